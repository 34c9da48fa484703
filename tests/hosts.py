"""Real hosts on loopback, for the tests that need p2pd."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from protocols.faults import TransportFault
from swarm.host import Host, HostConfig
from swarm.identity import Identity, load_identity


def identity(folder: Path, name: str) -> Identity:
    return load_identity(folder / f"{name}.key")[0]


@asynccontextmanager
async def hosts(folder: Path, count: int, linked: bool = True) -> AsyncIterator[list[Host]]:
    """`count` running hosts; all linked to the first one."""
    started: list[Host] = []
    try:
        for number in range(count):
            started.append(await Host.start(identity(folder, f"host{number}"), HostConfig()))
        if linked:
            await asyncio.gather(*(host.connect(started[0].addresses[0], 10.0) for host in started[1:]))
        yield started
    finally:
        await asyncio.gather(*(host.close() for host in started))


async def fault_of(work: Awaitable[object]) -> TransportFault:
    """The fault that `work` must end with."""
    try:
        result = await work
    except TransportFault as fault:
        return fault
    raise AssertionError(f"no fault, but {result!r}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children() -> set[int]:
    """Pids of our p2pd processes."""
    return {child.pid for child in psutil.Process().children(recursive=True) if "p2pd" in child.name()}


async def until(condition, timeout_s: float = 10.0) -> None:
    """Wait for something that no event announces; the only place that polls."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
