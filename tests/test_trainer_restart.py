"""A trainer that comes back on its home: whole, with damaged checkpoints, with none (case B73)."""

import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from peers.learning.learner import TrainingGroup
from peers.publishing import missing
from peers.trainer import Trainer, TrainerOptions
from protocols.adapters import adapter_digest
from protocols.codecs import rounded, widened
from protocols.envelopes import Sealed, seal
from protocols.ledger import audit
from protocols.manifest import EnvironmentSpec, LearningSpec, Manifest, ModelSpec, TransferSpec
from protocols.messages import AdapterRef, Announcement, BlobRef, Sampling
from swarm.blobs import BlobStore
from swarm.node import Node, NodeConfig
from tests.nodes import LISTEN, identity_of
from tests.samples import OWNER, RUN, TRAINER, TRAINER_ID

pytestmark = pytest.mark.network

DEFAULT = TransferSpec()
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
    """Their codes."""
    texts: list[str]

    async def step(self) -> None:
        """One real optimizer step, committed and published as any other."""
        await self._in_thread(self.learner.step, [GROUP])
        await self._commit((), {})

    def digest(self) -> bytes:
        return adapter_digest(self.learner.adapter())

    def moments(self) -> list[float]:
        """How many steps the optimizer has seen, for each parameter."""
        return [float(state["step"]) for state in self.learner._optimizer.state.values()]


def maker(
    publish_every: int = 1, transfer: TransferSpec = DEFAULT, max_steps: int = 100
) -> Callable[[ModelSpec, int], Sealed[Manifest]]:
    manifest = Manifest(
        run=RUN,
        revision=0,
        trainers=(TRAINER_ID,),
        issued_ms=1_000,
        publish_every=publish_every,
        max_steps=max_steps,
        transfer=transfer,
        environment=EnvironmentSpec(prompt="{expression} = ", params={"min_terms": 2, "max_terms": 2}),
        sampling=Sampling(group_size=2),
        learning=LearningSpec(batch_groups=1),
    )

    def make(model: ModelSpec, revision: int) -> Sealed[Manifest]:
        return seal(OWNER, replace(manifest, revision=revision, model=model))

    return make


@asynccontextmanager
async def trainer(
    home: Path,
    publish_every: int = 1,
    transfer: TransferSpec = DEFAULT,
    friend: Node | None = None,
    max_steps: int = 100,
    make_manifest: Callable[[ModelSpec, int], Sealed[Manifest]] | None = None,
) -> AsyncIterator[Restarted]:
    """An open trainer on this home, alone in the world but for a friend that may have its blobs."""
    identity = identity_of(home, TRAINER)
    node = await Node.start(identity, home, NodeConfig(role="trainer", listen=LISTEN), [RUN])
    warnings: list[str] = []
    texts: list[str] = []

    def warn(code: str, text: str) -> None:
        warnings.append(code)
        texts.append(text)

    node.warn = warn  # type: ignore[method-assign]
    made = Restarted(
        node,
        TrainerOptions(
            home=home,
            run=RUN,
            model="builtin",
            make_manifest=make_manifest or maker(publish_every, transfer, max_steps),
            listen=LISTEN,
            evaluation_problems=0,
        ),
    )
    made.warnings, made.texts = warnings, texts
    if friend is not None:
        await node.host.connect(friend.host.addresses[0], 10.0)
        made.follower.neighbourhood.sources = lambda version: [friend.peer_id]  # type: ignore[method-assign]
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


async def test_published_weights_that_are_not_here_are_fetched_from_a_peer(tmp_path: Path) -> None:
    home, other = tmp_path / "trainer", tmp_path / "other"
    digest, chain = await steps(home, 3)
    damage(home, 3)
    other.mkdir(mode=0o700)
    (home / "blobs").rename(other / "blobs")
    friend = await Node.start(identity_of(other), other, NodeConfig(role="inference", listen=LISTEN), [RUN])
    try:
        async with trainer(home, friend=friend) as again:
            assert again.warnings == ["damaged checkpoint"]
            assert (again.learner.steps, again.digest()) == (3, digest)
            await again.step()
            assert references(again)[-1].delta is not None, "the version before is known, so a delta to it is possible"
            assert [entry.raw for entry in again.parts.chain.entries][:4] == chain
    finally:
        await friend.close()


