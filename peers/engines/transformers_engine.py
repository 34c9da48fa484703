"""Generation with plain transformers: any causal language model, on CPU, CUDA or Apple's MPS.

    prompts --left-pad--> prefill once each --repeat cache--> rows --sample--> ids, log-probabilities
                                                               ^---------------|  until every row has ended

The loop is our own because `generate` warps logits by default settings of the checkpoint, and a
log-probability that is not that of the distribution sampled from silently biases training. In float32 the adapter
is merged into a copy of the weights it touches, always from the untouched base, so generation costs what the
bare model costs and no version leaves a trace in the next. In bfloat16 and float16 it stays beside them, in float32:
merged, most of its steps would be less than the last bit of a weight, and vanish (SmolLM2: 0.17 nats a token, half of
what there is between the adapter and the base). A version that comes while a call generates is checked and laid aside
at once; the next call takes it before its first token.
"""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from peers.engines import Completion, Generation
from peers.engines.choose import ROWS_MAX
from peers.models.base import BaseModel
from peers.models.lora import adapter_values, attach_lora, lora_parameters
from protocols.adapters import Adapter, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling

# Shape suffixes: P = prompts, R = rows (prompts x group), T = tokens, V = vocabulary.

_INIT_SEED = 0  # which A stands there before the first adapter is loaded does not matter: B is 0


@dataclass(frozen=True, slots=True)
class _Version:
    """An adapter that fits, on the device."""

    version: int
    adapter: bytes
    matrices: dict[str, torch.Tensor]


class TransformersEngine:
    """See the module's docstring. One call of `generate` or `greedy` at a time."""

    name = "transformers"
    calls = 1

    def __init__(self, model: BaseModel, lora: LoraSpec, device: str = "cpu", rows_max: int = ROWS_MAX) -> None:
        """Moves the model to the device, and computes in what its weights are in. At most `rows_max` completions are
        decoded at once, a group at least. Raises ValueError for LoRA targets that the model has not."""
        self.device = device
        self._rows_max = rows_max
        self._stopped = threading.Event()
        self._tokenizer = model.tokenizer
        self._scale = lora.alpha / lora.r
        self._base = model.module
        self._base.to(device).eval()
        self.dtype = str(next(self._base.parameters()).dtype).removeprefix("torch.")
        self._lora = attach_lora(self._base, lora, seed=_INIT_SEED)
        self._paths = [name.removesuffix(".lora_A") for name in lora_parameters(self._lora) if name.endswith("A")]
        self._merges = self.dtype == "float32"
        self._policy = _weight_sharing_copy(self._base) if self._merges else self._lora.get_base_model()
        """What generates."""
        if self._merges:
            for path in self._paths:
                linear = _linear(self._policy, path)
                linear.weight = nn.Parameter(linear.weight.clone(), requires_grad=False)
        self._lora.to(device)
        self._newest: _Version | None = None
        self._current: _Version | None = None

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Calls that begin from now on generate with it. Raises PeerFault, and keeps the one before, if it does not
        fit."""
        matrices = {name: values.to(self.device) for name, values in adapter_values(self._lora, adapter).items()}
        self._newest = _Version(version, adapter_digest(adapter), matrices)

    @torch.no_grad()
    def _begin(self) -> _Version:
        """The newest version, in the policy. Raises ValueError before the first."""
        newest = self._newest
        if newest is None:
            raise ValueError("no adapter is loaded")
        if newest is not self._current:
            self._current = None
            if self._merges:
                for path in self._paths:
                    delta = newest.matrices[f"{path}.lora_B"] @ newest.matrices[f"{path}.lora_A"] * self._scale
                    _linear(self._policy, path).weight.copy_(_linear(self._base, path).weight + delta)
            else:
                for name, parameter in lora_parameters(self._lora).items():
                    parameter.copy_(newest.matrices[name])
            self._current = newest
        return newest

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Generation:
        """`sampling.group_size` completions for each prompt; the same seed gives the same on the same machine.

        Prompts are answered in batches of at most `rows_max` rows. Raises ValueError for an empty prompt.
        """
        begun = self._begin()
        generator = torch.Generator(device=self.device).manual_seed(seed)
        size = sampling.group_size
        rows = []
        for batch in _batches(prompts, max(1, self._rows_max // size)):
            rows += self._decode(batch, size, sampling.max_new_tokens, sampling.temperature, generator)
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        return Generation(begun.version, begun.adapter, groups)

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """The likeliest continuation of each prompt, token by token."""
        self._begin()
        rows = []
        for batch in _batches(prompts, self._rows_max):
            rows += self._decode(batch, 1, max_new_tokens, temperature=1.0, generator=None)
        return rows

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[Completion]:
        return decode(
            self._policy,
            _left_padded(prompts, self._tokenizer.pad_id, self.device),
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            eos_ids=self._tokenizer.eos_ids,
            draw=_Draw(temperature, generator, self._stopped.is_set),
        )

    def stop(self) -> None:
        """From any thread, for good: what is being generated raises CancelledError at its next token.

        A process that was told to go cannot wait for minutes of generation (case B92).
        """
        self._stopped.set()

    def close(self) -> None:
        """Nothing to end: the weights go with the engine."""


class _Draw:
    """Chooses next ids: sampled at a temperature, or the likeliest where there is no generator."""

    def __init__(
        self, temperature: float, generator: torch.Generator | None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._temperature = temperature
        self._generator = generator
        self._stopped = stopped

    def __call__(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and their log-probabilities, [R, 1] each, over the full vocabulary, float32."""
        if self._stopped():
            raise CancelledError
        logprobs_RV = torch.log_softmax(logits_RV.float() / self._temperature, dim=-1)
        if self._generator is None:
            ids_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
        else:
            if not logprobs_RV.isfinite().any(dim=-1).all() or logprobs_RV.isnan().any():
                raise PeerFault("adapter gives no probabilities")  # its values are finite, what they lead to is not
            ids_R1 = torch.multinomial(logprobs_RV.exp(), 1, generator=self._generator)
        return ids_R1, logprobs_RV.gather(-1, ids_R1)


