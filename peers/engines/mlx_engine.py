"""Generation with mlx-lm: on the GPU of Apple silicon; on a CPU, also on Linux, for tests.

    prompt --read once--> cache --a copy a row--> BatchGenerator --ids, log-probabilities--> rows, until all have ended
                                                  ^ model at a temperature, sampler with a key of its own

BatchGenerator is mlx-lm's continuous batching. It reports log-probabilities of the logits it is given, so it is given
logits in float32 that are divided by the temperature already: what it reports is then what was sampled from.

In float32 the adapter is merged into copies of the weights that it touches, always from the untouched base, so no
version leaves a trace in the next; in bfloat16 and float16 it stays beside them, in float32, since most of its steps
are less than the last bit of a weight. Caches live as long as a call. A version that comes while a call generates is
checked, in numpy, and laid aside; the next call takes it before its first token. An array of MLX that is not computed
yet belongs to the thread that asked for it, and fails in every other: all that outlives a call is evaluated.
"""

import contextlib
import math
import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from peers.engines import Completion, Generation
from peers.engines.mlx_layout import to_mlx
from peers.models.base import ModelFiles
from peers.models.find import first_line
from peers.models.lora import fitting_values
from peers.models.shapes import read_shapes
from protocols.adapters import Adapter, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling

# Since then BatchGenerator can compute on a stream that every thread may use; the tests fail with 0.31.2.
MLX_LM_MIN = "0.31.3"


