"""Who may lead: the trainer and bootstrap peers. The DHT they meet in, their elections, the coordinator's duty.

The DHT is what hivemind's comes to: a put goes to every storing node that answers, a read is the union of what those
hold that answer, a node that does not answer is left out for a while, and any of it may fail or be slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.coordination import CoordinatorView, Grant
from protocols.directory import SKEW_S
from protocols.election import (
    TERM_EPOCH_S,
    Action,
    Claim,
    Election,
    ElectionConfig,
    Event,
    Heard,
    Lead,
    Obeyed,
    Phase,
    Put,
    Read,
    ReadBack,
    StepDown,
    Stored,
    Tick,
)
from protocols.envelopes import Sealed
from protocols.messages import Directive, Heartbeat, HeartbeatReply, Lease
from protocols.presence import BEAT_S, SILENT_S
from tests.simulation.node import Member, Parts
from tests.simulation.world import RUN, World

LEFT_OUT_S = SILENT_S  # a node that did not answer is not asked for this long (swarm/directory.py)
SLOW_S = 4.0


class Directory:
    """One node's way into the DHT."""

    def __init__(self, node: "Member", stores: list[str]) -> None:
        self.node, self.stores = node, stores
        self._left_out: dict[str, float] = {}

    def put(self, raw: bytes, until_s: float, then: Callable[[bool], None]) -> None:
        """True if anybody took it, as far as we hear."""
        world, rng = self.node.world, self.node.rng
        body = ("put", self.node.peer_id, msgspec.msgpack.encode(raw), until_s)

        def done(answers: list[Any]) -> None:
            taken = any(answers)
            if not world.calm and rng.random() < world.plan.dht_fails:
                world.dht_trouble_s = world.now_s
                if rng.random() < 0.5:
                    taken = False  # though it may well be there
                else:
                    self.node.after(rng.uniform(0.5, SLOW_S), then, taken)
                    return
            then(taken)

        self._all(body, done)

    def get(self, then: Callable[[dict[str, bytes]], None]) -> None:
        """Every record that somebody holds; of several, the one that lives longest."""

        def done(answers: list[Any]) -> None:
            best: dict[str, tuple[float, bytes]] = {}
            for held in answers:
                for subkey, (until_s, raw) in (held or {}).items():
                    if subkey not in best or until_s > best[subkey][0]:
                        best[subkey] = (until_s, raw)
            then({subkey: raw for subkey, (_, raw) in best.items()})

        self._all(("get",), done)

    def _all(self, body: Any, done: Callable[[list[Any]], None]) -> None:
        node, answers = self.node, []
        asked = [peer_id for peer_id in self.stores if self._left_out.get(peer_id, 0.0) <= node.steady_s]
        for peer_id in self.stores:
            out = node.world.nodes[peer_id]
            if peer_id not in asked and out.up and not out.stopped:
                node.world.dht_trouble_s = node.world.now_s

        def answered(peer_id: str, answer: Any) -> None:
            if answer is None:
                self._left_out[peer_id] = node.steady_s + LEFT_OUT_S
            answers.append(answer)
            if len(answers) == len(asked):
                done(answers)

        for peer_id in asked:
            if peer_id == node.peer_id:
                node.after(0.001, lambda: answered(node.peer_id, node.on_dht(node.peer_id, body)))
            else:
                node.ask(peer_id, "dht", body, partial(answered, peer_id))
        if not asked:
            node.after(0.001, done, [])


