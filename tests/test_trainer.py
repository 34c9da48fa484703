"""The trainer's small rules, without a network."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peers.trainer import Trainer, _refuse_change_of_kind
from protocols.manifest import EnvironmentSpec, LoraSpec, TransferSpec
from protocols.messages import CapacityAd, Sampling
from tests.samples import RUN, manifest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_lag", 9),
        ("seed", 77),
        ("lora", LoraSpec(r=2)),
        ("sampling", Sampling(group_size=3)),
        ("environment", EnvironmentSpec(prompt="{question}!")),
    ],
)
def test_what_a_run_is_cannot_change_after_its_start(field: str, value: object) -> None:
    before = manifest()
    after = msgspec.structs.replace(before, **{field: value})
    with pytest.raises(ValueError, match=f"^{field}: "):
        _refuse_change_of_kind(before, after)


def test_the_dtype_of_adapters_is_fixed_and_how_they_travel_is_not() -> None:
    before = manifest()
    _refuse_change_of_kind(
        before, msgspec.structs.replace(before, transfer=TransferSpec(codec="int4", keyframe_every=3))
    )
    with pytest.raises(ValueError, match=r"^transfer\.dtype: .*bfloat16") as error:
        _refuse_change_of_kind(before, msgspec.structs.replace(before, transfer=TransferSpec(dtype="float32")))
    assert "\n" not in str(error.value)


def test_the_link_is_what_inference_peers_say_and_unknown_when_they_say_nothing() -> None:
    def ad(role: Any, rate: float | None) -> SimpleNamespace:
        message = CapacityAd(run=RUN, session=bytes(16), role=role, issued_ms=0, down_bytes_per_s=rate)
        return SimpleNamespace(message=message)

    ads: dict[str, Any] = {"a": ad("trainer", 1.0), "b": ad("bootstrap", 2.0), "c": ad("inference", None)}
    trainer: Any = SimpleNamespace(follower=SimpleNamespace(neighbourhood=SimpleNamespace(ads=ads)))
    assert Trainer._link_bytes_per_s(trainer) is None
    ads["d"], ads["e"] = ad("inference", 5e6), ad("inference", 9e6)
    assert Trainer._link_bytes_per_s(trainer) == 5e6


def test_how_a_run_learns_may_change() -> None:
    before = manifest()
    _refuse_change_of_kind(before, msgspec.structs.replace(before, description="other", max_steps=before.max_steps + 1))
