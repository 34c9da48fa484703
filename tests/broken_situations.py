"""A volunteer's ten broken situations: how each comes about, and what `swarm doctor` and `swarm join` must say of it.

    python -m tests.broken_situations      # what both really print, also when all is well, into docs/doctor.md

Everything is real but the hub, which is one of our own on loopback, and the clock of the process, which is set where
Python reads it: a port that is taken, a disk that is full, a manifest that names other weights.
"""

import asyncio
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.envelopes import seal
from protocols.identity import public_bytes, run_id_of
from protocols.manifest import Manifest, ModelSpec
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig, now_ms
from tests.disks import fill_up, small_disk
from tests.hosts import free_port
from tests.hub import Hub, serving
from tests.nodes import LISTEN
from tests.processes import ROOT, wait_until
from tests.samples import STRANGER_ID
from tests.terminals import Terminals, printed

LOCAL = ("--host", "127.0.0.1", "--port", "0")
DISK_BYTES = 64 * 1024
MODELS = {
    "builtin": ModelSpec(),
    "absent": ModelSpec(name="nobody/has-this"),
    "gated": ModelSpec(name="somebody/has-terms"),
    "other": ModelSpec(name="builtin", digest=bytes(32)),
}
"""By name of the run."""


@dataclass
class Stage:
    """What the situations play on."""

    folder: Path
    runs: Mapping[str, str]
    """Run ids, by the names of MODELS."""
    door: str
    """Address of a bootstrap peer that serves all of them."""
    hub: Hub
    """Knows no model."""
    gated_hub: Hub
    disk: Path | None
    """A full one; None where this machine lets us mount none."""
    silent_port: int
    """Takes connections and never says a word."""
    homes: int = 0

    def home(self) -> list[str]:
        self.homes += 1
        return ["--home", str(self.folder / f"home-{self.homes}")]

    def invite(self, run: str = "builtin") -> str:
        return f"{self.door}#{self.runs[run]}"

    def at(self, port: int) -> str:
        return f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER_ID}"


Words = Callable[[Stage], list[str]]


@dataclass(frozen=True)
class Situation:
    """One way for a start to go wrong."""

    name: str
    how: str
    """For readers of the page."""
    words: Words
    """Behind `swarm doctor` and `swarm join`, but for home and port."""
    check: str
    """The doctor's line that must tell."""
    doctor: tuple[str, ...]
    """What it must hold."""
    join: tuple[str, ...]
    """What the one line of join must hold."""
    code: int
    """Exit code of join."""
    environment: Callable[[Stage], Mapping[str, str]] = field(default=lambda stage: {"HF_HUB_OFFLINE": "1"})
    clock_s: float = 0.0
    """How far this machine's clock is ahead."""
    local: tuple[str, ...] = LOCAL
    home: Words = Stage.home


def _online(hub: Hub) -> Mapping[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}


