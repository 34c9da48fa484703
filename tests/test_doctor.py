"""`swarm doctor`: what it finds, what it says of it, and that it breaks at nothing and leaves nothing behind.

The ten broken situations of a volunteer are in tests/broken_situations.py: here both commands run in this process,
which has paid for its imports; `make slow` runs them as people type them.
"""

import asyncio
import errno
import io
import json
import os
import random
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from bootstrap import doctor, doctor_command
from bootstrap.addresses import parse_address
from bootstrap.doctor import Check, DoctorOptions, Finding, Patient
from bootstrap.doctor_command import Line, checks_of, examine
from bootstrap.invite import parse_invite
from bootstrap.main import app
from bootstrap.visit import Door, Rate, Run, greet, measure_down, measure_up, read_run, visiting
from peers.engines.choose import EngineOptions
from protocols import PROTOCOL
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.manifest import EnvironmentSpec
from protocols.messages import AdapterRef, BlobRef, Status
from swarm.identity import load_identity, lock_home, private_folder
from swarm.node import now_ms
from tests.broken_situations import SITUATIONS, Situation, Stage, options_of, staged, typed, verify
from tests.hosts import children, free_port, until
from tests.nodes import nodes
from tests.samples import OTHER_RUN, OWNER_ID, RUN, TRAINER_ID, announcement, manifest
from tests.terminals import Terminals


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path_factory.mktemp("stage"))
    yield terminals
    terminals.close()


@pytest.fixture(scope="module")
def stage(terminals: Terminals) -> Iterator[Stage]:
    with staged(terminals.folder, terminals) as stage:
        yield stage


def swarm(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="swarm")


def no_exit(code: int) -> None:
    raise AssertionError(f"a thread hangs; exit code {code}")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> pytest.MonkeyPatch:
    """Commands in this process see the hub's settings as if they had been in its environment."""
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "IMPORTS", ())  # torch is imported here already; once more takes seconds
    monkeypatch.setattr(os, "_exit", no_exit)
    for checks in ("MACHINE", "RUN", "REST"):  # the machine that runs the tests may be busy
        patient = tuple(replace(check, limit_s=60.0) for check in getattr(doctor_command, checks))
        monkeypatch.setattr(doctor_command, checks, patient)
    monkeypatch.setattr(doctor_command, "TOTAL_S", 200.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(stage.folder / "cache"))
    return monkeypatch


