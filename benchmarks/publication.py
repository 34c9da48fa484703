"""From the end of an optimizer step until every peer generates with the new version, phase by phase.

    python -m benchmarks.publication [--peers 4] [--steps 40]

Real processes (`swarm sim`), once with the run's own choice of codec and once with every version whole, in turn. All
clocks are this machine's. The phases of a version, each of the peer that is ready last:

    encode    the delta, and what receivers rebuild from it
    store     checkpoint, blob read back, transaction: what must be safe before anybody is told
    announce  from there until the peer has the announcement
    fetch     of the blobs
    verify    decode, digest
    wait      for the generation call under way
    load      into the engine

The yardstick is the optimizer step itself: while it runs, the version before it is still good to generate with.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.figures import Figure, Measured, main, median, percentile

PHASES = ("encode", "store", "announce", "fetch", "verify", "wait", "load")
LIMIT_S = 300.0  # of one run
Event = dict[str, object]


def events_of(home: Path) -> list[Event]:
    """Everything that all processes of a run wrote down, in the order of time."""
    found: list[Event] = []
    for path in home.glob("*/metrics.jsonl"):
        found += [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    return sorted(found, key=lambda event: event["t"])  # type: ignore[arg-type, return-value]


def run(home: Path, peers: int, steps: int, codec: str) -> list[Event]:
    """One swarm; its events."""
    command = [sys.executable, "-m", "bootstrap.main", "sim", "--peers", str(peers), "--steps", str(steps)]
    subprocess.run([*command, "--codec", codec, "--home", str(home)], check=True, timeout=LIMIT_S, capture_output=True)
    return events_of(home)


def phases_of(events: list[Event], peers: int) -> list[dict[str, float]]:
    """Seconds of each phase, a row for each version that all peers generated with; `total` until the last was ready."""
    published = {event["version"]: event for event in events if event["event"] == "published"}
    loaded: dict[object, list[Event]] = {}
    for event in events:
        if event["event"] == "adapter":
            loaded.setdefault(event["version"], []).append(event)
    rows = []
    for version, made in published.items():
        ready = loaded.get(version, [])
        if len(ready) < peers or any(len(event["path"]) != 1 for event in ready):  # type: ignore[arg-type]
            continue  # somebody skipped it, or got it together with others
        last = max(ready, key=lambda event: event["ready_ms"])  # type: ignore[arg-type, return-value]
        begun_s, heard_s, end_s = (float(event[name]) / 1000 for event, name in  # type: ignore[arg-type]
                                   ((made, "stepped_ms"), (last, "heard_ms"), (last, "ready_ms")))  # fmt: skip
        row = {name: float(last[f"{name}_s"]) for name in ("fetch", "verify", "load")}  # type: ignore[arg-type]
        row |= {name: float(made[f"{name}_s"]) for name in ("encode", "store")}  # type: ignore[arg-type]
        row["announce"] = max(0.0, heard_s - begun_s - row["encode"] - row["store"])
        row["wait"] = max(0.0, end_s - heard_s - row["fetch"] - row["verify"] - row["load"])
        row["total"] = end_s - begun_s
        rows.append(row)
    return rows


def measure(peers: int, steps: int) -> Measured:
    """Both codecs."""
    figures, notes = [], []
    for codec in ("auto", "raw"):
        with tempfile.TemporaryDirectory() as folder:
            events = run(Path(folder), peers, steps, codec)
        rows = phases_of(events, peers)
        step_s = median([float(event["train_s"]) for event in events if event["event"] == "step"])  # type: ignore[arg-type]
        sizes = [int(event["bytes"]) for event in events if event["event"] == "published"]  # type: ignore[call-overload]
        for share, name in ((0.5, "p50"), (0.95, "p95")):
            figures.append(
                Figure(
                    what=f"{codec}: all {peers} peers ready, {name}",
                    ours=percentile([row["total"] for row in rows], share),
                    yardstick=step_s,
                    unit="s",
                    yardstick_is="an optimizer step",
                )
            )
        parts = ", ".join(f"{name} {1000 * median([row[name] for row in rows]):.0f} ms" for name in PHASES)
        notes.append(f"{codec}, {len(rows)} versions of {sum(sizes) // len(sizes):,} bytes, medians: {parts}")
    return figures, notes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    mine, sys.argv[1:] = parser.parse_known_args()
    main("publication", __doc__ or "", lambda: measure(mine.peers, mine.steps))
