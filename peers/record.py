"""The trainer's record: announcements, the ledger file, and where a restarted trainer goes on.

The database decides; the ledger file is its public copy, appended after each commit and rebuilt at start
if it differs. Nothing is announced before it is committed, and what was committed is announced again
after a crash, byte for byte: so no version ever has two contents.
"""

import logging
import os
from pathlib import Path

import msgspec

from protocols.envelopes import Sealed, seal, unseal
from protocols.ledger import MAGIC, Consumed, EndEntry, Entry, ManifestEntry, VersionEntry, frame, trained_on
from protocols.manifest import Manifest
from protocols.messages import AdapterRef, Announcement, RunEnd
from protocols.policy import Chain
from swarm.files import write_whole
from swarm.identity import Identity
from swarm.node import now_ms
from swarm.storage import TrainerStore

log = logging.getLogger(__name__)

LEDGER_NAME = "ledger.echo"
_END = "end"


class Record:
    """What this trainer has said, in order."""

    def __init__(self, identity: Identity, store: TrainerStore, home: Path) -> None:
        self.identity = identity
        self.store = store
        self.path = home / LEDGER_NAME
        self.pending: list[Consumed] = []
        """Groups trained since the last announcement."""

    async def manifest(self) -> Sealed[Manifest] | None:
        """The manifest of the last start, if there was one."""
        raw = await self.store.meta("manifest")
        return unseal(raw, Manifest) if raw is not None else None

    async def set_manifest(self, sealed: Sealed[Manifest], version: int) -> None:
        """A new revision, in force for what is announced after `version`."""
        await self.store.set_meta("manifest", sealed.raw)
        await self.store.set_meta(
            f"manifest/{sealed.message.revision}", version.to_bytes(8, "big", signed=True) + sealed.raw
        )

    async def restore(self, chain: Chain, steps: int) -> None:
        """Take up the groups that no version has named yet, and make the ledger file agree with the database."""
        rows = await self.store.consumed(max(chain.version, 0), steps)
        self.pending = [Consumed(*row) for row in rows]
        entries = await self._entries(chain)
        raw = MAGIC + b"".join(map(frame, entries))
        if not self.path.exists() or self.path.read_bytes() != raw:
            write_whole(self.path, raw)

    async def _entries(self, chain: Chain) -> list[Entry]:
        manifests = []
        for revision in range(chain.manifest.revision + 1):
            stored = await self.store.meta(f"manifest/{revision}")
            if stored is not None:
                manifests.append((int.from_bytes(stored[:8], "big", signed=True), ManifestEntry(stored[8:])))
        entries: list[Entry] = []
        before = 0
        for sealed in chain.entries:
            version = sealed.message.version
            while manifests and manifests[0][0] < version:
                entries.append(manifests.pop(0)[1])
            rows = await self.store.consumed(before, version)
            entries.append(VersionEntry(sealed.raw, tuple(Consumed(*row) for row in rows)))
            before = version
        entries += [entry for _, entry in manifests]
        end = await self.end()
        return [*entries, EndEntry(end.raw)] if end is not None else entries

    def announcement(
        self, chain: Chain, version: int, adapter: AdapterRef, consumed: list[Consumed], metrics: dict[str, float]
    ) -> Sealed[Announcement]:
        """Sign that `version` exists, trained on `consumed` since the head of the chain."""
        return seal(
            self.identity.key,
            Announcement(
                run=chain.run,
                version=version,
                parent=chain.head_hash,
                adapter=adapter,
                trained_on=trained_on(tuple(consumed)),
                bound=chain.manifest.max_lag,
                created_ms=now_ms(),
                metrics=metrics,
            ),
        )

    async def end(self) -> Sealed[RunEnd] | None:
        """The signed end of the run, if it has ended."""
        raw = await self.store.meta(_END)
        return unseal(raw, RunEnd) if raw is not None else None

    async def sign_end(self, chain: Chain) -> Sealed[RunEnd]:
        """End the run at the head of the chain: signed once, kept, and the last entry of the ledger."""
        sealed = await self.end()
        if sealed is None:
            sealed = seal(self.identity.key, RunEnd(chain.run, chain.version, chain.head_hash, now_ms()))
            await self.store.set_meta(_END, sealed.raw)
            self.append(EndEntry(sealed.raw))
        return sealed

    def append(self, entry: Entry) -> None:
        """Add a committed entry to the file, durably. Raises OSError."""
        with self.path.open("ab") as file:
            file.write(frame(entry))
            file.flush()
            os.fsync(file.fileno())


def same_manifest(old: Sealed[Manifest], new: Sealed[Manifest]) -> bool:
    """True when a manifest says nothing new: only when it was signed, and as which revision."""
    unified = msgspec.structs.replace(new.message, revision=old.message.revision, issued_ms=old.message.issued_ms)
    return unified == old.message
