"""The fence around a peer: old, foreign and hostile directives change nothing, or little (S6, cases B46, B102)."""

import itertools
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protocols.directory import SKEW_S
from protocols.election import TERM_EPOCH_S, precedes
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault
from protocols.manifest import CoordinationSpec, Manifest
from protocols.messages import Directive, Lease, Mode
from protocols.modes import DWELL_S
from protocols.orders import DIRECTIVE_LIFE_S, MODE_DWELL_S, Orders
from protocols.presence import BEAT_S, SILENT_S
from tests.samples import (
    OTHER_RUN,
    OTHER_TRAINER,
    OTHER_TRAINER_ID,
    OWNER,
    RUN,
    STRANGER,
    STRANGER_ID,
    TRAINER,
    TRAINER_ID,
    envelope_of,
    manifest,
)

AGE_S = 1_000_000  # of the run's calendar: terms up to a million may be claimed
WALL_S = float(TERM_EPOCH_S + AGE_S)


def auto(**changes: Any) -> Manifest:
    return manifest(coordination=CoordinationSpec(mode="auto"), **changes)


def directive(
    term: int = 1, number: int = 0, key: Ed25519PrivateKey = TRAINER, wall_s: float = WALL_S, **changes: Any
) -> Sealed[Directive]:
    fields = {"run": RUN, "mode": "async", "min_version": 0, "issued_ms": int(1000 * wall_s)}
    return seal(key, Directive(**{**fields, "term": term, "number": number, **changes}))


def take(orders: Orders, sealed: Sealed[Directive], now_s: float = 0.0) -> bool:
    """`now_s` is both clocks: the steady one, and the seconds since WALL_S."""
    return orders.take(sealed, now_s, WALL_S + now_s)


def refusal(orders: Orders, sealed: Sealed[Directive], now_s: float = 0.0) -> str:
    before = state(orders)
    with pytest.raises(PeerFault) as caught:
        take(orders, sealed, now_s)
    assert state(orders) == before, "what is refused changes nothing"
    return caught.value.reason


def state(orders: Orders) -> tuple[object, ...]:
    return orders.coordinator, orders.term, orders.newest, orders.mode, orders.min_version, orders.alone(1.0)


# ---------------------------------------------------------------------- the fence


def test_the_first_directive_is_obeyed_and_saying_it_again_is_no_news() -> None:
    orders = Orders(manifest())
    assert orders.alone(0.0)
    said = directive(term=3, number=7, min_version=2)
    assert take(orders, said)
    assert (orders.coordinator, orders.term, orders.min_version, orders.newest) == (TRAINER_ID, 3, 2, said)
    assert orders.leads(TRAINER_ID, 3)
    assert not orders.leads(TRAINER_ID, 2)
    assert not orders.leads(OTHER_TRAINER_ID, 3)
    assert not take(orders, said, 1.0)


def test_s6_a_lower_term_than_seen_changes_nothing() -> None:
    orders = Orders(auto())
    take(orders, directive(term=5, min_version=3))
    before = state(orders)
    for key in (TRAINER, OTHER_TRAINER):
        for term in (0, 1, 4):
            assert not take(orders, directive(term, 2**32 - 1, key, mode="sequential", min_version=9), 0.5)
    assert state(orders) == before


def test_b46_a_leader_that_was_stopped_and_goes_on_is_not_obeyed() -> None:
    # Its own clock tells it so first (tests/test_election.py); what it sent before it looked meets the fence.
    orders = Orders(auto())
    take(orders, directive(term=5, number=100), 0.0)
    take(orders, directive(term=6, number=0, key=OTHER_TRAINER, wall_s=WALL_S + 20), 20.0)
    late = directive(term=5, number=101, wall_s=WALL_S + 21, mode="sequential", min_version=50)
    assert not take(orders, late, 21.0)
    assert orders.leads(OTHER_TRAINER_ID, 6)
    assert not orders.leads(TRAINER_ID, 5), "nor do its credits count"
    assert (orders.min_version, orders.mode) == (0, "async")


def test_two_leaders_of_one_term_are_told_apart_the_same_way_everywhere() -> None:
    ours, theirs = directive(4, 9), directive(4, 0, OTHER_TRAINER)
    first, second = Orders(manifest()), Orders(manifest())
    for orders, order in ((first, (ours, theirs)), (second, (theirs, ours))):
        for said in order:
            take(orders, said)
    winner = TRAINER_ID if precedes(RUN, (4, TRAINER_ID), (4, OTHER_TRAINER_ID)) else OTHER_TRAINER_ID
    assert first.coordinator == second.coordinator == winner


