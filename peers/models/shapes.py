"""How large a model and its adapter are, from its configuration alone: nothing is loaded.

The model is built on torch's meta device, where tensors have shapes and no memory: a second for 30 layers. Names and
shapes are thus those of the trainer's own modules, also where a checkpoint stores fused or tied matrices otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from peers.models.base import ModelFiles
from peers.models.find import first_line
from peers.models.lora import linear_targets
from protocols.adapters import Tensor
from protocols.manifest import LoraSpec
from protocols.rollouts import PROMPT_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of a model and what LoRA adapts of it."""

    parameters: int
    """Numbers in the model; a tied matrix counts once."""
    vocab: int
    hidden: int
    intermediate: int
    """Width inside a layer's MLP."""
    context: int
    """Tokens that the model was made for."""
    cache_per_token: int
    """Numbers that a token leaves in the cache: keys and values of all layers."""
    adapted: Mapping[str, tuple[int, int]] = field(repr=False)
    """[out, in] of each adapted module, by path."""

    @property
    def adapted_parameters(self) -> int:
        """Numbers in the matrices that are adapted."""
        return sum(map(math.prod, self.adapted.values()))

    def adapter_parameters(self, r: int) -> int:
        """Numbers in an adapter of rank r: r * (in + out) a module."""
        return sum(r * sum(shape) for shape in self.adapted.values())


def read_shapes(files: ModelFiles, lora: LoraSpec) -> Shapes:
    """Raises ValueError, in one line, for a configuration that transformers does not know and for LoRA targets that
    the model has not."""
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"no model {files.name!r}: {first_line(error)}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return Shapes(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        context=getattr(text, "max_position_embeddings", None) or PROMPT_TOKENS_MAX,
        cache_per_token=2 * text.num_hidden_layers * kv_heads * head_dim,
        adapted={
            path: (linear.out_features, linear.in_features)
            for path, linear in sorted(linear_targets(module, lora.targets).items())
        },
    )


def zero_adapter(files: ModelFiles, lora: LoraSpec) -> dict[str, Tensor]:
    """An adapter that changes nothing: all of it is 0. Like version 0 it is the base model; its digest is another.

    Raises ValueError as `read_shapes` does.
    """
    adapter = {}
    for path, (num_out, num_in) in read_shapes(files, lora).adapted.items():
        adapter[f"{path}.lora_A"] = Tensor("F32", (lora.r, num_in), bytes(4 * lora.r * num_in))
        adapter[f"{path}.lora_B"] = Tensor("F32", (num_out, lora.r), bytes(4 * num_out * lora.r))
    return dict(sorted(adapter.items()))
