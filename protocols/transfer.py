"""Blobs in chunks: content-addressed, each chunk checked on its own, any source for any chunk.

    root = SHA-256 over (size, hash of chunk 0, hash of chunk 1, ...)

A receiver knows the root from a signed announcement, gets the list of hashes from any source, checks the
list against the root, and each chunk against the list. So a source that lies is found at the first chunk,
and what other sources sent stays good. Two machines decide what moves:

    Schedule   the asker's: which chunk to ask whom for next. Rarest first among the sources at hand, several
               in flight at each, what is late is asked for elsewhere too.
    Seeding    that of a holder which spares its uplink (the trainer): offers each asker chunks that nobody
               has been offered, so that it sends each chunk once before it repeats one, and askers find the
               rest at each other (the "super-seeding" of BitTorrent clients).

Sets of chunks are integers, a bit a chunk: the set algebra of 6,144 chunks then costs less than a microsecond.
"""

import hashlib
import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from protocols.adapters import ADAPTER_BYTES_MAX
from protocols.faults import LocalFault, PeerFault
from protocols.means import running_mean
from protocols.messages import CHUNKS_MAX, BlobRef

CHUNK_BYTES = 256 * 1024
HASH_BYTES = 32
_DOMAIN = b"echo-swarm/1/blob\0"

IN_FLIGHT_MIN = 2  # at one source: while one chunk arrives, the next is asked for
IN_FLIGHT_MAX = 16  # 4 MiB: a round trip of 0.16 s at 200 Mbit/s; beyond that loopback is no faster
PIPELINE_S = 0.1  # that asks in flight cover besides a round trip: until the holder offers more, and jitter
IN_FLIGHT_TOTAL_MIN = 8  # before the rate is known, and on slow links: 16 s at 1 Mbit/s
IN_FLIGHT_TOTAL_S = 2.0  # of the measured rate: what is asked for is bound to a source, so not too far ahead
LATE_MIN_S = 1.0  # before a chunk is asked for at a second source
LATE_FACTOR = 3.0  # of the usual time from ask to arrival
LATE_UNKNOWN_S = 3.0  # while no chunk has arrived yet
STALL_S = 5.0  # no byte for this long from whoever was asked is a stall (FIELD: Parallax, Psyche)
WAIT_S = 20.0  # signs of life, but nothing of a chunk: its turn would have come; a liar may repeat them for ever
SLOW_S = 60.0  # for one chunk, whatever drips: 4 KB/s, slower than any link worth waiting for
GAIN = 0.2  # of the running means: about five chunks

SEEDED_MIN = 2  # chunks an asker is offered and has not taken: one arrives, one is asked for
SEEDED_GROWTH = 3  # chunks taken for each that it is offered more: who is quick needs more, who is slow keeps them
SEEDED_MAX = 64  # 16 MiB: more than a fast link empties in a round trip
PROMISE_S = 5.0  # an offer not taken for this long no longer keeps a chunk from others: 8 chunks at 3.4 Mbit/s
TURN_S = 10.0  # the same for one that was asked for and waits for its turn: 24 askers' chunks at 20 Mbit/s
SPARED_CHUNKS_MIN = 4  # blobs of fewer are not worth the wait: 1 MiB a peer


