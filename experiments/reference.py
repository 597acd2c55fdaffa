"""The documentation as web pages: the API reference from the docstrings, the tables of ops and layers, the tutorial."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import py_engine
from bridge import spec, toml, validation
from bridge.errors import TwinGradError
from bridge.files import write_atomically
from bridge.layers import LAYERS
from py_engine import ops
from py_engine.ad.op import TABLE
from py_engine.ad.operators import numpy_state

__all__ = ["GUIDES", "build", "layer_table", "numpy_table", "op_table", "page_name"]

MODULES = (
    *("py_engine", "py_engine.ad.ops", "!py_engine.ad.ops.", "py_engine.network", "py_engine.scipy"),
    "py_engine.errors",
    *("bridge", "!bridge.adapters", "!bridge.child", "!bridge.worker_process", "experiments.data"),
)
"""Shown with what is inside them, but for those that begin with an exclamation mark."""


_NUMPY = (
    "## numpy's functions\n\nWhat becomes on tensors of each function that asks its arguments for stand-ins. All "
    "others make arrays (`numpy.zeros`), read files or change settings, and take no tensors.\n"
)

PAGES = Path(__file__).parent / "pages"
"""Templates in place of pdoc's own."""

GUIDES = tuple(
    Path(__file__).parent.parent / engine / f"COMING_FROM_{name}.md"
    for engine, name in (
        ("py_engine", "AUTOGRAD"),
        ("py_engine", "JAX"),
        ("py_engine", "PYTORCH"),
        ("julia_engine", "ZYGOTE"),
    )
)
"""Pages in Markdown for those who come from other libraries."""


class DocumentationError(TwinGradError):
    """The pages can't be made."""


def build(folder: Path) -> Path:
    """Write the pages into a folder and return the first of them.

    Raises `DocumentationError` without pdoc, and when the folder can't be written.
    """
    try:
        import pdoc
    except ImportError as error:
        raise DocumentationError(
            f"the documentation is made with pdoc ({error}): pip install 'twingrad[docs]'"
        ) from None
    tutorial = (Path(py_engine.__file__).parent / "TUTORIAL.md").read_text(encoding="utf-8")
    kept = py_engine.__doc__, ops.__doc__, spec.__doc__
    try:
        py_engine.__doc__ = f"{kept[0]}\n{tutorial.replace('```pycon', '```python')}"
        ops.__all__ = [name for name in vars(ops) if not name.startswith("_")]  # type: ignore[attr-defined]
        ops.__doc__ = f"{kept[1]}\n## The table of ops\n\n{op_table()}\n{_NUMPY}\n{numpy_table()}"
        spec.__doc__ = f"{kept[2]}\n## The table of layers\n\n{layer_table()}"
        folder.mkdir(parents=True, exist_ok=True)  # before the pages are made, which takes a while
        pdoc.render.configure(docformat="google", search=True, show_source=False, template_directory=PAGES)
        warnings.filterwarnings("ignore", "Error parsing type annotation", module="pdoc")  # what only mypy can read
        with tempfile.TemporaryDirectory(prefix="twingrad-docs-") as made:
            pdoc.pdoc(*MODULES, output_directory=Path(made))
            for guide in GUIDES:
                (Path(made) / page_name(guide)).write_text(_guide(pdoc, guide), encoding="utf-8")
            for page in sorted(path for path in Path(made).rglob("*") if path.is_file()):
                target = folder / page.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, page.read_bytes())
    except OSError as error:
        raise DocumentationError(f"{folder} can't be written: {error.strerror}") from None
    finally:
        py_engine.__doc__, ops.__doc__, spec.__doc__ = kept
        del ops.__all__  # type: ignore[attr-defined]
    return folder / "index.html"


def page_name(guide: Path) -> str:
    """The file of a guide's web page, such as `coming-from-jax.html`."""
    return guide.stem.lower().replace("_", "-") + ".html"


def _guide(pdoc: Any, path: Path) -> str:
    """A guide as a web page."""
    text = path.read_text(encoding="utf-8").replace("```pycon", "```python")
    content = pdoc.render_helpers.to_html(text)
    page: str = pdoc.render.env.get_template("guide.html.jinja2").render(
        title=text.partition("\n")[0].removeprefix("# "), guide=content
    )
    return page


def op_table() -> str:
    """The table of ops in Markdown: what each is, and what it has."""
    return _table(["op", "what it computes", "its result", "derivatives"], _rows())


def numpy_table() -> str:
    """The table of numpy's functions in Markdown: what becomes of each on tensors."""
    return _table(["function", "on tensors"], _numpy_rows())


def _numpy_rows() -> Iterator[list[str]]:
    for module, prefix in ((np, ""), (np.linalg, "linalg.")):
        for name in sorted(module.__all__):
            function = getattr(module, name)
            # Those that ask their arguments for stand-ins: ufuncs, and functions of the same kind as numpy.sum.
            if isinstance(function, (np.ufunc, type(np.sum))):
                yield [f"`numpy.{prefix}{name}`", numpy_state(prefix + name, function)]


def layer_table() -> str:
    """The table of a spec's layers in Markdown: what each is, and its keys, with what they may be and defaults."""
    return _table(["layer", "key", "what it is", "default"], _layer_rows())


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, [":---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _layer_rows() -> Iterator[list[str]]:
    for op, kind in LAYERS.items():
        yield [f"`{op}`", "", (inspect.getdoc(kind) or "").partition("\n")[0], ""]
        schema = kind.model_json_schema()["properties"]
        for key, words in validation.allowed(kind).items():
            if key in ("id", "op"):
                continue
            value = schema[key].get("default")
            default = "" if value is None else f"`{toml.inline(value)}`"
            yield ["", f"`{key}`", words, default]


def _rows() -> Iterator[list[str]]:
    for name, op in sorted(TABLE.items()):
        result = "elementwise" if op.elementwise else "a view" if op.view is not None else "—"
        doc = f"{op.doc} (made by fusion only)" if op.fused else op.doc
        derivatives = "of any order" if op.vjp is not None else "none"
        yield [f"`{name}`", doc.replace("|", "\\|"), result, derivatives]
