"""`swarm status INVITE`: how is the run? Asked as a stranger, of the peers that the invitation names.

    addresses --StatusRequest--> bootstrap peers --who leads?--> the coordinator
                                       +-- the best-informed answer --> Look --> table or JSON (docs/status.md)

The asker has a key of its own for as long as it asks. It says no hello, sends no heartbeat and joins no directory,
so nobody counts it as a peer. What is shown is the word of the peer that answered, and nothing in it may harm
the terminal: labels lose their control characters, numbers keep their width.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import msgspec

from bootstrap.errors import ADVICE, one_line
from bootstrap.invite import Invite
from bootstrap.view import SILENT_S, duration
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import PeerStatus, Refused, Status, StatusRequest, decode_reply, encode
from swarm.host import Host, HostConfig
from swarm.identity import KEY_FILE, load_identity
from swarm.node import JoinFault

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT = 1
CONNECT_S = 8.0  # as a peer that joins
ANSWER_S = 5.0
PATIENCE_S = 2.0  # for other addresses, once one has answered; and for a coordinator whom we know by name only
_ROLES = ("bootstrap", "trainer", "inference")  # as they stand in the table
_WIDE = 120  # columns of a terminal from which on engine and device fit
_LABEL_CHARS_MAX = 19  # of an engine or a device in the table, so that both do
_TABLE_LINES = 5  # around its rows: two of headings, a rule, "and 7 more peers", an empty one
_PIPE_WIDTH = 200  # where there is no terminal: more than any table needs


class Answer(NamedTuple):
    """What one peer says, and which."""

    peer_id: str
    status: Status


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An address of the invitation that gives no answer."""

    address: str
    fault: TransportFault
    since_s: float
    """Unix time of the first failure in a row."""


@dataclass(frozen=True, slots=True)
class Look:
    """The run at one moment, as far as anybody told."""

    run: str
    at_s: float
    """Unix time."""
    answer: Answer | None
    """Of the peer that knows most; None when nobody answered."""
    unreachable: tuple[Unreachable, ...]
    last_answer_s: float | None
    """Unix time."""


class Asker:
    """Asks all addresses of an invitation at once, again and again. Made by `asking`."""

    def __init__(self, host: Host, invite: Invite) -> None:
        self._host, self._run = host, invite.run
        self._addresses = tuple(dict.fromkeys(invite.addresses))
        self._request = encode(StatusRequest(invite.run))
        self._tasks: dict[str, asyncio.Task[Answer | TransportFault]] = {}
        self._unreachable: dict[str, Unreachable] = {}
        self._last_answer_s: float | None = None

    async def look(self) -> Look:
        """Ask. Raises TransportFault when our own p2pd has died; that others cannot be reached is in the Look."""
        for address in self._addresses:
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._ask_at(address))
        await self._wait()
        answers = self._collect(time.time())
        if self._host.died.is_set():
            raise TransportFault("p2pd died")
        answers += await self._ask_coordinators(answers)
        best = max(answers, key=_knowledge, default=None)
        at_s = time.time()
        if best is not None:
            self._last_answer_s = at_s
        unreachable = tuple(self._unreachable[each] for each in self._addresses if each in self._unreachable)
        return Look(self._run, at_s, best, unreachable, self._last_answer_s)

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _wait(self) -> None:
        """Until one has answered, and a little longer; or until all have failed. Who is late may answer next time."""
        pending, answered = set(self._tasks.values()), False
        while pending:
            patience_s = PATIENCE_S if answered else None
            done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            answered = answered or any(isinstance(task.result(), Answer) for task in done)

    def _collect(self, now_s: float) -> list[Answer]:
        """The answers that are there; who gave none is unreachable from now on, or still."""
        answers = []
        for address in self._addresses:
            known = self._unreachable.get(address)
            result: Answer | TransportFault
            if self._tasks[address].done():
                result = self._tasks.pop(address).result()
            else:
                result = known.fault if known else TransportFault("timeout", "no answer yet")
            if isinstance(result, Answer):
                self._unreachable.pop(address, None)
                answers.append(result)
            else:
                self._unreachable[address] = Unreachable(address, result, known.since_s if known else now_s)
        return answers

    async def _ask_coordinators(self, answers: Iterable[Answer]) -> list[Answer]:
        """Ask those who are said to lead. We know their names only; p2pd looks for a way through the peers we reach."""
        named = {answer.status.coordinator for answer in answers} - {answer.peer_id for answer in answers}
        replies = await asyncio.gather(*(self._ask(peer_id, PATIENCE_S) for peer_id in named if peer_id is not None))
        return [reply for reply in replies if isinstance(reply, Answer)]

    async def _ask_at(self, address: str) -> Answer | TransportFault:
        try:
            peer_id = await self._host.connect(address, CONNECT_S)
        except TransportFault as fault:
            return fault
        return await self._ask(peer_id, ANSWER_S)

    async def _ask(self, peer_id: str, timeout_s: float) -> Answer | TransportFault:
        try:
            reply = decode_reply(await self._host.call(peer_id, self._request, timeout_s))
        except TransportFault as fault:
            return fault
        except PeerFault as fault:
            return TransportFault("protocol mismatch", f"{short(peer_id)} answers: {fault}")
        match reply:
            case Status() if reply.run == self._run:
                return Answer(peer_id, reply)
            case Refused("unknown run"):
                return TransportFault("unknown run", f"says {short(peer_id)}")
            case Refused("no manifest yet"):
                return TransportFault("no manifest", f"says {short(peer_id)}")
            case Refused(reason):
                return TransportFault("protocol mismatch", f"{short(peer_id)} refuses: {reason}")
            case _:
                return TransportFault("protocol mismatch", f"{short(peer_id)} gives no status of this run")


