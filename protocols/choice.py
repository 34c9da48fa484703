"""Which codec a version travels in, where the manifest leaves it open (`transfer.codec = "auto"`).

A peer has a version once it was encoded, downloaded and decoded:

    seconds(codec) = encode_s + size / link + decode_s

    lossless (ulps, xor, raw) --over a step--> int8 --over a step--> int4      and back, when the better one fits again

A transfer that is no longer than an optimizer step hides behind the next one, so nothing is won by making it shorter,
and no precision is given away for it. When nothing fits, the fastest is taken. Sizes drift while a run learns: what is
not in use is measured again now and then, by whoever drives this (`due`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TIERS = (("ulps", "xor", "raw"), ("int8",), ("int4",))  # most faithful first; in a tier, usually the smallest first
_TIER_OF = {codec: at for at, tier in enumerate(TIERS) for codec in tier}

MARGIN = 1.2  # another codec must be better by this; times on one machine vary by 10 %
HOLD_VERSIONS = 5  # between two changes; a guess: one odd measurement must not count twice
PROBE_EVERY = 20  # versions for which a measurement is good; a guess: sizes drift over hundreds of steps


@dataclass(frozen=True, slots=True)
class Cost:
    """What one version took in one codec."""

    encode_s: float
    size: int
    """Bytes."""
    decode_s: float

    def seconds(self, link_bytes_per_s: float) -> float:
        """From the target to a peer that has the version, over a link of this rate."""
        return self.encode_s + self.size / link_bytes_per_s + self.decode_s


def link_rate(claims: Iterable[float]) -> float | None:
    """The rate that three of four peers say they can take, bytes a second; None when nobody says anything.

    Rates are claims. Whoever wants to move this quartile below every honest claim needs more than a quarter of the
    peers, above every honest claim three quarters; and all that it moves is the codec, never what is right.
    """
    rates = sorted(rate for rate in claims if rate > 0.0)
    return rates[len(rates) // 4] if rates else None


class Choice:
    """The codec of the next version, by what the versions before it took."""

    def __init__(self) -> None:
        self.codec = TIERS[0][0]
        """In use."""
        self._costs: dict[str, Cost] = {}
        self._measured: dict[str, int] = {}  # codec -> version count at its last measurement
        self._versions = 0
        self._changed = 0  # version count at the last change

    def learn(self, codec: str, cost: Cost) -> None:
        """What a version took in this codec, whether it was published in it or only tried."""
        self._costs[codec], self._measured[codec] = cost, self._versions

    def decode_s(self, codec: str) -> float | None:
        """The last measurement, while it is good."""
        return self._costs[codec].decode_s if self._is_good(codec) else None

    def due(self) -> str | None:
        """A codec to measure beside this version's, at most one a version: as faithful as the one in use, or more."""
        candidates = [codec for codec, tier in _TIER_OF.items() if tier <= _TIER_OF[self.codec]]
        return next((codec for codec in candidates if codec != self.codec and not self._is_good(codec)), None)

    def pick(self, link_bytes_per_s: float | None, step_s: float | None) -> str:
        """The codec of the next version. While link or step are not known: a lossless one."""
        self._versions += 1
        if self.codec not in self._costs:
            return self.codec  # to use it is to measure it
        if link_bytes_per_s is None or step_s is None:
            wanted = self.codec if _TIER_OF[self.codec] == 0 else TIERS[0][0]
        else:
            wanted = self._wanted({each: cost.seconds(link_bytes_per_s) for each, cost in self._costs.items()}, step_s)
        if wanted != self.codec and self._versions - self._changed >= HOLD_VERSIONS:
            self.codec, self._changed = wanted, self._versions
        return self.codec

    def _wanted(self, seconds: Mapping[str, float], step_s: float) -> str:
        now = _TIER_OF[self.codec]
        for at, tier in enumerate(TIERS):
            best = self._fastest(seconds, tier)
            if best is None and at > now:
                return tier[0]  # never measured: tried
            slack = MARGIN if at == now else 1.0 / MARGIN if at < now else 1.0
            if best is not None and seconds[best] <= step_s * slack:
                return best
        return self._fastest(seconds, tuple(_TIER_OF)) or self.codec

    def _fastest(self, seconds: Mapping[str, float], codecs: tuple[str, ...]) -> str | None:
        """Of those that were measured; the one in use if none is clearly faster, else the most faithful of equals."""
        known = [codec for codec in codecs if codec in seconds]
        best = min(known, key=seconds.__getitem__, default=None)
        if best is not None and self.codec in known and seconds[self.codec] <= seconds[best] * MARGIN:
            return self.codec
        return best

    def _is_good(self, codec: str) -> bool:
        return codec in self._measured and self._versions - self._measured[codec] < PROBE_EVERY
