"""A blob on its way through a whole swarm in virtual time: the rules are the real ones, links and drivers are modelled.

    Host --asks--> Stream --turns--> Uplink (shared evenly among streams) --latency--> downlink (one after the other)

No sockets, no sleeping: a heap of (time, order, act). Same seed, same run. As in swarm/downloads.py and
swarm/uploads.py: up to 10 sources drawn out of the swarm, one chunk after the other on a stream, the number of chunks
on the way bounded by Pacing, offers of a burst together. Left out: TCP, hashing, the disk, the bytes of messages.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocols.messages import BlobRef
from protocols.pacing import Pacing
from protocols.transfer import (
    IN_FLIGHT_MAX,
    SPARED_CHUNKS_MIN,
    STALL_S,
    Arrived,
    Ask,
    ChunkList,
    Event,
    Leave,
    Lost,
    Offered,
    Schedule,
    Seeding,
    Ticked,
)
from swarm.downloads import FAILED_S, GONE_S, LIED_S, NO_PROGRESS_S, RECRUIT_S, SOURCES_AT_ONCE, TICK_S
from swarm.uploads import ALIVE_S, OFFER_GAP_S, TURN_S

RETRY_S = 1.0  # after a download found no source
NOTHING_LEFT = 1e-3  # bytes; rounding of the clock


@dataclass(frozen=True, slots=True)
class Link:
    """Of one host. Rates in bytes/s."""

    up: float
    down: float
    latency_s: float = 0.01
    """One way, this half of the path; up to as much again is jitter."""


def mbit(up: float, down: float | None = None, latency_s: float = 0.01) -> Link:
    """A link of so many Mbit/s."""
    return Link(up * 125_000, (up if down is None else down) * 125_000, latency_s)


@dataclass(slots=True, eq=False)
class Stream:
    """One asker's blob stream with one holder."""

    asker: "Host"
    holder: "Host"
    key: str
    open: bool = True
    ordered_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """When the newest message arrives at the holder, at the asker: none overtakes another."""
    first_offer: bool = True
    sparing: bool = False
    moved: bool = False
    """Bytes of a chunk came since the last tick."""
    landing: int = 0
    """Transfers that the asker's downlink has: their bytes come, if slowly."""
    asks: deque[int] = field(default_factory=deque)
    offered: int | None = None
    offered_s: float = 0.0
    busy: bool = False
    """Its next chunk waits for its turn."""
    woken: bool = False
    plan: int = 0
    """Only the newest plan to look again holds."""


@dataclass(slots=True, eq=False)
class _Transfer:
    stream: Stream
    size: int
    act: Callable[[], None]
    left: float
    began_s: float = 0.0


class Uplink:
    """Bytes leave in the order of their stream; the streams share the rate evenly."""

    def __init__(self, sim: "Simulation", host: "Host") -> None:
        self.sim, self.host = sim, host
        self.flows: dict[Stream, deque[_Transfer]] = {}
        self._at_s = 0.0
        self._plan = 0

    def put(self, stream: Stream, size: int, act: Callable[[], None]) -> None:
        """`act` at the asker when the last of `size` bytes is there."""
        self.advance()
        flow = self.flows.setdefault(stream, deque())
        flow.append(_Transfer(stream, size, act, size, self.sim.now_s))
        self.advance()

    def drop(self, stream: Stream) -> None:
        """The stream is closed: what has not left stays."""
        self.advance()
        self.flows.pop(stream, None)
        self.advance()

    def advance(self) -> None:
        """Move what moved since the last call, and say when the next transfer ends."""
        passed_s, self._at_s = self.sim.now_s - self._at_s, self.sim.now_s
        share = 0.0 if self.host.frozen or not self.flows else self.host.link.up / len(self.flows)
        for stream in list(self.flows):
            flow = self.flows[stream]
            moved = min(flow[0].left, share * passed_s)
            flow[0].left -= moved
            self.host.sent_bytes += moved
            stream.moved |= moved > 0
            while flow and flow[0].left <= NOTHING_LEFT:
                self.sim.land(flow.popleft())
                if flow:
                    flow[0].began_s = self.sim.now_s
            if not flow:
                del self.flows[stream]
        self._plan += 1
        if self.flows and not self.host.frozen:
            share = self.host.link.up / len(self.flows)
            self.sim.after(min(flow[0].left for flow in self.flows.values()) / share, self._planned, self._plan)

    def _planned(self, plan: int) -> None:
        if plan == self._plan:
            self.advance()


