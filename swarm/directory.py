"""The slow, durable path: signed records in hivemind's DHT, checked by every node that stores or reads them.

    put --> rules --> the five nodes nearest to the key --> their rules --> stored until it expires
    get --> all nodes near the key --> rules --> merged, newest record of each subkey

The node runs in our own event loop over our own host; every wait has a limit. Nothing is cached, neither here
nor for others: a cached copy would be served after a newer record was stored, and a lookup costs 10 ms.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID

from protocols.directory import DirectoryRules, RecordKey
from protocols.faults import PeerFault, TransportFault
from protocols.identity import public_of, short
from protocols.msgpack_guard import unwrap_bin
from swarm.hivemind_guard import SUBKEY_CHARS_MAX, install, node_id_of
from swarm.host import Host

install()
log = logging.getLogger(__name__)

REPLICAS = 5  # nodes that store a record; hivemind's default: four may leave between two renewals
RPC_TIMEOUT_S = 3.0  # one node's answer; hivemind's default
PUT_TIMEOUT_S = 10.0  # a search of a few hops, of which some time out, then the stores in parallel
GET_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0  # asks p2pd to forget three handlers
PROMPT_S = 0.5  # within it all replicas of a healthy swarm have answered; then one is enough
# A node that did not answer is left out of searches for so long, or until it is heard of: one that was restarted asks
# its neighbours at once. In a swarm that is cut in two a search waits for the others' half once in so long.
SILENT_S = 30.0
OUTDATED = frozenset({"old head", "old manifest"})  # what a replica holds for a moment after a newer one: no offence
_PLAIN = msgspec.msgpack.encode(None)  # the subkey bytes of a record without subkey

T = TypeVar("T")
_subkey_decoder = msgspec.msgpack.Decoder(str)


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's hook: called for each record that is stored here or found elsewhere, ours included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.refusals: Counter[str] = Counter()
        self.rules: dict[bytes, tuple[DirectoryRules, RecordKey]] = {}
        self.storage: Any = {}  # the node's own, once there is one

    def add(self, rules: DirectoryRules) -> None:
        for key in rules.keys():  # noqa: SIM118  rules are not a mapping
            self.rules[_key_id(key).to_bytes()] = (rules, key)

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record.key, record.subkey, record.value, record.expiration_time)
        except PeerFault as fault:
            if fault.reason not in OUTDATED:
                self.refusals[fault.reason] += 1
            return False
        self._make_way(record)
        return True

    def _make_way(self, record: DHTRecord) -> None:
        """The DHT keeps what expires last; what the rules no longer allow must not keep out what they do.

        Whoever stored an old manifest again, for as long as allowed, would hold back the new one.
        """
        key_id, subkey = DHTID.from_bytes(record.key), _subkey_of(record.subkey)
        place: Any = self.storage
        if subkey is not None:
            whole = self.storage.get(key_id)
            place, key_id = (whole.value, subkey) if whole is not None else ({}, subkey)
        held = place.get(key_id)
        if held is None or held.value == record.value:
            return
        try:
            self.check(record.key, record.subkey, held.value, held.expiration_time)
        except PeerFault:
            del place[key_id]

    def check(self, key_bytes: bytes, subkey_bytes: bytes, value: bytes, expires_s: float) -> None:
        """Raises PeerFault unless the rules of a run that we know allow the record."""
        if key_bytes not in self.rules:
            raise PeerFault("unknown key")
        rules, key = self.rules[key_bytes]
        rules.check(key, _subkey_of(subkey_bytes), value, expires_s, self.clock())


class Directory:
    """A node of the DHT. Made by `await Directory.start(...)`; `close` it before its host."""

    def __init__(self, host: Host, node: Any, validator: _Validator) -> None:
        self._host = host
        self._node = node
        self._validator = validator
        self._storing: set[asyncio.Task[list[bool] | None]] = set()

    @classmethod
    async def start(
        cls,
        host: Host,
        rules: Sequence[DirectoryRules],
        initial_peers: Iterable[str] = (),
        client_mode: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> "Directory":
        """Join over `initial_peers` (peer ids, or addresses to dial first); those that fail are logged.

        `client_mode`: read and write, but store nothing for others, for peers that nobody can dial.
        """
        validator = _Validator(clock)
        for each in rules:
            validator.add(each)
        node = await DHTNode.create(
            p2p=host.p2p,
            node_id=node_id_of(host.p2p.peer_id),
            num_replicas=REPLICAS,
            wait_timeout=RPC_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,  # a search that is given up would end the others of its key half done
            blacklist_time=SILENT_S,
            backoff_rate=1.0,
            client_mode=client_mode,
            record_validator=validator,
            ensure_bootstrap_success=False,
            strict=False,
        )
        validator.storage = node.protocol.storage
        node.protocol.heard = node.blacklist.register_success
        self = cls(host, node, validator)
        await asyncio.gather(*(self._join(peer) for peer in initial_peers))
        return self

    @property
    def refusals(self) -> Counter[str]:
        """Records that were not stored or not believed, by reason."""
        return self._validator.refusals

    @property
    def size(self) -> int:
        """Other nodes in the routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def _join(self, peer: str) -> None:
        try:
            peer_id = await self._host.connect(peer) if peer.startswith("/") else peer
            await self.add_peer(peer_id)
        except (TransportFault, PeerFault) as fault:
            log.warning("directory: %s: %s", short(peer), fault)

    async def add_peer(self, peer_id: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Link with a node that we can reach, again after it was restarted. TransportFault 'unreachable', 'timeout'."""
        public_of(peer_id)
        peer = PeerID.from_base58(peer_id)
        self._node.blacklist.register_success(peer)
        protocol = self._node.protocol
        node_id = await _within(timeout_s, protocol.call_ping(peer), f"ping of {short(peer_id)}")
        if node_id is None:
            raise TransportFault("unreachable", f"{short(peer_id)} runs no DHT node")
        await protocol.update_routing_table(node_id, peer)  # the ping does so too, but later, in a task of its own
        await _within(timeout_s, self._node.find_nearest_nodes([self._node.node_id]), "search for neighbours")

    async def put(
        self,
        key: RecordKey,
        value: bytes,
        expires_s: float,
        subkey: str | None = None,
        timeout_s: float = PUT_TIMEOUT_S,
    ) -> bool:
        """Store an envelope until `expires_s` (seconds since 1970). True if another node holds it now.

        With no other node in sight, True if we hold it ourselves. False if it is against our own rules, or if
        the others have a newer one or refuse it. Raises TransportFault 'timeout'.
        """
        record = DHTRecord(_key_id(key).to_bytes(), _subkey_bytes(subkey), msgspec.msgpack.encode(value), expires_s)
        if not self._validator.validate(record):
            log.warning("directory: our own record for %s is refused by our rules", key.text)
            return False
        return await _within(timeout_s, self._store(key, record, subkey), f"put {key.text}")

    async def _store(self, key: RecordKey, record: DHTRecord, subkey: str | None) -> bool:
        key_id, protocol = _key_id(key), self._node.protocol
        found = await self._node.find_nearest_nodes([key_id], k_nearest=REPLICAS)
        nearest = found[key_id]
        here = False
        if nearest.pop(self._node.node_id, None) is not None and not protocol.client_mode:
            here = protocol.storage.store(key_id, record.value, record.expiration_time, subkey=subkey)
        if not nearest:
            return bool(here)
        stores = {
            asyncio.create_task(
                protocol.call_store(peer, [key_id], [record.value], record.expiration_time, subkeys=[subkey])
            )
            for peer in nearest.values()
        }
        self._storing |= stores
        for store in stores:
            store.add_done_callback(self._storing.discard)
        # Who does not answer holds up nobody: two limits in a row, of the search and of this, are a whole short lease.
        prompt, late = await asyncio.wait(stores, timeout=PROMPT_S)
        if any(_held(store.result()) for store in prompt):
            return True
        for answer in asyncio.as_completed(late):
            if _held(await answer):
                return True
        return False

    async def get(self, key: RecordKey, timeout_s: float = GET_TIMEOUT_S) -> dict[str | None, bytes]:
        """Envelopes by subkey (None: the plain record); empty when nobody has one. Raises TransportFault 'timeout'."""
        found = await _within(timeout_s, self._node.get(key.text, latest=True), f"get {key.text}")
        if found is None:
            return {}
        records = found.value if isinstance(found.value, dict) else {None: found}
        now_s = self._validator.clock()
        return {
            subkey: value
            for subkey, (value, expires_s) in records.items()
            if expires_s > now_s and self._stands(key, subkey, value, expires_s)
        }

    def held(self, key: RecordKey) -> dict[str, bytes]:
        """Envelopes by subkey that this node itself stores for others: known at once, without a search."""
        found = self._node.protocol.storage.get(_key_id(key))
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return {}
        return {subkey: unwrap_bin(record.value) for subkey, record in found.value.items()}

    def _stands(self, key: RecordKey, subkey: str | None, value: bytes, expires_s: float) -> bool:
        """Check again: what we stored ourselves may have been overtaken, by a manifest without this trainer say."""
        record = DHTRecord(_key_id(key).to_bytes(), _subkey_bytes(subkey), msgspec.msgpack.encode(value), expires_s)
        return self._validator.validate(record)

    async def close(self) -> None:
        """Leave. Bounded; our records stay with the others until they expire."""
        for store in self._storing:
            store.cancel()
        with suppress(TransportFault):  # p2pd is gone: nothing to unregister from
            await _within(CLOSE_TIMEOUT_S, self._node.shutdown(), "close")


async def _within(timeout_s: float, work: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise TransportFault("timeout", f"{what}: not done in {timeout_s:g} s") from error


def _held(answers: list[bool] | None) -> bool:
    """Did a node take the one record of a store?"""
    return bool(answers and answers[0])


def _key_id(key: RecordKey) -> DHTID:
    return DHTID.generate(key.text)


def _subkey_bytes(subkey: str | None) -> bytes:
    return msgspec.msgpack.encode(subkey)


def _subkey_of(raw: bytes) -> str | None:
    """The subkey in a record's tag. Raises PeerFault."""
    if raw == _PLAIN:
        return None
    try:
        subkey = _subkey_decoder.decode(raw[: 4 * SUBKEY_CHARS_MAX])
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerFault("bad subkey", "not a string") from error
    if len(subkey) > SUBKEY_CHARS_MAX:
        raise PeerFault("bad subkey", "too long")
    return subkey
