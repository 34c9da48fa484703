"""At least once on the wire, exactly once in training."""

import random

import pytest

import protocols.delivery as delivery
from protocols.delivery import (
    LATER_OUTCOMES_MAX,
    OUTBOX_GROUPS_MAX,
    PUSH_GROUPS_MAX,
    QUEUE_BATCHES_MAX,
    Batch,
    Intake,
    Outbox,
    Queued,
)
from protocols.envelopes import KINDS, seal
from protocols.faults import LocalFault, PeerFault
from protocols.messages import GroupReceipt, Outcome, Receipt
from tests.samples import RUN, STRANGER_ID, TRAINER, group

PEER = STRANGER_ID


def new_intake(max_lag: int = 2, batch_groups: int = 2) -> Intake:
    return Intake(max_lag=max_lag, batch_groups=batch_groups)


def offer(intake: Intake, counter: int, version: int = 0, steps: int = 0, producer: str = PEER) -> GroupReceipt:
    return intake.offer(
        producer, group(counter=counter, oldest_version=version, newest_version=version), steps, fault=None
    )


def receipt(*groups: tuple[int, Outcome]) -> Receipt:
    return Receipt(RUN, PEER, tuple(GroupReceipt(counter, bytes(32), outcome) for counter, outcome in groups), 3, 1)


# -- the trainer's side


def test_a_group_is_accepted_once_and_then_a_duplicate() -> None:
    intake = new_intake()
    first, again = offer(intake, 0), offer(intake, 0)
    assert (first.outcome, again.outcome, again.reason) == ("accepted", "duplicate", "")
    assert first.digest == again.digest
    assert intake.queued == 1
    assert intake.counts == {"received": 2, "accepted": 1, "duplicate": 1}


def test_b102_a_counter_is_used_once() -> None:
    intake = new_intake()
    offer(intake, 0)
    again = intake.offer(PEER, group(counter=0, rewards=(0.5, 0.5)), 0, None)
    assert (again.outcome, again.reason) == ("duplicate", "counter used")
    assert offer(intake, 0, producer="another").outcome == "accepted"


def test_b102_a_counter_stays_used_when_its_first_group_is_forgotten() -> None:
    # The first use is beyond the bound and dropped from memory; the same counter comes again under a new version.
    intake = new_intake(max_lag=1)
    offer(intake, 3)
    intake.sweep(5)
    intake.forget(5)
    again = offer(intake, 3, version=5, steps=5)
    assert (again.outcome, again.reason) == ("duplicate", "counter used")
    assert offer(intake, 4, version=5, steps=5).outcome == "accepted"
    assert intake.next_counter(PEER) == 5


def test_it_stays_used_across_a_restart() -> None:
    intake = new_intake(max_lag=1)
    old, recent = Queued(b"a" * 32, PEER, 3, 0), Queued(b"b" * 32, PEER, 6, 5)
    intake.restore([recent], [old])
    intake.forget(5)
    assert [offer(intake, counter, 5, 5).outcome for counter in (3, 6, 4, 7)] == [
        "duplicate",
        "duplicate",
        "accepted",
        "accepted",
    ]
    without_old = new_intake(max_lag=1)
    without_old.restore([recent], [])
    without_old.used(PEER, 7)
    assert offer(without_old, 3, 5, 5).reason == "counter used"
    assert offer(without_old, 7, 5, 5).outcome == "accepted"
    assert (without_old.next_counter(PEER), without_old.queued) == (8, 2)


def test_what_is_too_old_is_stale_and_what_is_too_new_is_invalid() -> None:
    intake = new_intake(max_lag=2)
    assert [offer(intake, v, version=v, steps=5).outcome for v in range(7)] == ["stale"] * 3 + ["accepted"] * 3 + [
        "invalid"
    ]
    assert intake.reasons == {"version ahead of the trainer": 1}
    assert offer(intake, 0, version=0, steps=5).reason == "lag 5 over 2"


def test_the_newest_version_of_a_group_must_exist_too() -> None:
    intake = new_intake()
    answer = intake.offer(PEER, group(oldest_version=0, newest_version=10**6), 1, None)
    assert (answer.outcome, answer.reason) == ("invalid", "version ahead of the trainer")


