"""`swarm status`: whom it asks, what it shows of their word, and that it leaves nothing behind."""

import asyncio
import io
import json
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bootstrap import status_command
from bootstrap.errors import explain
from bootstrap.invite import Invite, format_invite
from bootstrap.main import app
from bootstrap.status_command import (
    Answer,
    Asker,
    Look,
    Unreachable,
    asking,
    render,
    show_status,
    status_fields,
)
from protocols.faults import TransportFault
from protocols.identity import peer_id_of
from protocols.messages import PeerStatus, Refused, Reply, Status, StatusRequest, decode_request, encode
from swarm.host import Host
from swarm.node import JoinFault
from tests.hosts import children, free_port, hosts, until
from tests.nodes import nodes
from tests.processes import wait_until
from tests.samples import OTHER_RUN, OTHER_TRAINER_ID, OWNER_ID, RUN, STRANGER_ID, TRAINER_ID
from tests.terminals import Terminals

ROOT = Path(__file__).parent.parent


def peer(peer_id: str = TRAINER_ID, **fields: Any) -> PeerStatus:
    return PeerStatus(**{"peer_id": peer_id, "role": "inference", "silent_s": 0.5} | fields)


def status(**fields: Any) -> Status:
    return Status(**{"run": RUN, "now_ms": 1_000, "max_lag": 4, "max_steps": 100} | fields)


def look(said: Status | None, *unreachable: Unreachable, **fields: Any) -> Look:
    answer = None if said is None else Answer(OWNER_ID, said)
    return Look(
        **{"run": RUN, "at_s": 1_000.0, "answer": answer, "last_answer_s": None} | fields, unreachable=unreachable
    )


