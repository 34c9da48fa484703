"""Sequential mode, both ends: the trainer's calls for a round, and an inference peer's share of one.

    trainer: Rounds --RoundCall--> inference peer: RoundWork --groups, pushed like all others--> Ingest --> Rounds

Which peer owes what, and what moves when one stalls, is decided in protocols/rounds.py. A call may be lost or
repeated: it names a total. What a peer makes of it travels like any other rollout, receipts and all.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocols.delivery import Queued
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import RoundCall, RoundReply
from protocols.presence import IDENTITIES_MAX, SILENT_S
from protocols.rounds import STALL_MIN_S, Call, Round
from swarm.follower import Follower

log = logging.getLogger(__name__)

STRIKES_MAX = 7  # a peer that has never delivered is then asked once in 40 minutes
CALL_TIMEOUT_S = 5.0  # a peer answers a call at once, before it generates


@dataclass(frozen=True, slots=True)
class _Suspect:
    version: int | None
    """What it held when it stalled."""
    until_s: float


class Rounds:
    """The trainer's rounds, one at a time."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.node = follower.node
        self.moved = 0
        """Groups that were called from another peer, in all rounds."""
        self.open: Round | None = None
        self._opened_s = 0.0
        self._number = 0
        self.unwanted: Callable[[str], bool] = lambda peer_id: False
        """Peers whose rollouts are not taken any more."""
        self._suspects: dict[str, _Suspect] = {}
        """Peers that stalled: trusted again once they deliver, or hold a newer version and have waited their time."""
        self._strikes: Counter[str] = Counter()
        """How often a peer has stalled since it last delivered: versions are claims, so it waits longer each time."""
        self._silent: set[str] = set()
        """Peers that fell silent since the last round was closed."""
        self._to_call: dict[str, tuple[Round, Call]] = {}
        """The newest call that a peer has not got yet: calls to one peer must not overtake one another."""
        self._calling: dict[str, asyncio.Task[None]] = {}

    def keep_open(self, version: int, missing: int) -> None:
        """Open a round for `missing` groups, or look after the one that is open. Called again each second at least."""
        now_s = time.monotonic()
        if self.open is None:
            self.open, self._opened_s = self._round(version, missing), now_s
        elif self.open.stuck(now_s) or (self.open.done and missing > 0):  # some of it was lost, or became too old
            log.info("round %d is called anew: %d groups are missing", self.open.number, missing)
            again = self._round(version, missing)
            again.moved, again.stalled = self.open.moved, self.open.stalled
            self.open = again
        calls = self.open.peers(self._rates(now_s), now_s)
        self._make(self.open, calls + self.open.tick(now_s))

    def _round(self, version: int, missing: int) -> Round:
        self._number = max(self._number + 1, int(time.time()))  # rises over restarts too
        return Round(self._number, version, missing)

    def delivered(self, peer_id: str, groups: Sequence[Queued]) -> None:
        """Groups of this peer were accepted."""
        self._suspects.pop(peer_id, None)
        self._strikes.pop(peer_id, None)
        if self.open is not None:
            self._make(self.open, self.open.delivered(peer_id, len(groups), time.monotonic()))

    def drop(self) -> None:
        """Rounds are called no more: the mode has changed."""
        self.open = None

    def close(self, groups: int) -> None:
        """The batch is complete."""
        ended, self.open = self.open, None
        if ended is None:
            return
        self.moved += ended.moved
        stalled, self._silent = ended.stalled | self._silent, set()
        for peer_id in stalled:
            self._suspect(peer_id)
        self.node.metrics.emit(
            "round",
            number=ended.number,
            version=ended.version,
            groups=groups,
            peers=ended.num_peers,
            moved=ended.moved,
            stalled=sorted(stalled),
            seconds=round(time.monotonic() - self._opened_s, 3),
        )

    def _rates(self, now_s: float) -> dict[str, float | None]:
        """Inference peers that are alive, without those that stalled or fell silent unless there is nobody else."""
        known = {
            peer_id: seen
            for peer_id, seen in self.node.neighbours.items()
            if seen.beat.role == "inference" and seen.beat.run == self.follower.run
        }
        alive = {peer_id: seen.beat for peer_id, seen in known.items() if now_s - seen.heard_s < SILENT_S}
        for peer_id in known.keys() - alive.keys() - self._suspects.keys():
            self._suspect(peer_id)
            self._silent.add(peer_id)
        for peer_id, suspect in list(self._suspects.items()):
            newer = peer_id in alive and (alive[peer_id].version or 0) > (suspect.version or 0)
            if newer and now_s >= suspect.until_s:
                del self._suspects[peer_id]
        alive = {peer_id: beat for peer_id, beat in alive.items() if not self.unwanted(peer_id)}
        trusted = {peer_id: beat for peer_id, beat in alive.items() if peer_id not in self._suspects} or alive
        return {peer_id: beat.groups_per_s for peer_id, beat in trusted.items()}

    def _suspect(self, peer_id: str) -> None:
        """Ask nothing of it for now: after the first time only until it holds a newer version (case B34)."""
        if peer_id in self._suspects:
            return
        seen = self.node.neighbours.get(peer_id)
        wait_s = 0.0 if self._strikes[peer_id] == 0 else STALL_MIN_S * 2.0 ** self._strikes[peer_id]
        self._strikes[peer_id] = min(self._strikes[peer_id] + 1, STRIKES_MAX)
        if len(self._strikes) > IDENTITIES_MAX:
            del self._strikes[next(iter(self._strikes))]
        until_s = time.monotonic() + wait_s
        self._suspects[peer_id] = _Suspect(seen.beat.version if seen is not None else None, until_s)
        if len(self._suspects) > IDENTITIES_MAX:
            del self._suspects[next(iter(self._suspects))]

    def _make(self, opened: Round, calls: Sequence[Call]) -> None:
        for call in calls:
            self._to_call[call.peer_id] = (opened, call)
            if call.peer_id not in self._calling:
                self._calling[call.peer_id] = asyncio.create_task(self._call(call.peer_id))

    async def _call(self, peer_id: str) -> None:
        try:
            while peer_id in self._to_call:
                opened, call = self._to_call.pop(peer_id)
                if self.open is not opened:
                    continue
                taken = await self._ask(opened, call)
                if taken < call.count and self.open is opened:
                    self._make(opened, opened.refused(peer_id, taken, time.monotonic()))
        finally:
            del self._calling[peer_id]

    async def _ask(self, opened: Round, call: Call) -> int:
        """How many groups the peer takes on; 0 if it does not answer."""
        request = RoundCall(
            run=self.follower.run,
            number=opened.number,
            version=opened.version,
            refresh_gap=self.follower.manifest.coordination.refresh_gap,
            count=call.count,
        )
        try:
            reply = await self.node.ask(call.peer_id, request, CALL_TIMEOUT_S)
        except (TransportFault, PeerFault) as fault:
            log.info("round %d: %s does not take its part: %s", opened.number, short(call.peer_id), fault)
            return 0
        return reply.taken if isinstance(reply, RoundReply) else 0

    def cancel(self) -> None:
        """Wait for no answer any more."""
        for task in self._calling.values():
            task.cancel()


@dataclass(slots=True)
class RoundWork:
    """What an inference peer was called for, and how much of it is begun."""

    number: int = -1
    version: int = 0
    refresh_gap: int = 0
    count: int = 0
    begun: int = 0

    def called(self, call: RoundCall) -> None:
        """Take a call of the trainer. Another number is another round: what was left of the last one is not wanted."""
        if call.number != self.number:
            self.number, self.begun = call.number, 0
        self.version, self.refresh_gap, self.count = call.version, call.refresh_gap, call.count

    def left(self, loaded: int, head: int) -> int:
        """Groups that may be begun under version `loaded`, when `head` is the newest verified; 0: refresh first."""
        if max(head, self.version) - loaded > self.refresh_gap:
            return 0
        return max(0, self.count - self.begun)
