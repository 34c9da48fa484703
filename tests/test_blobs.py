"""What a blob store does where its folder is not as it left it, and that threads share it."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import swarm.blobs
from protocols.transfer import CHUNK_BYTES, ChunkList, blob_ref
from swarm.blobs import BlobStore

BLOB = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"end"
REF = blob_ref(BLOB)


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.folder.rmdir()
    store.keep_only(set())
    assert store.get(REF.root) is None
    assert store.put(BLOB) == REF
    store.remove(REF.root)
    store.folder.rmdir()
    store.begin(ChunkList(REF)).discard()
    assert store.folder.is_dir()


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    odd = [tmp_path / f"{'00' * 32}.part", tmp_path / ("ff" * 32)]
    for path in odd:
        path.mkdir()
    for number in range(20):
        store.put(bytes([number]))
    store.keep_only(set())
    assert sorted(tmp_path.iterdir()) == odd


def test_a_part_that_is_a_folder_is_named_in_the_error(tmp_path: Path) -> None:
    part = tmp_path / f"{REF.root.hex()}.part"
    part.mkdir()
    with pytest.raises(IsADirectoryError) as error:
        BlobStore(tmp_path).begin(ChunkList(REF))
    assert error.value.filename == str(part)


@pytest.mark.parametrize("size", [0, 7, CHUNK_BYTES, 5 * CHUNK_BYTES])
def test_a_part_of_another_size_is_begun_anew(tmp_path: Path, size: int) -> None:
    store, chunks = BlobStore(tmp_path), ChunkList(REF)
    (tmp_path / f"{REF.root.hex()}.part").write_bytes(os.urandom(size))
    chunks.take_hashes(swarm.blobs.chunk_hashes(BLOB))
    part = store.begin(chunks)
    part.resume()
    assert part.have == 0
    for index in range(chunks.count):
        part.keep(index, BLOB[index * CHUNK_BYTES :][:CHUNK_BYTES])
    store.finish(part)
    part.close()
    assert store.get(REF.root) == BLOB


def test_threads_remember_and_forget_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: with a cache that is always full, no thread finds the entry gone that it was about to throw out.
    monkeypatch.setattr(swarm.blobs, "HASH_CACHE_MAX", 1)
    store = BlobStore(tmp_path)
    (tmp_path / "any").touch()
    about = (tmp_path / "any").stat()
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(thread: int) -> None:
        for number in range(3000):
            root = bytes([thread, number % 7]) * 16
            store._remember(root, b"", about)
            store._forget(root)

    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
    finally:
        sys.setswitchinterval(before_s)
    assert len(store._info) <= 1
