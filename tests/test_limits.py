"""Bad input of any size is refused in bounded time and memory, by a message that is short and names what is wrong.

All of it runs in one process, whose memory the system limits, and each case within seconds of the processor's time.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import spec, toml, weights
from bridge.errors import TwinGradError, printable, shown
from experiments import cli, papers
from experiments import rows as input_rows
from experiments.data import glove, imdb, mnist
from experiments.gradbench import protocol

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 4
"""Of the processor: the limits are set for two, and a busy machine takes up to twice as long for the same work."""
MEGABYTES = 500

DIGITS = "1" * 100_000
TEXTS = {
    "a dotted key": (".".join(["a"] * 50_000) + " = 1", "the key 'a.a.a"),
    "a dotted header": ("[" + " . ".join(['"a"'] * 50_000) + "]", "has more than 50 parts"),
    "an inline dotted key": ("x = { " + ".".join(["a"] * 50_000) + " = 1 }", "has more than 50 parts"),
    "unknown keys": ("".join(f"k{n} = 1\n" for n in range(20_000)), "missing"),
    "digits": (f"version = {DIGITS}", "'version = 1111111111…': a number of 100,000 digits"),
    "hexadecimal digits": (f"version = 0x{DIGITS}", "version: "),
    "digits of a fraction": (f"version = 1.{DIGITS}", "version: "),
    "nested lists": ("x = " + "[" * 100_000, "nested too deeply"),
    "nested tables": ("x = " + "{a=" * 150 + "1" + "}" * 150, "nested too deeply"),
    "a long text": (f'name = "{"x" * 900_000}"', "missing"),
    "a long key": (f"{'k' * 900_000} = 1", "missing"),
    "too long": ("#" * 1_000_001, "more than 1,000,000 characters"),
    "many tables": ("[[layers]]\nx = 1\n" * 20_000, "missing"),
    "many headers": ("".join(f"[a.b{n}]\n" for n in range(50_000)), "missing"),
}

MEASURED = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (6_000 << 20, 6_000 << 20))
sys.path.insert(0, sys.argv[1])
import test_limits
from pathlib import Path
for name, case in test_limits.CASES.items():
    ready = case(Path(sys.argv[2]))
    before, memory = time.process_time(), test_limits.peak(reset=True)
    message = ready()
    used = time.process_time() - before
    print(json.dumps([name, message, used, (test_limits.peak() - memory) / 1e6]), flush=True)
"""


