"""The trainer's door for rollouts and the producer's outbox, without a model and without a network."""

import asyncio
import math
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peers.environments import Problem, Scored, Unscored
from peers.inference import InferenceOptions, InferencePeer
from peers.ingest import Checker, Ingest
from protocols.delivery import INVALID_MAX, PUSH_GROUPS_MAX, QUEUE_BATCHES_MAX, Intake, Queued
from protocols.envelopes import seal, unseal
from protocols.faults import PeerFault, TransportFault
from protocols.messages import Envelopes, PushRollouts, Receipt, Refused, Reply, RolloutBatch, RolloutGroup
from protocols.policy import Chain
from protocols.rollouts import group_digest, pack_floats, pack_ids
from swarm.storage import AcceptedGroup, PeerStore, TrainerStore
from tests.samples import (
    EOS,
    OTHER_RUN,
    OTHER_TRAINER,
    OTHER_TRAINER_ID,
    OWNER,
    OWNER_ID,
    RULES,
    RUN,
    STRANGER,
    STRANGER_ID,
    TRAINER,
    TRAINER_ID,
    announcement,
    envelope_of,
    group,
    manifest,
)

BATCH = 2
PRODUCERS = {STRANGER_ID: STRANGER, OTHER_TRAINER_ID: OTHER_TRAINER, OWNER_ID: OWNER, TRAINER_ID: TRAINER}


class Tokenizer:
    eos_ids = RULES.eos_ids
    pad_id = EOS
    vocab_size = RULES.vocab_size

    def encode(self, text: str) -> tuple[int, ...]:
        return (1, 2, 3)

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class Environment:
    """An answer is worth 1 if it begins with a 1; one that begins with a 4 has no score."""

    def problem(self, seed: int) -> Problem:
        return Problem(f"question {seed}", seed)

    def score(self, problem: Problem, completion: str) -> Scored | Unscored:
        return Unscored("no judge") if completion.startswith("4") else Scored(float(completion.startswith("1")))


class Door:
    """An ingest over a real store."""

    def __init__(self, folder: Path, max_lag: int = 2, batch_groups: int = BATCH) -> None:
        self.warnings: list[tuple[str, str]] = []
        self.store = TrainerStore(folder / "trainer.sqlite")
        self.chain = Chain(manifest(trainers=(TRAINER_ID,), max_lag=max_lag))
        self.chain.extend(announcement(0, bound=max_lag))
        self.intake = Intake(max_lag=max_lag, batch_groups=batch_groups)
        node: Any = SimpleNamespace(
            identity=SimpleNamespace(key=TRAINER),
            warn=lambda code, text: self.warnings.append((code, text)),
            neighbours={},
        )
        checker = Checker(self.chain.manifest, Environment(), Tokenizer())
        self.ingest = Ingest(node, self.intake, self.store, checker, self.chain)

    async def reply(self, *groups: RolloutGroup, key: Ed25519PrivateKey = STRANGER, peer: str = STRANGER_ID) -> Reply:
        return await self.ingest.push(PushRollouts(seal(key, RolloutBatch(RUN, groups)).raw), peer)

    async def receipt(self, *groups: RolloutGroup, peer: str = STRANGER_ID) -> Receipt | None:
        """What a push of this peer is answered; None for a refusal."""
        reply = await self.reply(*groups, key=PRODUCERS[peer], peer=peer)
        if isinstance(reply, Refused):
            return None
        assert isinstance(reply, Envelopes), reply
        receipt = unseal(reply.envelopes[0], Receipt)
        assert (receipt.sender, receipt.message.producer) == (TRAINER_ID, peer)
        return receipt.message

    async def outcomes(self, *groups: RolloutGroup) -> list[tuple[str, str]]:
        receipt = await self.receipt(*groups)
        assert receipt is not None
        assert [each.digest for each in receipt.groups] == [group_digest(STRANGER_ID, each) for each in groups]
        return [(each.outcome, each.reason) for each in receipt.groups]

    async def fill(self) -> None:
        """Until nobody is let in, by everybody but the stranger: the tests' own producer."""
        for peer in PRODUCERS.keys() - {STRANGER_ID}:
            await self.receipt(*(group(counter=number) for number in range(PUSH_GROUPS_MAX)), peer=peer)
        assert self.intake.queued == QUEUE_BATCHES_MAX * self.intake.batch_groups

    async def states(self) -> dict[str, int]:
        return await self.store.counts()

    def limit_disk(self, pages: int) -> None:
        query = f"PRAGMA max_page_count={pages}"
        self.store._thread.submit(lambda: self.store._db.execute(query).fetchone()).result()

    async def fill_disk(self) -> None:
        (pages,) = await self.store.run(lambda db: db.execute("PRAGMA page_count").fetchone())
        self.limit_disk(pages)


