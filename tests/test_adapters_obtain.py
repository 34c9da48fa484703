"""From announcements to checked tensors: ways, bad deltas, heads that move, full disks (B21 B26 B31 B32 B35)."""

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from protocols.adapters import Adapter, Tensor, adapter_digest, encode_adapter
from protocols.codecs import encode_delta, rounded, widened
from protocols.faults import PeerFault, TransportFault
from protocols.messages import AdapterRef, Announcement, BlobRef, DeltaRef
from protocols.policy import Chain, Extended
from protocols.transfer import blob_ref
from swarm.adapters import Adapters, NoRoom, Underway
from swarm.blobs import BlobStore
from swarm.downloads import Progress
from swarm.exchange import Fetched
from tests.disks import fill_up, small_disk
from tests.samples import OTHER_TRAINER, announcement, manifest

MIB = 1024 * 1024


class Trainer:
    """Makes versions of random steps, and holds all their blobs."""

    def __init__(self, elements: int = 3000, keyframe_every: int = 5, codec: str = "xor", seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.elements, self.keyframe_every, self.codec = elements, keyframe_every, codec
        self.chain = Chain(manifest())
        self.adapters: list[Adapter] = []
        self.blobs: dict[bytes, bytes] = {}
        self.said: list[Any] = []

    def values(self) -> dict[str, Tensor]:
        return {
            f"layer.{name}": Tensor("F32", (part,), self.rng.standard_normal(part).astype("<f4").tobytes())
            for name, part in (("a", self.elements // 3), ("b", self.elements - self.elements // 3))
        }

    def put(self, blob: bytes) -> BlobRef:
        ref = blob_ref(blob)
        self.blobs[ref.root] = blob
        return ref

    def step(self, **changes: Any) -> Announcement:
        """Announce the next version."""
        version = len(self.adapters)
        delta = None
        if not self.adapters:
            adapter: Adapter = rounded(self.values(), "bfloat16")
        elif self.codec == "raw":
            adapter = rounded(self.values(), "bfloat16")
        else:
            encoded = encode_delta(self.codec, self.values(), self.adapters[-1])
            adapter, delta = encoded.rebuilt, DeltaRef(self.codec, self.put(encoded.blob))
        whole = version % self.keyframe_every == 0 or self.codec == "raw"
        keyframe = self.put(encode_adapter(adapter)) if whole else None
        reference = AdapterRef(adapter_digest(adapter), keyframe, delta)
        reference = msgspec.structs.replace(reference, **changes)
        sealed = announcement(version, self.chain.head_hash, adapter=reference)
        assert isinstance(self.chain.extend(sealed), Extended)
        self.adapters.append(adapter)
        self.said.append(sealed)
        return sealed.message

    def steps(self, count: int) -> "Trainer":
        for _ in range(count):
            self.step()
        return self


class Shelf:
    """Stands for Exchange: blobs come from the trainer at once, and go through the real store."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer = trainer
        self.blobs = BlobStore(folder)
        self.downloads: dict[bytes, Any] = {}
        self.fetched: list[bytes] = []
        self.lost: set[bytes] = set()
        self.before: Callable[[BlobRef], Awaitable[None]] | None = None

    async def fetch(self, ref: BlobRef, sources: Callable[[], Sequence[str]]) -> Fetched:
        if self.before is not None:
            await self.before(ref)
        here = self.blobs.get(ref.root)
        if here is not None:
            return Fetched(here, {})
        if ref.root in self.lost:
            raise TransportFault("no source", ref.root.hex())
        self.fetched.append(ref.root)
        blob = self.trainer.blobs[ref.root]
        self.blobs.put(blob)
        return Fetched(blob, {source: len(blob) for source in list(sources())[:1]})


class Peer:
    """A chain of its own, and its adapters."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer = trainer
        self.chain = Chain(manifest())
        self.shelf = Shelf(trainer, folder)
        exchange: Any = self.shelf
        self.asked: list[int] = []

        def sources(version: int) -> list[str]:
            self.asked.append(version)
            return ["trainer"]

        self.adapters = Adapters(exchange, self.chain, sources)

    def hear(self, upto: int | None = None) -> None:
        for sealed in self.trainer.said[len(self.chain.entries) : upto]:
            self.chain.extend(sealed)

    async def catch_up(self, upto: int | None = None) -> str:
        """Obtain the head; the way that it took."""
        self.hear(upto)
        head = self.chain.head
        assert head is not None
        got = await self.adapters.obtain(head)
        assert got.rebuilt.adapter == self.trainer.adapters[got.rebuilt.version]
        assert got.rebuilt.digest == adapter_digest(got.rebuilt.adapter)
        return " ".join(f"{'D' if hop.codec else 'K'}{hop.version}" for hop in got.hops)

    @property
    def version(self) -> int | None:
        return self.adapters.newest.version if self.adapters.newest is not None else None

    def on_disk(self) -> list[str]:
        return sorted(self.names(bytes.fromhex(path.name)) for path in self.shelf.blobs.folder.iterdir())

    def names_on_disk(self) -> list[str]:
        """Of whole blobs."""
        return [self.names(bytes.fromhex(path.name)) for path in self.shelf.blobs.folder.glob("?" * 64)]

    def names(self, root: bytes) -> str:
        for sealed in self.trainer.said:
            about = sealed.message.adapter
            if about.keyframe is not None and about.keyframe.root == root:
                return f"K{sealed.message.version}"
            if about.delta is not None and about.delta.blob.root == root:
                return f"D{sealed.message.version}"
        return root.hex()


async def test_a_newcomer_takes_the_newest_keyframe_and_the_deltas_since(tmp_path: Path) -> None:
    peer = Peer(Trainer().steps(9), tmp_path)
    assert await peer.catch_up() == "K5 D6 D7 D8"
    assert peer.asked == [5, 6, 7, 8]
    peer.trainer.step()
    assert await peer.catch_up() == "D9"
    assert await peer.catch_up() == ""


async def test_a_sleeper_takes_the_deltas_it_missed_or_a_keyframe_if_that_is_less(tmp_path: Path) -> None:
    trainer = Trainer(codec="int4", keyframe_every=20).steps(41)
    peer = Peer(trainer, tmp_path)
    assert await peer.catch_up(upto=18) == "K0 " + " ".join(f"D{version}" for version in range(1, 18))
    assert await peer.catch_up(upto=20) == "D18 D19"
    assert await peer.catch_up() == "K40"


async def test_what_was_received_is_told_by_source_and_measured(tmp_path: Path) -> None:
    peer = Peer(Trainer(elements=200_000).steps(2), tmp_path)
    peer.hear()
    assert peer.chain.head is not None
    got = await peer.adapters.obtain(peer.chain.head)
    assert got.received == {"trainer": sum(map(len, peer.trainer.blobs.values()))}
    assert got.fetch_s > 0
    assert got.verify_s > 0
    assert peer.adapters.down_bytes_per_s is not None

    small = Peer(Trainer().steps(2), tmp_path / "small")
    await small.catch_up()
    assert small.adapters.down_bytes_per_s is None, "a few KB say nothing about a link"


async def test_after_a_restart_what_is_on_disk_is_not_fetched_again(tmp_path: Path) -> None:
    trainer = Trainer().steps(9)
    await Peer(trainer, tmp_path).catch_up()
    again = Peer(trainer, tmp_path)
    assert await again.catch_up() == "K5 D6 D7 D8"
    assert again.shelf.fetched == []


async def test_newer_versions_may_keep_arriving_in_one_pass(tmp_path: Path) -> None:
    # Goal: a pass leads to what was wanted or past it, although each blob takes as long as a version.
    trainer = Trainer(keyframe_every=10, codec="int4").steps(8)
    peer = Peer(trainer, tmp_path)

    async def step(ref: BlobRef) -> None:
        trainer.step()
        peer.hear()

    peer.shelf.before = step
    way = await peer.catch_up()
    # v0 to v2 took as long as v8 to v10 did, which begins anew: a keyframe and nothing before it.
    assert way == "K0 D1 D2 K10"
    assert peer.version == 10
    assert await peer.catch_up() == "D11"


async def test_b31_what_is_gone_is_given_up_for_the_head(tmp_path: Path) -> None:
    # Goal: a slow peer that finds v5 cleaned up jumps to the head; nothing stops.
    trainer = Trainer(codec="raw").steps(6)
    peer = Peer(trainer, tmp_path)

    async def gone(ref: BlobRef) -> None:
        if len(trainer.adapters) == 6:  # while v5 is fetched, v6 to v9 come, and everybody drops v5
            peer.shelf.lost.add(ref.root)
            trainer.steps(4)
            peer.hear()

    peer.shelf.before = gone
    assert await peer.catch_up() == "K9"
    assert peer.version == 9


async def test_b31_a_download_under_way_is_finished_though_the_head_moves(tmp_path: Path) -> None:
    # Goal: where versions come quicker than they can be fetched, a peer still arrives somewhere.
    trainer = Trainer(codec="raw").steps(6)
    peer = Peer(trainer, tmp_path)

    async def moves(ref: BlobRef) -> None:
        trainer.step()
        peer.hear()

    peer.shelf.before = moves
    assert await peer.catch_up() == "K5"
    assert await peer.catch_up() == "K6"


async def test_deltas_that_nobody_has_any_more_are_gone_around(tmp_path: Path) -> None:
    trainer = Trainer(codec="int4").steps(7)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=4)
    d4 = trainer.said[4].message.adapter.delta.blob.root
    peer.shelf.lost.add(d4)
    assert await peer.catch_up() == "K5 D6"


async def test_b26_nobody_has_the_blob_and_the_version_before_stays(tmp_path: Path) -> None:
    trainer = Trainer().steps(9)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=8)
    lost = trainer.said[8].message.adapter.delta.blob.root
    peer.shelf.lost.add(lost)
    with pytest.raises(TransportFault) as fault:
        await peer.catch_up()
    assert fault.value.code == "no source"
    assert peer.version == 7
    peer.shelf.lost.clear()  # somebody else got it before the trainer died
    assert await peer.catch_up() == "D8"


async def test_a_delta_that_makes_something_else_is_refused_and_a_keyframe_taken(tmp_path: Path) -> None:
    trainer = Trainer().steps(5)
    other = encode_delta("xor", trainer.values(), trainer.adapters[-1]).blob  # well-formed, of the right parent
    said = trainer.step(delta=DeltaRef("xor", trainer.put(other)))
    trainer.steps(1)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=5)
    assert said.version == 5
    assert await peer.catch_up(upto=6) == "K5"
    assert await peer.catch_up() == "D6"
    assert peer.shelf.fetched.count(blob_ref(other).root) == 1


