"""Two machines never pass as one, and one machine is the same at any moment and with any kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import machine as module
from experiments.machine import Machine, machine, read

# As Linux shows them, made up after machines of these kinds: both EPYCs are called "AMD EPYC" by their hypervisor.

X86 = """\
processor	: {number}
vendor_id	: {vendor}
cpu family	: {family}
model		: {model}
model name	: {name}
stepping	: {stepping}
microcode	: 0x1000065
cpu MHz		: {mhz}
cache size	: 1024 KB
physical id	: 0
siblings	: {cores}
core id		: {number}
cpu cores	: {cores}
flags		: {flags}
bugs		: spectre_v1 spectre_v2
bogomips	: {bogomips}
power management:
"""
ARM = """\
processor	: {number}
BogoMIPS	: {bogomips}
Features	: {flags}
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: {part}
CPU revision	: 1
"""
BASE = (
    "fpu vme de pse tsc msr pae mce cx8 sse sse2 ht syscall nx lm constant_tsc rep_good nopl cpuid pni ssse3 fma cx16"
)
BASE += " sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand hypervisor lahf_lm abm bmi1 avx2 smep bmi2 erms"
WIDE = " avx512f avx512dq rdseed adx smap avx512cd avx512bw avx512vl avx512_vnni avx512_bf16"
NEON = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


def x86(cores: int = 4, mhz: str = "2596.142", bogomips: str = "5192.28", **fields: str) -> str:
    usual = {"vendor": "AuthenticAMD", "family": "25", "model": "17", "name": "AMD EPYC", "stepping": "1"}
    made = usual | {"flags": BASE + WIDE, "mhz": mhz, "bogomips": bogomips} | fields
    return "\n".join(X86.format(number=number, cores=cores, **made) for number in range(cores)) + "\n"


def arm(parts: tuple[str, ...] = ("0xd0c",) * 4, flags: str = NEON, bogomips: str = "50.00") -> str:
    made = [ARM.format(number=n, part=part, flags=flags, bogomips=bogomips) for n, part in enumerate(parts)]
    return "\n".join(made) + "\n"


CACHES = {"L1 Data": "32K", "L1 Instruction": "32K", "L2 Unified": "1024K", "L3 Unified": "32768K"}
XEON = {"vendor": "GenuineIntel", "family": "6", "model": "143", "stepping": "8"}
XEON_NAME = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"

MACHINES: dict[str, tuple[str, dict[str, str]]] = {
    "AMD EPYC (family 25, model 17, AVX-512)": (x86(), CACHES),
    "AMD EPYC (family 26, model 2, AVX-512)": (
        x86(family="26", model="2", flags=BASE + WIDE + " avx_vnni avx512_vp2intersect"),
        CACHES | {"L1 Data": "48K"},
    ),
    f"{XEON_NAME} (family 6, model 143, AVX-512)": (
        x86(**XEON, name=XEON_NAME, flags=BASE + WIDE + " avx512_fp16 amx_bf16 amx_tile amx_int8"),
        CACHES | {"L1 Data": "48K", "L2 Unified": "2048K", "L3 Unified": "107520K"},
    ),
    "ARM (family 8, model 0xd0c, NEON)": (arm(), CACHES | {"L1 Data": "64K"}),
    "AMD EPYC (family 25, model 17, AVX2)": (x86(flags=BASE), CACHES),  # the hypervisor hides AVX-512
}


@pytest.fixture
def described(tmp_path: Path) -> Callable[..., Machine]:
    """A function from the text of /proc/cpuinfo and the caches of a core to the machine they describe."""

    def make(cpuinfo: str, caches: dict[str, str], architecture: str = "x86_64", first: int = 0) -> Machine:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for number, (kind, size) in enumerate(caches.items()):
            index = folder / "cpus" / f"cpu{first}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            level, kind = kind.removeprefix("L").split()
            for name, text in (("level", level), ("type", kind), ("size", size)):
                (index / name).write_text(text + "\n")
        (folder / "cpus").mkdir(parents=True, exist_ok=True)
        (folder / "cpus" / "cpufreq").mkdir()
        (folder / "cpuinfo").write_text(cpuinfo)
        return read(folder / "cpuinfo", folder / "cpus", architecture)

    return make


def test_machines_of_one_name_are_told_apart(described: Callable[..., Machine]) -> None:
    found = {label: described(*files) for label, files in MACHINES.items()}
    assert {label: one.label for label, one in found.items()} == {label: label for label in MACHINES}
    assert len({one.digest for one in found.values()}) == len({str(one) for one in found.values()}) == len(MACHINES)


DIFFERENT: dict[str, tuple[str, dict[str, str]]] = {
    "family": (x86(family="26"), CACHES),
    "model": (x86(model="18"), CACHES),
    "stepping": (x86(stepping="2"), CACHES),
    "name": (x86(name="AMD EPYC 9B14"), CACHES),
    "vendor": (x86(vendor="HygonGenuine"), CACHES),
    "instruction sets": (x86(flags=BASE + WIDE + " avx_vnni"), CACHES),
    "cores": (x86(cores=8), CACHES),
    "L1": (x86(), CACHES | {"L1 Data": "48K"}),
    "L2": (x86(), CACHES | {"L2 Unified": "512K"}),
    "L3": (x86(), CACHES | {"L3 Unified": "16384K"}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_each_difference_makes_another_machine(described: Callable[..., Machine], what: str) -> None:
    usual, other = described(x86(), CACHES), described(*DIFFERENT[what])
    assert usual.digest != other.digest
    assert str(usual) != str(other)


SAME: dict[str, str] = {
    "frequency": x86(mhz="3100.000"),
    "bogomips": x86(bogomips="5200.00"),
    "order of flags": x86(flags=" ".join(reversed((BASE + WIDE).split()))),
    "flags of a newer kernel": x86(flags=BASE + WIDE + " srso_user_kernel_no ibpb_exit_to_user user_shstk debug_swap"),
    "line ends and spaces": x86().replace("\n", "\r\n").replace("\t: ", " :   "),
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_by_itself_leaves_the_machine(described: Callable[..., Machine], what: str) -> None:
    assert SAME[what] != x86()
    assert described(SAME[what], CACHES) == described(x86(), CACHES)


def test_cores_of_two_kinds_are_one_machine(described: Callable[..., Machine]) -> None:
    mixed = described(arm(("0xd05", "0xd05", "0xd0b")), CACHES, "aarch64")
    assert (mixed.vendor, mixed.model, mixed.stepping, mixed.cores) == ("ARM", "0xd05+0xd0b", "r3p1", 3)
    assert mixed.digest != described(arm(("0xd05", "0xd05", "0xd05")), CACHES, "aarch64").digest
    assert described(arm(bogomips="48.00"), CACHES) == described(arm(), CACHES)


def test_caches_come_from_the_first_core_that_tells_them(described: Callable[..., Machine]) -> None:
    assert described(x86(), CACHES).caches == {"L1d": "32K", "L2": "1024K", "L3": "32768K"}
    assert described(x86(), CACHES, first=10).caches == described(x86(), CACHES).caches
    assert described(x86(), {}).caches == {}


def test_a_system_without_these_files_still_has_a_machine(tmp_path: Path) -> None:
    found = read(tmp_path / "cpuinfo", tmp_path, "riscv64")
    assert found.architecture == "riscv64" and found.cores >= 1 and found.label


def test_the_record_of_a_machine_says_everything() -> None:
    found = machine().record()
    assert {field.name for field in dataclasses.fields(Machine)} < set(found)
    assert found["label"] == str(machine()) and machine().digest.startswith(found["label"].rpartition(" ")[2])
    assert set(found["instruction_sets"]) <= module.INSTRUCTION_SETS
