"""What a coordinator costs: heartbeats a second that one core answers, and bytes a second and peer.

    rules       decode, CoordinatorView.heard, encode: this process alone, n peers in the view
    real        a node that leads, and its p2pd, on core 0; beats come from another process over libp2p, n peers in
                the view. The yardstick is the same call answered with the same bytes and no thought.

A peer beats every two seconds, and at once when a step gives it something to ask for.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.figures import Figure, Measured, main, median
from peers.coordinator import Coordinator
from protocols.coordination import CoordinatorView
from protocols.envelopes import seal
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.manifest import CoordinationSpec, Manifest
from protocols.messages import Directive, Heartbeat, HeartbeatReply, decode_reply, decode_request, encode
from protocols.presence import BEAT_S
from swarm.host import Host, HostConfig
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig
from swarm.tasks import run_loops

OWNER = Ed25519PrivateKey.from_private_bytes(b"the owner's key, benchmarks only")
RUN = run_id_of("benchmark", public_bytes(OWNER))
NUM_PEERS = (10, 100, 1_000, 10_000)
BEATS = 20_000  # of each measurement of the rules
CALLS, CALLERS = 2_000, 16  # of each real measurement, and how many wait for an answer at once
ROUNDS = 3
LEADS_WITHIN_S = 30.0
GOSSIP_DEGREE = 6  # GossipSub's mesh: how often each peer passes a directive on


def beat(number: int, started: int = 100) -> Heartbeat:
    """What a busy inference peer says."""
    return Heartbeat(
        run=RUN,
        session=number.to_bytes(16, "big"),
        role="inference",
        version=7,
        tokens_per_s=1234.5,
        groups_per_s=12.25,
        refresh_s=0.5,
        oldest=7,
        started=started,
        in_flight=4,
        outbox=2,
        accepted=90,
        stale=3,
    )


def names(count: int) -> list[str]:
    """Peer ids of peers that do not exist."""
    keys = (number.to_bytes(32, "big") for number in range(1, count + 1))
    return [peer_id_of(key) for key in keys]


def rules_per_s(count: int) -> float:
    """Heartbeats a second through decoding, the view, and encoding the answer."""
    manifest = Manifest(run=RUN, revision=1, trainers=(names(1)[0],), issued_ms=0)
    view = CoordinatorView(manifest, "async", 0.0)
    view.head_is(7)
    peers = names(count)
    raws = [encode(beat(number)) for number in range(count)]
    for number, peer_id in enumerate(peers):
        view.heard(peer_id, beat(number), 0.0)
    begun_s = time.perf_counter()
    for at in range(BEATS):
        request = decode_request(raws[at % count])
        assert isinstance(request, Heartbeat)
        grant = view.heard(peers[at % count], request, at * 1e-6)
        encode(HeartbeatReply(verdict="ok", now_ms=0, head=7, limit=grant.limit, sources=grant.sources))
    return BEATS / (time.perf_counter() - begun_s)


def pin(core: int) -> None:
    """This process and what it has started."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), {core})


