"""Problems from the run owner's own Python function, named `module:function`.

    # puzzles.py, and `name = "puzzles:doubling"` in run.toml
    def doubling(seed: int) -> dict:
        number = seed % 1000
        return {"question": f"2 * {number} =", "answer": str(2 * number)}

    doubling.score = lambda text, entry: float(text == entry["answer"])    # optional

The function must give the same dict for the same seed on every machine; it needs `question`, and `answer`
unless it has a scorer. All its fields may be used in the prompt template. Without a scorer the reward is 1.0
when the stripped completion equals the answer and 0.0 otherwise; a scorer gets the stripped completion and
the dict, and returns a number, or None when it cannot tell.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from peers.environments import Problem, Scored, Unscored
from peers.environments.gym import fill
from peers.environments.scoring import run_scorer


class CustomEnvironment:
    """The owner's function. Importing it runs the owner's code: see `load_environment`."""

    def __init__(self, name: str, template: str) -> None:
        """Raises ValueError when there is no such function, or what it makes cannot be used."""
        self.name = name
        self._template = template
        self._function = _import(name)
        self._scorer: Callable[[str, Any], object] = getattr(self._function, "score", _exact_match)
        self.problem(0)

    def problem(self, seed: int) -> Problem:
        """The problem of this seed."""
        entry = self._function(seed)
        needed = {"question", "answer"} if self._scorer is _exact_match else {"question"}
        if not isinstance(entry, dict) or not needed <= entry.keys():
            raise ValueError(f"{self.name}({seed}) must return a dict with {' and '.join(sorted(needed))}")
        return Problem(prompt=fill(self._template, entry), entry=entry)

    def score(self, problem: Problem, completion: str) -> Scored | Unscored:
        """The function's own score, or an exact match with the answer."""
        return run_scorer(lambda: self._scorer(completion.strip(), problem.entry))


def _exact_match(text: str, entry: Any) -> float:
    return float(text == str(entry["answer"]).strip())


def _import(name: str) -> Callable[[int], Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the file usually lies beside run.toml
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"environment {name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"environment {name!r} is not a function")
    return function  # type: ignore[no-any-return]
