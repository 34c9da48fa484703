"""Every engine that this environment has keeps the contract; and each check finds the faults that it is for.

On the built-in model all checks run, on SmolLM2 the comparisons with the trainer; `make slow` runs everything on both.
"""

from collections.abc import Iterator

import pytest

from peers.learning.learner import Learner, TrainingGroup
from peers.models.find import find_model
from protocols.manifest import LearningSpec
from tests.conformance import CHECKS, FULL, LONG_CHECKS, TINY, Nonconforming, Subject
from tests.conformance.broken import FAULTS, Wrapped, broken
from tests.conformance.builds import build, installed
from tests.conformance.checks import Check, greedy_agrees, logprobs_agree

QUICK_CHECKS = (greedy_agrees, logprobs_agree)
BY_NAME = {check.__name__: check for check in (*CHECKS, *LONG_CHECKS)}


# vLLM has an environment, and a file, of its own.
ENGINES = [name for name in installed() if name != "vllm"]


@pytest.fixture(scope="module", params=ENGINES)
def builtin(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(build(request.param), find_model("builtin"))
    yield subject
    subject.close()


@pytest.fixture(scope="module", params=ENGINES)
def smollm2(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(build(request.param), find_model("smollm2"), TINY)
    yield subject
    subject.close()


@pytest.fixture(scope="module", params=ENGINES)
def smollm2_full(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(build(request.param), find_model("smollm2"), FULL)
    yield subject
    subject.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_built_in_model(builtin: Subject, check: Check) -> None:
    check(builtin)


@pytest.mark.parametrize("check", QUICK_CHECKS, ids=lambda check: check.__name__)
def test_on_a_real_model(smollm2: Subject, check: Check) -> None:
    check(smollm2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", [*CHECKS, *LONG_CHECKS], ids=lambda check: check.__name__)
def test_all_on_a_real_model(smollm2_full: Subject, check: Check) -> None:
    check(smollm2_full)


@pytest.mark.slow
@pytest.mark.parametrize("check", LONG_CHECKS, ids=lambda check: check.__name__)
def test_at_length_on_the_built_in_model(builtin: Subject, check: Check) -> None:
    check(builtin)


LONG = {check.__name__ for check in LONG_CHECKS}
CASES = [
    pytest.param(fault, id=fault.__name__, marks=[pytest.mark.slow] if check in LONG else [])
    for fault, (check, _) in FAULTS.items()
]


@pytest.mark.parametrize("fault", CASES)
def test_conformance_catches_an_engine_that(fault: type[Wrapped]) -> None:
    check, says = FAULTS[fault]
    subject = Subject(broken(fault, build("transformers")), find_model("builtin"))
    with pytest.raises(Nonconforming, match=says):
        BY_NAME[check](subject)


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for check, _ in FAULTS.values()} == BY_NAME.keys()


def test_the_reference_is_the_trainers_own_computation() -> None:
    subject = Subject(build("transformers"), find_model("builtin"))
    reference, prompt = subject.reference, subject.prompts[2]
    adapter = reference.adapter(seed=1)
    completions = ((20, 21, 22, 23), (24,), (25, 26))
    logprobs = tuple((0.0,) * len(ids) for ids in completions)
    group = TrainingGroup(prompt, completions, logprobs, (None,) * 3, (False,) * 3)
    learner = Learner(subject.base, subject.lora, LearningSpec(), temperature=0.7, seed=0)
    learner.load_adapter(adapter)
    ours = reference.logprobs(adapter, prompt, completions, temperature=0.7)
    for theirs, ours_T in zip(learner.logprobs(group), ours, strict=True):
        assert ours_T.tolist() == pytest.approx(theirs, abs=1e-5)
