"""A Julia is found where the user would look for it, believed only when it has shown that it works, and remembered."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from bridge.errors import EngineUnavailableError, JuliaUnavailableError
from bridge.libjulia import environment, find
from bridge.libjulia.find import Julia, Memory

FakeJulia = Callable[..., str]

SOUND = "exit 0"
CRASHING = "echo 'signal (11): Segmentation fault' >&2; kill -SEGV $$"


def answers(root: Path, version: str, threads: int) -> list[str]:
    """What probe.jl prints on a sound Julia, up to the step at which a test may let it end."""
    return [
        f"version\t{version}",
        "step\tthrow and catch an exception",
        f"threads\t{threads}",
        "blas\tOpenBLAS 0.3.9",
        "kernels\tBarcelona",
        f"bindir\t{root}/usr/bin",
        f"sysimage\t{root}/sys.so",
        "library\t/lib/libc.so.6",
        f"library\t{root}/lib/libjulia.so.1",
        f"library\t{root}/lib/libunwind.so.8",
        f"library\t{root}/lib/libffi.so.7",
        f"library\t{root}/lib/julia/libgmp.so",
        "step\t",
    ]


@pytest.fixture
def fake_julia(tmp_path: Path) -> FakeJulia:
    """Writes a program that answers the probe: `fake_julia("bin/julia", version="1.4.2")`, and counts its starts."""

    def make(
        where: str,
        version: str = "1.11.2",
        threads: int = 2,
        ending: str = SOUND,
        said: int | None = None,
        keep_environment: bool = False,
    ) -> str:
        program = tmp_path / where
        root = tmp_path / f"root-of-{where.replace('/', '-')}"
        (root / "lib" / "julia").mkdir(parents=True, exist_ok=True)
        for name in ("sys.so", "lib/libjulia.so.1", "lib/libunwind.so.8", "lib/libffi.so.7", "lib/julia/libgmp.so"):
            (root / name).touch()
        program.parent.mkdir(parents=True, exist_ok=True)
        lines = answers(root, version, threads)[:said]
        script = [
            "#!/bin/sh",
            f"echo started >> {program}.log",
            f"export -p > {program}.env" if keep_environment else "",
            *(f"printf '%s\\n' '{line}'" for line in lines),
            ending,
        ]
        program.write_text("\n".join(script) + "\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    return make


def resolved(tmp_path: Path, program: str) -> None:
    """juliapkg has set this Julia up."""
    meta = tmp_path / "julia_env" / "pyjuliapkg" / "meta.json"
    meta.parent.mkdir(parents=True, exist_ok=True)
    meta.write_text(json.dumps({"meta_version": 8, "executable": program}))


def starts(program: str) -> int:
    log = Path(f"{program}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting, nothing remembered, nothing on PATH, nothing of juliapkg's; two cores."""
    for name in find.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "juliacall", raising=False)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(find, "_juliapkg_project", lambda: tmp_path / "julia_env")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


# Where it is looked for.


