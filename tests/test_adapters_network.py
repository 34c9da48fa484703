"""Versions over real streams: any size arrives bit for bit, and slow peers get somewhere (cases B29, B31)."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocols.faults import TransportFault
from protocols.policy import Chain
from swarm.adapters import Adapters
from swarm.blobs import BlobStore
from swarm.exchange import Exchange
from tests.hosts import hosts, until
from tests.samples import manifest
from tests.test_adapters_obtain import Trainer

pytestmark = pytest.mark.network

MB = 1_000_000


class Peer:
    """A host with blobs, and a chain that the test writes."""

    def __init__(self, exchange: Exchange, sources: list[str]) -> None:
        self.exchange = exchange
        self.chain = Chain(manifest())
        self.adapters = Adapters(exchange, self.chain, lambda version: sources)

    def hear(self, trainer: Trainer) -> None:
        for sealed in trainer.said[len(self.chain.entries) :]:
            self.chain.extend(sealed)

    async def catch_up(self, trainer: Trainer) -> str:
        self.hear(trainer)
        assert self.chain.head is not None
        got = await self.adapters.obtain(self.chain.head)
        assert got.rebuilt.adapter == trainer.adapters[got.rebuilt.version]
        return " ".join(f"{'D' if hop.codec else 'K'}{hop.version}" for hop in got.hops)


class Holder:
    """Where a trainer's blobs are put, as they come."""

    def __init__(self, exchange: Exchange, trainer: Trainer) -> None:
        self.exchange, self.trainer = exchange, trainer

    def publish(self) -> None:
        for blob in self.trainer.blobs.values():
            self.exchange.blobs.put(blob)


@asynccontextmanager
async def swarm(folder: Path, count: int, trainer: Trainer) -> AsyncIterator[tuple[Holder, list[Peer]]]:
    """A trainer's host, and as many peers that are linked with all and ask all others."""
    async with hosts(folder, 1 + count) as linked:
        pairs = itertools.combinations(linked, 2)
        await asyncio.gather(*(one.connect(other.addresses[0], 10.0) for one, other in pairs))
        made = [Exchange(host, BlobStore(folder / f"blobs{number}")) for number, host in enumerate(linked)]
        await asyncio.gather(*(each.start() for each in made))
        ids = [host.peer_id for host in linked]
        peers = [Peer(each, [peer for peer in ids if peer != each.host.peer_id]) for each in made[1:]]
        holder = Holder(made[0], trainer)
        holder.publish()
        yield holder, peers


@pytest.mark.parametrize("megabytes", [3.9, 4.1, 8.0, 64.0])
async def test_b29_deltas_of_any_size_arrive_bit_for_bit(tmp_path: Path, megabytes: float) -> None:
    # Goal: no size is special. bfloat16 in, the same bits out; and what is measured is what was sent.
    elements = int(megabytes * MB / 1.4114)  # bytes of a lossless delta between two unrelated adapters, an element
    trainer = Trainer(elements=elements, keyframe_every=10).steps(1)
    async with swarm(tmp_path, 1, trainer) as (holder, (peer,)):
        assert await peer.catch_up(trainer) == "K0"
        said = trainer.step()
        holder.publish()
        delta = said.adapter.delta
        assert delta is not None
        assert delta.blob.size == pytest.approx(megabytes * MB, rel=0.01)
        peer.hear(trainer)
        assert peer.chain.head is not None
        got = await peer.adapters.obtain(peer.chain.head)
        assert got.rebuilt.adapter == trainer.adapters[1]
        assert {tensor.dtype for tensor in got.rebuilt.adapter.values()} == {"BF16"}
        assert got.received == {holder.exchange.host.peer_id: delta.blob.size}
        assert peer.exchange.received_bytes == delta.blob.size + trainer.said[0].message.adapter.keyframe.size


async def test_b31_a_slow_worker_gets_v5_or_jumps_to_the_head(tmp_path: Path) -> None:
    # Goal: v5 is on its way when v6 to v9 are published and v5 is cleaned up. An open reader is protected, or the
    # answer is a clean "gone"; either way the worker ends at a version that was announced, and then at the head.
    trainer = Trainer(elements=4 * MB, codec="raw").steps(6)
    async with swarm(tmp_path, 1, trainer) as (holder, (peer,)):
        peer.hear(trainer)
        assert peer.chain.head is not None
        root = peer.chain.head.message.adapter.keyframe.root
        obtaining = asyncio.create_task(peer.adapters.obtain(peer.chain.head))
        await until(lambda: root in peer.exchange.downloads and peer.exchange.downloads[root].received_bytes > 0)
        trainer.steps(4)
        holder.publish()
        last_two = {each.message.adapter.keyframe.root for each in trainer.said[-2:]}
        await asyncio.to_thread(holder.exchange.blobs.keep_only, last_two)
        peer.hear(trainer)
        got = await obtaining
        assert got.rebuilt.version in (5, 9)
        assert got.rebuilt.adapter == trainer.adapters[got.rebuilt.version]
        if got.rebuilt.version == 5:
            assert await peer.catch_up(trainer) == "K9"
        await peer.adapters.tidy()


async def test_peers_complete_each_other_when_the_trainer_is_gone(tmp_path: Path) -> None:
    # B26 b): the trainer leaves when one of three has the version; those two get it from the third.
    trainer = Trainer(elements=2 * MB).steps(3)
    async with swarm(tmp_path, 3, trainer) as (holder, (first, *others)):
        assert await first.catch_up(trainer) == "K0 D1 D2"
        await holder.exchange.host.close()
        ways = await asyncio.gather(*(each.catch_up(trainer) for each in others))
        assert ways == ["K0 D1 D2"] * 2


async def test_b26_a_version_that_nobody_has_is_given_up_and_the_next_tried(tmp_path: Path) -> None:
    trainer = Trainer(codec="raw").steps(1)
    async with swarm(tmp_path, 1, trainer) as (holder, (peer,)):
        assert await peer.catch_up(trainer) == "K0"
        trainer.step()  # announced, and then the trainer died
        with pytest.raises(TransportFault) as fault:
            await peer.catch_up(trainer)
        assert fault.value.code == "no source"
        assert peer.adapters.newest is not None
        assert peer.adapters.newest.version == 0
        holder.publish()  # it came back
        assert await peer.catch_up(trainer) == "K1"
