"""The vLLM engine beyond the conformance suite: its prefix cache, slots, processes. `make test-vllm` runs this.

An engine takes half a minute to start, so that of SmolLM2 serves all tests here; each loads versions of its own.
"""

import itertools
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from peers.engines import Completion
from peers.engines.transformers_engine import TransformersEngine
from peers.engines.vllm_engine import VllmEngine, VllmLimits, _prompt_seed
from peers.models.base import ModelFiles
from peers.models.find import find_model
from peers.models.load import load_weights
from protocols.adapters import Adapter, Tensor, adapter_digest
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec
from protocols.messages import Sampling
from tests.conformance.reference import LIMITS, Agreement, Reference

vllm = pytest.mark.vllm
pytestmark = pytest.mark.timeout(900)  # a start is half a minute, and several times that on a busy machine

LORA = LoraSpec(r=8, alpha=16.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
SIZE = VllmLimits("float32", context_tokens=512, rows=32, cache_bytes=1 << 28)
SAMPLING = Sampling(group_size=8, max_new_tokens=24)
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Two plus three is",
    "def add(a, b):",
)
FACTS = "A list of facts. " + " ".join(f"Number {n} times {n} is {n * n}." for n in range(1, 25))
STOP_S = 5.0  # a step of the engine on a busy machine, many times over
VERSIONS = itertools.count(1)


class Loaded:
    """An engine, and what the trainer says of the same model."""

    def __init__(self, files: ModelFiles, lora: LoraSpec, limits: VllmLimits) -> None:
        base = load_weights(files)
        self.reference = Reference(base, lora)
        self.transformers = TransformersEngine(base, lora)
        self.files = files
        others = vllm_processes(psutil.Process())
        self.engine = VllmEngine(files, lora, limits)
        self.processes = [each for each in vllm_processes(psutil.Process()) if each not in others]

    def load(self, adapter: Adapter) -> int:
        """The adapter as the next version."""
        version = next(VERSIONS)
        self.engine.load_adapter(version, adapter)
        return version

    def prompts(self, *texts: str) -> list[tuple[int, ...]]:
        return [self.files.tokenizer.encode(text) for text in texts]

    def held(self) -> list[int]:
        """Adapters in the worker's memory."""
        (ids,) = self.ask("held_adapters")
        return ids

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.engine._wait(self.engine._llm.collective_rpc(method, args=arguments))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Loaded]:
    loaded = Loaded(find_model("smollm2"), LORA, SIZE)
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def builtin() -> Iterator[Loaded]:
    loaded = Loaded(find_model("builtin"), LoraSpec(), VllmLimits("float32", 256, rows=32, cache_bytes=1 << 26))
    yield loaded
    loaded.engine.close()


def require_alike(ours: list[Completion], theirs: list[Completion], tolerance: float = 1e-3) -> None:
    """The same ids, and log-probabilities within the tolerance."""
    assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)
        assert a.finish == b.finish


# --- what is computed


@vllm
def test_greedy_ids_are_those_of_transformers_in_float32(smollm2: Loaded) -> None:
    adapter = smollm2.reference.adapter(seed=1)
    smollm2.load(adapter)
    smollm2.transformers.load_adapter(1, adapter)
    prompts = smollm2.prompts(*TEXTS)
    require_alike(smollm2.engine.greedy(prompts, 24), smollm2.transformers.greedy(prompts, 24))


@vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_trainers(smollm2: Loaded, temperature: float) -> None:
    adapter = smollm2.reference.adapter(seed=2)
    version = smollm2.load(adapter)
    sampling = Sampling(group_size=8, max_new_tokens=24, temperature=temperature)
    prompts = smollm2.prompts(*TEXTS)
    made = smollm2.engine.generate(prompts, sampling, seed=3)
    assert (made.version, made.adapter) == (version, adapter_digest(adapter))
    agreement = Agreement.of(smollm2.reference.differences(adapter, prompts, made.groups, temperature))
    assert agreement.tokens >= 500
    agreement.require_within(LIMITS["float32"], "vllm")


@vllm
def test_completions_of_one_prompt_differ_and_follow_from_the_seed(smollm2: Loaded) -> None:
    smollm2.load(smollm2.reference.adapter(seed=2))
    (prompt,) = smollm2.prompts(TEXTS[1])
    first, other, again = (smollm2.engine.generate([prompt, prompt], SAMPLING, seed) for seed in (4, 5, 4))
    rows = [row.token_ids for group in first.groups for row in group]
    assert len(set(rows)) == len(rows) == 16, "the same prompt twice, and 8 completions each: all their own"
    assert again.groups == first.groups
    assert not {row.token_ids for group in other.groups for row in group} & set(rows)


