"""Key files: who may read them, whatever was there before (case B100); one process a home (case B07)."""

import copy
import logging
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocols.identity import key_from_file_bytes
from swarm.identity import load_identity, lock_home


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_b100_new_key_is_private_whatever_the_umask(tmp_path: Path, open_umask: None) -> None:
    path = tmp_path / "a" / "b" / "peer.key"
    identity, created = load_identity(path)
    assert created
    assert [mode(each) for each in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]
    assert os.listdir(path.parent) == ["peer.key"], "no temporary file stays"
    again, created = load_identity(path)
    assert not created
    assert again.peer_id == identity.peer_id
    assert identity.peer_id.startswith("12D3KooW")


@pytest.mark.parametrize("loose", [0o644, 0o640, 0o660, 0o777])
def test_b100_loose_key_of_ours_is_closed_with_a_warning(tmp_path: Path, loose: int, caplog) -> None:
    path = tmp_path / "peer.key"
    identity, _ = load_identity(path)
    path.chmod(loose)
    with caplog.at_level(logging.WARNING):
        assert load_identity(path)[0].peer_id == identity.peer_id
    assert mode(path) == 0o600
    assert str(path) in caplog.text


def test_b100_loose_key_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peer.key"
    load_identity(path)
    path.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"peer\.key.*owned by another user"):
        load_identity(path)
    assert mode(path) == 0o644


def test_b100_folder_that_others_can_write_is_closed(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o777)
    load_identity(folder / "peer.key")
    assert mode(folder) == 0o700
    assert str(folder) in caplog.text


def test_b100_shared_folders_are_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)  # like /tmp: closing it would break everybody else
    with pytest.raises(ValueError, match=r"shared: others can write"):
        load_identity(folder / "peer.key")
    assert mode(folder) == 0o1777
    folder.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"shared: others can write"):
        load_identity(folder / "peer.key")


def test_b100_symbolic_link_is_refused(tmp_path: Path) -> None:
    load_identity(tmp_path / "real.key")
    (tmp_path / "link.key").symlink_to(tmp_path / "real.key")
    (tmp_path / "dangling.key").symlink_to(tmp_path / "nowhere")
    for name in ("link.key", "dangling.key"):
        with pytest.raises(ValueError, match=rf"{name}.*symbolic link"):
            load_identity(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_b100_place_that_cannot_be_written_is_one_line_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (Path("/proc/echo-swarm/peer.key"), tmp_path / "file" / "peer.key"):
        with pytest.raises(ValueError, match=str(path.parent)) as caught:
            load_identity(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"junk", bytes(68), bytes(100_000)])
def test_damaged_key_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=rf"{path}: not an Ed25519 identity"):
        load_identity(path)
    assert path.read_bytes() == content, "a person may still rescue it"


def test_key_whose_halves_differ_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    load_identity(path)
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged"):
        load_identity(path)


def test_special_files_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    for path in (tmp_path / "pipe.key", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            load_identity(path)


def test_b100_key_never_leaves_in_text_or_pickles(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    identity, _ = load_identity(path)
    seed = path.read_bytes()[4:36]
    for text in (repr(identity), str(identity), f"{identity}", repr([identity])):
        assert text.strip("[]") == f"Identity({identity.peer_id})"
        assert seed.hex() not in text
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            leak(identity)
    assert key_from_file_bytes(path.read_bytes()).private_bytes_raw() == seed


def test_b07_second_process_on_one_home_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from swarm.identity import lock_home\n"
        "with lock_home(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match=rf"home {tmp_path} is in use by process {holder.pid}"),
            lock_home(tmp_path),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with lock_home(tmp_path):  # the kernel released it with the process: no stale lock file to remove by hand
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_lock_is_released_and_reported_for_bad_homes(tmp_path: Path) -> None:
    with lock_home(tmp_path / "new"), pytest.raises(ValueError, match="in use"), lock_home(tmp_path / "new"):
        pass
    with lock_home(tmp_path / "new"):
        pass
    with pytest.raises(ValueError, match=r"home /proc/echo-swarm cannot be used"), lock_home(Path("/proc/echo-swarm")):
        pass
