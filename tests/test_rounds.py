"""A round: work moves, group by group, from whoever stalls, refuses or leaves to the others (case B34)."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocols.rounds import STALL_MAX_S, STALL_MIN_S, STALL_SLACK, Call, Round

EQUAL: dict[str, float | None] = {"a": 1.0, "b": 1.0, "c": 1.0}


def opened(needed: int, rates: dict[str, float | None], now_s: float = 0.0) -> tuple[Round, dict[str, int]]:
    """A round, and what each peer was called for."""
    one = Round(1, 1, needed)
    return one, counts(one.peers(rates, now_s))


def counts(calls: list[Call]) -> dict[str, int]:
    assert len({call.peer_id for call in calls}) == len(calls), "one call a peer"
    return {call.peer_id: call.count for call in calls}


# ---------------------------------------------------------------------- sharing out


def test_work_is_shared_out_in_proportion_to_rates() -> None:
    assert opened(12, EQUAL)[1] == {"a": 4, "b": 4, "c": 4}
    assert opened(12, {"a": 1.0, "b": 5.0})[1] == {"a": 2, "b": 10}
    assert opened(3, {"a": 0.01, "b": 1.0})[1] == {"b": 3}, "who is last would hold all others up"


def test_a_rate_that_is_not_known_counts_as_one_group_a_second() -> None:
    for unknown in (None, 0.0, -1.0):
        assert opened(4, {"a": unknown, "b": 1.0})[1] == {"a": 2, "b": 2}


def test_a_round_is_done_when_what_was_needed_has_come() -> None:
    one, calls = opened(4, {"a": 1.0, "b": 1.0})
    assert calls == {"a": 2, "b": 2}
    assert one.delivered("a", 2, 1.0) == []
    assert not one.done
    assert one.delivered("b", 2, 1.0) == []
    assert one.done
    assert (one.moved, one.stalled) == (0, set())
    assert one.peers({"late": 1.0}, 2.0) == []


def test_a_round_of_nothing_is_done_and_calls_nobody() -> None:
    one, calls = opened(0, EQUAL)
    assert one.done
    assert calls == {}


def test_deliveries_that_nobody_called_for_count() -> None:
    # A batch that was on its way when the round opened is as good as any.
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    assert one.delivered("stranger", 1, 1.0) == []
    assert one.delivered("a", 3, 1.0) == []
    assert one.done
    assert one.delivered("b", 2, 2.0) == []
    assert one.moved == 0


def test_newcomers_get_what_is_free() -> None:
    one, calls = opened(4, {})
    assert calls == {}
    assert not one.done
    assert counts(one.peers({"a": 1.0}, 1.0)) == {"a": 4}
    assert one.peers({"a": 1.0, "b": 1.0}, 2.0) == [], "the first has it all"
    assert counts(one.refused("a", 1, 3.0)) == {"b": 3}


def test_a_rate_that_is_measured_later_counts_from_then_on() -> None:
    one, _ = opened(2, {"a": None, "b": None})
    assert one.peers({"a": 0.1, "b": 4.0, "c": None}, 1.0) == []
    assert counts(one.refused("b", 0, 1.0)) == {"c": 1}, "b is barred, and a would take ten seconds more"


# ---------------------------------------------------------------------- stalls


def test_b34_what_a_stalled_peer_owes_moves_to_the_others_and_what_it_delivered_stays() -> None:
    one, calls = opened(12, EQUAL)
    assert calls == {"a": 4, "b": 4, "c": 4}
    one.delivered("a", 1, 5.0)
    one.delivered("b", 4, 5.0)
    one.delivered("c", 4, 5.0)
    assert one.tick(5.0 + STALL_MIN_S - 0.1) == []
    assert counts(one.tick(5.0 + STALL_MIN_S)) == {"b": 6, "c": 5}, "its three groups, one by one, to two peers"
    assert one.stalled == {"a"}
    assert one.moved == 3
    one.delivered("b", 2, 30.0)
    one.delivered("c", 1, 30.0)
    assert one.done


def test_b34_a_stalled_peer_that_comes_back_is_welcome_and_is_asked_again() -> None:
    one, _ = opened(6, EQUAL)
    for peer_id in ("a", "b"):
        one.delivered(peer_id, 2, 1.0)
    assert counts(one.tick(STALL_MIN_S)) == {"a": 3, "b": 3}
    assert one.delivered("c", 1, STALL_MIN_S + 1) == [], "it had made one all the same"
    assert counts(one.refused("a", 2, STALL_MIN_S + 1)) == {}, "nothing is missing: c's came"
    one.peers({"c": 1.0}, STALL_MIN_S + 2)
    assert not one.done
    assert one.stalled == {"c"}
    one.delivered("c", 1, STALL_MIN_S + 3)
    assert one.done


def test_who_stalls_is_not_asked_again_before_a_while_has_passed() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    one.delivered("b", 2, 1.0)
    assert counts(one.tick(STALL_MIN_S)) == {"b": 4}
    assert one.refused("b", 2, STALL_MIN_S + 1) == [], "a is barred, and so is b"
    assert one.tick(2 * STALL_MIN_S - 0.1) == []
    assert counts(one.tick(2 * STALL_MIN_S)) == {"a": 2}


def test_b34_who_delivers_is_well_again_at_once() -> None:
    one, _ = opened(6, EQUAL)
    one.delivered("b", 2, 1.0)
    one.delivered("c", 1, 1.0)
    one.tick(STALL_MIN_S)
    one.delivered("a", 1, STALL_MIN_S + 1)
    assert counts(one.refused("b", 2, STALL_MIN_S + 2)) == {"a": 2}


def test_the_time_of_who_was_idle_begins_with_its_new_work() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    one.delivered("b", 2, 1.0)
    assert counts(one.peers({"b": 1.0, "c": None}, 100.0)) == {"b": 3, "c": 1}
    assert one.tick(100.0 + STALL_MIN_S - 0.1) == []
    assert one.stalled == set()


def test_nothing_moves_while_there_is_nobody_else() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    assert one.tick(10 * STALL_MIN_S) == [], "both stall: to take it away would win nothing"
    assert one.stalled == set()
    one.peers({"a": 1.0, "b": 1.0, "c": 1.0}, 10 * STALL_MIN_S)
    assert counts(one.tick(10 * STALL_MIN_S)) == {"c": 4}
    assert one.stalled == {"a", "b"}


def test_a_round_is_stuck_when_everybody_stalls_and_nobody_else_is_there() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    assert not one.stuck(STALL_MIN_S - 0.1)
    assert one.stuck(STALL_MIN_S)
    one.delivered("b", 1, STALL_MIN_S)
    assert not one.stuck(STALL_MIN_S), "b goes on"
    one.delivered("b", 1, STALL_MIN_S + 1)
    assert not one.stuck(10 * STALL_MIN_S), "b owes nothing: what a owes moves to it"
    one.peers({}, 10 * STALL_MIN_S)
    assert not one.stuck(20 * STALL_MIN_S), "there is nobody to ask anew"


def test_a_slow_peer_gets_the_time_that_its_own_rate_promises() -> None:
    one, calls = opened(10, {"slow": 0.1, "b": 0.1})
    assert calls == {"slow": 5, "b": 5}
    allowed_s = STALL_SLACK * 5 / 0.1
    one.delivered("b", 5, 1.0)
    assert one.tick(allowed_s - 0.1) == []
    assert counts(one.tick(allowed_s)) == {"b": 10}


def test_progress_is_what_counts_not_the_time_since_the_call() -> None:
    one, _ = opened(20, {"a": 1.0, "b": 1.0})
    one.delivered("b", 10, 1.0)
    for number in range(1, 10):
        now_s = number * (STALL_MIN_S - 1)
        one.delivered("a", 1, now_s)
        assert one.tick(now_s + 1) == []
    assert one.stalled == set()


def test_a_liar_holds_a_round_up_for_one_stall_and_no_longer() -> None:
    one, calls = opened(8, {"liar": 1e300, "b": 1.0})
    assert calls == {"liar": 8}
    assert counts(one.tick(STALL_MIN_S)) == {"b": 8}
    # One that claims to be endlessly slow gets nothing while there are others, and has no endless time either.
    one, calls = opened(8, {"liar": 1e-300, "b": 1.0})
    assert calls == {"b": 8}
    assert counts(one.refused("b", 0, 1.0)) == {"liar": 8}
    one.tick(1.0 + STALL_MIN_S)
    assert counts(one.tick(1.0 + STALL_MAX_S)) == {"b": 8}


# ---------------------------------------------------------------------- refusals, absences


def test_what_a_peer_refuses_goes_to_the_others_at_once() -> None:
    one, _ = opened(6, EQUAL)
    assert counts(one.refused("a", 1, 0.1)) == {"b": 3}
    assert one.moved == 1
    assert one.refused("a", 1, 0.2) == [], "it has said so"
    assert one.refused("a", 9, 0.2) == [], "more than it was asked for is no refusal"
    assert one.refused("nobody", 0, 0.2) == []


def test_a_refusal_takes_nothing_back_that_was_delivered() -> None:
    one, _ = opened(6, EQUAL)
    one.delivered("a", 1, 0.1)
    assert counts(one.refused("a", 0, 0.2)) == {"b": 3}
    assert one.moved == 1


def test_when_all_refuse_they_are_asked_again_later() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    assert counts(one.refused("a", 0, 0.1)) == {"b": 4}
    assert one.refused("b", 0, 0.2) == []
    assert one.tick(0.1 + STALL_MIN_S) != []
    assert not one.done


def test_what_a_peer_that_left_owes_goes_to_the_others() -> None:
    one, _ = opened(6, EQUAL)
    one.delivered("a", 1, 1.0)
    assert counts(one.peers({"b": 1.0, "c": 1.0}, 2.0)) == {"b": 3}
    assert one.moved == 1
    assert one.stalled == set(), "to leave is not to stall"


def test_all_gone_and_back() -> None:
    one, _ = opened(4, {"a": 1.0, "b": 1.0})
    one.delivered("a", 1, 1.0)
    assert one.peers({}, 2.0) == []
    assert one.tick(100.0) == []
    assert counts(one.peers({"a": 1.0}, 101.0)) == {"a": 4}, "one of the four is there already"
    assert one.tick(101.0 + STALL_MIN_S - 0.1) == [], "its time begins anew"
    one.delivered("a", 3, 102.0)
    assert one.done


def test_nobody_left_and_then_somebody() -> None:
    one, _ = opened(4, {"a": 1.0})
    one.peers({}, 1.0)
    assert counts(one.peers({"new": 1.0}, 2.0)) == {"new": 4}
    assert one.moved == 4


# ---------------------------------------------------------------------- whatever happens


class AnyRound(RuleBasedStateMachine):
    """Peers that come, go, stall, refuse and deliver too much: the sums hold, and an honest peer ends the round."""

    @initialize(needed=st.integers(0, 30))
    def begin(self, needed: int) -> None:
        self.one, self.now_s = Round(1, 1, needed), 0.0
        self.called: dict[str, int] = {}
        self.delivered: dict[str, int] = {}

    def take(self, calls: list[Call]) -> None:
        assert len({call.peer_id for call in calls}) == len(calls)
        for call in calls:
            assert call.count > self.one._workers[call.peer_id].delivered, "it is asked for something"
            self.called[call.peer_id] = call.count

    @rule(rates=st.dictionaries(st.sampled_from("abcde"), st.none() | st.sampled_from([0.1, 1.0, 50.0, 1e300, 1e-300])))
    def peers(self, rates: dict[str, float | None]) -> None:
        self.take(self.one.peers(rates, self.now_s))

    @rule(peer_id=st.sampled_from("abcdef"), count=st.integers(1, 5))
    def deliver(self, peer_id: str, count: int) -> None:
        self.delivered[peer_id] = self.delivered.get(peer_id, 0) + count
        self.take(self.one.delivered(peer_id, count, self.now_s))

    @rule(peer_id=st.sampled_from("abcdef"), taken=st.integers(0, 9))
    def refuse(self, peer_id: str, taken: int) -> None:
        self.take(self.one.refused(peer_id, taken, self.now_s))

    @rule(wait_s=st.sampled_from([0.1, 1.0, STALL_MIN_S, 2 * STALL_MIN_S, STALL_MAX_S]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.take(self.one.tick(self.now_s))

    @invariant()
    def no_more_is_owed_than_is_needed(self) -> None:
        owed = sum(worker.asked - worker.delivered for worker in self.one._workers.values())
        assert all(worker.asked >= worker.delivered for worker in self.one._workers.values())
        assert 0 <= owed <= self.one.needed
        assert self.one.done == (sum(self.delivered.values()) >= self.one.needed)

    @precondition(lambda self: not self.one.done)
    @rule()
    def one_honest_peer_ends_it(self) -> None:
        for _ in range(6):  # whatever the others owe, they stall; nobody may hold it for longer than STALL_MAX_S
            self.take(self.one.peers({"honest": 1.0}, self.now_s))
            owes = self.called.get("honest", 0) - self.delivered.get("honest", 0)
            if owes > 0:
                self.deliver("honest", owes)
            self.wait(2 * STALL_MIN_S)
        assert self.one.done


AnyRound.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyRound = AnyRound.TestCase
