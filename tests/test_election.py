"""Elections on a virtual clock: candidates around one made-up DHT (cases B46, B48, B50)."""

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocols import election
from protocols.directory import SKEW_S
from protocols.election import (
    TERM_EPOCH_S,
    Action,
    Claim,
    Election,
    ElectionConfig,
    Event,
    Heard,
    Lead,
    Obeyed,
    Phase,
    Put,
    Read,
    ReadBack,
    StepDown,
    Stored,
    Tick,
    check_term,
    precedes,
    rank_hash,
)
from protocols.faults import PeerFault
from tests.samples import RUN

CONFIG = ElectionConfig()
LEASE_S, RENEW_S = CONFIG.lease_s, CONFIG.renew_s
TO_LEAD_S = RENEW_S + CONFIG.wait_s + CONFIG.settle_s  # a newcomer alone: quiet, vacant, settled
NAMES = ("ada", "bob", "cyd", "dan")


class World:
    """Candidates, a DHT that takes one record each, and time. Claims spread by gossip as soon as they are stored."""

    def __init__(self, names: tuple[str, ...], store_s: float = 0.05, config: ElectionConfig = CONFIG) -> None:
        self.now_s, self.store_s, self.config = 0.0, store_s, config
        self.elections: dict[str, Election] = {}
        self.records: dict[str, Claim] = {}
        self.refuses: Callable[[str, Put], bool] = lambda name, put: False
        self.gossip = True
        self.log: list[tuple[float, str, Action]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for name in names:
            self.start(name)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), action))

    def start(self, name: str) -> None:
        self.elections[name] = Election(RUN, name, self.config, self.now_s)
        self.tell(name, Heard(self.found()))
        self.after(0.0, lambda: self._read_often(name, self.elections[name]))

    def kill(self, name: str) -> None:
        del self.elections[name]

    def found(self) -> tuple[Claim, ...]:
        """What a read of the DHT gives: records that have not expired."""
        return tuple(claim for claim in self.records.values() if claim.until_ms > 1000 * self.now_s)

    def tell(self, name: str, event: Event) -> None:
        if name not in self.elections:
            return
        one = self.elections[name]
        for action in one.handle(event, self.now_s):
            self.act(name, one, action)
        next_s = one.next_s
        if isinstance(event, Tick):
            assert next_s > self.now_s, "a busy loop"
        self.after(max(0.0, next_s - self.now_s), lambda: self._tick(name, one, next_s))

    def act(self, name: str, one: Election, action: Action) -> None:
        self.log.append((self.now_s, name, action))
        until_ms = int(1000 * (self.now_s + self.config.lease_s))
        if isinstance(action, Put):
            self.after(self.store_s, lambda: self._stored(name, one, action, until_ms))
        elif isinstance(action, Read):
            self.after(self.store_s, lambda: self._answer(name, one, ReadBack(self.found())))

    def run_until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = end_s

    def leaders(self) -> list[str]:
        return [name for name, one in self.elections.items() if one.leads(self.now_s)]

    def led(self) -> list[tuple[float, str, int]]:
        """When who began to lead, in which term."""
        return [(at_s, name, action.term) for at_s, name, action in self.log if isinstance(action, Lead)]

    def _tick(self, name: str, one: Election, due_s: float) -> None:
        if self.elections.get(name) is one and one.next_s <= due_s:  # otherwise put off by something that happened
            self.tell(name, Tick())

    def _answer(self, name: str, one: Election, event: Event) -> None:
        if self.elections.get(name) is one:
            self.tell(name, event)

    def _stored(self, name: str, one: Election, put: Put, until_ms: int) -> None:
        if self.elections.get(name) is not one:
            return
        ok = not self.refuses(name, put)
        if ok:
            self.publish(Claim(name, put.term, put.claimed, until_ms))
        self.tell(name, Stored(ok))

    def publish(self, claim: Claim) -> None:
        self.records[claim.candidate] = claim
        for other in self.elections if self.gossip else ():
            if other != claim.candidate:
                self.tell(other, Heard((claim,)))

    def _read_often(self, name: str, one: Election) -> None:
        if self.elections.get(name) is one:
            self.tell(name, Heard(self.found()))
            self.after(self.config.renew_s, lambda: self._read_often(name, one))