def shown(seen: Look, width: int = 200, watching: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(seen, width, watching))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(text: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = text.splitlines()
    rule = next(at for at, line in enumerate(lines) if "──" in line)
    return [line.split() for line in lines[rule + 1 :] if line.strip()]


def words(text: str) -> list[str]:
    return text.split()


def clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


REFUSED = Unreachable("/ip4/10.0.0.1/tcp/1/p2p/x", TransportFault("refused", "dial tcp"), 900.0)

# ---------------------------------------------------------------------- what is shown


def test_the_table_of_a_run() -> None:
    worker = peer(
        STRANGER_ID,
        engine="transformers",
        device="cpu",
        version=55,
        tokens_per_s=812.4,
        groups_per_s=1.25,
        in_flight=2,
        outbox=3,
        credit=4,
        accepted=300,
        stale=7,
        silent_s=8.4,
    )
    trainer = peer(TRAINER_ID, role="trainer", version=57, accepted=1234, stale=9)
    said = status(
        mode="async", head=57, step=57, queued=12, term=3, coordinator=OWNER_ID, leading=True, accepted=1234, stale=9,
        peers=(worker, trainer), left_out=5,
    )  # fmt: skip
    text = shown(look(said))
    assert text.splitlines()[:4] == [
        f"run          {RUN}",
        "mode         async   head v57   step 57 of 100   max_lag 4   queued 12",
        f"coordinator  {OWNER_ID[-8:]}, term 3",
        "groups       1234 accepted, 9 stale",
    ]
    assert rows(text)[0] == [TRAINER_ID[-8:], "trainer", *words("- - v57 - - - 0 0 - 1234/9 0 s")]
    assert rows(text)[1] == [
        STRANGER_ID[-8:],
        *words("inference transformers cpu v55 2 812 1.25 2 3 4 300/7 8 s"),
    ]
    assert text.splitlines()[-1] == "and 5 more peers"


def test_what_is_not_known_is_a_dash_and_never_0() -> None:
    text = shown(look(status(peers=(peer(),))))
    assert "mode         not chosen yet   head -   step - of 100   max_lag 4   queued -" in text
    assert "no coordinator is known" in text
    assert "groups       - accepted, - stale" in text
    assert rows(text) == [[TRAINER_ID[-8:], "inference", *words("- - - - - - 0 0 - -/- 0 s")]]


def test_a_run_without_a_coordinator_says_since_when() -> None:
    assert "no coordinator since 12 s, the last was in term 3\n" in shown(look(status(vacant_s=12.4, term=3)))
    assert "no coordinator since 2 min 5 s\n" in shown(look(status(vacant_s=125.0)))


def test_hearsay_about_the_coordinator_is_called_that() -> None:
    text = shown(look(status(coordinator=TRAINER_ID, term=2)))
    assert f"coordinator  {TRAINER_ID[-8:]}, term 2   (as {OWNER_ID[-8:]} says)" in text


def test_an_address_that_cannot_be_reached_has_its_reason_and_when_watching_its_time() -> None:
    line = "bootstrap unreachable: /ip4/10.0.0.1/tcp/1/p2p/x: refused: nothing listens at this address\n"
    assert line in shown(look(status(), REFUSED))
    text = shown(look(None, REFUSED, last_answer_s=880.0), watching=True)
    assert text.splitlines()[:3] == [
        f"run          {RUN}   at {clock(1000.0)}",
        f"nobody has answered since {clock(880.0)}",
        line.replace("unreachable:", f"unreachable since {clock(900.0)}:").rstrip("\n"),
    ]
    assert "nobody has answered so far" in shown(look(None, REFUSED), watching=True)


def test_a_narrow_terminal_keeps_what_matters() -> None:
    worker = peer(
        engine="transformers",
        device="NVIDIA H200 with a long name",
        version=9,
        tokens_per_s=12345.0,
        groups_per_s=12.5,
    )
    for width, engine in ((80, False), (120, True)):
        text = shown(look(status(head=10, peers=(worker,))), width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert ("transformers" in text) is engine
        assert rows(text)[0][-8:] == ["1e+04", "12.50", "0", "0", "-", "-/-", "0", "s"]


def test_a_picture_holds_as_many_peers_as_the_terminal_has_lines_for() -> None:
    peers = tuple(peer(peer_id_of(bytes([number]) * 32)) for number in range(40))
    for height in (24, 50):
        console = Console(file=io.StringIO(), width=120)
        console.print(render(look(status(peers=peers, left_out=5), REFUSED), 120, True, height))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert len(lines) == height
        assert f"and {45 - (height - 11)} more peers" in lines
    assert len(rows(shown(look(status(peers=peers))))) == 40


hostile_text = st.text(max_size=128) | st.sampled_from(
    ["\x1b[2J", "\x9b31m", "[red]x[/red]", "[/]", "\u202eabc", "a\nb\r\tc"]
)
hostile_number = st.none() | st.floats(-1e300, 1e300)
count = st.integers(0, 2**32 - 1)
hostile_peer = st.builds(
    peer,
    st.sampled_from([TRAINER_ID, OTHER_TRAINER_ID, STRANGER_ID]),
    role=st.sampled_from(["bootstrap", "trainer", "inference"]),
    silent_s=st.floats(-1e300, 1e300),
    version=st.none() | count,
    engine=st.none() | hostile_text,
    device=st.none() | hostile_text,
    tokens_per_s=hostile_number,
    groups_per_s=hostile_number,
    in_flight=count,
    outbox=count,
    credit=st.none() | count,
    accepted=st.none() | count,
    stale=st.none() | count,
)
hostile_status = st.builds(
    status,
    head=st.none() | count,
    step=st.none() | count,
    term=st.none() | count,
    vacant_s=hostile_number,
    coordinator=st.none() | st.just(STRANGER_ID),
    peers=st.lists(hostile_peer, max_size=4).map(tuple),
    left_out=count,
)


@given(hostile_status, st.sampled_from([40, 80, 120, 200]))
@settings(max_examples=60, deadline=None)
def test_no_answer_can_steer_the_terminal_or_leave_its_lines(said: Status, width: int) -> None:
    assert msgspec.msgpack.decode(encode(said), type=Status) == said  # it could have come over the wire
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(look(said, REFUSED), width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(char == "\n" or char.isprintable() for char in text)
    assert rows_fit(text, width)
    if width == 200 and said.peers:
        assert len(rows(text)) == len(said.peers) + bool(said.left_out)
    fields = json.loads(msgspec.json.encode(status_fields(look(said))))
    labels = [row[key] for row in fields["peers"] for key in ("engine", "device") if row[key] is not None]
    assert all(label.isprintable() for label in labels)


def rows_fit(text: str, width: int) -> bool:
    from rich.cells import cell_len

    return max(map(cell_len, text.splitlines())) <= width


def test_markup_in_a_label_is_text() -> None:
    assert "[red]x[/red]" in shown(look(status(peers=(peer(engine="[red]x[/red]"),))))


# ---------------------------------------------------------------------- JSON


def table(page: str, part: int) -> list[str]:
    """The names in the first column of a table of the page."""
    tables = re.split(r"\n\n", (ROOT / "docs" / page).read_text())
    tables = [each for each in tables if each.startswith("| field")]
    return re.findall(r"^\| `(\w+)` \|", tables[part], re.MULTILINE)


def test_every_field_of_the_json_is_described() -> None:
    fields = status_fields(look(status(peers=(peer(),)), REFUSED))
    assert table("status.md", 0) == list(fields)
    assert table("status.md", 1) == list(fields["peers"][0])
    assert fields["unreachable"] == [
        {"address": REFUSED.address, "reason": "refused", "detail": "dial tcp", "since": 900.0}
    ]
    text = (ROOT / "docs" / "status.md").read_text()
    assert all(f"`{name}`" in text for name in fields["unreachable"][0])


def test_json_of_a_run_that_nobody_answers_for_is_null_and_never_0() -> None:
    fields = status_fields(look(None, REFUSED))
    assert (fields.pop("format"), fields.pop("t"), fields.pop("run"), len(fields.pop("unreachable"))) == (
        1,
        1000.0,
        RUN,
        1,
    )
    assert set(fields.values()) == {None}


def test_json_has_the_lag_of_each_peer() -> None:
    peers = (peer(version=7), peer(version=11), peer())
    assert [row["lag"] for row in status_fields(look(status(head=10, peers=peers)))["peers"]] == [3, -1, None]
    assert status_fields(look(status(peers=peers)))["peers"][0]["lag"] is None


# ---------------------------------------------------------------------- whom it asks


class Answering:
    """What a host says when it is asked."""

    def __init__(self, reply: Reply | bytes | None) -> None:
        self.reply = reply
        """None: it is silent."""
        self.asked: list[str] = []

    async def __call__(self, raw: bytes, peer_id: str) -> bytes:
        assert decode_request(raw) == StatusRequest(RUN)
        self.asked.append(peer_id)
        if self.reply is None:
            await asyncio.Event().wait()
        return self.reply if isinstance(self.reply, bytes) else encode(self.reply)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@asynccontextmanager
async def answering(folder: Path, *replies: Reply | bytes | None) -> AsyncIterator[tuple[list[Host], list[Answering]]]:
    """Hosts that are linked, and answer so."""
    async with hosts(folder, len(replies)) as started:
        handlers = [Answering(reply) for reply in replies]
        for host, handler in zip(started, handlers, strict=True):
            await host.serve(handler)
        yield started, handlers


@asynccontextmanager
async def asker_of(*addresses: str) -> AsyncIterator[Asker]:
    before = children()
    async with asking(Invite(addresses, RUN)) as asker:
        yield asker
    assert children() == before


@pytest.mark.network
async def test_the_coordinator_itself_is_asked_and_its_word_counts(folder: Path) -> None:
    async with answering(folder, status(), status()) as ((door, leader), (at_door, at_leader)):
        at_door.reply = status(term=3, coordinator=leader.peer_id, head=9)
        at_leader.reply = status(term=3, coordinator=leader.peer_id, head=8, leading=True)
        async with asker_of(door.addresses[0]) as asker:
            seen = await asker.look()
            assert seen.answer == Answer(leader.peer_id, at_leader.reply)
            assert seen.unreachable == ()
            assert at_door.asked == at_leader.asked
            at_leader.reply = Refused("unknown run")  # it is not what it is said to be
            seen = await asker.look()
            assert seen.answer == Answer(door.peer_id, at_door.reply)
            assert at_door.asked[0] == at_door.asked[1]  # one identity as long as we ask


@pytest.mark.network
async def test_a_coordinator_that_cannot_be_found_or_is_silent_leaves_the_word_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "PATIENCE_S", 0.3)
    said = status(term=3, coordinator=STRANGER_ID)
    async with (
        answering(folder, said, None) as ((door, silent), (at_door, at_silent)),
        asker_of(door.addresses[0]) as asker,
    ):
        assert (await asker.look()).answer == Answer(door.peer_id, said)
        at_door.reply = said = status(term=4, coordinator=silent.peer_id)
        assert (await asker.look()).answer == Answer(door.peer_id, said)
        assert len(at_silent.asked) == 1


@pytest.mark.network
async def test_of_two_answers_the_newer_term_counts(folder: Path) -> None:
    old, new = status(term=3, head=50, leading=True), status(term=4, head=9)
    async with (
        answering(folder, old, new) as ((first, second), _),
        asker_of(first.addresses[0], second.addresses[0]) as asker,
    ):
        assert (await asker.look()).answer == Answer(second.peer_id, new)


@pytest.mark.network
async def test_a_silent_or_dead_address_holds_nobody_up_and_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "PATIENCE_S", 0.2)
    async with answering(folder, status(), None) as ((door, silent), (_, at_silent)):
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER_ID}"
        async with asker_of(dead, silent.addresses[0], door.addresses[0], dead) as asker:
            began_s = time.monotonic()
            first = await asker.look()
            second = await asker.look()
            assert time.monotonic() - began_s < 4.0  # far from the 5 s that an answer may take
            assert first.answer is not None
            assert [(each.address, each.fault.code) for each in first.unreachable] == [
                (dead, "refused"),
                (silent.addresses[0], "timeout"),
            ]
            assert [each.since_s for each in second.unreachable] == [each.since_s for each in first.unreachable]
            assert len(at_silent.asked) == 1  # one question at a time


