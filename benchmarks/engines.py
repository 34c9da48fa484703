"""Tokens a second of each engine as the swarm uses it, beside the same engine's own loop, and the memory of both.

    prompts --Engine.generate--------------> tokens/s   ours, with an adapter and log-probabilities
            --the library's own loop-------> tokens/s   the yardsticks, in turn with ours

    python -m benchmarks.engines                      the engines of this environment
    python -m benchmarks.engines --engines vllm --write   and its table in docs/benchmarks.md

Every row is as long as every other: nothing ends a completion. Memory is measured in processes of its own.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.agreement import LORA, packages
from benchmarks.all import DOCUMENT, rewritten
from benchmarks.figures import Figure, Result, machine, median, table
from peers.engines import Engine
from peers.models.base import ModelFiles
from peers.models.find import find_model
from peers.models.load import load_weights
from protocols.messages import Sampling
from tests.conformance import Reference
from tests.conformance.builds import build, installed

ROWS = (1, 8, 32)
TOKENS = 32
REPEATS = 5
AIM = ">= 0.95"  # the wrapper costs less than a twentieth
MEMORY_PROBE_S = 0.05

Ids = Sequence[int]
Run = Callable[[Sequence[Ids]], None]
"""Generate TOKENS tokens after each prompt, sampled at temperature 1."""


class _Endless:
    """A tokenizer that knows no end."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Somebody else's way to generate the same."""

    what: str
    run: Run
    aim: str = ""


def endless(model: str) -> ModelFiles:
    files = find_model(model)
    return replace(files, tokenizer=_Endless(files.tokenizer))


def prompts_of(files: ModelFiles, rows: int) -> list[tuple[int, ...]]:
    """Different ones, about equally long."""
    return [files.tokenizer.encode(f"{number} things to know about the sea:") for number in range(11, 11 + rows)]


def ours(engine: Engine) -> Run:
    """As a peer calls it; every prompt has one completion, because not every library draws groups."""
    sampling = Sampling(group_size=1, max_new_tokens=TOKENS)
    return lambda prompts: _require(engine.generate(prompts, sampling, seed=0).groups, len(prompts))


def _require(groups: Sequence[Sequence[Any]], rows: int) -> None:
    made = [len(row.token_ids) for group in groups for row in group]
    if made != [TOKENS] * rows:
        raise SystemExit(f"completions of {sorted(set(made))} tokens, not of {TOKENS}")


# --- the libraries' own loops


def bare_transformers(files: ModelFiles) -> Run:
    """`model.generate`, with every setting that changes the distribution off."""
    import torch

    module, pad_id = load_weights(files).module, files.tokenizer.pad_id
    module.generation_config.eos_token_id = None

    def run(prompts: Sequence[Ids]) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = module.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad_id,
        )
        if made.shape != (len(prompts), width + TOKENS):
            raise SystemExit(f"model.generate made {tuple(made.shape)}")

    return run


def bare_mlx(files: ModelFiles) -> Run:
    """mlx-lm's `BatchGenerator`, on the weights without adapter."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load_model

    model, _ = load_model(files.folder)

    def run(prompts: Sequence[Ids]) -> None:
        generator = BatchGenerator(
            model, max_tokens=TOKENS, sampler=make_sampler(temp=1.0), completion_batch_size=len(prompts)
        )
        generator.insert([list(prompt) for prompt in prompts])
        made = 0
        while responses := generator.next_generated():
            made += len(responses)
        generator.close()
        if made != TOKENS * len(prompts):
            raise SystemExit(f"BatchGenerator made {made} tokens")

    return run


def bare_vllm(files: ModelFiles) -> Run:
    """`LLM.generate`, without adapters."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(files.folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
    )
    parameters = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def run(prompts: Sequence[Ids]) -> None:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        _require([answer.outputs for answer in llm.generate(asked, parameters, use_tqdm=False)], len(prompts))

    return run