def leading(term: int = 1, at_s: float = 0.0) -> Election:
    """Ada, who leads since `at_s`, with a lease that she sent at that time."""
    one = Election(RUN, "ada", CONFIG, at_s - RENEW_S - CONFIG.wait_s - CONFIG.settle_s)
    one.term = term - 1
    one.handle(Tick(), at_s - CONFIG.settle_s - CONFIG.wait_s)  # says that it stands by
    one.handle(Stored(True), at_s - CONFIG.settle_s - CONFIG.wait_s)
    assert one.handle(Tick(), at_s - CONFIG.settle_s) == [Put(term, True)]
    one.handle(Stored(True), at_s - CONFIG.settle_s)
    assert one.handle(Tick(), at_s) == [Read()]
    own = Claim("ada", term, True, int(1000 * (at_s - CONFIG.settle_s + LEASE_S)) + 1_000_000)
    assert one.handle(ReadBack((own,)), at_s) == [Lead(term), Put(term, True)]
    assert one.handle(Stored(True), at_s) == []
    return one


def claiming(term: int = 1) -> Election:
    """Ada at time 0, whose claim is stored and settled, and who waits to read it back."""
    one = Election(RUN, "ada", CONFIG, -RENEW_S - CONFIG.wait_s - CONFIG.settle_s)
    one.term = term - 1
    one.handle(Tick(), -CONFIG.wait_s - CONFIG.settle_s)
    one.handle(Stored(True), -CONFIG.wait_s - CONFIG.settle_s)
    assert one.handle(Tick(), -CONFIG.settle_s) == [Put(term, True)]
    one.handle(Stored(True), -CONFIG.settle_s)
    assert one.handle(Tick(), 0.0) == [Read()]
    return one


def claim(name: str, term: int, until_ms: int = 10_000, claimed: bool = True) -> Claim:
    return Claim(name, term, claimed, until_ms)


# ---------------------------------------------------------------------- who leads


def test_a_single_candidate_leads_after_quiet_wait_and_settling() -> None:
    world = World(("ada",), store_s=0.01)
    world.run_until(TO_LEAD_S)
    assert world.leaders() == []
    world.run_until(TO_LEAD_S + 0.1)
    assert world.leaders() == ["ada"]
    assert [(name, term) for _, name, term in world.led()] == [("ada", 1)]
    world.run_until(200.0)
    assert len(world.led()) == 1, "who can renew leads on, in one term"
    assert world.elections["ada"].leader(world.now_s) == world.records["ada"]


@pytest.mark.parametrize("names", [NAMES[:2], NAMES[:3], NAMES])
@pytest.mark.parametrize("gossip", [True, False])
def test_of_several_candidates_one_leads(names: tuple[str, ...], gossip: bool) -> None:
    world = World(names)
    world.gossip = gossip
    world.run_until(2 * LEASE_S)
    assert len(world.leaders()) == 1
    leaders = {one.leader(world.now_s) for one in world.elections.values()}
    assert {found.candidate for found in leaders if found is not None} == set(world.leaders())
    num = len(world.led())
    world.run_until(200.0)
    assert len(world.led()) == num, "no change without a reason"


@pytest.mark.parametrize("names", [NAMES[:2], NAMES[:3], NAMES])
@pytest.mark.parametrize("lease_s", [6.0, 10.0, 60.0])
def test_l1_when_the_leader_dies_the_next_leads_within_two_leases(names: tuple[str, ...], lease_s: float) -> None:
    config = ElectionConfig(lease_s=lease_s)
    for killed_s in (0.0, 0.3 * lease_s, 0.6 * lease_s):  # anywhere between two renewals
        world = World(names, config=config)
        world.run_until(3 * lease_s + killed_s)
        (first,) = world.leaders()
        world.kill(first)
        world.run_until(world.now_s + 2 * lease_s)
        (second,) = world.leaders()
        terms = [term for _, _, term in world.led()]
        assert second != first
        assert terms == sorted(set(terms)), "each leads in a term of its own"


