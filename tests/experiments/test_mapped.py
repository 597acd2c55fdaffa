"""Training on files that may be larger than memory: the same numbers, little memory, no change of a file unseen."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bridge import registry, spec, weights
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments import mapped, mapped_speed, rows, training
from experiments.cli import invoke
from experiments.errors import InputError
from experiments.output import Output

MODEL = """
format = "twingrad-model"
version = 1
opset = 1
name = "small"

[input]
shape = ["N", {features}]

[[layers]]
id = "dense"
op = "dense"
units = 3

[loss]
op = "softmax_cross_entropy"
"""
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
ENGINES = tuple(name for name in registry.names() if registry.get(name).maps)


@pytest.fixture
def arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        **{f"x_{part}": random.standard_normal((n, 6)).astype(np.float32) for part, n in (("train", 60), ("test", 20))},
        **{f"y_{part}": random.integers(0, 3, n) for part, n in (("train", 60), ("test", 20))},
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of 6 features, in which the command works."""
    (tmp_path / "model.toml").write_text(MODEL.format(features=6))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_folder(place: Path, arrays: dict[str, Any]) -> str:
    (place / "folder").mkdir()
    for name, array in arrays.items():
        np.save(place / "folder" / f"{name}.npy", array)
    return "folder"


def as_arrow(path: Path, x: Any, y: Any, form: str = "lists", batches: int = 1, compression: str | None = None) -> None:
    arrow = pytest.importorskip("pyarrow")
    if form == "tensors":
        column = arrow.FixedShapeTensorArray.from_numpy_ndarray(x)
    else:
        column = arrow.FixedSizeListArray.from_arrays(arrow.array(x.reshape(-1)), x[0].size)
    table = arrow.table({"number": arrow.array(np.arange(len(x))), "x": column, "y": arrow.array(y)})
    options = arrow.ipc.IpcWriteOptions(compression=compression)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=-(-len(x) // batches))


def as_arrow_folder(place: Path, arrays: dict[str, Any]) -> str:
    (place / "folder").mkdir()
    for part, form in (("train", "lists"), ("test", "tensors")):
        as_arrow(place / "folder" / f"{part}.arrow", arrays[f"x_{part}"], arrays[f"y_{part}"], form)
    return "folder"


def as_npz(place: Path, arrays: dict[str, Any]) -> str:
    np.savez(place / "rows.npz", **arrays)
    return "rows.npz"


def loaded(name: str, folder: Path) -> rows.Rows:
    return rows.load_rows(name, None, spec.load(folder / "model.toml"), Output("train"))[0]


# The same numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "write"),
    [("numpy", as_folder), ("numpy", as_arrow_folder), ("julia", as_folder)],
    ids=["numpy-folder", "numpy-Arrow", "julia-folder"],
)
def test_a_training_ends_as_with_the_same_rows_in_memory(
    engine: str, write: Callable[..., str], place: Path, arrays: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if engine == "julia":
        request.getfixturevalue("julia")
    given = ["--engine", engine, "--epochs", "2", "--batch-size", "16", "--threads", "1"]
    for data in (write(place, arrays), as_npz(place, arrays)):
        options = ["--data", data, "--save", f"{data}.safetensors", "--json", f"{data}.json"]
        assert invoke(["train", "model.toml", *given, *options]) == 0
    found, expected = (load_file(place / f"{name}.safetensors") for name in ("folder", "rows.npz"))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("form", ["lists", "tensors"])
def test_an_arrow_file_is_mapped_where_its_columns_lie(form: str, place: Path, arrays: dict[str, Any]) -> None:
    as_arrow(place / "rows.arrow", arrays["x_train"], arrays["y_train"], form)
    found = mapped.load(place / "rows.arrow")
    assert all(isinstance(array, np.memmap) for array in found.values())
    np.testing.assert_array_equal(found["x_train"], arrays["x_train"])
    np.testing.assert_array_equal(found["y_train"], arrays["y_train"])


def test_the_last_rows_of_a_file_are_kept_apart_for_validation(place: Path, arrays: dict[str, Any]) -> None:
    found = loaded(as_folder(place, arrays), place)
    trained_on, apart = training.split(found, 0.25, 0, "folder")
    assert trained_on.tolist() == list(range(45))
    assert apart is not None and apart.y is not None
    np.testing.assert_array_equal(apart.x, arrays["x_train"][45:])
    np.testing.assert_array_equal(apart.y, arrays["y_train"][45:])
    assert mapped.mapped_file(apart.x) is not None


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("size", [1, 3136, 300_000, 2_000_000, 100_000_000])
def test_blocks_are_shuffled_with_every_row_once(count: int, size: int) -> None:
    numbers = np.arange(10, 10 + count)
    found = mapped.shuffled_blocks(numbers, size, [3, 1])
    np.testing.assert_array_equal(np.sort(found), numbers)
    np.testing.assert_array_equal(found, mapped.shuffled_blocks(numbers, size, [3, 1]))
    if count > 50:
        assert not np.array_equal(found, numbers)
        assert not np.array_equal(found, mapped.shuffled_blocks(numbers, size, [3, 2]))


def test_a_group_of_blocks_is_what_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window's worth of rows is whole blocks, so that a disk reads them one megabyte at a time."""
    each, together = mapped.BLOCK // 4096, mapped.WINDOW // mapped.BLOCK
    found = mapped.shuffled_blocks(np.arange(200 * each), 4096, [0])
    for start in range(0, len(found), each * together):
        numbers = np.sort(found[start : start + each * together])
        assert len(np.unique(numbers // each)) == len(numbers) // each


def test_a_checkpoint_resumes_with_the_same_order_only(place: Path, arrays: dict[str, Any], capsys: Any) -> None:
    options = ["train", "model.toml", "--data", as_folder(place, arrays), "--threads", "1", "--batch-size", "20"]
    options += ["--checkpoint", "kept.safetensors", "--resume"]
    assert invoke([*options, "--epochs", "1", "--shuffle", "blocks"]) == 0
    assert invoke([*options, "--epochs", "2", "--shuffle", "blocks"]) == 0
    assert invoke([*options, "--epochs", "3"]) == 2
    assert "shuffle" in capsys.readouterr().err


def test_a_folder_whose_name_is_no_text_is_mapped(place: Path, arrays: dict[str, Any]) -> None:
    as_folder(place, arrays)
    name = os.fsdecode(b"donn\xe9es")
    (place / "folder").rename(place / name)
    assert invoke(["train", "model.toml", "--data", name, "--threads", "1", "--epochs", "1", "--batch-size", "20"]) == 0


@pytest.mark.parametrize(
    ("as_files", "option"),
    [(as_folder, "--save"), (as_folder, "--json"), (as_arrow_folder, "--save"), (as_arrow_folder, "--json")],
)
def test_a_file_of_the_rows_is_not_replaced(
    as_files: Any, option: str, place: Path, arrays: dict[str, Any], capsys: Any
) -> None:
    folder = place / as_files(place, arrays)
    for file in sorted(folder.iterdir()):
        before = file.read_bytes()
        options = ["train", "model.toml", "--data", "folder", "--threads", "1", "--epochs", "1", option]
        assert invoke([*options, f"folder/{file.name}"]) == 2
        assert f"--data and {option} name the same file" in capsys.readouterr().err
        assert file.read_bytes() == before


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_of_a_gigabyte_is_trained_on_in_little_memory(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Anonymous memory, which can't be given back to the file: of the process, before and after an epoch."""
    if engine == "julia":
        request.getfixturevalue("julia")
    count, features = 65_536, 4096
    file = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (count, features))
    assert file.nbytes == 2**30
    del file  # a file with a hole, which takes no room
    (tmp_path / "model.toml").write_text(MODEL.format(features=features))
    model = spec.load(tmp_path / "model.toml")
    x, y = np.load(tmp_path / "x.npy", mmap_mode="r"), np.zeros(count, np.int64)
    with Worker(engine) as worker:
        worker.build(model, weights.initialise(model, 0), Optimizer("sgd", 0.1), 256)
        worker.train_epoch(x[:512], y[:512], np.arange(512))
        before = anonymous(worker.pid)
        losses = worker.train_epoch(x, y, np.random.default_rng(0).permutation(count))
        worker.evaluate(x, y)
        assert anonymous(worker.pid) - before < 100e6
    assert len(losses) == 256 and losses[-1] < losses[0]


def test_speeds_are_measured_of_files_and_of_the_disk(tmp_path: Path) -> None:
    mapped_speed.write(tmp_path, 8_000_000, written=True)
    found = mapped_speed.measured("numpy", tmp_path, beside_memory=True, written=True, rounds=1)
    assert 7.9e6 < found.size <= 8e6
    speeds = (found.mapped, found.in_memory, found.from_disk, found.disk)
    assert all(speed is not None and speed > 0 for speed in speeds)
    (_, _, line) = mapped_speed.table([found])
    assert re.fullmatch(r"\| numpy \| 1 \| 0.0 \|( [\d,]+ \|){3} \d+ % \|( [\d,]+ \|){2} \d+ % \|", line), line


@pytest.mark.campaign
@pytest.mark.skipif(not CAMPAIGN, reason="does not apply: `make test` has a file of 1 GB above")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("gigabytes", "beside_memory"), [(20.0, False), (4.0, True)])
@pytest.mark.parametrize("engine", ENGINES)
def test_large_files_are_trained_on_in_little_memory(
    engine: str, gigabytes: float, beside_memory: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Files with a hole, which take no room on the disk; the speeds are printed (pytest -rP)."""
    if engine == "julia":
        request.getfixturevalue("julia")
    mapped_speed.write(tmp_path, round(gigabytes * 1e9), written=False)
    assert os.stat(tmp_path / "x.npy").st_blocks * 512 < 1e6
    found = mapped_speed.measured(engine, tmp_path, beside_memory, written=False, rounds=3 if beside_memory else 0)
    print("\n".join(mapped_speed.table([found])))
    assert found.size > (gigabytes - 0.1) * 1e9
    assert found.anonymous < 1e9


def anonymous(pid: int) -> int:
    """Bytes of a process's anonymous memory."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


# Files that can't be used ---------------------------------------------------------------------------------------------


def spoiled(place: Path, kind: str, arrays: dict[str, Any]) -> str:
    """Data of which something is wrong."""
    x, y = arrays["x_train"], arrays["y_train"]
    folder = as_folder(place, arrays)
    file = place / folder / "x_train.npy"
    match kind:
        case "cut":
            os.truncate(file, 1000)
        case "longer":
            with file.open("ab") as end:
                end.write(b"more")
        case "another type":
            np.save(file, x.astype(np.float64))
        case "Fortran":
            np.save(file, np.asfortranarray(x))
        case "objects":
            np.save(file, np.array([{}], object), allow_pickle=True)
        case "no array":
            file.write_bytes(b"PK\x03\x04 no array")
        case "empty file":
            file.write_bytes(b"")
        case "no rows":
            np.save(file, x[:0])
        case "a folder":
            file.unlink()
            file.mkdir()
        case "nothing":
            file.unlink()
        case "other rows":
            np.save(file, x[:50])
        case "other features":
            np.save(file, x[:, :5])
        case "batches":
            as_arrow(place / "rows.arrow", x, y, batches=3)
        case "compressed":
            as_arrow(place / "rows.arrow", x, y, compression="zstd")
        case "no Arrow file":
            (place / "rows.arrow").write_bytes(b"ARROW1 but no more")
        case "no file":
            return "absent.arrow"
    return "rows.arrow" if (place / "rows.arrow").exists() else folder


SPOILED = {
    "cut": "x_train.npy: not an array that can be mapped, damaged, or still being written",
    "longer": "1,572 bytes, and 1,568 by its own header",
    "another type": "reads float32, and the rows are float64",
    "Fortran": "in C order",
    "objects": "x_train.npy: not an array that can be mapped",
    "no array": "x_train.npy: not an array that can be mapped",
    "empty file": "x_train.npy: not an array that can be mapped",
    "no rows": "there are no rows",
    "a folder": "x_train.npy: this is no regular file",
    "nothing": "expected the arrays x_train and y_train, found y_train",
    "other rows": "50 rows but 60 labels",
    "other features": r"expects rows of shape \(N, 6\), found \(60, 5\)",
    "batches": "3 record batches",
    "compressed": "is compressed",
    "no Arrow file": "rows.arrow: not an Arrow file that can be mapped",
    "no file": "absent.arrow: there is no such file",
}


@pytest.mark.parametrize("kind", SPOILED)
def test_what_can_not_be_trained_on_is_named(kind: str, place: Path, arrays: dict[str, Any]) -> None:
    name = spoiled(place, kind, arrays)
    with pytest.raises(InputError, match=SPOILED[kind]):
        loaded(name, place)


@pytest.mark.parametrize("change", ["shorter", "longer", "written", "removed"])
def test_a_file_that_changes_while_it_is_trained_on_is_found(change: str, place: Path, arrays: dict[str, Any]) -> None:
    found = loaded(as_folder(place, arrays), place)
    found.check()
    file = place / "folder" / "x_train.npy"
    match change:
        case "shorter":
            os.truncate(file, 200)
        case "longer":
            os.truncate(file, 5000)
        case "written":
            np.save(file, arrays["x_train"] + 1)
            os.utime(file, ns=(0, 0))
        case "removed":
            file.unlink()
    with pytest.raises(InputError, match=r"x_train\.npy"):
        found.check()


def test_a_file_that_is_cut_while_a_worker_reads_it_is_an_error_that_names_it(
    place: Path, arrays: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {name: np.repeat(array, 500, 0) for name, array in arrays.items()}
    folder = as_folder(place, wide)

    def cut() -> None:
        while time.monotonic() < limit and "EPOCH" not in capsys.readouterr().out:
            time.sleep(0.05)
        os.truncate(place / folder / "x_train.npy", 4096)

    limit = time.monotonic() + 60
    thread = threading.Thread(target=cut)
    thread.start()
    code = invoke(["train", "model.toml", "--data", folder, "--epochs", "1000", "--threads", "1", "--batch-size", "4"])
    thread.join()
    said = capsys.readouterr()
    assert code == 2 and "Traceback" not in said.err
    assert "x_train.npy had 720,128 bytes and has 4,096 now" in said.err


def test_an_engine_that_reads_rows_whole_is_refused_what_is_too_large(
    place: Path, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "MOST_BYTES", 1000)
    assert invoke(["train", "model.toml", "--data", as_folder(place, arrays), "--engine", "torch"]) == 2
    assert "engine torch reads rows whole, and these are 1,440 bytes" in capsys.readouterr().err


def test_the_digest_of_a_file_is_that_of_what_it_holds(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((1000, 50))
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "b.npy", array)
    first, second = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab")
    assert mapped.digest(first) == mapped.digest(second)
    array[-1, -1] += 1
    np.save(tmp_path / "c.npy", array)
    assert mapped.digest(np.load(tmp_path / "c.npy", mmap_mode="r")) != mapped.digest(first)
    assert mapped.digest(first.reshape(500, 100)) != mapped.digest(first)
