"""`swarm doctor [INVITE]`: one check after the other, each bounded, each a line once it is known (docs/doctor.md).

    Check --bounded--> Finding --Screen--> a line, or an element of a JSON array

Checks run one at a time: an import beside it would make a line look slow and a clock late.
"""

import asyncio
import logging
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TextIO

import msgspec
import typer

from bootstrap import doctor, doctor_model
from bootstrap.doctor import Check, DoctorOptions, Finding, NotKnown, Patient, warning
from bootstrap.errors import explain, one_line

log = logging.getLogger(__name__)

# For all checks: 10 s on an idle laptop, most of it imports, which alone take a minute where the disk is busy.
TOTAL_S = 120.0
FETCH_S = 24 * 3600.0  # --fetch: until it is there, or somebody loses patience
CANCEL_S = 2.0  # for a check that ran out of time to end
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "problem": typer.colors.RED}
_INDENT = 22  # level and name

MACHINE = (
    Check("python", doctor.check_python, "looking at Python", 1.0),
    Check("packages", doctor.check_packages, "importing torch and transformers", 60.0),
    Check("home", doctor.check_home, "looking at this peer's folder", 3.0),
    Check("devices", doctor.check_devices, "asking for GPUs", 12.0),
    Check("p2pd", doctor.check_p2pd, "starting p2pd", 60.0),
    Check("ports", doctor.check_ports, "trying to listen", 3.0),
    Check("swarm", doctor.check_swarm, "connecting", 12.0),
    Check("clock", doctor.check_clock, "comparing clocks", 12.0),
)
RUN = (
    Check("reachability", doctor.check_reachability, "having doors dial back", 12.0),
    Check("run", doctor.check_run, "asking for the run", 8.0),
    Check("bandwidth", doctor.check_bandwidth, "downloading a version", 12.0),
    Check("environment", doctor.check_environment, "making problems", 20.0),
)
REST = (
    Check("disk", doctor.check_disk, "looking at the disk", 3.0),
    Check("model", doctor_model.check_model, "reading the model", 20.0),
    Check("engine", doctor_model.check_engine, "looking for engines", 20.0),
    Check("memory", doctor_model.check_memory, "estimating memory", 10.0),
)


class Line(msgspec.Struct, frozen=True):
    """An element of what `--json` prints."""

    check: str
    level: doctor.Level
    found: str
    advice: str


def checks_of(options: DoctorOptions) -> tuple[Check, ...]:
    """Without an invitation there is no run to look at."""
    return MACHINE + (RUN if options.invite is not None else ()) + REST


@dataclass(frozen=True, slots=True)
class Examined:
    """All lines."""

    lines: tuple[Line, ...]
    hangs: bool
    """A thread has not come back from a check that ran out of time."""

    @property
    def has_problem(self) -> bool:
        """What decides the exit code."""
        return any(line.level == "problem" for line in self.lines)

    @property
    def verdict(self) -> str:
        """The last line for people."""
        levels = Counter(line.level for line in self.lines)
        counted = [f"{n} {level}{'s' if n > 1 else ''}" for level in ("problem", "warning") if (n := levels[level])]
        if self.has_problem:
            return f"{' and '.join(counted)}: with these options `swarm join` would not do"
        return ", ".join(["no problem found", *counted]) if counted else "all is well: this machine can join"


async def examine(options: DoctorOptions, as_json: bool, stream: TextIO | None = None) -> Examined:
    """Check, and show what is found as it is found."""
    show = _silent if as_json else _terminal if sys.stdout.isatty() and stream is None else _plain
    stream = stream or sys.stdout
    lines: list[Line] = []
    until_s = time.monotonic() + (FETCH_S if options.fetch else TOTAL_S)
    async with AsyncExitStack() as stack:
        patient = Patient(options, stack)
        stack.push_async_callback(patient.close)
        for check in checks_of(options):
            with show(check, stream) as found:
                level, *texts = await _bounded(check, patient, until_s)
                lines.append(Line(check.name, level, *map(one_line, texts)))
                found(lines[-1])
    examined = Examined(tuple(lines), patient.at_work > 0)
    print(msgspec.json.encode(lines).decode() if as_json else examined.verdict, file=stream, flush=True)
    return examined


async def _bounded(check: Check, patient: Patient, until_s: float) -> Finding:
    """What the check finds; if it breaks or takes too long, that."""
    left_s = until_s - time.monotonic()
    limit_s = left_s if patient.options.fetch else min(check.limit_s, left_s)
    if limit_s <= 0:
        return warning(
            f"not checked: the {TOTAL_S:g} s were over", "run it again; the lines above say what took so long"
        )
    task = asyncio.ensure_future(check.look(patient))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    finally:
        task.cancel()
    if not done:
        await asyncio.wait({task}, timeout=CANCEL_S)
        return warning(
            f"no result after {limit_s:.0f} s of {check.waits_for}", "run it again when less else is going on"
        )
    error = task.exception()
    return task.result() if error is None else _broken(check, error)


def _broken(check: Check, error: BaseException) -> Finding:
    if isinstance(error, NotKnown):
        return warning(f"not checked: {error}", "see the lines above")
    log.debug("check %s", check.name, exc_info=error)
    explained = explain(error)
    said = f"{type(error).__name__}: {error}" if explained is None else explained[0]
    return warning(f"could not be checked: {said}", "run it again; report it with --debug if it stays")


# ---------------------------------------------------------------------- what is shown

Show = Callable[[Line], None]


@contextmanager
def _silent(_: Check, __: TextIO) -> Iterator[Show]:
    yield lambda line: None


@contextmanager
def _plain(_: Check, stream: TextIO) -> Iterator[Show]:
    yield lambda line: print(text_of(line), file=stream, flush=True)


@contextmanager
def _terminal(check: Check, stream: TextIO) -> Iterator[Show]:
    """While it takes, what is waited for; then the line, wrapped to the width."""
    stream.write(typer.style(f"{'':8} {check.name:<12} {check.waits_for} ...", dim=True))
    stream.flush()

    def found(line: Line) -> None:
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(
            text_of(line),
            max(width, 2 * _INDENT),
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        stream.write(f"\r\x1b[K{typer.style(text[:8], fg=_COLOURS[line.level])}{text[8:]}\n")
        stream.flush()

    yield found


def text_of(line: Line) -> str:
    """One line: level, name, what was found, what to do."""
    return f"{line.level:<8} {line.check:<12} {line.found}" + (f"; next: {line.advice}" if line.advice else "")