def test_nothing_found_says_where_and_what_to_do() -> None:
    with pytest.raises(JuliaUnavailableError) as caught:
        find.find()
    for expected in ("on PATH, by juliapkg", "python -m bridge.julia.install", "1.5 or later", "TWINGRAD_JULIA"):
        assert expected in str(caught.value)
    assert isinstance(caught.value, EngineUnavailableError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("setting", ["julia-1.11/bin/julia", "julia-1.11", "julia-1.11/bin", "my-julia"])
def test_the_setting_names_a_program_its_folder_or_a_name_on_path(
    setting: str, fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_julia("julia-1.11/bin/julia")
    fake_julia("bin/my-julia")
    named = setting if setting == "my-julia" else str(tmp_path / setting)
    monkeypatch.setenv("TWINGRAD_JULIA", named)
    found = find.find()
    assert found.executable.endswith("bin/my-julia" if setting == "my-julia" else "julia-1.11/bin/julia")
    assert found.source == "TWINGRAD_JULIA"


@pytest.mark.parametrize("setting", ["no-such-julia", "/nowhere/julia", "~no-such-user/julia", "/" + 300 * "x"])
def test_a_wrong_setting_is_an_error_even_if_there_is_another_julia(
    setting: str, fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = fake_julia("bin/julia")
    monkeypatch.setenv("TWINGRAD_JULIA", setting)
    with pytest.raises(JuliaUnavailableError, match=f"TWINGRAD_JULIA={setting} names no Julia.*or unset it"):
        find.find()
    assert starts(on_path) == 0


def test_a_setting_that_names_a_broken_julia_is_an_error_too(
    fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_julia("bin/julia")
    monkeypatch.setenv("TWINGRAD_JULIA", fake_julia("old/julia", version="1.0.5"))
    with pytest.raises(JuliaUnavailableError, match="too old"):
        find.find()


def test_juliapkg_comes_before_path_and_that_before_our_own(
    fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fake_julia("cache/julia/debian-11/usr/bin/julia", version="1.5.3")
    Path(own).parents[2].joinpath("twingrad-julia.json").touch()
    of_juliapkg = fake_julia("env/julia", version="1.10.4")
    resolved(tmp_path, of_juliapkg)
    on_path = fake_julia("bin/julia")
    order = []
    for program in (of_juliapkg, on_path, own):
        order.append(find.find())
        Path(program).write_text("#!/bin/sh\nexit 1\n")
    assert [julia.source for julia in order] == ["juliapkg", "PATH", "installed by TwinGrad"]
    assert [julia.version for julia in order] == ["1.10.4", "1.11.2", "1.5.3"]


@pytest.mark.parametrize("variable", find.VARIABLES)
def test_each_variable_names_a_julia_and_nothing_else_is_looked_for(
    variable: str, fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = fake_julia("bin/julia")
    monkeypatch.setenv(variable, fake_julia("other/julia"))
    assert find.find().source == variable
    assert starts(on_path) == 0
    monkeypatch.setenv(variable, "/nowhere/julia")
    with pytest.raises(JuliaUnavailableError, match=f"{variable}=/nowhere/julia names no Julia"):
        find.find()


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations((find.RUNNING, *find.VARIABLES), 2)))
def test_two_that_disagree_are_both_named(
    first: str, second: str, fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def want(place: str, program: str) -> None:
        if place == find.RUNNING:
            monkeypatch.setitem(sys.modules, "juliacall", SimpleNamespace(CONFIG={"inited": True, "exepath": program}))
        else:
            monkeypatch.setenv(place, program)

    one, other = fake_julia("one/julia"), fake_julia("other/julia", version="1.10.4")
    want(first, one)
    want(second, one)
    assert find.find().source == first  # they agree, and the first says where it was found
    want(second, other)
    with pytest.raises(JuliaUnavailableError) as caught:
        find.find()
    for expected in (one, other, first, second):
        assert expected in str(caught.value)


def test_our_own_counts_only_when_it_is_whole(fake_julia: FakeJulia) -> None:
    fake_julia("cache/julia/debian-11/usr/bin/julia")  # without a manifest
    with pytest.raises(JuliaUnavailableError):
        find.find()


def test_one_that_does_not_work_is_passed_over(fake_julia: FakeJulia, tmp_path: Path) -> None:
    resolved(tmp_path, fake_julia("env/julia", ending=CRASHING, said=2))
    sound = fake_julia("bin/julia")
    assert find.find().executable == sound


def test_when_none_works_each_is_named_with_its_reason(fake_julia: FakeJulia, tmp_path: Path) -> None:
    first = fake_julia("bin/julia", version="1.4.2", said=1)
    second = fake_julia("env/julia", ending=CRASHING, said=2)
    resolved(tmp_path, second)
    with pytest.raises(JuliaUnavailableError) as caught:
        find.find()
    assert f"{first} (PATH) is too old" in str(caught.value)
    assert f"{second} (juliapkg) was ended by SIGSEGV" in str(caught.value)


# The proof.


def test_a_sound_julia_is_described(fake_julia: FakeJulia) -> None:
    program = fake_julia("bin/julia", version="1.12.0-rc1")
    found = find.find()
    root = Path(found.sysimage).parent
    assert found == Julia(
        executable=program,
        source="PATH",
        version="1.12.0-rc1",
        bindir=f"{root}/usr/bin",
        libjulia=f"{root}/lib/libjulia.so.1",
        sysimage=f"{root}/sys.so",
        preload=(),
        blas="OpenBLAS 0.3.9",
        kernels="Barcelona",
    )
    assert found.release == (1, 12, 0)


def test_the_libraries_of_our_own_are_to_be_loaded_in_the_order_they_need_each_other(fake_julia: FakeJulia) -> None:
    fake_julia("bin/julia")
    root = Path(find.find().sysimage).parent
    Memory().forget()
    (root / "twingrad-julia.json").touch()
    assert find.find().preload == (f"{root}/lib/libffi.so.7", f"{root}/lib/libunwind.so.8")


@pytest.mark.parametrize("version", ["1.4.2", "1.0.5", "0.6.4"])
def test_too_old(version: str, fake_julia: FakeJulia) -> None:
    program = fake_julia("bin/julia", version=version, said=1)
    with pytest.raises(JuliaUnavailableError, match=rf"too old: expected 1\.5 or later, found {version}\. .*install"):
        find.prove(program, "PATH")


@pytest.mark.parametrize(
    ("ending", "said", "expected"),
    [
        (CRASHING, 2, ["was ended by SIGSEGV when it was to throw and catch", "signal (11): Segmentation fault"]),
        ("echo 'ERROR: could not load library' >&2; exit 1", 0, ["exit code 1 when it was to start", "could not load"]),
        ("exit 0", 0, ["exit code 0 when it was to start", "last said: nothing"]),
        ("exit 3", 12, ["ended with exit code 3"]),
    ],
)
def test_one_that_crashes_is_quoted(ending: str, said: int, expected: Sequence[str], fake_julia: FakeJulia) -> None:
    program = fake_julia("bin/julia", ending=ending, said=said)
    with pytest.raises(JuliaUnavailableError) as caught:
        find.prove(program, "PATH")
    for part in (*expected, program, "name another one in TWINGRAD_JULIA", "python -m bridge.julia.install"):
        assert part in str(caught.value)


def test_only_the_last_lines_of_a_crash_are_quoted(fake_julia: FakeJulia) -> None:
    many = "; ".join(f"echo 'line {number} of the stack' >&2" for number in range(40))
    with pytest.raises(JuliaUnavailableError) as caught:
        find.prove(fake_julia("bin/julia", ending=f"{many}; exit 1", said=0), "PATH")
    assert "line 39 of" in str(caught.value)
    assert "line 9 of" not in str(caught.value)


def test_one_without_threads_is_refused(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_julia("bin/julia", threads=1)
    with pytest.raises(JuliaUnavailableError, match="was to start with 2 threads and has 1"):
        find.prove(program, "PATH")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # Julia 1.5 starts no more threads than there are cores
    assert find.prove(program, "PATH").version == "1.11.2"


def test_one_that_can_not_be_started(tmp_path: Path) -> None:
    broken = tmp_path / "julia"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    with pytest.raises(JuliaUnavailableError, match="can't be started: Exec format error"):
        find.prove(str(broken), "PATH")


def test_one_that_never_answers(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "PROOF_SECONDS", 0.2)
    with pytest.raises(JuliaUnavailableError, match="not ready after"):
        find.prove(fake_julia("bin/julia", ending="while :; do :; done", said=1), "PATH")


def test_the_proof_is_not_disturbed_by_the_users_settings_of_julia(
    fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_julia("bin/julia", keep_environment=True)
    for name in ("OPENBLAS_CORETYPE", "JULIA_LOAD_PATH", "JULIA_PROJECT"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("JULIA_NUM_THREADS", "7")
    find.prove(program, "PATH")
    seen = Path(f"{program}.env").read_text()
    assert "theirs" not in seen
    assert "JULIA_NUM_THREADS='2'" in seen


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"executable": 7}', '{"executable": "/gone/julia"}', f'{{"executable": "/{300 * "x"}"}}'],
)
def test_what_juliapkg_has_written_may_be_damaged(content: str, fake_julia: FakeJulia, tmp_path: Path) -> None:
    resolved(tmp_path, fake_julia("env/julia"))
    (tmp_path / "julia_env" / "pyjuliapkg" / "meta.json").write_text(content)
    on_path = fake_julia("bin/julia")
    assert find.find().executable == on_path


# The memory.


def test_what_was_proved_is_not_started_again(fake_julia: FakeJulia) -> None:
    program = fake_julia("bin/julia")
    assert find.find() == find.find()
    assert starts(program) == 1


def test_one_that_is_new_on_path_is_taken(
    fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_julia("bin/julia")
    find.find()
    fake_julia("newer/julia", version="1.12.1")
    monkeypatch.setenv("PATH", str(tmp_path / "newer"))
    assert find.find().version == "1.12.1"


def test_one_that_failed_is_not_tried_at_every_start(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_julia("bin/julia", ending=CRASHING, said=2)
    own = fake_julia("cache/julia/debian-11/usr/bin/julia", version="1.5.3")
    Path(own).parents[2].joinpath("twingrad-julia.json").touch()
    assert find.find() == find.find()
    assert (starts(broken), starts(own)) == (1, 1)
    fake_julia("bin/julia")  # mended
    assert find.find().source == "PATH"
    with pytest.raises(JuliaUnavailableError):  # whoever names it means it: it is tried each time
        monkeypatch.setenv("TWINGRAD_JULIA", fake_julia("other/julia", ending=CRASHING, said=2))
        find.find()
    with pytest.raises(JuliaUnavailableError):
        find.find()
    assert starts(os.environ["TWINGRAD_JULIA"]) == 2


def test_one_that_was_killed_is_tried_again_and_advice_says_how_to_try_another(
    fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = fake_julia("bin/julia", ending="kill -9 $$", said=2)
    for count in (1, 2):
        with pytest.raises(JuliaUnavailableError):
            find.find()
        assert starts(killed) == count
    broken = fake_julia("bin/julia", ending=CRASHING, said=2)
    for _ in range(2):
        with pytest.raises(JuliaUnavailableError) as caught:
            find.find()
    assert "found before; to try it again: python -m bridge.julia.install --again" in str(caught.value)
    assert starts(broken) == 3


def test_of_a_launcher_the_program_that_it_starts_is_used_until_it_starts_another(
    fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_started(version: str) -> Path:
        """Make a Julia of this version, and the launcher start it."""
        launcher = fake_julia("bin/julia", version=version)
        program = tmp_path / "root-of-bin-julia" / "usr" / "bin" / "julia"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("the program")
        script = Path(launcher)
        asked = f'case "$*" in *--version*) echo julia version {version}; exit 0;; esac'
        script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{asked}\n"))
        os.utime(script, (1, 1))
        return program

    program = is_started("1.11.2")
    assert find.find().executable == str(program) and find.find().version == "1.11.2"
    assert starts(str(tmp_path / "bin" / "julia")) == 1
    is_started("1.12.1")
    find._says_version.cache_clear()
    assert find.find().version == "1.12.1"


def test_a_remembered_one_is_proved_again_when_its_files_change(fake_julia: FakeJulia) -> None:
    program = fake_julia("bin/julia")
    sysimage = Path(find.find().sysimage)
    sysimage.write_text("another version")
    find.find()
    assert starts(program) == 2


def test_a_remembered_one_that_is_gone_is_forgotten(fake_julia: FakeJulia, tmp_path: Path) -> None:
    program = fake_julia("bin/julia")
    find.find()
    Path(program).unlink()
    with pytest.raises(JuliaUnavailableError):
        find.find()
    other = fake_julia("env/julia")
    resolved(tmp_path, other)
    assert find.find().executable == other


def test_the_setting_does_not_change_what_is_remembered(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake_julia("bin/julia")
    find.find()
    monkeypatch.setenv("TWINGRAD_JULIA", fake_julia("other/julia"))
    assert find.find().source == "TWINGRAD_JULIA"
    monkeypatch.delenv("TWINGRAD_JULIA")
    assert find.find().executable == on_path


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99, "chosen": "x"}',
        '{"format": 1, "chosen": 7, "proofs": {}}',
        '{"format": 1, "chosen": "x", "proofs": []}',
        '{"format": 1, "chosen": "x", "proofs": {"x": {"version": "1.11.2"}}}',
        '{"format": 1, "chosen": "x", "proofs": {"x": null}, "notes": []}',
    ],
)
def test_a_damaged_memory_is_no_memory(content: str, fake_julia: FakeJulia, tmp_path: Path) -> None:
    fake_julia("bin/julia")
    file = tmp_path / "cache" / "julia" / "julia.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert find.find().source == "PATH"
    Memory().note("key", value=1)
    assert Memory().recall("key") == 1
    assert json.loads(file.read_text())["format"] == 1


def test_without_a_place_to_remember_it_still_works(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_julia("bin/julia")
    monkeypatch.setenv("TWINGRAD_CACHE", os.devnull)
    assert find.find().executable == find.find().executable == program
    assert starts(program) == 2


def test_another_cache_hides_no_julia_that_was_installed_in_the_usual_one(
    fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = environment.cache_folder(with_setting=False).relative_to(tmp_path)
    own = fake_julia(str(usual / "debian-11" / "usr" / "bin" / "julia"), version="1.5.3")
    (tmp_path / usual / "debian-11" / "twingrad-julia.json").touch()
    found = find.find()
    assert (found.executable, found.version) == (own, "1.5.3")
    assert found.source == "installed by TwinGrad, found where TWINGRAD_CACHE is not set"
    assert find.find() == found and starts(own) == 1  # remembered in the cache that is set
    assert not (tmp_path / usual / "julia.json").exists()
    monkeypatch.delenv("TWINGRAD_CACHE")
    assert find.find().source == "installed by TwinGrad"


def test_another_cache_hides_no_julia_that_was_used_without_it(
    fake_julia: FakeJulia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_juliapkg = fake_julia("env/julia", version="1.10.4")
    monkeypatch.delenv("TWINGRAD_CACHE")
    resolved(tmp_path, of_juliapkg)
    assert find.find().source == "juliapkg"
    (tmp_path / "julia_env" / "pyjuliapkg" / "meta.json").unlink()  # as in another environment of Python's
    monkeypatch.setenv("TWINGRAD_CACHE", str(Path(of_juliapkg).parents[1] / "other"))
    found = find.find()
    assert (found.executable, found.source) == (of_juliapkg, "juliapkg, found where TWINGRAD_CACHE is not set")


def test_a_julia_in_the_cache_that_is_set_comes_first(fake_julia: FakeJulia, tmp_path: Path) -> None:
    usual = environment.cache_folder(with_setting=False).relative_to(tmp_path)
    for cache, version in ((Path("cache/julia"), "1.12.1"), (usual, "1.5.3")):
        fake_julia(str(cache / "debian-11" / "usr" / "bin" / "julia"), version=version)
        (tmp_path / cache / "debian-11" / "twingrad-julia.json").touch()
    assert find.find().version == "1.12.1"


def test_a_user_without_a_home(fake_julia: FakeJulia, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user(number: int) -> NoReturn:
        raise KeyError(number)

    fake_julia("bin/julia")
    monkeypatch.delenv("TWINGRAD_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_user)
    with pytest.raises(FileNotFoundError, match="name a folder in TWINGRAD_CACHE"):
        environment.cache_folder()
    assert find.find().source == "PATH"


# Threads and kernels.

AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}


@pytest.mark.parametrize(
    ("chosen", "flags", "expected"),
    [
        ("Barcelona", AVX512, "SKYLAKEX"),
        ("Haswell", AVX512, "SKYLAKEX"),
        ("SkylakeX", AVX512, None),
        ("Cooperlake", AVX512, None),
        ("Haswell", AVX512 - {"avx512dq"}, None),
        ("Prescott", AVX2, "HASWELL"),
        ("Zen", AVX2, None),
        ("Prescott", frozenset(), None),
        ("", AVX512, None),  # not an OpenBLAS
    ],
)
def test_an_old_blas_is_told_the_best_kernels_of_the_cpu(
    chosen: str, flags: frozenset[str], expected: str | None
) -> None:
    assert environment.kernels_for(chosen, flags) == expected


def test_the_users_own_choice_of_kernels_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_flags", lambda: AVX512)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    julia = Julia("julia", "PATH", "1.9.4", "", "", "", (), "OpenBLAS", "Barcelona")
    told = julia.environment(2)
    assert (told["OPENBLAS_CORETYPE"], told["JULIA_NUM_THREADS"]) == ("SKYLAKEX", "2")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert julia.environment(2)["OPENBLAS_CORETYPE"] == "Haswell"


def test_variables_set_for_a_moment_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINGRAD_TEST_SET", "before")
    with environment.temporarily({"TWINGRAD_TEST_SET": "during", "TWINGRAD_TEST_UNSET": "during"}):
        assert os.environ["TWINGRAD_TEST_SET"] == os.environ["TWINGRAD_TEST_UNSET"] == "during"
    assert os.environ["TWINGRAD_TEST_SET"] == "before"
    assert "TWINGRAD_TEST_UNSET" not in os.environ


# The real thing.


def test_the_julia_of_this_machine(julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # its script needs the programs on PATH
    found = find.prove(julia.executable, "PATH")
    assert found.release >= (1, 5, 0)
    assert Path(found.libjulia).is_file()
    assert Path(found.sysimage).is_file()
    assert Path(found.bindir).is_dir()
    assert found.blas
