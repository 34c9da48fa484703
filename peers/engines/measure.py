"""How fast an engine really is on this machine, and at how many rows: what a peer may say of itself.

Measured under an adapter that changes nothing, before the run's first one is there. The next `load_adapter` replaces
it, and leaves no trace of it, as the engines promise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import psutil

from peers.engines import Engine
from protocols.adapters import Adapter
from protocols.messages import Sampling

BUDGET_S = 10.0  # for all of it: a peer that joins should soon be of use
CALL_S_MAX = 2.0  # a guess: a new version waits for a call, and two waits a batch are as long as a quick step
GAIN_MIN = 1.1  # twice the rows, but not a tenth more tokens a second: they only wait longer
NEW_TOKENS_MAX = 32  # of a completion: enough that reading the prompts does not dominate

_WARM_UP_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """The best of a few real calls."""

    tokens_per_s: float
    """Sampled tokens a second of one call."""
    rows: int
    """Completions in that call: with twice as many, a call took too long or was hardly faster."""
    memory_bytes: int
    """What this process and its children hold in RAM after it, libraries included."""


def measure(
    engine: Engine,
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Calls of 1, 2, 4, ... groups, each of prompts of its own, so that no cache knows them, after one that warms up.

    Pass 2 n prompts to try up to n groups. Completions are cut short, and how long a real call would take is scaled
    up to `sampling.max_new_tokens`. Raises ValueError for fewer than two prompts, and what the engine raises.
    """
    if len(prompts) < 2:
        raise ValueError("measuring needs two prompts or more")
    begun_s = clock()
    engine.load_adapter(0, adapter)
    engine.generate(prompts[:1], _cut(sampling, _WARM_UP_TOKENS), 0)
    num_tokens = _affordable_tokens(engine, prompts[:1], sampling, clock)
    best: Measured | None = None
    groups = 1
    while 2 * groups <= len(prompts):
        call_s, tokens = _timed(engine, prompts[groups : 2 * groups], _cut(sampling, num_tokens), clock)
        real_call_s = call_s * sampling.max_new_tokens / num_tokens
        if best is not None and (real_call_s > CALL_S_MAX or tokens / call_s < best.tokens_per_s * GAIN_MIN):
            break
        best = Measured(tokens / call_s, groups * sampling.group_size, memory_used())
        if clock() - begun_s + 2 * call_s > BUDGET_S:
            break
        groups *= 2
    assert best is not None
    return best


def _affordable_tokens(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, clock: Callable[[], float]
) -> int:
    """Tokens of a completion that one group can make in a quarter of the budget."""
    call_s, _ = _timed(engine, prompts, _cut(sampling, _WARM_UP_TOKENS), clock)
    affordable = int(BUDGET_S / 4 / (call_s / _WARM_UP_TOKENS))
    return max(1, min(NEW_TOKENS_MAX, sampling.max_new_tokens, affordable))


def _cut(sampling: Sampling, num_tokens: int) -> Sampling:
    return msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, num_tokens))


def _timed(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, clock: Callable[[], float]
) -> tuple[float, int]:
    """(seconds, sampled tokens) of one call."""
    begun_s = clock()
    made = engine.generate(prompts, sampling, seed=len(prompts))
    elapsed_s = clock() - begun_s
    return elapsed_s, sum(len(each.token_ids) for group in made.groups for each in group)


def memory_used() -> int:
    """Bytes of RAM that this process and all it started hold (vLLM computes in processes of its own)."""
    me = psutil.Process()
    total: int = me.memory_info().rss
    for child in me.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