def test_seeds_of_neighbouring_prompts_do_not_overlap() -> None:
    # vLLM draws the completions of one prompt with its seed + 0, + 1, + 2, ...: up to 256 of them
    seeds = sorted(_prompt_seed(seed, index) for seed in range(50) for index in range(50))
    assert all(b - a > 256 for a, b in itertools.pairwise(seeds))
    assert seeds[0] >= 0
    assert seeds[-1] + 256 < 2**63


@vllm
def test_b67_completions_end_with_the_tokenizers_ids_and_no_others(smollm2: Loaded) -> None:
    """The checkpoint's own end id counts only because the tokenizer names it; so does any other that it names."""
    engine = smollm2.engine
    smollm2.load(smollm2.reference.adapter(seed=2))
    prompts = smollm2.prompts(*TEXTS)
    free = engine.greedy(prompts, 24)
    end = free[0].token_ids[3]
    named = engine._tokenizer
    try:
        engine._tokenizer = SimpleNamespace(eos_ids=frozenset({end}))
        ended = engine.greedy(prompts, 24)
    finally:
        engine._tokenizer = named
    for a, b in zip(free, ended, strict=True):
        length = a.token_ids.index(end) + 1 if end in a.token_ids else len(a.token_ids)
        assert b.token_ids[:length] == a.token_ids[:length]
        if end in a.token_ids:
            assert (len(b.token_ids), b.finish) == (length, "stop")
        else:
            assert b.finish == "stop" or len(b.token_ids) == 24, "goes on after what is no end any more"
    assert ended[0].finish == "stop"
    assert {len(row.token_ids) for row in ended if row.finish == "length"} <= {24}


@vllm
def test_a_prompt_that_does_not_fit_is_refused(smollm2: Loaded) -> None:
    smollm2.load(smollm2.reference.adapter(seed=2))
    with pytest.raises(ValueError, match="521 tokens with the completion; the engine takes 512"):
        smollm2.engine.greedy([(1,) * 497], 24)
    with pytest.raises(ValueError, match="without tokens"):
        smollm2.engine.generate([(1,), ()], SAMPLING, seed=0)
    with pytest.raises(ValueError, match=r"0\.005 is under vLLM's least"):
        smollm2.engine.generate([(1,)], Sampling(temperature=0.005), seed=0)
    assert smollm2.engine.generate([], SAMPLING, seed=0).groups == []


@vllm
def test_every_target_of_the_built_in_model_is_adapted_lm_head_too(builtin: Loaded) -> None:
    """Case B75: each module alone changes what is computed, as it does for the trainer."""
    prompts = builtin.prompts("1 + 2 =", "12 - 3 + 4 =")
    base = None
    for target in LoraSpec().targets:
        only = [path for path in builtin.reference.modules if path.endswith(target)]
        adapter = builtin.reference.adapter(seed=4, gain=1.0, only=only)
        builtin.load(adapter)
        made = builtin.engine.generate(prompts, SAMPLING, seed=5)
        Agreement.of(builtin.reference.differences(adapter, prompts, made.groups)).require_within(
            LIMITS["float32"], target
        )
        base = base or builtin.reference.adapter(seed=4, gain=0.0)
        assert builtin.reference.differences(base, prompts, made.groups).abs().mean() > 0.01, target


