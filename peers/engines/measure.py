"""How fast an engine really is on this machine: what a peer may say of itself."""

import time
from collections.abc import Sequence

from peers.engines import Engine
from protocols.messages import Sampling


def measure_tokens_per_s(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> float:
    """Sampled tokens a second of one real `generate` call, after one that warms up. Raises ValueError without prompts.

    Pass the batch that the peer will really generate: tokens a second rise with the number of rows.
    """
    if not prompts:
        raise ValueError("measuring needs at least one prompt")
    engine.generate(prompts[:1], sampling, seed=0)
    begun_s = time.perf_counter()
    groups = engine.generate(prompts, sampling, seed=1)
    elapsed_s = time.perf_counter() - begun_s
    return sum(len(completion.token_ids) for group in groups for completion in group) / elapsed_s
