"""Deltas between adapters: the same bits for whoever applies them, nothing but PeerFault for whoever was sent nonsense.

Numbers come from numpy with a printed seed. `chain` is what a trainer does, version after version.
"""

import resource
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peers.learning.learner import Learner, TrainingGroup
from peers.models.load import load_model
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.codecs import (
    BLOCK_ELEMENTS,
    CODECS,
    SEAL_BYTES,
    Quantised,
    _seal,
    decode_delta,
    encode_delta,
    rounded,
    widened,
)
from protocols.faults import LocalFault, PeerFault
from protocols.manifest import LearningSpec, LoraSpec

DTYPES = ("bfloat16", "float32")
LOSSLESS, LOSSY = ("xor", "ulps"), ("int8", "int4")
BATCHES, SEEDS_A_BATCH = 20, 100

BF16_LARGEST = 0x7F7F
F32_EXTREMES = np.array(  # both zeros, least and largest subnormal, least normal, one, what rounds up, largest
    [0x0, 0x1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF], "<u4"
)

Array = NDArray[np.float32]


def adapter(tensors: dict[str, Array]) -> dict[str, Tensor]:
    return {name: Tensor("F32", array.shape, array.astype("<f4").tobytes()) for name, array in tensors.items()}


def arrays(of: Adapter) -> dict[str, Array]:
    return {name: np.frombuffer(t.data, "<f4").reshape(t.shape) for name, t in widened(of).items()}


def flat(of: Adapter) -> NDArray[np.float64]:
    return np.concatenate([array.reshape(-1) for _, array in sorted(arrays(of).items())]).astype("f8")


def sample(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A parent and a target, both float32: of few or many elements, still, sparse, tiny, extreme, or like training."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1, 24, rng.integers(0, 3))) for _ in range(rng.integers(1, 5))]
    parent, target = {}, {}
    for number, shape in enumerate(shapes):
        values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 2)).astype("<f4")
        kind = rng.choice(["training", "still", "sparse", "tiny", "extremes", "negated"])
        moved = values + (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 0)).astype("<f4")
        match kind:
            case "still":
                moved = values
            case "sparse":
                moved = np.where(rng.random(shape) < 0.1, moved, values)
            case "tiny":  # subnormal numbers and their neighbours
                values, moved = (rng.integers(0, 0x1000000, shape).astype("<u4").view("<f4") for _ in range(2))
            case "extremes":
                values, moved = (
                    rng.choice(np.concatenate([F32_EXTREMES, F32_EXTREMES | 0x80000000]), shape)
                    .astype("<u4")
                    .view("<f4")
                    for _ in range(2)
                )
            case "negated":
                moved = -values
        parent[f"t{number}"], target[f"t{number}"] = np.asarray(values), np.asarray(moved, "<f4")
    return adapter(parent), adapter(target)


