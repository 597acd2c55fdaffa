"""Print the notes of a release: what CHANGELOG.md says of the version. `python tests/release_notes.py v0.2.0`

With a tag, the version of pyproject.toml, of julia_engine/Project.toml and of CITATION.cff must be that of the tag, and
the changelog must have it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(changelog: str, version: str) -> str:
    """The section of a version, without its head; empty where there is none."""
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", changelog, flags=re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def problem(tag: str, version: str, citation: str, changelog: str, julia: str) -> str:
    """Why a tag can be no release of what is there; empty where it can."""
    if tag and tag != f"v{version}":
        return f"the tag is {tag}, and pyproject.toml has version {version}"
    if tag and julia != version:
        return f"julia_engine/Project.toml has version {julia}, and pyproject.toml {version}"
    if tag and f"\nversion: {version}\n" not in citation:
        return f"CITATION.cff does not have version {version}"
    if tag and not notes(changelog, version):
        return f"CHANGELOG.md says nothing of version {version}"
    return ""


def main() -> None:
    tag = sys.argv[1] if len(sys.argv) > 1 else ""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")]
    version = tomllib.loads(texts[0])["project"]["version"]
    julia = tomllib.loads((ROOT / "julia_engine" / "Project.toml").read_text(encoding="utf-8"))["version"]
    if said := problem(tag, version, *texts[1:], julia):
        sys.exit(f"error: {said}")
    print(notes(texts[2], version) or f"TwinGrad {version}")


if __name__ == "__main__":
    main()
