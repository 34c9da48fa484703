"""The trainer's learner: groups of rollouts in, one AdamW step on the LoRA adapter out.

    groups --advantages--> rows --sort, pack--> micro-batches --forward, loss, backward--> clip --> AdamW

A step sees its groups once, so the proximal policy is the current one with the gradient cut: one forward
pass gives both. Micro-batches add up to the gradient of the whole batch. Whether rollouts are too old or
their rewards are right is decided before they come here; what their age does to their weight, here.

What is published is the policy: its adapter has fewer bits than the optimizer works with, and may be a lossy
delta's. So the parameters become what receivers rebuild, and the difference is carried, as a residual, to the
next version that is published (error feedback, arXiv 1901.09847, algorithm 1, with the whole step as its g):

    target = parameters + residual --publish--> rebuilt;  parameters := rebuilt, residual := target - rebuilt

A step that cannot teach anything is skipped, with a reason, and changes nothing, not even a moment of
AdamW: it is no progress and there is no new version to announce. Nothing here draws random numbers after
the adapter is initialised.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import safetensors
import safetensors.torch
import torch
from peft import PeftModel

from peers.learning.advantages import ADVANTAGES
from peers.learning.losses import LOSSES, LossSums, TokenBatch, staleness_weight
from peers.models.base import BaseModel
from peers.models.lora import attach_lora, lora_parameters, read_adapter, to_adapter, write_adapter
from protocols.adapters import Adapter, Tensor
from protocols.faults import LocalFault
from protocols.manifest import LearningSpec, LoraSpec

# Padded tokens in one forward and backward pass. Activations of a 0.5 B model take about 3 MB a token in
# float32, so this bounds them to about 3 and 12 GB. On a CPU smaller batches stay in the allocator's cache:
# 1024 is the fastest of 512 to 8192 on a 1 M-parameter model. A GPU wants more at once (4096 is a guess).
MICRO_BATCH_TOKENS_CPU = 1024
MICRO_BATCH_TOKENS_GPU = 4096

ADAMW_BETAS = (0.9, 0.99)  # a run is a few hundred steps, so the second moment forgets in about 100
ADAMW_EPS = 1e-8

# Causal attention never looks right, so what fills the right end of a row has no influence; 0 is in every
# vocabulary.
PAD_ID = 0

_STEPS = "steps"
_RESIDUAL = "residual"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter, as torch names it


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The G completions of one prompt, as the ingest accepted them."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Behaviour log-probability of each completion token, natural log, at the sampling temperature."""
    rewards: tuple[float | None, ...]
    """None: nobody could score it."""
    truncated: tuple[bool, ...]
    """True: the completion ran into max_new_tokens."""
    age: int = 0
    """Lag in optimizer steps: the group counts less the larger it is, under `downweight`."""

    def __post_init__(self) -> None:
        sizes = {len(self.completions), len(self.logprobs), len(self.rewards), len(self.truncated)}
        lengths_agree = [len(c) for c in self.completions] == [len(p) for p in self.logprobs]
        numbers = [*(r for r in self.rewards if r is not None), *(p for row in self.logprobs for p in row)]
        whole = self.prompt_ids and len(sizes) == 1 and lengths_agree and self.age >= 0
        if not whole or not all(map(math.isfinite, numbers)):
            raise LocalFault("a group reached the learner that the ingest should have refused")


