"""Models of the hub: the cache first, one commit for all, offline, and refusals in one line."""

import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.models.base import ModelFiles
from peers.models.find import check_model, find_model, pinned
from protocols.manifest import ModelSpec
from tests.hub import COMMIT, Hub, serving, write_tiny_model

NAME = "some-lab/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.fixture
def hub(files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(files) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What tried to reach the network while sockets are blocked."""
    tried: list[object] = []

    def blocked(*arguments: object, **_: object) -> None:
        tried.append(arguments[:2])
        raise OSError("sockets are blocked")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)
    return tried


def refused(name: str, revision: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the line
        find_model(name, revision)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_model_is_fetched_once_at_one_commit(
    hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = find_model(NAME)
    assert (first.name, first.revision, first.folder.name) == (NAME, COMMIT, COMMIT)
    assert hub.sent["model.safetensors"] == (first.folder / "model.safetensors").stat().st_size
    assert [record.message.split(":")[0] for record in caplog.records] == [f"model {NAME!r}"] * 2
    assert "fetching 0.1 MB" in caplog.text
    hub.asked.clear()
    for revision in (None, COMMIT):
        again = find_model(NAME, revision)
        assert (again.revision, again.digest, again.tokenizer.digest) == (COMMIT, first.digest, first.tokenizer.digest)
    assert hub.asked == []
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", ""), "no bars"


def test_b106_what_is_cached_needs_no_connection(
    hub: Hub, cache: Path, files: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Goal: with the cache filled or a folder given, no connection is tried, with or without HF_HUB_OFFLINE.
    find_model(NAME, "v1")
    attempts = request.getfixturevalue("attempts")
    for offline in (True, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        for revision in ("v1", COMMIT):
            assert find_model(NAME, revision).revision == COMMIT
        by_path = find_model(str(files))
        assert by_path.revision is None
        assert by_path.digest == find_model(NAME, COMMIT).digest
    assert attempts == []


def test_b106_what_is_missing_is_one_line(cache: Path, attempts: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused(NAME) == f"model {NAME!r} not in cache, offline"
    assert refused(NAME, "v1") == f"model {NAME!r} at revision v1 not in cache, offline"
    assert attempts == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert "is not on this machine, and https://huggingface.co cannot be reached" in refused(NAME)
    assert len(attempts) > 0, "the block works"


def test_a_download_that_was_cut_is_gone_on_with(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = find_model(NAME)
    (whole.folder / "model.safetensors").resolve().unlink()
    (whole.folder / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "not in cache, offline" in refused(NAME)
    assert "has no model.safetensors" in refused(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert find_model(NAME).digest == whole.digest


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, "RepoNotFound"), ["there is no model", "`hf auth login`"]),
        ((404, "RepoNotFound"), ["there is no model", "`hf auth login`"]),
        ((403, "GatedRepo"), ["gated", "accept its terms at http", f"/{NAME}", "`hf auth login`"]),
        ((401, "GatedRepo"), ["gated", "accept its terms at http", f"/{NAME}", "`hf auth login`"]),
        ((403, ""), ["may not be fetched (403)", "`hf auth login`"]),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    hub: Hub, cache: Path, refusal: tuple[int, str], words: list[str]
) -> None:
    hub.refusal = refusal
    line = refused(NAME)
    assert all(word in line for word in words), line


def test_a_revision_that_is_not_there_is_named(hub: Hub, cache: Path) -> None:
    assert f"model {NAME!r} has no revision 'v2'" in refused(NAME, "v2")
    assert "is no name of a model" in refused("no//name")
    assert "has no revisions" in refused("builtin", "main")


def test_weights_that_can_run_code_are_not_fetched(hub: Hub, cache: Path, tmp_path: Path, files: Path) -> None:
    hub.folder = shutil.copytree(files, tmp_path / "pickled")
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    assert "no weights as safetensors" in refused(NAME)
    assert hub.sent == {}


def test_a_model_that_the_disk_cannot_hold_is_not_begun(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    line = refused(NAME)
    assert f"{cache} has room for 1" in line
    assert hub.sent == {}


def with_model(found: ModelFiles, **changes: object) -> ModelSpec:
    import msgspec

    return msgspec.structs.replace(pinned(found), **changes)


def test_b105_other_weights_and_another_tokenizer_are_refused_with_both_digests(
    hub: Hub, cache: Path, files: Path, tmp_path: Path
) -> None:
    ours = find_model(NAME)
    spec = pinned(ours)
    assert spec == ModelSpec(name=NAME, digest=ours.digest, revision=COMMIT, tokenizer=ours.tokenizer.digest)
    check_model(ours, spec)
    check_model(ours, ModelSpec(name=NAME))

    other = shutil.copytree(files, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = find_model(str(other))
    assert theirs.digest == ours.digest
    for changes, what, mine, wanted in (
        ({"digest": bytes(32)}, "weights", ours.digest, bytes(32)),
        ({"tokenizer": theirs.tokenizer.digest}, "tokenizer", ours.tokenizer.digest, theirs.tokenizer.digest),
    ):
        with pytest.raises(ValueError, match=f"the {what} in .* get revision {COMMIT} from the hub") as caught:
            check_model(ours, with_model(ours, **changes))
        assert mine.hex() in str(caught.value)
        assert wanted.hex() in str(caught.value)
        assert "\n" not in str(caught.value)


def test_transformers_says_what_it_always_says_again_afterwards() -> None:
    from transformers.utils import logging as words

    from peers.models.load import quiet_transformers

    before = words.get_verbosity()
    with quiet_transformers():
        assert words.get_verbosity() == logging.ERROR
        assert not words.is_progress_bar_enabled()
    assert words.get_verbosity() == before
    assert words.is_progress_bar_enabled()
