"""A round of sequential mode: the trainer calls for B groups of one version, and moves work that stalls.

    Started --> Call each peer for its part --Delivered--> ... --> Done
                       |  a peer refuses, leaves, or delivers nothing for too long
                       +--> what it still owes is called from the others, group by group

Echo's sequential mode (arXiv 2508.05387): rollouts are pulled for the current policy, peers refresh first when they
are more than `refresh_gap` behind. What a peer has delivered before it stalls stays delivered; only what is still
owed moves, one group at a time to whoever owes least for its rate, so a slow peer is never given a whole batch back.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from protocols.presence import SILENT_S

STALL_MIN_S = 3 * SILENT_S  # a guess: a fetch and the first groups on a slow machine; shorter stalls are normal
STALL_SLACK = 4.0  # times what a peer's own rate promises for what it owes
STALL_MAX_S = 600.0  # whatever rate it claims: no honest group takes longer


@dataclass(frozen=True, slots=True)
class Call:
    """Ask a peer for `count` groups of this round, all calls together."""

    peer_id: str
    count: int


@dataclass(slots=True)
class _Worker:
    rate: float
    """Groups a second, measured by the peer; 1 where unknown."""
    asked: int = 0
    delivered: int = 0
    progress_s: float = 0.0
    present: bool = True
    barred_until_s: float = 0.0

    @property
    def owes(self) -> int:
        return max(0, self.asked - self.delivered)


class Round:
    """One round. The driver tells who is there, what was delivered and refused; it answers with calls to make."""

    def __init__(self, number: int, version: int, needed: int, stall_min_s: float = STALL_MIN_S) -> None:
        self.number, self.version, self.needed = number, version, needed
        """`needed` groups are still to come when the round opens."""
        self.moved = 0
        """Groups that were called from another peer because the first one stalled, refused or left."""
        self.stalled: set[str] = set()
        """Peers that have stalled in this round; the driver asks nothing of them in the next until they are well."""
        self._stall_min_s = stall_min_s
        self._workers: dict[str, _Worker] = {}
        self._delivered = 0

    @property
    def done(self) -> bool:
        """Everything that was needed has come."""
        return self._delivered >= self.needed

    @property
    def num_peers(self) -> int:
        """Peers that delivered something."""
        return sum(worker.delivered > 0 for worker in self._workers.values())

    def peers(self, rates: Mapping[str, float | None], now_s: float) -> list[Call]:
        """Who is there now, with their rates. Newcomers get what is free; who is gone loses what it owes."""
        for peer_id, rate in rates.items():
            worker = self._workers.setdefault(peer_id, _Worker(1.0, progress_s=now_s))
            worker.present = True
            if rate is not None and rate > 0:
                worker.rate = rate
        for peer_id, worker in self._workers.items():
            if peer_id not in rates and worker.present:
                worker.present = False
                self._drop(worker)
        return self._share(now_s)

    def delivered(self, peer_id: str, count: int, now_s: float) -> list[Call]:
        """The trainer has accepted groups of this peer that the round can use, called for or not."""
        self._delivered += count
        worker = self._workers.get(peer_id)
        if worker is not None:
            worker.delivered += count
            worker.asked = max(worker.asked, worker.delivered)
            worker.progress_s = now_s
            worker.barred_until_s = 0.0
        return self._share(now_s)

    def refused(self, peer_id: str, taken: int, now_s: float) -> list[Call]:
        """A peer cannot be reached, or takes on only `taken` groups, all calls together. Asked again later."""
        worker = self._workers.get(peer_id)
        if worker is None or taken >= worker.asked:
            return []
        self.moved += worker.asked - max(taken, worker.delivered)
        worker.asked = max(taken, worker.delivered)
        worker.barred_until_s = now_s + self._stall_min_s
        return self._share(now_s)

    def tick(self, now_s: float) -> list[Call]:
        """Time has passed: take away what stalls, if there is somebody else to do it."""
        stalled = {peer_id for peer_id, worker in self._workers.items() if self._is_stalled(worker, now_s)}
        if any(peer_id not in stalled for peer_id in self._able(now_s)):
            for peer_id in stalled:
                self._drop(self._workers[peer_id])
                self._workers[peer_id].barred_until_s = now_s + self._stall_min_s
            self.stalled |= stalled
        return self._share(now_s)

    def stuck(self, now_s: float) -> bool:
        """Everybody who is there stalls, and nobody else could do it: open another round, which asks them anew.

        They may know nothing of their calls any more (restarted within three beats, they were never missed), or have
        lost what they began (a full disk). A call that is repeated would not say so: it names a total.
        """
        able = self._able(now_s)
        return bool(able) and all(self._is_stalled(worker, now_s) for worker in able.values())

    # ------------------------------------------------------------------ sharing out

    def _able(self, now_s: float) -> dict[str, _Worker]:
        return {
            peer_id: worker
            for peer_id, worker in self._workers.items()
            if worker.present and now_s >= worker.barred_until_s
        }

    def _is_stalled(self, worker: _Worker, now_s: float) -> bool:
        allowed_s = max(self._stall_min_s, min(STALL_MAX_S, STALL_SLACK * worker.owes / worker.rate))
        return worker.owes > 0 and now_s - worker.progress_s >= allowed_s

    def _drop(self, worker: _Worker) -> None:
        """Nothing more is expected of it; what comes all the same is welcome."""
        self.moved += worker.owes
        worker.asked = worker.delivered

    def _share(self, now_s: float) -> list[Call]:
        """Give out what nobody owes, group by group, to whoever will be done with it first."""
        free = self.needed - self._delivered - sum(worker.owes for worker in self._workers.values())
        able = self._able(now_s)
        queue = [((worker.owes + 1) / worker.rate, peer_id) for peer_id, worker in able.items()]
        heapq.heapify(queue)
        called: dict[str, None] = {}
        for _ in range(free if queue else 0):
            _, peer_id = heapq.heappop(queue)
            worker = able[peer_id]
            if worker.owes == 0:
                worker.progress_s = now_s  # it begins now
            worker.asked += 1
            called[peer_id] = None
            heapq.heappush(queue, ((worker.owes + 1) / worker.rate, peer_id))
        return [Call(peer_id, self._workers[peer_id].asked) for peer_id in called]