@pytest.mark.parametrize("lease_s", [6.0, 10.0])
def test_l1_of_many_candidates_half_may_die_with_the_leader(lease_s: float) -> None:
    # Those that go first in rank may be dead too; their records end a quarter of a lease after the leader's at most.
    names = tuple(f"candidate {number}" for number in range(24))
    world = World(names, config=ElectionConfig(lease_s=lease_s))
    world.run_until(3 * lease_s)
    (leader,) = world.leaders()
    for name in {leader, *names[::2]}:
        world.kill(name)
    world.run_until(world.now_s + 2 * lease_s)
    assert len(world.leaders()) == 1


def test_two_dead_leaders_in_a_row_cost_two_leases_each_at_most() -> None:
    world = World(NAMES)
    for _ in range(3):
        world.run_until(world.now_s + 2 * LEASE_S)
        (leader,) = world.leaders()
        world.kill(leader)
    world.run_until(world.now_s + 2 * LEASE_S)
    assert world.leaders() == list(world.elections)
    assert len(world.elections) == 1


def test_at_no_time_do_two_lead_while_they_hear_each_other() -> None:
    world = World(NAMES[:3])
    world.run_until(20.0)
    for step in range(1, 400):
        world.run_until(20.0 + step / 10)
        assert len(world.leaders()) <= 1
        if step == 50:
            world.kill(world.leaders()[0])


def test_two_halves_of_a_partition_elect_one_each_and_agree_when_it_heals() -> None:
    # Method: two worlds; then both leaders hear one another's newest claim.
    halves = [World(("ada", "bob")), World(("cyd", "dan"))]
    for half in halves:
        half.run_until(30.0)
    both = [half.elections[half.leaders()[0]] for half in halves]
    claims = tuple(half.records[one.me] for half, one in zip(halves, both, strict=True))
    deposed = [action for one in both for action in one.handle(Heard(claims), 30.0) if isinstance(action, StepDown)]
    assert len(deposed) == 1
    above = max(both, key=lambda one: one.leads(30.0))
    below = both[1 - both.index(above)]
    assert (above.leads(30.0), below.leads(30.0)) == (True, False)
    assert precedes(RUN, (1, above.me), (1, below.me))


# ---------------------------------------------------------------------- a leader fences itself


def test_b46_leads_is_false_after_the_lease_even_if_nothing_was_handled() -> None:
    one = leading(term=4, at_s=0.0)
    assert one.leads(LEASE_S - 0.001)
    assert not one.leads(LEASE_S), "stopped and continued: the first thing it asks says no"
    actions = one.handle(Tick(), 3 * LEASE_S)
    assert actions[0] == StepDown(4, "lease ran out"), "before anything else"
    assert Lead not in {type(action) for action in actions}
    assert not one.leads(3 * LEASE_S)


@pytest.mark.parametrize(
    "event", [Heard((claim("bob", 9),)), Heard(()), Stored(True), ReadBack(()), Tick()], ids=lambda e: type(e).__name__
)
def test_b46_whatever_wakes_a_stopped_leader_it_steps_down_first(event: Event) -> None:
    one = leading()
    if isinstance(event, Stored):
        one.handle(Tick(), RENEW_S)  # its renewal was under way when it was stopped
    actions = one.handle(event, 2 * LEASE_S)
    assert actions[0] == StepDown(1, "lease ran out")
    assert not one.leads(2 * LEASE_S)


def test_the_lease_counts_from_before_it_was_sent() -> None:
    # Others count from when they hear of it, which is later: they start after this leader has stopped.
    one = leading()
    assert one.handle(Tick(), RENEW_S) == [Put(1, True)]
    one.handle(Stored(True), RENEW_S + 3.0)
    assert one.leads(RENEW_S + LEASE_S - 0.001)
    assert not one.leads(RENEW_S + LEASE_S)


