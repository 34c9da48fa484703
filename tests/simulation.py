"""A swarm in one process on a virtual clock: the real machines of `protocols/`, a made-up network and disk.

    heap of (time, order, action)        same seed, same run, byte for byte
    network: loss, delay, duplication, reordering          disk: a crash keeps a prefix of the writes in flight

One trainer (Intake, Chain, Sessions) and a few producers (Outbox, Chain, Download). Every node crashes now and
then, between any two of its steps, and comes back with what its disk holds. A third of the seeds has a producer
that relabels old rollouts as new and uses counters again; another third has a trainer that forks its chain. After
the storm there is a calm, in which everything must settle; then `check` asks DESIGN section 11.

`python -m tests.simulation SEED` replays a seed that failed.
"""

import heapq
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.adapters import Tensor, adapter_digest, decode_adapter, encode_adapter
from protocols.delivery import Batch, Intake, Outbox, Queued
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.ledger import MAGIC, Consumed, EndEntry, ManifestEntry, VersionEntry, audit, frame, trained_on
from protocols.manifest import LearningSpec, Manifest
from protocols.messages import (
    AdapterRef,
    Announcement,
    Receipt,
    RolloutBatch,
    RolloutGroup,
    RunEnd,
    Sampling,
)
from protocols.policy import Chain, Equivocation, Extended, Gap
from protocols.presence import BEAT_S, SILENT_S, Sessions
from protocols.rollouts import GroupRules, group_digest, pack_floats, pack_ids, unpack_group
from protocols.staleness import room
from protocols.transfer import Download, blob_ref, chunk_hashes

STORM_S, REST_S, END_S = 16.0, 26.0, 32.0  # crashes and losses end; then training; a back-off lasts up to 4 s
DELAY_S = 0.4  # longest way of a message
STEPS, BATCH_GROUPS, EOS = 8, 4, 7
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32) for number in range(9)]
OWNER, TRAINER, *PRODUCERS = KEYS
RUN = run_id_of("sim", public_bytes(OWNER))
TRAINER_ID = peer_id_of(public_bytes(TRAINER))
RULES = GroupRules(Sampling(group_size=2, max_new_tokens=3), vocab_size=8, eos_ids=frozenset({EOS}))

cached_unseal = lru_cache(4096)(unseal)  # a pure function; a copy at every peer need not be verified again


@dataclass(frozen=True)
class Parts:
    """The machines of a run; a mutation test puts a broken one in."""

    intake: type[Intake] = Intake
    chain: type[Chain] = Chain
    trainer: "type[TrainerNode] | None" = None


class Simulation:
    """Clock, network, dice, and what the invariants need to know."""

    def __init__(self, seed: int, parts: Parts, num_peers: int) -> None:
        self.seed, self.parts = seed, parts
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.trace: list[tuple[float, str]] = []
        self.faults: Counter[str] = Counter()
        self.true_oldest: dict[bytes, int] = {}  # group digest -> version that really wrote it
        self.trained: list[tuple[bytes, int]] = []  # digest, steps done: each time a commit reached the disk
        self.receipts: dict[bytes, set[tuple[str, str]]] = {}  # digest -> (outcome, reason) of receipts that arrived
        self.finished: set[bytes] = set()  # groups that a producer deleted after a receipt
        self.verdicts: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.loss, self.twice = self.rng.uniform(0.0, 0.3), self.rng.uniform(0.0, 0.2)
        self.forks, self.liar = seed % 3 == 1, seed % 3 == 2
        publish_every = self.rng.choice((1, 1, 2))
        self.manifest = seal(
            OWNER,
            Manifest(
                run=RUN,
                revision=1,
                trainers=(TRAINER_ID,),
                issued_ms=0,
                max_lag=self.rng.randint(publish_every - 1, 3),  # below, no group could make the second step
                max_steps=STEPS,
                publish_every=publish_every,
                sampling=RULES.sampling,
                learning=LearningSpec(batch_groups=BATCH_GROUPS),
            ),
        )
        self.trainer = (parts.trainer or TrainerNode)(self, TRAINER)
        self.producers = [ProducerNode(self, key) for key in PRODUCERS[: num_peers - 1]]
        self.producers[0].liar = self.liar
        self.nodes: dict[str, Node] = {node.peer_id: node for node in (self.trainer, *self.producers)}

    @property
    def calm(self) -> bool:
        return self.now_s >= STORM_S

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, action))

    def send(self, source: str, target: str, kind: str, body: Any) -> None:
        """Hand over `body` (bytes, or a tuple of them), perhaps twice, perhaps never, in any order."""
        copies = 1 if self.calm else (self.rng.random() >= self.loss) + (self.rng.random() < self.twice)
        for _ in range(copies):
            delay_s = self.rng.uniform(0.01, DELAY_S)
            self.after(delay_s, lambda: self.nodes[target].receive(source, kind, body))

    def run(self) -> None:
        for node in self.nodes.values():
            self.after(self.rng.uniform(0.0, 1.0), node.boot)
            for _ in range(self.rng.randint(0, 3 if node is self.trainer else 2)):
                self.after(self.rng.uniform(1.0, STORM_S - 1), node.crash)
        while self._heap and self._heap[0][0] < END_S:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()


