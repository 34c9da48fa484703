"""Checkpoints: one file a step, whole or not there, named in the database by its hash.

A step counts once its transaction is committed; the file is written before. So a file without a row is a
leftover of a crash and is removed, and a row's file can be checked before anything is loaded from it.
"""

import hashlib
import logging
from pathlib import Path

from swarm.files import remove_leftovers, write_whole

log = logging.getLogger(__name__)

KEPT = 3  # the last one, and two to fall back to when it is damaged


class Checkpoints:
    """The checkpoint folder of a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def write(self, step: int, state: bytes) -> tuple[str, bytes]:
        """Durably write the state after `step` steps: file name and SHA-256. Raises OSError when there is no room."""
        name = f"step-{step:010d}.safetensors"
        write_whole(self.folder / name, state)
        return name, hashlib.sha256(state).digest()

    def read(self, name: str, digest: bytes) -> bytes | None:
        """A checkpoint's state; None when the file is missing or damaged."""
        try:
            state = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return state if hashlib.sha256(state).digest() == digest else None

    def keep_only(self, names: set[str]) -> None:
        """Remove every other checkpoint, those of steps that were never committed among them."""
        for path in self.folder.glob("step-*.safetensors"):
            if path.name not in names:
                path.unlink(missing_ok=True)
