"""`run.toml`: what the owner of a run writes; from it and the owner's key comes the signed manifest.

    run.toml --load_config--> RunConfig --to_manifest--> Sealed[Manifest]
             <--render_config--

Sections and fields are those of `protocols/manifest.py`, which also checks what must go together. A typo, a
wrong type, or values that do not go together are a ValueError of one line that names the file and the field.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta, Struct

from protocols.envelopes import KINDS, Sealed, seal
from protocols.faults import PeerFault
from protocols.identity import RUN_NAME, public_bytes, public_of, run_id_of
from protocols.manifest import (
    CoordinationSpec,
    EnvironmentSpec,
    LearningSpec,
    LoraSpec,
    Manifest,
    ModelSpec,
    TransferSpec,
)
from protocols.messages import Count, PeerId, Sampling

_ENVELOPE_BYTES = 128  # sender, signature and MessagePack heads around a manifest: 104


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base model. Digests and the hub's commit are not written by hand: the trainer finds them."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] = "builtin"
    revision: Annotated[str, Meta(max_length=256)] = ""


class NetworkSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the trainer finds the swarm; not part of the manifest."""

    bootstrap: tuple[str, ...] = ()


class EvaluationSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the trainer measures on held-out problems; not part of the manifest."""

    problems: Annotated[int, Meta(ge=0, le=100_000)] = 200
    every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `run.toml`."""

    name: str
    trainers: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=64)]
    description: Annotated[str, Meta(max_length=1024)] = ""
    seed: Count = 0
    max_lag: Annotated[int, Meta(ge=0, le=1_000_000)] = 4
    max_steps: Annotated[int, Meta(ge=1, le=100_000_000)] = 1000
    publish_every: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    model: ModelSection = msgspec.field(default_factory=ModelSection)
    environment: EnvironmentSpec = msgspec.field(default_factory=EnvironmentSpec)
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    lora: LoraSpec = msgspec.field(default_factory=LoraSpec)
    learning: LearningSpec = msgspec.field(default_factory=LearningSpec)
    coordination: CoordinationSpec = msgspec.field(default_factory=CoordinationSpec)
    transfer: TransferSpec = msgspec.field(default_factory=TransferSpec)
    network: NetworkSection = msgspec.field(default_factory=NetworkSection)
    evaluation: EvaluationSection = msgspec.field(default_factory=EvaluationSection)

    def __post_init__(self) -> None:
        if not RUN_NAME.match(self.name):
            raise ValueError(f"name {self.name!r}: use lower-case letters, digits and '-', at most 64, no '-' first")
        _check_ids("trainers", self.trainers)
        _check_ids("coordination.coordinators", self.coordination.coordinators)
        _manifest(self)  # its own checks: they hold for every manifest, wherever it comes from
        if self.publish_every > self.max_steps:
            raise ValueError(f"publish_every = {self.publish_every} is over max_steps = {self.max_steps}")
        if len(set(self.lora.targets)) < max(1, len(self.lora.targets)):
            raise ValueError("lora.targets: give at least one module name, and each once")
        if "{" not in self.environment.prompt:
            raise ValueError("environment.prompt has no {question}: every problem would look the same")
        for path, value in _leaves("", msgspec.to_builtins(self)):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{path} must be a finite number, it is {value}")
        for path, value in _leaves("environment.params", self.environment.params):
            if not isinstance(value, str | bool | float) and not (isinstance(value, int) and abs(value) < 2**63):
                raise ValueError(f"{path}: use numbers, strings, true, false, lists and tables only")


def _check_ids(path: str, peer_ids: Sequence[str]) -> None:
    for peer_id in peer_ids:
        try:
            public_of(peer_id)
        except PeerFault:
            raise ValueError(f"{path}: {peer_id!r} is not the peer id of an Ed25519 key") from None
    if len(set(peer_ids)) < len(peer_ids):
        raise ValueError(f"{path}: one peer id stands there twice")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value that is no list or table, with its dotted path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(path, inner)
    else:
        yield path, value


def decode_config(text: str | bytes, source: str) -> RunConfig:
    """The configuration in TOML text. Raises ValueError, one line that begins with `source`."""
    try:
        return msgspec.toml.decode(text, type=RunConfig)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def load_config(path: Path) -> RunConfig:
    """Read `run.toml`. Raises ValueError as `decode_config` does, OSError when the file cannot be read."""
    return decode_config(path.read_bytes(), str(path))


