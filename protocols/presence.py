"""Who is here, as whom: notices two live processes with one identity (DESIGN section 4, case B07).

libp2p does not notice that two processes use one key: their streams get mixed up. Each process carries a
random session nonce in its hello and its heartbeats. Whoever hears them judges: while one session of an
identity is alive, another is `contested`; it waits. If the first beats again, the second is a copy: `identity
taken`. If the first is silent for three beats it is gone (killed, restarted), and the second takes its place.
Two that start within one beat may be heard in either order by different judges; the lower nonce goes first, so
that all judges send the same one away.
"""

from dataclasses import dataclass

from protocols.messages import Verdict

BEAT_S = 2.0
SILENT_S = 3 * BEAT_S  # three lost beats, as everywhere (DESIGN section 9)
IDENTITIES_MAX = 65_536  # about 500 B each; the oldest go first
RIVALS_MAX = 8  # a key used by more processes at once; nobody honest comes near


@dataclass(slots=True)
class _Holder:
    session: bytes
    since_s: float
    heard_s: float
    rivals: dict[bytes, float]
    """Other sessions, and when each was first heard."""


class Sessions:
    """The sessions one peer has heard, newest last."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}

    def heard(self, peer_id: str, session: bytes, now_s: float) -> Verdict:
        """Judge a hello or heartbeat of this identity."""
        holder = self._holders.pop(peer_id, None)
        if holder is None:
            self._make_room()
            holder = _Holder(session, now_s, now_s, {})
        self._holders[peer_id] = holder  # back in, as the newest
        if session == holder.session:
            holder.heard_s = now_s
            return "ok"
        if session < holder.session and now_s - holder.since_s < BEAT_S:
            self._holders[peer_id] = _Holder(session, now_s, now_s, {holder.session: now_s})
            return "ok"
        first_heard_s = holder.rivals.setdefault(session, now_s)
        if len(holder.rivals) > RIVALS_MAX:
            holder.rivals.pop(next(iter(holder.rivals)))
        if holder.heard_s > first_heard_s:
            return "identity taken"
        if now_s - holder.heard_s >= SILENT_S:
            self._holders[peer_id] = _Holder(session, now_s, now_s, {})
            return "ok"
        return "contested"

    def left(self, peer_id: str, session: bytes) -> None:
        """This session said goodbye: its identity is free at once."""
        holder = self._holders.get(peer_id)
        if holder is not None and holder.session == session:
            del self._holders[peer_id]

    def alive(self, now_s: float) -> list[str]:
        """Identities heard within the last three beats."""
        return [peer for peer, holder in self._holders.items() if now_s - holder.heard_s < SILENT_S]

    def _make_room(self) -> None:
        while len(self._holders) >= IDENTITIES_MAX:
            del self._holders[next(iter(self._holders))]
