"""What `swarm doctor` looks at: this machine, and with an invitation its way into a swarm. One finding a check.

    ok         `swarm join` with the same options finds what it needs
    warning    it works, at a cost; or it could not be found out, which is not the same as well
    problem    `swarm join` would fail, or be of no use to the run

Nothing is changed and nothing is left behind: no folder is made, no key, no download kept (unless --fetch).
What several checks need (a host, the doors of the swarm, its run, its model) is found once, by whoever asks first.
"""

import asyncio
import errno
import fcntl
import os
import platform
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from bootstrap.addresses import Address, interface_ips, parse_address
from bootstrap.errors import ADVICE, one_line
from bootstrap.home import KEY_FILE
from bootstrap.invite import Invite
from protocols import PROTOCOL
from protocols.directory import SKEW_S
from protocols.faults import PeerFault, TransportFault
from protocols.identity import key_from_file_bytes, peer_id_of, public_bytes, short

if TYPE_CHECKING:
    from bootstrap.visit import Door, Rate, Run
    from peers.engines.choose import EngineOptions
    from peers.hardware import Hardware
    from swarm.host import Host

PYTHON_MIN = (3, 11)
CLOCK_WARN_S = 1.0  # a third of what hivemind refuses: clocks that drift get there
# Without a run to ask: what runs of the built-in model and of models of some hundred million parameters keep.
HOME_BYTES = 200_000_000
IMPORTS = ("torch", "transformers")  # what is slow to import, and breaks when wheels do not fit together
_SHOWN = ("echo-swarm", "torch", "transformers", "peft", "hivemind", "protobuf")

T = TypeVar("T")
Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """What a check found."""

    level: Level
    found: str
    advice: str = ""
    """What to do; empty where all is well."""


