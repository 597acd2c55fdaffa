"""The Julia engine's own tests of ops, dual numbers and compiled functions, compiled quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from bridge.libjulia.find import Julia
from bridge.libjulia.sysimage import KEEPS_MACHINE_CODE


@pytest.mark.campaign
@pytest.mark.timeout(1860)
def test_the_julia_engine_passes_its_tests_of_ops_and_compiled_functions(
    julia: Julia, julia_groups: Mapping[str, Sequence[str]], run_julia_tests: Callable[..., dict[str, int]]
) -> None:
    # Newer versions have most of it compiled already. The loops of the kernels ask for optimisation, and get it.
    options = () if julia.release >= KEEPS_MACHINE_CODE else ("-O0",)
    assert all(run_julia_tests(julia_groups["quick"], *options).values())
