"""What this machine is: cores, memory and accelerators that a process here may really use.

    /proc, cgroups | sysctl, vm_stat, system_profiler | nvidia-smi --Probe--> pure parsers --> Hardware

Every `detect()` measures again and imports no torch: milliseconds, and where commands have to be asked, up to seconds;
so call it off the event loop. What cannot be found out is None, never 0. To the swarm all of it is a claim: the
coordinator plans with the tokens a second that it observes. Whether torch can use a card, torch is asked
(peers/engines/choose.py).
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

import psutil

MIB = 1024**2
GIB = 1024**3

# Longest wait for nvidia-smi or system_profiler: a card without persistence mode takes some 3 s to wake.
COMMAND_TIMEOUT_S = 10.0

# Part of a Mac's memory that Metal lets a process use (recommendedMaxWorkingSetSize, as programs print it on machines
# of 8 to 192 GB): two thirds up to 32 GB, three quarters above. `sysctl iogpu.wired_limit_mb` overrides it.
METAL_SHARE_SMALL, METAL_SHARE_LARGE = 2 / 3, 3 / 4
METAL_SMALL_BYTES_MAX = 32 * GIB

# A MIG instance's name says its size ("1g.10gb"), of which 95 to 97 % can be used: 9856 MiB of "10gb", 4864 of "5gb".
MIG_USABLE = 0.95

# cgroup v1 writes "no limit" as the largest multiple of a page below 2**63.
CGROUP_UNLIMITED = 2**60

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.free,mig.mode.current",
    "--format=csv,noheader,nounits",
)
NVIDIA_INSTANCES = ("nvidia-smi", "-L")
SYSCTL = ("sysctl", "hw.memsize", "hw.logicalcpu", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")
VM_STAT = ("vm_stat",)
DISPLAYS = ("system_profiler", "SPDisplaysDataType", "-json")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A card, a part of one (MIG), or the GPU of an Apple chip, whose memory is the machine's own."""

    kind: Literal["cuda", "mps"]
    name: str
    memory_total: int | None
    """Bytes that one process may use."""
    memory_free: int | None
    """Bytes of it that are free now."""
    uuid: str | None = None
    """What CUDA_VISIBLE_DEVICES may name."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One look at this machine."""

    system: str
    """Linux, Darwin or Windows."""
    machine: str
    """x86_64, arm64, aarch64, ..."""
    cores: int | None
    """That this process may keep busy: affinity and CPU quota respected."""
    memory_total: int | None
    """Bytes, of the machine or of the container, whichever is less."""
    memory_available: int | None
    """Bytes that can be had now without swapping."""
    accelerators: tuple[Accelerator, ...] = ()

    @property
    def apple_silicon(self) -> bool:
        """Where MLX has a GPU."""
        return (self.system, self.machine) == ("Darwin", "arm64")

    def best(self, kind: str) -> Accelerator | None:
        """Of this kind the one with the most free memory, the first of equals; None if there is none."""
        cards = [card for card in self.accelerators if card.kind == kind]
        return max(cards, key=lambda card: (card.memory_free or 0, card.memory_total or 0), default=None)


def _run(command: Sequence[str]) -> str | None:
    """What a command prints, whatever its exit status; None if it is missing or hangs."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def _read(path: str) -> str | None:
    """A small file's text; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _cores() -> int | None:
    """Those that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


@dataclass(frozen=True, slots=True)
class Probe:
    """How to ask a machine. Tests answer for machines that they do not have."""

    system: str = field(default_factory=platform.system)
    machine: str = field(default_factory=platform.machine)
    cores: int | None = field(default_factory=_cores)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[[Sequence[str]], str | None] = _run
    read: Callable[[str], str | None] = _read


def detect(probe: Probe | None = None) -> Hardware:
    """This machine as it is now. Raises nothing: what cannot be found out is None."""
    probe = probe or Probe()
    if probe.system == "Darwin":
        return _mac(probe)
    if probe.system == "Linux":
        total, available = parse_meminfo(probe.read("/proc/meminfo") or "")
        limits = cgroup_limits(probe.read)
        cores = _least(probe.cores, limits.cores)
        total, available = _least(total, limits.memory_total), _least(available, limits.memory_available)
    else:
        memory = psutil.virtual_memory()
        cores, total, available = probe.cores, memory.total, memory.available
    return Hardware(probe.system, probe.machine, cores, total, available, _nvidia(probe))


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


# ---------------------------------------------------------------------- Linux


def parse_meminfo(text: str) -> tuple[int | None, int | None]:
    """Bytes in total and available, from /proc/meminfo."""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, available = (kib.get(name) for name in ("MemTotal", "MemAvailable"))
    return _times(total, 1024), _times(available, 1024)


def _times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups leave to this process; None is no limit."""

    cores: int | None
    memory_total: int | None
    memory_available: int | None


