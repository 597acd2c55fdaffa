"""The identity of a machine: what tells its results from those of another one.

Vendor, family, model, stepping, instruction sets, number of cores and cache sizes, as Linux reports them. What changes
from one moment or kernel to the next (frequency, bogomips, the order of flags, flags that are no instruction sets) is
not a part of it. Model names alone do not tell machines apart: cloud providers call several generations "AMD EPYC".
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["INSTRUCTION_SETS", "Machine", "machine", "read"]

# The instruction sets that numerical code is compiled for, by Linux's names.
_X86 = (
    *("pni", "ssse3", "sse4_1", "sse4_2", "sse4a", "popcnt", "aes", "pclmulqdq", "avx", "f16c", "fma", "fma4", "xop"),
    *("avx2", "bmi1", "bmi2", "abm", "movbe", "adx", "sha_ni", "vaes", "vpclmulqdq", "gfni"),
    *("avx512f", "avx512cd", "avx512er", "avx512pf", "avx512bw", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi"),
    *("avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq", "avx512_4vnniw", "avx512_4fmaps"),
    *("avx512_bf16", "avx512_fp16", "avx512_vp2intersect", "avx_vnni", "avx_ifma", "amx_tile", "amx_int8", "amx_bf16"),
    *("amx_fp16", "avx10"),
)
_ARM = (
    *("fp", "asimd", "neon", "vfpv4", "fphp", "asimdhp", "asimdrdm", "asimddp", "asimdfhm", "fcma", "jscvt"),
    *("atomics", "aes", "pmull", "sha1", "sha2", "sha3", "sha512", "crc32", "bf16", "i8mm", "ebf16"),
    *("sve", "sve2", "sve2p1", "svebf16", "svei8mm", "svef32mm", "svef64mm", "sme", "sme2"),
)
INSTRUCTION_SETS = frozenset((*_X86, *_ARM))
"""The flags of /proc/cpuinfo that are instruction sets."""

# The one that a label shows: the first that is there.
_SHOWN = (
    *(("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX"), ("sse4_2", "SSE4.2"), ("pni", "SSE3")),
    *(("sme", "SME"), ("sve2", "SVE2"), ("sve", "SVE"), ("asimd", "NEON"), ("neon", "NEON")),
)
# ARM's CPUs give their maker as a number.
_IMPLEMENTERS = {
    "0x41": "ARM",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x50": "APM",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}


@dataclass(frozen=True)
class Machine:
    """A machine's CPU. A field is empty, and `cores` 0, where the system does not say."""

    architecture: str
    """"x86_64", "aarch64"."""
    vendor: str
    """"AuthenticAMD", "GenuineIntel"; the maker of an ARM CPU."""
    name: str
    """The model's name, where it has one."""
    family: str
    model: str
    """A number as text; of an ARM CPU the part, several joined by "+" where its cores differ."""
    stepping: str
    instruction_sets: tuple[str, ...]
    """In alphabetical order."""
    cores: int
    """Logical cores of the whole machine."""
    caches: dict[str, str]
    """Sizes as Linux writes them ("32K") of "L1d", "L2" and "L3", those that there are, of the first core."""

    @property
    def digest(self) -> str:
        """Equal for equal machines, different for different ones: 16 hex digits."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """For people: "AMD EPYC (family 25, model 17, AVX2)"."""
        sets = set(self.instruction_sets)
        best = next((shown for flag, shown in _SHOWN if flag in sets), "")
        facts = [f"{what} {value}" for what, value in (("family", self.family), ("model", self.model)) if value]
        facts += [best] if best else []
        name = self.name or self.vendor or self.architecture or "unknown CPU"
        return f"{name} ({', '.join(facts)})" if facts else name

    def __str__(self) -> str:
        """The label with the first digits of the digest, for tables: different for different machines."""
        return f"{self.label} {self.digest[:8]}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of its largest cache; 0 where the system does not say."""
        sizes = [re.fullmatch(r"(\d+)([KMG]?)", size) for size in self.caches.values()]
        return max((int(size[1]) << 10 * " KMG".index(size[2] or " ") for size in sizes if size), default=0)

    def record(self) -> dict[str, Any]:
        """Everything, for the provenance of a result."""
        facts = dataclasses.asdict(self) | {"instruction_sets": list(self.instruction_sets)}
        return {**facts, "label": str(self), "digest": self.digest}


@cache
def machine() -> Machine:
    """The machine that this process runs on."""
    return read(Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu"), platform.machine())


def read(cpuinfo: Path, cpus: Path, architecture: str) -> Machine:
    """The machine that these files of Linux describe; without them what Python knows of it."""
    try:
        blocks = _blocks(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        blocks = []
    cores = [block for block in blocks if "processor" in block]
    first = cores[0] if cores else {}
    flags = {flag for block in cores for name in ("flags", "Features") for flag in block.get(name, "").split()}
    arm = "CPU implementer" in first
    return Machine(
        architecture=architecture,
        vendor=_distinct(cores, "CPU implementer", _IMPLEMENTERS) if arm else first.get("vendor_id", ""),
        name=first.get("model name", "") or ("" if blocks else platform.processor()),
        family=first.get("CPU architecture" if arm else "cpu family", ""),
        model=_distinct(cores, "CPU part") if arm else first.get("model", ""),
        stepping="+".join(sorted({_revision(block) for block in cores})) if arm else first.get("stepping", ""),
        instruction_sets=tuple(sorted(flags & INSTRUCTION_SETS)),
        cores=len(cores) or os.cpu_count() or 0,
        caches=_caches(cpus),
    )


def _blocks(text: str) -> list[dict[str, str]]:
    """The fields of each core; a field that is there twice counts once."""
    found = []
    for part in text.replace("\r", "").split("\n\n"):
        fields: dict[str, str] = {}
        for line in part.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), " ".join(value.split()))
        found.append(fields)
    return found


def _distinct(cores: list[dict[str, str]], field: str, names: dict[str, str] | None = None) -> str:
    """The values of a field over all cores, each once, in order."""
    values = {core.get(field, "").lower() for core in cores} - {""}
    return "+".join(sorted((names or {}).get(value, value) for value in values))


def _revision(core: dict[str, str]) -> str:
    """ARM's way of writing it: r3p1."""
    variant = core.get("CPU variant", "")
    with contextlib.suppress(ValueError):
        variant = str(int(variant, 0))
    return f"r{variant}p{core.get('CPU revision', '')}"


def _caches(cpus: Path) -> dict[str, str]:
    """The sizes of the caches of the first core that tells them."""

    def number(folder: Path) -> int:
        return int(folder.name.removeprefix("cpu"))

    for core in sorted((folder for folder in cpus.glob("cpu[0-9]*") if folder.name[3:].isdigit()), key=number):
        found: dict[str, str] = {}
        for index in sorted(core.glob("cache/index*")):
            with contextlib.suppress(OSError):
                level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
                name = f"L{level}{'d' if level == '1' and kind == 'Data' else ''}"
                if kind in ("Data", "Unified") and name in ("L1d", "L2", "L3"):
                    found[name] = size
        if found:
            return found
    return {}