SITUATIONS = (
    Situation(
        "no model",
        "The run's model is a name that the hub does not know.",
        lambda stage: [stage.invite("absent")],
        "model",
        ("nobody/has-this", "there is no model"),
        ("nobody/has-this", "there is no model"),
        2,
        environment=lambda stage: _online(stage.hub),
    ),
    Situation(
        "no space",
        "The disk that holds this peer's folder is full.",
        lambda stage: [stage.invite()],
        "disk",
        ("0 bytes free", "make room there", "--home"),
        ("No space left on device",),
        2,
        home=lambda stage: ["--home", str(stage.disk / "home")] if stage.disk is not None else [],
    ),
    Situation(
        "wrong digest",
        "The weights on this machine are not those that the trainer uses.",
        lambda stage: [stage.invite("other")],
        "model",
        ("builtin", "have digest", "00000000", "get a copy of the trainer's files"),
        ("builtin", "have digest", "00000000", "get a copy of the trainer's files"),
        2,
    ),
    Situation(
        "clock off by 5 s",
        "This machine's clock is 5 s ahead of the swarm's.",
        lambda stage: [stage.invite()],
        "clock",
        ("5.0 s ahead of", "the limit is 3 s", "switch on time synchronisation"),
        ("clock: ", "more than 3 s apart", "+5.0 s off"),
        1,
        clock_s=5.0,
    ),
    Situation(
        "port blocked",
        "The port that this peer was told to listen on is taken.",
        lambda stage: [stage.invite()],
        "ports",
        ("is taken", "choose another with --port"),
        ("port in use: ",),
        1,
        local=(),
    ),
    Situation(
        "no engine",
        "An engine was asked for that is not installed.",
        lambda stage: [stage.invite(), "--engine", "vllm"],
        "engine",
        ("vllm is not installed", "pip install", "--engine transformers"),
        ("vllm is not installed", "pip install", "--engine transformers"),
        2,
    ),
    Situation(
        "GPU asked for but absent",
        "A GPU was asked for on a machine that has none.",
        lambda stage: [stage.invite(), "--device", "cuda"],
        "engine",
        ("--device cuda", "no such card is visible", "--device cpu"),
        ("--device cuda", "no such card is visible", "--device cpu"),
        2,
    ),
    Situation(
        "gated model",
        "The hub gives the run's model only to who has accepted its terms.",
        lambda stage: [stage.invite("gated")],
        "model",
        ("somebody/has-terms", "is gated", "accept its terms at"),
        ("somebody/has-terms", "is gated", "accept its terms at"),
        2,
        environment=lambda stage: _online(stage.gated_hub),
    ),
    Situation(
        "offline",
        "`HF_HUB_OFFLINE=1` is set, and the run's model is not in the cache.",
        lambda stage: [stage.invite("absent")],
        "model",
        ("nobody/has-this", "not in cache, offline"),
        ("nobody/has-this", "not in cache, offline"),
        2,
    ),
    Situation(
        "swarm unreachable",
        "Nothing listens at one address of the invitation, and a firewall swallows what is sent to the other.",
        lambda stage: [f"{stage.at(free_port())},{stage.at(stage.silent_port)}#{stage.runs['builtin']}"],
        "swarm",
        ("refused (nothing listens at this address)", "timeout (no answer in time)"),
        ("refused", "timeout"),
        1,
    ),
)


def options_of(situation: Situation, stage: Stage) -> list[str]:
    """All words behind the command."""
    port = () if situation.local else ("--host", "127.0.0.1", "--port", stage.door.split("/")[4])
    return [*situation.words(stage), *situation.local, *port, *situation.home(stage)]


def verify(situation: Situation, doctor: tuple[int, str], join: tuple[int, str]) -> None:
    """That both commands told what is wrong, each by its exit code and all that it printed."""
    code, text = doctor
    *printed_lines, _ = text.splitlines()
    lines = {line.split()[1]: line for line in printed_lines}
    line = lines.pop(situation.check)
    assert code == 1, text
    assert line.startswith("problem"), line
    assert all(word in line for word in situation.doctor), line
    assert "; next: " in line
    assert [other for other in lines.values() if other.startswith("problem")] == [], "one problem, one line"

    code, text = join
    assert code == situation.code, text
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith(("swarm: ", "  "))]
    said, steps = "\n".join(errors), sum(line.startswith("  next: ") for line in errors)
    assert all(word in said for word in situation.join), said
    assert steps == (0 if situation.code == 2 else 1), "one line, and for the network's faults the next step"


# ---------------------------------------------------------------------- the stage


@contextmanager
def staged(folder: Path, terminals: Terminals) -> Iterator[Stage]:
    """A bootstrap peer, manifests behind it, hubs, a full disk, a silent port."""
    owners = {name: Ed25519PrivateKey.generate() for name in MODELS}
    runs = {name: run_id_of(name, public_bytes(owner)) for name, owner in owners.items()}
    peer = terminals.type("bootstrap", *runs.values(), *LOCAL, "--home", folder / "door")
    door = printed(peer, "swarm join '").split("'")[1].partition("#")[0]
    asyncio.run(_publish(folder / "trainer", door, owners))
    with ExitStack() as stack:
        hub, gated_hub = (stack.enter_context(serving(None)) for _ in range(2))
        gated_hub.refusal = (403, "GatedRepo")
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        disk = None
        with suppress(pytest.skip.Exception):
            disk = stack.enter_context(small_disk(folder / "disk", DISK_BYTES))
            fill_up(disk / "full")
        yield Stage(folder, runs, door, hub, gated_hub, disk, listening.getsockname()[1])


async def _publish(home: Path, address: str, owners: Mapping[str, Ed25519PrivateKey]) -> None:
    """What `swarm train` does first, without a trainer behind it."""
    identity, _ = load_identity(home / "peer.key")
    config = NodeConfig(role="trainer", bootstrap=(address,), listen=LISTEN)
    runs = {run_id_of(name, public_bytes(owner)): owner for name, owner in owners.items()}
    node = await Node.start(identity, home, config, list(runs))
    try:
        for (run, owner), model in zip(runs.items(), MODELS.values(), strict=True):
            manifest = Manifest(run=run, revision=0, trainers=(node.peer_id,), issued_ms=now_ms(), model=model)
            node.followers[run].rules.learn(seal(owner, manifest))
            await node.followers[run].neighbourhood.put_manifest()
    finally:
        await node.close()