def test_within_a_term_the_later_number_counts() -> None:
    orders = Orders(manifest())
    assert take(orders, directive(1, 5, min_version=4))
    assert not take(orders, directive(1, 4, min_version=9))
    assert not take(orders, directive(1, 5, min_version=9))
    assert take(orders, directive(1, 6, min_version=2))
    assert orders.min_version == 4, "within a term it only rises"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=12))
def test_s6_in_whatever_order_directives_come_the_fence_never_goes_back(said: list[tuple[int, bool, int, int]]) -> None:
    orders = Orders(auto())
    where = (0, "", -1)
    for at_s, (term, ours, number, version) in enumerate(said):
        key = TRAINER if ours else OTHER_TRAINER
        mode: Mode = "sequential" if version % 2 else "async"
        before = state(orders)
        obeyed = take(orders, directive(term, number, key, min_version=version, mode=mode), at_s / 10)
        assert obeyed == (before != state(orders) or orders.newest is not before[2])
        now = (orders.term, orders.coordinator or "", orders._number)
        if obeyed:
            assert now[0] >= where[0]
            assert now[0] > where[0] or not where[1] or now[1:] != where[1:]
            if now[:2] == where[:2]:
                assert now[2] > where[2]
            elif now[0] == where[0]:
                assert precedes(RUN, (now[0], now[1]), (where[0], where[1]))
        where = now


# ---------------------------------------------------------------------- what nobody may send


def test_b102_old_directives_are_refused() -> None:
    orders = Orders(manifest())
    life_s = DIRECTIVE_LIFE_S + SKEW_S
    yesterday = directive(term=9, wall_s=WALL_S - 86_400)
    assert refusal(orders, yesterday) == "old directive"
    assert refusal(orders, directive(term=9), life_s + 0.1) == "old directive"
    assert refusal(orders, directive(term=9, wall_s=WALL_S + 3600)) == "old directive", "a clock an hour ahead"
    assert take(orders, directive(term=9), life_s)


def test_b102_a_directive_of_another_run_is_refused() -> None:
    # The same owner, the same bootstrap peer, which may lead both runs.
    orders = Orders(manifest(coordination=CoordinationSpec(coordinators=(STRANGER_ID,))))
    assert refusal(orders, directive(key=STRANGER, run=OTHER_RUN)) == "foreign run"
    assert take(orders, directive(key=STRANGER))


def test_b102_an_envelope_of_another_kind_is_no_directive() -> None:
    lease = Lease(RUN, 1, "claimed", int(1000 * WALL_S))
    with pytest.raises(PeerFault, match="bad signature"):
        unseal(seal(TRAINER, lease).raw, Directive)
    payload = msgspec.msgpack.encode(lease)
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(Directive, payload, TRAINER), Directive)


def test_b102_replayed_directives_of_this_term_and_of_older_ones_change_nothing() -> None:
    orders = Orders(auto())
    said = [directive(term, number, key) for term, key in ((1, TRAINER), (2, OTHER_TRAINER)) for number in range(3)]
    for sealed in said:
        assert take(orders, sealed)
    before = state(orders)
    assert [take(orders, sealed, 5.0) for sealed in said] == [False] * len(said)
    assert state(orders) == before


def test_who_is_not_eligible_orders_nothing() -> None:
    assert refusal(Orders(manifest()), directive(key=STRANGER)) == "not eligible"
    assert refusal(Orders(manifest()), directive(key=OWNER)) == "not eligible"
    assert take(Orders(manifest(coordination=CoordinationSpec(coordinators=(STRANGER_ID,)))), directive(key=STRANGER))


# ---------------------------------------------------------------------- a hostile coordinator


def test_a_version_that_does_not_exist_lifts_the_floor_to_the_head_and_no_further() -> None:
    orders = Orders(manifest())
    take(orders, directive(1, 0, min_version=2**32 - 1))
    assert [orders.floor(head) for head in (0, 7, 8)] == [0, 7, 8]


def test_what_a_hostile_coordinator_ordered_ends_with_its_term() -> None:
    orders = Orders(manifest())
    take(orders, directive(1, 0, min_version=2**32 - 1))
    take(orders, directive(2, 0, OTHER_TRAINER, min_version=6))
    assert orders.floor(9) == 6


def test_a_term_of_2_to_the_63_is_not_even_read() -> None:
    for term in (2**32, 2**63, 2**64 - 1, -1):
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(directive().message))
        raw = envelope_of(Directive, msgspec.msgpack.encode({**fields, "term": term}), TRAINER)
        with pytest.raises(PeerFault, match="malformed envelope"):
            unseal(raw, Directive)


