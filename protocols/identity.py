"""Ed25519 keys and the names made of them.

A libp2p peer id of an Ed25519 key *is* the public key: base58 of the identity multihash of
`crypto.proto PublicKey{type: Ed25519, data: 32 bytes}`. So a signature can be checked against a peer
id with nothing looked up. A run id carries 80 bits of the hash of its owner's key.
"""

import base64
import hashlib
import re
from functools import lru_cache

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protocols.faults import PeerFault

# multihash: identity, 36 bytes; protobuf PublicKey: field 1 = Ed25519 (1), field 2 = 32 bytes
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
# protobuf PrivateKey: field 1 = Ed25519 (1), field 2 = 64 bytes (seed, then public key)
_PRIVATE_KEY_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
PEER_ID_CHARS = 52  # what 38 bytes with this prefix come to in base58, whatever the key


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The 32 raw bytes of the public half."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


@lru_cache(4096)  # base58 costs as much as a signature; a peer hears from few others
def peer_id_of(public: bytes) -> str:
    """The libp2p peer id (base58, 52 characters) of a raw public key."""
    return str(base58.b58encode(_PEER_ID_PREFIX + public), "ascii")


@lru_cache(4096)
def public_of(peer_id: str) -> bytes:
    """The raw public key in a peer id. Raises PeerFault when it is not one of an Ed25519 key."""
    if len(peer_id) != PEER_ID_CHARS:  # first: base58 takes quadratic time
        raise PeerFault("malformed peer id")
    try:
        raw = bytes(base58.b58decode(peer_id))
    except ValueError as error:
        raise PeerFault("malformed peer id") from error
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise PeerFault("malformed peer id")
    return raw[-32:]


def public_key_of(public: bytes) -> Ed25519PublicKey:
    """The key object of 32 raw bytes."""
    return Ed25519PublicKey.from_public_bytes(public)


def key_file_bytes(key: Ed25519PrivateKey) -> bytes:
    """What p2pd reads as an identity file: protobuf PrivateKey with seed and public key."""
    seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return _PRIVATE_KEY_PREFIX + seed + public_bytes(key)


def key_from_file_bytes(raw: bytes) -> Ed25519PrivateKey:
    """The key in an identity file. Raises ValueError when it is anything else."""
    if len(raw) != len(_PRIVATE_KEY_PREFIX) + 64 or not raw.startswith(_PRIVATE_KEY_PREFIX):
        raise ValueError("not an Ed25519 identity file")
    key = Ed25519PrivateKey.from_private_bytes(raw[4:36])
    if public_bytes(key) != raw[36:]:
        raise ValueError("identity file is damaged: its public key is not that of its seed")
    return key


def run_id_of(name: str, owner_public: bytes) -> str:
    """`<name>-<first 80 bits of sha256(owner public key), base32>`. Raises ValueError for a bad name."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"run name {name!r}: use lower-case letters, digits and '-', at most 64, no '-' first")
    tail = base64.b32encode(hashlib.sha256(owner_public).digest()[:10]).decode().lower()
    return f"{name}-{tail}"


def short(peer_id: str) -> str:
    """The last eight characters of a peer id, for people: the first ones are the same for everybody."""
    return peer_id[-8:]
