"""Replay one seed, or take them all."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.simulation import Plan, Result, simulate

PROCESSES = 2
SHOWN = (
    "elections",
    "stepped down: lease ran out",
    "stepped down: a higher term",
    "partitions",
    "one-way partitions",
    "crashes",
    "disks lost",
    "stops",
    "rounds",
    "groups moved",
    "mode switches",
    "generated",
)


def attempt(job: tuple[int, int]) -> Result | str:
    """One seed; a line if it fails."""
    seed, num_peers = job
    try:
        return simulate(seed, num_peers=num_peers)
    except AssertionError as error:
        return str(error)


def conditions(plan: Plan) -> str:
    """What the time of a failover depends on."""
    silent = plan.dead_is_silent or plan.blow == "stopped"
    return (
        f"lease {plan.lease_s:g} s, dead nodes {'silent' if silent else 'refuse'}, "
        f"{'no gossip' if plan.gossip_loss == 1.0 else 'gossip'}"
    )


def storm(title: str, jobs: Iterable[tuple[int, int]], processes: int) -> bool:
    """All of these seeds; False if one has failed."""
    begun_s = time.monotonic()
    total: Counter[str] = Counter()
    failed: list[str] = []
    failovers: dict[str, list[float]] = {}
    num_seeds = 0
    with ProcessPoolExecutor(processes) as pool:
        for outcome in pool.map(attempt, jobs):
            num_seeds += 1
            if num_seeds % 100 == 0:
                print(f"{title}: {num_seeds} seeds, {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
            if isinstance(outcome, str):
                failed.append(outcome)
                print(outcome, flush=True)
                continue
            total.update(outcome.counts)
            total.update({f"groups {state}": count for state, count in outcome.states.items()})
            total["steps"] += outcome.steps
            assert outcome.plan is not None
            failovers.setdefault(conditions(outcome.plan), []).append(outcome.failover_s / outcome.plan.lease_s)
    print(f"{title}: {num_seeds} seeds in {time.monotonic() - begun_s:.0f} s, {len(failed)} failed")
    for where, times in sorted(failovers.items()):
        times.sort()
        over = sum(time > 2 for time in times)
        print(
            f"    failovers, {where}: {len(times)}, p50 {times[len(times) // 2]:.2f}, max {times[-1]:.2f} lease times",
            end="",
        )
        print(f", {over} over two")
    for name in ("steps", *SHOWN, *(f"groups {state}" for state in ("trained", "no_signal", "stale", "queued"))):
        print(f"    {name:30} {total[name]}")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", help="a number, or `storm`")
    parser.add_argument("peers", nargs="?", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1000, help="of 50 peers")
    parser.add_argument("--large", type=int, default=20, help="seeds of 1,000 peers")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    options = parser.parse_args()
    if options.seed != "storm":
        print(simulate(int(options.seed), num_peers=options.peers))
        return 0
    runs = ((options.seeds, 50), (options.large, 1000))
    whole = [
        storm(
            f"{peers} peers", [(seed, peers) for seed in range(options.first, options.first + seeds)], options.processes
        )
        for seeds, peers in runs
        if seeds
    ]
    return 0 if all(whole) else 1


if __name__ == "__main__":
    sys.exit(main())
