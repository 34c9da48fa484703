"""Bytes of strangers against hivemind's deserialiser: first the scan alone, then a live DHT node under attack."""

import asyncio
import math
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import hivemind.utils.timed_storage
import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.directory import DirectoryRules, RecordKey, RecordKind
from protocols.envelopes import seal
from protocols.faults import PeerFault
from protocols.identity import public_of, run_id_of
from protocols.messages import CapacityAd
from protocols.msgpack_guard import BYTES_MAX, ITEMS_MAX, check_msgpack, unwrap_bin
from swarm import hivemind_guard
from swarm.directory import Directory
from swarm.host import Host
from tests.hosts import hosts, identity, until

hivemind_guard.install()
NESTED_CRASHES = 240  # 874 bytes; 200 levels are enough with msgpack 1.2 and the usual 8 MiB stack


def nested(depth: int, code: int = 0x40, core: bytes = b"\xc0") -> bytes:
    for _ in range(depth):
        core = msgpack.packb(msgpack.ExtType(code, core))
    return core


def dictionary(*items: object, size: object = math.inf, latest: object = 0.0, code: int = 0x50) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb([size, latest, list(items)])))


HOSTILE = {
    "tuples in tuples": nested(NESTED_CRASHES),
    "dictionaries in dictionaries": nested(NESTED_CRASHES, 0x50),
    "tuples in an array": b"\x91" + nested(NESTED_CRASHES),
    "tuples in a dictionary": msgpack.packb(msgpack.ExtType(0x50, nested(NESTED_CRASHES))),
    "tuples as a value": dictionary(["a", msgpack.ExtType(0x40, nested(NESTED_CRASHES)), 1.0]),
    "arrays in arrays": b"\x91" * 100_000 + b"\xc0",
    "maps in maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "a billion items": b"\xdd\x3b\x9a\xca\x00" + bytes(100),
    "a timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "two values": b"\xc0\xc0",
    "no value": b"",
    "cut short": b"\xc4\x20abc",
    "too large": b"\xc6\x00\x30\x00\x00" + bytes(0x300000),
    "never used type": b"\xc1",
}


# ---------------------------------------------------------------------- the danger is real


def test_the_unguarded_deserialiser_kills_its_process() -> None:
    code = (
        "import sys; from hivemind.utils.serializer import MSGPackSerializer\n"
        "MSGPackSerializer.loads(bytes.fromhex(sys.argv[1]))"
    )
    raw = nested(NESTED_CRASHES)
    assert len(raw) < 1000
    result = subprocess.run([sys.executable, "-c", code, raw.hex()], capture_output=True, check=False)
    if result.returncode in (0, 1):
        pytest.skip(f"msgpack {msgpack.version} no longer crashes on nested extensions")
    assert result.returncode == -11  # SIGSEGV
    guarded = f"from swarm.hivemind_guard import install; install()\n{code}"
    result = subprocess.run([sys.executable, "-c", guarded, raw.hex()], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ValueError: malformed record" in result.stderr


# ---------------------------------------------------------------------- the scan


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_quickly_and_counted(name: str) -> None:
    before = hivemind_guard.refusals.total()
    began = time.perf_counter()
    with pytest.raises(PeerFault):
        check_msgpack(HOSTILE[name])
    with pytest.raises(ValueError, match="record"):
        MSGPackSerializer.loads(HOSTILE[name])
    assert time.perf_counter() - began < 0.5
    assert hivemind_guard.refusals.total() == before + 1


def test_everything_hivemind_stores_passes() -> None:
    records, late = DictionaryDHTValue(), time.time() + 60
    for number in range(4096):
        records.store(f"{number:052}", msgpack.packb(bytes(300)), late + number)
    raw = MSGPackSerializer.dumps(records)
    assert len(raw) < BYTES_MAX
    check_msgpack(raw)
    read = MSGPackSerializer.loads(raw)
    assert isinstance(read, DictionaryDHTValue)
    assert len(read) == 4096
    assert read.data == records.data
    assert read.latest_expiration_time == late + 4095
    for value in (None, "a subkey", b"a value", 1, 1.5, [1, ["a"]]):
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value


def test_limits_are_exact() -> None:
    check_msgpack(b"\xdd" + (ITEMS_MAX - 1).to_bytes(4, "big") + bytes(ITEMS_MAX - 1))
    with pytest.raises(PeerFault):
        check_msgpack(b"\xdd" + ITEMS_MAX.to_bytes(4, "big") + bytes(ITEMS_MAX))
    check_msgpack(b"\x91" * 4 + b"\xc0")
    with pytest.raises(PeerFault):
        check_msgpack(b"\x91" * 5 + b"\xc0")


def leaves() -> st.SearchStrategy[object]:
    return st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()


@given(
    st.recursive(leaves(), lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner), max_leaves=8)
)
def test_whatever_passes_is_what_msgpack_reads_too(value: object) -> None:
    raw = msgpack.packb(value)
    depth = deepest(value)
    if depth <= 4:
        check_msgpack(raw)
        with pytest.raises(PeerFault):
            check_msgpack(raw + b"\xc0")
        if len(raw) > 1:
            with pytest.raises(PeerFault):
                check_msgpack(raw[:-1])
    else:
        with pytest.raises(PeerFault):
            check_msgpack(raw)


