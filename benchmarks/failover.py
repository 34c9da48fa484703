"""How long a swarm is without a coordinator when its coordinator is killed: real processes, `kill -9`.

One trainer, four inference peers, two bootstrap peers; the trainer and the bootstrap peers may lead, the lease is
the shortest there is. Twenty times the leader is killed in the middle of training, and started again. From the
metrics files: from the kill until every live peer obeys the next leader, and the longest time between two steps.
A trainer that is killed cannot train until it is back: that time is a figure of its own. Exit 1 when a figure
is over two lease times, or when the ledger does not prove the bound.
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import Figure, Measured, main, median
from protocols.ledger import Audit, audit
from tests.processes import LEASE_S, Elected, Electorate

KILLS = 20
WORKERS = 4
STEPS_BETWEEN = 5
# Long enough for many kills, and tokens so slow that seven processes do not wait for one another's two cores.
ENDLESS = ("--steps", "1000000", "--learning-rate", "1e-6", "--slow", "0.1")


@dataclass(frozen=True)
class Kill:
    """One leader killed, and what came of it."""

    role: str
    failover_s: float
    """Until every peer that lived on obeyed the next leader."""
    idle_s: float
    """The longest time between two steps, until training went on; of a killed trainer, until it had done a step."""


def kill_leader(swarm: Electorate, old: Elected) -> tuple[Kill, Elected]:
    """`kill -9` the leader, wait for the next, start the killed one again; training has gone on when this returns."""
    victim = old.leader
    survivors = [peer for peer in swarm.alive if peer is not victim]
    last_step_s = swarm.step_times()[-1]
    killed_s = time.time()
    victim.kill()
    victim.wait()
    if victim.role == "trainer":
        swarm.again(victim)
    new = swarm.wait_for_leader(old.term, survivors)
    if victim.role == "bootstrap":
        swarm.again(victim).wait_for("ready")
    swarm.wait_for_steps(STEPS_BETWEEN, max(time.time(), new.at_s))
    idle_s = max(after - before for before, after in pairwise([last_step_s, *swarm.step_times(last_step_s)]))
    return Kill(victim.role, new.at_s - killed_s, idle_s), swarm.wait_for_leader(old.term)


def end(swarm: Electorate) -> Audit:
    """Stop the trainer in good order; what its ledger proves."""
    swarm.trainer.kill(signal.SIGTERM)
    swarm.trainer.wait()
    return audit((swarm.folder / "trainer" / "ledger.echo").read_bytes())


def figures(kills: Sequence[Kill]) -> list[Figure]:
    """Failover and idle time beside two lease times."""
    failovers = [kill.failover_s for kill in kills]
    trained = [kill.idle_s for kill in kills if kill.role != "trainer"]
    restarts = [kill.idle_s for kill in kills if kill.role == "trainer"]
    values = {
        f"kill to the next leader at every live peer, p50 of {len(kills)}": median(failovers),
        "the same, longest": max(failovers),
        f"longest time between two steps, {len(trained)} kills of a bootstrap peer": max(trained, default=0.0),
    }
    allowed = {"yardstick": 2 * LEASE_S, "unit": "s", "yardstick_is": "two lease times"}
    found = [Figure(what=what, ours=ours, aim="<= 1", **allowed) for what, ours in values.items()]
    if restarts:
        what = f"the same, {len(restarts)} kills of the trainer: its restart, longest"
        found.append(Figure(what=what, ours=max(restarts), **allowed))
    return found


def measure() -> Measured:
    """KILLS kills in one run."""
    rng = random.Random(0)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as folder:
        swarm = Electorate(Path(folder))
        try:
            elected = swarm.start_all(WORKERS, *ENDLESS)
            while len(kills) < KILLS:
                time.sleep(rng.uniform(0, LEASE_S / 2))  # at any moment between two renewals
                kill, elected = kill_leader(swarm, elected)
                kills.append(kill)
                print(f"{len(kills):2} {kill.role:9} {kill.failover_s:5.2f} s {kill.idle_s:5.2f} s", flush=True)
            result = end(swarm)
        finally:
            swarm.close()
    if not result.ok:
        raise SystemExit(f"the ledger proves nothing: {result.problems}")
    histogram = ", ".join(f"{count} of lag {lag}" for lag, count in sorted(result.histogram.items()))
    return figures(kills), [
        f"{result.groups} groups in {result.versions} versions, each trained once, within {result.bound}: {histogram}",
        f"lease {LEASE_S:g} s, {WORKERS} inference peers, {elected.term} terms",
    ]


if __name__ == "__main__":
    result = main("failover", "Kill the coordinator twenty times.", measure)
    sys.exit(1 if any(figure.met is False for figure in result.figures) else 0)
