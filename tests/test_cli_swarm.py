"""The real `swarm` command from end to end: what people type, mistype, interrupt, kill and are attacked with.

The first half needs only a door, a bootstrap peer that serves some runs; the second half shares one running swarm;
the last part is `swarm sim`. Every command must leave no process behind.
"""

import asyncio
import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from bootstrap.events import Event, read_events
from bootstrap.folder import RunFolder, open_run
from protocols.directory import DirectoryRules, RecordKey, RecordKind
from protocols.envelopes import seal
from protocols.faults import PeerFault, TransportFault
from protocols.manifest import EnvironmentSpec, Manifest, ModelSpec
from protocols.messages import (
    Announcement,
    BlobOffer,
    CapacityAd,
    ChunkHead,
    Heartbeat,
    PushRollouts,
    RolloutBatch,
    encode,
)
from swarm.directory import Directory
from swarm.frames import BLOB_PROTOCOL, frame
from swarm.host import Host, HostConfig
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig, now_ms
from tests.hosts import free_port
from tests.hub import Hub, serving, write_tiny_model
from tests.nodes import LISTEN
from tests.processes import ROOT, wait_until
from tests.samples import STRANGER as STRANGER_KEY
from tests.samples import STRANGER_ID, envelope_of
from tests.terminals import COMMAND, Terminal, Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

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
                await follower.neighbourhood.put_manifest()
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


def at(port: object, peer_id: str = STRANGER_ID) -> str:
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


def test_a_port_in_use(terminals: Terminals, door: Door) -> None:
    other = door.runs["plain"].run
    taken = terminals.type("bootstrap", other, "--host", "127.0.0.1", "--port", door.port, "--home", "taken")
    assert failed(taken, 1).startswith("port in use: ")


@pytest.mark.parametrize("home", ["file", "/proc/nobody", "/dev/null/home"])
def test_a_home_that_cannot_be_written(terminals: Terminals, home: str) -> None:
    # Tests may run as root, for whom no mode is an obstacle.
    path = Path(home) if home.startswith("/") else terminals.folder / home
    if not path.is_absolute() or home == "file":
        path.write_text("not a folder")
    line = failed(terminals.type("join", f"{at(1)}#{'sums-' + 'a' * 16}", "--home", path), 2)
    assert str(path) in line


REFUSED = {
    "code": ("of_the_owner:make", "--allow-code"),
    "weights": ("model 'builtin'", "the weights in", "00000000", "bfeb6e39"),
    "model": ("nobody/has-this",),
    "task": ("no_such_task",),
    "folder": ("model-with-code",),
}


