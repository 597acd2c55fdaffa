"""Numbers as text: the one place that decides digits, units, separators and signs for all output.

Terminal, tables, LaTeX, figures, the page and the paper's text call these functions. A unit is chosen after rounding:
999,600 bytes are 1.00 MB and never 1000 kB; no text has an exponent like that of 1e+03. Nothing (None, NaN) is a
dash, infinity is ∞, and a negative number has a minus sign, unless it is shown as zero.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal

MISSING = "—"
"""Stands for a number that does not exist; the notes of a table say why."""

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
"""Between the thousands of a number with five digits or more before its point."""

_EXACT = Context(prec=1200, rounding=ROUND_HALF_EVEN)
"""Holds every digit of any double, so that each number is rounded once."""

_TO_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
FROM_SUPERSCRIPTS = {raised: plain for plain, raised in _TO_SUPERSCRIPTS.items()}
"""What `str.translate` needs to read the exponents that are printed here."""

Unit = tuple[str, int]
"""A unit's name and its power of ten."""

_BYTES: Sequence[Unit] = (("kB", 3), ("MB", 6), ("GB", 9), ("TB", 12))
_SECONDS: Sequence[Unit] = (("ns", -9), ("µs", -6), ("ms", -3), ("s", 0))


def significant(value: float | None, digits: int = 3, trim: bool = False) -> str:
    """At least `digits` significant digits, never an exponent: 0.0123, 4.56, 1234, 12 345 (thin spaces).

    `trim` leaves out zeros at the end of the decimals, for the ticks of an axis: 2.5, 10.
    """
    number = _number(value)
    if isinstance(number, str):
        return number
    return _signed(number, _digits(abs(number), digits, trim))


def fixed(value: float | None, decimals: int = 2) -> str:
    """A number with `decimals` decimals: 0.34, 12.00, −1.50."""
    number = _number(value)
    if isinstance(number, str):
        return number
    return _signed(number, _grouped(f"{abs(number):,.{decimals}f}"))


def counted(number: int, what: str) -> str:
    """A number of things: 1 thread, 2 threads."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def fraction(value: float | None, decimals: int = 4) -> str:
    """An accuracy as a fraction of one."""
    return fixed(value, decimals)


def given(value: float) -> str:
    """A number with the digits that it was given with, as a study prints it: 12102.34, 50, 0.01."""
    text = f"{Decimal(repr(float(value))):f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


def scientific(value: float | None, digits: int = 2) -> str:
    """`digits` significant digits and a power of ten, as 3.1·10⁻⁷; zero is 0."""
    number = _number(value)
    if isinstance(number, str):
        return number
    if not number:
        return "0"
    mantissa, exponent = f"{abs(number):.{digits - 1}e}".split("e")
    return _signed(number, f"{mantissa}·10{str(int(exponent)).translate(_TO_SUPERSCRIPTS)}")


def power_of_ten(value: float) -> str:
    """A power of ten without its factor of one: 10⁻⁴."""
    return scientific(value).removeprefix("1.0·")


def with_spread(mean: float | None, spread: float | None, digits: int = 3) -> str:
    """`mean ± spread`, both with as many decimals as `digits` significant digits of the mean need."""
    text = significant(mean, digits)
    if mean is None or not math.isfinite(mean) or spread is None or not math.isfinite(spread):
        return text
    decimals = len(text.partition(".")[2])
    if 1e-4 * abs(mean) < spread < 0.5 * 10.0**-decimals:  # one more digit or two rather than a spread of nothing
        decimals = min(decimals + 2, math.ceil(-math.log10(spread)))
    return f"{fixed(mean, decimals)} ± {fixed(spread, decimals)}"


def percent(share: float | None) -> str:
    """A share of one in per cent; almost all is never said to be all: 44 %, over 99 %, over 99.9 %, 100 %."""
    number = _number(share)
    if isinstance(number, str):
        return number
    number = _EXACT.scaleb(number, 2)
    for least in (Decimal("99.9"), Decimal(99)):
        if least < number < 100 and round(number) == 100:
            return f"over {least} %"
    return f"{_signed(number, f'{abs(number):.0f}')} %"


def share(value: float | None) -> str:
    """A share of one in per cent, with two significant digits: 0.49 %, 8.9 %, 47 %, 110 %."""
    number = _number(value)
    if isinstance(number, str):
        return number
    number = _EXACT.scaleb(number, 2)
    return f"{_signed(number, _digits(abs(number), 2, trim=False))} %"


def size(value: float | None, digits: int = 3, trim: bool = False) -> str:
    """A number of bytes in the decimal unit that suits it: 512 B, 4.81 MB, 1.03 GB."""
    number = _number(value)
    if isinstance(number, str):
        return number
    if round(abs(number)) < 1000:
        return f"{_signed(number, f'{abs(number):.0f}')} B"
    return _signed(number, _in_unit(abs(number), _BYTES, digits, trim))


def nanoseconds(value: float | None, digits: int = 3, trim: bool = False) -> str:
    """A time given in nanoseconds, in the unit that suits it: 15.9 ns, 4.17 µs, 1.42 s."""
    return _time(value, -9, digits, trim)


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it, for people who wait: 812 µs, 3.20 ms, 1.42 s, 2 min 05 s, 1 h 02 min."""
    number = _number(seconds)
    if isinstance(number, str):
        return number
    whole, shown = abs(number), _time(seconds, 0, 3, False)
    if Decimal(f"{whole:.1f}") < 60:
        return shown
    if round(whole) < 3600:
        minutes, rest = divmod(round(whole), 60)
        return _signed(number, f"{minutes} min {rest:02d} s")
    hours, rest = divmod(round(_EXACT.divide(whole, Decimal(60))), 60)
    return _signed(number, f"{significant(hours, 1)} h {rest:02d} min")