def ok(found: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", found)


def warning(found: str, advice: str) -> Finding:
    """See the module's docstring."""
    return Finding("warning", found, advice)


def problem(found: str, advice: str) -> Finding:
    """See the module's docstring."""
    return Finding("problem", found, advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What `swarm doctor` was told: as `swarm join`, but that an invitation is not needed."""

    home: Path
    engine: "EngineOptions"
    invite: Invite | None = None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    allow_code: frozenset[str] = frozenset()
    fetch: bool = False


class NotKnown(Exception):
    """What a check needs, another one could not find out: its line says why."""


@dataclass
class Patient:
    """The machine, and what several checks want to know of it and of the swarm."""

    options: DoctorOptions
    stack: AsyncExitStack
    """Closes what was opened."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, thread_name_prefix="doctor"))
    at_work: int = 0
    """Threads that have not come back."""
    host_start_s: float = 0.0
    _found: dict[str, "asyncio.Task[Any]"] = field(default_factory=dict)

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Off the event loop; a thread that hangs is counted in `at_work`, and not waited for at the end."""
        self.at_work += 1
        future = asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)
        future.add_done_callback(self._came_back)
        return await asyncio.shield(future)

    def _came_back(self, future: "asyncio.Future[Any]") -> None:
        self.at_work -= 1
        if not future.cancelled():
            future.exception()  # seen, also where nobody waits any more

    async def once(self, name: str, find: Callable[[], Awaitable[T]]) -> T:
        """The result of `find`, called the first time only; a check that runs out of time leaves it to the next."""
        if name not in self._found:
            self._found[name] = asyncio.ensure_future(find())
        found: T = await asyncio.shield(self._found[name])
        return found

    def found(self, name: str) -> Any:
        """The result of `once`, if it is there."""
        task = self._found.get(name)
        return task.result() if task is not None and task.done() and task.exception() is None else None

    async def close(self) -> None:
        """End what is under way."""
        for task in self._found.values():
            task.cancel()
        await asyncio.gather(*self._found.values(), return_exceptions=True)
        self.threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ what several checks need

    async def host(self) -> "Host":
        """A host that listens nowhere. Raises TransportFault."""

        async def start() -> "Host":
            visit = await self.in_thread(import_module, "bootstrap.visit")  # and with it hivemind and torch
            began_s = time.monotonic()
            host = cast("Host", await self.stack.enter_async_context(visit.visiting()))
            self.host_start_s = time.monotonic() - began_s
            return host

        return await self.once("host", start)

    @property
    def invite(self) -> Invite:
        """Raises NotKnown."""
        if self.options.invite is None:
            raise NotKnown("there is no invitation")
        return self.options.invite

    async def greetings(self) -> "list[tuple[str, Door | TransportFault]]":
        """Of each address of the invitation, who answers or why nobody does."""

        async def greet_all() -> "list[tuple[str, Door | TransportFault]]":
            from bootstrap.visit import greet

            host, addresses = await self._or_not_known(self.host()), dict.fromkeys(self.invite.addresses)
            heard = await asyncio.gather(*(greet(host, address, self.invite.run) for address in addresses))
            return list(zip(addresses, heard, strict=True))

        return await self.once("greetings", greet_all)

    async def doors(self) -> "list[Door]":
        """Those that answer and speak our protocol. Raises NotKnown."""
        heard = [heard for _, heard in await self.greetings() if not isinstance(heard, TransportFault)]
        doors = [door for door in heard if door.protocol == PROTOCOL]
        if not doors:
            raise NotKnown("the swarm is not reached")
        return doors

    async def run(self) -> "Run":
        """Raises NotKnown, TransportFault, PeerFault."""

        async def read() -> "Run":
            from bootstrap.visit import read_run

            return await read_run(await self.host(), await self.doors(), self.invite.run)

        return await self.once("run", read)

    async def known_run(self) -> "Run":
        """Raises NotKnown where `run` raises whatever it does."""
        return await self._or_not_known(self.run(), "the run is not known")

    async def hardware(self) -> "Hardware":
        """Measured once."""

        async def look() -> "Hardware":
            from peers.hardware import detect

            return await self.in_thread(detect)

        return await self.once("hardware", look)

    async def _or_not_known(self, work: Awaitable[T], why: str = "p2pd does not run") -> T:
        try:
            return await work
        except (TransportFault, PeerFault) as fault:
            raise NotKnown(why) from fault


# ---------------------------------------------------------------------- this machine


async def check_python(_: Patient) -> Finding:
    """Version and platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON_MIN:
        return problem(found, f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer")
    return ok(found)


async def check_packages(_: Patient) -> Finding:
    """What echo-swarm requires is installed in a version that it takes, and the heavy ones can be imported."""
    missing = missing_packages()
    if missing:
        named = " ".join(f"'{requirement}'" for requirement, _ in missing)
        return problem("; ".join(what for _, what in missing), f"python -m pip install {named}")
    broken = await _broken_import()
    if broken is not None:
        name, why = broken
        return problem(
            f"{name} {_version(name)} cannot be imported: {why}", f"python -m pip install --force-reinstall {name}"
        )
    return ok(", ".join(f"{name} {_version(name)}" for name in _SHOWN))


def missing_packages() -> list[tuple[str, str]]:
    """(requirement, what is there instead) of each requirement of echo-swarm that is not met."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("echo-swarm") or []
    except metadata.PackageNotFoundError:
        return [(".", "echo-swarm itself is not installed, only unpacked here")]
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        have = _version(requirement.name)
        if have is None:
            found.append((wanted, f"{requirement.name} is not installed"))
        elif not requirement.specifier.contains(have, prereleases=True):
            found.append((wanted, f"{requirement.name} {have} does not do, {requirement.specifier} is needed"))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


async def _broken_import() -> tuple[str, str] | None:
    """(package, why) of the first that cannot be imported. In a process of its own: a bad build may crash it."""
    code = "import sys\nfor name in sys.argv[1:]:\n    print(name, flush=True)\n    __import__(name)"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", code, *IMPORTS),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        return None
    name = out.decode(errors="replace").split()[-1]
    if child.returncode < 0:
        return name, f"it ends with {signal.Signals(-child.returncode).name}; is it built for another processor?"
    return name, one_line(err.decode(errors="replace").strip().rpartition("\n")[2])[:300]


async def check_home(patient: Patient) -> Finding:
    """The peer's folder can be written and nobody uses it; its key is a key and nobody else's."""
    home = patient.options.home
    existing = _existing(home)
    other = "give another folder with --home"
    if not existing.is_dir():
        return problem(f"{existing}: not a folder", other)
    if not os.access(existing, os.W_OK | os.X_OK):
        return problem(f"{existing}: cannot be written by this user", other)
    if existing != home:
        return ok(f"{home}: new; a key will be made in it")
    holder = _lock_holder(home)
    if holder is not None:
        return problem(f"{home}: in use by process {holder}", "stop it, or give this peer another --home")
    about = home.stat()
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if about.st_uid != os.geteuid() or about.st_mode & stat.S_ISVTX:
            return problem(f"{home}: others can write to this folder", "keep keys in a folder of your own: --home")
        return warning(f"{home}: others can write to this folder", f"chmod 700 {home}; a start does it too")
    return _check_key(home / KEY_FILE)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _lock_holder(home: Path) -> str | None:
    """The process that holds the home's lock; no lock is made or kept."""
    try:
        handle = os.open(home / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "(unknown)"
    finally:
        os.close(handle)
    return None


def _check_key(path: Path) -> Finding:
    if not os.path.lexists(path):
        return ok(f"{path.parent}: writable; a key will be made in it")
    if path.is_symlink():
        return problem(f"{path}: a symbolic link", "put the key file itself there, or give another --home")
    try:
        identity = peer_id_of(public_bytes(key_from_file_bytes(path.read_bytes())))
    except (OSError, ValueError) as error:
        return problem(f"{path}: {error}", "restore the file from a copy, or give another --home for a new identity")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return warning(f"{path}: others can read this key", f"chmod 600 {path}; a start does it too")
    return ok(f"{path.parent}: writable, identity {short(identity)}")


async def check_disk(patient: Patient) -> Finding:
    """Room for versions at home. (Room for the model is part of its own check.)"""
    needed = await _home_bytes(patient)
    return _room(_existing(patient.options.home), needed, "versions and rollouts", "--home")


async def _home_bytes(patient: Patient) -> int:
    """What a peer keeps: a few versions, whole at worst."""
    try:
        run = await patient.known_run()
    except NotKnown:
        return HOME_BYTES
    from swarm.adapters import VERSIONS_KEPT  # it imports hivemind, which is there once a run is known

    largest = max((ref.size for ref in run.newcomer_blobs), default=0)
    return (1 + VERSIONS_KEPT) * largest or HOME_BYTES


def _room(folder: Path, needed: int, what: str, option: str) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {size(free)} free, {what} take about {size(needed)}"
    advice = f"make room there, or use a folder on another disk ({option})"
    if free < needed // 2:
        return problem(found, advice)
    return warning(found, advice) if free < needed else ok(found)


def size(num_bytes: float) -> str:
    """For people, in powers of 1000."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power:
            return f"{num_bytes / power:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


async def check_p2pd(patient: Patient) -> Finding:
    """The network daemon is there and starts."""
    repair = "python -m pip install --force-reinstall --no-cache-dir hivemind"
    spec = find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        return problem("it is part of hivemind, which is not installed", repair)
    binary = Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"
    if not binary.is_file():
        return problem(f"{binary} is missing", repair)
    if not os.access(binary, os.X_OK):
        return problem(f"{binary} cannot be executed", f"chmod +x {binary}")
    try:
        await patient.host()
    except TransportFault as fault:
        return problem(f"{binary} does not start: {one_line(fault.detail)}", repair)
    return ok(f"of hivemind {_version('hivemind')}, started in {patient.host_start_s:.1f} s")


async def check_ports(patient: Patient) -> Finding:
    """This peer can listen where it was told to."""
    for address in map(parse_address, patient.options.listen):
        finding = _cannot_listen(address)
        if finding is not None:
            return finding
    shown = ", ".join(address.replace("/tcp/0", "/tcp/<any free port>") for address in patient.options.listen)
    return ok(f"can listen at {shown}")


def _cannot_listen(address: Address) -> Finding | None:
    if address.ip is None:
        return problem(f"{address}: a name cannot be listened on", "give an IP address of this machine")
    _, transport, port = address.tail.split("/")[:3]
    family = socket.AF_INET if address.ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM) as probe:
        if transport == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, int(port)))
        except OSError as error:
            return _bind_failed(address, int(port), error)
    return None


def _bind_failed(address: Address, port: int, error: OSError) -> Finding:
    free = "choose another with --port (0 takes any free one)"
    match error.errno:
        case errno.EADDRINUSE:
            return problem(f"port {port} of {address.host} is taken{_taken_by(port)}", f"stop it, or {free}")
        case errno.EACCES:
            return problem(f"port {port} needs the rights of an administrator", free)
        case errno.EADDRNOTAVAIL:
            ours = ", ".join(interface_ips())
            return problem(f"{address.host} is no address of this machine ({ours})", "use --host 0.0.0.0 for all")
        case _:
            return problem(f"{address}: {error.strerror}", free)


def _taken_by(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.pid and not connection.raddr:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass  # of another user, or gone
    return " by another process"


async def check_devices(patient: Patient) -> Finding:
    """Cores, memory, accelerators; what is not known is said to be so."""
    hardware = await patient.hardware()
    gpus = [f"{card.name} ({card.kind}, {_of(card.memory_free, card.memory_total)})" for card in hardware.accelerators]
    memory = _of(hardware.memory_available, hardware.memory_total)
    cores = "an unknown number of" if hardware.cores is None else hardware.cores
    return ok(f"{cores} cores, memory {memory}; {', '.join(gpus) or 'no GPU'}")


def _of(free: int | None, total: int | None) -> str:
    free_text, total_text = ("unknown" if value is None else size(value) for value in (free, total))
    return f"{free_text} free of {total_text}"


# ---------------------------------------------------------------------- the swarm

_WITH_INVITE = "swarm doctor 'INVITE' does, with the invitation that you got"


async def check_swarm(patient: Patient) -> Finding:
    """Each address of the invitation: who answers, or why nobody does."""
    if patient.options.invite is None:
        return warning("no invitation: the way to a swarm, its run and its model are not looked at", _WITH_INVITE)
    heard = await patient.greetings()
    faults = [(address, each) for address, each in heard if isinstance(each, TransportFault)]
    doors = [each for _, each in heard if not isinstance(each, TransportFault)]
    reasons = "; ".join(f"{address}: {_meaning(fault.code)}" for address, fault in faults)
    if not doors:
        return problem(reasons, _next_step(faults[0][1].code))
    others = sorted({door.protocol for door in doors} - {PROTOCOL})
    if all(door.protocol != PROTOCOL for door in doors):
        found = f"the swarm speaks {', '.join(map(one_line, others))}, this peer {PROTOCOL}"
        return problem(found, _next_step("protocol mismatch"))
    millis = min(door.round_trip_s for door in doors) * 1000
    found = f"{len(doors)} of {len(heard)} addresses answer in {millis:.0f} ms, {PROTOCOL}"
    return warning(f"{found}; {reasons}", _next_step(faults[0][1].code)) if faults else ok(found)


def _meaning(code: str) -> str:
    """A fault's code, and what it means where the code alone does not say it."""
    return f"{code} ({ADVICE[code].text})" if code in ADVICE else code


def _next_step(code: str) -> str:
    return ADVICE[code].next_step if code in ADVICE else "run again with --debug, and report it"


async def check_clock(patient: Patient) -> Finding:
    """This machine's clock beside the swarm's; hivemind refuses whoever is more than 3 s off."""
    if patient.options.invite is None:
        return warning("not compared with a swarm's: there is no invitation", _WITH_INVITE)
    door = min(await patient.doors(), key=lambda door: abs(door.offset_s))
    off_s, exact_s = abs(door.offset_s), door.round_trip_s / 2
    side = "behind" if door.offset_s > 0 else "ahead of"
    found = f"{off_s:.1f} s {side} {short(door.peer_id)}'s (to within {exact_s:.2f} s); the limit is {SKEW_S:g} s"
    if off_s > SKEW_S:
        return problem(found, _next_step("clock"))
    if off_s >= CLOCK_WARN_S:
        return warning(found, "switch on time synchronisation (`timedatectl set-ntp true` on Linux)")
    return ok(found)


async def check_run(patient: Patient) -> Finding:
    """The run is served, its manifest is its owner's, and it goes on."""
    try:
        run = await patient.run()
    except TransportFault as fault:
        level = warning if fault.code == "no manifest" else problem  # a peer that joins waits for it
        return level(f"{patient.invite.run}: {_meaning(fault.code)}", _next_step(fault.code))
    except PeerFault as fault:
        return problem(f"{patient.invite.run}: {fault}", "ask the run's owner; do not join what its key did not sign")
    manifest, status = run.manifest, run.status
    found = f"{manifest.run}: manifest {manifest.revision} signed by its owner"
    if status is None:
        return warning(f"{found}; nobody tells how far it is", "try again in a minute")
    if status.ended:
        return problem(f"{found}; it has ended", "ask its owner for one that goes on")
    head = "no version yet" if status.head is None else f"at v{status.head} of {manifest.max_steps}"
    return ok(f"{found}, {head}; peers: {len(status.peers) + status.left_out}")


async def check_reachability(patient: Patient) -> Finding:
    """Doors dial back where this peer would listen. Nobody needs to be reached."""
    from bootstrap.visit import CONNECT_S, visiting
    from swarm.reachability import reachability

    doors = await patient.doors()
    try:
        async with visiting(patient.options.listen) as host:
            met = [await host.connect(door.address, CONNECT_S) for door in doors]
            found = await reachability(host, met)
    except TransportFault as fault:
        raise NotKnown(f"cannot listen: {fault.code}") from fault
    match found.kind:
        case "direct":
            return ok(f"others can reach this peer: {found.reason}")
        case "outbound only":
            return ok(
                f"outbound only ({found.reason}), which is enough: the swarm talks over connections made from here"
            )
        case _:
            return warning(f"not known whether others can reach this peer: {found.reason}", "nothing: join finds out")


async def check_bandwidth(patient: Patient) -> Finding:
    """A version from the peers that have one, and as many bytes back as tell the rate."""
    from bootstrap.visit import measure_down, measure_up

    run, host = await patient.known_run(), await patient.host()
    up = await measure_up(host, min(await patient.doors(), key=lambda door: door.round_trip_s).peer_id)
    blobs, status = run.newcomer_blobs, run.status
    sources = [peer.peer_id for peer in status.peers if peer.version is not None] if status is not None else []
    if not blobs or not sources:
        found = f"up {rate(up)}; there is no version yet to download"
        return warning(found, "run this again once the trainer has published one")
    try:
        down = await measure_down(host, blobs[0], sources)
    except TransportFault as fault:
        found = f"up {rate(up)}; no version can be downloaded from {len(sources)} peers: {fault}"
        return warning(found, "try again in a minute; if it stays, the peers that have versions cannot be reached")
    return _judge_bandwidth(run, down, up)


def _judge_bandwidth(run: "Run", down: "Rate", up: "Rate") -> Finding:
    found = f"down {rate(down)}, up {rate(up)}"
    num_bytes, every_s = run.version_bytes, run.interval_s
    if num_bytes is None or every_s is None:
        return ok(found)
    takes_s = num_bytes / down.bytes_per_s if down.num_bytes else float("inf")
    found += f"; a version of {size(num_bytes)} takes {takes_s:.1f} s, one comes each {every_s:.1f} s"
    if takes_s > every_s:
        return warning(found, "this peer would skip versions: use a faster line, or another peer nearby as a source")
    return ok(found)


def rate(measured: "Rate") -> str:
    """Bytes a second, for people."""
    return f"{size(measured.bytes_per_s)}/s"


async def check_environment(patient: Patient) -> Finding:
    """The run's problems can be made here; code of the owner only where that was allowed."""
    from peers.environments.load import load_environment

    run = await patient.known_run()
    spec, allowed = run.manifest.environment, patient.options.allow_code
    if ":" in spec.name and spec.name not in allowed:
        found = f"problems come from code of the run's owner ({spec.name}), which would run on this machine"
        return problem(found, f"pass --allow-code {spec.name} if you trust the owner; join needs it too")
    try:
        await patient.in_thread(load_environment, spec, allowed)
    except ValueError as error:
        return problem(one_line(str(error)), "update echo-swarm and reasoning-gym, or ask the run's owner")
    return ok(f"{spec.name}: can be made here")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    look: Callable[[Patient], Awaitable[Finding]]
    waits_for: str
    """What a terminal shows meanwhile."""
    limit_s: float
