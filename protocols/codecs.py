"""Adapters as deltas: what a version adds to its parent, in few bytes (DESIGN section 7).

    trainer   target (float32) ------ encode_delta ---> blob, rebuilt     carries on target - rebuilt
    receiver  blob, parent ---------- decode_delta ---> rebuilt           the same bits, on every machine

    blob = SHA-256 of (codec, digest of the parent, rest), 32 bytes | rest: one zstd frame of the plain difference

The seal tells another parent, another codec and a damaged byte before anything is decompressed. The size of the plain
difference follows from the parent, so a frame that promises another size is refused before memory is set aside for it.
Who announced a delta also announced the digest of what it rebuilds; that is the check that counts, and the caller's.

    xor    lossless: the bits of the rounded target XOR those of the parent, all lowest bytes first, then the next ...
    ulps   lossless: how many representable numbers each element moved by, elements of like size together
    int8   quantised: a block of 256 differences is a scale (bfloat16) and as many integers
    int4   the same with integers of -7 to 7, two a byte

A quantised delta leaves something behind, `target - rebuilt`. The trainer adds it to its next target, so that nothing
is lost, only late: error feedback (Seide et al. 2014, 1-bit SGD; Karimireddy et al. 2019, arXiv 1901.09847). Each
element of it is at most half a scale of its block (no value is clipped) and half a unit in the last place of the dtype.

Every machine rebuilds the same bits: decoding is integer arithmetic on bits, one exact float32 product and one float32
sum an element, each correctly rounded (IEEE 754). No such sum is a subnormal number or depends on one, so a processor
that flushes those to zero agrees too.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.faults import LocalFault, PeerFault

SEAL_BYTES = 32
SEAL_DOMAIN = b"echo-swarm/2/delta"
BLOCK_ELEMENTS = 256  # a scale of 16 bits costs 1/16 bit an element
PART_ELEMENTS_MIN = 1024  # a Huffman table of its own costs some 50 bytes
ZSTD_LEVEL = 1  # higher ones look longer for repetitions, of which differences have none

# Scales outside of this range are not sent: what is smaller stays in the residual. 2**-80 is far below anything that
# training in float32 notices, and so far above the subnormal numbers that no sum of a parent and a difference is one.
_SCALE_MIN = (127 - 80) << 7
_SCALE_MAX = 0x7F7F
_LARGEST = 2.0**128 - 2.0**120  # of bfloat16; the difference of two such numbers may be twice that

_BITS: Mapping[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<u4")}
_INFINITY = {"BF16": 0x7F80, "F32": 0x7F80_0000}
_MANTISSA_BITS = {"BF16": 7, "F32": 23}
_DTYPES: Mapping[str, str] = {"bfloat16": "BF16", "float32": "F32"}

Array = NDArray[Any]


class Encoded(NamedTuple):
    """A delta, and what whoever applies it to the parent gets."""

    blob: bytes
    rebuilt: dict[str, Tensor]


class Codec(Protocol):
    """How a difference to a parent is written down, before it is compressed."""

    def plain_bytes(self, parent: Adapter) -> int:
        """Exact size of a difference to this parent."""

    def difference(self, target: Adapter, parent: Adapter) -> list[bytes]:
        """What leads from the parent to the float32 target, or near it; in parts that are best compressed apart."""

    def apply(self, plain: bytes, parent: Adapter) -> dict[str, Tensor]:
        """The parent plus a difference of `plain_bytes`. Raises PeerFault and nothing else."""


# --- number formats


def rounded(adapter: Adapter, dtype: Literal["bfloat16", "float32"]) -> dict[str, Tensor]:
    """A float32 adapter in the dtype of a manifest: nearest, ties to even; over the largest finite number, that.

    Raises LocalFault if a tensor is not float32, or has an infinity or a NaN.
    """
    if any(tensor.dtype != "F32" for tensor in adapter.values()):
        raise LocalFault("only a float32 adapter is rounded")
    if not _finite(adapter):
        raise LocalFault("an adapter that is not finite")
    return {
        name: _tensor(_DTYPES[dtype], tensor.shape, _narrow(_bits(tensor), _DTYPES[dtype]))
        for name, tensor in adapter.items()
    }


def widened(adapter: Adapter) -> dict[str, Tensor]:
    """The same numbers in float32; exact."""
    return {name: Tensor("F32", tensor.shape, _values(tensor).tobytes()) for name, tensor in adapter.items()}


def _bits(tensor: Tensor) -> Array:
    """The numbers of a tensor as unsigned integers; shape (elements,)."""
    return np.frombuffer(tensor.data, _BITS[tensor.dtype])


def _values(tensor: Tensor) -> Array:
    """The numbers of a tensor in float32; shape (elements,)."""
    if tensor.dtype == "F16":
        return np.frombuffer(tensor.data, "<f2").astype("<f4")
    bits = _bits(tensor)
    return (bits.astype("<u4") << 16 if tensor.dtype == "BF16" else bits).view("<f4")


def _narrow(bits: Array, dtype: str) -> Array:
    """Bits of float32 numbers, infinities too, as bits of the nearest finite ones of `dtype`; ties to even."""
    if dtype == "BF16":
        bits = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    infinity = _INFINITY[dtype]
    magnitude = bits & (infinity | (infinity - 1))
    return np.where(magnitude >= infinity, (bits - magnitude) | (infinity - 1), bits).astype(_BITS[dtype])


def _finite(adapter: Adapter) -> bool:
    return not any(
        ((_bits(tensor) & _INFINITY[tensor.dtype]) == _INFINITY[tensor.dtype]).any() for tensor in adapter.values()
    )


def _tensor(dtype: str, shape: tuple[int, ...], bits: Array) -> Tensor:
    return Tensor(dtype, shape, bits.astype(_BITS[dtype], copy=False).tobytes())


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


# --- codecs


class Xor:
    """Lossless. Bits that did not change are zeros, and those that did are mostly the lowest."""

    def plain_bytes(self, parent: Adapter) -> int:
        return sum(len(tensor.data) for tensor in parent.values())

    def difference(self, target: Adapter, parent: Adapter) -> list[bytes]:
        return [plane.tobytes() for plane in _planes(_joined(target, _dtype(parent)) ^ _joined(parent, _dtype(parent)))]

    def apply(self, plain: bytes, parent: Adapter) -> dict[str, Tensor]:
        dtype = _dtype(parent)
        return _split(_joined(parent, dtype) ^ _from_planes(plain, dtype), parent)


class Ulps:
    """Lossless. How many numbers of the dtype lie between an element and its parent: units in the last place.

    An optimizer moves all elements by like amounts, so the units depend on how large the element was. Elements are
    sorted by their parent's exponent, largest first, and each exponent is a part of its own: 0.29 of a bfloat16
    keyframe where `xor` takes 0.39 (docs/codecs.md).
    """

    def plain_bytes(self, parent: Adapter) -> int:
        return sum(len(tensor.data) for tensor in parent.values())

    def difference(self, target: Adapter, parent: Adapter) -> list[bytes]:
        dtype = _dtype(parent)
        before = _joined(parent, dtype)
        sizes = _sizes(before, dtype)
        order = np.argsort(sizes, kind="stable")
        units = _zigzag(_ordinals(_joined(target, dtype)) - _ordinals(before))[order]
        cuts = _cuts(sizes[order])
        return [part.tobytes() for plane in _planes(units) for part in np.split(plane, cuts)]

    def apply(self, plain: bytes, parent: Adapter) -> dict[str, Tensor]:
        dtype = _dtype(parent)
        before = _joined(parent, dtype)
        units = np.empty_like(before)
        units[np.argsort(_sizes(before, dtype), kind="stable")] = _from_planes(plain, dtype)
        return _split(_from_ordinals(_ordinals(before) + _unzigzag(units)), parent)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A scale and `BLOCK_ELEMENTS` integers of `bits` bits a block; the last block of a tensor may be short.

    A scale is `rms_share` of the root mean square of its block, or what the largest value needs if that is more:
    nothing is clipped. The coarser the scale the fewer bits an integer has after compression, so `rms_share` buys bytes
    with residual.
    """

    bits: Literal[4, 8]
    rms_share: float

    def plain_bytes(self, parent: Adapter) -> int:
        elements = sum(map(_elements, parent.values()))
        return 2 * _blocks(parent) + (elements * self.bits + 7) // 8

    def difference(self, target: Adapter, parent: Adapter) -> list[bytes]:
        quantised = [self._quantise(_values(target[name]), _values(parent[name])) for name in sorted(parent)]
        scales = np.concatenate([scales for scales, _ in quantised])
        numbers = np.concatenate([numbers for _, numbers in quantised])
        return [*(plane.tobytes() for plane in _planes(scales)), self._pack(numbers)]

    def apply(self, plain: bytes, parent: Adapter) -> dict[str, Tensor]:
        num_blocks = _blocks(parent)
        scales = _from_planes(plain[: 2 * num_blocks], "BF16")
        if not ((scales == 0) | ((scales >= _SCALE_MIN) & (scales <= _SCALE_MAX))).all():
            raise PeerFault("malformed delta", "scale out of range")
        numbers = self._unpack(np.frombuffer(plain, "u1", offset=2 * num_blocks))
        rebuilt, block = {}, 0
        for name, part in _parts(parent):
            end = block + -(-(part.stop - part.start) // BLOCK_ELEMENTS)
            rebuilt[name] = self._move(parent[name], scales[block:end], numbers[part])
            block = end
        return rebuilt

    def _quantise(self, target: Array, parent: Array) -> tuple[Array, Array]:
        """Scales (bfloat16 bits) and integers; float64, where the difference of any two float32 numbers is finite."""
        delta = target.astype("f8") - parent
        starts = np.arange(0, len(delta), BLOCK_ELEMENTS)
        lengths = np.diff(starts, append=len(delta))
        largest = np.maximum.reduceat(np.abs(delta), starts)
        rms = np.sqrt(np.add.reduceat(delta * delta, starts) / lengths)
        scale = np.maximum(np.minimum(self.rms_share * rms, _LARGEST), largest / (2 ** (self.bits - 1) - 1))
        scales = _narrow(scale.astype("<f4").view("<u4"), "BF16")  # still none is clipped: 127 / (1 - 2**-8) < 127.5
        scales[scales < _SCALE_MIN] = 0
        divisor = np.where(scales == 0, np.inf, _scale_values(scales))
        return scales, np.rint(delta / np.repeat(divisor, lengths)).astype("i1")

    def _pack(self, numbers: Array) -> bytes:
        if self.bits == 8:
            return numbers.tobytes()
        nibbles = np.append(numbers, np.zeros(len(numbers) % 2, "i1")).view("u1") & 0xF
        return (nibbles[0::2] | nibbles[1::2] << 4).tobytes()

    def _unpack(self, packed: Array) -> Array:
        """Integers; one more than there are elements where their number is odd and two share a byte."""
        if self.bits == 8:
            return packed.view("i1")
        nibbles = np.stack([packed << 4, packed & 0xF0], axis=1).reshape(-1)
        return nibbles.view("i1") >> 4

    def _move(self, parent: Tensor, scales: Array, numbers: Array) -> Tensor:
        values = _values(parent)
        steps = np.repeat(_scale_values(scales), BLOCK_ELEMENTS)[: len(values)]
        with np.errstate(over="ignore"):
            moved = values + numbers.astype("<f4") * steps  # 8 by 8 significant bits: the product is exact
        bits = np.where(numbers == 0, values.view("<u4"), moved.view("<u4"))
        return _tensor(parent.dtype, parent.shape, _narrow(bits, parent.dtype))


def _dtype(adapter: Adapter) -> str:
    return next(iter(adapter.values())).dtype


def _parts(adapter: Adapter) -> Iterator[tuple[str, slice]]:
    """Where each tensor lies when all are put one after the other, by name."""
    start = 0
    for name in sorted(adapter):
        end = start + _elements(adapter[name])
        yield name, slice(start, end)
        start = end


def _joined(adapter: Adapter, dtype: str) -> Array:
    """The bits of all tensors one after the other, by name; float32 ones rounded to `dtype`."""
    tensors = [adapter[name] for name in sorted(adapter)]
    return np.concatenate([_bits(each) if each.dtype == dtype else _narrow(_bits(each), dtype) for each in tensors])


def _split(bits: Array, parent: Adapter) -> dict[str, Tensor]:
    """The inverse of `_joined`, for an adapter like `parent`."""
    return {name: _tensor(parent[name].dtype, parent[name].shape, bits[part]) for name, part in _parts(parent)}


def _planes(bits: Array) -> list[Array]:
    """All lowest bytes, all second lowest, ...; shape (elements,) each."""
    return [(bits >> 8 * byte).astype("u1") for byte in range(bits.itemsize)]


def _from_planes(plain: bytes, dtype: str) -> Array:
    """The inverse of `_planes`, joined."""
    planes = np.frombuffer(plain, "u1").reshape(_BITS[dtype].itemsize, -1)
    bits: Array = planes[0].astype(_BITS[dtype])
    for byte, plane in enumerate(planes[1:], 1):
        bits |= plane.astype(_BITS[dtype]) << 8 * byte
    return bits


def _ordinals(bits: Array) -> Array:
    """Signed integers in the order of the numbers, neighbours one apart: ..., -0.0 is -1, 0.0 is 0, ..."""
    signed = bits.view(f"<i{bits.itemsize}")
    ordinals: Array = signed ^ ((signed >> (8 * bits.itemsize - 1)) & np.iinfo(signed.dtype).max)
    return ordinals


def _from_ordinals(ordinals: Array) -> Array:
    """The inverse of `_ordinals`, which is its own."""
    return _ordinals(ordinals).view(f"<u{ordinals.itemsize}")


def _zigzag(signed: Array) -> Array:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: small differences have small bytes, whatever their sign."""
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(f"<u{signed.itemsize}")


def _unzigzag(units: Array) -> Array:
    return ((units >> 1) ^ -(units & 1)).view(f"<i{units.itemsize}")


def _sizes(bits: Array, dtype: str) -> Array:
    """By exponent, 0 the largest there is; equal sizes sort as they stand."""
    return 255 - ((bits >> _MANTISSA_BITS[dtype]) & 0xFF).astype("u1")


def _cuts(sizes: Array) -> list[int]:
    """Where to part sorted sizes: after each one, unless a part would be short."""
    cuts = [0]
    for cut in np.searchsorted(sizes, np.arange(256, dtype="u1"), side="right").tolist():
        if min(cut - cuts[-1], len(sizes) - cut) >= PART_ELEMENTS_MIN:
            cuts.append(cut)
    return cuts[1:]


def _blocks(adapter: Adapter) -> int:
    return sum(-(-_elements(tensor) // BLOCK_ELEMENTS) for tensor in adapter.values())


def _scale_values(scales: Array) -> Array:
    return (scales.astype("<u4") << 16).view("<f4")


CODECS: Mapping[str, Codec] = MappingProxyType(
    {"xor": Xor(), "ulps": Ulps(), "int8": Quantised(8, rms_share=0.25), "int4": Quantised(4, rms_share=0.875)}
)


# --- the door


def encode_delta(codec: str, target: Adapter, parent: Adapter, parent_digest: bytes | None = None) -> Encoded:
    """A float32 target as a delta to a parent. `parent_digest` spares hashing the parent, if it is known.

    Raises LocalFault for an unknown codec, a target that has not the parent's names and shapes in float32, numbers that
    are not finite, and a parent of no, mixed or unknown dtypes.
    """
    if codec not in CODECS:
        raise LocalFault(f"unknown codec {codec!r}")
    if unfit := _unfit(parent):
        raise LocalFault(f"unfit parent: {unfit}")
    if {name: ("F32", tensor.shape) for name, tensor in parent.items()} != {
        name: (tensor.dtype, tensor.shape) for name, tensor in target.items()
    }:
        raise LocalFault("the target has not the parent's names and shapes in float32")
    if unfit := _unfit(target):
        raise LocalFault(f"unfit target: {unfit}")
    parts = CODECS[codec].difference(target, parent)
    packed = _compressed(parts)
    return Encoded(_seal(codec, packed, parent, parent_digest) + packed, CODECS[codec].apply(b"".join(parts), parent))


def decode_delta(codec: str, blob: bytes, parent: Adapter, parent_digest: bytes | None = None) -> dict[str, Tensor]:
    """What a delta makes of its parent. `parent_digest` spares hashing the parent, if it is known.

    Raises PeerFault and nothing else: unknown codec, unfit parent, a delta of another parent, damage. What the parent's
    size does not allow for is refused before it is decompressed.
    """
    if codec not in CODECS:
        raise PeerFault("unknown codec", repr(codec)[:64])
    if unfit := _unfit(parent):
        raise PeerFault("unfit parent", unfit)
    packed = blob[SEAL_BYTES:]
    if blob[:SEAL_BYTES] != _seal(codec, packed, parent, parent_digest):
        raise PeerFault("malformed delta", "of another parent or codec, or damaged")
    rebuilt = CODECS[codec].apply(_decompressed(packed, CODECS[codec].plain_bytes(parent)), parent)
    if not _finite(rebuilt):
        raise PeerFault("malformed delta", "rebuilds numbers that are not finite")
    return rebuilt


def _unfit(adapter: Adapter) -> str:
    """Why an adapter can be no end of a delta; empty if it can."""
    dtypes = {tensor.dtype for tensor in adapter.values()}
    if len(dtypes) != 1 or not dtypes <= set(_BITS):
        return f"dtypes {sorted(dtypes)}"
    if any(
        not tensor.data or _elements(tensor) * _BITS[tensor.dtype].itemsize != len(tensor.data)
        for tensor in adapter.values()
    ):
        return "size of a tensor"
    return "" if _finite(adapter) else "not finite"


def _seal(codec: str, packed: bytes, parent: Adapter, parent_digest: bytes | None) -> bytes:
    seal = hashlib.sha256(SEAL_DOMAIN + codec.encode() + b"\0")
    seal.update(adapter_digest(parent) if parent_digest is None else parent_digest)
    seal.update(packed)
    return seal.digest()


def _compressed(parts: Sequence[bytes]) -> bytes:
    """One zstd frame; each part begins a block of it, and so gets a Huffman table of its own."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=sum(map(len, parts)))
    blocks = [compressor.compress(part) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for part in parts]
    return b"".join(blocks) + compressor.flush()


def _decompressed(packed: bytes, size: int) -> bytes:
    """The bytes of one zstd frame that holds `size` of them and nothing after. Raises PeerFault."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise PeerFault("malformed delta", "size")
        plain = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PeerFault("malformed delta", str(error)) from error
    if len(plain) != size:
        raise PeerFault("malformed delta", "size")
    return plain