def group_of(version: int, counter: int) -> RolloutGroup:
    """A group that was written under this version."""
    return group(counter=counter, oldest_version=version, newest_version=version, adapter=version.to_bytes(32, "big"))


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    made = Door(tmp_path)
    yield made
    made.ingest.close()
    made.store.close()


# ---------------------------------------------------------------------- content


async def test_a_good_group_is_accepted_with_the_rewards_that_we_compute(door: Door) -> None:
    boast = group(rewards=(1.0, 1.0))
    assert await door.outcomes(group(counter=1), msgspec.structs.replace(boast, counter=2)) == [("accepted", "")] * 2
    assert door.ingest.checker.mismatches == Counter({STRANGER_ID: 1})
    digests = [queued.digest for queued in await door.store.groups("queued")]
    trained = await door.ingest.training_groups(digests)
    assert [each.rewards for each in trained] == [(1.0, None), (1.0, None)], "never the producer's own, never 0"
    assert trained[0].completions == ((1, 2, EOS), (4, 5, 6, 7))
    assert trained[0].logprobs == ((-0.5,) * 3, (-0.5,) * 4)
    assert door.ingest.arrived.is_set()


INVALID = {
    "log-probability not finite": {"logprobs": pack_floats([-0.5] * 6 + [math.nan])},
    "log-probability above 0": {"logprobs": pack_floats([0.3] + [-0.5] * 6)},
    "lengths disagree": {"logprobs": pack_floats([-0.5] * 6)},
    "malformed group": {"logprobs": b"text"[:3]},
    "wrong group size": {"lengths": (3,)},
    "token outside the vocabulary": {"token_ids": pack_ids([1, 2, EOS, 4, 5, 6, 10])},
    "tokens after the end": {"token_ids": pack_ids([1, EOS, EOS, 4, 5, 6, 7])},
    "wrong ending": {"truncated": (True, True)},
    "completion length": {"lengths": (0, 7)},
    "reward not finite": {"rewards": (math.inf, None)},
    "wrong sampling": {"temperature": 0.7},
    "version span": {"oldest_version": 1},
    "unknown version": {"oldest_version": 5, "newest_version": 5},
    "wrong adapter": {"adapter": bytes([1]) * 32},
    "wrong prompt": {"prompt_ids": pack_ids([1, 2])},
    "prompt length": {"prompt_ids": b""},
}


@pytest.mark.parametrize("reason", INVALID)
async def test_b59_a_bad_group_is_invalid_for_a_reason_and_the_good_ones_beside_it_are_taken(
    door: Door, reason: str
) -> None:
    bad = group(counter=1, **INVALID[reason])
    assert await door.outcomes(group(counter=0), bad, group(counter=2)) == [
        ("accepted", ""),
        ("invalid", reason),
        ("accepted", ""),
    ]
    assert door.intake.reasons == Counter({reason: 1})
    assert await door.states() == {"queued": 2}


@pytest.mark.parametrize("value", [-math.inf, math.inf, -math.nan])
async def test_b59_infinities_are_no_log_probabilities(door: Door, value: float) -> None:
    bad = group(logprobs=pack_floats([value] + [-0.5] * 6))
    assert await door.outcomes(bad) == [("invalid", "log-probability not finite")]


@pytest.mark.parametrize("value", [None, "x", [0.1]])
async def test_b59_log_probabilities_of_another_type_do_not_even_decode(door: Door, value: object) -> None:
    fields = msgspec.to_builtins(RolloutBatch(RUN, (group(),)), builtin_types=(bytes,))
    fields["groups"][0]["logprobs"] = value
    raw = envelope_of(RolloutBatch, msgspec.msgpack.encode(fields))
    assert await door.ingest.push(PushRollouts(raw), STRANGER_ID) == Refused("malformed envelope")
    assert door.ingest.refusals == Counter({"malformed envelope": 1})