def num_chunks(size: int) -> int:
    """Chunks of a blob of `size` bytes; an empty blob has none."""
    return -(-size // CHUNK_BYTES)


def chunk_hashes(blob: bytes) -> bytes:
    """The hashes of a blob's chunks, 32 bytes each, concatenated."""
    view = memoryview(blob)
    starts = range(0, len(blob), CHUNK_BYTES)
    return b"".join(hashlib.sha256(view[at : at + CHUNK_BYTES]).digest() for at in starts)


def root_of(size: int, hashes: bytes) -> bytes:
    """The name of a blob; 32 bytes."""
    return hashlib.sha256(_DOMAIN + size.to_bytes(8, "big") + hashes).digest()


def blob_ref(blob: bytes) -> BlobRef:
    """The reference that an announcement carries."""
    return BlobRef(root_of(len(blob), chunk_hashes(blob)), len(blob))


def to_bitmap(chunks: int) -> bytes:
    """A set of chunks as it travels; no longer than it must be."""
    return chunks.to_bytes((chunks.bit_length() + 7) // 8, "little")


def from_bitmap(bitmap: bytes, count: int) -> int:
    """The set of chunks in a bitmap, of those that a blob of `count` chunks has."""
    return int.from_bytes(bitmap, "little") & ((1 << count) - 1)


class ChunkList:
    """A blob's chunks by size and hash, once the list of hashes is known."""

    def __init__(self, ref: BlobRef) -> None:
        if ref.size > ADAPTER_BYTES_MAX:
            raise PeerFault("blob too large", f"{ref.size} bytes")
        self.ref = ref
        self.count = num_chunks(ref.size)
        assert self.count <= CHUNKS_MAX
        self.hashes: bytes | None = None

    @property
    def all(self) -> int:
        """The set of all chunks."""
        return (1 << self.count) - 1

    def size(self, index: int) -> int:
        """Bytes of chunk `index`; all are CHUNK_BYTES but the last."""
        return min(CHUNK_BYTES, self.ref.size - index * CHUNK_BYTES)

    def bytes_of(self, chunks: int) -> int:
        """Bytes of a set of chunks."""
        whole = chunks.bit_count() * CHUNK_BYTES
        last = self.count - 1
        return whole - (CHUNK_BYTES - self.size(last) if self.count and chunks >> last & 1 else 0)

    def take_hashes(self, hashes: bytes) -> None:
        """The list from a source. Raises PeerFault when it is not the list of this root."""
        if len(hashes) != HASH_BYTES * self.count or root_of(self.ref.size, hashes) != self.ref.root:
            raise PeerFault("wrong blob", "hash list")
        self.hashes = hashes

    def check(self, index: int, data: bytes | memoryview) -> None:
        """Raises PeerFault unless `data` is chunk `index`."""
        if self.hashes is None:
            raise LocalFault("chunk before its hash list")
        if len(data) != self.size(index):  # a list may be signed and still lie about the size
            raise PeerFault("wrong chunk", f"{len(data)} bytes")
        if hashlib.sha256(data).digest() != self.hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]:
            raise PeerFault("wrong chunk", f"{index} of {self.count}")


# ---------------------------------------------------------------------- the asker


@dataclass(frozen=True, slots=True)
class Offered:
    """A source offers all these chunks now. `sparing`: it is to be asked only for what others do not offer."""

    source: str
    chunks: int
    sparing: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk came from a source, and is what its hash says."""

    source: str
    index: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A source is gone, whatever the reason."""

    source: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; a few times a second, so that what is late is noticed."""


Event = Offered | Arrived | Lost | Ticked


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a source for a chunk."""

    source: str
    index: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the stream with a source, and why: `stalled`, `slow`, or `overtaken` by another one with the same chunk."""

    source: str
    reason: str


Action = Ask | Leave


@dataclass(slots=True)
class _Source:
    offered: int
    sparing: bool
    asked: dict[int, float] = field(default_factory=dict)
    """Chunks in flight, and when each was asked for; oldest first."""
    flying: int = 0
    """The same as a set."""
    last_s: float = -math.inf
    """When it last sent a chunk."""
    heard_s: float = -math.inf
    """When it last sent a byte."""
    moved_s: float = -math.inf
    """When it last sent a byte of a chunk."""
    chunk_s: float | None = None
    """Running mean of the time it takes for one."""
    trip_s: float = math.inf
    """Least time from an ask to the arrival."""

    @property
    def window(self) -> int:
        """Asks that cover a round trip. As long as more of them bring more, chunk_s falls, and the window grows."""
        if self.chunk_s is None:
            return IN_FLIGHT_MIN
        covered_s = self.trip_s + PIPELINE_S
        return min(IN_FLIGHT_MAX, max(IN_FLIGHT_MIN, 1 + math.ceil(covered_s / max(self.chunk_s, 1e-6))))

    def ask(self, index: int, now_s: float) -> None:
        """It is asked for a chunk."""
        self.asked[index] = now_s
        self.flying |= 1 << index

    def arrived(self, index: int, now_s: float) -> float | None:
        """It sent a chunk: seconds since it was asked, None if it was not."""
        asked_s = self.asked.pop(index, None)
        if asked_s is None:
            return None
        self.flying ^= 1 << index
        self.chunk_s = running_mean(self.chunk_s, now_s - max(asked_s, self.last_s), GAIN)
        self.trip_s = min(self.trip_s, now_s - asked_s)
        self.last_s = now_s
        return now_s - asked_s

    def late(self, before_s: float) -> int:
        """Chunks that it was asked for before then."""
        return _set(takewhile(lambda index: self.asked[index] < before_s, self.asked))

    def failing(self, now_s: float) -> str | None:
        """Why it is to be left, if it is."""
        if not self.asked:
            return None
        oldest_s = next(iter(self.asked.values()))
        if now_s - max(oldest_s, self.heard_s) > STALL_S or now_s - max(oldest_s, self.moved_s) > WAIT_S:
            return "stalled"
        return "slow" if now_s - max(oldest_s, self.last_s) > SLOW_S else None


class Schedule:
    """What to ask whom for, until all of `count` chunks are here."""

    def __init__(self, count: int, have: int, rng: random.Random) -> None:
        """`have`: chunks that are here already."""
        self.have = have
        self._all = (1 << count) - 1
        self._rng = rng
        self._sources: dict[str, _Source] = {}
        self._usual_s: float | None = None
        """Running mean of the time from an ask to the arrival."""

    @property
    def done(self) -> bool:
        """Every chunk is here."""
        return self.have == self._all

    @property
    def offered(self) -> int:
        """Missing chunks that some source offers."""
        return _union(source.offered for source in self._sources.values()) & ~self.have

    def asked(self, source: str, index: int) -> bool:
        """A source was asked for a chunk and has not sent it."""
        known = self._sources.get(source)
        return known is not None and index in known.asked

    def heard(self, source: str, of_chunk: bool, now_s: float) -> None:
        """A byte came from a source."""
        known = self._sources.get(source)
        if known is not None:
            known.heard_s = now_s
            if of_chunk:
                known.moved_s = now_s

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take what happened; what to do about it. A source that is to be left is forgotten already."""
        match event:
            case Offered(name, chunks, sparing):
                source = self._sources.setdefault(name, _Source(0, sparing))
                source.offered, source.sparing = chunks & self._all, sparing
                actions: list[Action] = []
            case Arrived(name, index):
                actions = self._arrived(name, index, now_s)
            case Lost(name):
                self._sources.pop(name, None)
                actions = []
            case Ticked():
                failing = {name: source.failing(now_s) for name, source in self._sources.items()}
                actions = [self._leave(name, reason) for name, reason in failing.items() if reason is not None]
        return actions + self._asks(now_s)

    def _arrived(self, name: str, index: int, now_s: float) -> list[Action]:
        source = self._sources.get(name)
        if source is not None and (took_s := source.arrived(index, now_s)) is not None:
            self._usual_s = running_mean(self._usual_s, took_s, GAIN)
        self.have |= 1 << index
        overtaken = [each for each, other in self._sources.items() if index in other.asked]
        return [self._leave(each, "overtaken") for each in overtaken]

    def _leave(self, source: str, reason: str) -> Leave:
        del self._sources[source]
        return Leave(source, reason)

    def _asks(self, now_s: float) -> list[Action]:
        """As many as may be in flight, those with the least to do first."""
        asks: list[Action] = []
        before_s = now_s - (LATE_UNKNOWN_S if self._usual_s is None else max(LATE_MIN_S, LATE_FACTOR * self._usual_s))
        late = {name: source.late(before_s).bit_count() for name, source in self._sources.items()}
        in_flight = sum(len(source.asked) for source in self._sources.values())
        room = self._total() - in_flight + sum(late.values())  # who is late keeps nothing from the others
        ready = {
            name: source
            for name, source in self._sources.items()
            if len(source.asked) < source.window and not late[name]
        }
        while room > 0 and ready:
            name = min(ready, key=lambda each: (ready[each].sparing, len(ready[each].asked)))
            source = ready[name]
            index = self._next(source, before_s)
            if index is not None:
                source.ask(index, now_s)
                asks.append(Ask(name, index))
                room -= 1
            if index is None or len(source.asked) >= source.window:
                del ready[name]
        return asks

    def _total(self) -> int:
        rate = sum(1 / max(source.chunk_s, 1e-6) for source in self._sources.values() if source.chunk_s is not None)
        return max(IN_FLIGHT_TOTAL_MIN, math.ceil(rate * IN_FLIGHT_TOTAL_S))

    def _next(self, source: _Source, before_s: float) -> int | None:
        """The rarest chunk to ask this source for; failing that, one that others were asked for only before then."""
        missing = source.offered & ~self.have
        wanted = missing & ~_union(each.flying for each in self._sources.values())
        others = [each for each in self._sources.values() if each is not source]
        if source.sparing and wanted:
            able = (each for each in others if not each.sparing and not each.late(before_s))
            wanted &= ~_union(each.offered for each in able)
        if wanted:
            return _by_lot(self._rarest(wanted), self._rng)
        late = missing & ~source.flying & _union(each.late(before_s) for each in others)
        late &= ~_union(each.flying & ~each.late(before_s) for each in others)
        return _by_lot(late, self._rng) if late else None

    def _rarest(self, wanted: int) -> int:
        """Those that the fewest sources offer."""
        planes: list[int] = []  # planes[k]: the chunks where bit k of the number of their sources is set
        for source in self._sources.values():
            carry = source.offered & wanted
            for k, plane in enumerate(planes):
                planes[k], carry = plane ^ carry, plane & carry
            if carry:
                planes.append(carry)
        for plane in reversed(planes):
            wanted = wanted & ~plane or wanted
        return wanted


# ---------------------------------------------------------------------- the holder


@dataclass(slots=True)
class _Asker:
    has: int
    offered: int = 0
    promised: int = 0
    """Offered and not taken."""
    asked: int = 0
    """Asked for."""
    taken: int = 0
    """How many chunks were sent to it."""
    idle: bool = False
    """It let a promise run out: what it is offered is kept from nobody."""


class Seeding:
    """The offers of a holder that spares its uplink, for one blob. Offers to an asker only grow."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._rng = rng
        self._askers: dict[str, _Asker] = {}
        self._sent = [(1 << count) - 1]
        """[n]: the chunks that were sent n times."""
        self._resting = 0
        """Chunks that are offered to nobody else for now: they are promised, or have just been sent and spread."""
        self._until_s: dict[int, float] = {}
        self._wakes: list[tuple[float, int]] = []
        """A heap of when which chunk may be offered again; what _until_s says holds."""

    def joined(self, asker: str, has: int) -> None:
        """An asker came, and has these chunks."""
        self._askers[asker] = _Asker(has)

    def left(self, asker: str) -> None:
        """It went; what it was promised is free for others."""
        known = self._askers.pop(asker, None)
        if known is not None:
            self._resting &= ~known.promised

    def has(self, asker: str, chunks: int) -> None:
        """It has these chunks by now, from whomever."""
        known = self._askers[asker]
        known.has |= chunks
        self._resting &= ~(known.promised & chunks)
        known.promised &= ~chunks

    def asked(self, asker: str, index: int, now_s: float) -> None:
        """It asked for a chunk, which now waits for its turn."""
        known = self._askers[asker]
        known.asked |= 1 << index
        if not known.idle:
            self._rest(index, now_s + TURN_S)

    def sent(self, asker: str, index: int, took_s: float, now_s: float) -> None:
        """A chunk went out to it, and took so long."""
        chunk = 1 << index
        times = next(times for times, chunks in enumerate(self._sent) if chunks & chunk)
        if times + 1 == len(self._sent):
            self._sent.append(0)
        self._sent[times] ^= chunk
        self._sent[times + 1] |= chunk
        self._rest(index, now_s + took_s)  # in which the asker passes it on
        known = self._askers.get(asker)
        if known is not None:
            known.taken += 1
            known.promised &= ~chunk

    def offer(self, asker: str, now_s: float) -> int:
        """What it may ask for now."""
        self._wake(now_s)
        known = self._askers[asker]
        known.idle |= bool(known.promised & ~known.asked & ~self._resting)
        window = min(SEEDED_MAX, SEEDED_MIN + known.taken // SEEDED_GROWTH)
        missing = window - (known.promised & self._resting).bit_count()
        while missing > 0 and (free := self._least_sent(~(known.offered | known.has | self._resting))):
            index = _by_lot(free, self._rng)
            known.offered |= 1 << index
            missing -= 1
            if not known.idle:
                known.promised |= 1 << index
                self._rest(index, now_s + PROMISE_S)
        return known.offered

    def wakes_s(self) -> float:
        """When time alone may let an asker be offered more."""
        return self._wakes[0][0] if self._wakes else math.inf

    def _least_sent(self, among: int) -> int:
        return next((chunks & among for chunks in self._sent if chunks & among), 0)

    def _rest(self, index: int, until_s: float) -> None:
        self._resting |= 1 << index
        self._until_s[index] = until_s
        heapq.heappush(self._wakes, (until_s, index))

    def _wake(self, now_s: float) -> None:
        while self._wakes and self._wakes[0][0] <= now_s:
            _, index = heapq.heappop(self._wakes)
            if self._until_s[index] <= now_s:
                self._resting &= ~(1 << index)


def _union(sets: Iterator[int]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union


def _set(members: Iterator[int]) -> int:
    chunks = 0
    for index in members:
        chunks |= 1 << index
    return chunks


def _by_lot(chunks: int, rng: random.Random) -> int:
    """A member of a set: the first from a random place on."""
    start = rng.randrange(chunks.bit_length())
    above = chunks >> start
    return start + (above & -above).bit_length() - 1