def aligned(rows: Sequence[Sequence[str]], words: Container[int]) -> list[str]:
    """Rows of cells as lines with aligned columns: those of the indices in `words` flush left, others flush right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    padded = (
        [
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def _time(value: float | None, power: int, digits: int, trim: bool) -> str:
    """A time given in units of 10^power seconds."""
    number = _number(value)
    if isinstance(number, str):
        return number
    if not number:
        return "0 s"
    return _signed(number, _in_unit(_EXACT.scaleb(abs(number), power), _SECONDS, digits, trim))


def _in_unit(number: Decimal, units: Sequence[Unit], digits: int, trim: bool) -> str:
    """A positive number in the smallest unit in which its rounded digits are below 1000, else in the largest one."""
    texts = ((_digits(_EXACT.scaleb(number, -power), digits, trim), name) for name, power in units)
    shown = [f"{text} {name}" for text, name in texts if len(text.partition(".")[0]) < 4 or name == units[-1][0]]
    return shown[0]


def _digits(number: Decimal, digits: int, trim: bool) -> str:
    """The text of a number that is not negative, as `significant` has it."""
    if not number:
        return "0"
    exponent = int(f"{number:.{digits - 1}e}".partition("e")[2])  # after rounding: 9.996 has that of 10.0
    text = _grouped(f"{number:,.{max(0, digits - 1 - exponent)}f}")
    return text.rstrip("0").rstrip(".") if trim and "." in text else text


def _grouped(text: str) -> str:
    """Thin spaces between the thousands from five digits on, nothing below."""
    return text.replace(",", THIN if len(text.partition(".")[0]) > len("1,000") else "")


def _number(value: float | None) -> Decimal | str:
    """The exact value of a finite number; the text of what is none."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    return Decimal(value) if isinstance(value, int) else Decimal(float(value))


def _signed(number: Decimal, text: str) -> str:
    """The text of a number's size with its sign; what is shown as zero has none."""
    shown_as_zero = not any(digit in text for digit in "123456789")
    return text if number >= 0 or shown_as_zero else MINUS + text