def trained(seed: int, elements: int = 3000, num_steps: int = 1) -> Iterable[dict[str, Tensor]]:
    """A float32 adapter of two tensors, then what becomes of it: steps of one size that drift, as an optimizer's do."""
    rng = np.random.default_rng(seed)
    values = {"a": rng.standard_normal(elements).astype("<f4") * 0.1, "b": np.zeros((elements // 10, 2), "<f4")}
    yield adapter(values)
    drift = {name: rng.standard_normal(array.shape) for name, array in values.items()}
    for _ in range(num_steps):
        values = {
            name: array + (1e-3 * (0.5 * drift[name] + rng.standard_normal(array.shape))).astype("<f4")
            for name, array in values.items()
        }
        yield adapter(values)


def sealed(codec: str, packed: bytes, parent: Adapter) -> bytes:
    """A delta as a hostile trainer might make it: whatever it holds, the seal is right."""
    return _seal(codec, packed, parent, None) + packed


def bits(of: Adapter, name: str = "t") -> list[int]:
    return np.frombuffer(of[name].data, "<u2" if of[name].dtype == "BF16" else "<u4").tolist()


# --- number formats


def test_rounding_is_to_the_nearest_and_ties_to_even() -> None:
    numbers = np.array(
        [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF808001, 0x0, 0x80000000, 0x8001], "<u4"
    )
    before = {"t": Tensor("F32", (9,), numbers.tobytes())}
    assert bits(rounded(before, "bfloat16")) == [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF81, 0x0, 0x8000, 0x1]


def test_rounding_agrees_with_torch_on_any_finite_bits() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype="u4").astype("<u4")
    numbers = numbers[(numbers & 0x7FFFFFFF) < 0x7F7F8000]  # torch rounds what is above to infinity
    expected = torch.from_numpy(numbers.view("<f4").copy()).bfloat16().view(torch.int16).numpy().astype("<u2")
    before = {"t": Tensor("F32", numbers.shape, numbers.tobytes())}
    assert rounded(before, "bfloat16")["t"].data == expected.tobytes()


def test_rounding_saturates_at_the_largest_finite_number() -> None:
    before = {"t": Tensor("F32", (3,), np.array([0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF], "<u4").tobytes())}
    assert bits(rounded(before, "bfloat16")) == [BF16_LARGEST, BF16_LARGEST, 0x8000 | BF16_LARGEST]
    assert rounded(before, "float32") == before


def test_widening_is_exact() -> None:
    every = np.arange(0x7F80, dtype="<u2")
    before = {"t": Tensor("BF16", (len(every),), every.tobytes())}
    assert widened(before)["t"].dtype == "F32"
    assert rounded(widened(before), "bfloat16") == before
    halves = {"t": Tensor("F16", (3,), np.array([1.5, -0.0, 6e-8], "<f2").tobytes())}
    assert flat(halves).tolist() == [1.5, -0.0, float(np.float16(6e-8))]


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_published(number: float) -> None:
    wrong = adapter({"t": np.array([1.0, number], "<f4")})
    with pytest.raises(LocalFault, match="not finite"):
        rounded(wrong, "bfloat16")
    parent = rounded(adapter({"t": np.ones(2, "<f4")}), "bfloat16")
    for codec in CODECS:
        with pytest.raises(LocalFault, match="not finite"):
            encode_delta(codec, wrong, parent)


def test_only_float32_is_rounded() -> None:
    with pytest.raises(LocalFault, match="float32"):
        rounded({"t": Tensor("BF16", (1,), b"\0\0")}, "bfloat16")


# --- there and back


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whoever_applies_a_delta_gets_the_announced_digest(batch: int) -> None:
    # Goal: decode(encode(x)) is `rebuilt` bit for bit; 2,000 seeded adapters, each with every codec and dtype.
    for seed in range(batch * SEEDS_A_BATCH, (batch + 1) * SEEDS_A_BATCH):
        parent_f32, target = sample(seed)
        for dtype in DTYPES:
            parent, best = rounded(parent_f32, dtype), rounded(target, dtype)
            for codec in CODECS:
                encoded = encode_delta(codec, target, parent)
                got = decode_delta(codec, encoded.blob, parent)
                assert adapter_digest(got) == adapter_digest(encoded.rebuilt), f"seed {seed}, {codec}, {dtype}"
                assert {n: (t.dtype, t.shape) for n, t in got.items()} == {
                    n: (t.dtype, t.shape) for n, t in parent.items()
                }
                if codec in LOSSLESS:
                    assert got == best, f"seed {seed}, {codec}, {dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_nothing_changed_costs_next_to_nothing_and_changes_nothing(codec: str, dtype: str) -> None:
    parent = rounded(next(iter(trained(0, 30_000))), dtype)
    parent["zeros"] = Tensor(parent["a"].dtype, (2,), rounded(adapter({"z": np.array([0.0, -0.0])}), dtype)["z"].data)
    encoded = encode_delta(codec, widened(parent), parent)
    assert encoded.rebuilt == parent  # both zeros too
    assert len(encoded.blob) < 300


@pytest.mark.parametrize("codec", LOSSY)
def test_an_element_is_off_by_half_a_scale_at_most(codec: str) -> None:
    # No value is clipped: a block's largest decides when it must, here a single outlier among small ones.
    rng = np.random.default_rng(0)
    delta = (rng.standard_normal(700) * 1e-3).astype("<f4")
    delta[300] = 40.0
    parent, target = adapter({"t": np.zeros(700, "<f4")}), adapter({"t": delta})
    kind = CODECS[codec]
    assert isinstance(kind, Quantised)
    off = np.abs(flat(target) - flat(encode_delta(codec, target, parent).rebuilt))
    for start in range(0, 700, BLOCK_ELEMENTS):
        block = delta[start : start + BLOCK_ELEMENTS].astype("f8")
        scale = max(kind.rms_share * np.sqrt(np.mean(block**2)), np.abs(block).max() / (2 ** (kind.bits - 1) - 1))
        assert off[start : start + BLOCK_ELEMENTS].max() <= scale * (1 + 2**-8) / 2
    assert off[300] < 40.0 * 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_differences_too_small_for_a_scale_wait(codec: str, dtype: str) -> None:
    parent = rounded(adapter({"t": np.zeros(300, "<f4")}), dtype)
    target = adapter({"t": np.full(300, 2.0**-90, "<f4")})
    assert encode_delta(codec, target, parent).rebuilt == parent
    target = adapter({"t": np.full(300, 2.0**-70, "<f4")})
    assert flat(encode_delta(codec, target, parent).rebuilt) == pytest.approx(np.full(300, 2.0**-70), rel=0.01)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_step_beyond_the_largest_number_stops_there(codec: str) -> None:
    largest = float(np.array([BF16_LARGEST << 16], "<u4").view("<f4")[0])
    parent = rounded(adapter({"t": np.array([-largest, largest], "<f4")}), "bfloat16")
    target = adapter({"t": np.array([largest, -largest], "<f4")})  # the difference is no float32
    encoded = encode_delta(codec, target, parent)
    assert decode_delta(codec, encoded.blob, parent) == encoded.rebuilt
    assert flat(encoded.rebuilt) == pytest.approx(flat(target), rel=0.02)


@pytest.fixture
def flushed() -> Iterator[None]:
    """This thread's processor takes subnormal numbers for zero and makes none."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    assert np.array([2.0**-126], "<f4")[0] / np.float32(2.0) == 0.0
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushed")
def test_a_processor_that_flushes_subnormal_numbers_rebuilds_the_same_bits() -> None:
    for seed in range(300):
        parent_f32, target = sample(seed)
        for dtype in DTYPES:
            parent = rounded(parent_f32, dtype)
            for codec in CODECS:
                torch.set_flush_denormal(False)
                blob, rebuilt = encode_delta(codec, target, parent)
                torch.set_flush_denormal(True)
                assert decode_delta(codec, blob, parent) == rebuilt, f"seed {seed}, {codec}, {dtype}"


def test_a_known_parent_digest_spares_hashing_and_changes_nothing() -> None:
    parent, target = (rounded(each, "float32") for each in trained(1))
    digest = adapter_digest(parent)
    encoded = encode_delta("ulps", target, parent, digest)
    assert encoded == encode_delta("ulps", target, parent)
    assert decode_delta("ulps", encoded.blob, parent, digest) == encoded.rebuilt
    with pytest.raises(PeerFault, match="another parent"):
        decode_delta("ulps", encoded.blob, parent, bytes(32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_tensors_does_not_matter(dtype: str) -> None:
    before, target = trained(2)
    parent = rounded(before, dtype)
    backwards = dict(reversed(parent.items()))
    for codec in CODECS:
        encoded = encode_delta(codec, dict(reversed(target.items())), parent)
        assert decode_delta(codec, encoded.blob, backwards) == encoded.rebuilt


# --- damage


@pytest.mark.parametrize("codec", CODECS)
def test_b30_a_flipped_bit_at_any_byte_is_caught(codec: str) -> None:
    before, target = trained(3, elements=200)
    parent = rounded(before, "bfloat16")
    blob = encode_delta(codec, target, parent).blob
    for position in range(len(blob)):
        damaged = bytearray(blob)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(PeerFault, match="damaged"):
            decode_delta(codec, bytes(damaged), parent)


@pytest.mark.parametrize("codec", CODECS)
def test_b30_damage_under_a_right_seal_is_refused_or_makes_other_tensors_or_the_same(codec: str) -> None:
    # A hostile trainer can seal anything. Whatever comes out is finite and of the parent's layout; the announced
    # digest decides about it.
    rng = np.random.default_rng(4)
    before, target = trained(4, elements=20_000)
    parent = rounded(before, "bfloat16")
    blob, rebuilt = encode_delta(codec, target, parent)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in parent.items()}
    refused = changed = 0
    for _ in range(200):
        packed = bytearray(blob[SEAL_BYTES:])
        packed[rng.integers(len(packed))] ^= 1 << rng.integers(8)
        try:
            got = decode_delta(codec, sealed(codec, bytes(packed), parent), parent)
        except PeerFault:
            refused += 1
            continue
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in got.items()} == layout
        assert np.isfinite(flat(got)).all()
        changed += adapter_digest(got) != adapter_digest(rebuilt)
    assert refused + changed >= 150  # the rest makes the announced tensors: an integer whose step rounds away


@pytest.mark.parametrize("codec", CODECS)
def test_b30_a_delta_of_another_parent_is_refused(codec: str) -> None:
    first, second, third = (rounded(each, "bfloat16") for each in trained(5, num_steps=2))
    blob = encode_delta(codec, widened(third), second).blob
    renamed = {f"{name}x": tensor for name, tensor in second.items()}
    for other in (first, renamed, widened(second)):
        with pytest.raises(PeerFault, match="another parent"):
            decode_delta(codec, blob, other)


def test_a_delta_of_another_codec_is_refused() -> None:
    parent, target = trained(6)
    for codec in CODECS:
        blob = encode_delta(codec, target, parent).blob
        for other in set(CODECS) - {codec}:
            with pytest.raises(PeerFault, match="another parent or codec"):
                decode_delta(other, blob, parent)


def test_an_unknown_codec_is_our_fault_or_theirs() -> None:
    parent, target = trained(7)
    with pytest.raises(LocalFault, match="unknown codec 'raw'"):
        encode_delta("raw", target, parent)
    with pytest.raises(PeerFault, match="unknown codec"):
        decode_delta("raw", bytes(100), parent)


def test_changed_names_shapes_and_dtypes_are_refused_when_written() -> None:
    before, target = trained(8)
    parent = rounded(before, "bfloat16")
    a, b = target["a"], target["b"]
    for wrong in (
        {"a": a},
        {"a": a, "b": b, "c": b},
        {"a": a, "c": b},
        {"a": a, "b": Tensor("F32", b.shape[::-1], b.data)},
        {"a": a, "b": rounded(target, "bfloat16")["b"]},
        {"a": a, "b": Tensor("F32", b.shape, b.data[:-4])},
        {},
    ):
        for codec in CODECS:
            with pytest.raises(LocalFault):
                encode_delta(codec, wrong, parent)


@pytest.mark.parametrize(
    "parent",
    [
        {},
        {"t": Tensor("F16", (1,), b"\0\0")},
        {"t": Tensor("BF16", (1,), b"\0\0"), "u": Tensor("F32", (1,), bytes(4))},
        {"t": Tensor("BF16", (2,), b"\0\0")},
        {"t": Tensor("BF16", (0,), b"")},
        {"t": Tensor("BF16", (1,), b"\x80\x7f")},
    ],
    ids=["none", "float16", "mixed", "short", "empty", "infinite"],
)
def test_a_parent_that_can_have_no_delta_is_refused_on_both_sides(parent: Adapter) -> None:
    for codec in CODECS:
        with pytest.raises(LocalFault, match="unfit parent"):
            encode_delta(codec, parent, parent)
        with pytest.raises(PeerFault, match="unfit parent"):
            decode_delta(codec, sealed(codec, zstandard.compress(b""), parent), parent)


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_of_any_other_form_is_refused(codec: str) -> None:
    parent = rounded(next(iter(trained(9))), "bfloat16")
    size = CODECS[codec].plain_bytes(parent)
    frame = zstandard.compress(bytes(size))
    assert decode_delta(codec, sealed(codec, frame, parent), parent) == parent
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    lying = bytearray(zstandard.compress(bytes(size + 1)))
    lying[5:7] = frame[5:7]  # the content size in the header, two bytes for these
    assert zstandard.frame_content_size(bytes(lying)) == size
    skippable = 0x184D2A50.to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size)
    for wrong in (
        b"",
        frame[:-1],
        frame + b"\0",
        frame + frame,
        skippable,
        skippable + frame,
        unsized,
        bytes(lying),
        zstandard.compress(bytes(size - 1)),
        zstandard.compress(bytes(size + 1)),
        zstandard.compress(b""),
    ):
        with pytest.raises(PeerFault, match="malformed delta"):
            decode_delta(codec, sealed(codec, wrong, parent), parent)
    for short in range(SEAL_BYTES + 1):
        with pytest.raises(PeerFault, match="malformed delta"):
            decode_delta(codec, bytes(short), parent)


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_before_memory_is_set_aside(codec: str) -> None:
    parent = rounded(next(iter(trained(10))), "bfloat16")
    gigabyte = zstandard.ZstdCompressor().compressobj(size=2**30)
    bomb = b"".join([*(gigabyte.compress(bytes(2**20)) for _ in range(2**10)), gigabyte.flush()])
    assert len(bomb) < 200_000
    before = peak_bytes()
    with pytest.raises(PeerFault, match="malformed delta"):
        decode_delta(codec, sealed(codec, bomb, parent), parent)
    assert peak_bytes() - before < 32 * 2**20


def test_a_frame_that_claims_a_window_of_two_gigabytes_gets_none() -> None:
    parent = rounded(next(iter(trained(10))), "bfloat16")
    frame = zstandard.compress(bytes(CODECS["xor"].plain_bytes(parent)))
    # Descriptor: two bytes of content size, no single segment; then a window of 2 ** (10 + 21) bytes.
    wide = frame[:4] + bytes([0x40, 21 << 3]) + frame[5:]
    assert zstandard.get_frame_parameters(wide).window_size == 2**31
    before = peak_bytes()
    assert decode_delta("xor", sealed("xor", wide, parent), parent) == parent
    assert peak_bytes() - before < 32 * 2**20


def peak_bytes() -> int:
    """Most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x0001, (127 - 81) << 7])
