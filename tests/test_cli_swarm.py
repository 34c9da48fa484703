"""The real `swarm` command from end to end: what people type, mistype, interrupt, kill and are attacked with.

The first half needs only a door, a bootstrap peer that serves some runs; the second half shares one running swarm;
the last part is `swarm sim`. Every command must leave no process behind.
"""

import asyncio
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootstrap.events import Event, read_events
from bootstrap.folder import RunFolder, open_run
from protocols.envelopes import seal
from protocols.faults import TransportFault
from protocols.identity import peer_id_of
from protocols.manifest import EnvironmentSpec, Manifest, ModelSpec
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig, now_ms
from tests.hosts import free_port
from tests.hub import Hub, serving, write_tiny_model
from tests.nodes import LISTEN
from tests.processes import wait_until
from tests.terminals import Terminal, Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

STRANGER = peer_id_of(bytes(range(32)))
LOCAL = ("--host", "127.0.0.1", "--port", "0")
FAST_S = 30.0  # a command that fails at once, on a loaded machine


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path_factory.mktemp("swarm"))
    yield terminals
    terminals.close()


def events(home: Path, kind: str, since_s: float = 0.0) -> list[Event]:
    """What a peer wrote into its metrics."""
    found = read_events(home / "metrics.jsonl")
    return [event for event in found if event["event"] == kind and event["t"] >= since_s]


# ---------------------------------------------------------------------- a door, and manifests behind it


@dataclass
class Door:
    """A bootstrap peer and the runs that it serves."""

    peer: Terminal
    address: str
    runs: Mapping[str, RunFolder]

    @property
    def port(self) -> str:
        return self.address.split("/")[4]

    def invite(self, run: str) -> str:
        return f"{self.address}#{self.runs[run].run}"


MAKES_A_FILE = "from pathlib import Path\nPath({sentinel!r}).write_text('executed')\n"
CHANGES = {
    "plain": {},
    "code": {"environment": EnvironmentSpec(name="of_the_owner:make")},
    "weights": {"model": ModelSpec(name="builtin", digest=bytes(32))},
    "model": {"model": ModelSpec(name="nobody/has-this", digest=bytes(32))},
    "task": {"environment": EnvironmentSpec(name="no_such_task")},
    "folder": {},
    "typo": {},
    "hub": {},
}


@pytest.fixture(scope="module")
def door(terminals: Terminals) -> Door:
    """`plain` has no manifest; the others' manifests name what a member must refuse."""
    folder = terminals.folder
    (folder / "of_the_owner.py").write_text(MAKES_A_FILE.format(sentinel=str(folder / "sentinel-code")))
    for name in CHANGES:
        assert terminals.type("init", name).ended_clean() == 0
    runs = {name: open_run(folder / name) for name in CHANGES}
    files = [run.config_path for run in runs.values()]
    peer = terminals.type("bootstrap", *files, *LOCAL, "--home", folder / "door")
    invite = printed(peer, "swarm join '").split("'")[1]
    address = invite.partition("#")[0]
    model = folder / "model-with-code"
    model_with_code(model, folder / "sentinel-folder")
    changes = CHANGES | {"folder": {"model": ModelSpec(name=str(model), digest=bytes(32))}}
    asyncio.run(publish_manifests(folder / "owner", address, [(run, changes[name]) for name, run in runs.items()]))
    return Door(peer, address, runs)


async def publish_manifests(home: Path, address: str, runs: list[tuple[RunFolder, dict]]) -> None:
    """What `swarm train` does first, without a trainer behind it."""
    identity, _ = load_identity(home / "peer.key")
    ids = [run.run for run, _ in runs]
    node = await Node.start(identity, home, NodeConfig(role="trainer", bootstrap=(address,), listen=LISTEN), ids)
    try:
        for run, changes in runs:
            if changes:
                follower = node.followers[run.run]
                fields = {"run": run.run, "revision": 0, "trainers": run.config.trainers, "issued_ms": now_ms()}
                follower.rules.learn(seal(run.owner.key, Manifest(**{**fields, **changes})))
                await follower.put_manifest()
    finally:
        await node.close()


def model_with_code(folder: Path, sentinel: Path) -> None:
    """A model folder as a peer's manifest might name it: `auto_map` points to Python beside the weights."""
    folder.mkdir()
    code = MAKES_A_FILE.format(sentinel=str(sentinel))
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(code)
    config = {
        "model_type": "evil",
        "architectures": ["EvilModel"],
        "auto_map": {
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilModel",
            "AutoTokenizer": ["tokenization_evil.EvilTokenizer", None],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_evil.E", None]}})
    )


# ---------------------------------------------------------------------- mistakes


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield int(listening.getsockname()[1])


def at(port: object, peer_id: str = STRANGER) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}"


def failed(terminal: Terminal, code: int) -> str:
    """The one line that a command failed with, and its next step where the network is at fault."""
    assert terminal.ended_clean() == code, terminal.output
    assert "Traceback" not in terminal.output
    first, *rest = terminal.errors()
    assert all(line.startswith("  next: ") for line in rest), terminal.output
    assert bool(rest) == (code == 1), terminal.output
    return first.removeprefix("swarm: ")


