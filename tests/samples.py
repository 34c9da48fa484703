"""Valid messages of a small run, for tests that then bend one thing."""

from collections.abc import Iterator
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from protocols import PROTOCOL
from protocols.envelopes import KINDS, Sealed, seal
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.ledger import Consumed, trained_on
from protocols.manifest import Manifest
from protocols.messages import AdapterRef, Announcement, BlobRef, RolloutGroup, RunEnd, Sampling
from protocols.policy import genesis
from protocols.rollouts import GroupRules, pack_floats, pack_ids

OWNER, TRAINER, OTHER_TRAINER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(1, 5))
OWNER_ID, TRAINER_ID, OTHER_TRAINER_ID, STRANGER_ID = (
    peer_id_of(public_bytes(key)) for key in (OWNER, TRAINER, OTHER_TRAINER, STRANGER)
)
RUN = run_id_of("demo", public_bytes(OWNER))
OTHER_RUN = run_id_of("other", public_bytes(OWNER))
EOS = 9
RULES = GroupRules(Sampling(group_size=2, max_new_tokens=4), vocab_size=10, eos_ids=frozenset({EOS, 8}))


def manifest(**changes: Any) -> Manifest:
    """A manifest of RUN with two trainers and a bound of 2."""
    fields = {
        "run": RUN,
        "revision": 1,
        "trainers": (TRAINER_ID, OTHER_TRAINER_ID),
        "issued_ms": 1_000,
        "max_lag": 2,
        "sampling": RULES.sampling,
    }
    return Manifest(**{**fields, **changes})


def announcement(
    version: int,
    parent: bytes | None = None,
    *,
    consumed: tuple[Consumed, ...] = (),
    key: Ed25519PrivateKey = TRAINER,
    **changes: Any,
) -> Sealed[Announcement]:
    """Version `version`, child of `parent` (the genesis by default)."""
    fields = {
        "run": RUN,
        "version": version,
        "parent": parent or genesis(RUN),
        "adapter": AdapterRef(version.to_bytes(32, "big"), BlobRef(bytes(32), 100)),
        "trained_on": trained_on(consumed),
        "bound": 2,
        "created_ms": 2_000,
    }
    return seal(key, Announcement(**{**fields, **changes}))


def run_end(version: int, head: bytes, *, key: Ed25519PrivateKey = TRAINER, run: str = RUN) -> Sealed[RunEnd]:
    """The end of a run at `version`."""
    return seal(key, RunEnd(run, version, head, 3_000))


def group(**changes: Any) -> RolloutGroup:
    """Two completions: one of 3 tokens that ended, one that ran into max_new_tokens."""
    fields = {
        "counter": 0,
        "oldest_version": 0,
        "newest_version": 0,
        "adapter": bytes(32),
        "prompt_ids": pack_ids([1, 2, 3]),
        "lengths": (3, 4),
        "token_ids": pack_ids([1, 2, EOS, 4, 5, 6, 7]),
        "logprobs": pack_floats([-0.5] * 7),
        "truncated": (False, True),
        "rewards": (1.0, None),
        "temperature": 1.0,
        "engine": "test",
    }
    return RolloutGroup(**{**fields, **changes})


def envelope_of(kind: type[Struct], payload: bytes, key: Ed25519PrivateKey = STRANGER) -> bytes:
    """A correctly signed envelope of `kind` around any bytes at all."""
    signature = key.sign(f"{PROTOCOL}/{KINDS[kind][0]}\0".encode() + payload)
    return msgspec.msgpack.encode([public_bytes(key), payload, signature])


def indexes(chunks: int) -> Iterator[int]:
    """The members of a set of chunks, lowest first."""
    while chunks:
        lowest = chunks & -chunks
        yield lowest.bit_length() - 1
        chunks ^= lowest
