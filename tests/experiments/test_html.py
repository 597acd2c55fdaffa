"""The HTML report: opened in a real browser, offline, it shows every table and figure, and sorts when it is clicked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import report
from experiments.report import html


@pytest.fixture
def complaints() -> list[str]:
    """What the browser complained of, and what it tried to fetch."""
    return []


@pytest.fixture
def page(browser: Any, full_report: report.Built, complaints: list[str]) -> Iterator[Any]:
    """The report of the complete sweep, opened from its file with the network switched off."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((full_report.folder / "report.html").resolve().as_uri())
    yield page
    context.close()


@pytest.fixture
def document(full_report: report.Built) -> dict[str, Any]:
    """The report's own data."""
    return json.loads(full_report.data.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_every_table_and_figure_is_shown(page: Any, document: dict[str, Any], complaints: list[str]) -> None:
    for paper in document["papers"]:
        for table in paper["tables"]:
            shown = page.locator(f"#{paper['key']}-table-{table['id']} table")
            assert shown.locator("thead th").count() == len(table["headers"])
            rows = sum(len(group["rows"]) for group in table["groups"])
            assert shown.locator("tbody tr:not(.heading)").count() == rows
        for figure in paper["figures"]:
            width = f"document.querySelector('#{paper['key']}-figure-{figure['id']} img').naturalWidth"
            page.wait_for_function(f"{width} > 100")
    assert complaints == []


def test_the_page_opens_on_all_studies(page: Any, document: dict[str, Any]) -> None:
    rows = page.locator("#overview tbody tr")
    assert rows.count() == len(document["papers"])
    for index, paper in enumerate(document["papers"]):
        cells = rows.nth(index).locator("td").all_inner_texts()
        assert cells[0] == paper["key"] and cells[2] == paper["numbers"]["numpy.test_accuracy"]["text"]
        assert rows.nth(index).locator("a").get_attribute("href") == f"#{paper['key']}"


def test_nothing_is_wider_than_the_window(page: Any) -> None:
    for width in (1280, 420):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_click_on_a_heading_sorts_within_the_groups(page: Any, complaints: list[str]) -> None:
    table = page.locator("#mnist-rnn-e-table-race table")
    heading = table.locator("thead th").nth(1)

    def keys() -> list[list[float]]:
        return [
            [float(cell.get_attribute("data-key")) for cell in body.locator("tr:not(.heading) td:nth-child(2)").all()]
            for body in table.locator("tbody").all()
        ]

    before = keys()
    assert before != [sorted(group) for group in before]
    heading.locator("button").click()
    assert keys() == [sorted(group) for group in before]
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").click()
    assert keys() == [sorted(group, reverse=True) for group in before]
    assert heading.get_attribute("aria-sort") == "descending"
    table.locator("thead th").nth(0).locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    names = [body.locator("tr:not(.heading) td:first-child").all_inner_texts() for body in table.locator("tbody").all()]
    assert names == [sorted(group, key=str.lower) for group in names]
    assert complaints == []


def test_the_file_stands_alone(full_report: report.Built) -> None:
    text = (full_report.folder / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(source.startswith(("data:", "#")) for source in sources)


def test_sample_data_are_named_on_the_page(sample_report: report.Built) -> None:
    assert "embedded sample" in (sample_report.folder / "report.html").read_text(encoding="utf-8")


def test_text_is_never_markup(full_report: report.Built, document: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(full_report.folder, tmp_path / "report")
    document["papers"][0]["title"] = "<script>alert(1)</script>"
    data = tmp_path / "report" / "paper" / "report.json"
    data.write_text(json.dumps(document), encoding="utf-8")
    assert "<script>alert" not in html.render(tmp_path / "report")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("0.9245 ± 0.0018", 0.9245),
        ("12\u202f345", 12345.0),
        ("1,234", 1234.0),
        ("2.16 kB", 2160.0),
        ("14.5 GiB", 14.5 * 2**30),
        ("4.6 ± 0.2 s", 4.6),
        ("89.1 [86.4–89.1]", 89.1),
        ("7.2·10⁻⁷", 7.2e-7),
        ("≈ 11", 11.0),
        ("about 10 s", 10.0),
        ("−0.5", -0.5),
        ("91 %", 0.91),
        ("250 µs", 250e-6),
        ("2 min 05 s", 125.0),
        ("2 min 45 s, 2 threads ×", 165.0),
        ("1 h 02 min", 3720.0),
        ("−1 h 02 min", -3720.0),
        ("300 ns · 750 ns (2.5)", 300e-9),
        ("—", None),
        ("not measured", None),
        ("", None),
    ],
)
def test_cells_are_sorted_by_what_they_mean(cell: str, expected: float | None) -> None:
    assert html.sort_key(cell) == (expected if expected is None else pytest.approx(expected))
