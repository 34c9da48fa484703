"""One gossip topic of a run: what is heard waits here until it is handled, and a sender of nonsense is not heard."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from protocols.envelopes import Sealed
from protocols.faults import PeerFault, TransportFault

if TYPE_CHECKING:
    from swarm.follower import Follower

log = logging.getLogger(__name__)

INBOX_MAX = 256  # messages waiting to be verified; at 0.1 ms each a burst of 256 is over in 26 ms


class Topic:
    """Publishes to a topic and hears it."""

    def __init__(self, follower: "Follower", name: str, take: Callable[[bytes, str], Awaitable[object]]) -> None:
        """`take(envelope, sender)` handles what is heard; the PeerFaults it raises are the sender's offences."""
        self.name = name
        self.bytes = 0
        """Published and heard."""
        self._follower = follower
        self._take = take
        self._inbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(INBOX_MAX)

    async def publish(self, sealed: Sealed[Any]) -> None:
        """Tell everybody at once. Not to be relied on: faults are logged, not raised."""
        try:
            await self._follower.node.host.publish(self.name, sealed.raw)
            self.bytes += len(sealed.raw)
        except TransportFault as fault:
            log.warning("gossip failed: %s", fault)

    async def hear(self) -> None:
        """Subscribe, and handle what comes, one message after the other."""
        await self._follower.node.host.subscribe(self.name, self.enqueue)
        while True:
            sender, raw = await self._inbox.get()
            try:
                await self._take(raw, sender)
            except PeerFault as fault:
                await self._follower.offence(sender, fault)

    def enqueue(self, sender: str, raw: bytes) -> None:
        """Called by the network for each message. When too many wait, the oldest goes: the latest word wins."""
        self.bytes += len(raw)
        if self._follower.ignores(sender):
            self._follower.refusals["ignored sender"] += 1
            return
        if self._inbox.full():
            self._inbox.get_nowait()
            self._follower.refusals["inbox full"] += 1
        self._inbox.put_nowait((sender, raw))
