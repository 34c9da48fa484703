"""Rollout groups: packing, identity, and the check at the trainer's door.

Token ids and log-probabilities travel as the producer sampled them; text is never encoded again. A
group is invalid for one of a fixed set of reasons, each a counter's label. A missing or non-finite
value is never replaced by a neutral one.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from protocols import PROTOCOL
from protocols.faults import PeerFault
from protocols.messages import RolloutGroup, Sampling

LOGPROB_SLACK = 1e-3  # float32 log-softmax of a certain token may round to just above 0
PROMPT_TOKENS_MAX = 32_768
REWARD_MAX = 1e6  # far over any environment's scale; keeps a group's sums and squares finite in float32


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, unpacked."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    reward: float | None


def pack_ids(ids: Sequence[int]) -> bytes:
    """uint32, little-endian."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(raw: bytes) -> tuple[int, ...]:
    """Raises PeerFault if the bytes are not whole uint32s."""
    return _unpack("I", raw)


def pack_floats(values: Sequence[float]) -> bytes:
    """float32, little-endian."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_floats(raw: bytes) -> tuple[float, ...]:
    """Raises PeerFault if the bytes are not whole float32s."""
    return _unpack("f", raw)


def _unpack(code: str, raw: bytes) -> tuple[Any, ...]:
    if len(raw) % 4:
        raise PeerFault("malformed group", "packed length")
    return struct.unpack(f"<{len(raw) // 4}{code}", raw)


def group_digest(producer: str, group: RolloutGroup) -> bytes:
    """The identity of a group; what receipts and the ledger name. 32 bytes.

    A whole number in a float field (`rewards=(1, 0)`) travels as an integer and arrives as a float; both
    ends hash the float.
    """
    text = f"{PROTOCOL}/group\0{producer}\0".encode()
    rewards = tuple(None if reward is None else float(reward) for reward in group.rewards)
    canonical = msgspec.structs.replace(group, rewards=rewards, temperature=float(group.temperature))
    return hashlib.sha256(text + msgspec.msgpack.encode(canonical)).digest()


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What a group must look like in this run."""

    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]


def unpack_group(group: RolloutGroup, rules: GroupRules) -> list[Rollout]:
    """The completions of a group, each checked. Raises PeerFault with the reason it is invalid for."""
    size = rules.sampling.group_size
    if not size == len(group.lengths) == len(group.truncated) == len(group.rewards):
        raise PeerFault("wrong group size")
    if group.temperature != rules.sampling.temperature:
        raise PeerFault("wrong sampling", f"temperature {group.temperature}")
    if group.oldest_version > group.newest_version:
        raise PeerFault("version span")
    if not 0 < len(group.prompt_ids) <= 4 * PROMPT_TOKENS_MAX:
        raise PeerFault("prompt length")
    prompt, ids, logprobs = unpack_ids(group.prompt_ids), unpack_ids(group.token_ids), unpack_floats(group.logprobs)
    if not sum(group.lengths) == len(ids) == len(logprobs):
        raise PeerFault("lengths disagree", f"{sum(group.lengths)}, {len(ids)} ids, {len(logprobs)} log-probabilities")
    if max(*prompt, *ids, 0) >= rules.vocab_size:
        raise PeerFault("token outside the vocabulary")
    if not all(map(math.isfinite, logprobs)):
        raise PeerFault("log-probability not finite")
    if max(logprobs, default=0.0) > LOGPROB_SLACK:
        raise PeerFault("log-probability above 0")
    if any(reward is not None and not math.isfinite(reward) for reward in group.rewards):
        raise PeerFault("reward not finite")
    if any(reward is not None and abs(reward) > REWARD_MAX for reward in group.rewards):
        raise PeerFault("reward out of range")
    rollouts, at = [], 0
    for length, truncated, reward in zip(group.lengths, group.truncated, group.rewards, strict=True):
        rollout = Rollout(ids[at : at + length], logprobs[at : at + length], truncated, reward)
        _check_ending(rollout, rules)
        rollouts.append(rollout)
        at += length
    return rollouts


def _check_ending(rollout: Rollout, rules: GroupRules) -> None:
    """A completion ends at its first end-of-sequence id, or at max_new_tokens without one."""
    ids, eos = rollout.token_ids, rules.eos_ids
    if not 0 < len(ids) <= rules.sampling.max_new_tokens:
        raise PeerFault("completion length", str(len(ids)))
    if not eos.isdisjoint(ids[:-1]):
        raise PeerFault("tokens after the end")
    if rollout.truncated == (ids[-1] in eos) or (rollout.truncated and len(ids) != rules.sampling.max_new_tokens):
        raise PeerFault("wrong ending")
