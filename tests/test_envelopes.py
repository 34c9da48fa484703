"""The one door: whatever comes, a verified message or a PeerFault."""

import dataclasses
import random
import struct
import tracemalloc

import msgspec
import pytest
from msgspec import Struct, structs

from protocols.envelopes import KINDS, content_hash, seal, unseal
from protocols.faults import LocalFault, PeerFault
from protocols.identity import peer_id_of, public_bytes, public_of, run_id_of
from protocols.manifest import Manifest
from protocols.messages import (
    UNARY_BYTES_MAX,
    Announcement,
    CapacityAd,
    Directive,
    Lease,
    Receipt,
    RolloutBatch,
    RunEnd,
    decode_blob_asker,
    decode_blob_holder,
    decode_reply,
    decode_request,
)
from tests.samples import RUN, STRANGER, STRANGER_ID, TRAINER, announcement, envelope_of, group, manifest

DECODERS = (decode_request, decode_reply, decode_blob_asker, decode_blob_holder)
MESSAGES: dict[type[Struct], Struct] = {
    Manifest: manifest(),
    Announcement: announcement(3).message,
    RunEnd: RunEnd(RUN, 3, bytes(32), 1),
    CapacityAd: CapacityAd(run=RUN, session=bytes(16), role="inference", issued_ms=1),
    RolloutBatch: RolloutBatch(RUN, (group(),)),
    Receipt: Receipt(RUN, STRANGER_ID, (), 1, 2),
    Lease: Lease(RUN, 7, "claimed", 3),
    Directive: Directive(run=RUN, term=7, number=5, mode="async", min_version=3, issued_ms=1),
}


def fields_of(message: Struct) -> dict[str, object]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_sealed_is_unsealed(kind: type[Struct]) -> None:
    sealed = seal(STRANGER, MESSAGES[kind])
    assert unseal(sealed.raw, kind) == sealed
    assert (sealed.sender, sealed.message) == (STRANGER_ID, MESSAGES[kind])


def test_an_envelope_of_one_kind_is_refused_as_any_other() -> None:
    for kind, message in MESSAGES.items():
        for other in KINDS:
            if other is not kind:
                with pytest.raises(PeerFault, match=r"bad signature|envelope too large"):
                    unseal(seal(STRANGER, message).raw, other)


def test_every_single_flipped_bit_is_refused() -> None:
    raw = seal(STRANGER, MESSAGES[RunEnd]).raw
    for bit in range(8 * len(raw)):
        bent = bytearray(raw)
        bent[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PeerFault):
            unseal(bytes(bent), RunEnd)


def test_cut_envelopes_and_trailing_bytes_are_refused() -> None:
    raw = seal(STRANGER, MESSAGES[RunEnd]).raw
    for end in range(len(raw)):
        with pytest.raises(PeerFault, match="malformed envelope"):
            unseal(raw[:end], RunEnd)
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(raw + b"\0", RunEnd)
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(RunEnd, msgspec.msgpack.encode(MESSAGES[RunEnd]) + b"\0"), RunEnd)


def test_another_signer_cannot_take_over_a_payload() -> None:
    ours = msgspec.msgpack.decode(seal(TRAINER, MESSAGES[RunEnd]).raw)
    forged = msgspec.msgpack.encode([public_bytes(STRANGER), *ours[1:]])
    with pytest.raises(PeerFault, match="bad signature"):
        unseal(forged, RunEnd)


def test_size_is_checked_first_and_on_both_sides() -> None:
    for kind, (_, bytes_max) in KINDS.items():
        with pytest.raises(PeerFault, match="envelope too large"):
            unseal(bytes(bytes_max + 1), kind)
    large = RolloutBatch(RUN, (group(token_ids=bytes(UNARY_BYTES_MAX)),))
    with pytest.raises(LocalFault, match="over its limit"):
        seal(STRANGER, large)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_ignored_unknown_tags_are_not(kind: type[Struct]) -> None:
    fields = fields_of(MESSAGES[kind])
    newer = envelope_of(kind, msgspec.msgpack.encode({**fields, "from_the_future": {"a": [1]}}))
    assert unseal(newer, kind).message == MESSAGES[kind]
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(kind, msgspec.msgpack.encode({**fields, "type": "surprise"})), kind)


BOMBS = {
    "arrays": b"\x91" * 200_000 + b"\xc0",
    "maps": b"\x81\xa1a" * 66_000 + b"\xc0",
    "keys": b"\x81" * 100_000 + b"\xc0" * 100_001,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_nested_bombs_are_a_peer_fault(bomb: str) -> None:
    for kind in KINDS:
        with pytest.raises(PeerFault):
            unseal(BOMBS[bomb], kind)
    # Signed, and in an unknown field: the skipper must be bounded too. RolloutBatch has the room for it.
    payload = b"\x83" + b"".join(map(msgspec.msgpack.encode, ("type", "rollouts", "run", RUN, "x"))) + BOMBS[bomb]
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(RolloutBatch, payload), RolloutBatch)
    for decode in DECODERS:
        with pytest.raises(PeerFault):
            decode(BOMBS[bomb])