def require_mlx_lm(installed: str | None) -> None:
    """Raises ValueError, in one line, for a version that is too old, or None."""
    if installed is None or _numbers(installed) < _numbers(MLX_LM_MIN):
        found = "" if installed is None else f" ({installed} is installed)"
        raise ValueError(f"engine mlx needs mlx-lm >= {MLX_LM_MIN}: pip install -U 'echo-swarm[mlx]'{found}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


try:
    import mlx.core as mx
    import mlx_lm
    from mlx import nn
    from mlx.utils import tree_unflatten

    require_mlx_lm(mlx_lm.__version__)
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.utils import load_model
except ImportError:
    require_mlx_lm(None)

# Shape suffixes: R = rows, T = tokens, V = vocabulary.

# Rows decoded at once. More rows are faster per token until the cache fills the memory.
ROWS_MAX = 256

# Tokens of a prompt that are read at once, as mlx-lm itself does: scores of attention take memory for each pair.
_READ_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Version:
    """An adapter that fits, in mlx-lm's layout."""

    version: int
    adapter: bytes
    matrices: dict[str, np.ndarray]


@dataclass(slots=True)
class _Row:
    """What a row has so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class MlxEngine:
    """See the module's docstring. One call of `generate` or `greedy` at a time, on whichever thread."""

    name = "mlx"
    calls = 1

    def __init__(
        self,
        files: ModelFiles,
        lora: LoraSpec,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        rows_max: int = ROWS_MAX,
        device: Literal["cpu", "gpu"] | None = None,
    ) -> None:
        """`device`: None takes MLX's own choice, a GPU where there is one.

        Raises ValueError, in one line, for a GPU that is not there, for files that mlx-lm does not load, and for LoRA
        targets that the model has not, or has not as mlx-lm builds it.
        """
        if device == "gpu" and not mx.is_available(mx.gpu):
            raise ValueError("engine mlx: MLX finds no GPU here")
        self.device = mx.default_device().type.name if device is None else device
        self.dtype = dtype
        self._rows_max = rows_max
        self._eos_ids = files.tokenizer.eos_ids
        self._scale = lora.alpha / lora.r
        self._stopped = threading.Event()
        adapted = read_shapes(files, lora).adapted
        self._shapes = {f"{path}.lora_A": (lora.r, num_in) for path, (_, num_in) in adapted.items()}
        self._shapes |= {f"{path}.lora_B": (num_out, lora.r) for path, (num_out, _) in adapted.items()}
        self._stream = mx.new_thread_local_stream(getattr(mx, self.device))
        with mx.stream(self._stream):
            self._model = _load(files, dtype, by_columns=self.device == "cpu")
        linears = _linears(self._model, adapted)
        self._merges = dtype == "float32"
        self._linears = linears if self._merges else _beside(self._model, linears, lora)
        """The modules that are adapted, by path."""
        self._base = {path: linear.weight for path, linear in linears.items()}
        self._newest: _Version | None = None
        self._current: _Version | None = None

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Calls that begin from now on generate with it. Raises PeerFault, and keeps the one before, if it does not
        fit."""
        matrices = {name: values.numpy() for name, values in fitting_values(self._shapes, adapter).items()}
        self._newest = _Version(version, adapter_digest(adapter), to_mlx(matrices))

    def _begin(self) -> _Version:
        """The newest version, in the model. Raises ValueError before the first."""
        newest = self._newest
        if newest is None:
            raise ValueError("no adapter is loaded")
        if newest is not self._current:
            self._current = None
            for path, linear in self._linears.items():
                a, b = (mx.array(newest.matrices[f"{path}.{kind}"]) for kind in ("lora_a", "lora_b"))
                if self._merges:
                    linear.weight = self._base[path] + self._scale * (a @ b).T
                    mx.eval(linear.weight)  # one by one: of the one before, no more than a matrix stands beside it
                else:
                    linear.lora_a, linear.lora_b = a, b
                    mx.eval(a, b)
            self._current = newest
        return newest

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Generation:
        """`sampling.group_size` completions for each prompt; the same seed gives the same on the same machine.

        Raises ValueError for an empty prompt.
        """
        size = sampling.group_size
        with mx.stream(self._stream):
            begun = self._begin()
            rows = self._decode(prompts, size, sampling.max_new_tokens, sampling.temperature, _Sampler(seed))
        return Generation(begun.version, begun.adapter, [rows[i : i + size] for i in range(0, len(rows), size)])

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """The likeliest continuation of each prompt, token by token."""
        with mx.stream(self._stream):
            self._begin()
            return self._decode(prompts, 1, max_new_tokens, 1.0, _likeliest)

    def _decode(
        self, prompts: Sequence[Sequence[int]], group_size: int, max_new_tokens: int, temperature: float, sampler: Any
    ) -> list[Completion]:
        """`group_size` rows of each prompt, in order. A group begins as soon as there is room for its rows."""
        if not all(prompts):
            raise ValueError("a prompt without tokens cannot be continued")
        waiting = deque(prompts)
        rows: dict[int, _Row] = {}
        live = 0
        room = max(self._rows_max, group_size)
        generator = BatchGenerator(
            _AtTemperature(self._model, temperature),
            max_tokens=max_new_tokens,
            stop_tokens=[[i] for i in sorted(self._eos_ids)],
            sampler=sampler,
            completion_batch_size=room,
            prefill_batch_size=room,
            stream=self._stream,
        )
        with contextlib.closing(generator):
            while waiting or live:
                while waiting and live + group_size <= room:
                    prompt = waiting.popleft()
                    cache = self._read(prompt)  # the rows' caches are copies of it
                    added = generator.insert([[prompt[-1]] for _ in range(group_size)], caches=[cache] * group_size)
                    rows |= {uid: _Row() for uid in added}
                    live += group_size
                live -= self._step(generator, rows)
        mx.clear_cache()  # what this call needed may be of no size that the next one does
        return [_completion(row, self._eos_ids) for _, row in sorted(rows.items())]

    def _read(self, prompt: Sequence[int]) -> list[Any]:
        """Keys and values of a prompt, but for its last id."""
        cache = make_prompt_cache(self._model)
        before_last = list(prompt[:-1])
        for start in range(0, len(before_last), _READ_TOKENS):
            self._require_going()
            self._model(mx.array([before_last[start : start + _READ_TOKENS]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        return cache

    def _step(self, generator: "BatchGenerator", rows: dict[int, _Row]) -> int:
        """One token more for each row that goes on; how many have ended with it."""
        self._require_going()
        responses = generator.next_generated()
        logprobs = mx.stack([response.logprobs[response.token] for response in responses]).tolist()
        for response, logprob in zip(responses, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise PeerFault("adapter gives no probabilities")  # its values are finite, what they lead to is not
            rows[response.uid].ids.append(response.token)
            rows[response.uid].logprobs.append(logprob)
        return sum(response.finish_reason is not None for response in responses)

    def _require_going(self) -> None:
        if self._stopped.is_set():
            raise CancelledError

    def stop(self) -> None:
        """From any thread, for good: what is being generated raises CancelledError at its next token."""
        self._stopped.set()

    def close(self) -> None:
        """Give the weights back."""
        del self._model, self._linears, self._base
        mx.clear_cache()


class _AtTemperature:
    """The model as BatchGenerator calls it: logits of the last ids, float32, divided by the temperature."""

    def __init__(self, model: "nn.Module", temperature: float) -> None:
        self._model = model
        self._temperature = temperature

    def __call__(self, ids_RT: "mx.array", cache: list[Any]) -> "mx.array":
        logits_RTV = self._model(ids_RT, cache=cache)
        return logits_RTV[:, -1:].astype(mx.float32) / self._temperature


class _Sampler:
    """Draws with a key of its own: MLX's global one is anybody's."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)

    def __call__(self, logprobs_RV: "mx.array") -> "mx.array":
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(logprobs_RV, key=key)


def _likeliest(logprobs_RV: "mx.array") -> "mx.array":
    return mx.argmax(logprobs_RV, axis=-1)


def _completion(row: _Row, eos_ids: frozenset[int]) -> Completion:
    return Completion(tuple(row.ids), tuple(row.logprobs), "stop" if row.ids[-1] in eos_ids else "length")


def _load(files: ModelFiles, dtype: str, by_columns: bool) -> "nn.Module":
    """The base model, evaluated. Raises ValueError, in one line, for what mlx-lm does not load or cannot batch."""
    try:
        model, _ = load_model(files.folder, lazy=True, model_config=_filled_in(files))
        model.set_dtype(getattr(mx, dtype))
        if by_columns:  # mlx's wheel for Linux has the reference BLAS, which is twice as fast by these
            for layer in model.modules():
                if isinstance(layer, nn.Linear | nn.Embedding):
                    layer.weight = mx.contiguous(layer.weight.T).T
        mx.eval(model)  # also what is no parameter, such as frequencies of positions
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"no model {files.name!r}: mlx-lm does not load it: {first_line(error)}") from error
    unfit = {type(layer).__name__ for layer in make_prompt_cache(model) if not hasattr(layer, "merge")}
    if unfit:
        raise ValueError(f"no model {files.name!r}: mlx-lm cannot batch its cache ({', '.join(unfit)})")
    return model


