"""Who leads: leases in the DHT, terms, and a leader that fences itself (DESIGN section 9).

    STANDBY --nobody leads for an election timeout--> CLAIMING --settled, read back, still highest--> LEADING
       ^                                                 |  somebody higher, or not stored               |
       +-------------------------------------------------+------ lease ran out, or a higher claim -------+

The live claim with the highest (term, then lowest hash of run, term and id) leads. The DHT is no consensus, so
two leaders can exist for a moment; what they order is fenced by term (protocols/orders.py), and the staleness
bound never depends on who leads (protocols/staleness.py).

All times are of the candidate's own steady clock: a claim counts for one lease from when it was first heard, a
leader's own from before it was sent. So a leader stops before anybody else may start, however wrong clocks are.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from protocols.faults import LocalFault, PeerFault
from protocols.messages import Lease

# Terms may not outrun the clock: at most one a second since 2026, which no honest election reaches (each takes
# longer). So a candidate that claims the highest term it may holds the others up for seconds, not for ever.
TERM_EPOCH_S = 1_767_225_600
CANDIDATES_MAX = 256  # a manifest names at most 64 trainers and 64 others; those of older revisions go first


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Times of an election, in seconds. A new leader is there after lease + wait + rank * stagger + settle at most."""

    lease_s: float = 10.0
    wait_s: float = 1.0
    """How long nobody must lead before the first in rank claims."""
    stagger_s: float = 1.0
    """Between two ranks: longer than a claim takes to be seen, so that one claims at a time."""
    settle_s: float = 1.0
    """From a stored claim to reading it back; a store takes 10 ms, a search around a dead node up to 3 s."""

    @property
    def renew_s(self) -> float:
        """Four renewals a lease: it survives two lost ones and a slow third (case B50)."""
        return self.lease_s / 4


@dataclass(frozen=True, slots=True)
class Claim:
    """What one candidate last said in its lease record, or in gossip."""

    candidate: str
    term: int
    claimed: bool
    until_ms: int
    """As signed; tells a candidate's words apart, the later one counts."""

    @classmethod
    def of(cls, candidate: str, lease: Lease) -> "Claim":
        """The claim in a verified lease."""
        return cls(candidate, lease.term, lease.state == "claimed", lease.until_ms)