SkipReason = Literal["no signal", "all truncated", "not finite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did. What was not computed is None, never 0.

    Means are over trained tokens, except where the field says otherwise.
    """

    skipped: SkipReason | None
    tokens: int
    """Trained tokens: of scored, unmasked completions in groups with signal."""
    seconds: float
    reward_mean: float | None
    """Over scored completions of all groups."""
    zero_std_share: float
    """Groups without signal (all scored rewards equal) / groups."""
    loss: float | None = None
    grad_norm: float | None = None
    """L2 norm over all LoRA gradients, before clipping."""
    ratio_mean: float | None = None
    """current / proximal; 1 as long as a step sees its groups once."""
    importance_mean: float | None = None
    """proximal / behaviour, truncated at importance_cap."""
    weight_mean: float | None = None
    """What tokens count by their age: below 1 only under `downweight`."""
    abs_logprob_gap_mean: float | None = None
    """|proximal - behaviour|, in nats."""
    clip_share: float | None = None
    kl: float | None = None
    """k3 estimate to the base model, in nats; None with kl_beta 0."""

    def metrics(self) -> dict[str, float]:
        """The numbers that there are, by field name."""
        fields = dataclasses.asdict(self)
        return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion that is trained."""

    ids: tuple[int, ...]
    num_prompt: int
    behaviour: tuple[float, ...]
    advantage: float
    weight: float = 1.0


class Scorer:
    """Log-probabilities of given tokens under a policy, at the temperature that they were sampled at."""

    def __init__(self, policy: PeftModel, temperature: float) -> None:
        self.policy = policy
        self.device = next(policy.parameters()).device
        self.micro_batch_tokens = MICRO_BATCH_TOKENS_CPU if self.device.type == "cpu" else MICRO_BATCH_TOKENS_GPU
        self._temperature = temperature

    @torch.no_grad()
    def groups(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        """Of each completion token of these groups, under the policy's adapter as it stands."""
        rows = [
            [
                _Row(group.prompt_ids + completion, len(group.prompt_ids), behaviour, 0.0)
                for completion, behaviour in zip(group.completions, group.logprobs, strict=True)
            ]
            for group in groups
        ]
        found: dict[_Row, tuple[float, ...]] = {}
        for batch in _micro_batches([row for of in rows for row in of if row.behaviour], self.micro_batch_tokens):
            logprob_BT = self.tokens(self.ids(batch), _num_kept(batch))
            first = min(row.num_prompt for row in batch)
            for row, logprobs in zip(batch, logprob_BT.tolist(), strict=True):
                found[row] = tuple(logprobs[row.num_prompt - first : len(row.ids) - first])
        return [[found.get(row, ()) for row in of] for of in rows]

    def ids(self, batch: Sequence[_Row]) -> torch.Tensor:
        """Right-padded, int64 [B, T]."""
        length = max(len(row.ids) for row in batch)
        padded = [row.ids + (PAD_ID,) * (length - len(row.ids)) for row in batch]
        return torch.tensor(padded, device=self.device)

    def tokens(self, ids_BT: torch.Tensor, num_kept: int) -> torch.Tensor:
        """Of each of the last `num_kept` tokens of each row, float32 [B, num_kept]."""
        output = self.policy(input_ids=ids_BT[:, :-1], use_cache=False, logits_to_keep=num_kept)
        logit_BTV = output.logits.float() / self._temperature
        picked_BT = logit_BTV.gather(-1, ids_BT[:, -num_kept:, None]).squeeze(-1)
        return picked_BT - logit_BTV.logsumexp(-1)


class Learner:
    """The policy in training: base model, LoRA adapter and AdamW. Synchronous; call it from one thread."""

    def __init__(
        self,
        model: BaseModel,
        lora: LoraSpec,
        spec: LearningSpec,
        temperature: float,
        seed: int,
        stale: Literal["drop", "downweight"] = "drop",
    ) -> None:
        """Attach a fresh adapter to `model`; `temperature` is the one that completions are sampled at.

        `stale` is the manifest's: whether a rollout within the bound counts in full, or less the older it is.
        """
        self.policy = attach_lora(model.module, lora, seed)
        self.steps = 0
        """Optimizer steps done; skipped ones do not count."""
        self._spec = spec
        self._downweight = stale == "downweight"
        self._scorer = Scorer(self.policy, temperature)
        self._advantages = ADVANTAGES[spec.loss]
        self._loss = LOSSES[spec.loss]
        self._parameters = lora_parameters(self.policy)
        self._residual: dict[str, torch.Tensor] = {}
        """By name: what the last published adapter lacks, float32. Absent is zero."""
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=spec.learning_rate,
            betas=ADAMW_BETAS,
            eps=ADAMW_EPS,
            weight_decay=0.0,
            foreach=True,
        )

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """One optimizer step on these groups, or a skipped one that leaves everything as it was."""
        if not groups:
            raise LocalFault("a step without groups")
        started_s = time.perf_counter()
        advantages = [self._advantages(group.rewards) for group in groups]
        rows = self._rows(groups, advantages)
        num_tokens = sum(len(row.behaviour) for row in rows)
        scored = [reward for group in groups for reward in group.rewards if reward is not None]
        report = StepReport(
            skipped=None if num_tokens else self._why_nothing(groups),
            tokens=num_tokens,
            seconds=0.0,
            reward_mean=math.fsum(scored) / len(scored) if scored else None,
            zero_std_share=sum(not any(group) for group in advantages) / len(groups),
        )
        if report.skipped is None:
            numbers = self._backward(rows, num_tokens)
            if all(math.isfinite(number) for number in numbers.values()):
                self._optimizer.step()
                self.steps += 1
                report = dataclasses.replace(report, **numbers)
            else:
                report = dataclasses.replace(report, skipped="not finite")
        return dataclasses.replace(report, seconds=time.perf_counter() - started_s)

    def logprobs(self, group: TrainingGroup) -> list[tuple[float, ...]]:
        """Log-probability of each completion token under the adapter as it stands, at the temperature."""
        return self._scorer.groups([group])[0]

    def adapter(self) -> dict[str, Tensor]:
        """The adapter as it stands."""
        return read_adapter(self.policy)

    @torch.no_grad()
    def target(self) -> dict[str, Tensor]:
        """What ought to be published next, F32: the adapter as it stands, and what the last version lacks."""
        return to_adapter({name: self._target(name) for name in self._parameters})

    def _target(self, name: str) -> torch.Tensor:
        parameter, residual = self._parameters[name], self._residual.get(name)
        return parameter if residual is None else parameter + residual

    @torch.no_grad()
    def settle(self, rebuilt: Adapter) -> None:
        """Go on from what was published in place of `target()`; the difference is carried to the next version.

        With a lossless float32 version it is zero and nothing changes. PeerFault if `rebuilt` does not fit.
        """
        targets = {name: self._target(name).clone() for name in self._parameters}
        write_adapter(self.policy, rebuilt)
        lacking = {name: targets[name] - parameter for name, parameter in self._parameters.items()}
        self._residual = {name: residual for name, residual in lacking.items() if residual.any()}

    def load_adapter(self, adapter: Adapter) -> None:
        """Continue from this adapter and nothing beyond it; AdamW's moments and `steps` stay. PeerFault if it does
        not fit."""
        write_adapter(self.policy, adapter)
        self._residual = {}

    def state(self) -> bytes:
        """All that a new Learner with the same arguments needs to continue bit for bit; safetensors."""
        tensors = {_STEPS: torch.tensor(self.steps)}
        for name, parameter in self._parameters.items():
            tensors[f"lora/{name}"] = parameter.detach()
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value
        tensors |= {f"{_RESIDUAL}/{name}": residual for name, residual in self._residual.items()}
        return safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})

    @torch.no_grad()
    def load_state(self, raw: bytes) -> None:
        """Continue from `state()` of a Learner with the same arguments.

        Raises ValueError for bytes that are anything else, and has then changed nothing. The learning rate
        is not part of it: it comes from the manifest, whose next revision may change it.
        """
        tensors = _decoded(raw)
        expected = {_STEPS: torch.tensor(0)}
        for name, parameter in self._parameters.items():
            expected[f"lora/{name}"] = parameter
            if f"step/{name}" in tensors:
                moments = (torch.tensor(0.0), parameter, parameter)
                expected |= {f"{key}/{name}": value for key, value in zip(_MOMENTS, moments, strict=True)}
            if f"{_RESIDUAL}/{name}" in tensors:
                expected[f"{_RESIDUAL}/{name}"] = parameter
        _require_alike(tensors, expected)

        self._optimizer.state.clear()
        self._residual = {
            name: tensors[f"{_RESIDUAL}/{name}"].to(parameter.device)
            for name, parameter in self._parameters.items()
            if f"{_RESIDUAL}/{name}" in tensors
        }
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[f"lora/{name}"])
            if f"step/{name}" in tensors:
                step, exp_avg, exp_avg_sq = (tensors[f"{key}/{name}"].clone() for key in _MOMENTS)
                self._optimizer.state[parameter] = {
                    "step": step,
                    "exp_avg": exp_avg.to(parameter.device),
                    "exp_avg_sq": exp_avg_sq.to(parameter.device),
                }
        self.steps = int(tensors[_STEPS])

    def _rows(self, groups: Sequence[TrainingGroup], advantages: Sequence[Sequence[float]]) -> list[_Row]:
        """The completions that are trained.

        Left out, though their rewards count in the baseline: empty completions, and truncated ones if the
        manifest says so. Left out altogether: unscored completions, and groups without signal whatever
        kl_beta is (a pull to the base model alone would be a step that no reward asked for).
        """
        rows = []
        for group, group_advantages in zip(groups, advantages, strict=True):
            if not any(group_advantages):
                continue
            for i, completion in enumerate(group.completions):
                masked = self._spec.mask_truncated and group.truncated[i]
                if completion and group.rewards[i] is not None and not masked:
                    ids = group.prompt_ids + completion
                    weight = staleness_weight(group.age) if self._downweight else 1.0
                    rows.append(_Row(ids, len(group.prompt_ids), group.logprobs[i], group_advantages[i], weight))
        return rows

    def _why_nothing(self, groups: Sequence[TrainingGroup]) -> SkipReason:
        truncated = [flag for group in groups for flag in group.truncated]
        return "all truncated" if self._spec.mask_truncated and truncated and all(truncated) else "no signal"

    def _backward(self, rows: Sequence[_Row], num_tokens: int) -> dict[str, float]:
        """Leave the clipped gradient of the whole batch in the parameters; the numbers of the report."""
        self._optimizer.zero_grad()  # gradients are only those of this step, however the one before ended
        loss = 0.0
        totals: dict[str, float] = {}
        for batch in _micro_batches(rows, self._scorer.micro_batch_tokens):
            batch_loss, sums = self._batch_loss(batch, num_tokens)
            batch_loss.backward()
            loss += batch_loss.item()
            for name, value in dataclasses.asdict(sums).items():
                if value is not None:
                    totals[name] = totals.get(name, 0.0) + value
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._spec.max_grad_norm)
        means = {_REPORT_NAMES[name]: total / num_tokens for name, total in totals.items()}
        return {"loss": loss, "grad_norm": grad_norm.item(), **means}

    def _batch_loss(self, batch: Sequence[_Row], num_tokens: int) -> tuple[torch.Tensor, LossSums]:
        scorer, device = self._scorer, self._scorer.device
        ids_BT, num_kept = scorer.ids(batch), _num_kept(batch)
        base_BT = None
        if self._spec.kl_beta > 0.0:
            with torch.no_grad(), self.policy.disable_adapter():
                base_BT = scorer.tokens(ids_BT, num_kept)
        current_BT = scorer.tokens(ids_BT, num_kept)

        first = min(row.num_prompt for row in batch)
        behaviour_BT = torch.zeros(len(batch), num_kept)
        mask_BT = torch.zeros(len(batch), num_kept, dtype=torch.bool)
        for i, row in enumerate(batch):
            columns = slice(row.num_prompt - first, len(row.ids) - first)
            behaviour_BT[i, columns] = torch.tensor(row.behaviour)
            mask_BT[i, columns] = True
        tokens = TokenBatch(
            current_BT=current_BT,
            proximal_BT=current_BT.detach(),
            behaviour_BT=behaviour_BT.to(device),
            advantage_B=torch.tensor([row.advantage for row in batch], device=device),
            mask_BT=mask_BT.to(device),
            base_BT=base_BT,
            weight_B=torch.tensor([row.weight for row in batch], device=device),
        )
        return self._loss(tokens, self._spec, num_tokens)


