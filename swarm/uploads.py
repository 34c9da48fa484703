"""The holder's side of a blob stream: offers, and chunks as they are asked for (rules: protocols/transfer.py).

    asker  -> BlobOpen
    holder -> BlobOffer            at once, when there is more to offer, and as a sign of life while an ask waits
    asker  -> ChunkAsk, BlobHave
    holder -> ChunkHead, chunk     one ask after the other

A blob that is itself on its way here is served chunk by chunk as it comes.
"""

import asyncio
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from protocols.faults import PeerFault
from protocols.messages import BlobHave, BlobOffer, BlobOpen, ChunkAsk, ChunkHead, decode_blob_asker
from protocols.pacing import Pacing
from protocols.transfer import (
    IN_FLIGHT_MAX,
    SPARED_CHUNKS_MIN,
    STALL_S,
    ChunkList,
    Seeding,
    from_bitmap,
    num_chunks,
    to_bitmap,
)
from swarm.blobs import BlobStore, Part, read_chunk
from swarm.frames import frame, read_frame, write
from swarm.tasks import run_loops

UPLOADS_MAX = 32  # streams served at once
CHUNK_S = 60.0  # for one chunk to be taken: 4 KB/s
IDLE_S = 10.0  # without an ask, after which a stream may be closed to make room for another
ALIVE_S = STALL_S / 2  # between two signs of life while an ask waits
OFFER_GAP_S = 0.02  # chunks that come in a burst are offered together
TURN_S = 0.1  # how often whoever is next looks whether a chunk on the way is overdue
IDLE_FRAMES_MAX = 64  # messages in a row that tell us nothing; an honest asker sends none
SEEDINGS_MAX = 64  # blobs whose offers are remembered: the versions that peers may still ask for


@dataclass(frozen=True, slots=True)
class Holding:
    """What we have of a blob at this moment."""

    count: int
    chunks: int
    hashes: bytes
    """Empty as long as we do not know them ourselves."""


@dataclass(slots=True)
class Arriving:
    """A blob on its way here, as the uploads see it."""

    chunks: ChunkList
    part: Part | None = None
    """Once the hash list is known."""
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def tell(self) -> None:
        """There is more of it."""
        async with self.grown:
            self.grown.notify_all()


