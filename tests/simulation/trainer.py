"""The trainer: takes rollouts, trains, checkpoints, commits, announces; may die between any two of these.

It keeps its disk whatever happens. In sequential mode it calls rounds, otherwise it says what it waits for.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.adapters import Tensor, adapter_digest, decode_adapter, encode_adapter
from protocols.delivery import Batch, Queued
from protocols.envelopes import Sealed
from protocols.faults import PeerFault
from protocols.ledger import MAGIC, Consumed, EndEntry, ManifestEntry, VersionEntry, frame, trained_on
from protocols.messages import (
    AdapterRef,
    Announcement,
    Envelopes,
    GroupReceipt,
    Heartbeat,
    HeartbeatReply,
    PushRollouts,
    Receipt,
    Reply,
    RolloutBatch,
    RolloutGroup,
    RoundCall,
    RoundReply,
    RunEnd,
    encode,
)
from protocols.policy import Extended
from protocols.presence import SILENT_S
from protocols.rollouts import unpack_group
from protocols.rounds import STALL_MIN_S, Round
from protocols.rounds import Call as RoundShare
from protocols.transfer import blob_ref, chunk_hashes
from tests.simulation.candidate import Candidate
from tests.simulation.node import Call, Parts
from tests.simulation.world import RULES, RUN, World

LOOK_S = 1.0  # how often a trainer that waits looks after its round


@lru_cache(512)
def adapter_blob(version: int, salt: int = 0) -> bytes:
    """The adapter of a version."""
    return encode_adapter({"w": Tensor("F32", (2,), struct.pack("<2f", version, salt))})


@lru_cache(512)
def adapter_ref(version: int, salt: int = 0) -> AdapterRef:
    """What an announcement says of it."""
    blob = adapter_blob(version, salt)
    return AdapterRef(adapter_digest(decode_adapter(blob)), blob_ref(blob))


@dataclass
class Row:
    """A group on the trainer's disk."""

    queued: Queued
    state: str = "queued"
    step: int = -1


