"""What people see of a running swarm: a live picture on a terminal, plain lines elsewhere, raw events for machines.

with screen_for(Output.LIVE, state) as screen:
    await watched(lambda: run_trainer(options, on_ready), [Tail(path)], state, screen)
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from bootstrap.errors import one_line
from bootstrap.events import Event, Tail
from bootstrap.state import GONE, Download, Led, PeerRow, SwarmState, led_by
from protocols.identity import short

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 0.25  # fast enough to feel live, slow enough to cost nothing beside training
WARNING_SHOWN_S = 60.0  # those that repeat what still holds come more often
SILENT_S = 6.0  # three lost beats, as everywhere
DOWNLOAD_FRESH_S = 3.0  # one that has said nothing for so long has ended, or its peer has
DOWNLOADS_SHOWN = 4  # bars; a simulation may have dozens
_MIB = 1024 * 1024
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_LOUD = {"warning", "final", "ready", "eval", "mode", "lost"}
# A line at most this often of each other kind, so that a log of a long run stays readable.
_LINE_EVERY_S = {"step": 2.0, "generated": 10.0, "adapter": 10.0, "download": 3.0, "refused": 10.0, "round": 10.0}


class Output(Enum):
    """How progress is shown."""

    LIVE = "live"
    LINES = "lines"
    JSON = "json"


class Screen(Protocol):
    """Somewhere to show events."""

    def show(self, events: Sequence[Event]) -> None:
        """These have just been applied to the state."""


def choose_output(as_json: bool) -> Output:
    """JSON if asked for, the live picture on a terminal, lines elsewhere."""
    if as_json:
        return Output.JSON
    return Output.LIVE if sys.stdout.isatty() else Output.LINES


@contextmanager
def screen_for(output: Output, state: SwarmState, stream: TextIO | None = None) -> Iterator[Screen]:
    """A screen that is put away behind the block, whatever happened in it."""
    stream = stream or sys.stdout
    if output is Output.LIVE:
        with _live(state, stream) as screen:
            yield screen
    else:
        yield JsonLines(stream) if output is Output.JSON else PlainLines(stream)


async def watched(
    work: Callable[[], Awaitable[None]], tails: Sequence[Tail], state: SwarmState, screen: Screen
) -> None:
    """Do the work and meanwhile show what appears in these files, to the last line."""
    watcher = asyncio.create_task(_follow(tails, state, screen))
    try:
        await work()
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        show_new(tails, state, screen)


async def _follow(tails: Sequence[Tail], state: SwarmState, screen: Screen) -> None:
    while True:
        show_new(tails, state, screen)
        await asyncio.sleep(REFRESH_S)


def show_new(tails: Iterable[Tail], state: SwarmState, screen: Screen) -> list[Event]:
    """One turn: read, apply, show. The events in the order of their times."""
    events = sorted((event for tail in tails for event in tail.read()), key=lambda event: event["t"])
    for event in events:
        state.apply(event)
    screen.show(events)
    return events


class JsonLines:
    """The events as they were written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, events: Sequence[Event]) -> None:
        for event in events:
            self._stream.write(msgspec.json.encode(event).decode() + "\n")
        self._stream.flush()


