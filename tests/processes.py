"""Real peers as child processes, each with its log; all of them end with the test, by process id."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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


class Swarm:
    """Starts peers in one folder and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o700)
        self.peers: list[Peer] = []
        self.address = ""

    def start(self, role: str, *arguments: str) -> Peer:
        log = self.folder / f"{len(self.peers)}-{role}.log"
        command = [sys.executable, "-m", "tests.peer_process", role, str(self.folder), *arguments]
        if role != "bootstrap":
            command += ["--bootstrap", self.address]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        peer = Peer(process, log)
        self.peers.append(peer)
        return peer

    def start_bootstrap(self, *arguments: str) -> Peer:
        peer = self.start("bootstrap", *arguments)
        self.address = peer.wait_for("ready").split()[1]
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.kill(signal.SIGTERM)
        for peer in self.peers:
            try:
                peer.process.wait(5)
            except subprocess.TimeoutExpired:
                peer.kill()
                peer.process.wait()
