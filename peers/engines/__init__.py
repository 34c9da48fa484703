"""What every generation engine promises, whatever machine it runs on.

    engine.load_adapter(version, adapter)          # any thread, at any time
    made = engine.generate(prompts, sampling, seed)  # up to `engine.calls` at once, each on its own thread
    made.version, made.adapter                     # under which every token of it was sampled

A call generates under the version that was the newest when it began, to its end: a version that comes meanwhile is
for the calls after it. Engines are synchronous and run off the event loop. Their log-probabilities are those of
what was really sampled: temperature applied, over the full vocabulary, natural log, float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocols.adapters import Adapter
from protocols.messages import Sampling

NAMES = ("transformers", "vllm", "mlx")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: ids up to and including the first end-of-sequence id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probability of each id, natural log, after temperature; same length as `token_ids`."""
    finish: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call made, all of it under one adapter."""

    version: int
    adapter: bytes
    """`adapter_digest` of what the engine really applied: computed from the tensors that it was handed."""
    groups: list[list[Completion]]
    """For each prompt, in order, `group_size` completions."""


class Engine(Protocol):
    """A loaded base model."""

    name: str
    """One of NAMES."""
    device: str
    """Where it computes: cpu, cuda, mps, or what the machine calls its accelerator."""
    dtype: str
    """What it computes in: float32, bfloat16 or float16."""
    calls: int
    """Calls of `generate` that may run at once."""

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Calls that begin from now on generate with this adapter.

        Raises PeerFault, and keeps the one before, unless names, shapes and values are exactly right for the model:
        every module of the run's LoRA targets, no other.
        """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Generation:
        """`sampling.group_size` completions for each prompt; the same seed gives the same completions.

        Raises ValueError for an empty prompt or before the first adapter, PeerFault for an adapter under which
        nothing can be sampled, CancelledError after `stop`.
        """

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """The likeliest continuation of each prompt, token by token, with log-probabilities at temperature 1."""

    def stop(self) -> None:
        """From any thread, for good: what is being generated raises CancelledError at its next token."""

    def close(self) -> None:
        """Give back memory and end processes, once no call is under way; after that nothing may be called."""
