"""The directory over real hosts: records get through, and every node refuses what the rules forbid (B48, B101)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import pytest
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.proto import dht_pb2

from protocols.directory import DirectoryRules, RecordKey, RecordKind
from protocols.envelopes import seal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import public_of, run_id_of
from protocols.manifest import Manifest
from protocols.messages import AdapterRef, Announcement, BlobRef, CapacityAd, TrainedOn
from swarm.directory import PROMPT_S, RPC_TIMEOUT_S, Directory
from swarm.hivemind_guard import node_id_of
from swarm.host import Host, HostConfig
from swarm.identity import Identity
from tests.hosts import fault_of, free_port, hosts, identity, until

pytestmark = pytest.mark.network


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest):
    return request.param()


class Swarm:
    """Hosts with a directory each. host0 is the owner and bootstrap peer, host1 the trainer."""

    def __init__(self, folder: Path, started: list[Host]) -> None:
        self.folder = folder
        self.hosts = started
        self.people = [identity(folder, f"host{number}") for number in range(len(started))]
        self.run = run_id_of("demo", public_of(self.people[0].peer_id))
        self.manifest, self.head, self.peers = (
            RecordKey(self.run, kind) for kind in (RecordKind.MANIFEST, RecordKind.HEAD, RecordKind.PEERS)
        )
        self.nodes: list[Directory] = []

    async def start(self) -> None:
        for host in self.hosts:
            known = [self.hosts[0].addresses[0]] if self.nodes else []
            self.nodes.append(await Directory.start(host, [DirectoryRules(self.run)], known))

    def manifest_of(self, revision: int, signer: Identity | None = None) -> bytes:
        trainers = (self.people[1].peer_id,)
        manifest = Manifest(run=self.run, revision=revision, trainers=trainers, issued_ms=0)
        return seal((signer or self.people[0]).key, manifest).raw

    def head_of(self, version: int, signer: Identity) -> bytes:
        adapter = AdapterRef(digest=bytes(32), keyframe=BlobRef(root=bytes(32), size=1))
        announcement = Announcement(
            run=self.run,
            version=version,
            parent=bytes(32),
            adapter=adapter,
            trained_on=TrainedOn(count=0, max_lag=0, root=bytes(32)),
            bound=4,
            created_ms=0,
        )
        return seal(signer.key, announcement).raw

    def advert_of(self, signer: Identity) -> bytes:
        ad = CapacityAd(run=self.run, session=bytes(16), role="inference", issued_ms=int(time.time() * 1000))
        return seal(signer.key, ad).raw

    async def publish_manifest(self) -> None:
        """On every node, as every peer republishes it."""
        raw = self.manifest_of(1)
        for node in self.nodes:
            await node.get(self.manifest)
        assert await self.nodes[0].put(self.manifest, raw, time.time() + 600)
        for node in self.nodes:
            assert await node.get(self.manifest) == {None: raw}

    async def store_by_hand(self, key: str, subkey: str | None, value: bytes, expires_s: float) -> list[object]:
        """Ask every node but the last to store a record, as the last one, with no rules in between: their answers."""
        attacker = self.hosts[-1]
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(key).to_bytes()],
            subkeys=[msgpack.packb(subkey)],
            values=[value],
            expiration_time=[expires_s],
            in_cache=[False],
            peer=dht_pb2.NodeInfo(node_id=node_id_of(attacker.p2p.peer_id).to_bytes()),
        )
        answers = []
        for host in self.hosts[:-1]:
            raw = await attacker.p2p.control.call_unary_handler(
                host.p2p.peer_id, "DHTProtocol.rpc_store", request.SerializeToString()
            )
            answers += dht_pb2.StoreResponse.FromString(raw).store_ok
        return answers

    def refusals(self, reason: str) -> list[int]:
        return [node.refusals[reason] for node in self.nodes[:-1]]


@asynccontextmanager
async def swarm(folder: Path, count: int) -> AsyncIterator[Swarm]:
    async with hosts(folder, count, linked=False) as started:
        made = Swarm(folder, started)
        try:
            await made.start()
            yield made
        finally:
            for node in made.nodes:
                await node.close()


async def test_records_of_everybody_are_found_by_everybody(tmp_path: Path) -> None:
    async with swarm(tmp_path, 6) as made:
        await made.publish_manifest()
        for node, person in zip(made.nodes, made.people, strict=True):
            assert await node.put(made.peers, made.advert_of(person), time.time() + 60, subkey=person.peer_id)
        assert await made.nodes[1].put(
            made.head, made.head_of(3, made.people[1]), time.time() + 600, subkey=made.people[1].peer_id
        )
        for node in made.nodes:
            assert set(await node.get(made.peers)) == {person.peer_id for person in made.people}
            assert node.held(made.peers).items() <= (await node.get(made.peers)).items()
            assert await node.get(made.head) == {made.people[1].peer_id: made.head_of(3, made.people[1])}
            assert node.refusals == {}
        await until(lambda: [node.size for node in made.nodes] == [5] * 6)
        assert sum(len(node.held(made.peers)) for node in made.nodes) >= 5 * 6, "five replicas of each"


async def test_a_newer_record_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    async with swarm(tmp_path, 3) as made:
        await made.publish_manifest()
        trainer = made.people[1]
        for version in (1, 2):
            raw = made.head_of(version, trainer)
            assert await made.nodes[1].put(made.head, raw, time.time() + 600, subkey=trainer.peer_id)
            assert [await node.get(made.head) for node in made.nodes] == [{trainer.peer_id: raw}] * 3
        assert await made.nodes[0].put(made.manifest, made.manifest_of(2), time.time() + 600)
        assert [await node.get(made.manifest) for node in made.nodes] == [{None: made.manifest_of(2)}] * 3
        assert not await made.nodes[0].put(made.manifest, made.manifest_of(1), time.time() + 601), (
            "our own rules refuse"
        )


async def test_b101_no_node_stores_a_record_in_another_peers_name(tmp_path: Path) -> None:
    async with swarm(tmp_path, 4) as made:
        await made.publish_manifest()
        trainer, attacker = made.people[1], made.people[3]
        late = time.time() + 50
        tries = [
            (made.peers.text, trainer.peer_id, made.advert_of(attacker), "sender is not the subkey"),
            (made.head.text, trainer.peer_id, made.head_of(9, attacker), "sender is not the subkey"),
            (made.head.text, attacker.peer_id, made.head_of(9, attacker), "not a trainer"),
            (made.manifest.text, None, made.manifest_of(9, attacker), "foreign manifest"),
            (made.peers.text, None, made.advert_of(attacker), "bad subkey"),
            (made.head.text, None, made.head_of(9, attacker), "bad subkey"),
            (made.manifest.text, attacker.peer_id, made.manifest_of(1), "bad subkey"),
            (f"{made.run}/something", None, made.advert_of(attacker), "unknown key"),
            ("other-aaaaaaaaaaaaaaaa/manifest", None, made.manifest_of(9), "unknown key"),
        ]
        for number, (key, subkey, raw, reason) in enumerate(tries):
            before = made.refusals(reason)
            answers = await made.store_by_hand(key, subkey, msgpack.packb(raw), late + number)
            assert answers == [False, False, False], reason
            assert made.refusals(reason) == [count + 1 for count in before], reason
        honest = await made.store_by_hand(
            made.peers.text, attacker.peer_id, msgpack.packb(made.advert_of(attacker)), late
        )
        assert honest == [True, True, True], "its own name is its own"
        for node in made.nodes[:3]:
            assert await node.get(made.head) == {}
            assert set(await node.get(made.peers)) == {attacker.peer_id}


async def test_b48_no_node_stores_a_record_for_ten_years(tmp_path: Path) -> None:
    async with swarm(tmp_path, 4) as made:
        await made.publish_manifest()
        attacker, forever = made.people[3], time.time() + 10 * 365 * 86400
        for key, subkey, raw in (
            (made.peers, attacker.peer_id, made.advert_of(attacker)),
            (made.manifest, None, made.manifest_of(1)),
        ):
            assert await made.store_by_hand(key.text, subkey, msgpack.packb(raw), forever) == [False] * 3
        assert made.refusals("bad expiry") == [2, 2, 2]
        assert not await made.nodes[3].put(made.peers, made.advert_of(attacker), forever, subkey=attacker.peer_id)


async def test_b45_an_old_manifest_and_an_old_head_are_refused_by_every_node(tmp_path: Path) -> None:
    async with swarm(tmp_path, 4) as made:
        await made.publish_manifest()
        trainer = made.people[1]
        assert await made.nodes[0].put(made.manifest, made.manifest_of(7), time.time() + 500), "though it expires first"
        assert await made.nodes[1].put(made.head, made.head_of(9, trainer), time.time() + 500, subkey=trainer.peer_id)
        late = time.time() + 600
        assert (
            await made.store_by_hand(made.manifest.text, None, msgpack.packb(made.manifest_of(6)), late) == [False] * 3
        )
        old_head = msgpack.packb(made.head_of(0, trainer))
        assert await made.store_by_hand(made.head.text, trainer.peer_id, old_head, late) == [False] * 3
        assert await made.nodes[2].get(made.head) == {trainer.peer_id: made.head_of(9, trainer)}
        assert await made.nodes[2].get(made.manifest) == {None: made.manifest_of(7)}


async def test_a_record_that_a_new_manifest_forbids_is_no_longer_given_out(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as made:
        await made.publish_manifest()
        trainer, other = made.people[1], identity(tmp_path, "other")
        await made.nodes[1].put(made.head, made.head_of(1, trainer), time.time() + 600, subkey=trainer.peer_id)
        assert set(await made.nodes[0].get(made.head)) == {trainer.peer_id}
        changed = Manifest(run=made.run, revision=2, trainers=(other.peer_id,), issued_ms=0)
        await made.nodes[0].put(made.manifest, seal(made.people[0].key, changed).raw, time.time() + 600)
        assert await made.nodes[0].get(made.head) == {}


async def test_expired_records_are_not_given_out(tmp_path: Path) -> None:
    async with hosts(tmp_path, 1) as (host,):
        person = identity(tmp_path, "host0")
        run = run_id_of("demo", public_of(person.peer_id))
        ahead_s = 0.0
        node = await Directory.start(host, [DirectoryRules(run)], clock=lambda: time.time() + ahead_s)
        key = RecordKey(run, RecordKind.PEERS)
        ad = CapacityAd(run=run, session=bytes(16), role="inference", issued_ms=int(time.time() * 1000))
        raw = seal(person.key, ad).raw
        assert await node.put(key, raw, time.time() + 60, subkey=person.peer_id), "alone, we hold it ourselves"
        assert await node.get(key) == {person.peer_id: raw}
        ahead_s = 60.5
        assert await node.get(key) == {}
        await node.close()


async def test_a_client_reads_and_writes_but_holds_nothing(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3, linked=False) as started:
        made = Swarm(tmp_path, started[:2])
        await made.start()
        person = identity(tmp_path, "host2")
        known = [started[0].addresses[0]]
        client = await Directory.start(started[2], [DirectoryRules(made.run)], known, client_mode=True)
        raw = made.advert_of(person)
        assert await client.put(made.peers, raw, time.time() + 60, subkey=person.peer_id)
        assert await client.get(made.peers) == {person.peer_id: raw}
        assert await made.nodes[1].get(made.peers) == {person.peer_id: raw}
        assert [node.size for node in made.nodes] == [1, 1], "nobody counts on it"
        for node in (client, *made.nodes):
            await node.close()


async def test_b01_dead_bootstrap_peers_are_skipped_with_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(tmp_path, 2, linked=False) as started:
        made = Swarm(tmp_path, started[:1])
        await made.start()
        dead = identity(tmp_path, "dead").peer_id
        known = [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{dead}", dead, "rubbish", started[0].addresses[0]]
        node = await Directory.start(started[1], [DirectoryRules(made.run)], known)
        assert node.size == 1
        lines = [record.getMessage() for record in caplog.records if "directory:" in record.getMessage()]
        assert len(lines) == 3
        assert any("refused" in line for line in lines)
        assert (await fault_of(node.add_peer(dead, 5.0))).code == "unreachable"
        with pytest.raises(PeerFault, match="malformed peer id"):
            await node.add_peer("rubbish")
        await node.close()
        await made.nodes[0].close()


async def test_b18_a_restarted_bootstrap_peer_is_linked_again(tmp_path: Path) -> None:
    async with swarm(tmp_path, 3) as made:
        await made.publish_manifest()
        port = made.hosts[0].addresses[0].rpartition("/p2p/")[0]
        await made.nodes[0].close()
        await made.hosts[0].close()
        person = made.people[2]
        assert await made.nodes[2].put(made.peers, made.advert_of(person), time.time() + 60, subkey=person.peer_id)
        assert set(await made.nodes[1].get(made.peers)) == {person.peer_id}, "the others go on without it"
        made.hosts[0] = await Host.start(made.people[0], HostConfig(listen=(port,)))
        made.nodes[0] = await Directory.start(made.hosts[0], [DirectoryRules(made.run)])
        assert made.nodes[0].size == 0
        try:
            for host, node in zip(made.hosts[1:], made.nodes[1:], strict=True):
                await until_linked(host, node, made.hosts[0])
            assert made.nodes[0].size == 2
            assert await made.nodes[0].get(made.manifest) == {None: made.manifest_of(1)}
            assert set(await made.nodes[0].get(made.peers)) == {person.peer_id}
        finally:
            await made.nodes[0].close()
            await made.hosts[0].close()


async def until_linked(host: Host, node: Directory, bootstrap: Host) -> None:
    """What a peer does that lost its bootstrap peer: dial until it answers (p2pd allows one dial in some seconds)."""
    codes: list[str] = []
    async with asyncio.timeout(20.0):
        while bootstrap.peer_id not in await host.peers():
            try:
                await host.connect(bootstrap.addresses[0], 2.0)
            except TransportFault as fault:
                codes.append(fault.code)
                await asyncio.sleep(0.2)
        await node.add_peer(bootstrap.peer_id)
    assert set(codes) <= {"refused", "unreachable"}


async def test_nodes_that_do_not_answer_hold_up_one_search_and_no_store(tmp_path: Path) -> None:
    async with swarm(tmp_path, 4) as made:
        await made.publish_manifest()
        answered = {}
        for host in made.hosts[2:]:
            handlers = host.p2p.control.unary_handlers
            for name in [name for name in handlers if name.startswith("DHTProtocol")]:
                answered[host, name] = handlers[name]
                handlers[name] = silent
        raw, subkey = made.advert_of(made.people[1]), made.people[1].peer_id
        spent_s = []
        for life_s in (40, 45, 50):
            began_s = time.monotonic()
            assert await made.nodes[1].put(made.peers, raw, time.time() + life_s, subkey=subkey)
            spent_s.append(time.monotonic() - began_s)
        assert spent_s[0] < RPC_TIMEOUT_S + 2 * PROMPT_S, "the search waits once, the store for nobody"
        assert max(spent_s[1:]) < 2 * PROMPT_S, "they are left out"
        for (host, name), handler in answered.items():
            host.p2p.control.unary_handlers[name] = handler
        assert await made.nodes[2].get(made.peers) == {subkey: raw}, "asks, and so is heard of"
        ours = made.advert_of(made.people[2])
        assert await made.nodes[1].put(made.peers, ours, time.time() + 50, subkey=made.people[2].peer_id)
        assert made.people[2].peer_id in made.nodes[2].held(made.peers)


async def silent(request: bytes, peer: object) -> bytes:
    """A handler of a node that hangs."""
    await asyncio.Event().wait()
    return b""


async def test_every_wait_ends_when_nobody_answers(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as made:
        await made.publish_manifest()

        handlers = made.hosts[0].p2p.control.unary_handlers
        for name in [name for name in handlers if name.startswith("DHTProtocol")]:
            handlers[name] = silent
        began = time.monotonic()
        assert (await fault_of(made.nodes[1].get(made.peers, 0.3))).code == "timeout"
        raw, subkey = made.advert_of(made.people[1]), made.people[1].peer_id
        fault = await fault_of(made.nodes[1].put(made.peers, raw, time.time() + 60, subkey=subkey, timeout_s=0.3))
        assert fault.code == "timeout"
        assert (await fault_of(made.nodes[1].add_peer(made.hosts[0].peer_id, 0.3))).code == "timeout"
        assert time.monotonic() - began < 2.0


async def test_nothing_hangs_when_p2pd_is_dead(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as made:
        await made.publish_manifest()
        made.hosts[1].p2p._child.kill()
        await made.hosts[1].died.wait()
        async with asyncio.timeout(5.0):
            assert await made.nodes[1].get(made.manifest) == {None: made.manifest_of(1)}, "what we hold ourselves"
            await made.nodes[1].close()
