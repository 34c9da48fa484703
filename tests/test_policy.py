"""The policy chain: what extends it, what does not, and what proves a lie."""

import pytest

from protocols.envelopes import Sealed, content_hash
from protocols.faults import PeerFault
from protocols.messages import Announcement, TrainedOn
from protocols.policy import Chain, Equivocation, Extended, Gap, Known, genesis
from tests.samples import (
    OTHER_RUN,
    OTHER_TRAINER,
    RUN,
    STRANGER,
    TRAINER_ID,
    announcement,
    group,
    manifest,
    run_end,
)


def chain_of(*versions: int) -> tuple[Chain, list[Sealed[Announcement]]]:
    """A chain of these versions, and its announcements."""
    chain, entries = Chain(manifest()), []
    for version in versions:
        entries.append(announcement(version, chain.head_hash))
        assert chain.extend(entries[-1]) == Extended()
    return chain, entries


def test_an_empty_chain_stands_on_the_genesis_of_its_run() -> None:
    chain = Chain(manifest())
    assert (chain.version, chain.head, chain.head_hash) == (-1, None, genesis(RUN))
    assert genesis(RUN) != genesis(OTHER_RUN)
    assert chain.since(0, 10) == []


def test_it_extends_and_may_skip_versions() -> None:
    chain, entries = chain_of(0, 1, 3, 7)
    assert chain.version == 7
    assert chain.head == entries[-1]
    assert chain.head_hash == content_hash(entries[-1])
    assert (chain.get(3), chain.get(2)) == (entries[2], None)
    assert chain.since(2, 10) == entries[2:]
    assert chain.since(0, 2) == entries[:2]
    assert chain.since(8, 10) == []


def test_what_is_known_changes_nothing() -> None:
    chain, entries = chain_of(0, 1, 2)
    assert [chain.extend(entry) for entry in entries] == [Known()] * 3
    assert chain.entries == entries


def test_out_of_order_is_a_gap_that_closes() -> None:
    _, entries = chain_of(0, 1, 2, 3)
    chain = Chain(manifest())
    assert chain.extend(entries[2]) == Gap(0)
    assert chain.extend(entries[0]) == Extended()
    assert chain.extend(entries[3]) == Gap(1)
    assert [chain.extend(entry) for entry in entries[1:]] == [Extended()] * 3


def test_versions_only_rise() -> None:
    chain, entries = chain_of(0, 2, 4)
    with pytest.raises(PeerFault, match="not on the chain"):
        chain.extend(announcement(1, chain.head_hash))
    with pytest.raises(PeerFault, match="not on the chain"):
        chain.extend(announcement(3, content_hash(entries[2])))  # child of v4
    assert chain.entries == entries
    assert not chain.equivocations


def test_equivocation_at_the_head_refuses_both() -> None:
    chain, entries = chain_of(0, 1)
    rival = announcement(1, content_hash(entries[0]), created_ms=9)
    assert chain.extend(rival) == Equivocation(TRAINER_ID, 1, entries[1].raw, rival.raw)
    assert (chain.version, chain.head_hash, chain.get(1)) == (0, content_hash(entries[0]), None)
    for refused in (entries[1], rival, announcement(2, content_hash(entries[1]))):
        with pytest.raises(PeerFault, match="equivocating trainer"):
            chain.extend(refused)
    assert chain.extend(entries[0]) == Known()  # who relays an undisputed version is innocent
    # Another trainer of the run goes on from the last undisputed version.
    assert chain.extend(announcement(1, chain.head_hash, key=OTHER_TRAINER)) == Extended()


def test_equivocation_below_the_head_keeps_the_chain_and_the_proof() -> None:
    chain, entries = chain_of(0, 1, 2)
    rival = announcement(1, content_hash(entries[0]), created_ms=9)
    assert isinstance(chain.extend(rival), Equivocation)
    assert chain.entries == entries
    assert chain.equivocations[TRAINER_ID].second == rival.raw
    with pytest.raises(PeerFault, match="equivocating trainer"):
        chain.extend(announcement(3, chain.head_hash))


@pytest.mark.parametrize("version", [2, 3, 9])
def test_two_children_of_one_parent_are_equivocation_whatever_their_numbers(version: int) -> None:
    chain, entries = chain_of(0, 1, 3)
    rival = announcement(version, content_hash(entries[1]), created_ms=9)
    assert chain.extend(rival) == Equivocation(TRAINER_ID, 3, entries[2].raw, rival.raw)
    assert chain.version == 1


def test_a_second_beginning_of_the_run_is_equivocation() -> None:
    chain, entries = chain_of(0, 1)
    assert isinstance(chain.extend(announcement(5)), Equivocation)
    assert chain.entries == entries


