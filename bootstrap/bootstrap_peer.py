"""The bootstrap peer: an address that is always there. Stores records, relays gossip, knows the chain.

It is one way into the swarm, not its centre: peers that are in go on without it, and find each other again
through it when it is back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers.coordinator import Coordinator
from protocols.messages import CapacityAd, Heartbeat
from swarm.follower import MANIFEST_ASK_S, Follower
from swarm.node import Node, NodeConfig, now_ms, running
from swarm.tasks import Loop, run_loops


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """What `swarm bootstrap` was told."""

    home: Path
    runs: tuple[str, ...]
    bootstrap: tuple[str, ...] = ()
    """Other bootstrap peers to link with."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()


async def run_bootstrap(options: BootstrapOptions, on_ready: Callable[[list[str]], None]) -> None:
    """Serve until cancelled. Raises ValueError, TransportFault."""
    config = NodeConfig(role="bootstrap", bootstrap=options.bootstrap, listen=options.listen, announce=options.announce)
    async with running(options.home, config, options.runs) as node:
        loops: dict[str, Loop] = {}
        for follower in node.followers.values():
            loops[f"follow {follower.run}"] = _follow(node, follower)
            loops[f"coordinate {follower.run}"] = Coordinator(node, follower).run
        for run in options.runs:
            node.metrics.emit("ready", peer_id=node.peer_id, addresses=node.host.addresses, run=run)
        on_ready(node.host.addresses)
        try:
            await run_loops(node.loops() | loops, asyncio.Event())
        finally:
            for follower in node.followers.values():
                await follower.candidate.resign()
                await follower.heartbeats.say_goodbye()


def _follow(node: Node, follower: Follower) -> Loop:
    """Wait for the run's manifest to arrive, then follow its chain, so that late joiners can ask us for it."""

    def capacity() -> CapacityAd:
        return CapacityAd(
            run=follower.run,
            session=node.session,
            role="bootstrap",
            issued_ms=now_ms(),
            addresses=node.addresses,
        )

    def beat() -> Heartbeat:
        version = follower.chain.version if follower.chain is not None else -1
        return Heartbeat(
            run=follower.run, session=node.session, role="bootstrap", version=version if version >= 0 else None
        )

    async def loop() -> None:
        follower.heartbeats.beat = beat
        follower.neighbourhood.capacity = capacity
        while follower.rules.manifest is None:
            await follower.look_for_manifest()
            await asyncio.sleep(MANIFEST_ASK_S)
        await follower.open_chain()
        await asyncio.Event().wait()

    return loop