def deepest(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if not inner else 1 + max(map(deepest, inner))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_valueerror(raw: bytes) -> None:
    try:
        check_msgpack(raw)
    except PeerFault:
        with pytest.raises(ValueError, match="record"):
            MSGPackSerializer.loads(raw)
    else:
        read(raw)


@pytest.mark.parametrize("seed", range(20))
def test_mutated_dictionaries_raise_only_valueerror(seed: int) -> None:
    rng = random.Random(seed)
    good = dictionary(["a" * 52, msgpack.packb(bytes(20)), 2e9], ["b" * 52, msgpack.packb(b""), 2e9])
    for _ in range(500):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            match rng.randrange(3):
                case 0:
                    raw[at] = rng.randrange(256)
                case 1:
                    del raw[at]
                case 2:
                    raw.insert(at, rng.choice((0x40, 0x50, 0xC7, 0xC8, 0xD4, 0x91, 0xDD, rng.randrange(256))))
        read(bytes(raw))
        with suppress(PeerFault):
            unwrap_bin(bytes(raw))


def read(raw: bytes) -> None:
    """Deserialise; what comes out of a dictionary is of the types that hivemind goes on to use."""
    try:
        value = MSGPackSerializer.loads(raw)
    except ValueError:
        return
    if isinstance(value, DictionaryDHTValue):
        with value.freeze():
            for subkey, (content, expires_s) in value.items():
                assert isinstance(subkey, str)
                assert isinstance(content, bytes)
                assert math.isfinite(expires_s)


@pytest.mark.parametrize(
    "raw",
    [
        dictionary([["list"], b"", 1.0]),
        dictionary([None, b"", 1.0]),
        dictionary([7, b"", 1.0]),
        dictionary(["a", "text", 1.0]),
        dictionary(["a", b"", math.nan]),
        dictionary(["a", b"", math.inf]),
        dictionary(["a", b"", "later"]),
        dictionary(["a" * 65, b"", 1.0]),
        dictionary(["a", b""]),
        dictionary(),
        msgpack.packb(msgpack.ExtType(0x50, b"\xc0")),
    ],
)
def test_dictionaries_of_other_shapes_are_refused(raw: bytes) -> None:
    if raw == dictionary():
        assert len(MSGPackSerializer.loads(raw)) == 0
    else:
        with pytest.raises(ValueError, match="malformed dictionary"):
            MSGPackSerializer.loads(raw)


def test_size_limit_and_expiry_of_a_dictionary_are_not_the_senders_word() -> None:
    late = time.time() + 60
    for size, latest in ((1, math.inf), ("x", 5.0), (-1, None)):
        records = MSGPackSerializer.loads(dictionary(["a", b"", late], ["b", b"", late], size=size, latest=latest))
        assert (len(records), records.maxsize, records.latest_expiration_time) == (2, math.inf, late)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc4", b"\xc4\x01", b"\xc4\x01ab", b"\xa1a", b"\xc6\x00\x00", b"\xc0", b"\x91\xc4\x00"]
)
def test_a_value_that_is_not_one_bin_is_refused(raw: bytes) -> None:
    with pytest.raises(PeerFault, match="not one bin"):
        unwrap_bin(raw)


@given(st.binary(max_size=70_000))
def test_a_bin_is_unwrapped(content: bytes) -> None:
    assert unwrap_bin(msgpack.packb(content)) == content


