"""Adapters: one digest for one set of tensors, and nothing but a PeerFault for bytes that are none."""

import json
import random
import struct

import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import protocols.adapters as adapters
from protocols.adapters import (
    BYTES_PER_ELEMENT,
    TENSOR_NAME_MAX,
    Adapter,
    Tensor,
    adapter_digest,
    decode_adapter,
    encode_adapter,
)
from protocols.faults import PeerFault

SAMPLE = {
    "layers.0.q_proj.lora_A": Tensor("F32", (2, 3), bytes(range(24))),
    "layers.0.q_proj.lora_B": Tensor("BF16", (3, 2), bytes(range(12))),
    "scale": Tensor("F16", (), b"\x00\x3c"),
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(BYTES_PER_ELEMENT)))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    size = BYTES_PER_ELEMENT[dtype]
    for length in shape:
        size *= length
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


names = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=TENSOR_NAME_MAX
).filter(lambda name: name != "__metadata__")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, tensors(), max_size=4))
def test_any_adapter_round_trips_and_keeps_its_digest(adapter: dict[str, Tensor]) -> None:
    raw = encode_adapter(adapter)
    assert decode_adapter(raw) == adapter
    assert adapter_digest(decode_adapter(raw)) == adapter_digest(adapter)
    assert encode_adapter(dict(reversed(adapter.items()))) == raw


def test_the_bytes_are_safetensors() -> None:
    arrays = safetensors.numpy.load(encode_adapter({"w": Tensor("F32", (1, 2), struct.pack("<2f", 1.5, -2.0))}))
    assert arrays["w"].tolist() == [[1.5, -2.0]]


def changed(name: str, **changes: object) -> Adapter:
    return {**SAMPLE, name: SAMPLE[name]._replace(**changes)}


def test_the_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    first = "layers.0.q_proj.lora_A"
    others = [
        {**{name: tensor for name, tensor in SAMPLE.items() if name != first}, first + "x": SAMPLE[first]},
        {name: tensor for name, tensor in SAMPLE.items() if name != "scale"},
        {**SAMPLE, "extra": SAMPLE["scale"]},
        changed(first, shape=(3, 2)),
        changed(first, shape=(6,)),
        changed("scale", dtype="BF16"),
        changed("scale", shape=(1,)),
        changed(first, data=bytes(24)),
        {},
    ]
    assert len({adapter_digest(adapter) for adapter in [SAMPLE, *others]}) == 1 + len(others)
    assert adapter_digest(dict(reversed(SAMPLE.items()))) == adapter_digest(SAMPLE)


def test_bytes_cannot_move_between_tensors_or_into_names() -> None:
    one, two = Tensor("F16", (1,), b"ab"), Tensor("F16", (2,), b"abcd")
    pairs = [{"a": one, "b": two}, {"a": two, "b": one}, {"ab": one, "b": two}, {"a": one, "bb": two}]
    assert len({adapter_digest(pair) for pair in pairs}) == 4


def raw_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MALFORMED = {
    "empty": b"",
    "header length only": bytes(8),
    "header length of 2^63": (2**63).to_bytes(8, "little") + b"{}",
    "no object": raw_of([]),
    "no JSON": raw_of(b"\x80\x04\x95pickle"),
    "nested": raw_of(b"[" * 100_000),
    "nested object": raw_of(b'{"a":' * 100_000),
    "unknown dtype": raw_of({"a": entry("F8_E4M3", (4,))}, b"1234"),
    "integers": raw_of({"a": entry("I32")}, b"1234"),
    "sub-byte dtype": raw_of({"a": entry("F4", (8,))}, b"1234"),
    "negative shape": raw_of({"a": entry(shape=(-1,))}, b"1234"),
    "overflowing shape": raw_of({"a": entry(shape=(2**63, 2))}, b"1234"),
    "shape over 2^64": raw_of({"a": entry(shape=(2**65,))}, b"1234"),
    "shape and size disagree": raw_of({"a": entry(shape=(2,))}, b"1234"),
    "no elements": raw_of({"a": entry(shape=(0,), offsets=(0, 0))}),
    "no elements, 2^62 rows": raw_of({"a": entry(shape=(2**62, 0), offsets=(0, 0))}),
    "offsets beyond the end": raw_of({"a": entry()}, b"123"),
    "bytes nobody names": raw_of({"a": entry()}, b"12345"),
    "overlap": raw_of({"a": entry(), "b": entry()}, b"1234"),
    "NUL in a name": raw_of({"a\0": entry()}, b"1234"),
    "long name": raw_of({"a" * (TENSOR_NAME_MAX + 1): entry()}, b"1234"),
    "lone surrogate": raw_of({"\ud800": entry()}, b"1234"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_a_peer_fault(name: str) -> None:
    with pytest.raises(PeerFault, match="malformed adapter"):
        decode_adapter(MALFORMED[name])


def test_b30_cut_files_are_refused() -> None:
    raw = encode_adapter(SAMPLE)
    for end in range(len(raw)):
        with pytest.raises(PeerFault):
            decode_adapter(raw[:end])
    with pytest.raises(PeerFault):
        decode_adapter(raw + b"\0")


def test_b30_no_flipped_bit_keeps_the_digest() -> None:
    raw, digest = encode_adapter(SAMPLE), adapter_digest(SAMPLE)
    same = 0
    for bit in range(8 * len(raw)):
        bent = bytearray(raw)
        bent[bit // 8] ^= 1 << bit % 8
        try:
            same += adapter_digest(decode_adapter(bytes(bent))) == digest
        except PeerFault:
            continue
    assert same == 0


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode_adapter(SAMPLE)
    monkeypatch.setattr(adapters, "TENSORS_MAX", 2)
    with pytest.raises(PeerFault, match="3 tensors"):
        decode_adapter(raw)
    monkeypatch.setattr(adapters, "ADAPTER_BYTES_MAX", len(raw) - 1)
    with pytest.raises(PeerFault, match="adapter too large"):
        decode_adapter(raw)


def test_s7_random_bytes_are_a_peer_fault() -> None:
    rng = random.Random(11)
    for _ in range(500):
        body = rng.randbytes(rng.randint(0, 80))
        for raw in (body, len(body).to_bytes(8, "little") + body, raw_of({"a": entry()}, body + b"12345")):
            with pytest.raises(PeerFault):
                decode_adapter(raw)
