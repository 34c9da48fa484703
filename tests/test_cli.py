"""What a person types and reads: commands, invitations, errors, exit codes. Peers are fakes here."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bootstrap import errors
from bootstrap.addresses import listen_address, own_address, parse_address, peer_address, reachable
from bootstrap.config import RunConfig, decode_config, to_manifest
from bootstrap.folder import create_run, open_run
from bootstrap.invite import Invite, format_invite, join_lines, parse_invite
from bootstrap.main import app
from protocols.envelopes import seal
from protocols.faults import LocalFault, PeerFault, TransportFault
from protocols.identity import peer_id_of
from protocols.ledger import MAGIC, Consumed, EndEntry, ManifestEntry, VersionEntry, frame, trained_on
from protocols.manifest import CoordinationSpec, ModelSpec, TransferSpec
from protocols.messages import AdapterRef, Announcement, BlobRef, RunEnd
from protocols.policy import Chain
from swarm.identity import Identity, load_identity

ROOT = Path(__file__).parent.parent
ID = peer_id_of(bytes(range(32)))
RUN = "sums-abcdefghijklmnop"
ADDRESS = f"/ip4/192.168.1.20/tcp/31415/p2p/{ID}"


def swarm(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="swarm")


def one_line(result: Result) -> str:
    """The line on stderr of a command that was used wrongly."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("swarm: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# ---------------------------------------------------------------------- invitations and addresses