def test_a_scale_that_is_no_positive_ordinary_number_is_refused(codec: str, scale: int) -> None:
    parent = adapter({"t": np.ones(2, "<f4")})
    plain = scale.to_bytes(2, "little") + b"\1" * (CODECS[codec].plain_bytes(parent) - 2)
    with pytest.raises(PeerFault, match="scale out of range"):
        decode_delta(codec, sealed(codec, zstandard.compress(plain), parent), parent)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_a_delta_that_leads_to_infinity_is_refused(codec: str) -> None:
    parent = {"t": Tensor("BF16", (1,), BF16_LARGEST.to_bytes(2, "little"))}
    plain = {"xor": BF16_LARGEST ^ 0x7F80, "ulps": 2}[codec].to_bytes(2, "little")  # 2 is one up, in zigzag
    with pytest.raises(PeerFault, match="not finite"):
        decode_delta(codec, sealed(codec, zstandard.compress(plain), parent), parent)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_largest_scale_there_is_still_rebuilds_finite_numbers(codec: str) -> None:
    parent = {"t": Tensor("BF16", (2,), BF16_LARGEST.to_bytes(2, "little") * 2)}
    numbers = {"int8": b"\x7f\x80", "int4": b"\x87"}[codec]  # the largest, and the least
    plain = BF16_LARGEST.to_bytes(2, "little") + numbers
    got = decode_delta(codec, sealed(codec, zstandard.compress(plain), parent), parent)
    assert bits(got) == [BF16_LARGEST, 0x8000 | BF16_LARGEST]