class Node:
    """One process: what it remembers dies with it, what its disk holds does not."""

    def __init__(self, sim: Simulation, key: Ed25519PrivateKey) -> None:
        self.sim, self.key, self.rng = sim, key, sim.rng
        self.peer_id = peer_id_of(public_bytes(key))
        self.life = 0
        self.up = False
        self.log: list[bytes] = []  # on disk: every announcement that changed the chain, in order
        self._writes: list[Callable[[], None]] = []
        self._synced_s = 0.0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later, in this life only."""
        life = self.life
        self.sim.after(delay_s, lambda: action() if self.life == life else None)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s * self.rng.uniform(0.8, 1.2), again)

        self.after(period_s * self.rng.random(), again)

    def commit(self, change: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        """One transaction: durable some time later, after all those before it; then `then`."""
        self._writes.append(change)

        def synced() -> None:
            self._writes.pop(0)()
            then()

        self._synced_s = max(self._synced_s, self.sim.now_s) + self.rng.uniform(0.001, 0.1)
        self.after(self._synced_s - self.sim.now_s, synced)

    def crash(self) -> None:
        """kill -9. Of the writes in flight, any prefix reached the disk."""
        if not self.up:
            return
        self.up, self.life = False, self.life + 1
        for change in self._writes[: self.rng.randint(0, len(self._writes))]:
            change()
        self._writes.clear()
        self._synced_s = 0.0
        self.sim.after(self.rng.uniform(1.5, 6.0), self.boot)

    def boot(self) -> None:
        if not self.up:
            self.up = True
            self.chain = self.sim.parts.chain(self.sim.manifest.message)
            for raw in self.log:
                self.chain.extend(cached_unseal(raw, Announcement))
            self.start()

    def start(self) -> None:
        raise NotImplementedError

    def send(self, target: str, kind: str, body: Any) -> None:
        self.sim.send(self.peer_id, target, kind, body)

    def receive(self, source: str, kind: str, body: Any) -> None:
        """The receive loop: a fault of the peer is counted, anything else is a bug and ends the test."""
        if not self.up:
            return
        self.sim.trace.append((self.sim.now_s, f"{source[-4:]} {kind} {self.peer_id[-4:]}"))
        try:
            getattr(self, f"on_{kind}")(source, body)
        except PeerFault as fault:
            self.sim.faults[fault.reason] += 1

    def on_junk(self, source: str, body: bytes) -> None:
        unseal(body, Announcement)

    def on_chain(self, source: str, first: int) -> None:
        if not 0 <= first < 2**32:
            raise PeerFault("malformed request")
        page = [entry.raw for entry in self.chain.since(first, 256)]
        self.send(source, "page", (first, page, self.chain.end.raw if self.chain.end else None))

    def on_fetch(self, source: str, version: int) -> None:
        blob = self.blob(version)
        if blob is not None:
            bent = bytearray(blob)
            if not self.sim.calm and self.rng.random() < 0.1:
                bent[self.rng.randrange(len(bent))] ^= 1 << self.rng.randrange(8)
            self.send(source, "blob", (version, len(blob), chunk_hashes(blob), bytes(bent)))

    def blob(self, version: int) -> bytes | None:
        raise NotImplementedError


@dataclass
class Row:
    """A group on the trainer's disk."""

    queued: Queued
    state: str = "queued"
    step: int = -1


