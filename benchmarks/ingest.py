"""How fast rollouts are taken in: verified, scored again, on disk, receipted.

    ours         Ingest.push: signature, content check, prompt made again, rewards computed again,
                 one SQLite transaction (synchronous=FULL), signed receipt
    yardsticks   (a) the same envelopes decoded by msgspec and nothing else
                 (b) the same bytes appended to a file, with an fsync for each envelope

Four producers push at once, each waiting for its receipt, as inference peers do. Ours and the yardsticks take
turns, round by round, on the same envelopes.
"""

import asyncio
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.figures import Figure, Measured, main, median, percentile
from peers.environments import Environment, Scored
from peers.environments.load import load_environment
from peers.environments.split import training_problem
from peers.ingest import Checker, Ingest
from peers.models.characters import CHARACTERS, EOS, CharacterTokenizer
from protocols.delivery import Intake
from protocols.envelopes import seal, unseal
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.manifest import EnvironmentSpec, LearningSpec, Manifest
from protocols.messages import (
    AdapterRef,
    Announcement,
    BlobRef,
    Envelopes,
    PushRollouts,
    Receipt,
    RolloutBatch,
    RolloutGroup,
    Sampling,
    TrainedOn,
)
from protocols.policy import Chain, genesis
from protocols.rollouts import pack_floats, pack_ids
from swarm.identity import load_identity
from swarm.node import Node, NodeConfig
from swarm.storage import TrainerStore

OWNER = Ed25519PrivateKey.from_private_bytes(b"the owner's key, benchmarks only")
RUN = run_id_of("benchmark", public_bytes(OWNER))
PRODUCERS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 5)]
ENVIRONMENT = EnvironmentSpec(prompt="{expression}=", params={"min_terms": 2, "max_terms": 3, "max_digits": 2})
DIGEST = bytes(32)
TOKENIZER = CharacterTokenizer()


@dataclass(frozen=True)
class Load:
    """What is pushed."""

    name: str
    sampling: Sampling
    push_groups: int
    pushes: int
    """Of each producer in a round."""
    rounds: int


LOADS = (
    Load("8 completions of about 3 tokens", Sampling(group_size=8), push_groups=8, pushes=8, rounds=15),
    # Seven such groups are what fits under the 1 MiB of a request.
    Load("16 completions of 1024 tokens", Sampling(group_size=16, max_new_tokens=1024), 7, pushes=2, rounds=10),
)


def make_group(load: Load, environment: Environment, producer: str, counter: int) -> RolloutGroup:
    """A group as the inference peer makes it, with answers drawn instead of generated."""
    rng = random.Random(f"{producer}{counter}")
    problem = training_problem(environment, 0, producer, counter)
    length = load.sampling.max_new_tokens
    completions: list[tuple[int, ...]] = []
    for _ in range(load.sampling.group_size):
        if length > 100:
            text = "".join(rng.choices(CHARACTERS, k=length - 1))
        else:  # the builtin model's answers: a number, right about half of the time
            text = problem.entry["answer"] if rng.random() < 0.5 else str(rng.randrange(-99, 199))
        completions.append((*TOKENIZER.encode(text)[1:], EOS))
    scores = [environment.score(problem, TOKENIZER.decode(ids)) for ids in completions]
    num_tokens = sum(map(len, completions))
    return RolloutGroup(
        counter=counter,
        oldest_version=0,
        newest_version=0,
        adapter=DIGEST,
        prompt_ids=pack_ids(TOKENIZER.encode(problem.prompt)),
        lengths=tuple(map(len, completions)),
        token_ids=pack_ids([token for ids in completions for token in ids]),
        logprobs=pack_floats([-rng.random() for _ in range(num_tokens)]),
        truncated=(False,) * len(completions),
        rewards=tuple(score.reward if isinstance(score, Scored) else None for score in scores),
        temperature=load.sampling.temperature,
        engine="benchmark",
    )


def make_round(load: Load, environment: Environment, number: int) -> list[list[bytes]]:
    """The envelopes of one round, by producer."""
    envelopes = []
    for key in PRODUCERS:
        producer = peer_id_of(public_bytes(key))
        first = number * load.pushes * load.push_groups
        pushes = []
        for at in range(first, first + load.pushes * load.push_groups, load.push_groups):
            groups = [make_group(load, environment, producer, at + extra) for extra in range(load.push_groups)]
            pushes.append(seal(key, RolloutBatch(RUN, tuple(groups))).raw)
        envelopes.append(pushes)
    return envelopes


def make_ingest(load: Load, environment: Environment, folder: Path) -> Ingest:
    """The trainer's door, with a database on disk and a queue that does not fill."""
    identity, _ = load_identity(folder / "peer.key")
    learning = LearningSpec(batch_groups=65536)
    manifest = Manifest(
        run=RUN,
        revision=0,
        trainers=(identity.peer_id,),
        issued_ms=0,
        environment=ENVIRONMENT,
        sampling=load.sampling,
        learning=learning,
    )
    adapter, trained_on = AdapterRef(DIGEST, BlobRef(DIGEST, 1)), TrainedOn(0, 0, DIGEST)
    chain = Chain(manifest)
    chain.extend(
        seal(identity.key, Announcement(RUN, 0, genesis(RUN), adapter, trained_on, manifest.max_lag, created_ms=0))
    )
    intake = Intake(max_lag=manifest.max_lag, batch_groups=learning.batch_groups)
    node = Node(identity, folder, NodeConfig(role="trainer"))
    store = TrainerStore(folder / "trainer.sqlite")
    return Ingest(node, intake, store, Checker(manifest, environment, TOKENIZER), chain)