def test_b48_a_term_ahead_of_its_time_is_refused() -> None:
    orders = Orders(manifest())
    ceiling = int(AGE_S + SKEW_S)
    for term in (ceiling + 1, 2**32 - 1):
        assert refusal(orders, directive(term)) == "term ahead of its time"
    assert take(orders, directive(ceiling))


def test_a_term_at_the_ceiling_is_passed_by_an_honest_one_seconds_later() -> None:
    orders = Orders(manifest())
    ceiling = int(AGE_S + SKEW_S)
    take(orders, directive(ceiling))
    assert refusal(orders, directive(ceiling + 1, key=OTHER_TRAINER), 0.5) == "term ahead of its time"
    assert take(orders, directive(ceiling + 1, key=OTHER_TRAINER, wall_s=WALL_S + 1), 1.0)
    assert orders.coordinator == OTHER_TRAINER_ID


@pytest.mark.parametrize("configured", ["async", "sequential"])
def test_an_ordered_mode_counts_only_in_auto(configured: Mode) -> None:
    orders = Orders(manifest(coordination=CoordinationSpec(mode=configured)))
    other: Mode = "sequential" if configured == "async" else "async"
    assert take(orders, directive(mode=other))
    assert orders.mode == configured


def test_a_mode_flipped_each_beat_is_obeyed_once_in_a_dwell_at_most() -> None:
    orders = Orders(auto())
    changes_s = []
    for number in range(120):
        now_s = number * BEAT_S
        before = orders.mode
        mode: Mode = "sequential" if number % 2 == 0 else "async"
        assert take(orders, directive(1 + number // 40, number, wall_s=WALL_S + now_s, mode=mode), now_s)
        changes_s += [now_s] if orders.mode != before else []
    assert changes_s, "the first one is obeyed"
    assert min(later - sooner for sooner, later in itertools.pairwise(changes_s)) >= MODE_DWELL_S


def test_an_honest_switch_is_obeyed_by_the_next_beat_after_the_dwell() -> None:
    # The coordinator dwells as long as its peers do; one that heard of the last switch late hears the next one twice.
    assert MODE_DWELL_S == DWELL_S
    orders = Orders(auto())
    take(orders, directive(1, 0, wall_s=WALL_S + 1, mode="sequential"), 1.0)
    take(orders, directive(1, 15, wall_s=WALL_S + 30, mode="async"), 30.0)
    assert orders.mode == "sequential"
    take(orders, directive(1, 16, wall_s=WALL_S + 32, mode="async"), 32.0)
    assert orders.mode == "async"


# ---------------------------------------------------------------------- manifests, and nobody there


def test_a_coordinator_that_a_revision_removes_is_no_longer_obeyed() -> None:
    orders = Orders(manifest())
    take(orders, directive(5, 0, min_version=2**32 - 1))
    assert not orders.alone(1.0)
    orders.update_manifest(manifest(revision=2, trainers=(OTHER_TRAINER_ID,)))
    assert orders.coordinator is None
    assert orders.newest is None
    assert orders.alone(1.0), "from now on the peer keeps the bound itself"
    assert orders.floor(9) == 0
    assert refusal(orders, directive(6, 1)) == "not eligible"
    assert not take(orders, directive(5, 0, OTHER_TRAINER)), "the fence stays"
    assert take(orders, directive(6, 0, OTHER_TRAINER))


def test_a_revision_that_keeps_the_coordinator_changes_nothing() -> None:
    orders = Orders(manifest())
    take(orders, directive(5, 0, min_version=2))
    before = state(orders)
    orders.update_manifest(manifest(revision=2, trainers=(TRAINER_ID,)))
    assert state(orders) == before


def test_a_revision_that_changes_the_mode_is_obeyed() -> None:
    orders = Orders(manifest())
    assert orders.mode == "async"
    orders.update_manifest(manifest(revision=2, coordination=CoordinationSpec(mode="sequential")))
    assert orders.mode == "sequential"
    orders.update_manifest(auto(revision=3))
    take(orders, directive(1, 0, mode="sequential"))
    assert orders.mode == "sequential"
    orders.update_manifest(manifest(revision=4))
    assert orders.mode == "async"


def test_b50_alone_after_three_silent_beats_and_not_after_two() -> None:
    orders = Orders(manifest())
    take(orders, directive(1, 0), 0.0)
    assert not orders.alone(2 * BEAT_S)
    assert orders.alone(3 * BEAT_S)
    orders.heard(3 * BEAT_S)
    assert not orders.alone(3 * BEAT_S + SILENT_S - 0.1)
    orders.lost()
    assert orders.alone(3 * BEAT_S)
    take(orders, directive(1, 1), 7.0)
    assert not orders.alone(7.0)
