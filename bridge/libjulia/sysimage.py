"""A system image of Julia that holds the engine in compiled form: whether there is one to start a Julia with.

With it a session's first epoch no longer waits for Julia to compile the engine. It is used wherever libjulia is
embedded, for as long as the engine's sources, Julia and the processor are those that it was made with; the recipe is
contrib/sysimage.py of a checkout. juliacall starts Julia without it: the Julias that juliacall takes keep compiled code
of packages by themselves.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

from bridge.libjulia.environment import ENGINE, cache_folder, cpu_flags
from bridge.libjulia.find import Julia

__all__ = ["COMMAND", "KEEPS_MACHINE_CODE", "SUFFIX", "image_folder", "key", "options", "path_for", "usable"]

COMMAND = "python -m contrib.sysimage"
"""What makes one, in a checkout."""

VARIABLE = "TWINGRAD_SYSIMAGE"
"""Set to 0, it lets Julia start as if there were no image."""

KEEPS_MACHINE_CODE = (1, 9)
"""From this Julia on package images do what a system image does here."""

RECIPE = 1
"""Raised when the recipe changes what an image holds: older ones are then out of date."""

SUFFIX = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"


def usable(julia: Julia) -> tuple[str | None, str]:
    """The image to start this Julia with, and a note on it; None when there is none that fits."""
    if os.environ.get(VARIABLE, "").lower() in ("0", "false", "no", "off") or julia.release >= KEEPS_MACHINE_CODE:
        return None, ""
    try:
        there = [path for path in image_folder().iterdir() if path.suffix == SUFFIX]
        if not there:
            return None, ""
        path = path_for(julia)
    except OSError:
        return None, ""
    if path in there:
        return str(path), f"with the system image {path}"
    return (
        None,
        f"the system image in {image_folder()} is of another engine, Julia or processor: make it anew with {COMMAND}",
    )


def options(julia: Julia) -> list[str]:
    """What to start this Julia's program with so that it has the image; nothing where none fits."""
    image, _ = usable(julia)
    return [f"--sysimage={image}"] if image else []


def key(image: str) -> str:
    """What tells an image from others: a digest of all that it was made of."""
    return Path(image).stem.rpartition("-")[2]


def path_for(julia: Julia) -> Path:
    """Where the image for this Julia, the engine's sources as they are and this processor lies, or would."""
    digest = hashlib.sha256(f"{RECIPE}\0".encode())
    for file in (julia.executable, julia.libjulia, julia.sysimage):
        status = os.stat(file)
        digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    digest.update(f"{julia.version}\0{platform.machine()}\0{' '.join(sorted(cpu_flags()))}\0".encode())
    for path in (ENGINE / "Project.toml", *sorted((ENGINE / "src").rglob("*.jl"))):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return image_folder() / f"twingrad-{julia.version}-{digest.hexdigest()[:16]}{SUFFIX}"


def image_folder() -> Path:
    """Where images lie."""
    return cache_folder() / "sysimage"
