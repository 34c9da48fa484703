"""The coordinator's view of a run, and what it grants: rebuilt from heartbeats, nothing is handed over.

    heartbeat --CoordinatorView.heard--> Grant (credit, sources)         each beat: lost peers, directive, mode

Gate 1 for everybody at once (DESIGN section 9). With s steps done, B groups a step and q groups queued, in flight or
promised, the next group is consumed at step s + floor(q / B), and a peer at version v may begin it while that minus
v stays within the pipeline's depth. The groups that may be begun are shared out in proportion to measured rates.

Credits are totals, not increments: "of this session you may have begun 40 groups". A lost or repeated answer changes
nothing, and a new coordinator goes on with the numbers that peers report.
"""

import itertools
import math
from dataclasses import dataclass

from protocols.manifest import Manifest
from protocols.messages import SOURCES_MAX, Heartbeat, Mode, PeerStatus
from protocols.modes import Measured, ModeChoice, Switch, median
from protocols.presence import IDENTITIES_MAX, SILENT_S
from protocols.staleness import room

# A trainer that spoke so shortly before has counted what a peer has delivered: it is the coordinator, mostly.
SAME_MOMENT_S = 0.05
RATE_MAX = 1e6  # groups a second that a peer may claim; a lie costs the others at most their share of one window


@dataclass(frozen=True, slots=True)
class Grant:
    """The coordinator's answer to one heartbeat."""

    limit: int
    """Groups of the asker's session that it may have begun."""
    sources: tuple[str, ...]


@dataclass(slots=True)
class _Peer:
    beat: Heartbeat
    heard_s: float
    limit: int
    waits_since_s: float | None
    """Since when a trainer has waited for groups."""

    @property
    def promised(self) -> int:
        """Groups that it may still begin."""
        return self.limit - self.beat.started

    @property
    def unfinished(self) -> int:
        """Groups that it has begun, and the trainer has not answered."""
        return self.beat.in_flight + self.beat.outbox

    @property
    def outstanding(self) -> int:
        """Groups that will reach the trainer, if all goes well."""
        return self.promised + self.unfinished


class CoordinatorView:
    """Everybody who beats, and what they were granted. One for each term that this peer leads.

    A heartbeat costs the same however many peers there are: sums are kept up to date, not added up.
    """

    def __init__(self, manifest: Manifest, mode: Mode, now_s: float) -> None:
        self.manifest = manifest
        self.step = 0
        """Optimizer steps done, as far as is known: a version v says that v are."""
        self._head = 0
        self._peers: dict[str, _Peer] = {}
        self._holders: dict[str, None] = {}
        """Peers that hold the head, heard last at the end."""
        self._outstanding = 0
        self._delivered = 0
        """Groups that peers have delivered since the trainer last spoke: its queue as it said it lacks them."""
        self._trainer_heard_s = -math.inf
        self._rates = _Rates()
        self._choice = ModeChoice(mode, now_s)

    @property
    def mode(self) -> Mode:
        """What to order."""
        return self._choice.mode

    @property
    def min_version(self) -> int:
        """Below it, nothing that is begun could be consumed within the pipeline's depth."""
        return min(self._head, max(0, self.step - self.manifest.depth))

    def head_is(self, version: int) -> None:
        """The newest version that the coordinator has verified."""
        if version > self._head:
            self._head, self.step = version, max(self.step, version)
            self._holders = {peer_id: None for peer_id, peer in self._peers.items() if self._holds(peer.beat)}

    def heard(self, peer_id: str, beat: Heartbeat, now_s: float) -> Grant:
        """Take a heartbeat in, and say what this peer may do."""
        last = self._remove(peer_id)
        if beat.leaving:
            return Grant(beat.started, ())
        if len(self._peers) >= IDENTITIES_MAX:
            self._remove(next(iter(self._peers)))
        peer = _Peer(beat, now_s, beat.started, None)
        if peer_id in self.manifest.trainers:
            self.step = max(self.step, beat.step or 0)
            self._delivered, self._trainer_heard_s = 0, now_s
            peer.waits_since_s = _waits_since_s(beat, last, now_s)
        if beat.role == "inference":
            self._rates.add(beat.groups_per_s)
            if now_s - self._trainer_heard_s > SAME_MOMENT_S:
                self._delivered += _delivered(beat, last)
            peer.limit += self._credit(peer, now_s)
        self._outstanding += peer.outstanding
        self._peers[peer_id] = peer
        if self._holds(beat):
            self._holders.setdefault(peer_id)
        return Grant(peer.limit, self._sources(peer_id))

    def tick(self, now_s: float) -> tuple[list[str], Switch | None]:
        """Each beat: who has been silent for three, and is out of the view with what it was promised; the mode."""
        lost = [peer_id for peer_id, peer in self._peers.items() if now_s - peer.heard_s >= SILENT_S]
        for peer_id in lost:
            self._remove(peer_id)
        measured = self.measured() if self.manifest.coordination.mode == "auto" else None
        return lost, self._choice.observe(measured, now_s) if measured is not None else None

    def measured(self) -> Measured | None:
        """The numbers that the provisioning rule asks for; None while one of them is not known."""
        beats = [peer.beat for peer in self._peers.values()]
        steps = [trainer.beat.step_s for trainer in self._trainers() if trainer.beat.step_s is not None]
        refresh_s = median([beat.refresh_s for beat in beats if beat.refresh_s is not None])
        if not self._rates.known or not steps or refresh_s is None:
            return None
        learning, k = self.manifest.learning, self.manifest.publish_every
        return Measured(self._rates.groups_per_s, learning.batch_groups, max(steps), refresh_s, k)

    def rows(self, now_s: float) -> list[PeerStatus]:
        """Everybody, for `swarm status`."""
        return [
            status_of(peer_id, peer.beat, now_s - peer.heard_s, peer.promised) for peer_id, peer in self._peers.items()
        ]

    # ------------------------------------------------------------------ credits

    def _credit(self, peer: _Peer, now_s: float) -> int:
        """How many groups this peer may begin now; it is not among the outstanding yet.

        Once the trainer has waited for three beats, what the others have begun or were promised counts no more:
        some of them are slow, or lie. Each still gets no more than its share beyond what it works on.
        """
        if self.mode == "sequential" or peer.beat.version is None:
            return 0
        version = min(peer.beat.version, self.step)  # one that is news to us has as much room as the newest we know
        window = room(self.step, 0, self.manifest.learning.batch_groups, version, self.manifest.depth)
        others = 0 if self._starved(now_s) else self._outstanding + self._delivered
        free = window - self._queued() - others - peer.unfinished
        share = math.ceil(window * self._rates.share(peer.beat.groups_per_s)) - peer.unfinished
        return max(0, min(free, share))

    def _trainers(self) -> list[_Peer]:
        return [self._peers[trainer] for trainer in self.manifest.trainers if trainer in self._peers]

    def _starved(self, now_s: float) -> bool:
        """Has a trainer waited for three beats?"""
        waits = [trainer.waits_since_s for trainer in self._trainers()]
        return any(since_s is not None and now_s - since_s >= SILENT_S for since_s in waits)

    def _queued(self) -> int:
        """Groups that wait at the trainers; those of steps that were announced after one spoke are consumed."""
        queued = 0
        for trainer in self._trainers():
            beat = trainer.beat
            if beat.queued is not None and beat.step is not None:
                queued += max(0, beat.queued - (self.step - beat.step) * self.manifest.learning.batch_groups)
        return queued

    def _holds(self, beat: Heartbeat) -> bool:
        return beat.version == self._head and beat.role != "bootstrap"  # a bootstrap peer has the chain, no adapters

    def _sources(self, asker: str) -> tuple[str, ...]:
        """Who holds the head, those heard last first: the load goes around."""
        others = (peer_id for peer_id in reversed(self._holders) if peer_id != asker)
        return tuple(itertools.islice(others, SOURCES_MAX))

    def _remove(self, peer_id: str) -> _Peer | None:
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self._outstanding -= peer.outstanding
            if peer.beat.role == "inference":
                self._rates.remove(peer.beat.groups_per_s)
            self._holders.pop(peer_id, None)
        return peer


