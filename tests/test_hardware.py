"""What a machine says of itself, and what we make of it (case B55). The outputs have the form of the real commands'."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil
import pytest

from peers.hardware import (
    GIB,
    MIB,
    NVIDIA_SMI,
    Accelerator,
    Hardware,
    Probe,
    cgroup_limits,
    detect,
    metal_share,
    parse_vm_stat,
)

MEMINFO = """MemTotal:       32768000 kB
MemFree:          204800 kB
MemAvailable:   20480000 kB
Buffers:          123456 kB
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                4100.
Pages active:                            312847.
Pages inactive:                          300000.
Pages speculative:                         1900.
Pages throttled:                              0.
Pages wired down:                        141411.
Pages purgeable:                           6464.
"Translation faults":                1187253340.
Pages copy-on-write:                   41254183.
File-backed pages:                       181190.
Pages occupied by compressor:            210000.
"""
SYSCTL = """hw.memsize: 17179869184
hw.logicalcpu: 8
machdep.cpu.brand_string: Apple M2
iogpu.wired_limit_mb: 0
"""
DISPLAYS = json.dumps(
    {
        "SPDisplaysDataType": [
            {
                "_name": "Apple M2",
                "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
                "spdisplays_vendor": "sppci_vendor_Apple",
                "sppci_bus": "spdisplays_builtin",
                "sppci_cores": "10",
                "sppci_device_type": "spdisplays_gpu",
                "sppci_model": "Apple M2",
            }
        ]
    }
)
INTEL_DISPLAYS = json.dumps(
    {
        "SPDisplaysDataType": [
            {
                "_name": "kHW_AMDRadeonPro5300MItem",
                "spdisplays_vendor": "sppci_vendor_amd",
                "spdisplays_vram": "4 GB",
                "sppci_model": "AMD Radeon Pro 5300M",
            }
        ]
    }
)


def machine(
    system: str = "Linux",
    arch: str = "x86_64",
    *,
    outputs: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    cores: int | None = 8,
) -> Hardware:
    """Detected where commands print `outputs`, by their first two words or first word, and the others are missing."""

    def run(command: Sequence[str]) -> str | None:
        return (outputs or {}).get(" ".join(command[:2])) or (outputs or {}).get(command[0])

    return detect(Probe(system, arch, cores, environ or {}, run, {"/proc/meminfo": MEMINFO, **(files or {})}.get))


def mac(**changed: str) -> Hardware:
    outputs = {"sysctl": SYSCTL, "vm_stat": VM_STAT, "system_profiler": DISPLAYS} | changed
    return machine("Darwin", "arm64", outputs=outputs)


# ---------------------------------------------------------------------- macOS


def test_b55_apple_silicon_shares_its_memory_neither_none_nor_all_of_it() -> None:
    hardware = mac()
    assert (hardware.cores, hardware.memory_total) == (8, 16 * GIB)
    assert hardware.memory_available == (4100 + 1900 + 300_000) * 16384, "free pages alone would be 67 MB"
    (gpu,) = hardware.accelerators
    assert (gpu.kind, gpu.name) == ("mps", "Apple M2")
    assert gpu.memory_total == int(16 * GIB * 2 / 3)
    assert gpu.memory_free == hardware.memory_available, "what others hold cannot be had"
    assert hardware.apple_silicon


@pytest.mark.parametrize(
    ("total_gib", "wired_mb", "share_gib"),
    [(8, 0, 16 / 3), (32, 0, 64 / 3), (36, 0, 27), (64, None, 48), (64, 57344, 56)],
)
def test_b55_metals_share_of_the_memory(total_gib: int, wired_mb: int | None, share_gib: float) -> None:
    assert metal_share(total_gib * GIB, wired_mb) == int(share_gib * GIB)


def test_b55_the_gpu_gets_no_more_than_its_share_of_an_idle_mac() -> None:
    idle = VM_STAT.replace("4100.", "900000.")
    gpu = mac(vm_stat=idle).best("mps")
    assert gpu is not None
    assert gpu.memory_free == gpu.memory_total == int(16 * GIB * 2 / 3)


def test_b55_what_a_mac_does_not_say_is_unknown() -> None:
    # An older system has no iogpu.wired_limit_mb; nothing at all is said where the commands are forbidden.
    older = mac(sysctl=SYSCTL.replace("iogpu.wired_limit_mb: 0\n", ""))
    assert older == mac()
    silent = mac(sysctl="", vm_stat="", system_profiler="")
    assert silent == Hardware("Darwin", "arm64", 8, None, None, (Accelerator("mps", "Apple GPU", None, None),))
    assert mac(system_profiler="{}").accelerators[0].name == "Apple M2"
    assert parse_vm_stat("page size of 4096 bytes") is None


def test_an_intel_mac_has_no_gpu_that_engines_can_use() -> None:
    outputs = {"sysctl": SYSCTL, "vm_stat": VM_STAT, "system_profiler": INTEL_DISPLAYS}
    hardware = machine("Darwin", "x86_64", outputs=outputs)
    assert hardware.accelerators == ()
    assert not hardware.apple_silicon


# ---------------------------------------------------------------------- NVIDIA


def smi(text: str, listing: str = "", **environ: str) -> tuple[Accelerator, ...]:
    outputs = {" ".join(NVIDIA_SMI[:2]): text, "nvidia-smi -L": listing}
    return machine(outputs=outputs, environ=environ).accelerators


TWO = """0, GPU-1f2e3d4c-aaaa, NVIDIA GeForce RTX 3090, 24576, 23700, [N/A]
1, GPU-9b8a7c6d-bbbb, NVIDIA GeForce GTX 1080, 8192, 8100, [N/A]
"""
MIG = """0, GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960, 40326, Enabled
1, GPU-bbbb, NVIDIA A100-SXM4-40GB, 40960, 40326, Disabled
"""
MIG_LISTING = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
"""


