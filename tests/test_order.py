"""The order of the tests: files that begin first are there, and those of Julia wait until its engine is compiled."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest


def test_the_order_names_test_files_that_are_there(request: pytest.FixtureRequest) -> None:
    (conftest,) = (found for found in request.config.pluginmanager.get_plugins() if hasattr(found, "FIRST"))
    files = list(Path(__file__).parent.rglob("test_*.py"))
    there = {path.name for path in files} | {path.parent.name for path in files}
    assert {*conftest.FIRST, *conftest.OF_THE_REPORT} <= there


@pytest.mark.parametrize("of_julia", [True, False])
def test_only_tests_of_julia_wait_while_its_engine_is_compiled(
    of_julia: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (conftest,) = (found for found in request.config.pluginmanager.get_plugins() if hasattr(found, "WAIT_VARIABLE"))
    monkeypatch.setenv(conftest.WAIT_VARIABLE, str(tmp_path / "lock"))
    item = pytest.Function.from_parent(request.node.parent, name="test", callobj=lambda: None)
    if of_julia:
        item.add_marker(pytest.mark.julia)
    begins = threading.Thread(target=next, args=(conftest.pytest_runtest_protocol(item),), daemon=True)
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begins.start()
        begins.join(0.3 if of_julia else None)
        assert begins.is_alive() == of_julia
    begins.join()
