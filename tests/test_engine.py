"""The transformers engine: log-probabilities of what was really sampled, rows that end where they end."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peers.engines import Completion, Generation
from peers.engines.measure import BUDGET_S, Measured, measure
from peers.engines.transformers_engine import TransformersEngine, _Draw, _left_padded, decode
from peers.models.base import BaseModel
from peers.models.lora import attach_lora, read_adapter, write_adapter
from protocols.adapters import Tensor, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling

# Shape suffixes: R = rows, T = tokens, V = vocabulary.

LORA = LoraSpec(r=4)
PROMPTS = [(3, 9, 4), (5,), (8, 8, 1, 2, 6, 7), (10, 11)]
Ids = tuple[int, ...]


class Words:
    """A vocabulary whose padding is an end-of-sequence id, with a second one beside it."""

    eos_ids = frozenset({0, 31})
    pad_id = 0
    vocab_size = 32

    def encode(self, text: str) -> Ids:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def small_model(seed: int = 0) -> BaseModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # far from uniform, so that temperature and adapters show
        tie_word_embeddings=False,
    )
    module = LlamaForCausalLM(config).eval()
    return BaseModel("small", module, Words(), bytes(32))


def an_adapter(model: BaseModel, seed: int, spec: LoraSpec = LORA) -> dict[str, Tensor]:
    """An adapter with B away from 0, as after some training."""
    trained = attach_lora(model.module, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return read_adapter(trained)


def new_engine(rows_max: int = 256) -> TransformersEngine:
    """Under an adapter that changes nothing."""
    model = small_model()
    engine = TransformersEngine(model, LORA, rows_max=rows_max)
    engine.load_adapter(0, read_adapter(attach_lora(model.module, LORA, seed=0)))
    return engine


def ids_of(groups: list[list[Completion]]) -> list[list[Ids]]:
    return [[completion.token_ids for completion in group] for group in groups]


@torch.no_grad()
def trainer_logprobs(model: BaseModel, adapter: dict[str, Tensor], prompt: Ids, ids: Ids, t: float) -> list[float]:
    """As a trainer computes them: unmerged adapter, one full forward pass, no cache, no padding."""
    policy = attach_lora(model.module, LORA, seed=0)
    write_adapter(policy, adapter)
    logits_TV = policy(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits_TV / t, dim=-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b61_behaviour_and_trainer_log_probabilities_agree(temperature: float) -> None:
    model = small_model()
    engine, adapter = TransformersEngine(model, LORA), an_adapter(model, 1)
    engine.load_adapter(1, adapter)
    sampling = Sampling(group_size=16, max_new_tokens=12, temperature=temperature)
    groups = engine.generate(PROMPTS, sampling, seed=1).groups
    completions = [(prompt, c) for prompt, group in zip(PROMPTS, groups, strict=True) for c in group]
    assert len(completions) == 64

    differences = []
    for prompt, completion in completions:
        recomputed = trainer_logprobs(model, adapter, prompt, completion.token_ids, temperature)
        differences += [a - b for a, b in zip(recomputed, completion.logprobs, strict=True)]
    gap = torch.tensor(differences)
    assert gap.abs().max() < 1e-4
    assert 0.97 < gap.exp().mean() < 1.03
    # and the comparison can fail: without temperature the same ids have other log-probabilities
    prompt, completion = completions[0]
    plain = torch.tensor(trainer_logprobs(model, adapter, prompt, completion.token_ids, 2 * temperature))
    assert (plain - torch.tensor(completion.logprobs)).abs().max() > 0.05


def test_samples_follow_the_probabilities_that_are_reported() -> None:
    engine = new_engine()
    draws = engine.generate([PROMPTS[0]], Sampling(group_size=250, max_new_tokens=1, temperature=1.5), seed=2).groups[0]
    ids = [completion.token_ids[0] for completion in draws]
    reported = {c.token_ids[0]: torch.tensor(c.logprobs[0]).exp().item() for c in draws}
    for token, probability in reported.items():
        assert abs(ids.count(token) / 250 - probability) < 5 * (probability * (1 - probability) / 250) ** 0.5 + 0.01


@pytest.mark.parametrize("setting", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}])
def test_b62_settings_that_cut_probability_mass_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must stay off"):
        Sampling(**setting)


class Script(torch.nn.Module):
    """Says what it is told: gives the next id of each row that goes on a probability of almost 1."""

    config = LlamaConfig(num_hidden_layers=0)

    def __init__(self, lines: list[Ids]) -> None:
        super().__init__()
        self.live = list(lines)
        self.step = 0
        self.fed: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        if self.step:
            self.live = [line for line in self.live if line[self.step - 1] not in Words.eos_ids]
            self.fed.append(input_ids[:, -1].tolist())
        assert len(input_ids) == len(self.live)
        logits_RTV = torch.zeros(len(self.live), 1, 32)
        for row, line in enumerate(self.live):
            logits_RTV[row, 0, line[self.step]] = 50.0
        self.step += 1
        return SimpleNamespace(logits=logits_RTV)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(0)])
def test_b67_rows_end_at_the_first_of_any_eos_id(generator: torch.Generator | None) -> None:
    # Rows of 3, 5 and 8 tokens and one that never ends; 0 is padding and an EOS id, 31 is another. A row that
    # has ended is fed no more, so that it cannot collect junk.
    lines = [(4, 5, 0), (4, 5, 6, 9, 31), (1, 2, 3, 4, 5, 6, 9, 0), (9,) * 10]
    script = Script(lines)
    rows = decode(
        script,
        _left_padded([(1,), (1, 2), (3,), (4,)], Words.pad_id, "cpu"),
        group_size=1,
        max_new_tokens=10,
        eos_ids=Words.eos_ids,
        draw=_Draw(1.0, generator),
    )
    assert [row.token_ids for row in rows] == lines
    assert [row.finish for row in rows] == ["stop", "stop", "stop", "length"]
    assert [len(row.logprobs) for row in rows] == [3, 5, 8, 10]
    assert all(logprob > -1e-6 for row in rows for logprob in row.logprobs)
    assert script.fed == [[4, 4, 1, 9], [5, 5, 2, 9], [6, 3, 9], [9, 4, 9], [5, 9], [6, 9], [9, 9], [9], [9]]


def test_generation_stops_when_every_row_has_ended() -> None:
    script = Script([(4, 31), (0,)])
    padded = _left_padded([(1,), (1,)], 0, "cpu")
    decode(script, padded, group_size=1, max_new_tokens=99, eos_ids=Words.eos_ids, draw=_Draw(1.0, None))
    assert script.step == 2


def test_b92_nothing_is_generated_once_the_engine_is_stopped() -> None:
    # Every token asks, so it is enough that the first one is not drawn.
    engine = new_engine()
    engine.generate(PROMPTS, Sampling(group_size=2), seed=1)
    engine.stop()
    with pytest.raises(CancelledError):
        engine.generate(PROMPTS, Sampling(group_size=2), seed=1)


def test_the_same_seed_gives_the_same_completions_and_another_seed_does_not() -> None:
    engine, sampling = new_engine(), Sampling(group_size=4, max_new_tokens=8)
    first = engine.generate(PROMPTS, sampling, seed=5)
    assert first == engine.generate(PROMPTS, sampling, seed=5) == new_engine().generate(PROMPTS, sampling, seed=5)
    assert ids_of(first.groups) != ids_of(engine.generate(PROMPTS, sampling, seed=6).groups)
    assert len(first.groups) == len(PROMPTS)
    assert {len(group) for group in first.groups} == {4}


def test_a_batch_answers_like_its_prompts_one_by_one() -> None:
    engine = new_engine()
    together = engine.greedy(PROMPTS, 10)
    apart = [engine.greedy([prompt], 10)[0] for prompt in PROMPTS]
    assert [row.token_ids for row in together] == [row.token_ids for row in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len({row.token_ids for row in together}) > 1


def test_more_prompts_than_fit_one_batch_are_all_answered() -> None:
    engine = new_engine()
    at_once = engine.greedy(PROMPTS, 6)
    engine = new_engine(rows_max=3)
    assert [row.token_ids for row in engine.greedy(PROMPTS, 6)] == [row.token_ids for row in at_once]
    groups = engine.generate(PROMPTS, Sampling(group_size=8, max_new_tokens=3), seed=0).groups
    assert [len(group) for group in groups] == [8] * len(PROMPTS)


def test_swapping_adapters_leaves_no_trace() -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    a, b = an_adapter(model, 1), an_adapter(model, 2)
    sampling = Sampling(group_size=4, max_new_tokens=8)

    warm = TransformersEngine(model, LORA)
    for version, adapter in enumerate((a, b, a, b)):
        warm.load_adapter(version, adapter)
        warm.generate(PROMPTS, sampling, seed=version)
    cold = TransformersEngine(small_model(), LORA)
    cold.load_adapter(3, b)

    assert warm.generate(PROMPTS, sampling, seed=9) == cold.generate(PROMPTS, sampling, seed=9)
    warm.load_adapter(4, a)
    assert warm.generate(PROMPTS, sampling, seed=9).groups != cold.generate(PROMPTS, sampling, seed=9).groups
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())


def test_a_fresh_adapter_is_the_base_model() -> None:
    model = small_model()
    answers = new_engine().greedy(PROMPTS, 8)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits_TV = model.module(input_ids=torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert tuple(logits_TV.argmax(-1).tolist()) == answer.token_ids


def test_a_call_is_of_one_version_and_says_which() -> None:
    # A version that comes while a call generates is for the calls after it (case B85).
    model = small_model()
    engine, a, b = TransformersEngine(model, LORA), an_adapter(model, 1), an_adapter(model, 2)
    sampling = Sampling(group_size=4, max_new_tokens=8)
    with pytest.raises(ValueError, match="no adapter"):
        engine.generate(PROMPTS, sampling, seed=0)
    engine.load_adapter(1, a)
    undisturbed = engine.generate(PROMPTS, sampling, seed=0)
    assert (undisturbed.version, undisturbed.adapter) == (1, adapter_digest(a))

    forward, calls = engine._policy.forward, 0

    def loads_in_the_middle(**keywords: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            engine.load_adapter(2, b)
        return forward(**keywords)

    engine._policy.forward = loads_in_the_middle
    assert engine.generate(PROMPTS, sampling, seed=0) == undisturbed
    assert calls > 3
    after = engine.generate(PROMPTS, sampling, seed=0)
    assert (after.version, after.adapter) == (2, adapter_digest(b))
    assert after.groups != undisturbed.groups


def test_in_bfloat16_the_adapter_is_applied_as_it_is() -> None:
    # Its steps may be below the last bit of a weight, so it is not merged: it stands beside the weights, in float32.
    model, adapter = small_model(), an_adapter(small_model(), 1)
    model.module.to(torch.bfloat16)
    base = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    engine = TransformersEngine(model, LORA)
    assert engine.dtype == "bfloat16"
    engine.load_adapter(1, {name: t._replace(data=bytes(len(t.data))) for name, t in adapter.items()})
    without = engine.greedy(PROMPTS, 6)
    engine.load_adapter(2, adapter)
    assert engine.greedy(PROMPTS, 6) != without
    assert read_adapter(engine._lora) == adapter
    weights = {name: p for name, p in engine._policy.named_parameters() if ".lora_" not in name}
    assert all(torch.equal(base[name.replace(".base_layer", "")], weight) for name, weight in weights.items())


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    model = small_model()
    engine, good = TransformersEngine(model, LORA), an_adapter(model, 1)
    engine.load_adapter(1, good)
    sampling = Sampling(group_size=4, max_new_tokens=8)
    before = engine.generate(PROMPTS, sampling, seed=0)

    other = an_adapter(model, 2)
    name = max(other)
    wrong = [
        an_adapter(model, 2, LoraSpec(r=8)),
        {n: tensor for n, tensor in other.items() if n != name},
        {**other, "model.layers.9.mlp.up_proj.lora_A": other[name]},
        {**other, name: other[name]._replace(dtype="BF16")},
        {},
    ]
    for adapter in wrong:
        with pytest.raises(PeerFault):
            engine.load_adapter(2, adapter)
        assert engine.generate(PROMPTS, sampling, seed=0) == before


def test_nothing_asked_nothing_answered_and_an_empty_prompt_is_an_error() -> None:
    engine = new_engine()
    assert engine.generate([], Sampling(), seed=0).groups == []
    with pytest.raises(ValueError, match="without tokens"):
        engine.greedy([(1,), ()], 3)


class Clocked:
    """An engine whose calls last as long as the test says: by rows and tokens of a completion."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds = seconds
        self.now_s = 100.0
        self.calls: list[tuple[list[Ids], int]] = []
        self.loaded: list[tuple[int, dict[str, Tensor]]] = []

    def clock(self) -> float:
        return self.now_s

    def load_adapter(self, version: int, adapter: dict[str, Tensor]) -> None:
        self.loaded.append((version, adapter))

    def generate(self, prompts: Sequence[Ids], sampling: Sampling, seed: int) -> Generation:
        tokens = sampling.max_new_tokens
        self.calls.append((list(prompts), tokens))
        self.now_s += self.seconds(len(prompts) * sampling.group_size, tokens)
        row = Completion((1,) * tokens, (-1.0,) * tokens, "length")
        return Generation(0, b"", [[row] * sampling.group_size for _ in prompts])

    def measured(self, max_new_tokens: int = 16, num_prompts: int = 64) -> Measured:
        prompts = [(number,) for number in range(num_prompts)]
        return measure(self, {}, prompts, Sampling(group_size=4, max_new_tokens=max_new_tokens), self.clock)


