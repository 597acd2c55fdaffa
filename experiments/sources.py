"""The source files that decide a result: the static closure of some modules and files.

    SOURCES.digest(["bridge.worker_process", "bridge.adapters.torch"])

A module's closure holds its own file, what it imports (inside functions too, absolutely, relatively or by
`importlib.import_module` with a constant name), the `__init__` of every package on the way, the Julia and C++ files
beside it that it names as strings, the Julia project that it names by its folder, and what those files include. What
is behind `if TYPE_CHECKING:` is never run and does not count. Nothing is imported or run to find it out.

Modules that are chosen by a name at run time (adapters, measures, systems of the micro-benchmarks) are not found this
way: whoever makes a key gives them as starting points.
"""

from __future__ import annotations

import ast
import hashlib
import posixpath
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from experiments.errors import ResultsError

__all__ = ["PACKAGES", "ROOT", "SOURCES", "Sources"]

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds the packages: the checkout, or site-packages."""

PACKAGES = ("py_engine", "julia_engine", "bridge", "experiments")
"""The folders whose files are sources; the others are libraries, known by their versions."""

KINDS = (".py", ".jl", ".cpp", ".toml")

PROJECTS = {"TwinGrad": "julia_engine"}
"""The Julia projects among the packages, by the name of their module."""

CHOOSERS = (
    "experiments/measures/ablation.py",
    "experiments/measures/roofline.py",
    "experiments/microbenchmarks/process.py",
    "experiments/microbenchmarks/registry.py",
)
"""Files that serve every engine or system. What they import or name for some of them only (`bridge.libjulia`, files in
Julia and C++) counts for these alone: their adapters import it themselves, or the key's starting points name it."""

