"""`swarm` as people type it: real commands in a folder, and every process that one of them leaves behind.

A mark in the environment is inherited by whatever a command starts, p2pd included, wherever it ends up in the
process tree; so what is left behind is found, and nothing else is.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.processes import ROOT, START_S, Peer, wait_until

_INSTALLED = Path(sys.executable).with_name("swarm")
COMMAND = [str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "bootstrap.main"]
MARK = "ECHO_SWARM_TEST"
END_S = 10.0  # p2pd ends within seconds of its parent


@dataclass
class Terminal(Peer):
    """One command that runs, or has run."""

    mark: str
    started_s: float
    """Unix time."""

    @property
    def output(self) -> str:
        return "\n".join(self.lines())

    def errors(self) -> list[str]:
        """What `swarm` said when it failed, and everything behind it."""
        lines = self.lines()
        first = next((at for at, line in enumerate(lines) if line.startswith("swarm: ")), len(lines))
        return lines[first:]

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this command that still live."""
        return list(_marked(self.mark))

    def ended_clean(self, timeout_s: float = START_S) -> int:
        """Its exit code; no process may be left."""
        code = self.wait(timeout_s)
        wait_until(lambda: not self.left_behind(), END_S)
        return code


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == mark:
                yield process
        except psutil.Error:
            continue


class Terminals:
    """Commands typed in one folder; all of them, and what they started, end with the test."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.folder = folder
        self.all: list[Terminal] = []

    def type(
        self,
        *words: object,
        who: str = "anna",
        cwd: Path | None = None,
        before: str = "",
        wrap: tuple[str, ...] = (),
        **environment: str,
    ) -> Terminal:
        """Start `swarm <words>`. `who` is a person with a HOME of their own; `before` is Python that runs first."""
        command = (
            COMMAND if not before else [sys.executable, "-c", f"{before}\nfrom bootstrap.main import main\nmain()"]
        )
        return self._start([*wrap, *command, *map(str, words)], who, cwd, environment)

    def type_line(self, line: str, who: str = "anna", wrap: tuple[str, ...] = (), **environment: str) -> Terminal:
        """Run a printed line in a shell, exactly as it stands."""
        first = shlex.split(line)[0]
        assert first == "swarm", line
        path = f"{_shim(self.folder)}{os.pathsep}{os.environ['PATH']}"
        return self._start([*wrap, "sh", "-c", f"exec {line}"], who, None, {"PATH": path} | environment)

    def _start(self, command: list[str], who: str, cwd: Path | None, environment: Mapping[str, str]) -> Terminal:
        home = self.folder / who
        home.mkdir(exist_ok=True)
        log = self.folder / f"{len(self.all)}.log"
        mark = f"{log}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        own = {"HOME": str(home), MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        started_s = time.time()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=kept | own | environment,
            )
        terminal = Terminal(process, log, mark, started_s)
        self.all.append(terminal)
        return terminal

    def close(self) -> None:
        for terminal in self.all:
            terminal.kill(signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        for terminal in self.all:
            try:
                terminal.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                terminal.kill()
                terminal.process.wait()
            for process in terminal.left_behind():
                process.kill()


def _shim(folder: Path) -> Path:
    """A folder for PATH that holds `swarm`, whether it is installed or not."""
    bin_folder = folder / "bin"
    if not bin_folder.exists():
        bin_folder.mkdir()
        script = bin_folder / "swarm"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        script.chmod(0o755)
    return bin_folder


def printed(terminal: Terminal, start: str, under: str = "") -> str:
    """The first printed line that begins with `start` behind the line `under`."""

    def found() -> str | None:
        lines = [line.strip() for line in terminal.lines()]
        at = next((at for at, line in enumerate(lines) if line.startswith(under)), None)
        return None if at is None else next((line for line in lines[at:] if line.startswith(start)), None)

    line: str = wait_until(found, START_S, terminal)
    return line


def rewrite(run_file: Path, values: Mapping[str, str]) -> None:
    """Change fields of a run.toml, as with an editor: `{"model.name": '"x"'}`."""
    left, lines, section = dict(values), [], ""
    for line in run_file.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        path = section + line.partition(" = ")[0]
        lines.append(f"{path.removeprefix(section)} = {left.pop(path)}" if path in left else line)
    assert not left, f"no such fields in {run_file}: {left}"
    run_file.write_text("\n".join(lines) + "\n")
