"""`swarm sim`: a whole swarm of real processes on this machine, on loopback.

    create_run -> bootstrap peers -> trainer and inference peers -> trainer done -> everybody done -> report

Bootstrap peers start one after the other, each linked to those before it. Once they are ready all others start at
once: they load their libraries while they wait for the trainer's manifest.

Each child is the same `swarm` command that a person would type, with a home folder of its own; what it does is
read from its metrics file, what it says from its log. Children are in sessions of their own, so that Ctrl-C on
the terminal reaches only us, and on a leash (bootstrap/leash.py), so that none outlives us.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bootstrap.addresses import reachable
from bootstrap.config import RunConfig
from bootstrap.errors import Failed
from bootstrap.events import Event, Tail
from bootstrap.folder import create_run
from bootstrap.home import METRICS_FILE
from bootstrap.invite import format_invite
from bootstrap.report import about_run, report_run
from bootstrap.state import SwarmState
from bootstrap.view import REFRESH_S, Screen

READY_S = 180.0  # importing torch and loading a model takes 10 s on an idle laptop; several at once share the disk
GOODBYE_S = 30.0  # within which every peer of a finished run ends by itself (case B43)
STOP_S = 10.0  # from SIGTERM to SIGKILL: a peer finishes its sentence in 3 s
STOP_POLL_S = 0.05
LAST_LINES = 12
_ROLES = {"bootstrap": "bootstrap", "train": "trainer", "join": "inference"}
_LOOPBACK = ("--host", "127.0.0.1", "--port", "0")

# Several processes share the cores: one thread each, or they only get in one another's way.
_ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
} | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What to simulate."""

    home: Path
    config: RunConfig
    """Its `trainers` is empty: the simulation makes the trainer."""
    peers: int
    engines: tuple[str, ...] = ("auto",)
    """Of the inference peers, in turn."""
    bootstraps: int = 1
    command: tuple[str, ...] = (sys.executable, "-m", "bootstrap.main")
    ready_s: float = READY_S
    goodbye_s: float = GOODBYE_S

    @property
    def own_code(self) -> bool:
        """The environment is code that was named on this command line, by the same person."""
        return ":" in self.config.environment.name


@dataclass(slots=True, eq=False)
class Child:
    """One process of the swarm."""

    name: str
    role: str
    home: Path
    process: asyncio.subprocess.Process
    tail: Tail
    log: Path
    started_s: float
    ready: Event | None = None
    mourned: bool = False
    """Its death has been dealt with."""

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.returncode

    def last_lines(self) -> str:
        """The end of its log, indented."""
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "".join(f"\n  {line}" for line in lines) or "\n  (it said nothing)"


async def simulate(options: SimOptions, state: SwarmState, screen: Screen) -> dict[str, Any]:
    """Train to the end and report. Raises Failed when a process that is needed dies or does not start."""
    began_s = time.monotonic()
    folder = create_run(options.home, options.config)
    async with Children(options, state, screen) as children:
        addresses = await _start_bootstraps(children, str(folder.config_path))
        trainer = await _start_trainer(children, str(folder.config_path), addresses)
        inference = await _start_inference(children, format_invite(addresses, folder.run))
        helpers = [child for child in children.all if child is not trainer]
        await children.ready(trainer, helpers)
        await children.until(lambda: trainer.code is not None, [trainer], helpers)
        await children.farewell(inference)
    about = about_run(folder.config, folder.run, time.monotonic() - began_s, tuple(children.warnings))
    return report_run(about, [child.home for child in children.all])


async def _start_bootstraps(children: "Children", run_file: str) -> list[str]:
    """Their addresses on loopback, once all are ready."""
    addresses: list[str] = []
    for number in range(1, children.options.bootstraps + 1):
        name = f"bootstrap-{number}" if number > 1 else "bootstrap"
        child = await children.start(name, "bootstrap", run_file, *_LOOPBACK, *_each("--link", addresses))
        addresses.append(_loopback(await children.ready(child)))
    return addresses


async def _start_trainer(children: "Children", run_file: str, addresses: Sequence[str]) -> "Child":
    allow = ("--allow-code",) if children.options.own_code else ()
    return await children.start("trainer", "train", run_file, *_each("--bootstrap", addresses), *_LOOPBACK, *allow)


async def _start_inference(children: "Children", invite: str) -> list["Child"]:
    options = children.options
    allow = ("--allow-code", options.config.environment.name) if options.own_code else ()
    engines = [options.engines[number % len(options.engines)] for number in range(options.peers)]
    return [
        await children.start(f"peer-{number}", "join", invite, "--engine", engine, *_LOOPBACK, *allow)
        for number, engine in enumerate(engines, 1)
    ]


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


