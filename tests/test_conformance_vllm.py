"""vLLM keeps the contract too: the same checks on SmolLM2, in the environment that vLLM needs (`make test-vllm`)."""

import importlib.util
from collections.abc import Iterator

import pytest

from peers.engines import Engine
from peers.models.base import ModelFiles
from peers.models.find import find_model
from protocols.manifest import LoraSpec
from tests.conformance import CHECKS, LONG_CHECKS, SMALL, Subject
from tests.conformance.checks import Check

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"),
]


def vllm_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
    from peers.engines.vllm_engine import VllmEngine, VllmLimits

    return VllmEngine(files, lora, VllmLimits(dtype="float32", context_tokens=512, rows=64))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Subject]:
    subject = Subject(vllm_engine, find_model("smollm2"), SMALL)
    yield subject
    subject.close()


@pytest.mark.parametrize("check", [*CHECKS, *LONG_CHECKS], ids=lambda check: check.__name__)
def test_on_a_real_model(smollm2: Subject, check: Check) -> None:
    check(smollm2)
