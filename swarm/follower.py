"""Follows one run: its manifest, its policy chain, its gossip. The rest of a run's upkeep hangs on it.

    Follower --heartbeats---> swarm/heartbeats.py      who is alive, what the coordinator and the trainer say
             --neighbourhood> swarm/neighbourhood.py   the directory, connections, sources of adapters
             --candidate----> swarm/candidate.py       the election, where the manifest makes us eligible

The head of the chain arrives on four ways, any of which is enough: gossip (milliseconds), the answer to a
heartbeat (2 s), the DHT (15 s), and another peer's heartbeat. Whatever brought the news, the announcements
themselves are fetched and verified the same way, so a peer that missed everything ends in the same state.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from protocols.coordination import Grant, status_of
from protocols.directory import DirectoryRules, RecordKey, RecordKind, check_manifest
from protocols.envelopes import Sealed, is_of, unseal, unseal_either
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.manifest import Manifest
from protocols.messages import (
    CHAIN_PAGE_MAX,
    STATUS_PEERS_MAX,
    UNARY_BYTES_MAX,
    Announcement,
    ChainRequest,
    Directive,
    Envelopes,
    Heartbeat,
    Lease,
    ManifestRequest,
    PeerStatus,
    Refused,
    RunEnd,
    Status,
    encode,
)
from protocols.orders import Orders
from protocols.policy import Chain, Equivocation, Extended, Gap
from protocols.presence import BEAT_S, IDENTITIES_MAX
from swarm.candidate import Candidate
from swarm.gossip import Topic
from swarm.heartbeats import Heartbeats
from swarm.neighbourhood import Neighbourhood
from swarm.storage import PeerStore
from swarm.tasks import Loop

if TYPE_CHECKING:
    from swarm.node import Node

log = logging.getLogger(__name__)

CHAIN_STORE_S = 0.5  # behind the news; one transaction for all of a page or a burst
CATCH_UP_S = 10.0  # with one source, then whoever brings news next has a turn: one that drips must not hold us back
CHAIN_PAGE_BYTES = UNARY_BYTES_MAX // 2  # of an answer; leaves room for what frames it
STATUS_BYTES_MAX = UNARY_BYTES_MAX - 4096  # of its rows; the rest is for the run's own fields
# Faults that say nothing against whoever we talk to: relays of a forked chain, peers that are merely busy, words of a
# candidate that a cut cable held back, which arrive by the dozen when it is mended, and those of a candidate that a
# newer manifest names, which is still on its way to us.
INNOCENT = frozenset({"equivocating trainer", "remote error", "old directive", "bad expiry", "not eligible"})
OFFENCES_MAX = 8  # invalid messages until a sender is ignored; an honest bug shows itself in fewer
MANIFEST_ASK_S = 1.0
MANIFEST_WARN_S = 15.0
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
        self.started_s = time.monotonic()
        self.progress: Callable[[], Progress] = lambda: (None, None)
        self.wanted: Callable[[], int | None] = lambda: None
        """The trainer's: groups that it waits for."""
        self.next_counter_of: Callable[[str], int | None] = lambda peer_id: None
        self.orders: Orders | None = None
        """Whom we obey; None before the manifest is known."""
        self.grant: Callable[[str, Heartbeat], Grant | None] = lambda peer_id, beat: None
        """The coordinator's answer to a beat; None from everybody else."""
        self.rows: Callable[[], list[PeerStatus] | None] = lambda: None
        """The coordinator's view of everybody; None from everybody else."""
        self.heartbeats = Heartbeats(self)
        self.neighbourhood = Neighbourhood(self)
        self.candidate = Candidate(self)
        self.policy = Topic(self, f"echo/1/{self.run}/policy", self.take)
        """Announcements and the end of the run."""
        self.control = Topic(self, f"echo/1/{self.run}/control", self._take_control)
        """Leases and directives."""
        self._offences: Counter[str] = Counter()
        self._catching_up = asyncio.Lock()
        self._led_by: tuple[str | None, int] = (None, 0)
        self._to_store: dict[int, bytes] = {}
        """Announcements by version that are not on our disk yet."""
        self._kept_manifest: Sealed[Manifest] | None = None

    @property
    def gossip_bytes(self) -> int:
        """Published and heard."""
        return self.policy.bytes + self.control.bytes

    @property
    def manifest(self) -> Manifest:
        """The manifest; only once `find_manifest` has returned."""
        assert self.rules.manifest is not None
        return self.rules.manifest.message

    def loops(self) -> dict[str, Loop]:
        """What keeps this peer up to date."""
        loops: dict[str, Loop] = {
            f"gossip {self.run}": self.policy.hear,
            f"control {self.run}": self.control.hear,
            f"heartbeats {self.run}": self.heartbeats.run,
            f"leader {self.run}": self._watch_leader,
            f"directory {self.run}": self.neighbourhood.keep_records,
            f"neighbourhood {self.run}": self.neighbourhood.keep_near,
            f"chain {self.run}": self._store_chain,
        }
        if self.node.config.role != "inference":  # volunteers come and go
            loops[f"election {self.run}"] = self.candidate.run
        return loops

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
            await self.read_manifest()

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

    async def read_manifest(self) -> None:
        """Read the newest manifest from the directory. Faults are logged, not raised."""
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
        sealed = unseal_either(raw, Announcement, RunEnd)
        if is_of(sealed, Announcement):
            return await self._take_announcement(sealed, source)
        assert is_of(sealed, RunEnd)
        return await self._take_end(sealed, source)

    async def _take_announcement(self, sealed: Sealed[Announcement], source: str) -> bool:
        if self.chain is None:
            return False
        match self.chain.extend(sealed):
            case Extended():
                self._to_store[sealed.message.version] = sealed.raw
                self.heartbeats.trainer_heard_s = time.monotonic()
                await self.notify()
                return True
            case Gap():
                await self.catch_up(source)
                return True
            case Equivocation() as proof:
                await self._record(proof)
                await self.notify()
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
        await self.notify()
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
        until_s = time.monotonic() + CATCH_UP_S
        while time.monotonic() < until_s:
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

    async def notify(self) -> None:
        """Wake whoever waits for `changed`."""
        async with self.changed:
            self.changed.notify_all()

    def trainers(self) -> list[str]:
        """The run's trainers other than ourselves; none before the manifest is known."""
        if self.rules.manifest is None:
            return []
        return [peer_id for peer_id in self.manifest.trainers if peer_id != self.node.peer_id]

    async def keep_manifest(self) -> None:
        """A newer revision counts for the chain and for orders from now on, and is on disk for the next start."""
        sealed = self.rules.manifest
        if sealed is None or sealed is self._kept_manifest:
            return
        self._kept_manifest = sealed
        if self.chain is not None:
            self.chain.update_manifest(sealed.message)
        if self.orders is None:
            self.orders = Orders(sealed.message)
        else:
            self.orders.update_manifest(sealed.message)
        if self.store is not None:
            await self._on_disk(self.store.set_meta("manifest", sealed.raw))

    # ------------------------------------------------------------------ gossip

    async def _take_control(self, raw: bytes, _: str) -> None:
        """A lease or a directive. Raises PeerFault."""
        if self.rules.manifest is None:
            return
        sealed = unseal_either(raw, Directive, Lease)
        if is_of(sealed, Directive):
            await self.take_directive(sealed)
        elif is_of(sealed, Lease):
            self.candidate.heard(sealed)

    async def take_directive(self, sealed: Sealed[Directive]) -> None:
        """Obey it if it is above what we obey. Raises PeerFault for one that nobody may send."""
        await self.keep_manifest()
        if self.orders is not None and self.orders.take(sealed, time.monotonic(), time.time()):
            if self._show_leader(time.monotonic()) and sealed.sender != self.node.peer_id:
                self.candidate.led_by(sealed)
            await self.notify()

    async def _watch_leader(self) -> None:
        """Notice that nobody leads: whoever waits for credits must then pace itself."""
        while True:
            await asyncio.sleep(BEAT_S / 2)
            if self._show_leader(time.monotonic()):
                await self.notify()

    def _show_leader(self, now_s: float) -> bool:
        """Emit a change of the coordinator; True if there was one."""
        orders = self.orders
        if orders is None:
            return False
        led_by = (None if orders.alone(now_s) else orders.coordinator, orders.term)
        if led_by == self._led_by:
            return False
        if led_by[0] != self._led_by[0]:
            self.heartbeats.credit = None  # nobody else's counts
        self._led_by = led_by
        self.node.metrics.emit("leader", coordinator=led_by[0], term=led_by[1])
        return True

    # ------------------------------------------------------------------ status

    def status(self, now_s: float, now_ms: int) -> Status | None:
        """The run as this peer sees it; None before it knows the manifest."""
        if self.rules.manifest is None or self.orders is None:
            return None
        rows = self.rows()
        leading = rows is not None
        if rows is None:
            rows = [
                status_of(peer_id, seen.beat, now_s - seen.heard_s, None)
                for peer_id, seen in self.node.neighbours.items()
                if seen.beat.run == self.run
            ]
            rows.insert(0, status_of(self.node.peer_id, self.heartbeats.beat(), 0.0, None))
        trainer = next((row for row in rows if row.peer_id in self.manifest.trainers), None)
        shown = _fitting(self._described(row) for row in rows[:STATUS_PEERS_MAX])
        step, queued = self.progress()
        if step is None:
            step, queued = self._trainer_progress()
        head = self.chain.version if self.chain is not None and self.chain.version >= 0 else None
        if step is not None and head is not None:
            step = max(step, head)  # a version says that as many steps are done, and may come before the next beat
        alone, orders = self.orders.alone(now_s), self.orders
        return Status(
            run=self.run,
            now_ms=now_ms,
            max_lag=self.manifest.max_lag,
            max_steps=self.manifest.max_steps,
            mode=orders.mode,
            head=head,
            step=step,
            queued=queued,
            ended=self.ended.is_set(),
            term=orders.term or None,
            coordinator=None if alone else orders.coordinator,
            leading=leading,
            vacant_s=round(now_s - (orders.heard_s or self.started_s), 1) if alone else None,
            accepted=trainer.accepted if trainer is not None else None,
            stale=trainer.stale if trainer is not None else None,
            peers=shown,
            left_out=len(rows) - len(shown),
        )

    def _trainer_progress(self) -> Progress:
        for trainer in self.trainers():
            seen = self.node.neighbours.get(trainer)
            if seen is not None and seen.beat.step is not None:
                return seen.beat.step, seen.beat.queued
        return None, None

    def _described(self, row: PeerStatus) -> PeerStatus:
        ad = self.neighbourhood.ads.get(row.peer_id)
        return row if ad is None else structs.replace(row, engine=ad.message.engine, device=ad.message.device)

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


def _fitting(rows: Iterable[PeerStatus]) -> tuple[PeerStatus, ...]:
    """Those that fit into one answer; labels are the peers' own words, and may be long."""
    fitting, num_bytes = [], 0
    for row in rows:
        num_bytes += len(encode(row))
        if num_bytes > STATUS_BYTES_MAX:
            break
        fitting.append(row)
    return tuple(fitting)


def _is(known: Sealed[Announcement] | None, raw: bytes) -> bool:
    return known is not None and known.raw == raw