@settings(max_examples=300, deadline=None)
@given(codec=st.sampled_from(sorted(CODECS)), junk=st.binary(max_size=400), frame=st.booleans(), seal=st.booleans())
def test_s7_garbage_raises_peer_fault_and_nothing_else(codec: str, junk: bytes, frame: bool, seal: bool) -> None:
    parent = rounded(adapter({"t": np.arange(1, 101, dtype="<f4"), "u": np.ones(1, "<f4")}), "bfloat16")
    if frame:
        junk = zstandard.compress(
            junk.ljust(CODECS[codec].plain_bytes(parent), b"\1")[: CODECS[codec].plain_bytes(parent)]
        )
    blob = sealed(codec, junk, parent) if seal else junk
    try:
        got = decode_delta(codec, blob, parent)
    except PeerFault:
        return
    assert frame
    assert seal
    assert np.isfinite(flat(got)).all()


# --- what is left behind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_error_feedback_keeps_what_is_left_behind_bounded_over_a_thousand_versions(codec: str, dtype: str) -> None:
    # Goal: (a u + h) / (1 - a) of docs/codecs.md, in each block: a = half the coarsest scale over the largest
    # difference, u = the largest step so far, h = half a unit in the last place of the largest number so far.
    # Method: the trainer's own rule, next target = published + left behind + step; one block a tensor.
    kind = CODECS[codec]
    assert isinstance(kind, Quantised)
    a = max(kind.rms_share, 1 / (2 ** (kind.bits - 1) - 1)) / 2 * (1 + 2**-8)
    versions = list(trained(11, elements=BLOCK_ELEMENTS, num_steps=1000))
    published = rounded(versions[0], dtype)
    step, number = 0.0, np.abs(flat(published)).max()
    left = flat(versions[0]) - flat(published)
    worst = np.abs(left).max()
    for before, target in pairwise(versions):
        published = encode_delta(codec, target, published).rebuilt
        left = flat(target) - flat(published)
        step = max(step, np.abs(flat(target) - flat(before)).max())
        number = max(number, np.abs(flat(published)).max())
        half_ulp = number * (2**-8 if dtype == "bfloat16" else 0.0) + number * 2**-24
        bound = (a * step + half_ulp) / (1 - a)
        assert np.abs(left).max() <= bound
        worst = max(worst, np.abs(left).max())
    assert worst > bound / 10  # it bounds something