def test_invalid_and_stale_groups_leave_the_counter_free() -> None:
    intake = new_intake()
    assert intake.offer(PEER, group(), 0, PeerFault("lengths disagree", "1, 2")).reason == "lengths disagree"
    assert offer(intake, 0).outcome == "accepted"


def test_take_gives_full_batches_oldest_version_first() -> None:
    intake = new_intake(batch_groups=2)
    assert intake.take(0) is None
    for counter, version in ((0, 1), (1, 0), (2, 1)):
        offer(intake, counter, version, steps=1)
    batch = intake.take(1)
    assert batch is not None
    assert [(queued.counter, queued.oldest_version) for queued in batch.groups] == [(1, 0), (0, 1)]
    assert intake.queued == 3  # taken groups are still this intake's
    with pytest.raises(LocalFault):
        intake.take(1)
    intake.settle("trained")
    assert (intake.queued, intake.counts["trained"], intake.take(1)) == (1, 2, None)


def test_gate_3_takes_nothing_over_the_bound() -> None:
    intake = new_intake(max_lag=1, batch_groups=1)
    offer(intake, 0, version=0)
    offer(intake, 1, version=2, steps=2)  # accepted beside one that has become too old
    batch = intake.take(2)
    assert batch is not None
    assert ([q.counter for q in batch.groups], [q.counter for q in batch.stale]) == ([1], [0])
    intake.settle("trained")
    offer(intake, 2, version=2, steps=2)
    only_stale = intake.take(4)
    assert isinstance(only_stale, Batch)
    assert (only_stale.groups, [q.counter for q in only_stale.stale]) == ((), [2])
    assert intake.counts["stale_in_queue"] == 2


def test_gate_2_sweeps_exactly_what_is_over_the_bound() -> None:
    intake = new_intake(max_lag=1)
    for version in (0, 1, 2):
        offer(intake, version, version, steps=version)
    assert [queued.oldest_version for queued in intake.sweep(2)] == [0]
    assert [queued.oldest_version for queued in intake.sweep(2)] == []
    assert intake.queued == 2


def test_forgetting_frees_memory_but_never_lets_a_trained_group_back() -> None:
    # Method: every group is trained on, then offered again after each later step.
    intake = new_intake(max_lag=2, batch_groups=1)
    for step in range(20):
        assert offer(intake, step, version=step, steps=step).outcome == "accepted"
        assert intake.take(step) is not None
        intake.settle("trained")
        intake.forget(step + 1)
        again = [offer(intake, old, version=old, steps=step + 1).outcome for old in range(step + 1)]
        assert set(again) <= {"duplicate", "stale"}
        assert again[-1] == "duplicate"
    assert len(intake._seen) == 2  # lags 1 and 2 can still come


def test_the_bound_can_be_lowered_and_raised_again_but_never_over_max_lag() -> None:
    intake = new_intake(max_lag=2, batch_groups=1)
    assert intake.bound == 2
    offer(intake, 0, version=4, steps=5)
    intake.limit(0)
    assert intake.bound == 0
    refused = offer(intake, 1, version=4, steps=5)
    assert (refused.outcome, refused.reason) == ("stale", "lag 1 over 0")
    batch = intake.take(5)
    assert batch is not None
    assert (batch.groups, [each.counter for each in batch.stale]) == ((), [0]), "what waited goes too"
    intake.limit(2)
    assert offer(intake, 2, version=3, steps=5).outcome == "accepted"
    for bound in (3, -1):
        with pytest.raises(LocalFault):
            intake.limit(bound)
    assert intake.bound == 2


def test_a_lowered_bound_shortens_no_memory() -> None:
    # Goal: a group that was trained on while the bound was low does not come again when it is raised.
    intake = new_intake(max_lag=2, batch_groups=1)
    intake.limit(0)
    offer(intake, 0)
    intake.take(0)
    intake.settle("trained")
    intake.forget(1)
    intake.limit(2)
    again = offer(intake, 0, version=0, steps=1)
    assert (again.outcome, again.reason) == ("duplicate", ""), "known by its digest, not only by its counter"


