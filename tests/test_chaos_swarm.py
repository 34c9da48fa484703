"""The trainer of a whole swarm of real processes dies while a version is on its way (case B26)."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import START_S, Swarm, wait_until
from tests.test_crashes import chain_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.close()


def test_b26_the_trainer_dies_when_one_peer_has_the_version(swarm: Swarm) -> None:
    # Goal: the others get that version from this peer, digest-checked, and generate with it; the trainer, started
    # again, goes on from it.
    # Method: nothing older than the head is trained on, so a version is followed by another one only where somebody
    # generates with it. Two peers sleep from early on; the third fetches version after version until it stops itself
    # while it loads one.
    swarm.start_bootstrap()
    trainer = swarm.start("trainer", "--steps", "100000", "--max-lag", "0")
    sleepers = [swarm.start(name) for name in ("sleeper-1", "sleeper-2")]
    for sleeper in sleepers:
        sleeper.wait_for_event("adapter")
        sleeper.pause()
    database = trainer.home / "trainer.sqlite"
    last = len(chain_of(database)) + 2
    holder = swarm.start("holder", "--stop-at-load", str(last))
    holder.wait_paused()
    trainer.kill()
    trainer.wait()
    committed = chain_of(database)
    assert len(committed) == last + 1, "its successor was made without anybody generating"
    assert all(event["version"] < last for sleeper in sleepers for event in sleeper.events("adapter"))

    woken_s = time.time()
    for peer in (holder, *sleepers):
        peer.resume()
    for sleeper in sleepers:
        got = sleeper.wait_for_event("adapter", since_s=woken_s, version=last)
        assert got["bytes"] > 0
        assert got["source"] in {peer.peer_id for peer in (holder, *sleepers)} - {sleeper.peer_id}
        sleeper.wait_for_event("generated", since_s=woken_s, version=last)
        assert [event["code"] for event in sleeper.events("warning") if "adapter" in event["code"]] == []
        (chain,) = (chain_of(path) for path in sleeper.home.glob("*.sqlite"))
        assert chain == committed

    again = swarm.again(trainer)
    wait_until(lambda: len(chain_of(database)) > last + 2, START_S, again)
    assert chain_of(database)[: last + 1] == committed
    for sleeper in sleepers:
        wait_until(lambda: sleeper.events("adapter")[-1]["version"] > last, START_S, sleeper)  # noqa: B023
