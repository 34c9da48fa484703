"""Machines as network namespaces on two switches, and the cable between the switches, which can be cut.

    machine --veth-- [switch a] --trunk a====trunk b-- [switch b] --veth-- machine
    machine --veth-- router --veth-- [switch a]         at home: behind network address translation

A machine shares nothing with this one but the disk. Both switches stand in one more namespace, so that no name but
those of the namespaces can meet another test's; and deleting the namespaces removes everything.
"""

import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_serial = itertools.count()

# nf_tables by hand (linux/netfilter/nf_tables.h): kernels have it where the programs nft and iptables are missing.
_TABLE, _CHAIN, _RULE = 0xA00, 0xA03, 0xA06  # subsystem 10: NEWTABLE, NEWCHAIN, NEWRULE
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_ANSWERED, _MADE = 0x1 | 0x4, 0x400 | 0x800  # REQUEST and ACK, CREATE and APPEND
_IPV4 = 2
_IN, _OUT = 1, 4  # hooks: input, postrouting
_HOME = "192.168.1"  # every home has the same addresses, as in life
_NOWHERE = "10.77.31.254"  # whatever is sent there is lost, as private addresses are in the internet


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
        self._homes: list[str] = []

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
        ip("-n", machine.name, *f"neigh add {_NOWHERE} lladdr 02:00:00:00:00:fe dev eth0 nud permanent".split())
        ip("-n", machine.name, *f"route add 192.168.0.0/16 via {_NOWHERE}".split())
        return machine

    def firewalled(self, side: str) -> Machine:
        """One more machine, which drops whatever it did not ask for."""
        machine = self.machine(side)
        new = [_expression("ct", [(1, 1), (2, 0)]), _expression("bitwise", _masked(8)), _expression("cmp", _not_zero())]
        _filter(machine.name, "filter", _IN, [*new, _expression("immediate", [(1, 0), (2, [(2, [(1, 0)])])])])
        return machine

    def home(self, side: str) -> Machine:
        """One more machine, behind a router of its own that translates addresses. Nobody outside can address it."""
        router = self.machine(side)
        machine = Machine(f"echo-home{len(self._homes)}-{self._tag}", f"{_HOME}.2")
        ip("netns", "add", machine.name)
        self._homes.append(machine.name)
        ip("-n", router.name, *f"link add eth1 type veth peer name eth0 netns {machine.name}".split())
        ip("-n", router.name, *f"addr add {_HOME}.1/24 dev eth1".split())
        ip("-n", router.name, "link", "set", "eth1", "up")
        ip("-n", machine.name, *f"addr add {machine.address}/24 dev eth0".split())
        for device in ("eth0", "lo"):
            ip("-n", machine.name, "link", "set", device, "up")
        ip("-n", machine.name, *f"route add default via {_HOME}.1".split())
        _run(*router.inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _filter(router.name, "nat", _OUT, [_expression("masq", [])])
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
        for name in (*self._homes, *(machine.name for machine in self.machines), self._hub):
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


# ---------------------------------------------------------------------- nf_tables


Attributes = list[tuple[int, "bytes | str | int | Attributes"]]


def _attribute(kind: int, value: "bytes | str | int | Attributes") -> bytes:
    """A netlink attribute: numbers in network order, names end in a zero, lists are nested."""
    match value:
        case str():
            raw = value.encode() + b"\0"
        case int():
            raw = struct.pack(">I", value)
        case list():
            kind, raw = kind | 0x8000, _attributes(value)
        case bytes():
            raw = value
    return struct.pack("=HH", 4 + len(raw), kind) + raw + bytes(-len(raw) % 4)


def _attributes(values: Attributes) -> bytes:
    return b"".join(_attribute(*each) for each in values)


def _expression(name: str, about: Attributes) -> tuple[int, Attributes]:
    return 1, [(1, name), (2, about)]


def _masked(bits: int) -> Attributes:
    """Register 1 and these bits (in the machine's order), the rest zero."""
    return [(1, 1), (2, 1), (3, 4), (4, [(1, struct.pack("=I", bits))]), (5, [(1, bytes(4))])]


def _not_zero() -> Attributes:
    return [(1, 1), (2, 1), (3, [(1, bytes(4))])]


def _filter(namespace: str, kind: str, hook: int, expressions: Attributes) -> None:
    """One table with one chain with one rule, in a namespace. Skips the test where the kernel has no nf_tables."""
    messages = [
        (_BATCH_BEGIN, 0x1, 0, 10, []),
        (_TABLE, _ANSWERED | _MADE, _IPV4, 0, [(1, "echo")]),
        (_CHAIN, _ANSWERED | _MADE, _IPV4, 0, [(1, "echo"), (3, "all"), (4, [(1, hook), (2, 100)]), (7, kind)]),
        (_RULE, _ANSWERED | _MADE, _IPV4, 0, [(1, "echo"), (2, "all"), (4, expressions)]),
        (_BATCH_END, 0x1, 0, 10, []),
    ]
    batch = b""
    for number, (what, flags, family, subsystem, about) in enumerate(messages):
        body = struct.pack(">BBH", family, 0, subsystem) + _attributes(about)
        batch += struct.pack("=IHHII", 16 + len(body), what, flags, number, 0) + body
    error = _tell_netfilter(namespace, batch, answers=3)
    if error:
        pytest.skip(f"nf_tables do not work here: {os.strerror(error)}")


def _tell_netfilter(namespace: str, batch: bytes, answers: int) -> int:
    """Send a batch inside a namespace (in a process of its own); the first error number of its answers, or 0."""
    code = (
        "import socket, struct, sys\n"
        f"s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, {getattr(socket, 'NETLINK_NETFILTER', 12)})\n"
        "s.settimeout(5.0); s.bind((0, 0)); s.send(sys.stdin.buffer.read())\n"
        f"for _ in range({answers}):\n"
        "    error, = struct.unpack_from('=i', s.recv(65536), 16)\n"
        "    if error: sys.exit(-error)\n"
    )
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code]
    return subprocess.run(command, input=batch, check=False, capture_output=True).returncode
