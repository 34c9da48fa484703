"""Two processes with one identity: exactly one stays, and a restart is not mistaken for a copy (case B07)."""

import itertools

import pytest

import protocols.presence as presence
from protocols.presence import BEAT_S, RIVALS_MAX, SILENT_S, Sessions
from tests.samples import STRANGER_ID as PEER

LOW, HIGH = bytes(16), bytes([255]) * 16


def test_one_process_is_ok_for_ever() -> None:
    sessions = Sessions()
    assert {sessions.heard(PEER, LOW, BEAT_S * beat) for beat in range(100)} == {"ok"}


@pytest.mark.parametrize("copy", [LOW, HIGH])
def test_b07_a_copy_is_found_within_one_beat_of_the_first(copy: bytes) -> None:
    sessions, first = Sessions(), bytes([7]) * 16
    for beat in range(5):
        assert sessions.heard(PEER, first, BEAT_S * beat) == "ok"
    assert sessions.heard(PEER, copy, 8.5) == "contested"
    assert sessions.heard(PEER, first, 10.0) == "ok"
    assert sessions.heard(PEER, copy, 10.5) == "identity taken"
    assert sessions.heard(PEER, first, 12.0) == "ok"


@pytest.mark.parametrize("restarted", [LOW, HIGH])
def test_b07_killed_and_restarted_at_once_is_fine(restarted: bytes) -> None:
    sessions, first = Sessions(), bytes([7]) * 16
    for beat in range(5):
        sessions.heard(PEER, first, BEAT_S * beat)
    verdicts = [sessions.heard(PEER, restarted, at_s) for at_s in (8.1, 10.1, 12.1, 8.0 + SILENT_S, 16.0)]
    assert verdicts == ["contested", "contested", "contested", "ok", "ok"]


@pytest.mark.parametrize(("early", "late"), itertools.permutations([LOW, HIGH]))
def test_b07_of_two_in_the_same_50_ms_one_wins_at_every_judge(early: bytes, late: bytes) -> None:
    # Method: two judges that hear the two in opposite orders; a session that any judge sends away exits.
    judges = [Sessions(), Sessions()]
    judges[0].heard(PEER, early, 0.0)
    judges[0].heard(PEER, late, 0.05)
    judges[1].heard(PEER, late, 0.0)
    judges[1].heard(PEER, early, 0.05)
    gone: set[bytes] = set()
    for beat in range(1, 6):
        for session, offset_s in ((early, 0.0), (late, 0.05)):
            if session not in gone:
                verdicts = {judge.heard(PEER, session, BEAT_S * beat + offset_s) for judge in judges}
                gone |= {session} if "identity taken" in verdicts else set()
        if beat == 2:
            assert gone == {HIGH}  # within two beats, the same one everywhere
    assert gone == {HIGH}


def test_a_process_that_slept_finds_its_place_taken() -> None:
    sessions, sleeper, heir = Sessions(), bytes([7]) * 16, bytes([9]) * 16
    sessions.heard(PEER, sleeper, 0.0)
    assert sessions.heard(PEER, heir, 10.0) == "ok"
    assert sessions.heard(PEER, sleeper, 20.0) == "ok"  # the heir was silent for three beats itself
    assert sessions.heard(PEER, heir, 20.5) == "contested"
    sessions.heard(PEER, sleeper, 22.0)
    assert sessions.heard(PEER, heir, 22.5) == "identity taken"


def test_identities_do_not_mix() -> None:
    sessions = Sessions()
    assert sessions.heard(PEER, LOW, 0.0) == "ok"
    assert sessions.heard("another", HIGH, 0.0) == "ok"


def test_alive_is_who_was_heard_within_three_beats() -> None:
    sessions = Sessions()
    sessions.heard("old", LOW, 0.0)
    sessions.heard("new", LOW, 1.0)
    assert sessions.alive(0.0 + SILENT_S) == ["new"]
    assert sessions.alive(SILENT_S - 0.1) == ["old", "new"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "IDENTITIES_MAX", 10)
    sessions = Sessions()
    for number in range(50):
        sessions.heard(f"peer {number}", LOW, float(number))
        sessions.heard("peer 0", LOW, float(number))  # who keeps talking stays
    assert len(sessions._holders) == 10
    assert "peer 0" in sessions._holders
    for number in range(100):
        assert sessions.heard("peer 0", number.to_bytes(16, "big") or LOW, 100.0) in ("ok", "contested")
    assert len(sessions._holders["peer 0"].rivals) <= RIVALS_MAX


def test_a_goodbye_frees_the_identity_at_once() -> None:
    sessions = Sessions()
    sessions.heard(PEER, LOW, 10.0)
    sessions.left(PEER, HIGH)  # not the holder's to say
    assert sessions.heard(PEER, HIGH, 13.0) == "contested"
    sessions.left(PEER, LOW)
    sessions.left("nobody", LOW)
    assert sessions.heard(PEER, HIGH, 13.5) == "ok"
