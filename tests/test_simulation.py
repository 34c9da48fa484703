"""The invariants of DESIGN section 11 on many seeds, and proof that each check can fail."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from protocols.delivery import Intake, Queued
from protocols.election import (
    Action,
    Claim,
    Election,
    ElectionConfig,
    Lead,
    Phase,
    Put,
    Read,
    ReadBack,
    Stored,
    Tick,
    rank_hash,
)
from protocols.envelopes import Sealed
from protocols.faults import PeerFault
from protocols.messages import Announcement, Directive, GroupReceipt, RolloutGroup
from protocols.orders import Orders
from protocols.policy import Chain, Extended, Known, Outcome
from protocols.rounds import Round
from tests.simulation import Parts, Producer, Row, Trainer, simulate

SEEDS = 48
MUTATION_SEEDS = 200


def test_every_invariant_holds_on_every_seed() -> None:
    # Goal: S1 to S7, L1 to L3, whatever network, clocks, crashes and enemies do.
    # Method: a sample of seeds of 8 and of 50 peers (`make storm` takes all); together they must have reached what
    # they are about.
    states: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    equivocations = 0
    for seed, num_peers in [*((seed, 8) for seed in range(SEEDS)), *((seed, 50) for seed in range(6))]:
        result = simulate(seed, num_peers=num_peers)
        states += result.states
        counts += result.counts
        equivocations += result.equivocations > 0
    assert min(states[state] for state in ("trained", "no_signal", "stale", "queued")) > SEEDS
    assert min(counts[name] for name in ("elections", "rounds", "crashes", "obedience changed")) > SEEDS
    assert min(counts[name] for name in ("partitions", "one-way partitions", "disks lost", "stops")) > SEEDS / 4
    assert counts["stepped down: lease ran out"] > SEEDS / 8
    assert counts["groups moved"] > SEEDS
    assert equivocations > SEEDS / 12


def test_a_seed_is_the_same_run_byte_for_byte() -> None:
    assert simulate(5).trace == simulate(5).trace
    assert simulate(5).trace != simulate(6).trace


def test_a_seed_is_replayed_by_another_process() -> None:
    # Goal: the line that a failure prints is worth something. Method: other hash seeds, same run.
    shown = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "2"],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(shown) == 1
    assert str(simulate(2).trace) in shown.pop()


def test_a_rival_of_the_same_term_is_led_above() -> None:
    # A claim is read back before a later one is stored: its owner leads. The later one ranks higher and would lead the
    # same term, if it did not see the other's claim beside its own.
    config = ElectionConfig()
    later, earlier = sorted(("ada", "bob"), key=lambda name: rank_hash("run", 1, name))
    first, second = (Election("run", name, config, 0.0) for name in (earlier, later))
    claims = {}
    for election in (first, second):
        assert election.handle(Tick(), 3.0) == [Put(0, False)]
        election.handle(Stored(True), 3.1)
        assert election.handle(Tick(), 5.0) == [Put(1, True)]
    now_s = 6.0
    for election in (first, second):
        claims[election.me] = Claim(election.me, 1, True, 0)
        election.handle(Stored(True), now_s)
        assert election.handle(Tick(), now_s + config.settle_s) == [Read()]
        answer = election.handle(ReadBack(tuple(claims.values())), now_s + config.settle_s)
        assert answer == ([Lead(1), Put(1, True)] if election is first else [Put(2, True)])
    assert first.leads(now_s + config.settle_s)
    assert not second.leads(now_s + config.settle_s)


# ---------------------------------------------------------------------- gates, exactly once, disk


class NoThirdGate(Intake):
    """Consumes whatever waits."""

    def sweep(self, steps_done: int) -> tuple[Queued, ...]:
        return ()


class NotOnce(Intake):
    """Forgets at once what it has trained on."""

    def settle(self, outcome: str) -> None:
        super().settle(outcome)
        self._seen = {(group.producer, group.counter): (digest, 0) for digest, group in self._queue.items()}
        self._floor = {}


class ForgetsOneTooMany(Intake):
    """Drops the memory of groups that are just within the bound."""

    def forget(self, steps_done: int) -> None:
        super().forget(steps_done + 1)
        self._floor = {}


class NoFloor(Intake):
    """Takes a counter again once its first use is too old."""

    def _spend(self, producer: str, counter: int) -> None:
        pass


class RefusesNothing(Intake):
    """Offers no memory: every group is new."""

    def offer(self, producer: str, group: RolloutGroup, steps_done: int, fault: PeerFault | None) -> GroupReceipt:
        self._seen.clear()
        return super().offer(producer, group, steps_done, fault)


class BelievesLabels(Trainer):
    """Does not check that the weights of a group are those of the version it names."""

    def inspect(self, group: RolloutGroup) -> PeerFault | None:
        return None


class ReceiptFirst(Trainer):
    """Answers before the disk has what it accepted."""

    def store(self, new: list[Queued], answer: Any) -> None:
        answer()
        super().store(new, lambda: None)


class TwoTransactions(Trainer):
    """Commits the version, and in a second transaction the groups it consumed."""

    def consume(self, groups: tuple[Queued, ...], step: int) -> None:
        self.steps = step
        self.trained += [(group.digest, step - 1) for group in groups]

        def later() -> None:
            for group in groups:
                self.rows[group.digest] = Row(group, "trained", step - 1)

        self.commit(later)


# ---------------------------------------------------------------------- chain, adapters, junk


class AnyVersion(Chain):
    """Takes announcements in whatever order they come."""

    def extend(self, sealed: Sealed[Announcement]) -> Outcome:
        if self.get(sealed.message.version) is not None:
            return Known()
        self._append(sealed)
        return Extended()


class ForksUnnoticed(Chain):
    """Compares versions, but not parents."""

    def _sibling(self, said: Announcement) -> Sealed[Announcement] | None:
        return None


class BelievesItsDisk(Producer):
    """Generates with whatever stands under the name of a version."""

    def load(self, said: Announcement, blob: bytes) -> bool:
        if not super().load(said, blob):
            self.held = said
        return True


class Stumbles(Orders):
    """Falls over a directive of a stranger."""

    def check(self, sealed: Sealed[Directive], wall_s: float) -> None:
        assert_known = {peer_id: True for peer_id in self.manifest.eligible}
        assert_known[sealed.sender]
        super().check(sealed, wall_s)


# ---------------------------------------------------------------------- elections, orders, rounds


class ObeysAnyTerm(Orders):
    """No fence: the last word counts."""

    def _is_above(self, sealed: Sealed[Directive]) -> bool:
        return True


class LeadsOnStored(Election):
    """Does not read its claim back."""

    def _stored(self, ok: bool, now_s: float) -> list[Action]:
        claiming = self.phase is Phase.CLAIMING
        actions = super()._stored(ok, now_s)
        if claiming and ok:
            self.phase, self._settled_s, self._put_at_s = Phase.LEADING, None, now_s
            actions.append(Lead(self._my_term))
        return actions


class NeverFencesItself(Election):
    """Believes in its lease for ever."""

    def leads(self, now_s: float) -> bool:
        return self.phase is Phase.LEADING


class KnowsNoFences(Election):
    """Does not care for terms that others still stand at."""

    def _pass(self, term: int, candidate: str) -> None:
        pass


class NeverClaims(Election):
    """Waits for others."""

    def _claim_at_s(self) -> float:
        return 1e12


class NeverMovesWork(Round):
    """Waits for whoever was called first."""

    def _drop(self, worker: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("parts", "broken", "first"),
    [
        (Parts(intake=NoThirdGate), "S1|bound broken", 0),
        (Parts(trainer=BelievesLabels), "S1", 2),
        (Parts(intake=NotOnce), "S2|stored twice", 2),
        (Parts(intake=RefusesNothing), "S2|stored twice", 0),
        (Parts(intake=NoFloor), "stored twice", 2),
        (Parts(intake=ForgetsOneTooMany), "S2|stored twice", 2),
        (Parts(trainer=TwoTransactions), "S2|audit|bound broken", 27),
        (Parts(trainer=ReceiptFirst), "S3", 13),
        (Parts(chain=AnyVersion), "S4", 2),
        (Parts(chain=ForksUnnoticed), "S4", 5),
        (Parts(producer=BelievesItsDisk), "S5", 18),
        (Parts(orders=ObeysAnyTerm), "S6", 0),
        (Parts(orders=Stumbles), "S7: KeyError", 2),
        (Parts(election=LeadsOnStored), "two leaders of term|gives orders while", 62),
        (Parts(election=NeverFencesItself), "gives orders while|two leaders of term", 3),
        (Parts(election=KnowsNoFences), "L1", 118),
        (Parts(election=NeverClaims), "L1: 0 leaders", 0),
        (Parts(round=NeverMovesWork), "L3", 4),
    ],
    ids=lambda value: (
        next(part.__name__ for part in vars(value).values() if part is not None and part.__module__ == __name__)
        if isinstance(value, Parts)
        else str(value)
    ),
)
def test_a_broken_machine_is_caught(parts: Parts, broken: str, first: int) -> None:
    # Goal: the checks above can fail. Method: take one rule out; some seed must notice, and say how to replay it. The
    # first seed is one that is known to; where the rules have changed since, another one is found.
    def run_seeds() -> None:
        for seed in range(first, first + MUTATION_SEEDS):
            simulate(seed, parts)

    with pytest.raises(AssertionError, match=rf"({broken}).*replay with: python -m tests.simulation \d+"):
        run_seeds()