async def test_without_a_keyframe_a_wrong_delta_is_the_trainers_fault_and_not_fetched_again(tmp_path: Path) -> None:
    trainer = Trainer().steps(6)
    other = encode_delta("xor", trainer.values(), trainer.adapters[-1]).blob
    trainer.step(delta=DeltaRef("xor", trainer.put(other)))
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=6)
    for _ in range(2):
        with pytest.raises(PeerFault, match="wrong adapter"):
            await peer.catch_up()
    assert peer.version == 5
    assert peer.shelf.fetched.count(blob_ref(other).root) == 1
    trainer.steps(4)
    with pytest.raises(PeerFault, match="wrong adapter"):
        await peer.catch_up(upto=10)  # v7 to v9 are nothing without v6
    assert await peer.catch_up() == "K10"


async def test_what_was_refused_keeps_no_blob_in_memory_and_is_forgotten_with_its_version(tmp_path: Path) -> None:
    trainer = Trainer(codec="raw").steps(1)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    for version in range(1, 4):
        trainer.step(digest=bytes(32))
        with pytest.raises(PeerFault, match=f"wrong adapter: v{version} ") as first:
            await peer.catch_up()
        head = peer.chain.head
        assert head is not None
        with pytest.raises(PeerFault) as again:
            await peer.adapters.obtain(head)
        assert (again.value.reason, again.value.detail) == (first.value.reason, first.value.detail)
        assert again.value.__cause__ is again.value.__context__ is None
    assert set(peer.adapters._refused.values()) == {
        ("wrong adapter", f"v{version} has not the announced digest") for version in (1, 2, 3)
    }
    peer.chain.extend(announcement(3, trainer.said[3].message.parent, created_ms=9))  # v3 is revoked
    peer.adapters._refuse(bytes(32), PeerFault("of no version"))
    assert len(peer.adapters._refused) == 2


