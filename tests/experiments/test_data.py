"""Datasets are found in the documented order, checked whole, and never replaced in silence.

Most tests run on a small MNIST made here, with a table of digests to match; mirrors are servers on 127.0.0.1.
Nothing here asks the outside world.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import TwinGradError
from experiments import data
from experiments.data import SAMPLE_LABEL, DataError, fetch, glove, idx, mnist, sample

ROWS = {"train": 12, "t10k": 5}


@pytest.fixture(autouse=True)
def no_outside_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("TWINGRAD_DATA", "TWINGRAD_MIRRORS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow downloads, from the mirrors that a test names."""
    monkeypatch.delenv("TWINGRAD_OFFLINE")


def sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


@dataclass
class Tiny:
    """Few rows in MNIST's form: their arrays, their files' contents, and the table of their digests."""

    arrays: list[np.ndarray]

    @property
    def plain(self) -> dict[str, bytes]:
        names = [file.name for file in mnist.FILES]
        return {name: idx_bytes(array) for name, array in zip(names, self.arrays, strict=True)}

    @property
    def gz(self) -> dict[str, bytes]:
        return {f"{name}.gz": gzip.compress(contents, mtime=0) for name, contents in self.plain.items()}

    @property
    def files(self) -> list[mnist.IdxFile]:
        return [
            replace(
                file,
                shape=array.shape,
                sha256=sha256(self.plain[file.name]),
                gz_size=len(self.gz[f"{file.name}.gz"]),
                gz_sha256=sha256(self.gz[f"{file.name}.gz"]),
            )
            for file, array in zip(mnist.FILES, self.arrays, strict=True)
        ]

    def load(self, **arguments: object) -> data.Dataset:
        return mnist.load(files=self.files, **arguments)


@pytest.fixture
def tiny(rng: np.random.Generator) -> Tiny:
    arrays = []
    for rows in ROWS.values():
        arrays.append(rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8))
        arrays.append(rng.integers(0, 10, rows, dtype=np.uint8))
    return Tiny(arrays)


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, stored in contents.items():
        (folder / name).write_bytes(stored)
    return folder


def dotted(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {name.replace("-idx", ".idx"): stored for name, stored in contents.items()}


def assert_same_rows(dataset: data.Dataset, tiny: Tiny) -> None:
    x_train, y_train, x_test, y_test = tiny.arrays
    for found, images in ((dataset.x_train, x_train), (dataset.x_test, x_test)):
        assert found.dtype == np.float32 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, images.reshape(-1, 784).astype(np.float32) / np.float32(255))
    for found, labels in ((dataset.y_train, y_train), (dataset.y_test, y_test)):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, labels)


# Reading a folder


@pytest.mark.parametrize("subfolder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("form", ["gz", "plain", "dotted plain", "dotted gz"])
def test_a_folder_may_hold_any_spelling(tiny: Tiny, tmp_path: Path, form: str, subfolder: str) -> None:
    contents = tiny.gz if form.endswith("gz") else tiny.plain
    write(tmp_path / "d" / subfolder, dotted(contents) if form.startswith("dotted") else contents)
    dataset = tiny.load(data_dir=tmp_path / "d")
    assert_same_rows(dataset, tiny)
    assert (dataset.name, dataset.source, dataset.notice) == ("mnist", "real", None)
    assert dataset.origin == str(tmp_path / "d" / subfolder)


def test_the_digest_is_the_data_s_however_it_is_stored(tiny: Tiny, tmp_path: Path) -> None:
    compressed = tiny.load(data_dir=write(tmp_path / "gz", tiny.gz))
    mixed = write(tmp_path / "mixed", dict(list(tiny.gz.items())[:2]) | dict(list(tiny.plain.items())[2:]))
    assert tiny.load(data_dir=mixed).digest == compressed.digest
    tiny.arrays[3][0] = (tiny.arrays[3][0] + 1) % 10
    assert tiny.load(data_dir=write(tmp_path / "other", tiny.gz)).digest != compressed.digest


def test_a_file_compressed_anew_is_as_good_as_the_original(tiny: Tiny, tmp_path: Path) -> None:
    anew = {f"{name}.gz": gzip.compress(contents, 1, mtime=1) for name, contents in tiny.plain.items()}
    assert anew != tiny.gz
    assert_same_rows(tiny.load(data_dir=write(tmp_path / "d", anew)), tiny)


# Files that are present but wrong


def flip_last_pixel(contents: bytes) -> bytes:
    return contents[:-1] + bytes([contents[-1] ^ 1])


WRONG_CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "truncated: 0 bytes"),
    "only a piece of the header": (lambda b: b[:10], "truncated: 10 bytes"),
    "truncated": (lambda b: b[:-100], "is truncated: .* where its header means"),
    "longer": (lambda b: b + b"\0", "bytes after its end"),
    "wrong magic": (lambda b: b"\x00\x00\x08\x01" + b[4:], "begins with 2049, expected the IDX magic 2051"),
    "a page of HTML": (lambda b: b"<!doctype html><title>Sign in</title>", "expected the IDX magic 2051"),
    "wrong count": (
        lambda b: b[:7] + b"\x0b" + b[8:-784],
        "holds 11 x 28 x 28 values, expected 12 x 28 x 28",
    ),
    "one bit flipped": (flip_last_pixel, "contents differ"),
}


