"""What the events of a swarm add up to. No clock, no terminal: the same events give the same state.

    event --apply--> SwarmState --view.render--> what is on the screen

A field that nobody has reported is None, never 0.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootstrap.events import Event

RATE_STEPS = 20  # steps that the remaining time is estimated from: enough to be steady, few enough to follow changes
WARNINGS_KEPT = 3  # lines on the screen; the metrics files have them all
STARTING, READY, GENERATING, TRAINING, DONE, GONE = "starting", "ready", "generating", "training", "done", "gone"


class Led(NamedTuple):
    """Who coordinates the run, and in which term; None where nobody is heard."""

    coordinator: str | None
    term: int


def led_by(event: Event) -> Led | None:
    """What an event says about who leads; None for one that says nothing about it."""
    match event:
        case {"event": "leader", "coordinator": coordinator, "term": int(term)}:
            return Led(coordinator, term)
        case {"event": "coordinator", "state": "leading", "peer": peer_id, "term": int(term)}:
            return Led(peer_id, term)
        case {"event": "coordinator", "state": "stepped down", "term": int(term)}:
            return Led(None, term)
        case _:
            return None


class Download(NamedTuple):
    """A version on its way to a peer."""

    version: int
    bytes: int
    received_bytes: int
    bytes_per_s: float
    sources: int
    trouble: str
    """What went wrong last with a source, if anything did."""
    said_s: float
    """When the peer said so; it says so twice a second."""

    @classmethod
    def of(cls, event: Event) -> "Download":
        """What a `download` event says."""
        about = [event[name] for name in ("version", "bytes", "received_bytes", "bytes_per_s", "sources")]
        return cls(*about, event.get("trouble") or "", event["t"])


@dataclass(slots=True)
class PeerRow:
    """One peer, as the table shows it."""

    peer_id: str
    role: str
    state: str = STARTING
    version: int | None = None
    tokens_per_s: float | None = None
    groups: int | None = None
    """Groups it has generated."""
    engine: str | None = None
    device: str | None = None
    silent_s: float | None = None
    """How long the trainer has not heard it; None for a peer that speaks for itself."""
    download: Download | None = None
    """What it last said of a long download."""


@dataclass(slots=True)
class SwarmState:
    """A swarm as its events tell it."""

    steps: int | None = None
    """Steps that the run will make; None where this process cannot know."""
    step: int = 0
    version: int | None = None
    peers: dict[str, PeerRow] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    """Mean reward of each step; None for a step that had none."""
    skipped: Counter[str] = field(default_factory=Counter)
    evals: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out greedy accuracy), as measured."""
    loss: float | None = None
    lag: int | None = None
    """Largest lag in the last batch."""
    lag_max: int | None = None
    """Largest lag of all batches."""
    queued: int | None = None
    mode: str | None = None
    """How rollouts reach the trainer now."""
    rounds: int = 0
    """Rounds that were completed; none in asynchronous mode."""
    moved: int = 0
    """Groups of those rounds that were called from another peer."""
    loop_lag_p99_ms: float | None = None
    refused: dict[tuple[str, str, str], int] = field(default_factory=dict)
    warnings: dict[str, float] = field(default_factory=dict)
    """Text and when it was last said, the newest last."""
    receipts: Counter[str] = field(default_factory=Counter)
    """What became of the groups of inference peers, as each says at its end."""
    _step_times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    _obeyed: dict[str, Led] = field(default_factory=dict)
    """Whom each peer obeys, as it said last."""

    def apply(self, event: Event) -> None:
        """Take one event; unknown kinds change nothing."""
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def seconds_left(self, now_s: float) -> float | None:
        """Estimated from the last steps; None before there are two."""
        if self.steps is None or len(self._step_times) < 2:
            return None
        (first, since_s), (last, until_s) = self._step_times[0], self._step_times[-1]
        if last <= first:
            return None
        each_s = (until_s - since_s) / (last - first)
        return max(0.0, (self.steps - self.step) * each_s - max(0.0, now_s - until_s))

    @property
    def tokens_per_s(self) -> float | None:
        """All inference peers together, of those that are known."""
        rates = [peer.tokens_per_s for peer in self.peers.values() if peer.role == "inference"]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def generated(self) -> int | None:
        """Groups of all inference peers together, of those that are known."""
        known = [peer.groups for peer in self.peers.values() if peer.groups is not None]
        return sum(known) if known else None

    @property
    def led(self) -> Led | None:
        """Who leads, as those say who have seen the newest term; None when nobody has said anything."""
        return max(self._obeyed.values(), key=lambda led: (led.term, led.coordinator is not None), default=None)

    def gone(self, peer_id: str) -> None:
        """Its process has died."""
        self._obeyed.pop(peer_id, None)
        if peer_id in self.peers:
            self.peers[peer_id].state = GONE
            self.peers[peer_id].tokens_per_s = None

    def _row(self, event: Event) -> PeerRow:
        return self.peers.setdefault(event["peer"], PeerRow(event["peer"], event["role"]))

    def _ready(self, event: Event) -> None:
        self._row(event).state = READY

    def _step(self, event: Event) -> None:
        self._row(event).state = TRAINING
        self.step = event["step"]
        self.rewards.append(event.get("reward"))
        if event.get("skipped"):
            self.skipped[event["skipped"]] += 1
        self.loss = event.get("loss")
        self.queued = event.get("queued")
        self.mode = event.get("mode", self.mode)
        self.lag = event.get("lag_max")
        if self.lag is not None:
            self.lag_max = max(self.lag, self.lag_max or 0)
        self._step_times.append((self.step, event["t"]))
        self._at_version(event)

    def _at_version(self, event: Event) -> None:
        version = event.get("version")
        if version is not None:
            self._row(event).version = version
            self.version = max(version, self.version or 0)

    def _eval(self, event: Event) -> None:
        if event.get("greedy") is not None:
            self.evals.append((event.get("step", self.step), event["greedy"]))

    def _peers(self, event: Event) -> None:
        """The trainer's view. It adds what a peer does not say itself, and never overrules what it does say."""
        for about in event["peers"]:
            row = self.peers.setdefault(about["peer_id"], PeerRow(about["peer_id"], about["role"], READY))
            row.engine, row.device = about.get("engine"), about.get("device")
            row.silent_s = about.get("silent_s")
            if row.state in (READY, STARTING):
                row.version, row.tokens_per_s = about.get("version"), about.get("tokens_per_s")

    def _download(self, event: Event) -> None:
        self._row(event).download = Download.of(event)

    def _adapter(self, event: Event) -> None:
        self._row(event).download = None
        self._at_version(event)

    def _generated(self, event: Event) -> None:
        row = self._row(event)
        row.state, row.tokens_per_s, row.groups = GENERATING, event.get("tokens_per_s"), event.get("groups")
        self._at_version(event)

    def _refused(self, event: Event) -> None:
        self.refused[event["peer"], event.get("door", ""), event["reason"]] = event["count"]

    def _loop(self, event: Event) -> None:
        self.loop_lag_p99_ms = event.get("lag_p99_ms")

    def _leader(self, event: Event) -> None:
        led = led_by(event)
        if led is not None:
            self._obeyed[event["peer"]] = led

    def _mode(self, event: Event) -> None:
        self.mode = event["mode"]

    def _round(self, event: Event) -> None:
        self.rounds += 1
        self.moved += event["moved"]

    def _warning(self, event: Event) -> None:
        self.warnings.pop(event["text"], None)
        self.warnings[event["text"]] = event["t"]
        if len(self.warnings) > WARNINGS_KEPT:
            del self.warnings[next(iter(self.warnings))]

    def _final(self, event: Event) -> None:
        row = self._row(event)
        row.state, row.tokens_per_s = DONE, None
        self._at_version(event)
        if event["role"] == "inference":
            row.groups = event.get("generated", row.groups)
            self.receipts.update(event.get("receipts") or {})


_HANDLERS: dict[str, Any] = {
    "ready": SwarmState._ready,
    "step": SwarmState._step,
    "eval": SwarmState._eval,
    "peers": SwarmState._peers,
    "adapter": SwarmState._adapter,
    "download": SwarmState._download,
    "generated": SwarmState._generated,
    "refused": SwarmState._refused,
    "loop": SwarmState._loop,
    "leader": SwarmState._leader,
    "coordinator": SwarmState._leader,
    "mode": SwarmState._mode,
    "round": SwarmState._round,
    "warning": SwarmState._warning,
    "final": SwarmState._final,
}
