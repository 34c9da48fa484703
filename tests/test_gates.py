"""The bound at the trainer, step after step: the real door, store, chain and ledger, with everything but a model.

Gate 1 is the producers' own; here they keep to nothing. Gate 2 is a sweep with each new version, gate 3 the taking of
a batch. Each case ends with an audit of the ledger file, as anybody could do it.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import protocols.delivery as delivery
from peers.record import Record
from protocols.delivery import LATER_OUTCOMES_MAX, QUEUE_BATCHES_MAX, Queued
from protocols.envelopes import seal, unseal
from protocols.faults import PeerFault
from protocols.ledger import Audit, Consumed, VersionEntry, audit
from protocols.messages import AdapterRef, Announcement, BlobRef, Receipt
from protocols.policy import Extended
from swarm.storage import StepRecord
from tests.samples import OTHER_TRAINER_ID, OWNER, OWNER_ID, RUN, STRANGER_ID, TRAINER
from tests.test_ingest import Door, group_of

WORKERS = (STRANGER_ID, OTHER_TRAINER_ID, OWNER_ID)


class SmallTrainer(Door):
    """The trainer's loop without a learner: the same calls to door, store, chain and record, in the same order."""

    def __init__(self, folder: Path, max_lag: int, batch_groups: int, sweeps: bool = True) -> None:
        super().__init__(folder, max_lag, batch_groups)
        identity: Any = SimpleNamespace(key=TRAINER)
        self.record = Record(identity, self.store, folder)
        self.sweeps = sweeps
        self.steps = 0
        self.trained: list[tuple[int, Queued]] = []
        """(steps done, group) of everything that was consumed."""

    async def open(self) -> None:
        """From disk, as the last process left it."""
        if not await self.store.chain():
            assert self.chain.head is not None
            await self.record.set_manifest(seal(OWNER, self.chain.manifest), -1)
            await self.store.extend_chain([(0, self.chain.head.raw)])
        for raw in (await self.store.chain())[1:]:
            self.extend(raw)
        self.steps = self.ingest.steps_done = max(self.chain.version, 0)
        consumed = [group for state in ("trained", "stale") for group in await self.store.groups(state)]
        self.intake.restore(await self.store.groups("queued"), consumed)
        for producer, counter in (await self.store.next_counters()).items():
            self.intake.used(producer, counter)
        await self.record.restore(self.chain, self.steps)

    def extend(self, raw: bytes) -> None:
        assert isinstance(self.chain.extend(unseal(raw, Announcement)), Extended)

    async def step(self) -> bool:
        """Consume one batch, if there is one, and announce the next version."""
        batch = self.intake.take(self.steps)
        if batch is not None:
            await self.set_stale(batch.stale)
        if batch is None or not batch.groups:
            return False
        step = self.steps + 1
        consumed = [Consumed(each.digest, each.producer, each.oldest_version, self.steps) for each in batch.groups]
        consumed.sort(key=lambda each: each.digest)
        adapter = AdapterRef(step.to_bytes(32, "big"), BlobRef(bytes(32), 100))
        sealed = self.record.announcement(self.chain, step, adapter, consumed, {})
        digests = tuple(each.digest for each in batch.groups)
        await self.store.commit_step(StepRecord(step, f"step-{step}", bytes(32), digests, (step, sealed.raw)))
        self.intake.settle("trained")
        self.trained += [(self.steps, each) for each in batch.groups]
        self.steps = self.ingest.steps_done = step
        if self.sweeps:
            await self.set_stale(self.intake.sweep(step))
        self.intake.forget(step)
        self.record.append(VersionEntry(sealed.raw, tuple(consumed)))
        self.extend(sealed.raw)
        return True

    async def set_stale(self, groups: tuple[Queued, ...]) -> None:
        await self.store.set_state([each.digest for each in groups], "stale", self.steps)

    @property
    def lags(self) -> list[int]:
        return [step - each.oldest_version for step, each in self.trained]

    def audit(self) -> Audit:
        found = audit(self.record.path.read_bytes(), RUN)
        assert found.ok, found.problems
        return found


@asynccontextmanager
async def started(
    folder: Path, max_lag: int = 2, batch_groups: int = 4, sweeps: bool = True
) -> AsyncIterator[SmallTrainer]:
    trainer = SmallTrainer(folder, max_lag, batch_groups, sweeps)
    await trainer.open()
    try:
        yield trainer
    finally:
        trainer.ingest.close()
        trainer.store.close()


