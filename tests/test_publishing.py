"""The publisher: what becomes a keyframe, what a delta, and that all of it can be had before anybody is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.publishing import Published, Publisher, store
from protocols.adapters import Adapter, Tensor, adapter_digest, decode_adapter, encode_adapter
from protocols.codecs import CODECS, decode_delta, rounded, widened
from protocols.manifest import TransferSpec
from protocols.messages import AdapterRef, Announcement, BlobRef, DeltaRef
from protocols.transfer import blob_ref
from swarm.blobs import BlobStore
from tests.samples import announcement

SHAPES = {"a.lora_A": (8, 96), "a.lora_B": (64, 8)}
PAYLOAD = 2 * sum(rows * columns for rows, columns in SHAPES.values())  # in bfloat16


def adapter(values: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: Tensor("F32", each.shape, each.astype("<f4").tobytes()) for name, each in values.items()}


class Walk:
    """Targets that move a little each version, as training does; the error of the last one is carried along."""

    def __init__(self, seed: int = 0, step: float = 1e-3) -> None:
        self.rng, self.step = np.random.default_rng(seed), step
        self.values = {name: self.rng.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}

    def next(self) -> dict[str, Tensor]:
        for name, shape in SHAPES.items():
            self.values[name] = self.values[name] + self.step * self.rng.normal(size=shape).astype("f4")
        return adapter(self.values)


def published(spec: TransferSpec, count: int, walk: Walk | None = None) -> list[Published]:
    publisher, walk = Publisher(spec), walk or Walk()
    return [publisher.publish(walk.next()) for _ in range(count)]


def reference(version: Published) -> AdapterRef:
    keyframe = blob_ref(version.keyframe) if version.keyframe is not None else None
    delta = DeltaRef(version.delta[0], blob_ref(version.delta[1])) if version.delta is not None else None
    return AdapterRef(version.digest, keyframe, delta)


def said(versions: list[Published]) -> list[Announcement]:
    return [announcement(at, adapter=reference(each)).message for at, each in enumerate(versions)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_receiver_that_follows_the_deltas_has_each_version_bit_for_bit(codec: str, dtype: Any) -> None:
    parent: Adapter = {}
    for at, version in enumerate(published(TransferSpec(codec=codec, dtype=dtype, keyframe_every=4), 10)):
        if version.delta is not None:
            got: Adapter = decode_delta(version.delta[0], version.delta[1], parent)
            if version.keyframe is not None:
                assert decode_adapter(version.keyframe) == got
        else:
            assert at == 0 or codec == "xor", "a delta that is as large as the whole"
            assert version.keyframe is not None
            got = decode_adapter(version.keyframe)
        assert got == version.rebuilt
        assert adapter_digest(got) == version.digest
        parent = got


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_raw_is_a_keyframe_each_time_and_nothing_else(dtype: Any) -> None:
    walk = Walk()
    versions = published(TransferSpec(codec="raw", dtype=dtype), 3, walk)
    assert [(each.codec, each.delta) for each in versions] == [("raw", None)] * 3
    assert versions[-1].rebuilt == rounded(adapter(walk.values), dtype)
    assert versions[-1].keyframe == encode_adapter(versions[-1].rebuilt)


def test_lossless_deltas_lose_nothing_that_the_dtype_can_hold() -> None:
    walk = Walk()
    version = published(TransferSpec(codec="xor"), 5, walk)[-1]
    assert version.delta is not None
    assert version.rebuilt == rounded(adapter(walk.values), "bfloat16")


def test_a_keyframe_stands_every_so_many_versions() -> None:
    versions = published(TransferSpec(codec="int4", keyframe_every=3), 8, Walk(step=1e-4))
    assert [each.keyframe is not None for each in versions] == [True, False, False] * 2 + [True, False]
    assert [each.delta is not None for each in versions] == [False] + [True] * 7, "with a delta for who is up to date"


def test_deltas_that_add_up_to_more_than_a_keyframe_call_for_one() -> None:
    versions = published(TransferSpec(codec="int4", keyframe_every=1000), 40)
    since = 0
    for each in versions:
        size = len(each.delta[1]) if each.delta is not None else 0
        assert (each.keyframe is not None) == (each.delta is None or since + size > PAYLOAD)
        since = 0 if each.keyframe is not None else since + size
    assert 2 < sum(each.keyframe is not None for each in versions) < 30


def test_a_delta_that_is_not_smaller_than_the_whole_is_left_out() -> None:
    publisher, rng = Publisher(TransferSpec(codec="xor")), np.random.default_rng(0)
    for _ in range(3):
        bits = {  # any bfloat16 at all, of either sign
            name: (rng.integers(0, 0x7F80, shape) | rng.integers(0, 2, shape) << 15) << 16
            for name, shape in SHAPES.items()
        }
        target = adapter({name: each.astype("<u4").view("<f4") for name, each in bits.items()})
        version = publisher.publish(target)
        assert (version.codec, version.delta) == ("raw", None)
        assert widened(version.rebuilt) == target


def test_keyframe_every_one_offers_each_version_whole_and_as_a_delta() -> None:
    versions = published(TransferSpec(codec="int8", keyframe_every=1), 4)
    assert all(each.keyframe is not None for each in versions)
    assert all(each.delta is not None for each in versions[1:])


@pytest.mark.parametrize("codec", ["raw", "xor", "int8", "int4"])
def test_a_publisher_that_resumes_publishes_the_same_bytes_as_one_that_went_on(codec: str) -> None:
    spec = TransferSpec(codec=codec, keyframe_every=5)
    whole = published(spec, 16)
    for cut in range(1, 16):
        again, walk = Publisher(spec), Walk()
        for _ in range(cut):
            walk.next()
        again.resume(whole[cut - 1].rebuilt, said(whole[:cut]))
        got = [again.publish(walk.next()) for _ in range(cut, 16)]
        assert [(each.digest, each.keyframe, each.delta) for each in got] == [
            (each.digest, each.keyframe, each.delta) for each in whole[cut:]
        ]


def test_a_publisher_that_lost_its_parent_begins_with_a_keyframe() -> None:
    spec = TransferSpec(codec="int4")
    before = published(spec, 3)
    publisher, walk = Publisher(spec), Walk(seed=5)
    publisher.resume(None, said(before))
    version = publisher.publish(walk.next())
    assert (version.codec, version.keyframe is not None) == ("raw", True)
    assert publisher.publish(walk.next()).codec == "int4"


def test_auto_takes_the_lossless_way_and_on_a_slow_link_the_quantised_one() -> None:
    publisher, walk = Publisher(TransferSpec(codec="auto")), Walk()
    versions = [publisher.publish(walk.next(), None, 0.5) for _ in range(12)]
    assert {each.codec for each in versions[1:]} == {"ulps"}
    assert all(widened(each.rebuilt).keys() == SHAPES.keys() for each in versions)
    versions = [publisher.publish(walk.next(), 100.0, 0.5) for _ in range(24)]
    assert versions[-1].codec == "int4"
    tried = {codec for each in versions for codec in each.encode_s}
    assert tried == {"raw", *CODECS}, "what is more faithful is measured now and then"


def test_b26_what_is_stored_is_read_back_by_its_name(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    for version in published(TransferSpec(codec="int4", keyframe_every=2), 3):
        ref = store(version, blobs)
        assert ref == reference(version)
        if version.keyframe is not None and ref.keyframe is not None:
            assert blobs.get(ref.keyframe.root) == version.keyframe
        if version.delta is not None and ref.delta is not None:
            assert (ref.delta.codec, blobs.get(ref.delta.blob.root)) == version.delta


def test_b26_a_version_that_the_disk_does_not_hold_is_never_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, put = BlobStore(tmp_path), BlobStore.put

    def torn(self: BlobStore, blob: bytes) -> BlobRef:
        ref = put(self, blob)
        path = self.path(ref.root)
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
        return ref

    monkeypatch.setattr(BlobStore, "put", torn)
    with pytest.raises(OSError, match="does not hold what was written"):
        store(published(TransferSpec(), 1)[0], blobs)
