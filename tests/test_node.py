"""Nodes and followers over real p2pd: joining, losing the bootstrap peer, equivocation, and every door."""

import asyncio
import os
from pathlib import Path

import pytest

from protocols.messages import AdapterRef, BlobRef
from tests.hosts import free_port, until
from tests.nodes import Nodes, Running, nodes
from tests.samples import TRAINER_ID, announcement

pytestmark = pytest.mark.network

RUNS = int(os.environ.get("ECHO_SWARM_RUNS", "5"))


def forged(version: int, parent: bytes | None = None) -> bytes:
    """The trainer's signature on another content."""
    return announcement(version, parent, adapter=AdapterRef(bytes(32), BlobRef(bytes(32), 1))).raw


async def small_swarm(swarm: Nodes, versions: int) -> tuple[Running, Running, str]:
    """A bootstrap peer and a trainer with versions 0 .. versions - 1."""
    bootstrap = await swarm.bootstrap()
    address = bootstrap.node.host.addresses[0]
    trainer = await swarm.trainer((address,))
    for version in range(versions):
        await trainer.announce(version)
    return bootstrap, trainer, address


# ---------------------------------------------------------------------- joining


@pytest.mark.parametrize("offset_s", [-0.05, 0.05, 0.5])
async def test_b20_a_version_published_once_reaches_a_peer_that_just_joins(tmp_path: Path, offset_s: float) -> None:
    # Goal: whoever joins while a version is published holds it within 5 s, every time.
    # Method: each round, a new peer subscribes `-offset_s` after (or `offset_s` before) the trainer publishes, once.
    loop = asyncio.get_running_loop()
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm, 7)
        for number in range(RUNS):
            worker = await swarm.worker(f"worker{number}", (address,))
            version, published = trainer.version + 1, []
            subscribed = asyncio.Event()
            real = worker.node.host.subscribe

            async def subscribe(topic, on_message, real=real, subscribed=subscribed):  # type: ignore[no-untyped-def]
                subscribed.set()
                await real(topic, on_message)

            worker.node.host.subscribe = subscribe  # type: ignore[method-assign]

            def publish(version=version, published=published) -> None:  # type: ignore[no-untyped-def]
                published.append(asyncio.create_task(trainer.announce(version)))

            if offset_s < 0:
                publish()
                loop.call_later(-offset_s, worker.run)
            else:
                worker.run()
                await subscribed.wait()
                loop.call_later(offset_s, publish)
            await until(lambda worker=worker, version=version: worker.version == version, offset_s + 5.0)
            assert worker.task is not None
            assert not worker.task.done()
            await swarm.stop(worker)


async def test_a_peer_that_hears_no_gossip_ends_in_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm, 1)
        worker = await swarm.worker("deaf", (address,))
        monkeypatch.setattr(worker.follower, "_enqueue", lambda sender, raw: None)
        worker.run()
        for version in range(1, 4):
            await trainer.announce(version)
        await until(lambda: worker.version == 3, 6.0)
        assert worker.follower.chain is not None
        assert trainer.follower.chain is not None
        assert worker.follower.chain.entries == trainer.follower.chain.entries


# ---------------------------------------------------------------------- the bootstrap peer goes


async def test_b18_peers_go_on_without_the_bootstrap_peer_and_link_again(tmp_path: Path) -> None:
    # Goal: nobody needs the bootstrap peer once joined; its loss and its return are said, and all link again.
    # Method: two workers and a trainer; the bootstrap peer ends, and comes back on the same key and port.
    listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
    async with nodes(tmp_path) as swarm:
        bootstrap, everybody = await settled_swarm(swarm, listen)
        trainer, *workers = everybody
        await swarm.stop(bootstrap)
        await until(lambda: all("bootstrap unreachable" in each.codes() for each in everybody), 8.0)

        before = [worker.follower.gossip_bytes for worker in workers]
        await trainer.announce(1)
        await until(lambda: all(worker.version == 1 for worker in workers), 5.0)
        assert [worker.follower.gossip_bytes for worker in workers] > before, "gossip goes from peer to peer"
        assert TRAINER_ID in await heads(workers[0]), "the DHT between the peers answers"

        again = await swarm.bootstrap("bootstrap", listen)
        assert again.node.host.addresses == bootstrap.node.host.addresses
        await until(lambda: all("bootstrap reachable" in each.codes() for each in everybody), 25.0)
        await until(lambda: again.node.directory.size == 3, 5.0)
        await until(lambda: len(again.node.neighbours) == 3, 5.0)
        await until(lambda: again.version == 1, 20.0)
        assert all(each.codes().count("bootstrap unreachable") == 1 for each in everybody), "said once, not each beat"


async def test_b18_a_bootstrap_peer_with_a_new_key_is_reported_and_not_believed(tmp_path: Path) -> None:
    listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
    async with nodes(tmp_path) as swarm:
        bootstrap, everybody = await settled_swarm(swarm, listen)
        trainer, *workers = everybody
        await swarm.stop(bootstrap)
        other = await swarm.bootstrap("another", listen)

        def told(running: Running) -> bool:
            return any("peer id mismatch" in text for code, text in running.warnings if code == "bootstrap unreachable")

        await until(lambda: all(map(told, everybody)), 25.0)
        assert not any("bootstrap reachable" in each.codes() for each in everybody)
        assert other.node.neighbours == {}
        await trainer.announce(1)
        await until(lambda: all(worker.version == 1 for worker in workers), 5.0)
        assert all(each.task is not None and not each.task.done() for each in everybody)


async def settled_swarm(swarm: Nodes, listen: tuple[str, ...]) -> tuple[Running, list[Running]]:
    """A bootstrap peer, and a trainer and two workers that are connected with each other too."""
    bootstrap = await swarm.bootstrap("bootstrap", listen)
    address = bootstrap.node.host.addresses[0]
    trainer = await swarm.trainer((address,))
    await trainer.announce(0)
    workers = [await swarm.worker(f"worker{number}", (address,)) for number in range(2)]
    everybody = [trainer, *workers]
    for worker in workers:
        worker.run()

    async def linked() -> bool:
        ids = {each.node.peer_id for each in everybody}
        seen = [{*await each.node.host.peers(), each.node.peer_id} for each in everybody]
        return all(ids <= each for each in seen)

    async with asyncio.timeout(20.0):
        while not await linked():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0.05)
    return bootstrap, everybody


async def heads(running: Running) -> dict[str | None, bytes]:
    from protocols.directory import RecordKey, RecordKind

    return await running.node.directory.get(RecordKey(running.follower.run, RecordKind.HEAD))
