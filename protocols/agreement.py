"""Do rollouts come from the policy that they name? The trainer's accounts of it, without a model (case B76).

    batch --choose--> a few groups --the trainer's own pass under the version they name--> gaps --observe--> Verdict
                                                                                   refused: Disowned, for a session

The gap of a sampled token is |log p_trainer(v) - log p_producer|, in nats. It is taken under exactly the version that
the group names, so age has no part in it: what is left is numerical noise between engines (in float32 about 1e-5 nats
a token, in bfloat16 0.01 to 0.2: docs/wire.md has a table), or another policy. A producer that never loaded the
adapter, applies it at the wrong scale or stays at an old version looks, in rewards, just like staleness.

Two accounts of each producer find whoever mixes: one of the groups of a single version, one of all groups of late.
Which groups are looked at is the trainer's secret, drawn anew for every batch.

What this cannot see: text that was not sampled but whose log-probabilities under the version are right (an answer key,
greedy answers); policies closer to the named one than the limit, as neighbouring versions are; a share of false groups
so small that the mean over all that is looked at stays below the limit, where groups are shorter than TOKENS_MIN;
versions whose adapter the trainer no longer has; and a peer that comes back under another key. What such a producer
gains is bounded by what its tokens weigh (`importance_cap`), not by this check.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from protocols.delivery import Queued
from protocols.faults import LocalFault

# Tokens of a mean that may condemn. Gaps of the roughest honest engine that was measured (SmolLM2, adapter merged into
# bfloat16 weights: mean 0.17, 99 in 100 below 1.2) have a standard deviation of about 0.25, so means of 64 of them one
# of 0.03: the default limit of 0.3 is four of these away.
TOKENS_MIN = 64
# An account of late is halved beyond this many tokens, so that a long honest past dilutes a lie by half at most:
# whoever begins to err by twice the limit is found within about as many tokens.
RECENT_TOKENS_MAX = 512
# Versions of a producer with accounts of their own. Groups of more than a few versions seldom wait side by side.
VERSIONS_MAX = 8
# Producers with accounts, those seen last. About 1 KB each.
PRODUCERS_MAX = 4096
# Of a batch's groups at most one in four is looked at. With 32 groups of the built-in model a look at 8 takes 15 % of
# a training pass, one at 4 (four producers, proven) 6 %.
CHECKED_ONE_IN = 4
# Groups of a producer that are looked at in one batch until it has TOKENS_MIN tokens. Afterwards it is one.
UNPROVEN_GROUPS_MAX = 4
# Sessions of a producer that are judged anew. Three: a restart with another engine or a repaired one is a new
# chance; who fails each time is refused until the trainer restarts.
CHANCES_MAX = 3
REFUSED_MAX = 65_536  # refusals remembered; the oldest go first. Whoever makes more keys needs no amnesty
ENGINE_NAME_MAX = 24  # characters of an engine's name in a reason: names are the producers' words


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the account that decided says; if none did, the one of late."""

    refused: bool
    engine: str
    version: int
    """The one that the last group named."""
    tokens: int
    mean: float
    """|log p_trainer - log p_producer| a token, in nats."""
    limit: float

    @property
    def words(self) -> str:
        """Why, in at most a Label's 128 characters: "engine mlx does not run v5: mean gap 0.31 nats ..."."""
        return f"engine {self.engine[:ENGINE_NAME_MAX]} does not run v{self.version}: {self.numbers}"

    @property
    def numbers(self) -> str:
        """The mean, how many tokens it is of, and the limit."""
        return f"mean gap {self.mean:.2g} nats over {self.tokens} tokens, limit {self.limit:.2g}"