@pytest.mark.network
@pytest.mark.parametrize(
    ("reply", "code", "detail"),
    [
        (Refused("unknown run"), "unknown run", "says"),
        (Refused("no manifest yet"), "no manifest", "says"),
        (Refused("\x1b[2Jno"), "protocol mismatch", "refuses: \x1b[2Jno"),
        (b"\x80", "protocol mismatch", "malformed reply"),
        (status(run=OTHER_RUN), "protocol mismatch", "gives no status of this run"),
        (b"\xc1" * 2_000_000, "protocol mismatch", "remote error"),
    ],
)
async def test_an_answer_that_is_none_is_an_address_that_cannot_be_reached(
    folder: Path, reply: Reply | bytes, code: str, detail: str
) -> None:
    async with answering(folder, reply) as ((door,), _):
        with pytest.raises(JoinFault) as caught:
            await show_status(Invite((door.addresses[0],), RUN), None, as_json=False, stream=io.StringIO())
    assert (caught.value.code, detail in caught.value.detail) == (code, True)
    explained = explain(caught.value)
    assert explained is not None
    assert explained[0].replace("\n", "").isprintable()


@pytest.mark.network
async def test_an_outage_is_dated_from_its_beginning_and_ends(folder: Path) -> None:
    async with (
        answering(folder, Refused("no manifest yet")) as ((door,), (at_door,)),
        asker_of(door.addresses[0]) as asker,
    ):
        looks = [await asker.look() for _ in range(2)]
        at_door.reply = status()
        looks.append(await asker.look())
        at_door.reply = Refused("no manifest yet")
        looks.append(await asker.look())
    (first,), (second,), (), (again,) = (seen.unreachable for seen in looks)
    assert first.since_s == second.since_s < again.since_s
    assert [seen.last_answer_s is None for seen in looks] == [True, True, False, False]
    assert looks[3].last_answer_s == looks[2].last_answer_s == looks[2].at_s


