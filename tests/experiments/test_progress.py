"""What people read: columns that line up, stages with their times."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from experiments import output
from experiments.progress import Stages, download, table


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


@pytest.mark.parametrize("long", [True, False])
def test_what_is_waited_for_is_said_once_it_takes_over_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], long: bool
) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.01 if long else 60.0)
    here = output.Output("predict")
    said = threading.Event()
    say = here.say
    monkeypatch.setattr(here, "say", lambda text: (say(text), said.set()))
    with here.waiting("predicting 10 rows"):
        assert said.wait(30 if long else 0) is long
    assert capsys.readouterr().out == ("predicting 10 rows\n" if long else "")
    assert said.is_set() is long