@dataclass(slots=True)
class _Account:
    tokens: int = 0
    total: float = 0.0

    def add(self, gaps: Sequence[float]) -> None:
        self.tokens += len(gaps)
        self.total += sum(gaps)

    def halve(self) -> None:
        self.total *= (self.tokens // 2) / self.tokens
        self.tokens //= 2

    def over(self, limit: float) -> bool:
        return self.tokens >= TOKENS_MIN and self.total > limit * self.tokens


@dataclass(slots=True)
class _Producer:
    tokens: int = 0
    """All that were ever looked at."""
    recent: _Account = field(default_factory=_Account)
    versions: OrderedDict[int, _Account] = field(default_factory=OrderedDict)


class Agreement:
    """Running accounts of gaps, by producer."""

    def __init__(self, gap_max: float) -> None:
        self.gap_max = gap_max
        self._producers: OrderedDict[str, _Producer] = OrderedDict()

    def choose(self, groups: Sequence[Queued], dice: random.Random, settled: Container[str] = ()) -> list[Queued]:
        """The groups of a batch to look at: one of each producer, more of those that are not proven yet, and at most
        one in CHECKED_ONE_IN (at least one). Unproven producers first. `settled` producers are left out.
        """
        if not self.gap_max:
            return []
        drawn: dict[str, list[Queued]] = {}
        for group in dice.sample(groups, len(groups)):
            if group.producer not in settled:
                drawn.setdefault(group.producer, []).append(group)
        producers = dice.sample(list(drawn), len(drawn))
        unproven = [producer for producer in producers if not self.proven(producer)]
        chosen = [drawn[producer][0] for producer in sorted(producers, key=self.proven)]
        chosen += [group for producer in unproven for group in drawn[producer][1:UNPROVEN_GROUPS_MAX]]
        return chosen[: max(1, len(groups) // CHECKED_ONE_IN)]

    def proven(self, producer: str) -> bool:
        """True once enough tokens of this producer were looked at, and it was not refused since."""
        account = self._producers.get(producer)
        return account is not None and account.tokens >= TOKENS_MIN

    def observe(self, producer: str, engine: str, version: int, gaps: Sequence[float]) -> Verdict:
        """Take in the gaps of a group's tokens, finite and at least one. After a refusal accounts begin anew."""
        if not gaps or not all(map(math.isfinite, gaps)):
            raise LocalFault("gaps that say nothing")
        account = self._producers.setdefault(producer, _Producer())
        self._producers.move_to_end(producer)
        if len(self._producers) > PRODUCERS_MAX:
            self._producers.popitem(last=False)
        of_version = account.versions.setdefault(version, _Account())
        account.versions.move_to_end(version)
        if len(account.versions) > VERSIONS_MAX:
            account.versions.popitem(last=False)
        account.tokens += len(gaps)
        of_version.add(gaps)
        account.recent.add(gaps)
        over = next((each for each in (of_version, account.recent) if each.over(self.gap_max)), None)
        shown = over or account.recent
        verdict = Verdict(over is not None, engine, version, shown.tokens, shown.total / shown.tokens, self.gap_max)
        if verdict.refused:
            del self._producers[producer]
        elif account.recent.tokens > RECENT_TOKENS_MAX:
            account.recent.halve()
        return verdict


@dataclass(slots=True)
class _Refusal:
    words: str
    session: bytes | None
    times: int


class Disowned:
    """Producers that are listened to no more, until another session of theirs asks; at most CHANCES_MAX times.

    A session is what a peer says of itself: it counts restarts of the honest, and limits those who make sessions up.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[str, _Refusal] = OrderedDict()

    def add(self, producer: str, session: bytes | None, words: str) -> None:
        """Refuse this session of the producer (None: it was never heard of) for that reason."""
        before = self._refused.pop(producer, None)
        self._refused[producer] = _Refusal(words, session, 1 if before is None else before.times + 1)
        if len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def why(self, producer: str, session: bytes | None) -> str:
        """The reason for which this session of the producer is refused; empty if it is not."""
        refusal = self._refused.get(producer)
        if refusal is None:
            return ""
        if refusal.session is None:
            refusal.session = session
        another = session is not None and session != refusal.session
        return "" if another and refusal.times < CHANCES_MAX else refusal.words
