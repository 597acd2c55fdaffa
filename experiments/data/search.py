"""The order in which a dataset is looked for; the same for every dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.files import cache_folder, expanded
from experiments.data import fetch
from experiments.data.dataset import DataError, IncompleteError, Progress

DATA_VARIABLE = "TWINGRAD_DATA"

Finder = Callable[[Path], Path | None]
"""Given a folder, the folder or file in it that holds the whole dataset, or None; `IncompleteError` for a part."""


@dataclass(frozen=True)
class Place:
    """Where a dataset was found: a folder or a file, or None with the reasons why there is none."""

    found: Path | None
    cached: bool = False
    """Whether that is in the user cache, whose files we put there ourselves."""
    reason: str = ""


def search(
    dataset: str,
    title: str,
    find: Finder,
    files: Sequence[fetch.RemoteFile],
    mirrors: Sequence[str],
    data_dir: str | Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
    expected: str = "",
    refusal: str | None = None,
) -> Place:
    """The first place that holds `dataset` (its folder name; `title` is its name in messages).

    `files` and `mirrors` say what a download would fetch, and from which base URLs; `expected` names what
    `find` looks for, where that is more than these files; `refusal` says why no download can bring it, if
    none can. Raises `DataError` where the user pointed at something that isn't there or isn't whole.
    """
    if data_dir is not None:
        folder = _existing(data_dir, "the data folder")
        found = find(folder)
        if found is None:
            raise DataError(
                f"the data folder {folder} holds no {title}: expected {expected or _names(files)} in it or in "
                f"{folder / dataset}; copy them there, or leave the data folder out to have them downloaded"
            )
        return Place(found)

    reasons = []
    if setting := os.environ.get(DATA_VARIABLE):
        folder = _existing(setting, f"the folder in {DATA_VARIABLE}")
        found = find(folder)
        if found is not None:
            return Place(found)
        reasons.append(f"{DATA_VARIABLE} ({folder}) does not hold it")
    else:
        reasons.append(f"{DATA_VARIABLE} is not set")

    try:
        cache = cache_folder() / dataset
    except OSError as error:  # there is no such folder, nor a home
        return Place(None, reason="; ".join([*reasons, str(error)]))
    try:
        found = find(cache)
        if found is not None:
            return Place(found, cached=True)
        reasons.append(f"the cache ({cache}) does not hold it")
    except IncompleteError:  # from an earlier download that broke off; the files that did arrive are whole
        reasons.append(f"the cache ({cache}) holds only part of it")

    if refusal := refusal or fetch.refusal(allow_download):
        reasons.append(refusal)
        return Place(None, reason="; ".join(reasons))
    try:
        fetch.download(files, cache, fetch.mirrors_for(dataset, mirrors), progress)
    except fetch.DownloadError as error:
        reasons.append(str(error))
        return Place(None, reason="; ".join(reasons))
    return Place(find(cache), cached=True)


def _existing(setting: str | Path, what: str) -> Path:
    folder = expanded(setting).absolute()
    if not os.path.exists(folder):
        raise DataError(f"{what} does not exist: {folder}; correct the path, or leave it out")
    if not os.path.isdir(folder):
        raise DataError(f"{what} is not a folder: {folder}; name the folder that holds the data files")
    return folder


def _names(files: Sequence[fetch.RemoteFile]) -> str:
    return ", ".join(file.name for file in files)
