"""The arithmetic and the page of the benchmarks; the benchmarks themselves are programs (`make bench`)."""

import math

import pytest

from benchmarks.all import DOCUMENT, NAMES, rewritten
from benchmarks.figures import Figure, Result, percentile, table


def figure(ours: float, yardstick: float, aim: str = "") -> Figure:
    return Figure(what="speed", ours=ours, yardstick=yardstick, unit="MB/s", yardstick_is="raw", aim=aim)


def result(name: str) -> Result:
    return Result(
        benchmark=name,
        figures=(figure(4.0, 5.0),),
        notes=("a note",),
        machine="2 cores",
        load_before=0.5,
        measured_s=86400.0,
    )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


@pytest.mark.parametrize(
    ("ours", "aim", "met"),
    [
        (8.0, ">= 0.8", True),
        (7.9, ">= 0.8", False),
        (15.0, "<= 1.5", True),
        (15.1, "<= 1.5", False),
        (15.1, "< 20 MB/s", True),  # an aim with a unit is one of ours itself
        (20.1, "< 20 MB/s", False),
        (1.0, "", None),
    ],
)
def test_an_aim_is_met_or_not(ours: float, aim: str, met: bool | None) -> None:
    assert figure(ours, 10.0, aim).met is met


def test_missing_is_not_zero() -> None:
    assert math.isnan(figure(1.0, 0.0).ratio)
    assert figure(1.0, 0.0, "<= 1.5").met is False


def test_the_table_shows_both_and_their_ratio() -> None:
    assert table([figure(4.0, 5.0, ">= 0.9")])[2:] == ["| speed | 4 MB/s | 5 MB/s: raw | 0.8 | >= 0.9 | no |"]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_a_place_for_each_benchmark(name: str) -> None:
    before = DOCUMENT.read_text(encoding="utf-8")
    after = rewritten(before, result(name))
    assert "- 1970-01-02, 2 cores, load average before 0.50" in after
    assert rewritten(after, result(name)) == after
    with pytest.raises(ValueError, match="<!-- begin other -->"):
        rewritten(before, result("other"))
