"""The tests of the Julia engine that Julia can interpret, since their code runs once: a third of the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from bridge.libjulia.find import Julia
from bridge.libjulia.sysimage import KEEPS_MACHINE_CODE


@pytest.mark.campaign
@pytest.mark.timeout(1860)
def test_the_julia_engine_passes_its_tests_of_transforms_and_control_flow(
    julia: Julia,
    interpret: tuple[str, ...],
    julia_groups: Mapping[str, Sequence[str]],
    run_julia_tests: Callable[..., dict[str, int]],
) -> None:
    # The engine itself is compiled, in the system image or, in newer versions, in its package image.
    options = () if julia.release >= KEEPS_MACHINE_CODE else ("-O0", *interpret)
    assert all(run_julia_tests(julia_groups["interpreted"], *options).values())
