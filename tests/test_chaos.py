"""Chaos while a blob is on its way, among real processes: they die, sleep, lie, lose their line or their disk.

Every transfer must end bit-equal in bounded time, and no chunk that was verified is fetched again (B26, B27, B35).
What has arrived is read from the disks of the peers, whatever they say themselves.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from protocols.messages import BlobRef
from protocols.transfer import CHUNK_BYTES, STALL_S, blob_ref, num_chunks
from swarm.downloads import FAILED_S
from tests.blob_process import Answer, BlobPeer, blob_of, blob_peer
from tests.disks import fill_up, small_disk
from tests.hosts import until
from tests.namespaces import Machine, Network, network
from tests.samples import indexes

pytestmark = [pytest.mark.network, pytest.mark.asyncio(loop_scope="module")]

MIB = 1024 * 1024
# However a source fails, a chunk is asked for elsewhere within STALL_S, and a source is looked for again and again. The
# rest is the transfer itself, a few seconds, and room for a machine that does something else besides.
DONE_S = 30.0
SOON_S = 1.0  # instead of FAILED_S, where a source that failed is to be used again
seeds = itertools.count(1)


class Processes:
    """All of a module; killed behind it, as good order takes seconds."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.all: list[BlobPeer] = []

    async def start(self, folder: Path, inside: Sequence[str] = (), address: str = "127.0.0.1") -> BlobPeer:
        peer = await self.stack.enter_async_context(blob_peer(folder, inside, address))
        self.all.append(peer)
        return peer


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        running = Processes(stack)
        try:
            yield running
        finally:
            await asyncio.gather(*(peer.kill() for peer in running.all if peer.process.returncode is None))


class Peers:
    """Processes that go from test to test. Those that died, or are still busy with a test that failed, are replaced."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.running: list[BlobPeer] = []
        self.started = 0

    async def get(self, count: int, failed_s: float = FAILED_S) -> list[BlobPeer]:
        """So many, each linked with each, that remember nobody's failures."""
        running = [peer for peer in self.running if peer.process.returncode is None and not peer.busy]
        missing = range(self.started, self.started + count - len(running))
        self.started += len(missing)
        started = await asyncio.gather(*(self.processes.start(self.folder / f"{number}") for number in missing))
        self.running = running + started
        for number, peer in enumerate(self.running):
            await link(peer, self.running[:number])
            await peer.do(do="renew", failed_s=failed_s)
        return self.running[:count]

    async def again(self, ended: BlobPeer) -> BlobPeer:
        """Start one again on its folder, linked with those that run."""
        peer = await self.processes.start(ended.folder)
        self.running = [each for each in self.running if each is not ended]
        await link(peer, self.running)
        self.running.append(peer)
        return peer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Peers]:
    async with processes() as running:
        yield Peers(tmp_path_factory.mktemp("peers"), running)


async def link(peer: BlobPeer, others: Sequence[BlobPeer]) -> None:
    await peer.do(do="connect", addresses=[other.address for other in others])


@dataclass(frozen=True, slots=True)
class Blob:
    """One that no other test knows."""

    ref: BlobRef
    content: bytes = field(repr=False)

    @property
    def size(self) -> int:
        return self.ref.size

    @property
    def all(self) -> int:
        """The set of its chunks."""
        return (1 << num_chunks(self.size)) - 1

    def is_at(self, peer: BlobPeer) -> bool:
        """This peer has all of it, bit for bit."""
        return peer.path(self.ref.root).read_bytes() == self.content

    def part_at(self, peer: BlobPeer) -> Path:
        return peer.path(self.ref.root).with_suffix(".part")

    def arrived(self, peer: BlobPeer) -> int:
        """The chunks on its disk, as a set: those whose last bytes are there, as they are written from the first on."""
        whole = peer.path(self.ref.root)
        for path in (whole, self.part_at(peer), whole):  # the second may become the first meanwhile
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                ends = [min(self.size, at + CHUNK_BYTES) for at in range(0, self.size, CHUNK_BYTES)]
                there = (os.pread(descriptor, 64, end - 64) == self.content[end - 64 : end] for end in ends)
                return sum(each << index for index, each in enumerate(there))
            finally:
                os.close(descriptor)
        return 0

    async def share_arrived(self, peer: BlobPeer, share: float) -> None:
        await until(lambda: self.arrived(peer).bit_count() >= share * num_chunks(self.size), DONE_S)


