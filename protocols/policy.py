"""The policy chain: which versions exist, in which order, said by whom (DESIGN section 6).

    genesis(run) <- v0 <- v1 <- v3 ...       each announcement names the hash of its parent

Versions only rise, and may skip. A chain holds what one peer has verified; two honest chains of a run
are prefixes of each other. Two valid announcements by one trainer of one version, or with one parent (a
fork that skips the version), are equivocation: both are refused, the evidence is kept, and nothing more is
taken from that trainer. The owner ends that with a manifest that names another trainer key.
"""

import bisect
import hashlib
from dataclasses import dataclass

from protocols import PROTOCOL
from protocols.envelopes import Sealed, content_hash
from protocols.faults import PeerFault
from protocols.manifest import Manifest
from protocols.messages import Announcement, RolloutGroup, RunEnd


def genesis(run: str) -> bytes:
    """The parent of a run's first announcement; 32 bytes."""
    return hashlib.sha256(f"{PROTOCOL}/genesis\0{run}".encode()).digest()


@dataclass(frozen=True, slots=True)
class Extended:
    """The chain has a new head."""


@dataclass(frozen=True, slots=True)
class Known:
    """Nothing new: the same announcement, or one from before the head that does not conflict."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Its parent is unknown: ask somebody for the announcements from `first` on.

    If their answer leaves a gap again, the two chains differ further back: ask the same peer from 0 on.
    """

    first: int


@dataclass(frozen=True, slots=True)
class Equivocation:
    """One trainer, two contents for one version or for one parent: both envelopes prove it."""

    trainer: str
    version: int
    """The disputed version that this chain held."""
    first: bytes
    second: bytes


Outcome = Extended | Known | Gap | Equivocation


class Chain:
    """The verified announcements of one run, oldest first."""

    def __init__(self, manifest: Manifest) -> None:
        self.run = manifest.run
        self.manifest = manifest
        self.entries: list[Sealed[Announcement]] = []
        self.equivocations: dict[str, Equivocation] = {}
        self.end: Sealed[RunEnd] | None = None
        self._hashes: list[bytes] = []
        self._index: dict[int, int] = {}  # version -> position
        self._child: dict[bytes, int] = {}  # hash of the parent -> position

    @property
    def head(self) -> Sealed[Announcement] | None:
        """The newest announcement, if there is one."""
        return self.entries[-1] if self.entries else None

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return self.entries[-1].message.version if self.entries else -1

    @property
    def head_hash(self) -> bytes:
        """Hash of the newest announcement: the parent of the next one."""
        return self._hashes[-1] if self._hashes else genesis(self.run)

    def update_manifest(self, manifest: Manifest) -> None:
        """Go on under a newer revision of the manifest."""
        self.manifest = manifest

    def get(self, version: int) -> Sealed[Announcement] | None:
        """The announcement of a version that the chain holds."""
        at = self._index.get(version)
        return self.entries[at] if at is not None else None

    def since(self, first: int, limit: int) -> list[Sealed[Announcement]]:
        """At most `limit` announcements from version `first` on, oldest first."""
        start = bisect.bisect_left(self.entries, first, key=lambda entry: entry.message.version)
        return self.entries[start : start + limit]

    def check_authorship(self, group: RolloutGroup) -> None:
        """Raises PeerFault unless the group's versions exist here and its weights are those of the newest one.

        A producer that relabels old rollouts as new would get around the staleness bound; the digest of what it
        had loaded must then be forged too, and no longer be checked by its own engine.
        """
        newest = self.get(group.newest_version)
        if newest is None or group.oldest_version not in self._index:
            raise PeerFault("unknown version", f"v{group.oldest_version} to v{group.newest_version}")
        if group.adapter != newest.message.adapter.digest:
            raise PeerFault("wrong adapter", f"v{group.newest_version}")

    def extend(self, sealed: Sealed[Announcement]) -> Outcome:
        """Take one more announcement, in any order. Raises PeerFault for one that can never be valid here."""
        said = sealed.message
        self._check_origin(sealed.sender, said.run)
        if said.trained_on.max_lag > said.bound or said.bound != self.manifest.max_lag:
            raise PeerFault("bound broken", f"v{said.version} trained at lag {said.trained_on.max_lag}")
        known = self.get(said.version) or self._sibling(said)
        if known is not None and content_hash(known) == content_hash(sealed):
            return Known()
        if sealed.sender in self.equivocations:
            raise PeerFault("equivocating trainer", sealed.sender)
        if known is not None:
            return self._dispute(known, sealed)
        if said.version <= self.version:  # a version we skipped, whose parent is none of ours
            raise PeerFault("not on the chain", f"v{said.version}")
        if self.end is not None:
            raise PeerFault("after the end", f"v{said.version}")
        if said.parent != self.head_hash:
            return Gap(self.version + 1)
        self._append(sealed)
        return Extended()

    def finish(self, sealed: Sealed[RunEnd]) -> bool:
        """Take the end of the run: True when this chain is complete, False when it must catch up first.

        Raises PeerFault for an end that does not fit this chain.
        """
        self._check_origin(sealed.sender, sealed.message.run)
        if sealed.sender in self.equivocations:
            raise PeerFault("equivocating trainer", sealed.sender)
        if sealed.message.version > self.version and self.end is None:
            return False
        if sealed.message.version != self.version or sealed.message.head != self.head_hash:
            raise PeerFault("not on the chain", "end of the run")
        self.end = sealed
        return True

    def _check_origin(self, sender: str, run: str) -> None:
        if run != self.run:
            raise PeerFault("foreign run", run)
        if sender not in self.manifest.trainers:
            raise PeerFault("not a trainer", sender)

    def _append(self, sealed: Sealed[Announcement]) -> None:
        self._index[sealed.message.version] = self._child[sealed.message.parent] = len(self.entries)
        self.entries.append(sealed)
        self._hashes.append(content_hash(sealed))

    def _sibling(self, said: Announcement) -> Sealed[Announcement] | None:
        """The entry with the same parent, if `said` could stand in its place."""
        at = self._child.get(said.parent)
        if at is None or (at > 0 and said.version <= self.entries[at - 1].message.version):
            return None
        return self.entries[at]

    def _dispute(self, known: Sealed[Announcement], sealed: Sealed[Announcement]) -> Equivocation:
        if known.sender != sealed.sender:
            raise PeerFault("not on the chain", f"v{sealed.message.version} of another trainer")
        proof = Equivocation(sealed.sender, known.message.version, known.raw, sealed.raw)
        self.equivocations[sealed.sender] = proof
        if known is self.head:  # both are refused; older versions have descendants that peers already hold
            self.entries.pop()
            self._hashes.pop()
            del self._index[known.message.version], self._child[known.message.parent]
            self.end = None  # it named the head that is gone
        return proof