async def test_without_checkpoint_and_published_weights_the_trainer_says_what_to_do(tmp_path: Path) -> None:
    await steps(tmp_path, 2)
    damage(tmp_path, 2)
    for path in (tmp_path / "blobs").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="restore"):
        async with trainer(tmp_path):
            pass


def references(trainer: Restarted) -> list[AdapterRef]:
    return [entry.message.adapter for entry in trainer.parts.chain.entries]


@pytest.mark.parametrize(
    ("codec", "publish_every"), [("raw", 1), ("xor", 1), ("ulps", 2), ("int8", 1), ("int4", 1), ("int4", 2)]
)
async def test_a_restart_publishes_what_an_uninterrupted_run_would_bit_for_bit(
    tmp_path: Path, codec: Any, publish_every: int
) -> None:
    # Goal: parameters, what is carried, the deltas' parent and where keyframes fall all survive a restart.
    transfer = TransferSpec(codec=codec, keyframe_every=4)
    async with trainer(tmp_path / "whole", publish_every, transfer) as whole:
        for _ in range(6):
            await whole.step()
        expected, state = references(whole), whole.learner.state()
    for count in (1, 2, 3):
        async with trainer(tmp_path / "parts", publish_every, transfer) as again:
            for _ in range(count):
                await again.step()
            got = references(again)
    assert got == expected
    assert again.learner.state() == state
    assert (sum(ref.delta is not None for ref in got) > 0) == (codec != "raw")
    assert (b"residual/" in state) or codec == "raw"


async def test_the_policy_that_is_trained_on_is_the_one_that_was_published(tmp_path: Path) -> None:
    async with trainer(tmp_path, transfer=TransferSpec(codec="int4")) as first:
        for _ in range(3):
            await first.step()
            assert first.parts.chain.head is not None
            assert adapter_digest(rounded(first.learner.adapter(), "bfloat16")) == references(first)[-1].digest
            assert widened(rounded(first.learner.adapter(), "bfloat16")) == first.learner.adapter()
            assert first.learner.target() != first.learner.adapter()


async def test_before_the_first_step_a_restart_needs_neither_checkpoint_nor_blobs(tmp_path: Path) -> None:
    await steps(tmp_path / "one", 1)
    await steps(tmp_path / "two", 0)
    for path in (tmp_path / "two" / "blobs").iterdir():
        path.unlink()
    digest, _ = await steps(tmp_path / "two", 1)
    async with trainer(tmp_path / "one") as other:
        assert other.digest() == digest


async def test_a_trainer_that_lost_the_published_adapter_goes_on_with_a_keyframe(tmp_path: Path) -> None:
    async with trainer(tmp_path, 2, TransferSpec(codec="int4")) as first:
        for _ in range(3):
            await first.step()
    for path in (tmp_path / "blobs").iterdir():
        path.unlink()
    async with trainer(tmp_path, 2, TransferSpec(codec="int4")) as again:
        await again.step()
        last = references(again)[-1]
        assert last.keyframe is not None
        assert last.delta is None
        await again.step()
        await again.step()
        assert references(again)[-1].delta is not None


# ---------------------------------------------------------------------- blobs that the disk has lost

INT4 = TransferSpec(codec="int4", keyframe_every=4)


def way_is_whole(trainer: Restarted) -> bool:
    return missing([entry.message for entry in trainer.parts.chain.entries], trainer.node.exchange.blobs) == []


def lose(home: Path, ref: BlobRef, damaged: bool) -> None:
    path = home / "blobs" / ref.root.hex()
    if damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("codec", "count", "damaged"), [("raw", 2, False), ("int4", 4, True), ("int4", 3, False), ("xor", 1, True)]
)
async def test_what_newcomers_need_of_the_head_is_made_again(
    tmp_path: Path, codec: Any, count: int, damaged: bool
) -> None:
    transfer = TransferSpec(codec=codec, keyframe_every=4)
    async with trainer(tmp_path, transfer=transfer) as first:
        for _ in range(count):
            await first.step()
        head = references(first)[-1]
        assert (head.keyframe is not None) == (count % 4 == 0 or codec == "raw")
    ref = head.keyframe or (head.delta.blob if head.delta is not None else None)
    assert ref is not None
    lose(tmp_path, ref, damaged)
    async with trainer(tmp_path, transfer=transfer) as again:
        assert way_is_whole(again)
        assert again.warnings == []


