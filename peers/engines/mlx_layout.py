"""LoRA matrices in mlx-lm's layout, and back.

    ours, as PEFT's:  `<path>.lora_A` [r, in], `<path>.lora_B` [out, r]      weight + scale * B @ A
    mlx-lm's:         `<path>.lora_a` [in, r], `<path>.lora_b` [r, out]      weight + scale * (a @ b).T

The module paths are the same; what is no matrix of a LoRA module is never passed over, because mlx-lm would load it
without an error and without an effect.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from protocols.manifest import LoraSpec

_TO_MLX = {"lora_A": "lora_a", "lora_B": "lora_b"}
_FROM_MLX = {theirs: ours for ours, theirs in _TO_MLX.items()}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def to_mlx(matrices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our matrices by our names, of any dtype, as mlx-lm has them. Raises ValueError for any other name."""
    return _renamed(matrices, _TO_MLX)


def from_mlx(matrices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse of `to_mlx`, bit for bit. Raises ValueError for any other name."""
    return _renamed(matrices, _FROM_MLX)


def adapter_config(names: Iterable[str], lora: LoraSpec) -> dict[str, Any]:
    """`adapter_config.json` beside mlx-lm's `adapters.safetensors`, for matrices of these names (mlx-lm's).

    mlx-lm has no alpha: its `scale` is ours divided by the rank, and what it does not find it takes to be 20. Keys are
    whole paths, so modules without a matrix stay those of the base model, in whichever layers they are. Raises
    ValueError for a name that is none of mlx-lm's.
    """
    paths = sorted({_split(name, _FROM_MLX)[0] for name in names})
    layers = {found[1] for path in paths if (found := _LAYER.search(path))}
    return {
        "fine_tune_type": "lora",
        "num_layers": len(layers),
        "lora_parameters": {"rank": lora.r, "scale": lora.alpha / lora.r, "dropout": 0.0, "keys": paths},
    }


def _renamed(matrices: Mapping[str, np.ndarray], kinds: Mapping[str, str]) -> dict[str, np.ndarray]:
    renamed = {}
    for name, matrix in matrices.items():
        path, kind = _split(name, kinds)
        renamed[f"{path}.{kinds[kind]}"] = np.ascontiguousarray(matrix.T)
    return renamed


def _split(name: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    path, _, kind = name.rpartition(".")
    if not path or kind not in kinds:
        raise ValueError(f"{name[:128]!r} is no LoRA matrix: its name must end in one of {', '.join(kinds)}")
    return path, kind