# ---------------------------------------------------------------------- the page

PAGE = ROOT / "docs" / "doctor.md"
MARK = "<!-- From here on this is what `python -m tests.broken_situations` printed. -->\n"
END_S = 300.0  # of a command that fails, on a machine that is busy with much else
JOINED_S = 300.0  # until a peer that joined has shown what it does


def typed(terminals: Terminals, command: str, situation: Situation, stage: Stage) -> tuple[int, str]:
    """Exit code and output of a real process."""
    ahead = f"import time\nreal = time.time\ntime.time = lambda: real() + {situation.clock_s}"
    words, environment = options_of(situation, stage), situation.environment(stage)
    terminal = terminals.type(command, *words, before=ahead if situation.clock_s else "", **environment)
    return terminal.ended_clean(END_S), terminal.output


def write_page(folder: Path) -> None:
    """Everything behind the mark."""
    parts = [PAGE.read_text(encoding="utf-8").partition(MARK)[0], MARK]
    terminals = Terminals(folder)
    try:
        parts.append(_when_all_is_well(folder, terminals))
        with staged(folder, terminals) as stage:
            for situation in SITUATIONS:
                outputs = {command: typed(terminals, command, situation, stage) for command in ("doctor", "join")}
                verify(situation, *outputs.values())
                parts.append(_section(situation, stage, outputs))
    finally:
        terminals.close()
    PAGE.write_text("".join(parts), encoding="utf-8")


def _section(situation: Situation, stage: Stage, outputs: Mapping[str, tuple[int, str]]) -> str:
    shown = [f"\n### {situation.name}\n\n{situation.how}\n\n```\n"]
    options = " ".join(word for word in situation.words(stage)[1:])
    if not situation.local:
        options += "--port 31415"
    before = "HF_HUB_OFFLINE=1 " if situation.name == "offline" else ""
    for command, (code, output) in outputs.items():
        lines = [line for line in output.splitlines() if not line.startswith("ok ")]
        shown.append(f"$ {before}swarm {command} 'INVITE' {options}".rstrip() + "\n")
        shown += [f"{_for_readers(line, stage.folder)}\n" for line in lines]
        shown.append(f"(exit code {code})\n")
    return "".join([*shown, "```\n"])


def _when_all_is_well(folder: Path, terminals: Terminals) -> str:
    assert terminals.type("init", "sums").wait() == 0
    bootstrap = terminals.type("bootstrap", "sums/run.toml", *LOCAL, "--home", "b")
    invite = printed(bootstrap, "swarm join '").split("'")[1]
    trainer = terminals.type("train", "sums/run.toml", "--bootstrap", invite.partition("#")[0], *LOCAL)
    first = terminals.type("join", invite, *LOCAL, "--home", "first")
    wait_until(lambda: sum("groups" in line for line in first.lines()) >= 3, JOINED_S, first)
    doctor = terminals.type("doctor", invite, *LOCAL, "--home", "peer")
    assert doctor.ended_clean(END_S) == 0, doctor.output
    join = terminals.type("join", invite, *LOCAL, "--home", "peer")
    wait_until(lambda: sum("groups" in line for line in join.lines()) >= 2, JOINED_S, join)
    join.kill(signal.SIGINT)
    code = join.ended_clean()
    for peer in (first, trainer, bootstrap):
        peer.kill(signal.SIGTERM)
        peer.ended_clean()
    text = "\n".join(
        ["$ swarm doctor 'INVITE'", doctor.output, "$ swarm join 'INVITE'", join.output, f"(exit code {code})"]
    )
    return f"\n## When all is well\n\n```\n{_for_readers(text, folder)}\n```\n\n## Ten broken situations\n"


def _for_readers(text: str, folder: Path) -> str:
    """Without what is of this machine and this moment only."""
    text = text.replace(f"{folder}", "~").replace(f"{ROOT}", "~/echo-swarm").replace("127.0.0.1", "203.0.113.7")
    text = re.sub(r"12D3KooW\w{44}", "12D3KooW...", text)
    text = re.sub(r"http://203.0.113.7:\d+", "https://huggingface.co", text)
    return re.sub(r"(/tcp/|port )\d{4,5}", r"\g<1>31415", text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write_page(Path(temporary))