def to_manifest(
    config: RunConfig,
    owner_key: Ed25519PrivateKey,
    revision: int,
    issued_ms: int,
    model: ModelSpec | None = None,
    coordinators: Sequence[str] = (),
) -> Sealed[Manifest]:
    """The manifest of this configuration, signed. Raises ValueError when it is too large to be published.

    `model` is what the trainer found on its disk; without it only the name is there.
    `coordinators` may be elected where the configuration names nobody: the trainer's bootstrap peers.
    """
    coordination = config.coordination
    if not coordination.coordinators:
        coordination = msgspec.structs.replace(coordination, coordinators=tuple(coordinators))
    manifest = msgspec.structs.replace(
        _manifest(config, model),
        run=run_id_of(config.name, public_bytes(owner_key)),
        revision=revision,
        issued_ms=issued_ms,
        coordination=coordination,
    )
    size, size_max = len(msgspec.msgpack.encode(manifest)), KINDS[Manifest][1] - _ENVELOPE_BYTES
    if size > size_max:
        raise ValueError(f"the manifest is {size} bytes, at most {size_max} fit: shorten environment")
    return seal(owner_key, manifest)


def _manifest(config: RunConfig, model: ModelSpec | None = None) -> Manifest:
    """What the file says, of no run yet. Raises ValueError when its fields do not go together."""
    return Manifest(
        run="",
        revision=0,
        issued_ms=0,
        trainers=config.trainers,
        description=config.description,
        seed=config.seed,
        max_lag=config.max_lag,
        max_steps=config.max_steps,
        publish_every=config.publish_every,
        model=model or ModelSpec(name=config.model.name),
        environment=config.environment,
        sampling=config.sampling,
        lora=config.lora,
        learning=config.learning,
        coordination=config.coordination,
        transfer=config.transfer,
    )