def test_an_old_copy_that_is_refused_does_not_shorten_the_newer_ones_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(hivemind.utils.timed_storage, "get_dht_time", lambda: now_s)
    storage = DHTLocalStorage()
    key = DHTID.generate("key")
    assert storage.store_subkey(key, "peer", b"new", 60.0)
    assert not storage.store_subkey(key, "peer", b"same", 60.0)
    assert not storage.store_subkey(key, "peer", b"old", 5.0)
    now_s = 30.0
    assert storage.get(key).value.get("peer") == (b"new", 60.0)
    assert storage.store_subkey(key, "peer", b"newer", 90.0)
    now_s = 91.0
    assert storage.get(key) is None


def test_install_twice_changes_nothing() -> None:
    before = MSGPackSerializer.loads
    hivemind_guard.install()
    assert MSGPackSerializer.loads is before


# ---------------------------------------------------------------------- a live node


class Attacker:
    """A host that speaks hivemind's protocol by hand: no guard, no rules."""

    def __init__(self, host: Host, victim: Host) -> None:
        self.host = host
        self.node = dht_pb2.NodeInfo(node_id=hivemind_guard.node_id_of(host.p2p.peer_id).to_bytes())
        self.victim = victim
        self.num_finds = 0

    async def send(self, method: str, request: object, answer: type) -> object:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        peer = self.victim.p2p.peer_id
        reply = await self.host.p2p.control.call_unary_handler(peer, f"DHTProtocol.{method}", raw)
        return answer.FromString(reply)

    async def store(
        self, key: bytes, subkey: bytes, value: bytes, expires_s: float, **other: object
    ) -> list[bool] | str:
        fields = {
            "keys": [key],
            "subkeys": [subkey],
            "values": [value],
            "expiration_time": [expires_s],
            "in_cache": [False],
            "peer": self.node,
        }
        try:
            reply = await self.send("rpc_store", dht_pb2.StoreRequest(**(fields | other)), dht_pb2.StoreResponse)
        except P2PHandlerError as error:
            return str(error)
        return list(reply.store_ok)

    async def answer_finds_with(self, result: dht_pb2.FindResult) -> None:
        """Look like a node, and answer every search with `result`."""

        async def find(request: bytes, _: object) -> bytes:
            self.num_finds += 1
            keys = dht_pb2.FindRequest.FromString(request).keys
            return dht_pb2.FindResponse(results=[result] * len(keys), peer=self.node).SerializeToString()

        async def ping(request: bytes, _: object) -> bytes:
            return dht_pb2.PingResponse(peer=self.node, dht_time=time.time()).SerializeToString()

        control = self.host.p2p.control
        for method, handler in (("rpc_find", find), ("rpc_ping", ping)):
            if f"DHTProtocol.{method}" not in control.unary_handlers:
                await control.add_unary_handler(f"DHTProtocol.{method}", handler)
            control.unary_handlers[f"DHTProtocol.{method}"] = handler


class Scene:
    """Two honest nodes with a capacity record each, and an attacker who is linked with both."""

    def __init__(self, folder: Path, started: list[Host]) -> None:
        self.folder = folder
        self.first, self.second, self.third = started[:3]
        self.run = run_id_of("demo", public_of(identity(folder, "owner").peer_id))
        self.key = RecordKey(self.run, RecordKind.PEERS)
        self.nodes: list[Directory] = []
        self.attacker = Attacker(self.third, self.first)

    async def start(self) -> None:
        for host, known in ((self.first, []), (self.second, [self.first.peer_id])):
            self.nodes.append(await Directory.start(host, [DirectoryRules(self.run)], known))
        await until(lambda: self.nodes[0].size == 1)

    def advert(self, name: str) -> bytes:
        ad = CapacityAd(run=self.run, session=bytes(16), role="inference", issued_ms=int(time.time() * 1000))
        return seal(identity(self.folder, name).key, ad).raw

    async def works(self) -> None:
        """Both nodes still store and find what they should."""
        for node, name in zip(self.nodes, ("host0", "host1"), strict=True):
            assert await node.put(
                self.key, self.advert(name), time.time() + 60, subkey=identity(self.folder, name).peer_id
            )
        for node in self.nodes:
            assert set(await node.get(self.key)) == {self.first.peer_id, self.second.peer_id}

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()