class TrainerNode(Node):
    """Takes rollouts, trains, checkpoints, commits, announces; may die between any two of these."""

    def __init__(self, sim: Simulation, key: Ed25519PrivateKey) -> None:
        super().__init__(sim, key)
        self.rows: dict[bytes, Row] = {}  # on disk
        self.used: set[tuple[str, int]] = set()  # on disk: a unique index, as in swarm/storage.py
        self.steps = 0  # on disk
        self.checkpoints = {0}  # on disk
        self.end: Sealed[RunEnd] | None = None  # on disk
        self.sweeps = self.rng.random() < 0.5  # gate 3 alone must hold the bound
        self.fork_at = self.rng.randrange(2, 8) if sim.forks else -1

    def start(self) -> None:
        manifest = self.sim.manifest.message
        assert self.steps in self.checkpoints, "announced without a checkpoint"
        self.intake = self.sim.parts.intake(max_lag=manifest.max_lag, batch_groups=BATCH_GROUPS)
        rows, oldest = self.rows.values(), self.steps - manifest.max_lag
        recent = [row.queued for row in rows if row.state != "queued" and row.queued.oldest_version >= oldest]
        self.intake.restore([row.queued for row in rows if row.state == "queued"], recent)
        for producer, counter in self.used:
            self.intake.used(producer, counter + 1)
        self.sessions = Sessions()
        self.busy = False
        if self.end is not None:
            self.chain.finish(self.end)
        if self.chain.head is None:
            self.publish(0, ())
        self.every(0.4, self.begin)
        self.every(1.0, self.gossip)

    def blob(self, version: int) -> bytes | None:
        return adapter_blob(version) if self.chain.get(version) else None

    # -- rollouts in

    def on_hello(self, source: str, session: bytes) -> None:
        verdict = self.sessions.heard(source, session, self.sim.now_s)
        self.sim.verdicts[verdict] += 1
        self.send(source, "verdict", verdict)

    def on_push(self, source: str, raw: bytes) -> None:
        sealed = cached_unseal(raw, RolloutBatch)
        if sealed.sender != source or sealed.message.run != RUN:
            raise PeerFault("not yours")
        self.intake.admit(source, len(sealed.message.groups))
        receipts, new = [], []
        for group in sealed.message.groups:
            fault = self.inspect(group)
            receipt = self.intake.offer(source, group, self.steps, fault)
            receipts.append(receipt)
            if receipt.outcome == "accepted":
                new.append(Queued(receipt.digest, source, group.counter, group.oldest_version))
        receipt = seal(self.key, Receipt(RUN, source, tuple(receipts), self.steps, self.intake.queued))
        self.store(new, lambda: self.send(source, "receipt", receipt.raw))

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

    # -- versions out

    def begin(self) -> None:
        if self.busy or self.chain.head is None or self.steps >= STEPS or self.sim.now_s > REST_S:
            return
        batch = self.intake.take(self.steps)
        if batch is None:
            return
        self.mark(batch.stale, "stale")
        if batch.groups:
            self.busy = True
            self.after(self.rng.uniform(0.2, 0.8), lambda: self.trained(batch))

    def mark(self, groups: Iterable[Queued], state: str, then: Callable[[], None] = lambda: None) -> None:
        digests = [group.digest for group in groups]

        def update() -> None:
            for digest in digests:
                self.rows[digest].state = state

        self.commit(update, then)

    def trained(self, batch: Batch) -> None:
        if self.rng.random() < 0.15:
            self.mark(batch.groups, "no_signal", lambda: self.idle("no_signal"))
        else:
            self.commit(lambda: self.checkpoints.add(self.steps + 1), lambda: self.advance(batch))

    def advance(self, batch: Batch) -> None:
        """The step, its groups and its announcement become true together."""
        step = self.steps + 1
        if step % self.sim.manifest.message.publish_every == 0 or step == STEPS:
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
            self.sim.trained.append((group.digest, step - 1))
        self.steps = step

    def idle(self, outcome: str) -> None:
        self.intake.settle(outcome)
        self.intake.forget(self.steps)
        if self.sweeps:
            self.mark(self.intake.sweep(self.steps), "stale")
        if self.steps >= STEPS and self.end is None:
            end = seal(self.key, RunEnd(RUN, self.steps, self.chain.head_hash, 0))
            self.commit(lambda: setattr(self, "end", end), lambda: self.chain.finish(end) and None)
        self.busy = False
        self.begin()

    def consumed(self, parent: int, version: int, fresh: tuple[Queued, ...] = ()) -> tuple[Consumed, ...]:
        rows = [row for row in self.rows.values() if row.state == "trained" and parent <= row.step < version]
        rows += [Row(queued, "trained", version - 1) for queued in fresh]
        listed = [Consumed(row.queued.digest, row.queued.producer, row.queued.oldest_version, row.step) for row in rows]
        return tuple(sorted(listed, key=lambda group: (group.step, group.digest)))

    def announcement(
        self, version: int, fresh: tuple[Queued, ...], parent: bytes = b"", salt: int = 0
    ) -> Sealed[Announcement]:
        groups = self.consumed(max(self.chain.version, 0), version, fresh)
        blob = adapter_blob(version, salt)
        return seal(
            self.key,
            Announcement(
                run=RUN,
                version=version,
                parent=parent or self.chain.head_hash,
                adapter=AdapterRef(adapter_digest(decode_adapter(blob)), blob_ref(blob)),
                trained_on=trained_on(groups),
                bound=self.sim.manifest.message.max_lag,
                created_ms=int(1000 * self.sim.now_s),
            ),
        )

    def announce(self, announcement: Sealed[Announcement]) -> None:
        rival = None
        if 0 < self.fork_at <= announcement.message.version:  # once, a dishonest trainer tells two stories
            self.fork_at = -1
            version = announcement.message.version + self.rng.randint(0, 1)  # the same number, or one that skips it
            rival = self.announcement(version, (), announcement.message.parent, salt=1)
        for at, producer in enumerate(self.sim.producers):
            told = rival if rival is not None and at % 2 else announcement
            self.send(producer.peer_id, "announcement", told.raw)

    def gossip(self) -> None:
        if self.chain.head is not None:
            self.send(self.rng.choice(self.sim.producers).peer_id, "announcement", self.chain.head.raw)

    def on_announcement(self, source: str, raw: bytes) -> None:
        raise PeerFault("not from you")

    def ledger(self) -> bytes:
        """The ledger, written from the disk."""
        parts, parent = [MAGIC, frame(ManifestEntry(self.sim.manifest.raw))], 0
        for raw in self.log:
            version = cached_unseal(raw, Announcement).message.version
            parts.append(frame(VersionEntry(raw, self.consumed(parent, version))))
            parent = version
        return b"".join(parts + ([frame(EndEntry(self.end.raw))] if self.end else []))


