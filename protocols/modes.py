"""Mode `auto`: is generation fast enough for the trainer never to wait? (DESIGN section 9)

Asynchronous training keeps the trainer busy while sum(mu) >= k R / (k T - B): in the time of k steps less the
broadcast of a version, peers must write the k R groups that those steps consume (the provisioning rule of ECHO-2).
Below that, asynchronous rollouts only grow old while the trainer waits for them anyway; then rounds are called.

The rule is asked with a margin on both sides, and an answer must hold for a while: measured rates are noisy, and a
switch costs a pipeline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocols.messages import Mode

MARGIN = 1.2  # asynchronous above need * MARGIN, sequential below need / MARGIN; rates of one machine vary by 10 %
HOLD_S = 10.0  # how long the answer must be the same: five beats
DWELL_S = 30.0  # between two switches; a peer obeys none that comes sooner (protocols/orders.py)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rule is asked with."""

    groups_per_s: float
    """Of all live inference peers together."""
    batch_groups: int
    step_s: float
    """Of one optimizer step, without waiting for rollouts."""
    refresh_s: float
    """From an announcement until peers generate with the version: the median."""
    publish_every: int

    @property
    def needed_per_s(self) -> float:
        """k R / (k T - B), groups a second; infinite when a version takes longer to arrive than to be replaced."""
        usable_s = self.publish_every * self.step_s - self.refresh_s
        return self.publish_every * self.batch_groups / usable_s if usable_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of mode, and the numbers it was made on."""

    mode: Mode
    measured: Measured


class ModeChoice:
    """The coordinator's choice over time."""

    def __init__(self, mode: Mode, now_s: float) -> None:
        self.mode: Mode = mode
        self._since_s = now_s
        self._leaning_since_s: float | None = None

    def observe(self, measured: Measured, now_s: float) -> Switch | None:
        """Ask the rule again, each beat; a Switch when the mode changes."""
        if self._leaning(measured) == self.mode:
            self._leaning_since_s = None
            return None
        if self._leaning_since_s is None:
            self._leaning_since_s = now_s
        if now_s - self._leaning_since_s < HOLD_S or now_s - self._since_s < DWELL_S:
            return None
        self.mode = "sequential" if self.mode == "async" else "async"
        self._since_s, self._leaning_since_s = now_s, None
        return Switch(self.mode, measured)

    def _leaning(self, measured: Measured) -> Mode:
        """Between the two margins: stay."""
        if measured.groups_per_s >= measured.needed_per_s * MARGIN:
            return "async"
        if measured.groups_per_s < measured.needed_per_s / MARGIN:
            return "sequential"
        return self.mode


def median(values: Sequence[float]) -> float | None:
    """The lower median; None of nothing."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