@pytest.mark.network
async def test_a_live_node_survives_hostile_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with hosts(tmp_path, 3) as started:
        scene = Scene(tmp_path, started)
        await scene.start()
        await scene.works()
        key, late = DHTID.generate(scene.key.text).to_bytes(), time.time() + 30
        plain, whole = msgpack.packb(None), b""
        subkey = msgpack.packb(started[2].peer_id)
        store = scene.attacker.store
        for name, raw in HOSTILE.items():
            if name == "too large":
                continue  # p2pd itself refuses it
            assert await store(key, plain, raw, late) == [False], name
            assert await store(key, subkey, raw, late) == [False], name
            assert await store(key, raw or b"\xa1", msgpack.packb(b""), late) == [False], name
            if raw:
                assert "malformed record" in await store(key, whole, raw, late), name
        for odd in (dictionary([["l"], b"", late]), dictionary(["a", b"", math.inf]), msgpack.packb([1])):
            assert "malformed record" in await store(key, whole, odd, late)
        assert await store(key, whole, dictionary(["a", b"\xc4\x00", late], size="x"), late) == [False]
        good = msgpack.packb(scene.advert("host2"))
        assert await store(key, subkey, good, late) == [True], "an honest record of the same peer stands"
        assert "caching is off" in await store(key, subkey, good, late, in_cache=[True])
        assert "malformed dht request" in await store(key, subkey, good, late, in_cache=[])
        assert "malformed dht request" in await store(b"\0" + key, subkey, good, late)
        assert "malformed dht request" in await store(key, subkey, good, late, keys=[key] * 2000)
        for node_id in (bytes(20), bytes(30), b"x" * 100_000):
            assert "foreign node id" in await store(key, subkey, good, late, peer=dht_pb2.NodeInfo(node_id=node_id))
        for method in ("rpc_ping", "rpc_store", "rpc_find"):
            with pytest.raises(P2PHandlerError, match="malformed request"):
                await scene.attacker.send(method, b"\xff\xff\xff", dht_pb2.PingResponse)
        found = await scene.nodes[1].get(scene.key)
        assert set(found) == {host.peer_id for host in started}
        assert "handler failed" not in started[0].refusals, caplog.text
        await scene.close()


def hostile_answers(scene: Scene) -> list[dht_pb2.FindResult]:
    regular, whole, nothing = dht_pb2.FOUND_REGULAR, dht_pb2.FOUND_DICTIONARY, dht_pb2.NOT_FOUND
    late = time.time() + 30
    node_id, foreign = bytes(scene.attacker.node.node_id), scene.second.p2p.peer_id.to_bytes()
    own = msgpack.packb(scene.advert("host2"))
    values = [(kind, raw, late) for kind in (regular, whole) for raw in HOSTILE.values() if len(raw) < BYTES_MAX] + [
        (whole, dictionary(), math.inf),
        (whole, dictionary(size="x"), math.nan),
        (whole, dictionary(["a", b"\xc4\x00", late], size=1), math.inf),
        (whole, dictionary([scene.third.peer_id, own, late], size=1, latest=math.inf), math.inf),
        (regular, own, math.inf),
        (7, b"", late),
    ]
    neighbours = [
        ([node_id], [bytes(1_000_000)]),
        ([bytes(20)], [foreign]),
        ([node_id] * 9, []),
        ([b"x" * 99], [foreign]),
    ]
    return [dht_pb2.FindResult(type=kind, value=raw, expiration_time=until_s) for kind, raw, until_s in values] + [
        dht_pb2.FindResult(type=nothing, nearest_node_ids=ids, nearest_peer_ids=peers) for ids, peers in neighbours
    ]


@pytest.mark.network
async def test_a_reader_survives_hostile_answers_and_finds_what_honest_nodes_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(tmp_path, 4) as started:
        scene = Scene(tmp_path, started)
        await scene.start()
        await scene.works()
        answer_honestly = scene.first.p2p.control.unary_handlers["DHTProtocol.rpc_find"]

        async def answer_late(request: bytes, peer: object) -> bytes:
            await asyncio.sleep(0.05)  # so that the lie is always there first
            return await answer_honestly(request, peer)

        for host in (scene.first, scene.second):
            host.p2p.control.unary_handlers["DHTProtocol.rpc_find"] = answer_late
        reader = await Directory.start(started[3], [DirectoryRules(scene.run)], [scene.first.peer_id], client_mode=True)
        for number, answer in enumerate(hostile_answers(scene)):
            await scene.attacker.answer_finds_with(answer)
            await reader.add_peer(scene.third.peer_id)
            began = time.perf_counter()
            found = await reader.get(scene.key)
            assert set(found) >= {scene.first.peer_id, scene.second.peer_id}, number
            assert time.perf_counter() - began < 2.0, number
        assert scene.attacker.num_finds >= number
        assert "never retrieved" not in caplog.text
        await reader.close()
        await scene.close()
