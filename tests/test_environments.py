"""Environments: the same problem for the same seed, held-out problems never trained on, scores that never raise."""

import inspect
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from peers.environments import Problem, Scored, Unscored
from peers.environments.gym import UNSAFE_TASKS, GymEnvironment
from peers.environments.load import load_environment
from peers.environments.scoring import run_scorer
from peers.environments.split import ATTEMPTS_MAX, held_out_problems, is_held_out, training_problem
from protocols.manifest import EnvironmentSpec

PARAMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
SUMS = GymEnvironment("chain_sum", PARAMS, "{expression}=")
QUIZ = """
def quiz(seed):
    return {"question": f"2 * {seed % 50} =", "answer": 2 * (seed % 50), "hint": "double"}

def judged(seed):
    return {"question": "say something"}

def judge(text, entry):
    if text == "crash":
        raise ValueError("cannot read this")
    return None if text == "?" else len(text) / 10

judged.score = judge

def nonsense(seed):
    return 42
"""


class Constant:
    """An environment of one prompt."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def problem(self, seed: int) -> Problem:
        return Problem(prompt=self.prompt, entry=None)

    def score(self, problem: Problem, completion: str) -> Scored | Unscored:
        return Unscored("nobody asks")


def some_prompt(held_out: bool) -> str:
    return next(str(i) for i in range(1000) if is_held_out(str(i)) == held_out)


# -- the split


def test_a_tenth_of_all_prompts_is_held_out() -> None:
    share = sum(is_held_out(SUMS.problem(seed).prompt) for seed in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_the_side_of_a_prompt_never_changes() -> None:
    # Another split would train on what older runs and the built-in model hold out.
    assert [i for i in range(30) if is_held_out(f"{i} + 1=")] == [4, 7, 14, 15]


def test_training_problems_are_never_held_out_and_follow_from_seed_peer_and_counter() -> None:
    problems = [training_problem(SUMS, 7, "peer", counter) for counter in range(300)]
    assert not any(is_held_out(problem.prompt) for problem in problems)
    assert problems == [training_problem(SUMS, 7, "peer", counter) for counter in range(300)]
    assert len({problem.prompt for problem in problems}) > 250
    first = problems[0].prompt
    others = [training_problem(SUMS, s, p, c).prompt for s, p, c in ((8, "peer", 0), (7, "other", 0), (7, "peer", 1))]
    assert first not in others


def test_an_environment_of_held_out_prompts_only_is_an_error_not_a_hang() -> None:
    with pytest.raises(ValueError, match="too few"):
        training_problem(Constant(some_prompt(held_out=True)), 0, "peer", 0)


def test_held_out_problems_are_distinct_and_as_many_as_asked() -> None:
    problems = held_out_problems(SUMS, 3, 200)
    assert len({problem.prompt for problem in problems}) == len(problems) == 200
    assert all(is_held_out(problem.prompt) for problem in problems)
    assert problems == held_out_problems(SUMS, 3, 200)
    assert problems != held_out_problems(SUMS, 4, 200)


def test_a_small_space_gives_fewer_held_out_problems() -> None:
    assert len(held_out_problems(Constant(some_prompt(held_out=True)), 0, 5)) == 1
    assert held_out_problems(Constant(some_prompt(held_out=False)), 0, 5) == []
    assert ATTEMPTS_MAX == 1000


# -- reasoning-gym


def test_a_problem_is_a_function_of_its_seed() -> None:
    assert SUMS.problem(5) == GymEnvironment("chain_sum", PARAMS, "{expression}=").problem(5)
    assert SUMS.problem(5).prompt == SUMS.problem(5).entry["metadata"]["expression"] + "="
    assert len({SUMS.problem(seed).prompt for seed in range(100)}) > 80


def test_chain_sum_scores() -> None:
    problem = next(p for p in map(SUMS.problem, range(1000)) if p.entry["answer"] == "5")
    rewards = {text: SUMS.score(problem, text) for text in ("5", " 5\n", "05", "15", "6", "")}
    assert rewards == {
        "5": Scored(1.0),
        " 5\n": Scored(1.0),
        "05": Scored(1.0),
        "15": Scored(0.5),  # reasoning-gym's own credit for an answer that contains the right one
        "6": Scored(0.0),
        "": Scored(0.0),
    }


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_b65_no_text_makes_a_score_raise(text: str) -> None:
    problem = SUMS.problem(1)
    for completion in (text, text + "\ufffd", problem.entry["answer"] + text):
        result = SUMS.score(problem, completion)
        assert isinstance(result, Scored)
        assert 0.0 <= result.reward <= 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "chain_sun"}, "did you mean chain_sum"),
        ({"params": {"max_term": 3}}, "did you mean max_terms"),
        ({"params": {"zzz": 3}}, "known: allow_negation, max_digits"),
        ({"params": {"seed": 3}}, "no parameter 'seed'"),
        ({"params": {"min_terms": 5, "max_terms": 3}}, "max_terms must be >= min_terms"),
        ({"params": {"min_terms": "two"}}, "parameters of task 'chain_sum'"),
        ({"prompt": "{expresion}="}, "did you mean expression"),
        ({"name": "n_queens"}, "runs answers as Python code"),
    ],
)
def test_a_bad_spec_is_one_line_that_says_what_to_change(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_environment(EnvironmentSpec(**spec))
    assert "\n" not in str(caught.value)


def test_a_template_cannot_format_or_reach_into_objects() -> None:
    template = "{question.__class__} {question:>99} {} {question}"
    env = GymEnvironment("chain_sum", PARAMS, template)
    assert env.problem(0).prompt == template.replace("{question}", env.problem(0).entry["question"])


def test_every_task_whose_scorer_runs_the_answer_is_refused() -> None:
    # Goal: a newer reasoning-gym cannot bring back code execution by an answer.
    # Method: look for evaluators of text in every scorer and the methods it may call.
    runs_text = re.compile(r"\b(eval|exec|parse_expr|sympify)\(answer")
    found = {name for name, (kind, _) in DATASETS.items() if runs_text.search(inspect.getsource(kind))}
    assert found | {"composite"} == UNSAFE_TASKS


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - UNSAFE_TASKS))
def test_every_other_task_scores_its_own_answer_and_survives_garbage(name: str) -> None:
    env = GymEnvironment(name, {}, "{question}")
    problem = env.problem(3)
    assert problem.prompt
    for text in ("", "\ufffd\x00", "[[1, 2", "nan", "-1e999", "{'a': 1}", "()" * 50):
        result = env.score(problem, text)
        assert isinstance(result, Unscored) or math.isfinite(result.reward)


# -- scorers


def test_no_score_is_unscored_and_never_zero() -> None:
    def crash() -> float:
        raise ZeroDivisionError("x")

    assert run_scorer(lambda: 0.25) == Scored(0.25)
    assert run_scorer(lambda: None) == Unscored("the scorer gave no score")
    assert run_scorer(lambda: float("nan")) == Unscored("the scorer gave nan")
    assert run_scorer(lambda: "word") == Unscored("ValueError: could not convert string to float: 'word'")
    assert run_scorer(crash) == Unscored("ZeroDivisionError: x")


# -- the owner's own code


@pytest.fixture
def quiz_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_quiz.py").write_text(QUIZ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "echo_quiz", raising=False)
    return "echo_quiz"


@pytest.mark.parametrize("allow_code", [False, set(), {"echo_quiz:judged"}])
def test_code_of_the_owner_is_not_imported_unless_allowed(quiz_module: str, allow_code: bool | set[str]) -> None:
    with pytest.raises(ValueError, match="--allow-code echo_quiz:quiz if you trust it"):
        load_environment(EnvironmentSpec(name="echo_quiz:quiz"), allow_code)
    assert quiz_module not in sys.modules


@pytest.mark.parametrize("allow_code", [True, {"echo_quiz:quiz"}])
def test_a_function_without_a_scorer_is_matched_exactly(quiz_module: str, allow_code: bool | set[str]) -> None:
    env = load_environment(EnvironmentSpec(name=f"{quiz_module}:quiz", prompt="{hint} {question}"), allow_code)
    problem = env.problem(7)
    assert problem.prompt == "double 2 * 7 ="
    assert [env.score(problem, text) for text in (" 14 ", "15")] == [Scored(1.0), Scored(0.0)]


def test_a_function_with_a_scorer_is_judged_by_it(quiz_module: str) -> None:
    env = load_environment(EnvironmentSpec(name=f"{quiz_module}:judged"), allow_code=True)
    scores = [env.score(env.problem(0), text) for text in ("12345", "?", "crash")]
    assert scores == [
        Scored(0.5),
        Unscored("the scorer gave no score"),
        Unscored("ValueError: cannot read this"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("echo_quiz:absent", "has no attribute 'absent'"),
        ("echo_absent:quiz", "No module named 'echo_absent'"),
        ("echo_quiz:QUIZ", "has no attribute"),
        ("echo_quiz:nonsense", "must return a dict with answer and question"),
        (":quiz", "Empty module name"),
    ],
)
def test_unusable_code_is_one_line(quiz_module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_environment(EnvironmentSpec(name=name), allow_code=True)
