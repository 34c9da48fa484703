"""The `swarm` command line: what people type, what they are told, and exit codes.

    0 done      1 failed (network, audit, peer)      2 bad usage or configuration      130 Ctrl-C

Everything heavy (torch, hivemind) is imported inside the command that needs it, so that `--help` is instant.
The event loop is chosen here and nowhere else.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bootstrap.errors import FAILED, INTERRUPTED, reported
from bootstrap.home import KEY_FILE, METRICS_FILE, home_of

DEFAULT_PORT = 31415  # of bootstrap peers, so that a restarted one has the address it had; below the ephemeral ports
DEFAULT_PEERS = 2
PEERS_MAX = 64  # a guess: each is a Python process of some 500 MB
ENGINES = ("auto", "transformers", "vllm", "mlx")
WATCH_S = 2.0  # a beat: nothing changes faster
WATCH_MIN_S, WATCH_MAX_S = 0.5, 3600.0  # an answer of a large run is half a megabyte; longer than an hour is `sleep`
TERMINATED = 143  # a simulation told to stop has not done what it was asked for; a peer told to stop has
BOOTSTRAPS_MAX = 8  # a guess: the election of a simulation has seen enough failures by then
DEVICES = ("auto", "cpu", "cuda", "mps")
MODES, STALE = ("async", "sequential", "auto"), ("drop", "downweight")
CODECS = ("auto", "raw", "xor", "ulps", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Common:
    """Options that every command takes, before or behind its name."""

    home: Path | None
    json: bool
    debug: bool


class _Group(typer.core.TyperGroup):
    """Reports what is foreseen in one place, whichever command runs."""

    def invoke(self, ctx: Any) -> Any:
        with reported(debug="--debug" in sys.argv):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Folder of this peer's key and data; a second peer on one machine needs its own.",
        show_default="one a role",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and log everything.")]
Host = Annotated[str, typer.Option("--host", help="IP address to listen on; 0.0.0.0 is all of this machine's.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 is any free one.")]
Listen = Annotated[
    list[str] | None,
    typer.Option("--listen", metavar="MULTIADDR", help="Instead of --host and --port, as often as needed."),
]
Announce = Annotated[
    list[str] | None,
    typer.Option("--announce", metavar="MULTIADDR", help="Address to tell others, such as a forwarded port."),
]
Model = Annotated[str, typer.Option(help="builtin, smollm2, a Hugging Face name, or a folder.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="As `swarm init` wrote it.", show_default=False)]


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"there is no {option} {value!r}: use --{option} {' or '.join(choices)}")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from protocols import PROTOCOL

        try:
            number = version("echo-swarm")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"echo-swarm {number}, protocol {PROTOCOL}")
        raise typer.Exit


@app.callback()
def _common(
    ctx: typer.Context,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """Train a language model together: a peer-to-peer swarm for reinforcement learning.

    [bold]See it work[/bold] on this machine alone, in a minute:

        swarm sim

    [bold]Join[/bold] somebody's run with this computer:

        swarm join '/ip4/203.0.113.7/tcp/31415/p2p/12D3Koo...#sums-abc...'

    [bold]Start[/bold] a run of your own (ADDRESS is what the second line prints):

        swarm init sums
        swarm bootstrap sums/run.toml
        swarm train sums/run.toml --bootstrap ADDRESS
    """
    ctx.obj = Common(home, as_json, debug)


def _merged(ctx: typer.Context, home: Path | None, as_json: bool, debug: bool) -> Common:
    outer: Common = ctx.obj
    common = Common(home or outer.home, as_json or outer.json, debug or outer.debug)
    if common.debug:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    else:
        warnings.simplefilter("ignore", FutureWarning)  # of libraries, for their programmers
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
        logging.getLogger("swarm.node").setLevel(
            logging.ERROR
        )  # its warnings are events too: shown once, on the screen
    return common


@app.command()
def init(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder for the run; made if missing.")],
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="that of the folder")] = None,
    model: Model = "builtin",
    environment: Annotated[str, typer.Option(help="A reasoning-gym task, or module:function.")] = "chain_sum",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a commented run.toml, the owner's key and a trainer's key.

    [bold]Example[/bold]

        swarm init sums --name sums
    """
    common = _merged(ctx, None, as_json, debug)
    from bootstrap.demos import starting_config
    from bootstrap.folder import create_run
    from peers.environments.load import load_environment

    named = name or folder.absolute().name.lower().replace("_", "-").replace(" ", "-")
    template = starting_config(named, model, environment)
    if ":" not in environment:
        load_environment(template.environment)  # a typo is told here, not at the start of the trainer
    run = create_run(folder, template)
    if common.json:
        _print_json({"run": run.run, "config": str(run.config_path), "owner_key": str(run.owner.path)})
        return
    typer.echo(f"run {run.run}\n")
    typer.echo(f"  {run.config_path}      what the run is; read it, change it")
    typer.echo(f"  {run.owner.path}     makes you the owner: keep a copy, give it to nobody\n")
    shown = folder / "run.toml"
    typer.echo(f"next:  swarm bootstrap {shown}")
    typer.echo(f"then:  swarm train {shown} --bootstrap ADDRESS      (the address that the first one prints)")