def direct_vllm(engine: Any) -> Run:
    """`AsyncLLM.generate` of the engine's own vLLM, with its adapter: what is left is our wrapper."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=1.0,
        max_tokens=TOKENS,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        seed=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    llm, request, count = engine._llm, engine._newest.request, iter(range(sys.maxsize))

    async def answer(prompt: Ids) -> Any:
        asked, name = {"prompt_token_ids": list(prompt)}, f"bare-{next(count)}"
        return [made async for made in llm.generate(asked, parameters, name, lora_request=request)][-1]

    async def answers(prompts: Sequence[Ids]) -> list[Any]:
        return list(await asyncio.gather(*map(answer, prompts)))

    def run(prompts: Sequence[Ids]) -> None:
        made = asyncio.run_coroutine_threadsafe(answers(prompts), engine._loop).result()
        _require([each.outputs for each in made], len(prompts))

    return run


BARE: Mapping[str, tuple[str, Callable[[ModelFiles], Run]]] = {
    "transformers": ("model.generate, no adapter, no log-probabilities", bare_transformers),
    "mlx": ("BatchGenerator, no adapter", bare_mlx),
    "vllm": ("LLM.generate, no adapter, no log-probabilities", bare_vllm),
}


# --- measuring


@contextmanager
def loaded(name: str, files: ModelFiles) -> Iterator[Engine]:
    """The engine with an adapter."""
    adapter = Reference(load_weights(files), LORA).adapter(seed=1)
    engine = build(name)(files, LORA)
    try:
        engine.load_adapter(1, adapter)
        yield engine
    finally:
        engine.close()


def speeds(name: str, model: str) -> list[Figure]:
    """Tokens a second, ours in turn with each yardstick; medians."""
    files = endless(model)
    with loaded(name, files) as engine:
        what, bare = BARE[name]
        direct = [Yardstick("AsyncLLM.generate, same adapter", direct_vllm(engine), AIM)] if name == "vllm" else []
        sticks = [*direct, Yardstick(what, bare(files), "" if direct else AIM)]
        figures = []
        for rows in ROWS:
            prompts = prompts_of(files, rows)
            runs = [ours(engine), *(stick.run for stick in sticks)]
            taken: list[list[float]] = [[] for _ in runs]
            for repeat in range(-1, REPEATS):  # the first warms up
                for run, seconds in zip(runs, taken, strict=True):
                    begun_s = time.perf_counter()
                    run(prompts)
                    if repeat >= 0:
                        seconds.append(time.perf_counter() - begun_s)
            speed = [rows * TOKENS / median(seconds) for seconds in taken]
            for stick, bare_speed in zip(sticks, speed[1:], strict=True):
                figures.append(
                    Figure(
                        what=f"{rows} rows at once" if rows > 1 else "1 row",
                        ours=speed[0],
                        yardstick=bare_speed,
                        unit="tokens/s",
                        yardstick_is=stick.what,
                        aim=stick.aim,
                    )
                )
    return figures


def our_memory(name: str, model: str) -> float:
    """Peak of an engine with an adapter that generates the largest batch, MB."""
    files = endless(model)
    adapter = Reference(load_weights(files), LORA).adapter(seed=1)
    with peak_mb() as peak:
        engine = build(name)(files, LORA)
        try:
            engine.load_adapter(1, adapter)
            ours(engine)(prompts_of(files, max(ROWS)))
        finally:
            engine.close()
    return max(peak)


def bare_memory(name: str, model: str) -> float:
    """Peak of the library's own loop, MB."""
    files = endless(model)
    with peak_mb() as peak:
        BARE[name][1](files)(prompts_of(files, max(ROWS)))
    return max(peak)


@contextmanager
def peak_mb() -> Iterator[list[float]]:
    """Resident memory of this process and of those that it starts, every MEMORY_PROBE_S until the end, MB."""
    found: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        while not ended.wait(MEMORY_PROBE_S):
            found.append(tree_bytes() / 1e6)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def tree_bytes() -> int:
    total = 0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def alone(work: Callable[[str, str], float], name: str, model: str) -> float:
    """In a process of its own, so that nothing that was loaded before counts."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, name, model).result()


def measure(name: str, model: str) -> Result:
    """All figures of one engine."""
    load = os.getloadavg()[0]
    memory = Figure(
        what=f"peak memory, {max(ROWS)} rows",
        ours=alone(our_memory, name, model),
        yardstick=alone(bare_memory, name, model),
        unit="MB",
        yardstick_is=BARE[name][0],
    )
    return Result(
        benchmark=f"engine-{name}",
        figures=(*speeds(name, model), memory),
        notes=(
            f"{model}, float32, LoRA of rank {LORA.r} on {len(LORA.targets)} kinds of modules; {packages(name)}; "
            f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}",
            f"{TOKENS} tokens a row, medians of {REPEATS}, in turn; memory is resident, of all processes together, "
            "so what they share counts more than once",
        ),
        machine=machine(),
        load_before=round(load, 2),
        measured_s=time.time(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description="Engines and their own loops.")
    parser.add_argument("--engines", nargs="+", choices=installed(), default=installed(), metavar="ENGINE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="rewrite the tables of docs/benchmarks.md")
    options = parser.parse_args()
    results = []
    for name in options.engines:
        results.append(measure(name, options.model))
        print("\n".join([f"\n{name}", "", *table(results[-1].figures), *(f"- {note}" for note in results[-1].notes)]))
        if options.write:
            text = DOCUMENT.read_text(encoding="utf-8")
            DOCUMENT.write_text(rewritten(text, results[-1]), encoding="utf-8")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