def test_an_invitation_reads_back() -> None:
    other = f"/dns4/swarm.example.org/udp/4001/quic-v1/p2p/{ID}"
    text = format_invite([ADDRESS, other], RUN)
    assert text == f"{ADDRESS},{other}#{RUN}"
    assert parse_invite(text) == Invite((ADDRESS, other), RUN)
    assert parse_invite(f" '{ADDRESS}, {other}#{RUN}'\n") == Invite((ADDRESS, other), RUN)  # pasted with quotes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must look like <address>#<run id>"),
        (ADDRESS, "is the text behind '#' missing? put the invitation in quotes"),
        (f"#{RUN}", "no address before '#'"),
        (f"{ADDRESS}#", "run id '': it must be <name>-<16 letters and digits>"),
        (f"{ADDRESS}#{RUN[:-1]}", "was it cut off?"),
        (f"{ADDRESS}#{RUN}#x", "run id"),
        (f"http://example.org#{RUN}", "must look like /ip4/"),
        (f"/ip4/1.2.3.4#{RUN}", "must look like /ip4/"),
        (f"/ip4/1.2.3/tcp/1/p2p/{ID}#{RUN}", "'1.2.3' is not an IP address"),
        (f"/ip4/::1/tcp/1/p2p/{ID}#{RUN}", "::1 belongs behind /ip6"),
        (f"/onion3/x/tcp/1/p2p/{ID}#{RUN}", "it begins with /onion3"),
        (f"/dns4//tcp/1/p2p/{ID}#{RUN}", "the host name is empty"),
        (f"/ip4/1.2.3.4/sctp/1/p2p/{ID}#{RUN}", "/tcp/<port> or /udp/<port> must follow"),
        (f"/ip4/1.2.3.4/tcp/70000/p2p/{ID}#{RUN}", "'70000' is not a port"),
        (f"/ip4/1.2.3.4/tcp/²/p2p/{ID}#{RUN}", "'²' is not a port"),
        (f"/ip4/1.2.3.4/tcp/1#{RUN}", "/p2p/<peer id> is missing at its end"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/#{RUN}", "one peer id must follow /p2p/"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{ID[:-1]}#{RUN}", "is not a peer id; was it cut off?"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{ID}/p2p-circuit#{RUN}", "nothing behind it"),
        (f"{','.join([ADDRESS] * 17)}#{RUN}", "17 addresses, at most 16"),
        (f"{'/' * 500}#{RUN}", "over 256 characters"),
    ],
)
def test_a_wrong_invitation_says_what_is_wrong_with_it(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"invitation|address|run id") as caught:
        parse_invite(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_to_listen_on_have_no_peer_id_and_those_of_peers_do() -> None:
    assert str(parse_address(ADDRESS)) == ADDRESS
    assert listen_address("0.0.0.0", 0) == "/ip4/0.0.0.0/tcp/0"
    assert listen_address("::", 31415) == "/ip6/::/tcp/31415"
    assert own_address("/dns4/example.org/tcp/443") == "/dns4/example.org/tcp/443"
    with pytest.raises(ValueError, match="leave out /p2p/"):
        own_address(ADDRESS)
    with pytest.raises(ValueError, match="is missing at its end"):
        peer_address("/ip4/1.2.3.4/tcp/1")
    with pytest.raises(ValueError, match="host 'localhost': give an IP address"):
        listen_address("localhost", 1)
    with pytest.raises(ValueError, match="port 65536"):
        listen_address("0.0.0.0", 65536)


INTERFACES = ["127.0.0.1", "192.168.1.20", "8.8.4.4", "::1", "fe80::1", "2001:4860::8"]


def test_b05_what_is_printed_for_others_works_from_other_machines() -> None:
    tail = f"/tcp/31415/p2p/{ID}"
    found = reachable([f"/ip4/0.0.0.0{tail}", f"/ip4/127.0.0.1{tail}"], INTERFACES)
    assert found.remote == (f"/ip4/8.8.4.4{tail}", f"/ip4/192.168.1.20{tail}")  # the public one first
    assert found.local == (f"/ip4/127.0.0.1{tail}",)
    assert reachable([f"/ip6/::{tail}"], INTERFACES).remote == (f"/ip6/2001:4860::8{tail}",)  # not the link-local one
    assert reachable([f"/dns4/example.org{tail}"], INTERFACES).remote == (f"/dns4/example.org{tail}",)

    lines = join_lines([f"/ip4/0.0.0.0{tail}"], RUN, None, INTERFACES)
    assert lines == [
        "join from another machine:",
        f"  swarm join '/ip4/8.8.4.4{tail}#{RUN}'",
        f"  swarm join '/ip4/192.168.1.20{tail}#{RUN}'",
        "on this machine:",
        f"  swarm join '/ip4/127.0.0.1{tail}#{RUN}'",
    ]


def test_b05_loopback_only_is_said_and_offered_to_this_machine_alone() -> None:
    address = f"/ip4/127.0.0.1/tcp/31415/p2p/{ID}"
    assert join_lines([address], RUN, Path("sums/run.toml"), INTERFACES) == [
        "local only: other machines cannot join; pass --host 0.0.0.0 or --announce",
        "on this machine:",
        f"  swarm join '{address}#{RUN}'",
        "the trainer, on this machine:",
        f"  swarm train sums/run.toml --bootstrap {address}",
    ]


# ---------------------------------------------------------------------- errors


START_CAUSES = (
    "refused",
    "timeout",
    "peer id mismatch",
    "clock",
    "identity taken",
    "protocol mismatch",
    "unknown run",
    "banned",
)


def test_b104_every_cause_has_its_own_text_and_next_step() -> None:
    assert set(START_CAUSES) <= errors.ADVICE.keys()
    for column in zip(*errors.ADVICE.values(), strict=True):
        assert len(set(column)) == len(errors.ADVICE)
        assert all(text and "\n" not in text and not text.endswith(".") for text in column)


@pytest.mark.parametrize("code", START_CAUSES)
def test_b104_a_cause_is_one_line_and_a_next_step_without_a_traceback(
    code: str, peers: "Fakes", monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.fault = TransportFault(code, "10.0.0.1 did it")
    result = swarm("join", f"{ADDRESS}#{RUN}", "--home", peers.home)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"swarm: {code}: {errors.ADVICE[code].text} (10.0.0.1 did it)",
        f"  next: {errors.ADVICE[code].next_step}",
    ]
    monkeypatch.setattr(sys, "argv", ["swarm", "--debug", "join"])
    debugged = swarm("--debug", "join", f"{ADDRESS}#{RUN}", "--home", peers.home)
    assert debugged.exit_code == 1
    assert "Traceback" in debugged.stderr


def test_every_code_that_our_network_raises_is_explained() -> None:
    raised = set()
    for path in [*ROOT.glob("swarm/*.py"), *ROOT.glob("peers/*.py"), *ROOT.glob("bootstrap/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "TransportFault" and node.args:
                literals = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                raised |= {literal for literal in literals if isinstance(literal, str)}
    assert {"timeout", "p2pd died", "clock"} <= raised
    assert raised <= errors.ADVICE.keys()


def test_b01_each_address_has_a_line_with_its_own_reason() -> None:
    fault = TransportFault("refused", "first")
    fault.reasons = ["/ip4/10.0.0.1/tcp/1: refused", "/ip4/10.0.0.2/tcp/1: timeout"]  # type: ignore[attr-defined]
    explained = errors.explain(fault)
    assert explained is not None
    assert explained[0].splitlines() == [
        "none of the addresses works:",
        "  /ip4/10.0.0.1/tcp/1: refused",
        "  /ip4/10.0.0.2/tcp/1: timeout",
        f"  next: {errors.ADVICE['refused'].next_step}",
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("run.toml: no\nnot at all"), ("run.toml: no not at all", 2)),
        (FileNotFoundError(2, "No such file or directory", "a.toml"), ("a.toml: No such file or directory", 2)),
        (OSError(28, "No space left on device"), ("No space left on device", 1)),
        (PeerFault("bad signature", "manifest"), ("bad signature (manifest)", 1)),
        (errors.Failed("trainer died\n  its line"), ("trainer died\n  its line", 1)),
        (ExceptionGroup("tasks", [ExceptionGroup("", [ValueError("engine 'x'")])]), ("engine 'x'", 2)),
        (LocalFault("our own"), None),
        (BrokenPipeError(32, "Broken pipe"), None),
        (ExceptionGroup("tasks", [LocalFault("our own")]), None),
    ],
)
def test_errors_become_text_and_exit_code(error: BaseException, expected: tuple[str, int] | None) -> None:
    assert errors.explain(error) == expected


def test_a_bug_is_shown_as_one(peers: "Fakes") -> None:
    peers.fault = LocalFault("impossible")
    result = swarm("join", f"{ADDRESS}#{RUN}", "--home", peers.home)
    assert isinstance(result.exception, LocalFault)


def test_the_page_of_errors_is_the_table() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == errors.render_page()


# ---------------------------------------------------------------------- commands


@dataclass
class Fakes:
    """Stands for the modules that run peers: keeps what they were asked for, then returns or raises."""

    home: Path
    fault: Exception | None = None
    options: list[Any] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, options: Any, on_ready: Callable[[list[str]], None]) -> None:
        self.options.append(options)
        if self.fault is not None:
            raise self.fault
        with (options.home / "metrics.jsonl").open("a") as file:
            for event in self.metrics:
                file.write(json.dumps({"t": 1.0, "peer": ID, "role": "inference"} | event) + "\n")
        on_ready([f"/ip4/127.0.0.1/tcp/31415/p2p/{ID}"])


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes(tmp_path / "home")
    for module, options, run in (
        ("bootstrap.bootstrap_peer", "BootstrapOptions", "run_bootstrap"),
        ("peers.trainer", "TrainerOptions", "run_trainer"),
        ("peers.inference", "InferenceOptions", "run_inference"),
    ):
        fake = types.ModuleType(module)
        setattr(fake, options, types.SimpleNamespace)
        setattr(fake, run, fakes.run)
        monkeypatch.setitem(sys.modules, module, fake)
    return fakes