def test_a_fork_below_a_gap_is_found_when_the_gap_is_filled() -> None:
    ours, entries = chain_of(0, 1, 2, 3)
    theirs = Chain(manifest())
    theirs.extend(entries[0])
    for version in (2, 4, 5):
        theirs.extend(announcement(version, theirs.head_hash, created_ms=9))
    assert ours.extend(theirs.entries[-1]) == Gap(4)
    assert [type(ours.extend(entry)) for entry in theirs.since(4, 9)] == [Gap, Gap]  # a page from 4 leaves a gap again
    assert ours.extend(theirs.entries[0]) == Known()
    assert isinstance(ours.extend(theirs.entries[1]), Equivocation)


def test_another_trainer_does_not_equivocate_for_the_first() -> None:
    chain, entries = chain_of(0, 1)
    with pytest.raises(PeerFault, match="not on the chain"):
        chain.extend(announcement(1, content_hash(entries[0]), key=OTHER_TRAINER))
    assert chain.entries == entries
    assert not chain.equivocations


def test_only_trainers_of_the_manifest_announce() -> None:
    chain, _ = chain_of(0)
    with pytest.raises(PeerFault, match="not a trainer"):
        chain.extend(announcement(1, chain.head_hash, key=STRANGER))
    with pytest.raises(PeerFault, match="not a trainer"):
        chain.finish(run_end(0, chain.head_hash, key=STRANGER))
    chain.update_manifest(manifest(revision=2, trainers=(manifest().trainers[1],)))
    with pytest.raises(PeerFault, match="not a trainer"):
        chain.extend(announcement(1, chain.head_hash))


def test_b102_an_announcement_of_another_run_is_refused() -> None:
    # The same trainer key in two runs: the signature is good, the run is not ours.
    chain, _ = chain_of(0)
    with pytest.raises(PeerFault, match="foreign run"):
        chain.extend(announcement(5, genesis(OTHER_RUN), run=OTHER_RUN))
    with pytest.raises(PeerFault, match="foreign run"):
        chain.finish(run_end(0, chain.head_hash, run=OTHER_RUN))
    # Yesterday's announcement of our own run is known, and moves nothing.
    chain, entries = chain_of(0, 1, 2)
    assert chain.extend(entries[1]) == Known()
    assert chain.version == 2


def test_an_announcement_that_admits_to_a_broken_bound_is_refused() -> None:
    chain, _ = chain_of(0)
    over = TrainedOn(1, 3, bytes(32))
    for changes in ({"trained_on": over}, {"bound": 3}, {"bound": 3, "trained_on": over}, {"bound": 1}):
        with pytest.raises(PeerFault, match="bound broken"):
            chain.extend(announcement(1, chain.head_hash, **changes))


def test_the_end_closes_a_complete_chain() -> None:
    chain, entries = chain_of(0, 1)
    assert not chain.finish(run_end(2, bytes(32)))  # we lack v2: catch up first
    for wrong in (run_end(0, content_hash(entries[0])), run_end(1, bytes(32))):
        with pytest.raises(PeerFault, match="not on the chain"):
            chain.finish(wrong)
    assert chain.end is None
    end = run_end(1, chain.head_hash)
    assert chain.finish(end)
    assert chain.end == end


def test_b102_nothing_comes_after_the_end() -> None:
    chain, _ = chain_of(0, 1)
    chain.finish(run_end(1, chain.head_hash))
    with pytest.raises(PeerFault, match="after the end"):
        chain.extend(announcement(2, chain.head_hash))
    with pytest.raises(PeerFault, match="not on the chain"):
        chain.finish(run_end(2, bytes(32)))  # a second, later end: nobody has to wait for it
    assert chain.finish(run_end(1, chain.head_hash))


def test_an_equivocator_cannot_end_the_run_and_its_end_is_void() -> None:
    chain, entries = chain_of(0, 1)
    end = run_end(1, chain.head_hash)
    chain.finish(end)
    assert isinstance(chain.extend(announcement(1, content_hash(entries[0]), created_ms=9)), Equivocation)
    assert chain.end is None
    with pytest.raises(PeerFault, match="equivocating trainer"):
        chain.finish(run_end(0, chain.head_hash))


def test_a_group_is_of_the_version_whose_weights_it_names() -> None:
    chain, entries = chain_of(0, 2)
    right = entries[1].message.adapter.digest
    chain.check_authorship(group(oldest_version=0, newest_version=2, adapter=right))
    for oldest, newest in ((1, 2), (0, 1), (2, 3), (3, 3)):
        with pytest.raises(PeerFault, match="unknown version"):
            chain.check_authorship(group(oldest_version=oldest, newest_version=newest, adapter=right))
    with pytest.raises(PeerFault, match="wrong adapter"):  # old rollouts, relabelled as new
        chain.check_authorship(group(oldest_version=2, newest_version=2, adapter=entries[0].message.adapter.digest))
