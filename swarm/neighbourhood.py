"""Who else is in a run, where they are, and what they hold: the directory's records, kept and read.

our records (manifest, capacity, head) --renewed--> DHT --read--> ads, holders --> connections, sources
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from protocols.directory import (
    HEAD_LIFE_S,
    HEAD_REFRESH_S,
    MANIFEST_LIFE_S,
    PEER_LIFE_S,
    PEER_RENEW_S,
    RecordKey,
    RecordKind,
    shard_of,
)
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import CapacityAd
from protocols.presence import BEAT_S, SILENT_S

if TYPE_CHECKING:
    from swarm.follower import Follower

log = logging.getLogger(__name__)

MESH_PEERS = 8  # connections we make ourselves; GossipSub wants 6 to 12
NEIGHBOURS_ASKED = 3  # peers asked for the chain before we wait for the next heartbeat
SOURCES = 8  # inference peers named for a download; it talks to about ten at once, and asks again while it runs
DIRECTORY_READ_S = 15.0
MANIFEST_READ_S = 60.0
CAPACITY_FIRST_S = 1.0
FAREWELL_S = 1.0  # a last word is a courtesy: others notice three lost beats


class Neighbourhood:
    """The directory of one run, and the peers around us."""

    def __init__(self, follower: "Follower") -> None:
        self.follower = follower
        self.node = follower.node
        self.capacity: Callable[[], CapacityAd] | None = None
        self.ads: dict[str, Sealed[CapacityAd]] = {}
        self.holders: dict[str, int] = {}
        """Version that each neighbour said it holds."""
        self.named: tuple[str, ...] = ()
        """Holders of the head that the coordinator named last: it spreads those who ask."""
        self.linked: frozenset[str] = frozenset()
        """Peers that we had a connection with, whoever opened it, when we last looked."""
        self._rng = random.Random(self.node.session)
        self._head_changed = False
        self._capacity_changed = False

    # ------------------------------------------------------------------ our records

    async def keep_records(self) -> None:
        """Keep the manifest alive, renew our capacity, refresh the head (the trainer's)."""
        last_s = dict.fromkeys(("manifest", "capacity", "head"), -1e9)
        rules = self.follower.rules
        while True:
            now_s = time.monotonic()
            await self.follower.keep_manifest()
            if rules.manifest is not None and now_s - last_s["manifest"] > MANIFEST_LIFE_S / 3:
                last_s["manifest"] = now_s
                await self._put(RecordKind.MANIFEST, rules.manifest.raw, MANIFEST_LIFE_S)
            due = self._capacity_changed or now_s - last_s["capacity"] > PEER_RENEW_S
            if self.capacity is not None and due:
                last_s["capacity"] = now_s
                self._capacity_changed = False
                await self._put_capacity(self.capacity())
            if self._head_changed or now_s - last_s["head"] > HEAD_REFRESH_S:
                last_s["head"] = now_s
                self._head_changed = False
                await self.put_head()
            await asyncio.sleep(CAPACITY_FIRST_S)

    def head_changed(self) -> None:
        """Our own head moved: store it in the DHT soon."""
        self._head_changed = True

    def capacity_changed(self) -> None:
        """What we can do has changed: say so soon."""
        self._capacity_changed = True

    async def put_head(self) -> None:
        """Store the head of the chain in the DHT, if it is our own announcement."""
        head = self.follower.chain.head if self.follower.chain is not None else None
        if head is not None and head.sender == self.node.peer_id:
            await self._put(RecordKind.HEAD, head.raw, HEAD_LIFE_S)

    async def put_manifest(self) -> None:
        """Store the manifest in the DHT now."""
        if self.follower.rules.manifest is not None:
            await self._put(RecordKind.MANIFEST, self.follower.rules.manifest.raw, MANIFEST_LIFE_S)

    async def say_farewell(self) -> None:
        """Our last record says that we are gone (case B92). Bounded, best effort."""
        if self.capacity is None:
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._put_capacity(msgspec.structs.replace(self.capacity(), online=False))
        except TimeoutError:
            log.info("the directory was not told that we leave")

    async def _put_capacity(self, ad: CapacityAd) -> None:
        await self._put(RecordKind.PEERS, seal(self.node.identity.key, ad).raw, PEER_LIFE_S)

    async def _put(self, kind: RecordKind, raw: bytes, life_s: float) -> None:
        me, manifest = self.node.peer_id, self.follower.rules.manifest
        shard = shard_of(me, manifest.message.directory_shards if manifest else 1)
        key = RecordKey(self.follower.run, kind, shard if kind is RecordKind.PEERS else 0)
        subkey = None if kind is RecordKind.MANIFEST else me
        try:
            stored = await self.node.directory.put(key, raw, time.time() + life_s, subkey)
        except TransportFault as fault:
            log.info("could not store %s: %s", kind, fault)
            return
        if not stored:
            log.debug("%s was not stored: a newer one is there, or nobody answered", kind)

    # ------------------------------------------------------------------ the others'

    async def keep_near(self) -> None:
        """Know the others, be connected to some of them, and ask them for what was missed."""
        manifest_read_s = -math.inf
        while True:
            if time.monotonic() - manifest_read_s > MANIFEST_READ_S:  # only those near its key are told of a new one
                manifest_read_s = time.monotonic()
                await self.follower.read_manifest()
            await self.read_peers()
            await self._connect_some()
            chain = self.follower.chain
            if chain is not None:
                await self.read_head()
                newer = [peer for peer, version in self.holders.items() if version > chain.version]
                for peer_id in self._some(newer):
                    await self.follower.catch_up(peer_id)
            await asyncio.sleep(DIRECTORY_READ_S if self.ads.keys() - {self.node.peer_id} else CAPACITY_FIRST_S)

    def heard_of(self, peer_id: str, version: int | None) -> None:
        """A neighbour said which version it holds: a source for it, and perhaps news."""
        if version is not None:
            self.holders[peer_id] = version

    def told_of(self, holders: Iterable[str], version: int | None) -> None:
        """The coordinator named peers that hold this version."""
        self.named = tuple(holders)
        for peer_id in self.named:
            self.heard_of(peer_id, version)

    async def read_head(self) -> None:
        """Read the trainers' head records and take what is new. Faults are counted, not raised."""
        try:
            records = await self.node.directory.get(RecordKey(self.follower.run, RecordKind.HEAD))
        except TransportFault as fault:
            log.info("could not read the head: %s", fault)
            return
        for subkey, raw in records.items():
            try:
                await self.follower.take(raw, subkey or "")
            except PeerFault as fault:
                self.follower.refusals[fault.reason] += 1

    async def read_peers(self) -> None:
        """Read every shard of the capacity directory."""
        manifest = self.follower.rules.manifest
        found: dict[str, Sealed[CapacityAd]] = {}
        for shard in range(manifest.message.directory_shards if manifest else 1):
            try:
                records = await self.node.directory.get(RecordKey(self.follower.run, RecordKind.PEERS, shard))
            except TransportFault as fault:
                log.info("could not read the directory: %s", fault)
                continue
            for subkey, raw in records.items():
                try:
                    ad = unseal(raw, CapacityAd)
                except PeerFault as fault:
                    self.follower.refusals[fault.reason] += 1
                    continue
                if ad.message.online:
                    found[subkey or ""] = ad
        self.ads = found
        for peer_id, ad in found.items():
            self.heard_of(peer_id, ad.message.version)
        self.holders = {peer: version for peer, version in self.holders.items() if peer in found or self._near(peer)}

    def _near(self, peer_id: str) -> bool:
        seen = self.node.neighbours.get(peer_id)
        return seen is not None and time.monotonic() - seen.heard_s < SILENT_S

    def _some(self, peers: Iterable[str], count: int = NEIGHBOURS_ASKED) -> list[str]:
        """A few, by lot: nobody can stand in front, and requests spread."""
        found = list(peers)
        return self._rng.sample(found, min(len(found), count))

    async def _connect_some(self) -> None:
        try:
            self.linked = frozenset(await self.node.host.peers())
        except TransportFault:
            return
        known = self.linked | {self.node.peer_id}
        strangers = [peer for peer, ad in self.ads.items() if ad.message.addresses and peer not in known]
        some = self._some(strangers, max(0, MESH_PEERS - len(self.linked)))
        for peer_id, outcome in zip(
            some, await asyncio.gather(*map(self.reach, some), return_exceptions=True), strict=True
        ):
            if isinstance(outcome, TransportFault):
                log.info("cannot reach %s: %s", short(peer_id), outcome)
            elif outcome is not None:
                raise outcome

    async def reach(self, peer_id: str) -> None:
        """Connect to a peer at the addresses it advertises, all at once: most may be black holes. TransportFault."""
        if peer_id not in self.ads:
            await self.read_peers()
        ad = self.ads.get(peer_id)
        fault = TransportFault("unreachable", f"{short(peer_id)} advertises no address")
        addresses = [] if ad is None else [each for each in ad.message.addresses if each.endswith(f"/p2p/{peer_id}")]
        dials = [asyncio.create_task(self.node.host.connect(address, BEAT_S)) for address in addresses]
        try:
            for dial in asyncio.as_completed(dials):
                try:
                    await dial
                except TransportFault as error:
                    fault = error
                else:
                    return
        finally:
            for task in dials:
                task.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
        raise fault

    def sources(self, version: int) -> list[str]:
        """Whom to ask for a version, drawn anew with each call: some who hold it, the trainers, and some who do not.

        Those may be fetching it too, and serve what has arrived. Advertisements are up to half a minute old, and a
        trainer may be gone: one that has nothing says so at once.
        """
        trainers = [peer for peer in self.follower.trainers() if not self.follower.ignores(peer)]
        others = {peer for peer, ad in self.ads.items() if ad.message.role == "inference"} | self.holders.keys()
        others = {peer for peer in others - {self.node.peer_id, *trainers} if not self.follower.ignores(peer)}
        others = {peer for peer in others if self._within_reach(peer)}
        holders = {peer for peer in others if self.holders.get(peer, -1) >= version}
        named = [peer for peer in self.named if peer in holders]
        some = list(dict.fromkeys([*named, *self._some(sorted(holders), SOURCES)]))[:SOURCES]
        hopeful = sorted(peer for peer in others - holders if self._has_room(peer))
        return some + trainers + self._some(hopeful, SOURCES - len(some))

    def _within_reach(self, peer_id: str) -> bool:
        """A peer that nobody can dial advertises no address; it is within reach while it is linked with us."""
        ad = self.ads.get(peer_id)
        return ad is None or bool(ad.message.addresses) or peer_id in self.linked

    def _has_room(self, peer_id: str) -> bool:
        ad = self.ads.get(peer_id)
        return ad is None or ad.message.storage
