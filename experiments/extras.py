"""What each extra of the distribution is for, and the packages that it brings: for advice where one is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """An extra of `pyproject.toml`, which has the versions."""

    purpose: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    """What is imported of them."""


EXTRAS = {
    "data": Extra(
        "downloads of data sets, and the embedded sample of MNIST",
        ("pooch", "requests", "scikit-learn"),
        ("pooch", "requests", "sklearn"),
    ),
    "studies": Extra("runs of studies", ("pandas",), ("pandas",)),
    "reports": Extra(
        "tables, figures, pages and the PDF",
        ("jinja2", "matplotlib", "pandas", "seaborn", "typst"),
        ("jinja2", "matplotlib", "pandas", "seaborn", "typst"),
    ),
}


def remedy(module: str) -> str:
    """The command that installs the package of a module that is missing."""
    extra = next((name for name, extra in EXTRAS.items() if module in extra.modules), "experiments")
    return f"pip install 'twingrad[{extra}]'"
