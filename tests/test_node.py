"""Nodes and followers over real p2pd: joining, losing the bootstrap peer, equivocation, and every door."""

import asyncio
import os
import random
import struct
import time
from pathlib import Path

import msgspec
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from protocols import PROTOCOL
from protocols.directory import RecordKey, RecordKind
from protocols.envelopes import seal
from protocols.faults import PeerFault
from protocols.messages import (
    AdapterRef,
    BlobOpen,
    BlobRef,
    CapacityAd,
    ChainRequest,
    Directive,
    Envelopes,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    ManifestRequest,
    PushRollouts,
    Refused,
    encode,
)
from protocols.policy import Chain
from protocols.transfer import blob_ref
from swarm.follower import OFFENCES_MAX
from swarm.frames import BLOB_PROTOCOL
from swarm.node import now_ms
from tests.hosts import free_port, until
from tests.nodes import Nodes, Running, nodes
from tests.samples import OTHER_RUN, RUN, TRAINER, TRAINER_ID, announcement

pytestmark = pytest.mark.network

RUNS = int(os.environ.get("ECHO_SWARM_RUNS", "5"))


OTHER_ADAPTER = AdapterRef(bytes(32), BlobRef(bytes(32), 1))


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
        monkeypatch.setattr(worker.follower.policy, "enqueue", lambda sender, raw: None)
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
    return await running.node.directory.get(RecordKey(running.follower.run, RecordKind.HEAD))


# ---------------------------------------------------------------------- equivocation


async def test_b45_another_v0_after_v9_changes_nothing_and_is_evidence(tmp_path: Path) -> None:
    # Goal: a trainer that begins again is noticed, proven, and takes nobody back; a restart remembers.
    # Method: worker at v9 hears another v0 signed by the same trainer, twice, then restarts on its home.
    async with nodes(tmp_path) as swarm:
        bootstrap, trainer, address = await small_swarm(swarm, 10)
        worker = await swarm.worker("worker", (address,))
        worker.run()
        await until(lambda: bootstrap.version == worker.version == 9, 20.0)
        before = list(chain_of(worker).entries)
        other = announcement(0, adapter=OTHER_ADAPTER).raw
        async with asyncio.timeout(10.0):
            while worker.follower.refusals["equivocating trainer"] == 0:  # heard once more after it was proven
                await trainer.node.host.publish(trainer.follower.policy.name, other)
                await asyncio.sleep(0.2)
        assert chain_of(worker).entries == before
        assert worker.codes().count("equivocation") == 1
        assert worker.follower.store is not None
        proof = (TRAINER_ID, 0, before[0].raw, other)
        assert await worker.follower.store.evidence() == [proof]
        await swarm.stop(worker)

        again = await swarm.worker("worker", (address,))
        assert chain_of(again).entries == before
        assert chain_of(again).equivocations[TRAINER_ID].second == other
        again.run()
        await trainer.announce(10)
        await until(lambda: again.follower.refusals["equivocating trainer"] > 0)
        assert again.version == 9, "nothing more is taken from this trainer"
        assert not any(again.follower.ignores(peer) for peer in again.node.bootstraps.values()), "relays are innocent"

        late = await swarm.worker("late", (address,))
        assert chain_of(late).entries == before
        assert chain_of(late).equivocations[TRAINER_ID].second == other, "whoever joins later is told"


async def test_b45_a_fork_that_others_follow_is_found_by_asking_them(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm, 3)
        worker = await swarm.worker("worker", (address,))
        chain = Chain(worker.follower.manifest)
        entries = chain_of(trainer).entries
        chain.extend(entries[0])
        chain.extend(announcement(1, chain.head_hash, adapter=OTHER_ADAPTER))
        for version in range(2, 6):
            chain.extend(announcement(version, chain.head_hash))
        trainer.follower.chain = chain
        worker.run()
        await until(lambda: "equivocation" in worker.codes(), 8.0)
        assert chain_of(worker).entries == entries
        assert chain_of(worker).equivocations[TRAINER_ID].second == chain.entries[1].raw


def chain_of(running: Running) -> Chain:
    assert running.follower.chain is not None
    return running.follower.chain


# ---------------------------------------------------------------------- in another peer's name


