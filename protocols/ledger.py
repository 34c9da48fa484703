"""The ledger: what a run announced and what each version was trained on, for anyone to audit offline.

    file  = "ECHOLEDGER1\\n" entry*
    entry = length: uint32 little-endian, then one MessagePack message:
        ManifestEntry  the manifest's envelope; the first entry, and again for each new revision
        VersionEntry   the announcement's envelope, and every group it consumed: digest, producer,
                       oldest version, steps done when it was consumed
        EndEntry       the envelope of the run's end

The signed announcement holds the count, the largest lag and the root over the consumed groups, and the
hash of the announcement before it. So no version can be changed, removed or swapped unnoticed; a cut at the
end shows as a missing end. Every lag is counted from a version that the ledger holds.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from protocols.directory import check_manifest
from protocols.envelopes import unseal
from protocols.faults import LocalFault, PeerFault
from protocols.manifest import Manifest
from protocols.messages import Announcement, Count, Digest, PeerId, RunEnd, TrainedOn, Version
from protocols.policy import Chain, Extended
from protocols.staleness import lag

MAGIC = b"ECHOLEDGER1\n"
ENTRY_BYTES_MAX = 64 * 1024 * 1024  # 670,000 groups a version, at 100 B each: ten of the largest batches


class Consumed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group that a version was trained on."""

    digest: Digest
    producer: PeerId
    oldest_version: Version
    step: Count
    """Optimizer steps done when it was consumed; its lag is step - oldest_version."""


class ManifestEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="manifest"):
    envelope: bytes


class VersionEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="version"):
    envelope: bytes
    consumed: tuple[Consumed, ...]


class EndEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="end"):
    envelope: bytes


Entry = ManifestEntry | VersionEntry | EndEntry

_entry_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def trained_on(consumed: tuple[Consumed, ...]) -> TrainedOn:
    """What an announcement says of the groups it consumed."""
    root = hashlib.sha256(b"echo-swarm/1/trained-on\0" + msgspec.msgpack.encode(consumed)).digest()
    largest = max((lag(group.step, group.oldest_version) for group in consumed), default=0)
    return TrainedOn(len(consumed), max(0, largest), root)


def frame(entry: Entry) -> bytes:
    """The bytes of one entry in the file. LocalFault when no reader would take it."""
    body = msgspec.msgpack.encode(entry)
    if len(body) > ENTRY_BYTES_MAX:
        raise LocalFault(f"ledger entry of {len(body)} bytes: publish more often")
    return struct.pack("<I", len(body)) + body


def read_entries(raw: bytes) -> Iterator[Entry]:
    """The entries of a ledger file, in order. Raises PeerFault at the first that is not one."""
    if not raw.startswith(MAGIC):
        raise PeerFault("not a ledger", "it does not begin with ECHOLEDGER1")
    at = len(MAGIC)
    while at < len(raw):
        if at + 4 > len(raw):
            raise PeerFault("cut off", f"at byte {at}")
        (length,) = struct.unpack_from("<I", raw, at)
        if length > ENTRY_BYTES_MAX or at + 4 + length > len(raw):
            raise PeerFault("cut off", f"entry of {length} bytes at byte {at}")
        body = raw[at + 4 : at + 4 + length]
        try:
            entry = _entry_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PeerFault("malformed entry", str(error)[:200]) from error
        if msgspec.msgpack.encode(entry) != body:  # the wrapper is not signed: only one encoding of it counts
            raise PeerFault("malformed entry", "not in its one encoding")
        yield entry
        at += 4 + length


@dataclass(slots=True)
class Audit:
    """What an audit found. `problems` names entries by their number, from 0."""

    run: str = ""
    entries: int = 0
    versions: int = 0
    groups: int = 0
    head: int = -1
    max_lag: int = 0
    """Largest lag of any consumed group."""
    bound: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    """Consumed groups by lag."""
    ended: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems


def audit(raw: bytes, run: str | None = None) -> Audit:
    """Verify a ledger: signatures, chain, roots, counts, exactly-once and the staleness bound. Never raises.

    `run` is the run id the reader expects; without it the ledger's own first manifest names the run.
    The audit stops at the first entry that is wrong: what stands behind it proves nothing.
    """
    result = Audit()
    auditor = _Auditor(result, run)
    try:
        for entry in read_entries(raw):
            auditor.take(entry)
            result.entries += 1
    except PeerFault as fault:
        result.problems.append(f"entry {result.entries}: {fault}")
        return result
    if auditor.chain is None:
        result.problems.append("entry 0: the ledger holds no manifest")
    return result


class _Auditor:
    def __init__(self, result: Audit, run: str | None) -> None:
        self.result = result
        self.run = run
        self.chain: Chain | None = None
        self.revision = -1
        self.digests: set[bytes] = set()

    def take(self, entry: Entry) -> None:
        """Raises PeerFault when the entry does not follow from those before it."""
        if self.result.ended:
            raise PeerFault("entry after the end of the run")
        match entry:
            case ManifestEntry():
                self._manifest(entry)
            case VersionEntry():
                self._version(entry)
            case EndEntry():
                self._end(entry)

    def _manifest(self, entry: ManifestEntry) -> None:
        sealed = check_manifest(entry.envelope, self.run or _claimed_run(entry.envelope))
        if sealed.message.revision <= self.revision:
            raise PeerFault("old manifest", f"revision {sealed.message.revision}")
        if self.chain is not None and sealed.message.max_lag != self.result.bound:
            raise PeerFault("bound changed", f"{self.result.bound} to {sealed.message.max_lag}")
        self.revision = sealed.message.revision
        self.run = self.result.run = sealed.message.run
        self.result.bound = sealed.message.max_lag
        if self.chain is None:
            self.chain = Chain(sealed.message)
        else:
            self.chain.update_manifest(sealed.message)

    def _version(self, entry: VersionEntry) -> None:
        chain = self._chain()
        sealed = unseal(entry.envelope, Announcement)
        said = sealed.message
        before = max(chain.version, 0)
        for group in entry.consumed:
            age = lag(group.step, group.oldest_version)
            if not 0 <= age <= said.bound:
                raise PeerFault(
                    "lag over the bound", f"v{said.version} consumed a group of lag {age}, bound {said.bound}"
                )
            if not before <= group.step < said.version:
                raise PeerFault("wrong step", f"v{said.version} consumed a group at step {group.step}")
            if chain.get(group.oldest_version) is None:
                raise PeerFault("unknown version", f"v{said.version} consumed a group of v{group.oldest_version}")
            if group.digest in self.digests:
                raise PeerFault("trained twice", group.digest.hex())
            self.digests.add(group.digest)
            self.result.histogram[age] = self.result.histogram.get(age, 0) + 1
            self.result.max_lag = max(self.result.max_lag, age)
        if trained_on(entry.consumed) != said.trained_on:
            raise PeerFault("wrong root", f"v{said.version}: the groups listed are not those that were signed")
        outcome = chain.extend(sealed)
        if not isinstance(outcome, Extended):
            raise PeerFault("broken chain", f"v{said.version} does not follow v{chain.version}")
        self.result.versions += 1
        self.result.groups += len(entry.consumed)
        self.result.head = said.version

    def _end(self, entry: EndEntry) -> None:
        if not self._chain().finish(unseal(entry.envelope, RunEnd)):
            raise PeerFault("broken chain", "the run ended at a version that is not here")
        self.result.ended = True

    def _chain(self) -> Chain:
        if self.chain is None:
            raise PeerFault("no manifest", "the first entry must be one")
        return self.chain


def _claimed_run(envelope: bytes) -> str:
    """The run that a manifest names; `check_manifest` then proves it against the key that signed it."""
    return unseal(envelope, Manifest).message.run
