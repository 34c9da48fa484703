"""A base model with what the rest needs to know about its vocabulary."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Tokenizer(Protocol):
    """Text to ids and back. Only prompts are encoded; sampled ids are never encoded again."""

    eos_ids: frozenset[int]
    """Any of these ends a completion."""
    pad_id: int
    """Fills rows of unequal length; may also be an end-of-sequence id."""
    vocab_size: int
    """Width of the model's logits; the tokenizer itself may know fewer ids."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, with what the model expects before it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out. Never raises, whatever the ids."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Weights that never change during a run."""

    name: str
    module: "PreTrainedModel" = field(repr=False)
    tokenizer: Tokenizer
    digest: bytes
    """`weights_digest` of the module."""


def weights_digest(state: "Mapping[str, torch.Tensor]") -> bytes:
    """SHA-256 over tensors by sorted name: name, dtype, shape, bytes; 32 bytes.

    Of tensors that share their memory (tied weights) only the first name counts.
    """
    import torch

    digest = hashlib.sha256(b"echo-swarm/1/weights")
    seen: set[tuple[int, torch.Size]] = set()
    for name in sorted(state):
        tensor = state[name]
        place = (tensor.data_ptr(), tensor.shape)
        if place in seen:
            continue
        seen.add(place)
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{tensor.dtype}\0{shape}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
