"""LoRA in mlx-lm's layout: there and back, and read by mlx-lm itself (case B81)."""

import json
from pathlib import Path

import numpy as np
import pytest

from peers.engines.mlx_layout import adapter_config, from_mlx, to_mlx
from protocols.manifest import LoraSpec

LORA = LoraSpec(r=4, alpha=6.0)
SHAPES = {"self_attn.q_proj": (16, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}  # [out, in]


def matrices(layers: range, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for layer in layers:
        for name, (num_out, num_in) in SHAPES.items():
            path = f"model.layers.{layer}.{name}"
            made[f"{path}.lora_A"] = rng.standard_normal((LORA.r, num_in)).astype(dtype)
            made[f"{path}.lora_B"] = rng.standard_normal((num_out, LORA.r)).astype(dtype)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_b81_there_and_back_is_bit_for_bit(dtype: str) -> None:
    ours = matrices(range(3), dtype)
    back = from_mlx(to_mlx(ours))
    assert back.keys() == ours.keys()
    for name, matrix in ours.items():
        assert back[name].dtype == matrix.dtype
        assert back[name].tobytes() == matrix.tobytes(), name


def test_b81_the_change_of_every_weight_is_the_same() -> None:
    ours = matrices(range(3))
    theirs = to_mlx(ours)
    for path in {name.rpartition(".")[0] for name in ours}:
        a, b = theirs[f"{path}.lora_a"], theirs[f"{path}.lora_b"]
        assert a.shape[1] == b.shape[0] == LORA.r
        change = LORA.alpha / LORA.r * ours[f"{path}.lora_B"].astype(float) @ ours[f"{path}.lora_A"]
        # What mlx-lm adds to x @ W.T is scale * (x @ a) @ b.
        assert np.abs((LORA.alpha / LORA.r * a.astype(float) @ b).T - change).max() < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
        "model.layers.0.mlp.up_proj.lora_a",
        "model.layers.0.mlp.up_proj.lora_magnitude_vector",
        "model.layers.0.mlp.up_proj.weight",
        "lora_A",
        "",
    ],
)
def test_b81_unknown_keys_raise(name: str) -> None:
    with pytest.raises(ValueError, match="is no LoRA matrix"):
        to_mlx({**matrices(range(1)), name: np.zeros((4, 16), np.float32)})


def test_b81_our_names_are_none_of_mlx_lm() -> None:
    with pytest.raises(ValueError, match="is no LoRA matrix"):
        from_mlx(matrices(range(1)))
    with pytest.raises(ValueError, match="is no LoRA matrix"):
        adapter_config(matrices(range(1)), LORA)


def test_b81_layers_and_scale_come_from_keys_and_alpha() -> None:
    config = adapter_config(to_mlx(matrices(range(2, 5))), LORA)
    assert config["num_layers"] == 3
    assert config["lora_parameters"]["scale"] == 1.5
    assert config["lora_parameters"]["rank"] == 4
    assert len(config["lora_parameters"]["keys"]) == 9


@pytest.mark.parametrize("layers", [range(4), range(2), range(1, 3), range(3, 4)])
def test_b81_mlx_lm_reads_it_and_layers_without_an_adapter_stay_base(layers: range, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import load_adapters

    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=16,
            num_hidden_layers=4,
            intermediate_size=24,
            num_attention_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=32,
        )
    )
    base = {p: np.array(m.weight) for p, m in model.named_modules() if p.endswith(tuple(SHAPES))}
    ours = matrices(layers)
    theirs = to_mlx(ours)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: mx.array(m) for name, m in theirs.items()})
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(theirs, LORA)))

    load_adapters(model, str(tmp_path))
    adapted = {path for path, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    assert adapted == {name.rpartition(".")[0] for name in ours}
    modules = dict(model.named_modules())
    for path, weight in base.items():
        expected = weight
        if path in adapted:
            expected = weight + 1.5 * ours[f"{path}.lora_B"] @ ours[f"{path}.lora_A"]
        fused = modules[path].fuse() if path in adapted else modules[path]
        assert np.abs(np.array(fused.weight) - expected).max() < 1e-5, path