async def test_after_a_pass_that_failed_the_next_one_finds_what_it_left(tmp_path: Path) -> None:
    # Goal: tidying keeps parts and blobs of every way that the pass tried, though no newcomer would take it.
    trainer = Trainer(codec="int4", keyframe_every=30).steps(20)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=5)
    await peer.adapters.tidy()
    d15 = trainer.said[15].message.adapter.delta.blob.root
    peer.shelf.lost.add(d15)
    trainer.steps(20)
    with pytest.raises(TransportFault):
        await peer.catch_up(upto=20)
    (tmp_path / f"{d15.hex()}.part").write_bytes(b"x")
    await peer.adapters.tidy()
    assert {f"D{version}" for version in range(5, 15)} <= set(peer.names_on_disk())
    assert f"{d15.hex()}.part" in os.listdir(tmp_path)
    peer.shelf.lost.clear()
    peer.shelf.fetched.clear()
    assert (await peer.catch_up()).startswith("K30")
    await peer.adapters.tidy()
    assert f"{d15.hex()}.part" not in os.listdir(tmp_path), "the head is elsewhere"


async def test_an_unknown_codec_is_no_way(tmp_path: Path) -> None:
    trainer = Trainer().steps(3)
    trainer.step(delta=DeltaRef("from next year", blob_ref(b"x")))
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=3)
    with pytest.raises(PeerFault, match="no way to v3"):
        await peer.catch_up()
    assert peer.shelf.fetched.count(blob_ref(b"x").root) == 0


