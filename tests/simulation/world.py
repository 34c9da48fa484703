"""Clock, network and misfortune: what happens to the nodes of a seed, and when.

    heap of (time, order, node, its life, action)          same seed, same run, byte for byte

A storm, then a calm. In the storm messages are lost, late, doubled and overtake one another; links are cut, one way or
both; nodes crash with and without their disk, stop (SIGSTOP) and leave. In the calm there are three blows, each with
time to recover: the end of the storm, the loss of the coordinator, the loss of most inference peers.
"""

import hashlib
import heapq
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.election import TERM_EPOCH_S
from protocols.envelopes import Sealed
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.manifest import CoordinationSpec, LearningSpec, Manifest
from protocols.messages import Sampling
from protocols.presence import BEAT_S
from protocols.rollouts import GroupRules

if TYPE_CHECKING:
    from tests.simulation.candidate import Candidate
    from tests.simulation.node import Node

STORM_S = 40.0
GROWTH_S = 40.0  # for steps to rise after most peers are gone: a stalled round waits 18 s, and a liar may cost another
REST_S = 8.0  # after the last step: a back-off lasts up to 4 s, then everything is receipted
CALL_S = 5.0  # a call without an answer has failed
WALL_EPOCH_S = TERM_EPOCH_S + 50_000_000  # summer of 2027
EOS = 7
RULES = GroupRules(Sampling(group_size=2, max_new_tokens=3), vocab_size=8, eos_ids=frozenset({EOS}))


