"""The trainer's calls of a round, over real hosts: a round that cannot end by itself is called anew."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from peers.rounds import Rounds, RoundWork
from protocols.delivery import Queued
from protocols.messages import Heartbeat, Reply, RoundCall, RoundReply
from protocols.rounds import STALL_MIN_S
from tests.hosts import until
from tests.nodes import nodes
from tests.samples import RUN

pytestmark = pytest.mark.network

BATCH = 4


class Worker:
    """The one worker of a run: what it was called for, as a real one keeps it, and the calls."""

    def __init__(self) -> None:
        self.work = RoundWork()
        self.calls: list[RoundCall] = []

    def called(self, call: RoundCall, peer_id: str) -> Reply:
        self.calls.append(call)
        self.work.called(call)
        return RoundReply(call.count)


@asynccontextmanager
async def one_worker(folder: Path) -> AsyncIterator[tuple[Rounds, Worker, str]]:
    """The trainer's rounds, its only worker, and the worker's peer id; the worker has been called for a batch."""
    async with nodes(folder) as swarm:
        bootstrap = await swarm.bootstrap()
        address = bootstrap.node.host.addresses[0]
        trainer = await swarm.trainer((address,))
        await trainer.announce(0)
        running, worker = await swarm.worker("worker", (address,)), Worker()
        session = running.node.session
        running.follower.heartbeats.beat = lambda: Heartbeat(run=RUN, session=session, role="inference", version=0)
        running.node.on_round = worker.called
        running.run()
        await until(lambda: running.node.peer_id in trainer.node.neighbours)
        rounds = Rounds(trainer.follower)
        try:
            rounds.keep_open(0, BATCH)
            await until(lambda: worker.work.left(0, 0) == BATCH)
            yield rounds, worker, running.node.peer_id
        finally:
            rounds.cancel()


def groups(worker: str, count: int) -> list[Queued]:
    return [Queued(bytes(32), worker, counter, 0) for counter in range(count)]


async def test_the_only_worker_forgets_its_call_and_is_asked_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Restarted within three beats it was never missed; or it lost what it had begun to a full disk.
    async with one_worker(tmp_path) as (rounds, worker, peer_id):
        worker.work.begun = BATCH
        rounds.delivered(peer_id, groups(peer_id, 1))
        first = rounds.open
        assert first is not None
        monkeypatch.setattr("protocols.rounds.STALL_SLACK", 0.0)
        first._workers[peer_id].progress_s -= STALL_MIN_S
        rounds.keep_open(0, BATCH - 1)
        await until(lambda: worker.work.left(0, 0) == BATCH - 1)
        assert worker.calls[-1].number > first.number
        rounds.delivered(peer_id, groups(peer_id, BATCH - 1))
        assert rounds.open is not None
        assert rounds.open.done


async def test_groups_that_became_too_old_after_the_call_are_called_for_again(tmp_path: Path) -> None:
    # The mode changed while the trainer waited: what the round had counted on is not within the new bound.
    async with one_worker(tmp_path) as (rounds, worker, peer_id):
        worker.work.begun = BATCH
        rounds.delivered(peer_id, groups(peer_id, BATCH))
        rounds.keep_open(0, 0)
        rounds.keep_open(0, 2)
        await until(lambda: worker.work.left(0, 0) == 2)
        assert [call.count for call in worker.calls] == [BATCH, 2]
