"""Files are written whole or not at all, and look as if they had been written the ordinary way."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.files import write_atomically


def test_text_and_bytes_arrive(tmp_path: Path) -> None:
    write_atomically(tmp_path / "text", "N × 784\n")
    write_atomically(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == "N × 784\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    write_atomically(tmp_path / "new", "")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.touch(mode=0o600)
    write_atomically(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600
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
