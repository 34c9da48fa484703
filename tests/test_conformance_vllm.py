"""vLLM keeps the contract too: the same checks on SmolLM2, in the environment that vLLM needs (`make test-vllm`)."""

from collections.abc import Iterator

import pytest

from peers.models.find import find_model
from tests.conformance import CHECKS, LONG_CHECKS, SMALL, Subject
from tests.conformance.builds import build, installed
from tests.conformance.checks import Check

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif("vllm" not in installed(), reason="vLLM has an environment of its own"),
]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Subject]:
    subject = Subject(build("vllm"), find_model("smollm2"), SMALL)
    yield subject
    subject.close()


@pytest.mark.parametrize("check", [*CHECKS, *LONG_CHECKS], ids=lambda check: check.__name__)
def test_on_a_real_model(smollm2: Subject, check: Check) -> None:
    check(smollm2)
