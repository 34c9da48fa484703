"""How much better a completion is than the others of its group.

No reward (None: nobody could score it) is not a reward of 0: such a completion is outside the baseline
and has no advantage.
"""

import math
from collections.abc import Callable, Mapping, Sequence

# Added to the standard deviation, so that a group whose rewards differ by very little is not blown up.
# The value is a convention of GRPO implementations; the paper leaves it open.
STD_EPS = 1e-4

# Rewards closer together than this are equal: sums of reward functions that cancel out differ by rounding.
# Far below STD_EPS, where a difference would hardly count anyway.
REWARD_SPREAD_MIN = 1e-6

Rewards = Sequence[float | None]


def grpo_advantages(rewards: Rewards) -> list[float]:
    """(reward - mean) / (std + eps) over the scored completions of one group, 0.0 for those without a score.

    GRPO, arXiv 2402.03300, section 4.1.2; std is the population's (divided by their number). Exactly 0.0
    for all when there is nothing to tell apart: fewer than two scores, or all of them equal. Such a group
    has no signal and the learner leaves it out.
    """
    scored = [reward for reward in rewards if reward is not None]
    if not scored or max(scored) - min(scored) < REWARD_SPREAD_MIN:
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.hypot(*(reward - mean for reward in scored)) / math.sqrt(len(scored))
    return [0.0 if reward is None else (reward - mean) / (std + STD_EPS) for reward in rewards]


ADVANTAGES: Mapping[str, Callable[[Rewards], list[float]]] = {"grpo": grpo_advantages}
