"""A peer's key on disk: who may read it, and that one process at a time uses it.

The file is what p2pd reads as its identity (protocols/identity.py). It is 0600 in a folder that only
its owner can write, whatever the umask; a key that others could have read is closed with a warning, a
key that others could have put there is refused. Every problem is one line that names the path.
"""

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.identity import key_file_bytes, key_from_file_bytes, peer_id_of, public_bytes

log = logging.getLogger(__name__)

KEY_FILE = "peer.key"  # in a peer's home
KEY_FILE_BYTES_MAX = 4096  # an identity is 68 bytes; more than a page is some other file
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Identity:
    """An Ed25519 key and the file it lives in. Its key never appears in text and cannot be pickled or copied."""

    __slots__ = ("key", "path", "peer_id")

    def __init__(self, key: Ed25519PrivateKey, path: Path) -> None:
        self.key = key
        self.path = path
        self.peer_id = peer_id_of(public_bytes(key))

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an identity stays in its process: it cannot be pickled or copied")


def load_identity(path: Path) -> tuple[Identity, bool]:
    """The identity at `path` and whether it was created just now. Raises ValueError, one line with the path."""
    path = Path(path).absolute()
    try:
        private_folder(path.parent)
        if path.is_symlink():
            raise ValueError(f"{path}: the identity file is a symbolic link; give the path of the file itself")
        created = not path.exists()
        if created:
            _write_new(path, key_file_bytes(Ed25519PrivateKey.generate()))
        return Identity(key_from_file_bytes(_read_private(path)), path), created
    except OSError as error:
        raise ValueError(f"{path}: cannot use this as the identity file: {error.strerror}") from error
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("/") else f"{path}: {text}") from error


def private_folder(folder: Path) -> None:
    """Create `folder` with 0700, or check that nobody else can put files there. Raises OSError, ValueError."""
    for parent in reversed([folder, *folder.parents]):
        with suppress(FileExistsError):
            os.mkdir(parent, 0o700)  # the umask can only take bits away
    about = folder.stat()
    if not stat.S_ISDIR(about.st_mode):
        raise ValueError(f"{folder}: not a folder")
    if about.st_mode & _OTHERS_WRITE:
        if about.st_uid != os.geteuid() or about.st_mode & stat.S_ISVTX:
            raise ValueError(f"{folder}: others can write to this folder; keep keys in a folder of your own")
        os.chmod(folder, 0o700)
        log.warning("%s: others could write to this folder; its mode is now 0700", folder)


def _write_new(path: Path, content: bytes) -> None:
    """Temporary name, fsync, rename: the file is there with all its bytes, or it is not there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600, O_EXCL
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_private(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a named pipe must not block us
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a regular file")
        if about.st_mode & _OTHERS:
            if about.st_uid != os.geteuid():
                raise ValueError(f"open to others (mode {about.st_mode & 0o777:04o}) and owned by another user")
            os.fchmod(file.fileno(), 0o600)
            log.warning("%s: others could read this key (mode %04o); it is now 0600", path, about.st_mode & 0o777)
        return file.read(KEY_FILE_BYTES_MAX)


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold `<home>/lock` for as long as the block runs; the kernel lets go of it when the process ends.

    Raises ValueError when another process holds it, or when the folder cannot be used.
    """
    home = Path(home).absolute()
    try:
        private_folder(home)
        handle = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ValueError(f"home {home} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "(unknown)"
            raise ValueError(f"home {home} is in use by process {holder}; stop it or give another --home") from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
