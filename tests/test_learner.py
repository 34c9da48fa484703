"""The learner on tiny random models: it learns, it knows when it cannot, and it continues bit for bit."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peers.learning.advantages import grpo_advantages
from peers.learning.learner import Learner, TrainingGroup
from peers.models.base import BaseModel
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.codecs import rounded, widened
from protocols.faults import LocalFault, PeerFault
from protocols.manifest import LearningSpec, LoraSpec
from tests.test_lora import VOCAB, tiny_model

LORA = LoraSpec(r=4, alpha=8.0)
PROMPT = (1, 2, 3)
COMPLETIONS = ((4, 5, 6), (7, 8), (9, 10, 11, 12), (13, 14, 15))


def learning(**changes: Any) -> LearningSpec:
    return LearningSpec(learning_rate=1e-2, **changes)


SPEC = learning()


def base_model(module: nn.Module | None = None) -> BaseModel:
    tokenizer: Any = SimpleNamespace(pad_id=0, eos_ids=frozenset({0}), vocab_size=VOCAB)
    return BaseModel(name="tiny", module=module or tiny_model(), tokenizer=tokenizer, digest=bytes(32))


def new_learner(
    spec: LearningSpec = SPEC, temperature: float = 1.0, seed: int = 0, stale: Literal["drop", "downweight"] = "drop"
) -> Learner:
    return Learner(base_model(), LORA, spec, temperature, seed, stale)


def group(**changes: Any) -> TrainingGroup:
    plain = TrainingGroup(
        prompt_ids=PROMPT,
        completions=COMPLETIONS,
        logprobs=tuple(tuple(-math.log(VOCAB) for _ in ids) for ids in COMPLETIONS),
        rewards=(1.0, 0.0, 1.0, 0.0),
        truncated=(False,) * 4,
    )
    return dataclasses.replace(plain, **changes)


def another_group(i: int) -> TrainingGroup:
    """A group of other tokens and lengths for each i."""
    completions = tuple(tuple((7 * i + 3 * j + k) % VOCAB for k in range(1 + (i + j) % 4)) for j in range(4))
    logprobs = tuple(tuple(-4.0 - 0.1 * j for _ in ids) for j, ids in enumerate(completions))
    rewards = (1.0, 0.5, 0.0, float(i % 2))
    return TrainingGroup(tuple(range(1, 3 + i)), completions, logprobs, rewards, (False,) * 4)


def exact_logprobs(module: nn.Module, prompt: tuple[int, ...], ids: tuple[int, ...], t: float) -> list[float]:
    """One sequence alone, no padding, all positions: the slow way."""
    with torch.no_grad():
        logit_TV = module(torch.tensor([prompt + ids])).logits[0, :-1].float() / t
    logprob_TV = logit_TV.log_softmax(-1)[len(prompt) - 1 :]
    return [logprob_TV[i, token].item() for i, token in enumerate(ids)]


def test_b69_one_step_moves_b_and_makes_rewarded_completions_likelier() -> None:
    learner = new_learner()
    before = learner.logprobs(group())
    report = learner.step([group()])
    after = learner.logprobs(group())
    assert report.skipped is None
    assert learner.steps == 1
    moved = [name for name, t in learner.adapter().items() if name.endswith("lora_B") and any(t.data)]
    assert len(moved) == len(learner.adapter()) // 2
    for i, reward in enumerate(group().rewards):
        gain = sum(after[i]) - sum(before[i])
        assert gain > 0.01 if reward == 1.0 else gain < -0.01


def sample_group(learner: Learner, prompt: tuple[int, ...], wanted: int, dice: torch.Generator) -> TrainingGroup:
    with torch.no_grad():
        logprob_V = learner.policy(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    drawn = torch.multinomial(logprob_V.exp(), 16, replacement=True, generator=dice).tolist()
    return TrainingGroup(
        prompt_ids=prompt,
        completions=tuple((token,) for token in drawn),
        logprobs=tuple((logprob_V[token].item(),) for token in drawn),
        rewards=tuple(float(token == wanted) for token in drawn),
        truncated=(False,) * 16,
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_b69_a_bandit_is_solved_in_under_100_steps(seed: int) -> None:
    wanted, prompts = 17, [(i, i + 1) for i in range(1, 9)]
    learner, dice = new_learner(seed=seed), torch.Generator().manual_seed(seed)
    for _ in range(99):
        report = learner.step([sample_group(learner, prompt, wanted, dice) for prompt in prompts])
        assert report.reward_mean is not None
        if report.reward_mean > 0.95:
            break
    with torch.no_grad():
        chance_B = learner.policy(torch.tensor(prompts)).logits[:, -1].softmax(-1)[:, wanted]
    assert chance_B.mean().item() > 0.9


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_the_gradient_is_clipped_and_adamw_moves_by_the_learning_rate(max_norm: float) -> None:
    learner = new_learner(learning(max_grad_norm=max_norm))
    report = learner.step([group()])
    state = safetensors.torch.load(learner.state())
    first_moment = torch.cat([t.flatten() for name, t in state.items() if name.startswith("exp_avg/")])
    assert report.grad_norm is not None
    assert 1e-3 < report.grad_norm < 1e3  # before clipping
    assert first_moment.norm().item() == pytest.approx(0.1 * min(report.grad_norm, max_norm), rel=1e-3)
    assert state["lora/lm_head.lora_B"].abs().max().item() == pytest.approx(SPEC.learning_rate, rel=1e-2)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "rewards", [(1.0,) * 4, (2.0 + 0.0, 0.0 + 2.0, 2.0, 2.0), (None,) * 4, (1.0, None, None, None)]
)
def test_b56_without_signal_the_step_is_skipped_whatever_the_kl(beta: float, rewards: tuple[float | None]) -> None:
    learner = new_learner(learning(kl_beta=beta))
    learner.step([another_group(1)])
    state, dice = learner.state(), torch.get_rng_state()
    report = learner.step([group(rewards=rewards), group(rewards=rewards)])
    assert (report.skipped, report.tokens, report.zero_std_share) == ("no signal", 0, 1.0)
    assert (report.loss, report.grad_norm, report.kl) == (None, None, None)
    assert learner.state() == state
    assert torch.equal(torch.get_rng_state(), dice)
    assert learner.steps == 1


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_b56_a_group_without_signal_has_no_influence_on_a_step_that_has_some(beta: float) -> None:
    flat = dataclasses.replace(another_group(2), rewards=(0.5,) * 4)
    mixed, alone = (new_learner(learning(kl_beta=beta)) for _ in range(2))
    for _ in range(2):
        report, expected = mixed.step([flat, group()]), alone.step([group()])
    assert report.zero_std_share == 0.5
    assert (report.loss, report.kl, report.tokens) == (expected.loss, expected.kl, expected.tokens)
    assert adapter_digest(mixed.adapter()) == adapter_digest(alone.adapter())


def test_kl_pulls_towards_the_base_model() -> None:
    free, held = new_learner(), new_learner(learning(kl_beta=5.0))
    for _ in range(10):
        free.step([group()])
        report = held.step([group()])

    def distance(learner: Learner) -> float:
        base = new_learner().logprobs(group())
        pairs = zip(learner.logprobs(group()), base, strict=True)
        return sum(abs(p - q) for mine, theirs in pairs for p, q in zip(mine, theirs, strict=True))

    assert report.kl is not None
    assert report.kl > 0.0
    assert distance(held) < 0.5 * distance(free)


def test_b57_all_truncated_is_a_skipped_step() -> None:
    learner = new_learner()
    learner.step([group()])
    state = learner.state()
    report = learner.step([group(truncated=(True,) * 4)])
    assert (report.skipped, report.loss, report.tokens) == ("all truncated", None, 0)
    assert report.reward_mean == 0.5
    assert learner.state() == state


def test_b57_one_of_four_truncated_equals_the_loss_by_hand_on_the_other_three() -> None:
    learner = new_learner()
    current = learner.logprobs(group())
    report = learner.step([group(truncated=(False, False, False, True))])
    advantage = 0.5 / (0.5 + 1e-4)  # the truncated one's reward counts in the baseline: mean and std are 0.5
    total = 0.0
    for i, sign in enumerate((1, -1, 1)):
        for logprob, behaviour in zip(current[i], group().logprobs[i], strict=True):
            total += min(math.exp(logprob - behaviour), SPEC.importance_cap) * sign * advantage
    assert report.tokens == 3 + 2 + 4
    assert report.loss == pytest.approx(-total / 9, rel=1e-5)


def summed_objective(learner: Learner, plain: TrainingGroup) -> float:
    """Over the tokens of one group: min(proximal / behaviour, cap) * advantage, at ratio current / proximal 1."""
    total = 0.0
    for i, logprobs in enumerate(learner.logprobs(plain)):
        advantage = grpo_advantages(plain.rewards)[i]
        gaps = zip(logprobs, plain.logprobs[i], strict=True)
        total += sum(min(math.exp(mine - theirs), SPEC.importance_cap) * advantage for mine, theirs in gaps)
    return total


def test_under_downweight_a_group_counts_1_of_1_plus_its_lag() -> None:
    fresh, old = group(age=0), dataclasses.replace(another_group(1), age=3)
    learner = new_learner(stale="downweight")
    expected = -(summed_objective(learner, fresh) + summed_objective(learner, old) / 4)
    report = learner.step([fresh, old])
    tokens_fresh, tokens_old = (sum(map(len, each.completions)) for each in (fresh, old))
    assert report.tokens == tokens_fresh + tokens_old
    assert report.loss == pytest.approx(expected / report.tokens, rel=1e-5)
    assert report.weight_mean == (tokens_fresh + tokens_old / 4) / report.tokens
    assert report.importance_mean is not None
    assert report.importance_mean > 0.5  # of the ratio, before it is divided


def test_under_downweight_groups_of_the_newest_version_change_no_bit() -> None:
    fresh, usual = new_learner(stale="downweight"), new_learner(stale="drop")
    for i in range(3):
        report, expected = (each.step([another_group(i), group()]) for each in (fresh, usual))
        assert dataclasses.replace(report, seconds=0.0) == dataclasses.replace(expected, seconds=0.0)
        assert report.weight_mean == 1.0
    assert fresh.state() == usual.state()


def test_under_drop_the_age_changes_no_bit() -> None:
    old, fresh = new_learner(stale="drop"), new_learner(stale="drop")
    assert old.step([group(age=7)]).weight_mean == 1.0
    fresh.step([group(age=0)])
    assert old.state() == fresh.state()


def test_under_downweight_age_shifts_a_step_towards_the_newer_group() -> None:
    # Two groups that want the opposite: the newer one must win, however the optimizer scales the gradient.
    wants = group(rewards=(1.0, 0.0, 1.0, 0.0), age=0)
    against = group(rewards=(0.0, 1.0, 0.0, 1.0), age=4)
    learner = new_learner(stale="downweight")
    before = learner.logprobs(wants)
    learner.step([wants, against])
    gains = [sum(after) - sum(was) for after, was in zip(learner.logprobs(wants), before, strict=True)]
    assert [gain > 0.01 for gain in gains] == [True, False, True, False]


def test_truncated_completions_are_trained_when_the_manifest_says_so() -> None:
    report = new_learner(learning(mask_truncated=False)).step([group(truncated=(True,) * 4)])
    assert (report.skipped, report.tokens) == (None, 12)


def test_an_unscored_completion_changes_nothing() -> None:
    with_it, without = new_learner(), new_learner()
    report = with_it.step([group(rewards=(1.0, 0.0, None, 0.0))])
    keep = (0, 1, 3)
    fewer = {name: tuple(getattr(group(), name)[i] for i in keep) for name in ("completions", "logprobs", "truncated")}
    without.step([group(rewards=(1.0, 0.0, 0.0), **fewer)])
    assert report.reward_mean == pytest.approx(1 / 3)
    assert adapter_digest(with_it.adapter()) == adapter_digest(without.adapter())


def test_an_empty_completion_counts_in_the_baseline_and_trains_no_token() -> None:
    report = new_learner().step(
        [group(completions=((4,), ()), logprobs=((-4.0,), ()), rewards=(1.0, 0.0), truncated=(False,) * 2)]
    )
    assert (report.skipped, report.tokens, report.reward_mean) == (None, 1, 0.5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b61_equal_weights_give_ratio_one_at_any_temperature(temperature: float) -> None:
    learner = new_learner(temperature=temperature)
    learner.step([another_group(i) for i in range(3)])  # away from uniform
    groups = []
    for plain in (group(), another_group(3)):
        behaviour = [exact_logprobs(learner.policy, plain.prompt_ids, ids, temperature) for ids in plain.completions]
        groups.append(dataclasses.replace(plain, logprobs=tuple(map(tuple, behaviour))))
    report = learner.step(groups)
    assert report.importance_mean == pytest.approx(1.0, abs=1e-5)
    assert report.abs_logprob_gap_mean == pytest.approx(0.0, abs=1e-5)
    assert (report.ratio_mean, report.clip_share) == (1.0, 0.0)


def test_padding_and_packing_do_not_change_log_probabilities() -> None:
    learner = new_learner()
    learner.step([group()])
    for plain in (group(), another_group(5)):
        for ids, logprobs in zip(plain.completions, learner.logprobs(plain), strict=True):
            assert logprobs == pytest.approx(exact_logprobs(learner.policy, plain.prompt_ids, ids, 1.0), abs=1e-5)


def test_micro_batches_give_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [another_group(i) for i in range(6)]
    whole = new_learner().step(groups)
    monkeypatch.setattr("peers.learning.learner.MICRO_BATCH_TOKENS_CPU", 12)
    parts = new_learner().step(groups)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert parts.tokens == whole.tokens == sum(len(ids) for g in groups for ids in g.completions)


def _filled(learner: Learner, value: float) -> dict[str, Tensor]:
    adapter = learner.adapter()
    return {name: t._replace(data=torch.full(t.shape, value).numpy().tobytes()) for name, t in adapter.items()}


def test_b73_a_step_that_is_not_finite_is_skipped_and_never_saved() -> None:
    learner = new_learner()
    learner.step([group()])
    learner.load_adapter(_filled(learner, 3e38))
    state = learner.state()
    report = learner.step([group()])
    assert (report.skipped, report.loss, report.grad_norm) == ("not finite", None, None)
    assert learner.state() == state
    assert learner.steps == 1


def test_after_a_step_that_was_not_finite_training_goes_on_as_if_it_had_not_been() -> None:
    learner, calm = new_learner(), new_learner()
    first = (learner.step([group()]), calm.step([group()]))
    good = learner.adapter()
    learner.load_adapter(_filled(learner, 3e38))
    assert learner.step([group()]).skipped == "not finite"
    learner.load_adapter(good)
    learner.step([another_group(1)])
    calm.step([another_group(1)])
    assert first[0].loss == first[1].loss
    assert learner.state() == calm.state()


def test_b70_only_the_adapter_changes_and_the_base_is_bit_identical() -> None:
    module = tiny_model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    ids = torch.tensor([[1, 2, 3, 4]])
    logits = module(ids).logits
    learner = Learner(base_model(module), LORA, learning(kl_beta=0.1), 1.0, 0)
    for i in range(3):
        learner.step([another_group(i)])
    assert module.state_dict().keys() == before.keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with learner.policy.disable_adapter():
        assert torch.equal(learner.policy(ids).logits, logits)
    assert not torch.allclose(learner.policy(ids).logits, logits)


def test_b73_three_steps_saved_and_two_more_equal_five() -> None:
    straight, first = new_learner(), new_learner()
    for i in range(5):
        straight.step([another_group(i), group()])
    for i in range(3):
        first.step([another_group(i), group()])
    second = new_learner(seed=99)  # its own start must not matter
    second.step([group()])
    second.load_state(first.state())
    assert second.steps == 3
    for i in range(3, 5):
        second.step([another_group(i), group()])
    assert adapter_digest(second.adapter()) == adapter_digest(straight.adapter())
    assert second.state() == straight.state()


def test_the_state_before_the_first_step_is_complete_too() -> None:
    fresh, other = new_learner(), new_learner(seed=5)
    other.step([group()])
    other.load_state(fresh.state())
    assert other.steps == 0
    fresh.step([group()])
    other.step([group()])
    assert other.state() == fresh.state()


def test_state_of_another_adapter_is_refused_and_changes_nothing() -> None:
    learner = new_learner()
    learner.step([group()])
    state = learner.state()
    for lora in (LoraSpec(r=8, alpha=8.0), LoraSpec(r=4, alpha=8.0, targets=("q_proj",))):
        other = Learner(base_model(), lora, SPEC, 1.0, 0)
        other.step([group()])
        with pytest.raises(ValueError, match="learner state"):
            learner.load_state(other.state())
    assert learner.state() == state


@functools.cache
def small_saved_learner() -> tuple[Learner, bytes]:
    learner = Learner(base_model(), LoraSpec(r=1, targets=("q_proj",)), SPEC, 1.0, 0)
    learner.step([group()])
    return learner, learner.state()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_state_is_a_value_error_and_changes_nothing(data: st.DataObject) -> None:
    learner, good = small_saved_learner()
    learner.load_state(good)
    header_bytes = 8 + int.from_bytes(good[:8], "little")
    raw = bytearray(good[: data.draw(st.sampled_from([len(good), data.draw(st.integers(0, len(good)))]))])
    edits = st.tuples(st.integers(0, header_bytes), st.integers(0, 255))
    for place, value in data.draw(st.lists(edits, min_size=1, max_size=4)):
        raw[place : place + 1] = bytes([value])
    try:
        learner.load_state(bytes(raw))
    except ValueError:
        assert learner.state() == good
    else:  # the damage hit padding, or swapped names or offsets: still a whole state of this shape
        assert len(learner.state()) == len(good)


@pytest.mark.parametrize("raw", [b"", b"\x80\x04.", b"x" * 100, (2**63).to_bytes(8, "little") + b"{}"])
def test_what_is_no_state_at_all_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="learner state"):
        new_learner().load_state(raw)


def test_a_state_with_values_that_are_not_finite_is_refused() -> None:
    learner = new_learner()
    raw = bytearray(learner.state())
    raw[-4:] = torch.tensor(float("nan")).numpy().tobytes()
    with pytest.raises(ValueError, match="out of range"):
        learner.load_state(bytes(raw))


def test_load_adapter_continues_with_the_published_weights_and_the_old_moments() -> None:
    learner = new_learner()
    learner.step([group()])
    rounded = {
        name: Tensor(
            "F32",
            t.shape,
            torch.frombuffer(bytearray(t.data), dtype=torch.float32).bfloat16().float().numpy().tobytes(),
        )
        for name, t in learner.adapter().items()
    }
    learner.load_adapter(rounded)
    assert learner.adapter() == rounded
    assert learner.steps == 1
    with pytest.raises(PeerFault, match="adapter does not fit"):
        learner.load_adapter({})
    assert learner.adapter() == rounded


def floats(adapter: Adapter) -> torch.Tensor:
    return torch.cat([torch.frombuffer(bytearray(t.data), dtype=torch.float32) for t in adapter.values()])


def test_what_is_published_and_what_is_carried_add_up_to_the_target_bit_for_bit() -> None:
    learner = new_learner()
    learner.step([group()])
    target = learner.target()
    assert target == learner.adapter(), "nothing is carried yet"
    published = rounded(target, "bfloat16")
    learner.settle(published)
    assert learner.adapter() == widened(published), "the policy is what was published"
    assert learner.adapter() != target
    assert learner.target() == target, "rounding loses nothing: its error is a float32"
    learner.settle(published)
    assert learner.target() == target, "to settle again changes nothing"


def test_steps_between_two_versions_move_the_parameters_and_keep_what_is_carried() -> None:
    learner = new_learner()
    learner.step([group()])
    carried = floats(learner.target())
    learner.settle(rounded(learner.target(), "bfloat16"))
    carried = carried - floats(learner.adapter())
    for i in range(3):
        learner.step([another_group(i)])
    assert torch.equal(floats(learner.target()), floats(learner.adapter()) + carried)
    assert carried.any()


def test_to_publish_float32_changes_nothing_and_leaves_no_residual() -> None:
    learner, other = new_learner(), new_learner()
    for i in range(3):
        for each in (learner, other):
            each.step([another_group(i), group()])
        learner.settle(learner.target())
    assert learner.state() == other.state()
    assert b"residual/" not in learner.state()


def test_what_is_carried_is_part_of_the_state_and_of_nothing_else() -> None:
    straight, second = new_learner(), new_learner(seed=9)
    without = straight.state()
    for i in range(2):
        straight.step([another_group(i), group()])
        straight.settle(rounded(straight.target(), "bfloat16"))
    assert b"residual/" in straight.state()
    second.load_state(straight.state())
    assert second.state() == straight.state()
    for each in (straight, second):
        each.step([another_group(2), group()])
        each.settle(rounded(each.target(), "bfloat16"))
    assert second.state() == straight.state()
    target = second.target()
    second.load_adapter(straight.adapter())
    assert second.target() == straight.adapter() != target, "a loaded adapter has nothing beyond it"
    second.load_state(without)  # as an older checkpoint, it has none
    assert second.target() == second.adapter()


def test_b73_a_residual_that_is_not_finite_or_of_another_shape_is_refused() -> None:
    learner = new_learner()
    learner.step([group()])
    learner.settle(rounded(learner.target(), "bfloat16"))
    tensors = safetensors.torch.load(learner.state())
    name = next(each for each in tensors if each.startswith("residual/"))
    good = learner.state()
    for bad in (torch.full_like(tensors[name], math.nan), tensors[name].double(), tensors[name][:1]):
        with pytest.raises(ValueError, match="learner state: residual/"):
            learner.load_state(safetensors.torch.save(tensors | {name: bad.contiguous()}))
    with pytest.raises(ValueError, match="names differ"):
        learner.load_state(safetensors.torch.save(tensors | {"residual/nobody": tensors[name].clone()}))
    assert learner.state() == good


def test_the_same_groups_give_the_same_adapter() -> None:
    one, two = new_learner(), new_learner()
    for learner in (one, two):
        torch.manual_seed(id(learner) % 1000)  # the global dice do not matter
        for i in range(3):
            learner.step([another_group(i), group()])
    assert adapter_digest(one.adapter()) == adapter_digest(two.adapter())


def test_metrics_leave_out_what_was_not_computed() -> None:
    learner = new_learner()
    metrics = learner.step([group(rewards=(None,) * 4)]).metrics()
    assert metrics.keys() == {"tokens", "seconds", "zero_std_share"}
    metrics = learner.step([group()]).metrics()
    assert "kl" not in metrics
    assert metrics["ratio_mean"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": ()},
        {"rewards": (1.0, 0.0)},
        {"rewards": (1.0, 0.0, math.nan, 0.0)},
        {"logprobs": ((-1.0,), *group().logprobs[1:])},
        {"logprobs": ((-1.0, -math.inf, -1.0), *group().logprobs[1:])},
        {"age": -1},
    ],
)
def test_b59_a_malformed_group_is_our_own_fault(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalFault):
        group(**changes)
    with pytest.raises(LocalFault):
        new_learner().step([])
