"""Which codec `auto` takes: tables of what versions cost, on links of any rate."""

import pytest

from protocols.choice import HOLD_VERSIONS, MARGIN, PROBE_EVERY, Choice, Cost, link_rate

MB = 1_000_000
# A version of 8 MB in bfloat16: about what the codecs make of it on one core.
COSTS = {
    "raw": Cost(0.01, 8 * MB, 0.01),
    "xor": Cost(0.10, 5 * MB // 2, 0.05),
    "ulps": Cost(0.10, 2 * MB, 0.05),
    "int8": Cost(0.15, 3 * MB // 2, 0.05),
    "int4": Cost(0.15, 3 * MB // 4, 0.05),
}


def settled(link: float | None, step_s: float | None, versions: int = 60, costs: dict[str, Cost] = COSTS) -> list[str]:
    """The codec of each version of a run in which nothing drifts, measured as the publisher does it."""
    choice, used = Choice(), []
    choice.learn("raw", costs["raw"])
    for _ in range(versions):
        used.append(choice.pick(link, step_s))
        choice.learn(used[-1], costs[used[-1]])
        other = choice.due()
        if other is not None:
            choice.learn(other, costs[other])
    return used


@pytest.mark.parametrize(
    ("link", "step_s", "codec"),
    [
        (None, None, "ulps"),
        (None, 0.1, "ulps"),  # however long a step is: nothing is given up for a rate that nobody knows
        (1 * MB, None, "ulps"),
        (1e9, 1.0, "raw"),  # 0.03 s, and ulps 0.15 s
        (1e9, 0.001, "raw"),  # nothing fits, and it is the fastest
        (20 * MB, 5.0, "ulps"),  # 0.25 s; raw 0.42 s
        (1 * MB, 5.0, "ulps"),  # 2.15 s
        (1 * MB, 2.0, "ulps"),  # over the step, but not by the margin
        (1 * MB, 1.75, "int8"),  # ulps 2.15 s, int8 1.7 s
        (1 * MB, 1.0, "int4"),  # int8 1.7 s, int4 0.95 s
        (1 * MB, 0.1, "int4"),  # nothing fits, and it is the fastest
        (1000.0, 60.0, "int4"),
    ],
)
def test_a_lossless_way_while_it_fits_into_a_step_then_int8_then_int4(
    link: float | None, step_s: float | None, codec: str
) -> None:
    used = settled(link, step_s)
    assert used[0] == "ulps", "it begins without loss"
    assert used[-1] == codec
    assert len(set(used[3 * HOLD_VERSIONS :])) == 1, "it does not come to rest"


def test_the_same_measurements_give_the_same_choices() -> None:
    assert settled(1 * MB, 1.0) == settled(1 * MB, 1.0)


@pytest.mark.parametrize("step_s", [0.05, 0.3, 0.95, 1.3, 1.7, 2.15, 3.0])
def test_noise_of_a_tenth_does_not_make_it_flip(step_s: float) -> None:
    choice, changes = Choice(), 0
    choice.learn("raw", COSTS["raw"])
    before = "ulps"
    for version in range(400):
        noise = (0.9, 1.0, 1.1)[version % 3]
        codec = choice.pick(MB * (1.1, 0.9)[version % 2], step_s)
        cost = COSTS[codec]
        choice.learn(codec, Cost(cost.encode_s * noise, round(cost.size * noise), cost.decode_s))
        other = choice.due()
        if other is not None:
            choice.learn(other, COSTS[other])
        changes += codec != before
        before = codec
    assert changes <= 3


def test_it_changes_at_most_every_few_versions() -> None:
    used = settled(1 * MB, 1.0)
    changes = [at for at in range(1, len(used)) if used[at] != used[at - 1]]
    assert [used[at] for at in changes] == ["int8", "int4"]
    assert changes[1] - changes[0] >= HOLD_VERSIONS


def test_a_better_codec_comes_back_when_it_fits_again() -> None:
    choice = Choice()
    for codec, cost in COSTS.items():
        choice.learn(codec, cost)

    def run(link: float, step_s: float, costs: dict[str, Cost]) -> str:
        for _ in range(PROBE_EVERY + 3 * HOLD_VERSIONS):
            used = choice.pick(link, step_s)
            choice.learn(used, costs[used])
            other = choice.due()
            if other is not None:
                choice.learn(other, costs[other])
        return used

    assert run(1 * MB, 1.0, COSTS) == "int4"
    assert run(1 * MB, 2.15 * MARGIN - 0.01, COSTS) == "int8", "ulps would fit, but not by the margin"
    assert run(1 * MB, 1.0, COSTS) == "int4"
    smaller = COSTS | {"xor": Cost(0.1, MB // 2, 0.05)}  # adapters have drifted
    assert run(1 * MB, 1.0, smaller) == "xor"


def test_a_link_that_is_no_longer_known_brings_back_the_lossless_way() -> None:
    choice = Choice()
    for codec, cost in COSTS.items():
        choice.learn(codec, cost)
    used = [choice.pick(1 * MB, 0.9) for _ in range(3 * HOLD_VERSIONS)]
    assert used[-1] == "int4"
    used = [choice.pick(None, 0.9) for _ in range(2 * HOLD_VERSIONS)]
    assert used[-1] == "ulps"


def test_what_is_not_in_use_is_measured_now_and_then_and_never_what_is_less_faithful() -> None:
    choice, asked = Choice(), []
    choice.learn("raw", COSTS["raw"])
    for _ in range(3 * PROBE_EVERY):
        used = choice.pick(20 * MB, 5.0)
        choice.learn(used, COSTS[used])
        other = choice.due()
        if other is not None:
            asked.append(other)
            choice.learn(other, COSTS[other])
    assert asked == ["xor"] + ["raw", "xor"] * 2 + ["raw"]
    assert choice.codec == "ulps"


@pytest.mark.parametrize(
    ("claims", "rate"),
    [
        ([], None),
        ([0.0, -5.0], None),
        ([7.0], 7.0),
        ([1.0, 9.0], 1.0),
        ([5.0, 6.0, 7.0, 8.0], 6.0),
        ([0.001, 6.0, 7.0, 8.0], 6.0),  # one of four claims next to nothing
        ([5.0, 6.0, 1e300, 1e300], 6.0),
    ],
)
def test_a_quarter_of_liars_does_not_decide_the_rate(claims: list[float], rate: float | None) -> None:
    assert link_rate(claims) == rate
