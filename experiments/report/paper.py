"""The PDF: the text in `paper/` with the numbers of a report, set by the typst wheel.

Typst is a Python package like any other: nothing is installed in the system, nothing is downloaded, and only the fonts
inside the wheel are used, so that the same results give the same file everywhere.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bridge.files import write_atomically
from experiments import report, textbook
from experiments.errors import write
from experiments.report.view import ReportError

MAIN = "main.typ"
_KINDS = (".typ", ".bib")

TEXTBOOK = Path(textbook.__file__).parent
"""The steps that the supplement prints."""

_SOURCES = (Path(__file__).resolve().parents[2] / "paper", Path(__file__).resolve().parent / "text")
"""Where the text is: beside the packages in a checkout, inside this one in a wheel."""


class PaperError(ReportError):
    """The PDF could not be made; carries what typst said."""

    exit_code = 1


def build(
    results_dir: str | Path,
    out_pdf: str | Path | None = None,
    data_dir: str | Path | None = None,
    papers: Sequence[str] | None = None,
) -> Path:
    """Make the PDF of a results folder and return its path (default: `report/paper.pdf` in the folder).

    `papers` are keys or paper files (default: all of TwinGrad's that have results).
    A report that was made from exactly these results is used as it is; otherwise tables and figures are made anew.
    """
    results_dir = Path(results_dir)
    folder = results_dir / "report"
    out_pdf = Path(out_pdf) if out_pdf is not None else folder / "paper.pdf"
    if is_current(folder, results_dir, papers, data_dir):
        return _write(compile(folder), out_pdf)
    if out_pdf.resolve().parent == folder.resolve():
        report.build(results_dir, folder, papers, data_dir)
        return _write(compile(folder), out_pdf)
    # The PDF is wanted elsewhere: the results folder stays as it is (it may be a committed one).
    with tempfile.TemporaryDirectory(prefix="twingrad-paper-") as temporary:
        report.build(results_dir, temporary, papers, data_dir)
        return _write(compile(Path(temporary)), out_pdf)


def is_current(
    folder: Path, results_dir: Path, papers: Sequence[str] | None = None, data_dir: str | Path | None = None
) -> bool:
    """Whether the report in `folder` is of these papers, was made from these results by this code, and is complete.

    With a `data_dir` it is not where a figure lacks the data set, which may be there.
    """
    path = folder / "paper" / "report.json"
    if not path.is_file():
        return False
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != report.SCHEMA or document["made_from"] != report.made_from(results_dir, papers):
            return False
        figures = [one for part in ("papers", "other_machines") for paper in document[part] for one in paper["figures"]]
        if data_dir is not None and any(figure["lacks_data"] for figure in figures):
            return False
        pictures = ["design.svg", *(one["file"] for one in (*figures, *document["overviews"]))]
        return all((folder / "figures" / name).is_file() for name in pictures)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a damaged one
        return False


def compile(folder: Path, format: str = "pdf", ppi: float = 100) -> bytes | list[bytes]:
    """Set the text with the report in `folder`: the PDF, or with format "png" one picture per page.

    The sources are put beside the report first, so that `typst compile --root <folder> <folder>/paper/main.typ` does
    the same by hand.
    """
    import typst

    target = folder / "paper"
    texts = {source: source.relative_to(sources()) for source in sources().rglob("*") if source.suffix in _KINDS}
    texts |= {TEXTBOOK / f"{name}.py": Path(TEXTBOOK.name, f"{name}.py") for name in textbook.STEPS.values()}
    for source, place in sorted(texts.items()):
        copy = target / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, source.read_bytes())
    document = json.loads((target / "report.json").read_text(encoding="utf-8"))

    def made(floats: str) -> Any:
        return typst.compile(
            str(target / MAIN),
            root=str(folder),
            ignore_system_fonts=True,
            format=format,
            ppi=ppi,
            sys_inputs={"floats": floats},
            timestamp=_moment(document["created"]),
        )

    try:
        try:
            return made("yes")
        except typst.TypstError as error:
            # Typst 0.14 and 0.15 fail at the tags of floats that fall on certain page breaks.
            if "internal error" not in str(error):
                raise
            return made("no")
    except (typst.TypstError, RuntimeError) as error:
        raise PaperError(f"{target / MAIN}: {getattr(error, 'diagnostic', None) or error}") from None


def sources() -> Path:
    """The folder that holds the text and its template."""
    for folder in _SOURCES:
        if (folder / MAIN).is_file():
            return folder
    raise PaperError(f"the paper's text is not there: looked for {MAIN} in {' and '.join(map(str, _SOURCES))}")


def _moment(created: str) -> datetime:
    """The moment of the newest run, so that the same results give the same file."""
    try:
        moment = datetime.fromisoformat(created).replace(microsecond=0)  # typst counts whole seconds
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _write(pdf: bytes | list[bytes], path: Path) -> Path:
    write(path, b"".join(pdf) if isinstance(pdf, list) else pdf, option="another folder", parents=True)
    return path