async def test_what_newcomers_need_before_the_head_is_fetched_from_a_peer(tmp_path: Path) -> None:
    home, other = tmp_path / "trainer", tmp_path / "other"
    async with trainer(home, transfer=INT4) as first:
        for _ in range(3):
            await first.step()
        lost = references(first)[0].keyframe
    assert lost is not None
    other.mkdir(mode=0o700)
    shutil.copytree(home / "blobs", other / "blobs")
    lose(home, lost, damaged=True)
    friend = await Node.start(identity_of(other), other, NodeConfig(role="inference", listen=LISTEN), [RUN])
    try:
        async with trainer(home, transfer=INT4, friend=friend) as again:
            assert way_is_whole(again)
            assert again.warnings == []
            await again.step()
    finally:
        await friend.close()


@pytest.mark.parametrize("all_of_them", [True, False])
async def test_a_head_that_newcomers_cannot_reach_is_warned_of_and_the_next_version_is_whole(
    tmp_path: Path, all_of_them: bool
) -> None:
    transfer = TransferSpec(codec="int4", keyframe_every=10)
    async with trainer(tmp_path, transfer=transfer) as first:
        for _ in range(3):
            await first.step()
        middle = references(first)[2].delta
    assert middle is not None
    lose(tmp_path, middle.blob, damaged=False)
    if all_of_them:
        shutil.rmtree(tmp_path / "blobs")
    for _ in range(2):  # as long as no version follows, each start finds the same
        async with trainer(tmp_path, transfer=transfer) as again:
            assert again.warnings == ["missing blobs"]
            assert str(tmp_path / "blobs") in again.texts[0]
            assert not way_is_whole(again)
    async with trainer(tmp_path, transfer=transfer) as again:
        await again.step()
        assert references(again)[-1].keyframe is not None
        assert references(again)[-1].delta is not None, "for those who have the version before"
        assert way_is_whole(again)
        await again.step()
        assert references(again)[-1].keyframe is None
    async with trainer(tmp_path, transfer=transfer) as again:
        assert again.warnings == []


async def test_a_last_version_that_nobody_can_have_is_no_end(tmp_path: Path) -> None:
    transfer = TransferSpec(codec="int4", keyframe_every=10)
    async with trainer(tmp_path, transfer=transfer, max_steps=2) as first:
        for _ in range(2):
            await first.step()
    shutil.move(tmp_path / "blobs", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"restore the folder from a copy, .*, or raise max_steps") as error:
        async with trainer(tmp_path, transfer=transfer, max_steps=2):
            pass
    assert "\n" not in str(error.value)
    async with trainer(tmp_path, transfer=transfer, max_steps=3) as again:
        assert again.warnings == ["missing blobs"]
    shutil.rmtree(tmp_path / "blobs")
    shutil.move(tmp_path / "copy", tmp_path / "blobs")
    async with trainer(tmp_path, transfer=transfer, max_steps=2) as again:
        assert again.warnings == []
        await again.parts.record.sign_end(again.parts.chain)
    shutil.rmtree(tmp_path / "blobs")
    async with trainer(tmp_path, transfer=transfer, max_steps=2) as again:
        assert again.warnings == ["missing blobs"], "that the run has ended can be told all the same"
        assert "; the run has ended: " in again.texts[0]


