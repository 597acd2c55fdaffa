"""The figure of the engines' design: its memory plan is one that the engine made."""

from __future__ import annotations

from pathlib import Path

from experiments.report import design


def test_the_figure_is_drawn_and_drawn_the_same_again(tmp_path: Path) -> None:
    design.draw(tmp_path / "one")
    design.draw(tmp_path / "two")
    for suffix in (".svg", ".png"):
        first = tmp_path.joinpath(f"one{suffix}").read_bytes()
        assert len(first) > 10_000
        assert first == tmp_path.joinpath(f"two{suffix}").read_bytes()


def test_the_plan_is_that_of_a_whole_training_step() -> None:
    tape = design.compiled()
    assert tape.inputs[0].shape[0] == design.BATCH
    assert len(tape.outputs) > 2  # the loss, and a gradient for each parameter
    assert 0 < tape.plan.size < sum(out.nbytes for step in tape.steps for out in step.outs)
