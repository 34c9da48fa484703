"""Run every benchmark, one after the other, and write the figures into docs/benchmarks.md.

python -m benchmarks.all                      run all, rewrite the tables
python -m benchmarks.all --only fetch ingest  run some; the other tables stay
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.figures import Result, table

NAMES = ("announcement", "fetch", "ingest", "trainer_share", "overlap", "coordinator")
DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
LIMIT_S = 300.0  # a guess with room: the longest takes 230 s


def section(result: Result) -> str:
    """What stands between the markers of a benchmark."""
    day = time.strftime("%Y-%m-%d", time.gmtime(result.measured_s))
    notes = [*result.notes, f"{day}, {result.machine}, load average before {result.load_before:.2f}"]
    return "\n".join([*table(result.figures), "", *(f"- {note}" for note in notes)])


def rewritten(text: str, result: Result) -> str:
    """The document with this benchmark's figures. Raises ValueError when it has no place for them."""
    return replaced(text, result.benchmark, section(result))


def replaced(text: str, name: str, body: str) -> str:
    """The document with this between the markers of that name. Raises ValueError when it has not one such place."""
    begin, end = (f"<!-- {word} {name} -->" for word in ("begin", "end"))
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    new, count = re.subn(pattern, lambda _: f"{begin}\n{body}\n{end}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page needs one '{begin}' and one '{end}'")
    return new


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description="Run the benchmarks.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    names = parser.parse_args().only
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"\n{name}", flush=True)
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
            try:
                subprocess.run(command, check=True, timeout=LIMIT_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(error)
                failed.append(name)
                continue
            result = msgspec.json.decode(file.read_bytes(), type=Result)
            DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8"), result), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
