"""Reading the metrics files that peers write: JSONL, one event a line (swarm/metrics.py writes them)."""

import os
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]

_decoder = msgspec.json.Decoder(Event)

READ_BYTES_MAX = 4 * 1024 * 1024  # a turn; an event is under 1 KB, so this is far more than is ever written meanwhile


class Tail:
    """The events that are appended to a file, each once; the file may come later. Torn lines are skipped."""

    def __init__(self, path: Path, skip_existing: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if skip_existing and path.exists() else 0
        self._rest = b""

    def read(self) -> list[Event]:
        """What is new since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # begun anew
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                chunk = file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [event for line in lines if (event := _decode(line)) is not None]


def read_events(path: Path) -> list[Event]:
    """All events of a finished process, with those of the file before this one (metrics files are rotated once)."""
    events: list[Event] = []
    for part in (path.with_suffix(".old.jsonl"), path):
        tail = Tail(part)
        while more := tail.read():
            events += more
    return events


def _decode(line: bytes) -> Event | None:
    """None for a line that a killed process left half written."""
    try:
        event = _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
    return event if isinstance(event.get("event"), str) and isinstance(event.get("t"), int | float) else None
