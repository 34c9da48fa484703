"""The staleness bound: Echo's t_train - t_infer <= max_lag, counted in optimizer steps.

    lag of a rollout when it is consumed = steps done - oldest version that wrote any of its tokens

Gate 1 (admission) paces producers, gate 2 (queue) frees what can no longer be used, gate 3 (consumption)
alone guarantees the bound. All three are the same inequality, asked at three moments.
"""


def lag(steps_done: int, oldest_version: int) -> int:
    """Echo's t_train - t_infer for one rollout."""
    return steps_done - oldest_version


def within_bound(steps_done: int, oldest_version: int, max_lag: int) -> bool:
    """Gates 2 and 3: may a group of this version be consumed after `steps_done` steps?

    A version above the steps done does not exist yet; whoever names it is wrong or lying.
    """
    return 0 <= lag(steps_done, oldest_version) <= max_lag


def room(steps_done: int, queued: int, batch: int, version: int, depth: int) -> int:
    """Gate 1: how many more groups may a producer holding `version` start? 0 or less is none.

    With `queued` groups ahead of it and `batch` consumed a step, the next group is consumed at step
    steps_done + queued // batch (DESIGN section 9), and that minus `version` must stay within `depth`: how far
    ahead producers may run; at most the bound, and usually 1, so that the pipeline does not sit at the bound.
    """
    return (depth - lag(steps_done, version) + 1) * batch - queued
