"""How many chunks a holder lets be on the way, on a clock of its own (protocols/pacing.py)."""

import pytest

from protocols.pacing import AHEAD_S, ON_THE_WAY_MAX, ON_THE_WAY_MIN, OVERDUE_S, WINDOW_S, WINDOWS, Pacing


def carry(pacing: Pacing, per_s: float, from_s: float, for_s: float) -> float:
    """A link that delivers each chunk before the next, at this rate, to one asker; when it ends."""
    for number in range(round(per_s * for_s)):
        pacing.sent("fast", number, from_s + number / per_s)
        pacing.acknowledged("fast", number, from_s + (number + 1) / per_s)
    return from_s + for_s


def fill(pacing: Pacing, now_s: float, asker: str = "a") -> int:
    """Send as long as there is room; how many that were."""
    sent = 0
    while pacing.room(now_s):
        pacing.sent(asker, sent, now_s)
        sent += 1
    return sent


@pytest.mark.parametrize(
    ("per_s", "limit"), [(0, ON_THE_WAY_MIN), (8, ON_THE_WAY_MIN), (40, 16), (100, 40), (1000, ON_THE_WAY_MAX)]
)
def test_the_limit_follows_the_rate_between_its_bounds(per_s: float, limit: int) -> None:
    pacing = Pacing()
    now_s = carry(pacing, per_s, 100.0, 2.0)
    assert pacing.limit(now_s) == pytest.approx(limit, abs=AHEAD_S / WINDOW_S)  # a chunk more or less in a window
    assert fill(pacing, now_s) == pacing.limit(now_s)


def test_a_pause_is_not_a_slower_link_but_a_long_one_is_forgotten() -> None:
    pacing = Pacing()
    now_s = carry(pacing, 100.0, 100.0, 2.0)
    busy = pacing.limit(now_s)
    assert pacing.limit(now_s + (WINDOWS - 2) * WINDOW_S) == busy
    assert pacing.limit(now_s + (WINDOWS + 1) * WINDOW_S) == ON_THE_WAY_MIN


def test_a_link_that_becomes_slower_lowers_the_limit() -> None:
    pacing = Pacing()
    now_s = carry(pacing, 100.0, 100.0, 2.0)
    now_s = carry(pacing, 24.0, now_s, 1.0)
    assert pacing.limit(now_s) == pytest.approx(40, abs=2)
    now_s = carry(pacing, 24.0, now_s, 2.0)
    assert pacing.limit(now_s) == pytest.approx(10, abs=2)


def test_what_arrives_makes_room_for_as_much() -> None:
    pacing = Pacing()
    assert fill(pacing, 100.0) == ON_THE_WAY_MIN
    assert pacing.acknowledged("a", 2, 100.1) == pytest.approx(0.1)
    assert pacing.unacknowledged("a") == [0, 1, 3, 4, 5]
    assert pacing.room(100.1)
    pacing.sent("b", 2, 100.1)
    assert not pacing.room(100.1)


def test_a_chunk_is_acknowledged_once_and_only_if_it_was_sent() -> None:
    pacing = Pacing()
    pacing.sent("a", 7, 100.0)
    assert pacing.acknowledged("b", 7, 100.1) is None, "another asker's"
    assert pacing.acknowledged("a", 8, 100.1) is None
    assert pacing.acknowledged("a", 7, 100.1) is not None
    assert pacing.acknowledged("a", 7, 100.1) is None
    for number in range(100):
        pacing.acknowledged("a", number, 100.1)
    assert pacing.limit(100.1) == ON_THE_WAY_MIN, "what was not sent says nothing of the link"


def test_b27_a_silent_asker_does_not_keep_the_others_waiting() -> None:
    # Goal: whoever takes chunks and never says so holds up the rest for OVERDUE_S, and each refill once more.
    pacing = Pacing()
    fill(pacing, 100.0, "silent")
    assert not pacing.room(100.0 + 0.9 * OVERDUE_S)
    later_s = 100.0 + OVERDUE_S
    assert fill(pacing, later_s, "other") == ON_THE_WAY_MIN
    assert len(pacing.unacknowledged("silent")) == ON_THE_WAY_MIN, "they may still arrive"
    assert pacing.acknowledged("silent", 0, later_s + 1.0) == pytest.approx(OVERDUE_S + 1.0)


def test_whoever_goes_leaves_its_room_to_the_others() -> None:
    pacing = Pacing()
    for index in range(ON_THE_WAY_MIN - 1):
        pacing.sent("gone", index, 100.0)
    pacing.sent("stays", 0, 100.0)
    assert not pacing.room(100.0)
    pacing.left("gone")
    assert pacing.unacknowledged("gone") == []
    assert pacing.unacknowledged("stays") == [0]
    assert fill(pacing, 100.0, "new") == ON_THE_WAY_MIN - 1
    pacing.left("gone")  # again, as a stream may end twice