async def test_b59_too_many_invalid_groups_end_the_hearing_of_this_peer_alone(door: Door) -> None:
    bad = [group(counter=number, logprobs=pack_floats([math.nan] * 7)) for number in range(INVALID_MAX)]
    assert {outcome for outcome, _ in await door.outcomes(*bad)} == {"invalid"}
    assert await door.reply(group(counter=100)) == Refused("quarantined")
    assert door.ingest.refusals == Counter({"quarantined": 1})
    reply = await door.reply(group(counter=100), key=OTHER_TRAINER, peer=OTHER_TRAINER_ID)
    assert isinstance(reply, Envelopes), "the trainer goes on with the others"
    assert await door.states() == {"queued": 1}


# ---------------------------------------------------------------------- who and where


async def test_b101_a_batch_in_another_peers_name_or_of_another_run_is_refused(door: Door) -> None:
    assert await door.reply(group(), key=OTHER_TRAINER) == Refused("sender is not the peer")
    foreign = seal(STRANGER, RolloutBatch(OTHER_RUN, (group(),))).raw
    assert await door.ingest.push(PushRollouts(foreign), STRANGER_ID) == Refused("foreign run")
    forged = seal(STRANGER, RolloutBatch(RUN, (group(),))).raw
    assert await door.ingest.push(PushRollouts(forged[:-1] + b"\x00"), STRANGER_ID) == Refused("bad signature")
    assert await door.ingest.push(PushRollouts(b"\x91" * 100_000), STRANGER_ID) == Refused("malformed envelope")
    assert door.ingest.refusals.total() == 4
    assert await door.states() == {}


async def test_a_lost_receipt_costs_nothing_the_same_push_is_a_duplicate_and_trained_once(door: Door) -> None:
    push = [group(counter=number) for number in range(BATCH)]
    assert await door.outcomes(*push) == [("accepted", "")] * BATCH
    assert await door.outcomes(*push) == [("duplicate", "")] * BATCH
    batch = door.intake.take(0)
    assert batch is not None
    assert len(batch.groups) == BATCH
    assert await door.outcomes(*push) == [("duplicate", "")] * BATCH, "also while the step is running"
    door.intake.settle("trained")
    assert await door.outcomes(*push) == [("duplicate", "")] * BATCH
    assert door.intake.take(0) is None
    assert await door.states() == {"queued": BATCH}


async def test_a_producer_that_hangs_up_at_any_moment_tears_nothing_apart(door: Door) -> None:
    # Goal: whenever the call is given up, what the intake counts as queued is on disk.
    # Method: hang up after 0, 1, 2, ... turns of the loop, with the database's thread held back meanwhile.
    for turns in range(24):
        hold = threading.Event()
        door.store._thread.submit(hold.wait)
        push = asyncio.create_task(door.reply(group(counter=turns)))
        for _ in range(turns):
            await asyncio.sleep(0.001 if turns % 2 else 0)
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        hold.set()
        await asyncio.gather(*door.ingest._judging)
        assert door.intake.queued == (await door.states()).get("queued", 0)
        if door.intake.queued >= BATCH:
            batch = door.intake.take(0)
            assert batch is not None
            assert len(await door.ingest.training_groups([each.digest for each in batch.groups])) == BATCH
            await door.store.set_state([each.digest for each in batch.groups], "no_signal", 0)
            door.intake.settle("no_signal")
    assert door.intake.counts["accepted"] > 0


async def test_another_group_under_a_used_counter_is_not_taken(door: Door) -> None:
    assert await door.outcomes(group()) == [("accepted", "")]
    assert await door.outcomes(group(rewards=(0.5, None))) == [("duplicate", "counter used")]
    twice = group(counter=1)
    assert await door.outcomes(twice, twice) == [("accepted", ""), ("duplicate", "")]


async def test_b38_a_flood_is_refused_with_its_reason_and_leaves_room_for_others(door: Door) -> None:
    # 2000 groups that nobody asked for, in parallel pushes, while nothing is trained.
    groups = [group(counter=number) for number in range(2000)]
    replies = await asyncio.gather(*(door.reply(*groups[at : at + 20]) for at in range(0, 2000, 20)))
    taken = [unseal(each.envelopes[0], Receipt).message for each in replies if isinstance(each, Envelopes)]
    assert door.ingest.refusals == Counter({"queue share": 100 - len(taken)})
    assert sum(len(each.groups) for each in taken) == door.intake.queued == QUEUE_BATCHES_MAX * BATCH // 2
    assert await door.states() == {"queued": door.intake.queued}
    assert await door.reply(*groups[: PUSH_GROUPS_MAX + 1]) == Refused("push too large")
    await door.fill()
    assert await door.reply(group(counter=5000)) == Refused("queue full")
    assert door.intake.counts["received"] == QUEUE_BATCHES_MAX * BATCH, "what is turned away is not judged"


