"""The trainer's door for rollouts: check, score again, judge, store, and only then sign the receipt.

    push --size, signature, sender--> check each group (a thread) --> Intake.offer --> disk --> receipt

A group's prompt is made again from (run seed, producer, counter) and its rewards are computed again, so a
producer can neither make up problems nor praise itself; one that skips counters to find easy ones leaves
gaps. An accepted group is on disk before the receipt that lets its producer forget it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from peers.environments import Environment, Scored
from peers.environments.split import training_problem
from peers.learning.learner import TrainingGroup
from peers.models.base import Tokenizer
from peers.prompts import Prompts
from protocols.agreement import Disowned, Verdict
from protocols.delivery import Intake, Queued
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault
from protocols.identity import short
from protocols.manifest import Manifest
from protocols.messages import (
    Envelopes,
    GroupReceipt,
    PushRollouts,
    Receipt,
    Refused,
    Reply,
    RolloutBatch,
    RolloutGroup,
)
from protocols.policy import Chain
from protocols.rollouts import GroupRules, Rollout, pack_ids, unpack_group, unpack_ids
from swarm.node import Node
from swarm.storage import AcceptedGroup, TrainerStore

log = logging.getLogger(__name__)

REWARD_SLACK = 1e-6  # rewards travel as float64; a scorer may sum floats in another order

_group_decoder = msgspec.msgpack.Decoder(RolloutGroup)
_rewards_decoder: msgspec.msgpack.Decoder[tuple[float | None, ...]] = msgspec.msgpack.Decoder(tuple[float | None, ...])


@dataclass(frozen=True, slots=True)
class Checked:
    """One group after the content check: what is wrong with it, or the rewards we computed."""

    group: RolloutGroup
    fault: PeerFault | None
    rewards: tuple[float | None, ...] = ()


class Checker:
    """Everything about a group that needs no state but the run's: pure, runs in a thread."""

    def __init__(self, manifest: Manifest, environment: Environment, tokenizer: Tokenizer) -> None:
        """Raises ValueError for chat prompts without a chat template."""
        self.manifest = manifest
        self.environment = environment
        self.tokenizer = tokenizer
        self.prompts = Prompts(tokenizer, manifest.environment, manifest.model.name)
        self.rules = GroupRules(manifest.sampling, tokenizer.vocab_size, tokenizer.eos_ids)
        self.mismatches: Counter[str] = Counter()
        """Groups whose producer scored them otherwise, by producer."""

    def check(self, producer: str, group: RolloutGroup, chain: Chain) -> Checked:
        """Never raises for what a peer sent."""
        try:
            rollouts = unpack_group(group, self.rules)
            chain.check_authorship(group)
            rewards = self._score(producer, group, rollouts)
        except PeerFault as fault:
            return Checked(group, fault)
        return Checked(group, None, rewards)

    def _score(self, producer: str, group: RolloutGroup, rollouts: list[Rollout]) -> tuple[float | None, ...]:
        problem = training_problem(self.environment, self.manifest.seed, producer, group.counter)
        if pack_ids(self.prompts.ids(problem)) != group.prompt_ids:
            raise PeerFault("wrong prompt", f"counter {group.counter}")
        scores = [self.environment.score(problem, self.tokenizer.decode(rollout.token_ids)) for rollout in rollouts]
        rewards = tuple(score.reward if isinstance(score, Scored) else None for score in scores)
        if any(_differ(ours, theirs) for ours, theirs in zip(rewards, group.rewards, strict=True)):
            self.mismatches[producer] += 1
        return rewards


