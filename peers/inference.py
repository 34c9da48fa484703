"""The inference peer: fetch the policy, generate while the bound allows it, deliver until receipted.

    chain head --Adapters--> adapter --> engine --gate 1--> groups --> outbox (disk) --push--> receipt

Four kinds of loop: one keeps the adapter at the head (swarm/adapters.py), one hands it to the engine, as many as the
engine takes calls generate (on threads, so the event loop keeps answering), one pushes. A version is loaded while calls
are under way; they end under theirs. A group is on disk before it is sent, and its counter is never used again.
How many groups it may begin, the coordinator's credit says, or the trainer's call for a round. Without a
coordinator, or when the trainer waits and the coordinator grants nothing, the peer paces itself by the head and
the queue it knows (DESIGN section 9).
"""

import asyncio
import importlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from peers.engines import Engine
from peers.engines.choose import EngineOptions, free_memory
from peers.engines.measure import Measured
from peers.generation import GroupMaker, Made
from peers.hardware import detect
from peers.rounds import RoundWork
from protocols.codecs import CODECS
from protocols.delivery import Outbox
from protocols.directory import PEER_RENEW_S
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault, TransportFault
from protocols.manifest import Manifest
from protocols.means import running_mean
from protocols.messages import (
    UNARY_BYTES_MAX,
    Announcement,
    CapacityAd,
    Envelopes,
    Heartbeat,
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
from protocols.staleness import lag, room
from swarm.adapters import Adapters, NoRoom, Obtained
from swarm.node import Node, NodeConfig, now_ms, running
from swarm.storage import PeerStore
from swarm.tasks import run_loops

log = logging.getLogger(__name__)

CALL_TARGET_S = 0.5  # a generation call of this length loses little when a new version arrives meanwhile
CALL_GROUPS_MAX = 64  # a guess; measuring finds the number that pays, up to this
CALLS_PER_BATCH = 4  # so that a batch is not one peer's, and a new version is not waited with for long
PATIENCE_S = 600.0  # without a word of any trainer; sixty leases, and long enough to restart one
PUSH_TIMEOUT_S = 15.0
PUSH_BYTES_MAX = UNARY_BYTES_MAX - 64 * 1024  # leaves room for the envelope and the request around it
FETCH_RETRY_S = 1.0
DISK_RETRY_MAX_S = 30.0  # between two looks whether a disk that was full or refused is better; from FETCH_RETRY_S on
DOWNLOAD_SHOWN_S = 1.0  # a download that takes longer is shown
DOWNLOAD_TICK_S = 0.5
RATE_WINDOW_S = 1.0
RATE_GAIN = 0.1  # the advertised rate is a running mean over about ten calls

T = TypeVar("T")
_group_decoder = msgspec.msgpack.Decoder(RolloutGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions:
    """What `swarm join` was told."""

    home: Path
    run: str
    bootstrap: tuple[str, ...]
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    engine: EngineOptions = field(default_factory=EngineOptions)
    allow_code: frozenset[str] = frozenset()
    patience_s: float = PATIENCE_S
    """How long to stay without a word of a trainer (case B43)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The version that the engine generates with."""

    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the engine that is under way."""

    num_groups: int
    version: int
    """The version that was loaded when it began."""


@dataclass(frozen=True, slots=True)
class Heard:
    """When a version was first known here."""

    wall_ms: int
    clock_s: float
    """On the monotonic clock."""


async def run_inference(options: InferenceOptions, on_ready: Callable[[list[str]], None]) -> None:
    """Generate until the run ends, or until cancelled. Raises ValueError, TransportFault."""
    config = NodeConfig(role="inference", bootstrap=options.bootstrap, listen=options.listen, announce=options.announce)
    async with running(options.home, config, [options.run]) as node, aclosing(InferencePeer(node, options)) as peer:
        await peer.open()
        node.metrics.emit("ready", peer_id=node.peer_id, addresses=node.host.addresses, run=options.run)
        on_ready(node.host.addresses)
        loops = {
            "hear": peer.hear,
            "fetch": peer.fetch,
            "load": peer.load,
            "downloads": peer.show_downloads,
            "generate": peer.generate,
            "push": peer.push,
            "report": peer.report,
            "memory": peer.look_at_memory,
            "patience": peer.lose_patience,
        }
        try:
            await run_loops(node.loops() | loops, peer.follower.ended)
        finally:
            peer.emit_final()
            await peer.follower.heartbeats.say_goodbye()


class InferencePeer:
    """See the module's docstring."""

    def __init__(self, node: Node, options: InferenceOptions) -> None:
        self.node = node
        self.options = options
        self.follower = node.followers[options.run]
        self.outbox = Outbox()
        self.loaded: Loaded | None = None
        self.measured: Measured
        """At start: the rate, and the rows that it was best with."""
        self.tokens_per_s: float | None = None
        self.memory_bytes: int | None = None
        self.generated = Counter[str]()
        self.groups_per_s: float | None = None
        self.refresh_s: float | None = None
        self.work = RoundWork()
        self.started = 0
        """Groups begun in this session: what credits are counted in."""
        self.under_way: dict[int, Call] = {}
        """Calls that the engine works at, by their first counter."""
        self.busy_s = 0.0
        """How long at least one call was under way."""
        self.opened_s = time.monotonic()
        self.pushed_bytes = 0
        self._store: PeerStore
        self.adapters: Adapters
        self.storage = True
        """False: the disk is full, and the version stays what it is."""
        self._offered: Obtained | None = None
        """To be handed to the engine."""
        self._heard: dict[int, Heard] = {}
        """Versions newer than the one that is loaded."""
        self._heard_upto = -1
        self._hopeless: bytes | None = None
        """Digest of a head that cannot be rebuilt from what was announced."""
        self._next_counter = 0
        self._call_groups = 1
        self._call_s = 0.0
        self._to_push = asyncio.Event()
        self._waking: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._calls: ThreadPoolExecutor | None = None
        self._kept = asyncio.Event()
        """Set when the groups of the call that began last are in the outbox, and all before them."""
        self._kept.set()
        self._busy_since_s = 0.0

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def open(self) -> None:
        """Manifest, model, engine, measured rate, chain, outbox. Raises ValueError, TransportFault."""
        warm_up = asyncio.get_running_loop().run_in_executor(self._thread, _import_libraries)  # begins now
        manifest = await self.follower.find_manifest()
        log.info("manifest revision %d of %s", manifest.revision, manifest.run)
        await self.follower.keep_manifest()
        await warm_up
        await self._in_thread(self._load, manifest)
        log.info("%s on %s: %.0f tokens/s", self.engine.name, self.engine.device, self.tokens_per_s)
        assert self.follower.store is not None
        self._store = self.follower.store
        chain = await self.follower.open_chain()
        self.adapters = Adapters(self.node.exchange, chain, self.follower.neighbourhood.sources)
        for counter, body in await self._store.outbox():
            self.outbox.add(counter, len(body))
        self.opened_s = time.monotonic()
        stored = await self._store.meta("next_counter")
        self._next_counter = int.from_bytes(stored, "big") if stored is not None else _first_counter()
        self.follower.heartbeats.beat = self._beat
        self.follower.heartbeats.on_found = self._found
        self.node.on_round = self._called
        self.follower.neighbourhood.capacity = self._capacity
        for peer_id in self.node.bootstraps.values():
            await self.follower.catch_up(peer_id)
        await self.follower.neighbourhood.read_head()
        if self.follower.ended.is_set():
            assert self.follower.chain is not None
            self.node.warn("run ended", f"run {manifest.run} has ended at version {self.follower.chain.version}")

    def _load(self, manifest: Manifest) -> None:
        from peers.engines.choose import make_engine
        from peers.engines.measure import measure
        from peers.environments.load import load_environment
        from peers.models.find import check_model, find_model
        from peers.models.shapes import zero_adapter
        from peers.prompts import Prompts

        environment = load_environment(manifest.environment, self.options.allow_code)
        files = find_model(manifest.model.name, manifest.model.revision)
        check_model(files, manifest.model)
        prompts = Prompts(files.tokenizer, manifest.environment, files.name)
        self.maker = GroupMaker(manifest, self.node.peer_id, environment, files.tokenizer, prompts)
        samples = [self.maker.prompt(counter) for counter in range(2 * CALL_GROUPS_MAX)]
        self.engine: Engine = make_engine(self.options.engine, files, manifest, max(map(len, samples)))
        self._calls = ThreadPoolExecutor(self.engine.calls, thread_name_prefix="engine")
        nothing = zero_adapter(files, manifest.lora)
        self.measured = measure(self.engine, nothing, samples, manifest.sampling)
        self.tokens_per_s = self.measured.tokens_per_s

    # ------------------------------------------------------------------ policy

    async def hear(self) -> None:
        """Note when each version becomes known: fetching may be busy with the one before."""
        assert self.follower.chain is not None
        chain = self.follower.chain
        while True:
            async with self.follower.changed:
                await self.follower.changed.wait_for(lambda: chain.version > self._heard_upto)
            heard = Heard(now_ms(), time.monotonic())
            for entry in chain.since(self._heard_upto + 1, len(chain.entries)):
                self._heard[entry.message.version] = heard
            self._heard_upto = chain.version

    async def fetch(self) -> None:
        """Keep the adapter at the head of the chain."""
        assert self.follower.chain is not None
        retry_s = FETCH_RETRY_S
        while True:
            async with self.follower.changed:
                await self.follower.changed.wait_for(lambda: self._wanted() is not None)
            wanted = self._wanted()
            if wanted is None:
                continue
            try:
                wait_s = 0.0 if await self._fetch(wanted) else FETCH_RETRY_S
                retry_s = FETCH_RETRY_S
            except OSError as error:
                self._tell_of_disk(wanted.message.version, error)
                wait_s, retry_s = retry_s, min(2 * retry_s, DISK_RETRY_MAX_S)
            await self.adapters.tidy()
            if wait_s:
                await asyncio.sleep(wait_s)

    def _wanted(self) -> Sealed[Announcement] | None:
        """The head, if it is neither here nor beyond help."""
        head = self.follower.chain.head if self.follower.chain is not None else None
        if head is None or head.message.adapter.digest == self._hopeless or self.adapters.at(head):
            return None
        return head

    async def _fetch(self, wanted: Sealed[Announcement]) -> bool:
        """Get one version or a newer one; False when none can be had now (the head may have moved on by then).

        Raises OSError when it cannot be stored.
        """
        said = wanted.message
        try:
            obtained = await self.adapters.obtain(wanted)
        except TransportFault as fault:
            log.info("v%d: %s", said.version, fault)
            return False
        except PeerFault as fault:
            self.node.warn("bad adapter", f"v{said.version}: {fault}; staying at the version before")
            self._hopeless = said.adapter.digest
            return True
        self._set_storage(True)
        self._offered = obtained if self._offered is None else obtained.after(self._offered)
        await self.follower.notify()
        return True

    def _tell_of_disk(self, version: int, error: OSError) -> None:
        """A version could not be stored. Where that is for want of room, others learn to ask us for nothing newer."""
        if isinstance(error, NoRoom):
            self._set_storage(False)
            told = error.told
        else:
            told = f"{error.strerror or error}: {error.filename or self.node.exchange.blobs.folder}"
        self.node.warn("cannot store adapter", f"v{version}: {told}; staying at the version before")

    def _set_storage(self, storage: bool) -> None:
        if self.storage != storage:
            self.storage = storage
            self.follower.neighbourhood.capacity_changed()

    async def load(self) -> None:
        """Hand each version that is fetched to the engine, whatever it is generating."""
        while True:
            async with self.follower.changed:
                await self.follower.changed.wait_for(lambda: self._offered is not None)
            await self._load_offered()

    async def _load_offered(self) -> None:
        if self._offered is None:
            return
        offered, self._offered = self._offered, None
        loaded = Loaded(offered.rebuilt.version, offered.rebuilt.digest)
        started_s = time.monotonic()
        try:
            await self._in_thread(self.engine.load_adapter, loaded.version, offered.rebuilt.adapter)
        except PeerFault as fault:
            self._distrust(loaded, fault)
            return
        self.loaded = loaded
        self.follower.heartbeats.hurry()
        self._tell_loaded(offered, started_s, Heard(now_ms(), time.monotonic()))
        await self.follower.notify()

    def _tell_loaded(self, obtained: Obtained, started_s: float, ready: Heard) -> None:
        """The event of a version that is loaded: what it took, and when it was heard of and ready."""
        version, received = obtained.rebuilt.version, obtained.received
        heard = self._heard.get(version)
        self._heard = {known: when for known, when in self._heard.items() if known > version}
        if heard is not None:
            self.refresh_s = ready.clock_s - heard.clock_s
        self.node.metrics.emit(
            "adapter",
            version=version,
            path=[hop.codec or "keyframe" for hop in obtained.hops],
            bytes=received.total(),
            fetch_s=round(obtained.fetch_s, 4),
            verify_s=round(obtained.verify_s, 4),
            load_s=round(ready.clock_s - started_s, 4),
            heard_ms=heard.wall_ms if heard is not None else None,
            ready_ms=ready.wall_ms,
            sources=len(received),
            source=received.most_common(1)[0][0] if received else "disk",
        )

    async def show_downloads(self) -> None:
        """Tell how far a long download is, for whoever waits in front of it."""
        while True:
            await asyncio.sleep(DOWNLOAD_TICK_S)
            underway = self.adapters.underway() if self._wanted() is not None else None
            if underway is not None and underway.running_s >= DOWNLOAD_SHOWN_S:
                self.node.metrics.emit(
                    "download",
                    version=underway.version,
                    bytes=underway.bytes,
                    received_bytes=underway.received_bytes,
                    bytes_per_s=round(underway.bytes_per_s),
                    sources=underway.sources,
                    trouble=underway.trouble,
                )

    def _distrust(self, loaded: Loaded, fault: PeerFault) -> None:
        """A version that cannot be generated with: not tried again, the next one will be."""
        self.node.warn("bad adapter", f"v{loaded.version}: {fault}; waiting for the next version")

    # ------------------------------------------------------------------ generation

    async def generate(self) -> None:
        """As many calls at once as the engine takes, as far ahead of the trainer as the pipeline is deep."""
        never = asyncio.Event()
        await run_loops({f"call {n}": self._call_after_call for n in range(self.engine.calls)}, never)

    async def _call_after_call(self) -> None:
        while True:
            await self._until_allowed()
            num_groups = min(self._call_groups, self._room())
            if self.loaded is None or num_groups < 1:
                continue
            before, self._kept = self._kept, asyncio.Event()
            kept = self._kept
            made = await self._generate(self._begin(num_groups), self.loaded)
            await before.wait()  # a producer sends its oldest groups first, so they go into the outbox in their order
            if made is not None:
                await self._keep(made.groups)
            kept.set()
            if self._room() < self._call_groups:
                self.follower.heartbeats.hurry()

    def _begin(self, num_groups: int) -> range:
        """Counters that are this call's from now on."""
        first = max(self._next_counter, self.follower.heartbeats.next_counter)
        self._next_counter = first + num_groups
        return range(first, self._next_counter)

    async def _generate(self, counters: range, loaded: Loaded) -> Made | None:
        """One call of the engine; None if it cannot work with this version."""
        started_s, num_groups = time.monotonic(), len(counters)
        self.started += num_groups
        self.work.begun += num_groups
        if not self.under_way:
            self._busy_since_s = started_s
        self.under_way[counters.start] = Call(num_groups, loaded.version)
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(self._calls, self.maker.make, self.engine, counters)
        except PeerFault as fault:
            self._distrust(loaded, fault)
            self.loaded = Loaded(loaded.version, b"")
            return None
        finally:
            at_once = len(self.under_way)
            del self.under_way[counters.start]
            ended_s = time.monotonic()
            if not self.under_way:
                self.busy_s += ended_s - self._busy_since_s
        self.generated["tokens"] += made.tokens
        self._call_s = ended_s - started_s
        self._adapt(self._call_s / at_once, num_groups, made.tokens)
        return made

    async def _until_allowed(self) -> None:
        """Wait for credit, a call, or a new version; some of what allows us to go on is only time that passes."""
        async with self.follower.changed:
            try:
                async with asyncio.timeout(BEAT_S / 2):
                    await self.follower.changed.wait_for(lambda: self._room() > 0)
            except TimeoutError:
                pass

    def _room(self) -> int:
        """Gate 1: groups that may be begun now.

        The version before the head may go on while the head is fetched; one that was revoked may not.
        """
        chain, loaded, orders = self.follower.chain, self.loaded, self.follower.orders
        if chain is None or loaded is None or orders is None or self.outbox.full:
            return 0
        known = chain.get(loaded.version)
        if (
            known is None
            or known.message.adapter.digest != loaded.digest
            or loaded.version < orders.floor(chain.version)
        ):
            return 0
        called = self.work.left(loaded.version, chain.version)
        heartbeats = self.follower.heartbeats
        if called > 0 or (orders.mode == "sequential" and not self._starving):
            return called
        if orders.alone(time.monotonic()) or heartbeats.credit is None or self._starving:
            return self._own_room(loaded)
        if lag(self._steps(), loaded.version) > self.follower.manifest.depth:
            return 0
        return heartbeats.credit - self.started

    @property
    def _starving(self) -> bool:
        """The trainer waits, and for longer than generation takes: whoever restrains us is wrong (DESIGN section 9)."""
        return self.follower.heartbeats.starved_s >= max(SILENT_S, 2 * self._call_s)

    def _steps(self) -> int:
        """Optimizer steps done, as far as we know."""
        assert self.follower.chain is not None
        return max(self.follower.chain.version, self.follower.heartbeats.trainer_step or 0)

    def _own_room(self, loaded: Loaded) -> int:
        """Gate 1 as a peer on its own asks it, from the head and from what the trainer last said of its queue."""
        manifest, heartbeats = self.follower.manifest, self.follower.heartbeats
        batch = manifest.learning.batch_groups
        steps = self._steps()
        consumed_since = (steps - (heartbeats.trainer_step or 0)) * batch  # by steps announced after the trainer spoke
        queued = max(0, (heartbeats.trainer_queued or 0) - consumed_since) + len(self.outbox)
        return room(steps, queued, batch, loaded.version, manifest.depth)

    def _called(self, call: RoundCall, peer_id: str) -> Reply:
        """The trainer calls for a round."""
        if peer_id not in self.follower.trainers():
            return Refused("not a trainer")
        if call.run != self.options.run:
            return Refused("unknown run")
        self.work.called(call)
        wake = asyncio.create_task(self._wake(call, peer_id))
        self._waking.add(wake)
        wake.add_done_callback(self._waking.discard)
        return RoundReply(0 if self.outbox.full else call.count)

    async def _wake(self, call: RoundCall, trainer: str) -> None:
        """Get what the round is for, if we have not heard of it, and begin."""
        chain = self.follower.chain
        if chain is not None and chain.version < call.version:
            await self.follower.catch_up(trainer)
        await self.follower.notify()

    async def lose_patience(self) -> None:
        """Go home when no trainer has been heard for long, or the end of the run was missed (case B43)."""
        heartbeats = self.follower.heartbeats
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(BEAT_S)
            late_s = time.monotonic() - before_s - BEAT_S
            if late_s > SILENT_S:  # this process was stopped: it has not listened
                heartbeats.trainer_heard_s += late_s
            silent_s = time.monotonic() - heartbeats.trainer_heard_s
            if silent_s > self.options.patience_s:
                raise TransportFault("trainer gone", f"no trainer of {self.options.run} was heard for {silent_s:.0f} s")

    def _adapt(self, elapsed_s: float, num_groups: int, num_tokens: int) -> None:
        """Keep the advertised rates measured, and calls near their target length and a fraction of a step's batch.

        `elapsed_s` is a call's share of the time, where several run at once.
        """
        self.tokens_per_s = running_mean(self.tokens_per_s, num_tokens / elapsed_s, RATE_GAIN)
        self.groups_per_s = running_mean(self.groups_per_s, num_groups / elapsed_s, RATE_GAIN)
        manifest = self.follower.manifest
        best = self.measured.rows // manifest.sampling.group_size
        limit = max(1, min(CALL_GROUPS_MAX, best, manifest.learning.batch_groups // CALLS_PER_BATCH))
        if self._call_s < CALL_TARGET_S / 2:
            self._call_groups = min(limit, self._call_groups * 2)
        elif self._call_s > CALL_TARGET_S * 2:
            self._call_groups = max(1, self._call_groups // 2)
        self._call_groups = min(limit, self._call_groups)

    async def _keep(self, groups: list[tuple[int, bytes]]) -> None:
        """Onto the disk, then into the outbox."""
        try:
            await self._store.add_to_outbox(groups, groups[-1][0] + 1)
        except OSError as error:
            self.node.warn("cannot store rollouts", f"{error}; generating again when there is room")
            await asyncio.sleep(FETCH_RETRY_S * 5)
            return
        for counter, body in groups:
            self.outbox.add(counter, len(body))
        self.generated["groups"] += len(groups)
        self._to_push.set()

    # ------------------------------------------------------------------ delivery

    async def push(self) -> None:
        """Send what is in the outbox until receipts name it."""
        while True:
            counters = self.outbox.next_push(time.monotonic(), PUSH_BYTES_MAX)
            if not counters:
                self._to_push.clear()
                try:
                    async with asyncio.timeout(1.0):  # at most the shortest back-off
                        await self._to_push.wait()
                except TimeoutError:
                    pass
                continue
            await self._push(counters)

    async def _push(self, counters: list[int]) -> None:
        trainer = self._trainer()
        bodies = await self._store.outbox_bodies(counters)
        batch = RolloutBatch(self.options.run, tuple(_group_decoder.decode(body) for body in bodies))
        envelope = seal(self.node.identity.key, batch).raw
        try:
            if trainer in self.follower.heartbeats.lost_targets and trainer not in await self.node.host.peers():
                raise TransportFault("unreachable", "the trainer does not answer; its next heartbeat brings us back")
            reply = await self.node.ask(trainer, PushRollouts(envelope), PUSH_TIMEOUT_S)
            match reply:
                case Envelopes((raw,)):
                    await self._receipted(unseal(raw, Receipt), trainer)
                    self.pushed_bytes += len(envelope)
                case Refused(reason) if reason.partition(":")[0] == "quarantined":
                    why = reason.partition(": ")[2] or "too many invalid rollouts"
                    raise TransportFault("banned", f"the trainer refuses this peer: {why}")
                case Refused("not a trainer"):  # it is starting: its node answers before its queue is open
                    await asyncio.sleep(FETCH_RETRY_S)
                case Refused(reason):
                    log.info("trainer refuses: %s", reason)
                    self.outbox.failed(time.monotonic())
                case _:
                    raise PeerFault("unexpected reply", type(reply).__name__)
        except PeerFault as fault:
            self.follower.refusals[fault.reason] += 1
            self.outbox.failed(time.monotonic())
        except TransportFault as fault:
            if fault.code == "banned":
                raise
            log.info("push failed: %s", fault)
            self.outbox.failed(time.monotonic())

    def _found(self, target: str) -> None:
        """A peer that was lost answers again."""
        if target == self._trainer():
            self.outbox.retry_now()
            self._to_push.set()

    def _trainer(self) -> str:
        """Who consumes rollouts: whoever announced the head."""
        chain = self.follower.chain
        return chain.head.sender if chain is not None and chain.head is not None else self.follower.manifest.trainers[0]

    async def _receipted(self, sealed: Sealed[Receipt], trainer: str) -> None:
        receipt = sealed.message
        if sealed.sender != trainer or receipt.run != self.options.run or receipt.producer != self.node.peer_id:
            raise PeerFault("foreign receipt")
        done = self.outbox.receipted(receipt)
        try:
            await self._store.remove_from_outbox(done)
        except OSError as error:  # after a restart they are sent again, and found to be duplicates
            self.node.warn("cannot store receipts", str(error))
        self.follower.heartbeats.trainer_heard_s = time.monotonic()
        await self.follower.heartbeats.trainer_said(receipt.step, receipt.queued)
        self.follower.heartbeats.hurry()
        async with self.follower.changed:
            self.follower.changed.notify_all()  # the outbox is shorter

    # ------------------------------------------------------------------ telling others

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            run=self.options.run,
            session=self.node.session,
            role="inference",
            version=self.loaded.version if self.loaded is not None else None,
            tokens_per_s=self.tokens_per_s,
            groups_per_s=self.groups_per_s,
            refresh_s=self.refresh_s,
            oldest=min((call.version for call in self.under_way.values()), default=None),
            started=self.started,
            in_flight=sum(call.num_groups for call in self.under_way.values()),
            outbox=len(self.outbox),
            accepted=self.outbox.counts["accepted"],
            stale=self.outbox.counts["stale"],
        )

    def _capacity(self) -> CapacityAd:
        return CapacityAd(
            run=self.options.run,
            session=self.node.session,
            role="inference",
            issued_ms=now_ms(),
            engine=self.engine.name,
            device=self.engine.device,
            memory_bytes=self.memory_bytes,
            tokens_per_s=self.tokens_per_s,
            down_bytes_per_s=self.adapters.down_bytes_per_s,
            formats=("raw", *CODECS),
            version=self.loaded.version if self.loaded is not None else None,
            load=os.getloadavg()[0],
            storage=self.storage,
            addresses=self.node.addresses,
        )

    async def look_at_memory(self) -> None:
        """Keep what is free on the engine's device measured; off the loop, because a card is asked by a command."""
        while True:
            self.memory_bytes = free_memory(await asyncio.to_thread(detect), self.engine.device)
            await asyncio.sleep(PEER_RENEW_S)

    async def report(self) -> None:
        """Emit the rate of the last second while generating."""
        before, before_s = self.generated["tokens"], time.monotonic()
        while True:
            await asyncio.sleep(RATE_WINDOW_S)
            tokens, now_s = self.generated["tokens"], time.monotonic()
            if tokens != before:
                rate = (tokens - before) / (now_s - before_s)
                self.node.metrics.emit(
                    "generated",
                    groups=self.generated["groups"],
                    tokens=tokens,
                    tokens_per_s=round(rate, 1),
                    version=self.loaded.version if self.loaded is not None else None,
                    outbox=len(self.outbox),
                )
            before, before_s = tokens, now_s

    def emit_final(self) -> None:
        """The numbers of this process's life, for the report."""
        wall_s = time.monotonic() - self.opened_s
        self.node.metrics.emit(
            "final",
            generated=self.generated["groups"],
            receipts=dict(self.outbox.counts),
            outbox=len(self.outbox),
            version=self.loaded.version if self.loaded is not None else None,
            wall_s=round(wall_s, 3),
            busy_s=round(self.busy_s, 3),
            idle_s=round(wall_s - self.busy_s, 3),
            bytes={"adapters": self.node.exchange.received_bytes, "rollouts": self.pushed_bytes},
        )

    async def aclose(self) -> None:
        """Stop the engine and its thread. The loop goes on meanwhile, so that a second signal is heard (case B92)."""
        engine: Engine | None = getattr(self, "engine", None)
        if engine is not None:
            engine.stop()
        if self._calls is not None:
            await asyncio.to_thread(self._calls.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if engine is not None:
            await asyncio.to_thread(engine.close)


def _import_libraries() -> None:
    """Seconds of imports, while the manifest is looked for. No weights are touched (case B17)."""
    for name in ("peers.engines.transformers_engine", "reasoning_gym"):
        importlib.import_module(name)


def _first_counter() -> int:
    """Where a peer without memory begins: seconds since 2020. One that lost its disk but not its key is thus above most
    counters it used before; the trainer's answers to its heartbeats lift it over the rest."""
    return int(time.time()) - 1_577_836_800
