"""What is checked: a way to build an engine, a model, and how much of it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from peers.engines import Engine
from peers.models.base import ModelFiles
from peers.models.load import load_weights
from protocols.adapters import Adapter
from protocols.manifest import LoraSpec
from tests.conformance.reference import LIMITS, Limits, Reference

Build = Callable[[ModelFiles, LoraSpec], Engine]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # any Llama's, tied or not
LORA = LoraSpec(r=8, alpha=16.0, targets=TARGETS)


@dataclass(frozen=True, slots=True)
class Size:
    """How much a check generates."""

    group_size: int
    new_tokens: int
    long_tokens: int
    """Of a call that is met in its middle."""


TINY = Size(group_size=2, new_tokens=8, long_tokens=48)
SMALL = Size(group_size=8, new_tokens=12, long_tokens=48)
# Five short prompts of 32 completions of up to 32 tokens; some end early, 2,000 tokens remain.
FULL = Size(group_size=32, new_tokens=32, long_tokens=128)

# By model: short prompts of unequal length, a long beginning that prompts share (two blocks and more of any prefix
# cache; vLLM's has 128 tokens a block on a CPU), its ends, and a text that is an end besides the model's own.
TEXTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "builtin": (
        ("1 + 2 =", "9 - 4 + 3 =", "12 + 34 - 5 + 6 =", "8 =", "3 + 3 =\n"),
        " + ".join(str(number) for number in range(10, 50)),
        (" + 1 =", " - 7 =", " + 22 - 3 ="),
        "7",
    ),
    "smollm2": (
        (
            "The capital of France is",
            "Once upon a time, in a village by the sea, there lived",
            "Two plus three is",
            "The three laws of thermodynamics say that",
            "def add(a, b):\n    return",
        ),
        "A list of facts. " + " ".join(f"Number {n} times {n} is {n * n}." for n in range(1, 25)),
        (" Number 40 times 40 is", " The next fact is", " Now something else:"),
        ".",
    ),
}


class _Ends:
    """A tokenizer with more end-of-sequence ids, so that random completions end in both ways."""

    def __init__(self, inner: Any, more: frozenset[int]) -> None:
        self._inner = inner
        self.eos_ids: frozenset[int] = inner.eos_ids | more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Subject:
    """One engine on one model, built when it is first needed and kept for all checks."""

    build: Build
    found: ModelFiles
    size: Size = SMALL
    lora: LoraSpec = LORA
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    @cached_property
    def files(self) -> ModelFiles:
        """The model, with one more end-of-sequence id than it has itself."""
        tokenizer = self.found.tokenizer
        more = frozenset({tokenizer.encode(TEXTS[self.found.name][3])[-1]})
        return dataclasses.replace(self.found, tokenizer=_Ends(tokenizer, more))

    @cached_property
    def engine(self) -> Engine:
        """The one that the checks share; never stopped."""
        return self.build(self.files, self.lora)

    @cached_property
    def base(self) -> Any:
        """The weights in float32."""
        return load_weights(self.files)

    @cached_property
    def reference(self) -> Reference:
        """The trainer's computation with the run's LoRA."""
        return Reference(self.base, self.lora)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Short, of unequal lengths; the last one is a single token."""
        encoded = [self.files.tokenizer.encode(text) for text in TEXTS[self.found.name][0]]
        return [*encoded, encoded[0][:1]]

    @cached_property
    def long_prompts(self) -> list[tuple[int, ...]]:
        """With a long common beginning."""
        _, shared, ends, _ = TEXTS[self.found.name]
        return [self.files.tokenizer.encode(shared + end) for end in ends]

    @property
    def ends(self) -> frozenset[int]:
        """What ends a completion."""
        return self.files.tokenizer.eos_ids

    @property
    def limits(self) -> Limits:
        """Of the shared engine's dtype."""
        return LIMITS[self.engine.dtype]

    def load(self, adapter: Adapter, engine: Engine | None = None) -> int:
        """Load it as the next version; its number."""
        version = next(self._versions)
        (engine or self.engine).load_adapter(version, adapter)
        return version

    @contextmanager
    def fresh(self, lora: LoraSpec | None = None) -> Iterator[Engine]:
        """An engine of its own, closed at the end."""
        engine = self.build(self.files, lora or self.lora)
        try:
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        """Give the shared engine back, if there is one."""
        if "engine" in self.__dict__:
            self.engine.close()
