"""How each engine is built, in any dtype it computes in; only those that this environment has."""

import importlib.util

from peers.engines import Engine
from peers.models.base import ModelFiles
from peers.models.load import load_weights
from protocols.manifest import LoraSpec
from tests.conformance.subject import Build

CONTEXT_TOKENS, ROWS = 512, 64  # of vLLM: enough for the prompts of the checks and of the benchmarks

_PACKAGES = {"transformers": "transformers", "mlx": "mlx_lm", "vllm": "vllm"}


def installed() -> list[str]:
    """Names of the engines that can be built here."""
    return [name for name, package in _PACKAGES.items() if _has(package) and _has(f"peers.engines.{name}_engine")]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def build(name: str, dtype: str = "float32") -> Build:
    """Builds this engine, on the CPU where it has the choice."""

    def transformers_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
        import torch

        from peers.engines.transformers_engine import TransformersEngine

        model = load_weights(files)
        model.module.to(getattr(torch, dtype))
        return TransformersEngine(model, lora)

    def mlx_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
        from peers.engines.mlx_engine import MlxEngine

        return MlxEngine(files, lora, dtype)

    def vllm_engine(files: ModelFiles, lora: LoraSpec) -> Engine:
        from peers.engines.vllm_engine import VllmEngine, VllmLimits

        return VllmEngine(files, lora, VllmLimits(dtype, CONTEXT_TOKENS, ROWS))

    return {"transformers": transformers_engine, "mlx": mlx_engine, "vllm": vllm_engine}[name]
