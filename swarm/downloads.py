"""The asker's side of blob streams: one blob from many sources at once (rules: protocols/transfer.py).

    recruit --streams--> converse (one each) --chunks--> keep: check, write --> Arrived --> Schedule --> asks
                              ^--------------------------------------------------------------------------|

A source that lies is left for long, one that stalls for a moment; what was verified stays, on disk too, so the next
attempt asks only for the rest. While it arrives, the blob is served to others (swarm/uploads.py).
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import (
    BlobHave,
    BlobOffer,
    BlobOpen,
    BlobRef,
    ChunkAsk,
    ChunkHead,
    decode_blob_holder,
)
from protocols.transfer import (
    STALL_S,
    Action,
    Arrived,
    Ask,
    ChunkList,
    Event,
    Leave,
    Lost,
    Offered,
    Schedule,
    Ticked,
    from_bitmap,
    to_bitmap,
)
from swarm.blobs import BlobStore
from swarm.frames import BLOB_PROTOCOL, frame, read_bytes, read_frame, write
from swarm.host import Host
from swarm.tasks import run_loops
from swarm.uploads import Arriving

log = logging.getLogger(__name__)

SOURCES_MIN = 1  # besides one for each chunk
SOURCES_AT_ONCE = 10  # streams; with fewer than about 6 a chunk needs many hops through a large swarm
RECRUIT_S = 0.25  # between two looks for more sources; short beside a version on a fast link
TICK_S = 0.25  # how soon a stalled or late source is noticed
RATE_S = 1.0  # the rate shown is a running mean over about this
NO_PROGRESS_S = 30.0  # then all sources wait for one another; eight chunks at 1 Mbit/s take 17 s
LIED_S = 600.0  # how long a source that sent wrong bytes is asked last
FAILED_S = 15.0  # the same for one that stalled or closed: it may only have been busy
GONE_S = 0.25  # the same for one that has nothing: it gets it at the next moment, as all begin at the same time
OVERTAKEN_S = 1.0  # the same for one that was only slower
IDLE_FRAMES_MAX = 64  # offers in a row that tell us nothing: signs of life of more than two minutes
SHUNNED_MAX = 1024
ARRIVALS_MAX = 16  # chunks that wait to be hashed and written; then sources wait
CHECKED_AT_ONCE = 4  # chunks a call of a thread; one each would cost more than it saves


class Shunned:
    """Sources that failed lately, and until when they are asked last."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, source: str, for_s: float) -> None:
        """It failed just now."""
        self._until_s.pop(source, None)
        self._until_s[source] = time.monotonic() + for_s
        while len(self._until_s) > SHUNNED_MAX:
            del self._until_s[next(iter(self._until_s))]

    def __contains__(self, source: str) -> bool:
        return self._until_s.get(source, 0.0) > time.monotonic()


@dataclass(slots=True)
class Progress:
    """A download under way, as people see it."""

    size: int
    received_bytes: int = 0
    """Verified, those of an earlier attempt among them."""
    sources: int = 0
    """That are being asked right now."""
    bytes_per_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    trouble: str = ""
    """What went wrong last with a source, if anything did."""


@dataclass(slots=True, eq=False)
class _Talk:
    """A stream with one source."""

    task: "asyncio.Task[None]"
    writer: asyncio.StreamWriter | None = None
    offered: int = 0
    sparing: bool = False
    idle_frames: int = 0
    """Offers since the last one that told us anything."""