class ProducerNode(Node):
    """Follows the chain, fetches adapters, generates under the newest it verified, pushes until receipted."""

    def __init__(self, sim: Simulation, key: Ed25519PrivateKey) -> None:
        super().__init__(sim, key)
        self.stored: dict[int, RolloutGroup] = {}  # on disk: the outbox
        self.next_counter = 0  # on disk
        self.blobs: dict[int, bytes] = {}  # on disk
        self.liar = False
        self.paced = self.rng.random() < 0.5  # gate 1, or a producer that never heard of it

    def start(self) -> None:
        self.session = self.rng.randbytes(16)
        self.outbox = Outbox(retry_max_s=4.0)
        for counter, group in self.stored.items():
            self.outbox.add(counter, len(group.token_ids))
        self.counter = self.next_counter
        self.held: Announcement | None = None
        self.download: Download | None = None
        self.steps = self.queued = 0
        self.pushing = self.generating = False
        self.every(BEAT_S, lambda: self.send(TRAINER_ID, "hello", self.session))
        self.every(1.0, self.sync)
        self.every(0.8, self.fetch)
        self.every(0.8, self.generate)
        self.every(0.6, self.push)
        if not self.sim.calm:
            self.send(self.rng.choice(list(self.sim.nodes)), "junk", self.rng.randbytes(40))

    def on_verdict(self, source: str, verdict: str) -> None:
        assert verdict != "identity taken", f"a restarted peer was sent away ({SILENT_S} s)"

    # -- the chain

    def sync(self) -> None:
        others = [peer for peer in self.sim.nodes if peer != self.peer_id]
        self.send(self.rng.choice(others), "chain", max(self.chain.version, 0))

    def on_page(self, source: str, body: tuple[int, list[bytes], bytes | None]) -> None:
        first, page, end = body
        for raw in page:
            if isinstance(self.follow(raw), Gap):
                if first > 0:
                    self.send(source, "chain", 0)
                return
        if end is not None:
            self.chain.finish(cached_unseal(end, RunEnd))

    def on_announcement(self, source: str, raw: bytes) -> None:
        if isinstance(outcome := self.follow(raw), Gap):
            self.send(source, "chain", outcome.first)

    def follow(self, raw: bytes) -> object:
        outcome = self.chain.extend(cached_unseal(raw, Announcement))
        if isinstance(outcome, Extended | Equivocation):
            self.commit(lambda: self.log.append(raw))
        return outcome

    # -- adapters

    def fetch(self) -> None:
        head = self.chain.head
        if head is None or (self.held is not None and self.held.version == head.message.version):
            return
        version, ref = head.message.version, head.message.adapter.keyframe
        if version in self.blobs:
            self.load(head.message, self.blobs[version])
            return
        if self.download is None or self.download.ref != ref:
            self.download = Download(ref)
        self.send(self.rng.choice([peer for peer in self.sim.nodes if peer != self.peer_id]), "fetch", version)

    def blob(self, version: int) -> bytes | None:
        return self.blobs.get(version)

    def on_blob(self, source: str, body: tuple[int, int, bytes, bytes]) -> None:
        version, size, hashes, chunk = body
        head = self.chain.head
        if self.download is None or head is None or head.message.version != version:
            return
        self.download.take_hashes(size, hashes)
        self.download.take_chunk(0, chunk)
        blob, self.download = self.download.blob(), None
        self.commit(lambda: self.blobs.__setitem__(version, blob))
        self.load(head.message, blob)

    def load(self, said: Announcement, blob: bytes) -> None:
        """S5: only a digest-checked adapter is ever generated with."""
        if adapter_digest(decode_adapter(blob)) == said.adapter.digest:
            self.held = said

    # -- rollouts

    def generate(self) -> None:
        manifest, held = self.sim.manifest.message, self.held
        if self.generating or held is None or len(self.outbox) > 4 or self.chain.end is not None or self.steps >= STEPS:
            return
        if self.paced and room(self.steps, self.queued, BATCH_GROUPS, held.version, manifest.max_lag) < 1:
            return
        self.generating = True
        self.after(self.rng.uniform(0.2, 1.2), lambda: self.generated(held))

    def generated(self, first: Announcement) -> None:
        """`first` is what was held when generation began; a newer version may have come in between."""
        self.generating = False
        last, counter = self.held or first, self.counter
        self.counter += 1
        oldest = first.version
        if self.liar and self.chain.head is not None:
            oldest, last = last.version, msgspec.structs.replace(last, version=self.chain.version)
            counter = self.rng.randint(0, counter)
        group = RolloutGroup(
            counter=counter,
            oldest_version=last.version if self.liar else oldest,
            newest_version=last.version,
            adapter=last.adapter.digest,
            prompt_ids=pack_ids([1, 2]),
            lengths=(2, 3),
            token_ids=pack_ids([1, EOS, 2, 3, self.rng.randrange(7)]),
            logprobs=pack_floats([-0.5] * 5),
            truncated=(False, True),
            rewards=(1, None),
            temperature=1,
            engine="sim",
        )
        digest = group_digest(self.peer_id, group)
        self.sim.true_oldest[digest] = oldest

        def keep() -> None:
            self.stored[counter] = group
            self.next_counter = max(self.next_counter, counter + 1)

        self.commit(keep, lambda: self.outbox.add(counter, len(group.token_ids)))

    def push(self) -> None:
        counters = [c for c in self.outbox.next_push(self.sim.now_s, 200) if c in self.stored]
        if self.pushing or not counters:
            return
        self.pushing = True
        batch = seal(self.key, RolloutBatch(RUN, tuple(self.stored[counter] for counter in counters)))
        self.send(TRAINER_ID, "push", batch.raw)
        self.after(2.5 * DELAY_S, self.timeout)

    def timeout(self) -> None:
        if self.pushing:
            self.pushing = False
            self.outbox.failed(self.sim.now_s)

    def on_receipt(self, source: str, raw: bytes) -> None:
        sealed = cached_unseal(raw, Receipt)
        receipt = sealed.message
        if sealed.sender != TRAINER_ID or receipt.producer != self.peer_id or receipt.run != RUN:
            raise PeerFault("not ours")
        self.pushing = False
        self.steps, self.queued = receipt.step, receipt.queued
        for group in receipt.groups:
            self.sim.receipts.setdefault(group.digest, set()).add((group.outcome, group.reason))
        done = self.outbox.receipted(receipt)
        names = {group.counter: group.digest for group in receipt.groups}

        def delete() -> None:
            for counter in done:
                self.stored.pop(counter, None)  # a liar has several of one counter
                self.sim.finished.add(names[counter])

        self.commit(delete)


