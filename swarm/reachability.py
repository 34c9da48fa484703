"""Can others dial this peer? Its bootstrap peers try it, at the address that they see it at.

    peer --DialBack(port)--> bootstrap peer --TCP--> the address that the call came from, at that port
         <-DialedBack(reached)--            <--the first words of a libp2p listener--

Behind a NAT or a firewall nobody gets through. Such a peer goes on over the connections that it opened itself: calls
and streams run both ways on them. It keeps no records for others and advertises no address, so that nobody wastes time
on dialing it (docs/nat.md; also why this is no AutoNAT and no relay of p2pd's).

Nobody can be made to dial a stranger: only the caller's own address is dialled, and only whether libp2p answered there
is told. Somebody else's libp2p at the same port behind the same NAT would be taken for the caller.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import DialBack, DialedBack, Refused, Reply, decode_reply, encode
from swarm.host import Host, tcp_port

log = logging.getLogger(__name__)

DIAL_BACK_S = 1.5  # two attempts of TCP, which repeats a lost first packet after 1 s; a dropped dial takes all of it
ANSWER_S = DIAL_BACK_S + 1.5  # what a peer waits for: the dial and a round trip on a slow line
DIALS_AT_ONCE_MAX = 64  # file descriptors; a second's worth of newcomers in the largest swarm that we have in mind
LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"  # what a libp2p listener says first (multistream-select)

Kind = Literal["direct", "outbound only", "unknown"]


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether others can dial a peer. Unknown is not unreachable: such a peer behaves as one that can be dialled."""

    kind: Kind
    reason: str
    """For people: who tried what."""
    addresses: tuple[str, ...] = ()
    """Where bootstrap peers reached it, with /p2p/<its id>: behind a port forwarding it does not know them itself."""


async def reachability(host: Host, doors: Sequence[str]) -> Reachability:
    """Ask these peers (ids; connected) to dial us back, all at once. Takes ANSWER_S at most, raises nothing.

    One that cannot reach us decides: it may be the only one outside our own network.
    """
    if host.config.announce:
        return Reachability("direct", "its addresses were given with --announce")
    port = next((port for address in host.addresses if (port := tcp_port(address)) is not None), None)
    if port is None:
        return Reachability("unknown", "it listens on no TCP port")
    answers = await asyncio.gather(*(_ask(host, door, port) for door in doors))
    tried = [answer for answer in answers if isinstance(answer, DialedBack)]
    missed = [answer.address for answer in tried if not answer.reached]
    if missed:
        return Reachability("outbound only", f"nobody outside gets through to {missed[0]}")
    if not tried:
        return Reachability("unknown", "no bootstrap peer could try")
    reached = tuple(dict.fromkeys(f"{answer.address}/p2p/{host.peer_id}" for answer in tried))
    return Reachability("direct", f"reached at {tried[0].address}", reached)


async def _ask(host: Host, door: str, port: int) -> Reply | None:
    try:
        return decode_reply(await host.call(door, encode(DialBack(port)), ANSWER_S))
    except (TransportFault, PeerFault) as fault:
        log.info("%s did not dial back: %s", short(door), fault)
        return None


class DialBacks:
    """The other side: dials callers back, a bounded number at once, each caller once at a time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._under_way: set[str] = set()

    async def answer(self, port: int, peer_id: str) -> Reply:
        """Dial the address that this peer's connection comes from, at this port."""
        if peer_id in self._under_way or len(self._under_way) >= DIALS_AT_ONCE_MAX:
            return Refused("busy")
        self._under_way.add(peer_id)
        try:
            seen = [each for each in await self._host.addresses_of(peer_id) if tcp_port(each) is not None]
            if not seen:
                return Refused("no address to dial")
            _, family, ip, *_ = seen[0].split("/")
            return DialedBack(f"/{family}/{ip}/tcp/{port}", await _answers(ip, port))
        except TransportFault:  # our own p2pd does not tell
            return Refused("busy")
        finally:
            self._under_way.discard(peer_id)


async def _answers(ip: str, port: int) -> bool:
    """Does a libp2p listener answer there?"""
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            reader, writer = await asyncio.open_connection(ip, port)
            try:
                return await reader.readexactly(len(LIBP2P_GREETING)) == LIBP2P_GREETING
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
        return False