async def test_b101_nothing_is_believed_in_another_peers_name(tmp_path: Path) -> None:
    # Goal: what C says in the names of T and W is refused on every node, bootstrap included, and counted by reason.
    async with nodes(tmp_path) as swarm:
        bootstrap, trainer, address = await small_swarm(swarm, 2)
        await until(lambda: bootstrap.version == 1, 20.0)
        worker = await swarm.worker("worker", (address,))
        worker.run()
        liar = await swarm.worker("liar", (address,))
        everybody = [bootstrap, trainer, worker]

        head = chain_of(trainer).head_hash
        own = seal(liar.node.identity.key, announcement(2, head).message)
        stolen = forge_signature(announcement(2, head).raw)
        for raw, reason in ((own.raw, "not a trainer"), (stolen, "bad signature")):
            async with asyncio.timeout(10.0):
                while not all(each.follower.refusals[reason] for each in everybody):
                    await liar.node.host.publish(liar.follower.policy.name, raw)
                    await asyncio.sleep(0.3)
        assert [each.version for each in everybody] == [1, 1, 1]

        ad = CapacityAd(run=RUN, session=bytes(16), role="trainer", issued_ms=now_ms())
        peers, heads = RecordKey(RUN, RecordKind.PEERS), RecordKey(RUN, RecordKind.HEAD)
        sealed = seal(liar.node.identity.key, ad)
        expires_s = time.time() + 50.0
        for key, raw, subkey, reason in (
            (peers, sealed.raw, TRAINER_ID, "sender is not the subkey"),
            (heads, own.raw, liar.node.peer_id, "not a trainer"),
            (heads, own.raw, TRAINER_ID, "sender is not the subkey"),
            (peers, sealed.raw[:-1] + bytes([sealed.raw[-1] ^ 1]), liar.node.peer_id, "bad signature"),
        ):
            for each in everybody:
                before = each.node.directory.refusals[reason]
                assert not await store_at(liar, each, key, raw, subkey, expires_s)
                assert each.node.directory.refusals[reason] == before + 1, (reason, each.node.config.role)