@pytest.mark.parametrize(
    "params",
    [
        b"\x81\xa1a\x81\x80\x01",  # a map as a key
        b"\x81\xa1a\x81\x91\x80\x01",  # an array that holds a map, as a key
        b"\x81\xa1a\xc7\x0c\xff" + struct.pack(">Iq", 0, 2**62),  # a time stamp in the year 146 billion
        b"\x81\xa1a\xc7\x05\xff12345",  # a time stamp of 5 bytes
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # 4 billion items announced, none there
        b"\x81\xa1a\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xa2\xff\xfe",  # not UTF-8
        b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
    ],
    ids=["map key", "array key", "time", "short time", "array32", "map32", "utf-8", "nested"],
)
def test_free_form_parameters_cannot_raise_anything_else(params: bytes) -> None:
    # The manifest's environment parameters are the only untyped part of any signed message.
    fields = fields_of(manifest())
    payload = msgspec.msgpack.encode({**fields, "environment": {"params": "@here@"}})
    payload = payload.replace(msgspec.msgpack.encode("@here@"), params)
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(Manifest, payload), Manifest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", True),
        ("version", 3.0),
        ("version", -1),
        ("version", 2**32),
        ("version", 2**64 - 1),
        ("version", "3"),
        ("parent", "p" * 32),
        ("parent", bytes(31)),
        ("parent", list(range(32))),
        ("run", "Demo-aaaaaaaaaaaaaaaa"),
        ("run", b"demo-aaaaaaaaaaaaaaaa"),
        ("metrics", {"reward": "0.5"}),
        ("metrics", {"reward": True}),
        ("metrics", {str(n): 0.0 for n in range(33)}),
        ("metrics", {"n" * 129: 0.0}),
        ("metrics", {1: 0.0}),
    ],
)
def test_types_are_not_bent_to_fit(field: str, value: object) -> None:
    payload = msgspec.msgpack.encode({**fields_of(announcement(3).message), field: value})
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(Announcement, payload), Announcement)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *[(kind, "term", term) for kind in (Lease, Directive) for term in (-1, 2**32, 2**63, 2**64 - 1, 7.0, True)],
        (Lease, "state", "leading"),
        (Lease, "until_ms", 2**48),
        (Lease, "run", "Demo"),
        (Directive, "mode", "auto"),
        (Directive, "number", 2**32),
        (Directive, "min_version", 2**32),
        (Directive, "issued_ms", -1),
    ],
)
def test_a_lease_and_a_directive_with_impossible_numbers_are_not_even_read(
    kind: type[Struct], field: str, value: object
) -> None:
    payload = msgspec.msgpack.encode({**fields_of(MESSAGES[kind]), field: value})
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(kind, payload), kind)


@pytest.mark.parametrize("kind", [Lease, Directive])
def test_what_is_beaconed_each_beat_is_small(kind: type[Struct]) -> None:
    largest = {"run": "r" * 64 + RUN[-17:], "term": 2**32 - 1, "until_ms": 2**48 - 1, "issued_ms": 2**48 - 1}
    largest |= {"number": 2**32 - 1, "min_version": 2**32 - 1, "mode": "sequential"}
    message = structs.replace(
        MESSAGES[kind], **{name: largest[name] for name in fields_of(MESSAGES[kind]) & largest.keys()}
    )
    assert len(seal(STRANGER, message).raw) <= KINDS[kind][1] == 512


def test_announced_lengths_allocate_nothing() -> None:
    payload = b"\x83" + b"".join(map(msgspec.msgpack.encode, ("type", "rollouts", "run", RUN, "groups")))
    raw = envelope_of(RolloutBatch, payload + b"\xdd\xff\xff\xff\xff")
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault):
            unseal(raw, RolloutBatch)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_s7_random_and_mutated_bytes_raise_peer_faults_only() -> None:
    rng = random.Random(7)
    seeds = [seal(STRANGER, message).raw for message in MESSAGES.values()]
    payloads = [msgspec.msgpack.encode(message) for message in MESSAGES.values()]
    refused = 0
    for _ in range(1500):
        kind = rng.choice(list(KINDS))
        sample = bytearray(rng.choice(payloads))
        for _ in range(rng.randint(1, 4)):
            sample[rng.randrange(len(sample))] = rng.randrange(256)
        mutated = bytes(sample[: rng.randint(1, len(sample))]) if rng.random() < 0.3 else bytes(sample)
        for raw in (rng.randbytes(rng.randint(0, 100)), mutated, envelope_of(kind, mutated), rng.choice(seeds)[:-1]):
            try:
                unseal(raw, kind)
            except PeerFault:
                refused += 1
            for decode in DECODERS:
                try:
                    decode(raw)
                except PeerFault:
                    refused += 1
    assert refused > 20_000


def test_content_hash_is_of_kind_sender_and_payload() -> None:
    ours, theirs = seal(TRAINER, MESSAGES[RunEnd]), seal(STRANGER, MESSAGES[RunEnd])
    hashes = {content_hash(ours), content_hash(theirs), content_hash(seal(TRAINER, MESSAGES[Receipt]))}
    assert len(hashes) == 3
    assert content_hash(ours) == content_hash(dataclasses.replace(ours, raw=b"another signature"))


def test_peer_ids_are_public_keys() -> None:
    for public in (bytes(32), bytes([255]) * 32, public_bytes(STRANGER)):
        assert len(peer_id_of(public)) == 52
        assert public_of(peer_id_of(public)) == public


@pytest.mark.parametrize(
    "text", ["", "1" * 52, STRANGER_ID[:-1], STRANGER_ID + "\n", STRANGER_ID[:-1] + "0", "é" * 52, "z" * 1_000_000]
)
def test_other_peer_ids_are_refused_quickly(text: str) -> None:
    with pytest.raises(PeerFault, match="malformed peer id"):
        public_of(text)


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "a" * 65, "demo\n", "démo"])
def test_bad_run_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        run_id_of(name, bytes(32))