def test_b39_lag_in_flight_and_lag_in_the_queue_add_up() -> None:
    intake = new_intake(max_lag=4, batch_groups=1)
    offer(intake, 0, version=2, steps=3)
    batch = intake.take(5)
    assert batch is not None
    (taken,) = batch.groups
    assert (taken.arrived_step, taken.lag_in_flight, taken.lag_in_queue(5)) == (3, 1, 2)
    unknown = Queued(bytes(32), PEER, 0, 2)
    assert (unknown.lag_in_flight, unknown.lag_in_queue(5)) == (None, None), "missing is not 0"


def test_a_batch_does_not_depend_on_the_order_of_arrival() -> None:
    # Goal: floating-point sums over a batch are the same whoever was faster. Method: shuffle the arrivals.
    arrivals = [(producer, counter, counter % 3) for producer in ("b", "a", "c") for counter in range(4)]
    batches = set()
    for seed in range(20):
        random.Random(seed).shuffle(arrivals)
        intake = new_intake(batch_groups=12)
        for producer, counter, version in arrivals:
            offer(intake, counter, version, steps=2, producer=producer)
        batch = intake.take(2)
        assert batch is not None
        batches.add(tuple((each.oldest_version, each.producer, each.counter) for each in batch.groups))
    assert batches == {tuple(sorted((version, producer, counter) for producer, counter, version in arrivals))}


def test_of_one_version_those_that_came_first_are_taken() -> None:
    intake = new_intake(batch_groups=2)
    for producer, counter, version in (("z", 0, 1), ("z", 1, 0), ("a", 5, 1), ("a", 6, 1)):
        offer(intake, counter, version, steps=1, producer=producer)
    batch = intake.take(1)
    assert batch is not None
    assert [(each.producer, each.counter) for each in batch.groups] == [("z", 1), ("z", 0)]


# -- the queue is for everybody


def push(intake: Intake, producer: str, num_groups: int, first: int = 0) -> int:
    """Push as an ingest would; how many groups were let in. Raises PeerFault."""
    room = intake.admit(producer, num_groups)
    for counter in range(first, first + room):
        assert offer(intake, counter, producer=producer).outcome == "accepted"
    return room


def test_a_huge_push_is_turned_away_unjudged() -> None:
    intake = new_intake(batch_groups=1)
    with pytest.raises(PeerFault, match="push too large"):
        intake.admit(PEER, PUSH_GROUPS_MAX + 1)
    assert intake.counts["received"] == 0


def test_nobody_fills_the_queue_alone() -> None:
    intake = new_intake(batch_groups=4)
    limit = QUEUE_BATCHES_MAX * 4
    assert push(intake, PEER, PUSH_GROUPS_MAX) == limit // 2, "also not with one push"
    with pytest.raises(PeerFault, match="queue share"):
        intake.admit(PEER, 1)
    assert push(intake, "another", PUSH_GROUPS_MAX) == limit // 3
    with pytest.raises(PeerFault, match="queue share"):
        intake.admit("another", 1)
    assert push(intake, "a third", 1) == 1
    assert push(intake, "a third", PUSH_GROUPS_MAX, first=1) == limit - limit // 2 - limit // 3 - 1
    with pytest.raises(PeerFault, match="queue full"):
        intake.admit("a fourth", 1)
    assert intake.queued == limit


def test_the_share_is_free_again_as_groups_leave() -> None:
    # Method: each way out of the queue: consumed, too old, not stored.
    intake = new_intake(max_lag=0, batch_groups=2)
    half = QUEUE_BATCHES_MAX
    push(intake, PEER, PUSH_GROUPS_MAX)
    intake.take(0)
    with pytest.raises(PeerFault, match="queue share"):
        intake.admit(PEER, 1)  # taken is not settled
    intake.settle("trained")
    assert intake.admit(PEER, PUSH_GROUPS_MAX) == 2
    assert len(intake.sweep(1)) == half - 2
    assert intake.admit(PEER, PUSH_GROUPS_MAX) == half
    digest = intake.offer(PEER, group(counter=99, oldest_version=1, newest_version=1), 1, None).digest
    assert intake.admit(PEER, PUSH_GROUPS_MAX) == half - 1
    intake.retract([digest])
    assert intake.admit(PEER, PUSH_GROUPS_MAX) == half
    assert intake._held == {}