@torch.inference_mode()
def decode(
    module: PreTrainedModel,
    padded_PT: tuple[torch.Tensor, torch.Tensor],
    *,
    group_size: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    draw: _Draw,
) -> list[Completion]:
    """`group_size` completions of each left-padded prompt (ids and mask, int64 [P, T]); group by group.

    A row leaves the batch when it ends: what is left of a long tail costs what its rows cost.
    """
    ids_PT, mask_PT = padded_PT
    cache = DynamicCache(config=module.config)
    positions_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
    logits_PV = _last_logits(module, ids_PT, mask_PT, positions_PT, cache)
    cache.batch_repeat_interleave(group_size)
    logits_RV = logits_PV.repeat_interleave(group_size, dim=0)
    mask_RT = mask_PT.repeat_interleave(group_size, dim=0)
    position_R1 = mask_RT.sum(-1, keepdim=True)

    live = list(range(len(logits_RV)))
    ids: list[list[int]] = [[] for _ in live]
    logprobs: list[list[float]] = [[] for _ in live]
    while True:
        id_R1, logprob_R1 = draw(logits_RV)
        for row, token, logprob in zip(live, id_R1[:, 0].tolist(), logprob_R1[:, 0].tolist(), strict=True):
            ids[row].append(token)
            logprobs[row].append(logprob)
        kept = [i for i, row in enumerate(live) if ids[row][-1] not in eos_ids]
        if not kept or len(ids[live[kept[0]]]) == max_new_tokens:
            break
        if len(kept) < len(live):
            kept_R = torch.tensor(kept, device=id_R1.device)
            id_R1, mask_RT, position_R1 = id_R1[kept_R], mask_RT[kept_R], position_R1[kept_R]
            cache.batch_select_indices(kept_R)
            live = [live[i] for i in kept]
        mask_RT = torch.cat((mask_RT, torch.ones_like(id_R1)), dim=-1)
        logits_RV = _last_logits(module, id_R1, mask_RT, position_R1, cache)
        position_R1 = position_R1 + 1
    return [_completion(*row, eos_ids) for row in zip(ids, logprobs, strict=True)]


def _last_logits(
    module: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Logits after the last id of each row, [rows, V]; the cache grows by the ids."""
    keyword = {_cache_keyword(type(module)): cache}
    output = module(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **keyword
    )
    logits_RTV: torch.Tensor = output.logits
    return logits_RTV[:, -1]


@functools.cache
def _cache_keyword(module_type: type[nn.Module]) -> str:
    """`cache` since transformers 5.2x, `past_key_values` before and in models of other hands."""
    return "cache" if "cache" in inspect.signature(module_type.forward).parameters else "past_key_values"


def _completion(ids: list[int], logprobs: list[float], eos_ids: frozenset[int]) -> Completion:
    finish: Literal["stop", "length"] = "stop" if ids[-1] in eos_ids else "length"
    return Completion(token_ids=tuple(ids), logprobs=tuple(logprobs), finish=finish)


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 [P, T]; every prompt ends in the last column."""
    if not all(prompts):
        raise ValueError("a prompt without tokens cannot be continued")
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _batches(prompts: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def _linear(module: nn.Module, path: str) -> nn.Linear:
    linear = module.get_submodule(path)
    assert isinstance(linear, nn.Linear)  # attach_lora adapts nothing else
    return linear


def _weight_sharing_copy(module: PreTrainedModel) -> PreTrainedModel:
    """The same structure on the same tensors."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
