"""How an inference peer gets from version to version, what it tells of it, and a disk that is full (B21 B35)."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import peers.inference
from peers.inference import InferenceOptions, InferencePeer
from protocols.messages import BlobRef
from swarm.downloads import Progress
from swarm.neighbourhood import Neighbourhood
from tests.disks import fill_up, small_disk
from tests.hosts import until
from tests.processes import START_S, Member, Swarm, wait_until
from tests.samples import RUN, STRANGER_ID
from tests.test_adapters_obtain import MIB, Peer, SmallDisk, Trainer


class Worker:
    """The fetching half of an inference peer; its engine takes everything at once."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.got = Peer(trainer, folder)
        self.warnings: list[tuple[str, str]] = []
        self.events: list[dict[str, Any]] = []
        follower: Any = SimpleNamespace(
            chain=self.got.chain,
            changed=asyncio.Condition(),
            heartbeats=SimpleNamespace(hurry=lambda: None),
            notify=self.notify,
            ignores=lambda peer_id: False,
        )
        node: Any = SimpleNamespace(
            followers={RUN: follower},
            peer_id=STRANGER_ID,
            session=bytes(16),
            warn=lambda code, text: self.warnings.append((code, text)),
            metrics=SimpleNamespace(emit=lambda event, **fields: self.events.append({"event": event, **fields})),
        )
        follower.node = node
        follower.neighbourhood = Neighbourhood(follower)
        self.follower = follower
        self.peer = InferencePeer(node, InferenceOptions(home=folder, run=RUN, bootstrap=()))
        self.peer.adapters = self.got.adapters
        self.peer.engine = SimpleNamespace(
            load_adapter=lambda version, adapter: None, stop=lambda: None, close=lambda: None
        )  # type: ignore[assignment]

    async def notify(self) -> None:
        async with self.follower.changed:
            self.follower.changed.notify_all()

    async def hear(self) -> None:
        self.got.hear()
        await self.notify()

    @property
    def version(self) -> int | None:
        return self.peer.loaded.version if self.peer.loaded is not None else None

    async def load(self) -> None:
        """What the generating loop does between two calls."""
        while True:
            async with self.follower.changed:
                await self.follower.changed.wait_for(lambda: self.peer._offered is not None)
            await self.peer._load_offered()


@contextlib.asynccontextmanager
async def working(folder: Path, trainer: Trainer) -> AsyncIterator[Worker]:
    worker = Worker(folder, trainer)
    loops = [asyncio.create_task(loop()) for loop in (worker.peer.hear, worker.peer.fetch, worker.load)]
    try:
        yield worker
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await worker.peer.aclose()


async def test_b35_a_full_disk_is_said_and_over_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.inference, "FETCH_RETRY_S", 0.02)
    monkeypatch.setattr(peers.inference, "DISK_RETRY_MAX_S", 0.1)
    trainer = Trainer(elements=MIB).steps(1)
    async with working(tmp_path, trainer) as worker:
        await worker.hear()
        await until(lambda: worker.version == 0)
        assert worker.peer.storage

        disk = SmallDisk(tmp_path, 1, monkeypatch)
        delta = trainer.step().adapter.delta
        assert delta is not None
        await worker.hear()
        await until(lambda: len(worker.warnings) >= 5)
        code, text = worker.warnings[0]
        assert code == "cannot store adapter"
        assert text.startswith(f"v1: No space left on device: {tmp_path} needs {delta.blob.size:,} bytes and has ")
        assert text.endswith(" free; staying at the version before")
        assert not worker.peer.storage
        assert worker.follower.neighbourhood._capacity_changed, "others are to know soon"
        assert worker.version == 0
        assert not any("D" in name for name in worker.got.on_disk())

        disk.num_bytes = 100 * MIB
        await until(lambda: worker.version == 1)
        assert worker.peer.storage
        assert [event["version"] for event in worker.events] == [0, 1]


async def test_waits_for_room_grow_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            enough.set()
            await asyncio.Event().wait()

    trainer = Trainer().steps(1)
    SmallDisk(tmp_path, 1, monkeypatch)
    monkeypatch.setattr(peers.inference, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    async with working(tmp_path, trainer) as worker:
        await worker.hear()
        await asyncio.wait_for(enough.wait(), 10.0)
        assert worker.warnings[0][0] == "cannot store adapter"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


async def test_a_disk_that_refuses_is_named_and_is_not_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.inference, "FETCH_RETRY_S", 0.02)
    trainer = Trainer().steps(1)
    path = tmp_path / trainer.said[0].message.adapter.keyframe.root.hex()
    path.mkdir()  # where the keyframe goes
    async with working(tmp_path, trainer) as worker:
        await worker.hear()
        await until(lambda: len(worker.warnings) >= 3)
        assert set(worker.warnings) == {
            ("cannot store adapter", f"v0: Is a directory: {path}; staying at the version before")
        }
        assert worker.peer.storage
        path.rmdir()
        await until(lambda: worker.version == 0)


