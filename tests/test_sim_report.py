"""The simulation's processes, the state and picture made of their events, and the report.

The children here are one small script that behaves as EVENTS say: it writes metrics and a real ledger, and
misbehaves on request. So starting, watching and ending processes is tested without a network.
"""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.config import RunConfig
from bootstrap.errors import Failed
from bootstrap.events import Event, Tail, read_events
from bootstrap.report import About, about_run, build_report, summary_lines
from bootstrap.sim import SimOptions, simulate
from bootstrap.state import DONE, GENERATING, GONE, READY, TRAINING, SwarmState
from bootstrap.view import JsonLines, PlainLines, duration, render, size, sparkline
from protocols.ledger import Audit
from protocols.manifest import CoordinationSpec

ROOT = Path(__file__).parent.parent


def event(kind: str, t: float = 0.0, peer: str = "T", role: str = "trainer", **fields: Any) -> Event:
    return {"t": t, "peer": peer, "role": role, "event": kind, **fields}


def step(number: int, t: float = 0.0, reward: float | None = 0.5, **fields: Any) -> Event:
    return event("step", t, step=number, version=number, reward=reward, **({"skipped": None} | fields))


# ---------------------------------------------------------------------- reading


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    first, second = (json.dumps(event("step", number)) + "\n" for number in (1.0, 2.0))
    path.write_text(first + second[:10])
    assert [one["t"] for one in tail.read()] == [1.0]
    with path.open("a") as file:
        file.write(second[10:] + '{"torn\n[1]\n{"no": "event"}\n')
    assert [one["t"] for one in tail.read()] == [2.0]
    assert tail.read() == []
    path.write_text(first)  # rotated
    assert [one["t"] for one in tail.read()] == [1.0]


def test_a_tail_can_leave_out_an_earlier_start_and_a_reader_takes_the_rotated_file_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(event("ready", 2.0)) + "\n")
    (tmp_path / "metrics.old.jsonl").write_text(json.dumps(event("ready", 1.0)) + "\n")
    assert Tail(path, skip_existing=True).read() == []
    assert [one["t"] for one in read_events(path)] == [1.0, 2.0]
    assert read_events(tmp_path / "nothing.jsonl") == []


# ---------------------------------------------------------------------- state


def state_of(*events: Event, steps: int | None = None) -> SwarmState:
    state = SwarmState(steps=steps)
    for one in events:
        state.apply(one)
    return state


def test_nothing_reported_is_nothing_known() -> None:
    state = state_of(event("unheard of", x=1))
    assert state.peers == {}
    assert (state.version, state.lag, state.loss, state.queued, state.tokens_per_s) == (None,) * 5
    assert state.seconds_left(0.0) is None


def test_steps_add_up() -> None:
    state = state_of(
        step(1, 10.0, 0.2, loss=0.1, lag_max=3, queued=5),
        step(1, 12.0, None, skipped="no signal", lag_max=1),
        step(2, 14.0, 0.4, loss=0.05, lag_max=1, queued=0),
        steps=10,
    )
    assert (state.step, state.version, state.lag, state.lag_max) == (2, 2, 1, 3)
    assert state.rewards == [0.2, None, 0.4]
    assert state.skipped == {"no signal": 1}
    assert (state.loss, state.queued, state.peers["T"].state) == (0.05, 0, TRAINING)


def test_the_remaining_time_comes_from_the_last_steps() -> None:
    state = state_of(*(step(number, 100.0 + 2 * number) for number in range(1, 31)), steps=50)
    assert state.seconds_left(160.0) == pytest.approx(40.0)
    assert state.seconds_left(161.5) == pytest.approx(38.5)  # the next step is under way
    assert state.seconds_left(1e6) == 0.0
    assert state_of(step(1, 5.0), steps=9).seconds_left(6.0) is None


def test_what_a_peer_says_of_itself_counts_more_than_what_the_trainer_heard() -> None:
    heard = {"peer_id": "I", "role": "inference", "version": 1, "tokens_per_s": 5.0, "engine": "e", "silent_s": 9.0}
    state = state_of(event("peers", peers=[heard]))
    row = state.peers["I"]
    assert (row.state, row.version, row.tokens_per_s, row.engine, row.silent_s) == (READY, 1, 5.0, "e", 9.0)
    state.apply(event("generated", peer="I", role="inference", groups=3, tokens_per_s=50.0, version=2))
    state.apply(event("peers", peers=[heard]))
    assert (row.state, row.version, row.tokens_per_s) == (GENERATING, 2, 50.0)
    assert state.tokens_per_s == 50.0


def test_a_peer_s_life() -> None:
    about = {"peer": "I", "role": "inference"}
    state = state_of(event("ready", **about))
    assert state.peers["I"].state == READY
    state.apply(event("adapter", version=4, **about))
    assert state.peers["I"].version == 4
    state.apply(event("generated", groups=6, version=4, **about))
    assert (state.generated, state.tokens_per_s) == (6, None)
    state.apply(event("final", version=5, generated=8, receipts={"accepted": 7}, **about))
    assert state.generated == 8
    assert (state.peers["I"].state, state.receipts) == (DONE, {"accepted": 7})
    state.gone("I")
    state.gone("never seen")
    assert state.peers["I"].state == GONE