def cgroup_limits(read: Callable[[str], str | None]) -> Limits:
    """The tightest limits of this process's control groups and of all above them, version 1 or 2.

    Inside a container the path in /proc/self/cgroup may be the host's, with the container's own group mounted at the
    top: folders that are not there are passed over, and the top is always looked at. Files that the kernel can drop
    (inactive_file) count as free, as in MemAvailable. A part of a core is not worth a thread: quotas round down, to 1.
    """
    cores, totals, availables = [], [], []
    for folder, names in _cgroup_folders(read("/proc/self/cgroup") or ""):
        limit, used = (_int(read(f"{folder}/{name}")) for name in (names.limit, names.used))
        if limit is not None and limit < CGROUP_UNLIMITED:
            totals.append(limit)
            if used is not None:
                stat = read(f"{folder}/memory.stat") or ""
                dropped = re.search(rf"^{names.dropped} (\d+)$", stat, re.MULTILINE)
                availables.append(max(0, limit - used + (int(dropped[1]) if dropped else 0)))
        quota = re.match(r"(\d+)\s+(\d+)", " ".join(read(f"{folder}/{name}") or "" for name in names.quota))
        if quota and int(quota[1]) and int(quota[2]):
            cores.append(max(1, int(quota[1]) // int(quota[2])))
    return Limits(_least(*cores), _least(*totals), _least(*availables, *totals))


@dataclass(frozen=True, slots=True)
class _Names:
    """Of the files of one version of control groups."""

    limit: str
    used: str
    dropped: str
    quota: tuple[str, ...]


_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
)
_V2 = _Names("memory.max", "memory.current", "inactive_file", ("cpu.max",))


def _cgroup_folders(text: str) -> Iterator[tuple[str, _Names]]:
    """Each folder that may limit memory or CPU, from the process's own up to the top, from /proc/self/cgroup."""
    for line in text.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        group = PurePosixPath(path)
        for controller in controllers.split(","):  # one empty name in version 2
            if controller in ("", "memory", "cpu"):
                for each in (group, *group.parents):
                    yield str(PurePosixPath(f"/sys/fs/cgroup/{controller}/{each}")), _V1 if controller else _V2


def _int(text: str | None) -> int | None:
    """The number that the text is; None for anything else, "max" and "[N/A]" among it."""
    try:
        return int(text or "")
    except ValueError:
        return None


# ---------------------------------------------------------------------- NVIDIA


def _nvidia(probe: Probe) -> tuple[Accelerator, ...]:
    visible = probe.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return ()
    text = probe.run(NVIDIA_SMI)
    if text is None:
        return ()
    return visible_cards(parse_nvidia_smi(text, lambda: probe.run(NVIDIA_INSTANCES) or ""), visible)


def parse_nvidia_smi(text: str, instances: Callable[[], str]) -> dict[str, tuple[Accelerator, ...]]:
    """By index, each card, or its MIG instances where it is cut into such; `instances` gives `nvidia-smi -L`.

    A process gets one instance, not the card whose memory the query shows. What nvidia-smi writes as [N/A], as on
    boards whose GPU shares the machine's memory, is None. Lines that are no card (errors) are passed over.
    """
    found: dict[str, tuple[Accelerator, ...]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6 or not cells[0].isdecimal():
            continue
        index, uuid, name, total, free, mig = cells
        if mig == "Enabled":
            found[index] = parse_mig(instances()).get(index, ())
        else:
            card = Accelerator("cuda", name, _times(_int(total), MIB), _times(_int(free), MIB), uuid)
            found[index] = (card,)
    return found


def parse_mig(text: str) -> dict[str, tuple[Accelerator, ...]]:
    """By the card's index, the MIG instances that `nvidia-smi -L` lists. How much of one is free it does not say."""
    found: dict[str, tuple[Accelerator, ...]] = {}
    index = name = ""
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+): (.*) \(UUID", line):
            index, name = card[1], card[2]
        elif mig := re.match(r"\s+MIG (\S*?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: ([^)]+)\)", line):
            total = int(int(mig[2]) * GIB * MIG_USABLE)
            instance = Accelerator("cuda", f"{name} MIG {mig[1]}", total, None, mig[3])
            found[index] = (*found.get(index, ()), instance)
    return found


def visible_cards(cards: Mapping[str, Sequence[Accelerator]], visible: str | None) -> tuple[Accelerator, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets a process see: indices or beginnings of UUIDs, up to the first that is
    neither, as CUDA reads it."""
    if visible is None:
        return tuple(card for group in cards.values() for card in group)
    seen: list[Accelerator] = []
    for wanted in map(str.strip, visible.split(",")):
        by_uuid = [
            card for group in cards.values() for card in group if wanted and (card.uuid or "").startswith(wanted)
        ]
        matching = cards.get(wanted) or by_uuid[:1]
        if not matching:
            break
        seen += matching
    return tuple(seen)


# ---------------------------------------------------------------------- macOS


def _mac(probe: Probe) -> Hardware:
    facts = parse_sysctl(probe.run(SYSCTL) or "")
    total, cores = _int(facts.get("hw.memsize")), _int(facts.get("hw.logicalcpu"))
    available = parse_vm_stat(probe.run(VM_STAT) or "")
    gpus: tuple[Accelerator, ...] = ()
    if probe.machine == "arm64":  # torch and MLX know no other GPUs of Macs
        chip = facts.get("machdep.cpu.brand_string") or "Apple GPU"
        name = parse_displays(probe.run(DISPLAYS) or "") or chip
        share = metal_share(total, _int(facts.get("iogpu.wired_limit_mb")))
        free = None if available is None else _least(share, available)
        gpus = (Accelerator("mps", name, share, free),)
    return Hardware(probe.system, probe.machine, cores or probe.cores, total, available, gpus)


def parse_sysctl(text: str) -> dict[str, str]:
    """`name: value` lines. Names that a system does not know are missing."""
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in text.splitlines()) if colon}


def parse_vm_stat(text: str) -> int | None:
    """Bytes that can be had without swapping: free, read ahead on speculation, and inactive pages.

    Free pages alone are near 0 on a Mac that has run for an hour: what is free holds files.
    """
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r"^Pages ([\w ]+):\s+(\d+)\.?$", text, re.MULTILINE)}
    if size is None or "free" not in pages:
        return None
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "speculative", "inactive"))


def parse_displays(text: str) -> str | None:
    """The name of Apple's GPU, from `system_profiler SPDisplaysDataType -json`, which says nothing of its memory."""
    try:
        rows: Any = json.loads(text)["SPDisplaysDataType"]
        names = [row.get("sppci_model") for row in rows if "Apple" in str(row.get("spdisplays_vendor"))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((name for name in names if isinstance(name, str)), None)


def metal_share(total: int | None, wired_limit_mb: int | None) -> int | None:
    """Bytes of a Mac's memory that its GPU may use: what the user set, else Metal's share of the total."""
    if wired_limit_mb:
        return wired_limit_mb * MIB
    if total is None:
        return None
    return int(total * (METAL_SHARE_SMALL if total <= METAL_SMALL_BYTES_MAX else METAL_SHARE_LARGE))