class Trainer(Candidate):
    """See the module's docstring."""

    role: Any = "trainer"

    def __init__(self, world: World, key: Ed25519PrivateKey, parts: Parts) -> None:
        super().__init__(world, key, parts)
        self.rows: dict[bytes, Row] = {}  # on disk
        self.used: set[tuple[str, int]] = set()  # on disk: a unique index, as in swarm/storage.py
        self.steps = 0  # on disk
        self.checkpoints = {0}  # on disk
        self.end: Sealed[RunEnd] | None = None  # on disk
        self.trained: list[tuple[bytes, int]] = []  # digest, steps done: each time a commit reached the disk
        self.sweeps = self.rng.random() < 0.5  # gate 3 alone must hold the bound
        self.fork_at = self.rng.randrange(2, 12) if world.plan.forks else -1
        self.step_s = self.rng.choice((0.2, 0.8, 2.0))

    def lose(self) -> None:
        """A trainer keeps its disk."""
        self.crash()

    def start(self) -> None:
        manifest = self.world.manifest.message
        assert self.steps in self.checkpoints, "announced without a checkpoint"
        self.intake = self.parts.intake(max_lag=manifest.max_lag, batch_groups=manifest.learning.batch_groups)
        rows, oldest = self.rows.values(), self.steps - manifest.max_lag
        recent = [row.queued for row in rows if row.state != "queued" and row.queued.oldest_version >= oldest]
        self.intake.restore([row.queued for row in rows if row.state == "queued"], recent)
        for producer, counter in self.used:
            self.intake.used(producer, counter + 1)
        self.busy = self.waits = self.closed = False
        self.rounds = Rounds(self)
        super().start()
        if self.end is not None:
            self.chain.finish(self.end)
            self.closed = True
        if self.chain.head is None:
            self.publish(0, ())
        self.every(LOOK_S, self.begin)

    # ------------------------------------------------------------------ rollouts in

    def on_push(self, source: str, request: PushRollouts, call: Call) -> None:
        sealed = self.unseal(request.envelope, RolloutBatch)
        if sealed.sender != source or sealed.message.run != RUN:
            raise PeerFault("not yours")
        if self.closed:
            raise PeerFault("run ended")
        groups = sealed.message.groups
        room = self.intake.admit(source, len(groups))
        receipts: list[GroupReceipt] = []
        new: list[Queued] = []
        for group in groups:
            receipt = self.intake.offer(source, group, self.steps, self.inspect(group))
            if receipt.outcome == "accepted" and len(new) == room:
                self.intake.retract([receipt.digest])  # not in the receipt, so that it comes again
                continue
            receipts.append(receipt)
            if receipt.outcome == "accepted":
                new.append(Queued(receipt.digest, source, group.counter, group.oldest_version, self.steps))
        outcomes = (*receipts, *self.intake.later(source))
        sealed_receipt = self.seal(Receipt(RUN, source, outcomes, self.steps, self.intake.queued))

        def answer() -> None:
            call.reply(encode(Envelopes((sealed_receipt.raw,))))
            if new:
                self.rounds.delivered(source, new)
                self.begin()

        self.store(new, answer)

    def inspect(self, group: RolloutGroup) -> PeerFault | None:
        try:
            unpack_group(group, RULES)
            self.chain.check_authorship(group)
        except PeerFault as fault:
            return fault
        return None

    def store(self, new: list[Queued], answer: Callable[[], None]) -> None:
        """Disk first, receipt second."""

        def insert() -> None:
            for queued in new:
                name = (queued.producer, queued.counter)
                assert queued.digest not in self.rows, "stored twice"
                assert name not in self.used, "stored twice"
                self.used.add(name)
                self.rows[queued.digest] = Row(queued)

        self.commit(insert, answer)

    # ------------------------------------------------------------------ training

    def begin(self) -> None:
        """Train if there is a batch; else call for one, or say that we wait."""
        if self.busy or self.chain.head is None or self.closed:
            return
        if self.world.now_s > self.world.plan.rest_s:
            self.finish()
            return
        manifest, sequential = self.world.manifest.message, self.orders.mode == "sequential"
        self.intake.limit(manifest.coordination.refresh_gap if sequential else manifest.max_lag)
        batch = self.intake.take(self.steps)
        if batch is not None:
            self.mark(batch.stale, "stale")
        if batch is not None and batch.groups:
            self.busy, self.waits = True, False
            self.rounds.close()
            self.after(self.step_s * self.rng.uniform(0.5, 1.5), self.train, batch)
        elif sequential:
            self.waits = False
            self.rounds.keep_open(self.chain.version, self.missing)
        elif not self.waits:
            self.waits = True
            self.rounds.close()
            self.hurry()

    @property
    def missing(self) -> int:
        return max(0, self.world.plan.batch_groups - self.intake.queued)

    def mark(self, groups: Iterable[Queued], state: str, then: Callable[[], None] | None = None) -> None:
        digests = [group.digest for group in groups]

        def update() -> None:
            for digest in digests:
                self.rows[digest].state = state

        if digests or then is not None:
            self.commit(update, then)

    def train(self, batch: Batch) -> None:
        if self.rng.random() < 0.1:
            self.mark(batch.groups, "no_signal", lambda: self.idle("no_signal"))
        else:
            self.commit(lambda: self.checkpoints.add(self.steps + 1), lambda: self.advance(batch))

    def advance(self, batch: Batch) -> None:
        """The step, its groups and its announcement become true together."""
        step = self.steps + 1
        if step % self.world.plan.publish_every == 0:
            self.publish(step, batch.groups)
        else:
            self.commit(lambda: self.consume(batch.groups, step), lambda: self.idle("trained"))

    def publish(self, version: int, groups: tuple[Queued, ...]) -> None:
        announcement = self.announcement(version, groups)

        def transaction() -> None:
            self.consume(groups, version)
            self.log.append(announcement.raw)

        def done() -> None:
            try:
                assert isinstance(self.chain.extend(announcement), Extended), "a trainer's own announcement"
            except PeerFault as fault:
                raise AssertionError(f"a trainer refuses itself: {fault}") from fault
            self.announce(announcement)
            self.idle("trained")

        self.commit(transaction, done)

    def consume(self, groups: tuple[Queued, ...], step: int) -> None:
        """On disk: these groups made step number `step`."""
        for group in groups:
            self.rows[group.digest].state, self.rows[group.digest].step = "trained", step - 1
            self.trained.append((group.digest, step - 1))
        self.steps = step

    def idle(self, outcome: str) -> None:
        self.intake.settle(outcome)
        self.intake.forget(self.steps)
        if self.sweeps:
            self.mark(self.intake.sweep(self.steps), "stale")
        self.busy = False
        self.hurry()
        self.begin()

    def finish(self) -> None:
        """Half of the runs end; the others just stop."""
        if self.steps > self.chain.version and not self.chain.equivocations:
            self.busy = True  # the last step is always announced
            self.publish(self.steps, ())
            return
        self.closed = True
        if self.world.seed % 2 and self.end is None and not self.chain.equivocations:
            end = self.seal(RunEnd(RUN, self.chain.version, self.chain.head_hash, 0))
            self.commit(lambda: setattr(self, "end", end), lambda: self.chain.finish(end))

    # ------------------------------------------------------------------ versions out

    def consumed(self, parent: int, version: int, fresh: tuple[Queued, ...] = ()) -> tuple[Consumed, ...]:
        rows = [row for row in self.rows.values() if row.state == "trained" and parent <= row.step < version]
        rows += [Row(queued, "trained", version - 1) for queued in fresh]
        listed = [Consumed(row.queued.digest, row.queued.producer, row.queued.oldest_version, row.step) for row in rows]
        return tuple(sorted(listed, key=lambda group: (group.step, group.digest)))

    def announcement(
        self, version: int, fresh: tuple[Queued, ...], parent: bytes = b"", salt: int = 0
    ) -> Sealed[Announcement]:
        return self.seal(
            Announcement(
                run=RUN,
                version=version,
                parent=parent or self.chain.head_hash,
                adapter=adapter_ref(version, salt),
                trained_on=trained_on(self.consumed(max(self.chain.version, 0), version, fresh)),
                bound=self.world.plan.max_lag,
                created_ms=int(1000 * self.world.now_s),
            ),
        )

    def announce(self, announcement: Sealed[Announcement]) -> None:
        rival = None
        if 0 < self.fork_at <= announcement.message.version:  # once, a dishonest trainer tells two stories
            self.fork_at = -1
            version = announcement.message.version + self.rng.randint(0, 1)  # the same number, or one that skips it
            rival = self.announcement(version, (), announcement.message.parent, salt=1)
            half = [node for at, node in enumerate(self.world.all) if at % 2 and node is not self]
            for node in half:
                self.world.at(self.world.now_s + 0.02, self.world.tell, self.peer_id, [node], rival.raw)
        self.world.gossip(self, announcement.raw)

    def take(self, raw: bytes, source: str) -> bool:
        """Nobody tells a trainer what it has announced."""
        raise PeerFault("not from you")

    def catch_up(self, source: str, first: int | None = None) -> None:
        """Nor does it ask."""

    def on_blob_request(self, root: bytes) -> Any:
        for entry in reversed(self.chain.entries):
            if entry.message.adapter.keyframe.root == root:
                blob = adapter_blob(entry.message.version)
                return len(blob), chunk_hashes(blob), blob
        return None

    def ledger(self) -> bytes:
        """The ledger, written from the disk."""
        parts, parent = [MAGIC, frame(ManifestEntry(self.world.manifest.raw))], 0
        for raw in self.log:
            version = self.unseal(raw, Announcement).message.version
            parts.append(frame(VersionEntry(raw, self.consumed(parent, version))))
            parent = version
        return b"".join(parts + ([frame(EndEntry(self.end.raw))] if self.end else []))

    # ------------------------------------------------------------------ telling others

    def wanted(self) -> int | None:
        """Groups that we wait for, because peers generate on their own."""
        return self.missing if self.waits else None

    def progress(self, source: str) -> tuple[int | None, int | None, int | None, int | None]:
        return self.steps, self.intake.queued, self.wanted(), self.intake.next_counter(source)

    def beat(self) -> Heartbeat:
        return Heartbeat(
            run=RUN,
            session=self.session,
            role="trainer",
            version=self.chain.version if self.chain.version >= 0 else None,
            step=self.steps,
            queued=self.intake.queued,
            step_s=self.step_s,
            wanted=self.wanted(),
        )

    def trainer_answered(self, reply: HeartbeatReply) -> None:
        """Nobody else is the trainer."""

    def news(self) -> None:
        self.begin()


