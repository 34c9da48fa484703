"""The weights of a model on disk, looked at without loading them: which files, which tensors, what digest.

Safetensors only: a pickled checkpoint can run code when it is loaded.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_READ_BYTES = 16 * 2**20  # at once; larger reads are no faster


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model: one, or those that an index names. Raises ValueError, in one line."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder / missing[0]} is missing ({len(missing)} of {len(names)} files)")
        return [folder / name for name in names]
    if any(next(folder.glob(pattern), None) for pattern in _PICKLED):
        raise ValueError(f"{folder} has pickled weights only, which can run code: convert them to safetensors")
    raise ValueError(f"{folder} has no {SINGLE}")


def folder_digest(folder: Path) -> bytes:
    """SHA-256 over the stored tensors by sorted name: name, dtype, shape, bytes; 32 bytes.

    How they are spread over files does not matter; a tied matrix that is stored under two names counts twice. 1 s for
    0.5 to 2 GB, if the disk is as fast. Raises ValueError, in one line, for files that are missing or damaged.
    """
    tensors = _tensors(folder)
    digest = hashlib.sha256(b"echo-swarm/2/weights")
    for name in sorted(tensors):
        path, entry, start = tensors[name]
        shape = ",".join(map(str, entry["shape"]))
        digest.update(f"{name}\0{entry['dtype']}\0{shape}\0".encode())
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            _feed(digest, file, end - begin)
    return digest.digest()


def _tensors(folder: Path) -> dict[str, tuple[Path, Mapping[str, Any], int]]:
    """By name: the file, the header's entry (dtype, shape, data_offsets), and where the file's data begin."""
    files = weight_files(folder)
    found: dict[str, tuple[Path, Mapping[str, Any], int]] = {}
    for path in files:
        header, start = _header(path)
        for name, entry in header.items():
            if name in found:
                raise ValueError(f"{path} is damaged: it has {name!r}, as {found[name][0].name} has")
            found[name] = (path, entry, start)
    if files[0].name != SINGLE:
        lost = sorted(set(_weight_map(folder)) - set(found))
        if lost:
            raise ValueError(f"{folder / INDEX} names {lost[0]!r}, which no file has")
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries by name, and where the data begin. The library checks the file first: lengths, offsets, types."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged, fetch it again: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _weight_map(folder: Path) -> dict[str, str]:
    """From a tensor's name to the name of its file, beside the index."""
    path = folder / INDEX
    try:
        found = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, fetch it again: {type(error).__name__}") from error
    names = found.values() if isinstance(found, dict) else ()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{path} is damaged, fetch it again: no map of names to files")
    return dict(found)


def _feed(digest: Any, file: BinaryIO, count: int) -> None:
    buffer = memoryview(bytearray(min(count, _READ_BYTES)))
    while count:
        read = file.readinto(buffer[: min(count, len(buffer))])  # type: ignore[attr-defined]
        if not read:
            raise ValueError(f"{file.name} is damaged, fetch it again: it ends too early")
        digest.update(buffer[:read])
        count -= read
