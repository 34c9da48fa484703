"""How fast a version reaches every peer over home links, beside a star and beside what the links allow.

    python -m benchmarks.spread [--peers 8 24] [--mbit 20] [--mib 8]

Each peer is a process in a network namespace whose uplink and downlink carry `--mbit`. In the same run:

    star   every peer fetches from the trainer alone, as if there were nobody else
    ours   every peer fetches from the trainer, which spares its uplink, and from up to 8 others at random

The ideal is size / bandwidth: what one peer's downlink alone needs. Needs root, `ip` and `tc`.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.figures import Figure, Measured, main, median
from protocols.transfer import blob_ref
from tests.blob_process import BlobPeer, blob_of, blob_peer
from tests.namespaces import network

MIB = 1024 * 1024
OTHERS = 8  # sources besides the trainer, as a peer of a swarm asks
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Transfer:
    """One version to all peers."""

    slowest_s: float
    copies: float
    """That the trainer sent."""
    cpu_s: float
    """Of all processes and their p2pds."""


async def _transfer(trainer: BlobPeer, peers: list[BlobPeer], seed: int, size: int, star: bool) -> Transfer:
    rng = random.Random(seed)
    ref = blob_ref(blob_of(seed, size))
    await trainer.do(do="put", seed=seed, size=size, sparing=not star)
    before = [await each.do(do="count") for each in (trainer, *peers)]
    orders = []
    begun_s = time.monotonic()
    for peer in peers:
        others = [other.peer_id for other in peers if other is not peer]
        sources = [trainer.peer_id, *([] if star else rng.sample(others, min(OTHERS, len(others))))]
        orders.append(peer.do(do="fetch", root=ref.root.hex(), size=size, sources=sources))
    for answer in await asyncio.gather(*orders):
        for fault in answer["faults"]:
            print(f"tried again: {fault}", file=sys.stderr)
    took_s = time.monotonic() - begun_s
    after = [await each.do(do="count") for each in (trainer, *peers)]
    cpu_s = sum(each["cpu_s"] for each in after) - sum(each["cpu_s"] for each in before)
    return Transfer(took_s, (after[0]["sent"] - before[0]["sent"]) / size, cpu_s)


async def _swarm(folder: Path, count: int, mbit: float, size: int, star_too: bool) -> dict[str, list[Transfer]]:
    """Transfers by way, one after the other, of one swarm of `count` peers and a trainer."""
    found: dict[str, list[Transfer]] = {"star": [], "ours": []}
    with network() as net:
        async with AsyncExitStack() as stack:
            machines = [net.machine("a") for _ in range(count + 1)]
            trainer, *peers = [
                await stack.enter_async_context(blob_peer(folder / f"{count}-{at}", each.inside, each.address))
                for at, each in enumerate(machines)
            ]
            all_peers = (trainer, *peers)
            for at, peer in enumerate(peers, 1):
                await peer.do(do="connect", addresses=[other.address for other in all_peers[:at]])
            for machine in machines:
                net.limit(machine, mbit)
            for number in range(REPEATS):
                for way in ("star", "ours") if star_too and number == 0 else ("ours",):
                    seed = 100 * count + 2 * number + (way == "star")
                    transfer = await _transfer(trainer, peers, seed, size, way == "star")
                    found[way].append(transfer)
                    print(f"{count} peers, {way}: {transfer}", file=sys.stderr)
    return found


def measure(counts: list[int], mbit: float, mib: int) -> Measured:
    """All swarms, the star in the first only: it takes as long as it has peers."""
    size, ideal_s = mib * MIB, mib * MIB * 8 / (mbit * 1e6)
    figures, notes, took_s = [], [], dict[int, float]()
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            found = uvloop.run(_swarm(Path(folder), count, mbit, size, count == counts[0]))
        for way, transfers in found.items():
            if not transfers:
                continue
            times = [each.slowest_s for each in transfers]
            what = f"{mib} MiB to {count} peers, {way}"
            aim = "<= 2" if way == "ours" else ""
            yardstick_is = "size / bandwidth"
            figures.append(
                Figure(what=what, ours=median(times), yardstick=ideal_s, unit="s", yardstick_is=yardstick_is, aim=aim)
            )
            cpu_s = median([each.cpu_s for each in transfers])
            copies = ", ".join(f"{each.copies:.2f}" for each in transfers)
            notes.append(
                f"{what}: {', '.join(f'{time_s:.2f} s' for time_s in times)}; copies that the trainer sent: {copies}; "
                f"{cpu_s:.1f} s of CPU for all processes"
            )
        took_s[count] = median([each.slowest_s for each in found["ours"]])
        copies_max = max(each.copies for each in found["ours"])
        what, aim = f"trainer's upload to {count} peers, the most of {REPEATS}", "<= 1.5"
        figures.append(
            Figure(what=what, ours=copies_max, yardstick=1.0, unit="copies", yardstick_is="one copy", aim=aim)
        )
    if len(counts) > 1:
        few, many = counts[0], counts[-1]
        what, yardstick_is, aim = f"{many} peers beside {few}", f"{few} peers", "<= 1.33"
        ours, yardstick = took_s[many], took_s[few]
        figures.append(Figure(what=what, ours=ours, yardstick=yardstick, unit="s", yardstick_is=yardstick_is, aim=aim))
    return figures, [f"{mbit:g} Mbit/s up and down each; time until the last peer has it, median of {REPEATS}", *notes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--mib", type=int, default=8)
    mine, sys.argv[1:] = parser.parse_known_args()
    main("spread", __doc__ or "", lambda: measure(mine.peers, mine.mbit, mine.mib))
