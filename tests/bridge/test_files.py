"""Files are written whole or not at all, look as if written the ordinary way, and replace nothing but regular files."""

from __future__ import annotations

import ast
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bridge import weights
from bridge.errors import WeightsError
from bridge.files import cache_folder, descriptor, obstacle, replacing, write_atomically
from experiments import errors
from experiments.data import encoded
from experiments.output import Output
from experiments.report.paper import _write as write_pdf

ROOT = Path(__file__).resolve().parents[2]


def test_text_and_bytes_arrive(tmp_path: Path) -> None:
    write_atomically(tmp_path / "text", "N × 784\n")
    write_atomically(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == "N × 784\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_permissions_are_those_of_an_ordinary_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "ordinary").touch()
        write_atomically(tmp_path / "new", "")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666, 0o755])
def test_a_replaced_file_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.touch()
    path.chmod(mode)
    write_atomically(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "new"


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    write_atomically(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_in_the_middle_of_a_stream_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result"
    write_atomically(path, "old")
    with pytest.raises(ValueError, match="broke off"), replacing(path) as stream:
        stream.write(b"new")
        raise ValueError("broke off")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "named"), [(OSError(errno.ENOSPC, "No space left on device"), True), (OSError("something else"), False)]
)
def test_an_error_of_the_system_names_the_file(
    error: OSError, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="full" if named else "^something else$") as caught:
        write_atomically(tmp_path / "full", "text")
    assert caught.value.filename == (str(tmp_path / "full") if named else None)
    assert not list(tmp_path.iterdir())


def test_a_name_as_long_as_the_system_allows_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write_atomically(path, "long")
    assert path.read_text() == "long"


# What a path may lead to, for every writer of the project -----------------------------------------------------------


def _write_json(path: Path) -> None:
    Output("list", str(path)).write()


WRITERS: dict[str, Callable[[Path], None]] = {
    "write_atomically": lambda path: write_atomically(path, "new"),
    "--json": _write_json,
    "train --save": lambda path: weights.save(path, {"w": np.zeros(2, np.float32)}),
    "results": lambda path: errors.write(path, "{}\n"),
    "the PDF": lambda path: write_pdf(b"%PDF", path) and None,
    "encoded data": lambda path: encoded._write(path, "1", {"x": np.zeros(2)}),
}