def test_a_claim_that_took_long_to_store_gives_a_shorter_lease() -> None:
    one = Election(RUN, "ada", CONFIG, 0.0)
    one.handle(Tick(), RENEW_S)
    one.handle(Stored(True), RENEW_S)
    sent_s = RENEW_S + CONFIG.wait_s
    assert one.handle(Tick(), sent_s) == [Put(1, True)]
    one.handle(Stored(True), sent_s + 3.0)
    assert one.handle(Tick(), sent_s + 3.0 + CONFIG.settle_s) == [Read()]
    assert Lead(1) in one.handle(ReadBack((claim("ada", 1, 99_000),)), sent_s + 4.5)
    assert one.leads(sent_s + LEASE_S - 0.001)
    assert not one.leads(sent_s + LEASE_S)


def test_b50_two_lost_renewals_are_survived_and_the_third_is_not() -> None:
    one = leading()
    for lost in (1, 2):
        assert one.handle(Tick(), lost * RENEW_S) == [Put(1, True)]
        assert one.handle(Stored(False), lost * RENEW_S) == []
    assert one.handle(Tick(), 3 * RENEW_S) == [Put(1, True)]
    one.handle(Stored(True), 3 * RENEW_S)
    assert one.leads(3 * RENEW_S + LEASE_S - 0.001), "the third came through"
    for lost in (4, 5, 6):
        assert one.handle(Tick(), lost * RENEW_S) == [Put(1, True)]
        one.handle(Stored(False), lost * RENEW_S)
    end_s = 3 * RENEW_S + LEASE_S
    assert one.next_s == end_s
    assert one.handle(Tick(), end_s)[0] == StepDown(1, "lease ran out")


def test_b48_a_renewal_that_was_not_stored_does_not_lengthen_the_lease() -> None:
    world = World(("ada",))
    world.run_until(20.0)
    assert world.leaders() == ["ada"]
    world.refuses = lambda name, put: True
    world.run_until(20.0 + LEASE_S + 0.1)
    assert world.leaders() == []
    assert [action.reason for _, _, action in world.log if isinstance(action, StepDown)] == ["lease ran out"]
    world.run_until(100.0)
    assert world.leaders() == [], "no store, no lead"
    world.refuses = lambda name, put: False
    world.run_until(110.0)
    assert world.leaders() == ["ada"]


def test_a_higher_claim_deposes_at_once() -> None:
    for above in (claim("bob", 5), claim("bob", 4)):
        mine_first = precedes(RUN, (4, "ada"), (above.term, "bob"))
        one = leading(term=4)
        actions = one.handle(Heard((above,)), 1.0)
        assert one.leads(1.0) == mine_first
        assert (actions == []) == mine_first
        if not mine_first:
            assert actions == [StepDown(4, f"term {above.term} is another's"), Put(above.term, False)]
            assert one.leader(1.0) == above
    assert leading(term=4).handle(Heard((claim("bob", 3), claim("cyd", 4, claimed=False))), 1.0) == []


def test_a_leader_below_the_fence_of_a_peer_steps_down_and_leads_above_it_within_seconds() -> None:
    # A liar may order without a lease; peers obey it (S6). When it falls silent they stand where nobody leads.
    world = World(("ada", "bob"))
    world.run_until(20.0)
    (leader,) = world.leaders()
    world.tell(leader, Obeyed(500, "mallory"))
    assert world.leaders() == []
    world.run_until(20.0 + CONFIG.settle_s + 4 * world.store_s)
    assert world.leaders() == [leader]
    assert world.elections[leader].term == 501


