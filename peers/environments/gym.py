"""Problems from reasoning-gym: a task by name, its parameters, and a prompt template.

The reward is the task's own `score_answer` on the stripped completion. Most tasks give 1.0 for a right
answer and part of it for some others: `chain_sum` gives 1.0 when the numbers are equal, else
len(answer) / len(completion) when the right answer occurs inside the completion ("15" for 5 is 0.5), else 0.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from peers.environments import Problem, Scored, Unscored
from peers.environments.scoring import run_scorer

# Their scorers evaluate the answer as Python (`eval`, sympy's `parse_expr`). An answer is text that a
# stranger sent, so scoring it would run a stranger's code. `composite` may contain any of them.
UNSAFE_TASKS = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

_FIELD = re.compile(r"\{(\w+)\}")
_SET_BY_US = frozenset({"seed", "size"})


class GymEnvironment:
    """One reasoning-gym task. Raises ValueError, in one line, for a task, parameter or field it does not know."""

    def __init__(self, name: str, params: Mapping[str, Any], template: str) -> None:
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ValueError(f"no reasoning-gym task {name!r}{_nearest(name, DATASETS)}")
        if name in UNSAFE_TASKS:
            raise ValueError(f"task {name!r} runs answers as Python code to score them; choose another")
        self._dataset_class, self._config_class = DATASETS[name]
        known = {field.name for field in dataclasses.fields(self._config_class)} - _SET_BY_US
        for param in params:
            if param not in known:
                raise ValueError(f"task {name!r} has no parameter {param!r}{_nearest(param, known)}")
        self.name = name
        self._params = dict(params)
        self._template = template
        try:
            self._scorer = self._dataset(0)
            entry = self._scorer[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"parameters of task {name!r}: {error}") from error
        fill(template, entry)

    def problem(self, seed: int) -> Problem:
        """The problem of this seed; about 20 microseconds for `chain_sum`."""
        entry = self._dataset(seed)[0]
        return Problem(prompt=fill(self._template, entry), entry=entry)

    def score(self, problem: Problem, completion: str) -> Scored | Unscored:
        """The task's own score of the stripped completion. Never raises on any text."""
        return run_scorer(lambda: self._scorer.score_answer(completion.strip(), problem.entry))

    def _dataset(self, seed: int) -> Any:
        """A dataset of one problem; reasoning-gym makes problem i from `seed + i` when it is asked for."""
        return self._dataset_class(self._config_class(**self._params, seed=seed, size=1))


def fill(template: str, entry: Mapping[str, Any]) -> str:
    """The template with `{question}` and `{any metadata field}` filled in; other braces stay as they are.

    Not `str.format`: a template comes from a manifest, and `{question:>9999999999}` would eat all memory.
    """
    fields = {**entry, **entry.get("metadata", {}), "question": entry["question"]}

    def value(match: re.Match[str]) -> str:
        field = match.group(1)
        if field not in fields:
            raise ValueError(f"the prompt template has no field {field!r}{_nearest(field, fields)}")
        return str(fields[field])

    return _FIELD.sub(value, template)


def _nearest(word: str, known: "Mapping[str, Any] | set[str]") -> str:
    """What to try instead: near names, or all of them when few are known."""
    near = difflib.get_close_matches(word, known, n=3)
    if near:
        return f"; did you mean {', '.join(near)}?"
    return f"; known: {', '.join(sorted(known))}" if len(known) <= 20 else f"; {len(known)} are known"
