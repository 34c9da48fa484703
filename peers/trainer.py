"""The trainer: takes rollouts in, learns, publishes versions, keeps the record.

    pushes --Ingest--> queue on disk --gate 3--> Examiner --> Learner.step --> files --> one transaction --> announce
                                                                   |          |            |
                                         Publisher: the version, which        |            groups consumed, step,
                                         the learner goes on from             |            announcement
                                                                              checkpoint and blobs, fsync, read back

Whatever happens before the transaction leaves nothing but files that the next start removes; whatever
happens after it finds everything on disk. So a group is trained exactly once, and a version that was ever
announced is announced again with the same bytes (DESIGN sections 6 and 8).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from peers.checkpoints import KEPT, Checkpoints
from peers.coordinator import Coordinator
from peers.ingest import Checker, Ingest
from peers.publishing import Published, Publisher, missing, rebuild, remake, store
from peers.record import Record, same_manifest
from peers.rounds import Rounds
from protocols.adapters import Adapter, adapter_digest
from protocols.agreement import Agreement
from protocols.choice import link_rate
from protocols.codecs import rounded
from protocols.delivery import Intake, Queued
from protocols.directory import RecordKey, RecordKind
from protocols.envelopes import Sealed, unseal
from protocols.faults import LocalFault, PeerFault, TransportFault
from protocols.identity import short
from protocols.ledger import Consumed, VersionEntry
from protocols.manifest import COMMIT, Manifest, ModelSpec
from protocols.means import running_mean
from protocols.messages import Announcement, CapacityAd, Heartbeat, Mode
from protocols.paths import kept
from protocols.policy import Chain, Extended
from protocols.presence import BEAT_S, SILENT_S
from swarm.adapters import ENTRIES_MAX, KEPT_BYTES_MAX, Adapters
from swarm.node import Node, NodeConfig, now_ms, running
from swarm.storage import StepRecord, TrainerStore
from swarm.tasks import run_loops

log = logging.getLogger(__name__)

NO_ROLLOUTS_S = 30.0  # how long the trainer waits before it says what it waits for
VERSIONS_KEPT_MIN = 4  # blobs kept besides those within the bound, for peers that are a little late
STEP_GAIN = 0.2  # of the running mean of a step's time: about five steps
MEND_S = 60.0  # at start, for blobs that only peers have: a keyframe of 100 MB at 14 Mbit/s
LINGER_S = 15.0  # how long a trainer stays to tell everybody that the run is over

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What `swarm train` was told."""

    home: Path
    run: str
    model: str
    make_manifest: Callable[[ModelSpec, int], Sealed[Manifest]]
    """Signs the manifest, given the model as it is pinned and the revision of the manifest."""
    model_revision: str | None = None
    """Commit, tag or branch of a model from the hub; None takes what this machine has."""
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    evaluation_problems: int = 200
    evaluation_every: int = 0
    """Steps between two evaluations; 0 evaluates before the first step and after the last."""
    allow_code: bool = False


@dataclass(slots=True)
class Spent:
    """Where the trainer's time went, in seconds."""

    train_s: float = 0.0
    wait_s: float = 0.0
    check_s: float = 0.0
    publish_s: float = 0.0


class _Phases:
    """A publication from the end of its step on, phase after phase without a gap."""

    def __init__(self) -> None:
        self.begun_ms = now_ms()
        self.took_s: dict[str, float] = {}
        self._last_s = time.monotonic()

    def end(self, phase: str) -> None:
        """This phase ends here, and the next begins."""
        now_s = time.monotonic()
        self.took_s[phase], self._last_s = round(now_s - self._last_s, 5), now_s


@dataclass(slots=True)
class Parts:
    """What a trainer is made of, opened in this order and closed in reverse."""

    store: TrainerStore
    record: Record
    checkpoints: Checkpoints
    chain: Chain
    intake: Intake
    ingest: Ingest