_IN_EXPRESSIONS = (".jl", ".cpp", *PROJECTS.values(), "import_module")
"""Without any of these words in its text, a Python file leads to others by its import statements alone."""

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of statements that hold statements."""

_INCLUDE = re.compile(r'\binclude\((?:joinpath\(@__DIR__, *)?"([^"]+)"')
_USING = re.compile(r"^\s*(?:using|import) +(\w+)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)

_PARSING = threading.Lock()
"""Two threads that parse at the same time are a SystemError now and then in Python 3.11 (python/cpython#106905)."""


@dataclass(frozen=True)
class _File:
    """One file: a digest of its content, what it leads to, and its time and size when it was read, if it was."""

    digest: str
    leads_to: tuple[str, ...]
    stamp: tuple[int, int] | None = field(default=None, compare=False)


@dataclass
class Sources:
    """The source files under a folder, each read once."""

    root: Path
    _names: frozenset[str] = field(default_factory=frozenset)
    _files: dict[str, _File] = field(default_factory=dict)
    _digests: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self._names:
            found = (path for package in PACKAGES for path in (self.root / package).rglob("*") if path.suffix in KINDS)
            self._names = frozenset(path.relative_to(self.root).as_posix() for path in found)

    @property
    def names(self) -> frozenset[str]:
        """Every source file there is, as a path relative to the root with forward slashes."""
        return self._names

    def digest(self, starts: Iterable[str]) -> str:
        """The first 16 hex digits of a sha256 over the closure of modules (by dotted name) or files (by path)."""
        wanted = tuple(sorted(set(starts)))
        if wanted not in self._digests:
            sha = hashlib.sha256()
            for name in sorted(self.closure(wanted)):
                sha.update(f"{name}\n{self._file(name).digest}\n".encode())
            self._digests[wanted] = sha.hexdigest()[:16]
        return self._digests[wanted]

    def closure(self, starts: Iterable[str]) -> set[str]:
        """The files that a digest of these modules and files covers. Raises KeyError for a start that is no source."""
        waiting = [name for start in starts for name in self._start(start)]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._file(name).leads_to
        return found

    def edited(self, starts: Iterable[str]) -> str | None:
        """A file of the closure that is another one by now, or gone; None where all are as they were read."""
        for name in sorted(self.closure(starts)):
            read, path = self._file(name), self.root / name
            if read.stamp is None:  # see `with_changes`
                continue
            try:
                if _stamp(path) != read.stamp and hashlib.sha256(path.read_bytes()).hexdigest() != read.digest:
                    return name
            except OSError:
                return name
        return None

    def check_unedited(self, starts: Iterable[str], run: str) -> None:
        """Raise `ResultsError` where a file of the closure, which decides a run, is not as it was read for its key."""
        if (name := self.edited(starts)) is not None:
            raise ResultsError(
                f"{name} was edited while TwinGrad ran, so that it is unknown what {run} has measured: that is not "
                "recorded; give the same command again"
            )

    def with_changes(self, changes: Mapping[str, bytes]) -> Sources:
        """The same files with another content for some of them: what a change would do, for tests."""
        other = Sources(self.root, self._names | changes.keys(), dict(self._files))
        other._files |= {name: other._parsed(name, content) for name, content in changes.items()}
        return other

    def _start(self, start: str) -> list[str]:
        if start in self._names and not start.endswith(".py"):
            return [start]
        start = start.removesuffix(".py").replace("/", ".")
        module = list(self._module(start))
        if not module or module[-1].removesuffix(".py").removesuffix("/__init__") != start.replace(".", "/"):
            raise KeyError(f"{start} is neither a source file nor a module under {self.root}")
        return module

    def _file(self, name: str) -> _File:
        if name not in self._files:
            path = self.root / name
            stamp = _stamp(path)
            self._files[name] = replace(self._parsed(name, path.read_bytes()), stamp=stamp)
        return self._files[name]

    def _parsed(self, name: str, content: bytes) -> _File:
        text = content.decode("utf-8", errors="replace")
        match PurePosixPath(name).suffix:
            case ".py":
                leads_to = self._of_python(name, text)
            case ".jl":
                leads_to = self._of_julia(name, text)
            case _:
                leads_to = iter(())
        return _File(hashlib.sha256(content).hexdigest(), tuple(sorted(set(leads_to) - {name})))

    # Python.

    def _of_python(self, name: str, text: str) -> Iterator[str]:
        package = PurePosixPath(name).parent
        with _PARSING:
            tree = ast.parse(text)
        for node in _run(tree, expressions=any(word in text for word in _IN_EXPRESSIONS)):
            for module in _imported(node, package):
                if name not in CHOOSERS or not f"{module}.".startswith("bridge.libjulia."):
                    yield from self._module(module)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and name not in CHOOSERS:
                if node.value.endswith((".jl", ".cpp")):
                    yield from self._beside(name, node.value)
                elif node.value in PROJECTS.values():
                    yield from self._project(node.value)

    def _module(self, dotted: str) -> Iterator[str]:
        """The files of a module and of the packages that it is in; of a name in a module, those of the module."""
        parts = dotted.split(".")
        for count in range(1, len(parts) + 1):
            stem = "/".join(parts[:count])
            yield from (name for name in (f"{stem}/__init__.py", f"{stem}.py") if name in self._names)

    # Julia.

    def _of_julia(self, name: str, text: str) -> Iterator[str]:
        code = _COMMENT.sub("", text)
        for included in _INCLUDE.findall(code):
            yield from self._beside(name, included)
        for module in _USING.findall(code):
            if module in PROJECTS:
                yield from self._project(PROJECTS[module])

    def _project(self, folder: str) -> Iterator[str]:
        """The Project.toml of a Julia project, the file of its module, and its extensions."""
        module = next(module for module, place in PROJECTS.items() if place == folder)
        wanted = {f"{folder}/Project.toml", f"{folder}/src/{module}.jl"}
        yield from (name for name in self._names if name in wanted or name.startswith(f"{folder}/ext/"))

    def _beside(self, name: str, other: str) -> Iterator[str]:
        """The source file that one names relative to its own folder, if there is one."""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), other))
        if path in self._names:
            yield path


def _stamp(path: Path) -> tuple[int, int]:
    """The time of a file's last change and its size."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _run(tree: ast.AST, expressions: bool) -> Iterator[ast.AST]:
    """All nodes, or the statements alone, but for those behind `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            waiting += node.orelse
            continue
        if not expressions:  # a tenth of the nodes
            for block in _BLOCKS:
                waiting += getattr(node, block, ())
            continue
        for value in vars(node).values():  # as ast.iter_child_nodes does, in a third of the time
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)


def _is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


def _imported(node: ast.AST, package: PurePosixPath) -> Iterator[str]:
    """The dotted names that a node imports, those of what it takes from a module included; `package` is its folder."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            parts = package.parts[: len(package.parts) - level + 1] if level else ()
            base = ".".join([*parts, *([module] if module else [])])
            yield from (base if alias.name == "*" else f"{base}.{alias.name}" for alias in names)
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=[first, *_]):
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


SOURCES = Sources(ROOT)
"""The sources of this installation."""