async def test_what_failed_passes_leave_on_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: each version stalls half-way and the head moves on; parts of versions that nobody wants any more go.
    monkeypatch.setattr(peers.inference, "FETCH_RETRY_S", 0.01)
    trainer = Trainer(codec="raw")
    async with working(tmp_path, trainer) as worker:
        shelf = worker.got.shelf

        async def stall(ref: BlobRef) -> None:
            shelf.lost.add(ref.root)
            (tmp_path / f"{ref.root.hex()}.part").write_bytes(bytes(100))

        shelf.before = stall
        for _ in range(12):
            trainer.step()
            await worker.hear()
            whole = trainer.said[-1].message.adapter.keyframe.root
            await until(lambda whole=whole: whole in shelf.lost)
        newest = {f"{sealed.message.adapter.keyframe.root.hex()}.part" for sealed in trainer.said[-4:]}
        await until(lambda: set(os.listdir(tmp_path)) <= newest)
        assert f"{whole.hex()}.part" in os.listdir(tmp_path), "the head's stays, to go on from"


async def test_a_version_that_cannot_be_rebuilt_is_said_once_and_the_next_is_waited_for(tmp_path: Path) -> None:
    trainer = Trainer(codec="raw").steps(1)
    trainer.step(digest=bytes(32))
    async with working(tmp_path, trainer) as worker:
        worker.got.hear(1)
        await worker.notify()
        await until(lambda: worker.version == 0)
        await worker.hear()
        await until(lambda: len(worker.warnings) == 1)
        assert worker.warnings[0][0] == "bad adapter"
        trainer.step()
        await worker.hear()
        await until(lambda: worker.version == 2)
        assert len(worker.warnings) == 1


async def test_b21_replays_neither_load_nor_fetch_again(tmp_path: Path) -> None:
    trainer = Trainer(elements=300, keyframe_every=20).steps(50)
    async with working(tmp_path, trainer) as worker:
        await worker.hear()
        await until(lambda: worker.version == 49)
        for version in (48, 2, 49, 2):
            worker.got.chain.extend(trainer.said[version])
            await worker.notify()
        trainer.step()
        await worker.hear()
        await until(lambda: worker.version == 50)
        assert [event["version"] for event in worker.events] == [49, 50]


