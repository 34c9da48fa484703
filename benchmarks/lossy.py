"""Does a lossy codec cost anything? The demo task trained with `int4` deltas, beside whole versions; five seeds.

    co-located loop (tests/colocated.py): generate -> learn -> publish -> both halves go on from what receivers rebuild

The same seed has the same problems, first adapter and dice whatever the codec, so differences are taken seed by seed.
No swarm is in between: what is measured is the codec and nothing else, and a run can be repeated bit for bit.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import machine
from bootstrap.demos import DEMOS
from bootstrap.view import size
from peers.evaluation import evaluate
from peers.models.load import load_model
from protocols.identity import peer_id_of
from protocols.manifest import Manifest, ModelSpec, TransferSpec
from tests.colocated import Colocated

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SEEDS = (0, 1, 2, 3, 4)
STEPS, TENTH = 60, 6
HELD_OUT = 500
WAYS = (
    TransferSpec(codec="raw", dtype="bfloat16"),
    TransferSpec(codec="int4", dtype="bfloat16"),
    TransferSpec(codec="raw", dtype="float32"),
)
PRODUCER = peer_id_of(bytes(32))  # whose problems they are; any peer id would do
# Student's t, two-sided 95 %, by degrees of freedom: five seeds have four.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Trained:
    """One run."""

    reward: float
    """Mean over the last tenth of its steps."""
    held_out: float
    """Accuracy of greedy answers after the last step."""
    version_bytes: float
    """Mean over versions: of the delta, or of the keyframe where there is none."""


def train(transfer: TransferSpec, seed: int) -> Trained:
    """One run of the demo task."""
    manifest = Manifest(
        run="",
        revision=0,
        issued_ms=0,
        trainers=(PRODUCER,),
        seed=seed,
        model=ModelSpec(name="builtin"),
        environment=DEMOS["builtin"].environment,
        transfer=transfer,
    )
    loop = Colocated(manifest, PRODUCER, 0, manifest.learning.batch_groups)
    sizes = []
    for _ in range(STEPS):
        loop.step()
        version = loop.published
        sizes.append(len(version.delta[1] if version.delta is not None else version.keyframe or b""))
    rewards = [each.reward_mean for each in loop.spent.reports[-TENTH:] if each.reward_mean is not None]
    model = load_model(manifest.model.name)
    _, share = evaluate(model, loop.published.rebuilt, loop.environment, manifest, HELD_OUT)
    assert share is not None
    return Trained(statistics.fmean(rewards), share, statistics.fmean(sizes))


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % confidence interval of the mean, over seeds."""
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.3f} ± {half:.3f}".removeprefix("+")


def table(runs: dict[TransferSpec, list[Trained]]) -> list[str]:
    """Both figures of each way, and what sets it apart from the first."""
    lines = [
        "| codec, dtype | bytes a version | reward, last tenth | held-out after | reward, beside the first row "
        "| held-out, beside the first row |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    yardstick = runs[WAYS[0]]
    for way, trained in runs.items():
        gaps = ["", ""]
        if trained is not yardstick:
            pairs = list(zip(trained, yardstick, strict=True))
            gaps = [
                interval([ours.reward - other.reward for ours, other in pairs]),
                interval([ours.held_out - other.held_out for ours, other in pairs]),
            ]
        cells = [
            f"`{way.codec}`, {way.dtype}",
            size(statistics.fmean(each.version_bytes for each in trained)),
            interval([each.reward for each in trained]),
            interval([each.held_out for each in trained]),
            *gaps,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossy", description="What a lossy codec costs.")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="at least 2, at most 10")
    seeds = parser.parse_args().seeds
    load, runs = os.getloadavg()[0], {way: list[Trained]() for way in WAYS}
    for seed in seeds:
        for way in WAYS:
            begun_s = time.perf_counter()
            runs[way].append(train(way, seed))
            print(
                f"seed {seed}, {way.codec}, {way.dtype}: {runs[way][-1]}, {time.perf_counter() - begun_s:.0f} s",
                flush=True,
            )
    lines = table(runs)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    note = f"Seeds {', '.join(map(str, seeds))}; {STEPS} steps, {HELD_OUT} held-out problems; mean and 95 % confidence "
    note += f"interval (Student's t); {day}, {machine()}, load before {load:.2f}."
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = "<!-- begin lossy -->", "<!-- end lossy -->"
    before, _, rest = text.partition(begin)
    DOCUMENT.write_text(before + begin + "\n" + "\n".join([*lines, "", note]) + "\n" + end + rest.partition(end)[2])
    print("\n".join([*lines, note]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
