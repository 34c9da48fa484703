"""The bound: lag = steps done - oldest version, and the same inequality at each gate."""

import pytest

from protocols.staleness import admits, lag, room, within_bound


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_the_bound_holds_up_to_and_including_max_lag(max_lag: int) -> None:
    assert [within_bound(10, 10 - age, max_lag) for age in range(7)] == [age <= max_lag for age in range(7)]


def test_lag_counts_optimizer_steps() -> None:
    assert (lag(5, 5), lag(7, 4), lag(0, 0)) == (0, 3, 0)


def test_a_version_from_the_future_is_out_of_bounds() -> None:
    assert not within_bound(3, 4, 10)
    assert not within_bound(0, 2**32 - 1, 10)


def test_gate_1_admits_what_will_still_be_within_the_bound_when_consumed() -> None:
    # 4 groups a step: with 8 ahead of it a group waits 2 steps.
    assert [admits(3, queued, 4, 3, depth=2) for queued in (0, 3, 8, 11, 12)] == [True, True, True, True, False]
    assert not admits(6, 0, 4, 3, depth=2)
    assert admits(3, 3, 4, 3, depth=0)
    assert not admits(3, 4, 4, 3, depth=0)


def test_whatever_gate_1_admits_is_consumed_within_its_depth() -> None:
    # Method: an ideal queue, in order, batch by batch. Each admitted group's lag at its step is at most the depth.
    for batch in (1, 3, 4):
        for depth in (0, 1, 3):
            for steps in range(4):
                for queued in range(20):
                    for version in range(steps + 1):
                        consumed_at = steps + queued // batch
                        admitted = admits(steps, queued, batch, version, depth)
                        assert admitted == within_bound(consumed_at, version, depth)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_room_is_how_often_gate_1_says_yes_in_a_row(depth: int, batch: int) -> None:
    for steps in range(8, 11):
        for version in range(5, steps + 1):
            for queued in range(3 * batch):
                said_yes = 0
                while admits(steps, queued + said_yes, batch, version, depth):
                    said_yes += 1
                assert max(0, room(steps, queued, batch, version, depth)) == said_yes
