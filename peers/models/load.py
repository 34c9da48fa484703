"""From a model's files to torch and to a tokenizer.

Weights are float32 on the CPU unless an engine asks for something else, so that log-probabilities and an adapter's
small steps are the same on every machine, and so that any machine can: half precision is slow or absent on many CPUs.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from peers.models.base import BaseModel, ModelFiles
from peers.models.find import BUILTIN, find_model, first_line

__all__ = ["BUILTIN", "load_model", "load_weights", "read_tokenizer"]

log = logging.getLogger(__name__)

_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


def load_model(name: str, revision: str | None = None) -> BaseModel:
    """The named model on the CPU, in evaluation mode. Raises ValueError, in one line, when it cannot be had."""
    return load_weights(find_model(name, revision))


def load_weights(files: ModelFiles, dtype: Literal["float32", "bfloat16", "float16"] = "float32") -> BaseModel:
    """Its weights on the CPU, in evaluation mode.

    Raises ValueError, in one line, for files that do not load, or that leave a parameter of the model without a value.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            module, said = AutoModelForCausalLM.from_pretrained(
                files.folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, **_LOCAL
            )
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ImportError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise ValueError(f"model {files.name!r} does not load: {first_line(error)}") from error
    lost = sorted(said["missing_keys"]) + sorted(str(key) for key in said["mismatched_keys"])
    if lost:  # they would be drawn at random, on each machine others
        raise ValueError(f"model {files.name!r}: {files.folder} has no weights for {lost[0]} ({len(lost)} such)")
    log.info("model %s: loaded in %s on the CPU", files.name, dtype)
    return BaseModel(files.name, module.eval(), files.tokenizer, files.digest)


def read_tokenizer(name: str, folder: Path) -> "HuggingFaceTokenizer":
    """The tokenizer beside the weights. Raises ValueError, in one line."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, **_LOCAL)
            tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
        generation = folder / "generation_config.json"
        listed = json.loads(generation.read_bytes()).get("eos_token_id") if generation.exists() else None
        text = config.get_text_config()
        eos_ids = ids_of(listed, config.eos_token_id, text.eos_token_id, tokenizer.eos_token_id)
        return HuggingFaceTokenizer(tokenizer, eos_ids, text.vocab_size, _raw_parts(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise ValueError(f"model {name!r}: its tokenizer or config.json does not load: {first_line(error)}") from error


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer. It may know fewer ids than the model has logits."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int, raw: bytes) -> None:
        """`raw` are its files, as far as they turn text into ids. Raises ValueError for one that surrounds no text."""
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.pad_id: int = next(i for i in (tokenizer.pad_token_id, *sorted(eos_ids), 0) if i is not None)
        self.chat_template = _template(tokenizer.chat_template)
        self.special_tokens: Mapping[str, str] = {
            name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        }
        tokenizer.model_max_length = 2**31  # a prompt's room is checked elsewhere, by a line that says what to do
        self._tokenizer = tokenizer
        self._known = len(tokenizer)
        self._before = _before(tokenizer)
        self.digest = self._digest(raw)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with what the checkpoint puts before it; what some put behind it would end the answer."""
        return (*self._before, *self.encode_rendered(text))

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Ids of what a chat template wrote, with no special tokens but its own."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; halves of characters become U+FFFD, ids it does not know are left out."""
        known = [i for i in ids if 0 <= i < self._known]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _digest(self, raw: bytes) -> bytes:
        """Over its files, special ids, template, and the ids of a probe: how the libraries here read the files."""
        rules = {
            "before": self._before,
            "eos": sorted(self.eos_ids),
            "special": {name: self.special_tokens.get(name) for name in ("bos_token", "eos_token", "unk_token")},
            "template": self.chat_template,
            "probe": self.encode_rendered(_PROBE),
        }
        digest = hashlib.sha256(b"echo-swarm/2/tokenizer\0")
        digest.update(hashlib.sha256(raw).digest())
        digest.update(json.dumps(rules, sort_keys=True).encode())
        return digest.digest()


# Spaces, digits, case, line ends, code, other scripts, and a character of several bytes.
_PROBE = " A  prompt:\n\n\t12345 + 6.7e-8 = Δx'll [x[0] for x in y] naïve 東京 🙂\r\n "


def _before(tokenizer: Any) -> tuple[int, ...]:
    """The special ids that the checkpoint puts before a text, usually BOS or none."""
    bare, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    raise ValueError("its special tokens stand inside the text")


def _template(template: Any) -> str:
    """A checkpoint may name several; the default is what chats without tools use."""
    return str((template.get("default") if isinstance(template, dict) else template) or "")


def _raw_parts(folder: Path) -> bytes:
    """What turns text into ids, from the files: the same however JSON is laid out. Raises OSError, ValueError."""
    path = folder / "tokenizer.json"
    if path.exists():
        rules = json.loads(path.read_bytes())
        for setting in ("padding", "truncation"):  # of whoever saved it last; we do neither
            rules.pop(setting, None)
        return json.dumps(rules, sort_keys=True).encode()
    names = sorted(
        {each.name for pattern in ("*.model", "*.tiktoken", "vocab*", "merges*") for each in folder.glob(pattern)}
    )
    return b"".join(f"{name}\0".encode() + hashlib.sha256((folder / name).read_bytes()).digest() for name in names)


def ids_of(*values: int | Sequence[int] | None) -> frozenset[int]:
    """All ids in values that are an id, several or None, as configurations hold them."""
    found: set[int] = set()
    for value in values:
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer in the Hugging Face format.

    Raises ValueError, in one line, where that cannot be done here, and OSError where the disk takes no more.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers import GgufConfig

        options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        with quiet_transformers(), redirect_stderr(StringIO()):  # of the bar that it draws whatever one sets
            module = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
            )
            module.save_pretrained(folder)
            AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(first_line(error)) from error
    except ImportError as error:
        raise ValueError("a GGUF file is read with `pip install 'echo-swarm[smollm2]'`") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{gguf.name} cannot be converted: {first_line(error)}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its bars and warnings: what matters is raised, and a peer's output is for its user."""
    from transformers.utils import logging as words

    level, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    words.set_verbosity_error()
    words.disable_progress_bar()
    try:
        yield
    finally:
        words.set_verbosity(level)
        if bars:
            words.enable_progress_bar()
