"""Runs a scorer that somebody else wrote, on text that somebody else sent."""

import math
from collections.abc import Callable

from peers.environments import Scored, Unscored

# What a scorer can be driven to by a strange answer. Anything else is a bug of the scorer, and is loud.
SCORER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,  # RecursionError among them
    SyntaxError,
    TypeError,
    ValueError,  # UnicodeError among them
)


def run_scorer(scorer: Callable[[], object]) -> Scored | Unscored:
    """The scorer's number; Unscored when it failed, or gave none or one that is not finite."""
    try:
        score = scorer()
        reward = None if score is None else float(score)  # type: ignore[arg-type]
    except SCORER_ERRORS as error:
        return Unscored(f"{type(error).__name__}: {str(error)[:100]}")
    if reward is None:
        return Unscored("the scorer gave no score")
    if not math.isfinite(reward):
        return Unscored(f"the scorer gave {reward}")
    return Scored(reward)
