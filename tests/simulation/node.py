"""One process: its clocks, its disk, its doors; and what every member of a run does there.

What a node remembers dies with it, what its disk holds does not: a crash keeps a prefix of the writes in flight. While
it is stopped everything waits, and is done in order when it goes on, with the clock at another time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.coordination import CoordinatorView, Grant
from protocols.delivery import Intake
from protocols.directory import SKEW_S, DirectoryRules, RecordKey, RecordKind
from protocols.election import Election
from protocols.envelopes import M, Sealed, seal, unseal
from protocols.faults import PeerFault
from protocols.identity import peer_id_of, public_bytes
from protocols.messages import (
    CHAIN_PAGE_MAX,
    Announcement,
    ChainRequest,
    Directive,
    Envelopes,
    Heartbeat,
    HeartbeatReply,
    Lease,
    PushRollouts,
    Reply,
    Request,
    RoundCall,
    RunEnd,
    Verdict,
    decode_reply,
    decode_request,
    encode,
)
from protocols.orders import Orders
from protocols.policy import Chain, Equivocation, Extended, Gap
from protocols.presence import BEAT_S, SILENT_S, Sessions
from protocols.rounds import Round
from tests.simulation.world import CALL_S, RUN, STORM_S, TRAINER_ID, WALL_EPOCH_S, World

if TYPE_CHECKING:
    from tests.simulation.producer import Producer
    from tests.simulation.trainer import Trainer

LEASES = RecordKey(RUN, RecordKind.COORDINATOR)
Answered = Callable[[Any], None]  # with what came back; None: the call failed


@dataclass(frozen=True)
class Parts:
    """The machines of a run; a mutation test puts a broken one in."""

    intake: type[Intake] = Intake
    chain: type[Chain] = Chain
    election: type[Election] = Election
    orders: type[Orders] = Orders
    view: type[CoordinatorView] = CoordinatorView
    round: type[Round] = Round
    trainer: "type[Trainer] | None" = None
    producer: "type[Producer] | None" = None


class Call:
    """A request on its way, and its answer on the way back."""

    __slots__ = (
        "answered",
        "body",
        "done",
        "kind",
        "life",
        "replied",
        "sent_s",
        "source",
        "target",
        "timeout_s",
        "world",
    )

    def __init__(self, source: "Node", target: "Node", kind: str, body: Any, answered: Answered) -> None:
        self.world, self.source, self.target, self.kind, self.body = source.world, source, target, kind, body
        self.answered, self.life, self.done, self.replied = answered, source.life, False, False
        self.sent_s, self.timeout_s = self.world.now_s, BEAT_S if kind == "beat" else 3.0 if kind == "dht" else CALL_S

    def send(self) -> None:
        if not self.world.carry(self.source, self.target, self.kind, self.arrive):
            self.lose()

    def arrive(self) -> None:
        target = self.target
        if not target.up:
            if self.world.plan.dead_is_silent:
                self.lose()
            else:
                self.world.at(self.world.now_s + 0.05, self.answer, None)
            return
        if target.stopped:
            self.lose()
        target.do(target.serve, self)

    def reply(self, body: Any) -> None:
        """The answer of the target."""
        self.replied = True
        if not self.world.carry(self.target, self.source, self.kind, self.answer, body):
            self.lose()

    def answer(self, body: Any) -> None:
        source = self.source
        if self.done or source.life != self.life:
            return
        self.done = True
        if self.world.now_s - self.sent_s > self.timeout_s:
            body = None
        source.do(source.guarded, self.answered, body)

    def lose(self) -> None:
        """No answer will come, or perhaps none: the caller waits until its time is up."""
        self.world.at(max(self.world.now_s, self.sent_s + self.timeout_s), self.answer, None)


class Node:
    """Clocks, disk, doors."""

    may_lead = False

    def __init__(self, world: World, key: Ed25519PrivateKey) -> None:
        self.world, self.key, self.rng = world, key, world.rng
        self.parts: Parts
        self.peer_id = peer_id_of(public_bytes(key))
        self.index = len(world.all)
        self.life = 0
        self.up = self.stopped = self.gone = False
        self.honest = True
        self.wiped = False
        """Lost its disk at least once."""
        self._backlog: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = []
        # Anybody may be 3 s off the bootstrap peers (protocols/directory.py), and tick a little fast or slow.
        self.skew_s = self.rng.uniform(-2.5, 2.5)
        self.tick = 1 + self.rng.uniform(-2e-4, 2e-4)
        self.boot_s = self.rng.uniform(0.0, 1e5)
        self.sync_s = self.rng.choice((0.02, 0.1, 0.4))
        self._writes: list[tuple[Callable[[], Any], Callable[[], Any] | None]] = []
        world.all.append(self)
        world.nodes[self.peer_id] = self

    @property
    def leads(self) -> bool:
        """Is it the coordinator, by its own clock?"""
        return False

    @property
    def steady_s(self) -> float:
        """The clock that nobody sets."""
        return self.boot_s + self.world.now_s * self.tick

    @property
    def wall_s(self) -> float:
        """Seconds since 1970, more or less."""
        return WALL_EPOCH_S + self.world.now_s + self.skew_s

    # ------------------------------------------------------------------ time

    def do(self, action: Callable[..., Any], *args: Any) -> None:
        """Now, or when this node goes on."""
        if self.stopped:
            self._backlog.append((self.life, action, args))
        else:
            action(*args)

    def after(self, delay_s: float, action: Callable[..., Any], *args: Any) -> None:
        """Later, in this life only."""
        self.world.after(delay_s, self, action, *args)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s * self.rng.uniform(0.9, 1.1), again)

        self.after(period_s * self.rng.random(), again)

    # ------------------------------------------------------------------ envelopes

    def seal(self, message: M) -> Sealed[M]:
        """Signed by this node. What was sealed here need not be verified at each of a thousand peers."""
        sealed = seal(self.key, message)
        self.world.sealed[sealed.raw] = sealed
        return sealed

    def unseal(self, raw: bytes, kind: type[M]) -> Sealed[M]:
        """What came, verified. Raises PeerFault."""
        sealed = self.world.sealed.get(raw)
        return sealed if sealed is not None and type(sealed.message) is kind else unseal(raw, kind)

    # ------------------------------------------------------------------ disk

    def commit(self, change: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
        """One transaction: durable at the disk's next flush, in order; then `then`."""
        self._writes.append((change, then))
        if len(self._writes) == 1:
            self.after(self.rng.uniform(0.001, self.sync_s), self._flush)

    def _flush(self) -> None:
        writes, self._writes = self._writes, []
        for change, _ in writes:
            change()
        for _, then in writes:
            if then is not None:
                then()

    def wipe(self) -> None:
        """The disk is lost."""
        raise NotImplementedError

    # ------------------------------------------------------------------ accidents

    def crash(self, wipes: bool = False, back_s: float | None = None) -> None:
        """kill -9. Of the writes in flight, any prefix reached the disk."""
        if not self.up:
            return
        self.world.counts["crashes"] += 1
        if self.may_lead:
            self.world.dht_trouble_s = max(self.world.dht_trouble_s, min(self.world.now_s, STORM_S))
        self.up = self.stopped = False
        self.life += 1
        self._backlog.clear()
        for change, _ in self._writes[: self.rng.randint(0, len(self._writes))]:
            change()
        self._writes.clear()
        if wipes:
            self.world.counts["disks lost"] += 1
            self.wiped = True
            self.wipe()
        if back_s is None:
            back_s = min(self.world.now_s + self.rng.uniform(1.5, 8.0), max(STORM_S, self.world.now_s + 1.5))
        if back_s < math.inf:
            self.world.at(back_s, self.boot)

    def lose(self) -> None:
        """A crash that takes the disk along."""
        self.crash(wipes=True)

    def leave(self) -> None:
        """SIGTERM: a last word, then the end of the process."""
        if self.up and not self.stopped:
            self.world.counts["departures"] += 1
            self.farewell()
            self.after(0.5, self.crash)

    def stop(self, length_s: float) -> None:
        """SIGSTOP, and later SIGCONT."""
        if not self.up or self.stopped:
            return
        self.world.counts["stops"] += 1
        if self.may_lead and not self.world.calm:
            self.world.dht_trouble_s = self.world.now_s
        self.stopped = True
        until_s = self.world.now_s + length_s
        self.world.at(until_s if self.world.calm else min(until_s, STORM_S), self.go_on, self.life)

    def go_on(self, life: int) -> None:
        """SIGCONT: what was due or came meanwhile is done now, in order."""
        if self.life != life:
            return
        self.stopped = False
        if self.may_lead and not self.world.calm:
            self.world.dht_trouble_s = self.world.now_s
        backlog, self._backlog = self._backlog, []
        for at_life, action, args in backlog:
            if at_life == self.life:
                self.do(action, *args)

    def boot(self) -> None:
        """A new process on the old disk."""
        if not self.up and not self.gone:
            self.up = True
            if self.may_lead and not self.world.calm:
                self.world.dht_trouble_s = self.world.now_s  # its records are gone
            self.start()

    def start(self) -> None:
        raise NotImplementedError

    def farewell(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ doors

    def guarded(self, action: Callable[..., Any], *args: Any) -> bool:
        """The receive loop: a fault of the peer is counted, anything else is a bug and ends the test (S7)."""
        try:
            action(*args)
        except PeerFault as fault:
            self.world.counts[f"fault: {fault.reason}"] += 1
            return False
        return True

    def ask(self, target: str, kind: str, body: Any, answered: Answered) -> None:
        """One request to one peer."""
        node = self.world.nodes.get(target)
        if node is not None and node is not self:  # a liar may name anybody
            Call(self, node, kind, body, answered).send()
        else:
            self.after(0.01, answered, None)

    def serve(self, call: Call) -> None:
        """A request came; a fault in it is answered like a broken connection."""
        if not self.guarded(self.answer, call):
            call.reply(None)
        elif not call.replied:
            call.lose()  # unless the answer, which waits for the disk, comes first

    def answer(self, call: Call) -> None:
        raise NotImplementedError

    def hear(self, source: str, raw: bytes) -> None:
        raise NotImplementedError


class Member(Node):
    """Follows the run: its chain, its heartbeats, its coordinator."""

    role: Any = "inference"

    def __init__(self, world: World, key: Ed25519PrivateKey, parts: Parts) -> None:
        super().__init__(world, key)
        self.parts = parts
        self.guides: list[str] = []
        """Bootstrap peers that it beats to."""
        self.log: list[bytes] = []  # on disk: every announcement that changed the chain, in order
        self.chain: Chain
        self.orders: Orders

    def start(self) -> None:
        """What every process of a run begins with."""
        manifest = self.world.manifest.message
        self.session = self.rng.randbytes(16)
        self.sessions = Sessions()
        self.neighbours: dict[str, tuple[Heartbeat, float]] = {}
        self.chain = self.parts.chain(manifest)
        self.orders = self.parts.orders(manifest)
        self.rules = DirectoryRules(RUN)
        self.rules.learn(self.world.manifest)
        self.records: dict[str, tuple[float, bytes]] = {}  # as a storing node of the DHT, in memory
        self.seen_term = 0
        self.catching_up = False
        self.trainer_step: int | None = None
        self.trainer_queued = 0
        self.wanted_since_s: float | None = None
        self.next_counter_said = 0
        self.credit: int | None = None
        self.sources: tuple[str, ...] = ()
        for raw in self.log:
            self.chain.extend(self.unseal(raw, Announcement))
        self.every(BEAT_S, self.beat_all)

    def wipe(self) -> None:
        self.log = []

    # ------------------------------------------------------------------ requests

    def answer(self, call: Call) -> None:
        source = call.source.peer_id
        match call.kind:
            case "dht":
                call.reply(self.on_dht(source, call.body))
            case "blob":
                call.reply(self.on_blob_request(call.body))
            case _:
                self.on_request(source, decode_request(call.body), call)

    def on_request(self, source: str, request: Request, call: Call) -> None:
        match request:
            case Heartbeat():
                call.reply(encode(self.on_heartbeat(source, request)))
            case ChainRequest(_, first):
                call.reply(encode(Envelopes(self.page(first))))
            case PushRollouts():
                self.on_push(source, request, call)
            case RoundCall():
                call.reply(encode(self.on_round(source, request)))
            case _:
                raise PeerFault("not served here", type(request).__name__)

    def on_dht(self, source: str, body: Any) -> Any:
        """What a storing node answers. The rules decide; the record that lives longest stays."""
        if body[0] == "get":
            return {subkey: kept for subkey, kept in self.records.items() if kept[0] > self.wall_s - SKEW_S}
        _, subkey, value, until_s = body
        if not self.guarded(self.rules.check, LEASES, subkey, value, until_s, self.wall_s):
            return False
        if subkey not in self.records or until_s > self.records[subkey][0]:
            self.records[subkey] = (until_s, msgspec.msgpack.decode(value))
        return True

    def on_push(self, source: str, request: PushRollouts, call: Call) -> None:
        raise PeerFault("not a trainer")

    def on_round(self, source: str, request: RoundCall) -> Reply:
        raise PeerFault("not an inference peer")

    def on_blob_request(self, root: bytes) -> Any:
        raise PeerFault("no adapters here")

    def request(self, target: str, message: Request, answered: Callable[[Reply | None], None]) -> None:
        """Ask, and hand on the decoded answer; None for none, and for nonsense."""

        def decoded(raw: bytes | None) -> None:
            reply: Reply | None = None
            try:
                reply = decode_reply(raw) if raw is not None else None
            except PeerFault as fault:
                self.world.counts[f"fault: {fault.reason}"] += 1
            answered(reply)

        self.ask(target, "beat" if isinstance(message, Heartbeat) else "call", encode(message), decoded)

    # ------------------------------------------------------------------ heartbeats

    def beat(self) -> Heartbeat:
        """What this peer says of itself."""
        raise NotImplementedError

    def targets(self) -> list[str]:
        """The bootstrap peers, the trainer, the coordinator."""
        coordinator = self.orders.coordinator
        named = [*self.guides, TRAINER_ID, *([coordinator] if coordinator is not None else [])]
        return [target for target in dict.fromkeys(named) if target != self.peer_id]

    def beat_all(self) -> None:
        for target in self.targets():
            self.beat_to(target)

    def hurry(self) -> None:
        """News for the coordinator."""
        if self.orders.coordinator not in (None, self.peer_id):
            self.beat_to(str(self.orders.coordinator))

    def beat_to(self, target: str) -> None:
        beat, newest = self.beat(), self.orders.newest
        if newest is not None and self.orders.alone(self.steady_s):
            beat = msgspec.structs.replace(beat, directive=newest.raw)
        self.request(target, beat, lambda reply: self.beat_answered(target, reply))

    def farewell(self) -> None:
        beat = msgspec.structs.replace(self.beat(), leaving=True)
        for target in self.targets():
            self.request(target, beat, lambda reply: None)

    def on_heartbeat(self, source: str, beat: Heartbeat) -> HeartbeatReply:
        if beat.run != RUN:
            raise PeerFault("foreign run", beat.run)
        verdict: Verdict = self.sessions.heard(source, beat.session, self.steady_s)
        if verdict == "ok" and beat.leaving:
            self.sessions.left(source, beat.session)
            self.neighbours.pop(source, None)
        elif verdict == "ok":
            self.neighbours[source] = (beat, self.steady_s)
            if beat.version is not None and beat.version > self.chain.version:
                self.catch_up(source)
        if beat.directive is not None:
            self.guarded(self.told_of_order, beat.directive)
        grant = self.grant(source, beat) if verdict == "ok" else None
        newest = self.orders.newest
        step, queued, wanted, next_counter = self.progress(source)
        return HeartbeatReply(
            verdict=verdict,
            now_ms=int(self.wall_s * 1000),
            head=self.chain.version if self.chain.version >= 0 else None,
            step=step,
            queued=queued,
            wanted=wanted,
            next_counter=next_counter,
            ended=self.chain.end is not None,
            term=self.orders.term,
            coordinator=self.orders.coordinator,
            directive=newest.raw if newest is not None else None,
            limit=grant.limit if grant is not None else None,
            sources=grant.sources if grant is not None else (),
        )

    def progress(self, source: str) -> tuple[int | None, int | None, int | None, int | None]:
        """A trainer's answer: steps, queue, groups wanted, the asker's next counter."""
        return None, None, None, None

    def grant(self, source: str, beat: Heartbeat) -> Grant | None:
        """A coordinator's answer."""
        return None

    def beat_answered(self, target: str, reply: Reply | None) -> None:
        if not isinstance(reply, HeartbeatReply):
            if target == self.orders.coordinator:
                self.orders.lost()
                self.news()
            return
        assert reply.verdict != "identity taken" or not self.honest, f"a restarted peer was sent away ({SILENT_S} s)"
        if target == TRAINER_ID:
            self.trainer_answered(reply)
        if reply.directive is not None:
            self.guarded(self.take_directive, reply.directive)
        if reply.limit is not None and reply.term is not None and self.orders.leads(target, reply.term):
            assert reply.term >= self.seen_term, f"S6: a credit of term {reply.term} after term {self.seen_term}"
            self.orders.heard(self.steady_s)
            self.credit, self.sources = reply.limit, reply.sources
        if (reply.head is not None and reply.head > self.chain.version) or (reply.ended and self.chain.end is None):
            self.catch_up(target)
        self.news()

    def trainer_answered(self, reply: HeartbeatReply) -> None:
        self.next_counter_said = max(self.next_counter_said, reply.next_counter or 0)
        if not reply.wanted:
            self.wanted_since_s = None
        elif self.wanted_since_s is None:
            self.wanted_since_s = self.steady_s
        if reply.step is not None:
            self.trainer_step, self.trainer_queued = reply.step, reply.queued or 0

    def news(self) -> None:
        """Something changed that this peer may act upon."""

    # ------------------------------------------------------------------ orders

    def take_directive(self, raw: bytes) -> None:
        """Obey it if it is above what we obey. S6, whatever the fence thinks: no lower term changes anything."""
        orders = self.orders
        if orders.newest is not None and orders.newest.raw == raw:
            return
        sealed = self.unseal(raw, Directive)
        term = sealed.message.term
        before = (orders.coordinator, orders.term, orders.newest, orders.mode, orders.min_version)
        orders.take(sealed, self.steady_s, self.wall_s)
        if before != (orders.coordinator, orders.term, orders.newest, orders.mode, orders.min_version):
            assert term >= self.seen_term, f"S6: a directive of term {term} was obeyed after term {self.seen_term}"
            if before[:2] != (orders.coordinator, orders.term):
                self.credit = None  # nobody else's counts
                self.led_by(sealed)
                self.world.counts["obedience changed"] += 1
            self.news()
        self.seen_term = max(self.seen_term, term)

    def led_by(self, sealed: Sealed[Directive]) -> None:
        """Somebody else has begun to lead. Only candidates care."""

    def told_of_order(self, raw: bytes) -> None:
        """Somebody stands at this directive, and hears no more from its sender. Only candidates care."""

    # ------------------------------------------------------------------ chain

    def hear(self, source: str, raw: bytes) -> None:
        """Gossip: an announcement, the end, a directive; a lease is for candidates."""
        known = self.world.sealed.get(raw)
        match known.message if known is not None else None:
            case Directive() | None:
                self.guarded(self.take_directive, raw)
            case Lease():
                self.guarded(self.take_lease, raw)
            case _:
                self.guarded(self.take, raw, source)

    def take_lease(self, raw: bytes) -> None:
        """Only candidates care."""

    def take(self, raw: bytes, source: str) -> bool:
        """An announcement or an end, wherever it came from. True if it was news. Raises PeerFault."""
        known = self.world.sealed.get(raw)
        if known is not None and isinstance(known.message, RunEnd):
            end: Sealed[RunEnd] = known
            if self.chain.end is not None:
                return False
            if not self.chain.finish(end):
                self.catch_up(source)
            self.news()
            return True
        outcome = self.chain.extend(self.unseal(raw, Announcement))
        match outcome:
            case Extended() | Equivocation():
                self.commit(lambda: self.log.append(raw))
                self.news()
                return True
            case Gap():
                self.catch_up(source)
        return False

    def page(self, first: int) -> tuple[bytes, ...]:
        """Announcements, and behind the head the proofs of equivocation and the end."""
        raws = [entry.raw for entry in self.chain.since(first, CHAIN_PAGE_MAX)]
        for proof in self.chain.equivocations.values():
            raws += (proof.first, proof.second)
        return tuple(raws + ([self.chain.end.raw] if self.chain.end is not None else []))

    def catch_up(self, source: str, first: int | None = None) -> None:
        """Fetch what this peer lacks, page by page."""
        if self.catching_up:
            return
        self.catching_up = True
        first = self.chain.version + 1 if first is None else first

        def answered(reply: Reply | None) -> None:
            self.catching_up = False
            if not isinstance(reply, Envelopes) or not reply.envelopes:
                return
            before = (self.chain.version, self.chain.end)
            self.catching_up = True  # the announcements of one page must not start a race
            for raw in reply.envelopes:
                self.guarded(self.take, raw, source)
            self.catching_up = False
            if (self.chain.version, self.chain.end) != before:
                self.catch_up(source)
            elif first > 0 and not self.chain.equivocations:
                self.catch_up(source, 0)

        self.request(source, ChainRequest(RUN, first), answered)