def test_a_fence_in_the_leaders_own_term_counts_if_its_own_directives_are_below_it() -> None:
    assert leading(term=4).handle(Obeyed(4, "ada"), 1.0) == []
    assert leading(term=4).handle(Obeyed(3, "bob"), 1.0) == []
    actions = leading(term=4).handle(Obeyed(4, "bob"), 1.0)
    above = precedes(RUN, (4, "bob"), (4, "ada"))
    assert actions == ([StepDown(4, "term 5 is known"), Put(6, True)] if above else [])
    assert precedes(RUN, (4, "cyd"), (4, "ada")) != above, "both happen in this test"
    assert (leading(term=4).handle(Obeyed(4, "cyd"), 1.0) == []) == above


def test_a_bystander_that_knows_of_a_higher_term_makes_the_leader_lead_above_it() -> None:
    actions = leading(term=4).handle(Heard((claim("cyd", 9, claimed=False),)), 1.0)
    assert actions == [StepDown(4, "term 9 is known"), Put(10, True)]


def test_a_leader_whose_renewal_is_under_way_waits_for_its_end_before_it_claims() -> None:
    one = leading(term=4)
    assert one.handle(Tick(), RENEW_S) == [Put(4, True)]
    assert one.handle(Obeyed(9, "bob"), RENEW_S + 0.1) == []
    assert one.handle(Stored(True), RENEW_S + 0.2) == [StepDown(4, "term 9 is known"), Put(10, True)]


def test_a_claimant_gives_way_to_a_higher_claim() -> None:
    one = claiming(term=2)
    assert one.handle(Heard((claim("bob", 3),)), 0.1) == [Put(3, False)]
    assert one.phase is Phase.STANDBY


# ---------------------------------------------------------------------- acquired, or not


def test_b48_a_claim_that_was_not_stored_is_not_acquired() -> None:
    world = World(("ada",))
    world.refuses = lambda name, put: put.claimed
    world.run_until(60.0)
    assert world.led() == []
    claims = [action for _, _, action in world.log if isinstance(action, Put) and action.claimed]
    assert len(claims) > 10
    assert {put.term for put in claims} == {1}, "nobody has seen it: no need for another term"


@pytest.mark.parametrize(
    "found",
    [
        (),
        (claim("bob", 0, claimed=False),),
        (claim("ada", 1, claimed=False),),
        (claim("ada", 0),),
        (claim("ada", 1), claim("bob", 2)),
        (claim("ada", 1), claim("bob", 7, claimed=False)),
    ],
    ids=["nothing", "others only", "as standby", "an older one", "a higher one", "a higher term was led in"],
)
def test_a_read_back_without_our_claim_or_with_a_higher_one_is_no_lead(found: tuple[Claim, ...]) -> None:
    one = claiming()
    actions = one.handle(ReadBack(found), 0.1)
    assert actions == [Put(max([1, *(one.term for one in found)]), False)]
    assert not one.leads(0.1)
    assert one.phase is Phase.STANDBY


def test_a_read_back_with_a_lower_rival_of_the_same_term_claims_the_next() -> None:
    # The rival may have read back before our claim was there, and lead: one term has one leader.
    lower = next(name for name in NAMES[1:] if precedes(RUN, (1, "ada"), (1, name)))
    one = claiming()
    assert one.handle(ReadBack((claim("ada", 1), claim(lower, 1))), 0.1) == [Put(2, True)]
    assert not one.leads(0.1)


def test_a_read_back_that_comes_after_the_lease_is_no_lead() -> None:
    one = claiming()
    assert Lead(1) not in one.handle(ReadBack((claim("ada", 1),)), LEASE_S - CONFIG.settle_s)


def test_an_answer_for_a_claim_that_was_given_up_decides_nothing() -> None:
    one = claiming()
    one.handle(Heard((claim("bob", 1 if precedes(RUN, (1, "bob"), (1, "ada")) else 2),)), 0.1)
    one.handle(Stored(True), 0.2)
    at_s = 0.1 + LEASE_S  # Bob's claim has run out; then the wait for the election
    one.handle(Tick(), at_s)
    one.handle(Stored(True), at_s)
    (put,) = [action for action in one.handle(Tick(), at_s + 1.0) if isinstance(action, Put) and action.claimed]
    assert one.handle(ReadBack((claim("ada", put.term),)), at_s + 1.1) == []
    one.handle(Stored(True), at_s + 1.2)
    assert one.handle(ReadBack((claim("ada", put.term),)), at_s + 1.3) == [], "it has not settled"
    assert one.handle(Tick(), at_s + 2.2) == [Read()]
    assert Lead(put.term) in one.handle(ReadBack((claim("ada", put.term, 99_000),)), at_s + 2.3)