async def hold(size: int, *holders: BlobPeer, mib_per_s: float | None = None, sparing: bool = False) -> Blob:
    """A new blob that they all hold and serve at this rate each."""
    seed = next(seeds)
    for holder in holders:
        await holder.do(do="put", seed=seed, size=size, sparing=sparing)
        await holder.do(do="uplink", bytes_per_s=None if mib_per_s is None else mib_per_s * MIB)
    content = blob_of(seed, size)
    return Blob(blob_ref(content), content)


async def fetch(asker: BlobPeer, blob: Blob, *sources: BlobPeer, once: bool = False) -> Answer:
    names = [source.peer_id for source in sources]
    return await asker.do(do="fetch", root=blob.ref.root.hex(), size=blob.size, sources=names, once=once)


async def count(peer: BlobPeer) -> Answer:
    return await peer.do(do="count")


# ---------------------------------------------------------------------- the trainer


async def test_b26_the_trainer_is_killed_once_a_copy_is_out(peers: Peers) -> None:
    # Goal: from then on the swarm has it, though no peer has all of it.
    # Method: the trainer's uplink is quick, the others' are slow, so that the copy is out long before they are through.
    trainer, *askers = await peers.get(4)
    blob = await hold(8 * MIB, trainer, mib_per_s=4, sparing=True)
    fetches = []
    for asker in askers:
        await asker.do(do="uplink", bytes_per_s=MIB)
        others = [other for other in askers if other is not asker]
        fetches.append(asyncio.create_task(fetch(asker, blob, trainer, *others)))

    def copy_is_out() -> bool:
        first, second, third = map(blob.arrived, askers)
        return first | second | third == blob.all

    await until(copy_is_out, DONE_S)
    assert blob.all not in map(blob.arrived, askers)
    await trainer.kill()
    async with asyncio.timeout(DONE_S):
        answers = await asyncio.gather(*fetches)
    received = sum((Counter(answer["received"]) for answer in answers), Counter[str]())
    for asker in askers:
        assert blob.is_at(asker)
        about = await count(asker)
        assert (about["received"], about["refusals"]) == (blob.size, {})
        assert about["sent"] - received[asker.peer_id] <= 2 * CHUNK_BYTES, "chunks that somebody had already"


# ---------------------------------------------------------------------- a source


@pytest.mark.parametrize(
    ("fault", "mib"),
    [
        ("killed", 8),
        ("throttled", 8),
        pytest.param("stopped", 8, marks=pytest.mark.slow),
        *(pytest.param(fault, 64, marks=pytest.mark.slow) for fault in ("killed", "stopped", "throttled")),
    ],
)
async def test_b27_a_source_fails_half_way_and_the_other_one_finishes(peers: Peers, fault: str, mib: int) -> None:
    # Goal: nothing waits for it for long, nothing that was verified comes again; once it is well it is used again.
    asker, bad, good = await peers.get(3, failed_s=SOON_S)
    blob = await hold(mib * MIB, bad, good, mib_per_s=mib / 2)
    fetching = asyncio.create_task(fetch(asker, blob, bad, good))
    await blob.share_arrived(asker, 0.5)
    match fault:
        case "killed":
            await bad.kill()
        case "stopped":
            bad.pause()
        case "throttled":
            await bad.do(do="uplink", bytes_per_s=1000)
    async with asyncio.timeout(DONE_S):
        answer = await fetching
    assert blob.is_at(asker)
    assert answer["faults"] == []
    assert set(answer["received"]) == {bad.peer_id, good.peer_id}
    assert sum(answer["received"].values()) == blob.size
    assert (await count(good))["sent"] - answer["received"][good.peer_id] <= 2 * CHUNK_BYTES
    if fault == "killed":
        return

    bad.resume()
    blob = await hold(8 * MIB, bad, good, mib_per_s=4)  # from one of them it takes longer than SOON_S
    async with asyncio.timeout(DONE_S):
        answer = await fetch(asker, blob, bad, good)
    assert blob.is_at(asker)
    assert set(answer["received"]) == {bad.peer_id, good.peer_id}
    assert (await count(asker))["refusals"] == {}