@pytest.mark.parametrize("stored", ["plain", "gz"])
@pytest.mark.parametrize("case", WRONG_CONTENTS)
def test_wrong_contents_are_named_with_both_digests(tiny: Tiny, tmp_path: Path, case: str, stored: str) -> None:
    spoil, reason = WRONG_CONTENTS[case]
    name = "train-images-idx3-ubyte"
    good = tiny.plain[name]
    files = tiny.files
    if stored == "plain":
        folder = write(tmp_path / "d", tiny.plain | {name: spoil(good)})
    else:
        folder = write(tmp_path / "d", tiny.gz | {f"{name}.gz": gzip.compress(spoil(good))})
    with pytest.raises(DataError, match=reason) as caught:
        mnist.load(data_dir=folder, files=files)
    message = str(caught.value)
    assert str(folder / name) in message
    assert f"expected sha256 {sha256(good)}" in message
    assert f"found sha256    {sha256(spoil(good))}" in message
    assert "Put the original file in its place" in message


@pytest.mark.parametrize("spoil", [lambda b: b[:-20], lambda b: b"plain text", lambda b: b[:99] + b"??" + b[101:]])
def test_a_corrupt_gzip_is_named_with_both_digests(tiny: Tiny, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    name = "t10k-images-idx3-ubyte.gz"
    folder = write(tmp_path / "d", tiny.gz | {name: spoil(tiny.gz[name])})
    with pytest.raises(DataError, match="corrupt gzip") as caught:
        tiny.load(data_dir=folder)
    message = str(caught.value)
    assert str(folder / name) in message
    assert sha256(tiny.gz[name]) in message and sha256(spoil(tiny.gz[name])) in message


def test_a_label_out_of_range_is_named_with_its_row(tiny: Tiny, tmp_path: Path) -> None:
    tiny.arrays[1][7] = 10  # the digest in the table is this file's own, so only the label is wrong
    with pytest.raises(DataError, match=r"train-labels.*row 8 has label 10; labels are 0 to 9"):
        tiny.load(data_dir=write(tmp_path / "d", tiny.gz))


def test_images_and_labels_swapped_are_told_apart(tiny: Tiny, tmp_path: Path) -> None:
    swapped = tiny.plain | {"t10k-labels-idx1-ubyte": tiny.plain["t10k-images-idx3-ubyte"]}
    with pytest.raises(DataError, match=r"t10k-labels.*begins with 2051, expected the IDX magic 2049"):
        tiny.load(data_dir=write(tmp_path / "d", swapped))


def test_an_unreadable_file_is_an_error(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    folder = write(tmp_path / "d", tiny.gz)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz can't be read: Permission denied"):
        tiny.load(data_dir=folder)


@pytest.mark.parametrize("place", ["data_dir", "TWINGRAD_DATA"])
def test_some_of_the_four_files_is_an_error(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = write(tmp_path / "d", dict(list(tiny.gz.items())[:3]))
    monkeypatch.setenv("TWINGRAD_DATA", str(folder))
    with pytest.raises(DataError, match=r"only 3 of MNIST's 4 files.*t10k-labels-idx1-ubyte.gz") as caught:
        tiny.load(data_dir=folder if place == "data_dir" else None)
    assert str(folder) in str(caught.value)


def test_the_default_table_rejects_what_is_not_mnist(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected 60,000 x 28 x 28"):
        data.load("mnist", data_dir=write(tmp_path / "d", tiny.gz))


def test_errors_are_the_kind_that_the_command_line_prints() -> None:
    assert issubclass(DataError, TwinGradError) and issubclass(DataError, ValueError)
    with pytest.raises(DataError, match=r"no dataset is called 'cifar'; known datasets: .*mnist"):
        data.load("cifar")


# The order of search


def test_an_explicit_folder_without_mnist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no MNIST: expected train-images-idx3-ubyte\.gz"):
        data.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("place", ["data_dir", "TWINGRAD_DATA"])
def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    missing = tmp_path / "nowhere"
    file = tmp_path / "file"
    file.write_text("")
    of_nobody = Path("~no-such-user") / "data"
    for path, reason in ((missing, "does not exist"), (file, "is not a folder"), (of_nobody, "does not exist")):
        if place == "TWINGRAD_DATA":
            monkeypatch.setenv(place, str(path))
        with pytest.raises(DataError, match=reason) as caught:
            data.load("mnist", data_dir=path if place == "data_dir" else None)
        assert str(path) in str(caught.value)
        assert place == "data_dir" or place in str(caught.value)


def test_the_explicit_folder_goes_before_the_variable_and_that_before_the_cache(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explicit, named, cached = (write(tmp_path / place, tiny.gz) for place in ("explicit", "named", "cache/mnist"))
    assert tiny.load().origin == str(cached)
    monkeypatch.setenv("TWINGRAD_DATA", str(named))
    assert tiny.load().origin == str(named)
    assert tiny.load(data_dir=str(explicit)).origin == str(explicit)


def test_the_variable_may_name_a_folder_of_other_datasets(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "data" / "imdb", {"train.csv.gz": b""}).parent
    monkeypatch.setenv("TWINGRAD_DATA", str(other))
    notice = tiny.load().notice
    assert notice is not None and f"TWINGRAD_DATA ({other}) does not hold it" in notice
    cached = write(tmp_path / "cache" / "mnist", tiny.gz)
    assert tiny.load().origin == str(cached)


def test_a_wrong_file_in_the_cache_is_an_error_too(tiny: Tiny, tmp_path: Path) -> None:
    name = "train-labels-idx1-ubyte.gz"
    cached = write(tmp_path / "cache" / "mnist", tiny.gz | {name: tiny.gz[name][:-1]})
    with pytest.raises(DataError, match="Delete it and run again") as caught:
        tiny.load()
    assert str(cached / name) in str(caught.value)


# The embedded sample


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_without_files_or_network_the_sample_says_what_it_is(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "argument":
        monkeypatch.delenv("TWINGRAD_OFFLINE")
    dataset = data.load("mnist", allow_download=how == "variable")
    assert (dataset.name, dataset.source) == ("mnist", "sample")
    assert SAMPLE_LABEL in dataset.origin
    assert dataset.notice is not None and dataset.notice.lower().startswith(f"{SAMPLE_LABEL}, not mnist")
    assert "downloads are switched off" in dataset.notice
    assert dataset.x_train.shape == (1500, 784) and dataset.x_test.shape == (297, 784)
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert x.dtype == np.float32 and x.flags.c_contiguous
        assert x.min() == 0 and x.max() == 1
        assert y.dtype == np.int64 and set(y.tolist()) == set(range(10)) and len(x) == len(y)


def test_the_digits_are_those_of_scikit_learn_and_read_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    expected = load_digits()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.datasets", None)  # what imports it fails
        found = sample._digits()
    with monkeypatch.context() as patch:  # a scikit-learn that has its file elsewhere
        patch.setattr(sample.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="/nowhere/x.py"))
        imported = sample._digits()
    for images, labels in (found, imported):
        np.testing.assert_array_equal(images, expected.images, strict=True)
        np.testing.assert_array_equal(labels, expected.target)


def test_the_sample_is_the_same_every_time() -> None:
    first, second = data.load("mnist"), data.load("mnist")
    np.testing.assert_array_equal(first.x_train, second.x_train)
    assert first.digest == second.digest


def test_scaling_keeps_constants_ramps_and_range(rng: np.random.Generator) -> None:
    np.testing.assert_allclose(sample.bilinear(np.full((1, 8, 8), 0.3), 28), 0.3, rtol=1e-15)
    centres = (np.arange(8) + 0.5) / 8
    ramp = sample.bilinear(np.broadcast_to(centres, (1, 8, 8)), 28)[0]
    inside = (np.arange(28) + 0.5) / 28
    np.testing.assert_allclose(ramp, np.broadcast_to(np.clip(inside, centres[0], centres[-1]), (28, 28)))
    noise = rng.random((3, 8, 8))
    scaled = sample.bilinear(noise, 28)
    assert noise.min() <= scaled.min() and scaled.max() <= noise.max()
    np.testing.assert_allclose(sample.bilinear(noise.swapaxes(1, 2), 28), scaled.swapaxes(1, 2))


# Downloads, from servers on this machine


class Mirror:
    """A server of `contents`; with a `fault`, it answers as a bad server would."""

    def __init__(self, contents: dict[str, bytes], fault: str = "") -> None:
        self.requests: list[str] = []
        self.stopped = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                mirror.requests.append(self.path)
                self.answer(head=False)

            def answer(self, head: bool) -> None:
                body = contents.get(self.path.lstrip("/"))
                if body is None or fault == "500":
                    self.send_error(404 if body is None else 500)
                    return
                length = len(body)
                if fault == "truncated":
                    body = body[: length // 2]
                elif fault == "wrong":
                    body = body[:-1] + bytes([body[-1] ^ 1])
                elif fault == "too long":
                    body, length = body * 3, length * 3
                self.send_response(200)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if not head:
                    self.wfile.write(body[: length // 2] if fault == "stalls" else body)
                if not head and fault == "stalls":
                    self.wfile.flush()
                    mirror.stopped.wait()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Mirror]]:
    started: list[Mirror] = []

    def start(contents: dict[str, bytes], fault: str = "") -> Mirror:
        started.append(Mirror(contents, fault))
        return started[-1]

    yield start
    for mirror in started:
        mirror.stopped.set()
        mirror.server.shutdown()
        mirror.server.server_close()


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("fault", ["500", "truncated", "wrong", "too long", "missing", "closed"])
def test_the_next_mirror_is_asked_when_one_fails(
    tiny: Tiny, tmp_path: Path, serve: Callable[..., Mirror], closed_port: str, fault: str
) -> None:
    bad = closed_port if fault == "closed" else serve({} if fault == "missing" else tiny.gz, fault).url
    good = serve(tiny.gz)
    seen: list[tuple[str, int, int]] = []
    dataset = tiny.load(mirrors=[bad, f"{good.url}/"], progress=lambda *step: seen.append(step))
    assert_same_rows(dataset, tiny)
    assert dataset.source == "real" and dataset.origin == str(tmp_path / "cache" / "mnist")
    assert sorted(os.listdir(tmp_path / "cache" / "mnist")) == sorted(tiny.gz)
    assert sorted(good.requests) == sorted(f"/{name}" for name in tiny.gz)
    for name, contents in tiny.gz.items():
        assert (name, len(contents), len(contents)) in seen


@pytest.mark.usefixtures("online")
def test_a_failing_mirror_is_not_asked_for_every_file(tiny: Tiny, serve: Callable[..., Mirror]) -> None:
    bad, good = serve(tiny.gz, "500"), serve(tiny.gz)
    tiny.load(mirrors=[bad.url, good.url])
    assert len(bad.requests) == 1


@pytest.mark.usefixtures("online")
def test_a_second_load_asks_nobody(tiny: Tiny, serve: Callable[..., Mirror]) -> None:
    mirror = serve(tiny.gz)
    first = tiny.load(mirrors=[mirror.url])
    asked = len(mirror.requests)
    second = tiny.load(mirrors=[mirror.url])
    assert len(mirror.requests) == asked and second.digest == first.digest


@pytest.mark.usefixtures("online")
def test_the_mirrors_can_be_set(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Mirror], closed_port: str
) -> None:
    mirror = serve({f"data/mnist/{name}": contents for name, contents in tiny.gz.items()})
    monkeypatch.setenv("TWINGRAD_MIRRORS", f"{closed_port} {mirror.url}/data/")
    assert tiny.load(mirrors=["http://127.0.0.1:9/never-asked"]).source == "real"


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "HTTP status 500"),
        ("missing", "HTTP status 404"),
        ("truncated", "broke off|wrong bytes"),
        ("wrong", r"wrong bytes \([^)]*expected sha256 \w+, found \w+\)"),
        ("too long", "sent more than"),
    ],
)
def test_when_all_mirrors_fail_the_notice_says_why_and_nothing_is_kept(
    tiny: Tiny, tmp_path: Path, serve: Callable[..., Mirror], fault: str, reason: str
) -> None:
    mirrors = [serve({} if fault == "missing" else tiny.gz, fault) for _ in range(2)]
    dataset = tiny.load(mirrors=[mirror.url for mirror in mirrors])
    assert dataset.source == "sample" and dataset.notice is not None
    for mirror in mirrors:
        assert len(mirror.requests) == 1
        assert mirror.url in dataset.notice
    assert len(re.findall(reason, dataset.notice)) == len(mirrors)
    assert os.listdir(tmp_path / "cache" / "mnist") == []


@pytest.mark.usefixtures("online")
def test_without_a_network_the_sample_serves(tiny: Tiny, tmp_path: Path, closed_port: str) -> None:
    dataset = tiny.load(mirrors=[closed_port])
    assert dataset.source == "sample" and dataset.notice is not None
    assert f"{closed_port}: no connection" in dataset.notice
    assert os.listdir(tmp_path / "cache" / "mnist") == []


def test_a_mirror_that_never_answers_is_given_up(tiny: Tiny, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(fetch.DownloadError, match=r"no answer (in time|within 0\.2 s)"):
            fetch.download([file.gz for file in tiny.files], tmp_path, [url], contact_seconds=0.2)
    assert os.listdir(tmp_path) == []


def test_a_transfer_that_stands_still_is_given_up(tiny: Tiny, tmp_path: Path, serve: Callable[..., Mirror]) -> None:
    slow, good = serve(tiny.gz, "stalls"), serve(tiny.gz)
    files = [file.gz for file in tiny.files]
    fetch.download(files, tmp_path, [slow.url, good.url], stall_seconds=0.2)
    assert sorted(os.listdir(tmp_path)) == sorted(tiny.gz) and len(slow.requests) == 1
    with pytest.raises(fetch.DownloadError, match="the connection broke off; nothing was kept"):
        fetch.download(files, tmp_path / "other", [slow.url], stall_seconds=0.2)
    assert os.listdir(tmp_path / "other") == []


@pytest.mark.usefixtures("online")
def test_a_broken_off_download_is_taken_up_again(tiny: Tiny, tmp_path: Path, serve: Callable[..., Mirror]) -> None:
    names = list(tiny.gz)
    half = serve({name: tiny.gz[name] for name in names[:2]})
    assert tiny.load(mirrors=[half.url]).source == "sample"
    assert sorted(os.listdir(tmp_path / "cache" / "mnist")) == sorted(names[:2])
    offline = tiny.load(allow_download=False)
    assert offline.notice is not None and "holds only part of it" in offline.notice
    whole = serve(tiny.gz)
    assert tiny.load(mirrors=[whole.url]).source == "real"
    assert sorted(whole.requests) == sorted(f"/{name}" for name in names[2:])


@pytest.mark.usefixtures("online")
def test_a_cache_that_cannot_be_made_ends_in_the_sample(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Mirror]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "file"))
    dataset = tiny.load(mirrors=[serve(tiny.gz).url])
    assert dataset.source == "sample" and dataset.notice is not None
    assert f"the cache folder {tmp_path / 'file' / 'mnist'} can't be made" in dataset.notice


def test_offline_asks_nobody(tiny: Tiny, serve: Callable[..., Mirror]) -> None:
    mirror = serve(tiny.gz)
    assert tiny.load(mirrors=[mirror.url]).source == "sample"
    assert mirror.requests == []


def test_the_default_mirrors_are_several_and_encrypted() -> None:
    assert len({mirror.split("/")[2] for mirror in mnist.MIRRORS}) >= 2
    assert all(mirror.startswith("https://") for mirror in mnist.MIRRORS)


# The real MNIST, where TWINGRAD_DATA names it


def test_the_real_mnist_loads(data_dir: Path) -> None:
    dataset = data.load("mnist", data_dir=data_dir)
    assert (dataset.source, dataset.notice) == ("real", None)
    assert dataset.x_train.shape == (60_000, 784) and dataset.x_test.shape == (10_000, 784)
    assert dataset.x_train.dtype == np.float32 and dataset.x_train.flags.c_contiguous
    assert dataset.x_train.min() == 0 and dataset.x_train.max() == 1
    # Facts of the data set: how often each digit occurs, and the first labels of each part.
    counts = np.bincount(dataset.y_train).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert dataset.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    assert dataset.y_test[:5].tolist() == [7, 2, 1, 0, 4]


def test_the_real_archives_are_those_that_would_be_downloaded(data_dir: Path) -> None:
    for file in mnist.FILES:
        stored = (data_dir / "mnist" / file.gz.name).read_bytes()
        assert (len(stored), sha256(stored)) == (file.gz.size, file.gz.sha256)


def test_idx_shapes_read_as_words() -> None:
    assert idx.in_words((60_000, 28, 28)) == "60,000 x 28 x 28"


# What lies in the place of a data file --------------------------------------------------------------------------------

PLACES = {
    "mnist": ["train-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte", "MNIST/raw/train-labels.idx1-ubyte"],
    "imdb": ["imdb/train.csv", "test.csv.gz", "imdb/IMDB Dataset.csv", "imdb/aclImdb_v1.tar.gz", "reviews.csv"],
    "glove": ["glove.6B.50d.txt", "glove/glove.6B.50d.txt.gz", "glove.6B/glove.6B.zip"],
}
FOLDERS = {"mnist": "mnist", "imdb": "imdb", "glove": "glove"}
KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "Too many levels of symbolic links": lambda path: path.symlink_to(path.name),
}


def search_in(dataset: str) -> object:
    if dataset == "glove":
        return glove.locate(50, allow_download=False)
    return data.load(dataset, allow_download=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dataset", "name"), [(key, name) for key, names in PLACES.items() for name in names])
@pytest.mark.parametrize("where", ["TWINGRAD_DATA", "TWINGRAD_CACHE"])
def test_what_is_no_file_in_the_place_of_one_is_named_and_the_sample_does_not_serve(
    where: str, dataset: str, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / (dataset if where == "TWINGRAD_CACHE" else "") / name
    path.parent.mkdir(parents=True)
    KINDS[kind](path)
    monkeypatch.setenv(where, str(tmp_path / "data"))
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        search_in(dataset)
    assert kind in str(caught.value)


@pytest.mark.parametrize("dataset", FOLDERS)
def test_a_file_in_the_place_of_a_folder_is_named(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDERS[dataset]).write_text("")
    monkeypatch.setenv("TWINGRAD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"{tmp_path / FOLDERS[dataset]} is a file; expected a folder"):
        search_in(dataset)