class Rounds:
    """The trainer's rounds of sequential mode, one at a time."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.open: Round | None = None
        self._number = 0
        self._stalls: dict[str, tuple[int, float]] = {}
        """Peers that stalled: how often since they last delivered, and until when nothing is asked of them."""
        self._to_call: dict[str, RoundShare] = {}
        self._calling: set[str] = set()

    def keep_open(self, version: int, missing: int) -> None:
        """Open a round for `missing` groups, or look after the one that is open."""
        trainer = self.trainer
        if self.open is not None and self.open.done:
            self.close()  # what came has grown too old
        if self.open is None:
            self._number = max(self._number + 1, int(trainer.wall_s))  # rises over restarts too
            self.open = trainer.parts.round(self._number, version, missing)
        calls = self.open.peers(self._rates(), trainer.steady_s)
        self._make(calls + self.open.tick(trainer.steady_s))

    def delivered(self, source: str, groups: Sequence[Queued]) -> None:
        self._stalls.pop(source, None)
        if self.open is not None:
            self._make(self.open.delivered(source, len(groups), self.trainer.steady_s))

    def close(self) -> None:
        ended, self.open = self.open, None
        self._to_call = {}
        if ended is None:
            return
        self.trainer.world.counts["rounds"] += 1
        self.trainer.world.counts["groups moved"] += ended.moved
        for peer_id in sorted(ended.stalled):
            times = self._stalls.get(peer_id, (0, 0.0))[0]
            self._stalls[peer_id] = (times + 1, self.trainer.steady_s + STALL_MIN_S * 2**times)

    def _rates(self) -> dict[str, float | None]:
        """Inference peers that are alive, without those that stalled unless there is nobody else."""
        now_s = self.trainer.steady_s
        alive = {
            peer_id: beat
            for peer_id, (beat, heard_s) in self.trainer.neighbours.items()
            if beat.role == "inference" and now_s - heard_s < SILENT_S and not self.trainer.intake.quarantined(peer_id)
        }
        trusted = {peer: beat for peer, beat in alive.items() if self._stalls.get(peer, (0, 0.0))[1] <= now_s} or alive
        return {peer_id: beat.groups_per_s for peer_id, beat in trusted.items()}

    def _make(self, calls: Sequence[RoundShare]) -> None:
        for call in calls:
            self._to_call[call.peer_id] = call
            if call.peer_id not in self._calling:
                self._calling.add(call.peer_id)
                self._call(call.peer_id)

    def _call(self, peer_id: str) -> None:
        call, opened = self._to_call.pop(peer_id, None), self.open
        if call is None or opened is None:
            self._calling.discard(peer_id)
            return
        gap = self.trainer.world.manifest.message.coordination.refresh_gap
        said = RoundCall(run=RUN, number=opened.number, version=opened.version, refresh_gap=gap, count=call.count)

        def answered(reply: Reply | None) -> None:
            taken = reply.taken if isinstance(reply, RoundReply) else 0
            if taken < call.count and self.open is opened:
                self._make(opened.refused(peer_id, taken, self.trainer.steady_s))
            self._call(peer_id)

        self.trainer.request(peer_id, said, answered)