def settle(here: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    from huggingface_hub import constants

    here.setattr(constants, "HF_HUB_OFFLINE", environment["HF_HUB_OFFLINE"] == "1")
    if "HF_ENDPOINT" in environment:
        here.setattr(constants, "ENDPOINT", environment["HF_ENDPOINT"])


@pytest.mark.network
@pytest.mark.parametrize("situation", SITUATIONS, ids=[each.name for each in SITUATIONS])
def test_what_doctor_and_join_say_of_a_broken_situation(
    stage: Stage, here: pytest.MonkeyPatch, situation: Situation
) -> None:
    if situation.name == "no space" and stage.disk is None:
        pytest.skip("no file system of its own here")
    settle(here, dict(situation.environment(stage)))
    for module in ("bootstrap.visit", "swarm.node"):
        here.setattr(f"{module}.now_ms", lambda: now_ms() + round(situation.clock_s * 1000))
    if situation.name == "swarm unreachable":
        here.setattr("bootstrap.visit.CONNECT_S", 1.0)
        here.setattr("swarm.node.CONNECT_TIMEOUT_S", 1.0)
    said = {command: swarm(command, *options_of(situation, stage)) for command in ("doctor", "join")}
    verify(situation, *((result.exit_code, result.output) for result in said.values()))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("situation", SITUATIONS, ids=[each.name for each in SITUATIONS])
def test_what_people_read_in_a_broken_situation(stage: Stage, terminals: Terminals, situation: Situation) -> None:
    if situation.name == "no space" and stage.disk is None:
        pytest.skip("no file system of its own here")
    verify(situation, *(typed(terminals, command, situation, stage) for command in ("doctor", "join")))


# ---------------------------------------------------------------------- how it runs


def options(home: Path, invite: str | None = None, **changes: Any) -> DoctorOptions:
    parsed = None if invite is None else parse_invite(invite)
    return DoctorOptions(**{"home": home, "engine": EngineOptions(), "invite": parsed} | changes)


async def examined(monkeypatch: pytest.MonkeyPatch, *checks: Check, total_s: float = 60.0) -> tuple[list[Line], str]:
    """These checks alone: the lines, and what people see."""
    monkeypatch.setattr(doctor_command, "checks_of", lambda _: checks)
    monkeypatch.setattr(doctor_command, "TOTAL_S", total_s)
    shown = io.StringIO()
    found = await examine(options(Path("/nowhere")), False, shown)
    return list(found.lines), shown.getvalue()


async def well(_: Patient) -> Finding:
    return doctor.ok("well")


async def breaks(_: Patient) -> Finding:
    raise KeyError("no such thing")


async def hangs(_: Patient) -> Finding:
    await asyncio.Event().wait()
    raise AssertionError


async def dials(_: Patient) -> Finding:
    raise TransportFault("timeout", "10.0.0.1")


async def lacks(patient: Patient) -> Finding:
    return doctor.ok(patient.invite.run)


async def test_a_check_that_breaks_or_hangs_is_a_line_and_no_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check("breaks", breaks, "breaking", 1.0),
        Check("hangs", hangs, "hanging", 0.05),
        Check("dials", dials, "dialling", 1.0),
        Check("lacks", lacks, "lacking", 1.0),
        Check("well", well, "being well", 1.0),
    ]
    lines, shown = await examined(monkeypatch, *checks)
    assert [(line.check, line.level) for line in lines] == [
        ("breaks", "warning"),
        ("hangs", "warning"),
        ("dials", "warning"),
        ("lacks", "warning"),
        ("well", "ok"),
    ]
    said = ["KeyError: 'no such thing'", "no result after 0 s of hanging", "no answer in time", "no invitation", "well"]
    assert all(words in line.found for words, line in zip(said, lines, strict=True)), lines
    assert all(bool(line.advice) == (line.level != "ok") for line in lines)
    assert "Traceback" not in shown
    assert shown.splitlines()[-1] == "no problem found, 4 warnings"


async def test_all_checks_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = await examined(
        monkeypatch, Check("hangs", hangs, "hanging", 9.0), Check("well", well, "", 9.0), total_s=0.1
    )
    assert [line.found for line in lines] == ["no result after 0 s of hanging", "not checked: the 0.1 s were over"]


async def test_a_thread_that_hangs_is_told_of_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    async def reads(patient: Patient) -> Finding:
        await patient.in_thread(let_go.wait)
        raise AssertionError

    monkeypatch.setattr(doctor_command, "checks_of", lambda _: (Check("reads", reads, "reading", 0.05),))
    found = await examine(options(Path("/nowhere")), True, io.StringIO())
    assert found.hangs
    let_go.set()


async def test_a_terminal_shows_what_is_waited_for_and_wraps_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command.shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    stream = io.StringIO()
    with doctor_command._terminal(Check("clock", well, "comparing clocks", 1.0), stream) as found:
        assert "comparing clocks ..." in stream.getvalue()
        assert "\n" not in stream.getvalue()
        found(Line("clock", "problem", "5.0 s " + "behind " * 12, "switch on time synchronisation"))
    first, *rest = stream.getvalue().rpartition("\x1b[K")[2].splitlines()
    assert first.startswith("\x1b[31mproblem \x1b[0m clock        5.0 s behind")
    assert all(line.startswith(" " * 22) and len(line) <= 60 for line in rest)
    assert rest[-1].endswith("synchronisation")