def _knowledge(answer: Answer) -> tuple[int, bool, int, int]:
    """The higher, the better informed: of the newest term, the coordinator itself, then by progress."""
    status = answer.status
    term, head, step = (-1 if known is None else known for known in (status.term, status.head, status.step))
    return term, status.leading, head, step


@asynccontextmanager
async def asking(invite: Invite) -> AsyncIterator[Asker]:
    """An asker with a throw-away identity. Its key is gone as soon as p2pd has read it."""
    with tempfile.TemporaryDirectory(prefix="swarm-status-") as folder:
        identity, _ = load_identity(Path(folder) / KEY_FILE)
        host = await Host.start(identity, HostConfig(listen=()))
    asker = Asker(host, invite)
    try:
        yield asker
    finally:
        await asker.close()
        await host.close()


async def show_status(invite: Invite, every_s: float | None, as_json: bool, stream: TextIO | None = None) -> None:
    """Ask and show: once, or every so often until cancelled. Raises JoinFault when nobody answers, unless watching."""
    async with asking(invite) as asker:
        with _screen(as_json, every_s is not None, stream or sys.stdout) as show:
            while True:
                began_s = time.monotonic()
                look = await asker.look()
                if every_s is None and look.answer is None:
                    raise JoinFault([(each.address, each.fault) for each in look.unreachable])
                show(look)
                if every_s is None:
                    return
                await asyncio.sleep(max(0.0, began_s + every_s - time.monotonic()))


# ---------------------------------------------------------------------- for machines


def status_fields(look: Look) -> dict[str, Any]:
    """One look as JSON takes it (docs/status.md). What nobody told is null."""
    told = _plain(look.answer.status) if look.answer is not None else {}
    names = [field.name for field in msgspec.structs.fields(Status) if field.name != "run"]
    return {
        "format": FORMAT,
        "t": round(look.at_s, 3),
        "run": look.run,
        "answered_by": look.answer.peer_id if look.answer is not None else None,
        "unreachable": [
            {
                "address": each.address,
                "reason": each.fault.code,
                "detail": one_line(each.fault.detail),
                "since": round(each.since_s, 3),
            }
            for each in look.unreachable
        ],
        **{name: told.get(name) for name in names},
    }


