"""Metrics as JSON lines: one file a peer, one object a line (docs/metrics.md).

Every line has `t` (unix seconds), `peer`, `role` and `event`. The live view, the report of a simulation
and any script of a user read the same file.
"""

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

FILE_NAME = "metrics.jsonl"
# About a day of a busy trainer at 1 KB a second; then the file starts anew, with one old one kept.
FILE_BYTES_MAX = 64 * 1024 * 1024


class Metrics:
    """Appends events to `<home>/metrics.jsonl`. A full disk stops the metrics, never the peer."""

    def __init__(self, home: Path, peer_id: str, role: str) -> None:
        self.path = home / FILE_NAME
        self._common = {"peer": peer_id, "role": role}
        self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        self._size = self.path.stat().st_size

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. Values must be JSON's; non-finite numbers become null: missing is not zero."""
        if self._file is None:
            return
        record = {"t": round(time.time(), 3), **self._common, "event": event, **fields}
        line = json.dumps(_jsonable(record), separators=(",", ":"))
        try:
            self._rotate(len(line) + 1)
            self._file.write(line + "\n")
            self._file.flush()
        except OSError:
            self._file = None  # said once, by the code that meets the full disk where it matters

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self, num_bytes: int) -> None:
        self._size += num_bytes
        if self._size > FILE_BYTES_MAX and self._file is not None:
            self._file.close()
            self.path.replace(self.path.with_suffix(".old.jsonl"))
            self._file = self.path.open("a", encoding="utf-8")
            self._size = num_bytes


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
