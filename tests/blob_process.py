"""A peer that only holds and fetches blobs, as a process of its own that is told what to do, a line of JSON each.

    python -m tests.blob_process FOLDER ADDRESS

It says its address, then an answer to each order; it ends with its standard input. What is fetched goes to FOLDER and
stays there when the process is killed.

    connect  addresses                    dial other peers
    put      seed size sparing            hold `blob_of(seed, size)`
    spoil    root with_root               serve other bytes as a blob's: those of another blob, or (null) one bit of
                                          each chunk flipped
    uplink   bytes_per_s                  of what it serves, all streams together; null: as fast as it goes
    fetch    root size sources [once]     again and again until it is here, or one attempt
    count                                 what it sent and received so far
    renew    failed_s                     as after a start: nothing counted, nobody shunned, the whole uplink;
                                          henceforth a source that failed is shunned for so long
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

import swarm.downloads
from protocols.faults import TransportFault
from protocols.messages import BlobRef
from protocols.transfer import CHUNK_BYTES
from swarm.blobs import BlobStore
from swarm.exchange import Exchange
from swarm.frames import BLOB_PROTOCOL
from swarm.host import Host, HostConfig
from swarm.identity import load_identity

FETCH_S = 120.0  # limit of one transfer
PIECE_S = 0.05  # an uplink takes as much at once as it carries in this time
STOP_S = 10.0  # a process that was told to end and has not is killed
Answer = dict[str, Any]


def blob_of(seed: int, size: int) -> bytes:
    """Bytes that do not compress; the same in every process."""
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------------- in the process


class Uplink:
    """What a peer can send, all its streams together."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._turn = asyncio.Lock()

    async def carry(self, data: bytearray, writer: asyncio.StreamWriter) -> None:
        """Send all of `data` at our rate, also what is added meanwhile; it is empty then."""
        while data:
            async with self._turn:
                rate = self.bytes_per_s
                piece = bytes(data if rate is None else data[: max(1, int(rate * PIECE_S))])
                del data[: len(piece)]
                writer.write(piece)
                if rate is not None:
                    await asyncio.sleep(len(piece) / rate)
            await writer.drain()


class Throttled:
    """The writer of a stream that goes over an uplink. Like a real one it sends chunks when it is drained."""

    def __init__(self, writer: asyncio.StreamWriter, uplink: Uplink) -> None:
        self._writer = writer
        self._uplink = uplink
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        chunk = len(data) >= CHUNK_BYTES // 2  # what is smaller is a frame, and needs no time
        if self._waiting or (chunk and self._uplink.bytes_per_s is not None):
            self._waiting += data
        else:
            self._writer.write(data)

    async def drain(self) -> None:
        await self._uplink.carry(self._waiting, self._writer)
        await self._writer.drain()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class _Peer:
    def __init__(self, host: Host, exchange: Exchange) -> None:
        self.host = host
        self.exchange = exchange
        self.uplink = Uplink()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        throttled: Any = Throttled(writer, self.uplink)
        await self.exchange.uploads.serve(reader, throttled, peer_id)

    async def obey(self, order: Answer) -> Answer:
        exchange = self.exchange
        match order["do"]:
            case "connect":
                for address in order["addresses"]:
                    await self.host.connect(address, 20.0)
                return {}
            case "put":
                exchange.uploads.sparing = order["sparing"]
                exchange.blobs.put(blob_of(order["seed"], order["size"]))
                return {}
            case "spoil":
                _spoil(exchange.blobs, bytes.fromhex(order["root"]), order["with_root"])
                return {}
            case "uplink":
                self.uplink.bytes_per_s = order["bytes_per_s"]
                return {}
            case "renew":
                swarm.downloads.FAILED_S = order["failed_s"]
                self.exchange, self.uplink.bytes_per_s = Exchange(self.host, exchange.blobs), None
                return {}
            case "fetch":
                ref = BlobRef(bytes.fromhex(order["root"]), order["size"])
                return await self._fetch(ref, order["sources"], order.get("once", False))
            case "count":
                me = psutil.Process()
                times = [process.cpu_times() for process in (me, *me.children())]  # its own, and its p2pd's
                return {
                    "sent": exchange.sent_bytes,
                    "received": exchange.received_bytes,
                    "cpu_s": sum(time.user + time.system for time in times),
                    "refusals": dict(exchange.refusals),
                }
        raise AssertionError(order)

    async def _fetch(self, ref: BlobRef, sources: list[str], once: bool) -> Answer:
        begun_s, received, faults = time.monotonic(), dict[str, int](), list[str]()
        async with asyncio.timeout(FETCH_S):
            while not self.exchange.blobs.path(ref.root).exists():
                try:
                    received = (await self.exchange.fetch(ref, lambda: sources)).received
                except (TransportFault, OSError) as fault:
                    faults.append(str(fault))
                    if once:
                        break
                    await asyncio.sleep(0.5)
        return {"took_s": time.monotonic() - begun_s, "received": received, "faults": faults}