# ---------------------------------------------------------------------- leaving and coming back


def test_resigning_frees_the_lease_at_once() -> None:
    world = World(NAMES[:3])
    world.run_until(20.0)
    (first,) = world.leaders()
    term = world.elections[first].term
    actions = world.elections[first].resign(world.now_s)
    assert actions == [StepDown(term, "leaving"), Put(term, False)]
    assert not world.elections[first].leads(world.now_s)
    world.kill(first)
    world.publish(Claim(first, term, False, int(1000 * (world.now_s + LEASE_S))))
    freed_s = world.now_s
    world.run_until(freed_s + LEASE_S)
    assert len(world.leaders()) == 1
    longest_s = CONFIG.wait_s + 2 * CONFIG.stagger_s + CONFIG.settle_s + 3 * world.store_s
    assert world.led()[-1][0] - freed_s <= longest_s < LEASE_S


def test_a_claimant_that_leaves_takes_its_claim_back_and_a_bystander_just_goes() -> None:
    assert claiming(3).resign(0.1) == [Put(3, False)]
    assert Election(RUN, "ada", CONFIG, 0.0).resign(1.0) == []


def test_restarted_with_its_own_claim_in_the_dht_it_leads_in_a_higher_term() -> None:
    for down_s in (0.0, 1.0, 8.0):
        world = World(("ada",))
        world.records["ada"] = claim("ada", 41, until_ms=1)
        world.run_until(20.0)
        world.kill("ada")
        last = world.records["ada"].term
        world.run_until(20.0 + down_s)
        world.start("ada")
        world.run_until(world.now_s + 2 * LEASE_S)
        assert world.leaders() == ["ada"]
        assert world.led()[-1][2] > last, "peers obey no term twice"


def test_a_newcomer_says_nothing_before_it_has_listened() -> None:
    # Its standby record would overwrite its own last claim, the only record of that term there may be.
    one = Election(RUN, "ada", CONFIG, 0.0)
    assert one.handle(Tick(), 0.0) == []
    assert one.next_s == RENEW_S
    assert one.handle(Heard((claim("ada", 7),)), 1.0) == []
    assert one.leader(1.0) is None, "it was another life that led"
    assert one.handle(Tick(), RENEW_S) == [Put(7, False)]


def test_a_record_that_outlives_its_claim_holds_nobody_up() -> None:
    # Records may stand SKEW_S longer than their lease: a dead leader's last word must not be news again.
    one = Election(RUN, "ada", CONFIG, 0.0)
    one.handle(Heard((claim("bob", 3, until_ms=10_000),)), 0.0)
    one.handle(Tick(), RENEW_S)
    one.handle(Stored(True), RENEW_S)
    assert one.leader(LEASE_S - 0.1) is not None
    for late_s in (LEASE_S, LEASE_S + SKEW_S):
        one.handle(Heard((claim("bob", 3, until_ms=10_000),)), late_s)
        assert one.leader(late_s) is None
    one.handle(Heard((claim("bob", 3, until_ms=10_001),)), 14.0)
    assert one.leader(14.0) is not None


def test_words_that_were_overtaken_on_the_way_count_no_more() -> None:
    one = Election(RUN, "ada", CONFIG, 0.0)
    one.handle(Heard((claim("bob", 3, until_ms=12_000, claimed=False),)), 1.0)
    one.handle(Heard((claim("bob", 3, until_ms=11_000, claimed=True),)), 1.1)
    assert one.leader(1.1) is None


# ---------------------------------------------------------------------- terms and ranks


