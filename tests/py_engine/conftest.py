"""What the tests of the numpy engine share."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

from py_engine.ad.ops import blocks, convolution


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch as an oracle for values and gradients; without it the test is skipped."""
    module = pytest.importorskip("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="module")
def copied_as_if_large() -> Iterator[None]:
    """Small arrays are copied as only large ones are: transposed in parts, and with their columns apart."""
    with mock.patch.object(blocks, "LEAST_ACROSS", (0, 0)), mock.patch.object(convolution, "LEAST_APART", 0):
        yield
