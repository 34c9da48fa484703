"""Follows one run: its manifest, its policy chain, its heartbeats, its neighbourhood.

The head of the chain arrives on four ways, any of which is enough: gossip (milliseconds), the answer to a
heartbeat (2 s), the DHT (15 s), and another peer's heartbeat. Whatever brought the news, the announcements
themselves are fetched and verified the same way, so a peer that missed everything ends in the same state.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from protocols.directory import (
    HEAD_LIFE_S,
    HEAD_REFRESH_S,
    MANIFEST_LIFE_S,
    PEER_LIFE_S,
    PEER_RENEW_S,
    DirectoryRules,
    RecordKey,
    RecordKind,
    check_manifest,
    shard_of,
)
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.manifest import Manifest
from protocols.messages import (
    CHAIN_PAGE_MAX,
    UNARY_BYTES_MAX,
    Announcement,
    CapacityAd,
    ChainRequest,
    Envelopes,
    Heartbeat,
    HeartbeatReply,
    ManifestRequest,
    Refused,
    RunEnd,
)
from protocols.policy import Chain, Equivocation, Extended, Gap
from protocols.presence import BEAT_S, IDENTITIES_MAX, SILENT_S
from swarm.storage import PeerStore
from swarm.tasks import Loop

if TYPE_CHECKING:
    from swarm.node import Node

log = logging.getLogger(__name__)

CHAIN_STORE_S = 0.5  # behind the news; one transaction for all of a page or a burst
INBOX_MAX = 256  # gossip messages waiting to be verified; at 0.1 ms each a burst of 256 is over in 26 ms
CHAIN_PAGE_BYTES = UNARY_BYTES_MAX // 2  # of an answer; leaves room for what frames it
# Faults that say nothing against whoever we talk to: relays of a forked chain, and peers that are merely busy.
INNOCENT = frozenset({"equivocating trainer", "remote error"})
OFFENCES_MAX = 8  # invalid messages until a sender is ignored; an honest bug shows itself in fewer
MESH_PEERS = 8  # connections we make ourselves; GossipSub wants 6 to 12
GOODBYE_S = 1.0
NEIGHBOURS_ASKED = 3  # peers asked for the chain before we wait for the next heartbeat
MANIFEST_ASK_S = 1.0
MANIFEST_WARN_S = 15.0
DIRECTORY_READ_S = 15.0
CAPACITY_FIRST_S = 1.0

# What ends this process when a peer that we beat to says it. Not "unknown run": one that was restarted without the
# run is of no use to us, and no reason to stop.
FINAL_VERDICTS = frozenset({"identity taken", "banned"})

Progress = tuple[int | None, int | None]


class Follower:
    """One run, as one node sees it."""

    def __init__(self, node: "Node", rules: DirectoryRules) -> None:
        self.node = node
        self.rules = rules
        self.run = rules.run
        self.store: PeerStore | None = None
        self.chain: Chain | None = None
        self.ended = asyncio.Event()
        self.changed = asyncio.Condition()
        """Notified when the chain, the trainer's progress or the end of the run becomes known."""
        self.refusals: Counter[str] = Counter()
        self.gossip_bytes = 0
        self.trainer_step: int | None = None
        self.trainer_queued: int | None = None
        self.capacity: Callable[[], CapacityAd] | None = None
        self.beat: Callable[[], Heartbeat] = lambda: Heartbeat(
            run=self.run, session=node.session, role=node.config.role
        )
        self.progress: Callable[[], Progress] = lambda: (None, None)
        self.next_counter_of: Callable[[str], int | None] = lambda peer_id: None
        self.next_counter = 0
        """The lowest counter that we have not used, as the trainer knows it."""
        self.holders: dict[str, int] = {}
        """Version that each neighbour said it holds."""
        self.ads: dict[str, Sealed[CapacityAd]] = {}
        self._inbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(INBOX_MAX)
        self._offences: Counter[str] = Counter()
        self._unreachable: dict[str, str] = {}
        """Targets of heartbeats that do not answer, and the code of the last warning."""
        self._refusing: dict[str, TransportFault] = {}
        """Targets of heartbeats that refuse us, and why."""
        self._rng = random.Random(node.session)
        self._catching_up = asyncio.Lock()
        self._head_changed = False
        self._to_store: dict[int, bytes] = {}
        """Announcements by version that are not on our disk yet."""
        self._kept_manifest: Sealed[Manifest] | None = None

    @property
    def policy_topic(self) -> str:
        """Announcements and the end of the run."""
        return f"echo/1/{self.run}/policy"

    @property
    def manifest(self) -> Manifest:
        """The manifest; only once `find_manifest` has returned."""
        assert self.rules.manifest is not None
        return self.rules.manifest.message

    def loops(self) -> dict[str, Loop]:
        """What keeps this peer up to date."""
        return {
            f"gossip {self.run}": self._hear_gossip,
            f"heartbeats {self.run}": self._beat_forever,
            f"directory {self.run}": self._keep_directory,
            f"neighbourhood {self.run}": self._keep_neighbourhood,
            f"chain {self.run}": self._store_chain,
        }

    def close(self) -> None:
        """Close the store, if it is ours."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def ignores(self, peer_id: str) -> bool:
        """True for a sender of too many invalid messages."""
        return self._offences[peer_id] >= OFFENCES_MAX

    # ------------------------------------------------------------------ manifest and chain

    async def find_manifest(self) -> Manifest:
        """The newest manifest that anyone has; waits until the run has one."""
        warned_s = time.monotonic()
        while self.rules.manifest is None:
            await self.look_for_manifest()
            if self.rules.manifest is None:
                if time.monotonic() - warned_s > MANIFEST_WARN_S:
                    self.node.warn("no manifest yet", f"run {self.run} has no trainer so far; waiting for it")
                    warned_s = time.monotonic()
                await asyncio.sleep(MANIFEST_ASK_S)
        return self.manifest

    async def look_for_manifest(self) -> None:
        """Our own disk, the bootstrap peers, the DHT, once. TransportFault 'unknown run' if nobody serves it."""
        await self._stored_manifest()
        serving = [await self._ask_manifest(peer_id) for peer_id in list(self.node.bootstraps.values())]
        if serving and not any(serving) and self.node.config.role != "bootstrap":
            raise TransportFault("unknown run", f"no bootstrap peer serves {self.run}")
        if self.rules.manifest is None:
            await self._read_manifest()

    async def _stored_manifest(self) -> None:
        raw = await self.store.meta("manifest") if self.store is not None and self.rules.manifest is None else None
        if raw is None:
            return
        try:
            self.rules.learn(check_manifest(raw, self.run))
        except PeerFault as fault:
            self.node.warn("damaged chain", f"the stored manifest: {fault}; it is fetched again")

    async def _ask_manifest(self, peer_id: str) -> bool:
        """False when the peer says that it does not serve this run."""
        try:
            reply = await self.node.ask(peer_id, ManifestRequest(self.run))
            match reply:
                case Envelopes(envelopes):
                    for raw in envelopes:
                        self.rules.learn(check_manifest(raw, self.run))
                case Refused("unknown run"):
                    return False
        except PeerFault as fault:
            await self.offence(peer_id, fault)
        except TransportFault as fault:
            log.info("no manifest from %s: %s", short(peer_id), fault)
        return True

    async def _read_manifest(self) -> None:
        try:
            await self.node.directory.get(RecordKey(self.run, RecordKind.MANIFEST))  # the rules learn it
        except TransportFault as fault:
            log.info("no manifest in the DHT: %s", fault)

    async def open_chain(self) -> Chain:
        """The chain as this peer's disk knows it. Needs the manifest."""
        self.chain = Chain(self.manifest)
        if self.store is not None:
            for raw in await self.store.chain():
                try:
                    self.chain.extend(unseal(raw, Announcement))
                except PeerFault as fault:
                    self.node.warn("damaged chain", f"{fault}; the rest is fetched again")
                    break
            for trainer, version, first, second in await self.store.evidence():  # of what came after those entries
                self.chain.equivocations[trainer] = Equivocation(trainer, version, first, second)
            await self._restore_end(self.chain, await self.store.meta("end"))
        return self.chain

    async def _restore_end(self, chain: Chain, raw: bytes | None) -> None:
        try:
            if raw is not None and chain.finish(unseal(raw, RunEnd)):
                self.ended.set()
        except PeerFault as fault:
            self.node.warn("damaged chain", f"{fault}; the end of the run is fetched again")

    def page(self, first: int) -> tuple[bytes, ...]:
        """The answer to a ChainRequest: announcements, and behind the head the proofs of equivocation and the end."""
        if self.chain is None:
            return ()
        raws: list[bytes] = []
        size = 0
        at_head = True
        for entry in self.chain.since(first, CHAIN_PAGE_MAX):
            size += len(entry.raw)
            if raws and size > CHAIN_PAGE_BYTES:
                break
            raws.append(entry.raw)
            at_head = entry is self.chain.head
        if at_head:
            for proof in self.chain.equivocations.values():  # who asks later must know it too
                raws += (proof.first, proof.second)
        if at_head and self.chain.end is not None:
            raws.append(self.chain.end.raw)
        return tuple(raws)

    async def take(self, raw: bytes, source: str) -> bool:
        """One envelope of the policy topic, wherever it came from. True if it was news. Raises PeerFault."""
        try:
            announcement = unseal(raw, Announcement)
        except PeerFault as fault:
            try:
                end = unseal(raw, RunEnd)
            except PeerFault:
                raise fault from None  # neither: say what is wrong with it as an announcement
            return await self._take_end(end, source)
        return await self._take_announcement(announcement, source)

    async def _take_announcement(self, sealed: Sealed[Announcement], source: str) -> bool:
        if self.chain is None:
            return False
        match self.chain.extend(sealed):
            case Extended():
                self._to_store[sealed.message.version] = sealed.raw
                await self._notify()
                return True
            case Gap():
                await self.catch_up(source)
                return True
            case Equivocation() as proof:
                await self._record(proof)
                await self._notify()
        return False

    async def _store_chain(self) -> None:
        """Write the chain behind: nobody waits for this disk, and what a crash loses here is fetched again."""
        while True:
            await asyncio.sleep(CHAIN_STORE_S)
            await self.flush()

    async def flush(self) -> None:
        """What is verified and still stands goes to the disk, in one transaction."""
        waiting, self._to_store = self._to_store, {}
        if self.store is None or self.chain is None or not waiting:
            return
        standing = [(version, raw) for version, raw in waiting.items() if _is(self.chain.get(version), raw)]
        await self._on_disk(self.store.extend_chain(standing))

    async def _on_disk(self, work: Awaitable[None]) -> None:
        """A full disk costs what a restart would have known, not this process."""
        try:
            await work
        except OSError as error:
            self.node.warn("cannot store chain", str(error))

    async def _record(self, proof: Equivocation) -> None:
        if self.store is not None:
            await self._on_disk(self.store.add_evidence(proof.trainer, proof.version, proof.first, proof.second))
        text = f"trainer {short(proof.trainer)} signed two different versions {proof.version}; both are refused"
        self.node.warn("equivocation", text)

    async def _take_end(self, sealed: Sealed[RunEnd], source: str) -> bool:
        if self.chain is None or self.chain.end is not None:
            return False
        if not self.chain.finish(sealed):
            await self.catch_up(source)
            return True
        self.ended.set()
        await self._notify()
        if self.store is not None:
            await self._on_disk(self.store.set_meta("end", sealed.raw))
        return True

    async def catch_up(self, source: str) -> None:
        """Fetch what this peer lacks, page by page, from `source`. Faults are counted, not raised."""
        if self._catching_up.locked() or self.chain is None:
            return
        async with self._catching_up:
            try:
                await self._fetch_chain(self.chain, source)
            except PeerFault as fault:
                await self.offence(source, fault)
            except TransportFault as fault:
                log.info("no chain from %s: %s", short(source), fault)

    async def _fetch_chain(self, chain: Chain, source: str) -> None:
        first = chain.version + 1
        while True:
            reply = await self.node.ask(source, ChainRequest(self.run, first))
            if not isinstance(reply, Envelopes) or not reply.envelopes:
                return
            before = (chain.version, chain.end)
            for raw in reply.envelopes:
                await self.take(raw, source)
            if (chain.version, chain.end) != before:
                first = chain.version + 1
            elif first > 0 and not chain.equivocations:
                first = 0  # its chain does not continue ours: find where they part, which is proof of equivocation
            else:
                return

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ gossip

    async def publish(self, sealed: Sealed[Announcement] | Sealed[RunEnd]) -> None:
        """Tell everybody at once. Not to be relied on."""
        try:
            await self.node.host.publish(self.policy_topic, sealed.raw)
            self.gossip_bytes += len(sealed.raw)
        except TransportFault as fault:
            log.warning("gossip failed: %s", fault)

    async def _hear_gossip(self) -> None:
        await self.node.host.subscribe(self.policy_topic, self._enqueue)
        while True:
            sender, raw = await self._inbox.get()
            try:
                await self.take(raw, sender)
            except PeerFault as fault:
                await self.offence(sender, fault)

    def _enqueue(self, sender: str, raw: bytes) -> None:
        self.gossip_bytes += len(raw)
        if self.ignores(sender):
            self.refusals["ignored sender"] += 1
            return
        if self._inbox.full():
            self._inbox.get_nowait()  # the oldest: the latest version wins
            self.refusals["inbox full"] += 1
        self._inbox.put_nowait((sender, raw))

    async def offence(self, peer_id: str, fault: PeerFault) -> None:
        """Count nonsense against its sender; too much of it and the sender is ignored and disconnected."""
        self.refusals[fault.reason] += 1
        if fault.reason in INNOCENT:
            return
        self._offences[peer_id] += 1
        if len(self._offences) > IDENTITIES_MAX:
            del self._offences[next(iter(self._offences))]
        log.info("refused from %s: %s", short(peer_id), fault)
        if self._offences[peer_id] == OFFENCES_MAX:
            self.node.warn("peer ignored", f"{short(peer_id)} sent {OFFENCES_MAX} invalid messages, the last: {fault}")
            try:
                await self.node.host.disconnect(peer_id)
            except (
                TransportFault,
                PeerFault,
            ) as error:  # libp2p lets other kinds of key in, whose ids are none of ours
                log.info("could not disconnect %s: %s", short(peer_id), error)

    # ------------------------------------------------------------------ heartbeats

    def heard_of(self, peer_id: str, version: int | None) -> None:
        """A neighbour said which version it holds: a source for it, and perhaps news."""
        if version is not None:
            self.holders[peer_id] = version

    async def _beat_forever(self) -> None:
        """One beat a target at a time: a target that is slow to answer delays only its own."""
        beats: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                for target in self._targets():
                    if target not in beats or beats[target].done():
                        beats[target] = tasks.create_task(self._beat_to(target))
                await asyncio.sleep(BEAT_S)

    def _targets(self) -> list[str]:
        trainers = () if self.node.config.role == "bootstrap" else self._trainers()  # they beat to us
        return list(dict.fromkeys([*self.node.config.bootstrap, *trainers]))

    async def say_goodbye(self) -> None:
        """A last beat, so that nobody waits for us or takes a quick return for a copy. Bounded, best effort."""
        await self.flush()
        beat = msgspec.structs.replace(self.beat(), leaving=True)
        peers = [self.node.bootstraps.get(target, target) for target in self._targets()]
        calls = [self.node.ask(peer_id, beat, GOODBYE_S) for peer_id in peers if not peer_id.startswith("/")]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, TransportFault | PeerFault):
                log.info("goodbye not heard: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _trainers(self) -> Iterable[str]:
        if self.rules.manifest is None:
            return []
        return [peer_id for peer_id in self.manifest.trainers if peer_id != self.node.peer_id]

    async def _beat_to(self, target: str) -> None:
        """One heartbeat to a bootstrap address or to a trainer's peer id."""
        is_bootstrap = target.startswith("/")
        try:
            peer_id = self.node.bootstraps.get(target) if is_bootstrap else target
            if peer_id is None or target in self._unreachable:
                peer_id = await self._reconnect(target)
            reply = await self.node.ask(peer_id, self.beat(), BEAT_S)
            if not isinstance(reply, HeartbeatReply):
                raise PeerFault("unexpected reply", type(reply).__name__)
        except PeerFault as fault:
            self.refusals[fault.reason] += 1
            return
        except TransportFault as fault:
            if fault.code in FINAL_VERDICTS:
                self._refused_by(target, fault)
            else:
                self._lost(target, fault)
            return
        self._found(target)
        if reply.verdict in FINAL_VERDICTS:
            self._refused_by(target, self.node.turned_away(reply.verdict, f"says {short(peer_id)}"))
        else:
            self._refusing.pop(target, None)
            await self._on_reply(peer_id, reply)

    def _refused_by(self, target: str, fault: TransportFault) -> None:
        """One bootstrap peer alone may be wrong, or hostile: we go only when everybody who answers refuses us."""
        if target not in self._refusing:
            self.node.warn("refused", f"{target[-60:]} refuses this peer: {fault}")
        self._refusing[target] = fault
        answering = [other for other in self._targets() if other not in self._unreachable]
        if all(other in self._refusing for other in answering):
            raise fault

    async def _reconnect(self, target: str) -> str:
        if not target.startswith("/"):
            await self.reach(target)
            return target
        peer_id = await self.node.host.connect(target, BEAT_S)
        await self.node.hello(peer_id, self.run)
        self.node.bootstraps[target] = peer_id
        await self.node.directory.add_peer(peer_id)  # a restarted bootstrap peer knows nobody
        return peer_id

    async def _on_reply(self, peer_id: str, reply: HeartbeatReply) -> None:
        if reply.next_counter is not None and peer_id in self._trainers():
            self.next_counter = max(self.next_counter, reply.next_counter)
        if reply.step is not None and peer_id in self._trainers():
            await self.trainer_said(reply.step, reply.queued)
        if self.chain is None:
            return
        if (reply.head is not None and reply.head > self.chain.version) or (reply.ended and not self.ended.is_set()):
            await self.catch_up(peer_id)

    async def trainer_said(self, step: int, queued: int | None) -> None:
        """A heartbeat's answer or a receipt told how far the trainer is."""
        if (self.trainer_step, self.trainer_queued) != (step, queued):
            self.trainer_step, self.trainer_queued = step, queued
            await self._notify()

    def known_unreachable(self, target: str, fault: TransportFault) -> None:
        """It did not answer when we joined, and that was said then; it is tried again with every heartbeat."""
        self._unreachable[target] = fault.code

    def _lost(self, target: str, fault: TransportFault) -> None:
        """Say so once; and once more when somebody else answers there: the peer got a new key (case B18)."""
        what = "bootstrap" if target.startswith("/") else "trainer"
        said = self._unreachable.get(target)
        if said is None or (fault.code == "peer id mismatch" and said != fault.code):
            self._unreachable[target] = fault.code
            self.node.warn(f"{what} unreachable", f"since {time.strftime('%H:%M:%S')}: {fault}")

    def _found(self, target: str) -> None:
        if self._unreachable.pop(target, None) is not None:
            what = "bootstrap" if target.startswith("/") else "trainer"
            self.node.warn(f"{what} reachable", f"{target[-60:]} answers again")

    # ------------------------------------------------------------------ directory and neighbourhood

    async def _keep_directory(self) -> None:
        """Keep the manifest alive, renew our capacity, refresh the head (the trainer's), read the others'."""
        last_s = dict.fromkeys(("manifest", "capacity", "head"), -1e9)
        while True:
            now_s = time.monotonic()
            await self._keep_manifest()
            if self.rules.manifest is not None and now_s - last_s["manifest"] > MANIFEST_LIFE_S / 3:
                last_s["manifest"] = now_s
                await self._put(RecordKind.MANIFEST, self.rules.manifest.raw, MANIFEST_LIFE_S)
            if self.capacity is not None and now_s - last_s["capacity"] > PEER_RENEW_S:
                last_s["capacity"] = now_s
                await self._put(RecordKind.PEERS, seal(self.node.identity.key, self.capacity()).raw, PEER_LIFE_S)
            if self._head_changed or now_s - last_s["head"] > HEAD_REFRESH_S:
                last_s["head"] = now_s
                self._head_changed = False
                await self.put_head()
            await asyncio.sleep(CAPACITY_FIRST_S)

    async def _keep_manifest(self) -> None:
        """A newer revision counts for the chain from now on, and is on disk for the next start."""
        sealed = self.rules.manifest
        if sealed is None or sealed is self._kept_manifest:
            return
        self._kept_manifest = sealed
        if self.chain is not None:
            self.chain.update_manifest(sealed.message)
        if self.store is not None:
            await self._on_disk(self.store.set_meta("manifest", sealed.raw))

    def head_changed(self) -> None:
        """Our own head moved: store it in the DHT soon."""
        self._head_changed = True

    async def put_head(self) -> None:
        """Store the head of the chain in the DHT, if it is our own announcement."""
        if self.chain is not None and self.chain.head is not None and self.chain.head.sender == self.node.peer_id:
            await self._put(RecordKind.HEAD, self.chain.head.raw, HEAD_LIFE_S)

    async def put_manifest(self) -> None:
        """Store the manifest in the DHT now."""
        if self.rules.manifest is not None:
            await self._put(RecordKind.MANIFEST, self.rules.manifest.raw, MANIFEST_LIFE_S)

    async def _put(self, kind: RecordKind, raw: bytes, life_s: float) -> None:
        me = self.node.peer_id
        shard = shard_of(me, self.rules.manifest.message.directory_shards if self.rules.manifest else 1)
        key = RecordKey(self.run, kind, shard if kind is RecordKind.PEERS else 0)
        subkey = None if kind is RecordKind.MANIFEST else me
        try:
            stored = await self.node.directory.put(key, raw, time.time() + life_s, subkey)
        except TransportFault as fault:
            log.info("could not store %s: %s", kind, fault)
            return
        if not stored:
            log.debug("%s was not stored: a newer one is there, or nobody answered", kind)

    async def read_head(self) -> None:
        """Read the trainers' head records and take what is new. Faults are counted, not raised."""
        try:
            records = await self.node.directory.get(RecordKey(self.run, RecordKind.HEAD))
        except TransportFault as fault:
            log.info("could not read the head: %s", fault)
            return
        for subkey, raw in records.items():
            try:
                await self.take(raw, subkey or "")
            except PeerFault as fault:
                self.refusals[fault.reason] += 1

    async def _keep_neighbourhood(self) -> None:
        """Know the others, be connected to some of them, and ask them for what was missed."""
        while True:
            await self.read_peers()
            await self._connect_some()
            if self.chain is not None:
                await self.read_head()
                newer = [peer for peer, version in self.holders.items() if version > self.chain.version]
                for peer_id in self._some(newer):
                    await self.catch_up(peer_id)
            await asyncio.sleep(DIRECTORY_READ_S if self.ads.keys() - {self.node.peer_id} else CAPACITY_FIRST_S)

    async def read_peers(self) -> None:
        """Read every shard of the capacity directory."""
        shards = self.rules.manifest.message.directory_shards if self.rules.manifest else 1
        found: dict[str, Sealed[CapacityAd]] = {}
        for shard in range(shards):
            try:
                records = await self.node.directory.get(RecordKey(self.run, RecordKind.PEERS, shard))
            except TransportFault as fault:
                log.info("could not read the directory: %s", fault)
                continue
            for subkey, raw in records.items():
                try:
                    found[subkey or ""] = unseal(raw, CapacityAd)
                except PeerFault as fault:
                    self.refusals[fault.reason] += 1
        self.ads = found
        for peer_id, ad in found.items():
            self.heard_of(peer_id, ad.message.version)
        self.holders = {peer: version for peer, version in self.holders.items() if peer in found or self._near(peer)}

    def _near(self, peer_id: str) -> bool:
        seen = self.node.neighbours.get(peer_id)
        return seen is not None and time.monotonic() - seen.heard_s < SILENT_S

    def _some(self, peers: Iterable[str]) -> list[str]:
        """A few, by lot: nobody can stand in front, and requests spread."""
        found = list(peers)
        return self._rng.sample(found, min(len(found), NEIGHBOURS_ASKED))

    async def _connect_some(self) -> None:
        try:
            connected = set(await self.node.host.peers())
        except TransportFault:
            return
        strangers = [peer for peer in self.ads if peer not in connected and peer != self.node.peer_id]
        self._rng.shuffle(strangers)
        for peer_id in strangers[: max(0, MESH_PEERS - len(connected))]:
            try:
                await self.reach(peer_id)
            except TransportFault as fault:
                log.info("cannot reach %s: %s", short(peer_id), fault)

    async def reach(self, peer_id: str) -> None:
        """Connect to a peer at the addresses it advertises. Raises TransportFault."""
        if peer_id not in self.ads:
            await self.read_peers()
        ad = self.ads.get(peer_id)
        fault = TransportFault("unreachable", f"{short(peer_id)} advertises no address")
        for address in ad.message.addresses if ad is not None else ():
            try:
                if await self.node.host.connect(address, BEAT_S) == peer_id:
                    return
            except TransportFault as error:
                fault = error
        raise fault

    def sources(self, version: int) -> list[str]:
        """Whom to ask for a version: some that said they hold it, the trainers, then some that may have got it since.

        Advertisements are up to half a minute old, and a trainer may be gone: one that lacks a blob says so at once.
        """
        trainers = list(self._trainers())
        others = {peer for peer, ad in self.ads.items() if ad.message.role == "inference"} | self.holders.keys()
        others = {peer for peer in others - {self.node.peer_id, *trainers} if not self.ignores(peer)}
        holders = {peer for peer in others if self.holders.get(peer, -1) >= version}
        return self._some(sorted(holders)) + trainers + self._some(sorted(others - holders))


def _is(known: Sealed[Announcement] | None, raw: bytes) -> bool:
    return known is not None and known.raw == raw
