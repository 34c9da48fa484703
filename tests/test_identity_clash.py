"""Two processes with one key (case B07): a copy is sent away, of two at once one survives, a restart is welcome."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from protocols.faults import TransportFault
from protocols.presence import BEAT_S, SILENT_S
from tests.hosts import until
from tests.nodes import Nodes, Running, identity_of, nodes

pytestmark = pytest.mark.network


def copy_key(folder: Path, name: str, other: str) -> None:
    (folder / other).mkdir(mode=0o700)
    shutil.copy(folder / name / "peer.key", folder / other / "peer.key")


async def lives_on(peer: Running, seconds: float) -> None:
    """It beats all that time, and is not sent away."""
    assert peer.task is not None
    done, _ = await asyncio.wait([peer.task], timeout=seconds)
    assert not done, [task.exception() for task in done]


async def settled(swarm: Nodes) -> tuple[Running, Running, str]:
    bootstrap = await swarm.bootstrap()
    address = bootstrap.node.host.addresses[0]
    trainer = await swarm.trainer((address,))
    await trainer.announce(0)
    return bootstrap, trainer, address


async def test_b07_a_copied_key_is_refused_within_two_beats_and_the_first_goes_on(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await settled(swarm)
        first = await swarm.worker("first", (address,))
        first.run()
        await lives_on(first, BEAT_S + 0.5)  # whoever starts later than a beat is the copy
        copy_key(tmp_path, "first", "copy")
        begun_s = time.monotonic()
        with pytest.raises(TransportFault) as fault:
            await swarm.start("copy", "inference", (address,))
        assert fault.value.code == "identity taken"
        assert time.monotonic() - begun_s < 2 * BEAT_S + 2.0, "two beats, and the start of p2pd"
        await trainer.announce(1)
        await until(lambda: first.version == 1)
        await lives_on(first, 2 * BEAT_S)


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
async def test_b07_of_two_that_start_together_exactly_one_survives(tmp_path: Path, gap_s: float) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await settled(swarm)
        identity_of(tmp_path / "one")
        copy_key(tmp_path, "one", "two")

        async def live(name: str, wait_s: float) -> str:
            await asyncio.sleep(wait_s)
            try:
                peer = await swarm.worker(name, (address,))
                peer.run()
                assert peer.task is not None
                await peer.task
            except TransportFault as fault:
                return fault.code
            return "ended"

        lives = [asyncio.create_task(live("one", 0.0)), asyncio.create_task(live("two", gap_s))]
        done, running = await asyncio.wait(lives, timeout=SILENT_S + 2 * BEAT_S, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == ["identity taken"]
        done, _ = await asyncio.wait(running, timeout=2 * BEAT_S)
        assert not done, "the other one lives on"
        survivor = next(
            peer for peer in swarm.all if peer.node.config.role == "inference" and peer.task and not peer.task.done()
        )
        await trainer.announce(1)
        await until(lambda: survivor.version == 1)
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_b07_a_killed_peer_that_comes_back_at_once_is_welcome(tmp_path: Path) -> None:
    # Goal: no false "identity taken"; the wait is at most the three beats after which a silent peer is gone.
    async with nodes(tmp_path) as swarm:
        bootstrap, trainer, address = await settled(swarm)
        first = await swarm.worker("peer", (address,))
        first.run()
        await until(lambda: len(bootstrap.node.neighbours) == 2)
        await swarm.stop(first)  # without a goodbye
        begun_s = time.monotonic()
        again = await swarm.worker("peer", (address,))
        again.run()
        waited_s = time.monotonic() - begun_s
        assert waited_s < SILENT_S + 2.0
        await trainer.announce(1)
        await until(lambda: again.version == 1)
        await lives_on(again, 2 * BEAT_S)


async def test_b07_after_a_goodbye_the_identity_is_free_at_once(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        bootstrap, _, address = await settled(swarm)
        first = await swarm.worker("peer", (address,))
        first.run()
        await until(lambda: len(bootstrap.node.neighbours) == 2)
        await first.follower.heartbeats.say_goodbye()
        await swarm.stop(first)
        begun_s = time.monotonic()
        await swarm.worker("peer", (address,))
        assert time.monotonic() - begun_s < SILENT_S / 2
