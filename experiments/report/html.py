"""The report as one HTML file: the same tables and figures as the PDF, for people who would rather click.

Nothing is fetched when it is opened: styles, the script that sorts tables and all figures are inside the file.
"""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2

from experiments.formats import FROM_SUPERSCRIPTS, MISSING

TEMPLATE = "report.html.jinja"

_FACTORS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_FACTORS |= {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01}
_NUMBER = re.compile(r"(?:about |≈ ?|< ?|> ?)?([-−]?\d+(?:\.\d+)?)(?:·10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?\s*([^\W\d_]+|%)?")
_REST = re.compile(r" (\d+) (min|s)\b")  # behind the hours or minutes of a duration: 2 min 05 s


def render(folder: Path, comparison: dict[str, Any] | None = None) -> str:
    """The page for the report in `folder`, from its report.json and its figures.

    `comparison`: what `experiments.compared` says of these results beside others.
    """
    document = json.loads((folder / "paper" / "report.json").read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(
        headings=OVERVIEW,
        overview=overview(document),
        sort_key=sort_key,
        picture=lambda name: _picture(folder / "figures" / name),
    )
    others = document.get("other_machines", [])
    sections = [
        section
        for paper in document["papers"]
        for section in (paper, *(other for other in others if other["study"] == paper["key"]))
    ]
    return environment.get_template(TEMPLATE).render(report=document, sections=sections, comparison=comparison)


OVERVIEW = ("study", "task", "test accuracy", "step: numpy", "step: Julia", "claims reproduced", "hold for ours")
"""The headings of the first table: steps are ratios to PyTorch's, of our engines in the race with the most threads."""


def overview(document: dict[str, Any]) -> list[list[str]]:
    """A row for each study: what is in short found here."""
    rows = []
    for paper in document["papers"]:
        texts = {name: entry["text"] for name, entry in paper["numbers"].items()}
        races = [int(name.split(".")[1]) for name in texts if name.startswith("race.") and name.endswith(".rounds")]
        ratios = [texts.get(f"race.{max(races, default=0)}.{name}.ratio", MISSING) for name in ("numpy", "julia")]
        own = [int(texts.get(f"claims.ours.{verdict}", 0)) for verdict in ("holds", "does_not_hold")]
        told = [int(texts.get(f"claims.{verdict}", 0)) for verdict in ("reproduced", "not_reproduced")]
        shares = [f"{one} of {one + other}" if one + other else MISSING for one, other in (told, own)]
        rows.append([paper["key"], paper["task"], texts.get("numpy.test_accuracy", MISSING), *ratios, *shares])
    return rows


def sort_key(cell: str) -> float | None:
    """The number that a cell begins with, in the unit's own scale, to sort by; None for words.

    Units of size and time are brought to bytes and seconds, so that 900 kB comes before 1.2 MB, and 2 min 05 s before
    2 min 45 s.
    """
    text = re.sub(r"(?<=\d)[\u202f\u00a0,](?=\d{3})", "", cell.strip())
    found = _NUMBER.match(text)
    if text == MISSING or found is None:
        return None
    number, exponent, unit = found.groups()
    value = float(number.replace("−", "-"))
    if exponent:
        value *= 10.0 ** int(exponent.translate(FROM_SUPERSCRIPTS))
    if unit is None:  # "4.6 ± 0.2 s": the unit comes after the spread
        after = re.search(r"±\s*[\d.]+\s*([^\W\d_]+|%)", text)
        unit = after[1] if after else None
    value *= _FACTORS.get(unit or "", 1.0)
    rest = _REST.match(text, found.end()) if unit in ("h", "min") else None
    return value if rest is None else value + math.copysign(float(rest[1]) * _FACTORS[rest[2]], value)


def _picture(path: Path) -> Any:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:image/svg+xml;base64,{encoded}"