def peak(reset: bool = False) -> int:
    """The most memory that was resident since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def refusal(work: Callable[[], object]) -> str:
    """The message of the error that `work` must raise."""
    try:
        work()
    except TwinGradError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def bomb(size: int) -> bytes:
    """Zeros, packed: some kilobytes for each megabyte."""
    return gzip.compress(bytes(1 << 24)) * (size >> 24)


def placed(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _mnist(folder: Path) -> Callable[[], str]:
    path = placed(folder, "t10k-images-idx3-ubyte.gz", bomb(1 << 30))
    return lambda: refusal(lambda: mnist.read(path, mnist.FILES[2]))


def _glove(folder: Path) -> Callable[[], str]:
    path = placed(folder, "glove.6B.50d.txt.gz", bomb(1 << 30))
    return lambda: refusal(lambda: glove.read(path, ["the"], 50))


def _imdb_csv(folder: Path) -> Callable[[], str]:
    path = placed(folder, "IMDB Dataset.csv.gz", bomb(1 << 30))
    return lambda: refusal(lambda: list(imdb.read(path)))


def _imdb_rows(folder: Path) -> Callable[[], str]:
    path = placed(folder, "reviews.csv.gz", gzip.compress(b"review,label\n" + b"a,1\n" * 2_000_000, 1))
    return lambda: refusal(lambda: list(imdb.read(path, each=10_000)))


def _imdb_archive(folder: Path) -> Callable[[], str]:
    head = io.BytesIO()
    member = tarfile.TarInfo("aclImdb/other")
    member.size = 1 << 40
    head.write(member.tobuf())
    path = placed(folder, "aclImdb_v1.tar.gz", gzip.compress(head.getvalue()) + bomb(1 << 30))
    return lambda: refusal(lambda: list(imdb.read(path)))


def _imdb_note(folder: Path) -> Callable[[], str]:
    member = tarfile.TarInfo("note")
    member.type, member.size = tarfile.XHDTYPE, 1 << 29
    path = placed(folder, "aclImdb.tar.gz", gzip.compress(member.tobuf()) + bomb(1 << 29))
    return lambda: refusal(lambda: list(imdb.read(path)))


def _header(folder: Path, length: int) -> Callable[[], str]:
    path = placed(folder, f"{length}.safetensors", length.to_bytes(8, "little") + b"{" + b" " * 1000)
    return lambda: refusal(lambda: weights.load(path))


def _tensors(folder: Path) -> Callable[[], str]:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps({f"{'t' * 100}{n}": entry for n in range(20_000)}).encode()
    path = placed(folder, "many.safetensors", len(head).to_bytes(8, "little") + head)
    model = spec.load(papers.model_path("mnist-rnn"))
    return lambda: refusal(lambda: weights.load(path, model))


def _npz(folder: Path) -> Callable[[], str]:
    import zipfile

    path = folder / "rows.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "x_train.npy",
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117)
            + b"\n",
        )
    return lambda: refusal(lambda: input_rows.load_npz(path))


def _messages(*lines: str) -> Callable[[Path], Callable[[], str]]:
    """What GradBench's side of a pipe says last: an answer, or the error that ends the conversation."""

    def serve() -> str:
        answers = io.StringIO()
        try:
            protocol.serve("numpy", io.StringIO("\n".join(lines) + "\n"), answers)
        except TwinGradError as error:
            return str(error)
        return str(json.loads(answers.getvalue().splitlines()[-1])["error"])

    return lambda folder: serve


def _evaluate(module: str, function: str, **given: object) -> str:
    return json.dumps({"id": 0, "kind": "evaluate", "module": module, "function": function, "input": given})


def _text(reader: Callable[[str, str], object], text: str) -> Callable[[Path], Callable[[], str]]:
    return lambda folder: lambda: refusal(lambda: reader(text, "file.toml"))