async def test_groups_that_do_not_fit_are_left_out_of_the_receipt_and_come_again(door: Door) -> None:
    half = QUEUE_BATCHES_MAX * BATCH // 2
    bad = group(counter=99, logprobs=pack_floats([math.nan] * 7))
    push = [group(counter=number) for number in (*range(half + 3), half + 2)]
    receipt = await door.receipt(*push, bad, push[0])
    assert receipt is not None
    accepted = [(number, "accepted") for number in range(half)]
    judged = [(each.counter, each.outcome) for each in receipt.groups]
    assert judged == [*accepted, (99, "invalid"), (0, "duplicate")], "only what needs room waits for it"
    assert door.intake.counts == Counter(received=half + 2, accepted=half, invalid=1, duplicate=1)
    assert await door.states() == {"queued": half}
    assert await door.receipt(*push[half:]) is None
    assert door.intake.take(0) is not None
    door.intake.settle("trained")
    receipt = await door.receipt(*push[half:])
    assert receipt is not None
    assert [(each.counter, each.outcome) for each in receipt.groups] == [(half, "accepted"), (half + 1, "accepted")]


async def test_whoever_counts_deliveries_hears_of_groups_that_are_on_disk(door: Door) -> None:
    heard: list[tuple[str, list[int], int]] = []

    def on_accepted(producer: str, groups: Sequence[Queued]) -> None:
        with closing(sqlite3.connect(door.store.path)) as other:
            (stored,) = other.execute("SELECT count(*) FROM groups").fetchone()
        heard.append((producer, [each.counter for each in groups], stored))

    door.ingest.on_accepted = on_accepted
    bad = group(counter=1, logprobs=pack_floats([math.nan] * 7))
    await door.outcomes(group(counter=0), bad, group(counter=2))
    await door.outcomes(group(counter=0))
    await door.receipt(group(counter=0), peer=OWNER_ID)

    async def full(groups: list[AcceptedGroup]) -> None:
        raise OSError("database or disk is full")

    door.store.add_groups = full  # type: ignore[method-assign]
    assert await door.reply(group(counter=3)) == Refused("trainer cannot store")
    assert heard == [(STRANGER_ID, [0, 2], 2), (OWNER_ID, [0], 3)], "only what was accepted"


async def test_b102_a_batch_is_used_once_by_its_own_producer_in_its_own_run(door: Door, tmp_path: Path) -> None:
    # Goal: a recorded push is worth nothing to whoever plays it again, however late.
    async def play(to: Door, run: str = RUN, peer: str = STRANGER_ID) -> list[tuple[str, str]] | Refused:
        recorded = seal(STRANGER, RolloutBatch(run, (group(counter=1), group(counter=2)))).raw
        reply = await to.ingest.push(PushRollouts(recorded), peer)
        if isinstance(reply, Refused):
            return reply
        assert isinstance(reply, Envelopes)
        return [(each.outcome, each.reason) for each in unseal(reply.envelopes[0], Receipt).message.groups]

    assert await play(door, run=OTHER_RUN) == Refused("foreign run")
    assert await play(door, peer=OTHER_TRAINER_ID) == Refused("sender is not the peer")
    assert await play(door) == [("accepted", "")] * 2
    assert await play(door) == [("duplicate", "")] * 2, "while it waits"
    batch = door.intake.take(0)
    assert batch is not None
    await door.store.set_state([each.digest for each in batch.groups], "no_signal", 0)
    door.intake.settle("no_signal")
    assert await play(door) == [("duplicate", "")] * 2, "when it is consumed"
    restarted = Door(tmp_path)
    restarted.intake.restore([], await restarted.store.groups("no_signal"))
    assert await play(restarted) == [("duplicate", "")] * 2, "after a restart"
    restarted.ingest.close()
    restarted.store.close()
    door.ingest.steps_done = 3
    door.intake.forget(3)
    assert await play(door) == [("stale", "lag 3 over 2")] * 2, "when it is forgotten"
    assert await door.states() == {"no_signal": 2}


async def test_a_push_after_the_end_of_the_run_is_told_so(door: Door) -> None:
    door.ingest.closed = True
    assert await door.reply(group()) == Refused("run ended")