def test_b01_every_dead_address_has_its_own_reason(terminals: Terminals, door: Door, silent_port: int) -> None:
    run = door.runs["plain"].run
    where = [at(free_port()), at(silent_port), at(door.port)]
    peer = terminals.type("join", f"{','.join(where)}#{run}", *LOCAL, "--home", "b01")
    assert peer.ended_clean() == 1, peer.output
    head, *reasons, step = peer.errors()
    assert head == "swarm: none of the addresses works:"
    assert [reason.split(": ")[0].strip() for reason in reasons] == where
    assert [reason.split(": ")[1] for reason in reasons] == ["refused", "timeout", "peer id mismatch"]
    assert step.startswith("  next: ")
    assert "Traceback" not in peer.output


def test_a_port_in_use_and_a_door_that_serves_no_such_run(terminals: Terminals, door: Door) -> None:
    other = door.runs["plain"].run
    taken = terminals.type("bootstrap", other, "--host", "127.0.0.1", "--port", door.port, "--home", "taken")
    unknown = terminals.type("join", f"{door.address}#{'sums-' + 'a' * 16}", *LOCAL, "--home", "unknown")
    assert failed(taken, 1).startswith("port in use: ")
    assert failed(unknown, 1).startswith("unknown run: ")


@pytest.mark.parametrize("home", ["file", "/proc/nobody", "/dev/null/home"])
def test_a_home_that_cannot_be_written(terminals: Terminals, home: str) -> None:
    # Tests may run as root, for whom no mode is an obstacle.
    path = Path(home) if home.startswith("/") else terminals.folder / home
    if not path.is_absolute() or home == "file":
        path.write_text("not a folder")
    line = failed(terminals.type("join", f"{at(1)}#{'sums-' + 'a' * 16}", "--home", path), 2)
    assert str(path) in line


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("code", ("of_the_owner:make", "--allow-code")),
        ("weights", ("model builtin", "weights are", "00000000")),
        ("model", ("nobody/has-this",)),
        ("task", ("no_such_task",)),
        ("folder", ("model-with-code",)),
    ],
)
def test_a_run_that_this_machine_must_refuse_b75_b98(
    terminals: Terminals, door: Door, run: str, words: tuple[str, ...]
) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(terminals.folder / "hf"), "PYTHONPATH": str(terminals.folder)}
    peer = terminals.type("join", door.invite(run), *LOCAL, "--home", f"refuses-{run}", **offline)
    line = failed(peer, 2)
    assert all(word in line for word in words), line
    assert not list(terminals.folder.glob("sentinel*")), "code of the run's owner was executed"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("learning.batch_groups", "0", "$.learning.batch_groups"),
        ("max_lag", '"four"', "$.max_lag"),
        ("environment.name", '"no_such_task"', "no_such_task"),
        ("model.name", '"./nowhere"', "./nowhere"),
    ],
)
def test_a_run_file_that_cannot_be_trained(
    terminals: Terminals, door: Door, tmp_path: Path, field: str, value: str, said: str
) -> None:
    run_file = tmp_path / "typo" / "run.toml"
    shutil.copytree(door.runs["typo"].root, run_file.parent)
    rewrite(run_file, {field: value})
    line = failed(terminals.type("train", run_file, "--bootstrap", door.address, *LOCAL), 2)
    assert said in line
    assert line.count("\n") == 0


# ---------------------------------------------------------------------- identities, and the eight causes

ON_A_TTY = (sys.executable, "-c", "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))")
RUN_ID = "sums-" + "a" * 16


def test_b08_one_identity_a_person_and_a_new_one_is_loud(terminals: Terminals) -> None:
    invite = f"{at(free_port())}#{RUN_ID}"
    elsewhere = terminals.folder / "elsewhere"
    elsewhere.mkdir()
    said = []
    for who, cwd, wrap in (("emil", None, ()), ("emil", elsewhere, ()), ("otto", None, ON_A_TTY), ("otto", None, ())):
        peer = terminals.type("join", invite, *LOCAL, who=who, cwd=cwd, wrap=wrap)
        assert peer.ended_clean() == 1, peer.output
        said.append(peer.lines()[0])
    form = re.compile(r"(?P<new>new )?identity (?P<id>12D3KooW\w+), key (?P<key>/\S+/peer\.key)")
    loud = re.fullmatch(r"\x1b\[1m(.*)\x1b\[0m", said[2].strip())
    assert loud is not None, repr(said[2])
    first, again, other, quiet = map(form.fullmatch, (said[0], said[1], loud[1], said[3]))
    assert None not in (first, again, other, quiet), said
    assert [bool(each["new"]) for each in (first, again, other, quiet)] == [True, False, True, False]
    assert first["id"] == again["id"] != other["id"] == quiet["id"]
    assert first["key"] == again["key"]
    assert Path(first["key"]).is_relative_to(terminals.folder / "emil")