@dataclass(frozen=True, slots=True)
class Heard:
    """Claims arrived, by gossip or from a read of the DHT."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Obeyed:
    """Somebody stands at a directive of this term and candidate, and hears no more from it: who leads must lead above.

    Claims are gone with their lease, but fences stay. A leader that knows of none of them (it was elected in the other
    half of a partition, or has lost its memory) would not be obeyed by those who stand above it.
    """

    term: int
    candidate: str


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The read that a `Read` action asked for: all claims that the DHT holds now, ours among them if it is there."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A `Put` has ended: did the DHT take it? `store() is False` means not acquired (case B48)."""

    ok: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Put:
    """Store our lease, for one lease length from now. Answered by `Stored`."""

    term: int
    claimed: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Read all claims. Answered by `ReadBack`."""


@dataclass(frozen=True, slots=True)
class Lead:
    """From now on this peer is the coordinator of `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """This peer is no longer the coordinator."""

    term: int
    reason: str


Event = Heard | Obeyed | ReadBack | Stored | Tick
Action = Put | Read | Lead | StepDown


class Phase(Enum):
    """Where a candidate stands."""

    STANDBY = "standby"
    CLAIMING = "claiming"
    LEADING = "leading"


@dataclass(slots=True)
class _Held:
    claim: Claim
    until_s: float


def rank_hash(run: str, term: int, candidate: str) -> bytes:
    """The lower goes first. Nobody can be first in every term, and everybody computes the same."""
    return hashlib.sha256(f"echo-swarm/1/rank\0{run}\0{term}\0{candidate}".encode()).digest()


def precedes(run: str, first: tuple[int, str], second: tuple[int, str]) -> bool:
    """Does the first (term, candidate) rank above the second?"""
    if first[0] != second[0]:
        return first[0] > second[0]
    return rank_hash(run, *first) < rank_hash(run, *second)


def check_term(term: int, now_s: float) -> None:
    """Raises PeerFault for a term that no election can have reached by `now_s` (seconds since 1970)."""
    if term > max(0.0, now_s - TERM_EPOCH_S):
        raise PeerFault("term ahead of its time", str(term))


class Election:
    """One candidate's view. `handle` every event, and `Tick` at `next_s` at the latest."""

    def __init__(self, run: str, me: str, config: ElectionConfig, now_s: float) -> None:
        self.run, self.me, self.config = run, me, config
        self.phase = Phase.STANDBY
        self.term = 0
        """The highest term seen in a claim."""
        self._my_term = 0
        self._claims: dict[str, _Held] = {}
        """Each candidate's last words, those that count no more too: a record may outlive its claim."""
        self._vacant_since_s: float | None = None
        # A newcomer listens first, for as long as a leader may be quiet between two renewals. Nor does it say anything:
        # its word would take the place of its own last claim, the only record of that term there may be.
        self._quiet_until_s = now_s + config.renew_s
        self._seen_s = now_s
        self._lease_end_s = 0.0
        self._put_at_s = self._quiet_until_s
        self._put_sent_s: float | None = None
        self._settled_s: float | None = None

    def leads(self, now_s: float) -> bool:
        """Ask before every grant: a process may have been stopped for any time between two lines (case B46)."""
        return self.phase is Phase.LEADING and now_s < self._lease_end_s

    def leader(self, now_s: float) -> Claim | None:
        """The live claim that leads, as far as this candidate knows."""
        best: Claim | None = None
        for held in self._claims.values():
            claim = held.claim
            if not claim.claimed or held.until_s <= now_s:
                continue
            if best is None or precedes(self.run, (claim.term, claim.candidate), (best.term, best.candidate)):
                best = claim
        return best

    @property
    def next_s(self) -> float:
        """When to `Tick` next, if nothing else happens before."""
        times = [held.until_s for held in self._claims.values() if held.until_s > self._seen_s]
        idle = self._put_sent_s is None
        match self.phase:
            case Phase.LEADING:
                times += [self._lease_end_s, *([self._put_at_s] if idle else [])]
            case Phase.CLAIMING:
                times += [self._settled_s] if self._settled_s is not None else []
            case Phase.STANDBY if idle:
                times += [self._put_at_s, *([self._claim_at_s()] if self._vacant_since_s is not None else [])]
        return min(times, default=self._seen_s + self.config.renew_s)  # an answer is due; nothing to do before

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """One event; what the driver must do now, in order."""
        actions: list[Action] = []
        self._seen_s = now_s
        if self.phase is Phase.LEADING and now_s >= self._lease_end_s:
            actions += self._step_down("lease ran out")
        match event:
            case Heard(claims):
                self._hear(claims, now_s)
            case Obeyed(term, candidate):
                self._pass(term, candidate)
            case ReadBack(claims):
                self._hear(claims, now_s)
                actions += self._read_back(claims, now_s)
            case Stored(ok):
                actions += self._stored(ok, now_s)
            case Tick():
                pass
        return actions + self._advance(now_s)

    def resign(self, now_s: float) -> list[Action]:
        """Leave in good order: the lease becomes a standby's at once, so that others need not wait for its end."""
        was_active = self.phase is not Phase.STANDBY
        actions = self._step_down("leaving") if self.phase is Phase.LEADING else []
        self._back_to_standby(now_s)
        return [*actions, Put(self.term, False)] if was_active else actions

    # ------------------------------------------------------------------ transitions

    def _hear(self, claims: Iterable[Claim], now_s: float) -> None:
        for claim in claims:
            held = self._claims.get(claim.candidate)
            if held is not None and held.claim.until_ms >= claim.until_ms:
                continue  # said before, or overtaken on the way
            if held is None and len(self._claims) >= CANDIDATES_MAX:
                del self._claims[next(iter(self._claims))]
            if claim.candidate != self.me or self.phase is not Phase.STANDBY:
                self._claims[claim.candidate] = _Held(claim, now_s + self.config.lease_s)
            self.term = max(self.term, claim.term)

    def _advance(self, now_s: float) -> list[Action]:
        """What follows from the time and the claims."""
        actions: list[Action] = []
        leader = self.leader(now_s)
        other = leader if leader is not None and leader.candidate != self.me else None
        match self.phase:
            case Phase.LEADING if other is not None and self._outranked(other):
                actions += [*self._step_down(f"term {other.term} is another's"), *self._put(False, now_s)]
            case Phase.LEADING if self.term > self._my_term and self._put_sent_s is None:
                actions += [*self._step_down(f"term {self.term} is known"), *self._claim(now_s)]
            case Phase.CLAIMING if other is not None and self._outranked(other):
                self._back_to_standby(now_s)
                actions += self._put(False, now_s)
            case Phase.CLAIMING if self._settled_s is not None and now_s >= self._settled_s:
                self._settled_s = None
                actions.append(Read())
            case Phase.STANDBY:
                actions += self._stand_by(other, now_s)
        if self.phase is not Phase.CLAIMING and self._put_sent_s is None and now_s >= self._put_at_s:
            actions += self._put(self.phase is Phase.LEADING, now_s)
        return actions

    def _stand_by(self, leader: Claim | None, now_s: float) -> list[Action]:
        if leader is not None:
            self._vacant_since_s = None
            return []
        if self._vacant_since_s is None:
            self._vacant_since_s = max(now_s, self._quiet_until_s)
        if now_s < self._claim_at_s() or self._put_sent_s is not None:
            return []
        return self._claim(now_s)

    def _claim(self, now_s: float) -> list[Action]:
        """Claim the next term. Only when no store is on its way: `Stored` must be the claim's."""
        self._my_term = self.term + 1
        self.phase, self._settled_s = Phase.CLAIMING, None
        return self._put(True, now_s)

    def _pass(self, term: int, candidate: str) -> None:
        """Whoever stands at (term, candidate) must be able to obey us, if we lead."""
        leads_there = self.phase is Phase.LEADING and term == self._my_term and candidate != self.me
        above = leads_there and precedes(self.run, (term, candidate), (term, self.me))
        self.term = max(self.term, term + 1 if above else term)

    def _stored(self, ok: bool, now_s: float) -> list[Action]:
        sent_s, self._put_sent_s = self._put_sent_s, None
        if sent_s is None:
            raise LocalFault("a lease was stored that was not sent")
        match self.phase:
            case Phase.CLAIMING if ok:
                self.term = max(self.term, self._my_term)
                self._lease_end_s = sent_s + self.config.lease_s
                self._settled_s = now_s + self.config.settle_s
            case Phase.CLAIMING:
                self._back_to_standby(now_s)
            case Phase.LEADING if ok:
                self._lease_end_s = sent_s + self.config.lease_s
        return []

    def _read_back(self, claims: tuple[Claim, ...], now_s: float) -> list[Action]:
        """Lead if our claim is there, and is the highest that is.

        A rival of the same term that ranks below us may have read back before our claim was there, and lead: one term
        has one leader, so we go above it.
        """
        if self.phase is not Phase.CLAIMING or self._put_sent_s is not None or self._settled_s is not None:
            return []  # the answer for a claim that was given up
        claimants = {claim.candidate for claim in claims if claim.claimed and claim.term == self._my_term}
        leader = self.leader(now_s)
        highest = leader is not None and leader.candidate == self.me and self._my_term >= self.term
        if self.me in claimants and highest and now_s < self._lease_end_s:
            if len(claimants) > 1:
                return self._claim(now_s)
            self.phase = Phase.LEADING
            self._put_at_s = now_s
            return [Lead(self._my_term)]
        self._back_to_standby(now_s)
        return self._put(False, now_s)

    def _outranked(self, other: Claim) -> bool:
        return precedes(self.run, (other.term, other.candidate), (self._my_term, self.me))

    def _step_down(self, reason: str) -> list[Action]:
        self.phase = Phase.STANDBY
        self._claims.pop(self.me, None)
        self._vacant_since_s = None
        return [StepDown(self._my_term, reason)]

    def _back_to_standby(self, now_s: float) -> None:
        self.phase, self._settled_s = Phase.STANDBY, None
        self._vacant_since_s = None
        self._claims.pop(self.me, None)

    def _put(self, claimed: bool, now_s: float) -> list[Action]:
        """Say where we stand. One store at a time; the next follows when this one has ended."""
        if self._put_sent_s is not None:
            self._put_at_s = now_s
            return []
        self._put_sent_s = now_s
        self._put_at_s = now_s + self.config.renew_s
        return [Put(self._my_term if claimed else self.term, claimed)]

    def _claim_at_s(self) -> float:
        """The first in rank claims after `wait_s`, the others each a little later."""
        assert self._vacant_since_s is not None
        return self._vacant_since_s + self.config.wait_s + self._rank() * self.config.stagger_s

    def _rank(self) -> int:
        """How many live candidates go before us in the next term."""
        mine = rank_hash(self.run, self.term + 1, self.me)
        others = [candidate for candidate, held in self._claims.items() if held.until_s > self._seen_s]
        return sum(rank_hash(self.run, self.term + 1, other) < mine for other in others if other != self.me)