def _spoil(blobs: BlobStore, root: bytes, with_root: str | None) -> None:
    """As a disk does: other bytes, and nothing that tells of it."""
    info = blobs.info(root)
    assert info is not None
    if with_root is None:
        spoilt = bytearray(info.path.read_bytes())
        for at in range(0, info.size, CHUNK_BYTES):
            spoilt[at] ^= 1
    else:
        spoilt = bytearray(blobs.path(bytes.fromhex(with_root)).read_bytes())
        assert len(spoilt) == info.size
    with info.path.open("r+b") as file:
        file.write(spoilt)
    os.utime(info.path, ns=(info.written_ns, info.written_ns))


async def _run(folder: Path, address: str) -> None:
    identity, _ = load_identity(folder / "peer.key")
    host = await Host.start(identity, HostConfig(listen=(f"/ip4/{address}/tcp/0",)))
    peer = _Peer(host, Exchange(host, BlobStore(folder / "blobs")))
    await host.serve_stream(BLOB_PROTOCOL, peer.serve)
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({"peer_id": host.peer_id, "address": host.addresses[0]})
    try:
        while line := await reader.readline():
            _say(await peer.obey(json.loads(line)))
    finally:
        await host.close()


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


# ---------------------------------------------------------------------- around it


@dataclass(slots=True)
class BlobPeer:
    """The process, from outside."""

    process: Process
    folder: Path
    peer_id: str
    address: str
    busy: bool = False
    """With an order."""

    async def do(self, **order: object) -> Answer:
        """One order, and its answer. AssertionError when it ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert not self.busy, "the peer is at an earlier order"
        self.busy = True
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = json.loads(await self.process.stdout.readline() or b"null")
        self.busy = False
        assert answer is not None, "the peer has ended"
        assert isinstance(answer, dict)
        return answer

    def path(self, root: bytes) -> Path:
        """Where it keeps a blob; what has arrived of it so far is at `.part` behind this."""
        return self.folder / "blobs" / root.hex()

    async def kill(self) -> None:
        """SIGKILL; its p2pd ends with it."""
        self.process.kill()
        await self.process.wait()

    def pause(self) -> None:
        """SIGSTOP to all of it, as when a lid is closed: connections stay open, and nobody answers."""
        for process in self._all():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._all():
            process.send_signal(signal.SIGCONT)

    def _all(self) -> list[psutil.Process]:
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    async def stop(self) -> None:
        """End of its input, end of it; a process that is busy or paused is killed."""
        assert self.process.stdin is not None
        self.resume()
        self.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        except TimeoutError:
            await self.kill()


@asynccontextmanager
async def blob_peer(folder: Path, inside: Sequence[str] = (), address: str = "127.0.0.1") -> AsyncIterator[BlobPeer]:
    """A running peer; `inside` is what comes before its command. On a folder that was used before it goes on there."""
    await asyncio.to_thread(folder.mkdir, 0o700, exist_ok=True)
    command = [*inside, sys.executable, "-m", "tests.blob_process", str(folder), address]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
    except BaseException:
        process.kill()
        raise
    peer = BlobPeer(process, folder, hello["peer_id"], hello["address"])
    try:
        yield peer
    finally:
        if process.returncode is None:
            await peer.stop()


if __name__ == "__main__":
    uvloop.run(_run(Path(sys.argv[1]), sys.argv[2]))