async def test_a_revoked_head_leaves_its_parent_in_memory(tmp_path: Path) -> None:
    trainer = Trainer().steps(4)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    twin = announcement(3, trainer.said[3].message.parent, created_ms=9)
    peer.chain.extend(twin)  # the trainer signed two contents: both are refused
    assert peer.chain.version == 2
    assert await peer.catch_up(upto=0) == ""
    assert peer.asked == [0, 1, 2, 3]
    assert peer.version == 2

    adapter = trainer.adapters[2]
    target = {name: Tensor("F32", each.shape, widened({name: each})[name].data) for name, each in adapter.items()}
    encoded = encode_delta("xor", target, adapter)
    reference = AdapterRef(adapter_digest(encoded.rebuilt), None, DeltaRef("xor", trainer.put(encoded.blob)))
    newer = announcement(4, peer.chain.head_hash, key=OTHER_TRAINER, adapter=reference)
    assert isinstance(peer.chain.extend(newer), Extended)
    got = await peer.adapters.obtain(newer)
    assert [hop.version for hop in got.hops] == [4]
    assert got.rebuilt.adapter == encoded.rebuilt


async def test_a_version_that_was_revoked_is_not_taken_for_its_successor_of_the_same_number(tmp_path: Path) -> None:
    trainer = Trainer().steps(4)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    peer.chain.extend(announcement(3, trainer.said[3].message.parent, created_ms=9))  # equivocation
    encoded = encode_delta("xor", trainer.values(), trainer.adapters[2])
    reference = AdapterRef(adapter_digest(encoded.rebuilt), None, DeltaRef("xor", trainer.put(encoded.blob)))
    other = announcement(3, peer.chain.head_hash, key=OTHER_TRAINER, adapter=reference)
    assert isinstance(peer.chain.extend(other), Extended)
    assert not peer.adapters.at(other)
    got = await peer.adapters.obtain(other)
    assert (got.rebuilt.version, got.rebuilt.adapter) == (3, encoded.rebuilt)
    assert peer.adapters.at(other)


async def test_keyframes_are_made_for_those_who_come_later(tmp_path: Path) -> None:
    # Goal: a version that was rebuilt from deltas is offered whole as well, with the announced bytes.
    trainer = Trainer(codec="int4", keyframe_every=5).steps(5)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    trainer.steps(3)
    assert await peer.catch_up() == "D5 D6 D7"
    await peer.adapters.tidy()
    assert peer.on_disk() == ["D4", "D5", "D6", "D7", "K5"]
    k5 = trainer.said[5].message.adapter.keyframe.root
    assert peer.shelf.blobs.get(k5) == trainer.blobs[k5]
    assert k5 not in peer.shelf.fetched


async def test_a_keyframe_that_is_not_the_version_is_counted_and_not_offered(tmp_path: Path) -> None:
    trainer = Trainer(codec="int4").steps(5)
    trainer.step(keyframe=BlobRef(blob_ref(b"something else").root, 10_000))
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=5)
    assert await peer.catch_up() == "D5"
    await peer.adapters.tidy()
    assert peer.adapters.odd_keyframes == 1
    assert "K5" not in peer.on_disk()


async def test_b21_replayed_announcements_change_nothing(tmp_path: Path) -> None:
    # Goal: a newcomer to v1..v50 gets v50; replays of v3, v49, v50, in any order, neither fetch nor go back.
    trainer = Trainer(elements=300, keyframe_every=20).steps(50)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    assert peer.version == 49
    fetched = len(peer.shelf.fetched)
    for seed in range(20):
        replays = [trainer.said[version] for version in (2, 48, 49)] * 2
        random.Random(seed).shuffle(replays)
        for sealed in replays:
            peer.chain.extend(sealed)
            got = await peer.adapters.obtain(sealed)
            assert got.rebuilt.version == 49
            assert got.hops == ()
    assert len(peer.shelf.fetched) == fetched