class Download:
    """One blob on its way here. `run` once; it ends when the blob is whole."""

    def __init__(
        self,
        host: Host,
        blobs: BlobStore,
        ref: BlobRef,
        sources: Callable[[], Sequence[str]],
        shunned: Shunned,
        refusals: Counter[str],
    ) -> None:
        """`sources` is asked again and again. Raises PeerFault 'blob too large'."""
        self.arriving = Arriving(ChunkList(ref))
        self.progress = Progress(ref.size)
        self.received: Counter[str] = Counter()
        """Verified bytes by source."""
        self.refusals = refusals
        """What sources sent and we did not take, by reason."""
        self.trouble: dict[str, str] = {}
        """What went wrong last with each source."""
        self._host, self._blobs, self._ref, self._sources, self._shunned = host, blobs, ref, sources, shunned
        self._chunks = self.arriving.chunks
        self._rng = random.Random(host.peer_id)  # two peers should not want the same chunks in the same order
        self._schedule: Schedule | None = None
        self._early: dict[str, Offered] = {}
        """Offers from before the hash list was known."""
        self._known = asyncio.Event()
        """The hash list is here."""
        self._talks: dict[str, _Talk] = {}
        self._tried: set[str] = set()
        self._arrivals: asyncio.Queue[tuple[str, int, bytes]] = asyncio.Queue(ARRIVALS_MAX)
        self._advanced_s = time.monotonic()
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Raises TransportFault 'no source' when there is nobody left to ask, OSError when the disk is full."""
        loops = {"recruit": self._recruit, "keep": self._keep, "tick": self._tick}
        try:
            await run_loops(loops, self._done)
            part = self.arriving.part
            assert part is not None
            await asyncio.to_thread(self._blobs.finish, part)
        except OSError:  # no source's: the disk's
            if self.arriving.part is not None:
                self.arriving.part.discard()
            raise
        finally:
            tasks = [talk.task for talk in self._talks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Put the file away, once nobody is served from it any more."""
        if self.arriving.part is not None:
            self.arriving.part.close()

    # ------------------------------------------------------------------ sources

    async def _recruit(self) -> None:
        while True:
            now_s = time.monotonic()
            candidates = [source for source in dict.fromkeys(self._sources()) if source not in self._talks]
            fresh = [source for source in candidates if source not in self._shunned]
            if not fresh and not self._talks:
                fresh = [source for source in candidates if source not in self._tried]  # better than nobody
            if not self._talks and not fresh:
                raise self._no_source("nobody left to ask")
            if now_s - self._advanced_s > NO_PROGRESS_S:
                for source in self._talks:  # others come first next time
                    self._failed(source, "sent nothing", FAILED_S)
                raise self._no_source(f"nothing came for {NO_PROGRESS_S:g} s")
            wanted = min(SOURCES_AT_ONCE, SOURCES_MIN + self._chunks.count)
            for source in fresh[: max(0, wanted - len(self._talks))]:
                self._tried.add(source)
                self._talks[source] = _Talk(asyncio.create_task(self._talk(source), name=f"blob from {short(source)}"))
            await asyncio.sleep(RECRUIT_S)

    def _no_source(self, why: str) -> TransportFault:
        trouble = "; ".join(f"{short(source)}: {text}" for source, text in self.trouble.items())
        return TransportFault("no source", f"blob {self._ref.root.hex()[:12]}: {why}; {trouble or 'no peer known'}")

    async def _talk(self, source: str) -> None:
        """One source until it ends; what went wrong says for how long it is shunned."""
        talk = self._talks[source]
        try:
            await self._converse(source, talk)
        except PeerFault as fault:
            self._lied(source, fault)
        except (TransportFault, OSError, asyncio.IncompleteReadError) as error:
            gone = isinstance(error, TransportFault) and error.code == "gone"
            why = "no answer" if isinstance(error, TimeoutError) else str(error) or "closed"
            self._failed(source, why, GONE_S if gone else FAILED_S)
        finally:
            if talk.writer is not None:
                talk.writer.close()
            del self._talks[source]
            self._handle(Lost(source))

    def _lied(self, source: str, fault: PeerFault) -> None:
        self.refusals[fault.reason] += 1
        self._failed(source, str(fault), LIED_S)
        log.warning("blob %s: %s sent %s", self._ref.root.hex()[:12], short(source), fault)

    def _failed(self, source: str, why: str, for_s: float) -> None:
        self._shunned.add(source, for_s)
        self.trouble[source] = why
        self.progress.trouble = f"{short(source)}: {why}"

    async def _converse(self, source: str, talk: _Talk) -> None:
        async with asyncio.timeout(None) as limit:
            reader, talk.writer = await self._host.open_stream(source, BLOB_PROTOCOL, STALL_S)
            have = self._schedule.have if self._schedule is not None else 0
            opened = BlobOpen(self._ref.root, self._chunks.hashes is None, to_bitmap(have))
            write(talk.writer, frame(opened))
            limit.reschedule(asyncio.get_running_loop().time() + STALL_S)  # for the first offer
            while True:
                said = decode_blob_holder(await read_frame(reader))
                limit.reschedule(None)
                self._heard(source, False)
                match said:
                    case BlobOffer():
                        self._offered(source, talk, said)
                    case ChunkHead(index):
                        await self._receive(source, index, reader)

    def _offered(self, source: str, talk: _Talk, offer: BlobOffer) -> None:
        if not offer.found:
            raise TransportFault("gone", "has nothing of it")
        if offer.hashes and not self._known.is_set():
            self._chunks.take_hashes(offer.hashes)
            self._known.set()
        news = from_bitmap(offer.chunks, self._chunks.count) & ~talk.offered
        talk.idle_frames = 0 if news else talk.idle_frames + 1
        if talk.idle_frames > IDLE_FRAMES_MAX:
            raise PeerFault("too many messages")
        talk.sparing = offer.sparing
        if news:
            talk.offered |= news
            self._handle(Offered(source, talk.offered, offer.sparing))

    async def _receive(self, source: str, index: int, reader: asyncio.StreamReader) -> None:
        if self._schedule is None or not self._schedule.asked(source, index):
            raise PeerFault("wrong chunk", f"{index} was not asked for")
        data = await read_bytes(reader, self._chunks.size(index), lambda _: self._heard(source, True))
        await self._arrivals.put((source, index, data))

    def _heard(self, source: str, of_chunk: bool) -> None:
        if self._schedule is not None:
            self._schedule.heard(source, of_chunk, time.monotonic())

    # ------------------------------------------------------------------ chunks

    async def _keep(self) -> None:
        """Check and write what arrives, a few chunks a turn."""
        await self._open()
        while True:
            batch = [await self._arrivals.get()]
            while len(batch) < CHECKED_AT_ONCE and not self._arrivals.empty():
                batch.append(self._arrivals.get_nowait())
            faults = await asyncio.to_thread(self._write, batch)
            for (source, index, data), fault in zip(batch, faults, strict=True):
                if fault is not None:
                    self._lied(source, fault)
                    self._leave(source)
                else:
                    self._took(source, index, len(data))
            self._acknowledge({source for source, _, _ in batch})
            await self.arriving.tell()
            assert self._schedule is not None
            if self._schedule.done:
                self._done.set()

    async def _open(self) -> None:
        """Once the hash list is here, what an earlier attempt left can be checked, and chunks can be asked for."""
        if self._ref.size == 0:
            self._chunks.take_hashes(b"")
        else:
            await self._known.wait()
        part = await asyncio.to_thread(self._blobs.begin, self._chunks)
        self.arriving.part = part  # from here on `run` closes it
        await asyncio.to_thread(part.resume)
        self.progress.received_bytes = self._chunks.bytes_of(part.have)
        self._schedule = Schedule(self._chunks.count, part.have, self._rng)
        await self.arriving.tell()
        for offered in self._early.values():
            self._handle(offered)
        if self._schedule.done:
            self._done.set()

    def _write(self, batch: Sequence[tuple[str, int, bytes]]) -> list[PeerFault | None]:
        part = self.arriving.part
        assert part is not None
        faults: list[PeerFault | None] = []
        for _, index, data in batch:
            try:
                part.keep(index, data)
                faults.append(None)
            except PeerFault as fault:
                faults.append(fault)
        return faults

    def _took(self, source: str, index: int, size: int) -> None:
        assert self._schedule is not None
        assert self.arriving.part is not None
        self._advanced_s = time.monotonic()
        self._tried.clear()  # whoever failed meanwhile may be asked again when nobody else is left
        if not self._schedule.have >> index & 1:
            self.received[source] += size
            self.progress.received_bytes += size
        self._handle(Arrived(source, index))
        self.arriving.part.have = self._schedule.have

    def _acknowledge(self, senders: set[str]) -> None:
        """Tell what we have by now: who sent some of it may send the next, who spares itself need not offer it."""
        assert self._schedule is not None
        have = frame(BlobHave(to_bitmap(self._schedule.have)))
        for source, talk in self._talks.items():
            if talk.sparing or source in senders:
                _tell(talk, have)

    async def _tick(self) -> None:
        before, before_s = self.progress.received_bytes, time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Ticked())
            progress, now_s = self.progress, time.monotonic()
            share = min(1.0, (now_s - before_s) / RATE_S)
            rate = (progress.received_bytes - before) / (now_s - before_s)
            progress.bytes_per_s += share * (rate - progress.bytes_per_s)
            progress.sources = sum(1 for talk in self._talks.values() if talk.writer is not None)
            before, before_s = progress.received_bytes, now_s

    def _handle(self, event: Event) -> None:
        if self._schedule is None:
            match event:
                case Offered(source):
                    self._early[source] = event
                case Lost(source):
                    self._early.pop(source, None)
            return
        offered = self._schedule.offered
        for action in self._schedule.handle(event, time.monotonic()):
            self._do(action)
        if self._schedule.offered & ~offered:
            self._advanced_s = time.monotonic()

    def _do(self, action: Action) -> None:
        match action:
            case Ask(source, index):
                talk = self._talks.get(source)
                if talk is not None:
                    _tell(talk, frame(ChunkAsk(index)))
            case Leave(source, reason):
                self._failed(source, reason, OVERTAKEN_S if reason == "overtaken" else FAILED_S)
                self._leave(source)

    def _leave(self, source: str) -> None:
        talk = self._talks.get(source)
        if talk is not None:
            talk.task.cancel()


def _tell(talk: _Talk, raw: bytes) -> None:
    """That the stream is closed, its own task finds out."""
    if talk.writer is not None:
        with suppress(ConnectionResetError):
            write(talk.writer, raw)
