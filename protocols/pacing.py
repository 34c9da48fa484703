"""How many chunks a holder has on the way at once, all askers together.

A link that carries one chunk after the other delivers the first of ten in a tenth of the time that it needs when it
carries all ten at once, and only a chunk that has arrived can be passed on. What is written is not yet on the way: a
chunk fits into the buffers of the network stack. So what counts is what askers say they have.
"""

import math
from collections import deque

AHEAD_S = 0.4  # of the measured rate may be on the way: more than a round trip, so the link does not fall idle
ON_THE_WAY_MIN = 6  # of them some wait for a receiver whose downlink others fill, while ours must not fall idle
ON_THE_WAY_MAX = 64  # 16 MiB: 0.1 s at 160 MB/s
OVERDUE_MIN_S = 2.0  # a chunk not acknowledged for this long is overdue: its asker is slow, or silent
OVERDUE_MAX_S = 10.0  # whatever the usual time is: askers could make it long by acknowledging late
OVERDUE_FACTOR = 4.0  # of the usual time until one is acknowledged
GAIN = 0.1  # of that running mean: about ten chunks
WINDOW_S = 0.25  # the rate is the best of the last WINDOWS of these: a pause has not made the link slower
WINDOWS = 8
ALLOWED_START = 2  # chunks on the way to a peer that has acknowledged none yet
PEERS_MAX = 1024  # peers whose allowance is remembered


class Pacing:
    """What was sent and is not acknowledged. A stream is whatever tells a peer's streams apart.

    A peer may have as many chunks on the way as it has acknowledged, and half of all at most. One that lets a chunk
    become overdue is slow, or takes what it never acknowledges: it gets one at a time from then on, until it has
    acknowledged some, and keeps nobody waiting.
    """

    def __init__(self) -> None:
        self._sent_s: dict[tuple[str, str, int], float] = {}
        """By peer, stream and chunk."""
        self._allowed: dict[str, int] = {}
        """Chunks that a peer may have on the way, as far as that is known."""
        self._acknowledged: deque[tuple[int, int]] = deque(maxlen=WINDOWS)
        """Windows in which chunks were acknowledged, and how many."""
        self._usual_s = 0.0
        """Running mean of the time until a chunk is acknowledged."""

    def room(self, peer: str, now_s: float) -> bool:
        """One more chunk may be sent, to this peer."""
        limit, under_way = self.limit(now_s), self._under_way(now_s)
        mine = sum(each == peer for each, _, _ in self._sent_s)
        if mine >= min(self._allowed.get(peer, ALLOWED_START), max(ON_THE_WAY_MIN // 2, limit // 2)):
            return False
        return self._suspect(peer) or under_way < limit

    def limit(self, now_s: float) -> int:
        """Chunks that may be on the way, to all peers together."""
        now = int(now_s / WINDOW_S)
        best = max((count for window, count in self._acknowledged if window > now - WINDOWS), default=0)
        return min(ON_THE_WAY_MAX, max(ON_THE_WAY_MIN, math.ceil(best / WINDOW_S * AHEAD_S)))

    def sent(self, peer: str, stream: str, index: int, now_s: float) -> None:
        """A chunk was written."""
        self._sent_s[peer, stream, index] = now_s

    def acknowledged(self, peer: str, stream: str, index: int, now_s: float) -> float | None:
        """The asker has it: seconds since it was written, None if it was not sent."""
        sent_s = self._sent_s.pop((peer, stream, index), None)
        if sent_s is None:
            return None
        self._allow(peer, min(ON_THE_WAY_MAX, self._allowed.get(peer, ALLOWED_START) + 1))
        self._usual_s += GAIN * (now_s - sent_s - self._usual_s)
        window = int(now_s / WINDOW_S)
        if self._acknowledged and self._acknowledged[-1][0] == window:
            self._acknowledged[-1] = (window, self._acknowledged[-1][1] + 1)
        else:
            self._acknowledged.append((window, 1))
        return now_s - sent_s

    def unacknowledged(self, peer: str, stream: str) -> list[int]:
        """Chunks on the way on a stream."""
        return [index for each, its, index in self._sent_s if (each, its) == (peer, stream)]

    def left(self, peer: str, stream: str) -> None:
        """The stream is closed."""
        for index in self.unacknowledged(peer, stream):
            del self._sent_s[peer, stream, index]

    def _under_way(self, now_s: float) -> int:
        overdue_s = min(OVERDUE_MAX_S, max(OVERDUE_MIN_S, OVERDUE_FACTOR * self._usual_s))
        for (peer, _, _), sent_s in self._sent_s.items():
            if now_s - sent_s > overdue_s:
                self._allow(peer, 1)
        return sum(not self._suspect(peer) for peer, _, _ in self._sent_s)

    def _suspect(self, peer: str) -> bool:
        return self._allowed.get(peer, ALLOWED_START) < ALLOWED_START

    def _allow(self, peer: str, chunks: int) -> None:
        self._allowed.pop(peer, None)
        self._allowed[peer] = chunks
        while len(self._allowed) > PEERS_MAX:
            del self._allowed[next(iter(self._allowed))]
