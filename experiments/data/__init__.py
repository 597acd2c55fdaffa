"""Datasets: looked for on disk, then downloaded, and an embedded sample when there is no other way.

The order of search, for every dataset:

1. `data_dir`, when given (the command line's `--data-dir`): it must hold the dataset;
2. the folder in the environment variable `TWINGRAD_DATA`: it must exist, and serves where it holds the
   dataset;
3. the user cache (`TWINGRAD_CACHE`, by default the platform's cache folder for twingrad);
4. a download into that cache, unless `allow_download` is false or `TWINGRAD_OFFLINE` is set.
   `TWINGRAD_MIRRORS` names other servers to ask (base URLs between spaces, with the files under
   `<base>/<dataset>/`);
5. the embedded sample. `Dataset.source` is then "sample" and `Dataset.notice` says so and why.

Data that is present but wrong (truncated, corrupt, altered, incomplete) is a `DataError` that names the file;
it is never passed over for the next place in the list.

A new dataset is one module here with `load(data_dir, allow_download, progress, **options) -> Dataset`, a table
`OPTIONS` of its options and what they are when not given, and one line in `LOADERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.data.dataset import SAMPLE_LABEL, DataError, Dataset, IncompleteError, NoSampleError, Progress

__all__ = [
    "LOADERS",
    "SAMPLE_LABEL",
    "DataError",
    "Dataset",
    "IncompleteError",
    "NoSampleError",
    "Progress",
    "load",
    "options",
]

LOADERS = {
    "generated": "experiments.data.generated",
    "imdb": "experiments.data.imdb",
    "mnist": "experiments.data.mnist",
}
"""Dataset name -> the module whose `load` reads it."""


def load(
    name: str,
    data_dir: str | Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Dataset:
    """The dataset called `name` (see `LOADERS`), from the first place that has it.

    `progress(file, bytes so far, bytes in all)` is called during a download. `options` are the dataset's own
    (its module's `OPTIONS`). Raises `DataError` for an unknown name or option, a folder that isn't there, an
    explicit `data_dir` without the dataset, and files that are present but wrong.
    """
    if name not in LOADERS:
        raise DataError(f"no dataset is called {name!r}; known datasets: {', '.join(sorted(LOADERS))}")
    loader = _loader(name)
    unknown = sorted(set(options) - set(loader.OPTIONS))
    if unknown:
        known = f"its options: {', '.join(loader.OPTIONS)}" if loader.OPTIONS else "it has no options"
        raise DataError(f"{name} has no option {unknown[0]!r}; {known}")
    dataset: Dataset = loader.load(data_dir=data_dir, allow_download=allow_download, progress=progress, **options)
    return dataset


def options(name: str) -> Mapping[str, Any]:
    """The options of a dataset in `LOADERS`, with what they are when not given."""
    found: Mapping[str, Any] = _loader(name).OPTIONS
    return found


def _loader(name: str) -> Any:
    return importlib.import_module(LOADERS[name])
