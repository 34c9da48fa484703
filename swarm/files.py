"""Files that are whole or not there: temporary name, fsync, rename (DESIGN section 2)."""

import itertools
import os
from pathlib import Path

TEMPORARY = ".tmp-"
_numbers = itertools.count()


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that a crash leaves the old one or the new one. Raises OSError; removes its own leftovers."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{next(_numbers)}")  # threads may write the same file at once
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what a crash left half-written. Called at start, before anything is read."""
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)