def test_init_writes_a_run_and_says_what_to_type_next(tmp_path: Path) -> None:
    result = swarm("init", tmp_path / "my_run")
    assert result.exit_code == 0
    run = open_run(tmp_path / "my_run")
    assert run.config.name == "my-run"
    assert run.config.environment.prompt == "{expression}="
    assert run.config.trainers == (load_identity(run.trainer_home / "peer.key")[0].peer_id,)
    lines = result.stdout.splitlines()
    assert lines[0] == f"run {run.run}"
    assert f"swarm bootstrap {tmp_path}/my_run/run.toml" in lines[-2]
    assert f"swarm train {tmp_path}/my_run/run.toml --bootstrap ADDRESS" in lines[-1]
    assert "nothing is overwritten" in one_line(swarm("init", tmp_path / "my_run"))


def test_init_in_json_and_with_another_environment(tmp_path: Path) -> None:
    result = swarm("init", tmp_path / "x", "--name", "words", "--environment", "letter_counting", "--json")
    said = json.loads(result.stdout)
    assert said["run"].startswith("words-")
    config = open_run(Path(said["config"])).config
    assert (config.environment.name, config.environment.prompt, config.environment.params) == (
        "letter_counting",
        "{question}",
        {},
    )
    assert "use lower-case letters" in one_line(swarm("init", tmp_path / "y", "--name", "No Good"))
    assert not (tmp_path / "y").exists()


