"""What anybody with a connection can send to real nodes: none of it ends a process or spoils what others are told."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from msgspec import structs

from peers.coordinator import Coordinator
from protocols.directory import RecordKey, RecordKind, shard_of
from protocols.election import Heard, Put
from protocols.envelopes import Sealed, seal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import peer_id_of
from protocols.manifest import CoordinationSpec
from protocols.messages import (
    CapacityAd,
    ChainRequest,
    Envelopes,
    Heartbeat,
    Lease,
    Status,
    StatusRequest,
    decode_reply,
    decode_request,
    encode,
)
from protocols.presence import SILENT_S
from swarm.candidate import INBOX_MAX
from swarm.follower import OFFENCES_MAX
from swarm.host import Host, HostConfig
from swarm.identity import Identity, load_identity
from swarm.node import STATUS_LIFE_S, Neighbour, now_ms
from tests.hosts import fault_of, hosts, until
from tests.nodes import Nodes, Running, nodes
from tests.samples import OTHER_TRAINER_ID, OWNER, RUN, STRANGER, STRANGER_ID, TRAINER, TRAINER_ID, manifest

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


@asynccontextmanager
async def host(folder: Path) -> AsyncIterator[Host]:
    """A stranger's host, without a node."""
    host = await Host.start(load_identity(folder / "stranger.key")[0], HostConfig())
    try:
        yield host
    finally:
        await host.close()


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize("name", ["a..b", "a" * 70, "é..é"])
async def test_a_name_that_cannot_be_looked_up_is_a_fault_of_the_address(tmp_path: Path, name: str) -> None:
    async with hosts(tmp_path, 1) as (one,):
        fault = await fault_of(one.connect(f"/dns4/{name}/tcp/1/p2p/{STRANGER_ID}", 1.0))
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
        async with host(tmp_path) as stranger:
            await stranger.connect(address)
            status = decode_reply(await stranger.call(peer_id, encode(StatusRequest(RUN))))
        assert isinstance(status, Status)
        assert [row.role for row in status.peers] == ["bootstrap", "trainer"]
        assert bootstrap.node.host.refusals["malformed peer id"] == 2


# ---------------------------------------------------------------------- status


async def test_a_crowd_of_strangers_neither_empties_nor_falsifies_a_status(tmp_path: Path) -> None:
    # A thousand made-up peers with the longest labels there are say that they are trainers, and know everything.
    words, most = "\N{GRINNING FACE}" * 128, 2**32 - 1
    beat = encode(beat_of("trainer", accepted=most, stale=most, step=most, started=most, in_flight=most, outbox=most))
    async with nodes(tmp_path) as swarm:
        bootstrap, _, _ = await small_swarm(swarm)
        await until(lambda: TRAINER_ID in bootstrap.node.neighbours)
        node, ads = bootstrap.node, bootstrap.follower.neighbourhood.ads
        trainers_own = node.neighbours.pop(TRAINER_ID)  # comes last
        for number in range(1000):
            peer = peer_id_of(number.to_bytes(32, "big"))
            await node._serve(beat, peer)
            ad = CapacityAd(run=RUN, session=bytes(16), role="trainer", issued_ms=1, engine=words, device=words)
            ads[peer] = Sealed(peer, ad, b"", b"")
        node.neighbours[TRAINER_ID] = Neighbour(
            structs.replace(trainers_own.beat, accepted=3, stale=1, step=2), time.monotonic()
        )
        status = decode_reply(await node._serve(encode(StatusRequest(RUN)), STRANGER_ID))
        assert isinstance(status, Status)
        assert (status.accepted, status.stale, status.step) == (3, 1, 2)
        assert len(status.peers) > 800
        assert status.left_out == 1002 - len(status.peers)
        assert goes_on(bootstrap)


async def test_a_flood_of_questions_is_answered_from_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(tmp_path) as swarm:
        bootstrap, _, _ = await small_swarm(swarm)
        looks, real = [], bootstrap.follower.status

        def status(now_s: float, now_ms: int) -> Status | None:
            looks.append(now_s)
            return real(now_s, now_ms)

        monkeypatch.setattr(bootstrap.follower, "status", status)
        began_s = time.monotonic()
        answers = {await bootstrap.node._serve(encode(StatusRequest(RUN)), STRANGER_ID) for _ in range(200)}
        assert len(answers) == len(looks) <= (time.monotonic() - began_s) / STATUS_LIFE_S + 1


# ---------------------------------------------------------------------- neighbours that come and go


async def test_a_neighbour_that_leaves_while_another_is_given_up_ends_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To give up a connection takes p2pd's time; meanwhile one that was silent for long says goodbye, or is back.
    async with nodes(tmp_path) as swarm:
        bootstrap, _, _ = await small_swarm(swarm)
        node, given_up = bootstrap.node, []
        quiet, gone, back = (peer_id_of(bytes([number]) * 32) for number in range(3))

        async def disconnect(peer_id: str) -> None:
            given_up.append(peer_id)
            for peer, leaving in ((gone, True), (back, False)):
                await node._serve(encode(beat_of("inference", leaving=leaving)), peer)

        monkeypatch.setattr(node.host, "disconnect", disconnect)
        for peer, silent_s in ((quiet, SILENT_S), (gone, 11 * SILENT_S), (back, 11 * SILENT_S)):
            node.neighbours[peer] = Neighbour(beat_of("inference"), time.monotonic() - silent_s)
        await until(lambda: quiet in given_up)
        await until(lambda: given_up.count(quiet) == 1 and gone not in node.neighbours)
        assert back in node.neighbours
        assert goes_on(bootstrap)