def test_rows_double_until_they_no_longer_pay() -> None:
    # A step costs 1 ms up to 32 rows, and from there on 1 ms for each 32: 64 rows make as many tokens a second as 32.
    engine = Clocked(lambda rows, tokens: tokens * 1e-3 * max(1.0, rows / 32))
    measured = engine.measured()
    assert measured.rows == 32
    assert measured.tokens_per_s == pytest.approx(32_000)
    assert measured.memory_bytes > 50_000_000
    assert engine.loaded == [(0, {})]
    assert [len(prompts) for prompts, _ in engine.calls] == [1, 1, 1, 2, 4, 8, 16]
    asked = [prompt for prompts, _ in engine.calls[2:] for prompt in prompts]
    assert len(set(asked)) == len(asked), "no prompt is in a cache already"


def test_rows_stay_where_a_call_would_keep_new_versions_waiting() -> None:
    # 16 tokens take 0.5 s with 4 rows, 0.8 s with 8, 1.5 s with 16 and 2.6 s, over CALL_S_MAX, with 32.
    engine = Clocked(lambda rows, tokens: tokens * 1e-2 * rows**0.8)
    assert engine.measured().rows == 16
    # Long completions are not waited for, and count in full: 4 rows of 1600 tokens take 48 s.
    assert engine.measured(max_new_tokens=1600).rows == 4
    assert engine.now_s < 120


