"""`swarm audit LEDGER`: prove offline, from the file alone, that a run kept its promises."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocols.ledger import Audit, audit


def audit_file(path: Path, run: str | None = None) -> Audit:
    """Audit a ledger file. Raises OSError or ValueError when there is no such file to read."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file; give the ledger itself, such as trainer/ledger.echo")
    return audit(path.read_bytes(), run)


def audit_fields(result: Audit) -> dict[str, Any]:
    """The audit as JSON takes it."""
    return {
        "ok": result.ok,
        **asdict(result),
        "histogram": {str(lag): n for lag, n in sorted(result.histogram.items())},
    }


def audit_lines(result: Audit) -> list[str]:
    """The audit for people."""
    head = f"v{result.head}" if result.head >= 0 else "none"
    ending = "has ended" if result.ended else "goes on, or the file was cut here"
    lines = [
        f"run        {result.run or 'unknown'}",
        f"entries    {result.entries}",
        f"versions   {result.versions}, newest {head}, the run {ending}",
        f"groups     {result.groups}, each trained once",
        f"lag        at most {result.max_lag}, the bound is {result.bound}",
    ]
    if result.ok:
        return [*lines, "ok: signatures, chain, contents and the staleness bound hold"]
    lines[3] = f"groups     {result.groups}"  # what stands behind a problem proves nothing
    return [*lines, *(f"problem: {problem}" for problem in result.problems)]
