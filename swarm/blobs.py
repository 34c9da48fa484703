"""Content-addressed blobs on disk: one file a blob, named by its root, whole or not there.

A blob is served from an open file, so one that is removed meanwhile is still read to its end; a later
request is answered `found: false`, and the asker goes to the head version (case B31).
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from protocols.messages import BlobRef
from protocols.transfer import chunk_hashes, root_of
from swarm.files import remove_leftovers, write_whole

log = logging.getLogger(__name__)

HASH_CACHE_MAX = 64  # hash lists kept in memory: the versions that peers may still ask for


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a source says of a blob before it sends chunks."""

    path: Path
    size: int
    hashes: bytes
    written_ns: int
    """When the file was last written to: afterwards it is checked again."""


class BlobStore:
    """The blobs of one peer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        self._info: dict[bytes, BlobInfo] = {}

    def path(self, root: bytes) -> Path:
        """Where a blob stands, if it is here."""
        return self.folder / root.hex()

    def put(self, blob: bytes) -> BlobRef:
        """Store a blob durably; idempotent. Raises OSError when there is no room."""
        return self.put_verified(blob, chunk_hashes(blob))

    def put_verified(self, blob: bytes, hashes: bytes) -> BlobRef:
        """As `put`, for a blob whose chunks were checked against `hashes` on their way here."""
        ref = BlobRef(root_of(len(blob), hashes), len(blob))
        if self.info(ref.root) is None:  # not there, or damaged
            path = self.path(ref.root)
            write_whole(path, blob)
            self._remember(ref.root, hashes, path.stat())
        return ref

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
            self._info.pop(root, None)
            return None
        return self._remember(root, chunk_hashes(blob), about)

    def remove(self, root: bytes) -> None:
        """Forget a blob. Readers that have it open read on."""
        self._info.pop(root, None)
        self.path(root).unlink(missing_ok=True)

    def keep_only(self, roots: set[bytes]) -> None:
        """Remove every blob that is not named."""
        names = {root.hex() for root in roots}
        for path in self.folder.iterdir():
            if path.name not in names and len(path.name) == 64:
                self.remove(bytes.fromhex(path.name))

    def _remember(self, root: bytes, hashes: bytes, about: os.stat_result) -> BlobInfo:
        while len(self._info) >= HASH_CACHE_MAX:
            del self._info[next(iter(self._info))]
        self._info[root] = info = BlobInfo(self.path(root), about.st_size, hashes, about.st_mtime_ns)
        return info
