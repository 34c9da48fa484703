"""What a peer obeys: the directives of the highest term it has seen, and of no other (DESIGN section 9, S6).

    Directive --eligible, fresh, fenced by (term, candidate, number)--> mode, min version

A directive orders two things. The minimum version only rises within a term, and never over the head that the peer
itself has verified: an order for a version that does not exist changes nothing. The mode counts only where the manifest
says `auto`, and at most one change is obeyed in `MODE_DWELL_S`. So the worst coordinator slows a run down.
"""

from protocols.directory import SKEW_S
from protocols.election import check_term, precedes
from protocols.envelopes import Sealed
from protocols.faults import PeerFault
from protocols.manifest import Manifest
from protocols.messages import Directive, Mode
from protocols.presence import SILENT_S

DIRECTIVE_LIFE_S = 10.0  # a beacon comes each beat; an older one is a replay, or news of yesterday (case B102)
MODE_DWELL_S = 30.0  # as long as the coordinator itself stays with a mode (protocols/modes.py)


class Orders:
    """The fence of one peer: who leads, in which term, and what is ordered."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.term = 0
        self.coordinator: str | None = None
        """Whose directive was obeyed last."""
        self.heard_s: float | None = None
        """When a directive or an answer of a coordinator last came."""
        self._lost = False
        self.newest: Sealed[Directive] | None = None
        self.min_version = 0
        self._number = -1
        self._ordered: Mode = "async"
        self._mode_since_s: float | None = None

    @property
    def mode(self) -> Mode:
        """The mode in force here: the manifest's, or in `auto` what was ordered, `async` before that."""
        configured = self.manifest.coordination.mode
        return self._ordered if configured == "auto" else configured

    def update_manifest(self, manifest: Manifest) -> None:
        """Go on under a newer revision. Whoever is no longer eligible is no longer obeyed; the fence stays."""
        self.manifest = manifest
        if self.coordinator is not None and self.coordinator not in manifest.eligible:
            self.coordinator = self.newest = None
            self.min_version, self._lost = 0, True

    def leads(self, peer_id: str, term: int) -> bool:
        """Is this the coordinator that the fence stands at? What anybody else grants does not count."""
        return peer_id == self.coordinator and term == self.term

    def alone(self, now_s: float) -> bool:
        """True when no coordinator has been heard for three beats: the peer keeps the bound itself."""
        return self._lost or self.heard_s is None or now_s - self.heard_s >= SILENT_S

    def heard(self, now_s: float) -> None:
        """The coordinator gave a sign of life other than a directive."""
        self.heard_s, self._lost = now_s, False

    def lost(self) -> None:
        """The coordinator does not answer: do not wait for three beats."""
        self._lost = True

    def take(self, sealed: Sealed[Directive], now_s: float, wall_s: float) -> bool:
        """Obey a directive: True if it is news, False if it is known or of a lower term (S6).

        `now_s` is a steady clock, `wall_s` seconds since 1970. Raises PeerFault for one that nobody may send.
        """
        said = sealed.message
        self.check(sealed, wall_s)
        if abs(said.issued_ms / 1000 - wall_s) > DIRECTIVE_LIFE_S + SKEW_S:
            raise PeerFault("old directive", f"{wall_s - said.issued_ms / 1000:.0f} s")
        if not self._is_above(sealed):
            return False
        if (sealed.sender, said.term) != (self.coordinator, self.term):
            self.coordinator, self.term = sealed.sender, said.term
            self.min_version = 0  # what a bad coordinator ordered ends with its term
        self._number, self.newest = said.number, sealed
        self.heard(now_s)
        self.min_version = max(self.min_version, said.min_version)
        self._change_mode(said.mode, now_s)
        return True

    def check(self, sealed: Sealed[Directive], wall_s: float) -> None:
        """Raises PeerFault unless its sender may order in such a term, now or earlier."""
        said = sealed.message
        if said.run != self.manifest.run:
            raise PeerFault("foreign run", said.run)
        if sealed.sender not in self.manifest.eligible:
            raise PeerFault("not eligible", sealed.sender)
        check_term(said.term, wall_s + SKEW_S)

    def floor(self, head: int) -> int:
        """The minimum version as far as it can be obeyed: no order reaches over the verified head."""
        return min(self.min_version, head)

    def _is_above(self, sealed: Sealed[Directive]) -> bool:
        """Is it above what the fence stands at: a higher term, or the same one's next word?"""
        said = sealed.message
        if self.coordinator is None:
            return said.term > self.term
        if (sealed.sender, said.term) == (self.coordinator, self.term):
            return said.number > self._number
        return precedes(self.manifest.run, (said.term, sealed.sender), (self.term, self.coordinator))

    def _change_mode(self, mode: Mode, now_s: float) -> None:
        if self.manifest.coordination.mode != "auto" or mode == self._ordered:
            return
        if self._mode_since_s is None or now_s - self._mode_since_s >= MODE_DWELL_S:
            self._ordered, self._mode_since_s = mode, now_s
