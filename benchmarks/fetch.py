"""How fast an adapter is fetched, verified and stored, beside the raw libp2p stream of the same bytes.

    yardstick   bytes written to a stream of p2pd by one process, read and thrown away by the other
    ours        Exchange.fetch: hash list, SHA-256 of each chunk, chunks written as they come, the blob durable on
                disk (fsync, rename), and the same without the fsync, which shows what a slow disk costs

Holder and asker are two processes on loopback; each size is fetched in rounds, the ways in turn.
"""

import asyncio
import logging
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from benchmarks.figures import Figure, Measured, main, median
from protocols.transfer import CHUNK_BYTES, ChunkList, blob_ref
from swarm.blobs import PART, BlobStore, Part
from swarm.exchange import Exchange
from swarm.files import write_whole
from swarm.host import Host, HostConfig
from swarm.identity import load_identity

MIB = 1024 * 1024
SIZES = {8: 25, 64: 9}  # MiB of a blob -> rounds
RAW_PROTOCOL = "/echo-swarm/benchmark/raw"


class Unsynced(Part):
    """Trusts that the power stays on."""

    def sync(self) -> None:
        pass


class UnsyncedStore(BlobStore):
    """Of such parts."""

    def begin(self, chunks: ChunkList) -> Part:
        return Unsynced(self.path(chunks.ref.root).with_suffix(PART), chunks)


def blob_of(size_mib: int) -> bytes:
    """Bytes that do not compress; the same in both processes."""
    return random.Random(size_mib).randbytes(size_mib * MIB)


# ---------------------------------------------------------------------- the holder


def hold(pipe: Connection, folder: Path) -> None:
    """Serve all blobs by both ways until the pipe closes; sends our address first."""
    uvloop.run(_hold(pipe, folder))


async def _hold(pipe: Connection, folder: Path) -> None:
    identity, _ = load_identity(folder / "peer.key")
    host = await Host.start(identity, HostConfig())
    try:
        exchange = Exchange(host, BlobStore(folder / "blobs"))
        blobs = {size: blob_of(size) for size in SIZES}
        for blob in blobs.values():
            exchange.blobs.put(blob)
        await exchange.start()

        async def serve_raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: str) -> None:
            view = memoryview(blobs[int.from_bytes(await reader.readexactly(4), "little")])
            for at in range(0, len(view), CHUNK_BYTES):
                writer.write(view[at : at + CHUNK_BYTES])
                await writer.drain()

        await host.serve_stream(RAW_PROTOCOL, serve_raw)
        pipe.send(host.addresses[0])
        await asyncio.to_thread(pipe.poll, None)
    finally:
        await host.close()


# ---------------------------------------------------------------------- the asker


async def _read_raw(host: Host, holder: str, size_mib: int) -> None:
    reader, writer = await host.open_stream(holder, RAW_PROTOCOL)
    writer.write(size_mib.to_bytes(4, "little"))
    left = size_mib * MIB
    while left and (data := await reader.read(CHUNK_BYTES)):
        left -= len(data)
    writer.close()
    assert left == 0


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


async def ask(holder_address: str, folder: Path) -> dict[tuple[int, str], list[float]]:
    """Seconds of each way and size, a round each: (MiB, way) -> times."""
    identity, _ = load_identity(folder / "peer.key")
    host = await Host.start(identity, HostConfig())
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    try:
        holder = await host.connect(holder_address)
        durable = Exchange(host, BlobStore(folder / "blobs"))
        volatile = Exchange(host, UnsyncedStore(folder / "unsynced"))
        for size, rounds in SIZES.items():
            blob = blob_of(size)
            ref = blob_ref(blob)
            ways: dict[str, Callable[[], Awaitable[object]]] = {
                "raw": lambda size=size: _read_raw(host, holder, size),
                "volatile": lambda ref=ref: volatile.fetch(ref, lambda: [holder]),
                "durable": lambda ref=ref: durable.fetch(ref, lambda: [holder]),
                "disk": lambda blob=blob: asyncio.to_thread(write_whole, folder / "file", blob),
            }
            for number in range(-1, rounds):  # the first round warms up
                for way, work in ways.items():
                    durable.blobs.remove(ref.root)
                    volatile.blobs.remove(ref.root)
                    elapsed_s = await _timed(work)
                    if number >= 0:
                        times[size, way].append(elapsed_s)
    finally:
        await host.close()
    return times


async def _measure(folder: Path) -> dict[tuple[int, str], list[float]]:
    ours, theirs = multiprocessing.Pipe()
    for name in ("holder", "asker"):
        (folder / name).mkdir(mode=0o700)
    context = multiprocessing.get_context("spawn")
    context.Process(target=hold, args=(theirs, folder / "holder"), daemon=True).start()
    theirs.close()
    address = await asyncio.to_thread(ours.recv)
    try:
        return await ask(address, folder / "asker")
    finally:
        ours.close()


def measure() -> Measured:
    """All sizes and ways."""
    logging.getLogger("swarm").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        times = uvloop.run(_measure(Path(folder)))
    figures, notes = [], []
    for size in SIZES:
        rate = {way: size * MIB / 1e6 / median(times[size, way]) for way in ("raw", "volatile", "durable", "disk")}
        both_s = median([r + d for r, d in zip(times[size, "raw"], times[size, "disk"], strict=True)])
        rate["both"] = size * MIB / 1e6 / both_s
        for what, way, yardstick, yardstick_is, aim in (
            ("verified and durable", "durable", "raw", "raw stream", ">= 0.8"),
            ("verified and written, without fsync", "volatile", "raw", "raw stream", ">= 0.8"),
            ("verified and durable", "durable", "both", "raw stream, then the same bytes written and fsync'd", ""),
        ):
            figures.append(
                Figure(
                    what=f"{size} MiB, {what}",
                    ours=rate[way],
                    yardstick=rate[yardstick],
                    unit="MB/s",
                    yardstick_is=yardstick_is,
                    aim=aim,
                )
            )
        notes.append(f"{size} MiB: {SIZES[size]} rounds; the disk alone takes {rate['disk']:.0f} MB/s with fsync")
    return figures, notes


if __name__ == "__main__":
    main("fetch", "Adapter fetch beside a raw libp2p stream.", measure)
