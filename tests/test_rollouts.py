"""The check at the trainer's door: each kind of nonsense has its reason, and none becomes a number."""

import math

import msgspec
import pytest

from protocols.delivery import INVALID_MAX, Intake
from protocols.envelopes import unseal
from protocols.faults import PeerFault
from protocols.messages import RolloutBatch, RolloutGroup
from protocols.rollouts import (
    PROMPT_TOKENS_MAX,
    Rollout,
    group_digest,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_group,
    unpack_ids,
)
from tests.samples import EOS, RULES, RUN, STRANGER_ID, envelope_of, group

NAN, INF = math.nan, math.inf


def logprobs_with(value: float) -> bytes:
    return pack_floats([-0.5, -0.5, value, -0.5, -0.5, -0.5, -0.5])


def reason_of(group_: RolloutGroup) -> str:
    with pytest.raises(PeerFault) as caught:
        unpack_group(group_, RULES)
    return caught.value.reason


def test_a_good_group_is_unpacked_as_it_was_sampled() -> None:
    assert unpack_group(group(), RULES) == [
        Rollout((1, 2, EOS), (-0.5, -0.5, -0.5), False, 1.0),
        Rollout((4, 5, 6, 7), (-0.5, -0.5, -0.5, -0.5), True, None),
    ]


def test_packing_is_little_endian_and_exact() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert pack_floats([1.0]) == b"\0\0\x80\x3f"
    assert unpack_ids(pack_ids([0, 7, 2**32 - 1])) == (0, 7, 2**32 - 1)
    assert unpack_floats(pack_floats([-0.5, 0.0])) == (-0.5, 0.0)
    for unpack in (unpack_ids, unpack_floats):
        with pytest.raises(PeerFault, match="packed length"):
            unpack(b"12345")


BAD_LOGPROBS = {
    "nan": ({"logprobs": logprobs_with(NAN)}, "log-probability not finite"),
    "inf": ({"logprobs": logprobs_with(INF)}, "log-probability not finite"),
    "-inf": ({"logprobs": logprobs_with(-INF)}, "log-probability not finite"),
    "+0.3": ({"logprobs": logprobs_with(0.3)}, "log-probability above 0"),
    "one too few": ({"logprobs": pack_floats([-0.5] * 6)}, "lengths disagree"),
    "one too many": ({"logprobs": pack_floats([-0.5] * 8)}, "lengths disagree"),
    "none": ({"logprobs": b""}, "lengths disagree"),
    "three bytes": ({"logprobs": logprobs_with(-0.5)[:-1]}, "malformed group"),
}


@pytest.mark.parametrize("name", BAD_LOGPROBS)
def test_b59_bad_log_probabilities_are_refused_with_their_reason(name: str) -> None:
    changes, reason = BAD_LOGPROBS[name]
    assert reason_of(group(**changes)) == reason


@pytest.mark.parametrize("value", [None, "-0.5", [-0.5] * 7, [None] * 7, 0.5], ids=repr)
def test_b59_log_probabilities_of_another_type_do_not_pass_the_door(value: object) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(group()))
    batch = {"type": "rollouts", "run": RUN, "groups": [{**fields, "logprobs": value}]}
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(RolloutBatch, msgspec.msgpack.encode(batch)), RolloutBatch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rewards", ["1.0", None]),
        ("rewards", [True, None]),
        ("rewards", 1.0),
        ("truncated", [0, 1]),
        ("truncated", ["", "x"]),
        ("token_ids", [1, 2, 9]),
        ("lengths", [3.0, 4]),
        ("lengths", [3, -4]),
        ("counter", True),
        ("temperature", "1"),
    ],
)
def test_b59_wrong_types_on_the_wire(field: str, value: object) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(group()))
    batch = {"type": "rollouts", "run": RUN, "groups": [{**fields, field: value}]}
    with pytest.raises(PeerFault, match="malformed envelope"):
        unseal(envelope_of(RolloutBatch, msgspec.msgpack.encode(batch)), RolloutBatch)


def test_b59_the_trainer_goes_on_and_quarantines_after_the_limit() -> None:
    intake = Intake(max_lag=2, batch_groups=4)
    for counter in range(INVALID_MAX):
        intake.admit(STRANGER_ID, 1)
        bad = group(counter=counter, logprobs=logprobs_with(NAN))
        with pytest.raises(PeerFault) as caught:
            unpack_group(bad, RULES)
        receipt = intake.offer(STRANGER_ID, bad, 0, caught.value)
        assert (receipt.outcome, receipt.reason) == ("invalid", "log-probability not finite")
    assert intake.quarantined(STRANGER_ID)
    with pytest.raises(PeerFault, match="quarantined"):
        intake.admit(STRANGER_ID, 1)
    assert intake.reasons == {"log-probability not finite": INVALID_MAX}
    intake.admit("somebody else", 1)
    assert intake.offer("somebody else", group(), 0, None).outcome == "accepted"