async def test_b32_only_what_is_whole_is_read(tmp_path: Path) -> None:
    # Goal: what a killed process left (temporary files, half a download, a damaged blob) is never taken for a version.
    trainer = Trainer().steps(6)
    whole = trainer.said[5].message.adapter.keyframe
    (tmp_path / f".tmp-{whole.root.hex()}-0").write_bytes(trainer.blobs[whole.root])
    (tmp_path / f"{whole.root.hex()}.part").write_bytes(trainer.blobs[whole.root][:1000])
    (tmp_path / "shard-2-of-3.safetensors").write_bytes(b"left over")
    peer = Peer(trainer, tmp_path)
    assert await peer.catch_up() == "K5"
    assert peer.shelf.fetched == [whole.root]

    (tmp_path / whole.root.hex()).write_bytes(trainer.blobs[whole.root][:-1])
    again = Peer(trainer, tmp_path)
    assert await again.catch_up() == "K5"
    assert again.shelf.fetched == [whole.root]


async def test_how_far_a_pass_is(tmp_path: Path) -> None:
    # Goal: all blobs of the way are one download to whoever waits; what is on disk is no part of it.
    trainer = Trainer().steps(8)
    peer = Peer(trainer, tmp_path)
    k5, d6, d7 = (
        trainer.said[5].message.adapter.keyframe,
        *(trainer.said[version].message.adapter.delta.blob for version in (6, 7)),
    )
    peer.shelf.blobs.put(trainer.blobs[d6.root])
    seen: list[Underway | None] = []

    async def half_way(ref: BlobRef) -> None:
        peer.shelf.downloads = {ref.root: Progress(ref.size, ref.size // 2, 3, 1e6)}
        seen.append(peer.adapters.underway())
        peer.shelf.downloads = {}

    peer.shelf.before = half_way
    assert peer.adapters.underway() is None
    assert await peer.catch_up() == "K5 D6 D7"
    assert peer.adapters.underway() is None
    first, _, last = seen
    assert first is not None
    assert last is not None
    total = k5.size + d7.size
    assert (first.version, first.bytes, first.received_bytes, first.sources) == (7, total, k5.size // 2, 3)
    assert (last.version, last.bytes, last.received_bytes) == (7, total, k5.size + d7.size // 2)
    assert first.bytes_per_s == 1e6
    assert first.since_s == last.since_s
    assert first.running_s >= 0
    assert (first.trouble, last.trouble) == ("", "")


async def test_what_is_wrong_with_sources_is_known_during_a_pass_and_between_two(tmp_path: Path) -> None:
    trainer = Trainer().steps(7)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=6)
    d6 = trainer.said[6].message.adapter.delta.blob
    peer.shelf.lost.add(d6.root)
    trouble, seen = "3kd9: closed", []

    async def some_came(ref: BlobRef) -> None:
        peer.shelf.downloads = {ref.root: Progress(ref.size, 5, 1, 1e6, trouble=trouble)}
        seen.append(peer.adapters.underway())

    fetch = peer.shelf.fetch

    async def fetch_after_asking(ref: BlobRef, sources: Callable[[], Sequence[str]]) -> Fetched:
        await some_came(ref)
        sources()
        try:
            return await fetch(ref, sources)
        finally:
            peer.shelf.downloads = {}

    peer.shelf.fetch = fetch_after_asking  # type: ignore[method-assign]
    with pytest.raises(TransportFault):
        await peer.catch_up()
    between = peer.adapters.underway()
    assert between is not None
    assert seen == [Underway(6, d6.size, 5, 1e6, 1, between.since_s, trouble)]
    assert between == Underway(6, d6.size, 5, 0.0, 0, between.since_s, trouble)

    trouble = ""
    with pytest.raises(TransportFault):
        await peer.catch_up()
    assert seen[1] == Underway(6, d6.size, 5, 1e6, 1, between.since_s, "3kd9: closed"), "still the last that is known"
    again = peer.adapters.underway()
    assert again is not None
    assert (again.trouble, again.since_s) == (f"no source: {d6.root.hex()}", between.since_s)

    peer.shelf.lost.clear()
    assert await peer.catch_up() == "D6"
    assert peer.adapters.underway() is None


# ---------------------------------------------------------------------- full disks


class SmallDisk:
    """A disk of so many bytes, as the blob store meets it."""

    def __init__(self, folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        real = BlobStore.put

        def put(store: BlobStore, blob: bytes) -> BlobRef:
            if store.info(blob_ref(blob).root) is None and self.used() + len(blob) > self.num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device", str(store.folder))
            return real(store, blob)

        monkeypatch.setattr(BlobStore, "put", put)

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


async def test_b35_old_versions_go_first_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 MB a version, 6 MB of disk, four versions kept where there is room: ten versions pass nevertheless.
    peer = Peer(Trainer(elements=MIB, codec="raw"), tmp_path)
    SmallDisk(tmp_path, 6 * MIB, monkeypatch)
    for version in range(10):
        peer.trainer.step()
        assert await peer.catch_up() == f"K{version}"
        await peer.adapters.tidy()
    assert "K9" in peer.on_disk()


async def test_b35_what_the_way_still_needs_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(codec="int4", keyframe_every=20).steps(19)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up()
    trainer.steps(3)
    d20 = trainer.said[20].message.adapter.delta.blob.root
    peer.shelf.blobs.put(trainer.blobs[d20])  # as an earlier process left it
    disk = SmallDisk(tmp_path, 0, monkeypatch)
    disk.num_bytes = disk.used()
    peer.shelf.fetched.clear()
    assert await peer.catch_up() == "D19 D20 D21"
    assert d20 not in peer.shelf.fetched
    assert peer.on_disk() == ["D19", "D20", "D21"]


async def test_an_error_of_the_disk_that_is_not_want_of_room_costs_no_other_version(tmp_path: Path) -> None:
    trainer = Trainer(codec="raw").steps(5)
    peer = Peer(trainer, tmp_path)
    for version in range(1, 5):
        await peer.catch_up(upto=version)

    async def refuse(ref: BlobRef) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    peer.shelf.before = refuse
    with pytest.raises(PermissionError) as error:
        await peer.catch_up()
    assert not isinstance(error.value, NoRoom)
    assert peer.on_disk() == ["K0", "K1", "K2", "K3"]


async def test_b35_a_full_disk_is_said_with_what_is_needed_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(elements=MIB).steps(2)
    peer = Peer(trainer, tmp_path)
    await peer.catch_up(upto=1)
    disk = SmallDisk(tmp_path, 1, monkeypatch)
    delta = trainer.said[1].message.adapter.delta.blob
    with pytest.raises(NoRoom) as full:
        await peer.catch_up()
    assert full.value.errno == errno.ENOSPC
    assert full.value.filename == str(tmp_path)
    assert full.value.needed_bytes == delta.size
    assert full.value.free_bytes is not None
    assert peer.version == 0
    disk.num_bytes = 10 * MIB
    assert await peer.catch_up() == "D1"


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 6 MB."""
    with small_disk(tmp_path / "disk", 6 * 1024 * 1024) as folder:
        yield folder


@pytest.mark.parametrize("codec", ["raw", "xor"])
async def test_b35_ten_versions_of_2_mb_on_a_real_disk_of_6_mb(tmpfs: Path, codec: str) -> None:
    # Random numbers do not compress: a lossless delta is as large as a keyframe, the worst that a trainer publishes.
    peer = Peer(Trainer(elements=1_000_000, codec=codec, keyframe_every=2), tmpfs)
    for version in range(10):
        peer.trainer.step()
        await peer.catch_up()
        await peer.adapters.tidy()
        assert peer.version == version
    by_hand = tmpfs / "by hand"

    async def fill(ref: BlobRef) -> None:
        """Somebody else takes whatever room there is."""
        await asyncio.to_thread(fill_up, by_hand)

    peer.shelf.before = fill
    peer.trainer.steps(2)
    with pytest.raises(NoRoom) as full:
        await peer.catch_up()
    assert full.value.filename == str(tmpfs)
    assert full.value.needed_bytes > 1_400_000
    assert full.value.free_bytes is not None
    assert full.value.free_bytes < full.value.needed_bytes
    assert peer.version == 9
    assert not any(name.startswith(".tmp-") for name in os.listdir(tmpfs))
    peer.shelf.before = None
    by_hand.unlink()
    await peer.catch_up()
    assert peer.version == 11
