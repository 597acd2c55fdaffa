"""The test files and folders that begin first, or go to one worker, are there."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_order_names_test_files_that_are_there(request: pytest.FixtureRequest) -> None:
    (conftest,) = (found for found in request.config.pluginmanager.get_plugins() if hasattr(found, "FIRST"))
    files = list(Path(__file__).parent.rglob("test_*.py"))
    there = {path.name for path in files} | {path.parent.name for path in files}
    assert {*conftest.FIRST, *conftest.OF_THE_REPORT} <= there
