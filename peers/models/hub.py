"""Models of the Hugging Face hub: from the local cache where it has them, else fetched, always at one commit.

name, revision --cache--> snapshot folder, commit            without any connection
               --hub----> what is there? room on the disk? --> snapshot folder, commit
"""

import logging
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.models.weights import weight_files

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0  # a guess: a slow link answers in one

_WANTED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "model*.safetensors")


def hub_model(name: str, revision: str | None) -> tuple[Path, str]:
    """Its folder in the cache, and its commit; no connection is made for what the cache has.

    `revision` is a commit, a tag or a branch; without one, `main` as the cache knows it. Raises ValueError, in one
    line, that says what to do.
    """
    shown = _shown(name, revision)
    folder = _here(name, revision, shown) or _fetch(name, revision, shown)
    return folder, folder.name


def hub_bytes(name: str, revision: str | None) -> int:
    """Bytes that `hub_model` would fetch: 0 for what the cache has. Raises ValueError as it does; fetches nothing."""
    from huggingface_hub import HfApi

    shown = _shown(name, revision)
    if _here(name, revision, shown) is not None:
        return 0
    with _explained(name, revision, shown):
        _require_hub(shown)
        size = _look(name, revision, shown)
        HfApi().auth_check(name)  # of a gated model anybody sees what there is, and only some may fetch it
        return size


def _shown(name: str, revision: str | None) -> str:
    return f"model {name!r}" + (f" at revision {revision}" if revision else "")


def _here(name: str, revision: str | None, shown: str) -> Path | None:
    """The snapshot if the cache has all of it. Raises ValueError for no name, and for what is missing offline."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        folder = _cached(name, revision)
        lack = None if folder is None else _lack(folder)
    except HFValidationError as error:
        raise ValueError(
            f"{name!r} is no name of a model: `builtin`, `smollm2`, one from the hub, or a folder"
        ) from error
    if folder is not None and lack is None:
        return folder
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{shown} not in cache, offline" + (f": {lack}" if lack else ""))
    return None


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _lack(folder: Path) -> str | None:
    """What a snapshot that was not fetched to its end has not."""
    try:
        weight_files(folder)
    except ValueError as error:
        return str(error)
    return None


def _fetch(name: str, revision: str | None, shown: str) -> Path:
    from huggingface_hub import snapshot_download

    with _explained(name, revision, shown):
        _require_hub(shown)
        size = _look(name, revision, shown)
        log.warning("%s: fetching %.1f MB", shown, size / 1e6)  # a warning: it is what a user waits for
        began_s = time.monotonic()
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
        log.warning("%s: fetched in %.0f s", shown, time.monotonic() - began_s)
        return folder


@contextmanager
def _explained(name: str, revision: str | None, shown: str) -> Iterator[None]:
    """What the hub refuses, and what breaks on the way, as a ValueError in one line."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with _quiet():
            yield
    except HfHubHTTPError as error:
        raise ValueError(_refusal(name, revision, shown, error)) from error
    except (OSError, *_transport_errors()) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise ValueError(f"{shown}: the download failed, start again to go on with it: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's bars and its word on each retry: what matters is raised."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level, bars = get_verbosity(), not are_progress_bars_disabled()
    set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(level)
        if bars:
            enable_progress_bars()


def _require_hub(shown: str) -> None:
    """Raises ValueError at once where the hub cannot be reached; its own client would retry for most of a minute."""
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise ValueError(f"{shown} is not on this machine, and {ENDPOINT} cannot be reached") from error


def _look(name: str, revision: str | None, shown: str) -> int:
    """Bytes to fetch at most. Raises ValueError for weights that we do not load, and for too little room."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if not any(file.startswith("model") and file.endswith(".safetensors") for file in sizes):
        raise ValueError(
            f"{shown} has no weights as safetensors, and pickled ones can run code: choose another revision"
        )
    size = sum(sizes[file] for file in filter_repo_objects(sizes, allow_patterns=list(_WANTED)))
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if free < size:
        raise ValueError(f"{shown} needs {size} bytes, and {cache} has room for {free}: free some, or set HF_HOME")
    return size


def _refusal(name: str, revision: str | None, shown: str, error: Any) -> str:
    """What the hub's answer means for the user, in one line."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"{ENDPOINT}/{name}"
    status = error.response.status_code
    match error:
        case GatedRepoError():
            return f"{shown} is gated: accept its terms at {page}, then `hf auth login`"
        case RevisionNotFoundError():
            return f"model {name!r} has no revision {revision or 'main'!r}: see {page}"
        case RepositoryNotFoundError():
            return f"there is no model {name!r} at {ENDPOINT}; if it is private, `hf auth login`"
        case _ if status in (401, 403):
            return f"{shown} may not be fetched ({status}): accept its terms at {page}, then `hf auth login`"
        case _:
            return f"{shown}: the hub answers {status}: try again later"


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the hub's HTTP client raises when a connection breaks. It has been another library with each major version,
    and only one that it has imported can have raised anything."""
    return tuple(sys.modules[library].HTTPError for library in ("httpx", "httpx2") if library in sys.modules)