@pytest.mark.parametrize("value", [0.0, 5e-4])
def test_a_certain_token_may_round_to_just_above_0(value: float) -> None:
    assert unpack_group(group(logprobs=logprobs_with(value)), RULES)[0].logprobs[2] == pytest.approx(value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lengths": (3,)}, "wrong group size"),
        ({"truncated": (False, True, True)}, "wrong group size"),
        ({"rewards": ()}, "wrong group size"),
        ({"temperature": 0.7}, "wrong sampling"),
        ({"temperature": NAN}, "wrong sampling"),
        ({"oldest_version": 2, "newest_version": 1}, "version span"),
        ({"prompt_ids": b""}, "prompt length"),
        ({"prompt_ids": bytes(4 * PROMPT_TOKENS_MAX + 4)}, "prompt length"),
        ({"prompt_ids": b"12345"}, "malformed group"),
        ({"prompt_ids": pack_ids([10])}, "token outside the vocabulary"),
        ({"token_ids": pack_ids([1, 2, EOS, 4, 5, 6, 10])}, "token outside the vocabulary"),
        ({"token_ids": pack_ids([1, 2, EOS, 4, 5, 6, 2**32 - 1])}, "token outside the vocabulary"),
        ({"lengths": (4, 4)}, "lengths disagree"),
        ({"lengths": (2**32 - 1, 2**32 - 1)}, "lengths disagree"),
        ({"rewards": (NAN, None)}, "reward not finite"),
        ({"rewards": (1.0, -INF)}, "reward not finite"),
        ({"rewards": (1e38, None)}, "reward out of range"),
    ],
)
def test_each_kind_of_nonsense_has_its_reason(changes: dict[str, object], reason: str) -> None:
    assert reason_of(group(**changes)) == reason


@pytest.mark.parametrize(
    ("ids", "lengths", "truncated", "reason"),
    [
        ([1, EOS, 3, 4, 5, 6, 7], (3, 4), (False, True), "tokens after the end"),  # pad == eos: junk behind it
        ([1, 8, EOS, 4, 5, 6, 7], (3, 4), (False, True), "tokens after the end"),  # the other end-of-sequence id
        ([1, 2, 3, 4, 5, 6, 7], (3, 4), (False, True), "wrong ending"),  # stopped, without an end
        ([1, 2, 3, 4, 5, 6, 7], (3, 4), (True, True), "wrong ending"),  # truncated before max_new_tokens
        ([1, 2, EOS, 4, 5, 6, EOS], (3, 4), (False, True), "wrong ending"),  # ended, and called truncated
        ([1, 2, EOS, 4, 5, 6, 7], (3, 4), (False, False), "wrong ending"),
        ([1, 2, 3, 4, EOS, 6, 7], (5, 2), (False, True), "completion length"),
        ([1, 2, 3, 4], (0, 4), (True, True), "completion length"),  # an empty completion
    ],
)
def test_b67_a_completion_ends_at_its_first_end_or_at_the_limit(
    ids: list[int], lengths: tuple[int, int], truncated: tuple[bool, bool], reason: str
) -> None:
    bent = group(token_ids=pack_ids(ids), lengths=lengths, truncated=truncated, logprobs=pack_floats([-0.5] * len(ids)))
    assert reason_of(bent) == reason


@pytest.mark.parametrize("last", [EOS, 8])
def test_b67_either_end_of_sequence_id_ends_even_at_the_limit(last: int) -> None:
    ended = group(token_ids=pack_ids([1, 2, EOS, 4, 5, 6, last]), truncated=(False, False))
    assert [rollout.truncated for rollout in unpack_group(ended, RULES)] == [False, False]


def test_both_ends_of_the_wire_agree_on_a_digest() -> None:
    # A whole number in a float field is an int for its writer and a float for its reader.
    sent = group(rewards=(1, 0), temperature=1)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=RolloutGroup)
    assert group_digest(STRANGER_ID, sent) == group_digest(STRANGER_ID, received)


def test_a_digest_covers_producer_and_every_field() -> None:
    changed = [
        group(counter=1),
        group(oldest_version=1, newest_version=1),
        group(newest_version=1),
        group(adapter=bytes([1]) * 32),
        group(prompt_ids=pack_ids([1, 2])),
        group(lengths=(4, 3)),
        group(token_ids=pack_ids([1, 2, EOS, 4, 5, 6, 6])),
        group(logprobs=logprobs_with(-0.25)),
        group(truncated=(True, False)),
        group(rewards=(1.0, 0.0)),
        group(rewards=(None, 1.0)),
        group(temperature=0.5),
        group(engine="other"),
    ]
    assert (
        len({group_digest(STRANGER_ID, each) for each in [group(), *changed]} | {group_digest("else", group())}) == 15
    )


def test_s7_mutated_groups_raise_peer_faults_only() -> None:
    raw = bytearray(msgspec.msgpack.encode(group()))
    refused = 0
    for at in range(len(raw)):
        for mask in (1, 0x80, 0xFF):
            bent = bytearray(raw)
            bent[at] ^= mask
            try:
                unpack_group(msgspec.msgpack.decode(bytes(bent), type=RolloutGroup), RULES)
            except (PeerFault, msgspec.MsgspecError):
                refused += 1
    assert refused > len(raw)