@pytest.mark.network
def test_without_an_invitation_the_machine_alone_as_json(
    here: pytest.MonkeyPatch, stage: Stage, tmp_path: Path
) -> None:
    settle(here, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": stage.hub.url})
    before = children(), set(Path(tempfile.gettempdir()).glob("swarm-visit-*"))
    said = swarm("doctor", "--json", "--home", tmp_path / "peer", "--host", "127.0.0.1")
    assert said.exit_code == 0, said.output
    lines = {line["check"]: line for line in json.loads(said.stdout)}
    assert list(lines) == [check.name for check in checks_of(options(tmp_path))]
    assert {name for name, line in lines.items() if line["level"] != "ok"} == {"swarm", "clock"}, lines
    assert all(set(line) == {"check", "level", "found", "advice"} for line in lines.values())
    assert all("swarm doctor 'INVITE'" in lines[name]["advice"] for name in ("swarm", "clock"))
    assert not (tmp_path / "peer").exists()
    assert (children(), set(Path(tempfile.gettempdir()).glob("swarm-visit-*"))) == before


# ---------------------------------------------------------------------- this machine


async def look(
    check: Callable[[Patient], Awaitable[Finding]], home: Path, invite: str | None = None, **changes: Any
) -> Finding:
    async with AsyncExitStack() as stack:
        patient = Patient(options(home, invite, **changes), stack)
        stack.push_async_callback(patient.close)
        return await check(patient)


async def test_a_home_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    private_folder(tmp_path)
    home = tmp_path / "deep" / "peer"
    assert (await look(doctor.check_home, home)).level == "ok"
    assert not home.parent.exists()

    identity, _ = load_identity(home / "peer.key")
    found = await look(doctor.check_home, home)
    assert found == ("ok", f"{home}: writable, identity {short(identity.peer_id)}", "")

    with lock_home(home):
        found = await look(doctor.check_home, home)
    assert (found.level, found.found) == ("problem", f"{home}: in use by process {os.getpid()}")
    assert "--home" in found.advice
    assert (await look(doctor.check_home, home)).level == "ok"  # looking keeps no lock

    (home / "peer.key").chmod(0o644)
    found = await look(doctor.check_home, home)
    assert (found.level, found.advice) == ("warning", f"chmod 600 {home / 'peer.key'}; a start does it too")
    assert (home / "peer.key").stat().st_mode & 0o777 == 0o644

    (home / "peer.key").write_bytes(b"no key")
    assert (await look(doctor.check_home, home)).level == "problem"
    (tmp_path / "file").touch()
    assert (await look(doctor.check_home, tmp_path / "file" / "peer")).found == f"{tmp_path / 'file'}: not a folder"
    home.chmod(0o777)
    assert (await look(doctor.check_home, home)).level == "warning"
    assert (await look(doctor.check_home, Path(tempfile.gettempdir()))).level == "problem"  # sticky: a start refuses it


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/ip4/203.0.113.7/tcp/0", "203.0.113.7 is no address of this machine"),
        ("/dns4/example.org/tcp/4001", "a name cannot be listened on"),
        ("/ip4/127.0.0.1/tcp/{taken}", "port {taken} of 127.0.0.1 is taken by process {pid} ("),
        ("/ip4/127.0.0.1/udp/{udp}/quic-v1", "port {udp} of 127.0.0.1 is taken"),
    ],
)
async def test_where_this_machine_cannot_listen(tmp_path: Path, address: str, said: str) -> None:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for bound in (tcp, udp):
            bound.bind(("127.0.0.1", 0))
        tcp.listen()
        names = {"taken": tcp.getsockname()[1], "udp": udp.getsockname()[1], "pid": os.getpid()}
        found = await look(doctor.check_ports, tmp_path, listen=(address.format(**names),))
    assert found.level == "problem"
    assert said.format(**names) in found.found


def test_a_privileged_port_is_told_as_one() -> None:
    # Tests may run as root, who may bind any port: so the kernel's refusal is made up.
    address = parse_address("/ip4/0.0.0.0/tcp/80")
    found = doctor._bind_failed(address, 80, PermissionError(errno.EACCES, "Permission denied"))
    assert found.found == "port 80 needs the rights of an administrator"
    assert "--port" in found.advice


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["protobuf>=999", "no-such-package>=1", "msgspec", "vllm>=0.9; extra == 'vllm'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: lines)
    assert [wanted for wanted, _ in doctor.missing_packages()] == ["protobuf>=999", "no-such-package>=1"]
    assert "is not installed" in doctor.missing_packages()[1][1]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "it ends with SIGILL"),
    ],
)
async def test_a_package_that_does_not_import_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, said: str
) -> None:
    (tmp_path / "badly_built.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "IMPORTS", ("json", "badly_built"))
    found = await look(doctor.check_packages, tmp_path)
    assert found.level == "problem"
    assert found.found.startswith("badly_built ")
    assert said in found.found


async def test_a_p2pd_that_is_missing_or_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "hivemind_cli"
    folder.mkdir()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor, "find_spec", lambda _: spec)
    assert (await look(doctor.check_p2pd, tmp_path)).found == f"{folder / 'p2pd'} is missing"
    (folder / "p2pd").write_text("#!/bin/sh\n")
    assert (await look(doctor.check_p2pd, tmp_path)).advice == f"chmod +x {folder / 'p2pd'}"
    (folder / "p2pd").chmod(0o755)

    async def fails(_: Patient) -> None:
        raise TransportFault("p2pd failed", "exec format error")

    monkeypatch.setattr(Patient, "host", fails)
    found = await look(doctor.check_p2pd, tmp_path)
    assert (found.level, found.found) == ("problem", f"{folder / 'p2pd'} does not start: exec format error")


