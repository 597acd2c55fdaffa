"""The PDF: it is made offline from any results, fits its pages, and no number in its text is typed."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import typst

from experiments import report
from experiments.papers import ids, keys_of_others, load_paper, paper_keys
from experiments.report import numbers, paper
from experiments.report.paper import PaperError
from experiments.report.view import View

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "paper" / name for name in ("main.typ", "sections.typ")]
PPI = 72


def pages(folder: Path) -> list[np.ndarray]:
    """Every page as an array (height, width, colour) from 0 to 1."""
    made = paper.compile(folder, format="png", ppi=PPI)
    return [
        matplotlib.image.imread(io.BytesIO(page))[..., :3] for page in ([made] if isinstance(made, bytes) else made)
    ]


@pytest.fixture(autouse=True)
def no_data_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))


# ----------------------------------------------------------------------------------------------------------
# Making it


def test_a_results_folder_gives_a_pdf_and_the_same_one_again(full_results: Path, full_report: report.Built) -> None:
    first = paper.build(full_results)
    assert first == full_results / "report" / "paper.pdf"
    content = first.read_bytes()
    assert content.startswith(b"%PDF-") and content.rstrip().endswith(b"%%EOF")
    assert paper.build(full_results).read_bytes() == content


@pytest.mark.usefixtures("sketched")
def test_a_current_report_is_used_as_it_is_and_an_old_one_is_made_anew(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write(tmp_path, fake.rows(seeds=1, engines=("numpy", "torch")))
    made: list[Path] = []
    build = report.build
    monkeypatch.setattr(report, "build", lambda *args, **kwargs: made.append(args[1]) or build(*args, **kwargs))
    paper.build(tmp_path)
    assert made == [tmp_path / "report"]
    assert paper.is_current(tmp_path / "report", tmp_path)
    paper.build(tmp_path)
    assert len(made) == 1, "nothing changed, so nothing is drawn again"
    fake.write(tmp_path, fake.rows(seeds=2, engines=("numpy", "torch")))
    assert not paper.is_current(tmp_path / "report", tmp_path)
    paper.build(tmp_path)
    assert len(made) == 2


@pytest.mark.usefixtures("sketched")
def test_a_report_that_lacks_a_figure_is_not_current(fake: ModuleType, tmp_path: Path) -> None:
    fake.write(tmp_path, fake.rows(seeds=1, engines=("numpy", "torch")))
    paper.build(tmp_path)
    folder = tmp_path / "report"
    path = folder / "paper" / "report.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    figures = document["papers"][0]["figures"]
    for lacking in (True, False):
        for figure in figures:
            figure |= {"drawn": False, "lacks_data": lacking}  # or nothing was run for it
        path.write_text(json.dumps(document), encoding="utf-8")
        assert paper.is_current(folder, tmp_path)
        assert paper.is_current(folder, tmp_path, data_dir=tmp_path) is not lacking
    for name in (document["overviews"][0]["file"], "design.svg"):
        picture = (folder / "figures" / name).rename(tmp_path / name)
        assert not paper.is_current(folder, tmp_path)
        picture.rename(folder / "figures" / name)
    assert paper.is_current(folder, tmp_path)


@pytest.mark.usefixtures("sketched")
def test_a_pdf_elsewhere_leaves_the_results_folder_alone(fake: ModuleType, tmp_path: Path) -> None:
    results = fake.write(tmp_path / "results", fake.rows(seeds=1, engines=("numpy",)))
    before = sorted(results.rglob("*"))
    made = paper.build(results, tmp_path / "elsewhere" / "mine.pdf")
    assert made.read_bytes().startswith(b"%PDF-")
    assert sorted(results.rglob("*")) == before
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["mine.pdf"]


def without(sweep: dict[str, list[Any]], **wrong: Any) -> dict[str, list[Any]]:
    """A sweep without the rows that have these values."""
    return {
        name: [item for item in items if not all(item.get(key) == value for key, value in wrong.items())]
        for name, items in sweep.items()
    }


PARTS = (
    *("one engine", "no torch", "one seed", "no race", "one thread"),
    *("no memory", "no time", "only a race", "all failed"),
)
"""What may be missing; a campaign tries all, `make test` these: each takes 20 s."""
USUAL = ("one engine", "no time", "all failed")


@pytest.mark.campaign
@pytest.mark.parametrize("case", PARTS if os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign" else USUAL)
def test_any_part_of_the_results_gives_a_paper(case: str, fake: ModuleType, tmp_path: Path) -> None:
    sweep = fake.rows(seeds=1 if case == "one seed" else 2)
    match case:
        case "one engine":
            sweep = fake.rows(seeds=2, engines=("numpy",))
        case "no torch":
            sweep = fake.rows(seeds=2, engines=("numpy", "jax"))
        case "no race":
            sweep["race"] = []
        case "one thread":
            sweep["race"] = [item for item in sweep["race"] if item["threads"] == 1]
        case "no memory":
            sweep = without(sweep, measure="memory")
        case "no time":
            sweep = without(sweep, measure="time") | {"steps": []}
        case "only a race":
            sweep = {name: items if name == "race" else [] for name, items in sweep.items()}
        case "all failed":
            for run in sweep["runs"]:
                run |= {"status": "failed", "error": "it broke"}
            sweep |= {"epochs": [], "steps": [], "race": [], "scaling": [], "ablation": [], "variants": []}
    fake.write(tmp_path, sweep)
    assert paper.build(tmp_path).read_bytes().startswith(b"%PDF-")


def test_typst_has_nothing_to_warn_of(full_report: report.Built) -> None:
    paper.compile(full_report.folder)  # puts the sources there
    main = full_report.folder / "paper" / paper.MAIN
    _, warnings = typst.compile_with_warnings(str(main), root=str(full_report.folder), ignore_system_fonts=True)
    assert not warnings, [warning.message for warning in warnings]


def test_a_mistake_in_the_text_is_shown_with_its_place(
    full_results: Path, full_report: report.Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in paper.sources().iterdir():
        if source.suffix in (".typ", ".bib"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "main.typ").write_text("= Title\n#nothing-of-this-name", encoding="utf-8")
    monkeypatch.setattr(paper, "_SOURCES", (tmp_path,))
    with pytest.raises(PaperError, match=r"main\.typ.*unknown variable: nothing"):
        paper.build(full_results, tmp_path / "out.pdf")
    assert not (tmp_path / "out.pdf").exists()


def test_a_missing_text_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paper, "_SOURCES", (tmp_path / "nowhere",))
    with pytest.raises(PaperError, match=r"text is not there.*main\.typ.*nowhere"):
        paper.sources()


# ----------------------------------------------------------------------------------------------------------
# How it looks


def test_nothing_runs_over_the_edge_of_the_text(full_report: report.Built) -> None:
    for number, page in enumerate(pages(full_report.folder), start=1):
        margin = int(1.4 / 2.54 * PPI)  # the text begins at 1.75 cm
        for side in (page[:, :margin], page[:, -margin:], page[: margin // 2], page[-margin // 2 :]):
            assert side.min() == 1.0, f"page {number} is not white at an edge"


def test_the_main_part_has_at_most_twelve_pages(full_report: report.Built) -> None:
    paper.compile(full_report.folder)  # puts the sources there
    main = str(full_report.folder / "paper" / paper.MAIN)
    found = typst.query(main, "<pages-of-the-main-part>", field="value", one=True, root=str(full_report.folder))
    assert 3 <= json.loads(found) <= 12


def test_no_column_runs_into_the_other(full_report: report.Built) -> None:
    first = pages(full_report.folder)[0]
    height, width = first.shape[:2]
    gutter = first[int(0.45 * height) : int(0.9 * height), width // 2 - 4 : width // 2 + 4]
    assert gutter.min() == 1.0


def test_every_page_of_a_sample_says_so(sample_report: report.Built, full_report: report.Built) -> None:
    def has_notice(page: np.ndarray) -> bool:
        head = page[: int(2.0 / 2.54 * PPI)]
        return bool(((head[..., 0] - head[..., 1]) > 0.3).any())  # the red of the notice

    assert all(has_notice(page) for page in pages(sample_report.folder))
    assert not any(has_notice(page) for page in pages(full_report.folder))


# ----------------------------------------------------------------------------------------------------------
# What it says


def prose(text: str) -> str:
    """A typst text without comments, code expressions and labels."""
    text = re.sub(r"(?m)//.*$", "", text)
    text = re.sub(r'"[^"\n]*"', "", text)
    text = re.sub(r"(?m)^\s*(#(let|set|show|import)|  let ).*$", "", text)
    return re.sub(r"#?[a-z-]+\.?[a-z-]*\([^()]*\)|@[\w-]+|<[\w-]+>|\d+(\.\d+)?(pt|em|fr|cm)\b", "", text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_number_is_typed_into_the_text(path: Path) -> None:
    found = re.findall(
        r"[^\n]*(?<![\w.])\d+(?:[.,]\d+)?\s*(?:%|s\b|µs|ms|MB|GB|GiB|times|points)[^\n]*", prose(path.read_text())
    )
    found += re.findall(r"[^\n]*\d\.\d[^\n]*", prose(path.read_text()))
    assert not found, found


def text_of_papers() -> dict[str, str]:
    """The text about each paper by its key, as the table at the end of sections.typ names it."""
    text = TEXTS[1].read_text(encoding="utf-8")
    functions = {part.partition("(")[0]: part for part in re.split(r"(?m)^#let ", text)}
    named = dict(re.findall(r'"([a-z0-9-]+)": ([a-z-]+),', functions.popitem()[1]))
    return {key: functions[name] for key, name in named.items()}


def test_every_paper_has_a_text_of_its_own() -> None:
    assert set(text_of_papers()) == set(paper_keys())


@pytest.mark.parametrize("key", keys_of_others())
def test_every_number_of_the_text_is_one_that_the_report_has(
    key: str, fake: ModuleType, view_of: Callable[..., View]
) -> None:
    """A misspelt name would be printed as not measured even when it was."""
    names = set(re.findall(r'(?:n|amount)\(paper, "([^"]+)"\)', text_of_papers()[key]))
    found = numbers.of_paper(view_of(fake.rows(load_paper(key).runs_of_paper or key, seeds=2), paper=key))
    assert len(names) >= 5
    assert names <= set(found), names - set(found)


@pytest.mark.parametrize("key", paper_keys())
def test_every_table_and_figure_that_the_text_points_to_is_there(key: str) -> None:
    text, study = text_of_papers()[key], load_paper(key)
    assert set(re.findall(r'see-table\(paper, "([^"]+)"\)', text)) <= set(ids(study.tables))
    assert set(re.findall(r'see-figure\(paper, "([^"]+)"\)', text)) <= set(ids(study.figures))


@pytest.mark.parametrize("key", paper_keys())
def test_every_figure_is_mentioned_in_the_text(key: str) -> None:
    shared = {
        name: part
        for part in re.split(r"(?m)^#let ", TEXTS[1].read_text(encoding="utf-8"))
        if (name := part.partition("(")[0]).endswith("-sentence")
    }
    text = text_of_papers()[key]
    text += "".join(part for name, part in shared.items() if f"#{name}(" in text)
    assert set(ids(load_paper(key).figures)) <= set(re.findall(r'see-figure\(paper, "([^"]+)"\)', text))


@pytest.mark.usefixtures("sketched")
def test_another_result_gives_another_text(fake: ModuleType, tmp_path: Path) -> None:
    one = fake.write(tmp_path / "one", fake.rows(seeds=1, engines=("numpy", "torch")))
    sweep = fake.rows(seeds=1, engines=("numpy", "torch"))
    for item in sweep["race"]:
        item["microseconds_per_step"] *= 2
    two = fake.write(tmp_path / "two", sweep)
    first, second = (json.loads(report.build(folder).data.read_text(encoding="utf-8")) for folder in (one, two))
    name = "race.2.torch.step_us"
    assert second["papers"][0]["numbers"][name]["value"] == pytest.approx(
        2 * first["papers"][0]["numbers"][name]["value"]
    )
    assert pages(one / "report")[0].tobytes() != pages(two / "report")[0].tobytes()
