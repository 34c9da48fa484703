"""Real peers as child processes, each with its log; all of them end with the test, by process id."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bootstrap.events import Event, Tail
from bootstrap.home import KEY_FILE, METRICS_FILE
from swarm.identity import load_identity

ROOT = Path(__file__).parent.parent
START_S = 90.0  # imports of torch and transformers on a loaded machine with two cores


@dataclass
class Peer:
    """One running peer."""

    process: subprocess.Popen[bytes]
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def wait_for(self, word: str, timeout_s: float = START_S) -> str:
        """The first line that begins with `word`."""
        return wait_until(lambda: next((line for line in self.lines() if line.startswith(word)), None), timeout_s, self)

    def wait(self, timeout_s: float = START_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n" + "\n".join(self.lines()[-20:])) from None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def wait_until(found, timeout_s: float, peer: Peer | None = None):  # type: ignore[no-untyped-def]
    """The first true value of `found()`; an AssertionError with the peer's last lines if it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = found()
        if value:
            return value
        if peer is not None and peer.process.poll() is not None:
            value = found()
            if value:
                return value
            raise AssertionError(f"peer ended with {peer.process.returncode}:\n" + "\n".join(peer.lines()[-20:]))
        time.sleep(0.05)
    raise AssertionError("timed out" + ("" if peer is None else ":\n" + "\n".join(peer.lines()[-20:])))


@dataclass
class Member(Peer):
    """A peer of a swarm: what it was started as, and what it writes into its metrics file."""

    role: str
    arguments: tuple[str, ...]
    home: Path
    started_s: float = field(default_factory=time.time)
    paused: bool = False
    _peer_id: str = ""
    _tail: Tail = field(init=False)
    _seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = Tail(self.home / METRICS_FILE)

    def events(self, name: str = "", since_s: float = 0.0) -> list[Event]:
        """Events of this home so far, of all its processes: those of this name, from this moment (unix seconds) on."""
        self._seen += self._tail.read()
        return [each for each in self._seen if each["t"] >= since_s and name in ("", each["event"])]

    @property
    def peer_id(self) -> str:
        """Known once it has its key."""
        self._peer_id = self._peer_id or load_identity(self.home / KEY_FILE)[0].peer_id
        return self._peer_id

    @property
    def obeys(self) -> tuple[str | None, int]:
        """The coordinator that it obeys now, and the term; (None, 0) before it has heard of any."""
        return next(((e["coordinator"], e["term"]) for e in reversed(self.events("leader", self.started_s))), (None, 0))

    def wait_for_event(self, name: str, timeout_s: float = START_S, since_s: float = 0.0, **fields: object) -> Event:
        """The first event of this name with these fields, from this moment on."""

        def found() -> Event | None:
            return next((e for e in self.events(name, since_s) if fields.items() <= e.items()), None)

        event: Event = wait_until(found, timeout_s, self)
        return event

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nobody answers."""
        self.kill(signal.SIGSTOP)
        self.wait_paused()

    def wait_paused(self, timeout_s: float = START_S) -> None:
        """Wait until it is stopped, by whomever."""
        process = psutil.Process(self.process.pid)
        wait_until(lambda: self.process.poll() is None and process.status() == psutil.STATUS_STOPPED, timeout_s, self)
        self.paused = True

    def resume(self) -> None:
        self.kill(signal.SIGCONT)
        self.paused = False

    @property
    def alive(self) -> bool:
        """Runs, and is not paused."""
        return self.process.poll() is None and not self.paused


class Swarm:
    """Starts peers in one folder and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o700)
        self.peers: list[Member] = []
        self.addresses: dict[str, str] = {}
        """Of each bootstrap peer, by the name of its home."""

    def start(self, role: str, *arguments: str) -> Member:
        log = self.folder / f"{len(self.peers)}-{role}.log"
        name = arguments[arguments.index("--home") + 1] if "--home" in arguments else role
        command = [sys.executable, "-m", "tests.peer_process", role, str(self.folder), *arguments]
        for home, address in self.addresses.items():
            if home != name:
                command += ["--bootstrap", address]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        peer = Member(process, log, role, arguments, self.folder / name)
        self.peers.append(peer)
        return peer

    def start_bootstrap(self, *arguments: str) -> Member:
        """A bootstrap peer, linked with those before it; it comes back at the address that it has now."""
        peer = self.start("bootstrap", *arguments)
        address = self.addresses[peer.home.name] = peer.wait_for("ready").split()[1]
        if "--port" not in peer.arguments:
            peer.arguments += ("--port", address.split("/")[4])
        return peer

    def again(self, ended: Member) -> Member:
        """Start a peer again on its home, as what it was."""
        return self.start(ended.role, *ended.arguments)

    @property
    def alive(self) -> list[Member]:
        """Peers that run, and are not paused."""
        return [peer for peer in self.peers if peer.alive]

    def close(self) -> None:
        for peer in self.peers:
            peer.kill()
        for peer in self.peers:
            peer.process.wait()


LEASE_S = 6.0  # the shortest that a manifest may ask for
COORDINATORS = ("bootstrap-1", "bootstrap-2")


@dataclass(frozen=True)
class Elected:
    """A coordinator that every peer obeys."""

    leader: Member
    term: int
    at_s: float
    """When the last of them began to (unix seconds)."""


class Electorate(Swarm):
    """A trainer, inference peers and two linked bootstrap peers; the trainer and those two may lead."""

    def start_all(self, workers: int, *arguments: str) -> Elected:
        """Start everybody, all with these arguments; wait until one leads and all obey it."""
        for home in COORDINATORS:
            self.start_bootstrap("--home", home)
        may_lead = [word for home in COORDINATORS for word in ("--coordinator", home)]
        self.trainer = self.start("trainer", "--lease", f"{LEASE_S:g}", *may_lead, *arguments)
        self.workers = [self.start(f"worker-{number}", *arguments) for number in range(1, workers + 1)]
        for peer in (self.trainer, *self.workers):
            peer.wait_for("ready")
        return self.wait_for_leader()

    def wait_for_leader(
        self, above: int = 0, peers: Sequence[Member] | None = None, timeout_s: float = START_S
    ) -> Elected:
        """One coordinator in a term above this one, obeyed by all these peers: by default those that run."""
        elected: Elected = wait_until(lambda: self._elected(above, peers or self.alive), timeout_s)
        return elected

    def _elected(self, above: int, peers: Sequence[Member]) -> Elected | None:
        obeyed = {peer.obeys for peer in peers}
        coordinator, term = next(iter(obeyed))
        if len(obeyed) > 1 or coordinator is None or term <= above:
            return None
        leader = next(peer for peer in self.alive if peer.peer_id == coordinator)
        return Elected(leader, term, max(peer.events("leader", peer.started_s)[-1]["t"] for peer in peers))

    def again(self, ended: Member) -> Member:
        peer = super().again(ended)
        if ended is self.trainer:
            self.trainer = peer
        return peer

    def step_times(self, since_s: float = 0.0) -> list[float]:
        """When the trainer's steps were done (unix seconds), over its restarts."""
        return [event["t"] for event in self.trainer.events("step", since_s)]

    def wait_for_steps(self, count: int, since_s: float) -> None:
        """That many more steps from this moment on."""
        wait_until(lambda: len(self.step_times(since_s)) >= count, START_S, self.trainer)