def _plain(status: Status) -> Mapping[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(status)
    for row, peer in zip(fields["peers"], status.peers, strict=True):
        row["lag"] = _lag(status, peer)
        for label in ("engine", "device"):
            row[label] = None if row[label] is None else one_line(row[label])
    return fields


def _lag(status: Status, peer: PeerStatus) -> int | None:
    """How many versions a peer is behind the head."""
    return None if status.head is None or peer.version is None else status.head - peer.version


# ---------------------------------------------------------------------- for people


@contextmanager
def _screen(as_json: bool, watching: bool, stream: TextIO) -> Iterator[Callable[[Look], None]]:
    """Where looks are shown: JSON lines, one picture that changes, or blocks of text."""
    if as_json:
        yield lambda look: print(msgspec.json.encode(status_fields(look)).decode(), file=stream, flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH)
    if watching and stream.isatty():
        with Live(Text("asking ..."), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda look: live.update(render(look, console.width, watching, console.height), refresh=True)
    else:
        yield lambda look: console.print(render(look, console.width, watching))


def render(look: Look, width: int, watching: bool = False, height: int | None = None) -> "RenderableType":
    """The picture of a look; with a height, of as many peers as fit."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [Text(text) for text in _about(look, watching)]
    for each in look.unreachable:
        since = f" since {_clock(each.since_s)}" if watching else ""
        advice = ADVICE.get(each.fault.code)
        reason = f"{each.fault.code}: {advice.text}" if advice else each.fault.code
        lines.append(Text(f"bootstrap unreachable{since}: {each.address}: {reason}", style="yellow"))
    if look.answer is not None:
        status = look.answer.status
        peers = sorted(status.peers, key=lambda peer: (_ROLES.index(peer.role), peer.peer_id))
        fitting = peers if height is None else peers[: max(1, height - len(lines) - _TABLE_LINES)]
        lines.append(_peer_table(status, fitting, width) if fitting else Text("no peers"))
        if left_out := status.left_out + len(peers) - len(fitting):
            lines.append(Text(f"and {left_out} more peers"))
    return Group(*lines, *([Text()] if watching else []))


def _about(look: Look, watching: bool) -> Iterator[str]:
    """The lines above the table."""
    at = f"   at {_clock(look.at_s)}" if watching else ""
    if look.answer is None:
        yield f"run          {look.run}{at}"
        last = "so far" if look.last_answer_s is None else f"since {_clock(look.last_answer_s)}"
        yield f"nobody has answered {last}"
        return
    peer_id, status = look.answer
    yield f"run          {look.run}{', ended' if status.ended else ''}{at}"
    progress = [
        f"head {_version(status.head)}",
        f"step {_count(status.step)} of {status.max_steps}",
        f"max_lag {status.max_lag}",
        f"queued {_count(status.queued)}",
    ]
    yield f"mode         {status.mode or 'not chosen yet'}   {'   '.join(progress)}"
    yield _coordinator(peer_id, status)
    yield f"groups       {_count(status.accepted)} accepted, {_count(status.stale)} stale"
    if not status.leading:
        yield f"seen by      {short(peer_id)}: itself and the peers that beat to it; a coordinator sees all"


def _coordinator(told_by: str, status: Status) -> str:
    if status.coordinator is not None:
        hearsay = "" if status.leading else f"   (as {short(told_by)} says)"
        return f"coordinator  {short(status.coordinator)}, term {_count(status.term)}{hearsay}"
    since = "is known" if status.vacant_s is None else f"since {_age(status.vacant_s)}"
    return f"no coordinator {since}" + (f", the last was in term {status.term}" if status.term else "")


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Status, PeerStatus], str]
    right: bool = True
    wide: bool = False
    """Left out where the terminal is narrow."""


_COLUMNS = (
    _Column("peer", lambda _, peer: short(peer.peer_id), right=False),
    _Column("role", lambda _, peer: peer.role, right=False),
    _Column("engine", lambda _, peer: _label(peer.engine), right=False, wide=True),
    _Column("device", lambda _, peer: _label(peer.device), right=False, wide=True),
    _Column("version", lambda _, peer: _version(peer.version)),
    _Column("lag", lambda status, peer: _count(_lag(status, peer) if peer.role == "inference" else None)),
    _Column("tok/s", lambda _, peer: _rate(peer.tokens_per_s, 0)),
    _Column("grp/s", lambda _, peer: _rate(peer.groups_per_s, 2)),
    _Column("in\nflight", lambda _, peer: str(peer.in_flight)),
    _Column("outbox", lambda _, peer: str(peer.outbox)),
    _Column("credit", lambda _, peer: _count(peer.credit if peer.role == "inference" else None)),
    _Column("accepted\n/stale", lambda _, peer: f"{_count(peer.accepted)}/{_count(peer.stale)}"),
    _Column("silent", lambda _, peer: f"{_rate(peer.silent_s, 0)} s"),
)


def _peer_table(status: Status, peers: Iterable[PeerStatus], width: int) -> "RenderableType":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in _COLUMNS if width >= _WIDE or not column.wide]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)  # one space between columns: all fit into 80
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.heading, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for peer in peers:
        style = "yellow" if peer.silent_s >= SILENT_S else ""
        table.add_row(*(Text(column.cell(status, peer)) for column in columns), style=style)
    return table


def _label(text: str | None) -> str:
    return "-" if text is None else one_line(text)[:_LABEL_CHARS_MAX]


def _version(version: int | None) -> str:
    return "-" if version is None else f"v{version}"


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


def _rate(rate: float | None, digits: int) -> str:
    """A number that may be anything, in seven characters."""
    if rate is None:
        return "-"
    return f"{rate:.{digits if rate < 100 else 0}f}" if 0 <= rate < 10_000 else f"{rate:.0e}"


def _age(seconds: float) -> str:
    """A time span that may be anything."""
    return duration(seconds) if 0 <= seconds < 1e8 else f"{seconds:.0e} s"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
