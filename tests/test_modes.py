"""Mode `auto`: the provisioning rule in numbers, with margins, a hold and a dwell."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.messages import Mode
from protocols.modes import DWELL_S, HOLD_S, MARGIN, Measured, ModeChoice, Switch, median
from protocols.presence import BEAT_S


def measured(rate: float, need: float = 8.0) -> Measured:
    """One step of 10 groups in 2 s less a broadcast of 2 - 10 / need seconds."""
    return Measured(rate, batch_groups=10, step_s=2.0, refresh_s=2.0 - 10 / need, publish_every=1)


def test_the_rule_is_k_r_over_k_t_less_b() -> None:
    assert Measured(0.0, batch_groups=32, step_s=4.0, refresh_s=0.0, publish_every=1).needed_per_s == 8.0
    assert Measured(0.0, batch_groups=32, step_s=4.0, refresh_s=2.0, publish_every=1).needed_per_s == 16.0
    assert Measured(0.0, batch_groups=32, step_s=4.0, refresh_s=2.0, publish_every=4).needed_per_s == 128 / 14
    assert measured(0.0).needed_per_s == 8.0


@pytest.mark.parametrize("refresh_s", [4.0, 5.0])
def test_no_rate_is_enough_when_versions_arrive_slower_than_they_are_made(refresh_s: float) -> None:
    asked = Measured(1e300, batch_groups=32, step_s=4.0, refresh_s=refresh_s, publish_every=1)
    assert asked.needed_per_s == math.inf
    choice = ModeChoice("async", 0.0)
    assert choice.observe(asked, DWELL_S) is None
    assert choice.observe(asked, DWELL_S + HOLD_S) == Switch("sequential", asked)


@pytest.mark.parametrize(
    ("mode", "rate", "then"),
    [
        ("async", 8.0, "async"),
        ("async", 8.0 / MARGIN + 0.01, "async"),
        ("async", 8.0 / MARGIN - 0.01, "sequential"),
        ("async", 0.0, "sequential"),
        ("sequential", 8.0, "sequential"),
        ("sequential", 8.0 * MARGIN - 0.01, "sequential"),
        ("sequential", 8.0 * MARGIN, "async"),
    ],
)
def test_between_the_margins_it_stays_as_it_is(mode: Mode, rate: float, then: Mode) -> None:
    choice = ModeChoice(mode, 0.0)
    for number in range(60):
        choice.observe(measured(rate), number * BEAT_S)
    assert choice.mode == then


def test_an_answer_must_hold_before_it_counts() -> None:
    choice = ModeChoice("async", -DWELL_S)
    now_s = 0.0
    for _ in range(20):  # five beats of too slow, but for one
        for rate in (1.0, 1.0, 1.0, 1.0, 9.0):
            assert choice.observe(measured(rate), now_s) is None
            now_s += BEAT_S
    slow_s = now_s
    while choice.observe(measured(1.0), now_s) is None:
        now_s += BEAT_S
    assert now_s == slow_s + HOLD_S
    assert choice.mode == "sequential"


def test_a_new_coordinator_stays_with_the_mode_for_a_while() -> None:
    choice = ModeChoice("sequential", 100.0)
    seen = [choice.observe(measured(100.0), 100.0 + number * BEAT_S) for number in range(20)]
    assert [number * BEAT_S for number, switch in enumerate(seen) if switch is not None] == [DWELL_S]


@given(st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 1e6)), max_size=100), st.sampled_from([HOLD_S, 0.0]))
def test_whatever_rates_flap_it_switches_once_in_a_dwell_at_most(
    rates: list[tuple[float, float]], lull_s: float
) -> None:
    choice, now_s, switches_s = ModeChoice("async", 0.0), 0.0, [0.0]
    for wait_s, rate in rates:
        now_s += wait_s + lull_s
        before = choice.mode
        switch = choice.observe(measured(rate), now_s)
        assert (switch is not None) == (choice.mode != before)
        if switch is not None:
            assert switch.mode == choice.mode
            switches_s.append(now_s)
    assert all(later - sooner >= DWELL_S for sooner, later in itertools.pairwise(switches_s))


def test_the_fastest_flapping_that_counts_at_all_switches_each_dwell() -> None:
    choice, switches = ModeChoice("async", 0.0), 0
    for number in range(150):  # 300 s: too slow and fast enough, in turns of 30 s
        rate = 100.0 if number // 15 % 2 else 0.0
        switches += choice.observe(measured(rate), number * BEAT_S) is not None
    assert 5 <= switches <= 300 / DWELL_S


def test_the_lower_median_and_none_of_nothing() -> None:
    assert median([]) is None
    assert [median(values) for values in ([3.0], [1.0, 9.0], [9.0, 1.0, 2.0])] == [3.0, 1.0, 2.0]