def test_many_producers_have_at_least_a_batch_each() -> None:
    intake = new_intake(batch_groups=2)
    for number in range(QUEUE_BATCHES_MAX):
        assert push(intake, f"peer {number}", 2) == 2
    with pytest.raises(PeerFault, match="queue full"):
        intake.admit(PEER, 1)


def test_who_holds_what_is_known_again_after_a_restart() -> None:
    intake = new_intake(batch_groups=1)
    half = QUEUE_BATCHES_MAX // 2
    intake.restore([Queued(bytes([number]) * 32, PEER, number, 0) for number in range(half)], [])
    with pytest.raises(PeerFault, match="queue share"):
        intake.admit(PEER, 1)
    assert intake.admit("another", QUEUE_BATCHES_MAX) == QUEUE_BATCHES_MAX // 3


# -- what is told later


def test_b39_a_group_that_grows_too_old_in_the_queue_is_told_to_its_producer_once() -> None:
    intake = new_intake(max_lag=2)
    first = offer(intake, 0)
    offer(intake, 7, producer="another")
    intake.sweep(2)
    assert intake.later(PEER) == ()
    intake.sweep(3)
    assert intake.later(PEER) == (GroupReceipt(0, first.digest, "stale", "stale in queue: lag 3 over 2"),)
    assert intake.later(PEER) == ()
    assert [each.counter for each in intake.later("another")] == [7]


def test_gate_3_tells_too() -> None:
    intake = new_intake(max_lag=0)
    digest = offer(intake, 0).digest
    assert intake.take(1) == Batch((), (Queued(digest, PEER, 0, 0, 0),))
    assert [each.reason for each in intake.later(PEER)] == ["stale in queue: lag 1 over 0"]


def test_what_is_to_be_told_later_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LATER_PRODUCERS_MAX", 3)
    monkeypatch.setattr(delivery, "LATER_OUTCOMES_MAX", 4)
    intake = new_intake(max_lag=0)
    for number, producer in enumerate(("a", "b", "c", "a", "d", "e")):
        for counter in range(10 * number, 10 * number + 3):
            offer(intake, counter, producer=producer)
        intake.sweep(1)
    told = {producer: [each.counter for each in intake.later(producer)] for producer in "abcde"}
    assert told == {"a": [2, 30, 31, 32], "b": [], "c": [], "d": [40, 41, 42], "e": [50, 51, 52]}


def test_the_largest_receipt_is_far_under_its_limit() -> None:
    longest = GroupReceipt(2**32 - 1, bytes(32), "accepted", "x" * 128)
    full = Receipt(RUN, PEER, (longest,) * (PUSH_GROUPS_MAX + LATER_OUTCOMES_MAX), 2**32 - 1, 2**32 - 1)
    assert len(seal(TRAINER, full).raw) < KINDS[Receipt][1] / 8


def test_a_group_that_could_not_be_stored_may_come_again() -> None:
    intake = new_intake()
    first = offer(intake, 0)
    intake.retract([first.digest])
    assert (intake.queued, intake.counts["accepted"], intake.counts["received"]) == (0, 0, 0)
    assert offer(intake, 0).outcome == "accepted"
    assert offer(intake, 1).outcome == "accepted"
    intake.take(0)
    with pytest.raises(LocalFault):
        intake.retract([first.digest])


def test_memory_of_offenders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BLAMED_MAX", 10)
    intake = new_intake()
    for number in range(50):
        intake.offer(f"peer {number}", group(), 0, PeerFault("malformed group"))
    assert len(intake._invalid) == 10
    assert intake.reasons["malformed group"] == 50


# -- the producer's side


