"""Rollouts from producer to trainer: at least once on the wire, exactly once in training.

    producer                                        trainer
    Outbox: keep each group on disk                 Intake: judge each group, store the accepted
      until a receipt names it                        ones on disk, then sign the receipt
                                                      queued -> trained | no signal | stale | disowned

A lost receipt means the same group comes again and is answered `duplicate`. A group that was accepted and grew too
old in the queue is named again, as `stale`, in a later receipt; so is, as `invalid`, one of a producer that turns out
not to run the version it names. Both machines hold only what they need to decide;
their drivers hold the bytes, and rebuild them from disk after a crash.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from protocols.faults import LocalFault, PeerFault
from protocols.messages import GroupReceipt, Outcome, Receipt, RolloutGroup
from protocols.rollouts import group_digest
from protocols.staleness import lag, within_bound

# Groups a trainer holds before it turns pushes away. At pipeline depth 1 honest producers stay under two batches, at
# the deepest (24) under 25, which one of them alone may fill: half of the limit. Beyond that somebody is flooding.
QUEUE_BATCHES_MAX = 64
# Producers that are told later what became of accepted groups, and outcomes kept for each until its next receipt. A
# courtesy: the oldest go first. A thousand peers, and as many as a push holds: a receipt at most doubles, to about
# 100 KB; all of them, if nobody ever came back for his, are some 50 MB.
LATER_PRODUCERS_MAX = 1024
LATER_OUTCOMES_MAX = 256
# Invalid groups after which nothing more is taken from a producer. Honest ones make none; a few may come
# from a version mismatch that a restart mends.
INVALID_MAX = 16
# Producers whose invalid groups are counted; the oldest go first. Whoever makes more keys needs no amnesty.
BLAMED_MAX = 65_536
# Groups a producer keeps unacknowledged before it stops generating: enough for a minute without a trainer.
OUTBOX_GROUPS_MAX = 1024
# Accepted groups of which a producer still believes that they are revised: eight batches of 1024 groups.
REVISABLE_MAX = 8 * 1024
PUSH_GROUPS_MAX = 256
REVISIONS = ("stale", "invalid")  # what may become of an accepted group that is not trained


@dataclass(frozen=True, slots=True)
class Queued:
    """What the intake remembers of a group that waits to be consumed."""

    digest: bytes
    producer: str
    counter: int
    oldest_version: int
    arrived_step: int | None = None
    """Optimizer steps done when it was accepted; None for one that was stored before this was recorded."""

    @property
    def lag_in_flight(self) -> int | None:
        """How old it was when it was accepted, in optimizer steps."""
        return None if self.arrived_step is None else lag(self.arrived_step, self.oldest_version)

    def lag_in_queue(self, steps_done: int) -> int | None:
        """How many optimizer steps it has waited by now; with `lag_in_flight` this adds up to its lag."""
        return None if self.arrived_step is None else steps_done - self.arrived_step


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step consumes, and what was found too old on the way."""

    groups: tuple[Queued, ...]
    """Oldest version first, then by (producer, counter): sums over them do not depend on the order of arrival."""
    stale: tuple[Queued, ...]


