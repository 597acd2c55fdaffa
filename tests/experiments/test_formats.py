"""Numbers as text: every boundary of units and digits, signs, nothing, infinity; and no other place formats one."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import formats
from experiments.report.html import sort_key

ROOT = Path(__file__).resolve().parents[2]

MANTISSAS = ("9.994", "9.995", "99.94", "99.95", "999.4", "999.5", "999.6", "1", "1.005", "10", "100", "1000")
"""Where three digits carry into the next power of ten, and their neighbours."""

UNITS = {
    formats.size: [0, 3, 6, 9, 12],
    formats.nanoseconds: [0, 3, 6, 9],
    formats.duration: [-9, -6, -3, 0],
    formats.significant: [-9, -6, -3, 0, 3, 6],
}
"""The powers of ten of a format's units, in the number that it is given."""

FORMATS: dict[str, Callable[[float], str]] = {
    function.__name__: function
    for function in (
        *(formats.significant, formats.fixed, formats.fraction, formats.scientific, formats.percent),
        *(formats.share, formats.size, formats.nanoseconds, formats.duration),
    )
}


def boundaries(powers: list[int]) -> Iterator[float]:
    """The boundaries in every unit, with the next doubles on both sides."""
    for power in powers:
        for mantissa in MANTISSAS:
            value = float(Decimal(mantissa).scaleb(power))
            yield from (math.nextafter(value, 0), value, math.nextafter(value, math.inf))


def read(text: str) -> float:
    """The number that a text says, in bytes or seconds; in minutes and hours it is the sum."""
    parts = re.findall(r"\d[\d.\u202f]*(?: [^\d ]+)?", text)
    found = [sort_key(part) for part in parts]
    assert found and all(number is not None for number in found), text
    return math.fsum(number for number in found if number is not None)


def rounding(text: str) -> float:
    """Half of the last digit that a text shows, in bytes or seconds."""
    number, _, unit = text.rpartition(" ") if " " in text else (text, "", "")
    last = number.rpartition(" ")[2]
    decimals = len(last.partition(".")[2])
    one = sort_key(f"1 {unit}" if unit else "1")
    assert one is not None
    return 0.5 * one * 10.0**-decimals


@pytest.mark.parametrize("show", UNITS, ids=lambda show: show.__name__)
def test_at_every_boundary_the_text_says_the_number_and_grows_with_it(show: Callable[[float], str]) -> None:
    values = sorted(set(boundaries(UNITS[show])))
    shown = [show(value) for value in values]
    scale = 1e-9 if show is formats.nanoseconds else 1.0
    for value, text in zip(values, shown, strict=True):
        assert "e" not in text, (value, text)
        assert abs(read(text) - value * scale) <= rounding(text) * (1 + 1e-9), (value, text)
    for (low, below), (high, above) in pairwise(zip(values, shown, strict=True)):
        assert read(below) <= read(above) * (1 + 1e-12), (low, below, high, above)


@pytest.mark.parametrize("show", [formats.size, formats.nanoseconds], ids=lambda show: show.__name__)
def test_a_unit_rolls_over_after_rounding_and_never_loses_digits(show: Callable[[float], str]) -> None:
    for value in boundaries(UNITS[show][:-1]):
        number, unit = show(value).split(" ")
        assert 1 <= float(number) < 1000 or unit in ("ns", "B"), (value, number, unit)
        assert len(number.replace(".", "").lstrip("0")) == 3 or unit == "B", (value, number, unit)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999_600, "1.00 MB"),
        (999_499, "999 kB"),
        (999.4, "999 B"),
        (999.5, "1.00 kB"),
        (0, "0 B"),
        (-0.2, "0 B"),
        (950, "950 B"),
        (4800, "4.80 kB"),
        (4_808_000, "4.81 MB"),
        (152_600_000, "153 MB"),
        (1.6e10, "16.0 GB"),
        (1.169e12, "1.17 TB"),
        (1e16, "10\u202f000 TB"),
        (-1500, "−1.50 kB"),
    ],
)
def test_sizes(value: float, text: str) -> None:
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1.00 s"),
        (0.9994, "999 ms"),
        (0.000812, "812 µs"),
        (0.0032, "3.20 ms"),
        (15.9e-9, "15.9 ns"),
        (1.4234, "1.42 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (7199, "2 h 00 min"),
        (86_400_000, "24\u202f000 h 00 min"),
        (0.0, "0 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text
    if 0 < seconds < 59:
        assert formats.nanoseconds(seconds * 1e9) == text


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_a_longer_time_never_reads_as_a_shorter_one(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert read(formats.duration(low)) <= read(formats.duration(high)) * (1 + 1e-12)
    assert abs(read(formats.duration(one)) - one) <= rounding(formats.duration(one)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (4.555, "4.55"),
        (9.999, "10.0"),
        (99.96, "100"),
        (123.4, "123"),
        (1234.4, "1234"),
        (9999.4, "9999"),
        (9999.6, "10\u202f000"),
        (12345.6, "12\u202f346"),
        (1e300, f"{10**300:,}".replace(",", "\u202f")[:4] + "…"),
        (5e-324, "0." + "0" * 323 + "494"),
        (-2.5, "−2.50"),
        (2**70, "1\u202f180\u202f591\u202f620\u202f717\u202f411\u202f303\u202f424"),
    ],
)
def test_significant_digits(value: float, text: str) -> None:
    shown = formats.significant(value)
    assert shown.startswith(text.removesuffix("…")) if text.endswith("…") else shown == text


@given(st.floats(1e-6, 1e12), st.integers(1, 5))
def test_significant_is_never_off_by_more_than_half_a_digit(value: float, digits: int) -> None:
    shown = float(formats.significant(value, digits).replace("\u202f", ""))
    assert abs(shown - value) <= 0.5 * 10.0 ** min(0, math.floor(math.log10(value)) - digits + 2) * (1 + 1e-9)
    assert abs(shown - value) <= 0.5001 * 10.0 ** (math.floor(math.log10(value)) - digits + 1) or value > 10**digits


@given(st.floats(1e-12, 1e15), st.integers(1, 5))
def test_ticks_drop_zeros_and_nothing_else(value: float, digits: int) -> None:
    for show in (formats.significant, formats.size, formats.nanoseconds):
        whole, trimmed = show(value, digits), show(value, digits, trim=True)
        assert sort_key(trimmed) == pytest.approx(sort_key(whole), rel=1e-12)
        assert not re.search(r"\.\d*0( |$)|\.( |$)", trimmed)
    assert formats.size(2.5e9, 1, trim=True) == "2 GB" and formats.size(2.5e9, trim=True) == "2.5 GB"


@pytest.mark.parametrize("show", FORMATS.values(), ids=FORMATS)
def test_nothing_infinity_and_signs(show: Callable[[float | None], str]) -> None:
    assert show(None) == show(math.nan) == formats.MISSING
    assert show(math.inf) == "∞" and show(-math.inf) == "−∞"
    assert show(0.0) == show(-0.0) and "−" not in show(-0.0)
    for value in (1234.5, 0.77, 3.0, 7.3e9):
        assert show(-value) == f"−{show(value)}"
        assert "-" not in show(-value)
    assert "−" not in show(-1e-300) or any(digit in show(-1e-300) for digit in "123456789")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.444, "44 %"),
        (0.994, "99 %"),
        (0.996, "over 99 %"),
        (0.9996, "over 99.9 %"),
        (math.nextafter(1, 0), "over 99.9 %"),
        (1.0, "100 %"),
        (1.004, "100 %"),
        (-0.001, "0 %"),
        (-0.25, "−25 %"),
    ],
)
def test_shares(share: float, text: str) -> None:
    assert formats.percent(share) == text