async def push_round(ingest: Ingest, envelopes: Sequence[Sequence[bytes]]) -> list[float]:
    """Push everything, all producers at once; seconds of each push."""
    waits: list[float] = []

    async def produce(key: Ed25519PrivateKey, pushes: Sequence[bytes]) -> None:
        for envelope in pushes:
            began_s = time.perf_counter()
            reply = await ingest.push(PushRollouts(envelope), peer_id_of(public_bytes(key)))
            waits.append(time.perf_counter() - began_s)
            assert isinstance(reply, Envelopes), reply
            receipt = unseal(reply.envelopes[0], Receipt).message
            assert all(group.outcome == "accepted" for group in receipt.groups), receipt

    await asyncio.gather(*(produce(key, pushes) for key, pushes in zip(PRODUCERS, envelopes, strict=True)))
    return waits


_envelope_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])
_batch_decoder = msgspec.msgpack.Decoder(RolloutBatch)


def decode_round(envelopes: Sequence[Sequence[bytes]]) -> None:
    """Yardstick (a)."""
    for pushes in envelopes:
        for envelope in pushes:
            _, payload, _ = _envelope_decoder.decode(envelope)
            _batch_decoder.decode(payload)


def append_round(path: Path, envelopes: Sequence[Sequence[bytes]]) -> None:
    """Yardstick (b)."""
    with path.open("ab", buffering=0) as file:
        for pushes in envelopes:
            for envelope in pushes:
                file.write(envelope)
                os.fsync(file.fileno())


def costs_of(ingest: Ingest, envelopes: Sequence[Sequence[bytes]]) -> str:
    """CPU time of the parts of a push that do not touch the disk."""
    raws = [envelope for pushes in envelopes for envelope in pushes]
    began_s = time.process_time()
    opened = [unseal(raw, RolloutBatch) for raw in raws]
    opened_s = time.process_time()
    for sealed in opened:
        for group in sealed.message.groups:
            checked = ingest.checker.check(sealed.sender, group, ingest.chain)
            assert checked.fault is None
    checked_s = time.process_time()
    num_groups = sum(len(sealed.message.groups) for sealed in opened)
    return (
        f"CPU a group: {1e6 * (opened_s - began_s) / num_groups:.0f} us decoding and signature, "
        f"{1e6 * (checked_s - opened_s) / num_groups:.0f} us content, prompt and rewards"
    )


async def measure_load(load: Load, folder: Path) -> tuple[dict[str, list[float]], list[float], int, str]:
    """Seconds a round of each way, seconds of each push, bytes of a round, where the time goes."""
    environment = load_environment(ENVIRONMENT)
    ingest = make_ingest(load, environment, folder)
    times: dict[str, list[float]] = defaultdict(list)
    waits: list[float] = []
    try:
        for number in range(load.rounds + 1):
            envelopes = make_round(load, environment, number)
            began_s = time.perf_counter()
            pushed = await push_round(ingest, envelopes)
            pushed_s = time.perf_counter()
            decode_round(envelopes)
            decoded_s = time.perf_counter()
            append_round(folder / "file", envelopes)
            appended_s = time.perf_counter()
            if number > 0:  # the first round warms up
                waits += pushed
                times["ours"].append(pushed_s - began_s)
                times["decode"].append(decoded_s - pushed_s)
                times["append"].append(appended_s - decoded_s)
        costs = costs_of(ingest, envelopes)
    finally:
        ingest.close()
        ingest.store.close()
        ingest.node.metrics.close()
    return times, waits, sum(map(len, (raw for pushes in envelopes for raw in pushes))), costs


def measure() -> Measured:
    """All loads."""
    figures, notes = [], []
    for load in LOADS:
        with tempfile.TemporaryDirectory() as folder:
            times, waits, num_bytes, costs = uvloop.run(measure_load(load, Path(folder)))
        num_groups = len(PRODUCERS) * load.pushes * load.push_groups
        seconds = {way: median(values) for way, values in times.items()}
        for way, yardstick_is in (("decode", "msgspec decoding alone"), ("append", "append and fsync alone")):
            for amount, unit in ((num_groups, "groups/s"), (num_bytes / 1e6, "MB/s")):
                figures.append(
                    Figure(
                        what=load.name,
                        ours=amount / seconds["ours"],
                        yardstick=amount / seconds[way],
                        unit=unit,
                        yardstick_is=yardstick_is,
                    )
                )
        notes.append(
            f"{load.name}: {load.push_groups} groups a push, {num_bytes / num_groups:.0f} bytes a group; receipt after "
            f"p50 {1000 * percentile(waits, 0.5):.1f} ms, p99 {1000 * percentile(waits, 0.99):.1f} ms; {costs}"
        )
    return figures, notes


if __name__ == "__main__":
    main("ingest", "Rollout ingest beside decoding and appending.", measure)
