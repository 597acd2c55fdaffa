"""The groups of the Julia engine's own tests are whole, and say what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ENGINE_TESTS = Path(__file__).parents[2] / "julia_engine" / "test"

BROKEN = """
@testset "arithmetic" begin
    @test 1 + 1 == 2
    @test 1 + 1 == 3
    @test error("on purpose")
end
"""


def test_each_file_is_in_one_group_and_each_group_in_one_test_file(julia_groups: Mapping[str, Sequence[str]]) -> None:
    files = {path.stem for path in ENGINE_TESTS.glob("*.jl")} - {"runtests"}
    grouped = [name for group in julia_groups.values() for name in group]
    assert sorted(grouped) == sorted(files)
    # One test file per group: pytest-xdist hands out whole files.
    test_files = {
        path.stem.removeprefix("test_julia_suite_") for path in Path(__file__).parent.glob("test_julia_suite_*.py")
    }
    assert test_files == set(julia_groups)


def test_a_failing_file_is_named_with_the_lines_that_failed(
    tmp_path: Path, run_julia_tests: Callable[..., dict[str, int]]
) -> None:
    broken, sound = tmp_path / "broken", tmp_path / "sound"
    Path(f"{broken}.jl").write_text(BROKEN, encoding="utf-8")
    Path(f"{sound}.jl").write_text('@test true\n@testset "two" begin @test 1 < 2 end\n', encoding="utf-8")
    assert run_julia_tests([str(sound)]) == {str(sound): 2}
    with pytest.raises(pytest.fail.Exception) as failed:
        run_julia_tests([str(sound), str(broken)])
    message = str(failed.value)
    assert f"not passed: {broken}\n" in message
    assert f"file {broken}\n" in message and f"file {sound}\n" not in message
    assert f"Test Failed at {broken}.jl:4" in message and "1 + 1 == 3" in message
    assert f"Error During Test at {broken}.jl:5" in message and "on purpose" in message


def test_a_file_without_tests_fails(tmp_path: Path, run_julia_tests: Callable[..., dict[str, int]]) -> None:
    empty = tmp_path / "empty"
    Path(f"{empty}.jl").write_text("1 + 1\n", encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match=f"the file {empty} has no test"):
        run_julia_tests([str(empty)])
