"""The libraries that compute an engine's matrix products and convolutions, as each framework itself says.

One line of text for tables: names, versions where they are known, and the kernels that were chosen for this CPU. What a
framework doesn't say is "unknown", never a guess: a library that is linked into a framework can't be seen from
outside, and numpy's BLAS, which is in almost every process, computes for numpy alone. Each function runs in the process
whose libraries it describes, and receives the framework's module: nothing here imports one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["UNKNOWN", "of_jax", "of_numpy", "of_tensorflow", "of_torch"]

UNKNOWN = "unknown"

_MKL = re.compile(r"Math Kernel Library Version (\S+?)(?:-Product|-Beta|\s|$)")
_ONEDNN = re.compile(r"MKL-DNN v(\S+)|oneDNN v(\S+)")
_BLAS = re.compile(r"\bBLAS_INFO=(\w+)")
_CAPABILITY = re.compile(r"CPU capability usage: (\S+)")


@cache
def of_numpy() -> str:
    """numpy's BLAS: "openblas 0.3.31 Haswell"; looked up once, since it takes going through all loaded libraries."""
    import numpy as np

    if found := libraries_of_numpy():
        return ", ".join(sorted(map(_described, found)))
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # linked statically, or a part of the system
    return " ".join(str(built[name]) for name in ("name", "version") if built.get(name, UNKNOWN) != UNKNOWN) or UNKNOWN


def libraries_of_numpy() -> list[dict[str, Any]]:
    """The BLAS libraries that numpy has loaded, as threadpoolctl describes them."""
    import numpy as np
    from threadpoolctl import threadpool_info

    loaded = [library for library in threadpool_info() if library.get("user_api") == "blas"]
    folder = Path(np.__file__).parent
    own = [library for library in loaded if _is_inside(library["filepath"], folder, folder.with_name("numpy.libs"))]
    # Libraries that lie elsewhere may be any package's: the only one is numpy's.
    return own or (loaded if len(loaded) == 1 else [])


def of_torch(torch: Any) -> str:
    """PyTorch's: "MKL 2024.2, oneDNN 3.12.0, AVX2 kernels"."""
    text, found = torch.__config__.show(), []
    built_with = match[1].lower() if (match := _BLAS.search(text)) else ""
    if torch.backends.mkl.is_available():
        found.append(f"MKL {match[1]}" if (match := _MKL.search(text)) else "MKL")
    elif built_with not in ("", "mkl"):
        found.append({"open": "openblas"}.get(built_with, built_with))
    else:
        found.append(f"BLAS {UNKNOWN}")
    if torch.backends.mkldnn.is_available():
        found.append(f"oneDNN {match[1] or match[2]}" if (match := _ONEDNN.search(text)) else "oneDNN")
    if match := _CAPABILITY.search(text):
        found.append(f"{match[1]} kernels")
    return ", ".join(found)


def of_tensorflow(tensorflow: Any, xla: bool = False) -> str:
    """TensorFlow's: "Eigen, oneDNN off"; with `xla` that of the code that XLA compiles."""
    if xla:
        return f"XLA of TensorFlow {tensorflow.__version__}"
    port = sys.modules.get("tensorflow.python.util._pywrap_util_port")  # not public: absent in another release
    one_dnn = UNKNOWN if port is None else "on" if port.IsMklEnabled() else "off"
    return f"Eigen of TensorFlow {tensorflow.__version__}, oneDNN {one_dnn}"


def of_jax(jax: Any) -> str:
    """JAX's: "XLA of jaxlib 0.10.2". Which libraries XLA was built with, it doesn't say."""
    return f"XLA of jaxlib {jax.lib.__version__}"


def _is_inside(path: str, *folders: Path) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _described(library: Mapping[str, Any]) -> str:
    return " ".join(str(library[name]) for name in ("internal_api", "version", "architecture") if library.get(name))
