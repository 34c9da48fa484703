"""One process in the swarm: a host, a directory, a door for requests, and one follower for each run.

    bootstrap addresses --connect, hello--> peers that answer --DHT--> directory --+--> Follower(run) ...
                                                                                   +--> Exchange (blobs)
    request --decode--> _answer: hello, heartbeat, manifest, chain, rollouts (the trainer's)

The node drives; rules are in `protocols/`. What a role adds (training, generating) runs beside the node's
own loops in the same task group, so a crash of any of them ends the process and is seen.
"""

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocols import PROTOCOL
from protocols.directory import SKEW_S, DirectoryRules
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import (
    ChainRequest,
    DialBack,
    Envelopes,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloReply,
    ManifestRequest,
    PushRollouts,
    Refused,
    Reply,
    Request,
    RoundCall,
    Status,
    StatusRequest,
    Verdict,
    decode_reply,
    decode_request,
    encode,
)
from protocols.presence import BEAT_S, SILENT_S, Sessions
from swarm import hivemind_guard
from swarm.blobs import BlobStore
from swarm.directory import Directory
from swarm.exchange import Exchange
from swarm.follower import Follower
from swarm.host import Host, HostConfig
from swarm.identity import KEY_FILE, Identity, load_identity, lock_home
from swarm.metrics import Metrics
from swarm.reachability import DialBacks, Reachability, reachability
from swarm.storage import PeerStore
from swarm.tasks import Loop

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 8.0  # a TCP and a TLS handshake across the world take 1 s; a black hole must not cost a minute
# Refusals of honest neighbours: records of another run of the same swarm, and of one whose manifest is on its way.
UNREMARKABLE = {("dht", "unknown key"), ("dht", "no manifest yet")}
STATUS_LIFE_S = 0.5  # anybody may ask at any rate, and an answer costs 20 ms when ten thousand have sent a heartbeat
ADDRESSES_MAX = 16  # in a CapacityAd
LAG_PROBE_S = 0.02
LAG_REPORT_S = 5.0

