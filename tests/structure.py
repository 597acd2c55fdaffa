"""Draw the engines' structure, `tests/structure.svg`: layers of modules, each beside its twin, from the imports.

    python tests/structure.py

The layers are those of the table in CONTRIBUTING.md, which tests hold the code to; imports are read from the
numpy engine's modules, and the Julia engine's files from the groups of `include` in AD.jl and NETWORK.jl.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from fnmatch import fnmatch
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON, JULIA = ROOT / "py_engine", ROOT / "julia_engine" / "src"
PICTURE = ROOT / "tests" / "structure.svg"

ROW, BAND, LEFT, COLUMN, WIDTH = 17, 46, 190, 260, 1010  # pixels


def layers() -> dict[str, list[str]]:
    """For each layer, from the lowest to the highest, the patterns of its modules."""
    table = re.search(r"^\| layer \|.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)
    assert table is not None
    rows = [row.split("|") for row in table[0].strip().splitlines()[2:]]
    return {cells[1].strip(): re.findall(r"`([a-z_.*]+)`", cells[2]) for cells in rows}


def modules() -> dict[str, str]:
    """The source of each module of the numpy engine; a package goes by its folder's name."""
    found = {}
    for path in sorted(PYTHON.rglob("*.py")):
        parts = path.relative_to(PYTHON).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("", "ad", "ad.compile", "ad.control"):
            found[name] = path.read_text("utf-8")
    return found


def imported(source: str, names: set[str]) -> set[str]:
    """The modules that a module imports, in functions too, but not for annotations alone."""
    found, waiting = set(), [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            found |= {name.removeprefix("py_engine.") for name in whole}
    return found & names


def julia_files() -> dict[str, list[str]]:
    """The files of the Julia engine in each layer, in the order in which they are included."""
    found: dict[str, list[str]] = {}
    layer = "values"
    for line in (JULIA / "AD.jl").read_text("utf-8").splitlines():
        if group := re.match(r"# (\w+): ", line):
            layer = group[1]
        elif file := re.match(r'include\("(.+)\.jl"\)', line):
            found.setdefault(layer, []).append(file[1])
    network = re.findall(r'^include\("(.+)\.jl"\)', (JULIA / "NETWORK.jl").read_text("utf-8"), re.M)
    found["networks"] = network
    return found


def twin(name: str) -> str:
    """The Julia file, without its ending, that a module's twin would have."""
    return {"errors": "ad/errors", "ad.ops": "AD", "network": "NETWORK"}.get(name, name.replace(".", "/"))


def rows_of(ours: list[str], theirs: list[str]) -> list[tuple[str, str]]:
    """Modules and files side by side: twins in one row."""
    pairs = [(name, twin(name) if twin(name) in theirs else "") for name in ours]
    return pairs + [("", file) for file in theirs if file not in {other for _, other in pairs}]


def picture() -> str:
    """The picture as SVG."""
    sources, files = modules(), julia_files()
    members = {
        layer: [name for name in sources if any(fnmatch(name, pattern) for pattern in patterns)]
        for layer, patterns in layers().items()
    }
    layer_of = {name: layer for layer, names in members.items() for name in names}
    lines, y = [], 50
    for layer in reversed(members):
        rows = rows_of(members[layer], files.get(layer, []))
        uses = Counter(layer_of[other] for name in members[layer] for other in imported(sources[name], set(sources)))
        below = ", ".join(f"{other} ({uses[other]})" for other in reversed(members) if other != layer and uses[other])
        height = BAND + ROW * len(rows)
        lines.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height - 8}" rx="6" class="band"/>')
        lines.append(f'<text x="24" y="{y + 24}" class="layer">{layer}</text>')
        if below:
            lines.append(f'<text x="{LEFT}" y="{y + 24}" class="uses">imports of {below}</text>')
        for i, (name, file) in enumerate(rows):
            at = y + 44 + ROW * i
            lines.append(f'<text x="{LEFT}" y="{at}">{escape(name.removeprefix("ad."))}</text>')
            if file:
                lines.append(f'<text x="{LEFT + 2 * COLUMN - 60}" y="{at}">{escape(file)}.jl</text>')
            if name and file:
                lines.append(
                    f'<line x1="{LEFT + COLUMN - 60}" y1="{at - 4}" x2="{LEFT + 2 * COLUMN - 70}" y2="{at - 4}"/>'
                )
        y += height
    style = (
        "text{font:13px monospace;fill:#222} .layer{font:bold 15px sans-serif} .uses{font:12px sans-serif;fill:#666} "
        ".head{font:bold 15px sans-serif} .band{fill:#f3f5f8;stroke:#c8d0da} line{stroke:#b5bfcb;stroke-dasharray:2 3}"
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 4}" viewBox="0 0 {WIDTH} {y + 4}">',
        f"<style>{style}</style>",
        f'<rect width="{WIDTH}" height="{y + 4}" fill="white"/>',
        f'<text x="{LEFT}" y="32" class="head">numpy engine (py_engine)</text>',
        f'<text x="{LEFT + 2 * COLUMN - 60}" y="32" class="head">Julia engine (julia_engine/src)</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
    print(f"wrote {PICTURE}", file=sys.stderr)
