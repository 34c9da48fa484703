"""Blobs in chunks: no byte is kept that its hash does not name."""

import hashlib
import random

import pytest

from protocols.faults import LocalFault, PeerFault
from protocols.messages import BlobRef
from protocols.transfer import (
    CHUNK_BYTES,
    HASH_BYTES,
    Download,
    Want,
    blob_ref,
    chunk_hashes,
    num_chunks,
    root_of,
    served_range,
)

BLOB = random.Random(1).randbytes(3 * CHUNK_BYTES + 1000)
HASHES = chunk_hashes(BLOB)


def chunk(index: int, blob: bytes = BLOB) -> bytes:
    return blob[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def started() -> Download:
    download = Download(blob_ref(BLOB))
    download.take_hashes(len(BLOB), HASHES)
    return download


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_any_size_round_trips(size: int) -> None:
    blob = BLOB[:size]
    download = Download(blob_ref(blob))
    assert download.want() == Want(True, 0, num_chunks(size))
    download.take_hashes(size, chunk_hashes(blob))
    for index in range(num_chunks(size)):
        assert download.chunk_size(index) == len(chunk(index, blob))
        download.take_chunk(index, chunk(index, blob))
    assert download.done
    assert download.want() is None
    assert download.blob() == blob


def test_a_root_names_size_and_chunks() -> None:
    roots = {
        blob_ref(BLOB).root,
        root_of(len(BLOB) + 1, HASHES),
        root_of(len(BLOB), HASHES[:-1] + b"x"),
        root_of(0, b""),
    }
    assert len(roots) == 4


@pytest.mark.parametrize("index", range(4))
def test_b30_a_flipped_bit_in_any_chunk_is_refused(index: int) -> None:
    download, good = started(), chunk(index)
    for bit in (0, 8 * len(good) // 2, 8 * len(good) - 1):
        with pytest.raises(PeerFault, match="wrong chunk"):
            download.take_chunk(index, flipped(good, bit))
    assert download.received_bytes == 0
    download.take_chunk(index, good)
    assert download.received_bytes == len(good)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.999])
def test_b30_a_cut_chunk_is_refused(share: float) -> None:
    download = started()
    with pytest.raises(PeerFault, match="wrong chunk"):
        download.take_chunk(0, chunk(0)[: int(share * CHUNK_BYTES)])
    with pytest.raises(PeerFault, match="wrong chunk"):
        download.take_chunk(3, chunk(3) + b"\0")


def test_b30_every_flipped_bit_of_the_hash_list_is_refused() -> None:
    download = Download(blob_ref(BLOB))
    for bit in range(8 * len(HASHES)):
        with pytest.raises(PeerFault, match="hash list"):
            download.take_hashes(len(BLOB), flipped(HASHES, bit))
    for hashes in (HASHES[:-HASH_BYTES], HASHES + bytes(HASH_BYTES), HASHES[:-1], b""):
        with pytest.raises(PeerFault, match="size"):
            download.take_hashes(len(BLOB), hashes)
    for size in (len(BLOB) - 1, len(BLOB) + 1, 0):
        with pytest.raises(PeerFault, match="size"):
            download.take_hashes(size, HASHES)
    assert download.want() == Want(True, 0, 4)


def test_b30_an_older_valid_blob_is_refused_as_a_whole_and_by_chunk() -> None:
    older = random.Random(2).randbytes(len(BLOB))
    download = Download(blob_ref(BLOB))
    with pytest.raises(PeerFault, match="hash list"):
        download.take_hashes(len(older), chunk_hashes(older))
    download.take_hashes(len(BLOB), HASHES)
    for index in range(4):
        with pytest.raises(PeerFault, match="wrong chunk"):
            download.take_chunk(index, chunk(index, older))


def test_b30_another_source_goes_on_where_the_first_failed() -> None:
    download = started()
    download.take_chunk(0, chunk(0))
    with pytest.raises(PeerFault):
        download.take_chunk(1, bytes(CHUNK_BYTES))
    download.take_chunk(2, chunk(2))
    assert download.want() == Want(False, 1, 1)  # what was verified stays
    download.take_hashes(len(BLOB), HASHES)  # a second source may send the list again
    download.take_chunk(1, chunk(1))
    assert download.want() == Want(False, 3, 1)
    download.take_chunk(3, chunk(3))
    assert download.blob() == BLOB


def test_a_signed_list_that_lies_about_the_size_is_refused() -> None:
    # A trainer can sign a root over hashes of chunks that are not of the size they must have.
    hashes = hashlib.sha256(b"short").digest() + hashlib.sha256(b"x").digest()
    size = CHUNK_BYTES + 1
    download = Download(BlobRef(root_of(size, hashes), size))
    download.take_hashes(size, hashes)
    with pytest.raises(PeerFault, match="5 bytes"):
        download.take_chunk(0, b"short")
    download.take_chunk(1, b"x")


def test_indexes_outside_are_refused_and_misuse_is_our_own_fault() -> None:
    for index in (-1, 4):
        with pytest.raises(PeerFault, match="index"):
            started().take_chunk(index, chunk(0))
    with pytest.raises(LocalFault):
        Download(blob_ref(BLOB)).take_chunk(0, chunk(0))
    with pytest.raises(LocalFault):
        started().blob()


def test_a_blob_over_the_limit_is_refused_before_a_byte_is_fetched() -> None:
    Download(BlobRef(bytes(32), 100), bytes_max=100)
    with pytest.raises(PeerFault, match="blob too large"):
        Download(BlobRef(bytes(32), 101), bytes_max=100)
    with pytest.raises(PeerFault, match="blob too large"):
        Download(BlobRef(bytes(32), 2**48 - 1))


def test_a_request_is_cut_to_what_exists() -> None:
    size = 3 * CHUNK_BYTES + 1
    ranges = [(0, 4), (1, 2), (3, 2**32 - 1), (4, 1), (2**32 - 1, 2**32 - 1), (0, 0)]
    assert [list(served_range(size, *r)) for r in ranges] == [[0, 1, 2, 3], [1, 2], [3], [], [], []]
    assert list(served_range(0, 0, 5)) == []
