"""A base model: its files on this disk, its vocabulary, and, for who computes with torch, its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Tokenizer(Protocol):
    """Text to ids and back. Only prompts are encoded; sampled ids are never encoded again."""

    eos_ids: frozenset[int]
    """Any of these ends a completion."""
    pad_id: int
    """Fills rows of unequal length; may also be an end-of-sequence id."""
    vocab_size: int
    """Width of the model's logits; the tokenizer itself may know fewer ids."""
    chat_template: str
    """In Jinja, as the checkpoint has it; empty for a base model."""
    special_tokens: Mapping[str, str]
    """What a chat template may write by name: `bos_token`, `eos_token` and others."""
    digest: bytes
    """SHA-256 of all that turns text into ids, the chat template included; 32 bytes."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a plain prompt, with what the model expects before it, and nothing after it."""

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The ids of what a chat template wrote: it has put all special tokens there itself."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out. Never raises, whatever the ids."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A base model as it lies on this disk, in the Hugging Face format: what every engine loads for itself."""

    name: str
    """As the manifest names it."""
    folder: Path
    """Holds `config.json` and the weights as safetensors."""
    digest: bytes
    """SHA-256 of the weights (peers/models/find.py), 32 bytes."""
    config: Mapping[str, Any] = field(repr=False)
    """`config.json`."""
    tokenizer: Tokenizer = field(repr=False)
    revision: str | None = None
    """The hub's commit, 40 hex digits; None for a model that is not from the hub."""

    @property
    def context(self) -> int | None:
        """Tokens that prompt and completion may have together; None where the configuration does not say."""
        text = self.config.get("text_config") or self.config
        known = (text.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((value for value in known if isinstance(value, int) and value > 0), None)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The weights in memory, in float32 where a trainer has them. They never change during a run."""

    name: str
    module: "PreTrainedModel" = field(repr=False)
    tokenizer: Tokenizer
    digest: bytes
    """Of the files it was loaded from."""