@pytest.mark.network
async def test_a_real_node_answers_and_never_counts_the_asker_as_a_peer(folder: Path) -> None:
    async with nodes(folder) as started:
        door = await started.bootstrap()
        invite = Invite((door.node.host.addresses[0],), RUN)
        stream = io.StringIO()
        with pytest.raises(JoinFault) as caught:
            await show_status(invite, None, as_json=True, stream=stream)
        assert caught.value.code == "no manifest"
        trainer = await started.trainer(invite.addresses)
        await until(lambda: TRAINER_ID in door.node.neighbours and door.follower.orders is not None, 30.0)
        await show_status(invite, None, as_json=True, stream=stream)
        fields = json.loads(stream.getvalue())
        assert (fields["run"], fields["max_lag"], fields["unreachable"]) == (RUN, 2, [])
        assert TRAINER_ID in {row["peer_id"] for row in fields["peers"]}
        known = {door.node.peer_id, trainer.node.peer_id}
        assert fields["answered_by"] in known
        for running in (door, trainer):
            alive = running.node.sessions.alive(time.monotonic())
            assert {*running.node.neighbours, *alive} <= known


# ---------------------------------------------------------------------- the command


def one_line(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["status", *arguments], prog_name="swarm")
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER_ID}"


def test_bad_usage_is_one_line_and_exit_code_2() -> None:
    assert "invitation 'nonsense'" in one_line("nonsense")
    assert "--watch 0.1: give from 0.5 to 3600 seconds" in one_line(f"{ADDRESS}#{RUN}", "--watch", "0.1")
    assert "--watch -1: give from 0.5" in one_line(f"{ADDRESS}#{RUN}", "--watch", "-1")
    assert "--watch nan: give from 0.5" in one_line(f"{ADDRESS}#{RUN}", "--watch=nan")
    result = CliRunner().invoke(app, ["status", "--help"], prog_name="swarm")
    assert "swarm status " in result.stdout
    assert "Example" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "every_s", "as_json"),
    [
        (["INVITE"], None, False),
        (["INVITE", "--watch"], 2.0, False),
        (["--watch", "INVITE"], 2.0, False),
        (["--watch", "INVITE", "--json"], 2.0, True),
        (["INVITE", "--watch", "--json"], 2.0, True),
        (["--watch", "5", "INVITE"], 5.0, False),
        (["INVITE", "--watch", "0.5"], 0.5, False),
        (["--watch=7", "INVITE"], 7.0, False),
    ],
)
def test_watch_takes_a_number_where_one_follows(
    arguments: list[str], every_s: float | None, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []

    async def fake(*arguments: Any) -> None:
        called.append(arguments)

    monkeypatch.setattr(status_command, "show_status", fake)
    words = [format_invite([ADDRESS], RUN) if word == "INVITE" else word for word in arguments]
    result = CliRunner().invoke(app, ["status", *words], prog_name="swarm")
    assert result.exit_code == 0, result.output
    assert called == [(Invite((ADDRESS,), RUN), every_s, as_json)]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_refreshed_in_place_and_anything_else_gets_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, pipe = Screen(), io.StringIO()
    for stream in (screen, pipe):
        with status_command._screen(False, True, stream) as show:
            show(look(status(step=1)))
            show(look(status(step=2)))
    assert "\x1b[1A" in screen.getvalue()  # up, over what stood there
    assert "\x1b" not in pipe.getvalue()
    assert [line for line in pipe.getvalue().splitlines() if "step" in line or not line] != []
    assert len(re.findall(r"step \d of 100", pipe.getvalue())) == 2
    lines = io.StringIO()
    with status_command._screen(True, True, lines) as show:
        show(look(status(step=1)))
        show(look(None, REFUSED))
    assert [json.loads(line)["step"] for line in lines.getvalue().splitlines()] == [1, None]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    opened = Terminals(tmp_path)
    yield opened
    opened.close()


@pytest.mark.network
@pytest.mark.e2e
def test_nobody_answers_is_exit_code_1_or_watched_until_ctrl_c(terminals: Terminals, tmp_path: Path) -> None:
    invite = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER_ID}#{RUN}"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    once = terminals.type("status", invite, TMPDIR=str(temporary))
    watching = terminals.type("status", invite, "--watch", "0.5", "--json", TMPDIR=str(temporary))
    assert once.ended_clean() == 1
    assert once.errors()[0].startswith("swarm: refused: nothing listens at this address (")
    assert len(once.lines()) == 2  # and the next step
    wait_until(lambda: len(watching.lines()) >= 3, 30.0, watching)
    watching.process.send_signal(signal.SIGINT)
    assert watching.ended_clean() == 130
    told = [json.loads(line) for line in watching.lines() if line.startswith("{")]
    assert {each["unreachable"][0]["reason"] for each in told} == {"refused"}
    assert len({each["unreachable"][0]["since"] for each in told}) == 1
    assert list(temporary.iterdir()) == []
    assert list(Path(tempfile.gettempdir()).glob("swarm-status-*")) == []
    assert not (tmp_path / "anna" / ".local").exists()  # no home, no identity that stays