def test_b48_a_term_ahead_of_its_time_is_refused() -> None:
    check_term(0, 0.0)  # a clock of 1970
    check_term(100, TERM_EPOCH_S + 100.0)
    for term, now_s in ((1, 0.0), (101, TERM_EPOCH_S + 100.0), (2**32 - 1, TERM_EPOCH_S + 30 * 365 * 86400.0)):
        with pytest.raises(PeerFault, match="term ahead of its time"):
            check_term(term, now_s)


def claims_under_ceiling(world: World, epoch_s: float) -> None:
    """Every node's rules refuse a term that no election can have reached; time 0 of the world is `epoch_s`."""

    def refuses(name: str, put: Put) -> bool:
        try:
            check_term(put.term, epoch_s + world.now_s + SKEW_S)
        except PeerFault:
            return True
        return False

    world.refuses = refuses


@pytest.mark.parametrize("claimed", [True, False], ids=["as leader", "as bystander"])
def test_b48_a_candidate_at_the_ceiling_of_terms_delays_the_others_by_seconds_only(claimed: bool) -> None:
    # Method: the leader dies, and for a minute a liar says the highest term that the rules let through, each second.
    world = World(NAMES[:3])
    start_s = TERM_EPOCH_S + 1000.0
    claims_under_ceiling(world, start_s)
    world.run_until(20.0)
    world.kill(world.leaders()[0])
    for second in range(20, 81):
        world.run_until(second)
        top = int(start_s - TERM_EPOCH_S + world.now_s + SKEW_S)
        check_term(top, start_s + world.now_s + SKEW_S)
        world.publish(Claim("mallory", top, claimed, int(1000 * (world.now_s + LEASE_S))))
    world.run_until(80.0)
    assert world.leaders() == [], "as long as it speaks"
    # Then a claim counts for a lease. The next term passes everywhere a second later, and the skew of clocks.
    freed_s = 80.0 + (LEASE_S if claimed else 0.0)
    check_term(top + 1, start_s + freed_s + 1.0 + SKEW_S)
    world.run_until(freed_s + 1.0 + SKEW_S + CONFIG.wait_s + 2 * CONFIG.stagger_s + CONFIG.settle_s)
    assert len(world.leaders()) == 1
    assert world.elections[world.leaders()[0]].term <= top + 3


def test_a_claim_that_is_refused_does_not_chase_the_ceiling() -> None:
    # One term more for each refused claim, each second, would stay one ahead of the clock for ever.
    world = World(("ada",), store_s=0.0)
    claims_under_ceiling(world, TERM_EPOCH_S + 1000.0)
    world.run_until(RENEW_S + CONFIG.wait_s - 0.01)  # just before it claims
    top = 1000 + int(world.now_s + SKEW_S)
    world.tell("ada", Heard((Claim("ada", top, False, 20_000),)))  # her own words: nobody goes before her in rank
    world.run_until(20.0)
    assert world.leaders() == ["ada"]


def test_the_order_of_claims_is_total_and_nobody_is_first_in_every_term() -> None:
    claims = [(term, name) for term in (1, 2, 3) for name in NAMES]
    for first, second in itertools.combinations(claims, 2):
        assert precedes(RUN, first, second) != precedes(RUN, second, first)
        if first[0] != second[0]:
            assert precedes(RUN, max(first, second), min(first, second))
    assert len({min(NAMES, key=lambda name: rank_hash(RUN, term, name)) for term in range(50)}) == len(NAMES)


def test_candidates_claim_by_rank_so_that_one_claims_at_a_time() -> None:
    world = World(NAMES)
    world.run_until(20.0)
    world.kill(world.leaders()[0])
    start_s = world.now_s
    world.run_until(start_s + 2 * LEASE_S)
    late = [name for at_s, name, action in world.log if at_s > start_s and action == Put(world.led()[-1][2], True)]
    assert set(late) == set(world.leaders()), "the others saw the first claim, and made none"


