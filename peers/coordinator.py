"""The coordinator's duty: what an elected peer does for as long as it leads (DESIGN section 9).

    heartbeat --CoordinatorView--> credit, sources          each beat --> Directive (beacon), lost peers, mode

Trainers and bootstrap peers carry it with them; it sleeps until their election is won. It holds nothing that
heartbeats do not rebuild, so a new leader works within one beat and an old one has nothing to hand over. Before
each grant and each directive it asks the election whether it still leads: a process may have been stopped for
any time between two lines (case B46).
"""

import asyncio
import logging
import math
import time

from protocols.coordination import CoordinatorView, Grant
from protocols.envelopes import seal
from protocols.faults import PeerFault
from protocols.identity import short
from protocols.messages import Directive, Heartbeat, PeerStatus
from protocols.modes import Switch
from protocols.presence import BEAT_S
from swarm.follower import Follower
from swarm.node import Node, now_ms

log = logging.getLogger(__name__)


class Coordinator:
    """One run's coordinator, while this peer leads it."""

    def __init__(self, node: Node, follower: Follower) -> None:
        self.node = node
        self.follower = follower
        self.view: CoordinatorView | None = None
        self._number = 0
        self._woken = asyncio.Event()
        follower.grant = self.grant
        follower.rows = self.rows
        follower.candidate.on_change = self._changed

    @property
    def _leading(self) -> CoordinatorView | None:
        return self.view if self.view is not None and self.follower.candidate.leads else None

    def grant(self, peer_id: str, beat: Heartbeat) -> Grant | None:
        """The answer to a heartbeat; None unless we lead."""
        view = self._leading
        if view is None:
            return None
        self._look_at_ourselves(view)
        return view.heard(peer_id, beat, time.monotonic())

    def rows(self) -> list[PeerStatus] | None:
        """Everybody, for `swarm status`; None unless we lead."""
        view = self._leading
        return view.rows(time.monotonic()) if view is not None else None

    async def run(self) -> None:
        """A directive each beat while we lead."""
        while True:
            self._woken.clear()
            view = self._leading
            if view is not None:
                await self._one_beat(view)
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _changed(self) -> None:
        """We begin or end to lead."""
        orders = self.follower.orders
        self.view = None
        if self.follower.candidate.leads and orders is not None:
            self.view = CoordinatorView(self.follower.manifest, orders.mode, time.monotonic())
            self._number = int(time.time())  # above what an earlier life of ours said in the same term
            self._woken.set()

    async def _one_beat(self, view: CoordinatorView) -> None:
        self._look_at_ourselves(view)
        lost, switch = view.tick(time.monotonic())
        for peer_id in lost:
            log.info("%s is silent; its work is given to others", short(peer_id))
            self.node.metrics.emit("lost", peer_id=peer_id)
        if switch is not None:
            self._show(switch)
        directive = Directive(
            run=self.follower.run,
            term=self.follower.candidate.term,
            number=self._number,
            mode=view.mode,
            min_version=view.min_version,
            issued_ms=now_ms(),
        )
        self._number += 1
        sealed = seal(self.node.identity.key, directive)
        try:
            await self.follower.take_directive(sealed)  # we obey like everybody else
        except PeerFault as fault:  # a new manifest does not name us, or this process slept before this line
            log.info("our own directive is refused: %s", fault)
            return
        await self.follower.control.publish(sealed)

    def _look_at_ourselves(self, view: CoordinatorView) -> None:
        """What our own heartbeat would say, and the newest version that we have verified."""
        view.manifest = self.follower.manifest  # a new revision counts at once
        if self.follower.chain is not None:
            view.head_is(self.follower.chain.version)
        view.heard(self.node.peer_id, self.follower.heartbeats.beat(), time.monotonic())

    def _show(self, switch: Switch) -> None:
        measured = switch.measured
        needed = measured.needed_per_s
        self.node.metrics.emit(
            "mode",
            mode=switch.mode,
            term=self.follower.candidate.term,
            groups_per_s=round(measured.groups_per_s, 3),
            needed_per_s=round(needed, 3) if math.isfinite(needed) else None,
            batch_groups=measured.batch_groups,
            step_s=round(measured.step_s, 4),
            refresh_s=round(measured.refresh_s, 4),
        )
        log.info("mode %s: %.2f groups/s, %.2f needed", switch.mode, measured.groups_per_s, needed)