def test_a_group_is_pushed_until_a_receipt_names_it() -> None:
    outbox = Outbox()
    for counter in (4, 5, 6):
        outbox.add(counter, 100)
    assert outbox.next_push(0.0, 1000) == [4, 5, 6]
    assert outbox.receipted(receipt((4, "accepted"), (6, "stale"))) == [4, 6]
    assert outbox.next_push(0.0, 1000) == [5]
    assert outbox.receipted(receipt((4, "duplicate"), (5, "duplicate"), (9, "accepted"))) == [5]
    assert len(outbox) == 0
    assert outbox.next_push(0.0, 1000) == []
    assert outbox.counts == {"accepted": 1, "stale": 1, "duplicate": 1}


def test_a_push_stays_within_one_message() -> None:
    outbox = Outbox()
    for counter in range(PUSH_GROUPS_MAX + 5):
        outbox.add(counter, 10)
    assert outbox.next_push(0.0, 39) == [0, 1, 2]
    assert outbox.next_push(0.0, 40) == [0, 1, 2, 3]
    assert len(outbox.next_push(0.0, 10**9)) == PUSH_GROUPS_MAX
    assert outbox.next_push(0.0, 5) == [0]  # one group always goes: else it would never


def test_waits_double_up_to_a_limit_and_end_with_progress() -> None:
    outbox = Outbox(retry_s=1.0, retry_max_s=5.0)
    outbox.add(0, 10)
    outbox.add(1, 10)
    assert [outbox.failed(100.0) - 100.0 for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert outbox.next_push(104.9, 100) == []
    assert outbox.next_push(105.0, 100) == [0, 1]
    for _ in range(10_000):
        outbox.failed(100.0)
    outbox.receipted(receipt((0, "accepted")))
    assert outbox.next_push(100.0, 100) == [1]
    assert outbox.failed(100.0) == 101.0


def test_an_empty_receipt_does_not_end_a_back_off() -> None:
    outbox = Outbox()
    outbox.add(0, 10)
    outbox.failed(0.0)
    assert outbox.receipted(receipt()) == []
    assert outbox.next_push(0.5, 100) == []


def test_a_full_outbox_says_so() -> None:
    outbox = Outbox()
    for counter in range(OUTBOX_GROUPS_MAX):
        assert not outbox.full
        outbox.add(counter, 1)
    assert outbox.full


def test_b39_a_receipt_revises_an_accepted_group_once() -> None:
    outbox = Outbox()
    for counter in range(4):
        outbox.add(counter, 10)
    outbox.receipted(receipt((0, "accepted"), (1, "stale"), (2, "duplicate")))
    assert outbox.receipted(receipt((0, "stale"))) == [], "its bytes are deleted already"
    assert outbox.counts == {"accepted": 0, "stale": 2, "duplicate": 1}
    before = dict(outbox.counts)
    for counter, outcome in ((0, "stale"), (1, "stale"), (2, "stale"), (9, "stale"), (0, "accepted"), (0, "invalid")):
        assert outbox.receipted(receipt((counter, outcome))) == []  # type: ignore[arg-type]
    assert outbox.counts == before, "repeated, never accepted, unknown, or no revision at all"
    assert outbox.receipted(receipt((3, "accepted"), (3, "stale"), (3, "stale"))) == [3]
    assert outbox.counts == {"accepted": 0, "stale": 3, "duplicate": 1}
    assert sum(outbox.counts.values()) == 4


def test_a_revision_does_not_end_a_back_off() -> None:
    outbox = Outbox()
    outbox.add(0, 10)
    outbox.receipted(receipt((0, "accepted")))
    outbox.add(1, 10)
    outbox.failed(0.0)
    outbox.receipted(receipt((0, "stale")))
    assert outbox.next_push(0.5, 100) == []


def test_memory_of_what_may_be_revised_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "REVISABLE_MAX", 3)
    outbox = Outbox()
    for counter in range(5):
        outbox.add(counter, 10)
    outbox.receipted(receipt(*((counter, "accepted") for counter in range(5))))
    outbox.receipted(receipt(*((counter, "stale") for counter in range(5))))
    assert outbox.counts == {"accepted": 2, "stale": 3}
    assert len(outbox._revisable) == 0
