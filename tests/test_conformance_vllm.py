"""vLLM keeps the contract too: the same checks on SmolLM2, in the environment that vLLM needs (`make test-vllm`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig

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


def test_b82_the_adapter_on_disk_means_alpha_over_r_to_peft(smollm2: Subject) -> None:
    smollm2.load(smollm2.reference.adapter(seed=1))
    (folder,) = {Path(path).parent for path in smollm2.engine._folder.glob("*/adapter_config.json")}
    config = LoraConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.use_rslora) == (smollm2.lora.r, smollm2.lora.alpha, False)
