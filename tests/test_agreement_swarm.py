"""A trainer among producers that run what they say and some that do not (case B76): real models, in one process."""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bootstrap.events import read_events
from peers.engines import Generation
from peers.engines.transformers_engine import TransformersEngine
from peers.generation import GroupMaker
from peers.models.load import load_model
from protocols.adapters import adapter_digest
from protocols.envelopes import Sealed, seal, unseal
from protocols.identity import peer_id_of, public_bytes, short
from protocols.ledger import VersionEntry, audit, read_entries
from protocols.manifest import EnvironmentSpec, LearningSpec, LoraSpec, Manifest, ModelSpec
from protocols.messages import Envelopes, PushRollouts, Receipt, Refused, Reply, RolloutBatch, RolloutGroup, Sampling
from protocols.rollouts import group_digest
from tests.samples import OWNER, RUN, TRAINER_ID
from tests.test_trainer_restart import Restarted, trainer

pytestmark = pytest.mark.network

BATCH = 12
GROUPS = 4  # of each producer before each step
_decoder = msgspec.msgpack.Decoder(RolloutGroup)


class Engine:
    """Says that it runs the version it was handed last, and generates with what `stays` makes of it; its
    log-probabilities are off by `noise` nats (standard deviation)."""

    name = "odd"

    def __init__(self, real: TransformersEngine, stays: Callable[[int], int], noise: float) -> None:
        self.real, self.stays, self.noise = real, stays, noise
        self.dice = random.Random(0)
        self.claimed: tuple[int, bytes] = (0, b"")
        self.adapters: dict[int, Any] = {}

    def load_adapter(self, version: int, adapter: Any) -> None:
        self.claimed = version, adapter_digest(adapter)
        self.adapters[version] = adapter

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Generation:
        used = self.stays(self.claimed[0])
        self.real.load_adapter(used, self.adapters[used])
        made = self.real.generate(prompts, sampling, seed)
        groups = [[self._noisy(completion) for completion in group] for group in made.groups]
        return Generation(*self.claimed, groups)

    def _noisy(self, completion: Any) -> Any:
        logprobs = (min(0.0, logprob + self.dice.gauss(0.0, self.noise)) for logprob in completion.logprobs)
        return replace(completion, logprobs=tuple(logprobs))


class Producer:
    """An inference peer without a network."""

    def __init__(self, number: int, made: Restarted, engine: Engine) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(bytes([100 + number]) * 32)
        self.peer_id = peer_id_of(public_bytes(self.key))
        self.engine = engine
        self.counter = 0
        self.made: tuple[RolloutGroup, ...] = ()
        self.follow(made)

    def follow(self, made: Restarted, session: bytes = bytes(16)) -> None:
        """A trainer, perhaps the same one started again; this peer as that session."""
        self.trainer = made
        checker = made.parts.ingest.checker
        self.maker = GroupMaker(checker.manifest, self.peer_id, made.environment, made.model.tokenizer, checker.prompts)
        made.node.neighbours[self.peer_id] = SimpleNamespace(beat=SimpleNamespace(session=session), heard_s=0.0)  # type: ignore[assignment]

    def make(self, count: int = GROUPS) -> tuple[RolloutGroup, ...]:
        """Groups under the head, as this engine says."""
        head = self.trainer.parts.chain.version
        adapter = self.trainer.publisher.parent
        assert adapter is not None
        self.engine.load_adapter(head, adapter)
        made = self.maker.make(self.engine, range(self.counter, self.counter + count))  # type: ignore[arg-type]
        self.counter += count
        groups = tuple(_decoder.decode(body) for _, body in made.groups)
        self.made += groups
        return groups

    async def push(self, groups: tuple[RolloutGroup, ...] | None = None) -> Reply:
        batch = RolloutBatch(RUN, self.make() if groups is None else groups)
        return await self.trainer.parts.ingest.push(PushRollouts(seal(self.key, batch).raw), self.peer_id)

    async def outcomes(self, groups: tuple[RolloutGroup, ...] | None = None) -> list[tuple[str, str]] | str:
        reply = await self.push(groups)
        if isinstance(reply, Refused):
            return reply.reason
        assert isinstance(reply, Envelopes)
        return [(each.outcome, each.reason) for each in unseal(reply.envelopes[0], Receipt).message.groups]


def everybody(made: Restarted, real: TransformersEngine, lie: Callable[[int], int]) -> tuple[Producer, ...]:
    """One that computes as the trainer does, one that rounds like a bfloat16 engine, one that lies."""
    kinds = ((honest, 1e-3), (honest, 0.02), (lie, 0.0))
    return tuple(Producer(number, made, Engine(real, *kind)) for number, kind in enumerate(kinds))


def honest(version: int) -> int:
    return version


def base(version: int) -> int:
    return 0


def stuck(version: int) -> int:
    return min(version, 2)


@pytest.fixture(scope="module")
def real() -> TransformersEngine:
    return TransformersEngine(load_model("builtin"), LoraSpec())