class Candidate(Member):
    """A member that may be elected."""

    role: Any = "bootstrap"
    may_lead = True

    def __init__(self, world: World, key: Ed25519PrivateKey, parts: Parts) -> None:
        super().__init__(world, key, parts)
        self.stores: list[str] = []
        self.election: Election | None = None
        self.view: CoordinatorView | None = None

    def start(self) -> None:
        super().start()
        config = ElectionConfig(lease_s=self.world.plan.lease_s)
        self.directory = Directory(self, self.stores)
        self.election = self.parts.election(RUN, self.peer_id, config, self.steady_s)
        self.view = None
        self.led_term = self.number = 0
        self.claimed_s = 0.0
        self._wake = 0
        self._until_ms = 0
        self.every(BEAT_S, self.coordinate)
        self._read_often(config.renew_s)
        self.drive(Tick())

    @property
    def leads(self) -> bool:
        """Asked before every grant and every directive (case B46)."""
        return self.up and self.election is not None and self.election.leads(self.steady_s)

    # ------------------------------------------------------------------ the election

    def drive(self, event: Event) -> None:
        """Hand an event to the machine, do what it says, and wake it when it asks for it."""
        election = self.election
        if election is None:
            return
        for action in election.handle(event, self.steady_s):
            self.act(action)
        assert election.next_s > self.steady_s, f"an election spins while {election.phase.value}"
        self._wake += 1
        self.after((election.next_s - self.steady_s) / self.tick + 1e-6, self._woken, self._wake)

    def _woken(self, number: int) -> None:
        if number == self._wake:
            self.drive(Tick())

    def act(self, action: Action) -> None:
        match action:
            case Put():
                if self.election is not None and self.election.phase is Phase.CLAIMING:
                    self.claimed_s = self.world.now_s
                self.put(action, lambda ok: self.drive(Stored(ok)))
            case Read():
                self.read(lambda claims: self.drive(ReadBack(claims)))
            case Lead(term):
                self.world.counts["elections"] += 1
                self.led_term = term
                self.number = max(self.number, int(self.wall_s))  # rises over restarts too
                self.view = self.parts.view(self.world.manifest.message, self.orders.mode, self.steady_s)
                self.world.began_to_lead(self, term)
                self.after(0.0, self.coordinate)
            case StepDown(_, reason):
                self.world.counts[f"stepped down: {'a higher term' if reason.startswith('term') else reason}"] += 1
                self.view = None

    def put(self, action: Put, then: Callable[[bool], None]) -> None:
        """Store our lease; what the DHT took is also gossiped."""
        until_s = self.wall_s + self.world.plan.lease_s
        self._until_ms = max(self._until_ms + 1, int(until_s * 1000))
        lease = Lease(RUN, action.term, "claimed" if action.claimed else "standby", self._until_ms)
        sealed = self.seal(lease)

        def stored(ok: bool) -> None:
            if ok:
                self.world.gossip(self, sealed.raw)
            then(ok)

        self.directory.put(sealed.raw, until_s, stored)

    def read(self, then: Callable[[tuple[Claim, ...]], None]) -> None:
        """All claims that may be believed."""

        def done(records: dict[str, bytes]) -> None:
            claims: list[Claim] = []
            for raw in records.values():
                self.guarded(lambda raw=raw: claims.append(self.believed(raw)))
            then(tuple(claims))

        self.directory.get(done)

    def _read_often(self, period_s: float) -> None:
        """Gossip may lose every claim; the DHT has them."""
        self.read(lambda claims: self.drive(Heard(claims)))
        self.after(period_s, self._read_often, period_s)

    def believed(self, raw: bytes) -> Claim:
        """Raises PeerFault."""
        sealed = self.unseal(raw, Lease)
        self.rules.check_lease(sealed, self.wall_s)
        return Claim.of(sealed.sender, sealed.message)

    def take_lease(self, raw: bytes) -> None:
        claim = self.believed(raw)
        if claim.candidate != self.peer_id:
            self.drive(Heard((claim,)))

    def led_by(self, sealed: Sealed[Directive]) -> None:
        """Who orders has claimed: that is heard here before its lease, or instead of it."""
        if sealed.sender != self.peer_id:
            said = sealed.message
            until_ms = said.issued_ms + int(1000 * self.world.plan.lease_s)
            self.drive(Heard((Claim(sealed.sender, said.term, True, until_ms),)))

    def told_of_order(self, raw: bytes) -> None:
        """Who stands there obeys nobody below."""
        sealed = self.unseal(raw, Directive)
        self.orders.check(sealed, self.wall_s)
        self.drive(Obeyed(sealed.message.term, sealed.sender))

    def farewell(self) -> None:
        """SIGTERM: give the lease back."""
        super().farewell()
        election, self.election = self.election, None
        for action in election.resign(self.steady_s) if election is not None else []:
            match action:
                case Put():
                    self.put(action, lambda ok: None)
                case StepDown():
                    self.act(action)

    # ------------------------------------------------------------------ the duty

    @property
    def leading(self) -> CoordinatorView | None:
        """The view, while we lead; asked before every directive and every grant."""
        if not self.leads:
            return None
        if self.view is not None:
            self.world.acts_as_leader(self)
        return self.view

    def coordinate(self) -> None:
        """A directive each beat while we lead."""
        view = self.leading
        if view is None:
            return
        self.look_at_ourselves(view)
        _, switch = view.tick(self.steady_s)
        self.world.counts["mode switches"] += switch is not None
        self.direct(view.mode, view.min_version, self.led_term)

    def direct(self, mode: Any, min_version: int, term: int) -> None:
        """Sign a directive, obey it, and tell everybody."""
        said = Directive(
            run=RUN,
            term=term,
            number=self.number,
            mode=mode,
            min_version=min_version,
            issued_ms=int(self.wall_s * 1000),
        )
        self.number += 1
        raw = self.seal(said).raw
        self.take_directive(raw)
        self.world.gossip(self, raw)

    def look_at_ourselves(self, view: CoordinatorView) -> None:
        if self.chain.version >= 0:
            view.head_is(self.chain.version)
        view.heard(self.peer_id, self.beat(), self.steady_s)

    def grant(self, source: str, beat: Heartbeat) -> Grant | None:
        view = self.leading
        if view is None:
            return None
        self.look_at_ourselves(view)
        return view.heard(source, beat, self.steady_s)

    def beat(self) -> Heartbeat:
        version = self.chain.version if self.chain.version >= 0 else None
        return Heartbeat(run=RUN, session=self.session, role=self.role, version=version)


class Hostile(Candidate):
    """Eligible, and an enemy: the highest term there may be, a version that does not exist, a mode flip each beat,
    nothing for anybody or everything for everybody."""

    def __init__(self, world: World, key: Ed25519PrivateKey, parts: Parts) -> None:
        super().__init__(world, key, parts)
        self.honest = False
        self.credits = self.rng.choice(((0,), (2**32 - 1,), (0, 2**32 - 1)))

    def drive(self, event: Event) -> None:
        """It does not wait to be elected."""

    def coordinate(self) -> None:
        if self.world.now_s < 6.0:
            return
        self.led_term = int(self.wall_s + self.rng.choice((0.0, SKEW_S)) - TERM_EPOCH_S)
        self.put(Put(self.led_term, True), lambda ok: None)
        mode = "async" if self.number % 2 else "sequential"
        self.direct(mode, self.rng.choice((0, self.chain.version + 1000, 2**32 - 1)), self.led_term)

    def on_heartbeat(self, source: str, beat: Heartbeat) -> HeartbeatReply:
        reply = super().on_heartbeat(source, beat)
        return msgspec.structs.replace(
            reply,
            term=self.led_term,
            limit=self.credits[self.number % len(self.credits)],
            sources=(source, self.peer_id),
        )
