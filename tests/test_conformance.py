"""Every engine that this environment has keeps the contract; and each check finds the faults that it is for.

On the built-in model all checks run, on SmolLM2 the comparisons with the trainer; `make slow` runs everything on both.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from peers.engines import Engine
from peers.models.base import ModelFiles
from peers.models.find import find_model
from peers.models.load import load_weights
from protocols.manifest import LoraSpec
from tests.conformance import CHECKS, FULL, LONG_CHECKS, TINY, Nonconforming, Subject
from tests.conformance.broken import FAULTS, Wrapped, broken
from tests.conformance.checks import Check, greedy_agrees, logprobs_agree
from tests.conformance.subject import Build

QUICK_CHECKS = (greedy_agrees, logprobs_agree)
BY_NAME = {check.__name__: check for check in (*CHECKS, *LONG_CHECKS)}


def transformers_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
    from peers.engines.transformers_engine import TransformersEngine

    return TransformersEngine(load_weights(files), lora)


def mlx_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
    from peers.engines.mlx_engine import MlxEngine

    return MlxEngine(files, lora, "float32")


BUILDS: dict[str, Build] = {"transformers": transformers_engine}
if importlib.util.find_spec("mlx_lm") and importlib.util.find_spec("peers.engines.mlx_engine"):
    BUILDS["mlx"] = mlx_engine


@pytest.fixture(scope="module", params=BUILDS)
def builtin(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(BUILDS[request.param], find_model("builtin"))
    yield subject
    subject.close()


@pytest.fixture(scope="module", params=BUILDS)
def smollm2(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(BUILDS[request.param], find_model("smollm2"), TINY)
    yield subject
    subject.close()


@pytest.fixture(scope="module", params=BUILDS)
def smollm2_full(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(BUILDS[request.param], find_model("smollm2"), FULL)
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
    subject = Subject(broken(fault, transformers_engine), find_model("builtin"))
    with pytest.raises(Nonconforming, match=says):
        BY_NAME[check](subject)


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for check, _ in FAULTS.values()} == BY_NAME.keys()