_REPORT_NAMES = {
    "ratio": "ratio_mean",
    "importance": "importance_mean",
    "weight": "weight_mean",
    "abs_logprob_gap": "abs_logprob_gap_mean",
    "clipped": "clip_share",
    "kl": "kl",
}


def _num_kept(batch: Sequence[_Row]) -> int:
    """Columns from the first completion token of any row to the last of any."""
    return max(len(row.ids) for row in batch) - min(row.num_prompt for row in batch)


def _micro_batches(rows: Sequence[_Row], tokens_max: int) -> Iterator[list[_Row]]:
    """Rows of similar length together, at most `tokens_max` padded tokens, at least one row."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: (len(row.ids), row.num_prompt)):
        if batch and (len(batch) + 1) * len(row.ids) > tokens_max:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _decoded(raw: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise ValueError(f"learner state is damaged: {error}") from error


def _require_alike(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    if tensors.keys() != expected.keys():
        names = sorted(tensors.keys() ^ expected.keys())
        raise ValueError(f"learner state is of another model or adapter: {len(names)} names differ, {names[:3]}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise ValueError(f"learner state: {name} is {tensor.dtype} {list(tensor.shape)}")
        if not tensor.isfinite().all() or (name == _STEPS and tensor < 0):
            raise ValueError(f"learner state: {name} is out of range")
