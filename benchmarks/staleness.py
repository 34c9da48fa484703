"""What the staleness bound costs and buys: the demo task in asynchronous mode, at several bounds, three seeds each.

    swarm sim --max-lag L --depth D --seed S  ->  report  ->  one row of the table in docs/staleness.md

Each run is a whole swarm of real processes; the histogram is that of its audited ledger. `depth` is how many versions
peers run ahead: 1 unless a row says otherwise, so that a large bound is a guard and not where the pipeline sits.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import machine
from bootstrap.events import read_events
from bootstrap.home import METRICS_FILE
from bootstrap.view import size

DOCUMENT = Path(__file__).parent.parent / "docs" / "staleness.md"
SEEDS = (0, 1, 2)
STEPS, PEERS = 60, 2
LIMIT_S = 200.0


@dataclass(frozen=True)
class Setting:
    """One row: how the run is started."""

    mode: str
    max_lag: int
    depth: int = 1
    stale: str = "drop"

    @property
    def words(self) -> list[str]:
        """Options of `swarm sim`."""
        return [
            *("--mode", self.mode, "--max-lag", str(self.max_lag)),
            *("--depth", str(self.depth), "--stale", self.stale),
        ]


SETTINGS = (
    Setting("sequential", 0),
    Setting("async", 0),
    Setting("async", 1),
    Setting("async", 4),
    Setting("async", 20),
    Setting("async", 4, depth=4),
    Setting("async", 20, depth=20),
    Setting("async", 20, depth=20, stale="downweight"),
)
HEADINGS = (
    "mode, max_lag, depth",
    "lag of trained groups: share at each",
    "reward, last tenth",
    "held-out after",
    "a step, s",
    "idle: trainer",
    "idle: inference",
    "stale groups",
    "bytes: adapters, rollouts",
)


def run(setting: Setting, seed: int) -> dict[str, Any]:
    """The report of one run, with `step_s`: seconds from step to step. SystemExit when it fails or breaks the bound."""
    with tempfile.TemporaryDirectory() as folder:
        home, file = Path(folder) / "swarm", Path(folder) / "report.json"
        command = [sys.executable, "-m", "bootstrap.main", "sim", "--home", str(home), "--report", str(file)]
        subprocess.run(
            [*command, "--peers", str(PEERS), "--steps", str(STEPS), "--seed", str(seed), *setting.words],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        report: dict[str, Any] = msgspec.json.decode(file.read_bytes())
        steps = [event for event in read_events(home / "trainer" / METRICS_FILE) if event["event"] == "step"]
    report["step_s"] = (steps[-1]["t"] - steps[0]["t"]) / (len(steps) - 1)
    if not report["audit"]["ok"] or report["lag"]["max_consumed"] > setting.max_lag or report["rollouts"]["lost"]:
        raise SystemExit(
            f"{setting}, seed {seed}: {report['audit']}, {report['lag']}, lost {report['rollouts']['lost']}"
        )
    return report


def row(setting: Setting, reports: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, with the smallest and largest where it matters."""
    total = sum(sum(report["lag"]["histogram"].values()) for report in reports)
    lags: dict[int, int] = {}
    for report in reports:
        for lag, count in report["lag"]["histogram"].items():
            lags[int(lag)] = lags.get(int(lag), 0) + count
    stale = [
        (report["rollouts"]["stale"] + report["rollouts"]["stale_in_queue"]) / report["rollouts"]["received"]
        for report in reports
    ]
    adapters = sum(report["bytes"]["adapters"] for report in reports) / len(reports)
    rollouts = sum(report["bytes"]["rollouts"] for report in reports) / len(reports)
    cells = [
        f"{setting.mode}, {setting.max_lag}, {setting.depth}" + (", downweight" if setting.stale != "drop" else ""),
        _histogram({lag: count / total for lag, count in sorted(lags.items())}),
        _spread([report["reward"]["last"] for report in reports]),
        _spread([report["eval"]["after"] for report in reports]),
        _spread([report["step_s"] for report in reports]),
        _percent([report["idle"]["trainer"] for report in reports]),
        _percent([report["idle"]["inference"] for report in reports]),
        _percent(stale),
        f"{size(adapters)}, {size(rollouts)}",
    ]
    return f"| {' | '.join(cells)} |"


def _histogram(shares: dict[int, float]) -> str:
    """At most six columns; the largest lag is always named."""
    shown = [f"{lag}: {share:.0%}" for lag, share in shares.items() if share >= 0.005]
    most = max(shares)
    text = ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]])
    return text if f"{most}: " in text else f"{text}, at most {most}"


def _spread(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _percent(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1%}" if known else "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description="The table of docs/staleness.md."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    seeds = parser.parse_args().seeds
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + " --- |" * len(HEADINGS)]
    load = os.getloadavg()[0]
    for setting in SETTINGS:
        lines.append(row(setting, [run(setting, seed) for seed in seeds]))
        print(lines[-1], flush=True)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    note = f"Seeds {', '.join(map(str, seeds))}; {STEPS} steps, {PEERS} inference peers; {day}, {machine()}, "
    note += f"load before {load:.2f}."
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = "<!-- begin staleness -->", "<!-- end staleness -->"
    before, _, rest = text.partition(begin)
    DOCUMENT.write_text(before + begin + "\n" + "\n".join([*lines, "", note]) + "\n" + end + rest.partition(end)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