@pytest.fixture(scope="module")
def refusals(terminals: Terminals, door: Door) -> dict[str, Terminal]:
    """Members of these runs, started together: each spends seconds on imports."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(terminals.folder / "hf"), "PYTHONPATH": str(terminals.folder)}
    return {
        run: terminals.type("join", door.invite(run), *LOCAL, "--home", f"refuses-{run}", **offline) for run in REFUSED
    }


@pytest.mark.parametrize("run", REFUSED)
def test_a_run_that_this_machine_must_refuse_b75_b98(
    terminals: Terminals, refusals: dict[str, Terminal], run: str
) -> None:
    line = failed(refusals[run], 2)
    assert all(word in line for word in REFUSED[run]), line
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
    for who, cwd, wrap in (("emil", None, ()), ("emil", elsewhere, ()), ("otto", None, ON_A_TTY)):
        peer = terminals.type("join", invite, *LOCAL, who=who, cwd=cwd, wrap=wrap)
        assert peer.ended_clean() == 1, peer.output
        said.append(peer.lines()[0])
    form = re.compile(r"(?P<new>new )?identity (?P<id>12D3KooW\w+), key (?P<key>/\S+/peer\.key)")
    loud = re.fullmatch(r"\x1b\[1m(.*)\x1b\[0m", said[2].strip())
    assert loud is not None, repr(said[2])
    first, again, other = map(form.fullmatch, (said[0], said[1], loud[1]))
    assert None not in (first, again, other), said
    assert [bool(each["new"]) for each in (first, again, other)] == [True, False, True]
    assert first["id"] == again["id"] != other["id"]
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
    with serving(model) as hub, serving(model) as trainers_hub:
        environment = hub_environment(trainers_hub, tmp_path / "trainer-cache")
        trainer = terminals.type("train", run_file, "--bootstrap", door.address, *LOCAL, **environment)
        invite = f"{at(free_port())},{at(free_port())}#{door.runs['hub'].run}"
        dead = terminals.type("join", invite, *LOCAL, "--home", home, **hub_environment(hub, cache))
        assert dead.ended_clean() == 1
        assert hub.asked == []

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


# ---------------------------------------------------------------------- five terminals, and one running swarm

THIRD_JOIN_S = 15.0  # from the start of its process, imports included, to an accepted group, on an idle machine
ENDLESS = {"max_steps": "100000", "learning.batch_groups": "8", "evaluation.problems": "0"}


@dataclass
class Running:
    """Bootstrap peer, trainer and two members, each started by hand in a terminal of its own."""

    terminals: Terminals
    run: RunFolder
    bootstrap: Terminal
    trainer: Terminal
    members: list[Terminal]
    join_line: str
    """As the bootstrap peer printed it. The first member typed it."""
    dead: list[str]
    """Addresses that the second member tries besides."""

    @property
    def address(self) -> str:
        return self.join_line.split("'")[1].partition("#")[0]

    def home_of(self, who: str, role: str = "inference") -> Path:
        return self.terminals.folder / who / ".local" / "share" / "echo-swarm" / role

    def peer_id(self, home: Path) -> str:
        return load_identity(home / "peer.key")[0].peer_id

    def groups_of(self, home: Path) -> int:
        """Groups of a peer that the trainer has accepted and written down."""
        query = "SELECT count(*) FROM groups WHERE producer = ?"
        with closing(sqlite3.connect(f"file:{self.run.trainer_home / 'trainer.sqlite'}?mode=ro", uri=True)) as db:
            return int(db.execute(query, [self.peer_id(home)]).fetchone()[0])

    def step(self) -> int:
        return max((event["step"] for event in events(self.run.trainer_home, "step")), default=0)

    def goes_on(self, steps: int = 3) -> None:
        """Training makes progress from here."""
        before = self.step()
        wait_until(lambda: self.step() >= before + steps, 60, self.trainer)

    def warnings(self, home: Path, since_s: float) -> list[tuple[str, str]]:
        return [(event["code"], event["text"]) for event in events(home, "warning", since_s)]


@pytest.fixture(scope="module")
def running(terminals: Terminals) -> Running:
    assert terminals.type("init", "sums").ended_clean() == 0
    run = open_run(terminals.folder / "sums")
    rewrite(run.config_path, ENDLESS)
    bootstrap = terminals.type("bootstrap", "sums/run.toml", "--port", free_port())
    train_line = printed(bootstrap, "swarm train ")
    join_line = printed(bootstrap, "swarm join '", under="on this machine:")
    trainer = terminals.type_line(train_line)
    dead = [at(free_port()), at(free_port())]
    address, _, run_id = join_line.split("'")[1].partition("#")
    members = [
        terminals.type_line(join_line, who="berta"),
        terminals.type("join", f"{','.join([*dead, address])}#{run_id}", *LOCAL, who="carl"),
    ]
    swarm = Running(terminals, run, bootstrap, trainer, members, join_line, dead)
    for member in members:
        printed(member, "joined ")
    swarm.goes_on()
    return swarm


def test_a_third_member_contributes_seconds_after_its_start(running: Running) -> None:
    load = os.getloadavg()[0]
    third = running.terminals.type_line(running.join_line, who="dora")
    home = running.home_of("dora")
    wait_until(lambda: (home / "peer.key").exists(), 60, third)
    wait_until(lambda: running.groups_of(home), 120, third)
    took_s = time.time() - third.started_s
    in_s = events(home, "ready")[0]["t"] - third.started_s
    load = max(load, os.getloadavg()[0])
    print(f"third member: in the swarm after {in_s:.1f} s, first accepted group after {took_s:.1f} s, load {load:.1f}")
    # Trainer, two members and the third are four busy processes; what else runs here takes its share of two cores.
    assert took_s < THIRD_JOIN_S * max(1.0, (load + 1) / 4 * 2 / (os.cpu_count() or 1))
    running.members.append(third)


@pytest.fixture(scope="module")
def in_the_background(running: Running) -> Running:
    """From here on the swarm leaves the processors to the commands under test."""
    for terminal in (running.trainer, *running.members):
        for process in terminal.left_behind():
            process.nice(10)
    return running


def test_b01_two_dead_addresses_and_one_live_one(running: Running) -> None:
    warned = [text for code, text in running.warnings(running.home_of("carl"), 0) if code == "bootstrap unreachable"]
    assert len(warned) == 2, "each is said once"
    for address in running.dead:
        assert any(text.startswith(f"{address}: refused") for text in warned), warned
    assert running.groups_of(running.home_of("carl"))


def test_b07_a_copied_key_is_refused_and_a_killed_peer_comes_back(
    in_the_background: Running, terminals: Terminals
) -> None:
    swarm = in_the_background
    home = swarm.home_of("berta")
    copy = terminals.folder / "second-machine"
    copy_key(home, copy)
    begun_s = time.time()
    twin = terminals.type("join", f"{swarm.address}#{swarm.run.run}", *LOCAL, "--home", copy)
    line = failed(twin, 1)
    refused_s = time.time() - begun_s
    print(f"the copy was refused after {refused_s:.1f} s")
    assert line.startswith("identity taken: ")
    assert str(copy / "peer.key") in line
    assert "--home" in twin.errors()[-1]
    berta = swarm.members[0]
    assert berta.process.poll() is None

    berta.kill()
    assert berta.wait() == -signal.SIGKILL
    again = terminals.type_line(swarm.join_line, who="berta")
    printed(again, "joined ")
    groups = swarm.groups_of(home)
    wait_until(lambda: swarm.groups_of(home) > groups, 60, again)
    assert not [code for code, _ in swarm.warnings(home, again.started_s) if "identity" in code or code == "refused"]
    swarm.members[0] = again


def test_b18_the_bootstrap_peer_is_away_for_a_while(in_the_background: Running, terminals: Terminals) -> None:
    swarm = in_the_background
    homes = [swarm.run.trainer_home, swarm.home_of("berta"), swarm.home_of("carl")]
    gone_s = time.time()
    swarm.bootstrap.kill()
    swarm.bootstrap.wait()

    def all_say(code: str, since_s: float) -> bool:
        return all(any(said == code for said, _ in swarm.warnings(home, since_s)) for home in homes)

    wait_until(lambda: all_say("bootstrap unreachable", gone_s), 30, swarm.trainer)
    swarm.goes_on()
    port = swarm.address.split("/")[4]
    swarm.bootstrap = terminals.type("bootstrap", "sums/run.toml", "--port", port)
    assert printed(swarm.bootstrap, "swarm join '", under="on this machine:") == swarm.join_line
    back_s = time.time()
    wait_until(lambda: all_say("bootstrap reachable", gone_s), 30, swarm.trainer)
    print(f"everybody was linked again {time.time() - back_s:.1f} s after the bootstrap peer was back")
    swarm.goes_on()


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self.sentinel)!r}, 'w').close()",)


def bombs(sentinel: Path) -> list[bytes]:
    """A pickle and a PyTorch checkpoint that run code when they are loaded carelessly."""
    import torch

    checkpoint = io.BytesIO()
    torch.save({"lora_A": Bomb(sentinel)}, checkpoint)
    return [pickle.dumps(Bomb(sentinel)), checkpoint.getvalue()]


class Mallory:
    """A member that answers every request and every download with one of the bombs, and counts who asked.

    A liar is soon asked last, so each of the four ways to serve a bomb gets a Mallory of its own.
    """

    def __init__(self, host: Host, payloads: list[bytes], way: int) -> None:
        self.host = host
        self.payloads = payloads
        self.way = way
        self.requests = self.downloads = 0

    async def answer(self, _: bytes, __: str) -> bytes:
        self.requests += 1
        return self.payloads[self.requests % len(self.payloads)]

    async def upload(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: str) -> None:
        (size,) = struct.unpack("<I", await reader.readexactly(4))
        await reader.readexactly(size)
        payload = self.payloads[self.way % len(self.payloads)]
        if self.way < 2:
            offer = BlobOffer(True, hashlib.sha256(payload).digest(), b"\x01")
            writer.write(frame(offer) + frame(ChunkHead(0)) + payload)
        else:
            writer.write(struct.pack("<I", len(payload)) + payload)
        self.downloads += 1

    async def attack(self, run: str, peers: list[str]) -> None:
        """Each bomb bare and under a valid signature, at every door of every peer."""
        key = STRANGER_KEY
        directory = await Directory.start(self.host, [DirectoryRules(run)], peers)
        try:
            for payload in self.payloads:
                for peer in peers:
                    await self._call(peer, payload)
                    for envelope in (payload, envelope_of(RolloutBatch, payload, key)):
                        await self._call(peer, encode(PushRollouts(envelope)))
                    for value in (payload, msgspec.msgpack.encode(payload), envelope_of(CapacityAd, payload, key)):
                        assert not await self._store(directory, RecordKey(run, RecordKind.PEERS), peer, value)
            beat = Heartbeat(run=run, session=bytes(16), role="inference", version=10**6)
            async with asyncio.timeout(60.0):
                while not (self.downloads and self.requests):
                    for peer in peers:
                        await self._call(peer, encode(beat))
                    await asyncio.sleep(0.2)
            for _ in range(5):  # the first ones may be lost while GossipSub builds its mesh; eight make us an outlaw
                for payload in self.payloads:
                    await self.host.publish(f"echo/1/{run}/policy", payload)
                    await self.host.publish(f"echo/1/{run}/policy", envelope_of(Announcement, payload, key))
                await asyncio.sleep(0.3)
        finally:
            await directory.close()

    async def _call(self, peer: str, raw: bytes) -> None:
        with suppress(PeerFault, TransportFault):  # refused, and in the end disconnected
            await self.host.call(peer, raw, 5.0)

    async def _store(self, directory: Directory, key: RecordKey, peer: str, value: bytes) -> bool:
        protocol = directory._node.protocol
        where = [DHTID.generate(key.text)]
        answers = await protocol.call_store(
            PeerID.from_base58(peer), where, [value], time.time() + 50, subkeys=[self.host.peer_id]
        )
        return bool(answers and answers[0])


def test_b98_nothing_that_a_peer_sends_is_unpickled(in_the_background: Running, tmp_path: Path) -> None:
    swarm, sentinel = in_the_background, tmp_path / "sentinel"
    payloads = bombs(sentinel)
    pickle.loads(payloads[0])  # noqa: S301  the bomb works
    assert sentinel.exists()
    sentinel.unlink()
    homes = [swarm.run.trainer_home, swarm.home_of("berta"), swarm.home_of("carl")]
    addresses = [swarm.address, *(events(home, "ready")[-1]["addresses"][0] for home in homes)]

    async def attack(way: int) -> Mallory:
        host = await Host.start(load_identity(tmp_path / f"mallory{way}" / "peer.key")[0], HostConfig())
        mallory = Mallory(host, payloads, way)
        try:
            await host.serve(mallory.answer)
            await host.serve_stream(BLOB_PROTOCOL, mallory.upload)
            peers = [await host.connect(address) for address in addresses]
            await mallory.attack(swarm.run.run, peers)
        finally:
            await host.close()
        return mallory

    begun_s = time.time()
    for way in range(4):
        mallory = asyncio.run(attack(way))
        print(f"way {way}: answered {mallory.requests} requests and {mallory.downloads} downloads with bombs")
    assert not sentinel.exists(), "a peer's bytes were executed"
    swarm.goes_on()
    assert all(peer.process.poll() is None for peer in (swarm.bootstrap, swarm.trainer, *swarm.members))
    doors = {event["door"].split()[0] for home in homes for event in events(home, "refused", begun_s)}
    assert {"request", "dht", "gossip", "blob"} <= doors


def test_the_run_ends_and_its_ledger_is_audited(in_the_background: Running, terminals: Terminals) -> None:
    # The trainer is stopped, its run.toml is given an end that is near, and it is started again.
    swarm = in_the_background
    swarm.trainer.kill(signal.SIGINT)
    assert swarm.trainer.ended_clean() == 130, swarm.trainer.output[-2000:]
    rewrite(swarm.run.config_path, {"max_steps": str(swarm.step() + 10)})
    trainer = terminals.type("train", "sums/run.toml", "--bootstrap", swarm.address)
    assert trainer.ended_clean(120) == 0, trainer.output[-2000:]
    assert "audit      ok" in trainer.lines()
    assert [member.ended_clean(30) for member in swarm.members] == [0] * len(swarm.members)
    swarm.bootstrap.kill(signal.SIGINT)
    assert swarm.bootstrap.ended_clean() == 130

    ledger = swarm.run.trainer_home / "ledger.echo"
    good = terminals.type("audit", ledger, "--run", swarm.run.run)
    assert good.ended_clean() == 0
    assert good.lines()[-1].startswith("ok: ")
    assert "the run has ended" in good.output
    raw = bytearray(ledger.read_bytes())
    raw[len(raw) // 2] ^= 1
    bent = terminals.folder / "bent.echo"
    bent.write_bytes(raw)
    bad = terminals.type("audit", bent)
    assert bad.ended_clean() == 1
    assert re.search(r"^problem: entry \d+: ", bad.output, re.MULTILINE), bad.output


# ---------------------------------------------------------------------- simulations


def sim_home(terminals: Terminals, name: str) -> Path:
    return terminals.folder / f"sim-{name}"


def trained(home: Path, steps: int) -> bool:
    return len(events(home / "trainer", "step")) >= steps


def test_a_peer_is_killed_during_a_simulation_and_nothing_is_lost(terminals: Terminals, tmp_path: Path) -> None:
    home, report_file = sim_home(terminals, "victim"), tmp_path / "report.json"
    sim = terminals.type("sim", "--peers", "2", "--steps", "12", "--home", home, "--report", report_file)
    victim = home / "peer-1"
    wait_until(lambda: events(victim, "generated") and trained(home, 2), 120, sim)
    (process,) = [each for each in sim.left_behind() if is_peer(each, victim)]
    process.kill()
    assert sim.ended_clean(120) == 0, sim.output
    report = json.loads(report_file.read_bytes())
    assert report["audit"]["ok"] is True
    assert (report["steps"], report["rollouts"]["lost"]) == (12, 0)
    assert report["warnings"] == ["peer-1 was killed by signal 9"]
    assert "warning: peer-1 was killed by signal 9" in sim.output


def is_peer(process: psutil.Process, home: Path) -> bool:
    """The peer itself, and not the p2pd it started."""
    words = process.cmdline()
    return "--home" in words and words[words.index("--home") + 1] == str(home)


def test_ctrl_c_in_the_middle_of_a_simulation(terminals: Terminals) -> None:
    home = sim_home(terminals, "interrupted")
    sim = terminals.type("sim", "--peers", "1", "--steps", "1000", "--home", home)
    wait_until(lambda: trained(home, 2), 120, sim)
    begun_s = time.monotonic()
    sim.kill(signal.SIGINT)
    assert sim.ended_clean(30) == 130, sim.output
    print(f"everybody was gone {time.monotonic() - begun_s:.1f} s after Ctrl-C")
    assert "Traceback" not in sim.output
    assert events(home / "trainer", "final"), "the trainer was not given the time to end well"


@pytest.mark.parametrize(("signals", "code"), [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGKILL,), -9)])
def test_a_simulation_that_ends_at_once_takes_everybody_along(
    terminals: Terminals, signals: tuple[int, ...], code: int
) -> None:
    home = sim_home(terminals, f"ends-with-{code}")
    sim = terminals.type("sim", "--peers", "2", "--steps", "1000", "--home", home)
    wait_until(lambda: events(home / "bootstrap", "ready") and len(sim.left_behind()) >= 6, 60, sim)
    for number in signals:
        sim.kill(number)
        if number == signal.SIGINT:
            wait_until(lambda: sim.process.poll() is not None or "stopping" in sim.output, 10)
    begun_s = time.monotonic()
    assert sim.wait(3) == code, sim.output
    wait_until(lambda: not sim.left_behind(), 10)
    print(f"everybody was gone after {time.monotonic() - begun_s:.1f} s")


# ---------------------------------------------------------------------- the live view


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_live_view_on_a_terminal(terminals: Terminals, tmp_path: Path) -> None:
    # A real terminal of 100 columns, in colour and UTF-8; what a person sees is what tmux would draw.
    tmux = ("tmux", "-S", str(tmp_path / "tmux"))
    line = shlex.join([*COMMAND, "sim", "--steps", "6", "--peers", "1"])
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"} | {
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
    shell = f'{line}; echo "exit code $?"; exec sleep 600'
    subprocess.run([*tmux, "-u", "new-session", "-d", "-x", "100", "-y", "40", shell], env=environment, check=True)

    def seen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    try:
        live = wait_until(lambda: (shown := seen()) and re.search(r"step +[1-5]/6", shown) and shown, 120)
        ended = wait_until(lambda: "exit code" in (shown := seen()) and shown, 120)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    print(live, ended, sep="\n" + "=" * 100 + "\n")
    rows = [row.split() for row in live.splitlines()]
    assert ["peer", "role", "version", "tokens/s", "state"] in rows
    assert [row[1] for row in rows if row[1:2] and row[1] in ("trainer", "inference")] == ["trainer", "inference"]
    assert "━" in live
    assert "reward " in live
    for heading in ("reward ", "held-out ", "steps      6 of 6", "groups ", "lag ", "bytes ", "audit      ok"):
        assert any(line.startswith(heading) for line in ended.splitlines()), heading
    assert "exit code 0" in ended
    for shown in (live, ended):
        assert not re.search(r"^!", shown, re.MULTILINE), "a run that goes well warns of nothing"
        assert not re.search(r"\x1b|\[\d*[A-Za-z]\b|Traceback|Warning|�", shown)
