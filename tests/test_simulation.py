"""The invariants of DESIGN section 11 on many seeds, and proof that each check can fail."""

from collections import Counter

import pytest

from protocols.delivery import Intake, Queued
from protocols.envelopes import Sealed
from protocols.faults import PeerFault
from protocols.messages import Announcement, GroupReceipt, RolloutGroup
from protocols.policy import Chain, Extended, Known, Outcome
from tests.simulation import Parts, Row, TrainerNode, simulate

SEEDS = 150
MUTATION_SEEDS = 40


def test_s1_to_s4_hold_on_every_seed() -> None:
    # Goal: bound, exactly once, nothing lost, one chain - whatever the network and the crashes do.
    # Method: 150 seeds of 8 peers; and the seeds together must have reached what they are about.
    states: Counter[str] = Counter()
    complete = equivocations = 0
    for seed in range(SEEDS):
        result = simulate(seed)
        states += result.states
        complete += result.steps == 8
        equivocations += result.equivocations > 0
    assert min(states[state] for state in ("trained", "no_signal", "stale", "queued")) > SEEDS
    assert complete > SEEDS / 5
    assert equivocations > SEEDS / 8


def test_a_seed_is_the_same_run_byte_for_byte() -> None:
    assert simulate(5).trace == simulate(5).trace
    assert simulate(5).trace != simulate(6).trace


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


class BelievesLabels(TrainerNode):
    """Does not check that the weights of a group are those of the version it names."""

    def inspect(self, group: RolloutGroup) -> PeerFault | None:
        return None


class ReceiptFirst(TrainerNode):
    """Answers before the disk has what it accepted."""

    def store(self, new, answer) -> None:  # type: ignore[no-untyped-def]
        answer()
        super().store(new, lambda: None)


class TwoTransactions(TrainerNode):
    """Commits the version, and in a second transaction the groups it consumed."""

    def consume(self, groups: tuple[Queued, ...], step: int) -> None:
        self.steps = step
        self.sim.trained += [(group.digest, step - 1) for group in groups]

        def later() -> None:
            for group in groups:
                self.rows[group.digest] = Row(group, "trained", step - 1)

        self._writes.append(later)
        self.after(0.05, lambda: self._writes.remove(later) or later() if later in self._writes else None)


class RefusesNothing(Intake):
    """Offers no memory: every group is new."""

    def offer(self, producer: str, group: RolloutGroup, steps_done: int, fault: PeerFault | None) -> GroupReceipt:
        self._seen.clear()
        return super().offer(producer, group, steps_done, fault)


@pytest.mark.parametrize(
    ("parts", "broken"),
    [
        (Parts(intake=NoThirdGate), "S1|bound broken"),
        (Parts(trainer=BelievesLabels), "S1"),
        (Parts(intake=NotOnce), "S2|stored twice"),
        (Parts(intake=RefusesNothing), "S2|stored twice"),
        (Parts(intake=NoFloor), "stored twice"),
        (Parts(intake=ForgetsOneTooMany), "S2|stored twice"),
        (Parts(trainer=TwoTransactions), "S2|audit"),
        (Parts(trainer=ReceiptFirst), "S3"),
        (Parts(chain=AnyVersion), "S4"),
        (Parts(chain=ForksUnnoticed), "S4"),
    ],
    ids=lambda value: (
        next((p.__name__ for p in vars(value).values() if p.__module__ == __name__), "")
        if isinstance(value, Parts)
        else value
    ),
)
def test_a_broken_machine_is_caught(parts: Parts, broken: str) -> None:
    # Goal: the checks above can fail. Method: take one rule out; some seed must notice, and say how to replay it.
    def run_seeds() -> None:
        for seed in range(MUTATION_SEEDS):
            simulate(seed, parts)

    with pytest.raises(AssertionError, match=rf"({broken}).*replay with: python -m tests.simulation \d+"):
        run_seeds()