def test_small_shares_keep_two_digits() -> None:
    shown = [formats.share(share) for share in (0.00487, 0.0887, 0.4729, 0.996, 1.104, 0.0)]
    assert shown == ["0.49 %", "8.9 %", "47 %", "100 %", "110 %", "0 %"]
    assert formats.share(None) == formats.MISSING


@pytest.mark.parametrize(
    ("mean", "spread", "text"),
    [
        (0.5, 0.01, "0.500 ± 0.010"),
        (12.3, 0.04, "12.30 ± 0.04"),
        (12.3, None, "12.3"),
        (12.3, math.nan, "12.3"),
        (1.5, 0.002, "1.500 ± 0.002"),
        (2.0, 0.0, "2.00 ± 0.00"),
        (12345.6, 0.3, "12\u202f346 ± 0"),
        (12345.6, 2.0, "12\u202f346 ± 2"),
        (9999.7, 0.4, "10\u202f000 ± 0"),
        (123456.0, 23456.0, "123\u202f456 ± 23\u202f456"),
        (0.0, 0.3, "0.0 ± 0.3"),
        (math.nan, 1.0, formats.MISSING),
    ],
)
def test_a_spread_has_the_digits_of_its_mean_unless_it_would_vanish(
    mean: float, spread: float | None, text: str
) -> None:
    assert formats.with_spread(mean, spread) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.14e-7, "3.1·10⁻⁷"), (9.96e4, "1.0·10⁵"), (0.0, "0"), (-2e-9, "−2.0·10⁻⁹"), (1.0, "1.0·10⁰")]
)
def test_powers_of_ten(value: float, text: str) -> None:
    assert formats.scientific(value) == text
    assert formats.power_of_ten(1e-4) == "10⁻⁴"


@pytest.mark.parametrize(
    ("value", "text"),
    [(12102.34, "12102.34"), (50.0, "50"), (0.01, "0.01"), (1.44e9, "1440000000"), (1e-7, "0.0000001"), (-3.5, "−3.5")],
)
def test_what_a_study_prints_keeps_its_digits(value: float, text: str) -> None:
    assert formats.given(value) == text


@settings(max_examples=50)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_given_number_reads_back_as_itself(value: float) -> None:
    assert float(formats.given(value).replace("−", "-")) == value


ELSEWHERE = {
    "formats.py": "the one place",
    "results.py": "the digits of a float32 in the tidy files",
    "microbenchmarks/process.py": "errors that name a tolerance",
    "data/fetch.py": "an error that names a limit in whole seconds",
    "comparison.py": "relative differences of losses, as powers of ten",
    "measures/sizes.py": "an error that names a limit in whole seconds",
    "op_speed.py": "a program's own lines, with sizes as they are given",
    "report/sizes.py": "names of sizes and limits as they are given",
    "shards.py": "costs in a table for programs, to three digits",
}
"""Files in which a number with decimals has its own format, with the reason."""


def test_no_other_place_decides_how_a_number_reads() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                spec = ast.unparse(node.format_spec)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                spec = "".join(re.findall(r"\{:[^{}]*\}", node.value))
            else:
                continue
            if re.search(r"\.\{?\d*[^}]*[fegG%]|[:'\"][fegG%]['\"}]", spec):
                name = path.relative_to(ROOT / "experiments").as_posix()
                found.setdefault(name, []).append(f"{node.lineno}: {spec}")
    assert set(found) == set(ELSEWHERE), {name: places for name, places in found.items() if name not in ELSEWHERE}
