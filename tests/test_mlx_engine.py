"""The MLX engine, beside what every engine must do alike (tests/test_conformance.py): what is mlx-lm's own."""

import dataclasses
import importlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("mlx_lm")

from peers.engines.mlx_engine import MLX_LM_MIN, BatchGenerator, MlxEngine, mx, require_mlx_lm
from peers.engines.transformers_engine import TransformersEngine
from peers.models.base import BaseModel, ModelFiles
from peers.models.find import find_model
from peers.models.load import load_weights
from peers.models.shapes import read_shapes, zero_adapter
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling
from tests.conformance.reference import Reference
from tests.test_models import write_checkpoint

LORA = LoraSpec(r=4, alpha=8.0)  # with the output matrix, which is not tied
PROMPTS = [(3, 9, 4), (5,), (8, 8, 1, 2, 6, 7), (10, 11)]
LONG = [tuple(range(1, 30)) * 3, tuple(range(1, 30)) * 3 + (4,)]


class Words:
    """A vocabulary with two ends."""

    eos_ids = frozenset({0, 31})
    pad_id = 0
    vocab_size = 32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Two layers whose positions are anything but mlx-lm's default, with ends that come soon."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # far from uniform, so that temperature and adapters show
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(folder)
    return ModelFiles("small", folder, bytes(32), json.loads((folder / "config.json").read_text()), Words())


@pytest.fixture(scope="module")
def base(files: ModelFiles) -> BaseModel:
    return load_weights(files)


@pytest.fixture(scope="module")
def reference(base: BaseModel) -> Reference:
    return Reference(base, LORA)


@pytest.fixture
def engine(files: ModelFiles) -> Iterator[MlxEngine]:
    engine = MlxEngine(files, LORA)
    yield engine
    engine.close()


