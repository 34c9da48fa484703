"""Machines as network namespaces on two switches, and the cable between the switches, which can be cut.

    machine --veth-- [switch a] --trunk a====trunk b-- [switch b] --veth-- machine

A machine shares nothing with this one but the disk. Both switches stand in one more namespace, so that no name but
those of the namespaces can meet another test's; and deleting the namespaces removes everything.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_serial = itertools.count()


def ip(*words: str) -> None:
    """`ip <words>`; an AssertionError with what it said when it fails."""
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace with an address of its own."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command that runs there."""
        return ("ip", "netns", "exec", self.name)


class Network:
    """Made by `network()`; every namespace is gone behind its block."""

    def __init__(self) -> None:
        self._tag = f"{os.getpid()}-{next(_serial)}"
        self._hub = f"echo-hub-{self._tag}"
        self.machines: list[Machine] = []

    def build(self) -> None:
        """The switches and the trunk. Skips the test, with the reason, where this machine does not let us."""
        _or_skip("network namespaces cannot be made here", "netns", "add", self._hub)
        for side in "ab":
            _or_skip("a bridge cannot be made here", "-n", self._hub, "link", "add", f"switch-{side}", "type", "bridge")
            ip("-n", self._hub, "link", "set", f"switch-{side}", "up")
        _or_skip("a veth pair cannot be made here", *f"-n {self._hub} link add trunk-a type veth peer trunk-b".split())
        for side in "ab":
            ip("-n", self._hub, "link", "set", f"trunk-{side}", "master", f"switch-{side}", "up")

    def machine(self, side: str) -> Machine:
        """One more machine, on switch `a` or `b`."""
        number = len(self.machines) + 1
        machine = Machine(f"echo-{side}{number}-{self._tag}", f"10.77.31.{number}")
        ip("netns", "add", machine.name)
        self.machines.append(machine)
        ip("-n", self._hub, *f"link add port-{number} type veth peer eth0 netns {machine.name}".split())
        ip("-n", self._hub, "link", "set", f"port-{number}", "master", f"switch-{side}", "up")
        ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", machine.name, "link", "set", device, "up")
        return machine

    def limit(self, machine: Machine, mbit: float) -> None:
        """A line of this rate both ways, with room for 100 ms in front of it, as home routers have."""
        number = self.machines.index(machine) + 1
        for place in (f"-n {machine.name} qdisc add dev eth0", f"-n {self._hub} qdisc add dev port-{number}"):
            _run("tc", *f"{place} root tbf rate {mbit}mbit burst 32kb latency 100ms".split())

    def cut(self) -> None:
        """Nothing passes between the switches any more, and nobody is told."""
        ip("-n", self._hub, "link", "set", "trunk-a", "down")

    def cut_one_way(self, side: str) -> None:
        """What machines on this side send no longer reaches the other side; they still hear it.

        A queue of one byte in front of the trunk takes no frame at all: every kernel has it, unlike netem and filters.
        """
        _run("tc", "-n", self._hub, *f"qdisc add dev trunk-{side} root bfifo limit 1".split())

    def heal(self) -> None:
        """As before the cut."""
        ip("-n", self._hub, "link", "set", "trunk-a", "up")
        for side in "ab":  # fails where none was added
            command = ["tc", "-n", self._hub, *f"qdisc del dev trunk-{side} root".split()]
            subprocess.run(command, check=False, capture_output=True)

    def remove(self) -> None:
        """Remove every namespace, whatever happened before."""
        for name in (*(machine.name for machine in self.machines), self._hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def network() -> Iterator[Network]:
    """Two switches and a trunk, for as long as the block runs."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` (iproute2) is not installed")
    made = Network()
    try:
        made.build()
        yield made
    finally:
        made.remove()


def _or_skip(reason: str, *words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{reason}: {done.stderr.strip()}")


def reaches(source: Machine, target: Machine) -> bool:
    """Does a datagram of one machine arrive at another?"""
    listen = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 9)); s.settimeout(1.0)\n"
        "print(flush=True); s.recv(1)"
    )
    knock = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('{target.address}', 9))"
    command = [*target.inside, sys.executable, "-c", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        subprocess.run([*source.inside, sys.executable, "-c", knock], check=False, capture_output=True)
        return listener.wait() == 0
