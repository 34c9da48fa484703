"""What hivemind's DHT believes of strangers, and no longer does.

hivemind 1.1.12 trusts its peers in places that no record validator sees. Each was tried against a live node
(tests/test_msgpack_guard.py). `install()` closes them, once a process:

    loads                nested extensions overflow the C stack: 941 bytes kill the process. Bytes are scanned first.
    DictionaryDHTValue   took size limit and expiry of the whole from the sender, and keys of any type
    TimedStorage.store   an older copy of a record, refused, still made the newer one vanish at the older's expiry
    DHTProtocol          caching for others let a part of a dictionary hide the whole; node ids were free to choose,
                         so anyone could settle beside a key; answers could name peers of any length (base58 of
                         1 MB takes minutes); "expires: never" on an empty dictionary ended every search
"""

import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import hivemind.dht.node
import msgspec
from hivemind.dht.protocol import DHTProtocol as HivemindProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from protocols.faults import PeerFault
from protocols.msgpack_guard import check_msgpack

SUBKEY_CHARS_MAX = 64  # a subkey is a peer id: 52
KEYS_FOUND_MAX = 64  # hivemind asks for 16 at most
KEYS_STORED_MAX = 1024  # a new neighbour is sent all that it should hold: 258 keys of a few runs
NEIGHBOURS_MAX = 64  # an answer names one bucket: 20
PEER_ID_BYTES = 38  # of an Ed25519 key
DHTID_BYTES = 20

refusals: Counter[str] = Counter()
"""Bytes that were not deserialised, by reason."""

_items_decoder = msgspec.msgpack.Decoder(tuple[object, object, list[tuple[str, bytes, float]]])
_hivemind_loads: Callable[[bytes], object] = MSGPackSerializer.loads
_hivemind_store: Callable[[Any, Any, Any, float], bool] = TimedStorage.store


def install() -> None:
    """Replace the functions above by safe ones. Calling it again changes nothing."""
    MSGPackSerializer.loads = _loads
    DictionaryDHTValue.unpackb = _unpack_dictionary
    TimedStorage.store = _store
    hivemind.dht.node.DHTProtocol = DHTProtocol


def _loads(raw: bytes) -> object:
    """hivemind's own, behind a scan. Raises ValueError."""
    try:
        check_msgpack(raw)
    except PeerFault as fault:
        refusals[fault.reason] += 1
        raise ValueError(str(fault)) from fault
    return _hivemind_loads(raw)


def _unpack_dictionary(raw: bytes) -> Any:
    """A dictionary of records. Only the records are the sender's word: no size limit, expiry that of the latest."""
    try:
        _, _, items = _items_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        refusals["malformed dictionary"] += 1
        raise ValueError(f"malformed dictionary: {error}") from error
    records = DictionaryDHTValue()
    with records.freeze():
        for subkey, value, expires_s in items:
            if len(subkey) > SUBKEY_CHARS_MAX or not math.isfinite(expires_s):
                refusals["malformed dictionary"] += 1
                raise ValueError("malformed dictionary: subkey or expiry")
            records.store(subkey, value, expires_s)
    return records


def _store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Ask first whether a record is newer; hivemind notes its expiry before it knows, and evicts by that note."""
    held = self.data.get(key)
    if held is not None and held.expiration_time >= expiration_time:
        return False
    return _hivemind_store(self, key, value, expiration_time)


def node_id_of(peer_id: PeerID) -> DHTID:
    """The only place in the DHT that a peer may take: the hash of its key."""
    return DHTID.generate(peer_id.to_bytes())


class DHTProtocol(HivemindProtocol):  # type: ignore[misc]
    """hivemind's, with every request and every answer bounded before it is read."""

    heard: Callable[[PeerID], None] = staticmethod(lambda peer_id: None)
    """Called with each node that answers us or asks us something."""

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        if responded:
            self.heard(peer_id)
        await super().update_routing_table(node_id, peer_id, responded)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        _check_node(request.peer, context.remote_id)
        return await super().rpc_ping(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        _check_node(request.peer, context.remote_id)
        _check_keys(request.keys, KEYS_STORED_MAX)
        lists = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        if any(len(each) != len(request.keys) for each in lists):
            raise PeerFault("malformed dht request")
        if any(request.in_cache):
            raise PeerFault("caching is off")
        try:
            return await super().rpc_store(request, context)
        except (ValueError, AssertionError) as error:  # from `loads`, or it was not a dictionary
            raise PeerFault("malformed record", str(error)[:200]) from error

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        _check_node(request.peer, context.remote_id)
        _check_keys(request.keys, KEYS_FOUND_MAX)
        return await super().rpc_find(request, context)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        found = await super().call_find(peer, keys)
        return found and {key: (_of_its_records(item), nearest) for key, (item, nearest) in found.items()}

    def get_stub(self, peer: PeerID) -> "_CheckedStub":
        return _CheckedStub(super().get_stub(peer), peer)


def _of_its_records(item: Any) -> Any:
    """A dictionary found is as new as its newest record, and nothing at all when it is empty."""
    if item is None or not isinstance(item.value, DictionaryDHTValue):
        return item
    return ValueWithExpiration(item.value, item.value.latest_expiration_time) if item.value else None


def _check_node(node: Any, peer_id: PeerID) -> None:
    """Raises PeerFault unless a sender gave no node id (it stores nothing) or its own."""
    if node.node_id and node.node_id != node_id_of(peer_id).to_bytes():
        raise PeerFault("foreign node id")


def _check_keys(keys: Collection[bytes], keys_max: int) -> None:
    if len(keys) > keys_max or any(len(key) != DHTID_BYTES for key in keys):
        raise PeerFault("malformed dht request")


class _CheckedStub:
    """Calls a peer and checks what it says of itself and others. Raises PeerFault; hivemind takes it as a failure."""

    def __init__(self, stub: Any, peer_id: PeerID) -> None:
        self._stub = stub
        self._peer_id = peer_id

    async def rpc_ping(self, request: Any, **limits: Any) -> Any:
        return self._checked(await self._stub.rpc_ping(request, **limits))

    async def rpc_store(self, request: Any, **limits: Any) -> Any:
        return self._checked(await self._stub.rpc_store(request, **limits))

    async def rpc_find(self, request: Any, **limits: Any) -> Any:
        response = self._checked(await self._stub.rpc_find(request, **limits))
        for result in response.results:
            ids, peers = result.nearest_node_ids, result.nearest_peer_ids
            if len(ids) != len(peers) or len(peers) > NEIGHBOURS_MAX:
                raise PeerFault("malformed dht answer")
            for node_id, peer in zip(ids, peers, strict=True):
                if len(peer) != PEER_ID_BYTES or node_id != DHTID.generate(peer).to_bytes():
                    raise PeerFault("foreign node id")
        return response

    def _checked(self, response: Any) -> Any:
        _check_node(response.peer, self._peer_id)
        return response