def test_measuring_a_slow_machine_takes_little_longer_than_its_budget() -> None:
    engine = Clocked(lambda rows, tokens: 0.5 * tokens * rows**0.5)  # 4 rows: a second a token
    measured = engine.measured(max_new_tokens=512)
    assert measured.tokens_per_s == pytest.approx(4)
    assert engine.now_s - 100 < BUDGET_S
    assert engine.measured(max_new_tokens=1).tokens_per_s == pytest.approx(8), "16 rows in 2 s"
    # Calls of 1.5 s whatever the rows: twice the rows always pay, and five calls are what the budget holds.
    steady = Clocked(lambda rows, tokens: 1.5)
    assert steady.measured(max_new_tokens=2).rows == 16
    assert steady.now_s - 100 < BUDGET_S


def test_measuring_needs_prompts_and_tries_as_many_rows_as_they_allow() -> None:
    free = Clocked(lambda rows, tokens: tokens * 1e-3)
    assert free.measured(num_prompts=16).rows == 8 * 4
    assert free.measured(num_prompts=2).rows == 4
    with pytest.raises(ValueError, match="two prompts"):
        free.measured(num_prompts=1)


def test_measuring_leaves_no_trace() -> None:
    model = small_model()
    measured, fresh = TransformersEngine(model, LORA), TransformersEngine(small_model(), LORA)
    nothing = {name: t._replace(data=bytes(len(t.data))) for name, t in an_adapter(model, 1).items()}
    found = measure(measured, nothing, PROMPTS, Sampling(max_new_tokens=4))
    assert found.tokens_per_s > 1
    assert found.rows in (8, 16)
    for engine in (measured, fresh):
        engine.load_adapter(3, an_adapter(model, 2))
    sampling = Sampling(group_size=4, max_new_tokens=8)
    assert measured.generate(PROMPTS, sampling, 9) == fresh.generate(PROMPTS, sampling, 9)


def test_weights_that_lead_to_no_probabilities_are_the_adapters_fault() -> None:
    draw = _Draw(1.0, torch.Generator())
    good_RV = torch.zeros(2, 5)
    draw(good_RV)
    for value in (float("nan"), float("inf")):
        bad_RV = good_RV.clone()
        bad_RV[1, 2] = value
        with pytest.raises(PeerFault, match="adapter gives no probabilities"):
            draw(bad_RV)
    masked_RV = good_RV.clone()
    masked_RV[0, 1:] = float("-inf")
    assert draw(masked_RV)[0][0].item() == 0, "a token that is impossible is no fault"