class Ingest:
    """Answers pushes. `lock` is held while groups go from the intake to the disk, and while a batch is taken."""

    def __init__(self, node: Node, intake: Intake, store: TrainerStore, checker: Checker, chain: Chain) -> None:
        self.node = node
        self.intake = intake
        self.store = store
        self.checker = checker
        self.chain = chain
        self.steps_done = 0
        self.closed = False
        self.received_bytes = 0
        self.arrived = asyncio.Event()
        self.on_accepted: Callable[[str, Sequence[Queued]], None] | None = None
        """Called with (producer, groups) once they are on disk, before the receipt leaves."""
        self.lock = asyncio.Lock()
        self.refusals: Counter[str] = Counter()
        self.disowned = Disowned()
        """Producers that do not run the versions that they name."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingest")
        self._judging: set[asyncio.Task[Reply]] = set()

    async def push(self, request: PushRollouts, peer_id: str) -> Reply:
        """The node's handler of PushRollouts."""
        self.received_bytes += len(request.envelope)
        try:
            groups = self._open(request, peer_id).message.groups
            self._admit(peer_id, len(groups))  # before the work
            loop = asyncio.get_running_loop()
            checked = await loop.run_in_executor(self._thread, self._check_all, peer_id, groups)
            # Whoever hangs up now must not tear apart what goes into memory and what goes onto the disk.
            judging = asyncio.create_task(self._judge_alone(peer_id, checked))
            self._judging.add(judging)
            judging.add_done_callback(self._judging.discard)
            return await asyncio.shield(judging)
        except PeerFault as fault:
            self.refusals[fault.reason] += 1
            log.info("push of %s refused: %s", short(peer_id), fault)
            if fault.reason != "quarantined":
                return Refused(fault.reason)
            last = self.intake.later(peer_id)  # no other receipt will tell of them
            return self._receipt(peer_id, last) if last else Refused(str(fault))

    def _open(self, request: PushRollouts, peer_id: str) -> Sealed[RolloutBatch]:
        sealed = unseal(request.envelope, RolloutBatch)
        if sealed.sender != peer_id:
            raise PeerFault("sender is not the peer", short(sealed.sender))
        if sealed.message.run != self.node_run:
            raise PeerFault("foreign run", sealed.message.run)
        return sealed

    def _admit(self, peer_id: str, num_groups: int) -> int:
        """How many groups of this push may be accepted now. Raises PeerFault when it is not to be looked at."""
        if self.closed:
            raise PeerFault("run ended")
        why = self._disowned(peer_id)
        if why:
            raise PeerFault("quarantined", why)
        return self.intake.admit(peer_id, num_groups)

    def unwanted(self, peer_id: str) -> bool:
        """Whether nothing more is taken from this peer."""
        return self.intake.quarantined(peer_id) or bool(self._disowned(peer_id))

    def _disowned(self, peer_id: str) -> str:
        return self.disowned.why(peer_id, self._session(peer_id))

    def _session(self, peer_id: str) -> bytes | None:
        seen = self.node.neighbours.get(peer_id)
        return seen.beat.session if seen is not None else None

    async def disown(self, producer: str, verdict: Verdict) -> int:
        """Take nothing more from this session of the producer, and train nothing that waits of it; how many groups."""
        async with self.lock:
            self.disowned.add(producer, self._session(producer), verdict.words)
            gone = self.intake.disown(producer, verdict.words)
            await self.store.set_state([group.digest for group in gone], "disowned", self.steps_done)
        return len(gone)

    @property
    def node_run(self) -> str:
        """The run that this trainer trains."""
        return self.checker.manifest.run

    def _check_all(self, peer_id: str, groups: tuple[RolloutGroup, ...]) -> list[Checked]:
        return [self.checker.check(peer_id, group, self.chain) for group in groups]

    async def _judge_alone(self, peer_id: str, checked: list[Checked]) -> Reply:
        async with self.lock:
            room = self._admit(peer_id, len(checked))  # again: pushes that were checked side by side add up
            return await self._judge(peer_id, checked, room)

    async def _judge(self, peer_id: str, checked: list[Checked], room: int) -> Reply:
        steps_done = self.steps_done
        receipts: list[GroupReceipt] = []
        accepted: list[AcceptedGroup] = []
        for each in checked:
            judged = self.intake.offer(peer_id, each.group, steps_done, each.fault)
            if judged.outcome == "accepted" and len(accepted) == room:
                self.intake.retract([judged.digest])  # not in the receipt, so that it comes again
                continue
            receipts.append(judged)
            if judged.outcome == "accepted":
                queued = Queued(judged.digest, peer_id, each.group.counter, each.group.oldest_version, steps_done)
                body, rewards = msgspec.msgpack.encode(each.group), msgspec.msgpack.encode(each.rewards)
                accepted.append(AcceptedGroup(queued, body, rewards))
        if accepted:
            try:
                await self.store.add_groups(accepted)
            except OSError as error:
                self.intake.retract([group.queued.digest for group in accepted])
                self.node.warn("cannot store rollouts", str(error))
                return Refused("trainer cannot store")
            self.arrived.set()
            if self.on_accepted is not None:
                self.on_accepted(peer_id, [group.queued for group in accepted])
        return self._receipt(peer_id, (*receipts, *self.intake.later(peer_id)))

    def _receipt(self, peer_id: str, outcomes: tuple[GroupReceipt, ...]) -> Reply:
        receipt = Receipt(self.node_run, peer_id, outcomes, self.steps_done, self.intake.queued)
        return Envelopes((seal(self.node.identity.key, receipt).raw,))

    async def training_groups(self, digests: list[bytes]) -> list[TrainingGroup]:
        """Stored groups as the learner wants them, in the order asked for."""
        return [training for _, training in await self.opened(digests)]

    async def opened(self, digests: list[bytes]) -> list[tuple[RolloutGroup, TrainingGroup]]:
        """Stored groups as they came and as the learner wants them, in the order asked for."""
        stored = await self.store.bodies(digests)
        groups = [_group_decoder.decode(body) for body, _ in stored]
        return [
            (group, self._training_group(group, rewards)) for group, (_, rewards) in zip(groups, stored, strict=True)
        ]

    def _training_group(self, group: RolloutGroup, rewards: bytes) -> TrainingGroup:
        rollouts = unpack_group(group, self.checker.rules)
        return TrainingGroup(
            prompt_ids=unpack_ids(group.prompt_ids),
            completions=tuple(rollout.token_ids for rollout in rollouts),
            logprobs=tuple(rollout.logprobs for rollout in rollouts),
            rewards=_rewards_decoder.decode(rewards),
            truncated=group.truncated,
            age=max(0, self.steps_done - group.oldest_version),
        )

    def close(self) -> None:
        """No more pushes are taken."""
        self.closed = True
        self._thread.shutdown(cancel_futures=True)


def _differ(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is not theirs
    return abs(ours - theirs) > REWARD_SLACK