def forge_signature(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


async def store_at(
    liar: Running, target: Running, key: RecordKey, raw: bytes, subkey: str | None, expires_s: float
) -> bool:
    """One DHT store at one node, past our own rules."""
    protocol = liar.node.directory._node.protocol
    value = msgspec.msgpack.encode(raw)
    peer = PeerID.from_base58(target.node.peer_id)
    answers = await protocol.call_store(peer, [DHTID.generate(key.text)], [value], expires_s, subkeys=[subkey])
    return bool(answers and answers[0])


# ---------------------------------------------------------------------- every door


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Cut, flip, repeat or replace some bytes of a valid message."""
    data = bytearray(raw)
    match rng.randrange(5):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            at = rng.randrange(len(data))
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        case 3:
            return rng.randbytes(rng.randrange(1, 400))
        case _:
            return bytes([0x91]) * rng.randrange(1, 4000) + b"\xc0"
    return bytes(data)


async def test_every_door_refuses_what_strangers_send_and_the_node_goes_on(tmp_path: Path) -> None:
    # Goal: no bytes from the network end a node or change its chain; each is refused, counted, and bounded in time.
    # Method: 200 random or bent messages at each of four doors, then one honest request at each.
    rng = random.Random(20)
    async with nodes(tmp_path) as swarm:
        bootstrap, trainer, address = await small_swarm(swarm, 3)
        worker = await swarm.worker("worker", (address,))
        worker.run()
        await until(lambda: worker.version == 2)
        liar = await swarm.worker("liar", (address,))
        await liar.node.host.connect(worker.node.host.addresses[0])
        target = worker.node.peer_id
        ref = worker.node.exchange.blobs.put(rng.randbytes(1000))
        async with asyncio.timeout(60.0):
            await attack_requests(rng, liar, worker)
            await attack_gossip(rng, liar, worker, trainer)
            await attack_blobs(rng, liar, worker)
            await attack_directory(rng, liar, worker)

        assert worker.task is not None
        assert not worker.task.done(), "the node goes on"
        reply = await liar.node.ask(target, ChainRequest(RUN, 0))
        assert isinstance(reply, Envelopes)
        assert len(reply.envelopes) == 3
        fetched = await bootstrap.node.exchange.fetch(ref, lambda: [target])
        assert list(fetched.received) == [target]
        assert blob_ref(fetched.blob) == ref
        await trainer.announce(3)
        await until(lambda: worker.version == 3)
        assert worker.node.host.refusals["handler failed"] == 0, "a bug of ours"


async def attack_requests(rng: random.Random, liar: Running, worker: Running) -> None:
    """Unary calls: bent messages are refused; foreign runs are answered so."""
    target = worker.node.peer_id
    valid = [
        encode(Hello(PROTOCOL, RUN, bytes(16), now_ms())),
        encode(Heartbeat(run=RUN, session=bytes(16), role="inference")),
        encode(ChainRequest(RUN, 0)),
        encode(PushRollouts(rng.randbytes(100))),
    ]
    refused = 0
    for _ in range(200):
        try:
            await liar.node.host.call(target, mutated(rng, rng.choice(valid)), 5.0)
        except PeerFault:
            refused += 1
    counted = worker.node.host.refusals["malformed request"]
    assert counted == refused > 100
    assert await liar.node.ask(target, ChainRequest(OTHER_RUN, 0)) == Refused("unknown run")
    assert await liar.node.ask(target, ManifestRequest(OTHER_RUN)) == Refused("unknown run")
    reply = await liar.node.ask(target, Heartbeat(run=OTHER_RUN, session=bytes(16), role="inference"))
    assert isinstance(reply, HeartbeatReply)
    assert reply.verdict == "unknown run"


async def attack_gossip(rng: random.Random, liar: Running, worker: Running, trainer: Running) -> None:
    """The policy topic: after eight invalid messages a sender is ignored; replays change nothing."""
    replayed, foreign = chain_of(trainer).entries[0].raw, announcement(0, run=OTHER_RUN).raw
    heard = worker.follower.refusals
    before = heard.total()
    topic = worker.follower.policy.name
    for number in range(200):
        raw = [replayed, foreign, mutated(rng, replayed), forge_signature(replayed)][number % 4]
        await liar.node.host.publish(topic, raw)
    await until(lambda: "peer ignored" in worker.codes())
    assert heard.total() - before >= 8
    assert heard["foreign run"] > 0
    assert worker.follower.ignores(liar.node.peer_id)
    assert worker.version == 2
    await liar.node.host.connect(worker.node.host.addresses[0])  # it was disconnected, and comes back
    async with asyncio.timeout(10.0):
        while not heard["ignored sender"]:
            await liar.node.host.publish(topic, replayed)
            await asyncio.sleep(0.1)


async def attack_blobs(rng: random.Random, liar: Running, worker: Running) -> None:
    """Blob streams: each bent request ends its stream."""
    await liar.node.host.connect(worker.node.host.addresses[0])
    valid = encode(BlobOpen(bytes(32), True, b"\0"))
    for _ in range(200):
        body = mutated(rng, valid)
        length = rng.choice([len(body), 2**31, 4096])
        reader, writer = await liar.node.host.open_stream(worker.node.peer_id, BLOB_PROTOCOL)
        writer.write(struct.pack("<I", length) + body)
        writer.write_eof()
        async with asyncio.timeout(5.0):
            answer = await reader.read()
        writer.close()
        assert len(answer) < 64, "at most: not found"
    assert worker.node.host.refusals["frame too large"] > 0
    assert worker.node.host.refusals["malformed blob request"] > 0


async def test_words_that_a_cut_cable_held_back_are_no_offence(tmp_path: Path) -> None:
    async with nodes(tmp_path) as swarm:
        bootstrap = await swarm.bootstrap()
        trainer = await swarm.trainer(tuple(bootstrap.node.host.addresses[:1]))
        heard = bootstrap.follower.refusals
        held_back_ms = now_ms() - 60_000
        lease = Lease(RUN, 1, "claimed", until_ms=held_back_ms)
        directive = Directive(run=RUN, term=1, number=1, mode="async", min_version=0, issued_ms=held_back_ms)
        async with asyncio.timeout(20.0):
            while min(heard["bad expiry"], heard["old directive"]) < 2 * OFFENCES_MAX:
                await trainer.follower.control.publish(seal(TRAINER, lease))
                await trainer.follower.control.publish(seal(TRAINER, directive))
                await asyncio.sleep(0.01)
        assert not bootstrap.follower.ignores(TRAINER_ID)
        assert "peer ignored" not in bootstrap.codes()


async def attack_directory(rng: random.Random, liar: Running, worker: Running) -> None:
    """DHT stores: nothing bent is stored."""
    ad = CapacityAd(run=RUN, session=bytes(16), role="inference", issued_ms=now_ms())
    valid = seal(liar.node.identity.key, ad).raw
    key, subkey = RecordKey(RUN, RecordKind.PEERS), liar.node.peer_id
    refusals = worker.node.directory.refusals
    before = refusals.total()
    for number in range(200):
        until_s = time.time() + (50.0 if number % 4 else 5000.0)
        raw = valid if number % 4 == 0 else mutated(rng, valid)
        assert not await store_at(liar, worker, key, raw, subkey, until_s)
    assert refusals.total() == before + 200
    assert refusals["bad expiry"] == 50


async def test_nonsense_from_a_peer_with_another_kind_of_key_does_not_end_the_node(tmp_path: Path) -> None:
    # libp2p lets in RSA keys; their peer ids are not ours, so such a peer cannot even be disconnected by name.
    rsa = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    async with nodes(tmp_path) as swarm:
        _, trainer, address = await small_swarm(swarm, 1)
        worker = await swarm.worker("worker", (address,))
        worker.run()
        for _ in range(9):
            worker.follower.policy.enqueue(rsa, b"nonsense")
        worker.follower.neighbourhood.heard_of(rsa, 1000)  # it also claims to hold what nobody has
        await worker.follower.catch_up(rsa)
        await until(lambda: worker.follower.ignores(rsa))
        await trainer.announce(1)
        await until(lambda: worker.version == 1)
        assert worker.task is not None
        assert not worker.task.done()