# ---------------------------------------------------------------------- the swarm

INVITE = f"/ip4/127.0.0.1/tcp/1/p2p/{OWNER_ID}#{RUN}"


def door(offset_s: float = 0.0, **changes: Any) -> Door:
    fields = {"address": INVITE.partition("#")[0], "peer_id": OWNER_ID, "verdict": "ok", "detail": ""}
    return Door(**{**fields, "protocol": PROTOCOL, "offset_s": offset_s, "round_trip_s": 0.02, **changes})


def knows(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """What the doctor found out of the swarm."""

    async def tell(_: Patient) -> object:
        return value

    monkeypatch.setattr(Patient, name, tell)


@pytest.mark.parametrize(
    ("offset_s", "level", "side"),
    [(0.4, "ok", "behind"), (-1.2, "warning", "ahead of"), (3.2, "problem", "behind"), (-86400.0, "problem", "ahead")],
)
async def test_how_far_a_clock_may_be_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offset_s: float, level: str, side: str
) -> None:
    knows(monkeypatch, "doors", [door(offset_s)])
    found = await look(doctor.check_clock, tmp_path, INVITE)
    assert (found.level, f"{abs(offset_s):.1f} s {side}" in found.found) == (level, True), found


async def test_one_clock_among_the_doors_that_is_ours_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    knows(monkeypatch, "doors", [door(60.0), door(0.1)])
    assert (await look(doctor.check_clock, tmp_path, INVITE)).level == "ok"


async def test_addresses_that_do_not_answer_beside_one_that_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dead = ("/ip4/10.0.0.1/tcp/1/p2p/x", TransportFault("timeout"))
    knows(monkeypatch, "greetings", [dead, (door().address, door())])
    found = await look(doctor.check_swarm, tmp_path, INVITE)
    assert found.level == "warning"
    assert "1 of 2 addresses answer" in found.found
    assert "/ip4/10.0.0.1/tcp/1/p2p/x: timeout" in found.found
    knows(monkeypatch, "greetings", [(door().address, door(protocol="echo-swarm/9"))])
    found = await look(doctor.check_swarm, tmp_path, INVITE)
    assert (found.level, "speaks echo-swarm/9" in found.found) == ("problem", True)


def status(**changes: Any) -> Status:
    return Status(**{"run": RUN, "now_ms": 1, "max_lag": 2, "max_steps": 9, "head": 4} | changes)


def a_run(size: int = 4_000_000, every_ms: int = 2_000, **changes: Any) -> Run:
    said = [announcement(n, created_ms=n * every_ms).message for n in range(3)]
    blob = AdapterRef(bytes(32), BlobRef(bytes(32), size))
    said = [msgspec.structs.replace(each, adapter=blob) for each in said]
    return Run(**{"manifest": manifest(), "status": status(), "announcements": tuple(said)} | changes)


def test_a_line_that_is_too_slow_for_the_versions() -> None:
    up = Rate(250_000, 1.0)
    slow = doctor._judge_bandwidth(a_run(), Rate(1_000_000, 1.0), up)
    assert slow.level == "warning"
    assert slow.found == "down 1.0 MB/s, up 250.0 kB/s; a version of 4.0 MB takes 4.0 s, one comes each 2.0 s"
    assert doctor._judge_bandwidth(a_run(), Rate(4_000_000, 1.0), up).level == "ok"
    assert doctor._judge_bandwidth(a_run(announcements=()), Rate(1, 1.0), up).level == "ok"  # nothing to compare with
    assert doctor._judge_bandwidth(a_run(), Rate(0, 5.0), up).level == "warning"