@lru_cache(256)
def adapter_blob(version: int, salt: int = 0) -> bytes:
    """The adapter of a version."""
    return encode_adapter({"w": Tensor("F32", (2,), struct.pack("<2f", version, salt))})


def check(sim: Simulation) -> None:
    """The invariants of DESIGN section 11, after the storm and the calm. AssertionError names the broken one."""
    max_lag, rows = sim.manifest.message.max_lag, sim.trainer.rows
    for digest, step in sim.trained:
        assert 0 <= step - sim.true_oldest[digest] <= max_lag, (
            f"S1: lag {step - sim.true_oldest[digest]} over {max_lag}"
        )
    assert len({digest for digest, _ in sim.trained}) == len(sim.trained), "S2: a group was trained twice"
    check_groups(sim, rows)
    check_chains(sim)
    report = audit(sim.trainer.ledger(), RUN)
    assert report.ok, f"audit: {report.problems}"
    assert report.groups == sum(row.state == "trained" for row in rows.values()) or not report.ended, "audit: groups"


def check_groups(sim: Simulation, rows: dict[bytes, Row]) -> None:
    """S3: what a receipt accepted is on the trainer's disk, and what a producer deleted is accounted for."""
    honest = {producer.peer_id for producer in sim.producers if not producer.liar}
    for digest, outcomes in sim.receipts.items():
        words = {outcome for outcome, _ in outcomes}
        assert digest in rows or not words & {"accepted"}, "S3: an accepted group disappeared"
        reused = ("duplicate", "counter used") in outcomes
        assert digest in rows or digest not in sim.finished or words & {"stale", "invalid"} or reused, "S3: lost"
        if digest in rows and rows[digest].queued.producer in honest:
            assert "invalid" not in words, "an honest group was accepted and refused"
            assert not reused, "an honest counter was called used"
    assert {row.state for row in rows.values()} <= {"queued", "trained", "no_signal", "stale"}, "S3: state"


