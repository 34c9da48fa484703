"""A peer that only holds and fetches blobs, as a process of its own that is told what to do, a line of JSON each.

    python -m tests.blob_process FOLDER ADDRESS

It says its address, then an answer to each order; it ends with its standard input. What is fetched goes to FOLDER and
stays there when the process is killed.
"""

import asyncio
import json
import random
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

from protocols.faults import TransportFault
from protocols.messages import BlobRef
from swarm.blobs import BlobStore
from swarm.exchange import Exchange
from swarm.host import Host, HostConfig
from swarm.identity import load_identity

FETCH_S = 120.0  # limit of one transfer
Answer = dict[str, Any]


def blob_of(seed: int, size: int) -> bytes:
    """Bytes that do not compress; the same in every process."""
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------------- in the process


async def _peer(folder: Path, address: str) -> None:
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


async def _obey(order: Answer, host: Host, exchange: Exchange) -> Answer:
    match order["do"]:
        case "connect":
            for address in order["addresses"]:
                await host.connect(address, 20.0)
            return {}
        case "put":
            exchange.uploads.sparing = order["sparing"]
            exchange.blobs.put(blob_of(order["seed"], order["size"]))
            return {}
        case "fetch":
            ref = BlobRef(bytes.fromhex(order["root"]), order["size"])
            begun_s, received, faults = time.monotonic(), dict[str, int](), list[str]()
            async with asyncio.timeout(FETCH_S):
                while not exchange.blobs.path(ref.root).exists():
                    try:
                        received = (await exchange.fetch(ref, lambda: order["sources"])).received
                    except (TransportFault, OSError) as fault:
                        faults.append(str(fault))
                        await asyncio.sleep(0.5)
            return {"took_s": time.monotonic() - begun_s, "received": received, "faults": faults}
        case "count":
            me = psutil.Process()
            times = [process.cpu_times() for process in (me, *me.children())]  # its own, and its p2pd's
            cpu_s = sum(time.user + time.system for time in times)
            return {"sent": exchange.sent_bytes, "cpu_s": cpu_s, "refusals": dict(exchange.refusals)}
    raise AssertionError(order)


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


# ---------------------------------------------------------------------- around it


@dataclass(slots=True)
class BlobPeer:
    """The process, from outside."""

    process: Process
    folder: Path
    peer_id: str
    address: str

    async def do(self, **order: object) -> Answer:
        """One order, and its answer. AssertionError when it ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = json.loads(await self.process.stdout.readline() or b"null")
        assert answer is not None, "the peer has ended"
        assert isinstance(answer, dict)
        return answer

    async def stop(self) -> None:
        """End of its input, end of it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


@asynccontextmanager
async def blob_peer(folder: Path, inside: Sequence[str] = (), address: str = "127.0.0.1") -> AsyncIterator[BlobPeer]:
    """A running peer; `inside` is what comes before its command."""
    await asyncio.to_thread(folder.mkdir, 0o700, exist_ok=True)
    command = [*inside, sys.executable, "-m", "tests.blob_process", str(folder), address]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    hello = json.loads(await process.stdout.readline())
    peer = BlobPeer(process, folder, hello["peer_id"], hello["address"])
    try:
        yield peer
    finally:
        if process.returncode is None:
            await peer.stop()


if __name__ == "__main__":
    uvloop.run(_peer(Path(sys.argv[1]), sys.argv[2]))
