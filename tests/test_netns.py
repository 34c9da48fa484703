"""Two machines, as network namespaces joined by a cable: the line that one prints works on the other (case B05)."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootstrap.folder import open_run
from tests.terminals import Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

ADDRESSES = ("10.77.31.1", "10.77.31.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """A network namespace with an address of its own; it shares nothing with this machine but the disk."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command that runs there."""
        return ("ip", "netns", "exec", self.name)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if shutil.which("ip") is None:
        pytest.skip("`ip` (iproute2) is not installed")
    tag = f"{os.getpid() % 10**6:06d}"
    first, second = (Machine(f"echo{end}{tag}", address) for end, address in zip("ab", ADDRESSES, strict=True))
    try:
        ip("netns", "add", first.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        ip("netns", "add", second.name)
        ip("link", "add", f"va{tag}", "netns", first.name, "type", "veth", "peer", f"vb{tag}", "netns", second.name)
        for machine, link in ((first, f"va{tag}"), (second, f"vb{tag}")):
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", link)
            ip("-n", machine.name, "link", "set", link, "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in (first, second):
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


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