def check_chains(sim: Simulation) -> None:
    """S4: prefixes of one another, or somebody holds the proof of equivocation. L2: without one, all at the head."""
    chains = [node.chain for node in sim.nodes.values()]
    longest = max(chains, key=lambda chain: len(chain.entries))
    told = [[entry.raw for entry in chain.entries] for chain in chains]
    whole = [entry.raw for entry in longest.entries]
    if all(entries == whole[: len(entries)] for entries in told):
        if not sim.forks:
            assert all(chain.version == sim.trainer.chain.version for chain in chains), "L2: a peer is not at the head"
    else:
        assert any(chain.equivocations for chain in chains), "S4: chains differ and nobody knows"
    assert sim.forks or not any(chain.equivocations for chain in chains), "S4: an honest trainer was accused"


@dataclass
class Result:
    """What a run came to, for those who ask whether it tested anything."""

    steps: int
    states: Counter[str]
    faults: Counter[str]
    trace: list[tuple[float, str]] = field(repr=False)
    equivocations: int = 0


def simulate(seed: int, parts: Parts | None = None, num_peers: int = 8) -> Result:
    """Run one seed and check it. AssertionError with one line that replays it."""
    sim = Simulation(seed, parts or Parts(), num_peers)
    try:
        sim.run()
        check(sim)
    except AssertionError as error:
        broken = str(error).partition("\n")[0]
        raise AssertionError(f"{broken}; replay with: python -m tests.simulation {seed}") from error
    states = Counter(row.state for row in sim.trainer.rows.values())
    proofs = sum(len(node.chain.equivocations) for node in sim.nodes.values())
    return Result(sim.trainer.steps, states, sim.faults, sim.trace, proofs)


if __name__ == "__main__":
    print(simulate(int(sys.argv[1])))
