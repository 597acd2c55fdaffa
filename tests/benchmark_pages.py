"""What asv's pages show in a real browser: the points of every graph.

    python tests/benchmark_pages.py .asv/html 12

opens the page of every benchmark and ends with 1 where none of its lines has as many points. The pages fetch jQuery,
Flot and others from the web; what lies in the folders named after the number, in those of Debian's packages
(libjs-jquery-flot, libjs-jquery-stupidtable, libjs-bootstrap, node-blueimp-md5) or of npm's, is taken from there.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCRIPTS = (Path("/usr/share/javascript"), Path("/usr/share/nodejs"))
ANYBODY = {"Access-Control-Allow-Origin": "*"}

DRAWN = """() => {
  const graph = window.jQuery && window.jQuery("#main-graph");
  const plot = graph && graph.is(":visible") && graph.find("canvas").length && graph.data("plot");
  return plot && plot.getData().map(line => [line.label || "", line.data.filter(p => p && p[1] !== null).length]);
}"""
"""The lines of the graph that is shown, each with its number of points."""


def browser_path() -> str | None:
    """A Chromium of this machine."""
    return os.environ.get("TWINGRAD_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served meanwhile, to this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def local(url: str, folders: Sequence[Path]) -> Path | None:
    """The file in the folders that is meant by an address on the web: versions and `.min` aside."""
    name = re.sub(r"-[0-9.]+(?=\.)|\.min(?=\.)", "", url.rsplit("/", 1)[1])
    wanted = {name, name.replace(".js", ".min.js"), name.replace(".css", ".min.css")}
    found = (path for folder in folders for path in sorted(folder.rglob(f"{name.partition('.')[0]}*.*")))
    return next((path for path in found if path.name in wanted), None)


def points(browser: Any, html: Path, folders: Sequence[Path] = SCRIPTS) -> dict[str, dict[str, int]]:
    """For each benchmark the lines of its graph with their numbers of points; empty where no graph is drawn.

    What the folders lack is fetched from the web where Flot, the one that draws, is not in them.
    """
    from playwright.sync_api import TimeoutError as Late

    def answer(route: Any) -> None:
        url = route.request.url
        file = local(url, folders)
        if url.startswith("http://127.0.0.1"):
            response = route.fetch()
            # The files of a package are not those of the address to the byte.
            text = re.sub(r'integrity="[^"]*"', "", response.text())
            route.fulfill(response=response, body=text)
        elif file:
            route.fulfill(path=file, headers=ANYBODY)
        elif web:
            route.continue_()
        else:  # what is drawn does not need it
            route.fulfill(content_type="text/javascript", body="", headers=ANYBODY)

    web = local("https://web/jquery.flot.min.js", folders) is None
    found: dict[str, dict[str, int]] = {}
    index = json.loads((html / "index.json").read_text(encoding="utf-8"))
    with served(html) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.route(re.compile(r"/(index\.html)?(\?.*)?$|^https://"), answer)
        page = context.new_page()  # one for all: a new page would be a new process of the browser
        for name in index["benchmarks"]:
            page.goto("about:blank")  # a new document for each: a change of the fragment alone loads nothing
            page.goto(f"{address}/index.html#{name}")
            try:
                lines = page.wait_for_function(DRAWN, timeout=20_000).json_value()
            except Late:
                lines = []
            found[name] = {label: count for label, count in lines if count}
        context.close()
    return found


def main(html: str, least: str, *folders: str) -> int:
    """Say what is shown; 1 where it is less than the least."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        found = points(browser, Path(html), [*map(Path, folders), *SCRIPTS])
        browser.close()
    enough = [name for name, lines in found.items() if max(lines.values(), default=0) >= int(least)]
    for name, lines in found.items():
        said = ", ".join(f"{label or 'value'}: {count}" for label, count in lines.items()) or "no graph"
        print(f"{'ok  ' if name in enough else 'FEW '} {name}  {said}")
    return 0 if enough and len(enough) == len([lines for lines in found.values() if lines]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