def make_manifest(model: ModelSpec, revision: int) -> Sealed[Manifest]:
    manifest = Manifest(
        run=RUN,
        revision=revision,
        trainers=(TRAINER_ID,),
        issued_ms=1_000,
        model=model,
        environment=EnvironmentSpec(
            prompt="{expression}=", params={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
        ),
        learning=LearningSpec(batch_groups=BATCH, learning_rate=1e-2),  # moves by more than gap_max in a few steps
    )
    return seal(OWNER, manifest)


async def step(made: Restarted, *producers: Producer) -> None:
    """Everybody delivers, and the trainer takes a batch of it; the first delivers more when some of that is refused."""
    for producer in producers:
        await producer.push()
    stepping = asyncio.create_task(made._one_step())
    while not stepping.done():
        if made.waits:
            await producers[0].push()
        await asyncio.wait([stepping], timeout=0.02)
    await stepping


async def until_found(made: Restarted, *producers: Producer) -> None:
    """Steps until somebody is refused."""
    told, first = len(made.warnings), made.learner.steps
    while len(made.warnings) == told and made.learner.steps < first + 12:
        await step(made, *producers)


def trained_on(home: Path) -> list[bytes]:
    """Digests of all that the ledger says was trained on."""
    entries = read_entries((home / "ledger.echo").read_bytes())
    return [group.digest for entry in entries if isinstance(entry, VersionEntry) for group in entry.consumed]


def events(home: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(home / "metrics.jsonl") if event["event"] == kind]


@pytest.mark.parametrize("lie", [base, stuck])
async def test_b76_who_does_not_run_what_it_says_is_refused_and_the_others_go_on(
    tmp_path: Path, real: TransformersEngine, lie: Callable[[int], int]
) -> None:
    # Goal: one that never loads an adapter, or stays at v2, is found once the policy has moved; honest ones are not,
    # however their engines round. Nothing of it that waits is trained, and no batch is smaller for it.
    async with trainer(tmp_path, make_manifest=make_manifest) as made:
        exact, rough, liar = everybody(made, real, lie)
        await until_found(made, exact, rough, liar)
        assert made.warnings == ["disagreement"]
        (text,) = made.texts
        version = made.parts.chain.version - 1
        told = (
            rf"peer {short(liar.peer_id)} does not run v{version} \(engine odd\): mean gap \S+ nats over \d+ tokens, "
        )
        assert re.fullmatch(told + r"limit 0\.3; refused, and \d+ of its groups are not trained", text)
        counts = await made.store.counts()
        assert counts.pop("disowned") >= GROUPS
        assert counts["trained"] == BATCH * made.learner.steps

        receipt = await liar.outcomes()
        assert isinstance(receipt, list)
        why = f"engine odd does not run v{version}: mean gap "
        assert {outcome for outcome, _ in receipt} == {"invalid"}, "what was accepted is told of once more"
        assert all(reason.startswith(why) for _, reason in receipt)
        refused = await liar.outcomes()
        assert refused == f"quarantined: {receipt[0][1]}"
        assert made.parts.ingest.unwanted(liar.peer_id)
        assert not made.parts.ingest.unwanted(rough.peer_id)

        before = made.learner.steps
        await step(made, exact, rough)
        await step(made, exact, rough)
        assert made.learner.steps > before
        assert made.warnings == ["disagreement"], "said once"
    report = audit((tmp_path / "ledger.echo").read_bytes(), RUN)
    assert (report.problems, report.groups) == ([], len(set(trained_on(tmp_path))))
    looks = [look for event in events(tmp_path, "agreement") for look in event["groups"]]
    means = {peer: [look["mean"] for look in looks if look["peer_id"] == peer.peer_id] for peer in (exact, rough)}
    assert max(means[exact]) < 2e-3
    assert 0.005 < min(means[rough]) < max(means[rough]) < 0.04
    assert sum(event["check_s"] for event in events(tmp_path, "step")) > 0.0


async def test_what_was_disowned_stays_so_over_a_restart_and_the_peer_has_another_chance(
    tmp_path: Path, real: TransformersEngine
) -> None:
    async with trainer(tmp_path, make_manifest=make_manifest) as made:
        exact, _, liar = everybody(made, real, honest)
        liar.engine.noise = 1.0
        await until_found(made, exact, exact, liar)
        counts = await made.store.counts()
        assert counts["disowned"] == GROUPS, "what was delivered before the last batch"
        false = liar.made[-GROUPS:]
        assert not {group_digest(liar.peer_id, group) for group in false} & set(trained_on(tmp_path))
        await exact.push(exact.make(2 * BATCH))
        waiting, trained = made.parts.intake.queued, made.learner.steps
    async with trainer(tmp_path, make_manifest=make_manifest) as again:
        for producer in (exact, liar):
            producer.follow(again)
        assert await liar.outcomes(false) == [("duplicate", "")] * len(false)
        assert (again.parts.intake.queued, again.learner.steps) == (waiting, trained)
        await again._one_step()
        assert events(tmp_path, "agreement")[-1]["groups"][0]["mean"] < 2e-3, "the head is made again from the disk"
        liar.engine.noise = 0.0
        assert await liar.outcomes() == [("accepted", "")] * GROUPS
        await again._one_step()
        assert again.warnings == []
        counts = await again._counts()
        assert counts["disowned"] == 0, "of this process's life"
        became = sum(counts[name] for name in ("trained", "no_signal", "stale_in_queue", "unused", "queued"))
        assert counts["accepted"] + counts["resumed"] == became


async def test_with_a_limit_of_0_nobody_is_looked_at(tmp_path: Path, real: TransformersEngine) -> None:
    def unlimited(model: ModelSpec, revision: int) -> Sealed[Manifest]:
        manifest = make_manifest(model, revision).message
        return seal(OWNER, msgspec.structs.replace(manifest, learning=LearningSpec(batch_groups=BATCH, gap_max=0.0)))

    async with trainer(tmp_path, make_manifest=unlimited) as made:
        _, _, liar = everybody(made, real, honest)
        liar.engine.noise = 1.0
        await step(made, liar, liar, liar)
        assert (made.warnings, await made.store.counts()) == ([], {"trained": BATCH})
    assert events(tmp_path, "agreement") == []