def test_without_error_feedback_the_error_grows() -> None:
    # The same thousand versions; what a version lacks is forgotten. Steps under half a unit in the last place are lost.
    versions = list(trained(11, elements=BLOCK_ELEMENTS, num_steps=1000))
    kept = forgetful = rounded(versions[0], "bfloat16")
    for before, target in pairwise(versions):
        kept = encode_delta("int4", target, kept).rebuilt
        moved = flat(forgetful) + flat(target) - flat(before)
        a, b = np.split(moved, [BLOCK_ELEMENTS])
        forgetful = encode_delta("int4", adapter({"a": a, "b": b.reshape(target["b"].shape)}), forgetful).rebuilt
    rms = [float(np.sqrt(np.mean((flat(versions[-1]) - flat(each)) ** 2))) for each in (kept, forgetful)]
    assert rms[1] > 10 * rms[0]


# --- real training


def test_versions_of_a_real_training_run_arrive_whole() -> None:
    # The built-in model, GRPO steps on groups whose rewards differ, published as a trainer does.
    model = load_model("builtin")
    spec = LearningSpec()
    for codec in CODECS:
        learner = Learner(load_model("builtin"), LoraSpec(), spec, 1.0, seed=0)
        trainers = receivers = rounded(learner.adapter(), "bfloat16")
        learner.settle(trainers)
        sizes = []
        for number in range(3):
            prompt = tuple(model.tokenizer.encode(f"{number} + 2="))
            answers = [tuple(model.tokenizer.encode(str(number + each))) for each in range(4)]
            group = TrainingGroup(
                prompt, tuple(answers), tuple((-1.0,) * len(a) for a in answers), (0, 0, 1, 0), (False,) * 4
            )
            assert learner.step([group]).skipped is None
            blob, trainers = encode_delta(codec, learner.target(), trainers)
            learner.settle(trainers)
            receivers = decode_delta(codec, blob, receivers)
            assert adapter_digest(receivers) == adapter_digest(trainers)
            assert adapter_digest(rounded(learner.adapter(), "bfloat16")) == adapter_digest(receivers)
            sizes.append(len(blob) / sum(len(tensor.data) for tensor in trainers.values()))
        assert max(sizes) < 0.6
