"""A trainer that comes back on its home: whole, with damaged checkpoints, with none (case B73)."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from peers.learning.learner import TrainingGroup
from peers.trainer import Trainer, TrainerOptions
from protocols.adapters import adapter_digest
from protocols.envelopes import Sealed, seal
from protocols.ledger import audit
from protocols.manifest import EnvironmentSpec, LearningSpec, Manifest, ModelSpec
from protocols.messages import Sampling
from swarm.node import Node, NodeConfig
from tests.nodes import LISTEN, identity_of
from tests.samples import OWNER, RUN, TRAINER, TRAINER_ID

pytestmark = pytest.mark.network

GROUP = TrainingGroup(
    prompt_ids=(1, 5, 6),
    completions=((7, 2), (8, 2)),
    logprobs=((-1.0, -1.0),) * 2,
    rewards=(1.0, 0.0),
    truncated=(False, False),
)


class Restarted(Trainer):
    """A trainer whose warnings are kept."""

    warnings: list[str]

    async def step(self) -> None:
        """One real optimizer step, committed and published as any other."""
        await self._in_thread(self.learner.step, [GROUP])
        await self._commit((), {})

    def digest(self) -> bytes:
        return adapter_digest(self.learner.adapter())

    def moments(self) -> list[float]:
        """How many steps the optimizer has seen, for each parameter."""
        return [float(state["step"]) for state in self.learner._optimizer.state.values()]


def maker(publish_every: int = 1) -> Callable[[bytes, int], Sealed[Manifest]]:
    manifest = Manifest(
        run=RUN,
        revision=0,
        trainers=(TRAINER_ID,),
        issued_ms=1_000,
        publish_every=publish_every,
        environment=EnvironmentSpec(prompt="{expression} = ", params={"min_terms": 2, "max_terms": 2}),
        sampling=Sampling(group_size=2),
        learning=LearningSpec(batch_groups=1),
    )

    def make(digest: bytes, revision: int) -> Sealed[Manifest]:
        return seal(OWNER, replace(manifest, revision=revision, model=ModelSpec(name="builtin", digest=digest)))

    return make


@asynccontextmanager
async def trainer(home: Path, publish_every: int = 1) -> AsyncIterator[Restarted]:
    """An open trainer on this home, alone in the world."""
    identity = identity_of(home, TRAINER)
    node = await Node.start(identity, home, NodeConfig(role="trainer", listen=LISTEN), [RUN])
    warnings: list[str] = []
    node.warn = lambda code, text: warnings.append(code)  # type: ignore[method-assign]
    made = Restarted(
        node,
        TrainerOptions(
            home=home,
            run=RUN,
            model="builtin",
            make_manifest=maker(publish_every),
            listen=LISTEN,
            evaluation_problems=0,
        ),
    )
    made.warnings = warnings
    try:
        await made.open()
        yield made
    finally:
        made.close()
        await node.close()


async def steps(home: Path, count: int, publish_every: int = 1) -> tuple[bytes, list[bytes]]:
    """Train some steps and stop: the digest of the last weights, and the chain."""
    async with trainer(home, publish_every) as first:
        for _ in range(count):
            await first.step()
        return first.digest(), [entry.raw for entry in first.parts.chain.entries]


def damage(home: Path, *numbers: int) -> None:
    for number in numbers:
        path = home / "checkpoints" / f"step-{number:010d}.safetensors"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


async def test_a_restarted_trainer_goes_on_with_the_same_weights_moments_and_chain(tmp_path: Path) -> None:
    digest, chain = await steps(tmp_path, 3)
    assert len(chain) == 4
    (tmp_path / "checkpoints" / "step-0000000009.safetensors").write_bytes(b"of a step that was never committed")
    async with trainer(tmp_path) as again:
        assert (again.learner.steps, again.digest(), set(again.moments())) == (3, digest, {3.0})
        assert [entry.raw for entry in again.parts.chain.entries] == chain
        assert again.warnings == []
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3
        await again.step()
        assert again.parts.chain.version == 4
    report = audit((tmp_path / "ledger.echo").read_bytes(), RUN)
    assert (report.problems, report.head, report.versions) == ([], 4, 5)


async def test_b73_a_damaged_last_checkpoint_is_made_up_for_by_the_published_weights(tmp_path: Path) -> None:
    digest, chain = await steps(tmp_path, 3)
    damage(tmp_path, 3)
    async with trainer(tmp_path) as again:
        assert again.warnings == ["damaged checkpoint"]
        assert (again.learner.steps, again.digest()) == (3, digest), "the weights are those that everybody has"
        assert set(again.moments()) == {2.0}, "the optimizer is one step behind"
        await again.step()
        assert again.parts.chain.version == 4, "no version is announced twice"
        assert [entry.raw for entry in again.parts.chain.entries][:4] == chain


async def test_b73_unpublished_weights_are_taken_from_the_checkpoint_before(tmp_path: Path) -> None:
    # Published are v0 and v2 of 4 steps; the checkpoint of step 4 is damaged, the one of step 3 is newer than v2.
    async with trainer(tmp_path, 2) as first:
        digests = []
        for _ in range(3):
            await first.step()
            digests.append(first.digest())
        assert first.parts.chain.version == 2
    damage(tmp_path, 3)
    async with trainer(tmp_path, 2) as again:
        assert again.warnings == ["damaged checkpoint", "steps lost"]
        assert (again.learner.steps, again.digest()) == (3, digests[1])
    async with trainer(tmp_path, 2) as again:
        pass
    damage(tmp_path, 3)  # whole again
    async with trainer(tmp_path, 2) as again:
        assert again.warnings == []
        await again.step()
        await again.step()
    damage(tmp_path, 5)
    async with trainer(tmp_path, 2) as again:
        assert again.warnings == ["damaged checkpoint", "steps lost"]
        assert (again.learner.steps, again.parts.chain.version) == (5, 4)


async def test_b73_without_any_whole_checkpoint_the_trainer_says_what_to_do(tmp_path: Path) -> None:
    await steps(tmp_path, 3)
    damage(tmp_path, 1, 2, 3)
    with pytest.raises(ValueError, match="no checkpoint is whole") as error:
        async with trainer(tmp_path):
            pass
    assert "\n" not in str(error.value)
    assert "restore the folder" in str(error.value)


async def test_without_checkpoint_and_published_weights_the_trainer_says_what_to_do(tmp_path: Path) -> None:
    await steps(tmp_path, 2)
    damage(tmp_path, 2)
    for path in (tmp_path / "blobs").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="restore"):
        async with trainer(tmp_path):
            pass


async def test_a_step_that_cannot_be_stored_is_not_announced(tmp_path: Path) -> None:
    async with trainer(tmp_path) as first:
        await first.step()
        heard: list[int] = []
        first.follower.publish = lambda sealed: heard.append(sealed.message.version)  # type: ignore[assignment]

        async def full(record: object) -> None:
            raise OSError("database or disk is full")

        first.parts.store.commit_step = full  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="full"):
            await first.step()
        assert heard == []
        assert first.parts.chain.version == 1
    async with trainer(tmp_path) as again:
        assert (again.learner.steps, again.parts.chain.version, again.warnings) == (1, 1, [])
        await again.step()
        assert again.parts.chain.version == 2
    assert audit((tmp_path / "ledger.echo").read_bytes(), RUN).ok
