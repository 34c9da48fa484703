"""Advantages and losses against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.learning.advantages import ADVANTAGES, STD_EPS, grpo_advantages
from peers.learning.losses import LOSSES, TokenBatch, grpo_loss, k3, staleness_weight
from protocols.faults import LocalFault
from protocols.manifest import LearningSpec

SPEC = LearningSpec(clip_low=0.2, clip_high=0.28, importance_cap=2.0)
REWARDS = st.lists(st.none() | st.floats(-100, 100, width=32), min_size=1, max_size=16)


def test_advantages_by_hand() -> None:
    # mean 0.25, population variance (0.5625 + 3 * 0.0625) / 4
    std = math.sqrt(0.1875)
    expected = [0.75 / (std + STD_EPS), *[-0.25 / (std + STD_EPS)] * 3]
    assert grpo_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, rel=1e-12)


@given(REWARDS)
def test_advantages_sum_to_zero_and_are_bounded(rewards: list[float | None]) -> None:
    advantages = grpo_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert max(map(abs, advantages)) <= math.sqrt(len(rewards)) + 1e-6  # of population z-scores


@given(REWARDS.flatmap(lambda rewards: st.tuples(st.just(rewards), st.permutations(range(len(rewards))))))
def test_advantages_follow_a_permutation(case: tuple[list[float | None], list[int]]) -> None:
    rewards, order = case
    advantages = grpo_advantages(rewards)
    assert grpo_advantages([rewards[i] for i in order]) == pytest.approx([advantages[i] for i in order], abs=1e-9)


@given(REWARDS)
def test_an_unscored_completion_is_outside_the_baseline(rewards: list[float | None]) -> None:
    advantages = grpo_advantages(rewards)
    scored = [reward for reward in rewards if reward is not None]
    kept = [a for a, reward in zip(advantages, rewards, strict=True) if reward is not None]
    assert kept == grpo_advantages(scored)
    assert all(a == 0.0 for a, reward in zip(advantages, rewards, strict=True) if reward is None)


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0],
        [2.0 + 0.0, 0.0 + 2.0, 2.0 + 0.0, 0.0 + 2.0],  # two reward functions that cancel out
        [0.1 + 0.2, 0.3 + 0.0, 0.3, 0.1 + 0.2],  # ... and do so only up to rounding
        [1.0, None, None, None],
        [None, None],
        [None, 0.5, 0.5],
    ],
)
def test_b56_without_a_difference_the_advantages_are_exactly_zero(rewards: list[float | None]) -> None:
    assert grpo_advantages(rewards) == [0.0] * len(rewards)


def batch(**changes: torch.Tensor) -> TokenBatch:
    """Two completions of two tokens, all policies equal, all tokens trained."""
    logprob_BT = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    equal = TokenBatch(
        current_BT=logprob_BT,
        proximal_BT=logprob_BT,
        behaviour_BT=logprob_BT,
        advantage_B=torch.tensor([1.0, -0.5]),
        mask_BT=torch.ones(2, 2, dtype=torch.bool),
    )
    return dataclasses.replace(equal, **changes)


def test_with_equal_policies_the_loss_is_minus_the_mean_advantage_of_tokens() -> None:
    loss, sums = grpo_loss(batch(), SPEC, 4)
    assert loss.item() == pytest.approx(-(2 * 1.0 + 2 * -0.5) / 4)
    assert (sums.ratio, sums.importance, sums.weight) == (4.0, 4.0, 4.0)
    assert (sums.abs_logprob_gap, sums.clipped, sums.kl) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient"),
    [
        (1.0, 1.1, 1.1, True),
        (1.0, 1.5, 1.28, False),  # above the upper bound: no further
        (1.0, 0.5, 0.5, True),  # a good token that became unlikely is pulled back
        (-1.0, 0.9, -0.9, True),
        (-1.0, 0.5, -0.8, False),  # below the lower bound: no further
        (-1.0, 1.5, -1.5, True),  # a bad token that became likely is pushed back
    ],
)
def test_the_ratio_is_clipped_only_where_it_went_too_far_already(
    advantage: float, ratio: float, value: float, gradient: bool
) -> None:
    current_BT = torch.tensor([[-1.0 + math.log(ratio)]], requires_grad=True)
    one = TokenBatch(
        current_BT=current_BT,
        proximal_BT=torch.tensor([[-1.0]]),
        behaviour_BT=torch.tensor([[-1.0]]),
        advantage_B=torch.tensor([advantage]),
        mask_BT=torch.tensor([[True]]),
    )
    loss, sums = grpo_loss(one, SPEC, 1)
    loss.backward()
    assert loss.item() == pytest.approx(-value)
    assert current_BT.grad.item() == pytest.approx(-advantage * ratio if gradient else 0.0)
    assert sums.clipped == (0.0 if gradient else 1.0)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (math.log(1.5), 1.5), (5.0, 2.0), (-3.0, math.exp(-3.0))])
def test_the_importance_weight_is_truncated_and_carries_no_gradient(gap: float, weight: float) -> None:
    current_BT = batch().current_BT.clone().requires_grad_()
    shifted = batch(current_BT=current_BT, proximal_BT=current_BT, behaviour_BT=batch().current_BT - gap)
    shifted = dataclasses.replace(shifted, proximal_BT=current_BT.detach())
    loss, sums = grpo_loss(shifted, SPEC, 4)
    loss.backward()
    assert loss.item() == pytest.approx(-weight * 1.0 / 4)
    torch.testing.assert_close(current_BT.grad, torch.tensor([[-weight] * 2, [0.5 * weight] * 2]) / 4)
    assert sums.importance == pytest.approx(4 * weight)
    assert sums.abs_logprob_gap == pytest.approx(4 * abs(gap))


@pytest.mark.parametrize(("lag", "weight"), [(0, 1.0), (1, 0.5), (3, 0.25), (19, 0.05)])
def test_a_rollout_counts_less_the_older_it_is(lag: int, weight: float) -> None:
    assert staleness_weight(lag) == weight


def test_the_staleness_weight_divides_the_truncated_importance_weight_and_nothing_else() -> None:
    # First completion: proximal / behaviour 3, truncated to 2, divided by 1 + 3. Second: 1.5, divided by 1 + 1.
    current_BT = batch().current_BT.clone().requires_grad_()
    behaviour_BT = current_BT.detach() - torch.tensor([[3.0], [1.5]]).log()
    shifted = batch(
        current_BT=current_BT,
        proximal_BT=current_BT.detach(),
        behaviour_BT=behaviour_BT,
        base_BT=current_BT.detach() - 0.5,
        weight_B=torch.tensor([staleness_weight(3), staleness_weight(1)]),
    )
    loss, sums = grpo_loss(shifted, SPEC, 4)
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * 0.5 * 1.0 + 2 * 0.75 * -0.5) / 4)
    torch.testing.assert_close(current_BT.grad, torch.tensor([[-0.5] * 2, [0.5 * 0.75] * 2]) / 4)
    assert (sums.importance, sums.weight) == (pytest.approx(2 * 2.0 + 2 * 1.5), 2 * 0.25 + 2 * 0.5)
    pulled, _ = grpo_loss(shifted, LearningSpec(kl_beta=0.1), 4)
    assert (pulled - loss).item() == pytest.approx(
        0.1 * (math.exp(-0.5) + 0.5 - 1), rel=1e-5
    )  # the pull to the base has no age


def test_weights_of_1_change_no_bit() -> None:
    plain = batch(behaviour_BT=torch.tensor([[-1.2, -1.5], [-0.9, -2.0]]))
    weighted = dataclasses.replace(plain, weight_B=torch.ones(2))
    (loss, sums), (expected, expected_sums) = (grpo_loss(each, SPEC, 3) for each in (weighted, plain))
    assert (loss.item(), sums) == (expected.item(), expected_sums)


def test_a_proximal_policy_that_is_not_detached_still_gives_the_weight_no_gradient() -> None:
    proximal_BT = batch().current_BT.clone().requires_grad_()
    loss, _ = grpo_loss(batch(proximal_BT=proximal_BT, current_BT=batch().current_BT), SPEC, 4)
    loss.backward()  # through the ratio only: d ratio / d proximal = -ratio
    torch.testing.assert_close(proximal_BT.grad, torch.tensor([[1.0, 1.0], [-0.5, -0.5]]) / 4)


def test_b57_masked_tokens_are_neither_in_the_sum_nor_in_the_denominator() -> None:
    mask_BT = torch.tensor([[True, False], [True, True]])
    loss, sums = grpo_loss(batch(mask_BT=mask_BT), SPEC, 3)
    assert loss.item() == pytest.approx(-(1.0 - 0.5 - 0.5) / 3)
    assert sums.ratio == sums.importance == 3.0


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_masked_tokens_has_no_influence(rubbish: float) -> None:
    mask_BT = torch.tensor([[True, False], [True, True]])

    def spoiled(x_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, x_BT, rubbish)

    spec = LearningSpec(kl_beta=0.1)
    clean = batch(mask_BT=mask_BT, base_BT=batch().current_BT - 0.3)
    current_BT = spoiled(clean.current_BT).requires_grad_()
    dirty = dataclasses.replace(
        clean,
        current_BT=current_BT,
        proximal_BT=spoiled(clean.proximal_BT),
        behaviour_BT=spoiled(clean.behaviour_BT),
        base_BT=spoiled(clean.base_BT),
    )
    loss, sums = grpo_loss(dirty, spec, 3)
    loss.backward()
    expected, expected_sums = grpo_loss(clean, spec, 3)
    assert (loss.item(), sums) == (expected.item(), expected_sums)
    assert current_BT.grad.isfinite().all()
    assert current_BT.grad[0, 1] == 0.0


def test_b57_with_everything_masked_loss_and_gradient_are_zero_not_nan() -> None:
    current_BT = batch().current_BT.clone().requires_grad_()
    masked = batch(current_BT=current_BT, mask_BT=torch.zeros(2, 2, dtype=torch.bool))
    loss, _ = grpo_loss(masked, SPEC, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(current_BT.grad, torch.zeros(2, 2))


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    weight_B = torch.tensor([0.5, 0.25])
    whole = batch(behaviour_BT=torch.tensor([[-1.2, -1.5], [-0.9, -2.0]]), weight_B=weight_B)
    total = 0.0
    for row in (slice(0, 1), slice(1, 2)):
        parts = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
        rows = {name: x if x is None else x[row] for name, x in parts.items()}
        total += grpo_loss(TokenBatch(**rows), SPEC, 4)[0].item()
    assert total == pytest.approx(grpo_loss(whole, SPEC, 4)[0].item())


def test_k3_by_hand_and_its_unbiasedness() -> None:
    assert k3(torch.tensor(-1.0), torch.tensor(-1.0)).item() == 0.0
    assert k3(torch.tensor(-1.0), torch.tensor(-1.5)).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    current_V = torch.tensor([0.7, 0.2, 0.1]).log()
    base_V = torch.tensor([0.3, 0.3, 0.4]).log()
    expected = (current_V.exp() * (current_V - base_V)).sum()  # KL(current || base)
    torch.testing.assert_close((current_V.exp() * k3(current_V, base_V)).sum(), expected)


def test_kl_adds_beta_times_the_estimate() -> None:
    spec = LearningSpec(kl_beta=0.1)
    with_base = batch(base_BT=batch().current_BT - 0.5)
    loss, sums = grpo_loss(with_base, spec, 4)
    kl = math.exp(-0.5) + 0.5 - 1
    assert sums.kl == pytest.approx(4 * kl)
    assert loss.item() == pytest.approx(-0.25 + 0.1 * kl)


def test_kl_without_a_base_is_our_own_fault() -> None:
    with pytest.raises(LocalFault, match="base model"):
        grpo_loss(batch(), LearningSpec(kl_beta=0.1), 4)


def test_every_loss_of_the_manifest_is_registered() -> None:
    assert set(LOSSES) == set(ADVANTAGES) == {LearningSpec().loss}
