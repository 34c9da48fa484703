"""What one optimizer step minimises: small pure functions over token log-probabilities.

Three policies meet in a token of an asynchronous run, and each ratio between them has its own bound:

    behaviour --(proximal / behaviour)--> proximal --(current / proximal)--> current
    the producer's, when it                the trainer's, before              the one that
    sampled the token                      this step                          gets the gradient
                        truncated at importance_cap         clipped to 1 - clip_low .. 1 + clip_high

Under `stale = "downweight"` a completion also counts less the older it is (`staleness_weight`).

Shape suffixes: B = completions, T = tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from protocols.faults import LocalFault
from protocols.manifest import LearningSpec


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Natural-log probabilities of sampled tokens, all at the sampling temperature; float32 [B, T]."""

    current_BT: torch.Tensor
    proximal_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantage_B: torch.Tensor
    mask_BT: torch.Tensor
    """Bool: True where a token is trained. Whatever stands elsewhere has no influence."""
    base_BT: torch.Tensor | None = None
    """The base model's, without adapter; needed only with kl_beta > 0."""
    weight_B: torch.Tensor | None = None
    """Staleness weight of each completion; None is 1 for all."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the trained tokens of a batch; the learner divides by their number."""

    ratio: float
    importance: float
    weight: float
    abs_logprob_gap: float
    clipped: float
    kl: float | None


def grpo_loss(batch: TokenBatch, spec: LearningSpec, num_tokens: int) -> tuple[torch.Tensor, LossSums]:
    """Clipped policy loss with truncated importance correction, summed over tokens / `num_tokens`.

    `num_tokens` counts the trained tokens of the whole optimizer step, so that micro-batches add up and
    each token weighs the same (DAPO, arXiv 2503.14476, section 3.3). Clipping is PPO's as GRPO uses it
    (arXiv 2402.03300, equation 3), with DAPO's higher upper bound (section 3.1). The weight
    min(proximal / behaviour, importance_cap) is truncated importance sampling (Ionides 2008; per token, as
    in the decoupled objective of arXiv 2110.00641); no gradient flows through it. With kl_beta > 0 each
    trained token adds GRPO's k3 estimate (equation 4). With nothing to train the loss is 0.
    """
    mask_BT = batch.mask_BT

    def trained(x_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, x_BT, 0.0)

    advantage_B1 = batch.advantage_B[:, None]
    ratio_BT = trained(batch.current_BT - batch.proximal_BT).exp()
    clipped_BT = ratio_BT.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    surrogate_BT = torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)

    gap_BT = trained(batch.proximal_BT - batch.behaviour_BT).detach()
    importance_BT = gap_BT.exp().clamp(max=spec.importance_cap)
    weight_BT = torch.ones_like(importance_BT)
    if batch.weight_B is not None:
        weight_BT = weight_BT * batch.weight_B[:, None]
    loss_BT = -importance_BT * weight_BT * surrogate_BT

    kl = None
    if spec.kl_beta > 0.0:
        if batch.base_BT is None:
            raise LocalFault("kl_beta > 0 needs the base model's log-probabilities")
        kl_BT = k3(trained(batch.current_BT), trained(batch.base_BT))
        loss_BT = loss_BT + spec.kl_beta * kl_BT
        kl = kl_BT.sum().item()

    sums = LossSums(
        ratio=trained(ratio_BT).sum().item(),
        importance=trained(importance_BT).sum().item(),
        weight=trained(weight_BT).sum().item(),
        abs_logprob_gap=gap_BT.abs().sum().item(),
        clipped=trained((surrogate_BT < ratio_BT * advantage_B1).float()).sum().item(),
        kl=kl,
    )
    return trained(loss_BT).sum() / max(num_tokens, 1), sums


def k3(current_BT: torch.Tensor, base_BT: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(current || base) per token: base/current - log(base/current) - 1, never negative.

    GRPO, arXiv 2402.03300, equation 4 (Schulman's third estimator).
    """
    log_ratio_BT = base_BT - current_BT
    return log_ratio_BT.exp() - log_ratio_BT - 1.0


def staleness_weight(lag: int) -> float:
    """1 / (1 + lag): what a rollout `lag` optimizer steps old counts under `downweight`.

    Staleness-aware learning (Zhang et al., arXiv 1511.05950) divides the learning rate of a stale gradient by its
    staleness. Here each rollout of a batch has a lag of its own, so it is its weight that is divided; by 1 + lag, so
    that a rollout of the newest version counts in full and each step of lag tells.
    """
    return 1.0 / (1 + lag)


Loss = Callable[[TokenBatch, LearningSpec, int], tuple[torch.Tensor, LossSums]]

LOSSES: Mapping[str, Loss] = {"grpo": grpo_loss}
