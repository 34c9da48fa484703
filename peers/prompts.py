"""From a problem to the ids that a model is given: the one place that decides it.

    problem.prompt ------------------------------------------------------> ids    plain
    problem.prompt --chat template: system, examples, question, "answer"--> ids    environment.chat = true

Inference peers generate from these ids, the trainer makes them again to check a rollout, and the evaluation measures
with them; so they are the same on every machine and every day. A plain prompt gets what the checkpoint puts before a
text, usually BOS; a chat template writes BOS itself if it wants one. Nothing is ever put after a prompt.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.environments import Environment, Problem
from peers.environments.split import training_problem
from peers.models.base import ModelFiles, Tokenizer
from protocols.manifest import EnvironmentSpec, Manifest
from protocols.rollouts import PROMPT_TOKENS_MAX

SAMPLED = 32  # problems looked at before a run begins; the slowest tasks take 50 ms for one
_TEMPLATE_S_MAX = 30.0  # a template takes 0.2 s, nearly all of it Python's start; a busy, slow machine ten times that


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template puts around a question."""

    before: str
    after: str
    strips_left: bool
    strips_right: bool

    def around(self, question: str) -> str:
        """The whole prompt, as the template would write it."""
        question = question.lstrip() if self.strips_left else question
        question = question.rstrip() if self.strips_right else question
        return f"{self.before}{question}{self.after}"


class Prompts:
    """Prompts of one run. Raises ValueError, in one line, for a chat without a usable template (case B105)."""

    def __init__(self, tokenizer: Tokenizer, spec: EnvironmentSpec, name: str) -> None:
        """`name` is the model's, for the error."""
        self._tokenizer = tokenizer
        self._name = name
        self._frame: Frame | None = None
        if spec.chat:
            template = spec.template or tokenizer.chat_template
            if not template:
                raise ValueError(
                    f"model {name!r} has no chat template: set environment.template, or environment.chat = false"
                )
            try:
                self._frame = chat_frame(template, _turns(spec), tokenizer.special_tokens)
            except ValueError as error:
                whose = "environment.template" if spec.template else f"the chat template of model {name!r}"
                raise ValueError(f"{whose}: {error}") from error

    def ids(self, problem: Problem) -> tuple[int, ...]:
        """The ids of a problem's prompt."""
        if self._frame is None:
            return self._tokenizer.encode(problem.prompt)
        return self._tokenizer.encode_rendered(self._frame.around(problem.prompt))

    def check(self, problems: Iterable[Problem], max_new_tokens: int, context: int | None) -> None:
        """Raises ValueError when one of these prompts is empty, or leaves no room for its completion.

        `context` is what the model can look at, in tokens; None when that is not known.
        """
        for problem in problems:
            length = len(self.ids(problem))
            if length == 0:
                raise ValueError(f"model {self._name!r}: a prompt is empty; set environment.prompt")
            if length > PROMPT_TOKENS_MAX:
                raise ValueError(
                    f"a prompt of {length} tokens is over the {PROMPT_TOKENS_MAX} that travel: make problems smaller"
                )
            if context is not None and length + max_new_tokens > context:
                raise ValueError(
                    f"a prompt of {length} tokens and sampling.max_new_tokens = {max_new_tokens} are over the "
                    f"{context} that model {self._name!r} can look at: make problems or max_new_tokens smaller"
                )


def check_prompts(manifest: Manifest, environment: Environment, files: ModelFiles) -> None:
    """Look at a sample of the run's problems. Raises ValueError, in one line, when a prompt cannot be made or has no
    room."""
    prompts = Prompts(files.tokenizer, manifest.environment, files.name)
    problems = [training_problem(environment, manifest.seed, "", counter) for counter in range(SAMPLED)]
    prompts.check(problems, manifest.sampling.max_new_tokens, files.context)


def _turns(spec: EnvironmentSpec) -> tuple[tuple[str, str], ...]:
    """(role, text) of all that comes before the question."""
    shown = [turn for question, answer in spec.examples for turn in (("user", question), ("assistant", answer))]
    return (*((("system", spec.system),) if spec.system else ()), *shown)


def chat_frame(template: str, turns: Iterable[tuple[str, str]], tokens: Mapping[str, str]) -> Frame:
    """What this Jinja template puts around a question after these turns. Raises ValueError, in one line.

    It is run in a sandbox and in a process of its own, bounded in memory and in time (peers/models/template.py).
    """
    return _frame(template, tuple(turns), tuple(sorted(tokens.items())))


@functools.lru_cache(maxsize=8)  # a process has one run; its parts ask again
def _frame(template: str, turns: tuple[tuple[str, str], ...], tokens: tuple[tuple[str, str], ...]) -> Frame:
    messages = [{"role": role, "content": text} for role, text in turns]
    order = json.dumps({"template": template, "messages": messages, "tokens": dict(tokens)})
    program = Path(__file__).parent / "models" / "template.py"
    command = [sys.executable, "-P", str(program)]
    try:
        done = subprocess.run(
            command, input=order, capture_output=True, text=True, timeout=_TEMPLATE_S_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"it takes over {_TEMPLATE_S_MAX:g} s to render") from error
    if done.returncode < 0:
        raise ValueError("it takes too long to render, or too much memory")
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"its process ended with {done.returncode}")
        raise ValueError(last[:200])
    return Frame(**json.loads(done.stdout))
