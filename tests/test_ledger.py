"""The ledger: anyone can check it, and nobody can bend it, the trainer that signs it included."""

import random
import struct
from collections.abc import Callable

import msgspec
import pytest

import protocols.ledger as ledger
from protocols.envelopes import seal
from protocols.faults import LocalFault, PeerFault
from protocols.ledger import MAGIC, Consumed, EndEntry, Entry, ManifestEntry, VersionEntry, audit, frame, read_entries
from protocols.messages import TrainedOn
from protocols.policy import Chain
from tests.samples import (
    OTHER_RUN,
    OWNER,
    RUN,
    STRANGER,
    STRANGER_ID,
    TRAINER_ID,
    announcement,
    manifest,
    run_end,
)

MANIFEST = ManifestEntry(seal(OWNER, manifest()).raw)


def group(number: int, step: int, oldest: int) -> Consumed:
    return Consumed(number.to_bytes(32, "big"), STRANGER_ID, oldest, step)


def write(
    versions: list[tuple[int, tuple[Consumed, ...]]], *, ended: bool = True, first: ManifestEntry = MANIFEST
) -> list[Entry]:
    """The entries of a run whose trainer signs whatever it is told to."""
    entries: list[Entry] = [first]
    parent = Chain(manifest()).head_hash
    chain = Chain(manifest(max_lag=10**6))
    for version, consumed in versions:
        sealed = announcement(version, parent, consumed=consumed)
        chain._append(sealed)
        parent = chain.head_hash
        entries.append(VersionEntry(sealed.raw, consumed))
    if ended:
        entries.append(EndEntry(run_end(versions[-1][0], parent).raw))
    return entries


def file_of(entries: list[Entry]) -> bytes:
    return MAGIC + b"".join(map(frame, entries))


GOOD = write([(0, ()), (1, (group(1, 0, 0), group(2, 0, 0))), (3, (group(3, 1, 1), group(4, 2, 0)))])


def problem_of(entries: list[Entry]) -> str:
    report = audit(file_of(entries), RUN)
    assert not report.ok
    assert len(report.problems) == 1
    return report.problems[0]


def test_a_good_ledger_is_audited_and_summed_up() -> None:
    report = audit(file_of(GOOD))
    assert report.problems == []
    assert (report.run, report.entries, report.versions, report.groups, report.head) == (RUN, 5, 3, 4, 3)
    assert (report.max_lag, report.bound, report.histogram, report.ended) == (2, 2, {0: 3, 2: 1}, True)
    assert audit(file_of(GOOD), RUN).ok
    assert list(read_entries(file_of(GOOD))) == GOOD


def test_every_single_changed_byte_is_caught_and_named() -> None:
    # Method: each byte in turn, xored with a seeded mask that is never 0.
    raw, rng = file_of(GOOD), random.Random(3)
    for at in range(len(raw)):
        bent = bytearray(raw)
        bent[at] ^= rng.randint(1, 255)
        report = audit(bytes(bent))
        assert not report.ok, f"byte {at}"
        number = int(report.problems[0].removeprefix("entry ").partition(":")[0])
        assert 0 <= number < len(GOOD)


@pytest.mark.parametrize("at", range(4))
def test_a_removed_entry_is_caught(at: int) -> None:
    expected = ["no manifest", "unknown version", "unknown version", "broken chain"][at]
    assert problem_of(GOOD[:at] + GOOD[at + 1 :]).startswith(f"entry {at}: {expected}")


@pytest.mark.parametrize("at", range(4))
def test_swapped_neighbours_are_caught(at: int) -> None:
    swapped = [*GOOD[:at], GOOD[at + 1], GOOD[at], *GOOD[at + 2 :]]
    assert problem_of(swapped).startswith(f"entry {at}:")


@pytest.mark.parametrize("at", range(5))
def test_a_repeated_entry_is_caught(at: int) -> None:
    assert problem_of([*GOOD[: at + 1], GOOD[at], *GOOD[at + 1 :]]).startswith(f"entry {at + 1}:")


def test_a_cut_tail_shows() -> None:
    raw = file_of(GOOD)
    ends = [len(file_of(GOOD[:count])) for count in range(len(GOOD) + 1)]
    for end in range(len(raw)):
        report = audit(raw[:end], RUN)
        if end in ends[1:]:
            assert report.ok  # a run in progress looks like this
            assert not report.ended
        else:
            assert not report.ok
    assert audit(MAGIC).problems == ["entry 0: the ledger holds no manifest"]


def test_nothing_stands_behind_the_end() -> None:
    for extra in (MANIFEST, GOOD[1], GOOD[-1]):
        assert "after the end" in problem_of([*GOOD, extra])


def test_a_dishonest_trainer_cannot_sign_a_lag_over_the_bound() -> None:
    over = write([(0, ()), (4, (group(1, 3, 0),))])  # lag 3, bound 2: said openly
    assert problem_of(over).startswith("entry 2: lag over the bound: v4 consumed a group of lag 3")
    hidden = announcement(4, _parent_of_v4(), trained_on=TrainedOn(1, 2, bytes(32)))
    assert "lag over the bound" in problem_of([*over[:2], VersionEntry(hidden.raw, (group(1, 3, 0),))])
    unlisted = [*over[:2], VersionEntry(hidden.raw, ())]
    assert "wrong root" in problem_of(unlisted)
    wide = announcement(1, _parent_of_v4(), bound=9)
    assert "bound broken" in problem_of([*over[:2], VersionEntry(wide.raw, ())])


