"""Sequential mode against the co-located loop: the same numbers, bit for bit, through a swarm of real processes."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.folder import open_run
from protocols.envelopes import unseal
from protocols.ledger import audit
from protocols.manifest import Manifest
from swarm.identity import load_identity
from tests.colocated import Colocated
from tests.terminals import Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

STEPS, BATCH = 8, 4  # a batch of four is generated in calls of one group, so that both sides batch alike
LOCAL = ("--host", "127.0.0.1", "--port", "0")


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("int4", "bfloat16"),
        pytest.param("auto", "bfloat16", marks=pytest.mark.slow),
        pytest.param("raw", "float32", marks=pytest.mark.slow),
    ],
)
def test_sequential_mode_equals_the_colocated_loop_exactly(
    terminals: Terminals, tmp_path: Path, codec: str, dtype: str
) -> None:
    # Goal: pulled rollouts through the swarm are on-policy, and nothing on the way changes a bit, lossy or not.
    # Method: one inference peer, refresh_gap 0; the trainer's losses against those of the loop in this process.
    assert terminals.type("init", "sums").ended_clean() == 0
    run = open_run(tmp_path / "sums")
    values = {"max_steps": str(STEPS), "learning.batch_groups": str(BATCH), "evaluation.problems": "0"}
    values |= {"transfer.codec": f'"{codec}"', "transfer.dtype": f'"{dtype}"'}
    rewrite(run.config_path, values | {"coordination.mode": '"sequential"'})
    door = terminals.type("bootstrap", "sums/run.toml", *LOCAL, "--home", tmp_path / "door")
    invite = printed(door, "swarm join '").split("'")[1]
    trainer = terminals.type("train", "sums/run.toml", "--bootstrap", invite.partition("#")[0], *LOCAL)
    member = terminals.type("join", invite, *LOCAL, "--home", tmp_path / "member")
    assert trainer.ended_clean(120) == 0, trainer.output
    assert member.ended_clean(30) == 0, member.output

    folder = tmp_path / "sums" / "trainer"
    report = audit((folder / "ledger.echo").read_bytes(), run.run)
    assert report.ok, report.problems
    assert report.histogram == {0: report.groups}
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]

    manifest, first_counter = stored(folder / "trainer.sqlite")
    loop = Colocated(manifest, load_identity(tmp_path / "member" / "peer.key")[0].peer_id, first_counter, 1)
    expected = [loop.step() for _ in steps]
    assert [event["skipped"] for event in steps] == [each.skipped for each in expected]
    assert [event["reward"] for event in steps] == [each.reward_mean for each in expected]
    assert [event["loss"] for event in steps] == [each.loss for each in expected]
    assert [event["grad_norm"] for event in steps] == [each.grad_norm for each in expected]
    assert sum(event["loss"] is not None for event in steps) == STEPS


def stored(path: Path) -> tuple[Manifest, int]:
    """The manifest in force, and the first counter that its one producer used."""
    with sqlite3.connect(path) as db:
        (raw,) = db.execute("SELECT value FROM meta WHERE name = 'manifest'").fetchone()
        producers, first = db.execute("SELECT count(DISTINCT producer), min(counter) FROM groups").fetchone()
    assert producers == 1
    return unseal(bytes(raw), Manifest).message, first
