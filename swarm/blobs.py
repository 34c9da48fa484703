"""Content-addressed blobs on disk: one file a blob, named by its root, whole or not there.

    <root>.part --chunks at their places, each verified before it is written--> fsync, rename --> <root>

A part survives its process: its chunks are checked again and the rest is fetched. Files that somebody reads or
writes are not removed; a later call of `keep_only` finds them idle.
"""

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocols.faults import PeerFault
from protocols.messages import BlobRef
from protocols.transfer import CHUNK_BYTES, ChunkList, chunk_hashes, root_of
from swarm.files import remove_leftovers, sync_folder, write_whole

log = logging.getLogger(__name__)

HASH_CACHE_MAX = 64  # hash lists kept in memory: the versions that peers may still ask for
PART = ".part"


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a source says of a blob before it sends chunks."""

    path: Path
    size: int
    hashes: bytes
    written_ns: int
    """When the file was last written to: afterwards it is checked again."""


class Part:
    """A blob on its way here. Blocking; all raise OSError."""

    def __init__(self, path: Path, chunks: ChunkList) -> None:
        """Takes the room for the whole blob at once: a disk that is too full says so before anything is fetched."""
        self.path = path
        self.chunks = chunks
        self.have = 0
        """Chunks that are here and verified."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._resumes = os.fstat(self._descriptor).st_size == chunks.ref.size
            if chunks.ref.size and hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(self._descriptor, 0, chunks.ref.size)
            os.truncate(self._descriptor, chunks.ref.size)
        except OSError as error:
            self.discard()
            raise OSError(error.errno, error.strerror, str(path)) from error

    def resume(self) -> None:
        """Find out what an earlier process left here. Needs the hash list."""
        if not self._resumes:
            return
        for index in range(self.chunks.count):
            try:
                self.chunks.check(index, self.read(index))
            except PeerFault:
                continue
            self.have |= 1 << index

    def keep(self, index: int, data: bytes) -> None:
        """Write one chunk that is what its hash says; PeerFault otherwise."""
        self.chunks.check(index, data)
        try:
            os.pwrite(self._descriptor, data, index * CHUNK_BYTES)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def read(self, index: int) -> bytes:
        """The bytes at a chunk's place."""
        return os.pread(self._descriptor, self.chunks.size(index), index * CHUNK_BYTES)

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Put it away for later. Closing again changes nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def discard(self) -> None:
        """Give its room back."""
        self.close()
        self.path.unlink(missing_ok=True)


class BlobStore:
    """The blobs of one peer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        self._info: dict[bytes, BlobInfo] = {}
        self._info_lock = threading.Lock()
        """Whoever writes to `_info` holds it: they are on several threads."""
        self._in_use: Counter[bytes] = Counter()

    def path(self, root: bytes) -> Path:
        """Where a blob stands, if it is here."""
        return self.folder / root.hex()

    def put(self, blob: bytes) -> BlobRef:
        """Store a blob durably; idempotent. Raises OSError when there is no room."""
        hashes = chunk_hashes(blob)
        ref = BlobRef(root_of(len(blob), hashes), len(blob))
        if self.info(ref.root) is None:  # not there, or damaged
            path = self.path(ref.root)
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            write_whole(path, blob)
            self._remember(ref.root, hashes, path.stat())
        return ref

    def begin(self, chunks: ChunkList) -> Part:
        """Begin to receive a blob, or go on. Raises OSError, with the path, when there is no room for all of it."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        return Part(self.path(chunks.ref.root).with_suffix(PART), chunks)

    def finish(self, part: Part) -> None:
        """The part is whole: from now on it is a blob. Raises OSError."""
        ref, hashes = part.chunks.ref, part.chunks.hashes
        assert hashes is not None
        part.sync()
        path = self.path(ref.root)
        part.path.replace(path)
        sync_folder(self.folder)
        self._remember(ref.root, hashes, path.stat())

    def get(self, root: bytes) -> bytes | None:
        """A blob's bytes, checked against its name; None when it is not here or damaged (then it is removed)."""
        path = self.path(root)
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            return None
        if root_of(len(blob), chunk_hashes(blob)) != root:
            log.warning("blob %s is damaged on disk, removed", root.hex()[:12])
            self.remove(root)
            return None
        return blob

    def info(self, root: bytes) -> BlobInfo | None:
        """Size and hash list of a blob that is here and whole."""
        known = self._info.get(root)
        try:
            about = self.path(root).stat()
            if known is not None and (known.size, known.written_ns) == (about.st_size, about.st_mtime_ns):
                return known
        except FileNotFoundError:
            about = None
        blob = self.get(root) if about is not None else None
        if blob is None or about is None:
            self._forget(root)
            return None
        return self._remember(root, chunk_hashes(blob), about)

    def remove(self, root: bytes) -> None:
        """Forget a blob. Whoever has it open reads on."""
        self._forget(root)
        self.path(root).unlink(missing_ok=True)

    @contextmanager
    def in_use(self, root: bytes) -> Iterator[None]:
        """`keep_only` leaves this blob, whole or in part, alone for as long as the block runs."""
        self._in_use[root] += 1
        try:
            yield
        finally:
            self._in_use[root] -= 1
            if not self._in_use[root]:
                del self._in_use[root]

    def keep_only(self, roots: set[bytes]) -> None:
        """Remove every blob that is not named and not in use, and what is left of downloads of such.

        What cannot be removed stays, and is logged. Raises OSError when the folder cannot be read.
        """
        kept = {root.hex() for root in roots} | {root.hex() for root in list(self._in_use)}
        for path in self.folder.iterdir() if self.folder.exists() else ():
            name = path.name.removesuffix(PART)
            if name in kept or not _is_root(name):
                continue
            self._forget(bytes.fromhex(name))
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.info("cannot remove %s: %s", path, error.strerror)

    def _remember(self, root: bytes, hashes: bytes, about: os.stat_result) -> BlobInfo:
        info = BlobInfo(self.path(root), about.st_size, hashes, about.st_mtime_ns)
        with self._info_lock:
            while len(self._info) >= HASH_CACHE_MAX:
                del self._info[next(iter(self._info))]
            self._info[root] = info
        return info

    def _forget(self, root: bytes) -> None:
        with self._info_lock:
            self._info.pop(root, None)


def read_chunk(path: Path, size: int, index: int) -> bytes:
    """One chunk of a whole blob. Raises OSError, FileNotFoundError when it was removed."""
    with path.open("rb") as file:
        file.seek(index * CHUNK_BYTES)
        data = file.read(CHUNK_BYTES)
    if len(data) != min(CHUNK_BYTES, size - index * CHUNK_BYTES):
        raise OSError(errno.EIO, "the file was cut short meanwhile", str(path))
    return data


def _is_root(name: str) -> bool:
    return len(name) == 64 and not set(name) - set("0123456789abcdef")