async def test_a_long_download_is_told_of_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.inference, "DOWNLOAD_TICK_S", 0.01)
    monkeypatch.setattr(peers.inference, "DOWNLOAD_SHOWN_S", 0.05)
    trainer = Trainer().steps(1)
    size = trainer.said[0].message.adapter.keyframe.size
    arrived = asyncio.Event()
    async with working(tmp_path, trainer) as worker:

        async def arrive(ref: BlobRef) -> None:
            worker.got.shelf.downloads[ref.root] = Progress(ref.size, ref.size // 4, 3, 12345.6)
            await arrived.wait()
            del worker.got.shelf.downloads[ref.root]

        worker.got.shelf.before = arrive
        telling = asyncio.create_task(worker.peer.show_downloads())
        started_s = time.monotonic()
        await worker.hear()
        await until(lambda: len(worker.events) >= 2)
        assert time.monotonic() - started_s >= 0.05
        about = {"version": 0, "bytes": size, "received_bytes": size // 4, "bytes_per_s": 12346, "sources": 3}
        assert worker.events[0] == {"event": "download"} | about | {"trouble": ""}
        arrived.set()
        await until(lambda: worker.version == 0)
        assert worker.events[-1]["event"] == "adapter"
        telling.cancel()
        await asyncio.wait([telling])


async def test_when_nothing_comes_it_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.inference, "DOWNLOAD_TICK_S", 0.01)
    monkeypatch.setattr(peers.inference, "DOWNLOAD_SHOWN_S", 0.05)
    monkeypatch.setattr(peers.inference, "FETCH_RETRY_S", 0.01)
    trainer = Trainer().steps(1)
    keyframe = trainer.said[0].message.adapter.keyframe
    async with working(tmp_path, trainer) as worker:
        worker.got.shelf.lost.add(keyframe.root)
        telling = asyncio.create_task(worker.peer.show_downloads())
        await worker.hear()
        await until(lambda: len(worker.events) >= 3)  # each attempt takes no time, and yet they are told of
        about = {"version": 0, "bytes": keyframe.size, "received_bytes": 0, "bytes_per_s": 0, "sources": 0}
        assert worker.events[-1] == {"event": "download"} | about | {"trouble": f"no source: {keyframe.root.hex()}"}
        worker.got.shelf.lost.clear()
        await until(lambda: worker.version == 0)
        told = len(worker.events)
        telling.cancel()
        await asyncio.wait([telling])
        assert worker.events[told - 1]["event"] == "adapter"
        assert worker.got.adapters.underway() is None


async def test_the_event_of_a_version_says_what_it_took(tmp_path: Path) -> None:
    # Two passes ended before the engine had time: what is told is the way from what was loaded before.
    trainer = Trainer().steps(2)
    before_ms = int(time.time() * 1000)
    worker = Worker(tmp_path, trainer)
    hearing = asyncio.create_task(worker.peer.hear())
    for _ in range(2):
        await worker.hear()
        await until(lambda: worker.peer._heard_upto == worker.got.chain.version)
        head = worker.got.chain.head
        assert head is not None
        assert await worker.peer._fetch(head)
        trainer.step()
    await worker.peer._load_offered()
    hearing.cancel()
    await asyncio.wait([hearing])
    await worker.peer.aclose()
    (event,) = worker.events
    assert (event["event"], event["version"], event["path"]) == ("adapter", 2, ["keyframe", "xor", "xor"])
    sizes = [trainer.said[0].message.adapter.keyframe.size]
    sizes += [trainer.said[version].message.adapter.delta.blob.size for version in (1, 2)]
    assert (event["bytes"], event["sources"], event["source"]) == (sum(sizes), 1, "trainer")
    assert before_ms <= event["heard_ms"] <= event["ready_ms"] <= time.time() * 1000
    assert worker.peer.refresh_s is not None
    assert worker.peer.refresh_s == pytest.approx((event["ready_ms"] - event["heard_ms"]) / 1000, abs=0.05)
    assert worker.peer._heard == {}


# ---------------------------------------------------------------------- real processes


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.close()


@pytest.mark.e2e
@pytest.mark.slow
def test_b35_a_peer_on_a_small_disk_stays_in_the_swarm_and_recovers(swarm: Swarm) -> None:
    # Goal: versions of 112 KB on a disk of 512 KB: more of them than fit pass by. Then somebody fills the disk: the
    # peer says how much it needs, stays at its version, and is back at the head when there is room again.
    swarm.start_bootstrap()
    with small_disk(swarm.folder / "small" / "blobs", 512 * 1024) as disk:
        options = ("--steps", "100000", "--codec", "raw", "--batch", "2")
        swarm.start("trainer", *options)
        other = swarm.start("other")
        small = swarm.start("small")
        small.wait_for_event("adapter")
        wait_until(lambda: len(small.events("adapter")) >= 8, START_S, small)
        assert not [each for each in small.events("warning") if each["code"] == "cannot store adapter"]

        def full() -> dict[str, Any] | None:
            fill_up(disk / "by hand")  # and what is evicted meanwhile
            told = [each for each in small.events("warning") if each["code"] == "cannot store adapter"]
            return told[0] if told else None

        warning = wait_until(full, START_S, small)
        assert f"{disk} needs 112," in warning["text"]
        stuck_at = max(each["version"] for each in small.events("adapter"))
        other.wait_for_event("adapter", since_s=time.time())
        assert small.process.poll() is None

        (disk / "by hand").unlink()
        freed_s = time.time()
        again = small.wait_for_event("adapter", since_s=freed_s)
        assert again["version"] > stuck_at
        head = max(each["version"] for each in other.events("adapter"))
        wait_until(lambda: small.events("adapter")[-1]["version"] >= head, START_S, small)


@pytest.mark.e2e
def test_a_latecomer_and_a_sleeper_reach_the_head_in_one_pass(swarm: Swarm) -> None:
    # Goal: whoever comes late takes a keyframe and the deltas since; whoever slept, the deltas it missed or a newer
    # keyframe. Either is one event, however many versions lie between.
    swarm.start_bootstrap()
    trainer = swarm.start("trainer", "--steps", "100000", "--batch", "2", "--codec", "int4")
    swarm.start("early")
    wait_until(lambda: any(each["version"] >= 10 for each in trainer.events("step")), START_S, trainer)

    late = swarm.start("late")
    first = late.wait_for_event("adapter")
    assert first["version"] >= 10
    assert first["path"][0] == "keyframe"
    assert set(first["path"][1:]) <= {"int4", "keyframe"}  # passes that end before the first is loaded are told as one
    assert first["bytes"] > 0
    assert first["sources"] >= 1
    assert first["heard_ms"] <= first["ready_ms"]

    late.pause()
    before = late.events("adapter")[-1]["version"]
    wait_until(lambda: trainer.events("step")[-1]["version"] >= before + 10, START_S, trainer)
    resumed_s = time.time()
    late.resume()
    jump = next(each for each in iter_adapters(late, resumed_s) if each["version"] > before + 5)
    assert len(jump["path"]) >= 1
    assert set(jump["path"][1:]) <= {"int4", "keyframe"}


def iter_adapters(peer: Member, since_s: float) -> Iterator[dict[str, Any]]:
    """The versions that it loads from this moment on, as they come."""
    seen = 0
    while True:
        wait_until(lambda: len(peer.events("adapter", since_s)) > seen, START_S, peer)  # noqa: B023
        yield peer.events("adapter", since_s)[seen]
        seen += 1
