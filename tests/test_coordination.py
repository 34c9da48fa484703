"""What a coordinator grants, and that liars, losses and newcomers change little (cases B34, B50; DESIGN section 9)."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import coordination
from protocols.coordination import RATE_MAX, CoordinatorView, _Rates
from protocols.directory import LEASE_LIFE_MAX_S, PEER_LIFE_S, PEER_RENEW_S
from protocols.election import ElectionConfig
from protocols.envelopes import unseal
from protocols.faults import PeerFault
from protocols.manifest import CoordinationSpec, LearningSpec, Manifest
from protocols.messages import SOURCES_MAX, Heartbeat
from protocols.modes import DWELL_S, HOLD_S
from protocols.presence import BEAT_S, SILENT_S
from tests.samples import OTHER_TRAINER_ID, RUN, STRANGER_ID, TRAINER_ID, envelope_of, manifest

BATCH = 8
WINDOW = 2 * BATCH  # of a peer that holds the head, at a depth of one step
U32 = 2**32 - 1


def a_manifest(mode: str = "async", **changes: Any) -> Manifest:
    """A batch of 8 groups, a version each step: peers run one step ahead."""
    return manifest(learning=LearningSpec(batch_groups=BATCH), coordination=CoordinationSpec(mode=mode), **changes)


def new_view(step: int = 0, mode: str = "async", **changes: Any) -> CoordinatorView:
    view = CoordinatorView(a_manifest(mode, **changes), "sequential" if mode == "sequential" else "async", 0.0)
    view.head_is(step)
    return view


def beat(version: int | None = 0, rate: float | None = 1.0, **changes: Any) -> Heartbeat:
    fields = {"run": RUN, "session": bytes(16), "role": "inference", "version": version, "groups_per_s": rate}
    return Heartbeat(**{**fields, **changes})


def trainer(step: int = 0, queued: int = 0, wanted: int | None = None, **changes: Any) -> Heartbeat:
    return beat(step, None, role="trainer", step=step, queued=queued, wanted=wanted, **changes)


def credit(view: CoordinatorView, peer_id: str, said: Heartbeat, now_s: float = 0.0) -> int:
    """Groups that the peer may still begin."""
    return view.heard(peer_id, said, now_s).limit - said.started


def settled(view: CoordinatorView, beats: dict[str, Heartbeat], now_s: float = 0.0) -> dict[str, int]:
    """The credits of the second beat: by then everybody is known."""
    for peer_id, said in beats.items():
        view.heard(peer_id, said, now_s)
    return {peer_id: credit(view, peer_id, said, now_s) for peer_id, said in beats.items()}


# ---------------------------------------------------------------------- what a manifest may ask for


def test_b50_a_lease_under_three_beats_is_refused_and_the_message_says_why() -> None:
    with pytest.raises(
        ValueError, match=r"^lease_s = 5.9 is under three beats \(6 s\): two lost beats would end a lease$"
    ):
        CoordinationSpec(lease_s=5.9)
    assert CoordinationSpec(lease_s=3 * BEAT_S).lease_s == 6.0
    assert ElectionConfig(lease_s=6.0).renew_s * 3 < 6.0, "two lost renewals and a third in time"


def test_b50_a_manifest_from_the_network_with_such_a_lease_is_a_peer_fault() -> None:
    fields = msgspec.to_builtins(manifest())
    for lease_s in (5.9, -1.0, LEASE_LIFE_MAX_S + 1):
        fields["coordination"]["lease_s"] = lease_s
        with pytest.raises(PeerFault, match="malformed envelope"):
            unseal(envelope_of(Manifest, msgspec.msgpack.encode(fields)), Manifest)
    fields["coordination"]["lease_s"] = LEASE_LIFE_MAX_S
    assert unseal(envelope_of(Manifest, msgspec.msgpack.encode(fields)), Manifest).message.coordination.lease_s == 600.0


def test_eligible_are_the_trainers_and_whom_the_owner_named() -> None:
    assert manifest().eligible == {TRAINER_ID, OTHER_TRAINER_ID}
    assert STRANGER_ID in manifest(coordination=CoordinationSpec(coordinators=(STRANGER_ID,))).eligible


@pytest.mark.parametrize(
    ("max_lag", "publish_every", "depth"), [(0, 1, 0), (1, 1, 1), (20, 1, 1), (4, 3, 3), (2, 3, 2)]
)
def test_peers_run_one_version_ahead_within_the_bound(max_lag: int, publish_every: int, depth: int) -> None:
    assert manifest(max_lag=max_lag, publish_every=publish_every).depth == depth


# ---------------------------------------------------------------------- shares of the window


def test_credits_are_in_proportion_to_measured_rates() -> None:
    beats = {"slow": beat(rate=1.0), "fast": beat(rate=5.0), "middling": beat(rate=2.0)}
    assert settled(new_view(), beats) == {"slow": 2, "fast": 10, "middling": 4}


def test_who_has_not_measured_yet_counts_as_the_mean_of_those_who_have() -> None:
    assert settled(new_view(), {"a": beat(rate=1.0), "b": beat(rate=3.0), "new": beat(rate=None)}) == {
        "a": 3,  # 16 * 1 / 6, rounded up
        "b": 8,
        "new": 5,  # its share is 6, what is left is 5
    }
    assert settled(new_view(), {"a": beat(rate=None), "b": beat(rate=0.0)}) == {"a": 8, "b": 8}
    assert settled(new_view(), {"alone": beat(rate=None)}) == {"alone": WINDOW}


def test_what_is_queued_begun_or_waits_in_an_outbox_is_not_granted_again() -> None:
    view = new_view()
    view.heard(TRAINER_ID, trainer(queued=5), 0.0)
    assert credit(view, "a", beat(started=40, in_flight=3, outbox=2)) == WINDOW - 5 - 3 - 2
    assert credit(view, "b", beat()) == 0, "the rest is promised to the first"
    view.heard(TRAINER_ID, trainer(queued=WINDOW), 0.0)
    assert credit(view, "a", beat()) == 0


def test_a_share_is_of_all_that_a_peer_works_on() -> None:
    view = new_view()
    settled(view, {"a": beat(), "b": beat()})
    assert credit(view, "a", beat(started=9, in_flight=4, outbox=1)) == 3
    assert credit(view, "a", beat(started=19, in_flight=14, outbox=1)) == 0


def test_what_a_peer_has_delivered_is_in_the_queue_before_the_trainer_says_so() -> None:
    view = new_view()
    view.heard(TRAINER_ID, trainer(queued=0), 0.0)
    view.heard("a", beat(started=6, in_flight=6, accepted=0), 0.0)
    assert credit(view, "a", beat(started=6, accepted=6), 1.0) == WINDOW - 6
    view.heard(TRAINER_ID, trainer(queued=6), 2.0)
    assert credit(view, "a", beat(started=6, accepted=6), 3.0) == WINDOW - 6, "and it is not counted twice"
    view.heard("a", beat(started=8, in_flight=2, accepted=6), 3.0)
    view.heard(TRAINER_ID, trainer(queued=8), 4.0)
    assert credit(view, "a", beat(started=8, accepted=8), 4.0) == WINDOW - 8, "nor by a trainer that leads itself"


@pytest.mark.parametrize(
    "again",
    [
        beat(session=b"s" * 16, accepted=9),
        beat(accepted=None),
        beat(accepted=0),
        beat(started=3, in_flight=3, accepted=1),
    ],
    ids=["another session", "it does not know", "fewer than before", "none since"],
)
def test_deliveries_are_of_one_session_and_only_what_was_there_to_deliver(again: Heartbeat) -> None:
    view = new_view()
    view.heard(TRAINER_ID, trainer(), 0.0)
    view.heard("a", beat(started=3, in_flight=3, accepted=1), 1.0)
    view.heard("a", again, 2.0)
    assert view._delivered == 0
    limit = view.heard("b", beat(accepted=0, started=2, in_flight=2), 2.0).limit
    view.heard("b", beat(accepted=U32), 3.0)
    assert view._delivered == limit, "all that it had begun or was promised"


def test_groups_of_steps_announced_after_the_trainer_spoke_are_consumed() -> None:
    view = new_view(step=3)
    view.heard(TRAINER_ID, trainer(step=3, queued=10), 0.0)
    view.head_is(4)
    assert credit(view, "a", beat(version=4)) == WINDOW - 2
    view.head_is(9)
    assert credit(view, "a", beat(version=9)) == WINDOW
    view.heard("b", beat(version=9), 0.0)
    view.heard("a", beat(version=9, in_flight=12), 0.0)
    assert credit(view, "b", beat(version=9)) == WINDOW - 12, "a queue is never less than empty"


def test_steps_between_two_versions_are_known_from_the_trainer_and_from_nobody_else() -> None:
    view = new_view(step=6, publish_every=2)
    assert credit(view, "a", beat(version=6)) == 3 * BATCH
    view.heard("impostor", trainer(step=50), 0.0)
    assert credit(view, "a", beat(version=6)) == 3 * BATCH
    view.heard(TRAINER_ID, trainer(step=7), 0.0)
    assert credit(view, "a", beat(version=6)) == 2 * BATCH
    view.heard(TRAINER_ID, trainer(step=3), 0.0)
    assert (view.step, view.min_version) == (7, 5), "steps are not undone"


def test_a_version_that_is_too_old_is_granted_nothing() -> None:
    for depth, lag in itertools.product((1, 2), range(5)):
        view = new_view(step=20, publish_every=depth)
        given = credit(view, "a", beat(version=20 - lag))
        assert given == max(0, (depth - lag + 1) * BATCH)
    assert new_view(step=20).min_version == 19
    assert new_view(step=0).min_version == 0


def test_a_version_that_is_too_old_is_granted_nothing_even_while_the_trainer_starves() -> None:
    view = new_view(step=20)
    for now_s in (0.0, SILENT_S):
        view.heard(TRAINER_ID, trainer(20, 0, wanted=8), now_s)
    assert credit(view, "old", beat(version=18), SILENT_S) == 0
    assert credit(view, "new", beat(version=20), SILENT_S) == WINDOW // 2


def test_without_a_version_without_an_engine_or_in_rounds_nothing_is_granted() -> None:
    view = new_view()
    assert credit(view, "empty", beat(version=None)) == 0
    assert credit(view, TRAINER_ID, trainer()) == 0
    assert credit(view, "boot", beat(role="bootstrap")) == 0
    assert credit(new_view(mode="sequential"), "a", beat()) == 0


class Swarm:
    """Honest peers around a view: they begin what they may, finish, deliver; the trainer consumes, and beats too."""

    def __init__(self, num_peers: int, rates: list[float]) -> None:
        self.view, self.now_s = new_view(), 0.0
        self.step = self.queued = 0
        zero = {"started": 0, "in_flight": 0, "outbox": 0, "version": 0, "accepted": 0, "limit": 0}
        self.peers = [dict(zero) for _ in range(num_peers)]
        self.rates = rates

    def beat(self, number: int) -> None:
        peer = self.peers[number]
        self.view.head_is(self.step)
        said = {name: value for name, value in peer.items() if name != "limit"}
        peer["limit"] = self.view.heard(f"peer {number}", beat(rate=self.rates[number], **said), self.now_s).limit

    def act(self, number: int, what: str) -> None:
        peer = self.peers[number]
        self.now_s += 0.1
        match what:
            case "beat":
                self.beat(number)
            case "trainer beat":
                self.view.heard(TRAINER_ID, trainer(self.step, self.queued), self.now_s)
            case "begin" if peer["started"] < peer["limit"]:
                peer["started"] += 1
                peer["in_flight"] += 1
            case "finish" if peer["in_flight"]:
                peer["in_flight"] -= 1
                peer["outbox"] += 1
            case "deliver" if peer["outbox"]:
                peer["outbox"] -= 1
                peer["accepted"] += 1
                self.queued += 1
            case "refresh":
                peer["version"] = self.step
            case "train" if self.queued >= BATCH:
                self.queued -= BATCH
                self.step += 1

    def outstanding(self) -> int:
        begun = sum(peer["in_flight"] + peer["outbox"] for peer in self.peers)
        return begun + sum(max(0, peer["limit"] - peer["started"]) for peer in self.peers) + self.queued


ACTS = ["beat", "trainer beat", "begin", "finish", "deliver", "refresh", "train"]


@settings(max_examples=150, deadline=None)
@given(
    rates=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
    acts=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(ACTS)),
        max_size=120,
    ),
)
def test_all_that_is_promised_begun_and_queued_never_exceeds_the_window(
    rates: list[float], acts: list[tuple[int, str]]
) -> None:
    swarm = Swarm(len(rates), rates)
    for number, what in acts:
        swarm.act(number % len(rates), what)
        assert swarm.outstanding() <= WINDOW


def test_a_swarm_that_only_follows_its_credits_trains_on() -> None:
    swarm = Swarm(3, [1.0, 2.0, 3.0])
    for _ in range(400):
        for number in range(3):
            for what in ("trainer beat", "refresh", "beat", "begin", "finish", "deliver", "train"):
                swarm.act(number, what)
    assert swarm.step >= 100
    assert all(peer["started"] > 100 for peer in swarm.peers), "nobody is left out"


def test_a_lost_answer_changes_nothing() -> None:
    view, lossless = new_view(), new_view()
    for now_s, started in enumerate((0, 0, 0, 3, 3, 9)):
        for peer_id in ("a", "b"):
            said = beat(started=started, in_flight=min(started, 2))
            assert view.heard(peer_id, said, now_s) == view.heard(peer_id, said, now_s), "asked again, told the same"
            lossless.heard(peer_id, said, now_s)
    assert view._outstanding == lossless._outstanding, "what was said twice was promised once"


# ---------------------------------------------------------------------- who is there


def test_b50_a_peer_is_dropped_after_three_silent_beats_and_not_after_two() -> None:
    assert PEER_LIFE_S >= 3 * PEER_RENEW_S
    assert SILENT_S == 3 * BEAT_S
    view = new_view()
    view.heard("a", beat(), 0.0)
    assert view.tick(2 * BEAT_S) == ([], None)
    view.heard("a", beat(), 2 * BEAT_S)
    assert view.tick(2 * BEAT_S + SILENT_S - 0.01) == ([], None)
    assert view.tick(2 * BEAT_S + SILENT_S) == (["a"], None)
    assert view.tick(100.0) == ([], None), "lost once"


def test_what_a_silent_peer_was_promised_and_had_begun_is_free_again() -> None:
    view = new_view()
    assert credit(view, "dead", beat(started=5, in_flight=5), 0.0) == WINDOW - 5
    assert credit(view, "alive", beat(), 1.0) == 0
    view.tick(SILENT_S)
    assert credit(view, "alive", beat(), SILENT_S) == WINDOW


def test_b92_who_says_goodbye_frees_its_share_at_once() -> None:
    view = new_view()
    view.heard("a", beat(), 0.0)
    assert view.heard("a", beat(started=3, leaving=True), 0.1) == coordination.Grant(3, ())
    assert credit(view, "b", beat(), 0.2) == WINDOW
    assert [row.peer_id for row in view.rows(0.2)] == ["b"]


def test_a_new_coordinator_grants_the_same_within_one_beat() -> None:
    # Nothing is handed over: the second leader hears each peer once, and from the next beat on they agree.
    beats = {
        TRAINER_ID: trainer(step=7, queued=2),
        "a": beat(version=7, rate=1.0, started=30, in_flight=1),
        "b": beat(version=7, rate=2.0, started=60, in_flight=2),
        "c": beat(version=6, rate=4.0, started=90, in_flight=2, outbox=1),
    }
    old = settled(new_view(step=7), beats)
    assert sum(old.values()) > 0
    assert settled(new_view(step=7), dict(reversed(beats.items()))) == old


@settings(max_examples=100, deadline=None)
@given(
    rates=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
    acts=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([*ACTS, "new"])),
        max_size=120,
    ),
)
def test_a_change_of_the_coordinator_costs_one_window_at_most(rates: list[float], acts: list[tuple[int, str]]) -> None:
    # A new view knows nobody before their beats, so it may promise once more what the old one had promised to others.
    swarm, changes = Swarm(len(rates), rates), 0
    for number, what in acts:
        if what == "new":
            swarm.view, changes = CoordinatorView(swarm.view.manifest, "async", 0.0), changes + 1
        swarm.act(number % len(rates), what)
        assert swarm.outstanding() <= (1 + changes) * WINDOW


# ---------------------------------------------------------------------- liars


LIES = {
    "busy": beat(rate=1e300, started=U32, in_flight=U32, outbox=U32),
    "fast": beat(rate=1e300, started=U32),
    "ahead": beat(version=U32, rate=1e300),
    "nothing works": beat(rate=-1e300, in_flight=U32),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_starves_nobody_for_longer_than_three_beats(lie: str) -> None:
    view, honest = new_view(), ("a", "b", "c")
    view.heard("liar", LIES[lie], 0.0)
    for number in range(8):
        now_s = number * BEAT_S
        view.heard("liar", LIES[lie], now_s)
        view.heard(TRAINER_ID, trainer(wanted=BATCH), now_s)
        credits = {peer_id: credit(view, peer_id, beat(), now_s) for peer_id in honest}
        if now_s >= SILENT_S:
            assert min(credits.values()) >= 1
        view.tick(now_s)


def test_a_liar_that_delivers_without_end_starves_nobody_for_longer() -> None:
    view = new_view()
    for number in range(8):
        now_s = number * BEAT_S
        view.heard(TRAINER_ID, trainer(wanted=BATCH), now_s)
        for accepted in (number * 10**8, number * 10**8 + 10**7):
            view.heard("liar", beat(in_flight=U32, accepted=accepted), now_s + 1.0)
        if now_s >= SILENT_S:
            assert credit(view, "a", beat(), now_s + 1.0) >= 1


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_promised_no_more_than_one_window(lie: str) -> None:
    view = new_view(step=5)
    assert credit(view, "liar", LIES[lie]) <= WINDOW
    assert view.heard("liar", LIES[lie], 0.0).limit - LIES[lie].started <= WINDOW


def test_a_version_that_is_news_to_the_coordinator_has_as_much_room_as_the_head() -> None:
    assert credit(new_view(step=5), "a", beat(version=6)) == WINDOW


def test_a_rate_counts_up_to_a_limit_and_below_that_liars_cost_their_share() -> None:
    assert settled(new_view(), {"liar": beat(rate=1e300), "a": beat(rate=RATE_MAX)}) == {"liar": 8, "a": 8}
    assert settled(new_view(), {"a": beat(rate=1.0), "liar": beat(rate=1e300)})["a"] == 1, "the least that is given"


def test_a_trainer_that_steps_does_not_starve_however_often_it_waits() -> None:
    view = new_view()
    view.heard("liar", LIES["busy"], 0.0)
    for number in range(8):
        view.heard(TRAINER_ID, trainer(number // 2, wanted=BATCH), number * BEAT_S)
        assert credit(view, "a", beat(version=number // 2), number * BEAT_S) == 0
        view.heard("liar", LIES["busy"], number * BEAT_S)


def test_an_idle_trainer_does_not_hide_that_another_one_waits() -> None:
    view = new_view()
    for now_s in (0.0, 2.0, 4.0, 6.0):
        view.heard(TRAINER_ID, trainer(wanted=3), now_s)
        view.heard(OTHER_TRAINER_ID, trainer(wanted=0), now_s)
    view.heard("liar", LIES["busy"], 6.0)
    assert credit(view, "a", beat(), 6.0) >= 1


def test_only_three_beats_in_a_row_and_only_a_trainer_of_the_manifest_count_as_starving() -> None:
    view = new_view()
    view.heard("liar", LIES["busy"], 0.0)
    for now_s in (0.0, 2.0, 4.0, 6.0, 8.0):
        view.heard("impostor", trainer(wanted=3), now_s)
        view.heard(TRAINER_ID, trainer(wanted=0 if now_s == 4.0 else 3), now_s)
    assert credit(view, "a", beat(), 8.0) == 0
    view.heard(TRAINER_ID, trainer(wanted=3), 12.0)
    assert credit(view, "a", beat(), 12.0) >= 1
    view.tick(12.0 + SILENT_S)  # the trainer is gone: nobody waits any more
    view.heard("liar", LIES["busy"], 18.0)
    assert credit(view, "a", beat(), 18.0) == 0


# ---------------------------------------------------------------------- sources


def test_sources_are_a_few_that_hold_the_head_and_not_the_asker() -> None:
    view = new_view(step=3)
    for number in range(9):
        view.heard(f"peer {number}", beat(version=3), float(number))
    view.heard("boot", beat(version=3, role="bootstrap"), 9.0)
    view.heard("old", beat(version=2), 9.0)
    assert view.heard("asker", beat(version=2), 9.0).sources == ("peer 8", "peer 7", "peer 6", "peer 5")
    view.heard("peer 0", beat(version=3), 10.0)
    assert view.heard("peer 8", beat(version=3), 10.0).sources == ("peer 0", "peer 7", "peer 6", "peer 5")
    assert SOURCES_MAX == 4
    view.head_is(4)
    assert view.heard("asker", beat(version=2), 10.0).sources == ()
    view.heard(TRAINER_ID, trainer(4), 10.0)
    assert view.heard("asker", beat(version=2), 10.0).sources == (TRAINER_ID,)
    view.head_is(3)  # an old announcement
    assert view.heard("asker", beat(version=2), 10.0).sources == (TRAINER_ID,)


def test_who_had_a_version_before_the_coordinator_is_a_source_of_it() -> None:
    view = new_view(step=3)
    view.heard("early", beat(version=4), 0.0)
    assert view.heard("asker", beat(version=3), 0.0).sources == ()
    view.head_is(4)
    assert view.heard("asker", beat(version=3), 0.0).sources == ("early",)


# ---------------------------------------------------------------------- sums and memory


BEATS = st.builds(
    beat,
    version=st.none() | st.integers(0, 4) | st.just(U32),
    rate=st.none() | st.sampled_from([-1e300, 0.0, 1e-300, 0.1, 3.0, 1e300]),
    role=st.sampled_from(["inference", "inference", "trainer", "bootstrap"]),
    started=st.integers(0, 50) | st.just(U32),
    in_flight=st.integers(0, 5) | st.just(U32),
    outbox=st.integers(0, 5),
    leaving=st.booleans(),
    step=st.none() | st.integers(0, 4),
    queued=st.none() | st.integers(0, 20),
    wanted=st.none() | st.integers(0, 8),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), BEATS, st.floats(0.0, 4.0), st.integers(0, 4)), max_size=60))
def test_sums_that_are_kept_equal_sums_from_scratch(said: list[tuple[str, Heartbeat, float, int]]) -> None:
    # So a heartbeat costs the same however many peers there are, and yet nothing drifts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "IDENTITIES_MAX", 5)
        view, now_s = new_view(), 0.0
        for peer_id, words, wait_s, head in said:
            now_s += wait_s
            view.heard(peer_id if peer_id != "a" else TRAINER_ID, words, now_s)
            view.head_is(head)
            view.tick(now_s)
            peers = view._peers.values()
            assert len(peers) <= 5
            assert view._outstanding == sum(peer.outstanding for peer in peers)
            rates = _Rates()
            for peer in peers:
                if peer.beat.role == "inference":
                    rates.add(peer.beat.groups_per_s)
            assert vars(view._rates) == vars(rates)
            assert view._holders.keys() == {name for name, peer in view._peers.items() if view._holds(peer.beat)}
            assert [peer.heard_s for peer in peers] == sorted(peer.heard_s for peer in peers)


def test_memory_is_bounded_and_the_longest_silent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "IDENTITIES_MAX", 10)
    view = new_view()
    for number in range(50):
        view.heard(f"made up {number}", beat(), float(number) / 100)
        view.heard("honest", beat(), float(number) / 100)
    assert len(view.rows(1.0)) == 10
    assert "honest" in {row.peer_id for row in view.rows(1.0)}


def test_rows_say_what_each_peer_said_and_what_it_may_still_begin() -> None:
    view = new_view()
    view.heard("a", beat(version=0, rate=2.0, tokens_per_s=9.0, started=4, in_flight=2, accepted=1, stale=1), 1.0)
    (row,) = view.rows(2.5)
    assert (row.peer_id, row.role, row.silent_s, row.version, row.tokens_per_s) == ("a", "inference", 1.5, 0, 9.0)
    assert (row.groups_per_s, row.in_flight, row.outbox, row.accepted, row.stale) == (2.0, 2, 0, 1, 1)
    assert row.credit == WINDOW - 2


# ---------------------------------------------------------------------- the mode


def test_the_rule_is_asked_only_with_numbers_that_are_known() -> None:
    view = new_view(mode="auto")
    assert view.measured() is None
    view.heard("a", beat(rate=None, refresh_s=0.5), 0.0)
    view.heard(TRAINER_ID, trainer(step_s=4.0), 0.0)
    assert view.measured() is None, "nobody has measured a rate"
    view.heard("a", beat(rate=2.0), 0.0)
    assert view.measured() is None, "nobody has refreshed"
    for peer_id, rate, refresh_s in (("a", 2.0, 0.5), ("b", 1.0, 0.1), ("c", 0.0, 9.0)):
        view.heard(peer_id, beat(rate=rate, refresh_s=refresh_s), 0.0)
    measured = view.measured()
    assert measured is not None
    assert (measured.groups_per_s, measured.batch_groups, measured.step_s) == (3.0, BATCH, 4.0)
    assert (measured.refresh_s, measured.publish_every) == (0.5, 1)
    view.heard(OTHER_TRAINER_ID, trainer(step_s=3.0), 0.0)
    assert view.measured() == measured, "the slowest trainer's"


def test_who_only_calls_itself_a_trainer_and_impossible_rates_do_not_choose_the_mode() -> None:
    view = new_view(mode="auto")
    view.heard(TRAINER_ID, trainer(step_s=4.0), 0.0)
    view.heard("a", beat(rate=3.0, refresh_s=0.5), 0.0)
    before = view.measured()
    view.heard("impostor", beat(None, None, role="trainer", step_s=1e300), 0.0)
    view.heard("negative", beat(rate=-1e300), 0.0)
    assert view.measured() == before
    view.heard("liar", beat(rate=1e300), 0.0)
    measured = view.measured()
    assert measured is not None
    assert measured.groups_per_s == RATE_MAX + 3.0


def test_auto_switches_to_rounds_when_generation_is_too_slow_and_grants_nothing_then() -> None:
    view, switches = new_view(mode="auto"), []
    for number in range(40):
        now_s = number * BEAT_S
        view.heard(TRAINER_ID, trainer(step_s=1.0), now_s)
        view.heard("a", beat(rate=1.0, refresh_s=0.2), now_s)
        lost, switch = view.tick(now_s)
        assert lost == []
        switches += [(now_s, switch)] if switch is not None else []
    ((at_s, switch),) = switches
    assert at_s == max(DWELL_S, HOLD_S)
    assert (switch.mode, switch.measured.groups_per_s, switch.measured.needed_per_s) == ("sequential", 1.0, 10.0)
    assert view.mode == "sequential"
    assert credit(view, "a", beat(), 80.0) == 0


@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_a_mode_that_the_manifest_fixes_is_never_switched(mode: str) -> None:
    view = new_view(mode=mode)
    for number in range(40):
        view.heard(TRAINER_ID, trainer(step_s=1.0), number * BEAT_S)
        view.heard("a", beat(rate=1.0 if mode == "async" else 1e3, refresh_s=0.2), number * BEAT_S)
        assert view.tick(number * BEAT_S) == ([], None)
    assert view.mode == mode
