"""How fast a new version is known: publish -> verified in the chain of every peer, beside raw GossipSub.

    ours        Follower.publish -> p2pd -> inbox -> unseal (Ed25519) -> Chain.extend -> `changed` -> a waiting task
    yardstick   PUBLISH of as many random bytes -> p2pd -> PSMessage parsed by a bare subscriber

Both go through the same hosts, in turn, a gap apart. Peers are whole nodes (heartbeats, DHT, SQLite) without a
model, spread over as many processes as there are cores; publisher and bootstrap peer are in a further one.
`time.monotonic` is one clock for all processes of a machine.
"""

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint
from hivemind.proto import p2pd_pb2

from benchmarks.figures import Figure, Measured, main, percentile
from protocols.envelopes import Sealed, seal, unseal
from protocols.identity import public_bytes, run_id_of
from protocols.manifest import Manifest
from protocols.messages import AdapterRef, Announcement, BlobRef, CapacityAd, TrainedOn
from protocols.policy import Chain
from swarm.follower import Follower
from swarm.host import Host
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig, Role, now_ms
from swarm.tasks import run_loops

# Peers -> gap between two messages in seconds, drawn anew each time: the messages must not keep step with GossipSub's
# heartbeat of 0.3 s, nor meet each other. With 2 peers each has a core of its own.
SWARMS = {2: (0.03, 0.06), 8: (0.04, 0.08), 24: (0.06, 0.12)}
ANNOUNCEMENTS = 420
WARM_UP = 20  # of these: connections, caches, GossipSub's mesh
SETTLE_S = 6.0  # the neighbourhood is read, connections made, and the mesh grafted in a few heartbeats
LAST_S = 3.0  # longer than a heartbeat: what gossip lost has come by then
RAW_TOPIC = "echo/1/benchmark/raw"
OWNER = Ed25519PrivateKey.from_private_bytes(b"the owner's key, benchmarks only")
RUN = run_id_of("benchmark", public_bytes(OWNER))

Arrivals = dict[int, list[float]]
"""Number of a message -> when each peer had it, in seconds of `time.monotonic`."""


class Swarm:
    """The nodes of one process, running, and what arrived at them."""

    def __init__(self, folder: Path, manifest: Sealed[Manifest]) -> None:
        self.folder, self.manifest = folder, manifest
        self.nodes: list[Node] = []
        self.announced: Arrivals = defaultdict(list)
        self.raw: Arrivals = defaultdict(list)
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Swarm":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def start(self, name: str, role: Role, bootstrap: tuple[str, ...], listens: bool) -> Node:
        """A node that follows the run; what arrives at it is noted if it `listens`. All are in both topics' meshes."""
        home = self.folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        identity, _ = load_identity(home / "peer.key")
        config = NodeConfig(role=role, bootstrap=bootstrap, listen=("/ip4/127.0.0.1/tcp/0",))
        node = await Node.start(identity, home, config, [RUN])
        self._stack.push_async_callback(node.close)
        follower = node.followers[RUN]
        follower.rules.learn(self.manifest)
        chain = await follower.open_chain()
        follower.neighbourhood.capacity = lambda: CapacityAd(
            run=RUN, session=node.session, role=role, issued_ms=now_ms(), addresses=tuple(node.host.addresses)
        )
        if listens:
            self._tasks.append(asyncio.create_task(_note_chain(follower, chain, self.announced)))
        raw = self.raw if listens else defaultdict(list)
        self._tasks.append(asyncio.create_task(_note_raw(node.host, raw)))
        self._tasks.append(asyncio.create_task(run_loops(node.loops(), asyncio.Event())))
        self.nodes.append(node)
        return node

    def check(self) -> None:
        """Raises what ended a task of a node: figures of a swarm that is half dead are none."""
        for task in self._tasks:
            if task.done():
                task.result()


async def _note_chain(follower: Follower, chain: Chain, arrivals: Arrivals) -> None:
    """What an inference peer's fetch loop does: wait until the head has changed."""
    seen = -1
    while True:
        async with follower.changed:
            await follower.changed.wait_for(lambda: chain.version > seen)  # noqa: B023
        now_s = time.monotonic()
        for version in range(seen + 1, chain.version + 1):
            arrivals[version].append(now_s)
        seen = chain.version


