"""The manifest: everything that the peers of a run must agree on, signed by its owner.

`run.toml` has the same sections with the same names (bootstrap/config.py), so a field is described
once, here. A volunteer is invited to a run id; the manifest must be signed by the key whose hash ends
that id. Of two valid manifests the higher revision counts.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from protocols import PROTOCOL
from protocols.messages import UNARY_BYTES_MAX, Count, Digest, Label, Millis, PeerId, RunId, Sampling
from protocols.presence import BEAT_S

# A group travels in one message of 1 MiB: 8 bytes a sampled token (id and log-probability), and at most 128 KiB of
# prompt (PROMPT_TOKENS_MAX in protocols/rollouts.py), labels and lengths.
GROUP_TOKENS_MAX = (UNARY_BYTES_MAX - 256 * 1024) // 8


# Examples show the form of an answer. Eight is what papers show, and all that a manifest holds when each is a page.
EXAMPLES_MAX = 8

COMMIT = re.compile(r"^[0-9a-f]{40}\Z")  # of a model on the hub
Commit = Annotated[str, Meta(pattern=COMMIT.pattern)]
Turn = Annotated[str, Meta(min_length=1, max_length=1024)]


class ModelSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base model: `builtin`, a Hugging Face name, or a folder."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] = "builtin"
    digest: Digest | None = None
    """SHA-256 over the base weights; filled in by the trainer. A peer with other weights is refused at start."""
    revision: Commit | None = None
    """The hub's commit that the trainer uses; filled in by it. None for a model that is not from the hub."""
    tokenizer: Digest | None = None
    """SHA-256 of what turns text into ids, chat template included; filled in by the trainer, checked as `digest`."""


class EnvironmentSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where problems come from: a reasoning-gym task by name, or `module:function` of your own."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] = "chain_sum"
    prompt: Annotated[str, Meta(min_length=1, max_length=1024)] = "{question}"
    """Prompt text; `{question}` and the fields of the problem's metadata (`{expression}`) are filled in."""
    params: dict[str, Any] = {}
    """Parameters of the task, as reasoning-gym names them."""
    chat: bool = False
    """The prompt is a user's message and goes through a chat template, which then asks for the answer."""
    system: Annotated[str, Meta(max_length=2048)] = ""
    """With `chat`: the system's message; empty gives none, and a template may have its own."""
    examples: Annotated[tuple[tuple[Turn, Turn], ...], Meta(max_length=EXAMPLES_MAX)] = ()
    """With `chat`: questions and answers that are shown before as earlier turns."""
    template: Annotated[str, Meta(max_length=8192)] = ""
    """With `chat`: a Jinja template in place of the model's own. Half of what a manifest may hold; templates without
    tools are under 2 KB."""

    def __post_init__(self) -> None:
        for name in ("system", "examples", "template"):
            if getattr(self, name) and not self.chat:
                raise ValueError(f"environment.{name} is for chat prompts: set environment.chat = true")


class LoraSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter that is trained and published."""

    r: Annotated[int, Meta(ge=1, le=512)] = 8
    alpha: Annotated[float, Meta(gt=0.0)] = 16.0
    """Effective scale is alpha / r."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    )
    """Module names that get an adapter. `lm_head` matters for small models: the final norm fixes the scale."""


class LearningSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the trainer learns: GRPO with token-level, truncated importance correction."""

    loss: Literal["grpo"] = "grpo"
    learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-3
    batch_groups: Annotated[int, Meta(ge=1, le=65536)] = 32
    """Groups consumed by one optimizer step."""
    clip_low: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Meta(gt=0.0)] = 0.28
    """Asymmetric clip range of the ratio current / proximal (DAPO)."""
    importance_cap: Annotated[float, Meta(ge=1.0)] = 2.0
    """Truncation of the ratio proximal / behaviour."""
    kl_beta: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    """Weight of the k3 KL estimate to the base model; 0 turns it off."""
    max_grad_norm: Annotated[float, Meta(gt=0.0)] = 1.0
    mask_truncated: bool = True
    """Leave completions that ran into max_new_tokens out of the loss (their reward still counts in the baseline)."""
    gap_max: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.3
    """Mean |log p_trainer - log p_producer| a token, in nats, up to which a producer runs the version that it names
    (protocols/agreement.py); 0 looks at nobody. Honest producers are below 2e-5 in float32; in bfloat16 at 0.01 with
    the built-in model, at up to 0.17 with SmolLM2 where the adapter is merged into bfloat16 weights. One that samples
    from the base instead is at 0.4 after ten steps of the built-in model, at 0.6 after two of SmolLM2."""


class CoordinationSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who generates when, and what becomes of rollouts that are not of the newest version (DESIGN section 9)."""

    mode: Literal["async", "sequential", "auto"] = "async"
    """`async`: peers generate on credits; `sequential`: when the trainer calls; `auto`: the coordinator picks."""
    refresh_gap: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Sequential mode: a peer whose version is further behind than this fetches before it generates."""
    depth: Annotated[int, Meta(ge=1, le=24)] = 1
    """Asynchronous: how many versions ahead of the trainer peers may generate; at most what max_lag allows."""
    stale: Literal["drop", "downweight"] = "drop"
    """What is over the bound is always dropped. `downweight`: what is within it counts less the older it is."""
    lease_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    """How long a coordinator leads without a sign of life."""
    coordinators: Annotated[tuple[PeerId, ...], Meta(max_length=64)] = ()
    """Who may be elected besides the trainers: bootstrap peers."""

    def __post_init__(self) -> None:
        if self.lease_s < 3 * BEAT_S:
            raise ValueError(
                f"lease_s = {self.lease_s:g} is under three beats ({3 * BEAT_S:g} s): two lost beats would end a lease"
            )


class TransferSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How versions travel (DESIGN section 7). What is published is the policy, whatever was lost on the way to it."""

    codec: Literal["auto", "raw", "xor", "ulps", "int8", "int4"] = "auto"
    """`raw`: every version whole. `xor`, `ulps`: lossless deltas. `int8`, `int4`: quantised deltas, the rest is carried
    on to the next. `auto`: lossless deltas, and quantised ones when those would take longer than a step."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the published adapter. What the trainer keeps beyond bfloat16 is carried on to the next version."""
    keyframe_every: Annotated[int, Meta(ge=1, le=10_000)] = 20
    """Versions between two that are offered whole too; sooner when the deltas between them add up to one."""


class Manifest(Struct, frozen=True, kw_only=True, tag="manifest"):
    """One run."""

    run: RunId
    revision: Count
    trainers: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=64)]
    """Only these may announce policies."""
    issued_ms: Millis
    protocol: Label = PROTOCOL
    description: Annotated[str, Meta(max_length=1024)] = ""
    seed: Count = 0
    max_lag: Annotated[int, Meta(ge=0, le=1_000_000)] = 4
    """The staleness bound: no consumed rollout is older than this many optimizer steps."""
    max_steps: Annotated[int, Meta(ge=1, le=100_000_000)] = 1000
    publish_every: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    directory_shards: Annotated[int, Meta(ge=1, le=256)] = 1
    model: ModelSpec = msgspec.field(default_factory=ModelSpec)
    environment: EnvironmentSpec = msgspec.field(default_factory=EnvironmentSpec)
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    lora: LoraSpec = msgspec.field(default_factory=LoraSpec)
    learning: LearningSpec = msgspec.field(default_factory=LearningSpec)
    coordination: CoordinationSpec = msgspec.field(default_factory=CoordinationSpec)
    transfer: TransferSpec = msgspec.field(default_factory=TransferSpec)

    def __post_init__(self) -> None:
        if self.max_lag < self.publish_every - 1:
            raise ValueError(
                f"publish_every {self.publish_every} needs max_lag >= {self.publish_every - 1}: between two versions "
                "the newest grows that old, and nothing could be consumed"
            )
        gap = self.coordination.refresh_gap
        if gap > self.max_lag:
            raise ValueError(f"coordination.refresh_gap {gap} is over max_lag {self.max_lag}")
        if self.coordination.mode != "async" and gap < self.publish_every - 1:
            raise ValueError(
                f"publish_every {self.publish_every} needs coordination.refresh_gap >= {self.publish_every - 1} "
                f"in mode {self.coordination.mode}: between two versions the newest grows that old"
            )
        tokens = self.sampling.group_size * self.sampling.max_new_tokens
        if tokens > GROUP_TOKENS_MAX:
            raise ValueError(
                f"sampling: a group of {self.sampling.group_size} x {self.sampling.max_new_tokens} tokens cannot be "
                f"delivered in one message; group_size * max_new_tokens is at most {GROUP_TOKENS_MAX}"
            )

    @property
    def eligible(self) -> frozenset[str]:
        """Who may lead: the trainers, and whom the owner named."""
        return frozenset(self.trainers) | frozenset(self.coordination.coordinators)

    @property
    def depth(self) -> int:
        """Optimizer steps that peers may generate ahead: one version by default, so that the pipeline does not sit at
        the bound (docs/design.md, section 9)."""
        return min(self.max_lag, self.coordination.depth * self.publish_every)