# ---------------------------------------------------------------------- a chain, drop by drop


async def test_a_source_that_gives_one_version_at_a_time_holds_nobody_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.follower.CATCH_UP_S", 0.5)
    async with nodes(tmp_path) as swarm, host(tmp_path) as dripping:
        _, trainer, address = await small_swarm(swarm)
        chain = [(await trainer.announce(version)).raw for version in range(1, 20)]
        worker = await swarm.start("worker", "inference", (address,))
        await worker.follower.find_manifest()
        await worker.follower.open_chain()
        assert trainer.follower.chain is not None
        chain.insert(0, trainer.follower.chain.entries[0].raw)

        async def drip(raw: bytes, peer_id: str) -> bytes:
            request = decode_request(raw)
            assert isinstance(request, ChainRequest)
            await asyncio.sleep(0.4)
            return encode(Envelopes((chain[request.first],)))

        await dripping.serve(drip)
        await worker.node.host.connect(dripping.addresses[0])
        await worker.follower.catch_up(dripping.peer_id)
        assert 0 <= worker.version < 5
        await worker.follower.catch_up(worker.node.bootstraps[address])
        assert worker.version == 19


# ---------------------------------------------------------------------- a manifest that changes who may lead


async def test_a_coordinator_that_a_new_manifest_does_not_name_steps_down_and_goes_on(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, _ = await small_swarm(swarm)
        candidate, rules = trainer.follower.candidate, trainer.follower.rules
        coordinator = Coordinator(trainer.node, trainer.follower)
        await until(lambda: candidate.leads, 15.0)
        assert coordinator.view is not None
        await coordinator._one_beat(coordinator.view)
        said = trainer.follower.orders.newest
        assert said is not None
        rules.learn(seal(OWNER, manifest(revision=2, trainers=(OTHER_TRAINER_ID,))))
        await coordinator._one_beat(coordinator.view)
        assert trainer.follower.orders.coordinator is None
        await until(lambda: not candidate.leads)
        assert coordinator.view is None
        assert goes_on(trainer)


async def test_an_answer_that_comes_after_an_election_is_not_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A store is under way when a manifest ends our part in the election; the next manifest lets us in again.
    async with nodes(tmp_path) as swarm:
        _, trainer, _ = await small_swarm(swarm)
        candidate, rules = trainer.follower.candidate, trainer.follower.rules
        stored, puts = asyncio.Event(), []

        async def put(action: Put) -> bool:
            puts.append(action)
            await stored.wait()
            return True

        monkeypatch.setattr(candidate, "_put", put)
        await until(lambda: puts, 15.0)
        first = candidate.election
        rules.learn(seal(OWNER, manifest(revision=2, trainers=(OTHER_TRAINER_ID,))))
        candidate._post(Heard(()))
        await until(lambda: candidate._events.empty())
        stored.set()
        await until(lambda: candidate.election is None)
        rules.learn(seal(OWNER, manifest(revision=3)))
        await until(lambda: candidate.election is not None and len(puts) > 1, 15.0)
        assert candidate.election is not first
        assert goes_on(trainer)


async def test_a_peer_that_takes_no_part_collects_no_claims(tmp_path: Path) -> None:
    # An inference peer hears all leases, for hours, and has nobody who takes them out of the election's inbox.
    async with nodes(tmp_path) as swarm:
        _, _, address = await small_swarm(swarm)
        worker = await swarm.worker("worker", (address,))
        candidate = worker.follower.candidate
        for term in range(INBOX_MAX + 10):
            candidate.heard(seal(TRAINER, Lease(RUN, term, "claimed", now_ms())))
        assert candidate.election is None
        assert candidate._events.empty()
        assert not worker.follower.refusals["inbox full"]


async def test_a_new_lease_length_begins_a_new_election(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, _ = await small_swarm(swarm)
        candidate, rules = trainer.follower.candidate, trainer.follower.rules
        await until(lambda: candidate.election is not None)
        rules.learn(seal(OWNER, manifest(revision=2, coordination=CoordinationSpec(lease_s=60.0))))
        await until(lambda: candidate.election is not None and candidate.election.config.lease_s == 60.0)
        assert goes_on(trainer)


async def test_a_revision_reaches_those_whom_nobody_tells(tmp_path: Path) -> None:
    # A record is stored by the few nodes nearest to its key; everybody else has to look.
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm)
        worker = await swarm.worker("worker", (address,))
        old, rules = worker.follower.rules.manifest, worker.follower.rules
        trainer.follower.rules.learn(seal(OWNER, manifest(revision=2, trainers=(TRAINER_ID, OTHER_TRAINER_ID))))
        await trainer.follower.neighbourhood.put_manifest()
        rules.manifest = old  # as if it were not among those few
        worker.node.directory._validator.storage.clear()
        looking = asyncio.create_task(worker.follower.neighbourhood.keep_near())
        try:
            await until(lambda: rules.manifest is not None and rules.manifest.message.revision == 2)
        finally:
            looking.cancel()


async def test_b48_a_candidate_that_our_manifest_does_not_name_is_not_obeyed_and_not_banned(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        bootstrap, _, _ = await small_swarm(swarm)
        follower = bootstrap.follower
        for number in range(2 * OFFENCES_MAX):
            until_ms = now_ms() + number
            follower.control.enqueue(STRANGER_ID, seal(STRANGER, Lease(RUN, number, "claimed", until_ms)).raw)
        await until(lambda: follower.refusals["not eligible"] == 2 * OFFENCES_MAX)
        assert not follower.ignores(STRANGER_ID)
        assert follower.orders is not None
        assert follower.orders.coordinator != STRANGER_ID
