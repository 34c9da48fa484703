"""Real nodes on loopback in one process, without models: a trainer that signs by hand, and peers that follow it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.envelopes import Sealed, seal
from protocols.identity import key_file_bytes
from protocols.messages import AdapterRef, Announcement, CapacityAd, Heartbeat
from swarm.follower import Follower
from swarm.identity import Identity, load_identity
from swarm.node import Node, NodeConfig, Role, now_ms
from swarm.tasks import run_loops
from tests.samples import OWNER, RUN, TRAINER, TRAINER_ID, announcement, manifest

LISTEN = ("/ip4/127.0.0.1/tcp/0",)


def identity_of(home: Path, key: Ed25519PrivateKey | None = None) -> Identity:
    """The identity of this home, with a key of our choice."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = home / "peer.key"
    if key is not None and not path.exists():
        path.touch(0o600)
        path.write_bytes(key_file_bytes(key))
    return load_identity(path)[0]


class Running:
    """A node and the task that runs its loops."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.done = asyncio.Event()
        self.warnings: list[tuple[str, str]] = []
        self.task: asyncio.Task[None] | None = None
        real = node.warn

        def warn(code: str, text: str) -> None:
            self.warnings.append((code, text))
            real(code, text)

        node.warn = warn  # type: ignore[method-assign]

    @property
    def follower(self) -> Follower:
        return self.node.followers[RUN]

    @property
    def version(self) -> int:
        return self.follower.chain.version if self.follower.chain is not None else -1

    def codes(self) -> list[str]:
        return [code for code, _ in self.warnings]

    def run(self) -> None:
        self.task = asyncio.create_task(run_loops(self.node.loops(), self.done))

    def advertise(self) -> None:
        """Say what this peer holds: its whole chain."""
        node, follower = self.node, self.follower

        def held() -> int | None:
            return self.version if self.version >= 0 else None

        def capacity() -> CapacityAd:
            return CapacityAd(
                run=RUN,
                session=node.session,
                role=node.config.role,
                issued_ms=now_ms(),
                version=held(),
                addresses=tuple(node.host.addresses[:16]),
            )

        follower.neighbourhood.capacity = capacity
        follower.heartbeats.beat = lambda: Heartbeat(
            run=RUN, session=node.session, role=node.config.role, version=held()
        )

    async def join(self) -> None:
        """What an inference peer does before its loops start: manifest, chain, the head as others know it."""
        await self.follower.find_manifest()
        await self.follower.open_chain()
        self.advertise()
        for peer_id in self.node.bootstraps.values():
            await self.follower.catch_up(peer_id)
        await self.follower.neighbourhood.read_head()

    async def announce(self, version: int, adapter: AdapterRef | None = None) -> Sealed[Announcement]:
        """The trainer's next version, published once, as peers/trainer.py does."""
        chain = self.follower.chain
        assert chain is not None
        changes = {} if adapter is None else {"adapter": adapter}
        sealed = announcement(version, chain.head_hash, **changes)
        chain.extend(sealed)
        await self.follower.policy.publish(sealed)
        self.follower.neighbourhood.head_changed()
        return sealed

    async def stop(self) -> None:
        """End the loops, then the node. A failure of the loops is the test's to look at."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        await self.node.close()


class Nodes:
    """Starts nodes in one folder and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Running] = []

    async def start(
        self,
        name: str,
        role: Role,
        bootstrap: tuple[str, ...] = (),
        key: Ed25519PrivateKey | None = None,
        listen: tuple[str, ...] = LISTEN,
    ) -> Running:
        home = self.folder / name
        identity = identity_of(home, key)
        node = await Node.start(identity, home, NodeConfig(role=role, bootstrap=bootstrap, listen=listen), [RUN])
        running = Running(node)
        self.all.append(running)
        return running

    async def bootstrap(self, name: str = "bootstrap", listen: tuple[str, ...] = LISTEN) -> Running:
        """A bootstrap peer that follows the run once it has a manifest."""
        running = await self.start(name, "bootstrap", listen=listen)

        async def follow() -> None:
            await running.follower.find_manifest()
            await running.follower.open_chain()
            await asyncio.Event().wait()

        running.advertise()
        loops = running.node.loops() | {"follow": follow}
        running.task = asyncio.create_task(run_loops(loops, running.done))
        return running

    async def trainer(self, bootstrap: tuple[str, ...] = (), name: str = "trainer") -> Running:
        """The signer of the chain, running, at version -1."""
        running = await self.start(name, "trainer", bootstrap, TRAINER)
        running.follower.rules.learn(seal(OWNER, manifest(trainers=(TRAINER_ID,))))
        await running.follower.open_chain()
        running.advertise()
        await running.follower.neighbourhood.put_manifest()
        running.run()
        return running

    async def worker(self, name: str, bootstrap: tuple[str, ...]) -> Running:
        """A peer that has joined; its loops do not run yet."""
        running = await self.start(name, "inference", bootstrap)
        await running.join()
        return running

    async def stop(self, running: Running) -> None:
        self.all.remove(running)
        await running.stop()


@asynccontextmanager
async def nodes(folder: Path) -> AsyncIterator[Nodes]:
    """Nodes that end with the block."""
    os.chmod(folder, 0o700)
    started = Nodes(folder)
    try:
        yield started
    finally:
        await asyncio.gather(*(running.stop() for running in started.all))
