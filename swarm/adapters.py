"""One peer's adapters: from what the chain announces to tensors in memory, checked.

    head --cheapest--> hops --Exchange.fetch--> blobs --decode--> tensors --digest--> Rebuilt (the last two)

The way is planned anew whenever the head has moved (protocols/paths.py), between two blobs: a download under way is
never given up for a newer version. Where versions come quicker than one can be downloaded, a peer that always left
for the newest would arrive nowhere. Every version on the way must have its announced digest; one that has not is the
trainer's doing, as it signed both, and another way is looked for.
"""

import asyncio
import errno
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocols.adapters import Adapter, adapter_digest, encode_adapter
from protocols.envelopes import Sealed
from protocols.faults import PeerFault, TransportFault
from protocols.means import running_mean
from protocols.messages import Announcement, BlobRef
from protocols.paths import Hop, cheapest, follow, kept
from protocols.policy import Chain
from protocols.transfer import blob_ref
from swarm.downloads import Progress
from swarm.exchange import Exchange, Fetched

log = logging.getLogger(__name__)

VERSIONS_KEPT = 4  # on disk for peers that are a little late: a refresh seldom takes longer than so many steps
FULL = (errno.ENOSPC, errno.EDQUOT)  # these pass when something is removed
# Twice the largest adapter (ADAPTER_BYTES_MAX): its keyframe and the deltas since, which never add up to more than
# one keyframe, have room; common adapters, of 10 to 100 MB, are far from it.
KEPT_BYTES_MAX = 3 * 1024 * 1024 * 1024
IN_MEMORY = 2  # a head that is revoked (equivocation) leaves the version before it as a parent
# A manifest allows at most 10,000 versions from keyframe to keyframe, so a way to the head begins in these.
ENTRIES_MAX = 10_001
RATE_BYTES_MIN = 256 * 1024  # what is smaller measures a round trip, not a link
RATE_GAIN = 0.2  # the running mean of about five downloads


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A version in memory. Its digest is the announced one."""

    version: int
    digest: bytes
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Obtained:
    """A version, and what it took to get there."""

    rebuilt: Rebuilt
    hops: tuple[Hop, ...]
    """None for a version that was in memory already."""
    received: Counter[str]
    """Bytes downloaded, by source."""
    fetch_s: float
    """Waiting for blobs, from disk or network."""
    verify_s: float
    """Decoding them and comparing digests."""

    def after(self, earlier: "Obtained") -> "Obtained":
        """The same version, and what it took from before an earlier pass."""
        return Obtained(
            self.rebuilt,
            earlier.hops + self.hops,
            earlier.received + self.received,
            earlier.fetch_s + self.fetch_s,
            earlier.verify_s + self.verify_s,
        )


@dataclass(frozen=True, slots=True)
class Underway:
    """A pass towards a version, as it stands; or the last one, while the next is waited for."""

    version: int
    bytes: int
    """To download, all blobs of the pass together."""
    received_bytes: int
    bytes_per_s: float
    sources: int
    since_s: float
    """On the monotonic clock: when the first of the passes began that ended, one after the other, for want of a
    source; this one if the last did not."""
    trouble: str
    """What went wrong last with a source, if anything did."""

    @property
    def running_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.since_s


class NoRoom(OSError):
    """The disk is full: `needed_bytes` do not fit beside what has to stay; `free_bytes` None: not known."""

    def __init__(self, error: OSError, folder: str, needed_bytes: int, free_bytes: int | None) -> None:
        super().__init__(error.errno, error.strerror, folder)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    @property
    def told(self) -> str:
        """For people: what is wrong where, and how much room it takes."""
        free = "an unknown number" if self.free_bytes is None else f"{self.free_bytes:,}"
        return f"{self.strerror}: {self.filename} needs {self.needed_bytes:,} bytes and has {free} free"


class _Pass:
    """One call of `obtain`: what it has done so far."""

    def __init__(self, stuck: Underway | None) -> None:
        """`stuck`: where the last one was, if it ended for want of a source."""
        self.hops: list[Hop] = []
        self.received: Counter[str] = Counter()
        self.fetch_s = 0.0
        self.verify_s = 0.0
        self.stuck = stuck
        """How far it was when nobody had a blob."""
        self.since_s = stuck.since_s if stuck is not None else time.monotonic()
        self.target: Sealed[Announcement] | None = None
        """Where the plan leads."""
        self.planned: list[Hop] = []
        """What is left to do, the blob under way first."""
        self.to_download = 0
        """Bytes of that, as planned."""
        self.arriving: Progress | None = None
        """Of the blob that was last asked for."""
        self.gone: dict[bytes, tuple[str, str]] = {}
        """Code and detail of blobs that nobody had; asked for again in the next pass."""
        self.ways: dict[bytes, int] = {}
        """Sizes of all blobs that were planned on ways to `target`, those of the first plan first."""


class Adapters:
    """See the module's docstring. One `obtain` or `tidy` at a time."""

    def __init__(self, exchange: Exchange, chain: Chain, sources: Callable[[int], Sequence[str]]) -> None:
        """`sources`: whom to ask for a version; called again and again during a download."""
        self.exchange = exchange
        self.chain = chain
        self.sources = sources
        self.down_bytes_per_s: float | None = None
        """Running mean over downloads; None before there was one worth measuring."""
        self.odd_keyframes = 0
        """Keyframes whose announced bytes are not those of the version, though its digest is right."""
        self._rebuilt: list[Rebuilt] = []
        self._refused: dict[bytes, tuple[str, str]] = {}
        """Reason and detail of blobs that do not make what was announced; of those that the chain still names."""
        self._keyframe: tuple[BlobRef, Adapter] | None = None
        """The newest announced keyframe that was rebuilt from deltas and is not on disk yet."""
        self._pass: _Pass | None = None
        self._failed: _Pass | None = None
        """The last pass, if what it had planned may do another time."""

    @property
    def newest(self) -> Rebuilt | None:
        """The version that was obtained last."""
        return self._rebuilt[-1] if self._rebuilt else None

    def at(self, sealed: Sealed[Announcement]) -> bool:
        """This version is the one that was obtained last."""
        said, newest = sealed.message, self.newest
        return newest is not None and (newest.version, newest.digest) == (said.version, said.adapter.digest)

    async def obtain(self, wanted: Sealed[Announcement]) -> Obtained:
        """The wanted version, or a newer one if the way to the head leads past it.

        Raises TransportFault 'no source' when a blob cannot be had now, PeerFault when what was announced cannot be
        rebuilt, NoRoom when the disk is full even without everything that can be done without, OSError when the disk
        refuses for another reason.
        """
        self._pass = work = _Pass(self._failed.stuck if self._failed is not None else None)
        self._failed = None
        try:
            held = await self._follow(work, wanted.message.version)
        except (TransportFault, OSError):
            self._failed = work
            raise
        finally:
            self._pass = None
        self._rebuilt = [*(each for each in self._rebuilt if each is not held), held]
        return Obtained(held, tuple(work.hops), work.received, work.fetch_s, work.verify_s)

    async def tidy(self) -> None:
        """After a pass, whatever came of it: drop what nobody needs any more, store the keyframe that others may want.

        What a pass that failed had planned with stays: the next one goes on from there. Neither is a must, so what
        the disk says against it is only logged.
        """
        roots = kept(self._entries(), VERSIONS_KEPT, KEPT_BYTES_MAX) | self._unfinished_roots()
        keyframe, self._keyframe = self._keyframe, None
        try:
            await asyncio.to_thread(self.exchange.blobs.keep_only, roots)
            if keyframe is not None and keyframe[0].root in roots:
                await asyncio.to_thread(self._store_keyframe, *keyframe)
        except OSError as error:
            log.info("not tidied: %s", error)

    def underway(self) -> Underway | None:
        """How far the pass is; between two passes, where the last one got stuck. None: nothing is being downloaded."""
        work = self._pass or self._failed
        if work is None:
            return None
        download = self.exchange.downloads.get(work.planned[0].blob.root) if work.planned else None
        return self._stands(work, download) if download is not None else work.stuck

    def _stands(self, work: _Pass, download: Progress) -> Underway:
        done = work.received.total()
        return Underway(
            version=work.planned[-1].version,
            bytes=done + work.to_download,
            received_bytes=done + download.received_bytes,
            bytes_per_s=download.bytes_per_s,
            sources=download.sources,
            since_s=work.since_s,
            trouble=download.trouble or (work.stuck.trouble if work.stuck is not None else ""),
        )

    # ------------------------------------------------------------------ the way

    def _entries(self) -> list[Announcement]:
        return [entry.message for entry in self.chain.entries[-ENTRIES_MAX:]]

    async def _follow(self, work: _Pass, wanted: int) -> Rebuilt:
        """Hop after hop to the wanted version or past it. Raises what `obtain` does."""
        while True:
            head = self.chain.head
            if head is None:
                raise TransportFault("no source", "the only version was revoked")
            held = self._held(head.message.version)
            if held is not None and held.version >= min(wanted, head.message.version):
                return held
            if not work.planned or work.target is not head:
                self._plan(work, head, held)
            await self._go(work, held)

    def _held(self, newest: int) -> Rebuilt | None:
        """The newest version in memory that the chain still holds, up to `newest`."""
        for rebuilt in reversed(self._rebuilt):
            known = self.chain.get(rebuilt.version)
            if known is not None and known.message.adapter.digest == rebuilt.digest and rebuilt.version <= newest:
                return rebuilt
        return None

    def _on_disk(self, root: bytes) -> bool:
        return self.exchange.blobs.path(root).is_file()  # if it is damaged, the download finds out

    def _plan(self, work: _Pass, head: Sealed[Announcement], held: Rebuilt | None) -> None:
        target = head.message.version
        without = self._refused.keys() | work.gone.keys()
        hops = cheapest(self._entries(), target, held.version if held is not None else None, self._on_disk, without)
        if hops is None and work.gone:
            raise TransportFault(*next(reversed(work.gone.values())))
        if hops is None and self._refused:
            raise PeerFault(*next(reversed(self._refused.values())))
        if hops is None:
            raise PeerFault("wrong adapter", f"no way to v{target} is known")
        if work.target is not head:
            work.ways.clear()
        work.target, work.planned = head, hops
        for hop in hops:
            work.ways.setdefault(hop.blob.root, hop.blob.size)
        work.to_download = sum(hop.blob.size for hop in hops if not self._on_disk(hop.blob.root))

    async def _go(self, work: _Pass, held: Rebuilt | None) -> None:
        """One hop. A blob that cannot be had, or is not what was announced, is left out of the next plan."""
        hop = work.planned[0]
        try:
            fetched = await self._fetch(work, hop)
            rebuilt = await self._rebuild(work, hop, fetched.blob, held)
        except TransportFault as fault:
            log.info("v%d: %s", hop.version, fault)
            work.gone[hop.blob.root] = (fault.code, fault.detail)
            arriving = work.arriving or Progress(hop.blob.size)
            trouble = arriving.trouble or str(fault)
            work.stuck = replace(self._stands(work, arriving), bytes_per_s=0.0, sources=0, trouble=trouble)
            work.planned = []
            return
        except PeerFault as fault:
            log.warning("v%d, %s: %s", hop.version, hop.codec or "keyframe", fault)
            self._refuse(hop.blob.root, fault)
            work.planned = []
            return
        work.stuck = None
        work.hops.append(hop)
        work.planned = work.planned[1:]
        self._rebuilt = [*self._rebuilt, rebuilt][-IN_MEMORY:]

    def _refuse(self, root: bytes, fault: PeerFault) -> None:
        """Never again. What it says is kept and not the fault itself, whose traceback holds the blob in memory."""
        self._refused[root] = (fault.reason, fault.detail)
        named = {ref.root for entry in self._entries() for ref in _blobs(entry)}
        self._refused = {refused: why for refused, why in self._refused.items() if refused in named}

    async def _fetch(self, work: _Pass, hop: Hop) -> Fetched:
        started_s = time.monotonic()
        try:
            fetched = await self._fetch_with_room(work, hop)
        finally:
            took_s = time.monotonic() - started_s
            work.fetch_s += took_s
        num_bytes = sum(fetched.received.values())
        work.received.update(fetched.received)
        work.to_download = max(0, work.to_download - hop.blob.size) if num_bytes else work.to_download
        if num_bytes >= RATE_BYTES_MIN:
            self.down_bytes_per_s = running_mean(self.down_bytes_per_s, num_bytes / took_s, RATE_GAIN)
        return fetched

    async def _rebuild(self, work: _Pass, hop: Hop, blob: bytes, held: Rebuilt | None) -> Rebuilt:
        """Decode one blob, on a thread. Raises PeerFault."""
        known = self.chain.get(hop.version)
        if known is None:
            raise TransportFault("no source", f"v{hop.version} was revoked meanwhile")
        reference = known.message.adapter
        started_s = time.monotonic()
        adapter = await asyncio.to_thread(_decode, hop, blob, held, reference.digest)
        work.verify_s += time.monotonic() - started_s
        if hop.codec is not None and reference.keyframe is not None:
            self._keyframe = (reference.keyframe, adapter)
        return Rebuilt(hop.version, reference.digest, adapter)

    # ------------------------------------------------------------------ the disk

    def _unfinished_roots(self) -> set[bytes]:
        """As much as KEPT_BYTES_MAX allows of what the pass that failed had planned with."""
        roots: set[bytes] = set()
        num_bytes = 0
        for root, size in self._failed.ways.items() if self._failed is not None else ():
            num_bytes += size
            if num_bytes > KEPT_BYTES_MAX:
                break
            roots.add(root)
        return roots

    async def _fetch_with_room(self, work: _Pass, hop: Hop) -> Fetched:
        """One blob; if the disk is full, once more without everything that the way to the head can do without."""
        work.arriving = None

        def sources() -> Sequence[str]:
            work.arriving = self.exchange.downloads.get(hop.blob.root)
            return self.sources(hop.version)

        try:
            return await self.exchange.fetch(hop.blob, sources)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.info("v%d, %d bytes: %s; older versions go", hop.version, hop.blob.size, error)
        needed = kept(self._entries(), 0, 0) | {each.blob.root for each in work.planned}
        try:
            await asyncio.to_thread(self.exchange.blobs.keep_only, needed)
            return await self.exchange.fetch(hop.blob, sources)
        except OSError as error:
            if error.errno not in FULL:
                raise
            folder = self.exchange.blobs.folder
            raise NoRoom(error, str(folder), hop.blob.size, _free_bytes(str(folder))) from error

    def _store_keyframe(self, announced: BlobRef, adapter: Adapter) -> None:
        """Whoever comes later gets it from us too. Raises OSError."""
        blob = encode_adapter(adapter)
        if blob_ref(blob) != announced:
            self.odd_keyframes += 1
            log.warning("an announced keyframe is not the encoding of its version; not offered")
            return
        self.exchange.blobs.put(blob)


def _decode(hop: Hop, blob: bytes, held: Rebuilt | None, digest: bytes) -> Adapter:
    """Raises PeerFault unless the blob makes the version that was announced."""
    adapter = follow(hop, blob, held.adapter if held is not None else None, held.digest if held is not None else None)
    if adapter_digest(adapter) != digest:
        raise PeerFault("wrong adapter", f"v{hop.version} has not the announced digest")
    return adapter


def _blobs(said: Announcement) -> list[BlobRef]:
    """What a version can be made of."""
    delta = said.adapter.delta
    return [ref for ref in (said.adapter.keyframe, delta.blob if delta is not None else None) if ref is not None]


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
