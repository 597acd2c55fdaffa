"""Tables, figures and the paper from the tidy results; nothing is measured here and nothing is typed in.

    results/report/tables/<paper>-<table>.csv, .tex, .md
    results/report/figures/<paper>-<figure>.svg, .png, and overview-<figure> over all papers
    results/report/paper/report.json     every number of the text, and the tables as texts
    results/report/report.html           the same tables and figures as one page to click in
    results/report/paper.pdf             (experiments.report.paper)

Which tables and figures there are is said by the papers' files; one that nothing produces is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bridge.errors import TwinGradError, shown
from experiments.errors import ResultsError, explain, write
from experiments.measures.registry import TABLES
from experiments.papers import MODELS_DIR, PAPERS_DIR, Paper, keys_of_others, load_paper, paper_keys
from experiments.report import design, figures, html, numbers, overview, row_helpers, table, tables
from experiments.report import growth as growth
from experiments.report import microbenchmark_figures as microbenchmark_figures  # its producers enter themselves
from experiments.report import sizes as sizes
from experiments.report import sizes_targets as sizes_targets
from experiments.report import totals as totals
from experiments.report.view import MixedMachinesError, ReportError, View, paper_view, views_of
from experiments.results import Tidy, key_of

__all__ = ["Built", "MixedMachinesError", "ReportError", "build", "made_from"]

SCHEMA = 1
"""Version of report.json, which the paper's template reads."""


@dataclass
class Built:
    """What a report consists of: the files written, and in words what is missing and why."""

    folder: Path
    written: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        """The file that the paper's template reads."""
        return self.folder / "paper" / "report.json"


