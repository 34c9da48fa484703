"""Two machines, as network namespaces joined by a cable: the line that one prints works on the other (case B05)."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.folder import open_run
from tests.namespaces import Machine, network
from tests.terminals import Terminals, printed, rewrite

pytestmark = pytest.mark.e2e


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with network() as net:
        yield net.machine("a"), net.machine("b")


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


def test_b05_the_printed_line_works_on_another_machine(machines: tuple[Machine, Machine], terminals: Terminals) -> None:
    here, there = machines
    assert terminals.type("init", "sums").ended_clean() == 0
    run = open_run(terminals.folder / "sums")
    rewrite(run.config_path, {"max_steps": "3", "learning.batch_groups": "4", "evaluation.problems": "0"})
    door = terminals.type("bootstrap", "sums/run.toml", wrap=here.inside)
    join_line = printed(door, "swarm join '", under="join from another machine:")
    train_line = printed(door, "swarm train ", under="the trainer, on this machine:")
    assert f"/ip4/{here.address}/tcp/31415/" in join_line
    member = terminals.type_line(join_line, who="berta", wrap=there.inside)
    trainer = terminals.type_line(train_line, wrap=here.inside)
    assert trainer.ended_clean(120) == 0, trainer.output
    assert member.ended_clean(30) == 0, member.output
    assert re.search(r"done at v\d+: \d+ accepted", member.output), member.output
    assert "audit      ok" in trainer.lines()


def test_b05_a_peer_on_loopback_says_so_and_prints_no_line_for_others(
    machines: tuple[Machine, Machine], terminals: Terminals
) -> None:
    here, there = machines
    run = "sums-" + "a" * 16
    door = terminals.type("bootstrap", run, "--host", "127.0.0.1", wrap=here.inside)
    line = printed(door, "swarm join '", under="on this machine:")
    said = [text.strip() for text in door.lines()]
    assert "local only: other machines cannot join; pass --host 0.0.0.0 or --announce" in said
    assert "join from another machine:" not in said
    assert [text for text in said if text.startswith("swarm join")] == [line]
    assert "/ip4/127.0.0.1/" in line
    stranger = terminals.type_line(line, who="berta", wrap=there.inside)
    assert stranger.ended_clean() == 1
    assert stranger.errors()[0].startswith("swarm: refused: ")