CASES: dict[str, Callable[[Path], Callable[[], str]]] = {
    **{f"spec: {name}": _text(spec.loads, text) for name, (text, _) in TEXTS.items()},
    **{f"paper: {name}": _text(papers.loads, text) for name, (text, _) in TEXTS.items()},
    "mnist.gz": _mnist,
    "glove.gz": _glove,
    "imdb.csv.gz": _imdb_csv,
    "imdb rows": _imdb_rows,
    "imdb.tar.gz": _imdb_archive,
    "imdb note": _imdb_note,
    "header 2**60": lambda folder: _header(folder, 2**60),
    "header 2**27": lambda folder: _header(folder, 2**27),
    "many tensors": _tensors,
    "npz": _npz,
    "gradbench: lists": _messages('{"id": 0, "kind": "evaluate", "input": [' + "[]," * 3_000_000 + "[]]}"),
    "gradbench: values": _messages('{"id": 0, "kind": "evaluate", "input": [' + "0," * 11_000_000 + "0]}"),
    "gradbench: deep": _messages("[" * 900_000),
    "gradbench: digits": _messages('{"id": ' + DIGITS + "}"),
    "gradbench: id": _messages('{"id": ' + "[" * 900 + "]" * 900 + ', "kind": "start"}'),
    "gradbench: module": _messages(_evaluate("m" * 10_000_000, "f")),
    "gradbench: function": _messages(_evaluate("lse", "\x1b[31m" * 100_000, x=[1.0])),
    "gradbench: points": _messages(_evaluate("llsq", "primal", x=[1.0, 2.0], n=2**52)),
    "gradbench: runs": _messages(_evaluate("lse", "primal", x=[1.0], min_runs=10**12)),
    "gradbench: seconds": _messages(_evaluate("lse", "primal", x=[1.0], min_seconds=1e12)),
}
EXPECTED = {
    **{f"{kind}: {name}": expected for kind in ("spec", "paper") for name, (_, expected) in TEXTS.items()},
    "mnist.gz": "unpacks to more than",
    "glove.gz": "line 1 has more than 3,500 bytes",
    "imdb.csv.gz": "line 1 has more than 131,072 bytes",
    "imdb rows": "holds more than 41,000 reviews of one kind",
    "imdb.tar.gz": "it unpacks to more than 450,000,000 bytes",
    "imdb note": "a note of 536,870,912 bytes",
    "header 2**60": "a header of 1,152,921,504,606,846,976 bytes",
    "header 2**27": "a header of 134,217,728 bytes",
    "many tensors": "more than 100 problems",
    "npz": "rows.npz: not an .npz file that can be read",
    "gradbench: lists": "1,000,000 lists",
    "gradbench: values": "10,000,000 values",
    "gradbench: deep": "is not JSON",
    "gradbench: digits": "is not JSON",
    "gradbench: id": "expected a number or a text for 'id'",
    "gradbench: module": "there is no module 'mmmm",
    "gradbench: function": r"'\x1b[31m",
    "gradbench: points": "n=4,503,599,627,370,496 points",
    "gradbench: runs": "min_runs: expected a number of at most 1,000,000, found 1000000000000",
    "gradbench: seconds": "min_seconds: expected a number of at most 3,600",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float, float]]:
    """What each case said, its seconds of the processor, and the megabytes that it took."""
    folder = tmp_path_factory.mktemp("limits")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(ROOT / "tests"), str(folder)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (said, seconds, more) for name, said, seconds, more in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_within_bounds_by_a_short_message(
    name: str, measured: dict[str, tuple[str, float, float]]
) -> None:
    said, seconds, megabytes = measured[name]
    assert EXPECTED[name] in said, said
    assert len(said) < 5_000
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said) is None
    assert seconds < SECONDS, seconds
    assert megabytes < MEGABYTES, megabytes


# Messages -------------------------------------------------------------------------------------------------------------


def test_values_are_shown_on_one_line_shortened_and_without_control_characters() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 10**6)) < 100 and len(shown({"k" * 10**6: ["v" * 10**6] * 10**5})) < 1_000
    assert shown(int("1" * 4000)) == "a whole number of 4,000 digits"
    assert shown(16**200_000) == "a whole number of 240,825 digits"
    for hostile in ("\x1b[2J", "a\nb", "\r", "\u202eabc", "\x00", "\ud800", "\x9b31m"):
        assert printable(shown(hostile)) == shown(hostile)
        assert shown(hostile).isascii() and "\n" not in shown(hostile)
    assert printable("two\nlines") == "two\nlines"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "mnist-rnn", "--data", "mnist", "--epochs", DIGITS], "'--epochs': '1111111111"),
        (["train", "mnist-rnn", "--data", "mnist", "--seed", str(2**63)], "not a whole number from 0 to 9,223,372"),
        (["train", "mnist-rnn", "--data", "mnist", "--batch-size", "100000001"], "from 1 to 100,000,000"),
        (["train", "x" * 100_000, "--data", "mnist"], "no model 'xxxx"),
        (["train", "mnist-rnn", "--data", "\x1b[31m" * 10_000], r"\x1b[31m"),
        (["run", "\x1b[31mred"], r"no paper '\x1b[31mred'"),
        (["run", "mnist-rnn-e", "--seeds", "1001"], "from 1 to 1,000"),
        (["race", "mnist-rnn-e", "--rounds", "10001"], "from 1 to 10,000"),
        (["gradbench", "--engine", "numpy", "--threads", "1025"], "from 1 to 1,024"),
    ],
)
def test_the_command_line_names_the_option_and_its_limits(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(arguments) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said) < 10_000 and "\x1b" not in said and "Traceback" not in said


def test_a_file_without_end_is_read_to_its_limit() -> None:
    with pytest.raises(toml.TomlError, match="more than 1,000,000 bytes"):
        toml.read("/dev/zero")