# What each field means, for `swarm init`. Key: dotted path. A test holds this table and the types together.
COMMENTS = {
    "name": "First part of the run id; the second part is the hash of owner.key.",
    "trainers": "Peer ids that may announce new versions of the policy. `swarm init` puts trainer/peer.key here.",
    "description": "For people who are invited.",
    "seed": "Decides which problems each peer gets, and the held-out ones. Any number from 0 to 4294967295.",
    "max_lag": (
        "The staleness bound: nothing is trained on a rollout that is more optimizer steps old than this. "
        "It cannot change once the run has started. 0 is on-policy; larger values let slow peers help."
    ),
    "max_steps": "Optimizer steps of the whole run; then everybody goes home.",
    "publish_every": "Optimizer steps between two published versions; at most max_lag + 1.",
    "model.name": (
        "`builtin` (a small model of our own, for trying out), `smollm2`, a Hugging Face name, or a folder."
    ),
    "model.revision": (
        "Of a Hugging Face name: a commit, a tag or a branch; empty: what this machine has, else the newest. The run "
        "keeps the commit that it began with."
    ),
    "environment.name": "Where problems come from: a reasoning-gym task, or `module:function` of your own.",
    "environment.prompt": "The prompt; {question} and the fields of the problem are filled in.",
    "environment.params": "Parameters of the task, as reasoning-gym names them.",
    "environment.chat": (
        "Prompts are messages of a user: they go through the model's chat template. For instruct models; "
        "a base model has no template."
    ),
    "environment.system": "With chat: the system's message. Empty: none, unless the template has its own.",
    "environment.examples": (
        "With chat: questions and answers that are shown before, as earlier turns; each text has at most 1024 "
        'characters: [["1 + 1 =", "2"]].'
    ),
    "environment.template": "With chat: a Jinja template in place of the model's own.",
    "sampling.group_size": "Completions of one problem. Their mean reward is the baseline.",
    "sampling.max_new_tokens": "Longest completion, in tokens.",
    "sampling.temperature": "Sampling temperature; 1.0 samples from the model as it is.",
    "sampling.top_p": "Must stay 1.0: cutting the distribution would falsify importance ratios.",
    "sampling.top_k": "Must stay 0, for the same reason.",
    "sampling.min_p": "Must stay 0.0, for the same reason.",
    "lora.r": "Rank of the adapter that is trained and sent around.",
    "lora.alpha": "The adapter's output is scaled by alpha / r.",
    "lora.targets": "Modules that get an adapter.",
    "learning.loss": "The loss; `grpo` is the one there is.",
    "learning.learning_rate": "Step size of the optimizer (AdamW).",
    "learning.batch_groups": "Groups that one optimizer step consumes.",
    "learning.clip_low": "The ratio of new to old probability is clipped at 1 - clip_low ...",
    "learning.clip_high": "... and at 1 + clip_high.",
    "learning.importance_cap": "Rollouts of older versions are weighted by their probability ratio, at most this.",
    "learning.kl_beta": "Weight of the KL penalty towards the base model; 0.0 turns it off.",
    "learning.max_grad_norm": "Gradients are scaled down to this norm.",
    "learning.mask_truncated": "Leave completions that ran into max_new_tokens out of the loss.",
    "learning.gap_max": (
        "The trainer computes some log-probabilities again, under the version that the rollout names. A producer whose "
        "mean difference is over this, in nats a token, does not run that version and is refused; 0.0 looks at nobody."
    ),
    "coordination.mode": (
        "When peers generate. `async`: all the time, as far ahead as they have credit. `sequential`: when the trainer "
        "calls. `auto`: the coordinator picks by measured rates."
    ),
    "coordination.refresh_gap": (
        "In sequential mode: a peer whose version is more steps behind than this fetches the newest first; "
        "at most max_lag."
    ),
    "coordination.depth": (
        "In asynchronous mode: versions that peers may generate ahead of the trainer. 1 keeps everybody busy; more "
        "only makes rollouts older, unless steps or peers are very uneven."
    ),
    "coordination.stale": (
        "Rollouts over max_lag are dropped in any case. `drop`: those within it count in full; "
        "`downweight`: 1 / (1 + lag) each."
    ),
    "coordination.lease_s": "Seconds that a coordinator leads without a sign of life; at least 6, three heartbeats.",
    "coordination.coordinators": (
        "Peer ids that may be elected besides the trainers; none: the bootstrap peers that the trainer starts with."
    ),
    "transfer.codec": (
        "How a version travels to peers that have the one before. `ulps`, `xor`: what changed, nothing is lost. "
        "`int8`, `int4`: rounded changes, smaller; what they leave out is carried on to the next version. `raw`: "
        "whole. `auto`: without loss, unless that takes longer than a step."
    ),
    "transfer.dtype": (
        "Of the published adapter. It cannot change once the run has started; float32 is twice the size of bfloat16 "
        "and rounds nothing."
    ),
    "transfer.keyframe_every": (
        "Versions between two that are offered whole too, for peers that come late; sooner when the changes between "
        "them add up to as much."
    ),
    "network.bootstrap": 'Addresses of bootstrap peers, as `swarm bootstrap` prints them: ["/ip4/.../p2p/..."].',
    "evaluation.problems": "Held-out problems that the trainer answers greedily; 0 measures nothing.",
    "evaluation.every": "Steps between two measurements; 0 measures before the first step and after the last.",
}

_HEAD = """\
# A run of Echo swarm. Every field is here; those that you delete get their default.
# A typo is an error, never ignored: nothing starts before this file is right.
"""
_COMMENT_WIDTH = 100


def render_config(config: RunConfig) -> str:
    """The TOML text of a configuration, each field under a comment. `decode_config` gives the same back."""
    lines = [_HEAD]
    sections = []
    for field in msgspec.structs.fields(RunConfig):
        value = getattr(config, field.name)
        if isinstance(value, Struct):
            sections.append((field.name, value))
        else:
            lines += _render_field(field.name, field, value)
    for name, section in sections:
        lines += [f"[{name}]", ""]
        for field in msgspec.structs.fields(type(section)):
            lines += _render_field(f"{name}.{field.name}", field, getattr(section, field.name))
    return "\n".join(lines).rstrip() + "\n"


def _render_field(path: str, field: Any, value: Any) -> list[str]:
    words, rows = COMMENTS[path].split(" "), ["#"]
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if default is not msgspec.NODEFAULT:
        words.append(f"Default: {_toml(default)}")
    for word in words:
        if len(rows[-1]) + 1 + len(word) > _COMMENT_WIDTH:
            rows.append("#")
        rows[-1] += f" {word}"
    return [*rows, f"{field.name} = {_toml(value)}", ""]


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():  # a JSON string is a TOML basic string, but for DEL
            return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict() if not value:
            return "{}"
        case dict():
            return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items()) + " }"
        case _:
            raise TypeError(f"no TOML for {type(value).__name__}")
