"""Where a trainer's time goes in a small real swarm, and how well the loops keep answering.

`swarm sim`: one bootstrap peer, one trainer, two inference peers, each a process, the built-in model. From
the metrics files: training beside waiting for rollouts and publishing (state, checkpoint, transaction,
announcement), and the lag of the event loops while generating and while training. Its yardstick is an idle
event loop in this process, probed in the same way at the same time: what the busy cores do to anybody.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.figures import Figure, Measured, main, median, percentile
from bootstrap.events import Event, read_events
from bootstrap.home import METRICS_FILE
from swarm.node import LAG_PROBE_S, LAG_REPORT_S

STEPS = 60
INFERENCE_PEERS = 2
LIMIT_S = 160.0

Windows = list[tuple[float, float, float]]
"""End (unix seconds), p50 and p99 in ms of the lag in each LAG_REPORT_S."""


async def probe(windows: Windows) -> None:
    """The lag of this loop, as `Node` measures its own."""
    while True:
        lags = []
        until_s = time.monotonic() + LAG_REPORT_S
        while (before_s := time.monotonic()) < until_s:
            await asyncio.sleep(LAG_PROBE_S)
            lags.append(max(0.0, time.monotonic() - before_s - LAG_PROBE_S) * 1000)
        windows.append((time.time(), percentile(lags, 0.5), percentile(lags, 0.99)))


async def simulate(home: Path, report: Path) -> Windows:
    """Run the swarm to its end; the lag of an idle loop meanwhile."""
    windows: Windows = []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bootstrap.main", "sim", "--home", str(home), "--report", str(report)),
        *("--peers", str(INFERENCE_PEERS), "--steps", str(STEPS)),
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    idle = asyncio.create_task(probe(windows))
    try:
        async with asyncio.timeout(LIMIT_S):
            code = await process.wait()
    finally:
        idle.cancel()
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if code != 0:
        raise SystemExit(f"swarm sim ended with {code}")
    return windows


def lag_windows(events: Sequence[Event], first_s: float, last_s: float) -> Windows:
    """The lag of one peer's loop in the windows that lie between two moments."""
    windows = [(e["t"], e["lag_p50_ms"], e["lag_p99_ms"]) for e in events if e["event"] == "loop"]
    return [window for window in windows if first_s + LAG_REPORT_S <= window[0] <= last_s]


def time_figures(steps: Sequence[Event], wall_s: float) -> list[Figure]:
    """Waiting, publishing and the rest, beside training; of all steps together."""
    spent = {key: sum(step[key] for step in steps) for key in ("train_s", "wait_s", "publish_s")}
    spent["other_s"] = wall_s - sum(spent.values())
    names = {
        "wait_s": "waiting for rollouts",
        "publish_s": "publishing: state, checkpoint, transaction, announcement",
        "other_s": "reading the batch, metrics, the loop",
    }
    return [
        Figure(
            what=f"{name} ({100 * spent[key] / wall_s:.0f} % of the time between first and last step)",
            ours=spent[key],
            yardstick=spent["train_s"],
            unit="s",
            yardstick_is=f"training ({100 * spent['train_s'] / wall_s:.0f} %)",
        )
        for key, name in names.items()
    ]


def lag_figures(name: str, ours: Windows, idle: Windows, aim: str) -> list[Figure]:
    """p50 and p99 in the median window."""
    return [
        Figure(
            what=f"loop lag {name}: {share} of the median {LAG_REPORT_S:g} s",
            ours=median([window[at] for window in ours]),
            yardstick=median([window[at] for window in idle]),
            unit="ms",
            yardstick_is="an idle loop beside it",
            aim=aim if share == "p99" else "",
        )
        for at, share in ((1, "p50"), (2, "p99"))
    ]


def measure() -> Measured:
    """One swarm."""
    with tempfile.TemporaryDirectory() as folder:
        home, report_file = Path(folder) / "swarm", Path(folder) / "report.json"
        idle = uvloop.run(simulate(home, report_file))
        report: dict[str, Any] = msgspec.json.decode(report_file.read_bytes())
        trainer = read_events(home / "trainer" / METRICS_FILE)
        peers = [read_events(home / f"peer-{number + 1}" / METRICS_FILE) for number in range(INFERENCE_PEERS)]
    steps = [event for event in trainer if event["event"] == "step"]
    first_s, last_s = steps[0]["t"], steps[-1]["t"]
    # The first step's wait began before there was any peer.
    figures = time_figures(steps[1:], last_s - first_s)
    idle = [window for window in idle if first_s + LAG_REPORT_S <= window[0] <= last_s]
    generating = [window for events in peers for window in lag_windows(events, first_s, last_s)]
    training = lag_windows(trainer, first_s, last_s)
    figures += lag_figures("of an inference peer while generating", generating, idle, "< 50 ms")
    figures += lag_figures("of the trainer while training", training, idle, "< 50 ms")
    publish_ms = [1000 * step["publish_s"] for step in steps[1:]]
    notes = [
        f"{len(steps)} steps in {last_s - first_s:.1f} s; {report['rollouts']['trained']} groups trained, "
        f"held-out {report['eval']['before']} -> {report['eval']['after']}, audit {report['audit']['ok']}",
        f"one publication takes p50 {median(publish_ms):.1f} ms, p99 {percentile(publish_ms, 0.99):.1f} ms",
        f"highest p99 of a window: generating {max(w[2] for w in generating):.1f} ms, "
        f"training {max(w[2] for w in training):.1f} ms, idle {max(w[2] for w in idle):.1f} ms",
        f"{INFERENCE_PEERS + 2} peers with as many p2pd share the machine's cores",
    ]
    return figures, notes


if __name__ == "__main__":
    main("trainer_share", "Where the trainer's time goes, and the lag of the loops.", measure)
