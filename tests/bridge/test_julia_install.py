"""A Julia is found, or installed for this user alone, and proved; recipes of a checkout come after juliapkg."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.errors import JuliaUnavailableError
from bridge.julia import install
from bridge.libjulia import find, juliacall, start
from bridge.libjulia.find import Julia, Memory
from bridge.libjulia.juliacall import Project
from contrib import debian, sysimage
from contrib import julia as recipes

# With stand-ins for juliapkg, Debian and the starts of Julia.


class Machine:
    """What a machine has, can reach, and has been asked."""

    def __init__(self) -> None:
        self.found: str | None = None
        self.installed: tuple[str, str] | None = None
        self.juliapkg: str | None = None
        self.debian = False
        self.juliacall_works = True
        self.embedding_works = True
        self.asked: list[str] = []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    here = Machine()
    for name in ("TWINGRAD_JULIA", "TWINGRAD_OFFLINE", "OPENBLAS_CORETYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path))
    files = {name: tmp_path / name for name in ("libjulia", "sysimage")}
    for file in files.values():
        file.touch()

    def prove(executable: str, source: str) -> Julia:
        here.asked.append(f"prove {Path(executable).name}")
        if not Path(executable).exists():
            raise JuliaUnavailableError(f"{executable} can't be started")
        version = Path(executable).name.removeprefix("julia-")
        libjulia, sysimage = str(files["libjulia"]), str(files["sysimage"])
        return Julia(executable, source, version, "", libjulia, sysimage, (), "OpenBLAS 0.3.9", "Haswell")

    def candidates() -> Iterator[tuple[str, str]]:
        if here.found is not None:
            yield here.found, "PATH"
        if here.installed is not None:
            yield here.installed

    def prepare(executable: str | None = None, say: juliacall.Say = print) -> Project:
        say("[juliapkg] Locating Julia")
        here.asked.append(f"juliapkg {Path(executable).name if executable else 'any'}")
        if here.juliapkg is None:
            raise JuliaUnavailableError("juliapkg: Name or service not known")
        if executable is None:
            here.installed = here.juliapkg, "juliapkg"
        return Project(executable or here.juliapkg, str(tmp_path))

    def install_debian(folder: Path, prove: Callable[[str], object], say: object) -> None:
        here.asked.append("debian")
        if not here.debian:
            raise JuliaUnavailableError("this system has no apt-get")
        here.installed = find.own_executable(), "installed by TwinGrad"

    def obstacle(julia: Julia) -> str | None:
        if julia.release >= juliacall.OLDEST:
            return None
        return f"juliacall needs Julia 1.10.3 or later, and this is {julia.version}"

    def verify(backend: str, julia: Julia, memory: Memory) -> start.Verdict:
        here.asked.append(f"verify {backend}")
        project = start.known_project(julia, memory)
        if backend == "juliacall" and (reason := obstacle(julia)) is not None:
            here.asked.pop()
            return start.Verdict(False, reason)
        works = here.embedding_works if backend == "embedded" else here.juliacall_works and project is not None
        seen = start.Verdict(works, "" if works else f"{backend} crashed")
        memory.note(*start._key(backend, julia, memory), value={"ok": seen.ok, "reason": seen.reason})
        return seen

    own = tmp_path / "julia-1.5.3"
    own.touch()
    monkeypatch.setattr(find, "prove", prove)
    monkeypatch.setattr(find, "_candidates", candidates)
    monkeypatch.setattr(find, "own_executable", lambda cache=None: str(own))
    monkeypatch.setattr(juliacall, "prepare", prepare)
    monkeypatch.setattr(juliacall, "obstacle", obstacle)
    monkeypatch.setattr(juliacall, "version", lambda: "0.9.37")
    monkeypatch.setattr(debian, "install", install_debian)
    monkeypatch.setattr(start, "verify", verify)
    yield here


def program(folder: Path, version: str) -> str:
    file = folder / f"julia-{version}"
    file.touch()
    return str(file)


def test_a_julia_that_is_there_is_used_and_both_ways_are_tried(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.found = machine.juliapkg = program(tmp_path, "1.11.2")
    assert install.main([]) == 0
    assert machine.asked == ["prove julia-1.11.2", "juliapkg julia-1.11.2", "verify juliacall", "verify embedded"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"Julia 1.11.2 at {machine.found} (PATH)"
    assert said[1].startswith("  OpenBLAS 0.3.9, ")
    assert said[-2:] == ["  juliacall: works", "  embedded: works"]


def test_a_second_call_asks_nothing(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.found = machine.juliapkg = program(tmp_path, "1.11.2")
    install.main([])
    first = capsys.readouterr().out.splitlines()
    machine.asked.clear()
    assert install.main([]) == 0
    assert machine.asked == []
    assert set(capsys.readouterr().out.splitlines()) < set(first)


def test_again_forgets_what_was_remembered(machine: Machine, tmp_path: Path) -> None:
    machine.found = machine.juliapkg = program(tmp_path, "1.11.2")
    install.main([])
    first = list(machine.asked)
    machine.asked.clear()
    install.set_up(lambda line: None)
    assert machine.asked == []
    install.set_up(lambda line: None, again=True)
    assert machine.asked == first


def test_without_a_julia_juliapkg_is_asked_first(machine: Machine, tmp_path: Path) -> None:
    machine.debian = True
    machine.juliapkg = program(tmp_path, "1.12.1")
    assert install.set_up(lambda line: None, recipes=[debian.set_up]).source == "juliapkg"
    assert machine.asked == ["juliapkg any", "prove julia-1.12.1", "verify juliacall", "verify embedded"]
    assert find.find().version == "1.12.1"


def test_without_julias_servers_debian_is_asked(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine.debian = True
    assert recipes.main([]) == 0
    assert machine.asked == ["juliapkg any", "debian", "prove julia-1.5.3", "verify embedded"]
    said = capsys.readouterr().out
    assert "failed: juliapkg: Name or service not known" in said
    assert "juliacall needs Julia 1.10.3 or later, and this is 1.5.3" in said
    assert said.endswith("embedded: works\n")
    assert find.find().source == "installed by TwinGrad"


def test_with_neither_all_reasons_are_given(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main([]) == 2
    said = capsys.readouterr().err
    for part in (
        "error: no Julia could be installed",
        "juliapkg: Name or service not known",
        "this system has no apt-get",
        "Install Julia 1.5 or later by hand, and put it on PATH or name it in TWINGRAD_JULIA",
    ):
        assert part in said


def test_without_a_checkouts_recipes_their_command_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.debian = True
    assert install.main([]) == 2
    assert machine.asked == ["juliapkg any"]
    assert "a checkout of TwinGrad can install that of Debian 11: python -m contrib.julia" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "made"), [("1.5.3", [[]]), ("1.9.0", [])])
def test_an_image_is_made_where_it_is_asked_for_and_of_use(
    machine: Machine, tmp_path: Path, version: str, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(sysimage, "main", lambda arguments: calls.append(arguments) or 0)
    machine.found = program(tmp_path, version)
    assert recipes.main([]) == 0 and calls == []
    assert recipes.main(["--image"]) == 0 and calls == made


def test_what_the_user_has_named_is_never_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.debian = True
    monkeypatch.setenv("TWINGRAD_JULIA", "/nowhere/julia")
    assert recipes.main([]) == 2
    assert "error: TWINGRAD_JULIA=/nowhere/julia names no Julia" in capsys.readouterr().err
    assert machine.asked == []


def test_offline_nothing_is_downloaded(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.debian = True
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    with pytest.raises(JuliaUnavailableError, match="TWINGRAD_OFFLINE forbids to install one: unset it, or name one"):
        install.set_up(lambda line: None, recipes=[debian.set_up])
    machine.found = program(tmp_path, "1.11.2")
    assert install.set_up(lambda line: None).version == "1.11.2"
    assert not [asked for asked in machine.asked if asked.startswith(("juliapkg", "debian", "verify juliacall"))]


def test_one_way_in_is_enough(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.found = program(tmp_path, "1.11.2")  # juliapkg can't bring PythonCall.jl
    assert install.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  juliacall: juliapkg: Name or service not known",
        "  embedded: works",
    ]
    assert "verify juliacall" not in machine.asked, "without a project it would try to download one"


def test_without_a_way_in_julia_is_of_no_use(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.found = program(tmp_path, "1.5.3")
    machine.embedding_works = False
    assert install.main([]) == 2
    said = capsys.readouterr().err
    assert "works, but can't be started from this Python" in said
    assert "embedded: embedded crashed" in said


def test_a_way_that_failed_is_tried_again(machine: Machine, tmp_path: Path) -> None:
    machine.found = machine.juliapkg = program(tmp_path, "1.11.2")
    machine.juliacall_works = False
    install.set_up(lambda line: None)
    machine.asked.clear()
    machine.juliacall_works = True
    install.set_up(lambda line: None)
    assert machine.asked == ["verify juliacall"]


def test_the_path_alone_for_scripts(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.found = program(tmp_path, "1.11.2")
    assert install.main(["--path"]) == 0
    assert capsys.readouterr().out == f"{machine.found}\n"


def test_which_kernels_the_blas_will_use_is_said(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.found = program(tmp_path, "1.5.3")
    said = []
    for better, users in ((None, ""), ("SKYLAKEX", ""), ("SKYLAKEX", "Zen")):
        monkeypatch.setattr(install, "kernels_for", lambda chosen, better=better: better)
        monkeypatch.setenv("OPENBLAS_CORETYPE", users)
        install.main([])
        said.append(capsys.readouterr().out.splitlines()[1].strip())
    assert said == [
        "OpenBLAS 0.3.9, kernels for Haswell",
        "OpenBLAS 0.3.9, set to use its kernels for SKYLAKEX (it would take those for Haswell)",
        "OpenBLAS 0.3.9, with the kernels that OPENBLAS_CORETYPE names: Zen",
    ]


def test_no_address_is_written_into_the_code() -> None:
    folders = [Path(package.__file__).parent for package in (install, find, debian)]
    for file in (file for folder in folders for file in folder.iterdir()):
        if file.is_file():
            assert "http://" not in (text := file.read_text(encoding="utf-8")) and "https://" not in text, file
