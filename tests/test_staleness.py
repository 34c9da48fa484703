"""The bound: lag = steps done - oldest version, and the same inequality at each gate."""

import pytest

from protocols.staleness import lag, room, within_bound


def admits(steps: int, queued: int, batch: int, version: int, depth: int) -> bool:
    return room(steps, queued, batch, version, depth) > 0


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


def test_room_is_what_is_left_of_the_batches_ahead() -> None:
    assert room(3, queued=5, batch=4, version=3, depth=1) == 3
    assert room(4, queued=5, batch=4, version=3, depth=1) == -1
    assert room(0, queued=31, batch=32, version=0, depth=0) == 1


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