class PlainLines:
    """A line for each event that matters, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_s: dict[tuple[str, str], float] = {}
        self._term = -1
        self._told: set[str | None] = set()
        """Who was said to lead in this term."""

    def show(self, events: Sequence[Event]) -> None:
        for event in events:
            text = describe(event)
            if text is not None and self._is_due(event):
                clock = time.strftime("%H:%M:%S", time.localtime(event["t"]))
                self._stream.write(f"{clock} {event['role']} {short(event['peer'])}  {text}\n")
        self._stream.flush()

    def _is_due(self, event: Event) -> bool:
        kind = event["event"]
        if kind in _LOUD:
            return True
        led = led_by(event)
        if led is not None:
            return self._is_news(led)
        last_s = self._last_s.get((kind, event["peer"]))
        if last_s is not None and 0 <= event["t"] - last_s < _LINE_EVERY_S.get(kind, 0.0):
            return False
        self._last_s[kind, event["peer"]] = event["t"]
        return True

    def _is_news(self, led: Led) -> bool:
        """Every peer tells who leads, one after the other: one line is enough."""
        if led.term > self._term:
            self._term, self._told = led.term, set()
        if led.term < self._term or led.coordinator in self._told:
            return False
        self._told.add(led.coordinator)
        return True


def describe(event: Event) -> str | None:
    """One line about an event; None for those that are for machines only."""
    match event:
        case {"event": "ready", "addresses": addresses, "run": run}:
            return f"in the swarm of {run}, listening on {', '.join(addresses) or 'nothing'}"
        case {"event": "reachability", "kind": "outbound only", "role": "inference", "reason": reason}:
            return f"{reason}: works over the connections that it opens itself"
        case {"event": "step", "step": step, "skipped": str(reason)}:
            return f"step {step} skipped: {reason}"
        case {"event": "step", "step": step}:
            return (
                f"step {step}  v{event.get('version')}  reward {number(event.get('reward'), 3)}  "
                f"loss {number(event.get('loss'), 4)}  lag {number(event.get('lag_max'), 0)}"
            )
        case {"event": "eval", "greedy": greedy}:
            return f"held-out accuracy {percent(greedy)} on {event.get('problems')} problems"
        case {"event": "adapter", "version": version}:
            got = f"{size(event.get('bytes'))} in {number(event.get('fetch_s'), 2)} s"
            return f"loaded v{version}, {got}" + (f" from {_sources(event['sources'])}" if event.get("sources") else "")
        case {"event": "download"}:
            return f"fetching v{event['version']}: {_download_text(Download.of(event))}"
        case {"event": "generated", "groups": groups}:
            return f"{groups} groups, {number(event.get('tokens_per_s'), 0)} tokens/s, v{event.get('version')}"
        case {"event": "refused", "door": door, "reason": reason, "count": count}:
            return f"refused at {door}: {reason} ({count})"
        case {"event": "warning", "text": text}:
            return f"warning: {one_line(text)}"
        case {"event": "final"}:
            counts = event.get("counts") or event.get("receipts") or {}
            version = event.get("version")
            at = "" if version is None else f" at v{version}"
            return f"done{at}: " + (", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing was sent")
        case _:
            return _describe_coordination(event)


def _describe_coordination(event: Event) -> str | None:
    match event:
        case {"event": "coordinator", "state": "stepped down", "term": term, "reason": reason}:
            return f"term {term}: no longer coordinates ({reason})"
        case {"event": "leader" | "coordinator"}:
            led = led_by(event)
            return None if led is None else _describe_leader(led)
        case {"event": "mode", "mode": mode}:
            rates = f"{number(event.get('groups_per_s'), 2)} groups/s are made, {_needed(event)} needed"
            return f"mode is {mode} from now on: {rates}"
        case {"event": "round", "version": version, "groups": groups}:
            moved = f", {event['moved']} moved" if event.get("moved") else ""
            stalled = "".join(f", {short(peer_id)} stalled" for peer_id in event.get("stalled", ()))
            return f"round of v{version}: {groups} groups in {number(event.get('seconds'), 1)} s{moved}{stalled}"
        case {"event": "lost", "peer_id": peer_id}:
            return f"{short(peer_id)} is silent; its work is given to others"
        case _:
            return None


def _describe_leader(led: Led) -> str:
    if led.coordinator is None:
        return f"term {led.term}: no coordinator is heard" if led.term else "no coordinator yet"
    return f"term {led.term}: {short(led.coordinator)} coordinates"


def _needed(event: Event) -> str:
    """Infinite, written as null: a version takes longer to arrive than to be replaced."""
    return "more than any rate" if event.get("needed_per_s") is None else f"{event['needed_per_s']:.2f}"


@contextmanager
def _live(state: SwarmState, stream: TextIO) -> "Iterator[Screen]":
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        class Picture:
            def show(self, events: Sequence[Event]) -> None:
                live.update(render(state, time.time(), console.width), refresh=True)

        yield Picture()


def render(state: SwarmState, now_s: float, width: int) -> "RenderableType":
    """The picture of a state."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [_peer_table(state.peers) if state.peers else Text("starting ...")]
    if state.steps is not None or state.step:
        lines.append(_progress(state, now_s, width))
    downloads = [row.download for row in state.peers.values() if row.download is not None]
    fresh = [each for each in downloads if now_s - each.said_s < DOWNLOAD_FRESH_S]
    lines += [_download_bar(each, width) for each in fresh[:DOWNLOADS_SHOWN]]
    if state.rewards:
        last = next((reward for reward in reversed(state.rewards) if reward is not None), None)
        spark = sparkline(state.rewards, max(8, min(_SPARK_WIDTH, width - 24)))
        lines.append(Text.assemble(("reward ", "bold"), (spark, "green"), f" {number(last, 3)}"))
    lines.append(Text(_facts(state)))
    lines += [Text(f"refused {count} at {door}: {reason}") for (_, door, reason), count in state.refused.items()][-3:]
    recent = [text for text, said_s in state.warnings.items() if now_s - said_s < WARNING_SHOWN_S]
    lines += [Text(f"! {one_line(text)}", style="yellow") for text in recent]
    return Group(*lines)


