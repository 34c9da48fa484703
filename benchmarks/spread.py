"""How fast a version reaches every peer over home links, beside a star and beside what the links allow.

    python -m benchmarks.spread [--peers 8 24] [--mbit 20] [--mib 8]

Each peer is a process in a network namespace whose uplink and downlink carry `--mbit`. In the same run:

    star   every peer fetches from the trainer alone, as if there were nobody else
    ours   every peer fetches from the trainer, which spares its uplink, and from up to 8 others at random

The ideal is size / bandwidth: what one peer's downlink alone needs. Needs root, `ip` and `tc`.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.figures import Figure, Measured, main
from protocols.faults import TransportFault
from protocols.messages import BlobRef
from protocols.transfer import blob_ref
from swarm.blobs import BlobStore
from swarm.exchange import Exchange
from swarm.host import Host, HostConfig
from swarm.identity import load_identity
from tests.namespaces import Machine, network

MIB = 1024 * 1024
OTHERS = 8  # sources besides the trainer, as a peer of a swarm asks
FETCH_S = 120.0  # limit of one transfer
REPEATS = 3


def blob_of(seed: int, size: int) -> bytes:
    """Bytes that do not compress; the same in every process."""
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------------- a peer


async def _child(folder: Path, address: str) -> None:
    identity, _ = load_identity(folder / "peer.key")
    host = await Host.start(identity, HostConfig(listen=(f"/ip4/{address}/tcp/0",)))
    exchange = Exchange(host, BlobStore(folder / "blobs"))
    await exchange.start()
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({"peer_id": host.peer_id, "address": host.addresses[0]})
    try:
        while line := await reader.readline():
            _say(await _obey(json.loads(line), host, exchange))
    finally:
        await host.close()


async def _obey(order: dict, host: Host, exchange: Exchange) -> dict:
    match order["do"]:
        case "connect":
            for address in order["addresses"]:
                await host.connect(address, 20.0)
            return {}
        case "put":
            exchange.uploads.sparing = order["sparing"]
            exchange.blobs.put(blob_of(order["seed"], order["size"]))
            return {"sent": exchange.sent_bytes}
        case "fetch":
            begun_s, before = time.monotonic(), exchange.sent_bytes
            ref = BlobRef(bytes.fromhex(order["root"]), order["size"])
            async with asyncio.timeout(FETCH_S):
                while True:
                    try:
                        fetched = await exchange.fetch(ref, lambda: order["sources"])
                        break
                    except TransportFault as fault:
                        print(f"{host.peer_id[-8:]}: {fault}", file=sys.stderr)
                        await asyncio.sleep(0.5)
            took_s = time.monotonic() - begun_s
            return {"took_s": took_s, "received": fetched.received, "sent": exchange.sent_bytes - before}
        case "sent":
            return {"sent": exchange.sent_bytes, "cpu_s": _cpu_s()}
    raise AssertionError(order)


def _cpu_s() -> list[float]:
    """Of this process, and of its p2pd."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children())]
    return [time.user + time.system for time in times]


def _say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


# ---------------------------------------------------------------------- all of them


