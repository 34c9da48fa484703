"""How many chunks a holder lets be on the way, on a clock of its own (protocols/pacing.py)."""

import pytest

from protocols.pacing import (
    AHEAD_S,
    ALLOWED_START,
    ON_THE_WAY_MAX,
    ON_THE_WAY_MIN,
    OVERDUE_MIN_S,
    PEERS_MAX,
    WINDOW_S,
    WINDOWS,
    Pacing,
)

CROWD = [f"peer {number}" for number in range(ON_THE_WAY_MAX)]


def carry(pacing: Pacing, per_s: float, from_s: float, for_s: float, peer: str = "fast") -> float:
    """A link that delivers each chunk before the next, at this rate, to one peer; when it ends."""
    for number in range(round(per_s * for_s)):
        pacing.sent(peer, "its", number, from_s + number / per_s)
        pacing.acknowledged(peer, "its", number, from_s + (number + 1) / per_s)
    return from_s + for_s


def fill(pacing: Pacing, now_s: float, *peers: str) -> int:
    """Send to these in turn as long as there is room for any; how many that were."""
    sent = 0
    while ready := [peer for peer in peers or CROWD if pacing.room(peer, now_s)]:
        pacing.sent(ready[sent % len(ready)], "its", sent, now_s)
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
    assert fill(pacing, 100.0, *CROWD[:3]) == ON_THE_WAY_MIN
    assert not pacing.room("another", 100.1)
    assert pacing.acknowledged(CROWD[0], "its", 0, 100.1) == pytest.approx(0.1)
    assert pacing.room("another", 100.1)
    pacing.sent("another", "its", 0, 100.1)
    assert not pacing.room(CROWD[1], 100.1)


def test_a_peer_gets_as_much_as_it_acknowledges_and_half_of_all_at_most() -> None:
    pacing = Pacing()
    assert fill(pacing, 100.0, "new") == ALLOWED_START
    pacing.left("new", "its")
    now_s = carry(pacing, 100.0, 100.0, 2.0)
    assert fill(pacing, now_s, "fast") == pacing.limit(now_s) // 2
    assert fill(pacing, now_s, *CROWD) == pacing.limit(now_s) - pacing.limit(now_s) // 2


def test_streams_of_one_peer_share_its_allowance() -> None:
    pacing = Pacing()
    for stream in range(ALLOWED_START):
        assert pacing.room("one", 100.0)
        pacing.sent("one", f"stream {stream}", 0, 100.0)
    assert not pacing.room("one", 100.0)
    assert pacing.unacknowledged("one", "stream 0") == [0]


def test_a_chunk_is_acknowledged_once_and_only_if_it_was_sent() -> None:
    pacing = Pacing()
    pacing.sent("a", "its", 7, 100.0)
    assert pacing.acknowledged("b", "its", 7, 100.1) is None, "another peer's"
    assert pacing.acknowledged("a", "other", 7, 100.1) is None, "another stream's"
    assert pacing.acknowledged("a", "its", 8, 100.1) is None
    assert pacing.acknowledged("a", "its", 7, 100.1) is not None
    assert pacing.acknowledged("a", "its", 7, 100.1) is None
    for number in range(100):
        pacing.acknowledged("a", "its", number, 100.1)
    assert pacing.limit(100.1) == ON_THE_WAY_MIN, "what was not sent says nothing of the link"


def test_b27_who_never_acknowledges_holds_the_others_up_once_and_never_again() -> None:
    pacing = Pacing()
    silent = CROWD[: ON_THE_WAY_MIN // ALLOWED_START]
    assert fill(pacing, 100.0, *silent) == ON_THE_WAY_MIN
    assert not pacing.room("other", 100.0 + 0.9 * OVERDUE_MIN_S)
    later_s = 100.0 + 1.1 * OVERDUE_MIN_S
    assert pacing.room("other", later_s)
    assert not any(pacing.room(peer, later_s) for peer in silent), "what they have is enough for them"
    for peer in silent:
        pacing.left(peer, "its")  # and comes again
        assert pacing.room(peer, later_s)
        pacing.sent(peer, "again", 0, later_s)
        assert not pacing.room(peer, later_s), "one at a time"
    assert fill(pacing, later_s, *CROWD[10:]) == ON_THE_WAY_MIN, "and keeps nobody waiting"
    pacing.acknowledged(silent[0], "again", 0, later_s + 1.0)
    assert fill(pacing, later_s + 1.0, silent[0]) == 0, "it counts like the others again"


def test_on_a_slow_link_nobody_is_overdue() -> None:
    pacing = Pacing()
    now_s = 100.0
    for number in range(40):  # 1 Mbit/s, six chunks on the way: each takes twelve seconds
        pacing.sent("slow", "its", number, now_s)
        pacing.acknowledged("slow", "its", number, now_s + 1.9)
        now_s += 2.0
    pacing.sent("slow", "its", 100, now_s)
    assert fill(pacing, now_s + 5.0, "slow", "other", "third") == ON_THE_WAY_MIN - 1


def test_whoever_goes_leaves_its_room_to_the_others() -> None:
    pacing = Pacing()
    assert fill(pacing, 100.0) == ON_THE_WAY_MIN
    pacing.left(CROWD[0], "its")
    assert pacing.unacknowledged(CROWD[0], "its") == []
    assert fill(pacing, 100.0, "new") == 1
    pacing.left(CROWD[0], "its")  # again, as a stream may end twice


def test_what_is_remembered_of_peers_is_bounded() -> None:
    pacing = Pacing()
    for number in range(2 * PEERS_MAX):
        carry(pacing, 1.0, 100.0, 1.0, f"peer {number}")
    assert len(pacing._allowed) == PEERS_MAX
