"""The Julia engine's sweep over Julia's functions, in a process that interprets: each call is made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest


@pytest.mark.timeout(1860)
def test_the_julia_engine_agrees_with_julia(
    julia_groups: Mapping[str, Sequence[str]], run_julia_tests: Callable[..., dict[str, int]]
) -> None:
    assert all(run_julia_tests(julia_groups["sweep"], "--compile=min").values())
