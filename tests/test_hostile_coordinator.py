"""A coordinator that is eligible and hostile, among real processes: it slows a run down, and that is all it can do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap.folder import open_run
from protocols.ledger import audit
from swarm.identity import load_identity
from tests.processes import wait_until
from tests.terminals import Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

STEPS, MAX_LAG = 6, 2
LOCAL = ("--host", "127.0.0.1", "--port", "0")

# Claims at once, the highest term that the clock allows, grants nothing, orders a version that does not exist, and
# another mode with each beat.
HOSTILE = """
import itertools, time
from protocols import coordination, election
from protocols.coordination import CoordinatorView, Grant

begin = election.Election.__init__
def at_the_ceiling(self, *arguments, **named):
    begin(self, *arguments, **named)
    self.term = int(time.time()) - election.TERM_EPOCH_S - 2
election.Election.__init__ = at_the_ceiling
election.Election._claim_at_s = lambda self: 0.0
modes = itertools.cycle(("sequential", "async"))
CoordinatorView.mode = property(lambda self: next(modes))
CoordinatorView.min_version = property(lambda self: 2**32 - 1)
CoordinatorView.heard = lambda self, peer_id, beat, now_s: Grant(0, ())
"""


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


def events(home: Path, kind: str) -> list[dict[str, Any]]:
    lines = (home / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_hostile_coordinator_slows_a_run_at_most(terminals: Terminals, tmp_path: Path) -> None:
    # Goal: no order of an elected peer stops a run, breaks the bound or loses a group.
    # Method: the bootstrap peer is hostile and elected before anybody generates; mode `auto`, so that flips count.
    assert terminals.type("init", "sums").ended_clean() == 0
    run = open_run(tmp_path / "sums")
    values = {"max_steps": str(STEPS), "max_lag": str(MAX_LAG), "learning.batch_groups": "8"}
    rewrite(run.config_path, values | {"evaluation.problems": "0", "coordination.mode": '"auto"'})
    door = terminals.type("bootstrap", "sums/run.toml", *LOCAL, "--home", tmp_path / "door", before=HOSTILE)
    invite = printed(door, "swarm join '").split("'")[1]
    trainer = terminals.type("train", "sums/run.toml", "--bootstrap", invite.partition("#")[0], *LOCAL)
    folder = tmp_path / "sums" / "trainer"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and events(folder, "leader"), 60.0, trainer)
    member = terminals.type("join", invite, *LOCAL, "--home", tmp_path / "member")
    assert trainer.ended_clean(240) == 0, trainer.output
    assert member.ended_clean(30) == 0, member.output

    hostile = load_identity(tmp_path / "door" / "peer.key")[0].peer_id
    for home in (folder, tmp_path / "member"):
        obeyed = events(home, "leader")[0]
        assert obeyed["coordinator"] == hostile
        assert obeyed["term"] > 1_000_000
    report = audit((folder / "ledger.echo").read_bytes(), run.run)
    assert report.ok, report.problems
    assert report.head == STEPS
    assert report.max_lag <= MAX_LAG
    final = events(folder, "final")[-1]["counts"]
    became = sum(final[key] for key in ("trained", "no_signal", "stale_in_queue", "unused", "queued"))
    assert final["accepted"] == became