async def serve(folder: Path) -> None:
    """A node that leads; told over standard input how many peers its view is to hold. `0`: answer without thought."""
    thoughtless: list[bytes] = []
    real = Node._serve

    async def answered(node: Node, raw: bytes, peer_id: str) -> bytes:
        return thoughtless[0] if thoughtless else await real(node, raw, peer_id)

    Node._serve = answered  # type: ignore[method-assign]
    identity, _ = load_identity(folder / "peer.key")
    node = await Node.start(identity, folder, NodeConfig(role="bootstrap", listen=("/ip4/127.0.0.1/tcp/0",)), [RUN])
    follower = node.followers[RUN]
    coordination = CoordinationSpec(coordinators=(node.peer_id,))
    trainer = peer_id_of(public_bytes(OWNER))
    follower.rules.learn(
        seal(OWNER, Manifest(run=RUN, revision=1, trainers=(trainer,), issued_ms=0, coordination=coordination))
    )
    await follower.keep_manifest()
    coordinator = Coordinator(node, follower)
    leads = asyncio.Event()
    changed = follower.candidate.on_change
    follower.candidate.on_change = lambda: (changed(), leads.set())  # type: ignore[assignment, return-value, func-returns-value]

    async def command() -> None:
        await leads.wait()
        pin(0)
        print(node.host.addresses[0], flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            count = int(line)
            thoughtless.clear()
            for number, peer_id in enumerate(names(max(1, count))):
                answer = await real(node, encode(beat(number)), peer_id)
            if count == 0:
                thoughtless.append(answer)
            print(len(answer), flush=True)
        done.set()

    done = asyncio.Event()
    try:
        await run_loops(node.loops() | {"coordinate": coordinator.run, "command": command}, done)
    finally:
        await node.close()


async def calls_per_s(host: Host, peer_id: str) -> tuple[float, bytes]:
    """Heartbeats a second over libp2p, and the last answer."""
    left = CALLS
    answer = b""

    async def caller(number: int) -> None:
        nonlocal left, answer
        raw = encode(beat(0))
        while left > 0:
            left -= 1
            answer = await host.call(peer_id, raw, 10.0)

    begun_s = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    return CALLS / (time.perf_counter() - begun_s), answer


async def real_per_s(folder: Path, counts: Sequence[int]) -> tuple[dict[int, float], int]:
    """Median over rounds for each number of peers (0: no thought), and the bytes of an answer."""
    (folder / "server").mkdir()
    (folder / "client").mkdir()
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.coordinator", "--serve", str(folder / "server")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    found: dict[int, list[float]] = {count: [] for count in counts}
    host = await Host.start(load_identity(folder / "client" / "peer.key")[0], HostConfig())
    size = 0
    try:
        async with asyncio.timeout(LEADS_WITHIN_S):
            address = (await server.stdout.readline()).decode().strip()
        peer_id = await host.connect(address)
        pin(1)
        for _ in range(ROUNDS):
            for count in counts:
                server.stdin.write(f"{count}\n".encode())
                await server.stdout.readline()
                rate, answer = await calls_per_s(host, peer_id)
                found[count].append(rate)
                reply = decode_reply(answer)
                assert count == 0 or (isinstance(reply, HeartbeatReply) and reply.limit is not None), "it does not lead"
                size = max(size, len(answer))
    finally:
        server.stdin.close()
        await host.close()
        await server.wait()
    return {count: median(rates) for count, rates in found.items()}, size


def measure() -> Measured:
    """Rules and reality, at each number of peers."""
    rules = {count: rules_per_s(count) for count in NUM_PEERS}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        real, answer_bytes = uvloop.run(real_per_s(Path(folder), (0, *NUM_PEERS)))
    figures = [
        Figure(
            what=f"{count:,} peers: heartbeats a second, {name}",
            ours=rates[count],
            yardstick=yardstick,
            unit="/s",
            yardstick_is=beside,
        )
        for name, rates, yardstick, beside in (
            ("rules alone", rules, rules[NUM_PEERS[0]], f"with {NUM_PEERS[0]} peers"),
            ("over libp2p, one core", real, real[0], "answered without thought"),
        )
        for count in NUM_PEERS
    ]
    ask, directive = len(encode(beat(0))), seal(OWNER, _directive()).raw
    beat_bytes = (ask + answer_bytes) / BEAT_S
    gossip_bytes = GOSSIP_DEGREE * len(directive) / BEAT_S
    slowest = real[1_000]
    notes = [
        f"a beat is {ask} bytes and its answer {answer_bytes}: {beat_bytes:.0f} bytes a second and peer, however many "
        f"there are; directives of {len(directive)} bytes in gossip add up to {gossip_bytes:.0f} at a mesh degree of "
        f"{GOSSIP_DEGREE}",
        *(
            f"{count:,} peers beat {count / BEAT_S:,.0f} times a second: {100 * count / BEAT_S / real[count]:.0f} % of "
            f"that core, {count * beat_bytes / 1e6:.2f} MB/s at the coordinator"
            for count in NUM_PEERS
        ),
        f"a step lets every peer ask once more: with 1,000 peers the core is full at {slowest / 1_000 - 0.5:.1f} steps "
        "a second",
    ]
    return figures, notes


def _directive() -> Directive:
    return Directive(run=RUN, term=1, number=1000, mode="async", min_version=7, issued_ms=int(time.time() * 1000))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        uvloop.run(serve(Path(sys.argv[-1])))
    else:
        main("coordinator", "What a coordinator costs.", measure)
