"""What every generation engine promises, whatever machine it runs on.

    engine = transformers_engine.TransformersEngine(model, config)
    engine.load_adapter(version, adapter)         # replaces the version before it
    groups = engine.generate(prompts, sampling, seed)

An engine is synchronous and runs off the event loop (a worker thread). Its log-probabilities are
those of what was really sampled: temperature applied, over the full vocabulary, float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocols.adapters import Adapter
from protocols.messages import Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: ids up to and including the first end-of-sequence id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probability of each id, natural log, after temperature; same length as `token_ids`."""
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """A loaded base model that generates under one adapter at a time."""

    name: str
    device: str

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Generate with this adapter from now on. Raises PeerFault if it does not fit the model exactly."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[list[Completion]]:
        """`sampling.group_size` completions for each prompt; the same seed gives the same completions."""

    def stop(self) -> None:
        """From any thread, for good: what is being generated raises CancelledError at its next token."""