def key_of(name: str) -> Ed25519PrivateKey:
    """The same key for the same name."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


OWNER, TRAINER = key_of("owner"), key_of("trainer")
RUN = run_id_of("sim", public_bytes(OWNER))
TRAINER_ID = peer_id_of(public_bytes(TRAINER))


@dataclass(frozen=True)
class Plan:
    """What kind of a seed this is."""

    num_peers: int
    mode: str
    max_lag: int
    publish_every: int
    batch_groups: int
    lease_s: float
    num_guides: int
    """Bootstrap peers: they store records and may lead."""
    loss: float
    twice: float
    delay_s: float
    """Longest way of a message; one in fifty takes up to 3 s more."""
    gossip_loss: float
    """1: gossip never works, not even in the calm."""
    dht_loss: float
    dht_fails: float
    """Part of the stores that fail or are slow."""
    dead_is_silent: bool
    """A call to a dead node fails at its timeout, not at once."""
    forks: bool
    """The trainer tells two stories."""
    hostile: bool
    """One bootstrap peer is an eligible enemy."""
    num_liars: int
    blow: str
    """What becomes of the coordinator in the calm: killed, stopped, leaves."""

    @classmethod
    def draw(cls, seed: int, rng: random.Random, num_peers: int) -> "Plan":
        """The dice of a seed; what must not come together is told apart by the seed's number."""
        gentle = rng.random() < 0.3  # the way between candidates and DHT is whole but for cuts and crashes
        publish_every = rng.choice((1, 1, 2))
        loss = rng.uniform(0.0, 0.3)
        num_guides = 2 if num_peers < 10 else rng.choice((2, 3))
        return cls(
            num_peers=num_peers,
            mode=("async", "sequential", "auto")[seed % 3],
            max_lag=rng.randint(max(0, publish_every - 1), 3),  # below, no group could make the second step
            publish_every=publish_every,
            batch_groups=max(4, num_peers // 12),
            lease_s=rng.choice((8.0, 10.0)),
            num_guides=num_guides,
            loss=loss,
            twice=rng.uniform(0.0, 0.2),
            delay_s=rng.choice((0.05, 0.2, 0.4)),
            gossip_loss=rng.choice((loss, loss, loss, 0.6, 1.0)),
            dht_loss=0.0 if gentle else loss,
            dht_fails=0.0 if gentle else rng.choice((0.0, 0.1, 0.3)),
            dead_is_silent=rng.random() < 0.5,
            forks=seed % 8 == 5,
            hostile=seed % 5 == 3,
            num_liars=rng.choice((0, 1, max(1, num_peers // 20))),
            blow=rng.choice(("killed", "stopped", "leaves")),
        )

    @property
    def patience_s(self) -> float:
        """L1: two lease times of the default lease. What a shorter one does not shorten is a search of the DHT around a
        dead node that does not even refuse: 3 s. Without gossip, news of a leader takes a read and two beats more."""
        silent_s = 3.0 if self.dead_is_silent or self.blow == "stopped" else 0.0
        return self.lease_s + 10.0 + silent_s + (self.lease_s / 4 + 2 * BEAT_S if self.gossip_loss == 1.0 else 0.0)

    @property
    def struck_s(self) -> float:
        """When the coordinator is struck."""
        return STORM_S + self.patience_s + 0.5

    @property
    def culled_s(self) -> float:
        """When most inference peers go."""
        return self.struck_s + self.patience_s + 0.5

    @property
    def rest_s(self) -> float:
        """No step begins after this."""
        return self.culled_s + GROWTH_S

    @property
    def end_s(self) -> float:
        """The last moment."""
        return self.rest_s + REST_S

    def manifest(self, coordinators: Iterable[str]) -> Manifest:
        """The run's manifest."""
        return Manifest(
            run=RUN,
            revision=1,
            trainers=(TRAINER_ID,),
            issued_ms=0,
            max_lag=self.max_lag,
            max_steps=10_000,
            publish_every=self.publish_every,
            sampling=RULES.sampling,
            learning=LearningSpec(batch_groups=self.batch_groups),
            coordination=CoordinationSpec(
                mode=self.mode,  # type: ignore[arg-type]
                refresh_gap=self.publish_every - 1,
                lease_s=self.lease_s,
                coordinators=tuple(coordinators),
            ),
        )


@dataclass(frozen=True, eq=False)
class Cut:
    """No message passes from these to those."""

    sources: frozenset["Node"]
    targets: frozenset["Node"]


class World:
    """Time, and what is between the nodes."""

    def __init__(self, seed: int, num_peers: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = Plan.draw(seed, self.rng, num_peers)
        self.now_s = 0.0
        self.manifest: Sealed[Manifest]
        self.nodes: dict[str, Node] = {}
        self.all: list[Node] = []
        self.trace = 0
        """A checksum over every delivery: the run, byte for byte."""
        self.counts: Counter[str] = Counter()
        self.sealed: dict[bytes, Sealed[Any]] = {}
        """Everything that a node has signed, with what it unseals to."""
        self.dht_trouble_s = -1e9
        """When last a message between candidates and DHT was lost, late or refused, or a storing node went away."""
        self._cuts: list[Cut] = []
        self._heap: list[tuple[float, int, Node | None, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = 0

    @property
    def calm(self) -> bool:
        """No accident happens any more."""
        return self.now_s >= STORM_S

    def at(self, at_s: float, action: Callable[..., Any], *args: Any) -> None:
        """Something that nobody can prevent."""
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, None, 0, action, args))

    def after(self, delay_s: float, node: "Node", action: Callable[..., Any], *args: Any) -> None:
        """Something that a node will do, in this life only, and not while it is stopped."""
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, node, node.life, action, args))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, node, life, action, args = heapq.heappop(heap)
            if node is None:
                action(*args)
            elif node.life == life:
                node.do(action, *args)
        self.now_s = until_s

    # ------------------------------------------------------------------ network

    def passes(self, source: "Node", target: "Node") -> bool:
        """Is there a way at all?"""
        return not any(source in cut.sources and target in cut.targets for cut in self._cuts)

    def carry(self, source: "Node", target: "Node", kind: str, deliver: Callable[..., Any], *args: Any) -> bool:
        """Hand over, perhaps twice, perhaps never, in any order. False if it is lost."""
        rng, plan = self.rng, self.plan
        copies = 1
        if not self.calm:
            loss = plan.dht_loss if kind == "dht" else plan.loss
            copies = (rng.random() >= loss) + (rng.random() < plan.twice)
            if self._cuts and not self.passes(source, target):
                copies = 0
            if kind == "dht" and not copies:
                self.dht_trouble_s = self.now_s
        for _ in range(copies):
            delay_s = rng.uniform(0.005, plan.delay_s)
            if not self.calm and rng.random() < 0.02:
                delay_s += rng.uniform(0.0, 3.0)
                if kind == "dht":
                    self.dht_trouble_s = self.now_s
            self.at(self.now_s + delay_s, deliver, *args)
        stamp = struct.pack("<dII", self.now_s, source.index, target.index)
        self.trace = zlib.crc32(stamp, self.trace)
        return copies > 0

    def gossip(self, source: "Node", raw: bytes) -> None:
        """To everybody whom it reaches, in a few waves."""
        rng, calm = self.rng, self.calm
        loss = 1.0 if self.plan.gossip_loss == 1.0 else 0.0 if calm else self.plan.gossip_loss
        if loss == 1.0:
            return
        told = [node for node in self.all if node is not source and (loss == 0.0 or rng.random() >= loss)]
        if self._cuts:
            told = [node for node in told if self.passes(source, node)]
        first = rng.randrange(8)
        for wave in range(8):
            delay_s = rng.uniform(0.005, self.plan.delay_s)
            self.at(self.now_s + delay_s, self.tell, source.peer_id, told[(first + wave) % 8 :: 8], raw)

    def tell(self, source: str, told: list["Node"], raw: bytes) -> None:
        for node in told:
            if node.up:
                node.do(node.hear, source, raw)

    # ------------------------------------------------------------------ who watches

    def began_to_lead(self, node: "Candidate", term: int) -> None:
        """A candidate says that it leads."""
        raise NotImplementedError

    def acts_as_leader(self, node: "Candidate") -> None:
        """A candidate orders or grants."""
        raise NotImplementedError

    # ------------------------------------------------------------------ misfortune

    def cut(self, sources: Iterable["Node"], targets: Iterable["Node"], one_way: bool, length_s: float) -> None:
        """Part two sets of nodes for a while; the storm's end heals everything."""
        there, back = Cut(frozenset(sources), frozenset(targets)), Cut(frozenset(targets), frozenset(sources))
        cuts = [there] if one_way else [there, back]
        self.counts["one-way partitions" if one_way else "partitions"] += 1
        self._cuts += cuts

        def heal() -> None:
            self._cuts = [cut for cut in self._cuts if cut not in cuts]

        self.at(min(self.now_s + length_s, STORM_S), heal)

    def split(self) -> None:
        """A random partition: any set of nodes against any other, or against the rest."""
        rng = self.rng
        share = rng.choice((0.1, 0.3, 0.5))
        some = [rng.choice(self.all), *(node for node in self.all if rng.random() < share)]
        rest = [node for node in self.all if node not in some]
        if rng.random() < 0.3:
            rest = [node for node in rest if rng.random() < 0.5]
        self.cut(some, rest, rng.random() < 0.4, rng.uniform(3.0, 15.0))

    def hit_leader(self) -> None:
        """An accident to the coordinator, if there is one."""
        leader = self.leader()
        if leader is None:
            return
        length_s = self.rng.uniform(0.5, 2.0) * self.plan.lease_s
        match self.rng.choice(("crash", "stop", "leave", "cut", "deaf", "mute")):
            case "crash":
                leader.crash()
            case "stop":
                leader.stop(length_s)
            case "leave":
                leader.leave()
            case "cut":
                self.cut([leader], [node for node in self.all if node is not leader], False, length_s)
            case "deaf":
                self.cut([node for node in self.all if node is not leader], [leader], True, length_s)
            case "mute":
                self.cut([leader], [node for node in self.all if node is not leader], True, length_s)

    def leader(self) -> "Node | None":
        """Some node that leads and may."""
        return next((node for node in self.all if node.leads), None)

    def schedule(self) -> None:
        """Draw the accidents of this seed."""
        rng = self.rng
        for node in self.all:
            self.at(rng.uniform(0.0, 1.0), node.boot)
            duty = node.may_lead
            for _ in range(rng.choice((0, 1, 1, 2)) if duty else rng.choice((0, 0, 1))):
                accident = rng.choice((node.crash, node.lose, node.leave))
                self.at(rng.uniform(2.0, STORM_S - 4.0), accident)
            if rng.random() < (0.4 if duty else 0.1):
                self.at(rng.uniform(2.0, STORM_S - 4.0), node.stop, rng.uniform(1.0, 15.0))
        for _ in range(rng.randint(0, 3)):
            self.at(rng.uniform(2.0, STORM_S - 5.0), self.split)
        for _ in range(rng.randint(0, 2)):
            self.at(rng.uniform(12.0, STORM_S - 5.0), self.hit_leader)