def _filled_in(files: ModelFiles) -> dict[str, Any]:
    """What `config.json` leaves out or says in a way that mlx-lm does not read, as transformers understands it.

    Otherwise mlx-lm takes defaults of its own, silently: embeddings are tied where transformers' Llama has them
    untied, and what stands under `rope_parameters`, as transformers writes it since 5.0, is mostly not looked at, so
    that the base of rotary positions becomes 10,000.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True).to_dict()
    filled = {key: value for key, value in config.items() if key not in files.config and value is not None}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where kinds of layers have parameters of their own it is one level down, as in mlx-lm
        filled |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope.get("rope_type", "default") != "default":
            filled["rope_scaling"] = rope
    return filled


def _beside(model: "nn.Module", linears: dict[str, "nn.Linear"], lora: LoraSpec) -> dict[str, "LoRALinear"]:
    """These modules of the model with room for an adapter beside the weights, in float32; by path."""
    adapted = {
        path: LoRALinear.from_base(linear, r=lora.r, scale=lora.alpha / lora.r) for path, linear in linears.items()
    }
    model.update_modules(tree_unflatten(list(adapted.items())))
    return adapted


def _linears(model: "nn.Module", adapted: dict[str, tuple[int, int]]) -> dict[str, "nn.Linear"]:
    """The modules to adapt, by path. Raises ValueError for one that mlx-lm has not, or not in this form."""
    modules = dict(model.named_modules())
    for path, shape in adapted.items():
        linear = modules.get(path)
        if not isinstance(linear, nn.Linear) or linear.weight.shape != shape:
            target = path.rpartition(".")[2]
            raise ValueError(
                f"lora.targets: {target!r} is no linear module of this model as mlx-lm builds it ({path}); use another "
                "engine, or leave it out of the run's targets"
            )
    return {path: modules[path] for path in adapted}
