"""The Julia engine's tests of tapes, loops and sessions: interpreted, but for what counts allocations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest


@pytest.mark.campaign
@pytest.mark.timeout(1860)
def test_the_julia_engine_passes_its_tests_of_tapes_loops_and_sessions(
    interpret: tuple[str, ...],
    julia_groups: Mapping[str, Sequence[str]],
    run_julia_tests: Callable[..., dict[str, int]],
) -> None:
    assert all(run_julia_tests(julia_groups["training"], *interpret).values())