@pytest.fixture(params=sorted(WRITERS))
def write(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return WRITERS[request.param]


def is_new(path: Path) -> bool:
    return path.is_file() and path.read_bytes() not in (b"", b"old")


@pytest.mark.parametrize("there", [True, False], ids=["old file", "dangling"])
@pytest.mark.parametrize("links", [1, 2, 5])
def test_a_link_stays_and_what_it_leads_to_is_replaced(
    write: Callable[[Path], None], there: bool, links: int, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = at = tmp_path / "elsewhere" / "target"
    if there:
        target.write_bytes(b"old")
    for number in range(links):
        link = tmp_path / f"link-{number}"
        link.symlink_to(os.path.relpath(at, tmp_path))
        at = link
    write(at)
    assert is_new(target) and not target.is_symlink()
    assert all((tmp_path / f"link-{number}").is_symlink() for number in range(links))
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["target"]


def test_a_fifo_is_written_to_and_stays(write: Callable[[Path], None], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write(fifo)
    reader.join()
    assert read[0] and stat.S_ISFIFO(fifo.stat().st_mode)
    assert list(tmp_path.iterdir()) == [fifo]


def test_a_device_is_written_to_and_stays(write: Callable[[Path], None], tmp_path: Path) -> None:
    before = os.stat(os.devnull)
    (tmp_path / "link").symlink_to(os.devnull)
    for path in (Path(os.devnull), tmp_path / "link"):
        write(path)
    after = os.stat(os.devnull)
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert (tmp_path / "link").is_symlink()


def _loop(path: Path) -> None:
    path.symlink_to(path.name + "-2")
    path.with_name(path.name + "-2").symlink_to(path.name)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _link_to_folder(path: Path) -> None:
    path.symlink_to(".")


@pytest.mark.parametrize("make", [_loop, _socket, Path.mkdir, _link_to_folder])
def test_what_is_no_place_for_a_file_is_refused_and_stays(
    write: Callable[[Path], None], make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("taken")
    make(path)
    before = path.lstat().st_mode, sorted(tmp_path.iterdir())
    with pytest.raises((OSError, Exception), match=r"taken|Too many levels|folder|socket") as failure:
        write(path)
    assert isinstance(failure.value, OSError) or hasattr(failure.value, "exit_code")
    assert (path.lstat().st_mode, sorted(tmp_path.iterdir())) == before
    assert obstacle(path)


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    path.chmod(0o400)
    real = os.access  # root may write anything
    monkeypatch.setattr(
        "bridge.files.os.access", lambda at, mode: real(at, mode) and (Path(at) != path or mode != os.W_OK)
    )
    assert obstacle(path) == "Permission denied"
    with pytest.raises(PermissionError):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_an_obstacle_is_found_wherever_writing_would_fail_and_only_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("absent/target")
    os.mkfifo(tmp_path / "fifo")
    for free in ("file", "new", "fifo", os.devnull):
        assert obstacle(tmp_path / free) is None, free
    for blocked in ("absent/new", "file/new", "dangling"):
        assert obstacle(tmp_path / blocked), blocked
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            write_atomically(tmp_path / blocked, "")


def test_a_disk_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk"
    path.touch()
    found = os.stat_result((stat.S_IFBLK | 0o660, *path.stat()[1:]))
    monkeypatch.setattr("bridge.files.os.stat", lambda _: found)
    assert obstacle(path) == "it is a disk"
    with pytest.raises(OSError, match="it is a disk") as failure:
        write_atomically(path, "new")
    assert failure.value.errno == errno.EINVAL


# The process's own open files ---------------------------------------------------------------------------------------

_PRINT_AND_WRITE = """
import sys
from bridge.files import write_atomically
print("before")
write_atomically(sys.argv[1], "written\\n")
print("after")
"""


def said_by(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, *command], cwd=ROOT, text=True, check=True, **options
    )


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1"])
@pytest.mark.parametrize("to", ["pipe", "file"])
def test_standard_output_is_written_to_in_order(path: str, to: str, tmp_path: Path) -> None:
    if to == "pipe":
        found = said_by("-c", _PRINT_AND_WRITE, path, stdout=subprocess.PIPE).stdout
    else:
        with (tmp_path / "out").open("w") as out:
            said_by("-c", _PRINT_AND_WRITE, path, stdout=out)
        found = (tmp_path / "out").read_text()
    assert found == "before\nwritten\nafter\n"


def test_a_link_to_standard_output_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    found = said_by("-c", _PRINT_AND_WRITE, str(tmp_path / "link"), stdout=subprocess.PIPE).stdout
    assert found == "before\nwritten\nafter\n"
    assert descriptor(tmp_path / "link") == 1


# There is no other way to write -------------------------------------------------------------------------------------

TO_THEIR_OWN_FOLDERS = {
    "bridge/memory.py": "a switch of the kernel",
    "bridge/child.py": "the temporary folder of a process",
    "bridge/worker.py": "the worker's temporary folder",
    "bridge/worker_process.py": "the worker's temporary folder",
    "contrib/debian.py": "a folder that is made whole under another name, and its lock",
    "contrib/sysimage.py": "a temporary folder",
    "experiments/benchmarks/engines.py": "a temporary folder",
    "experiments/mapped_speed.py": "a temporary folder",
    "experiments/reference.py": "a temporary folder",
    "experiments/run_arrays.py": "the sweep's own folder of work",
}
"""Modules that write by other means, and where; nobody but the process itself puts anything there."""

WRITING = {"write_text", "write_bytes", "savetxt", "copyfile", "copy", "copy2", "move", "to_csv", "savefig"}


def _writes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        first = ast.unparse(node.args[0]) if node.args else ""
        opened = name == "open" and any(set(text) & set("wax+") and len(text) <= 3 for text in texts)
        written = name in WRITING and owner != "table" and (owner == "shutil" or name not in ("copy", "move"))
        saved = owner == "np" and name in ("save", "savez")
        if opened or ((written or saved) and first not in ("buffer", "stream")):
            yield ast.unparse(node)


def test_every_other_module_writes_by_this_one() -> None:
    found = {
        str(path.relative_to(ROOT)): writes
        for package in ("bridge", "contrib", "experiments", "py_engine")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "__pycache__" not in path.parts and path.name != "files.py" and (writes := list(_writes(path)))
    }
    assert found.keys() == TO_THEIR_OWN_FOLDERS.keys(), found


def test_json_to_standard_output_leaves_it_to_programs(tmp_path: Path) -> None:
    for target in ("-", "/dev/stdout", "/dev/fd/1"):
        output = Output("list", target)
        assert (output.target, output.console.stderr) == ("-", True)
    assert not Output("list", str(tmp_path / "list.json")).console.stderr


def test_weights_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"taken: cannot be written: it is a folder"):
        (tmp_path / "taken").mkdir()
        weights.save(tmp_path / "taken", {})


@pytest.mark.parametrize("setting", [".", "./", "cache"])
def test_a_cache_may_be_named_from_here(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINGRAD_CACHE", setting)
    assert cache_folder() == tmp_path / setting


def test_a_cache_of_a_user_that_there_is_not_is_an_error_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINGRAD_CACHE", "~no-such-user/cache")
    with pytest.raises(FileNotFoundError, match="TWINGRAD_CACHE=~no-such-user/cache: there is no user no-such-user"):
        cache_folder()
    assert not list(tmp_path.iterdir())
