"""The yardstick: what the trainer would say about the same tokens, in float32."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from peers.engines import Completion
from peers.models.base import BaseModel
from peers.models.lora import attach_lora, lora_parameters, to_adapter, write_adapter
from protocols.adapters import Adapter, Tensor
from protocols.manifest import LoraSpec

# Shape suffixes: B = completions, T = tokens, V = vocabulary.

Ids = Sequence[int]

# Standard deviation of B in the adapters of the checks. With A as it is initialised and a scale of 2, they move
# the built-in model and SmolLM2 by 0.14 nats a token: far above rounding, and the text remains text.
GAIN = 0.1


class Nonconforming(AssertionError):
    """An engine does not do what the contract says."""


def require(condition: bool, message: str) -> None:
    """Raises Nonconforming unless the condition holds."""
    if not condition:
        raise Nonconforming(message)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far from the float32 reference an engine may be, in nats; the reasons are in docs/agreement.md."""

    gap: float
    """Greedy: how much likelier the reference's best token may be than the one that was chosen."""
    mean: float
    """Mean |engine - reference| of a sampled token's log-probability."""
    p99: float
    max: float


LIMITS = {
    "float32": Limits(gap=1e-3, mean=3e-4, p99=1e-3, max=5e-3),
    "bfloat16": Limits(gap=0.5, mean=0.06, p99=0.3, max=2.0),
    "float16": Limits(gap=0.06, mean=0.0075, p99=0.04, max=0.25),  # three bits more than bfloat16: an eighth
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """|engine - reference| over sampled tokens, in nats."""

    tokens: int
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, gap_T: torch.Tensor) -> "Agreement":
        """Of differences engine - reference, any order. Raises Nonconforming where there are none."""
        require(gap_T.numel() > 0, "nothing was generated to compare")
        size_T = gap_T.abs().double()
        return cls(len(size_T), size_T.mean().item(), size_T.quantile(0.99).item(), size_T.max().item())

    def require_within(self, limits: Limits, what: str) -> None:
        """Raises Nonconforming, with the numbers."""
        for name in ("mean", "p99", "max"):
            measured, limit = getattr(self, name), getattr(limits, name)
            require(
                measured <= limit,
                f"{what}: {name} difference to the trainer's log-probabilities {measured:.2g} nats over "
                f"{self.tokens} tokens, limit {limit:g}",
            )


class Reference:
    """The base model with an unmerged adapter."""

    def __init__(self, model: BaseModel, lora: LoraSpec, *, rslora: bool = False) -> None:
        """`rslora`: scaled by alpha / sqrt(r) (arXiv 2312.03732) by peft itself, and not by alpha / r."""
        self.policy = _rslora(model, lora) if rslora else attach_lora(model.module, lora, seed=0)
        self.modules = tuple(sorted({name.rpartition(".")[0] for name in lora_parameters(self.policy)}))
        """Paths of what the LoRA targets name in this model."""
        self._written: Adapter | None = None

    def adapter(self, seed: int, gain: float = GAIN, only: Sequence[str] | None = None) -> dict[str, Tensor]:
        """An adapter as after some training; `only` these modules have B away from 0."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, parameter in lora_parameters(self.policy).items():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".lora_A"):
                tensors[name] = values / (3 * parameter.shape[1]) ** 0.5  # the variance of peft's own A
            else:
                silent = not gain or (only is not None and name.removesuffix(".lora_B") not in only)
                tensors[name] = torch.zeros_like(values) if silent else values * gain
        return to_adapter(tensors)

    @torch.no_grad()
    def distributions(
        self, adapter: Adapter, prompt: Ids, completions: Sequence[Ids], temperature: float = 1.0
    ) -> Iterator[torch.Tensor]:
        """For each completion the log-probabilities of all ids before each of its tokens, float32 [T, V]."""
        if adapter is not self._written:
            write_adapter(self.policy, adapter)
            self._written = adapter
        width = max(map(len, completions))
        # Causal attention never looks right, so what fills the right end has no influence.
        ids_BT = torch.tensor([[*prompt, *ids, *[0] * (width - len(ids))] for ids in completions])
        logits_BTV = self.policy(input_ids=ids_BT[:, :-1], use_cache=False, logits_to_keep=width).logits.float()
        for ids, logits_TV in zip(completions, logits_BTV, strict=True):
            yield torch.log_softmax(logits_TV[: len(ids)] / temperature, dim=-1)

    def logprobs(
        self, adapter: Adapter, prompt: Ids, completions: Sequence[Ids], temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Log-probability of each completion's tokens, float32 [T] each."""
        distributions = self.distributions(adapter, prompt, completions, temperature)
        return [of_ids(dist_TV, ids) for dist_TV, ids in zip(distributions, completions, strict=True)]

    def differences(
        self,
        adapter: Adapter,
        prompts: Sequence[Ids],
        groups: Sequence[Sequence[Completion]],
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Engine - reference for each token of all groups, float32 [T]."""
        found = []
        for prompt, group in zip(prompts, groups, strict=True):
            ours = self.logprobs(adapter, prompt, [each.token_ids for each in group], temperature)
            found += [torch.tensor(each.logprobs) - o_T for each, o_T in zip(group, ours, strict=True)]
        return torch.cat(found) if found else torch.zeros(0)


def _rslora(model: BaseModel, lora: LoraSpec) -> PeftModel:
    """peft's own rank-stabilised LoRA, on the same weights."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    options = {"r": lora.r, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
    return get_peft_model(copy.deepcopy(model.module, shared), LoraConfig(**options, use_rslora=True)).eval()


def of_ids(logprobs_TV: torch.Tensor, ids: Ids) -> torch.Tensor:
    """What stands at the ids, [T]."""
    return logprobs_TV.gather(-1, torch.tensor(ids)[:, None])[:, 0]