def _parent_of_v4() -> bytes:
    chain = Chain(manifest())
    chain.extend(announcement(0))
    return chain.head_hash


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([(0, ()), (1, (group(1, 0, 0),)), (2, (group(1, 1, 1),))], "entry 3: trained twice"),
        ([(0, ()), (1, (group(1, 0, 0), group(1, 0, 0)))], "entry 2: trained twice"),
        ([(0, ()), (1, (group(1, 1, 0),))], "entry 2: wrong step"),  # at a step of the next version
        ([(0, ()), (1, ()), (2, (group(1, 0, 0),))], "entry 3: wrong step"),  # at a step of the version before
        ([(0, (group(1, 0, 0),))], "entry 1: wrong step"),  # version 0 was not trained at all
        ([(0, ()), (2, (group(1, 0, 1),))], "entry 2: lag over the bound"),  # from the future
        ([(0, ()), (2, ()), (3, (group(1, 2, 1),))], "entry 3: unknown version"),  # v1 was never announced
    ],
)
def test_what_a_dishonest_trainer_signs_is_still_wrong(
    versions: list[tuple[int, tuple[Consumed, ...]]], expected: str
) -> None:
    assert problem_of(write(versions)).startswith(expected)


def test_listed_groups_are_those_that_were_signed() -> None:
    version = GOOD[2]
    assert isinstance(version, VersionEntry)
    bent: list[Callable[[tuple[Consumed, ...]], tuple[Consumed, ...]]] = [
        lambda groups: groups[:1],
        lambda groups: groups[::-1],
        lambda groups: (*groups, group(9, 0, 0)),
        lambda groups: (msgspec.structs.replace(groups[0], producer=TRAINER_ID), groups[1]),
        lambda groups: (group(9, 0, 0), groups[1]),
    ]
    for change in bent:
        changed = VersionEntry(version.envelope, change(version.consumed))
        assert problem_of([*GOOD[:2], changed, *GOOD[3:]]).startswith("entry 2: wrong root")


def test_a_ledger_of_another_run_is_refused() -> None:
    assert audit(file_of(GOOD), OTHER_RUN).problems[0].startswith("entry 0: foreign manifest")
    for nonsense in ("", "demo", "x" * 1000, "demo-\n"):
        assert audit(file_of(GOOD), nonsense or "-").problems[0].startswith("entry 0: foreign manifest")
    stolen = [ManifestEntry(seal(STRANGER, manifest()).raw), *GOOD[1:]]
    assert problem_of(stolen).startswith("entry 0: foreign manifest")
    assert audit(file_of(stolen)).problems[0].startswith("entry 0: foreign manifest")


def test_a_newer_manifest_may_change_trainers_but_not_the_bound() -> None:
    newer = ManifestEntry(seal(OWNER, manifest(revision=2)).raw)
    assert audit(file_of([*GOOD[:2], newer, *GOOD[2:]]), RUN).ok
    assert "old manifest" in problem_of([*GOOD[:2], MANIFEST, *GOOD[2:]])
    without = ManifestEntry(seal(OWNER, manifest(revision=2, trainers=(STRANGER_ID,))).raw)
    assert "not a trainer" in problem_of([*GOOD[:2], without, *GOOD[2:]])
    wider = ManifestEntry(seal(OWNER, manifest(revision=2, max_lag=9)).raw)
    assert problem_of([*GOOD[:2], wider, *GOOD[2:]]).startswith("entry 2: bound changed: 2 to 9")


def test_the_wrapper_has_one_encoding() -> None:
    body = msgspec.msgpack.encode(GOOD[-1])
    longer = b"\xdc\x00\x02" + body[1:]  # the same array with a 16-bit length
    raw = MAGIC + b"".join(map(frame, GOOD[:-1])) + struct.pack("<I", len(longer)) + longer
    assert "not in its one encoding" in audit(raw).problems[0]


def test_entries_over_the_limit_are_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cut off" in audit(MAGIC + b"\xff\xff\xff\xff").problems[0]
    monkeypatch.setattr(ledger, "ENTRY_BYTES_MAX", 100)
    with pytest.raises(LocalFault, match="publish more often"):
        frame(GOOD[2])


def test_s7_an_audit_never_raises() -> None:
    rng = random.Random(5)
    for _ in range(300):
        body = rng.randbytes(rng.randint(0, 60))
        for raw in (body, MAGIC + body, MAGIC + struct.pack("<I", len(body)) + body):
            assert not audit(raw).ok or raw == MAGIC
    bomb = b"\x91" * 200_000
    assert "malformed entry" in audit(MAGIC + struct.pack("<I", len(bomb)) + bomb).problems[0]
    with pytest.raises(PeerFault):
        list(read_entries(b""))