@pytest.mark.parametrize(
    ("outcome", "level", "said"),
    [
        (a_run(), "ok", "signed by its owner, at v4 of"),
        (a_run(status=status(ended=True)), "problem", "it has ended"),
        (a_run(status=None), "warning", "nobody tells how far it is"),
        (TransportFault("unknown run"), "problem", "does not serve this run"),
        (TransportFault("no manifest"), "warning", "its trainer has not published it yet"),
        (PeerFault("bad signature"), "problem", "bad signature"),
    ],
)
async def test_what_is_said_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: object, level: str, said: str
) -> None:
    async def tell(_: Patient) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(Patient, "run", tell)
    found = await look(doctor.check_run, tmp_path, INVITE)
    assert (found.level, said in found.found) == (level, True), found


async def test_code_of_the_owner_is_refused_unless_it_was_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "of_the_owner.py").write_text("raise AssertionError('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = EnvironmentSpec(name="of_the_owner:make")
    knows(monkeypatch, "known_run", a_run(manifest=manifest(environment=spec)))
    found = await look(doctor.check_environment, tmp_path, INVITE)
    assert (found.level, "--allow-code of_the_owner:make" in found.advice) == ("problem", True)


@pytest.mark.network
async def test_a_visitor_measures_a_real_swarm_and_is_no_peer_of_it(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm_of, visiting() as host:
        bootstrap = await swarm_of.bootstrap()
        address = bootstrap.node.host.addresses[0]
        trainer = await swarm_of.trainer((address,))
        blob = random.Random(0).randbytes(3_000_000)
        ref = trainer.node.exchange.blobs.put(blob)
        for version in range(3):
            await trainer.announce(version, AdapterRef(version.to_bytes(32, "big"), ref))
        await until(lambda: bootstrap.version == 2)

        met = await greet(host, address, RUN)
        assert isinstance(met, Door)
        assert (met.verdict, met.protocol, met.peer_id) == ("ok", PROTOCOL, bootstrap.node.peer_id)
        assert abs(met.offset_s) < 0.5
        run = await read_run(host, [met], RUN)
        assert [each.version for each in run.announcements] == [0, 1, 2]
        assert run.newcomer_blobs == (ref,)
        assert run.version_bytes == len(blob)
        down = await measure_down(host, ref, [trainer.node.peer_id])
        assert down.num_bytes == len(blob)
        assert down.bytes_per_s > 100_000
        up = await measure_up(host, met.peer_id)
        assert up.num_bytes > 256 * 1024

        seen = {TRAINER_ID, bootstrap.node.peer_id}
        assert run.status is not None
        assert {peer.peer_id for peer in run.status.peers} <= seen
        assert set(bootstrap.node.neighbours) <= seen
        assert not bootstrap.node.host.refusals
        assert isinstance(await greet(host, f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{OWNER_ID}", RUN), TransportFault)
        with pytest.raises(TransportFault, match="unknown run"):
            await read_run(host, [met], OTHER_RUN)


@pytest.mark.network
async def test_doors_dial_back_to_where_a_peer_would_listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm_of:
        bootstrap = await swarm_of.bootstrap()
        address = bootstrap.node.host.addresses[0]
        met = door(address=address, peer_id=bootstrap.node.peer_id)
        knows(monkeypatch, "doors", [met])
        invite, listen = f"{address}#{RUN}", ("/ip4/127.0.0.1/tcp/0",)
        found = await look(doctor.check_reachability, tmp_path / "peer", invite, listen=listen)
        assert (found.level, "others can reach this peer" in found.found) == ("ok", True), found
        monkeypatch.setattr("swarm.reachability.LIBP2P_GREETING", b"nobody says this")  # as if nobody got through
        found = await look(doctor.check_reachability, tmp_path / "peer", invite, listen=listen)
        assert (found.level, "outbound only" in found.found) == ("ok", True), found


@pytest.mark.network
async def test_a_large_version_is_downloaded_only_as_far_as_the_rate_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bootstrap.visit.DOWN_BYTES", 1_000_000)
    async with nodes(tmp_path) as swarm_of, visiting() as host:
        bootstrap = await swarm_of.bootstrap()
        ref = bootstrap.node.exchange.blobs.put(random.Random(0).randbytes(40_000_000))
        await host.connect(bootstrap.node.host.addresses[0])
        down = await measure_down(host, ref, [bootstrap.node.peer_id])
        assert 1_000_000 <= down.num_bytes < 40_000_000
        await until(lambda: not bootstrap.node.host._streams)  # the holder is not kept busy
