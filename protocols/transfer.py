"""Blobs in chunks: content-addressed, each chunk checked on its own, any source for any chunk.

    root = SHA-256 over (size, hash of chunk 0, hash of chunk 1, ...)

A receiver knows the root from a signed announcement, asks a source for the list of hashes, checks the
list against the root, then checks each chunk against the list. So a source that lies is found at the
first chunk, and what earlier sources sent stays good.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from protocols.adapters import ADAPTER_BYTES_MAX
from protocols.faults import LocalFault, PeerFault
from protocols.messages import BlobRef

CHUNK_BYTES = 256 * 1024
HASH_BYTES = 32
_DOMAIN = b"echo-swarm/1/blob\0"


def num_chunks(size: int) -> int:
    """Chunks of a blob of `size` bytes; an empty blob has none."""
    return -(-size // CHUNK_BYTES)


def chunk_hashes(blob: bytes) -> bytes:
    """The hashes of a blob's chunks, 32 bytes each, concatenated."""
    view = memoryview(blob)
    starts = range(0, len(blob), CHUNK_BYTES)
    return b"".join(hashlib.sha256(view[at : at + CHUNK_BYTES]).digest() for at in starts)


def root_of(size: int, hashes: bytes) -> bytes:
    """The name of a blob; 32 bytes."""
    return hashlib.sha256(_DOMAIN + size.to_bytes(8, "big") + hashes).digest()


def blob_ref(blob: bytes) -> BlobRef:
    """The reference that an announcement carries."""
    return BlobRef(root_of(len(blob), chunk_hashes(blob)), len(blob))


@dataclass(frozen=True, slots=True)
class Want:
    """What to ask a source for next: the hashes, and `count` chunks from `first` on."""

    hashes: bool
    first: int
    count: int


class Download:
    """One blob on its way here, from any number of sources. Keeps what was verified."""

    def __init__(self, ref: BlobRef, bytes_max: int = ADAPTER_BYTES_MAX) -> None:
        if ref.size > bytes_max:
            raise PeerFault("blob too large", f"{ref.size} bytes")
        self.ref = ref
        self._hashes: bytes | None = None
        self._have: set[int] = set()
        self._blob = io.BytesIO()  # chunks at their places: joining them at the end would take as much memory again

    @property
    def done(self) -> bool:
        """True when every chunk is here and verified."""
        return self._hashes is not None and len(self._have) == num_chunks(self.ref.size)

    @property
    def received_bytes(self) -> int:
        """Verified bytes so far."""
        return sum(map(self.chunk_size, self._have))

    @property
    def hashes(self) -> bytes:
        """The hash list, verified. Only once it was taken."""
        if self._hashes is None:
            raise LocalFault("no hash list yet")
        return self._hashes

    def want(self) -> Want | None:
        """The next request for any source: the first run of missing chunks. None when done."""
        if self.done:
            return None
        total = num_chunks(self.ref.size)
        missing = [index for index in range(total) if index not in self._have]
        first = missing[0] if missing else 0
        count = next((at for at, index in enumerate(missing) if index != first + at), len(missing))
        return Want(self._hashes is None, first, count)

    def take_hashes(self, size: int, hashes: bytes) -> None:
        """The hash list from a source. Raises PeerFault when it is not the list of this root."""
        if size != self.ref.size or len(hashes) != HASH_BYTES * num_chunks(size):
            raise PeerFault("wrong blob", "size")
        if root_of(size, hashes) != self.ref.root:
            raise PeerFault("wrong blob", "hash list")
        self._hashes = hashes

    def chunk_size(self, index: int) -> int:
        """Bytes of chunk `index`; all are CHUNK_BYTES but the last."""
        return min(CHUNK_BYTES, self.ref.size - index * CHUNK_BYTES)

    def take_chunk(self, index: int, data: bytes) -> None:
        """One chunk from a source. Raises PeerFault when it is not what the list says."""
        if self._hashes is None:
            raise LocalFault("chunk before its hash list")
        if not 0 <= index < num_chunks(self.ref.size):
            raise PeerFault("wrong chunk", f"index {index}")
        if len(data) != self.chunk_size(index):  # a list may be signed and still lie about the size
            raise PeerFault("wrong chunk", f"{len(data)} bytes")
        if hashlib.sha256(data).digest() != self._hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]:
            raise PeerFault("wrong chunk", f"{index} of {num_chunks(self.ref.size)}")
        self._blob.seek(index * CHUNK_BYTES)
        self._blob.write(data)
        self._have.add(index)

    def blob(self) -> bytes:
        """The whole blob. Only once `done`."""
        if not self.done:
            raise LocalFault("blob is not complete")
        return self._blob.getvalue()


def served_range(size: int, first: int, count: int) -> Sequence[int]:
    """Chunk indexes to serve for a request, cut to what exists."""
    return range(min(first, num_chunks(size)), min(first + count, num_chunks(size)))
