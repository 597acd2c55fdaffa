"""What the tests of the numpy engine share."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch as an oracle for values and gradients; without it the test is skipped."""
    module = pytest.importorskip("torch")
    module.set_num_threads(1)
    return module