def test_bootstrap_takes_run_files_and_run_ids_and_prints_how_to_join(tmp_path: Path, peers: Fakes) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=()))
    result = swarm("--home", peers.home, "bootstrap", run.config_path, RUN, "--announce", "/dns4/a.org/tcp/1")
    assert result.exit_code == 0, result.output
    (options,) = peers.options
    assert (options.home, options.runs, options.bootstrap) == (peers.home, (run.run, RUN), ())
    assert (options.listen, options.announce) == (("/ip4/0.0.0.0/tcp/31415",), ("/dns4/a.org/tcp/1",))
    assert f"swarm join '/ip4/127.0.0.1/tcp/31415/p2p/{ID}#{RUN}'" in result.stdout
    assert f"swarm train {run.config_path} --bootstrap /ip4/127.0.0.1/tcp/31415/p2p/{ID}" in result.stdout
    assert "local only" in result.stdout
    assert "run id 'nonsense'" in one_line(swarm("bootstrap", "nonsense"))
    assert "No such file" in one_line(swarm("bootstrap", "nonsense.toml"))
    assert "host 'localhost'" in one_line(swarm("bootstrap", RUN, "--host", "localhost"))


def test_train_passes_on_what_the_run_says(tmp_path: Path, peers: Fakes) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=()))
    result = swarm("train", run.config_path, "--bootstrap", ADDRESS, "--listen", "/ip4/0.0.0.0/tcp/7")
    assert result.exit_code == 0, result.output
    (options,) = peers.options
    assert (options.home, options.run, options.model) == (run.trainer_home, run.run, "builtin")
    assert (options.bootstrap, options.listen, options.evaluation_problems) == (
        (ADDRESS,),
        ("/ip4/0.0.0.0/tcp/7",),
        200,
    )
    manifest = options.make_manifest(ModelSpec(), 4).message
    assert (manifest.revision, manifest.coordination.coordinators) == (4, (ID,))
    assert options.allow_code is False
    assert f"swarm join '{ADDRESS}#{run.run}'" in result.stdout
    assert "no bootstrap address" in one_line(swarm("train", run.config_path))


def test_train_takes_bootstrap_addresses_from_the_file_and_refuses_a_stranger(tmp_path: Path, peers: Fakes) -> None:
    run = create_run(tmp_path / "sums", RunConfig(name="sums", trainers=()))
    text = run.config_path.read_text().replace("\nbootstrap = []", f'\nbootstrap = ["{ADDRESS}"]')
    run.config_path.write_text(text)
    assert swarm("train", run.root).exit_code == 0
    assert peers.options[-1].bootstrap == (ADDRESS,)
    result = swarm("train", run.root, "--home", tmp_path / "stranger")
    assert result.exit_code == 2
    assert "`trainers` does not hold this peer's id; add 12D3KooW" in result.stderr
    (run.root / "run.toml").write_text(text.replace("max_lag", "max_lagg"))
    assert "unknown field `max_lagg`" in one_line(swarm("train", run.root))


def test_join_passes_on_the_invitation(peers: Fakes) -> None:
    arguments = ("--engine", "transformers", "--allow-code", "a:b", "--allow-code", "c:d")
    result = swarm("join", f"{ADDRESS}#{RUN}", *arguments, "--home", peers.home)
    assert result.exit_code == 0, result.output
    (options,) = peers.options
    assert (options.run, options.bootstrap) == (RUN, (ADDRESS,))
    assert options.engine.engine == "transformers"
    assert (options.allow_code, options.listen) == ({"a:b", "c:d"}, ("/ip4/0.0.0.0/tcp/0",))
    assert "invitation 'nonsense'" in one_line(swarm("join", "nonsense"))