def _peer_table(peers: "Mapping[str, PeerRow]") -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (("peer", "left"), ("role", "left"), ("version", "right"), ("tokens/s", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("state")
    order = ("bootstrap", "trainer", "inference")
    for row in sorted(peers.values(), key=lambda row: order.index(row.role) if row.role in order else len(order)):
        silent = row.silent_s is not None and row.silent_s >= SILENT_S
        text = f"silent {row.silent_s:.0f} s" if silent and row.silent_s is not None else row.state
        version = "-" if row.version is None else f"v{row.version}"
        style = "red" if row.state == GONE else "yellow" if silent else ""
        table.add_row(short(row.peer_id), row.role, version, number(row.tokens_per_s, 0), text, style=style)
    return table


def _progress(state: SwarmState, now_s: float, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left_s = state.seconds_left(now_s)
    row = Table.grid(padding=(0, 1))
    target = "?" if state.steps is None else str(state.steps)
    bar = ProgressBar(total=state.steps, completed=state.step, width=max(8, min(_SPARK_WIDTH, width - 40)))
    remaining = "" if left_s is None or state.step == state.steps else f"{duration(left_s)} left"
    row.add_row("step", f"{state.step}/{target}", bar, remaining)
    return row


def _download_bar(download: Download, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=download.bytes, completed=download.received_bytes, width=max(8, min(24, width - 64)))
    row.add_row(f"v{download.version}", bar, _download_text(download))
    return row


def _download_text(download: Download) -> str:
    """`43.2%, 3.5 of 8.0 MiB, 1.2 MiB/s from 5 sources`, or what is wrong in place of rate and sources."""
    share = percent(download.received_bytes / download.bytes) if download.bytes else "-"
    per_s = download.bytes_per_s
    rate = f"{per_s / _MIB:.1f} MiB/s" if per_s >= _MIB / 10 else f"{per_s / 1024:.0f} KiB/s"
    so_far = f"{download.received_bytes / _MIB:.1f} of {download.bytes / _MIB:.1f} MiB"
    waiting = download.sources == 0 and download.trouble
    flow = f"no source ({one_line(download.trouble)})" if waiting else f"{rate} from {_sources(download.sources)}"
    return f"{share}, {so_far}, {flow}"


def _sources(count: int) -> str:
    return "1 source" if count == 1 else f"{count} sources"


def _facts(state: SwarmState) -> str:
    facts = [
        ("mode", state.mode),
        ("coordinator", _leading(state)),
        ("version", None if state.version is None else f"v{state.version}"),
        ("lag", None if state.lag is None else f"{state.lag} (most {state.lag_max})"),
        ("tokens/s", None if state.tokens_per_s is None else f"{state.tokens_per_s:.0f}"),
        ("generated", state.generated),
        ("queued", state.queued),
        ("loss", None if state.loss is None else f"{state.loss:.4f}"),
        ("held-out", " -> ".join(percent(greedy) for _, greedy in state.evals) or None),
        ("skipped", state.skipped.total() or None),
        ("rounds", f"{state.rounds} ({state.moved} groups moved)" if state.rounds else None),
        ("receipts", ", ".join(f"{count} {name}" for name, count in state.receipts.items() if count) or None),
    ]
    return "  ".join(f"{name} {value}" for name, value in facts if value is not None)


def _leading(state: SwarmState) -> str | None:
    if state.led is None:
        return None
    who = "none" if state.led.coordinator is None else short(state.led.coordinator)
    return f"{who} (term {state.led.term})"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """At most `width` block characters; each is the mean of its share of the values, blank where there is none."""
    count = min(width, len(values))
    buckets = [_known_mean(values[at * len(values) // count : (at + 1) * len(values) // count]) for at in range(count)]
    known = [value for value in buckets if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BLOCKS[round((value - low) * scale)] for value in buckets)


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: Any, digits: int) -> str:
    """A number, or `-` for one that is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return "-" if share is None else f"{share:.1%}"


def size(num_bytes: float | None) -> str:
    """Bytes for people: powers of 1024."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def duration(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