Role = Literal["bootstrap", "trainer", "inference"]
PushHandler = Callable[[PushRollouts, str], Awaitable[Reply]]
RoundHandler = Callable[[RoundCall, str], Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Where a peer listens, whom it asks first, what it is."""

    role: Role
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()


class JoinFault(TransportFault):
    """No bootstrap address worked: `reasons` has one line for each, `code` is that of the first."""

    def __init__(self, faults: Sequence[tuple[str, TransportFault]]) -> None:
        super().__init__(faults[0][1].code, faults[0][1].detail)
        self.reasons = [f"{address}: {fault.code}" for address, fault in faults]


@dataclass(slots=True)
class Neighbour:
    """What the last heartbeat of a peer said."""

    beat: Heartbeat
    heard_s: float


class Node:
    """See the module's docstring. Made by `await Node.start(...)`; `close` it."""

    def __init__(self, identity: Identity, home: Path, config: NodeConfig) -> None:
        self.identity = identity
        self.home = home
        self.config = config
        self.session = os.urandom(16)
        self.metrics = Metrics(home, identity.peer_id, config.role)
        self.sessions = Sessions()
        self.neighbours: dict[str, Neighbour] = {}
        self.followers: dict[str, Follower] = {}
        self._statuses: dict[str, tuple[float, Status | None]] = {}
        """The last answer of each run, and when it was made."""
        self.bootstraps: dict[str, str] = {}
        """Bootstrap addresses that answered, and their peer ids."""
        self.reachability = Reachability("unknown", "nobody was asked")
        self.on_push: PushHandler | None = None
        self.on_round: RoundHandler | None = None
        self.more_doors: dict[str, Counter[str]] = {}
        """Counters of what a role refuses, by door and reason, for the metrics."""
        self.host: Host
        self._dial_backs: DialBacks
        self.exchange: Exchange
        self.directory: Directory
        self._resources = AsyncExitStack()

    @property
    def peer_id(self) -> str:
        """Our name, and our public key."""
        return self.identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial us, for our advertisement; none when nobody gets through."""
        if self.reachability.kind == "outbound only":
            return ()
        return tuple(dict.fromkeys([*self.reachability.addresses, *self.host.addresses]))[:ADDRESSES_MAX]

    @classmethod
    async def start(cls, identity: Identity, home: Path, config: NodeConfig, runs: Sequence[str]) -> "Node":
        """Come up and reach the swarm. Raises TransportFault (a JoinFault if no bootstrap answers), ValueError."""
        self = cls(identity, home, config)
        try:
            await self._start(runs)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, runs: Sequence[str]) -> None:
        self._resources.callback(self.metrics.close)
        host_config = HostConfig(
            listen=self.config.listen, announce=self.config.announce, serve_relay=self.config.role == "bootstrap"
        )
        self.host = await Host.start(self.identity, host_config)
        self._resources.push_async_callback(self.host.close)
        self._dial_backs = DialBacks(self.host)
        self.exchange = Exchange(self.host, BlobStore(self.home / "blobs"))
        rules = [DirectoryRules(run) for run in runs]
        self.followers = {each.run: Follower(self, each) for each in rules}
        await self.host.serve(self._serve)
        if self.config.bootstrap:
            # A bootstrap peer links with others whatever runs they serve; everybody else comes for one run.
            await self._join(None if self.config.role == "bootstrap" else runs[0])
            await self._look_whether_reachable()
        if self.config.role != "trainer":  # a trainer brings its own; a run that is not there leaves no file
            for follower in self.followers.values():
                follower.store = PeerStore(self.home / f"{follower.run}.sqlite")
        # Records kept by a peer that nobody can dial would be lost to all, and each search would wait for it in vain.
        unreachable = self.reachability.kind == "outbound only" and self.config.role != "bootstrap"
        known = list(self.bootstraps.values())
        self.directory = await Directory.start(self.host, rules, known, client_mode=unreachable)
        self._resources.push_async_callback(self.directory.close)
        await self.exchange.start()

    async def close(self) -> None:
        """Leave: directory, host, stores, in this order. Bounded."""
        for follower in self.followers.values():
            follower.close()
        await self._resources.aclose()

    def loops(self) -> dict[str, Loop]:
        """The node's own loops, for the role's task group."""
        loops: dict[str, Loop] = {"watchdog": self._watch, "loop lag": self._measure_lag, "refusals": self._report}
        for follower in self.followers.values():
            loops |= follower.loops()
        return loops

    # ------------------------------------------------------------------ joining

    async def _join(self, run: str | None) -> None:
        """Connect to every bootstrap address at once; one that answers is enough."""
        results = await asyncio.gather(*(self._greet(address, run) for address in self.config.bootstrap))
        faults = [(address, fault) for address, fault in zip(self.config.bootstrap, results, strict=True) if fault]
        if len(faults) == len(results):
            raise JoinFault(faults)
        for address, fault in faults:
            self.warn("bootstrap unreachable", f"{address}: {fault}")
            for follower in self.followers.values():
                follower.heartbeats.known_unreachable(address, fault)

    async def _look_whether_reachable(self) -> None:
        self.reachability = await reachability(self.host, list(self.bootstraps.values()))
        found = self.reachability
        self.metrics.emit("reachability", kind=found.kind, reason=found.reason, addresses=found.addresses)
        if found.kind == "outbound only" and self.config.role != "inference":
            self.warn(
                "cannot be dialled",
                f"{found.reason}; others need to connect to this {self.config.role} peer: "
                "open or forward its port (--port), and where the address differs pass --announce",
            )

    async def _greet(self, address: str, run: str | None) -> TransportFault | None:
        try:
            peer_id = await self.host.connect(address, CONNECT_TIMEOUT_S)
            await self.hello(peer_id, run)
        except TransportFault as fault:
            return fault
        except PeerFault as fault:
            return TransportFault("protocol mismatch", f"{short(peer_id)} answers: {fault}")
        self.bootstraps[address] = peer_id
        return None

    async def hello(self, peer_id: str, run: str | None) -> None:
        """Introduce ourselves. Raises TransportFault with the verdict as its code unless we are welcome."""
        deadline_s = time.monotonic() + 2 * SILENT_S
        while True:
            sent_ms = now_ms()
            reply = await self.ask(peer_id, Hello(PROTOCOL, run, self.session, sent_ms))
            if not isinstance(reply, HelloReply):
                raise PeerFault("unexpected reply", type(reply).__name__)
            offset_s = (reply.now_ms - (sent_ms + now_ms()) / 2) / 1000
            if abs(offset_s) > SKEW_S:
                raise TransportFault(
                    "clock", f"this machine's clock is {-offset_s:+.1f} s off that of {short(peer_id)}"
                )
            if reply.verdict == "ok":
                return
            if reply.verdict != "contested" or time.monotonic() > deadline_s:
                code = "identity taken" if reply.verdict == "contested" else reply.verdict
                raise self.turned_away(code, reply.detail or f"says {short(peer_id)}")
            await asyncio.sleep(BEAT_S / 2)

    def turned_away(self, verdict: str, detail: str) -> TransportFault:
        """The fault for a verdict about us; for a taken identity it names the key file (case B07)."""
        return TransportFault(verdict, f"{self.identity.path}, {detail}" if verdict == "identity taken" else detail)

    async def ask(self, peer_id: str, request: Request, timeout_s: float = 5.0) -> Reply:
        """One request to one peer. Raises TransportFault, or PeerFault for an answer that is none."""
        return decode_reply(await self.host.call(peer_id, encode(request), timeout_s))

    # ------------------------------------------------------------------ answering

    async def _serve(self, raw: bytes, peer_id: str) -> bytes:
        return encode(await self._answer(decode_request(raw), peer_id))

    async def _answer(self, request: Request, peer_id: str) -> Reply:
        match request:
            case Hello():
                return self._on_hello(request, peer_id)
            case Heartbeat():
                return self._on_heartbeat(request, peer_id)
            case ManifestRequest(run):
                follower = self.followers.get(run)
                if follower is None or follower.rules.manifest is None:
                    return Refused("unknown run" if follower is None else "no manifest yet")
                return Envelopes((follower.rules.manifest.raw,))
            case ChainRequest(run, first):
                follower = self.followers.get(run)
                return Refused("unknown run") if follower is None else Envelopes(follower.page(first))
            case PushRollouts():
                return Refused("not a trainer") if self.on_push is None else await self.on_push(request, peer_id)
            case RoundCall():
                return Refused("not an inference peer") if self.on_round is None else self.on_round(request, peer_id)
            case StatusRequest(run):
                return self._on_status(run)
            case DialBack(port):
                return await self._dial_backs.answer(port, peer_id)

    def _on_hello(self, hello: Hello, peer_id: str) -> HelloReply:
        detail = ""
        verdict: Verdict = self.sessions.heard(peer_id, hello.session, time.monotonic())
        if hello.protocol != PROTOCOL:
            verdict, detail = "protocol mismatch", f"speaks {PROTOCOL}"
        elif abs(hello.now_ms - now_ms()) > SKEW_S * 1000:
            verdict, detail = "clock", f"{(hello.now_ms - now_ms()) / 1000:+.1f} s"
        elif hello.run is not None and hello.run not in self.followers:
            verdict = "unknown run"
        elif hello.run is not None and self.followers[hello.run].ignores(peer_id):
            verdict = "banned"
        return HelloReply(verdict, PROTOCOL, now_ms(), detail)

    def _on_heartbeat(self, beat: Heartbeat, peer_id: str) -> HeartbeatReply:
        follower = self.followers.get(beat.run)
        if follower is None:
            return HeartbeatReply(verdict="unknown run", now_ms=now_ms())
        verdict = self.sessions.heard(peer_id, beat.session, time.monotonic())
        if verdict == "ok" and beat.leaving:
            self.sessions.left(peer_id, beat.session)
            self.neighbours.pop(peer_id, None)
            if follower.orders is not None and follower.orders.coordinator == peer_id:
                follower.orders.lost()
        elif verdict == "ok":
            self.neighbours[peer_id] = Neighbour(beat, time.monotonic())
            follower.neighbourhood.heard_of(peer_id, beat.version)
        if verdict == "ok" and beat.directive is not None:
            follower.candidate.obeyed(beat.directive)
        step, queued = follower.progress()
        grant = follower.grant(peer_id, beat) if verdict == "ok" else None
        orders = follower.orders
        head = follower.chain.version if follower.chain is not None else -1
        return HeartbeatReply(
            verdict="banned" if follower.ignores(peer_id) else verdict,
            now_ms=now_ms(),
            head=head if head >= 0 else None,
            step=step,
            queued=queued,
            ended=follower.ended.is_set(),
            next_counter=follower.next_counter_of(peer_id),
            wanted=follower.wanted(),
            term=orders.term if orders is not None else None,
            coordinator=orders.coordinator if orders is not None else None,
            directive=orders.newest.raw if orders is not None and orders.newest is not None else None,
            limit=grant.limit if grant is not None else None,
            sources=grant.sources if grant is not None else (),
        )

    def _on_status(self, run: str) -> Reply:
        follower = self.followers.get(run)
        if follower is None:
            return Refused("unknown run")
        now_s = time.monotonic()
        made_s, status = self._statuses.get(run, (-math.inf, None))
        if status is None or now_s - made_s >= STATUS_LIFE_S:
            status = follower.status(now_s, now_ms())
            self._statuses[run] = (now_s, status)
        return Refused("no manifest yet") if status is None else status

    # ------------------------------------------------------------------ loops

    def warn(self, code: str, text: str) -> None:
        """Something that a person should see."""
        text = " ".join(text.split())  # p2pd lists each address it tried on a line of its own
        log.warning("%s: %s", code, text)
        self.metrics.emit("warning", code=code, text=text)

    async def _watch(self) -> None:
        await self.host.died.wait()
        raise TransportFault("p2pd died", "the network daemon ended by itself; start this peer again")

    async def _measure_lag(self) -> None:
        """How late the loop wakes up: the delay that every peer's request would meet."""
        while True:
            lags: list[float] = []
            until_s = time.monotonic() + LAG_REPORT_S
            while not lags or time.monotonic() < until_s:  # uvloop's own clock counts whole milliseconds
                before_s = time.monotonic()
                await asyncio.sleep(LAG_PROBE_S)
                lags.append(max(0.0, time.monotonic() - before_s - LAG_PROBE_S) * 1000)
            lags.sort()
            p50, p99 = lags[len(lags) // 2], lags[int(len(lags) * 0.99)]
            self.metrics.emit("loop", lag_p50_ms=round(p50, 2), lag_p99_ms=round(p99, 2))

    async def _report(self) -> None:
        """Emit what was refused, by door and reason, when it changes; forget neighbours that are long gone."""
        shown: dict[tuple[str, str], int] = {}
        while True:
            await asyncio.sleep(BEAT_S)
            for door, counter in self._doors().items():
                for reason, count in counter.items():
                    if shown.get((door, reason)) != count and (door, reason) not in UNREMARKABLE:
                        shown[door, reason] = count
                        self.metrics.emit("refused", door=door, reason=reason, count=count)
            now_s = time.monotonic()
            for peer_id, seen in list(self.neighbours.items()):
                silent_s = now_s - seen.heard_s
                if SILENT_S <= silent_s < SILENT_S + BEAT_S:
                    await self._give_up_connection(peer_id)
                elif (
                    silent_s > 10 * SILENT_S and self.neighbours.get(peer_id) is seen
                ):  # it may have come back, or left
                    del self.neighbours[peer_id]

    async def _give_up_connection(self, peer_id: str) -> None:
        """A neighbour is silent: it may long be back on a new connection, while libp2p still talks on the old one."""
        try:
            await self.host.disconnect(peer_id)
        except (TransportFault, PeerFault) as fault:
            log.info("could not disconnect %s: %s", short(peer_id), fault)

    def _doors(self) -> dict[str, Counter[str]]:
        doors = {"request": self.host.refusals, "dht": self.directory.refusals, "blob": self.exchange.refusals}
        doors["dht bytes"] = hivemind_guard.refusals
        doors |= {f"gossip {follower.run}": follower.refusals for follower in self.followers.values()}
        return doors | self.more_doors


def now_ms() -> int:
    """Wall clock, milliseconds since 1970."""
    return int(time.time() * 1000)


@asynccontextmanager
async def running(home: Path, config: NodeConfig, runs: Sequence[str]) -> AsyncIterator[Node]:
    """The node of a process: alone on its home, with the identity that lies there, closed behind the block.

    Raises ValueError for a home that cannot be used, TransportFault when the swarm cannot be reached.
    """
    with lock_home(home):
        identity, _ = load_identity(home / KEY_FILE)
        node = await Node.start(identity, home, config, runs)
        try:
            yield node
        finally:
            await node.close()