@dataclass(slots=True, eq=False)
class _Upload:
    """One stream."""

    peer_id: str
    key: str
    """Its name among all streams."""
    writer: asyncio.StreamWriter
    root: bytes = b""
    hashes_due: bool = False
    asks: deque[int] = field(default_factory=deque)
    asked: int = 0
    """Chunks that were asked for, ever."""
    has: int = 0
    """Chunks that the asker said it has."""
    idle_frames: int = 0
    """Messages since the last one that told us anything."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    offered: bytes | None = None
    offered_s: float = 0.0
    asked_s: float = field(default_factory=time.monotonic)


class Uploads:
    """Serves the blobs of one peer, and the parts that are here of those on their way."""

    def __init__(self, blobs: BlobStore, arriving: Mapping[bytes, Arriving]) -> None:
        self.blobs = blobs
        self.arriving = arriving
        self.sparing = False
        """Offer each chunk once before any is repeated, as long as others can pass it on."""
        self.sent_bytes = 0
        self._streams: set[_Upload] = set()
        self._serial = itertools.count()
        self._pacing = Pacing()
        self._arrived = asyncio.Event()
        """An asker has got a chunk, or went."""
        self._rng = random.Random(0)  # which chunk goes first is nobody's secret
        self._seedings: dict[bytes, Seeding] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        """One stream, until the asker closes it. Raises PeerFault."""
        upload = _Upload(peer_id, f"{peer_id}/{next(self._serial)}", writer)
        self._make_room()
        self._streams.add(upload)
        try:
            async with asyncio.timeout(STALL_S):
                opened = decode_blob_asker(await read_frame(reader))
            if not isinstance(opened, BlobOpen):
                raise PeerFault("malformed blob request", "not opened")
            upload.root, upload.hashes_due = opened.root, opened.hashes
            self._replace_older(upload)
            with self.blobs.in_use(opened.root):
                await self._converse(upload, opened, reader)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            return  # the asker went, or the blob did: it asks somebody else
        finally:
            self._streams.discard(upload)

    def _make_room(self) -> None:
        """Raises PeerFault when every stream is busy."""
        if len(self._streams) < UPLOADS_MAX:
            return
        idlest = min(self._streams, key=lambda each: each.asked_s)
        if time.monotonic() - idlest.asked_s < IDLE_S:
            raise PeerFault("too many uploads")
        self._end(idlest)

    def _replace_older(self, upload: _Upload) -> None:
        """One stream a peer and blob: an asker that comes again has left the one before."""
        for other in list(self._streams):
            if other is not upload and (other.peer_id, other.root) == (upload.peer_id, upload.root):
                self._end(other)

    def _end(self, upload: _Upload) -> None:
        self._streams.discard(upload)
        upload.writer.transport.abort()  # closing would wait until the asker has read what was written

    async def _converse(self, upload: _Upload, opened: BlobOpen, reader: asyncio.StreamReader) -> None:
        await asyncio.to_thread(self.blobs.info, upload.root)  # may read the whole file; from then on it is known
        holding = self._holding(upload.root)
        if holding is None:
            write(upload.writer, frame(BlobOffer(False)))
            return
        spares = self.sparing and holding.count >= SPARED_CHUNKS_MIN
        seeding = self._seeding(upload.root, holding) if spares else None
        upload.has = from_bitmap(opened.have, holding.count)
        if seeding is not None:
            seeding.joined(upload.key, upload.has)
        done = asyncio.Event()

        async def talk() -> None:
            await self._talk(upload, seeding)
            done.set()

        loops = {
            "hear": lambda: self._hear(upload, seeding, holding.count, reader),
            "talk": talk,
            "watch": lambda: self._watch(upload),
            "sign of life": lambda: self._show_life(upload, seeding),
        }
        try:
            await run_loops(loops, done)
        finally:
            self._pacing.left(upload.peer_id, upload.key)
            self._arrived.set()
            if seeding is not None:
                seeding.left(upload.key)
                self._stir(upload.root)

    async def _hear(self, upload: _Upload, seeding: Seeding | None, count: int, reader: asyncio.StreamReader) -> None:
        while True:
            self._heard(decode_blob_asker(await read_frame(reader)), upload, seeding, count)

    def _heard(
        self, said: BlobOpen | ChunkAsk | BlobHave, upload: _Upload, seeding: Seeding | None, count: int
    ) -> None:
        match said:
            case ChunkAsk(index):
                offered = from_bitmap(upload.offered or b"", count) & ~upload.asked
                if not offered >> index & 1:  # or asked for before: it was sent, or will be
                    raise PeerFault("chunk not offered", f"{index} of {count}")
                if len(upload.asks) >= IN_FLIGHT_MAX:
                    raise PeerFault("too many asks")
                upload.asked_s = time.monotonic()
                upload.asked |= 1 << index
                upload.idle_frames = 0
                upload.asks.append(index)
                if seeding is not None:
                    seeding.asked(upload.key, index, upload.asked_s)
                upload.news.set()
            case BlobHave(chunks):
                news = from_bitmap(chunks, count) & ~upload.has
                upload.idle_frames = 0 if news else upload.idle_frames + 1
                if upload.idle_frames > IDLE_FRAMES_MAX:
                    raise PeerFault("too many messages")
                if news:
                    upload.has |= news
                    self._acknowledged(upload, seeding, upload.has)
            case BlobOpen():
                raise PeerFault("malformed blob request", "opened twice")

    async def _watch(self, upload: _Upload) -> None:
        """Wake the stream when there is more of a blob that is still coming."""
        while (arriving := self.arriving.get(upload.root)) is not None:
            async with arriving.grown:
                await arriving.grown.wait()
            upload.news.set()

    async def _talk(self, upload: _Upload, seeding: Seeding | None) -> None:
        while True:
            upload.news.clear()
            if not self._offer(upload, seeding):
                return
            if upload.asks:
                await self._send(upload, upload.asks[0], seeding)
                upload.asks.popleft()
                continue
            await upload.writer.drain()
            try:
                async with asyncio.timeout(self._until_more_s(seeding)):
                    await upload.news.wait()
            except TimeoutError:
                continue
            gap_s = upload.offered_s + OFFER_GAP_S - time.monotonic()
            if not upload.asks and gap_s > 0:
                await asyncio.sleep(gap_s)

    def _until_more_s(self, seeding: Seeding | None) -> float | None:
        """Seconds until time alone lets us offer more."""
        if seeding is None or math.isinf(wakes_s := seeding.wakes_s()):
            return None
        return max(OFFER_GAP_S, wakes_s - time.monotonic())

    def _offer(self, upload: _Upload, seeding: Seeding | None, again: bool = False) -> bool:
        """Say what we offer, if it is news, or `again`. False: the blob is gone."""
        now_s = time.monotonic()
        holding = self._holding(upload.root)
        if holding is None:
            write(upload.writer, frame(BlobOffer(False)))
            return False
        chunks = to_bitmap(holding.chunks if seeding is None else seeding.offer(upload.key, now_s))
        hashes = holding.hashes if upload.hashes_due else b""
        if chunks != upload.offered or hashes or again:
            upload.hashes_due = upload.hashes_due and not hashes
            upload.offered, upload.offered_s = chunks, now_s
            write(upload.writer, frame(BlobOffer(True, hashes, chunks, seeding is not None)))
        return True

    async def _send(self, upload: _Upload, index: int, seeding: Seeding | None) -> None:
        while not self._pacing.room(upload.peer_id, time.monotonic()):
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await self._arrived.wait()
        self._pacing.sent(upload.peer_id, upload.key, index, time.monotonic())
        data = self._read(upload.root, index)
        write(upload.writer, frame(ChunkHead(index)), data)
        self.sent_bytes += len(data)
        async with asyncio.timeout(CHUNK_S):
            await upload.writer.drain()

    def _acknowledged(self, upload: _Upload, seeding: Seeding | None, chunks: int) -> None:
        """The asker has these chunks by now, from whomever."""
        now_s = time.monotonic()
        for index in self._pacing.unacknowledged(upload.peer_id, upload.key):
            if chunks >> index & 1:
                took_s = self._pacing.acknowledged(upload.peer_id, upload.key, index, now_s)
                if seeding is not None and took_s is not None:
                    seeding.sent(upload.key, index, took_s, now_s)
                self._arrived.set()
        if seeding is not None:
            seeding.has(upload.key, chunks)
            self._stir(upload.root)

    async def _show_life(self, upload: _Upload, seeding: Seeding | None) -> None:
        """While an ask waits for its turn, the asker hears from us."""
        while True:
            await asyncio.sleep(ALIVE_S)
            if upload.asks:
                self._offer(upload, seeding, again=True)

    def _stir(self, root: bytes) -> None:
        """What one asker took or left free changes what the others may be offered."""
        for other in self._streams:
            if other.root == root:
                other.news.set()

    def _holding(self, root: bytes) -> Holding | None:
        arriving = self.arriving.get(root)
        if arriving is not None:
            part = arriving.part
            return Holding(arriving.chunks.count, part.have if part is not None else 0, arriving.chunks.hashes or b"")
        info = self.blobs.info(root)
        if info is None:
            return None
        count = num_chunks(info.size)
        return Holding(count, (1 << count) - 1, info.hashes)

    def _read(self, root: bytes, index: int) -> bytes:
        arriving = self.arriving.get(root)
        if arriving is not None and arriving.part is not None:
            return arriving.part.read(index)
        info = self.blobs.info(root)
        if info is None:
            raise FileNotFoundError(str(self.blobs.path(root)))
        return read_chunk(info.path, info.size, index)

    def _seeding(self, root: bytes, holding: Holding) -> Seeding:
        seeding = self._seedings.get(root)
        if seeding is None:
            while len(self._seedings) >= SEEDINGS_MAX:
                del self._seedings[next(iter(self._seedings))]
            seeding = self._seedings[root] = Seeding(holding.count, self._rng)
        return seeding