async def test_a_push_that_is_checked_while_the_run_ends_is_not_stored(door: Door) -> None:
    async with door.ingest.lock:
        push = asyncio.create_task(door.reply(group()))
        await asyncio.sleep(0.05)
        door.ingest.closed = True
    assert await push == Refused("run ended")
    assert await door.states() == {}


# ---------------------------------------------------------------------- the disk


async def test_b35_a_full_disk_refuses_loses_nothing_and_recovers(tmp_path: Path) -> None:
    door = Door(tmp_path, batch_groups=64)
    assert await door.outcomes(group(counter=0)) == [("accepted", "")]
    await door.fill_disk()
    many = [group(counter=number, engine="x" * 128) for number in range(1, 200)]
    assert await door.reply(*many) == Refused("trainer cannot store")
    assert [code for code, _ in door.warnings] == ["cannot store rollouts"]
    assert "full" in door.warnings[0][1]
    assert door.intake.queued == 1
    door.limit_disk(1_000_000)
    assert await door.outcomes(*many) == [("accepted", "")] * 199, "as if they had never come"
    assert await door.states() == {"queued": 200}
    door.ingest.close()
    door.store.close()


async def test_what_was_accepted_is_known_again_after_a_restart(door: Door) -> None:
    push = [group(counter=number) for number in range(3)]
    await door.outcomes(*push)
    door.intake = door.ingest.intake = Intake(max_lag=2, batch_groups=BATCH)
    door.intake.restore(await door.store.groups("queued"), [])
    for producer, counter in (await door.store.next_counters()).items():
        door.intake.used(producer, counter)
    assert await door.outcomes(*push) == [("duplicate", "")] * 3
    assert await door.outcomes(group(counter=3)) == [("accepted", "")]


# ---------------------------------------------------------------------- the producer


class Producer:
    """An inference peer with an outbox on disk and a wire that the test holds."""

    def __init__(self, folder: Path, wire: Callable[[PushRollouts], Any]) -> None:
        self.store = PeerStore(folder / "peer.sqlite")
        self.said: list[tuple[int, int]] = []

        async def trainer_said(step: int, queued: int) -> None:
            self.said.append((step, queued))

        follower: Any = SimpleNamespace(
            next_counter=0,
            chain=None,
            manifest=manifest(trainers=(TRAINER_ID,)),
            refusals=Counter(),
            changed=asyncio.Condition(),
            heartbeats=SimpleNamespace(trainer_said=trainer_said, hurry=lambda: None, lost_targets={}),
        )
        self.follower = follower

        async def ask(peer_id: str, request: PushRollouts, timeout_s: float) -> Reply:
            assert peer_id == TRAINER_ID
            return await wire(request)

        node: Any = SimpleNamespace(
            followers={RUN: follower},
            ask=ask,
            identity=SimpleNamespace(key=STRANGER),
            peer_id=STRANGER_ID,
            warn=lambda code, text: None,
            metrics=SimpleNamespace(emit=lambda *arguments, **fields: None),
        )
        self.peer = InferencePeer(node, InferenceOptions(home=folder, run=RUN, bootstrap=()))
        self.peer._store = self.store

    async def make(self, *groups: RolloutGroup) -> None:
        await self.peer._keep([(each.counter, msgspec.msgpack.encode(each)) for each in groups])

    async def push(self) -> None:
        """Push once, whatever the back-off."""
        await self.peer._push([counter for counter, _ in await self.store.outbox()])


@pytest.fixture
async def wired(door: Door, tmp_path: Path) -> AsyncIterator[tuple[Door, Producer, list[str]]]:
    """A producer whose pushes reach the door; `losses` says what happens to the next answers."""
    losses: list[str] = []

    async def wire(request: PushRollouts) -> Reply:
        loss = losses.pop(0) if losses else ""
        if loss == "push":
            raise TransportFault("timeout")
        reply = await door.ingest.push(request, STRANGER_ID)
        if loss == "receipt":
            raise TransportFault("timeout")
        return reply

    producer = Producer(tmp_path, wire)
    yield door, producer, losses
    await producer.peer.aclose()
    producer.store.close()