class Intake:
    """The trainer's side: decides what is accepted and what is consumed. Owns gates 2 and 3."""

    def __init__(self, *, max_lag: int, batch_groups: int) -> None:
        self.max_lag = max_lag
        self.batch_groups = batch_groups
        self._bound = max_lag
        self.counts: Counter[str] = Counter()
        """Groups by what became of them:
        received, accepted, stale, duplicate, invalid; trained, no_signal, disowned."""
        self.reasons: Counter[str] = Counter()
        """Invalid groups by reason."""
        self._queue: OrderedDict[bytes, Queued] = OrderedDict()
        self._taken: dict[bytes, Queued] = {}
        self._held: Counter[str] = Counter()  # queued and taken groups by producer; nobody stands there with 0
        self._later: OrderedDict[str, deque[GroupReceipt]] = OrderedDict()
        self._seen: dict[tuple[str, int], tuple[bytes, int]] = {}  # (producer, counter) -> digest, version
        self._next_counter: dict[str, int] = {}
        self._floor: dict[str, int] = {}  # producer -> counters below it that are not in _seen are spent
        self._invalid: Counter[str] = Counter()

    def restore(self, queued: Iterable[Queued], consumed: Iterable[Queued]) -> None:
        """Rebuild from disk: groups that wait, and those that must not come again.

        The latter were trained, gave no signal, went stale or were disowned. `consumed` may leave out groups beyond
        the bound when `used` tells their counters.
        """
        for group in consumed:
            self._remember(group)
        for group in queued:
            self._enqueue(group)

    @property
    def bound(self) -> int:
        """The lag that gates 2 and 3 allow now: `max_lag`, or less where `limit` says so."""
        return self._bound

    def limit(self, bound: int) -> None:
        """Allow only this lag from now on (sequential mode: refresh_gap). LocalFault outside 0 .. max_lag.

        What waits in the queue and is older goes with the next `sweep` or `take`.
        """
        if not 0 <= bound <= self.max_lag:
            raise LocalFault(f"a bound of {bound} is outside 0 .. {self.max_lag}")
        self._bound = bound

    @property
    def queued(self) -> int:
        """Accepted groups that wait, those of the step in progress included."""
        return len(self._queue) + len(self._taken)

    def next_counter(self, producer: str) -> int:
        """The lowest counter that this producer has not used here."""
        return self._next_counter.get(producer, 0)

    def used(self, producer: str, next_counter: int) -> None:
        """From disk: no counter of this producer below `next_counter` is new.

        Not even one that is missing on the disk: a producer sends its oldest groups first.
        """
        self._spend(producer, next_counter)

    def quarantined(self, producer: str) -> bool:
        """True when this producer has sent too much nonsense to be listened to."""
        return self._invalid[producer] >= INVALID_MAX

    def admit(self, producer: str, num_groups: int) -> int:
        """May this push be looked at? How many of its groups may be accepted; the others stay with the producer.

        Raises PeerFault when none may: nothing of it was judged, send it later.
        """
        if self.quarantined(producer):
            raise PeerFault("quarantined")
        if num_groups > PUSH_GROUPS_MAX:
            raise PeerFault("push too large", f"{num_groups} groups")
        limit = QUEUE_BATCHES_MAX * self.batch_groups
        if self.queued >= limit:
            raise PeerFault("queue full")
        free = max(limit // 2 - self.queued, min(limit - self.queued, self._share(producer, limit)))
        if free <= 0:
            raise PeerFault("queue share", f"{self._held[producer]} of {self.queued} groups")
        return min(num_groups, free)

    def _share(self, producer: str, limit: int) -> int:
        """How many more groups this producer may have in a queue that is half full: up to an even part, or one batch.

        One part is kept for whoever comes next, so that nobody fills the queue alone.
        """
        held = self._held[producer]
        num_parts = len(self._held) + (held == 0) + 1
        return max(self.batch_groups, limit // num_parts) - held

    def offer(self, producer: str, group: RolloutGroup, steps_done: int, fault: PeerFault | None) -> GroupReceipt:
        """Judge one group; `fault` is what the content check found. The driver stores it if `accepted`.

        A receipt, `duplicate` included, may leave only when everything accepted before it is on disk: the group
        it is a duplicate of may still be on its way there.
        """
        self.counts["received"] += 1
        digest = group_digest(producer, group)
        queued = Queued(digest, producer, group.counter, group.oldest_version, steps_done)
        seen = self._seen.get((producer, group.counter))
        if seen is not None:
            reason = "" if seen[0] == digest else "counter used"
            return self._receipt(queued, "duplicate", reason)
        if fault is None and max(group.oldest_version, group.newest_version) > steps_done:
            fault = PeerFault("version ahead of the trainer")
        if fault is not None:
            self._blame(producer, fault.reason)
            return self._receipt(queued, "invalid", fault.reason)
        if not self._usable(queued, steps_done):
            return self._receipt(queued, "stale", self._too_old(queued, steps_done))
        if group.counter < self._floor.get(producer, 0):
            return self._receipt(queued, "duplicate", "counter used")
        self._enqueue(queued)
        return self._receipt(queued, "accepted", "")

    def retract(self, digests: Iterable[bytes]) -> None:
        """Accepted groups that cannot be kept after all, for want of room or of a disk: as if they had never come."""
        for digest in digests:
            group = self._queue.pop(digest, None)
            if group is None:
                raise LocalFault("a group was consumed before it was stored")
            del self._seen[group.producer, group.counter]
            self._release(group)
            self.counts["accepted"] -= 1
            self.counts["received"] -= 1

    def sweep(self, steps_done: int) -> tuple[Queued, ...]:
        """Gate 2: take out what can no longer be used. The driver records it as stale before a receipt tells so."""
        old = tuple(group for group in self._queue.values() if not self._usable(group, steps_done))
        for group in old:
            del self._queue[group.digest]
            self._release(group)
            reason = f"stale in queue: {self._too_old(group, steps_done)}"
            self._tell_later(group.producer, GroupReceipt(group.counter, group.digest, "stale", reason))
        self.counts["stale_in_queue"] += len(old)
        return old

    def take(self, steps_done: int) -> Batch | None:
        """Gate 3: a full batch of groups within the bound, or None.

        The oldest versions are taken first, and of one version those that came first. It asks the bound again, whoever
        else has. Taken groups stay this intake's responsibility until `settle`.
        """
        if self._taken:
            raise LocalFault("a batch is already taken")
        stale = self.sweep(steps_done)
        if len(self._queue) < self.batch_groups:
            return Batch((), stale) if stale else None
        oldest_first = sorted(self._queue.values(), key=lambda group: group.oldest_version)
        groups = sorted(
            oldest_first[: self.batch_groups], key=lambda group: (group.oldest_version, group.producer, group.counter)
        )
        for group in groups:
            self._taken[group.digest] = self._queue.pop(group.digest)
        return Batch(tuple(groups), stale)

    def disown(self, producer: str, reason: str) -> tuple[Queued, ...]:
        """Take out all that this producer has here, of the taken batch too; what else was taken waits again.

        The driver records it as disowned before a receipt tells so.
        """
        groups = [*self._taken.values(), *self._queue.values()]
        self._taken.clear()
        self._queue = OrderedDict((group.digest, group) for group in groups if group.producer != producer)
        gone = tuple(group for group in groups if group.producer == producer)
        for group in gone:
            self._release(group)
            self._tell_later(producer, GroupReceipt(group.counter, group.digest, "invalid", reason))
        self.counts["disowned"] += len(gone)
        return gone

    def settle(self, outcome: str) -> None:
        """The taken batch is on disk as `trained` or `no_signal`."""
        self.counts[outcome] += len(self._taken)
        for group in self._taken.values():
            self._release(group)
        self._taken.clear()

    def later(self, producer: str) -> tuple[GroupReceipt, ...]:
        """For this producer's next receipt: accepted groups that were not trained after all. Each is told once."""
        return tuple(self._later.pop(producer, ()))

    def forget(self, steps_done: int) -> None:
        """Drop memories of groups that the bound refuses anyway; called after each step.

        A producer's counters and versions rise together. So each producer's floor stands for what was dropped:
        a counter below it is either too old, or comes again under a version that it was not written with.
        """
        limit = steps_done - self.max_lag
        for producer, counter in [key for key, (_, version) in self._seen.items() if version < limit]:
            del self._seen[producer, counter]
            self._spend(producer, counter + 1)

    def _usable(self, group: Queued, steps_done: int) -> bool:
        return within_bound(steps_done, group.oldest_version, self._bound)

    def _too_old(self, group: Queued, steps_done: int) -> str:
        return f"lag {lag(steps_done, group.oldest_version)} over {self._bound}"

    def _enqueue(self, group: Queued) -> None:
        self._remember(group)
        self._queue[group.digest] = group
        self._held[group.producer] += 1

    def _release(self, group: Queued) -> None:
        self._held[group.producer] -= 1
        if not self._held[group.producer]:
            del self._held[group.producer]

    def _tell_later(self, producer: str, outcome: GroupReceipt) -> None:
        self._later.setdefault(producer, deque(maxlen=LATER_OUTCOMES_MAX)).append(outcome)
        self._later.move_to_end(producer)
        if len(self._later) > LATER_PRODUCERS_MAX:
            self._later.popitem(last=False)

    def _spend(self, producer: str, counter: int) -> None:
        self._floor[producer] = max(self._floor.get(producer, 0), counter)
        self._next_counter[producer] = max(self.next_counter(producer), counter)

    def _blame(self, producer: str, reason: str) -> None:
        self._invalid[producer] += 1
        self.reasons[reason] += 1
        if len(self._invalid) > BLAMED_MAX:
            del self._invalid[next(iter(self._invalid))]

    def _remember(self, group: Queued) -> None:
        self._seen[group.producer, group.counter] = (group.digest, group.oldest_version)
        self._next_counter[group.producer] = max(self.next_counter(group.producer), group.counter + 1)

    def _receipt(self, group: Queued, outcome: Outcome, reason: str) -> GroupReceipt:
        self.counts[outcome] += 1
        return GroupReceipt(group.counter, group.digest, outcome, reason)


class Outbox:
    """The producer's side: what is not yet receipted, and when to try again."""

    def __init__(self, *, retry_s: float = 1.0, retry_max_s: float = 15.0) -> None:
        self.counts: Counter[str] = Counter()
        """Groups by what their receipts say became of them; one that is revised moves from accepted to stale or
        invalid."""
        self._pending: OrderedDict[int, int] = OrderedDict()  # counter -> encoded bytes
        self._revisable: OrderedDict[int, None] = OrderedDict()  # counters of accepted groups
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._failures = 0
        self._not_before_s = 0.0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """True while the producer must not generate more."""
        return len(self._pending) >= OUTBOX_GROUPS_MAX

    def add(self, counter: int, num_bytes: int) -> None:
        """A group is on disk and wants to be sent."""
        self._pending[counter] = num_bytes

    def next_push(self, now_s: float, bytes_max: int) -> list[int]:
        """Counters to send now, oldest first, within one message; empty while backing off or with nothing to say."""
        if now_s < self._not_before_s:
            return []
        counters: list[int] = []
        total = 0
        for counter, num_bytes in self._pending.items():
            total += num_bytes
            if counters and (total > bytes_max or len(counters) == PUSH_GROUPS_MAX):
                break
            counters.append(counter)
        return counters

    def receipted(self, receipt: Receipt) -> list[int]:
        """A receipt arrived: counters that are done and can be deleted. Unknown ones are ignored.

        The driver has checked that it is a trainer's, of this run, and to this producer. One that settles nothing
        does not end a back-off: an empty receipt for each push would be a busy loop. A group that was accepted can be
        named once more, as stale or invalid.
        """
        done = []
        for group in receipt.groups:
            if self._pending.pop(group.counter, None) is not None:
                self.counts[group.outcome] += 1
                done.append(group.counter)
                if group.outcome == "accepted":
                    self._may_be_revised(group.counter)
            elif group.outcome in REVISIONS and group.counter in self._revisable:
                del self._revisable[group.counter]
                self.counts["accepted"] -= 1
                self.counts[group.outcome] += 1
        if done:
            self._failures, self._not_before_s = 0, 0.0
        return done

    def failed(self, now_s: float) -> float:
        """A push was refused or lost; returns when to try again. Waits double up to a limit."""
        wait_s = min(self._retry_max_s, self._retry_s * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._not_before_s = now_s + wait_s
        return self._not_before_s

    def retry_now(self) -> None:
        """The trainer is there again: do not wait for the end of the back-off."""
        self._not_before_s = 0.0

    def _may_be_revised(self, counter: int) -> None:
        self._revisable[counter] = None
        if len(self._revisable) > REVISABLE_MAX:
            self._revisable.popitem(last=False)
