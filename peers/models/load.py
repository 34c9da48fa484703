"""From a model's files to torch: weights in float32, so that digests, log-probabilities and an adapter's small steps
are the same on every machine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.models.base import BaseModel, ModelFiles
from peers.models.find import BUILTIN, find_model, first_line, ids_of

__all__ = ["BUILTIN", "load_model", "load_weights", "read_tokenizer"]


def load_model(name: str) -> BaseModel:
    """The named model on the CPU, in evaluation mode. Raises ValueError, in one line, when it cannot be had."""
    return load_weights(find_model(name))


def load_weights(files: ModelFiles) -> BaseModel:
    """Its weights on the CPU, in evaluation mode. Raises ValueError, in one line, for files that do not load."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    options = {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True}
    try:
        module = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"no model {files.name!r}: {first_line(error)}") from error
    return BaseModel(files.name, module.eval(), files.tokenizer, files.digest)


def read_tokenizer(name: str, folder: Path) -> "HuggingFaceTokenizer":
    """The tokenizer beside the weights. Raises ValueError, in one line."""
    from transformers import AutoTokenizer

    try:
        config = json.loads((folder / "config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"no model {name!r}: {first_line(error)}") from error
    generation = folder / "generation_config.json"
    listed = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    eos_ids = ids_of(listed, config.get("eos_token_id"), tokenizer.eos_token_id)
    return HuggingFaceTokenizer(tokenizer, eos_ids, config["vocab_size"])


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer. It may know fewer ids than the model has logits."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.pad_id: int = next(i for i in (tokenizer.pad_token_id, *sorted(eos_ids), 0) if i is not None)
        self.chat_template: str = tokenizer.chat_template or ""
        self.special_tokens: dict[str, str] = dict(tokenizer.special_tokens_map)
        self.digest = bytes(32)
        self._tokenizer = tokenizer
        self._known = len(tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with the special tokens that the checkpoint puts before it."""
        return tuple(self._tokenizer.encode(text))

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Ids of what a chat template wrote, with no special tokens but its own."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; halves of characters become U+FFFD, ids it does not know are left out."""
        known = [i for i in ids if 0 <= i < self._known]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer in the Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    config = GgufConfig(dequantize=True)
    module = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=config, **options
    )
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