@pytest.mark.parametrize("lie", ["a flipped bit", pytest.param("an older blob", marks=pytest.mark.slow)])
async def test_b30_a_source_that_lies_is_counted_and_shunned(peers: Peers, lie: str) -> None:
    asker, liar, good = await peers.get(3, failed_s=SOON_S)
    older = await hold(4 * MIB, liar)
    blob = await hold(4 * MIB, liar, good, mib_per_s=4)  # neither has sent all before the other is asked
    other = None if lie == "a flipped bit" else older.ref.root.hex()
    await liar.do(do="spoil", root=blob.ref.root.hex(), with_root=other)
    async with asyncio.timeout(DONE_S):
        answer = await fetch(asker, blob, liar, good)
    assert blob.is_at(asker)
    assert (answer["received"], answer["faults"]) == ({good.peer_id: blob.size}, [])
    refusals = (await count(asker))["refusals"]
    assert refusals.keys() == {"wrong chunk"}
    assert refusals["wrong chunk"] <= 4, "it was asked again after its first chunks"

    blob = await hold(8 * MIB, liar, good, mib_per_s=4)  # takes longer than SOON_S
    last = await hold(MIB, liar)
    async with asyncio.timeout(DONE_S):
        assert (await fetch(asker, blob, liar, good))["received"] == {good.peer_id: blob.size}
        assert (await fetch(asker, last, liar))["received"] == {liar.peer_id: last.size}, "there was nobody else"
    assert (await count(asker))["refusals"] == refusals


# ---------------------------------------------------------------------- the asker, and its disk


async def test_b27_an_asker_that_was_killed_goes_on_where_it_was(peers: Peers) -> None:
    # Goal: after a restart exactly what is missing on its disk is fetched, and what the disk has damaged meanwhile.
    asker, *sources = await peers.get(3)
    blob = await hold(8 * MIB, *sources, mib_per_s=2)
    interrupted = asyncio.create_task(fetch(asker, blob, *sources))
    await blob.share_arrived(asker, 0.5)
    await asker.kill()
    with pytest.raises(AssertionError, match="has ended"):
        await interrupted
    kept = list(indexes(blob.arrived(asker)))
    assert 0.5 * num_chunks(blob.size) <= len(kept) < num_chunks(blob.size)
    with blob.part_at(asker).open("r+b") as part:
        part.seek(kept.pop() * CHUNK_BYTES)
        part.write(b"garbage")

    again = await peers.again(asker)
    async with asyncio.timeout(DONE_S):
        answer = await fetch(again, blob, *sources)
    assert blob.is_at(again)
    assert sum(answer["received"].values()) == blob.size - len(kept) * CHUNK_BYTES
    assert not blob.part_at(again).exists()


async def test_b35_a_disk_that_fills_up_does_not_disturb_what_is_on_its_way(peers: Peers, tmp_path: Path) -> None:
    # Goal: room for a blob is taken before its first chunk. Where there is none that is said at once, nothing is left
    # behind, what is here is still served, and the blob comes once there is room.
    with small_disk(tmp_path / "disk", 6 * MIB) as disk:
        async with blob_peer(disk / "peer") as asker:
            source, other = await peers.get(2)
            await link(asker, [source, other])
            blob = await hold(4 * MIB, source, mib_per_s=4)
            fetching = asyncio.create_task(fetch(asker, blob, source))
            await blob.share_arrived(asker, 0.25)
            fill_up(disk / "filler")
            assert blob.part_at(asker).exists()
            async with asyncio.timeout(DONE_S):
                assert (await fetching)["faults"] == []
            assert blob.is_at(asker)

            wanted = await hold(MIB, source)
            (fault,) = (await fetch(asker, wanted, source, once=True))["faults"]
            assert "No space left on device" in fault
            assert str(wanted.part_at(asker)) in fault
            assert [path.name for path in (asker.folder / "blobs").iterdir()] == [blob.ref.root.hex()]
            assert (await fetch(other, blob, asker))["received"] == {asker.peer_id: blob.size}

            waiting = asyncio.create_task(fetch(asker, wanted, source))
            (disk / "filler").unlink()
            async with asyncio.timeout(DONE_S):
                await waiting
            assert wanted.is_at(asker)


