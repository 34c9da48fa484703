"""Signed bytes: the one door through which everything that is stored or relayed comes in.

    envelope = [sender: 32 bytes, payload: bytes, signature: 64 bytes]      (MessagePack array)
    signature covers  "echo-swarm/2/<kind>" NUL payload

Sign the bytes that are sent, verify the bytes that came; nothing is ever re-encoded to be checked. The
kind is part of what is signed, so a receipt can never be read as an announcement. Order of checks:
size, shape of the envelope, signature, shape of the content. Only PeerFault comes out of this door.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeGuard, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta, Struct

from protocols import PROTOCOL
from protocols.faults import LocalFault, PeerFault
from protocols.identity import peer_id_of, public_bytes, public_key_of
from protocols.manifest import Manifest
from protocols.messages import (
    GOSSIP_BYTES_MAX,
    RECORD_BYTES_MAX,
    UNARY_BYTES_MAX,
    Announcement,
    CapacityAd,
    Directive,
    Lease,
    Receipt,
    RolloutBatch,
    RunEnd,
)

# Kind (what the signature is bound to) and largest envelope of each signed message.
KINDS: dict[type[Struct], tuple[str, int]] = {
    Manifest: ("manifest", RECORD_BYTES_MAX),
    Announcement: ("announcement", GOSSIP_BYTES_MAX - 1024),  # leaves room for GossipSub's own frame
    RunEnd: ("end", 1024),
    CapacityAd: ("capacity", 4096),
    RolloutBatch: ("rollouts", UNARY_BYTES_MAX - 1024),  # fits into PushRollouts
    Receipt: ("receipt", UNARY_BYTES_MAX - 1024),
    Lease: ("lease", 512),
    Directive: ("directive", 512),
}

M = TypeVar("M", bound=Struct)
N = TypeVar("N", bound=Struct)


class _Envelope(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sender: Annotated[bytes, Meta(min_length=32, max_length=32)]
    payload: bytes
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_content_decoders: dict[type[Struct], Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Sealed(Generic[M]):
    """A message whose signature was verified, and the bytes that prove it."""

    sender: str
    message: M
    raw: bytes
    """The whole envelope, to store or to pass on."""
    payload: bytes


def _signed_text(kind: type[Struct], payload: bytes) -> bytes:
    return f"{PROTOCOL}/{KINDS[kind][0]}\0".encode() + payload


def seal(key: Ed25519PrivateKey, message: M) -> Sealed[M]:
    """Sign a message. A message too large for its kind is our own fault: LocalFault."""
    kind = type(message)
    payload = msgspec.msgpack.encode(message)
    envelope = _Envelope(public_bytes(key), payload, key.sign(_signed_text(kind, payload)))
    raw = msgspec.msgpack.encode(envelope)
    if len(raw) > KINDS[kind][1]:
        raise LocalFault(f"{KINDS[kind][0]} of {len(raw)} bytes is over its limit of {KINDS[kind][1]}")
    return Sealed(peer_id_of(envelope.sender), message, raw, payload)


def unseal(raw: bytes, kind: type[M]) -> Sealed[M]:
    """Check size, envelope, signature, content, in this order. Raises PeerFault and nothing else."""
    name, bytes_max = KINDS[kind]
    if len(raw) > bytes_max:
        raise PeerFault("envelope too large", f"{name} of {len(raw)} bytes")
    try:
        envelope = _envelope_decoder.decode(raw)
        public_key_of(envelope.sender).verify(envelope.signature, _signed_text(kind, envelope.payload))
        message: M = _content_decoders[kind].decode(envelope.payload)
    except InvalidSignature as error:
        raise PeerFault("bad signature", name) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerFault("malformed envelope", f"{name}: {str(error)[:200]}") from error
    return Sealed(peer_id_of(envelope.sender), message, raw, envelope.payload)


def unseal_either(raw: bytes, first: type[M], second: type[N]) -> Sealed[M] | Sealed[N]:
    """As `unseal`, where two kinds are expected; the fault of one that is neither says what is wrong as the first."""
    try:
        return unseal(raw, first)
    except PeerFault as fault:
        try:
            return unseal(raw, second)
        except PeerFault:
            raise fault from None


def is_of(sealed: Sealed[Any], kind: type[M]) -> TypeGuard[Sealed[M]]:
    """Whether it is a message of this kind."""
    return isinstance(sealed.message, kind)


def content_hash(sealed: Sealed[M]) -> bytes:
    """The identity of a signed message: SHA-256 over kind, sender and payload (not over the signature)."""
    text = _signed_text(type(sealed.message), sealed.sender.encode() + b"\0" + sealed.payload)
    return hashlib.sha256(text).digest()