def build(
    results_dir: str | Path,
    out_dir: str | Path | None = None,
    papers: Sequence[str] | None = None,
    data_dir: str | Path | None = None,
    comparison: dict[str, Any] | None = None,
) -> Built:
    """Make all tables and figures of the papers that were run, and the data of the PDF.

    `papers` are keys or paper files (default: all that have results); `data_dir` is where the dataset is looked for,
    which only its example pictures need; `comparison` is a section of the page (`experiments.compared.document`).
    Raises ReportError when nothing was run, and PaperFileError when a paper's file asks for what nothing produces.
    """
    results_dir = Path(results_dir)
    built = Built(Path(out_dir) if out_dir is not None else results_dir / "report")
    tidy = Tidy.load(results_dir)
    chosen = _papers(tidy, papers, results_dir)
    for paper in chosen:
        paper.check_producers(row_helpers.PRODUCERS, figures.PRODUCERS)
    sections, others, views = [], [], []
    data = Path(data_dir) if data_dir is not None else None
    for paper in chosen:
        with _foreseen(paper):
            shown = views_of(paper, tidy, data) or [paper_view(paper, tidy, data)]
            made = [_paper(view, built, first=view is shown[0]) for view in shown]
            views += shown
            sections.append(made[0])
            others += made[1:]
    document = {
        "schema": SCHEMA,
        "made_from": made_from(results_dir, papers),
        "papers": sections,
        "other_machines": others,
        "overviews": _overviews(views, built),
        "not_run": [key for key in keys_of_others() if key not in {paper.key for paper in chosen}],
        "notices": sorted({section["notice"] for section in sections if section["notice"]}),
        "created": max((section["runs"]["created"] or "" for section in sections), default=""),
    }
    _write(built, built.data, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _draw(built, built.folder / "figures" / "design", design.draw)
    _write(built, built.folder / "report.html", html.render(built.folder, comparison))
    if papers is None:
        built.missing += [
            f"{key}: its paper file is not TwinGrad's: report it by naming the file" for key in foreign(tidy)
        ]
    return built


@contextlib.contextmanager
def _foreseen(paper: Paper) -> Iterator[None]:
    """Say which paper's results make no report: rows that are sound one by one may be missing or repeated."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, TwinGradError):
            raise
        raise ReportError(
            f"the results of {paper.key} make no report ({type(error).__name__}: {shown(str(error))}): rows of the "
            "tidy tables are missing, repeated or altered; make them anew from the raw records"
        ) from error


def foreign(tidy: Tidy) -> list[str]:
    """The papers of the user's own that have results, whose files must be named to be reported."""
    found = {str(key) for frame in (tidy.runs, *tidy.tables.values()) for key in frame["paper"]}
    return sorted(found - set(paper_keys()))


def made_from(results_dir: Path, papers: Sequence[str] | None = None) -> str:
    """A digest over everything that decides a report of these papers, or of all.

    That is the tidy results, the papers' and models' files, and the code that reports or that reporting asks.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for folder, pattern in (
        (results_dir / "tidy", "*.csv*"),
        (here, "*.py"),
        (here.parent, "*.py"),
        *((here.parent / name, "*.py") for name in ("measures", "microbenchmarks", "papers")),
        (PAPERS_DIR, "*.toml"),
        (MODELS_DIR, "*.toml"),
    ):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{folder.name}/{path.name}\n".encode() + path.read_bytes())
    for name in papers or ():
        paper = load_paper(name)
        digest.update(f"{paper.key}\n".encode() + paper.model_file().read_bytes())
        if paper.file is not None:
            digest.update(paper.file.read_bytes())
    return digest.hexdigest()


def _papers(tidy: Tidy, names: Sequence[str] | None, results_dir: Path) -> list[Paper]:
    """The papers to report: those named, or all that have any result."""
    if names is not None:
        return [load_paper(name) for name in names]
    found = {*tidy.runs["paper"], *(key for name in TABLES for key in tidy.tables[name]["paper"])}
    small = {*tidy.tables["microbenchmarks"]["paper"]}
    known = [load_paper(key) for key in paper_keys()]
    chosen = [paper for paper in known if (paper.runs_of_paper or paper.key) in found or paper.key in small]
    if not chosen:
        own = ", ".join(f"{key}.toml" for key in foreign(tidy))
        advice = f"name the papers' files to report them, as in `twingrad report {own}`" if own else ""
        raise ReportError(f"no results of any paper in {results_dir}: {advice or 'start with `twingrad run`'}")
    return chosen


def _paper(view: View, built: Built, first: bool) -> dict[str, Any]:
    """Write one paper's tables and figures, of one machine; what the PDF and the page need to know of them.

    `first`: of several machines the one whose tables have the paper's own names.
    """
    paper = view.paper
    key = paper.key if first else f"{paper.key}-on-{short_name(view.machines[0])}"
    made = [tables.make(output, view) for output in paper.tables]
    made += [tables.pooled_accuracies(view)] if view.machines and first else []
    for item in made:
        stem = built.folder / "tables" / f"{key}-{item.id}"
        for suffix, content in (
            (".csv", table.to_csv(item)),
            (".tex", table.to_latex(item, label=f"{key}-{item.id}")),
            (".md", table.to_markdown(item)),
        ):
            _write(built, stem.with_name(stem.name + suffix), content)
    drawn = []
    for output in paper.figures:
        stem = built.folder / "figures" / f"{key}-{output.id}"
        reason = _draw(built, stem, partial(figures.make, output, view))
        if reason:
            built.missing.append(f"{key}: figure {output.id}: {reason}")
        drawn.append(
            {
                "id": output.id,
                "file": f"{stem.name}.svg",
                "title": figures.caption(output),
                "wide": figures.is_wide(stem),
                "drawn": reason is None,
                "lacks_data": reason is not None and output.producer in figures.OF_DATASET,
            }
        )
    missing = [row for row in tables.missing(view).rows if row["row"] != "none"]
    built.missing += [f"{key}: {row['row']}: {row['measure']}: {row['reason']}" for row in missing]
    return {
        "key": key,
        "study": paper.key,
        "own": not paper.reported,
        "machines": list(view.machines),
        "runs_of": paper.runs_of_paper or paper.key,
        "title": f"{paper.title}: {view.machines[0]}" if view.machines and not first else paper.title,
        "authors": paper.authors,
        "task": paper.task,
        "model": paper.model,
        "dataset": paper.dataset,
        "environment": paper.environment.description,
        "reported_rows": list(
            dict.fromkeys(
                "its own engine" if item.row == "Own" else item.row for item in paper.reported if item.kind == "paper"
            )
        ),
        "engines": [{"name": engine, "label": view.label(engine)} for engine in view.engines()],
        "absent": [view.label(engine) for engine in view.absent()],
        "notice": view.notice,
        "runs": numbers.of_runs(view),
        "numbers": numbers.of_paper(view),
        "tables": [table.to_json(item) for item in made],
        "figures": drawn,
    }


def short_name(machine: str) -> str:
    """A few letters for the names of files: the digest that a machine's label ends with, or one of the label."""
    last = machine.rpartition(" ")[2]
    is_digest = len(last) == 8 and all(letter in "0123456789abcdef" for letter in last)
    return last if is_digest else key_of({"machine": machine})[:8]


def _overviews(views: Sequence[View], built: Built) -> list[dict[str, Any]]:
    """Draw the figures over all studies; those for which nothing was run are left out."""
    drawn = []
    for item in overview.OVERVIEWS:
        stem = built.folder / "figures" / f"overview-{item.id}"
        try:
            if not overview.draw(item, views, stem):
                continue
        except OSError as error:
            raise ResultsError(explain(error, stem, "another folder")) from error
        built.written += [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
        drawn.append({"id": item.id, "file": f"{stem.name}.svg", "title": item.title})
    return drawn


def _draw(built: Built, stem: Path, draw: Callable[[Path], str | None]) -> str | None:
    """Let a figure be drawn; the reason if it is an empty one."""
    try:
        reason = draw(stem)
    except OSError as error:
        raise ResultsError(explain(error, stem, "another folder")) from error
    built.written += [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
    return reason


def _write(built: Built, path: Path, content: str) -> None:
    write(path, content, option="another folder", parents=True)
    built.written.append(path)
