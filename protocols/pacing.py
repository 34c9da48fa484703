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
OVERDUE_S = 2.0  # a chunk not acknowledged for this long no longer keeps others waiting: its asker is slow, or silent
WINDOW_S = 0.25  # the rate is the best of the last WINDOWS of these: a pause has not made the link slower
WINDOWS = 8


class Pacing:
    """What was sent and is not acknowledged. A key is whatever tells chunks on the way apart."""

    def __init__(self) -> None:
        self._sent_s: dict[tuple[str, int], float] = {}
        self._acknowledged: deque[tuple[int, int]] = deque(maxlen=WINDOWS)
        """Windows in which chunks were acknowledged, and how many."""

    def room(self, now_s: float) -> bool:
        """One more chunk may be sent."""
        under_way = sum(now_s - sent_s < OVERDUE_S for sent_s in self._sent_s.values())
        return under_way < self.limit(now_s)

    def limit(self, now_s: float) -> int:
        """Chunks that may be on the way."""
        now = int(now_s / WINDOW_S)
        best = max((count for window, count in self._acknowledged if window > now - WINDOWS), default=0)
        return min(ON_THE_WAY_MAX, max(ON_THE_WAY_MIN, math.ceil(best / WINDOW_S * AHEAD_S)))

    def sent(self, asker: str, index: int, now_s: float) -> None:
        """A chunk was written to an asker."""
        self._sent_s[asker, index] = now_s

    def acknowledged(self, asker: str, index: int, now_s: float) -> float | None:
        """The asker has it: seconds since it was written, None if it was not sent."""
        sent_s = self._sent_s.pop((asker, index), None)
        if sent_s is None:
            return None
        window = int(now_s / WINDOW_S)
        if self._acknowledged and self._acknowledged[-1][0] == window:
            self._acknowledged[-1] = (window, self._acknowledged[-1][1] + 1)
        else:
            self._acknowledged.append((window, 1))
        return now_s - sent_s

    def unacknowledged(self, asker: str) -> list[int]:
        """Chunks on the way to an asker."""
        return [index for each, index in self._sent_s if each == asker]

    def left(self, asker: str) -> None:
        """The asker went."""
        for index in self.unacknowledged(asker):
            del self._sent_s[asker, index]