@app.command()
def bootstrap(  # noqa: PLR0913  the options of a command are its arguments
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="A run.toml or a run id.", show_default=False)],
    link: Annotated[
        list[str] | None, typer.Option("--link", metavar="ADDRESS", help="Another bootstrap peer of the same swarm.")
    ] = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    listen: Listen = None,
    announce: Announce = None,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Start a bootstrap peer: the door to a swarm. Prints the line that others join with.

    [bold]Examples[/bold]

        swarm bootstrap sums/run.toml

        swarm bootstrap sums-abcdefghijklmnop --announce /dns4/example.org/tcp/31415
    """
    common = _merged(ctx, home, as_json, debug)
    from bootstrap.addresses import interface_ips, peer_address
    from bootstrap.invite import join_lines

    named = [_run_of(run) for run in runs]
    where, announced = _listen_addresses(listen, host, port), _own_addresses(announce)
    links = tuple(map(peer_address, link or ()))
    home = home_of("bootstrap", common.home)
    _announce_identity(home, common)

    def on_ready(addresses: Sequence[str]) -> None:
        for run, path in named:
            for line in join_lines(addresses, run, path, interface_ips()):
                typer.echo(line, err=common.json)

    from bootstrap.bootstrap_peer import BootstrapOptions, run_bootstrap

    options = BootstrapOptions(
        home=home,
        runs=tuple(run for run, _ in named),
        bootstrap=links,
        listen=where,
        announce=announced,
    )
    _run_watched(lambda: run_bootstrap(options, on_ready), home, common, steps=None, may_be_live=False)


@app.command()
def train(  # noqa: PLR0913
    ctx: typer.Context,
    run_file: RunFile,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", metavar="ADDRESS", help="Bootstrap peer; instead of those in run.toml."),
    ] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Import the environment `module:function`.")] = False,
    host: Host = "0.0.0.0",
    port: Port = 0,
    listen: Listen = None,
    announce: Announce = None,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Start the trainer of a run: it publishes the manifest, learns from rollouts and publishes adapters.

    [bold]Example[/bold]

        swarm train sums/run.toml --bootstrap /ip4/192.168.1.20/tcp/31415/p2p/12D3Koo...
    """
    common = _merged(ctx, home, as_json, debug)
    from bootstrap.addresses import peer_address
    from bootstrap.folder import open_run
    from bootstrap.invite import trainer_line
    from bootstrap.report import about_run, report_run, summary_lines

    run = open_run(run_file)
    home = home_of("trainer", common.home or run.trainer_home)
    peer_id = _announce_identity(home, common)
    if peer_id not in run.config.trainers:
        raise ValueError(f"{run.config_path}: `trainers` does not hold this peer's id; add {peer_id}")
    addresses = tuple(map(peer_address, bootstrap or run.config.network.bootstrap))
    if not addresses:
        raise ValueError(f"no bootstrap address: pass --bootstrap, or write it into [network] of {run.config_path}")
    where, announced = _listen_addresses(listen, host, port), _own_addresses(announce)

    def on_ready(_: Sequence[str]) -> None:
        typer.echo(trainer_line(addresses, run.run), err=common.json)

    from peers.trainer import TrainerOptions, run_trainer

    options = TrainerOptions(
        home=home,
        run=run.run,
        model=run.config.model.name,
        model_revision=run.config.model.revision or None,
        make_manifest=partial(run.make_manifest, bootstrap=addresses),
        bootstrap=addresses,
        listen=where,
        announce=announced,
        evaluation_problems=run.config.evaluation.problems,
        evaluation_every=run.config.evaluation.every,
        allow_code=allow_code,
    )
    began_s = time.time()
    _run_watched(lambda: run_trainer(options, on_ready), home, common, steps=run.config.max_steps)
    if not common.json:
        about = about_run(run.config, run.run, time.time() - began_s)
        typer.echo("\n".join(summary_lines(report_run(about, [home], began_s))))


