"""Figures of a benchmark: each beside its yardstick, as a ratio; printed as a table, written as JSON.

A benchmark alternates ours, yardstick, ours, yardstick ... so that whatever else the machine does meets both.
"""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True):
    """One measured number, what it is compared with, and what we aim at."""

    what: str
    ours: float
    yardstick: float
    unit: str
    yardstick_is: str
    aim: str = ""
    """Of the ratio ours / yardstick, as `<= 1.5` or `>= 0.8`; or of ours itself, with its unit: `< 50 ms`. Or none."""

    @property
    def ratio(self) -> float:
        """Ours over the yardstick; NaN where the yardstick is 0."""
        return self.ours / self.yardstick if self.yardstick else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if not self.aim:
            return None
        sign, limit, *unit = self.aim.split()
        value = self.ours if unit else self.ratio
        return value >= float(limit) if sign.startswith(">") else value <= float(limit)


class Result(Struct, frozen=True, kw_only=True):
    """All figures of one benchmark, and what a reader must know to judge them."""

    benchmark: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    machine: str
    load_before: float
    """One-minute load average when the benchmark began: other work on the machine makes figures worse."""
    measured_s: float
    """Unix time at the end."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The lower median."""
    return percentile(values, 0.5)


def machine() -> str:
    """What kind of computer this is, without its name."""
    return f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}"


def table(figures: Sequence[Figure]) -> list[str]:
    """The figures as a Markdown table."""
    lines = [
        "| figure | ours | yardstick | ratio | aim | met |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for each in figures:
        met = {True: "yes", False: "no", None: ""}[each.met]
        yardstick = f"{_number(each.yardstick)} {each.unit}: {each.yardstick_is}"
        ours = f"{_number(each.ours)} {each.unit}"
        lines.append(f"| {each.what} | {ours} | {yardstick} | {_number(each.ratio)} | {each.aim} | {met} |")
    return lines


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


Measured = tuple[list[Figure], list[str]]


def main(name: str, description: str, measure: Callable[[], Measured]) -> Result:
    """The command line of one benchmark: measure, print the table, write `--json FILE`; what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    figures, notes = measure()
    result = Result(
        benchmark=name,
        figures=tuple(figures),
        notes=tuple(notes),
        machine=machine(),
        load_before=round(load, 2),
        measured_s=time.time(),
    )
    print("\n".join([*table(figures), *(f"- {note}" for note in notes), f"- load before: {load:.2f}; {machine()}"]))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result
