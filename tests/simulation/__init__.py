"""A swarm in one process on a virtual clock: the real machines of `protocols/`, a made-up network, disk and DHT.

    world     clock, dice, network, partitions, accidents    candidate   DHT, election, coordinator's duty; an enemy
    node      clocks, disk, doors; chain, beats, orders      producer    outbox, adapters, credits; a liar
    checks    DESIGN section 11                              trainer     intake, rounds, steps, chain, ledger

Everything follows from the seed. A third of the seeds runs in each mode; an eighth has a trainer that tells two
stories, a fifth an eligible enemy, most have lying peers. A storm (losses, delays, doubles, reordering, skewed and
drifting clocks, partitions of any set, crashes with and without disk, stopped processes) ends in a calm with three
blows: the storm's end, the coordinator's, and that of most inference peers.

    python -m tests.simulation SEED [PEERS]            replays a seed that failed
    python -m tests.simulation storm                   1,000 seeds of 50 peers and 20 of 1,000 (`make storm`)
"""

from collections import Counter
from dataclasses import dataclass

from protocols.envelopes import seal
from tests.simulation.candidate import Candidate, Hostile
from tests.simulation.checks import check_end, check_growth, check_heads, check_leader, l2_s
from tests.simulation.node import Parts
from tests.simulation.producer import Producer
from tests.simulation.trainer import Row, Trainer
from tests.simulation.world import OWNER, STORM_S, TRAINER, Plan, World, key_of

__all__ = ["Candidate", "Parts", "Plan", "Producer", "Result", "Row", "Swarm", "Trainer", "simulate"]


class Swarm(World):
    """The nodes of a seed, and what is watched while they run."""

    def __init__(self, seed: int, parts: Parts, num_peers: int) -> None:
        super().__init__(seed, num_peers)
        rng, plan = self.rng, self.plan
        self.trainer = (parts.trainer or Trainer)(self, TRAINER, parts)
        kinds = [Candidate] * (plan.num_guides - plan.hostile) + [Hostile] * plan.hostile
        self.guides = [kind(self, key_of(f"guide {at}"), parts) for at, kind in enumerate(kinds)]
        count = num_peers - 1 - len(self.guides)
        self.producers = [(parts.producer or Producer)(self, key_of(f"peer {at}"), parts) for at in range(count)]
        for producer in rng.sample(self.producers, min(plan.num_liars, count - 2)):
            producer.honest = False
        self.manifest = seal(OWNER, plan.manifest(guide.peer_id for guide in self.guides))
        self.candidates: list[Candidate] = [self.trainer, *self.guides]
        stores = [node.peer_id for node in (*self.candidates, *self.producers[:2])]
        names = [guide.peer_id for guide in self.guides]
        for candidate in self.candidates:
            candidate.stores, candidate.guides = stores, [name for name in names if name != candidate.peer_id]
        for guide in self.guides:
            guide.skew_s /= 5  # everybody else's reference
        for producer in self.producers:
            producer.guides = rng.sample(names, min(2, len(names)))
        self.began_s: list[float] = []
        """When somebody began to lead."""
        self.failover_s = 0.0
        """From the coordinator's blow until the next one leads."""

    # ------------------------------------------------------------------ what is watched

    @property
    def whole(self) -> bool:
        """Nothing has come between candidates and DHT for two leases: what follows from reading it holds."""
        return self.now_s - self.dht_trouble_s > 2 * self.plan.lease_s

    def began_to_lead(self, node: Candidate, term: int) -> None:
        """Two leaders of one term never, if the DHT was whole since the first of them claimed it."""
        self.began_s.append(self.now_s)
        for other in self.candidates:
            if other is not node and other.leads and other.led_term == term:
                self.counts["two leaders of a term"] += 1
                whole = self.dht_trouble_s < min(node.claimed_s, other.claimed_s)
                assert not whole, f"two leaders of term {term}"

    def acts_as_leader(self, node: Candidate) -> None:
        """Whoever orders is the only one that leads, while the DHT is whole: the others' leases have run out."""
        for other in self.candidates:
            if other is not node and other.leads and other.led_term > node.led_term:
                assert not self.whole, f"term {node.led_term} gives orders while term {other.led_term} leads"

    # ------------------------------------------------------------------ the course of a seed

    def play(self) -> None:
        """Storm, calm and the three blows, with a check after each."""
        plan = self.plan
        self.schedule()
        self.run(STORM_S)
        for node in self.all:
            node.boot()
        if plan.hostile:
            self.retire(self.guides[-1])
        head = self.trainer.chain.version
        self.run(STORM_S + l2_s(self))
        check_heads(self, self.trainer, head)
        self.run(STORM_S + plan.patience_s)
        self.strike(check_leader(self))
        self.run(plan.culled_s)
        self.failover_s = next(began_s for began_s in self.began_s if began_s > plan.struck_s) - plan.struck_s
        check_leader(self)
        steps = self.trainer.steps
        self.cull()
        self.run(plan.rest_s)
        check_growth(self, self.trainer.steps - steps)
        self.run(plan.end_s)
        check_end(self, self.trainer, self.producers)

    def retire(self, node: Candidate | Producer) -> None:
        """Gone for good."""
        node.gone = True
        node.crash(back_s=float("inf"))

    def strike(self, leader: Candidate) -> None:
        """The coordinator's blow: killed, stopped past its lease, or leaving. A trainer comes back soon."""
        self.run(self.plan.struck_s)
        match self.plan.blow:
            case "stopped":
                leader.stop(1.6 * self.plan.lease_s)
            case "killed" if leader is self.trainer:
                leader.crash(back_s=self.now_s + 4.0)
            case "killed":
                self.retire(leader)
            case _:
                leader.leave()
        self.counts["blows"] += 1

    def cull(self) -> None:
        """Most inference peers go for good; one honest one stays at least."""
        rng = self.rng
        going = rng.sample(self.producers, int(len(self.producers) * rng.uniform(0.55, 0.8)))
        if not any(producer.honest and producer not in going for producer in self.producers):
            going.remove(next(producer for producer in going if producer.honest))
        for producer in going:
            self.retire(producer)


@dataclass
class Result:
    """What a run came to, for those who ask whether it tested anything."""

    steps: int
    states: Counter[str]
    counts: Counter[str]
    trace: int
    equivocations: int = 0
    failover_s: float = 0.0
    """From the coordinator's blow until the next one leads."""
    plan: Plan | None = None


def simulate(seed: int, parts: Parts | None = None, num_peers: int = 8) -> Result:
    """Run one seed and check it. AssertionError with one line that replays it, whatever broke."""
    parts = parts or Parts()
    swarm = Swarm(seed, parts, num_peers)
    replay = f"replay with: python -m tests.simulation {seed}" + (f" {num_peers}" if num_peers != 8 else "")
    try:
        swarm.play()
    except AssertionError as error:
        broken = str(error).partition("\n")[0]
        raise AssertionError(f"{broken} (at {swarm.now_s:.2f} s); {replay}") from error
    except Exception as error:
        raise AssertionError(f"S7: {type(error).__name__}: {error} (at {swarm.now_s:.2f} s); {replay}") from error
    states = Counter(row.state for row in swarm.trainer.rows.values())
    proofs = sum(len(node.chain.equivocations) for node in swarm.all if hasattr(node, "chain"))
    return Result(swarm.trainer.steps, states, swarm.counts, swarm.trace, proofs, swarm.failover_s, swarm.plan)