def require_agreement(engine: MlxEngine, files: ModelFiles, lora: LoraSpec, adapter: Adapter) -> None:
    """The same greedy ids as transformers', and log-probabilities within 1e-3."""
    other = TransformersEngine(load_weights(files), lora)
    for each in (engine, other):
        each.load_adapter(1, adapter)
    for ours, theirs in zip(engine.greedy(PROMPTS, 10), other.greedy(PROMPTS, 10), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish == theirs.finish
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_it_says_what_it_is(engine: MlxEngine) -> None:
    assert (engine.name, engine.dtype, engine.calls) == ("mlx", "float32", 1)
    assert engine.device in ("cpu", "gpu")


def test_it_computes_where_it_is_told_to(
    files: ModelFiles, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []

    def generator(*arguments: object, **options: object) -> object:
        streams.append(options["stream"])
        return BatchGenerator(*arguments, **options)

    monkeypatch.setattr("peers.engines.mlx_engine.BatchGenerator", generator)
    engine = MlxEngine(files, LORA, device="cpu")
    engine.load_adapter(1, reference.adapter(seed=1))
    engine.greedy(PROMPTS, 2)
    assert engine.device == "cpu"
    assert streams == [engine._stream]
    if not mx.is_available(mx.gpu):
        with pytest.raises(ValueError, match="finds no GPU"):
            MlxEngine(files, LORA, device="gpu")


@pytest.mark.parametrize("installed", [None, "0.24.0", "0.31.2", "0.9"])
def test_b87_an_old_mlx_lm_is_refused_in_one_line(installed: str | None) -> None:
    with pytest.raises(ValueError, match=rf"^engine mlx needs mlx-lm >= {MLX_LM_MIN}: pip install .*$") as refused:
        require_mlx_lm(installed)
    assert installed is None or installed in str(refused.value)


@pytest.mark.parametrize("installed", [MLX_LM_MIN, "0.32.2", "0.33.0.dev1", "1.0"])
def test_b87_a_newer_mlx_lm_is_not(installed: str) -> None:
    require_mlx_lm(installed)


def test_b87_a_missing_mlx_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peers.engines.mlx_engine")
    monkeypatch.setitem(sys.modules, "mlx_lm.generate", None)
    with pytest.raises(ValueError, match="engine mlx needs mlx-lm"):
        importlib.import_module("peers.engines.mlx_engine")


def test_greedy_is_transformers(engine: MlxEngine, files: ModelFiles, reference: Reference) -> None:
    require_agreement(engine, files, LORA, reference.adapter(seed=1))


def test_what_config_json_leaves_out_is_as_transformers_has_it(
    files: ModelFiles, reference: Reference, tmp_path: Path
) -> None:
    # mlx-lm alone would tie the embeddings of this one, and take the base of its positions to be 10,000.
    folder = Path(shutil.copytree(files.folder, tmp_path / "copy"))
    config = {key: value for key, value in files.config.items() if key != "tie_word_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))
    copy = dataclasses.replace(files, folder=folder, config=config)
    require_agreement(MlxEngine(copy, LORA), files, LORA, reference.adapter(seed=1))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b61_log_probabilities_are_the_trainers(engine: MlxEngine, reference: Reference, temperature: float) -> None:
    adapter = reference.adapter(seed=2)
    engine.load_adapter(1, adapter)
    made = engine.generate(PROMPTS, Sampling(group_size=16, max_new_tokens=12, temperature=temperature), seed=3)
    assert reference.differences(adapter, PROMPTS, made.groups, temperature).abs().max() < 1e-3
    assert reference.differences(adapter, PROMPTS, made.groups, 2 * temperature).abs().max() > 0.05


def test_b87_four_prompts_at_once_are_answered_as_one_by_one(engine: MlxEngine, reference: Reference) -> None:
    engine.load_adapter(1, reference.adapter(seed=1))
    together = engine.greedy(PROMPTS, 10)
    alone = [engine.greedy([prompt], 10)[0] for prompt in PROMPTS]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
    assert len({row.token_ids for row in together}) == 4


def test_rows_beyond_the_limit_wait(files: ModelFiles, engine: MlxEngine, reference: Reference) -> None:
    adapter = reference.adapter(seed=1)
    narrow = MlxEngine(files, LORA, rows_max=5)
    for each in (engine, narrow):
        each.load_adapter(1, adapter)
    assert [row.token_ids for row in narrow.greedy(PROMPTS * 3, 6)] == [
        row.token_ids for row in engine.greedy(PROMPTS * 3, 6)
    ]
    made = narrow.generate(PROMPTS, Sampling(group_size=2, max_new_tokens=6), seed=0)
    assert [len(group) for group in made.groups] == [2, 2, 2, 2]
    assert reference.differences(adapter, PROMPTS, made.groups).abs().max() < 1e-3
    # A group that is larger than the limit is still one group.
    assert len(narrow.generate(PROMPTS[:1], Sampling(group_size=8, max_new_tokens=2), seed=0).groups[0]) == 8


def test_b74_a_swap_leaves_no_trace(files: ModelFiles, engine: MlxEngine, reference: Reference) -> None:
    a, b = reference.adapter(seed=1), reference.adapter(seed=2, gain=0.5)
    sampling = Sampling(group_size=4, max_new_tokens=8)
    for version, adapter in enumerate((a, b, a, b)):
        engine.load_adapter(version, adapter)
        last = engine.generate(LONG, sampling, seed=version)
    cold = MlxEngine(files, LORA)
    cold.load_adapter(3, b)
    assert cold.generate(LONG, sampling, seed=3) == last, "warm and cold differ"
    engine.load_adapter(4, a)
    assert engine.generate(LONG, sampling, seed=3) != last
    # With B = 0 it is the base model again.
    zero = reference.adapter(seed=3, gain=0.0)
    engine.load_adapter(5, zero)
    rows = [[row] for row in engine.greedy(PROMPTS, 8)]
    assert reference.differences(zero, PROMPTS, rows).abs().max() < 1e-3


def test_b75_what_does_not_fit_is_refused_and_the_old_one_stays(
    files: ModelFiles, engine: MlxEngine, reference: Reference
) -> None:
    good, other = reference.adapter(seed=1), reference.adapter(seed=2)
    engine.load_adapter(1, good)
    sampling = Sampling(group_size=2, max_new_tokens=6)
    before = engine.generate(PROMPTS, sampling, seed=0)
    name = "model.layers.1.mlp.up_proj.lora_A"
    prefix = {n.replace("model.layers", "model.language_model.layers"): tensor for n, tensor in other.items()}
    nan = Tensor("F32", other[name].shape, b"\0\0\xc0\x7f" * (len(other[name].data) // 4))
    wrong = {
        "prefix": prefix,
        "missing layer": {n: t for n, t in other.items() if ".layers.1." not in n},
        "extra layer": {**other, name.replace(".1.", ".2."): other[name]},
        "typo": {n.replace("up_proj", "upp_proj"): t for n, t in other.items()},
        "mlx's own names": {n.replace("lora_A", "lora_a").replace("lora_B", "lora_b"): t for n, t in other.items()},
        "transposed": {**other, name: other[name]._replace(shape=other[name].shape[::-1])},
        "rank": zero_adapter(files, LoraSpec(r=8)),
        "dtype": {**other, name: other[name]._replace(dtype="F16")},
        "size": {**other, name: other[name]._replace(data=other[name].data[4:])},
        "not finite": {**other, name: nan},
        "nothing": {},
    }
    for what, adapter in wrong.items():
        with pytest.raises(PeerFault, match="adapter does not fit"):
            engine.load_adapter(2, adapter)
        assert engine.generate(PROMPTS, sampling, seed=0) == before, what
    assert before.version == 1
    assert before.adapter == adapter_digest(good)


@pytest.mark.parametrize("alpha", [4.0, 16.0, 32.0])
def test_b82_the_scale_is_alpha_over_r(files: ModelFiles, base: BaseModel, alpha: float) -> None:
    lora = LoraSpec(r=8, alpha=alpha)
    scaled = Reference(base, lora)
    adapter = scaled.adapter(seed=5)
    engine = MlxEngine(files, lora)
    engine.load_adapter(1, adapter)
    rows = [[row] for row in engine.greedy(PROMPTS, 8)]
    assert scaled.differences(adapter, PROMPTS, rows).abs().max() < 1e-3
    twice = Reference(base, LoraSpec(r=8, alpha=2 * alpha))
    assert twice.differences(adapter, PROMPTS, rows).abs().max() > 0.01


def test_b81_bfloat16_adapters_are_widened(engine: MlxEngine, reference: Reference) -> None:
    narrow, wide = {}, {}
    for name, tensor in reference.adapter(seed=6).items():
        bits = np.frombuffer(tensor.data, "<u4") & 0xFFFF0000
        narrow[name] = Tensor("BF16", tensor.shape, (bits >> 16).astype("<u2").tobytes())
        wide[name] = Tensor("F32", tensor.shape, bits.astype("<u4").tobytes())
    made = []
    for adapter in (narrow, wide):
        engine.load_adapter(1, adapter)
        made.append(engine.generate(PROMPTS, Sampling(group_size=2, max_new_tokens=6), seed=0))
    assert made[0].groups == made[1].groups
    assert made[0].adapter != made[1].adapter


def test_in_bfloat16_the_adapter_is_applied_as_it_is(files: ModelFiles, reference: Reference) -> None:
    # Merged into bfloat16 weights, most steps of an adapter would be less than their last bit.
    engine, adapter = MlxEngine(files, LORA, "bfloat16"), reference.adapter(seed=6)
    engine.load_adapter(0, {name: tensor._replace(data=bytes(len(tensor.data))) for name, tensor in adapter.items()})
    without = engine.greedy(PROMPTS, 6)
    engine.load_adapter(1, adapter)
    assert engine.greedy(PROMPTS, 6) != without
    for path, linear in engine._linears.items():
        for kind in "AB":
            ours = np.array(linear[f"lora_{kind.lower()}"]).T
            assert ours.tobytes() == adapter[f"{path}.lora_{kind}"].data
        assert mx.array_equal(linear.linear.weight, engine._base[path])
        assert linear.linear.weight.dtype == mx.bfloat16


@pytest.mark.parametrize(("target", "says"), [("lm_head", "tied"), ("qkv_proj", "is no linear module")])
def test_targets_that_cannot_be_adapted_are_refused(tmp_path: Path, target: str, says: str) -> None:
    tied = find_model(str(write_checkpoint(tmp_path / "tied", eos=256)))
    with pytest.raises(ValueError, match=f"'{target}'.*{says}" if says != "tied" else "lm_head.*tied"):
        MlxEngine(tied, LoraSpec(targets=("q_proj", target)))


def test_a_module_that_mlx_lm_builds_otherwise_is_refused(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = dataclasses.replace(read_shapes(files, LORA), adapted={"model.layers.0.mlp.experts.0.up_proj": (64, 32)})
    monkeypatch.setattr("peers.engines.mlx_engine.read_shapes", lambda *_: shapes)
    with pytest.raises(ValueError, match="'up_proj' is no linear module of this model as mlx-lm builds it"):
        MlxEngine(files, LORA)


def test_a_model_that_mlx_lm_does_not_load_is_one_line(files: ModelFiles, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(files.folder, tmp_path / "copy"))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"^no model 'small': mlx-lm does not load it: .*$"):
        MlxEngine(dataclasses.replace(files, folder=folder), LORA)


def test_a_seed_decides_and_members_of_a_group_differ(
    files: ModelFiles, engine: MlxEngine, reference: Reference
) -> None:
    sampling = Sampling(group_size=4, max_new_tokens=8, temperature=1.5)
    other = MlxEngine(files, LORA)
    for each in (engine, other):
        each.load_adapter(1, reference.adapter(seed=1))
    first = engine.generate(PROMPTS, sampling, seed=5)
    mx.random.seed(1)  # of no influence
    assert first == engine.generate(PROMPTS, sampling, seed=5) == other.generate(PROMPTS, sampling, seed=5)
    assert first.groups != engine.generate(PROMPTS, sampling, seed=6).groups
    assert any(len({row.token_ids for row in group}) > 1 for group in first.groups)
    assert engine.generate([], sampling, seed=5).groups == []


def test_b67_rows_end_with_any_end_or_at_the_limit(engine: MlxEngine, reference: Reference) -> None:
    engine.load_adapter(1, reference.adapter(seed=1))
    made = engine.generate(PROMPTS, Sampling(group_size=32, max_new_tokens=9, temperature=2.0), seed=2)
    rows = [row for group in made.groups for row in group]
    for row in rows:
        assert len(row.logprobs) == len(row.token_ids)
        assert not Words.eos_ids & set(row.token_ids[:-1])
        assert row.finish == ("stop" if row.token_ids[-1] in Words.eos_ids else "length")
        assert row.finish == "stop" or len(row.token_ids) == 9
    assert {row.token_ids[-1] for row in rows if row.finish == "stop"} == Words.eos_ids
    assert any(row.finish == "length" for row in rows)
    assert {len(row.token_ids) for row in rows} == set(range(1, 10))


def test_nothing_is_generated_before_an_adapter_or_from_nothing(engine: MlxEngine, reference: Reference) -> None:
    with pytest.raises(ValueError, match="no adapter is loaded"):
        engine.greedy(PROMPTS, 2)
    engine.load_adapter(1, reference.adapter(seed=1))
    with pytest.raises(ValueError, match="without tokens"):
        engine.generate([(1,), ()], Sampling(), seed=0)


def test_an_adapter_that_gives_no_probabilities(engine: MlxEngine, reference: Reference) -> None:
    good, sampling = reference.adapter(seed=1), Sampling(group_size=2, max_new_tokens=4)
    huge = {name: t._replace(data=np.full(t.shape, 3e30, "<f4").tobytes()) for name, t in good.items()}
    engine.load_adapter(1, huge)
    with pytest.raises(PeerFault, match="adapter gives no probabilities"):
        engine.generate(PROMPTS, sampling, seed=0)
    engine.load_adapter(2, good)
    assert reference.differences(good, PROMPTS, engine.generate(PROMPTS, sampling, seed=0).groups).abs().max() < 1e-3


def test_any_thread_may_build_load_and_generate(files: ModelFiles, reference: Reference) -> None:
    # A lazy array of MLX fails in every thread but its own.
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as third:
        engine = first.submit(MlxEngine, files, LORA).result()
        made = []
        for thread in (second, first, third):
            thread.submit(engine.load_adapter, 1, reference.adapter(seed=1)).result()
            made.append(thread.submit(engine.generate, PROMPTS, Sampling(group_size=2), 0).result())
        third.submit(engine.close).result()
    assert made[0] == made[1] == made[2]


class Paused:
    """An engine whose third step waits until the test lets it go on."""

    def __init__(self, engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        step, steps = engine._step, iter(range(1_000_000))

        def pausing(*arguments: object) -> int:
            if next(steps) == 2:
                self.reached.set()
                assert self.go.wait(30)
            return step(*arguments)

        monkeypatch.setattr(engine, "_step", pausing)


def test_a_version_that_comes_meanwhile_is_for_the_next_call(
    engine: MlxEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = reference.adapter(seed=1), reference.adapter(seed=2)
    engine.load_adapter(1, a)
    sampling = Sampling(group_size=4, max_new_tokens=8)
    undisturbed = engine.generate(PROMPTS, sampling, seed=0)
    pause = Paused(engine, monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(engine.generate, PROMPTS, sampling, 0)
        assert pause.reached.wait(30)
        engine.load_adapter(2, b)
        pause.go.set()
        assert call.result() == undisturbed
    after = engine.generate(PROMPTS, sampling, seed=0)
    assert (after.version, after.adapter) == (2, adapter_digest(b))
    assert reference.differences(b, PROMPTS, after.groups).abs().max() < 1e-3


def test_b92_stop_ends_what_is_being_generated_at_its_next_token(
    engine: MlxEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load_adapter(1, reference.adapter(seed=1))
    pause = Paused(engine, monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(engine.generate, PROMPTS, Sampling(group_size=8, max_new_tokens=1000), 0)
        assert pause.reached.wait(30)
        engine.stop()
        pause.go.set()
        with pytest.raises(CancelledError):
            call.result(30)
    with pytest.raises(CancelledError):
        engine.greedy(PROMPTS, 2)


def test_b84_two_hundred_swaps_take_no_memory(engine: MlxEngine, reference: Reference) -> None:
    adapters = [reference.adapter(seed) for seed in range(4)]
    active = []
    for version in range(200):
        engine.load_adapter(version, adapters[version % 4])
        engine.generate(PROMPTS[:1], Sampling(group_size=2, max_new_tokens=2), seed=version)
        active.append(mx.get_active_memory())
    # Weights, and their merged copies once more; a version that stayed would be a fifth of that.
    assert max(active[100:]) <= max(active[:10]) + 1024
    assert mx.get_cache_memory() < active[0]
