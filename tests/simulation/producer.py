"""An inference peer: follows the chain, fetches adapters, generates as far as it may, pushes until receipted.

A liar does the same, but relabels old rollouts as new, uses counters again, tells absurdities in its heartbeats, and
sends junk to every door.
"""

import math
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocols.adapters import adapter_digest, decode_adapter
from protocols.delivery import Outbox
from protocols.envelopes import seal
from protocols.faults import PeerFault
from protocols.messages import (
    Announcement,
    CapacityAd,
    Directive,
    Envelopes,
    Heartbeat,
    Lease,
    PushRollouts,
    Receipt,
    Refused,
    Reply,
    RolloutBatch,
    RolloutGroup,
    RoundCall,
    RoundReply,
)
from protocols.presence import BEAT_S, SILENT_S
from protocols.rollouts import group_digest, pack_floats, pack_ids
from protocols.staleness import room, within_bound
from protocols.transfer import ChunkList, chunk_hashes
from tests.simulation.node import Member, Parts
from tests.simulation.world import EOS, RUN, TRAINER_ID, World

FETCH_RETRY_S = 1.0
OUTBOX_MAX = 12  # groups; a small disk, so that a flood of credits stays a flood and not a deluge
VERSIONS_KEPT = 4
ABSURD = (0, 1, 2**31, 2**32 - 1)
ABSURD_RATES = (-1e300, -1.0, 0.0, 1e-300, 1e-9, 1e9, 1e300)