def test_memory_is_bounded_and_more_candidates_than_a_manifest_names_do_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(election, "CANDIDATES_MAX", 5)
    one = Election(RUN, "ada", CONFIG, 0.0)
    one.handle(Heard(tuple(claim(f"peer {number}", number) for number in range(50))), 1.0)
    assert len(one._claims) == 5
    assert one.leader(1.0) == claim("peer 49", 49)


# ---------------------------------------------------------------------- whatever happens


class AnyElection(RuleBasedStateMachine):
    """Any events in any order, answers to our own actions early, late or never: no fault, no busy loop, no overlap."""

    @initialize(wait_s=st.sampled_from([0.0, 1.0]), settle_s=st.sampled_from([0.0, 1.0]))
    def begin(self, wait_s: float, settle_s: float) -> None:
        self.now_s, self.until_ms = 0.0, 0
        self.one = Election(RUN, "ada", ElectionConfig(wait_s=wait_s, settle_s=settle_s), 0.0)
        self.put: Put | None = None
        self.reads = 0
        self.led = 0
        self.leading = False

    def tell(self, event: Event) -> None:
        leads_before = self.one.leads(self.now_s)
        actions = self.one.handle(event, self.now_s)
        if self.leading and not leads_before:
            assert isinstance(actions[0], StepDown), "a lease that ran out comes first"
        for action in actions:
            match action:
                case Put():
                    assert self.put is None, "two puts at once"
                    self.put = action
                case Read():
                    self.reads += 1
                case Lead(term):
                    assert not self.leading
                    assert term > self.led, "no term is led twice"
                    self.led, self.leading = term, True
                case StepDown(term):
                    assert self.leading
                    assert term == self.led
                    self.leading = False
        assert self.one.leads(self.now_s) == self.leading
        assert self.one.next_s > self.now_s or actions, "a busy loop"
        if event == Tick() and not actions:
            assert self.one.next_s > self.now_s, "a busy loop"

    @rule(wait_s=st.floats(0.0, 30.0))
    def time_passes(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.tell(Tick())
        self.tell(Tick())
        assert self.one.next_s > self.now_s, "a second tick at the same time has nothing left to do"

    @rule()
    def tick_when_due(self) -> None:
        self.now_s = max(self.now_s, self.one.next_s)
        self.tell(Tick())

    @rule(
        name=st.sampled_from(NAMES),
        term=st.integers(0, 9),
        claimed=st.booleans(),
        later_ms=st.integers(-20_000, 20_000),
    )
    def a_peer_says(self, name: str, term: int, claimed: bool, later_ms: int) -> None:
        self.tell(Heard((Claim(name, term, claimed, max(0, int(1000 * self.now_s) + later_ms)),)))

    @rule(name=st.sampled_from(NAMES), term=st.integers(0, 9))
    def a_peer_stands_at(self, name: str, term: int) -> None:
        self.tell(Obeyed(term, name))

    @precondition(lambda self: self.put is not None)
    @rule(ok=st.booleans())
    def stored(self, ok: bool) -> None:
        put, self.put = self.put, None
        assert put is not None
        if ok:
            self.until_ms = max(self.until_ms + 1, int(1000 * (self.now_s + LEASE_S)))
            self.mine = Claim("ada", put.term, put.claimed, self.until_ms)
        self.tell(Stored(ok))

    @precondition(lambda self: self.reads > 0)
    @rule(there=st.booleans(), others=st.lists(st.tuples(st.sampled_from(NAMES[1:]), st.integers(0, 9)), max_size=2))
    def read_back(self, there: bool, others: list[tuple[str, int]]) -> None:
        self.reads -= 1
        claims = [Claim(name, term, True, int(1000 * (self.now_s + LEASE_S))) for name, term in others]
        self.tell(ReadBack((*claims, *([self.mine] if there else []))))

    @invariant()
    def a_leader_has_a_lease(self) -> None:
        assert not self.one.leads(self.now_s + LEASE_S + 0.001)


AnyElection.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyElection = AnyElection.TestCase
