"""The Julia engine's own tests of kernels, memory and training, compiled as users' code is, in their own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest


@pytest.mark.campaign
@pytest.mark.timeout(1860)
def test_the_julia_engine_passes_its_tests_of_kernels_memory_and_training(
    julia_groups: Mapping[str, Sequence[str]], run_julia_tests: Callable[..., dict[str, int]]
) -> None:
    assert all(run_julia_tests(julia_groups["optimised"]).values())
