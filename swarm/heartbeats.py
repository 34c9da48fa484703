"""Heartbeats of one run: to the bootstrap peers, the trainers and the coordinator, and what their answers tell.

    every beat, and at once when there is news (`hurry`) --Heartbeat--> a target
                 <-- head, end; a trainer's step and queue; the coordinator's directive, credit, sources

A target that is slow to answer delays only its own beats.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from protocols.envelopes import unseal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import Directive, Heartbeat, HeartbeatReply
from protocols.presence import BEAT_S, SILENT_S

if TYPE_CHECKING:
    from swarm.follower import Follower

log = logging.getLogger(__name__)

GOODBYE_S = 1.0
# Between two beats that do not wait for their turn: twenty a second a peer at most, and one a step is the rule.
HURRY_S = 0.05

# What ends this process when a peer that we beat to says it. Not "unknown run": one that was restarted without the
# run is of no use to us, and no reason to stop.
FINAL_VERDICTS = frozenset({"identity taken", "banned"})


class Heartbeats:
    """What we say of ourselves, to whom, and what we last heard from a trainer and from the coordinator."""

    def __init__(self, follower: "Follower") -> None:
        self.follower = follower
        self.node = follower.node
        self.beat: Callable[[], Heartbeat] = lambda: Heartbeat(
            run=follower.run, session=self.node.session, role=self.node.config.role
        )
        self.trainer_step: int | None = None
        self.trainer_queued: int | None = None
        self.trainer_heard_s = time.monotonic()
        """When a trainer last gave a sign of life; at first, when we began to listen."""
        self.wanted_since_s: float | None = None
        """Since when the trainer has said that it waits for rollouts."""
        self.next_counter = 0
        """The lowest counter that we have not used, as the trainer knows it."""
        self.credit: int | None = None
        """Groups of this session that the coordinator lets us begin; None before it has said."""
        self.on_found: Callable[[str], None] = lambda target: None
        """Called with a target that answers again."""
        self._unreachable: dict[str, str] = {}
        """Targets that do not answer, and the code of the last warning."""
        self._linked_s: dict[str, float] = {}
        """Since when each of them has not answered over the connection that there may be."""
        self._refusing: dict[str, TransportFault] = {}
        """Targets that refuse us, and why."""
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._hurried = asyncio.Event()

    @property
    def lost_targets(self) -> dict[str, str]:
        """Targets that do not answer now, and why."""
        return dict(self._unreachable)

    def hurry(self) -> None:
        """Something changed that the coordinator should know, or that we want its answer to: do not wait a beat."""
        self._hurried.set()

    async def run(self) -> None:
        """One beat a target at a time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hurry())
            while True:
                for target in self._targets():
                    if not self._busy[target].locked():
                        tasks.create_task(self._beat_to(target))
                await asyncio.sleep(BEAT_S)

    async def _hurry(self) -> None:
        while True:
            await self._hurried.wait()
            self._hurried.clear()
            target = self._coordinator_target()
            if target is not None and target not in self._unreachable:
                await self._beat_to(target)
            await asyncio.sleep(HURRY_S)

    def _targets(self) -> list[str]:
        trainers = () if self.node.config.role == "bootstrap" else self.follower.trainers()  # they beat to us
        coordinator = self._coordinator_target()
        return list(
            dict.fromkeys([*self.node.config.bootstrap, *trainers, *([coordinator] if coordinator is not None else [])])
        )

    def _coordinator_target(self) -> str | None:
        """The bootstrap address that the coordinator answers at, or its peer id. None: nobody leads, or we do."""
        orders = self.follower.orders
        if orders is None or orders.coordinator in (None, self.node.peer_id) or orders.alone(time.monotonic()):
            return None
        peer_id = orders.coordinator
        return next((address for address, known in self.node.bootstraps.items() if known == peer_id), peer_id)

    async def say_goodbye(self) -> None:
        """A last beat, so that nobody waits for us or takes a quick return for a copy. Bounded, best effort."""
        await self.follower.flush()
        beat = msgspec.structs.replace(self.beat(), leaving=True)
        peers = [self.node.bootstraps.get(target, target) for target in self._targets()]
        calls = [self.node.ask(peer_id, beat, GOODBYE_S) for peer_id in peers if not peer_id.startswith("/")]
        farewell = self.follower.neighbourhood.say_farewell()
        for outcome in await asyncio.gather(*calls, farewell, return_exceptions=True):
            if isinstance(outcome, TransportFault | PeerFault):
                log.info("goodbye not heard: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _beat_to(self, target: str) -> None:
        """One heartbeat to a bootstrap address or to a peer id."""
        async with self._busy[target]:
            is_bootstrap = target.startswith("/")
            try:
                peer_id = self.node.bootstraps.get(target) if is_bootstrap else target
                if peer_id is None or target in self._unreachable:
                    peer_id = await self._reconnect(target)
                reply = await self.node.ask(peer_id, self._beat_now(), BEAT_S)
                if not isinstance(reply, HeartbeatReply):
                    raise PeerFault("unexpected reply", type(reply).__name__)
            except PeerFault as fault:
                self.follower.refusals[fault.reason] += 1
                return
            except TransportFault as fault:
                if fault.code in FINAL_VERDICTS:
                    self._refused_by(target, fault)
                else:
                    self._lost(target, fault)
                return
        self._found(target)
        if reply.verdict in FINAL_VERDICTS:
            self._refused_by(target, self.node.turned_away(reply.verdict, f"says {short(peer_id)}"))
        else:
            self._refusing.pop(target, None)
            await self._on_reply(peer_id, reply)

    def _beat_now(self) -> Heartbeat:
        """What we say; and, when nobody leads us, whom we obeyed last: who wants to lead us must do so above that."""
        orders = self.follower.orders
        if orders is None or orders.newest is None or not orders.alone(time.monotonic()):
            return self.beat()
        return msgspec.structs.replace(self.beat(), directive=orders.newest.raw)

    def _refused_by(self, target: str, fault: TransportFault) -> None:
        """One bootstrap peer alone may be wrong, or hostile: we go only when everybody who answers refuses us."""
        if target not in self._refusing:
            self.node.warn("refused", f"{target[-60:]} refuses this peer: {fault}")
        self._refusing[target] = fault
        answering = [other for other in self._targets() if other not in self._unreachable]
        if all(other in self._refusing for other in answering):
            raise fault

    async def _reconnect(self, target: str) -> str:
        await self._give_up_connection(target)
        if not target.startswith("/"):
            await self.follower.neighbourhood.reach(target)
            return target
        peer_id = await self.node.host.connect(target, BEAT_S)
        await self.node.hello(peer_id, self.follower.run)
        self.node.bootstraps[target] = peer_id
        await self.node.directory.add_peer(peer_id)  # a restarted bootstrap peer knows nobody
        return peer_id

    async def _give_up_connection(self, target: str) -> None:
        """End a connection over which nothing has come for three beats.

        libp2p keeps it for 40 s, takes it for good meanwhile, and dials no other. When a cut cable is mended, TCP sends
        on it again only after as long as it was cut; a new one works at once.
        """
        peer_id = self.node.bootstraps.get(target) if target.startswith("/") else target
        now_s = time.monotonic()
        if peer_id is not None and now_s - self._linked_s.setdefault(target, now_s) >= SILENT_S:
            self._linked_s[target] = now_s
            await self.node.host.disconnect(peer_id)

    # ------------------------------------------------------------------ answers

    async def _on_reply(self, peer_id: str, reply: HeartbeatReply) -> None:
        if peer_id in self.follower.trainers():
            await self._trainer_answered(reply)
        await self._obey(peer_id, reply)
        chain = self.follower.chain
        if chain is None:
            return
        news = reply.head is not None and reply.head > chain.version
        if news or (reply.ended and not self.follower.ended.is_set()):
            await self.follower.catch_up(peer_id)

    async def _trainer_answered(self, reply: HeartbeatReply) -> None:
        self.trainer_heard_s = time.monotonic()
        if reply.next_counter is not None:
            self.next_counter = max(self.next_counter, reply.next_counter)
        if not reply.wanted:
            self.wanted_since_s = None
        elif self.wanted_since_s is None or reply.step != self.trainer_step:
            self.wanted_since_s = self.trainer_heard_s
        if reply.step is not None:
            await self.trainer_said(reply.step, reply.queued)

    async def trainer_said(self, step: int, queued: int | None) -> None:
        """A heartbeat's answer or a receipt told how far the trainer is."""
        if (self.trainer_step, self.trainer_queued) != (step, queued):
            self.trainer_step, self.trainer_queued = step, queued
            await self.follower.notify()

    @property
    def starved_s(self) -> float:
        """For how long the trainer has waited for the batch of one step, as far as we know."""
        return 0.0 if self.wanted_since_s is None else time.monotonic() - self.wanted_since_s

    async def _obey(self, peer_id: str, reply: HeartbeatReply) -> None:
        """What the answer says of the coordinator, whoever answers; and its credit, if it is the coordinator's."""
        if reply.directive is not None:
            try:
                await self.follower.take_directive(unseal(reply.directive, Directive))
            except PeerFault as fault:
                self.follower.refusals[fault.reason] += 1
        orders = self.follower.orders
        if orders is None or reply.limit is None or reply.term is None or not orders.leads(peer_id, reply.term):
            return
        orders.heard(time.monotonic())
        self.follower.neighbourhood.told_of(reply.sources, reply.head)
        if self.credit != reply.limit:
            self.credit = reply.limit
            await self.follower.notify()

    # ------------------------------------------------------------------ who answers

    def known_unreachable(self, target: str, fault: TransportFault) -> None:
        """It did not answer when we joined, and that was said then; it is tried again with every heartbeat."""
        self._unreachable[target] = fault.code

    def _what(self, target: str) -> str:
        if target.startswith("/"):
            return "bootstrap"
        return "trainer" if target in self.follower.trainers() else "coordinator"

    def _lost(self, target: str, fault: TransportFault) -> None:
        """Say so once; and once more when somebody else answers there: the peer got a new key (case B18)."""
        if target == self._coordinator_target() and self.follower.orders is not None:
            self.follower.orders.lost()  # do not wait for three beats: pace ourselves
        self._linked_s.setdefault(target, time.monotonic())
        said = self._unreachable.get(target)
        if said is None or (fault.code == "peer id mismatch" and said != fault.code):
            self._unreachable[target] = fault.code
            self.node.warn(f"{self._what(target)} unreachable", f"since {time.strftime('%H:%M:%S')}: {fault}")

    def _found(self, target: str) -> None:
        if self._unreachable.pop(target, None) is not None:
            self._linked_s.pop(target, None)
            self.on_found(target)
            self.node.warn(f"{self._what(target)} reachable", f"{target[-60:]} answers again")
