"""What asynchronous training gains over sequential: the overlap of generating and training.

    one bootstrap peer; the trainer on core 0, one inference peer on core 1, their p2pd beside them; the same run twice

With g seconds to write a batch and t seconds to train on it and publish, sequential mode needs g + t a step and no
overlap can need less than max(g, t). So the ideal gain is (g + t) / max(g, t), from the sequential run's own times;
ours is its time a step over the asynchronous run's.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.figures import Figure, Measured, main, median
from bootstrap.events import Event, read_events
from bootstrap.home import METRICS_FILE

STEPS = 100
SETTLED_STEP = 30  # the first steps are made while the others still start, and before there is a coordinator
LIMIT_S = 160.0
CORES = {"train": 0, "join": 1, "bootstrap": 1}


def pin(root: psutil.Process) -> None:
    """Each peer of the simulation, with everything it has started, on its core. Threads too: each is pinned alone."""
    for process in root.children(recursive=True):
        with suppress(psutil.Error, OSError):
            core = next((CORES[word] for word in process.cmdline() if word in CORES), None)
            if core is None:
                continue
            for each in (process, *process.children(recursive=True)):
                for thread in Path(f"/proc/{each.pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})


def run(mode: str, home: Path) -> list[Event]:
    """The steps of one simulated run."""
    command = [sys.executable, "-m", "bootstrap.main", "sim", "--home", str(home), "--mode", mode]
    process = subprocess.Popen(
        [*command, "--peers", "1", "--steps", str(STEPS)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            pin(psutil.Process(process.pid))
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    if process.returncode != 0:
        raise SystemExit(f"swarm sim --mode {mode} ended with {process.returncode}")
    events = read_events(home / "trainer" / METRICS_FILE)
    return [event for event in events if event["event"] == "step"]


def a_step_s(steps: list[Event]) -> float:
    """Seconds from one step to the next, when everybody is there."""
    settled = [event["t"] for event in steps if event["step"] >= SETTLED_STEP]
    return (settled[-1] - settled[0]) / (len(settled) - 1)


def measure() -> Measured:
    """The same run in both modes."""
    with tempfile.TemporaryDirectory() as folder:
        sequential = run("sequential", Path(folder) / "sequential")
        ahead = run("async", Path(folder) / "async")
    settled = [event for event in sequential if event["step"] >= SETTLED_STEP]
    generate_s = median([event["wait_s"] for event in settled])
    train_s = a_step_s(sequential) - generate_s
    ideal = (generate_s + train_s) / max(generate_s, train_s)
    gain = a_step_s(sequential) / a_step_s(ahead)
    waited = sum(event["wait_s"] for event in ahead if event["step"] >= SETTLED_STEP)
    figures = [
        Figure(
            what="steps a second, asynchronous over sequential",
            ours=gain,
            yardstick=ideal,
            unit="x",
            yardstick_is="ideal overlap (g + t) / max(g, t)",
            aim=">= 0.85",
        )
    ]
    notes = [
        f"sequential: {a_step_s(sequential):.3f} s a step, of which {generate_s:.3f} s from the call to the full batch",
        f"asynchronous: {a_step_s(ahead):.3f} s a step; the trainer waited {waited:.2f} s in "
        f"{STEPS - SETTLED_STEP} steps; largest lag {max(event['lag_max'] for event in ahead)}",
        f"steps {SETTLED_STEP} to {STEPS} of each run; trainer on core 0, inference peer on core 1",
    ]
    return figures, notes


if __name__ == "__main__":
    main("overlap", "Asynchronous beside sequential training, and the ideal.", measure)