class Producer(Member):
    """See the module's docstring."""

    def __init__(self, world: World, key: Ed25519PrivateKey, parts: Parts) -> None:
        super().__init__(world, key, parts)
        self.stored: dict[int, RolloutGroup] = {}  # on disk: the outbox
        self.next_counter: int | None = None  # on disk
        self.blobs: dict[int, bytes] = {}  # on disk
        self.finished: set[bytes] = set()  # groups deleted after a receipt
        self.receipts: dict[bytes, set[tuple[str, str]]] = {}  # digest -> (outcome, reason) of receipts that arrived
        self.true_oldest: dict[bytes, int] = {}  # group digest -> version that really wrote it
        self.group_s = self.rng.choice((0.3, 1.0, 3.0))

    def wipe(self) -> None:
        super().wipe()
        self.stored, self.next_counter, self.blobs = {}, None, {}

    def start(self) -> None:
        super().start()
        self.outbox = Outbox(retry_max_s=4.0)
        for counter, group in self.stored.items():
            self.outbox.add(counter, len(group.token_ids))
        # Without a memory: seconds, which are above most counters used before (peers/inference.py).
        self.counter = self.next_counter if self.next_counter is not None else int(self.wall_s) % 2**31
        self.held: Announcement | None = None
        self.checked: set[bytes] = set()
        """Digests that this process has computed itself."""
        self.fetching = 0
        """Sources that have not answered yet."""
        self.pushing = False
        self.flying: Announcement | None = None
        self.begun = 0
        self.round = RoundCall(run=RUN, number=0, version=0, refresh_gap=0, count=0)
        self.round_begun = 0
        self.told_s = 0.0
        self.every(BEAT_S, self.news)
        if not self.honest:
            self.every(2.0, self.send_junk)

    # ------------------------------------------------------------------ adapters

    def news(self) -> None:
        self.fetch()
        self.generate()
        self.push()

    def fetch(self) -> None:
        head = self.chain.head
        if not self.honest and self.held is not None and self.rng.random() < 0.9:
            return  # old weights are good enough
        if head is None or self.fetching or (self.held is not None and self.held.version == head.message.version):
            return
        said = head.message
        kept = self.blobs.get(said.version)
        if kept is not None and self.load(said, kept):
            return
        holders = [peer for peer in dict.fromkeys((*self.sources, TRAINER_ID)) if peer != self.peer_id]
        asked = self.rng.sample(holders, min(2, len(holders)))  # at once: one may be dead, or lie
        self.fetching = len(asked)
        for holder in asked:
            self.ask(holder, "blob", said.adapter.keyframe.root, lambda got: self.fetched(said, got))

    def fetched(self, said: Announcement, got: Any) -> None:
        """One source has answered. The first good one counts, the last bad one has us try again."""
        if self.held is not None and self.held.version >= said.version:
            return
        self.fetching -= 1
        blob: bytes | None = None
        if got is not None:
            try:
                chunks = ChunkList(said.adapter.keyframe)
                chunks.take_hashes(got[1])
                chunks.check(0, got[2])
                blob = got[2]
            except PeerFault as fault:
                self.world.counts[f"fault: {fault.reason}"] += 1
        if blob is None or not self.load(said, blob):
            if not self.fetching:
                self.sources = ()  # ask the trainer next
                self.after(FETCH_RETRY_S, self.fetch)
            return
        self.fetching = 0
        kept = blob
        self.commit(lambda: self.keep(said.version, kept))
        self.news()

    def keep(self, version: int, blob: bytes) -> None:
        """On disk. Now and then the disk does not hold what was written."""
        torn = not self.world.calm and self.rng.random() < 0.2
        self.blobs[version] = blob[:-1] + b"?" if torn else blob
        for old in sorted(self.blobs)[:-VERSIONS_KEPT]:
            del self.blobs[old]

    def load(self, said: Announcement, blob: bytes) -> bool:
        """S5: only an adapter whose digest is the announced one is generated with."""
        try:
            digest = adapter_digest(decode_adapter(blob))
        except PeerFault:
            digest = b""
        if digest != said.adapter.digest:
            self.blobs.pop(said.version, None)
            return False
        self.use(said, digest)
        return True

    def use(self, said: Announcement, digest: bytes) -> None:
        self.checked.add(digest)
        self.held = said
        self.hurry()
        self.generate()

    def on_blob_request(self, root: bytes) -> Any:
        for entry in reversed(self.chain.entries[-VERSIONS_KEPT:]):
            blob = self.blobs.get(entry.message.version)
            if blob is not None and entry.message.adapter.keyframe.root == root:
                bent = bytearray(blob)
                if not self.world.calm and self.rng.random() < 0.1:
                    bent[self.rng.randrange(len(bent))] ^= 1 << self.rng.randrange(8)
                return len(blob), chunk_hashes(blob), bytes(bent)
        return None

    # ------------------------------------------------------------------ may we?

    def on_round(self, source: str, call: RoundCall) -> Reply:
        if source not in self.world.manifest.message.trainers or call.run != RUN:
            raise PeerFault("not a trainer")
        if call.number < self.round.number:
            return RoundReply(0)
        if call.number > self.round.number:
            self.round_begun = 0
        self.round = call
        self.generate()
        return RoundReply(min(call.count, self.round_begun + OUTBOX_MAX))

    def pace(self) -> int:
        """Gate 1 of a peer on its own, from what it knows."""
        plan, held = self.world.plan, self.held
        assert held is not None
        said = self.trainer_step or 0
        steps = max(self.chain.version, said)
        queued = max(0, self.trainer_queued - (steps - said) * plan.batch_groups) + len(self.outbox)
        return room(steps, queued, plan.batch_groups, held.version, self.world.manifest.message.depth)

    def allowed(self) -> int:
        """Groups that may be begun now."""
        held, orders, now_s = self.held, self.orders, self.steady_s
        if held is None or self.chain.end is not None or len(self.outbox) >= OUTBOX_MAX or self.outbox.full:
            return 0
        known = self.chain.get(held.version)
        if known is None or known.message.adapter.digest != held.adapter.digest:
            return 0  # revoked
        if not self.honest:
            return 1
        head = self.chain.version
        if held.version < orders.floor(head):
            return 0
        if orders.mode == "sequential":
            behind = max(head, self.round.version) - held.version
            credit = self.round.count - self.round_begun if behind <= self.round.refresh_gap else 0
        elif orders.alone(now_s):
            return self.pace()
        else:
            credit = (self.credit or 0) - self.begun
        steps = max(head, self.trainer_step or 0)
        if credit > 0 and within_bound(steps, held.version, self.world.plan.max_lag):
            return credit
        starving = self.wanted_since_s is not None and now_s - self.wanted_since_s >= SILENT_S
        return self.pace() if starving else 0

    # ------------------------------------------------------------------ rollouts

    def generate(self) -> None:
        if self.flying is not None or self.allowed() < 1:
            return
        held = self.held
        assert held is not None
        self.counter = max(self.counter, self.next_counter_said)
        if self.orders.mode == "sequential":
            self.round_begun += 1
        self.flying = held
        self.begun += 1
        self.after(self.group_s * self.rng.uniform(0.5, 1.5), self.generated, held)

    def generated(self, first: Announcement) -> None:
        """`first` is what was held when generation began; a newer version may have come in between."""
        self.flying = None
        last, counter = self.held or first, self.counter
        assert first.adapter.digest in self.checked, "S5: generated with an adapter that was not checked"
        assert last.adapter.digest in self.checked, "S5: generated with an adapter that was not checked"
        self.counter += 1
        oldest = first.version
        relabelled = not self.honest and self.chain.head is not None and self.rng.random() < 0.7
        if relabelled:
            oldest, last = last.version, msgspec.structs.replace(last, version=self.chain.version)
            counter = self.rng.randint(max(0, counter - 50), counter)
        group = RolloutGroup(
            counter=counter,
            oldest_version=last.version if relabelled else oldest,
            newest_version=last.version,
            adapter=last.adapter.digest,
            prompt_ids=pack_ids([1, 2]),
            lengths=(2, 3),
            token_ids=pack_ids([1, EOS, 2, 3, self.rng.randrange(7)]),
            logprobs=pack_floats([-0.5] * 5),
            truncated=(False, True),
            rewards=(1.0, None),
            temperature=1.0,
            engine="sim",
        )
        self.true_oldest[group_digest(self.peer_id, group)] = oldest
        self.world.counts["generated"] += 1

        def keep() -> None:
            self.stored[counter] = group
            self.next_counter = max(self.next_counter or 0, counter + 1)

        def kept() -> None:
            self.outbox.add(counter, len(group.token_ids))
            self.push()

        self.commit(keep, kept)
        self.generate()

    def push(self) -> None:
        counters = [c for c in self.outbox.next_push(self.steady_s, 200) if c in self.stored]
        if self.pushing or not counters:
            return
        self.pushing = True
        batch = self.seal(RolloutBatch(RUN, tuple(self.stored[counter] for counter in counters)))
        self.request(TRAINER_ID, PushRollouts(batch.raw), self.pushed)

    def pushed(self, reply: Reply | None) -> None:
        self.pushing = False
        match reply:
            case Envelopes((raw,)):
                self.guarded(self.receipted, raw)
                self.news()
            case _:
                if isinstance(reply, Refused):
                    self.world.counts[f"refused: {reply.reason}"] += 1
                again_s = self.outbox.failed(self.steady_s)
                self.after(max(0.01, again_s - self.steady_s), self.push)

    def receipted(self, raw: bytes) -> None:
        sealed = self.unseal(raw, Receipt)
        receipt = sealed.message
        if sealed.sender != TRAINER_ID or receipt.producer != self.peer_id or receipt.run != RUN:
            raise PeerFault("foreign receipt")
        self.trainer_step, self.trainer_queued = receipt.step, receipt.queued
        for group in receipt.groups:
            self.receipts.setdefault(group.digest, set()).add((group.outcome, group.reason))
            self.world.counts[f"receipt: {group.outcome}"] += 1
        done = self.outbox.receipted(receipt)
        names = {group.counter: group.digest for group in receipt.groups}

        def delete() -> None:
            for counter in done:
                self.stored.pop(counter, None)  # a liar has several of one counter
                self.finished.add(names[counter])

        self.commit(delete)

    # ------------------------------------------------------------------ telling others

    def beat(self) -> Heartbeat:
        flying = self.flying
        beat = Heartbeat(
            run=RUN,
            session=self.session,
            role="inference",
            version=self.held.version if self.held is not None else None,
            groups_per_s=1 / self.group_s,
            refresh_s=0.2,
            oldest=flying.version if flying is not None else None,
            started=self.begun,
            in_flight=int(flying is not None),
            outbox=len(self.outbox),
        )
        return beat if self.honest else self.lie(beat)

    def lie(self, beat: Heartbeat) -> Heartbeat:
        """Some fields of a heartbeat, made up."""
        rng = self.rng
        lies: dict[str, Any] = {name: rng.choice(ABSURD) for name in ("version", "started", "in_flight", "outbox")}
        lies |= {name: rng.choice(ABSURD) for name in ("step", "queued", "wanted", "oldest", "stale")}
        lies |= {name: rng.choice(ABSURD_RATES) for name in ("tokens_per_s", "groups_per_s", "refresh_s", "step_s")}
        lies["role"] = rng.choice(("trainer", "bootstrap", "inference"))
        kept = {name: lie for name, lie in lies.items() if rng.random() < 0.3}
        return msgspec.structs.replace(beat, **kept)

    def send_junk(self) -> None:
        """S7: bytes that nobody should stumble over."""
        rng, world = self.rng, self.world
        target = rng.choice(world.all).peer_id
        wall_ms = int(1000 * self.wall_s)
        lease = seal(self.key, Lease(RUN, 7, "claimed", wall_ms + 5000)).raw
        order = Directive(
            run=RUN, term=2**32 - 1, number=1, mode="sequential", min_version=2**32 - 1, issued_ms=wall_ms
        )
        capacity = seal(self.key, CapacityAd(run=RUN, session=self.session, role="inference", issued_ms=0)).raw
        junk = rng.choice((rng.randbytes(40), lease, seal(self.key, order).raw, capacity, b"\x91" * 5000))
        if rng.random() < 0.5:
            bent = bytearray(junk)
            bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
            junk = bytes(bent)
        match rng.randrange(3):
            case 0:
                world.gossip(self, junk)
            case 1:
                self.ask(target, "call", junk, lambda answer: None)
            case 2:
                until_s = self.wall_s + rng.choice((5.0, 1e9, -1e9, math.nan))
                self.ask(target, "dht", ("put", self.peer_id, msgspec.msgpack.encode(junk), until_s), lambda _: None)