def test_b55_two_cards() -> None:
    assert smi(TWO) == (
        Accelerator("cuda", "NVIDIA GeForce RTX 3090", 24576 * MIB, 23700 * MIB, "GPU-1f2e3d4c-aaaa"),
        Accelerator("cuda", "NVIDIA GeForce GTX 1080", 8192 * MIB, 8100 * MIB, "GPU-9b8a7c6d-bbbb"),
    )
    best = machine(outputs={"nvidia-smi": TWO.replace("23700", "100")}).best("cuda")
    assert best is not None
    assert best.name == "NVIDIA GeForce GTX 1080", "the larger card is busy"


@pytest.mark.parametrize("word", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", ""])
def test_b55_memory_that_nvidia_smi_does_not_know_is_unknown(word: str) -> None:
    (card,) = smi(f"0, GPU-cccc, NVIDIA GB10, {word}, {word}, [N/A]\n")
    assert card == Accelerator("cuda", "NVIDIA GB10", None, None, "GPU-cccc")


@pytest.mark.parametrize(
    "text",
    [
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
        "NVIDIA driver is installed and running.\n\n",
        "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n",
        'Field "mig.mode.current" is not a valid field to query.\n',
    ],
)
def test_b55_no_card_where_nvidia_smi_fails_or_is_missing(text: str) -> None:
    assert smi(text) == ()
    assert machine().accelerators == ()


def test_b55_of_a_card_cut_into_instances_a_process_gets_one() -> None:
    instances = smi(MIG, MIG_LISTING)
    assert [(card.name, card.memory_free, card.uuid) for card in instances] == [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, "MIG-1111"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", None, "MIG-2222"),
        ("NVIDIA A100-SXM4-40GB", 40326 * MIB, "GPU-bbbb"),
    ]
    totals = [card.memory_total or 0 for card in instances[:2]]
    assert 19_000 * MIB < totals[0] < 19_968 * MIB, "what a 3g.20gb really has"
    assert 4_500 * MIB < totals[1] <= 4_864 * MIB
    assert smi(MIG.splitlines()[0], "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)\n") == (), "none is made yet"


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("1", ["1080"]), ("1,0", ["1080", "3090"]), ("GPU-9b8a", ["1080"]), ("0,7,1", ["3090"])],
)
def test_cuda_visible_devices_hides_cards_as_it_does_from_cuda(visible: str, names: list[str]) -> None:
    assert [card.name.split()[-1] for card in smi(TWO, CUDA_VISIBLE_DEVICES=visible)] == names


# ---------------------------------------------------------------------- Linux and its containers


def test_b55_a_container_of_2_gb_on_a_machine_of_32() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{1536 * MIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {512 * MIB}\nactive_file 7\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    hardware = machine(files=files)
    assert (hardware.memory_total, hardware.memory_available) == (2 * GIB, 1 * GIB)
    assert hardware.cores == 1
    free = machine(files={"/proc/self/cgroup": "0::/\n"})
    assert (free.cores, free.memory_total, free.memory_available) == (8, 32_768_000 * 1024, 20_480_000 * 1024)


def test_b55_control_groups_of_version_1_are_found_where_the_container_mounts_them() -> None:
    files = {
        "/proc/self/cgroup": "12:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n1:name=systemd:/docker/0123\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1073741824\n",
        "/sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 536870912\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    limits = cgroup_limits(files.get)
    assert (limits.cores, limits.memory_total, limits.memory_available) == (4, 2 * GIB, 1536 * MIB)


def test_the_tightest_of_nested_groups_counts() -> None:
    files = {
        "/proc/self/cgroup": "0::/user.slice/job\n",
        "/sys/fs/cgroup/user.slice/job/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "50000 100000\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    }
    limits = cgroup_limits(files.get)
    assert (limits.cores, limits.memory_total, limits.memory_available) == (1, 3 * GIB, 3 * GIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", "nonsense"])
def test_no_limit_is_not_a_limit(limit: str) -> None:
    files = {
        "/proc/self/cgroup": "9:memory:/a\n3:cpu:/\n0::/\n",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": limit,
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    limits = cgroup_limits(files.get)
    assert (limits.cores, limits.memory_total, limits.memory_available) == (None, None, None)


def test_a_machine_that_says_nothing_is_unknown_and_not_empty() -> None:
    hardware = machine(files={"/proc/meminfo": ""}, cores=None)
    assert hardware == Hardware("Linux", "x86_64", None, None, None, ())


# ---------------------------------------------------------------------- here


def test_b55_every_look_measures_again() -> None:
    files = {"/proc/meminfo": MEMINFO}
    probe = Probe("Linux", "x86_64", 4, {}, lambda _: None, files.get)
    before = detect(probe)
    files["/proc/meminfo"] = MEMINFO.replace("20480000", "1024000")
    assert (before.memory_available, detect(probe).memory_available) == (20_480_000 * 1024, 1_024_000 * 1024)


def test_this_machine_is_known_and_torch_stays_away() -> None:
    code = "import sys; from peers.hardware import detect; print(detect()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    hardware = detect()
    assert hardware.cores is not None
    assert 1 <= hardware.cores <= (os.cpu_count() or 1)
    assert hardware.memory_total is not None
    assert hardware.memory_available is not None
    assert 0 < hardware.memory_available <= hardware.memory_total <= psutil.virtual_memory().total