@app.command()
def join(  # noqa: PLR0913
    ctx: typer.Context,
    invite: Annotated[
        str, typer.Argument(metavar="INVITE", help="'<address>#<run id>', in quotes.", show_default=False)
    ],
    engine: Annotated[str, typer.Option(help="What generates: auto, transformers, vllm or mlx.")] = "auto",
    device: Annotated[str, typer.Option(help="Where: auto, cpu, cuda or mps.")] = "auto",
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GIB", help="Memory to use at most.", show_default="what is free"),
    ] = None,
    adapter_slots: Annotated[
        int | None,
        typer.Option("--adapter-slots", min=1, help="Versions that vLLM holds at once.", show_default="as needed"),
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option("--allow-code", metavar="NAME", help="Run this code of the run's owner, `module:function`."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads at most.", show_default="all")] = None,
    host: Host = "0.0.0.0",
    port: Port = 0,
    listen: Listen = None,
    announce: Announce = None,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Join a run with this computer: it answers problems, and the trainer learns from the answers.

    [bold]Example[/bold]

        swarm join '/ip4/203.0.113.7/tcp/31415/p2p/12D3Koo...#sums-abc...'
    """
    common = _merged(ctx, home, as_json, debug)
    from bootstrap.invite import parse_invite

    invited = parse_invite(invite)
    _check_choice("engine", engine, ENGINES)
    _check_choice("device", device, DEVICES)
    memory_bytes = _memory_bytes(memory)
    where, announced = _listen_addresses(listen, host, port), _own_addresses(announce)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported, which is later
    home = home_of("inference", common.home)
    _announce_identity(home, common)

    typer.echo(f"looking for {invited.run} ...", err=common.json)

    def on_ready(_: Sequence[str]) -> None:
        typer.echo(f"joined {invited.run}; Ctrl-C leaves", err=common.json)

    from peers.engines.choose import EngineOptions
    from peers.inference import InferenceOptions, run_inference

    options = InferenceOptions(
        home=home,
        run=invited.run,
        bootstrap=invited.addresses,
        listen=where,
        announce=announced,
        engine=EngineOptions(
            engine=engine,
            device=device,
            adapter_slots=adapter_slots,
            memory_bytes=memory_bytes,
        ),
        allow_code=frozenset(allow_code or ()),
    )
    _run_watched(lambda: run_inference(options, on_ready), home, common, steps=None)


@app.command()
def sim(  # noqa: PLR0913
    ctx: typer.Context,
    peers: Annotated[int, typer.Option(min=1, max=PEERS_MAX, help="Inference peers.")] = DEFAULT_PEERS,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps.", show_default="60; with smollm2 24")
    ] = None,
    bootstraps: Annotated[int, typer.Option(min=1, max=BOOTSTRAPS_MAX, help="Bootstrap peers.")] = 1,
    mode: Annotated[str, typer.Option(help="When peers generate: async, sequential or auto.")] = "async",
    max_lag: Annotated[int, typer.Option("--max-lag", min=0, help="The staleness bound.")] = 4,
    refresh_gap: Annotated[
        int, typer.Option("--refresh-gap", min=0, help="Steps that a peer may be behind in sequential mode.")
    ] = 0,
    depth: Annotated[int, typer.Option(min=1, max=24, help="Versions that peers generate ahead in async mode.")] = 1,
    stale: Annotated[
        str, typer.Option(help="drop what is over the bound only, or also downweight what is within it by its age.")
    ] = "drop",
    codec: Annotated[str, typer.Option(help="How versions travel: auto, raw, xor, ulps, int8 or int4.")] = "auto",
    model: Model = "builtin",
    engine: Annotated[str, typer.Option(metavar="E[,E]", help="Engines of the inference peers, in turn.")] = "auto",
    environment: Annotated[str, typer.Option(help="A reasoning-gym task, or module:function.")] = "chain_sum",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Decides the problems.")] = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report, JSON.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Start a whole swarm of real processes on this machine, and train.

    [bold]Examples[/bold]

        swarm sim

        swarm sim --peers 3 --steps 100 --max-lag 2 --report report.json

        swarm sim --model smollm2 --engine transformers,mlx
    """
    common = _merged(ctx, home, as_json, debug)
    _check_choice("mode", mode, MODES)
    _check_choice("stale", stale, STALE)
    _check_choice("codec", codec, CODECS)
    for each in engine.split(","):
        _check_choice("engine", each, ENGINES)
    if report is not None and not report.absolute().parent.is_dir():
        raise ValueError(f"{report}: its folder does not exist")
    from bootstrap.demos import demo_steps, starting_config
    from bootstrap.sim import SimOptions
    from protocols.manifest import CoordinationSpec, TransferSpec

    config = msgspec.structs.replace(
        starting_config("sim", model, environment),
        seed=seed,
        max_lag=max_lag,
        max_steps=demo_steps(model) if steps is None else steps,
        coordination=CoordinationSpec(mode=mode, refresh_gap=refresh_gap, depth=depth, stale=stale),
        transfer=TransferSpec(codec=codec),
    )
    with ExitStack() as stack:
        root = _sim_home(common.home, keep, stack)
        engines = tuple(engine.split(","))
        options = SimOptions(home=root, config=config, peers=peers, engines=engines, bootstraps=bootstraps)
        result = _run_sim(options, common)
    _hand_over(result, report, root if common.home is not None or keep else None, common)
    if result["audit"]["ok"] is not True:
        raise typer.Exit(FAILED)


@app.command()
def doctor(  # noqa: PLR0913
    ctx: typer.Context,
    invite: Annotated[
        str | None, typer.Argument(metavar="[INVITE]", help="'<address>#<run id>', in quotes.", show_default=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="As join: auto, transformers, vllm or mlx.")] = "auto",
    device: Annotated[str, typer.Option(help="As join: auto, cpu, cuda or mps.")] = "auto",
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GIB", help="As join.", show_default="what is free")
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option("--allow-code", metavar="NAME", help="As join: run this code of the run's owner."),
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download the run's model where it is missing.")] = False,
    host: Host = "0.0.0.0",
    port: Port = 0,
    listen: Listen = None,
    home: Home = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine and its way into a swarm, before joining. Leaves nothing behind; exit code 1 on a problem.

    Give it the invitation and the options that `swarm join` will get.

    [bold]Examples[/bold]

        swarm doctor

        swarm doctor '/ip4/203.0.113.7/tcp/31415/p2p/12D3Koo...#sums-abc...'
    """
    common = _merged(ctx, home, as_json, debug)
    from bootstrap.invite import parse_invite

    invited = None if invite is None else parse_invite(invite)
    _check_choice("engine", engine, ENGINES)
    _check_choice("device", device, DEVICES)
    memory_bytes, where = _memory_bytes(memory), _listen_addresses(listen, host, port)
    from bootstrap.doctor import DoctorOptions
    from bootstrap.doctor_command import Examined, examine
    from peers.engines.choose import EngineOptions

    options = DoctorOptions(
        home=home_of("inference", common.home),
        engine=EngineOptions(engine=engine, device=device, memory_bytes=memory_bytes),
        invite=invited,
        listen=where,
        allow_code=frozenset(allow_code or ()),
        fetch=fetch,
    )
    found: list[Examined] = []

    async def work() -> None:
        found.append(await examine(options, common.json))

    _run_to_end(work, terminated=TERMINATED)
    code = FAILED if found[0].has_problem else 0
    if found[0].hangs:  # in a thread, which Python would wait for
        sys.stdout.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)


class _StatusCommand(typer.core.TyperCommand):
    """`--watch` takes a number where one follows, and has a default where none does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        alone = f"--watch={WATCH_S:g}"
        pairs = zip(args, [*args[1:], ""], strict=True)
        words = [alone if word == "--watch" and not _is_number(after) else word for word, after in pairs]
        return super().parse_args(ctx, words)


def _is_number(word: str) -> bool:
    return word.lstrip("+-.")[:1].isdigit()


@app.command(cls=_StatusCommand)
def status(
    ctx: typer.Context,
    invite: Annotated[
        str, typer.Argument(metavar="INVITE", help="'<address>#<run id>', in quotes.", show_default=False)
    ],
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="[SECONDS]", help="Keep showing, every 2 s or as often.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How a run is doing now: its peers, their versions and lags, the coordinator. Joins nothing.

    [bold]Examples[/bold]

        swarm status '/ip4/203.0.113.7/tcp/31415/p2p/12D3Koo...#sums-abc...'

        swarm status --watch 5 '/ip4/203.0.113.7/tcp/31415/p2p/12D3Koo...#sums-abc...'
    """
    common = _merged(ctx, None, as_json, debug)
    from bootstrap.invite import parse_invite

    invited = parse_invite(invite)
    if watch is not None and not WATCH_MIN_S <= watch <= WATCH_MAX_S:
        raise ValueError(f"--watch {watch:g}: give from {WATCH_MIN_S:g} to {WATCH_MAX_S:g} seconds")
    from bootstrap.status_command import show_status

    _run_to_end(lambda: show_status(invited, watch, common.json), terminated=TERMINATED if watch is None else 0)


@app.command()
def audit(
    ctx: typer.Context,
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="The trainer's ledger.", show_default=False)],
    run: Annotated[str | None, typer.Option(metavar="RUN_ID", help="Must be the ledger of this run.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Verify a ledger offline: signatures, chain, contents and the staleness bound.

    [bold]Example[/bold]

        swarm audit sums/trainer/ledger.echo --run sums-abcdefghijklmnop
    """
    common = _merged(ctx, None, as_json, debug)
    from bootstrap.audit_command import audit_fields, audit_file, audit_lines
    from bootstrap.invite import check_run_id

    result = audit_file(ledger, None if run is None else check_run_id(run))
    if common.json:
        _print_json(audit_fields(result))
    else:
        typer.echo("\n".join(audit_lines(result)))
    if not result.ok:
        raise typer.Exit(FAILED)


def _run_of(text: str) -> tuple[str, Path | None]:
    """The run id of RUN, and its run.toml where it is one."""
    from bootstrap.invite import check_run_id

    path = Path(text)
    if path.suffix == ".toml" or path.exists():
        from bootstrap.folder import open_run

        return open_run(path).run, path
    return check_run_id(text), None


def _memory_bytes(gib: float | None) -> int | None:
    if gib is not None and not 0 < gib < 2**20:
        raise ValueError(f"--memory {gib:g}: give the GiB that may be used")
    return None if gib is None else round(gib * 2**30)


def _listen_addresses(listen: list[str] | None, host: str, port: int) -> tuple[str, ...]:
    from bootstrap.addresses import listen_address

    return _own_addresses(listen) or (listen_address(host, port),)


def _own_addresses(addresses: list[str] | None) -> tuple[str, ...]:
    from bootstrap.addresses import own_address

    return tuple(map(own_address, addresses or ()))


def _announce_identity(home: Path, common: Common) -> str:
    """Say who this is, and where the key is: the first thing that a peer prints (case B08)."""
    from swarm.identity import load_identity

    identity, created = load_identity(home / KEY_FILE)
    text = f"{'new identity' if created else 'identity'} {identity.peer_id}, key {identity.path}"
    typer.echo(typer.style(text, bold=created or None), err=common.json)
    return identity.peer_id


def _run_watched(
    work: Callable[[], Awaitable[None]], home: Path, common: Common, steps: int | None, may_be_live: bool = True
) -> None:
    """Run a peer to its end, and show what it writes into its metrics file."""
    from bootstrap.events import Tail
    from bootstrap.state import SwarmState
    from bootstrap.view import Output, choose_output, screen_for, watched

    output = choose_output(common.json)
    if output is Output.LIVE and not may_be_live:
        output = Output.LINES
    state = SwarmState(steps=steps)
    tails = [Tail(home / METRICS_FILE, skip_existing=True)]
    with screen_for(output, state) as screen:
        _run_to_end(lambda: watched(work, tails, state, screen))


def _sim_home(given: Path | None, keep: bool, stack: ExitStack) -> Path:
    """The folder of a simulation: the given one, which must be empty, or one that vanishes behind it."""
    if given is not None:
        root = given.expanduser().absolute()
        if root.exists() and any(root.iterdir()):
            raise ValueError(f"{root}: not empty; give a new folder, a simulation does not continue an earlier one")
        return root
    if keep:
        return Path(tempfile.mkdtemp(prefix="swarm-sim-"))
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-sim-")))


def _run_sim(options: Any, common: Common) -> dict[str, Any]:
    from bootstrap.sim import simulate
    from bootstrap.state import SwarmState
    from bootstrap.view import Output, choose_output, screen_for

    state = SwarmState(steps=options.config.max_steps)
    results: list[dict[str, Any]] = []
    # With --json standard output holds the report and nothing else.
    output, stream = (Output.LINES, sys.stderr) if common.json else (choose_output(False), sys.stdout)
    with screen_for(output, state, stream) as screen:

        async def work() -> None:
            results.append(await simulate(options, state, screen))

        _run_to_end(work, terminated=TERMINATED)
    return results[0]


def _run_to_end(work: Callable[[], Coroutine[Any, Any, None]], terminated: int = 0) -> None:
    """Run to the end, or to the first SIGINT, SIGTERM or SIGHUP, which cancels; the second ends the process at once."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        received = runner.run(_until_signal(work()))
    if received is not None:
        raise typer.Exit(INTERRUPTED if received == signal.SIGINT else terminated)


async def _until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    """The signal that ended the work, or None."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            os._exit(INTERRUPTED)
        received.append(number)
        if number == signal.SIGINT:
            typer.echo("stopping; Ctrl-C again ends at once", err=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return received[0] if received else None


def _print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def _hand_over(result: dict[str, Any], report: Path | None, kept: Path | None, common: Common) -> None:
    """Write the report, print it, and say where things are."""
    if report is not None:
        report.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    _print_report(result, common)
    if kept is not None:
        typer.echo(f"kept in    {kept}", err=common.json)
    if report is not None:
        typer.echo(f"report     {report}", err=common.json)


def _print_report(report: dict[str, Any], common: Common) -> None:
    from bootstrap.report import summary_lines

    if common.json:
        _print_json(report)
    else:
        typer.echo("\n".join(summary_lines(report)))


def main() -> None:
    """The console script."""
    try:
        app(prog_name="swarm")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