class Flood:
    """Workers that push whatever they like: of any version near the head, many times what is consumed."""

    def __init__(self, seed: int, behind: int) -> None:
        self.rng = random.Random(seed)
        self.behind = behind
        self.counters = Counter(dict.fromkeys(WORKERS, 0))
        self.outcomes: Counter[str] = Counter()

    async def push(self, trainer: SmallTrainer, pushes: int) -> None:
        for _ in range(pushes):
            worker = self.rng.choice(WORKERS)
            groups = []
            for _ in range(self.rng.randint(1, 6)):
                version = max(0, trainer.steps - self.rng.randint(0, self.behind))
                groups.append(group_of(version, self.counters[worker]))
                self.counters[worker] += 1
            receipt = await trainer.receipt(*groups, peer=worker)
            if receipt is not None:
                self.outcomes.update(each.outcome for each in receipt.groups)

    async def train(self, trainer: SmallTrainer, until: int, pushes: int) -> None:
        """So many pushes before each step: fast workers, or a slow trainer."""
        while trainer.steps < until:
            await self.push(trainer, pushes)
            await trainer.step()


@pytest.mark.parametrize("sweeps", [True, False], ids=["gates 2 and 3", "gate 3 alone"])
async def test_b37_the_bound_holds_over_a_restart_with_a_slow_trainer_and_fast_workers(
    tmp_path: Path, sweeps: bool
) -> None:
    # Goal: consumed step - oldest version <= 2 for every trained group, before and after.
    # Method: to v20, stop with a full queue, go on from disk. Workers are so fast that the queue is always full, they
    # keep to no gate 1, and after the restart a step takes three times as long as before.
    flood = Flood(seed=37, behind=4)
    async with started(tmp_path, max_lag=2, sweeps=sweeps) as before:
        await flood.train(before, until=20, pushes=6)
        await flood.push(before, 6)
        left = before.intake.queued
        assert left > before.intake.batch_groups, "something waits over the restart"
    async with started(tmp_path, max_lag=2, sweeps=sweeps) as after:
        assert (after.steps, after.intake.queued) == (20, left)
        await flood.train(after, until=30, pushes=18)
        waited = [each for _, each in after.trained if each.arrived_step is not None and each.arrived_step <= 20]
        assert waited, "groups of before the restart are used, where they are within the bound"
        states = await after.states()
        found = after.audit()
    lags = before.lags + after.lags
    assert max(lags) == 2, "the bound is reached, or this shows nothing"
    assert found.histogram == Counter(lags)
    assert found.groups == states["trained"] == 30 * 4
    assert states["stale"] > 0
    assert after.intake.counts["stale_in_queue"] + before.intake.counts["stale_in_queue"] == states["stale"]
    assert flood.outcomes["accepted"] == sum(states.values()), "every accepted group is trained, stale or waits"


async def test_without_gate_3_the_same_flood_breaks_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The case above can fail: a gate that lets all pass trains on old groups, and the audit says so.
    monkeypatch.setattr(delivery, "within_bound", lambda steps_done, oldest_version, max_lag: True)
    flood = Flood(seed=37, behind=4)
    async with started(tmp_path, max_lag=2, sweeps=False) as trainer:
        with pytest.raises(PeerFault, match="bound broken"):  # no chain takes such a version, not even our own
            await flood.train(trainer, until=8, pushes=6)
        assert max(trainer.lags) > 2
        assert "lag over the bound" in audit(trainer.record.path.read_bytes(), RUN).problems[0]