async def test_who_has_not_got_the_head_is_told_of_when_rollouts_do_not_come(tmp_path: Path) -> None:
    async with trainer(tmp_path) as first:
        await first.step()
        first._warn_of_waiting()
        now_s = time.monotonic()
        neighbours: dict[str, Any] = first.node.neighbours
        for number, (role, version, silent_s) in enumerate(
            [
                ("inference", 1, 0.0),
                ("inference", 0, 0.0),
                ("inference", None, 0.0),
                ("inference", 0, 100.0),
                ("trainer", 0, 0.0),
            ]
        ):
            beat = SimpleNamespace(role=role, version=version)
            neighbours[str(number)] = SimpleNamespace(beat=beat, heard_s=now_s - silent_s)
        first._warn_of_waiting()
        assert first.warnings == ["waiting for rollouts"] * 2
        assert first.texts[0] == "0 of 1 groups queued, 0 peers alive; give others the line to join with"
        assert first.texts[1].endswith("; 2 of 3 inference peers have not got v1 so far")
        neighbours.clear()


async def test_b26_a_version_can_be_had_before_anybody_hears_of_it(tmp_path: Path) -> None:
    async with trainer(tmp_path, transfer=TransferSpec(codec="int4", keyframe_every=2)) as first:
        publish, heard = first.follower.policy.publish, []

        async def listen(sealed: Sealed[Announcement]) -> None:
            adapter, blobs = sealed.message.adapter, first.node.exchange.blobs
            refs = [each for each in (adapter.keyframe, adapter.delta and adapter.delta.blob) if each is not None]
            heard.append([blobs.get(ref.root) is not None and blobs.info(ref.root) is not None for ref in refs])
            await publish(sealed)

        first.follower.policy.publish = listen  # type: ignore[method-assign,assignment]
        for _ in range(4):
            await first.step()
        assert heard == [[True], [True, True], [True], [True, True]]


async def test_b26_a_version_that_the_disk_does_not_hold_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = BlobStore.put

    def torn(self: BlobStore, blob: bytes) -> BlobRef:
        ref = put(self, blob)
        self.path(ref.root).write_bytes(blob[: len(blob) // 2])
        return ref

    async with trainer(tmp_path) as first:
        await first.step()
        expected = references(first)
        monkeypatch.setattr(BlobStore, "put", torn)
        with pytest.raises(OSError, match="does not hold"):
            await first.step()
        assert references(first) == expected
    monkeypatch.undo()
    async with trainer(tmp_path) as again:
        assert (again.learner.steps, references(again), again.warnings) == (1, expected, [])
        await again.step()
        assert again.parts.chain.version == 2


async def test_blobs_that_no_announcement_names_are_removed_by_the_next_step(tmp_path: Path) -> None:
    async with trainer(tmp_path) as first:
        await first.step()
        first.node.exchange.blobs.put(b"of a step that was never committed")
        await first.step()
        named = {ref.keyframe.root.hex() for ref in references(first) if ref.keyframe is not None}
        named |= {ref.delta.blob.root.hex() for ref in references(first) if ref.delta is not None}
        assert {path.name for path in (tmp_path / "blobs").iterdir()} == named


async def test_a_publication_is_measured_without_a_gap(tmp_path: Path) -> None:
    async with trainer(tmp_path, transfer=TransferSpec(codec="xor", keyframe_every=2)) as first:
        events: list[dict[str, Any]] = []
        first.node.metrics.emit = lambda name, **fields: events.append({"event": name, **fields})  # type: ignore[method-assign]
        began_ms = time.time() * 1000
        for _ in range(2):
            await first.step()
        ended_ms = time.time() * 1000
    one, two = [event for event in events if event["event"] == "published"]
    assert (one["version"], one["codec"], one["keyframe"], one["keyframe_bytes"]) == (1, "xor", False, None)
    assert (two["version"], two["codec"], two["keyframe"]) == (2, "xor", True)
    assert one["bytes"] == references(first)[1].delta.blob.size
    assert two["keyframe_bytes"] == references(first)[2].keyframe.size > two["bytes"]
    for event in (one, two):
        took_ms = 1000 * (event["encode_s"] + event["store_s"] + event["announce_s"])
        assert took_ms > 0
        assert began_ms - 1 <= event["stepped_ms"] <= event["stepped_ms"] + took_ms <= ended_ms + 1


async def test_a_step_that_cannot_be_stored_is_not_announced(tmp_path: Path) -> None:
    async with trainer(tmp_path) as first:
        await first.step()
        heard: list[int] = []
        first.follower.policy.publish = lambda sealed: heard.append(sealed.message.version)  # type: ignore[assignment]

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