async def run_trainer(options: TrainerOptions, on_ready: Callable[[list[str]], None]) -> None:
    """Train until max_steps, or until cancelled. Raises ValueError, TransportFault."""
    config = NodeConfig(role="trainer", bootstrap=options.bootstrap, listen=options.listen, announce=options.announce)
    async with running(options.home, config, [options.run]) as node:
        with closing(Trainer(node, options)) as trainer:
            await trainer.open()
            node.metrics.emit("ready", peer_id=node.peer_id, addresses=node.host.addresses, run=options.run)
            on_ready(node.host.addresses)
            loops = {"train": trainer.train, "peers": trainer.show_peers, "coordinate": trainer.coordinator.run}
            try:
                await run_loops(node.loops() | loops, trainer.done)
            finally:
                await trainer.emit_final()
                await trainer.follower.candidate.resign()
                await trainer.follower.heartbeats.say_goodbye()
                await trainer.rest()


class Trainer:
    """See the module's docstring."""

    def __init__(self, node: Node, options: TrainerOptions) -> None:
        self.node = node
        self.options = options
        self.follower = node.followers[options.run]
        self.coordinator = Coordinator(node, self.follower)
        self.rounds = Rounds(self.follower)
        self.done = asyncio.Event()
        self.waits = False
        """A batch is waited for."""
        self.step_s: float | None = None
        """Running mean of a step's time, without waiting for rollouts."""
        self.spent = Spent()
        self.started_s = time.monotonic()
        self.parts: Parts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._resources = ExitStack()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run on the learner's one thread: models are not shared between threads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # ------------------------------------------------------------------ opening

    async def open(self) -> None:
        """Load, restore, publish version 0 or announce the head again. Raises ValueError, TransportFault."""
        from peers.agreement import Examiner, Versions
        from peers.environments.load import load_environment
        from peers.learning.learner import Learner
        from peers.models.find import find_model, pinned
        from peers.models.load import load_weights
        from peers.prompts import check_prompts

        node, options = self.node, self.options
        self.store = TrainerStore(options.home / "trainer.sqlite")
        self._resources.callback(self.store.close)
        record = Record(node.identity, self.store, options.home)
        old = await record.manifest()
        files = await self._in_thread(find_model, options.model, self._revision(old))
        new = options.make_manifest(pinned(files), 0 if old is None else old.message.revision + 1)
        self.environment = load_environment(new.message.environment, options.allow_code)
        await self._in_thread(check_prompts, new.message, self.environment, files)
        manifest = await self._manifest(record, old, new)
        self.model = await self._in_thread(load_weights, files)
        self.learner: Learner = await self._in_thread(
            partial(Learner, stale=manifest.coordination.stale),
            self.model,
            manifest.lora,
            manifest.learning,
            manifest.sampling.temperature,
            manifest.seed,
        )
        chain = await self._open_chain()
        checkpoints = Checkpoints(options.home / "checkpoints")
        intake = Intake(max_lag=manifest.max_lag, batch_groups=manifest.learning.batch_groups)
        checker = Checker(manifest, self.environment, self.model.tokenizer)
        ingest = Ingest(node, intake, self.store, checker, chain)
        self._resources.callback(ingest.close)
        self.versions = await self._in_thread(
            Versions, self.model, manifest.lora, manifest.sampling.temperature, self._from_disk
        )
        agreement = Agreement(manifest.learning.gap_max)
        self.examiner = Examiner(ingest, agreement, self.versions, self._in_thread, random.SystemRandom())
        self.counts_before = await self.store.counts()
        self.parts = Parts(self.store, record, checkpoints, chain, intake, ingest)
        self.publisher = Publisher(manifest.transfer)
        await self._restore()
        await record.restore(chain, self.learner.steps)
        await self._refuse_ended(record, manifest)
        if chain.head is not None:
            await self._mend()
        self.follower.progress = lambda: (ingest.steps_done, intake.queued)
        self.follower.wanted = self._wanted
        self.follower.next_counter_of = intake.next_counter
        ingest.on_accepted = self._accepted
        self.rounds.unwanted = ingest.unwanted
        self.follower.heartbeats.beat = self._beat
        self.follower.neighbourhood.capacity = self._capacity
        node.on_push = ingest.push
        node.exchange.uploads.sparing = True
        node.more_doors = {"push": ingest.refusals, "group": intake.reasons}
        await self.follower.neighbourhood.put_manifest()
        if chain.head is None:
            await self._publish_first()
        await self._announce(chain.head)

    def _revision(self, old: Sealed[Manifest] | None) -> str | None:
        """Which of the hub's commits to use: that of the last start, though a branch or tag has moved since."""
        asked = self.options.model_revision
        if old is None or old.message.model.name != self.options.model or COMMIT.match(asked or ""):
            return asked
        return old.message.model.revision

    async def _manifest(self, record: Record, old: Sealed[Manifest] | None, new: Sealed[Manifest]) -> Manifest:
        """The manifest in force: the one of the last start, or a new revision if the configuration changed."""
        if old is not None and same_manifest(old, new):
            new = old
        if self.node.peer_id not in new.message.trainers:
            raise ValueError(f"trainers: {self.node.peer_id} (the key in {self.node.identity.path}) is not among them")
        if old is not None:
            _refuse_change_of_kind(old.message, new.message)
        self.follower.rules.learn(new)
        await self.follower.keep_manifest()
        if new is not old:
            version = max((unseal(raw, Announcement).message.version for raw in await self.store.chain()), default=-1)
            await record.set_manifest(new, version)
        return new.message

    async def _refuse_ended(self, record: Record, manifest: Manifest) -> None:
        """A run that has ended can be announced again, but not gone on with; nor can one end before its last step."""
        steps, version = self.learner.steps, self.parts.chain.version
        if manifest.max_steps < steps or (manifest.max_steps == steps and 0 <= version < steps):
            raise ValueError(f"max_steps = {manifest.max_steps}: {steps} steps are done; give at least {steps + 1}")
        end = await record.end()
        if end is not None and manifest.max_steps > end.message.version:
            raise ValueError(
                f"run {manifest.run} has ended at version {end.message.version}, and max_steps cannot extend it: "
                "`swarm init` a new run"
            )

    async def _open_chain(self) -> Chain:
        """Our own chain from disk; refused when the swarm knows a longer one signed by this key (case B45)."""
        follower = self.follower
        follower.store = self.store
        chain = await follower.open_chain()
        follower.store = None  # from here on a version is stored by the step's own transaction
        before = chain.version
        await follower.neighbourhood.read_peers()
        for peer_id in dict.fromkeys([*self.node.bootstraps.values(), *list(follower.neighbourhood.ads)[:3]]):
            if peer_id != self.node.peer_id:
                await follower.catch_up(peer_id)
        known = max(chain.version, await self._head_in_directory())
        if known > before or chain.equivocations:
            raise ValueError(
                f"run {chain.run} already has version {known} signed by this trainer's key, but {self.options.home} "
                f"ends at version {before}: start from the home that made it, or `swarm init` a new run"
            )
        return chain

    async def _head_in_directory(self) -> int:
        key = RecordKey(self.options.run, RecordKind.HEAD)
        try:
            raw = (await self.node.directory.get(key)).get(self.node.peer_id)
        except TransportFault as fault:
            log.info("no head in the DHT: %s", fault)
            return -1
        try:
            return unseal(raw, Announcement).message.version if raw is not None else -1
        except PeerFault:
            return -1

    async def _restore(self) -> None:
        """Weights, optimizer and queue as the last committed step left them (case B73)."""
        parts, learner = self.parts, self.learner
        rows = await parts.store.steps(KEPT)
        steps = rows[0][0] if rows else 0
        found = await self._load_newest(rows)
        published = await self._published()
        if parts.chain.version > found:
            await self._load_published(published)
        self.publisher.resume(published, [entry.message for entry in parts.chain.entries[-ENTRIES_MAX:]])
        newest = max(found, parts.chain.version)
        if rows and newest < steps:
            self.node.warn("steps lost", f"{steps} steps were done, but the newest weights are those after {newest}")
        learner.steps = steps
        parts.checkpoints.keep_only({name for _, name, _ in rows})
        oldest = steps - parts.intake.max_lag
        consumed: list[Queued] = []
        for state in ("trained", "no_signal", "stale", "disowned"):
            consumed += await parts.store.groups(state, max(0, oldest))
        parts.intake.restore(await parts.store.groups("queued"), consumed)
        for producer, counter in (await parts.store.next_counters()).items():
            parts.intake.used(producer, counter)
        parts.ingest.steps_done = steps

    async def _load_newest(self, rows: Sequence[tuple[int, str, bytes]]) -> int:
        """Load the newest checkpoint that is whole; the step it is of, -1 before the first. ValueError if none is."""
        for step, name, digest in rows:
            state = await asyncio.to_thread(self.parts.checkpoints.read, name, digest)
            if state is not None:
                await self._in_thread(self.learner.load_state, state)
                return step
            self.node.warn("damaged checkpoint", f"{name} is missing or damaged; going back to the one before")
        if rows:
            raise ValueError(
                f"{self.parts.checkpoints.folder}: no checkpoint is whole; restore the folder from a copy, "
                "or `swarm init` a new run"
            )
        return -1

    async def _published(self) -> Adapter | None:
        """The head as it was published: our own weights if they are its, else from blobs, ours or those of others; None
        when it cannot be had."""
        head = self.parts.chain.head
        if head is None:
            return None
        own = rounded(await self._in_thread(self.learner.adapter), self.follower.manifest.transfer.dtype)
        if await asyncio.to_thread(adapter_digest, own) == head.message.adapter.digest:
            return own
        adapters = Adapters(self.node.exchange, self.parts.chain, self.follower.neighbourhood.sources)
        try:
            return (await adapters.obtain(head)).rebuilt.adapter
        except (TransportFault, PeerFault, OSError) as error:
            log.warning("v%d, as it was published, cannot be had: %s", head.message.version, error)
            return None

    async def _load_published(self, published: Adapter | None) -> None:
        """The newest weights are those that were published; only the optimizer's moments are older."""
        if published is None:
            raise ValueError(
                f"the checkpoint of v{self.parts.chain.version} is not whole, and the adapter that was published is "
                f"neither in {self.node.exchange.blobs.folder} nor at a peer: restore {self.options.home} from a copy"
            )
        await self._in_thread(self.learner.load_adapter, published)

    async def _mend(self) -> None:
        """What is announced again can be had: blobs that a newcomer needs of the head and that the disk has lost are
        made again, or fetched. Otherwise the next version is a keyframe. ValueError when there will be none."""
        chain, blobs, publisher = self.parts.chain, self.node.exchange.blobs, self.publisher
        entries = [entry.message for entry in chain.entries[-ENTRIES_MAX:]]
        lost = await asyncio.to_thread(missing, entries, blobs)
        if not lost:
            return
        published, target = publisher.parent, await self._in_thread(self.learner.target)
        log.info("v%d: %d blobs are not whole in %s", chain.version, len(lost), blobs.folder)
        try:
            async with asyncio.timeout(MEND_S):
                for hop in lost:
                    remade = published is not None and await asyncio.to_thread(
                        remake, hop, entries, published, target, blobs
                    )
                    if not remade:
                        await self.node.exchange.fetch(hop.blob, partial(self._others, hop.version))
        except (TransportFault, PeerFault, OSError) as error:
            why = str(error) or f"not fetched within {MEND_S:g} s"
            trouble = f"newcomers cannot fetch v{chain.version}: {len(lost)} blobs are not whole in {blobs.folder}"
            await self._warn_of_missing(trouble, why)

    async def _warn_of_missing(self, trouble: str, why: str) -> None:
        """The head cannot be had from us. ValueError if nothing will make up for that."""
        advice = "restore the folder from a copy, or start a peer that has the version"
        ended = await self.parts.record.end() is not None
        if self.learner.steps >= self.follower.manifest.max_steps and not ended:
            raise ValueError(f"{trouble}, and no version follows: {advice}, or raise max_steps ({why})")
        self.publisher.whole_next = True
        outlook = (
            "the run has ended" if ended else "the next version will be whole, but only who has this one leads to it"
        )
        self.node.warn("missing blobs", f"{trouble}; {outlook}: {advice} ({why})")

    def _from_disk(self, version: int) -> Adapter | None:
        """What was published under this number, if the disk still leads there."""
        entries = [entry.message for entry in self.parts.chain.entries[-ENTRIES_MAX:]]
        upto = [said for said in entries if said.version <= version]
        adapter = rebuild(upto, self.node.exchange.blobs) if upto and upto[-1].version == version else None
        return adapter if adapter is not None and adapter_digest(adapter) == upto[-1].adapter.digest else None

    def _others(self, version: int) -> list[str]:
        return [peer for peer in self.follower.neighbourhood.sources(version) if peer != self.node.peer_id]

    # ------------------------------------------------------------------ training

    async def train(self) -> None:
        """Step after step until max_steps, then end the run."""
        max_steps = self.follower.manifest.max_steps
        if await self.parts.record.end() is None:
            if self.learner.steps == 0:
                await self._evaluate()
            while self.learner.steps < max_steps:
                await self._one_step()
                every = self.options.evaluation_every
                if every and self.learner.steps % every == 0 and self.learner.steps < max_steps:
                    await self._evaluate()
            await self._evaluate()
        await self._finish()
        self.done.set()

    async def _one_step(self) -> None:
        begun_s, checked_s = time.monotonic(), self.examiner.spent_s
        batch = await self._next_batch()
        checked_s = self.examiner.spent_s - checked_s
        waited_s = time.monotonic() - begun_s - checked_s
        groups = await self.parts.ingest.training_groups([group.digest for group in batch])
        steps_before = self.learner.steps
        begun_s = time.monotonic()
        report = await self._in_thread(self.learner.step, groups)
        trained_s = time.monotonic() - begun_s
        begun_s = time.monotonic()
        if report.skipped is None:
            await self._commit(batch, report.metrics())
        else:
            await self.parts.store.set_state([group.digest for group in batch], "no_signal", steps_before)
            self.parts.intake.settle("no_signal")
        published_s = time.monotonic() - begun_s
        self.spent.wait_s += waited_s
        self.spent.train_s += trained_s
        self.spent.check_s += checked_s
        self.spent.publish_s += published_s
        spent_s = checked_s + trained_s + published_s
        self.step_s = running_mean(self.step_s, spent_s, STEP_GAIN)
        self.follower.heartbeats.hurry()
        lags = [steps_before - group.oldest_version for group in batch]
        self.node.metrics.emit(
            "step",
            step=self.learner.steps,
            version=self.parts.chain.version,
            skipped=report.skipped,
            loss=report.loss,
            reward=report.reward_mean,
            zero_std_share=report.zero_std_share,
            grad_norm=report.grad_norm,
            ratio_mean=report.ratio_mean,
            logprob_gap=report.abs_logprob_gap_mean,
            lag_max=max(lags),
            lag_mean=sum(lags) / len(lags),
            lag_door_max=max((lag for each in batch if (lag := each.lag_in_flight) is not None), default=None),
            lag_queue_max=max(
                (lag for each in batch if (lag := each.lag_in_queue(steps_before)) is not None), default=None
            ),
            mode=self.mode,
            groups=len(batch),
            queued=self.parts.intake.queued,
            train_s=round(trained_s, 4),
            wait_s=round(waited_s, 4),
            check_s=round(checked_s, 4),
            publish_s=round(published_s, 4),
            tokens=report.tokens,
        )

    @property
    def mode(self) -> Mode:
        """How rollouts reach us now."""
        orders = self.follower.orders
        assert orders is not None
        return orders.mode

    async def _next_batch(self) -> tuple[Queued, ...]:
        """Gate 3: a full batch within the bound, of producers that run what they say. In sequential mode it is called
        for, otherwise waited for."""
        parts = self.parts
        settled: set[str] = set()
        warned_s = time.monotonic()
        try:
            while True:
                parts.ingest.arrived.clear()
                async with parts.ingest.lock:
                    self._set_bound()
                    batch = parts.intake.take(self.learner.steps)
                    if batch is not None and batch.stale:
                        await self._set_stale(batch.stale)
                if batch is not None and batch.groups:
                    if await self._agrees(batch.groups, settled):
                        return batch.groups
                    continue
                self._call_or_wait()
                if time.monotonic() - warned_s > NO_ROLLOUTS_S:
                    warned_s = time.monotonic()
                    self._warn_of_waiting()
                try:
                    async with asyncio.timeout(BEAT_S / 2):
                        await parts.ingest.arrived.wait()
                except TimeoutError:
                    pass
        finally:
            self.waits = False
            self.rounds.close(parts.intake.batch_groups)

    async def _agrees(self, batch: tuple[Queued, ...], settled: set[str]) -> bool:
        """Whether nobody was found out. Whoever was has no group here any more, and the batch is to be taken again."""
        refused = await self.examiner.examine(batch, settled)
        for producer, verdict in refused.items():
            count = await self.parts.ingest.disown(producer, verdict)
            self.node.warn(
                "disagreement",
                f"peer {short(producer)} does not run v{verdict.version} (engine {verdict.engine}): "
                f"{verdict.numbers}; refused, and {count} of its groups are not trained",
            )
        return not refused

    def _set_bound(self) -> None:
        """A round's groups are of its own version, or `refresh_gap` older; generated ahead, within max_lag."""
        manifest = self.follower.manifest
        sequential = self.mode == "sequential"
        self.parts.intake.limit(manifest.coordination.refresh_gap if sequential else manifest.max_lag)

    def _call_or_wait(self) -> None:
        missing = self.parts.intake.batch_groups - self.parts.intake.queued
        if self.mode == "sequential":
            self.waits = False
            self.rounds.keep_open(self.parts.chain.version, missing)
        elif not self.waits:
            self.waits = True
            self.rounds.drop()
            self.follower.heartbeats.hurry()

    def _accepted(self, producer: str, groups: Sequence[Queued]) -> None:
        """Groups are in the queue: news for the open round, and for the coordinator that counts what waits."""
        self.rounds.delivered(producer, groups)
        self.follower.heartbeats.hurry()

    def _wanted(self) -> int | None:
        """Groups that we wait for, because peers generate on their own."""
        return max(0, self.parts.intake.batch_groups - self.parts.intake.queued) if self.waits else None

    def _warn_of_waiting(self) -> None:
        """What is missing, and why it may be: nobody here, or nobody who has got the head."""
        queued, wanted = self.parts.intake.queued, self.parts.intake.batch_groups
        now_s, head = time.monotonic(), self.parts.chain.version
        alive = len(self.node.sessions.alive(now_s))
        beats = [seen.beat for seen in self.node.neighbours.values() if now_s - seen.heard_s < SILENT_S]
        held = [beat.version for beat in beats if beat.role == "inference"]
        behind = sum(version is None or version < head for version in held)
        if behind:
            hint = f"{behind} of {len(held)} inference peers have not got v{head} so far"
        else:
            hint = "give others the line to join with"
        self.node.warn("waiting for rollouts", f"{queued} of {wanted} groups queued, {alive} peers alive; {hint}")

    async def _set_stale(self, groups: Sequence[Queued]) -> None:
        await self.parts.store.set_state([group.digest for group in groups], "stale", self.learner.steps)

    async def _commit(self, batch: tuple[Queued, ...], metrics: dict[str, float]) -> None:
        """The version, if this step publishes one; then files, the transaction, the announcement."""
        parts, step, phases = self.parts, self.learner.steps, _Phases()
        publishes = step % self.follower.manifest.publish_every == 0 or step == self.follower.manifest.max_steps
        published, state = await self._in_thread(self._next_version, publishes, self._link_bytes_per_s())
        phases.end("encode_s")
        name, digest = await asyncio.to_thread(parts.checkpoints.write, step, state)
        consumed = [Consumed(group.digest, group.producer, group.oldest_version, step - 1) for group in batch]
        pending = parts.record.pending + sorted(consumed, key=lambda group: group.digest)
        sealed: Sealed[Announcement] | None = None
        if published is not None:
            ref = await asyncio.to_thread(store, published, self.node.exchange.blobs)
            sealed = parts.record.announcement(parts.chain, step, ref, pending, metrics)
        announcement = (step, sealed.raw) if sealed is not None else None
        digests = tuple(group.digest for group in batch)
        await parts.store.commit_step(StepRecord(step, name, digest, digests, announcement))
        parts.intake.settle("trained")
        parts.ingest.steps_done = step
        async with parts.ingest.lock:
            stale = parts.intake.sweep(step)
            if stale:
                await self._set_stale(stale)
        parts.intake.forget(step)
        parts.record.pending = [] if publishes else pending
        if sealed is not None and published is not None:
            await asyncio.to_thread(parts.record.append, VersionEntry(sealed.raw, tuple(pending)))
            self._extend(sealed)
            phases.end("store_s")
            await self._announce(sealed)
            phases.end("announce_s")
            self._emit_published(step, published, phases)
        await self._clean_up(step)

    def _next_version(self, publishes: bool, link_bytes_per_s: float | None) -> tuple[Published | None, bytes]:
        """The version that this step makes, if it makes one, and the state of the learner that goes on from it."""
        published = None
        if publishes:
            published = self.publisher.publish(self.learner.target(), link_bytes_per_s, self.step_s)
            self.learner.settle(published.rebuilt)
            self.versions.keep(self.learner.steps, published.rebuilt)
        return published, self.learner.state()

    def _link_bytes_per_s(self) -> float | None:
        """The rate at which most inference peers say that they can download; None when none says."""
        ads = [sealed.message for sealed in self.follower.neighbourhood.ads.values()]
        return link_rate(ad.down_bytes_per_s or 0.0 for ad in ads if ad.role == "inference")

    def _emit_published(self, version: int, published: Published, phases: "_Phases") -> None:
        keyframe, delta = published.keyframe, published.delta
        self.node.metrics.emit(
            "published",
            version=version,
            codec=published.codec,
            keyframe=keyframe is not None,
            bytes=len(delta[1] if delta is not None else keyframe or b""),
            keyframe_bytes=len(keyframe) if keyframe is not None else None,
            stepped_ms=phases.begun_ms,
            encode_s=phases.took_s["encode_s"],
            store_s=phases.took_s["store_s"],
            announce_s=phases.took_s["announce_s"],
        )

    def _extend(self, sealed: Sealed[Announcement]) -> None:
        outcome = self.parts.chain.extend(sealed)
        if not isinstance(outcome, Extended):
            raise LocalFault(f"our own announcement does not extend our chain: {outcome}")

    async def _announce(self, sealed: Sealed[Announcement] | None) -> None:
        """Tell everybody, by gossip now and by the DHT in the background of the next step."""
        if sealed is not None:
            await self.follower.policy.publish(sealed)
            self.follower.neighbourhood.head_changed()

    async def _publish_first(self) -> None:
        """Version 0: the freshly initialised adapter, trained on nothing. What rounding took from it was random, so
        nothing of it is carried: a restart needs no checkpoint before the first step."""
        parts = self.parts
        published = await self._in_thread(lambda: self.publisher.publish(self.learner.target()))
        await self._in_thread(self.learner.load_adapter, published.rebuilt)
        ref = await asyncio.to_thread(store, published, self.node.exchange.blobs)
        sealed = parts.record.announcement(parts.chain, 0, ref, [], {})
        await parts.store.extend_chain([(0, sealed.raw)])
        await asyncio.to_thread(parts.record.append, VersionEntry(sealed.raw, ()))
        self._extend(sealed)

    async def _clean_up(self, step: int) -> None:
        """Keep what the bound, late peers and a fallback may need; nothing else."""
        parts = self.parts
        rows = await parts.store.steps(KEPT)
        entries = [entry.message for entry in parts.chain.entries[-ENTRIES_MAX:]]
        roots = kept(entries, parts.intake.max_lag + VERSIONS_KEPT_MIN, KEPT_BYTES_MAX)
        await asyncio.to_thread(parts.checkpoints.keep_only, {name for _, name, _ in rows})
        await asyncio.to_thread(self.node.exchange.blobs.keep_only, roots)

    async def _evaluate(self) -> None:
        """Greedy accuracy on held-out problems under the adapter as it stands."""
        if self.options.evaluation_problems == 0:
            return
        from peers.evaluation import evaluate

        problems, share = await self._in_thread(
            evaluate,
            self.model,
            self.learner.adapter(),
            self.environment,
            self.follower.manifest,
            self.options.evaluation_problems,
        )
        self.node.metrics.emit("eval", step=self.learner.steps, greedy=share, problems=problems)

    # ------------------------------------------------------------------ ending

    async def _finish(self) -> None:
        """Sign the end, account for what is left in the queue, and stay until everybody alive has heard it."""
        parts = self.parts
        async with parts.ingest.lock:
            parts.ingest.closed = True
            left = await parts.store.groups("queued")
            await parts.store.set_state([group.digest for group in left], "unused", self.learner.steps)
        sealed = await parts.record.sign_end(parts.chain)
        parts.chain.finish(sealed)
        self.follower.ended.set()
        await self.follower.policy.publish(sealed)
        ended_s = time.monotonic()
        while time.monotonic() - ended_s < LINGER_S:
            await asyncio.sleep(BEAT_S / 4)
            waiting = [
                peer
                for peer, seen in self.node.neighbours.items()
                if time.monotonic() - seen.heard_s < SILENT_S and seen.heard_s < ended_s
            ]
            if not waiting:
                return

    async def emit_final(self) -> None:
        """The numbers of this process's life, for the report."""
        counts = await self._counts()
        self.node.metrics.emit(
            "final",
            counts=counts,
            reasons=dict(self.parts.intake.reasons + self.parts.ingest.refusals),
            version=self.parts.chain.version,
            steps=self.learner.steps,
            wall_s=round(time.monotonic() - self.started_s, 3),
            train_s=round(self.spent.train_s, 3),
            wait_s=round(self.spent.wait_s, 3),
            check_s=round(self.spent.check_s, 3),
            publish_s=round(self.spent.publish_s, 3),
            moved=self.rounds.moved,
            bytes={
                "adapters": self.node.exchange.sent_bytes,
                "rollouts": self.parts.ingest.received_bytes,
                "gossip": self.follower.gossip_bytes,
            },
            ledger=str(self.parts.record.path),
        )

    async def _counts(self) -> dict[str, int]:
        """Groups of this process's life: judged at the door (from memory), and what became of them (from disk)."""
        door = {key: self.parts.intake.counts[key] for key in ("received", "accepted", "stale", "duplicate", "invalid")}
        now, before = await self.parts.store.counts(), self.counts_before
        ends = {name: name for name in ("trained", "no_signal", "disowned", "unused")} | {"stale_in_queue": "stale"}
        became = {name: now.get(state, 0) - before.get(state, 0) for name, state in ends.items()}
        return door | became | {"resumed": before.get("queued", 0), "queued": now.get("queued", 0)}

    async def rest(self) -> None:
        """Wait for the step under way, on a loop that hears a second signal meanwhile (case B92)."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self.rounds.cancel()
        self._thread.shutdown(cancel_futures=True)
        self._resources.close()

    # ------------------------------------------------------------------ telling others

    def _beat(self) -> Heartbeat:
        version, intake = self.parts.chain.version, self.parts.intake
        return Heartbeat(
            run=self.options.run,
            session=self.node.session,
            role="trainer",
            version=version if version >= 0 else None,
            step=self.parts.ingest.steps_done,
            queued=intake.queued,
            step_s=self.step_s,
            wanted=self._wanted(),
            accepted=intake.counts["accepted"],
            stale=intake.counts["stale"] + intake.counts["stale_in_queue"],
        )

    def _capacity(self) -> CapacityAd:
        version = self.parts.chain.version
        return CapacityAd(
            run=self.options.run,
            session=self.node.session,
            role="trainer",
            issued_ms=now_ms(),
            version=version if version >= 0 else None,
            addresses=self.node.addresses,
        )

    async def show_peers(self) -> None:
        """Who is here, every beat, for the live view."""
        while True:
            now_s = time.monotonic()
            rows = []
            for peer_id, seen in self.node.neighbours.items():
                ad = self.follower.neighbourhood.ads.get(peer_id)
                rows.append(
                    {
                        "peer_id": peer_id,
                        "role": seen.beat.role,
                        "version": seen.beat.version,
                        "tokens_per_s": seen.beat.tokens_per_s,
                        "engine": ad.message.engine if ad is not None else None,
                        "device": ad.message.device if ad is not None else None,
                        "silent_s": round(now_s - seen.heard_s, 1),
                    }
                )
            self.node.metrics.emit("peers", peers=rows)
            await asyncio.sleep(BEAT_S)


def _refuse_change_of_kind(old: Manifest, new: Manifest) -> None:
    """What stored groups and running peers depend on is for a run's whole life; ValueError names what changed."""
    for name in ("max_lag", "seed", "model", "lora", "environment", "sampling"):
        if getattr(old, name) != getattr(new, name):
            raise ValueError(f"{name}: this run began with another one, and it is fixed; start a new run to change it")
    if old.transfer.dtype != new.transfer.dtype:
        raise ValueError(
            f"transfer.dtype: this run began with {old.transfer.dtype}, and it is fixed; start a new run to change it"
        )