class Children:
    """The processes of a simulation, in the order of their start. Leaving the block ends them all."""

    def __init__(self, options: SimOptions, state: SwarmState, screen: Screen) -> None:
        self.options, self.state, self.screen = options, state, screen
        self.all: list[Child] = []
        self.warnings: list[str] = []
        """What was seen from outside: a dead process cannot write it into its metrics."""

    async def __aenter__(self) -> "Children":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        self._look()

    async def start(self, name: str, command: str, *arguments: str) -> Child:
        """Start `swarm <command> <arguments>` with a home of its own."""
        home = self.options.home / name
        home.mkdir(mode=0o700, exist_ok=True)
        log = home / "output.log"
        leash = (sys.executable, "-m", "bootstrap.leash", str(os.getpid()))
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *leash,
                *self.options.command,
                *("--home", str(home)),
                command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )
        child = Child(name, _ROLES[command], home, process, Tail(home / METRICS_FILE), log, time.monotonic())
        self.all.append(child)
        return child

    async def ready(self, child: Child, helpers: Sequence[Child] = ()) -> Event:
        """Its `ready` event. Raises Failed when it dies before, or takes too long."""
        needed = [child for child in self.all if child not in helpers]
        try:
            async with asyncio.timeout(self.options.ready_s):
                await self.until(lambda: child.ready is not None, needed, helpers)
        except TimeoutError:
            waited = f"{self.options.ready_s:g} s"
            raise Failed(f"{child.name} was not ready after {waited}; its last lines:{child.last_lines()}") from None
        assert child.ready is not None
        return child.ready

    async def until(self, done: Callable[[], bool], needed: Sequence[Child], helpers: Sequence[Child] = ()) -> None:
        """Watch until `done`. Raises Failed when one of the needed dies in an error, or all helpers of a role have."""
        while True:
            self._look()
            for child in needed:
                if child.code is not None and not (child.code == 0 and done()):
                    raise Failed(f"{child.name} {_how(child.code)}; its last lines:{child.last_lines()}")
            if done():
                return
            self._mourn(helpers)
            await asyncio.sleep(REFRESH_S)

    async def farewell(self, helpers: Sequence[Child]) -> None:
        """The run is over: everybody ends by itself, or is told to."""
        try:
            async with asyncio.timeout(self.options.goodbye_s):
                await asyncio.gather(*(child.process.wait() for child in helpers))
        except TimeoutError:
            for child in helpers:
                if child.code is None:
                    self._warn(child, f"{child.name} did not end within {self.options.goodbye_s:g} s of the run's end")

    def _look(self) -> None:
        """Take in what the children wrote since the last time."""
        events = []
        for child in self.all:
            for event in child.tail.read():
                events.append(event)
                if event["event"] == "ready":
                    child.ready = event
        self._show(sorted(events, key=lambda event: event["t"]))

    def _show(self, events: Sequence[Event]) -> None:
        for event in events:
            self.state.apply(event)
        self.screen.show(events)

    def _mourn(self, helpers: Sequence[Child]) -> None:
        """A helper that died is missed, but the swarm goes on while there is another of its role."""
        for child in helpers:
            if child.code is None and child.ready is None and time.monotonic() - child.started_s > self.options.ready_s:
                child.process.kill()  # it hangs; its death is noticed in the next turn
            if child.code not in (None, 0) and not child.mourned:
                child.mourned = True
                if child.ready is not None:
                    self.state.gone(child.ready["peer"])
                self._warn(child, f"{child.name} {_how(child.code)}")
        for role in {child.role for child in helpers}:
            team = [child for child in helpers if child.role == role]
            if all(child.mourned for child in team):
                raise Failed(f"all {role} peers have died; the last lines of one:{team[0].last_lines()}")

    def _warn(self, child: Child, text: str) -> None:
        self.warnings.append(text)
        peer = child.ready["peer"] if child.ready is not None else child.name
        about = {"t": time.time(), "peer": peer, "role": child.role}
        self._show([{**about, "event": "warning", "code": "child", "text": text}])

    async def _stop(self) -> None:
        """SIGTERM, a bounded wait, SIGKILL; then whatever they had started and left behind."""
        running = [child for child in self.all if child.code is None]
        descendants = _descendants(running)  # looked up while their parents live: later nobody knows whose they are
        for child in running:
            child.process.terminate()
        deadline_s = time.monotonic() + STOP_S
        while any(child.code is None for child in running) and time.monotonic() < deadline_s:
            await asyncio.sleep(STOP_POLL_S)
            descendants |= _descendants(running)
        for child in running:
            if child.code is None:
                child.process.kill()
            await child.process.wait()
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the pid is still the same process


def _descendants(children: Sequence[Child]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(child.process.pid).children(recursive=True))
    return found


def _how(code: int | None) -> str:
    """How a process ended, for people."""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


def _loopback(ready: Event) -> str:
    local = reachable(ready["addresses"], ["127.0.0.1"]).local
    if not local:
        raise Failed(f"the bootstrap peer does not listen on loopback: {ready['addresses']}")
    return local[0]