async def _note_raw(host: Host, arrivals: Arrivals) -> None:
    """The least that a subscriber in Python can do: read a frame, parse it."""
    message = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=RAW_TOPIC)
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=message)
    reader, writer, _ = await host.p2p.control.open(request)
    try:
        while True:
            frame = await reader.readexactly(await read_unsigned_varint(reader))
            data = p2pd_pb2.PSMessage.FromString(frame).data
            arrivals[int.from_bytes(data[:8], "big")].append(time.monotonic())
    finally:
        writer.close()


# ---------------------------------------------------------------------- a process full of peers


def run_peers(pipe: Connection, folder: Path, names: list[str], bootstrap: str, manifest: bytes) -> None:
    """Start these peers, say `ready`; when told to stop, send what arrived."""
    uvloop.run(_run_peers(pipe, folder, names, bootstrap, manifest))


async def _run_peers(pipe: Connection, folder: Path, names: list[str], bootstrap: str, manifest: bytes) -> None:
    async with Swarm(folder, unseal(manifest, Manifest)) as swarm:
        for name in names:
            await swarm.start(name, "inference", (bootstrap,), listens=True)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        swarm.check()
        links = [len(await node.host.peers()) for node in swarm.nodes]
        pipe.send((dict(swarm.announced), dict(swarm.raw), links))


# ---------------------------------------------------------------------- the publisher


class Latencies:
    """Milliseconds from publishing to arrival, by message: at each peer, and at the last one."""

    def __init__(self, num_peers: int) -> None:
        self.num_peers = num_peers
        self.each: list[float] = []
        self.last: list[float] = []
        self.missing = 0
        """Arrivals that never came."""

    def add(self, published_s: float, arrivals: list[float]) -> None:
        """One message, and when it came to whom."""
        delays = [1000 * (arrived_s - published_s) for arrived_s in arrivals]
        self.each += delays
        self.missing += self.num_peers - len(delays)
        if len(delays) == self.num_peers:
            self.last.append(max(delays))


def announcement(version: int, chain: Chain) -> Announcement:
    """The next version, with as many metrics as the trainer gives."""
    rng = random.Random(version)
    names = ("loss", "reward_mean", "zero_std_share", "grad_norm", "ratio_mean", "abs_logprob_gap_mean", "tokens")
    return Announcement(
        run=RUN,
        version=version,
        parent=chain.head_hash,
        adapter=AdapterRef(rng.randbytes(32), BlobRef(rng.randbytes(32), 1_000_000)),
        trained_on=TrainedOn(32, 1, rng.randbytes(32)),
        bound=chain.manifest.max_lag,
        created_ms=now_ms(),
        metrics={name: rng.random() for name in names},
    )


async def publish_all(publisher: Node, gap_s: tuple[float, float], rng: random.Random) -> dict[str, list[float]]:
    """Announcements and raw messages of the same size in turn; when each was published."""
    follower = publisher.followers[RUN]
    chain = follower.chain
    assert chain is not None
    published: dict[str, list[float]] = {"announced": [], "raw": []}
    for number in range(ANNOUNCEMENTS):
        sealed = seal(publisher.identity.key, announcement(number, chain))
        chain.extend(sealed)
        published["announced"].append(time.monotonic())
        await follower.policy.publish(sealed)
        await asyncio.sleep(rng.uniform(*gap_s))
        raw = number.to_bytes(8, "big") + rng.randbytes(len(sealed.raw) - 8)
        published["raw"].append(time.monotonic())
        await publisher.host.publish(RAW_TOPIC, raw)
        await asyncio.sleep(rng.uniform(*gap_s))
    return published