def test_warnings_are_kept_once_and_the_newest_few() -> None:
    said = ["a", "b", "a", "c", "d"]
    state = state_of(*(event("warning", float(at), code="x", text=text) for at, text in enumerate(said)))
    assert state.warnings == {"a": 2.0, "c": 3.0, "d": 4.0}


def test_evaluations_and_refusals() -> None:
    state = state_of(
        event("eval", step=0, greedy=0.25, problems=200),
        event("refused", door="dht", reason="old head", count=1),
        event("refused", door="dht", reason="old head", count=4),
        event("eval", step=9, greedy=0.5, problems=200),
        event("loop", lag_p50_ms=1.0, lag_p99_ms=7.0),
    )
    assert state.evals == [(0, 0.25), (9, 0.5)]
    assert list(state.refused.values()) == [4]
    assert state.loop_lag_p99_ms == 7.0


# ---------------------------------------------------------------------- pictures and lines


def picture(state: SwarmState, now_s: float = 0.0, width: int = 110) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(render(state, now_s, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_shows_what_is_known() -> None:
    state = state_of(
        event("ready", peer="x" * 44 + "boot1234", role="bootstrap"),
        event("generated", peer="x" * 44 + "infer123", role="inference", groups=3, tokens_per_s=812.4, version=7),
        step(7, 10.0, 0.25, loss=-0.0123, lag_max=2, queued=12),
        step(8, 11.0, 0.75, loss=-0.01, lag_max=1, queued=12),
        event("eval", step=0, greedy=0.231, problems=200),
        event("warning", 5.0, code="x", text="bootstrap unreachable since 12:01:07"),
        steps=10,
    )
    text = picture(state, now_s=11.0)
    assert "boot1234" in text
    assert "infer123   inference        v7        812   generating" in text
    assert "step 8/10" in text
    assert "2 s left" in text
    assert "reward ▁█ 0.750" in text
    assert "version v8  lag 1 (most 2)  tokens/s 812  generated 3  queued 12  loss -0.0100  held-out 23.1%" in text
    assert "! bootstrap unreachable since 12:01:07" in text
    assert "unreachable" not in picture(state, now_s=70.0)
    assert max(map(len, picture(state, width=40).splitlines())) <= 40
    assert "silent 8 s" in picture(
        state_of(event("peers", peers=[{"peer_id": "p", "role": "inference", "silent_s": 8.2}]))
    )


def test_a_sparkline_leaves_gaps_where_nothing_is_known() -> None:
    assert sparkline([0.0, None, 1.0], 10) == "▁ █"
    assert sparkline([0.3, 0.3], 10) == "▁▁"
    assert sparkline([float(number) for number in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([None], 4) == " "


def test_plain_lines_are_few() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.show([step(number, 100.0 + number / 10, lag_max=0, loss=0.5) for number in range(1, 42)])
    lines.show(
        [event("loop", lag_p99_ms=1.0), event("peers", peers=[]), event("final", counts={"trained": 3, "stale": 0})]
    )
    shown = [line.split("  ")[1:] for line in stream.getvalue().splitlines()]
    assert [line[0] for line in shown] == ["step 1", "step 21", "step 41", "done: 3 trained"]
    assert shown[0] == ["step 1", "v1", "reward 0.500", "loss 0.5000", "lag 0"]


def leader(peer: str, coordinator: str | None, term: int, t: float = 0.0) -> Event:
    return event("leader", t, peer=peer, role="inference", coordinator=coordinator, term=term)


def leads(peer: str, term: int, t: float = 0.0) -> Event:
    return event("coordinator", t, peer=peer, state="leading", term=term, reason=None)


def stepped_down(peer: str, term: int, t: float = 0.0) -> Event:
    return event("coordinator", t, peer=peer, state="stepped down", term=term, reason="lease ran out")


SWITCH = {"mode": "sequential", "term": 2, "groups_per_s": 1.5, "needed_per_s": None, "batch_groups": 32}
SWITCH |= {"step_s": 0.5, "refresh_s": 1.0}


def test_a_change_of_the_leader_is_one_line_however_many_peers_tell_it() -> None:
    stream = io.StringIO()
    PlainLines(stream).show(
        [
            leads("AAAAAAAA", 1),
            *(leader(peer, "AAAAAAAA", 1) for peer in "xyz"),
            *(leader(peer, None, 1) for peer in "xy"),
            leads("BBBBBBBB", 2),
            leader("z", None, 1),  # it hears last
            *(leader(peer, "BBBBBBBB", 2) for peer in "xyz"),
            stepped_down("AAAAAAAA", 1),
            stepped_down("BBBBBBBB", 2),
            leader("x", None, 2),
        ]
    )
    assert [line.partition("  ")[2] for line in stream.getvalue().splitlines()] == [
        "term 1: AAAAAAAA coordinates",
        "term 1: no coordinator is heard",
        "term 2: BBBBBBBB coordinates",
        "term 2: no longer coordinates (lease ran out)",
    ]


def test_lines_of_a_coordinated_run() -> None:
    stream = io.StringIO()
    round_ = {"number": 9, "version": 4, "groups": 32, "peers": 3, "seconds": 2.25}
    PlainLines(stream).show(
        [
            event("mode", **SWITCH),
            event("mode", **SWITCH | {"mode": "async", "needed_per_s": 1.0}),
            event("round", 0.0, **round_, moved=0, stalled=[]),
            event("round", 5.0, **round_, moved=0, stalled=[]),
            event("round", 20.0, **round_, moved=2, stalled=["x" * 44 + "stalling"]),
            event("lost", peer_id="x" * 44 + "lostpeer"),
        ]
    )
    assert [line.partition("  ")[2] for line in stream.getvalue().splitlines()] == [
        "mode is sequential from now on: 1.50 groups/s are made, more than any rate needed",
        "mode is async from now on: 1.50 groups/s are made, 1.00 needed",
        "round of v4: 32 groups in 2.2 s",
        "round of v4: 32 groups in 2.2 s, 2 moved, stalling stalled",
        "lostpeer is silent; its work is given to others",
    ]


def test_the_picture_shows_who_leads_as_those_say_who_know_most() -> None:
    state = state_of(leader("x", "AAAAAAAA", 1), leads("BBBBBBBB", 2), leader("x", None, 1))
    assert state.led == ("BBBBBBBB", 2)
    state.apply(step(1, mode="sequential"))
    state.apply(event("round", moved=3))
    state.apply(event("round", moved=0))
    text = picture(state)
    assert "mode sequential  coordinator BBBBBBBB (term 2)  version v1" in text
    assert "rounds 2 (3 groups moved)" in text
    state.gone("BBBBBBBB")  # its last word counts no more
    assert state.led == (None, 1)
    assert "coordinator none (term 1)" in picture(state)
    state.apply(leader("x", "CCCCCCCC", 3))
    state.apply(event("mode", **SWITCH | {"mode": "async"}))
    assert "mode async  coordinator CCCCCCCC (term 3)" in picture(state)
    state.apply(stepped_down("CCCCCCCC", 3))
    assert state.led == ("CCCCCCCC", 3)  # x still hears it
    assert state_of(leads("C", 3), stepped_down("C", 3)).led == (None, 3)


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    said = event("warning", code="x", text="peer says \x1b[2J\x9b31m\u202eevil\nand more")
    PlainLines(stream).show([said])
    assert stream.getvalue().endswith("  warning: peer says \ufffd[2J\ufffd31m\ufffdevil and more\n")
    assert "! peer says \ufffd[2J\ufffd31m\ufffdevil and more" in picture(state_of(said))


def test_json_lines_are_the_events() -> None:
    stream = io.StringIO()
    JsonLines(stream).show([event("loop", lag_p99_ms=1.5)])
    assert json.loads(stream.getvalue()) == event("loop", lag_p99_ms=1.5)


def test_units() -> None:
    assert [size(count) for count in (None, 12, 2048, 3 * 2**20, 5 * 2**30)] == [
        "-",
        "12 B",
        "2 KiB",
        "3 MiB",
        "5.0 GiB",
    ]
    assert [duration(seconds) for seconds in (None, 4.4, 200.0, 7500.0)] == ["-", "4 s", "3 min 20 s", "2 h 5 min"]


def download(t: float, received_bytes: int, peer: str = "I", **changes: Any) -> Event:
    about = {"version": 7, "bytes": 8 * 2**20, "received_bytes": received_bytes, "bytes_per_s": 1.5 * 2**20}
    return event("download", t, peer=peer, role="inference", **(about | {"sources": 5} | changes))


def test_a_long_download_is_a_bar_until_the_version_is_loaded() -> None:
    state = state_of(download(10.0, 2 * 2**20), download(10.5, 3 * 2**20))
    text = picture(state, now_s=11.0)
    assert "37.5%, 3.0 of 8.0 MiB, 1.5 MiB/s from 5 sources" in text
    assert text.count("MiB/s") == 1
    assert max(map(len, picture(state, 11.0, width=60).splitlines())) <= 60
    assert "MiB/s" not in picture(state, now_s=14.0), "its peer says nothing more: that download has ended"
    state.apply(event("adapter", 11.0, peer="I", role="inference", version=7))
    assert "MiB/s" not in picture(state, now_s=11.0)


def test_only_a_few_bars_are_shown_and_nothing_is_divided_by_nothing() -> None:
    state = state_of(*(download(1.0, 5, peer=f"peer {number}") for number in range(9)))
    assert picture(state, now_s=1.0).count("sources") == 4
    state = state_of(download(1.0, 0, bytes=0, bytes_per_s=0, sources=1))
    assert "-, 0.0 of 0.0 MiB, 0 KiB/s from 1 source" in picture(state, now_s=1.0)


def test_a_download_that_gets_nothing_says_why() -> None:
    stuck = download(10.0, 2**20, sources=0, bytes_per_s=0.0, trouble="3kd9: has nothing of it\x1b[2J")
    assert "12.5%, 1.0 of 8.0 MiB, no source (3kd9: has nothing of it\ufffd[2J)" in picture(state_of(stuck), now_s=11.0)
    stream = io.StringIO()
    PlainLines(stream).show([stuck])
    assert stream.getvalue().endswith(
        "fetching v7: 12.5%, 1.0 of 8.0 MiB, no source (3kd9: has nothing of it\ufffd[2J)\n"
    )
    flowing = download(10.0, 2**20, trouble="3kd9: closed")
    assert "1.5 MiB/s from 5 sources" in picture(state_of(flowing), now_s=11.0), "others go on"
    assert "closed" not in picture(state_of(flowing), now_s=11.0)


def test_a_long_download_is_a_line_each_few_seconds() -> None:
    stream = io.StringIO()
    PlainLines(stream).show([download(number / 2, number * 2**19, bytes_per_s=2.0**15) for number in range(1, 15)])
    assert [line.partition("  ")[2] for line in stream.getvalue().splitlines()] == [
        "fetching v7: 6.2%, 0.5 of 8.0 MiB, 32 KiB/s from 5 sources",
        "fetching v7: 43.8%, 3.5 of 8.0 MiB, 32 KiB/s from 5 sources",
        "fetching v7: 81.2%, 6.5 of 8.0 MiB, 32 KiB/s from 5 sources",
    ]
    stream = io.StringIO()
    loaded = {"version": 7, "bytes": 8 * 2**20, "fetch_s": 5.333, "sources": 5}
    PlainLines(stream).show([event("adapter", 9.0, **loaded), event("adapter", 20.0, **loaded | {"sources": 0})])
    assert [line.partition("  ")[2] for line in stream.getvalue().splitlines()] == [
        "loaded v7, 8 MiB in 5.33 s from 5 sources",
        "loaded v7, 8 MiB in 5.33 s",
    ]


# ---------------------------------------------------------------------- report

ABOUT = About(run="r", mode="async", model="m", environment="e", seed=1, max_lag=4, steps_wanted=20, wall_s=12.34567)
COUNTS = {"received": 100, "accepted": 90, "stale": 4, "duplicate": 5, "invalid": 1}
COUNTS |= {"trained": 70, "no_signal": 8, "stale_in_queue": 6, "unused": 3}


def trainer_events(**final: Any) -> list[Event]:
    end = {"counts": COUNTS, "steps": 20, "wall_s": 9.0, "train_s": 5.0, "bytes": {"adapters": 7, "rollouts": 8}}
    return [
        event("ready"),
        event("eval", step=0, greedy=0.2, problems=50),
        *(step(number, reward=None if number == 2 else number / 20) for number in range(1, 21)),
        event("eval", step=20, greedy=0.6, problems=50),
        event("warning", code="x", text="something"),
        event("final", **(end | final)),
    ]


def inference_events(generated: int, receipts: dict[str, int] | None) -> list[Event]:
    about = {"peer": f"I{generated}", "role": "inference"}
    events = [event("ready", **about), event("generated", groups=generated - 1, **about)]
    return events + ([event("final", generated=generated, receipts=receipts, outbox=1, **about)] if receipts else [])


def test_the_report_of_a_whole_run() -> None:
    audit = Audit(run="r", entries=22, versions=21, groups=70, head=20, max_lag=3, bound=4, histogram={3: 10, 0: 60})
    peers = [
        [event("ready", peer="B", role="bootstrap")],
        trainer_events(),
        inference_events(61, {"accepted": 55, "stale": 5}),
        inference_events(41, {"accepted": 35, "duplicate": 5}),
    ]
    report = build_report(ABOUT, peers, audit)
    needed = {"mode", "steps", "wall_s", "peers", "reward", "eval", "rollouts", "lag", "coordinator", "bytes", "audit"}
    assert needed <= report.keys()
    assert (report["format"], report["mode"], report["steps"], report["wall_s"]) == (1, "async", 20, 12.346)
    assert report["peers"] == {"bootstrap": 1, "trainer": 1, "inference": 2}
    assert len(report["reward"]["per_step"]) == 20
    assert report["reward"]["first"] == 0.05  # steps 1 and 2, of which the second had no reward
    assert report["reward"]["last"] == pytest.approx((0.95 + 1.0) / 2)
    assert report["eval"] == {"before": 0.2, "after": 0.6, "problems": 50}
    rollouts = report["rollouts"]
    assert {name: rollouts[name] for name in COUNTS} == COUNTS
    assert rollouts["lost"] == 90 - 70 - 8 - 6 - 3 == 3
    assert (rollouts["generated"], rollouts["outbox"]) == (102, 2)
    assert rollouts["receipts"] == {"accepted": 90, "stale": 5, "duplicate": 5, "invalid": 0}
    assert rollouts["without_receipt"] == 2
    assert report["lag"] == {"max_consumed": 3, "histogram": {"0": 60, "3": 10}, "door_max": None, "queue_max": None}
    assert report["bytes"] == {"adapters": 7, "rollouts": 8, "gossip": None}
    assert (report["audit"]["ok"], report["audit"]["problems"]) == (True, [])
    assert report["warnings"] == ["something"]
    assert report["time"] == {"wall_s": 9.0, "train_s": 5.0, "wait_s": None, "check_s": None, "publish_s": None}
    assert json.loads(json.dumps(report)) == report
    text = "\n".join(summary_lines(report))
    assert "reward     0.050 -> 0.975" in text
    assert "held-out   20.0% -> 60.0%   (50 problems, greedy)" in text
    assert "steps      20 of 20 in 12 s" in text
    assert (
        "102 generated, 70 trained, 8 no signal, 4 stale, 6 stale in queue, 5 duplicate, 1 invalid, 3 unused, 3 lost"
        in text
    )
    assert text.endswith("audit      ok")


def test_what_nobody_reported_is_null_and_never_0() -> None:
    report = build_report(ABOUT, [[event("ready")], inference_events(9, None)], None)
    assert "audit      not possible" in "\n".join(summary_lines(report))
    assert "leader     -" in summary_lines(report)
    assert "idle       trainer -, inference -" in summary_lines(report)
    assert set(report["rollouts"].pop("receipts").values()) == {None}
    assert report["rollouts"].pop("generated") == 8  # it said so before it died
    assert set(report["rollouts"].values()) == {None}
    assert report["reward"] == {"per_step": [], "first": None, "last": None}
    assert set(report["eval"].values()) == set(report["lag"].values()) == set(report["bytes"].values()) == {None}
    assert (
        set(report["coordinator"].values()) == set(report["rounds"].values()) == set(report["idle"].values()) == {None}
    )
    assert (report["steps"], report["audit"]["ok"]) == (None, None)


def test_elections_are_counted_once_however_many_peers_saw_them() -> None:
    first = [leads("A", 1, 1.0), leader("A", "A", 1, 1.1), stepped_down("A", 1, 9.0), leads("A", 4, 40.0)]
    second = [leader("B", "A", 1, 1.2), leader("B", None, 1, 8.0), leads("B", 2, 10.0), leads("B", 3, 30.0)]
    third = [leader("C", "A", 1, 1.3), leader("C", "B", 2, 10.1), leader("C", "B", 3, 30.1), leader("C", "A", 4, 41.0)]
    switches = [event("mode", 12.0, **SWITCH), event("mode", 50.0, **SWITCH | {"mode": "async", "term": 4})]
    report = build_report(ABOUT, [[*first, switches[1]], [*second, switches[0]], third], None)
    assert report["coordinator"]["terms"] == 4
    assert report["coordinator"]["failovers"] == 2  # A to B and back; from term 2 to 3 B stays
    assert [(each["t"], each["mode"]) for each in report["coordinator"]["switches"]] == [
        (12.0, "sequential"),
        (50.0, "async"),
    ]
    assert report["coordinator"]["switches"][0] == {"t": 12.0, **SWITCH}
    assert "leader     4 terms, 2 failovers, 2 mode changes" in summary_lines(report)


def test_one_leader_from_start_to_end_is_one_term_and_no_failover() -> None:
    report = build_report(
        ABOUT, [[leads("A", 1)], [leader("B", None, 0), leader("B", "A", 1), leader("B", "A", 1)]], None
    )
    assert report["coordinator"] == {"terms": 1, "failovers": 0, "switches": []}
    assert "leader     1 term, 0 failovers" in summary_lines(report)
    nobody = build_report(ABOUT, [[leader("B", None, 0)]], None)
    assert nobody["coordinator"] == {"terms": 0, "failovers": 0, "switches": []}  # told, and nobody led


def test_who_leads_after_the_run_has_ended_is_no_failover() -> None:
    trainer = [leads("A", 1, 1.0), event("final", 9.0), stepped_down("A", 1, 9.5)]
    report = build_report(ABOUT, [trainer, [leader("B", "A", 1, 1.5), leads("B", 2, 13.0)]], None)
    assert report["coordinator"] == {"terms": 1, "failovers": 0, "switches": []}


def test_two_leaders_of_one_term_are_a_failover_in_the_order_in_which_they_began() -> None:
    late = [leader("x", "B", 1, 1.6), leader("x", "A", 1, 2.0), leader("x", "B", 2, 9.0)]
    report = build_report(ABOUT, [[leads("A", 1, 1.0)], [leads("B", 1, 1.5), leads("B", 2, 8.0)], late], None)
    assert report["coordinator"] == {"terms": 2, "failovers": 1, "switches": []}


def test_rounds_idle_shares_and_where_lag_came_from() -> None:
    about = {"number": 1, "version": 1, "groups": 32, "peers": 3, "seconds": 1.0}
    trainer = [
        event("ready"),
        step(1, lag_door_max=1, lag_queue_max=0),
        step(2, lag_door_max=0, lag_queue_max=2),
        step(2, skipped="no signal"),
        event("round", **about, moved=3, stalled=["p"]),
        event("round", **about, moved=1, stalled=[]),
        event("final", wait_s=2.0, wall_s=8.0),
    ]

    def final(peer: str, **times: float) -> list[Event]:
        return [event("ready", peer=peer, role="inference"), event("final", peer=peer, role="inference", **times)]

    killed = [event("ready", peer="k", role="inference")]
    busy, lazy = final("a", busy_s=9.0, idle_s=1.0, wall_s=10.0), final("b", busy_s=1.0, idle_s=1.0, wall_s=2.0)
    report = build_report(ABOUT, [trainer, busy, lazy, killed], None)
    assert report["rounds"] == {"count": 2, "moved": 4, "stalled": 1}
    assert report["idle"] == {"trainer": 0.25, "inference": 0.3}
    assert (report["lag"]["door_max"], report["lag"]["queue_max"]) == (1, 2)
    assert "idle       trainer 25.0%, inference 30.0%" in summary_lines(report)


def test_the_mode_of_a_report_is_the_one_that_the_run_asks_for() -> None:
    config = RunConfig(name="sums", trainers=(), coordination=CoordinationSpec(mode="auto"))
    assert about_run(config, "r", 1.0).mode == "auto"


def test_one_peer_without_a_last_word_makes_the_sums_unknown() -> None:
    report = build_report(ABOUT, [trainer_events(), inference_events(61, {"accepted": 61}), []], None)
    assert report["rollouts"]["receipts"]["accepted"] == 61
    peers = [trainer_events(), inference_events(61, {"accepted": 61}), inference_events(9, None)]
    rollouts = build_report(ABOUT, peers, None)["rollouts"]
    assert (rollouts["generated"], rollouts["receipts"]["accepted"], rollouts["without_receipt"]) == (69, None, None)
    silent = [event("ready", peer="I", role="inference")]
    assert build_report(ABOUT, [silent, *peers], None)["rollouts"]["generated"] is None


def test_a_count_that_was_never_counted_is_0_once_there_are_counts() -> None:
    rollouts = build_report(ABOUT, [trainer_events(counts={"received": 3, "accepted": 3, "trained": 3})], None)[
        "rollouts"
    ]
    assert (rollouts["stale"], rollouts["no_signal"], rollouts["lost"]) == (0, 0, 0)


def test_only_the_first_and_the_last_evaluation_count() -> None:
    one = [event("eval", step=0, greedy=0.2, problems=50)]
    assert build_report(ABOUT, [one], None)["eval"] == {"before": 0.2, "after": None, "problems": 50}


# ---------------------------------------------------------------------- processes

CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

arguments = sys.argv[1:]
home, command = Path(arguments[1]), arguments[2]
name, scene = home.name, os.environ.get("SCENE", "")
role = {"bootstrap": "bootstrap", "train": "trainer", "join": "inference"}[command]
peer_id = "12D3KooWD8PektQDAWpbFKmJ1EjN2guDT7MW2oifLb2BEcMFWGXa"

def emit(event, **fields):
    with (home / "metrics.jsonl").open("a") as file:
        line = {"t": time.time(), "peer": peer_id[:-8] + name.rjust(8, "1")[:8], "role": role, "event": event}
        file.write(json.dumps(line | fields) + "\\n")

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)

def stop(*_):
    (home / "stopped").touch()
    os._exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if f"{name} deaf" in scene else stop)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(home / "pids").write_text(f"{os.getpid()} {helper.pid}")
(home / "arguments").write_text(json.dumps(arguments))
(home / "threads").write_text(os.environ["OMP_NUM_THREADS"])
if f"{name} mute" in scene:
    time.sleep(600)
if f"{name} dies" in scene:
    helper.kill()
    sys.exit("no such model: x")
emit("ready", peer_id=peer_id, addresses=[f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"], run="r")
if f"{name} ends badly" in scene:
    helper.kill()
    sys.exit(7)
if f"{name} ends late" in scene:
    wait_for(home.parent / "peer-2" / "done")
    helper.kill()
    sys.exit(7)
if command == "bootstrap":
    time.sleep(600)
if command == "train":
    wait_for(home.parent / "peer-2" / "done")
    for step in (1, 2, 3):
        emit("step", step=step, version=step, reward=step / 4, loss=0.1, lag_max=1, queued=0, skipped=None)
    if "trainer waits" in scene:
        wait_for(home.parent / "mourned")
    if "trainer hangs" in scene:
        time.sleep(600)
    sys.path.insert(0, str(Path.cwd()))
    from tests.test_cli import ledger
    run, raw = ledger(home.parent)
    (home / "ledger.echo").write_bytes(raw)
    counts = {"received": 3, "accepted": 3, "trained": 3}
    emit("final", counts=counts, steps=3, ledger=str(home / "ledger.echo"))
else:
    emit("generated", groups=2, tokens=9, tokens_per_s=9.0, version=0, outbox=0)
    (home / "done").touch()
    wait_for(home.parent / "trainer" / "ledger.echo")
    emit("final", generated=2, receipts={"accepted": 2}, outbox=0)
helper.kill()
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimOptions:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.chdir(ROOT)
    return SimOptions(
        home=tmp_path / "sim",
        config=RunConfig(name="sums", trainers=(), max_steps=3),
        peers=2,
        engines=("transformers", "auto"),
        command=(sys.executable, str(script)),
        ready_s=30.0,
        goodbye_s=10.0,
    )


class Silent:
    def show(self, events: Any) -> None:
        pass


def pids(home: Path) -> list[int]:
    """Of every child, and of the helper that each has started in a session of its own, as p2pd is."""
    return [int(pid) for path in sorted(home.glob("*/pids")) for pid in path.read_text().split()]


def living(home: Path) -> list[int]:
    return [pid for pid in pids(home) if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def wait_until(condition: Callable[[], bool]) -> None:
    """At most 10 s; the kernel needs a moment between a signal and the end of a process."""
    for _ in range(1000):
        if condition():
            return
        psutil.Process().cpu_percent(interval=0.01)
    raise AssertionError("not within 10 s")


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Every process of the simulation is gone, however the test ended."""
    yield
    try:
        wait_until(lambda: not living(tmp_path / "sim"))
    finally:
        for pid in living(tmp_path / "sim"):
            os.kill(pid, signal.SIGKILL)


async def test_a_simulation_starts_everybody_trains_and_reports(options: SimOptions) -> None:
    state = SwarmState(steps=3)
    report = await simulate(options, state, Silent())
    assert report["peers"] == {"bootstrap": 1, "trainer": 1, "inference": 2}
    assert report["reward"] == {"per_step": [0.25, 0.5, 0.75], "first": 0.25, "last": 0.75}
    assert (report["steps"], report["steps_wanted"], report["warnings"]) == (3, 3, [])
    assert (report["rollouts"]["generated"], report["rollouts"]["lost"]) == (4, 0)
    assert (report["audit"]["ok"], report["audit"]["versions"], report["audit"]["ended"]) == (True, 2, True)
    assert report["run"] == report["audit"]["run"]
    assert (state.step, {row.state for row in state.peers.values()}) == (3, {READY, DONE})
    home = options.home
    said = {path.parent.name: json.loads(path.read_text())[2:] for path in home.glob("*/arguments")}
    address = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWD8PektQDAWpbFKmJ1EjN2guDT7MW2oifLb2BEcMFWGXa"
    assert said["bootstrap"] == ["bootstrap", f"{home}/run.toml", "--host", "127.0.0.1", "--port", "0"]
    assert said["trainer"][:4] == ["train", f"{home}/run.toml", "--bootstrap", address]
    assert said["peer-1"][:4] == ["join", f"{address}#{report['run']}", "--engine", "transformers"]
    assert said["peer-2"][:4] == ["join", f"{address}#{report['run']}", "--engine", "auto"]
    assert {path.read_text() for path in home.glob("*/threads")} == {"1"}
    assert (home / "bootstrap" / "stopped").exists()
    assert not (home / "peer-1" / "stopped").exists()  # it went by itself


async def test_code_named_on_the_command_line_is_allowed_in_the_children(options: SimOptions) -> None:
    from bootstrap.demos import environment_spec

    config = RunConfig(name="sums", trainers=(), max_steps=3, environment=environment_spec("puzzles:doubling"))
    own = SimOptions(options.home, config, 2, command=options.command)
    await simulate(own, SwarmState(), Silent())
    said = {path.parent.name: json.loads(path.read_text()) for path in options.home.glob("*/arguments")}
    assert said["trainer"][-1] == "--allow-code"
    assert said["peer-1"][-2:] == ["--allow-code", "puzzles:doubling"]


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ("bootstrap dies", "bootstrap ended with exit code 1; its last lines:\n  no such model: x"),
        ("trainer dies", "trainer ended with exit code 1; its last lines:\n  no such model: x"),
        ("trainer ends badly", "trainer ended with exit code 7; its last lines:\n  (it said nothing)"),
        ("peer-1 dies, peer-2 dies", "all inference peers have died; the last lines of one:\n  no such model: x"),
    ],
)
async def test_a_needed_process_that_dies_ends_the_simulation(
    options: SimOptions, scene: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCENE", scene)
    with pytest.raises(Failed) as caught:
        await simulate(options, SwarmState(), Silent())
    assert str(caught.value) == message


async def test_an_inference_peer_that_dies_is_a_warning(options: SimOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCENE", "peer-1 ends badly")
    state = SwarmState()
    report = await simulate(options, state, Silent())
    assert report["warnings"] == ["peer-1 ended with exit code 7"]
    assert list(state.warnings) == ["peer-1 ended with exit code 7"]
    assert GONE in {row.state for row in state.peers.values()}
    assert (report["audit"]["ok"], report["rollouts"]["generated"]) == (True, None)


async def test_several_bootstrap_peers_are_linked_and_everybody_knows_all_of_them(options: SimOptions) -> None:
    report = await simulate(dataclasses.replace(options, bootstraps=3), SwarmState(), Silent())
    assert report["peers"] == {"bootstrap": 3, "trainer": 1, "inference": 2}
    said = {path.parent.name: json.loads(path.read_text())[2:] for path in options.home.glob("*/arguments")}
    address = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWD8PektQDAWpbFKmJ1EjN2guDT7MW2oifLb2BEcMFWGXa"
    assert "--link" not in said["bootstrap"]
    assert said["bootstrap-2"][-2:] == ["--link", address]
    assert said["bootstrap-3"][-4:] == ["--link", address] * 2
    assert said["trainer"][2:8] == ["--bootstrap", address] * 3
    assert said["peer-2"][1] == f"{address},{address},{address}#{report['run']}"


async def test_a_swarm_goes_on_while_one_of_its_bootstrap_peers_lives(
    options: SimOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mourner:
        def show(self, events: Any) -> None:
            if any(event["event"] == "warning" for event in events):
                (options.home / "mourned").touch()

    monkeypatch.setenv("SCENE", "bootstrap-2 ends late, trainer waits")
    report = await simulate(dataclasses.replace(options, bootstraps=2), SwarmState(), Mourner())
    assert report["audit"]["ok"] is True
    assert report["warnings"] == ["bootstrap-2 ended with exit code 7"]


async def test_a_swarm_without_bootstrap_peers_ends(options: SimOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCENE", "bootstrap ends late, trainer hangs")
    with pytest.raises(Failed, match=r"^all bootstrap peers have died; "):
        await simulate(options, SwarmState(), Silent())


async def test_a_process_that_is_not_ready_in_time_is_named(
    options: SimOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCENE", "bootstrap mute")
    impatient = SimOptions(options.home, options.config, 2, command=options.command, ready_s=1.0)
    with pytest.raises(Failed, match=r"^bootstrap was not ready after 1 s; its last lines:\n  \(it said nothing\)$"):
        await simulate(impatient, SwarmState(), Silent())


async def test_a_process_that_does_not_hear_sigterm_is_killed(
    options: SimOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCENE", "bootstrap deaf")
    monkeypatch.setattr("bootstrap.sim.STOP_S", 0.5)
    await simulate(options, SwarmState(), Silent())
    assert not (options.home / "bootstrap" / "stopped").exists()
    assert len(pids(options.home)) == 8


PARENT = """
import asyncio, sys
from pathlib import Path
import typer
from bootstrap import main
from bootstrap.config import RunConfig
from bootstrap.sim import SimOptions, simulate
from bootstrap.state import SwarmState

class Screen:
    def show(self, events):
        if any(event["event"] == "step" for event in events):
            print("training", flush=True)

config = RunConfig(name="sums", trainers=(), max_steps=3)
options = SimOptions(Path(sys.argv[1]), config, 2, command=(sys.executable, sys.argv[2]))
try:
    main._run_to_end(lambda: simulate(options, SwarmState(), Screen()))
except typer.Exit as ending:
    sys.exit(ending.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")),
    ],
)
def test_no_child_outlives_the_simulation(options: SimOptions, tmp_path: Path, number: int, code: int) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SCENE": "trainer hangs"}
    with subprocess.Popen(
        [sys.executable, script, options.home, options.command[1]], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"training\n"
        started = pids(options.home)
        assert len(living(options.home)) == len(started) == 8
        process.send_signal(number)
        assert process.wait(timeout=30) == code
    if number == signal.SIGKILL:
        children, helpers = started[0::2], started[1::2]
        wait_until(lambda: not set(living(options.home)) & set(children))
        for pid in helpers:  # they stand for p2pd, which ends by itself when its parent is gone
            os.kill(pid, signal.SIGKILL)


def test_a_trainer_that_came_back_has_no_accuracy_from_before_the_first_step() -> None:
    resumed = [event("eval", step=60, greedy=0.86, problems=50)]
    assert build_report(ABOUT, [resumed], None)["eval"] == {"before": None, "after": 0.86, "problems": 50}