@vllm
def test_b75_modules_that_vllm_would_leave_out_are_found(smollm2: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.rotary"
    assert smollm2.ask("unadapted", [known, unknown, "model.layers.30.mlp.up_proj"]) == [
        [unknown, "model.layers.30.mlp.up_proj"]
    ]
    names = {f"{known}.lora_A": None, f"{unknown}.lora_A": None}
    monkeypatch.setattr("peers.models.lora.lora_parameters", lambda _: names)
    with pytest.raises(ValueError, match="vLLM cannot adapt rotary of this model"):
        smollm2.engine._require_adapted()


# --- versions


@vllm
def test_b74_a_cached_prompt_is_never_answered_from_other_weights(smollm2: Loaded) -> None:
    engine = smollm2.engine
    (prompt,) = smollm2.prompts(FACTS + " Number 40 times 40 is")
    assert len(prompt) > 256, "two blocks of the cache"
    smollm2.load(smollm2.reference.adapter(seed=6))
    under_a = engine.greedy([prompt], 24)
    assert cached_tokens(engine, prompt) >= 256, "the cache is on, and warm"
    smollm2.load(smollm2.reference.adapter(seed=7))
    assert cached_tokens(engine, prompt) == 0
    warm = engine.greedy([prompt], 24)
    assert engine._wait(engine._llm.reset_prefix_cache())
    cold = engine.greedy([prompt], 24)
    require_alike(warm, cold, tolerance=1e-4)
    between = (abs(a - b) for a, b in zip(warm[0].logprobs, under_a[0].logprobs, strict=True))
    assert max(between) > 0.05, "the two adapters differ"
    smollm2.transformers.load_adapter(1, smollm2.reference.adapter(seed=7))
    require_alike(warm, smollm2.transformers.greedy([prompt], 24))


def cached_tokens(engine: VllmEngine, prompt: tuple[int, ...]) -> int:
    """Tokens of the prompt whose keys and values vLLM has for the newest version."""

    async def ask() -> int:
        parameters = engine._parameters(1, n=1, temperature=0.0)
        answers = engine._llm.generate(
            {"prompt_token_ids": list(prompt)}, parameters, f"cached {time.monotonic()}", lora_request=newest.request
        )
        *_, final = [answer async for answer in answers]
        return final.num_cached_tokens or 0

    newest = engine._newest
    assert newest is not None
    return engine._wait(ask())


@vllm
def test_b75_b78_b79_what_does_not_fit_never_reaches_the_engine(smollm2: Loaded) -> None:
    engine, good = smollm2.engine, smollm2.reference.adapter(seed=8)
    version = smollm2.load(good)
    held = smollm2.held()
    name = max(good)
    wrong: dict[str, Adapter] = {
        "another prefix": {each.replace("model.", "model.language_model.", 1): good[each] for each in good},
        "a missing layer": {each: good[each] for each in good if ".layers.7." not in each},
        "an extra layer": {**good, name.replace("layers.9", "layers.30"): good[name]},
        "a typo": {each.replace("up_proj", "up_porj"): good[each] for each in good},
        "rank 64": with_rank(good, 64),
        "one module of rank 64": {**good, **with_rank({name: good[name]}, 64)},
        "a whole matrix": {**good, "lm_head.weight": Tensor("F32", (1, 1), bytes(4))},
        "values that are no numbers": {
            **good,
            name: good[name]._replace(data=torch.full(good[name].shape, math.nan).numpy().tobytes()),
        },
    }
    for what, adapter in wrong.items():
        with pytest.raises(PeerFault) as fault:
            engine.load_adapter(version + 1, adapter)
        assert fault.value.reason == "adapter does not fit", what
    assert smollm2.held() == held
    made = engine.generate(smollm2.prompts(*TEXTS), SAMPLING, seed=9)
    assert (made.version, made.adapter) == (version, adapter_digest(good))


def with_rank(adapter: Adapter, r: int) -> dict[str, Tensor]:
    """The same modules with matrices of another rank."""
    shapes = {name: (r, t.shape[1]) if name.endswith("A") else (t.shape[0], r) for name, t in adapter.items()}
    return {name: Tensor("F32", shape, bytes(4 * math.prod(shape))) for name, shape in shapes.items()}


@vllm
def test_calls_under_way_end_under_the_version_that_they_began_with(smollm2: Loaded) -> None:
    """Case B85: with two calls on two versions, a third one is loaded and used."""
    engine, reference = smollm2.engine, smollm2.reference
    long = Sampling(group_size=4, max_new_tokens=400)
    prompts = smollm2.prompts(TEXTS[1])
    adapters = [reference.adapter(seed) for seed in (10, 11, 12)]
    with ThreadPoolExecutor(2) as pool:
        versions, calls = [], []
        for adapter in adapters[:2]:
            versions.append(smollm2.load(adapter))
            calls.append(pool.submit(engine.generate, prompts, long, 13))
            wait_until(lambda: engine._newest is not None and engine._newest.users == 1)
        versions.append(smollm2.load(adapters[2]))
        assert not any(call.done() for call in calls), "a version waits for no call"
        assert len(smollm2.held()) == engine.calls + 1 == 3
        newest = engine.generate(prompts, SAMPLING, seed=13)
        made = [*(call.result() for call in calls), newest]
    assert [each.version for each in made] == versions
    for adapter, each in zip(adapters, made, strict=True):
        assert each.adapter == adapter_digest(adapter)
        Agreement.of(reference.differences(adapter, prompts, each.groups)).require_within(LIMITS["float32"], "mixed")
    assert len(smollm2.held()) == 1, "what nobody uses is unloaded"
    assert len(list(engine._folder.iterdir())) == 1


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    """Returns once the condition holds."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "waited in vain"
        threading.Event().wait(0.005)


@vllm
def test_b84_200_versions_leave_nothing_behind(smollm2: Loaded) -> None:
    engine, prompts = smollm2.engine, smollm2.prompts(TEXTS[0])
    adapters = [smollm2.reference.adapter(seed) for seed in range(4)]
    bytes_each = sum(len(tensor.data) for tensor in adapters[0].values())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    at = {}
    for swap in range(200):
        smollm2.load(adapters[swap % 4])
        if swap % 20 == 0:
            engine.generate(prompts, Sampling(group_size=2, max_new_tokens=2), seed=swap)
            assert len(smollm2.held()) == 1
            assert len(list(engine._folder.iterdir())) == 1
        if swap in (49, 199):  # allocators and caches are warm after the first
            at[swap] = sum(process.memory_info().rss for process in processes)
    assert at[199] - at[49] < 0.1 * 150 * bytes_each, "a tenth of what 150 versions would be"


@vllm
def test_b84_an_unload_that_fails_is_logged_and_breaks_nothing(
    smollm2: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(lora_id: int) -> bool:
        raise RuntimeError("no such adapter")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(smollm2.engine._llm, "remove_lora", fails)
        versions = [smollm2.load(smollm2.reference.adapter(seed)) for seed in range(14, 20)]
        assert len(smollm2.held()) <= smollm2.engine.calls + 1, "vLLM lets go of the oldest by itself"
        made = smollm2.engine.generate(smollm2.prompts(*TEXTS), SAMPLING, seed=0)
    assert made.version == versions[-1]
    assert f"v{versions[0]} stays loaded in vLLM: no such adapter" in caplog.text
    Agreement.of(
        smollm2.reference.differences(smollm2.reference.adapter(19), smollm2.prompts(*TEXTS), made.groups)
    ).require_within(LIMITS["float32"], "after failed unloads")


# --- start and end


def test_b85_too_few_slots_are_refused_with_the_flag() -> None:
    limits = VllmLimits("float32", 256, 8, adapter_slots=2, calls=2)
    with pytest.raises(ValueError, match=r"--adapter-slots 2 is too few: 2 calls .* takes --adapter-slots 3"):
        VllmEngine(find_model("builtin"), LORA, limits)


def test_b108_without_vllm_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"^engine vllm is not installed: pip install 'echo-swarm\[vllm\]'$"):
        VllmEngine(find_model("builtin"), LORA, SIZE)


def test_b108_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=""))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(ValueError, match=r"^vLLM needs a GPU, and finds none here; use --engine transformers, "):
        VllmEngine(find_model("builtin"), LORA, SIZE)


@vllm
def test_b78_a_rank_over_what_vllm_takes_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"lora\.r: this vLLM takes adapters up to rank 512, not 600"):
        VllmEngine(find_model("builtin"), LoraSpec(r=600), SIZE)


@vllm
def test_a_stopped_engine_answers_at_once_and_a_closed_one_leaves_no_process(builtin: Loaded) -> None:
    """The last test with this engine."""
    engine = builtin.engine
    builtin.load(builtin.reference.adapter(seed=1))
    ours = builtin.processes
    assert ours
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, [(1,)] * 512, Sampling(group_size=32, max_new_tokens=200), 0)
        wait_until(lambda: engine._newest is not None and engine._newest.users == 1)
        begun_s = time.monotonic()
        engine.stop()
        with pytest.raises(CancelledError):
            call.result(timeout=60.0)
        assert time.monotonic() - begun_s < STOP_S
    with pytest.raises(CancelledError):
        engine.greedy([(1,)], 4)
    with pytest.raises(CancelledError):
        builtin.load(builtin.reference.adapter(seed=1))
    engine.close()
    gone, left = psutil.wait_procs(ours, timeout=10.0)
    assert not left
    assert len(gone) == len(ours)
    assert not engine._folder.exists()
    engine.close()  # twice is once


def vllm_processes(parent: psutil.Process) -> list[psutil.Process]:
    """The scheduler and the workers, by the titles that vLLM gives them."""
    running = (each for each in parent.children(recursive=True) if alive(each))
    return [each for each in running if any("VLLM::" in part for part in each.cmdline())]


KILLED = """
import os, signal
from peers.engines.vllm_engine import VllmEngine, VllmLimits
from peers.models.find import find_model
from protocols.manifest import LoraSpec

if __name__ == "__main__":
    engine = VllmEngine(find_model("builtin"), LoraSpec(), VllmLimits("float32", 256, 8, cache_bytes=1 << 26))
    print("started", flush=True)
    signal.pause()
"""


@vllm
def test_processes_die_with_a_peer_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "started\n"
            orphans = vllm_processes(psutil.Process(peer.pid))
            assert len(orphans) >= 1
        finally:
            peer.kill()
    wait_until(lambda: not any(map(alive, orphans)), timeout_s=10.0)


def alive(process: psutil.Process) -> bool:
    """False for one that only waits for somebody to ask for its exit code, too."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
