"""Drives one peer's election (protocols/election.py): leases go to the DHT and, as beacons, into gossip.

    DHT reads, gossiped leases --> Election --> Put, Read, Lead, StepDown

Only peers that the manifest makes eligible run one. What a leader does is somebody else's duty (peers/coordinator.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, assert_never

from protocols.directory import RecordKey, RecordKind
from protocols.election import (
    Action,
    Claim,
    Election,
    ElectionConfig,
    Event,
    Heard,
    Lead,
    Obeyed,
    Put,
    Read,
    ReadBack,
    StepDown,
    Stored,
    Tick,
)
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault, TransportFault
from protocols.messages import Directive, Lease

if TYPE_CHECKING:
    from swarm.follower import Follower

log = logging.getLogger(__name__)

INBOX_MAX = 256  # claims waiting; each candidate sends one each quarter of a lease
ELIGIBLE_ASK_S = 1.0  # how often to look whether a new manifest makes us eligible
RESIGN_S = 2.0  # the last word of a leader that leaves; without it the others wait for the end of the lease


def steady_s() -> float:
    """Seconds of a clock that nobody sets and that counts while the machine sleeps, where there is one.

    A lease must have run out for a laptop that was closed; Linux's monotonic clock stands still then.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Candidate:
    """The election of one run, as one eligible peer takes part in it."""

    def __init__(self, follower: "Follower") -> None:
        self.follower = follower
        self.node = follower.node
        self.election: Election | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when we begin or end to lead."""
        self.term = 0
        """The term that we lead in, or led in last."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()  # bounded by _post, and by two actions in flight

    @property
    def leads(self) -> bool:
        """Asked before every grant and every directive (case B46)."""
        return self.election is not None and self.election.leads(steady_s())

    @property
    def _config(self) -> ElectionConfig | None:
        """How to take part, as the newest manifest says; None: not at all."""
        manifest = self.follower.rules.manifest
        if manifest is None or self.node.peer_id not in manifest.message.eligible or self.follower.ended.is_set():
            return None
        return ElectionConfig(lease_s=manifest.message.coordination.lease_s)

    def heard(self, sealed: Sealed[Lease]) -> None:
        """A lease came by gossip. Raises PeerFault if it may not be believed."""
        self.follower.rules.check_lease(sealed, time.time())
        self._post(Heard((Claim.of(sealed.sender, sealed.message),)))

    def led_by(self, sealed: Sealed[Directive]) -> None:
        """Somebody else leads, and we obey: that is its claim, even if we cannot read the DHT now."""
        if self._config is not None:
            until_ms = sealed.message.issued_ms + int(1000 * self._config.lease_s)
            self._post(Heard((Claim(sealed.sender, sealed.message.term, True, until_ms),)))

    def obeyed(self, raw: bytes) -> None:
        """A peer that nobody leads stands at this directive, in a heartbeat. The beat counts even if this does not."""
        if self.election is None or self.follower.orders is None:
            return
        try:
            sealed = unseal(raw, Directive)
            self.follower.orders.check(sealed, time.time())
        except PeerFault as fault:  # it may not have the newest manifest
            self.follower.refusals[fault.reason] += 1
            return
        self._post(Obeyed(sealed.message.term, sealed.sender))

    async def run(self) -> None:
        """Take part for as long as the manifest makes us eligible and the run goes on."""
        while not self.follower.ended.is_set():
            config = self._config
            if config is not None:
                await self._take_part(config)
            await asyncio.sleep(ELIGIBLE_ASK_S)

    async def resign(self) -> None:
        """Free the lease, if we hold it. Bounded, best effort."""
        election, self.election = self.election, None
        if election is None:
            return
        actions = election.resign(steady_s())
        for action in actions:
            match action:
                case Put():
                    try:
                        async with asyncio.timeout(RESIGN_S):
                            await self._put(action)
                    except TimeoutError:
                        log.info("the lease was not given back; it ends by itself")
                case StepDown():
                    self._stepped_down(action)

    async def _take_part(self, config: ElectionConfig) -> None:
        self.election = election = Election(self.follower.run, self.node.peer_id, config, steady_s())
        self._events = asyncio.Queue()  # what the last election asked for may have been answered after its end
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_often(config))
            while self._config == config and self.election is election:
                wait_s = max(0.0, election.next_s - steady_s())
                try:
                    async with asyncio.timeout(min(wait_s, config.renew_s)):
                        event = await self._events.get()
                except TimeoutError:
                    event = Tick()
                for action in election.handle(event, steady_s()):
                    self._act(action, tasks)
            reading.cancel()
        await self.resign()

    def _act(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Put():
                tasks.create_task(self._store(action))
            case Read():
                tasks.create_task(self._read_back())
            case Lead(term):
                self.term = term
                log.info("leading %s in term %d", self.follower.run, term)
                self.node.metrics.emit("coordinator", state="leading", term=term, reason=None)
                self.on_change()
            case StepDown():
                self._stepped_down(action)
            case _:
                assert_never(action)

    def _stepped_down(self, action: StepDown) -> None:
        log.info("no longer leading %s: %s", self.follower.run, action.reason)
        self.node.metrics.emit("coordinator", state="stepped down", term=action.term, reason=action.reason)
        self.on_change()

    def _post(self, event: Event) -> None:
        if self.election is None:
            return  # we take no part, so nothing would ever be taken out
        if self._events.qsize() >= INBOX_MAX and isinstance(event, Heard | Obeyed):
            self.follower.refusals["inbox full"] += 1  # claims are repeated; answers to our actions are not
            return
        self._events.put_nowait(event)

    # ------------------------------------------------------------------ the DHT

    @property
    def _key(self) -> RecordKey:
        return RecordKey(self.follower.run, RecordKind.COORDINATOR)

    async def _store(self, action: Put) -> None:
        self._post(Stored(await self._put(action)))

    async def _put(self, action: Put) -> bool:
        until_s = time.time() + self.follower.manifest.coordination.lease_s
        lease = Lease(
            self.follower.run, action.term, "claimed" if action.claimed else "standby", until_ms=int(until_s * 1000)
        )
        sealed = seal(self.node.identity.key, lease)
        try:
            stored = await self.node.directory.put(self._key, sealed.raw, until_s, self.node.peer_id)
        except TransportFault as fault:
            log.info("lease not stored: %s", fault)
            return False
        if stored:  # what the DHT does not hold must not be believed either
            await self.follower.control.publish(sealed)
        return stored

    async def _read_often(self, config: ElectionConfig) -> None:
        """Gossip may lose every claim; the DHT has them.

        A claim counts from when it is first heard, and a search may wait seconds for nodes that are gone; so what is
        stored here is heard first.
        """
        while True:
            self._post(Heard(self._claims(self.node.directory.held(self._key).values())))
            self._post(Heard(await self._read()))
            await asyncio.sleep(config.renew_s)

    async def _read_back(self) -> None:
        self._post(ReadBack(await self._read()))

    async def _read(self) -> tuple[Claim, ...]:
        try:
            records = await self.node.directory.get(self._key)
        except TransportFault as fault:
            log.info("could not read leases: %s", fault)
            return ()
        return self._claims(records.values())

    def _claims(self, records: Iterable[bytes]) -> tuple[Claim, ...]:
        claims = []
        for raw in records:
            try:
                sealed = unseal(raw, Lease)
            except PeerFault as fault:
                self.follower.refusals[fault.reason] += 1
                continue
            claims.append(Claim.of(sealed.sender, sealed.message))  # the rules have checked who and until when
        return tuple(claims)