@dataclass(slots=True)
class Peer:
    """A process in its namespace."""

    process: Process
    peer_id: str
    address: str

    async def do(self, **order: object) -> dict:
        """One order, and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = json.loads(await self.process.stdout.readline() or b"null")
        assert answer is not None, "a peer has ended"
        return answer


async def _start(machine: Machine, folder: Path) -> Peer:
    await asyncio.to_thread(folder.mkdir, 0o700)
    command = [*machine.inside, sys.executable, "-m", "benchmarks.spread", "--child", str(folder), machine.address]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    hello = json.loads(await process.stdout.readline())
    return Peer(process, hello["peer_id"], hello["address"])


@dataclass(slots=True)
class Transfer:
    """One version to all peers."""

    slowest_s: float
    copies: float
    """That the trainer sent."""


async def _transfer(trainer: Peer, peers: list[Peer], seed: int, size: int, star: bool, rng: random.Random) -> Transfer:
    ref = blob_ref(blob_of(seed, size))
    before = (await trainer.do(do="put", seed=seed, size=size, sparing=not star))["sent"]
    orders = []
    for peer in peers:
        others = [other.peer_id for other in peers if other is not peer]
        sources = [trainer.peer_id, *([] if star else rng.sample(others, min(OTHERS, len(others))))]
        orders.append(peer.do(do="fetch", root=ref.root.hex(), size=size, sources=sources))
    results = await asyncio.gather(*orders)
    sent = (await trainer.do(do="sent"))["sent"] - before
    all_cpu = [(await each.do(do="sent"))["cpu_s"] for each in (trainer, *peers)]
    print("cpu", [round(sum(x),1) for x in zip(*all_cpu)], file=sys.stderr)
    return Transfer(max(result["took_s"] for result in results), sent / size)


async def _swarm(folder: Path, count: int, mbit: float, size: int, star_too: bool) -> dict[str, list[Transfer]]:
    """Transfers by way, one after the other in turn, of one swarm of `count` peers and a trainer."""
    found: dict[str, list[Transfer]] = {"star": [], "ours": []}
    rng = random.Random(count)
    with network() as net:
        machines = [net.machine("a") for _ in range(count + 1)]
        trainer, *peers = [await _start(each, folder / f"{count}-{at}") for at, each in enumerate(machines)]
        try:
            await asyncio.gather(
                *(
                    peer.do(do="connect", addresses=[other.address for other in (trainer, *peers[:at])])
                    for at, peer in enumerate(peers)
                )
            )
            for machine in machines:
                net.limit(machine, mbit)
            for number in range(REPEATS):
                for way in ("star", "ours") if star_too and number == 0 else ("ours",):
                    transfer = await _transfer(
                        trainer, peers, 100 * count + number + (way == "star") * 50, size, way == "star", rng
                    )
                    found[way].append(transfer)
                    print(
                        f"{count} peers, {way}: {transfer.slowest_s:.2f} s, {transfer.copies:.2f} copies of the trainer",
                        file=sys.stderr,
                    )
        finally:
            for peer in (trainer, *peers):
                assert peer.process.stdin is not None
                peer.process.stdin.close()
            await asyncio.gather(*(peer.process.wait() for peer in (trainer, *peers)))
    return found


def measure(counts: list[int], mbit: float, mib: int) -> Measured:
    """All swarms, the star in the first only: it takes as long as it has peers."""
    size, ideal_s = mib * MIB, mib * MIB * 8 / (mbit * 1e6)
    figures, notes, times = [], [], {}
    with tempfile.TemporaryDirectory() as name:
        for count in counts:
            found = uvloop.run(_swarm(Path(name), count, mbit, size, count == counts[0]))
            for way, transfers in found.items():
                if not transfers:
                    continue
                ordered = sorted(transfers, key=lambda each: each.slowest_s)
                middle = ordered[len(ordered) // 2]
                times[count, way] = middle.slowest_s
                aim = "<= 2" if way == "ours" else ""
                figures.append(
                    Figure(
                        what=f"{mib} MiB to {count} peers, {way}",
                        ours=middle.slowest_s,
                        yardstick=ideal_s,
                        unit="s",
                        yardstick_is="size / bandwidth",
                        aim=aim,
                    )
                )
                if way == "ours":
                    copies = max(each.copies for each in transfers)
                    figures.append(
                        Figure(
                            what=f"trainer's upload, {count} peers (the most)",
                            ours=copies,
                            yardstick=1.0,
                            unit="copies",
                            yardstick_is="one copy",
                            aim="<= 1.5",
                        )
                    )
                notes.append(f"{count} peers, {way}: " + ", ".join(f"{each.slowest_s:.2f} s" for each in transfers))
    if len(counts) > 1:
        few, many = counts[0], counts[-1]
        figures.append(
            Figure(
                what=f"{many} peers beside {few}",
                ours=times[many, "ours"],
                yardstick=times[few, "ours"],
                unit="s",
                yardstick_is=f"{few} peers",
                aim="<= 1.33",
            )
        )
    return figures, [f"{mbit:g} Mbit/s up and down each; time until the last peer has it, median of {REPEATS}", *notes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "ADDRESS"))
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--mib", type=int, default=8)
    mine, sys.argv[1:] = parser.parse_known_args()
    if mine.child:
        uvloop.run(_child(Path(mine.child[0]), mine.child[1]))
    else:
        main("spread", __doc__, lambda: measure(mine.peers, mine.mbit, mine.mib))
