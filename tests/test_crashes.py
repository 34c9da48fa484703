"""Real processes that are killed: the chain goes on, nothing is trained twice, nothing accepted is lost."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocols.ledger import VersionEntry, audit, read_entries
from tests.processes import Swarm, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.close()


def rows(path: Path, query: str) -> list[tuple]:
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def states(folder: Path) -> dict[str, int]:
    return dict(rows(folder / "trainer" / "trainer.sqlite", "SELECT state, count(*) FROM groups GROUP BY state"))


def chain_of(path: Path) -> list[bytes]:
    return [row[0] for row in rows(path, "SELECT envelope FROM chain ORDER BY version")]


def test_b73_the_trainer_is_killed_at_every_awkward_moment_and_the_chain_continues(swarm: Swarm) -> None:
    # Goal: whatever is half done when the trainer dies, no version has two contents and no group is trained twice.
    # Also B26 a) and B32: no peer hears of a version that cannot be had, and half a blob is never taken for one.
    # Method: one run of 12 steps; the trainer kills itself at six points, then comes back on the same home. Deltas are
    # lossy, so that what is carried from version to version must survive as well.
    swarm.start_bootstrap()
    peer = swarm.start("inference")
    run = ("--steps", "12", "--codec", "int4")
    crashes = ("after-step", "after-checkpoint", "while-writing", "after-blobs", "before-ledger", "before-announce")
    for step, crash in enumerate(crashes, 2):
        trainer = swarm.start("trainer", *run, "--crash", f"{crash}:{step}")
        assert trainer.wait() == -9, trainer.lines()[-20:]
        leftovers = [path.name for path in (trainer.home / "blobs").glob(".tmp-*")]
        assert len(leftovers) == (crash == "while-writing"), "the crash came elsewhere"
    trainer = swarm.start("trainer", *run)
    assert trainer.wait() == 0, trainer.lines()[-20:]
    assert peer.wait(30) == 0
    assert list((trainer.home / "blobs").glob(".tmp-*")) == []
    assert [each["code"] for each in peer.events("warning") if "adapter" in each["code"]] == []
    # Loading goes on beside generation, so the run may end before the last versions are loaded; these came after the
    # last crash, which made version 7.
    assert peer.events("adapter")[-1]["version"] > 7

    home = swarm.folder / "trainer"
    raw = (home / "ledger.echo").read_bytes()
    report = audit(raw)
    assert report.problems == []
    assert (report.head, report.versions, report.ended) == (12, 13, True)
    assert report.groups == 12 * 4

    consumed = [
        group.digest for entry in read_entries(raw) if isinstance(entry, VersionEntry) for group in entry.consumed
    ]
    assert len(consumed) == len(set(consumed))
    counts = states(swarm.folder)
    assert counts.pop("trained") == 48
    assert set(counts) <= {"unused", "stale", "no_signal"}, "an accepted group has no outcome"

    database = next((swarm.folder / "inference").glob("*.sqlite"))
    committed = chain_of(home / "trainer.sqlite")
    assert chain_of(database) == committed, "the peer saw another chain than the trainer committed"
    assert rows(database, "SELECT * FROM evidence") == []


def test_an_inference_peer_is_killed_and_none_of_its_accepted_groups_is_lost(swarm: Swarm) -> None:
    swarm.start_bootstrap()
    victim = swarm.start("victim")
    other = swarm.start("other")
    trainer = swarm.start("trainer", "--steps", "30")
    victim.wait_for("ready")
    database = swarm.folder / "trainer" / "trainer.sqlite"
    trainer.wait_for("ready")
    key = swarm.folder / "victim" / "metrics.jsonl"
    wait_until(lambda: '"event":"generated"' in key.read_text(), 60, victim)
    victim.kill()
    assert victim.wait() == -9
    before = len(rows(database, "SELECT 1 FROM groups"))
    assert trainer.wait() == 0, trainer.lines()[-20:]
    assert other.wait(30) == 0
    assert len(rows(database, "SELECT 1 FROM groups")) > before, "nobody went on"
    counts = states(swarm.folder)
    assert counts.pop("trained") == 30 * 4
    assert set(counts) <= {"unused", "stale", "no_signal"}
    assert audit((swarm.folder / "trainer" / "ledger.echo").read_bytes()).ok


def test_b45_a_trainer_with_an_empty_home_does_not_start_the_run_again(swarm: Swarm) -> None:
    swarm.start_bootstrap()
    peer = swarm.start("inference")
    trainer = swarm.start("trainer", "--steps", "1000")
    database = next(iter([swarm.folder / "trainer" / "trainer.sqlite"]))
    trainer.wait_for("ready")
    wait_until(lambda: len(chain_of(database)) > 3, 60, trainer)
    trainer.kill()
    trainer.wait()
    key = swarm.folder / "trainer" / "peer.key"
    empty = swarm.folder / "empty"
    empty.mkdir(mode=0o700)
    (empty / "peer.key").write_bytes(key.read_bytes())
    (empty / "peer.key").chmod(0o600)
    again = swarm.start("trainer", "--home", "empty")
    assert again.wait() == 2
    line = again.lines()[-1]
    assert "already has version" in line
    assert "swarm init" in line
    assert peer.process.poll() is None, "the peer must not be disturbed"