def copy_key(source: Path, home: Path) -> None:
    """What a user does who moves to a second machine and forgets the first."""
    home.mkdir(mode=0o700)
    (home / "peer.key").touch(0o600)
    (home / "peer.key").write_bytes((source / "peer.key").read_bytes())


async def get_banned(home: Path, address: str, run: str) -> None:
    """Gossip nonsense under the key of this home until the door has had enough."""
    identity, _ = load_identity(home / "peer.key")
    config = NodeConfig(role="inference", bootstrap=(address,), listen=LISTEN)
    node = await Node.start(identity, home, config, [run])
    (door,) = node.bootstraps.values()
    try:
        async with asyncio.timeout(20.0):
            while True:
                with suppress(TransportFault):  # it disconnects us
                    await node.host.publish(f"echo/1/{run}/policy", b"nonsense")
                    await node.host.connect(address)
                    await node.hello(door, run)
                    continue
                with suppress(TransportFault):
                    await node.host.connect(address)
                try:
                    await node.hello(door, run)
                except TransportFault as fault:
                    if fault.code == "banned":
                        return
    finally:
        await node.close()


def test_b104_eight_causes_have_eight_texts(terminals: Terminals, door: Door, silent_port: int) -> None:
    folder, run = terminals.folder, door.runs["plain"].run
    first = terminals.type("bootstrap", run, "--link", door.address, *LOCAL, "--home", "twin")
    printed(first, "on this machine:")
    copy_key(folder / "twin", folder / "copy")
    (folder / "outlaw").mkdir(mode=0o700)
    asyncio.run(get_banned(folder / "outlaw", door.address, run))
    later = "import time\nreal = time.time\ntime.time = lambda: real() + 60"
    newer = "import protocols\nprotocols.PROTOCOL = 'echo-swarm/9'"
    forced = {  # cause: (address, run, home, Python that runs first)
        "refused": (at(free_port()), run, "refused", ""),
        "timeout": (at(silent_port), run, "timeout", ""),
        "peer id mismatch": (at(door.port), run, "mismatch", ""),
        "clock": (door.address, run, "clock", later),
        "identity taken": (door.address, run, "copy", ""),
        "protocol mismatch": (door.address, run, "newer", newer),
        "unknown run": (door.address, RUN_ID, "unknown", ""),
        "banned": (door.address, run, "outlaw", ""),
    }
    begun = {
        cause: terminals.type("join", f"{address}#{run}", *LOCAL, "--home", home, before=before)
        for cause, (address, run, home, before) in forced.items()
    }
    lines = {cause: failed(peer, 1) for cause, peer in begun.items()}
    assert {cause: line.partition(":")[0] for cause, line in lines.items()} == {cause: cause for cause in forced}
    steps = {peer.errors()[-1] for peer in begun.values()}
    assert len(steps) == len(forced), "each cause has its own next step"
    assert str(folder / "copy" / "peer.key") in lines["identity taken"]
    assert "--home" in begun["identity taken"].errors()[-1]
    assert first.process.poll() is None, "the first of the twins goes on"


# ---------------------------------------------------------------------- models


def hub_environment(hub: Hub, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}


def test_b17_a_model_is_fetched_once_and_not_before_the_swarm_is_reached(
    terminals: Terminals, door: Door, tmp_path: Path
) -> None:
    # Goal: a failed start costs no download, and a second good start costs none either.
    # Method: a counting hub with a tiny model; a dead door; a trainer and the same peer twice, all with caches of
    # their own.
    model, home, cache = tmp_path / "model", tmp_path / "peer", tmp_path / "peer-cache"
    write_tiny_model(model)
    run_file = door.runs["hub"].config_path
    rewrite(run_file, {"model.name": '"anna/tiny"', "learning.batch_groups": "1", "evaluation.problems": "0"})
    with serving(model) as hub:
        invite = f"{at(free_port())},{at(free_port())}#{door.runs['hub'].run}"
        dead = terminals.type("join", invite, *LOCAL, "--home", home, **hub_environment(hub, cache))
        assert dead.ended_clean() == 1
        assert hub.asked == []

        environment = hub_environment(hub, tmp_path / "trainer-cache")
        trainer = terminals.type("train", run_file, "--bootstrap", door.address, *LOCAL, **environment)
        printed(trainer, "on this machine")
        for downloads in (True, False):
            hub.asked.clear()
            hub.sent.clear()
            peer = terminals.type("join", door.invite("hub"), *LOCAL, "--home", home, **hub_environment(hub, cache))
            printed(peer, "joined ")
            wait_until(lambda peer=peer: events(home, "generated", peer.started_s), 60, peer)
            assert ("model.safetensors" in hub.sent) == downloads
            assert bool(hub.asked) == downloads, hub.asked
            peer.kill(signal.SIGINT)
            assert peer.ended_clean() == 130
        trainer.kill(signal.SIGINT)
        assert trainer.ended_clean() == 130
