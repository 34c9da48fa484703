"""An adapter as the protocol sees it: named tensors, a canonical digest, and safetensors bytes.

The digest (DESIGN section 6) is the identity of a policy: every receiver recomputes it before it
generates a token. It covers tensors by sorted name, each name, dtype, shape and raw bytes, so it does
not depend on how the tensors were packed for the road.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import safetensors

from protocols.faults import PeerFault

# LoRA of rank 64 on every linear layer of an 8 B model in float32 is about 0.7 GB; twice that is a mistake.
ADAPTER_BYTES_MAX = 1536 * 1024 * 1024
TENSORS_MAX = 16_384  # 80 layers x 7 modules x 2 matrices is 1,120; a guess with an order of magnitude to spare
TENSOR_NAME_MAX = 256

BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}


class Tensor(NamedTuple):
    """One tensor as bytes: safetensors dtype name, shape, little-endian row-major data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Adapter = Mapping[str, Tensor]


def adapter_digest(adapter: Adapter) -> bytes:
    """SHA-256 over the canonical adapter; 32 bytes."""
    digest = hashlib.sha256(b"echo-swarm/1/adapter")
    for name in sorted(adapter):
        tensor = adapter[name]
        header = f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0{len(tensor.data)}\0"
        digest.update(header.encode())
        digest.update(tensor.data)
    return digest.digest()


def encode_adapter(adapter: Adapter) -> bytes:
    """Safetensors bytes of an adapter; the `raw` codec. Same adapter, same bytes.

    Written here because the library's own `serialize` takes memory addresses, not bytes.
    """
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, tensor in sorted(adapter.items()):
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)  # the format aligns data to 8 bytes
    return b"".join([len(head).to_bytes(8, "little"), head, *(adapter[name].data for name in sorted(adapter))])


def decode_adapter(raw: bytes) -> dict[str, Tensor]:
    """The adapter in safetensors bytes. Raises PeerFault and nothing else."""
    if len(raw) > ADAPTER_BYTES_MAX:
        raise PeerFault("adapter too large", f"{len(raw)} bytes")
    try:
        entries = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise PeerFault("malformed adapter", str(error)) from error
    if len(entries) > TENSORS_MAX:
        raise PeerFault("malformed adapter", f"{len(entries)} tensors")
    return {name: _tensor(name, entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in entries}


def _tensor(name: str, dtype: str, shape: list[int], data: bytes) -> Tensor:
    if dtype not in BYTES_PER_ELEMENT:
        raise PeerFault("malformed adapter", f"dtype {dtype} of {name[:64]!r}")
    if len(name) > TENSOR_NAME_MAX or "\0" in name:
        raise PeerFault("malformed adapter", "tensor name")
    if not data or math.prod(shape) * BYTES_PER_ELEMENT[dtype] != len(data):
        raise PeerFault("malformed adapter", f"size of {name[:64]!r}")
    return Tensor(dtype, tuple(shape), data)