# ---------------------------------------------------------------------- the line


@dataclass(frozen=True, slots=True)
class Country:
    """Machines of their own: the asker and a source on one side of a cable, a source on the other side."""

    net: Network
    asker: BlobPeer
    near: BlobPeer
    far: BlobPeer
    far_machine: Machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def country(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Country]:
    folder = tmp_path_factory.mktemp("country")
    with network() as net:
        async with processes() as running:
            machines = [net.machine(side) for side in "aab"]
            starting = (running.start(folder / each.name, each.inside, each.address) for each in machines)
            asker, near, far = await asyncio.gather(*starting)
            await link(asker, [near, far])
            yield Country(net, asker, near, far, machines[2])


@pytest.mark.slow
async def test_b27_the_cable_is_cut_and_the_source_on_this_side_finishes(country: Country) -> None:
    asker, near, far = country.asker, country.near, country.far
    await asker.do(do="renew", failed_s=FAILED_S)
    blob = await hold(8 * MIB, near, far, mib_per_s=2)
    fetching = asyncio.create_task(fetch(asker, blob, near, far))
    await blob.share_arrived(asker, 0.5)
    country.net.cut()
    try:
        async with asyncio.timeout(DONE_S):
            answer = await fetching
    finally:
        country.net.heal()
    assert blob.is_at(asker)
    assert answer["faults"] == []
    assert set(answer["received"]) == {near.peer_id, far.peer_id}
    assert sum(answer["received"].values()) == blob.size


async def test_b27_the_cable_is_cut_and_the_transfer_goes_on_once_it_heals(country: Country) -> None:
    # Goal: however long the cut, what was verified stays, and the only source is found again soon.
    asker, far = country.asker, country.far
    await asker.do(do="renew", failed_s=FAILED_S)
    blob = await hold(8 * MIB, far, mib_per_s=4)
    fetching = asyncio.create_task(fetch(asker, blob, far))
    await blob.share_arrived(asker, 0.25)
    country.net.cut()
    try:
        before = blob.arrived(asker)
        done, _ = await asyncio.wait([fetching], timeout=STALL_S + 3)
        assert not done
        assert (blob.arrived(asker) & ~before).bit_count() <= 2, "it was not cut"
    finally:
        country.net.heal()
    async with asyncio.timeout(2 * DONE_S):
        answer = await fetching
    assert answer["faults"], "the cut was not noticed"
    assert blob.is_at(asker)
    assert (await count(asker))["received"] == blob.size


async def test_b27_a_source_whose_line_carries_a_kilobyte_a_second_is_overtaken(country: Country) -> None:
    # The last test of this country: the line stays so.
    asker, near, slow = country.asker, country.near, country.far
    await asker.do(do="renew", failed_s=FAILED_S)
    blob = await hold(8 * MIB, near, slow, mib_per_s=2)
    fetching = asyncio.create_task(fetch(asker, blob, near, slow))
    await blob.share_arrived(asker, 0.5)
    country.net.limit(country.far_machine, 0.008)
    async with asyncio.timeout(DONE_S):
        answer = await fetching
    assert blob.is_at(asker)
    assert answer["faults"] == []
    assert set(answer["received"]) == {near.peer_id, slow.peer_id}
    assert sum(answer["received"].values()) == blob.size
