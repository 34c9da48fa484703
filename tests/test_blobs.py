"""What a blob store does where its folder is not as it left it, and that threads share it."""

import contextlib
import os
import threading
from collections.abc import Iterator
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


class Watched(dict[bytes, swarm.blobs.BlobInfo]):
    """Whoever looks for the oldest entry waits for a second one that does, if none keeps it out."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2, timeout=0.2)

    def __iter__(self) -> Iterator[bytes]:
        keys = list(super().__iter__())
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait()
        return iter(keys)


def test_two_threads_do_not_throw_out_the_same_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.blobs, "HASH_CACHE_MAX", 1)
    store = BlobStore(tmp_path)
    store.put(b"oldest")
    info, store._info = store._info, Watched()
    store._info.update(info)
    with ThreadPoolExecutor(2) as threads:
        refs = list(threads.map(store.put, [b"one", b"other"]))
    assert len(store._info) == 1
    assert store._info.keys() <= {ref.root for ref in refs}