async def test_b38_two_thousand_groups_that_nobody_asked_for(tmp_path: Path) -> None:
    # Goal: with S = 0, each is answered with a reason, memory is bounded, and none is trained over the bound.
    # Method: one worker sends 2000 groups of v0, in pushes of 20, while an honest one takes the trainer from v0 to v3.
    # What is refused or left out is sent again, until everything has its receipt.
    waiting = list(range(2000))
    outcomes: dict[int, str] = {}
    reasons: Counter[str] = Counter()

    async def push_all(trainer: SmallTrainer) -> None:
        for at in range(0, len(waiting), 20):
            receipt = await trainer.receipt(*(group_of(0, counter) for counter in waiting[at : at + 20]))
            for each in receipt.groups if receipt is not None else ():
                outcomes[each.counter] = each.outcome  # the last word counts
                reasons[each.reason] += 1
        waiting[:] = [counter for counter in waiting if counter not in outcomes]

    async with started(tmp_path, max_lag=0) as trainer:
        half = QUEUE_BATCHES_MAX * trainer.intake.batch_groups // 2
        await push_all(trainer)
        assert trainer.intake.queued == half
        assert len(waiting) == 2000 - half
        assert set(trainer.ingest.refusals) == {"queue share"}
        assert len(trainer.intake._seen) == half, "what was turned away leaves no memory"
        assert await trainer.step()
        for version in (1, 2):
            honest = await trainer.receipt(
                *(group_of(version, 4 * version + each) for each in range(4)), peer=OTHER_TRAINER_ID
            )
            assert honest is not None
            assert [each.outcome for each in honest.groups] == ["accepted"] * 4, "the flood shuts nobody out"
            assert await trainer.step()
            await push_all(trainer)
        assert trainer.steps == 3
        assert waiting == []
        assert trainer.lags == [0] * 12
        assert Counter(outcomes.values()) == {"accepted": 4, "stale": 1996}
        assert set(reasons) == {"", "lag 2 over 0", "stale in queue: lag 1 over 0"}
        assert reasons["stale in queue: lag 1 over 0"] == half - 4
        assert await trainer.states() == {"trained": 12, "stale": half - 4}
        assert (trainer.intake.queued, trainer.intake._held, trainer.intake._later) == (0, {}, {})
        assert len(trainer.intake._seen) == 0
        assert trainer.audit().histogram == {0: 12}


async def test_what_is_swept_and_never_asked_for_stays_bounded(tmp_path: Path) -> None:
    async with started(tmp_path, max_lag=0, batch_groups=200) as trainer:
        for step in range(1, 4):
            for at in range(0, 600, 200):
                groups = (group_of(trainer.steps, step * 1000 + at + each) for each in range(200))
                assert await trainer.receipt(*groups) is not None
            assert await trainer.step()
            assert len(trainer.intake._later[STRANGER_ID]) == LATER_OUTCOMES_MAX, "of the 400 that were swept"
        assert trainer.intake.counts["stale_in_queue"] == 3 * 400


@pytest.mark.parametrize("refresh_gap", [0, 1])
async def test_sequential_mode_consumes_nothing_older_than_the_refresh_gap(tmp_path: Path, refresh_gap: int) -> None:
    flood = Flood(seed=1, behind=4)
    async with started(tmp_path, max_lag=4) as trainer:
        trainer.intake.limit(refresh_gap)
        await flood.train(trainer, until=6, pushes=4)
        assert max(trainer.lags) == refresh_gap
        trainer.intake.limit(4)  # the coordinator has chosen the other mode
        await flood.train(trainer, until=12, pushes=4)
        assert max(trainer.lags) == 4
        assert trainer.audit().max_lag == 4


async def test_what_a_trainer_counts_adds_up_for_each_producer(tmp_path: Path) -> None:
    # Goal: accepted in receipts, less what receipts revise, is what is trained or still waits.
    flood = Flood(seed=5, behind=3)
    last: dict[tuple[str, int], str] = {}

    class Remembering(SmallTrainer):
        async def receipt(self, *groups: Any, peer: str = STRANGER_ID) -> Receipt | None:
            receipt = await super().receipt(*groups, peer=peer)
            for each in receipt.groups if receipt is not None else ():
                last[peer, each.counter] = each.outcome
            return receipt

    trainer = Remembering(tmp_path, 1, 4)
    await trainer.open()
    await flood.train(trainer, until=10, pushes=4)
    trainer.intake.limit(0)
    for worker in WORKERS:
        await trainer.receipt(peer=worker)  # an empty push fetches what is still to be told
    for worker in WORKERS:
        accepted = {counter for (peer, counter), outcome in last.items() if (peer, outcome) == (worker, "accepted")}
        used = [*await trainer.store.groups("trained"), *await trainer.store.groups("queued")]
        assert accepted == {each.counter for each in used if each.producer == worker}
    trainer.ingest.close()
    trainer.store.close()
