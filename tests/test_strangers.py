"""What anybody with a connection can send to real nodes: none of it ends a process or spoils what others are told."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from protocols.directory import RecordKey, RecordKind, shard_of
from protocols.envelopes import seal
from protocols.faults import PeerFault, TransportFault
from protocols.messages import CapacityAd, Heartbeat, Status, StatusRequest, decode_reply, encode
from swarm.host import Host, HostConfig
from swarm.identity import Identity, load_identity
from swarm.node import now_ms
from tests.hosts import fault_of, hosts, until
from tests.nodes import Nodes, Running, nodes
from tests.samples import RUN, STRANGER, STRANGER_ID

pytestmark = pytest.mark.network


async def small_swarm(swarm: Nodes) -> tuple[Running, Running, str]:
    """A bootstrap peer and a trainer at version 0, which know each other."""
    bootstrap = await swarm.bootstrap()
    address = bootstrap.node.host.addresses[0]
    trainer = await swarm.trainer((address,))
    await trainer.announce(0)
    await until(lambda: bootstrap.version == 0)
    return bootstrap, trainer, address


def goes_on(running: Running) -> bool:
    return running.task is not None and not running.task.done()


def beat_of(role: str, **said: object) -> Heartbeat:
    return Heartbeat(run=RUN, session=bytes(16), role=role, **said)  # type: ignore[arg-type]


@asynccontextmanager
async def foreign_host(folder: Path) -> AsyncIterator[Host]:
    """A host with an RSA key: libp2p lets it in, and its peer id is none that our messages have room for."""
    der = rsa.generate_private_key(65537, 2048).private_bytes(
        Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    path = folder / "rsa.key"
    length = bytes([len(der) & 0x7F | 0x80, len(der) >> 7])  # protobuf PrivateKey: type RSA (0), then the bytes
    path.touch(0o600)
    path.write_bytes(b"\x08\x00\x12" + length + der)
    host = await Host.start(Identity(STRANGER, path), HostConfig())
    try:
        yield host
    finally:
        await host.close()


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize("name", ["a..b", "a" * 70, "é..é"])
async def test_a_name_that_cannot_be_looked_up_is_a_fault_of_the_address(tmp_path: Path, name: str) -> None:
    async with hosts(tmp_path, 1) as (host,):
        fault = await fault_of(host.connect(f"/dns4/{name}/tcp/1/p2p/{STRANGER_ID}", 1.0))
        assert fault.code == "unreachable"


async def test_an_advertised_address_that_nobody_can_dial_ends_no_node(tmp_path: Path) -> None:
    # Whoever has a key may put an advertisement into the directory, and everybody tries its addresses.
    addresses = tuple(f"/dns4/{name}/tcp/1/p2p/{STRANGER_ID}" for name in ("a..b", "a" * 70, "é..é"))
    ad = CapacityAd(run=RUN, session=bytes(16), role="inference", issued_ms=now_ms(), version=9, addresses=addresses)
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm)
        stranger = await swarm.start("stranger", "inference", (address,), STRANGER)
        key = RecordKey(RUN, RecordKind.PEERS, shard_of(STRANGER_ID, 1))
        stored = await stranger.node.directory.put(key, seal(STRANGER, ad).raw, time.time() + 30.0, STRANGER_ID)
        assert stored
        await swarm.stop(stranger)
        worker = await swarm.worker("worker", (address,))
        worker.run()
        await until(lambda: STRANGER_ID in worker.follower.neighbourhood.ads)
        with pytest.raises(TransportFault, match="unreachable"):
            await worker.follower.neighbourhood.reach(STRANGER_ID)
        await trainer.announce(1)
        await until(lambda: worker.version == 1)
        assert goes_on(worker)


# ---------------------------------------------------------------------- another kind of key


async def test_a_peer_with_another_kind_of_key_spoils_no_answer(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm, foreign_host(tmp_path) as foreigner:
        bootstrap, _, address = await small_swarm(swarm)
        peer_id = bootstrap.node.peer_id
        await foreigner.connect(address)
        for request in (beat_of("trainer", version=0), StatusRequest(RUN)):
            with pytest.raises(PeerFault, match="malformed peer id"):
                await foreigner.call(peer_id, encode(request))
        stranger = await Host.start(load_identity(tmp_path / "stranger.key")[0], HostConfig())
        try:
            await stranger.connect(address)
            status = decode_reply(await stranger.call(peer_id, encode(StatusRequest(RUN))))
        finally:
            await stranger.close()
        assert isinstance(status, Status)
        assert [row.role for row in status.peers] == ["trainer"]
        assert bootstrap.node.host.refusals["malformed peer id"] == 2
