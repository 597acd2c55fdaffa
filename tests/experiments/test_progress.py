"""What people read: times and sizes in fitting units, columns that line up, stages with their times."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from experiments.progress import Stages, download, duration, size, table


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.000812, "812 µs"),
        (0.0032, "3.2 ms"),
        (0.153, "153 ms"),
        (1.4234, "1.42 s"),
        (125, "2 min 05 s"),
        (59.999, "60.00 s"),
        (3600, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (512, "512 B"), (4800, "4.8 kB"), (1.03e9, "1.03 GB"), (152_600_000, "153 MB")]
)
def test_sizes(count: float, expected: str) -> None:
    assert size(count) == expected


def test_plain_columns_line_up_and_numbers_are_flush_right() -> None:
    text = io.StringIO()
    table(Console(file=text), ["ENGINE", "TIME"], [["numpy", "9 ms"], ["torch-compile", "[1.5] ms"]])
    assert text.getvalue().splitlines() == [
        "ENGINE             TIME",
        "numpy              9 ms",
        "torch-compile  [1.5] ms",
    ]


def test_a_terminal_gets_the_same_cells() -> None:
    text = io.StringIO()
    table(Console(file=text, force_terminal=True, width=80), ["ENGINE", "TIME"], [["torch", "[bold] ms"]])
    assert "torch" in text.getvalue() and "[bold] ms" in text.getvalue()


def test_a_download_is_announced_once_per_file() -> None:
    text = io.StringIO()
    show = download(Console(file=text, width=80))
    for so_far in (0, 100, 200):
        show("images.gz", so_far, 9_912_422)
    assert text.getvalue() == "downloading images.gz (9.91 MB)\n"


def test_stages_are_timed_even_when_they_fail() -> None:
    stages = Stages(Console(file=io.StringIO()))
    with pytest.raises(ZeroDivisionError), stages.stage("divide"):
        raise ZeroDivisionError
    ((name, seconds),) = stages.seconds
    assert name == "divide" and stages.total() == seconds >= 0
