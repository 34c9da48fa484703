"""Where problems come from and what an answer is worth.

A problem is a pure function of (environment, seed), so a trainer can make again any problem that a
peer says it answered, and recompute its reward. Problems are split in two by a hash of their prompt:
held-out problems are never handed out for training (`peers/environments/split.py`).
"""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, and whatever the environment needs to score an answer."""

    prompt: str
    entry: Any


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward that was really computed."""

    reward: float


@dataclass(frozen=True, slots=True)
class Unscored:
    """No reward could be computed: left out of the group's baseline, never a 0."""

    reason: str


class Environment(Protocol):
    """A source of problems and the judge of their answers."""

    def problem(self, seed: int) -> Problem:
        """The problem of this seed; the same on every machine."""

    def score(self, problem: Problem, completion: str) -> Scored | Unscored:
        """What this completion is worth. Never raises on any text."""