async def test_a_lost_push_and_a_lost_receipt_leave_the_group_in_the_outbox(
    wired: tuple[Door, Producer, list[str]],
) -> None:
    door, producer, losses = wired
    await producer.make(group(counter=5), group(counter=6))
    losses += ["push", "receipt"]
    for _ in range(2):
        await producer.push()
        assert [counter for counter, _ in await producer.store.outbox()] == [5, 6]
    await producer.push()
    assert await producer.store.outbox() == []
    assert len(producer.peer.outbox) == 0
    assert producer.peer.outbox.counts == Counter(duplicate=2)
    assert await door.states() == {"queued": 2}
    assert producer.said == [(0, 2)]


async def test_a_full_queue_makes_the_producer_wait_and_is_accepted_later(
    wired: tuple[Door, Producer, list[str]],
) -> None:
    door, producer, _ = wired
    await door.fill()
    await producer.make(group(counter=1))
    await producer.push()
    assert producer.peer.outbox.next_push(0.0, 10**6) == [], "backs off"
    assert len(producer.peer.outbox) == 1
    assert door.intake.take(0) is not None
    door.intake.settle("trained")
    await producer.push()
    assert producer.peer.outbox.counts == Counter(accepted=1)


async def test_b39_a_group_that_waits_too_long_is_stale_and_its_producer_hears_why(
    wired: tuple[Door, Producer, list[str]],
) -> None:
    # Goal: staleness is counted while a finished group waits, too. Method: a group is done at v0; the batch is not full
    # until v5; nobody sweeps, so that only gate 3 is there.
    door, producer, _ = wired
    await producer.make(group(counter=1))
    await producer.push()
    assert producer.peer.outbox.counts == Counter(accepted=1)
    for version in range(1, 6):
        door.chain.extend(announcement(version, door.chain.head_hash))
    for step, counter, version in ((4, 0, 3), (5, 1, 4)):
        door.ingest.steps_done = step
        await door.receipt(group_of(version, counter), peer=OWNER_ID)
    batch = door.intake.take(5)
    assert batch is not None
    assert [(each.producer, each.counter) for each in batch.stale] == [(STRANGER_ID, 1)]
    assert [(each.lag_in_flight, each.lag_in_queue(5)) for each in batch.groups] == [(1, 1), (1, 0)]
    await door.store.set_state([each.digest for each in batch.stale], "stale", 5)
    receipt = await door.receipt(group_of(5, 2))
    assert receipt is not None
    assert [(each.counter, each.outcome, each.reason) for each in receipt.groups] == [
        (2, "accepted", ""),
        (1, "stale", "stale in queue: lag 5 over 2"),
    ]
    assert producer.peer.outbox.receipted(receipt) == []
    assert producer.peer.outbox.counts == Counter(stale=1)
    assert await door.states() == {"queued": 3, "stale": 1}
    assert [each.arrived_step for each in await door.store.groups("queued")] == [4, 5, 5]
    assert door.intake.counts["stale_in_queue"] == 1


async def test_a_quarantined_producer_stops_with_a_code(wired: tuple[Door, Producer, list[str]]) -> None:
    door, producer, _ = wired
    await door.outcomes(*[group(counter=n, logprobs=pack_floats([math.nan] * 7)) for n in range(INVALID_MAX)])
    await producer.make(group(counter=1000))
    with pytest.raises(TransportFault) as fault:
        await producer.push()
    assert fault.value.code == "banned"


async def test_a_receipt_of_somebody_else_settles_nothing(wired: tuple[Door, Producer, list[str]]) -> None:
    _, producer, _ = wired
    await producer.make(group(counter=1))
    for key, receipt in (
        (STRANGER, Receipt(RUN, STRANGER_ID, (), 0, 0)),
        (TRAINER, Receipt(OTHER_RUN, STRANGER_ID, (), 0, 0)),
        (TRAINER, Receipt(RUN, TRAINER_ID, (), 0, 0)),
    ):
        with pytest.raises(PeerFault, match="foreign receipt"):
            await producer.peer._receipted(seal(key, receipt), TRAINER_ID)
    assert len(producer.peer.outbox) == 1


async def test_b35_a_full_disk_at_the_producer_does_not_end_it(wired: tuple[Door, Producer, list[str]]) -> None:
    # The receipt is in; only its record on the disk fails. What stays there is sent again after a restart.
    door, producer, _ = wired
    await producer.make(group(counter=1))

    async def full(counters: list[int]) -> None:
        raise OSError("database or disk is full")

    producer.store.remove_from_outbox = full  # type: ignore[method-assign]
    await producer.push()
    assert len(producer.peer.outbox) == 0
    assert producer.said == [(0, 1)]
    assert await door.states() == {"queued": 1}