async def measure_swarm(num_peers: int, folder: Path) -> tuple[Latencies, Latencies, str]:
    """Latencies of announcements and of raw messages, and what else there is to say."""
    identity, _ = load_identity(folder / "publisher" / "peer.key")
    manifest = seal(OWNER, Manifest(run=RUN, revision=0, trainers=(identity.peer_id,), issued_ms=now_ms()))
    async with Swarm(folder, manifest) as swarm:
        bootstrap = await swarm.start("bootstrap", "bootstrap", (), listens=False)
        address = bootstrap.host.addresses[0]
        publisher = await swarm.start("publisher", "trainer", (address,), listens=False)
        pipes = await asyncio.to_thread(start_processes, num_peers, folder, address, manifest.raw)
        await asyncio.sleep(SETTLE_S)
        published = await publish_all(publisher, SWARMS[num_peers], random.Random(num_peers))
        await asyncio.sleep(LAST_S)
        size = len(publisher.followers[RUN].page(ANNOUNCEMENTS - 1)[0])
        swarm.check()
        for pipe in pipes:
            pipe.send("stop")
        reports = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
    ours, raw = Latencies(num_peers), Latencies(num_peers)
    for number in range(WARM_UP, ANNOUNCEMENTS):
        ours.add(published["announced"][number], [t for announced, _, _ in reports for t in announced.get(number, [])])
        raw.add(published["raw"][number], [t for _, received, _ in reports for t in received.get(number, [])])
    links = [count for _, _, counts in reports for count in counts]
    return ours, raw, f"{size} bytes, {min(links)} to {max(links)} connections a peer"


def start_processes(num_peers: int, folder: Path, bootstrap: str, manifest: bytes) -> list[Connection]:
    """One process a core, each with its share of the peers; returns when all are ready. Daemons: they end with us."""
    context = multiprocessing.get_context("spawn")
    num_processes = os.cpu_count() or 1
    pipes = []
    for number in range(num_processes):
        names = [f"peer{at}" for at in range(number, num_peers, num_processes)]
        ours, theirs = context.Pipe()
        context.Process(target=run_peers, args=(theirs, folder, names, bootstrap, manifest), daemon=True).start()
        theirs.close()  # so that a dead child is an EOFError here, not a wait for ever
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    return pipes


def verification_us() -> float:
    """CPU time of one unseal and extend, in microseconds: what ours does besides, for each peer."""
    key = Ed25519PrivateKey.generate()
    trainer = seal(key, announcement(0, Chain(Manifest(run=RUN, revision=0, trainers=("1" * 52,), issued_ms=0)))).sender
    manifest = Manifest(run=RUN, revision=0, trainers=(trainer,), issued_ms=0)
    source, chain = Chain(manifest), Chain(manifest)
    raws = []
    for version in range(ANNOUNCEMENTS):
        sealed = seal(key, announcement(version, source))
        source.extend(sealed)
        raws.append(sealed.raw)
    began_s = time.process_time()
    for raw in raws:
        chain.extend(unseal(raw, Announcement))
    return 1e6 * (time.process_time() - began_s) / len(raws)


def measure() -> Measured:
    """The swarms, one after the other."""
    figures, notes = [], []
    for num_peers in SWARMS:
        with tempfile.TemporaryDirectory() as folder:
            ours, raw, about = uvloop.run(measure_swarm(num_peers, Path(folder)))
        for what, our_ms, raw_ms in (("each peer", ours.each, raw.each), ("all peers", ours.last, raw.last)):
            for share in (0.5, 0.99):
                figures.append(
                    Figure(
                        what=f"{num_peers} peers, until {what} verified it: p{100 * share:.0f}",
                        ours=percentile(our_ms, share),
                        yardstick=percentile(raw_ms, share),
                        unit="ms",
                        yardstick_is="raw GossipSub",
                        aim="<= 1.5" if share == 0.99 else "",
                    )
                )
        notes.append(
            f"{num_peers} peers: {len(ours.last)} announcements and as many raw messages of {about}; "
            f"missing arrivals: {ours.missing} of ours, {raw.missing} raw"
        )
    notes.append(f"checking one announcement takes {verification_us():.0f} us of CPU at each peer")
    return figures, notes


if __name__ == "__main__":
    main("announcement", "Announcement latency beside raw GossipSub.", measure)
