"""From a model's name to a model: `builtin`, a Hugging Face name, or a folder in its format.

Weights are read from safetensors only (a pickled checkpoint can run code) and in float32: the digest
and the log-probabilities must be the same on every machine, and an adapter's steps are too small for bfloat16.
"""

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.models.base import BaseModel, weights_digest

BUILTIN = Path(__file__).parent / "builtin"
HUB_TIMEOUT_S = 5.0  # a guess: a slow link answers in one


def load_model(name: str) -> BaseModel:
    """The named model on the CPU, in evaluation mode. Raises ValueError, in one line, when it cannot be had."""
    return _load_builtin() if name == "builtin" else _load_hugging_face(name)


def _load_builtin() -> BaseModel:
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from peers.models.characters import CharacterTokenizer

    module = LlamaForCausalLM(LlamaConfig.from_json_file(BUILTIN / "config.json"))
    module.load_state_dict(load_file(BUILTIN / "model.safetensors"))
    return BaseModel("builtin", module.eval(), CharacterTokenizer(), weights_digest(module.state_dict()))


def _load_hugging_face(name: str) -> BaseModel:
    """From the folder or the local cache where possible: no network, and no newer revision by surprise."""
    from safetensors import SafetensorError

    try:
        try:
            tokenizer, module = _read(name, local_files_only=True)
        except OSError:
            if Path(name).exists():
                raise
            if name.startswith((".", "/", "~")):
                raise OSError("there is no such folder") from None
            _require_hub()
            tokenizer, module = _read(name, local_files_only=False)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"no model {name!r} (`builtin`, a Hugging Face name or a folder): {reason[:200]}") from error
    tokens = HuggingFaceTokenizer(tokenizer, _eos_ids(module, tokenizer), module.config.vocab_size)
    return BaseModel(name, module.eval(), tokens, weights_digest(module.state_dict()))


def _read(name: str, local_files_only: bool) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": False, "local_files_only": local_files_only}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True, **options)
    return tokenizer, module


def _require_hub() -> None:
    """Raises OSError at once where the hub cannot be reached; its own client would retry for most of a minute."""
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise OSError(f"it is not on this machine, and {ENDPOINT} cannot be reached") from error


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer. It may know fewer ids than the model has logits."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.pad_id: int = next(i for i in (tokenizer.pad_token_id, *sorted(eos_ids), 0) if i is not None)
        self._tokenizer = tokenizer
        self._known = len(tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with the special tokens that the checkpoint puts before it."""
        return tuple(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; halves of characters become U+FFFD, ids it does not know are left out."""
        known = [i for i in ids if 0 <= i < self._known]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _eos_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a completion: instruction models list several in `generation_config`."""
    found: set[int] = set()
    for ids in (module.generation_config.eos_token_id, module.config.eos_token_id, tokenizer.eos_token_id):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)