def _waits_since_s(beat: Heartbeat, last: _Peer | None, now_s: float) -> float | None:
    """Since when a trainer has waited for the batch of one step."""
    if not beat.wanted:
        return None
    if last is None or last.waits_since_s is None or last.beat.step != beat.step:
        return now_s
    return last.waits_since_s


def _delivered(beat: Heartbeat, last: _Peer | None) -> int:
    """Groups that the trainer has accepted from a peer since its last beat; no more than it had to deliver then."""
    if last is None or last.beat.session != beat.session or beat.accepted is None or last.beat.accepted is None:
        return 0
    return max(0, min(beat.accepted - last.beat.accepted, last.outstanding))


class _Rates:
    """The rates of all inference peers, and what part of them one is."""

    def __init__(self) -> None:
        self._micro = 0  # millionths of a group a second: whole numbers add up and cancel out exactly
        self.known = self._unknown = 0

    @property
    def groups_per_s(self) -> float:
        """Of all who have measured."""
        return self._micro / 1e6

    def add(self, rate: float | None, sign: int = 1) -> None:
        """A peer came; unknown is None."""
        if rate is None or rate <= 0:
            self._unknown += sign
        else:
            self.known += sign
            self._micro += sign * _micro(rate)

    def remove(self, rate: float | None) -> None:
        """A peer went."""
        self.add(rate, -1)

    def share(self, rate: float | None) -> float:
        """Part of all generation; who has not measured yet counts as the mean of those who have."""
        mean = self._micro / self.known if self.known else 1.0
        mine = mean if rate is None or rate <= 0 else _micro(rate)
        return min(1.0, mine / (self._micro + mean * self._unknown))


def _micro(rate: float) -> int:
    return max(1, round(min(rate, RATE_MAX) * 1e6))


def status_of(peer_id: str, beat: Heartbeat, silent_s: float, credit: int | None) -> PeerStatus:
    """A row of `swarm status`; engine and device come from the peer's advertisement."""
    return PeerStatus(
        peer_id=peer_id,
        role=beat.role,
        silent_s=round(silent_s, 2),
        version=beat.version,
        tokens_per_s=beat.tokens_per_s,
        groups_per_s=beat.groups_per_s,
        in_flight=beat.in_flight,
        outbox=beat.outbox,
        credit=credit,
        accepted=beat.accepted,
        stale=beat.stale,
    )
