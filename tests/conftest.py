"""What all tests share: one printed seed, what may be skipped, a Julia, a browser, and the folder of real data sets."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from bridge.errors import JuliaUnavailableError
from bridge.libjulia.find import Julia, find

MUST_BE_THERE = (
    "torch",
    "tensorflow",
    "jax",
    "autograd",
    "memray",
    "pyarrow",
    "mpi4py",
    "distributed",
    "jinja2",
    "typst",
    "playwright",
    "pdoc",
)
"""Optional packages, without which tests are skipped on a user's machine, and CI fails."""

SKIPPED_IN_CI = ("does not apply: ", "needs the real data")
"""How the reasons begin for which CI may skip a test, too; any other fails the run there."""

FIRST = (
    *("test_paper.py", "test_reference_layers.py", "test_references.py", "py_engine"),
    *("test_julia_suite_interpreted.py", "test_julia_suite_optimised.py", "test_julia_suite_quick.py"),
    *("test_julia_suite_training.py", "test_cli.py", "test_microbenchmarks.py"),
    *("test_readme.py", "test_benchmarks.py", "test_packaging.py", "test_parity.py", "test_julia_packages.py"),
    *("test_resume.py", "test_julia_function.py", "test_julia_suite_sweep.py", "test_tutorial.py", "test_limits.py"),
)
"""The test files, and a folder of them, in the order in which they begin; the others follow.

First those that need no Julia, since `make test` compiles the Julia engine beside them; then those that take longest,
so that no worker is left alone with one of them at the end.
"""

OF_THE_REPORT = ("test_paper.py", "test_report.py", "test_figures.py", "test_html.py")
"""Test files for one worker: they look at the same report, which takes a while to make."""

WAIT_VARIABLE = "TWINGRAD_TEST_WAITS_FOR"
"""A file that is locked while `make test` compiles the Julia engine: tests marked `julia` wait for the lock's end."""

SEED_VARIABLE = "TWINGRAD_TEST_SEED"

PROFILE_VARIABLE = "TWINGRAD_TEST_PROFILE"
"""`campaign`: tests marked so draw a hundred times as much, without limits of time (`make campaign`)."""

CAMPAIGN = os.environ.get(PROFILE_VARIABLE) == "campaign"

# In CI the same examples every time: a failure there must be the change's, not the draw's. A test that needs more than
# others asks for a multiple of the profile's number.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("local", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("campaign", deadline=None, print_blob=True, max_examples=5000)
settings.load_profile("campaign" if CAMPAIGN else "ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        default=os.environ.get(SEED_VARIABLE, "0"),
        help="seed of the random tests: a number, or 'random' (default: 0, the same draws in every run)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's job in the background ignores ctrl-C, and so would all that the tests start and interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    absent = [name for name in MUST_BE_THERE if importlib.util.find_spec(name) is None]
    if absent and os.environ.get("CI"):
        raise pytest.UsageError(f"CI skips nothing for want of a package: {', '.join(absent)} cannot be imported")
    seed = config.getoption("--seed")
    # The environment carries the drawn seed to the workers of pytest-xdist.
    os.environ[SEED_VARIABLE] = str(random.SystemRandom().randrange(2**32)) if seed == "random" else seed
    if seed == "random":
        config.option.seed = os.environ[SEED_VARIABLE]


def pytest_report_header() -> str:
    return f"random tests: --seed {os.environ[SEED_VARIABLE]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CAMPAIGN:
            item.add_marker(pytest.mark.timeout(0), append=False)
        if "julia" in item.nodeid.lower() or "julia" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.julia)
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: min(order.get(name, len(order)) for name in (item.path.name, item.path.parent.name)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give pytest-xdist's workers whole files, as `--dist loadfile` does, and those of the report to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "the report" if Path(file).name in OF_THE_REPORT else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the limit of a test's time begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    waits_for = os.environ.get(WAIT_VARIABLE)
    if waits_for and item.get_closest_marker("julia"):
        with open(waits_for, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if os.environ.get("CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPPED_IN_CI):
            report.outcome, report.longrepr = "failed", f"CI runs all tests: {reason}"
    return report


@pytest.fixture
def seeded_by(request: pytest.FixtureRequest) -> str:
    """What a test's seed follows from, beside that of the run: its name and its parameters."""
    return str(request.node.nodeid)


@pytest.fixture
def seed(seeded_by: str) -> int:
    """A seed of the test's own, whatever other tests run with it; printed where the test fails."""
    run = os.environ[SEED_VARIABLE]
    digest = hashlib.sha256(f"{run} {seeded_by}".encode()).digest()
    value = int.from_bytes(digest[:4], "little")
    print(f"seed of this test: {value} (from --seed {run})")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator started from `seed`."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def pages() -> ModuleType:
    """The program that looks at pages in a browser."""
    found = importlib.util.spec_from_file_location("benchmark_pages", Path(__file__).with_name("benchmark_pages.py"))
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def browser(pages: ModuleType) -> Iterator[Any]:
    """A headless Chromium; without one the test is skipped."""
    program = pages.browser_path()
    if program is None:
        pytest.skip(f"needs a browser: {', '.join(pages.BROWSERS)}, or TWINGRAD_BROWSER")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def julia() -> Julia:
    """A Julia that works; without one the test is skipped."""
    try:
        return find()
    except JuliaUnavailableError as error:
        pytest.skip(f"needs Julia: {error}")


BROKEN_JULIAS = {
    "missing": (None, "names no Julia: expected the program, its folder, or a name on PATH"),
    "too old": ("printf 'version\\t1.4.2\\n'", "is too old: expected 1.5 or later, found 1.4.2"),
    "crashing": (
        "echo 'signal (11): Segmentation fault' >&2; kill -SEGV $$",
        "was ended by SIGSEGV when it was to start",
    ),
}


@pytest.fixture(params=BROKEN_JULIAS)
def broken_julia(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Julia that is missing, too old or crashing takes the place of one that works; what is to be said of it."""
    script, words = BROKEN_JULIAS[request.param]
    program = tmp_path / "broken" / "julia"
    if script is not None:
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("TWINGRAD_JULIA", str(program))
    return words


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real data sets, named by TWINGRAD_DATA; without it the test is skipped."""
    folder = os.environ.get("TWINGRAD_DATA")
    if not folder:
        pytest.skip("needs the real data: set TWINGRAD_DATA to the folder that holds mnist/")
    if not Path(folder, "mnist").is_dir():
        pytest.fail(f"TWINGRAD_DATA={folder} holds no folder mnist/: name another one, or unset it")
    return Path(folder)