class Host:
    """One peer: it downloads the blob, and serves what it has of it."""

    def __init__(self, sim: "Simulation", name: str, link: Link, whole: bool = False) -> None:
        self.sim, self.name, self.link = sim, name, link
        self.rng = random.Random(f"{sim.seed}/{name}")
        self.have = sim.chunks.all if whole else 0
        self.sparing = self.frozen = self.lies = self.dead = False
        self.uplink = Uplink(sim, self)
        self.down_free_s = 0.0
        self.sent_bytes = 0.0
        # as an asker
        self.starts_s = 0.0
        self.schedule: Schedule | None = None
        self.downloading = False
        self.done_s: float | None = 0.0 if whole else None
        self.talks: dict[str, Stream] = {}
        self.came_from: dict[int, str] = {}
        self.twice = self.refused = self.asked = self.restarts = 0
        self.left: list[tuple[str, str]] = []
        self._early: dict[str, Offered] = {}
        self._shunned: dict[str, float] = {}
        self._tried: set[str] = set()
        self._advanced_s = 0.0
        # as a holder
        self.streams: list[Stream] = []
        self._serial = itertools.count()
        self._pacing = Pacing()
        self._turns: deque[Stream] = deque()
        self._pump_s = -1.0
        self.seeding: Seeding | None = None

    @property
    def knows(self) -> bool:
        """It has the list of hashes."""
        return self.schedule is not None or self.have == self.sim.chunks.all

    # ------------------------------------------------------------------ asking

    def download(self) -> None:
        """Begin, or begin again with what is here."""
        if self.frozen or self.done_s is not None:
            return
        self.downloading, self._advanced_s = True, self.sim.now_s
        self._tried.clear()
        if self.schedule is not None:
            self.schedule = Schedule(self.sim.chunks.count, self.have, self.rng)
        self._recruit()
        self._tick()

    def _recruit(self) -> None:
        if not self.downloading or self.frozen:
            return
        candidates = [name for name in self.sim.sources(self) if name not in self.talks]
        fresh = [name for name in candidates if self._shunned.get(name, 0.0) <= self.sim.now_s]
        if not fresh and not self.talks:
            fresh = [name for name in candidates if name not in self._tried]
        if (not fresh and not self.talks) or self.sim.now_s - self._advanced_s > NO_PROGRESS_S:
            self.restarts += 1
            self._stop()
            self.sim.after(RETRY_S, self.download)
            return
        for name in fresh[: max(0, SOURCES_AT_ONCE - len(self.talks))]:
            self._tried.add(name)
            self._open(self.sim.hosts[name])
        self.sim.after(RECRUIT_S, self._recruit)

    def _stop(self) -> None:
        self.downloading = False
        for stream in list(self.talks.values()):
            self._close(stream)
        self._early.clear()

    def _open(self, holder: "Host") -> None:
        stream = self.talks[holder.name] = Stream(self, holder, f"{self.name}/{next(holder._serial)}")
        have = self.schedule.have if self.schedule is not None else 0
        self.sim.send(stream, lambda: holder.opened(stream, have))
        self.sim.after(STALL_S, self._unanswered, stream)

    def _unanswered(self, stream: Stream) -> None:
        if stream.open and stream.first_offer:
            self.lose(stream, FAILED_S)

    def lose(self, stream: Stream, shunned_s: float) -> None:
        """The stream is over; its holder is asked last for a while."""
        if not stream.open or self.frozen:
            return
        self._shunned[stream.holder.name] = self.sim.now_s + shunned_s
        self._close(stream)
        self._handle(Lost(stream.holder.name))

    def _close(self, stream: Stream) -> None:
        stream.open = False
        self.talks.pop(stream.holder.name, None)
        stream.holder.uplink.drop(stream)
        self.sim.send(stream, lambda: stream.holder.closed(stream))

    def hear_offer(self, stream: Stream, chunks: int, found: bool, knows: bool) -> None:
        """BlobOffer came."""
        name, stream.first_offer = stream.holder.name, False
        if self.schedule is not None:
            self.schedule.heard(name, False, self.sim.now_s)
        if not found:
            self.lose(stream, GONE_S)
            return
        stream.sparing = stream.holder.seeding is not None
        self._handle(Offered(name, chunks, stream.sparing))
        if knows and self.schedule is None:
            self.schedule = Schedule(self.sim.chunks.count, 0, self.rng)
            self._tell()
            for offered in list(self._early.values()):
                self._handle(offered)

    def hear_chunk(self, stream: Stream, index: int) -> None:
        """A whole chunk came."""
        schedule, name = self.schedule, stream.holder.name
        assert schedule is not None
        assert schedule.asked(name, index), "a chunk that nobody asked for"
        if stream.holder.lies:
            self.refused += 1
            self.lose(stream, LIED_S)
            return
        self._advanced_s = self.sim.now_s
        self.twice += self.have >> index & 1
        self.came_from.setdefault(index, name)
        self._handle(Arrived(name, index))
        self.have = schedule.have
        for talk in [talk for talk in self.talks.values() if talk.sparing or talk is stream]:
            self.sim.send(talk, lambda talk=talk, have=self.have: talk.holder.hear_have(talk, have))
        self._tell()
        if schedule.done:
            self.done_s = self.sim.now_s
            self._stop()

    def _tell(self) -> None:
        for stream in self.streams:
            self.news(stream)

    def _tick(self) -> None:
        if not self.downloading or self.frozen:
            return
        self.sim.after(TICK_S, self._tick)
        for name, stream in self.talks.items():
            stream.holder.uplink.advance()
            if (stream.moved or stream.landing) and self.schedule is not None:
                self.schedule.heard(name, True, self.sim.now_s)
            stream.moved = False
        self._handle(Ticked())

    def _handle(self, event: Event) -> None:
        if self.schedule is None:
            if isinstance(event, Offered):
                self._early[event.source] = event
            elif isinstance(event, Lost):
                self._early.pop(event.source, None)
            return
        offered = self.schedule.offered
        for action in self.schedule.handle(event, self.sim.now_s):
            stream = self.talks.get(action.source)
            match action:
                case Ask(name, index):
                    assert stream is not None, f"{name} was left, and asked for {index}"
                    self.asked += 1
                    self.sim.send(stream, lambda stream=stream, index=index: stream.holder.hear_ask(stream, index))
                case Leave(name, reason):
                    assert stream is not None, f"{name} was left twice"
                    self.left.append((name, reason))
                    self.lose(stream, FAILED_S)
        if self.schedule.offered & ~offered:
            self._advanced_s = self.sim.now_s

    # ------------------------------------------------------------------ holding

    def opened(self, stream: Stream, have: int) -> None:
        """BlobOpen came."""
        if self.dead or self.frozen:
            if self.dead:
                self.sim.after(self.link.latency_s, stream.asker.lose, stream, FAILED_S)
            return
        if not stream.open:
            return
        if not (self.downloading or self.knows):
            self.uplink.put(stream, 0, lambda: stream.asker.hear_offer(stream, 0, False, False))
            return
        if self.sparing and self.sim.chunks.count >= SPARED_CHUNKS_MIN:
            self.seeding = self.seeding or Seeding(self.sim.chunks.count, self.rng)
            self.seeding.joined(stream.key, have)
        self.streams.append(stream)
        self.sim.after(ALIVE_S, self._show_life, stream)
        self._step(stream)

    def closed(self, stream: Stream) -> None:
        """The asker closed it."""
        if stream not in self.streams:
            return
        self.streams.remove(stream)
        self._pacing.left(stream.asker.name, stream.key)
        self._pump()
        if self.seeding is not None:
            self.seeding.left(stream.key)
            self._tell()

    def hear_ask(self, stream: Stream, index: int) -> None:
        """ChunkAsk came."""
        if not self.frozen and stream.open:
            assert stream.offered is not None
            assert stream.offered >> index & 1, "asked for what was not offered"
            assert len(stream.asks) < IN_FLIGHT_MAX
            stream.asks.append(index)
            if self.seeding is not None:
                self.seeding.asked(stream.key, index, self.sim.now_s)
            self.news(stream)

    def hear_have(self, stream: Stream, chunks: int) -> None:
        """BlobHave came."""
        if self.frozen or not stream.open:
            return
        for index in self._pacing.unacknowledged(stream.asker.name, stream.key):
            if chunks >> index & 1:
                took_s = self._pacing.acknowledged(stream.asker.name, stream.key, index, self.sim.now_s)
                assert took_s is not None
                if self.seeding is not None:
                    self.seeding.sent(stream.key, index, took_s, self.sim.now_s)
        self._pump()
        if self.seeding is not None:
            self.seeding.has(stream.key, chunks)
            self._tell()

    def news(self, stream: Stream) -> None:
        """There may be more to offer, or a chunk to send."""
        if stream.woken or (stream.busy and not stream.asks):
            return
        stream.woken = True
        gap_s = stream.offered_s + OFFER_GAP_S - self.sim.now_s
        self.sim.after(0.0 if stream.asks else max(0.0, gap_s), self._step, stream)

    def _step(self, stream: Stream) -> None:
        stream.woken = False
        if self.frozen or not stream.open or stream.busy:
            return
        self._offer(stream)
        if stream.asks:
            stream.busy = True
            self._turns.append(stream)
            self._pump()
        elif self.seeding is not None and not math.isinf(wakes_s := self.seeding.wakes_s()):
            stream.plan += 1
            self.sim.after(max(OFFER_GAP_S, wakes_s - self.sim.now_s), self._planned, stream, stream.plan)

    def _planned(self, stream: Stream, plan: int) -> None:
        if plan == stream.plan:
            self._step(stream)

    def _offer(self, stream: Stream, again: bool = False) -> None:
        chunks, knows = self.have, self.knows
        if self.seeding is not None:
            chunks = self.seeding.offer(stream.key, self.sim.now_s)
        if chunks != stream.offered or again or (knows and stream.asker.schedule is None):
            stream.offered, stream.offered_s = chunks, self.sim.now_s
            self.uplink.put(stream, 0, lambda: stream.asker.hear_offer(stream, chunks, True, knows))

    def _show_life(self, stream: Stream) -> None:
        if stream.open and not self.frozen:
            self.sim.after(ALIVE_S, self._show_life, stream)
            if stream.asks:
                self._offer(stream, again=True)

    def _pump(self) -> None:
        """Whoever is next sends its chunk."""
        while self._turns and not self.frozen:
            able = (turn for turn in self._turns if self._pacing.room(turn.asker.name, self.sim.now_s))
            stream = next(able, None)
            if stream is None:
                if self._pump_s <= self.sim.now_s:
                    self._pump_s = self.sim.now_s + TURN_S
                    self.sim.after(TURN_S, self._pump)
                return
            self._turns.remove(stream)
            stream.busy = False
            if not stream.open:
                continue
            index = stream.asks.popleft()
            self._pacing.sent(stream.asker.name, stream.key, index, self.sim.now_s)
            size = self.sim.chunks.size(index)
            self.uplink.put(stream, size, lambda stream=stream, index=index: stream.asker.hear_chunk(stream, index))
            self.sim.after(0.0, self._step, stream)

    # ------------------------------------------------------------------ trouble

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and nothing comes any more."""
        self.uplink.advance()
        self.frozen = True

    def die(self) -> None:
        """SIGKILL: its connections are closed."""
        self.uplink.advance()
        self.dead = self.frozen = True
        self.uplink.flows.clear()
        for stream in list(self.talks.values()):
            self._close(stream)
        for stream in self.streams:
            self.sim.after(self.link.latency_s, stream.asker.lose, stream, FAILED_S)


class Simulation:
    """Hosts that all want one blob, which the trainer has."""

    def __init__(self, seed: int, size: int, trainer: Link, peers: Sequence[Link]) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.chunks = ChunkList(BlobRef(bytes(32), size))
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self.trainer = Host(self, "trainer", trainer, whole=True)
        self.trainer.sparing = True
        self.peers = [Host(self, f"peer {n}", link) for n, link in enumerate(peers)]
        self.hosts = {host.name: host for host in [self.trainer, *self.peers]}
        for peer in self.peers:
            self.after(self._rng.uniform(0.0, 0.1), self._start, peer)

    def _start(self, peer: Host) -> None:
        """It hears of the blob, or only later."""
        if peer.starts_s > self.now_s:
            self.after(peer.starts_s - self.now_s, self._start, peer)
        else:
            peer.download()

    def after(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        """Do it then."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), act, args))

    def send(self, stream: Stream, act: Callable[[], None]) -> None:
        """A message to the holder."""
        self._arrive(stream, 0, self.now_s, act)

    def land(self, transfer: _Transfer) -> None:
        """The last byte left its uplink: the downlink takes it as fast as it can, behind what came before."""
        stream, asker = transfer.stream, transfer.stream.asker
        delay_s = self._latency_s(stream)
        asker.down_free_s = max(asker.down_free_s, transfer.began_s + delay_s) + transfer.size / asker.link.down
        there_s = max(self.now_s + delay_s, asker.down_free_s if transfer.size else 0.0)
        stream.landing += 1
        self._arrive(stream, 1, there_s - delay_s, lambda: self._landed(transfer), delay_s)

    def _landed(self, transfer: _Transfer) -> None:
        transfer.stream.landing -= 1
        if transfer.stream.open and not transfer.stream.asker.frozen:
            transfer.act()

    def _arrive(
        self, stream: Stream, side: int, from_s: float, act: Callable[[], None], delay_s: float | None = None
    ) -> None:
        at_s = from_s + (self._latency_s(stream) if delay_s is None else delay_s)
        stream.ordered_s[side] = at_s = max(at_s, stream.ordered_s[side])
        self.after(at_s - self.now_s, act)

    def _latency_s(self, stream: Stream) -> float:
        return (stream.asker.link.latency_s + stream.holder.link.latency_s) * self._rng.uniform(1.0, 2.0)

    def sources(self, asker: Host) -> list[str]:
        """The trainer and some others, as a peer's neighbourhood names them."""
        others = [host.name for host in self.peers if host is not asker]
        return ["trainer", *self._rng.sample(others, min(SOURCES_AT_ONCE - 1, len(others)))]

    def run(self, until_s: float) -> "Simulation":
        """Until then, or until every living peer has the blob."""
        while self._heap and self.unfinished:
            at_s, _, act, args = heapq.heappop(self._heap)
            if at_s > until_s:
                break
            self.now_s = at_s
            act(*args)
        return self

    # ------------------------------------------------------------------ what came of it

    @property
    def unfinished(self) -> list[str]:
        """Living peers without the blob."""
        return [peer.name for peer in self.peers if peer.done_s is None and not peer.frozen]

    @property
    def took_s(self) -> float:
        """When the last of them had it."""
        assert not self.unfinished, f"seed {self.seed}: {self.unfinished} at {self.now_s:.1f} s"
        return max(peer.done_s for peer in self.peers if peer.done_s is not None)

    @property
    def copies(self) -> float:
        """That the trainer sent."""
        return self.trainer.sent_bytes / self.chunks.ref.size

    @property
    def wasted(self) -> float:
        """Share of the bytes sent that nobody needed: what came twice, was cut off, or was wrong."""
        sent = sum(host.sent_bytes for host in self.hosts.values())
        return 1.0 - sum(self.chunks.bytes_of(peer.have) for peer in self.peers) / sent

    @property
    def ideal_s(self) -> float:
        """No schedule is faster: one copy leaves the trainer, each downlink takes one, all uplinks together send all.

        For fluids this bound is met (Kumar and Ross, "Peer-assisted file distribution", 2006).
        """
        size, ups = self.chunks.ref.size, [host.link.up for host in self.hosts.values()]
        return max(
            size / self.trainer.link.up,
            size / min(peer.link.down for peer in self.peers),
            size * len(self.peers) / sum(ups),
        )