def test_b08_one_person_has_one_identity_wherever_the_command_is_typed(
    tmp_path: Path, peers: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    first_lines = []
    for home, folder in (("anna", "a"), ("anna", "b"), ("bert", "b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setenv("HOME", str(tmp_path / home))
        result = CliRunner().invoke(app, ["join", f"{ADDRESS}#{RUN}"], color=True)
        assert result.exit_code == 0, result.output
        first_lines.append(result.stdout.splitlines()[0])
    bold = re.compile(r"^\x1b\[1mnew identity (\w+), key (.*/peer\.key)\x1b\[0m$")
    new, same, other = bold.match(first_lines[0]), first_lines[1], bold.match(first_lines[2])
    assert new is not None
    assert other is not None
    assert re.sub(r"\x1b\[0m", "", same) == f"identity {new[1]}, key {new[2]}"
    assert new[1] != other[1]
    assert Path(new[2]).is_absolute()
    assert tmp_path / "anna" in Path(new[2]).parents
    assert peers.options[0].home == peers.options[1].home == Path(new[2]).parent


def test_json_prints_the_events_and_nothing_else_on_stdout(peers: Fakes) -> None:
    peers.home.mkdir(mode=0o700)
    (peers.home / "metrics.jsonl").write_text('{"t":0.5,"peer":"p","role":"inference","event":"of an earlier start"}\n')
    peers.metrics = [{"event": "adapter", "version": 3, "bytes": 10}, {"event": "unheard of", "x": [1]}]
    result = swarm("join", f"{ADDRESS}#{RUN}", "--home", peers.home, "--json")
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["adapter", "unheard of"]
    assert result.stderr.startswith("new identity ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "magic"), "there is no mode 'magic': use --mode async or sequential or auto"),
        (("--stale", "keep"), "there is no stale 'keep': use --stale drop or downweight"),
        (("--codec", "zip"), "there is no codec 'zip': use --codec auto or raw or xor or ulps or int8 or int4"),
        (("--refresh-gap", "5"), "coordination.refresh_gap 5 is over max_lag 4"),
        (("--report", "/nowhere/at/all.json"), "its folder does not exist"),
        (("--home", ROOT), "not empty"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_at_once(arguments: tuple[str | Path, ...], message: str) -> None:
    assert message in one_line(swarm("sim", *arguments))


def test_a_simulation_is_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(options: Any, _: Any) -> None:
        asked.append(options)
        raise errors.Failed("enough")

    monkeypatch.setattr("bootstrap.main._run_sim", fake)
    assert swarm("sim").exit_code == 1
    assert asked[0].bootstraps == 1
    assert asked[0].config.coordination == CoordinationSpec()
    words = "--mode auto --refresh-gap 2 --stale downweight --bootstraps 2 --peers 4 --max-lag 3 --codec int4"
    assert swarm("sim", *words.split()).exit_code == 1
    assert (asked[1].bootstraps, asked[1].peers, asked[1].config.max_lag) == (2, 4, 3)
    assert asked[1].config.coordination == CoordinationSpec(mode="auto", refresh_gap=2, stale="downweight")
    assert (asked[0].config.transfer, asked[1].config.transfer) == (TransferSpec(), TransferSpec(codec="int4"))


def test_usage_errors_and_help() -> None:
    assert swarm("nonsense").exit_code == 2
    assert swarm("sim", "--peers", "0").exit_code == 2
    assert swarm("join").exit_code == 2
    assert "protocol echo-swarm/2" in swarm("--version").stdout
    for command in ("init", "bootstrap", "train", "join", "sim", "audit"):
        result = swarm(command, "--help")
        assert result.exit_code == 0
        assert f"swarm {command} " in result.stdout
        assert "Example" in result.stdout


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, bootstrap.main; print(sorted({'torch', 'hivemind', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---------------------------------------------------------------------- audit


def ledger(folder: Path, num_versions: int = 2) -> tuple[str, bytes]:
    """A run's id and a valid ledger of it."""
    owner, _ = load_identity(folder / "owner.key")
    trainer, _ = load_identity(folder / "trainer" / "peer.key")
    config = decode_config(f'name = "sums"\ntrainers = ["{trainer.peer_id}"]', "run.toml")
    manifest = to_manifest(config, owner.key, 0, 1)
    chain = Chain(manifest.message)
    raw = MAGIC + frame(ManifestEntry(manifest.raw))
    for version in range(num_versions):
        consumed = (Consumed(bytes([version] * 32), ID, version - 1, version - 1),) if version else ()
        raw += frame(VersionEntry(_announce(chain, trainer, version, consumed), consumed))
    end = seal(trainer.key, RunEnd(chain.run, chain.version, chain.head_hash, 1))
    return chain.run, raw + frame(EndEntry(end.raw))


def _announce(chain: Chain, trainer: Identity, version: int, consumed: tuple[Consumed, ...]) -> bytes:
    sealed = seal(
        trainer.key,
        Announcement(
            run=chain.run,
            version=version,
            parent=chain.head_hash,
            adapter=AdapterRef(bytes(32), BlobRef(bytes(32), 10)),
            trained_on=trained_on(consumed),
            bound=4,
            created_ms=1,
        ),
    )
    chain.extend(sealed)
    return sealed.raw


def test_audit_of_a_good_ledger(tmp_path: Path) -> None:
    run, raw = ledger(tmp_path / "keys", num_versions=3)
    path = tmp_path / "ledger.echo"
    path.write_bytes(raw)
    result = swarm("audit", path, "--run", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == f"run        {run}"
    assert "versions   3, newest v2, the run has ended" in result.stdout
    assert "groups     2, each trained once" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("ok: ")
    said = json.loads(swarm("--json", "audit", path).stdout)
    assert (said["ok"], said["run"], said["versions"], said["groups"], said["max_lag"]) == (True, run, 3, 2, 0)
    assert (said["bound"], said["histogram"], said["ended"], said["problems"]) == (4, {"0": 2}, True, [])


def test_audit_names_the_entry_that_is_wrong(tmp_path: Path) -> None:
    run, raw = ledger(tmp_path / "keys", num_versions=3)
    path = tmp_path / "ledger.echo"
    path.write_bytes(raw[:-1])
    result = swarm("audit", path)
    assert result.exit_code == 1
    assert "problem: entry 4: cut off" in result.stdout
    assert "each trained once" not in result.stdout
    assert json.loads(swarm("audit", path, "--json").stdout)["ok"] is False
    path.write_bytes(raw)
    foreign = run[:-1] + ("a" if run[-1] != "a" else "b")
    assert "problem: entry 0: foreign manifest" in swarm("audit", path, "--run", foreign).stdout
    path.write_bytes(b"a poem")
    assert swarm("audit", path).exit_code == 1


def test_audit_of_what_is_no_file(tmp_path: Path) -> None:
    assert "No such file" in one_line(swarm("audit", tmp_path / "nothing"))
    assert "not a file" in one_line(swarm("audit", tmp_path))
    path = tmp_path / "ledger.echo"
    path.write_bytes(ledger(tmp_path / "keys")[1])
    assert "run id 'x'" in one_line(swarm("audit", path, "--run", "x"))


# ---------------------------------------------------------------------- signals

SIGNALLED = """
import asyncio, sys
import typer
from bootstrap import main

async def work():
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaning", flush=True)
        if sys.argv[1] == "stubborn":
            await asyncio.sleep(60)
        print("clean", flush=True)

try:
    main._run_to_end(work)
except typer.Exit as ending:
    sys.exit(ending.exit_code)
"""


def signalled(tmp_path: Path, kind: str, *numbers: int) -> tuple[int, str]:
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, script, kind], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    for number in numbers:
        process.send_signal(number)
        lines.append(process.stdout.readline())
    rest, _ = process.communicate(timeout=20)
    return process.returncode, (b"".join(lines) + rest).decode()


def test_ctrl_c_cleans_up_and_exits_130_and_a_second_one_is_at_once(tmp_path: Path) -> None:
    assert signalled(tmp_path, "polite", signal.SIGINT) == (130, "ready\ncleaning\nclean\n")
    assert signalled(tmp_path, "stubborn", signal.SIGINT, signal.SIGINT) == (130, "ready\ncleaning\n")


def test_b92_sigterm_cleans_up_and_exits_0(tmp_path: Path) -> None:
    assert signalled(tmp_path, "polite", signal.SIGTERM) == (0, "ready\ncleaning\nclean\n")
