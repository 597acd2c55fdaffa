"""A Julia out of Debian 11's packages, unpacked into its own folder: no root, nothing of the system changed.

For machines that reach a Debian archive but not Julia's download servers. Debian 11 is the last release with a Julia;
its packages come from the same archive as the machine's own, so the archive is looked up in the machine's apt sources.
With Julia come the libraries it was built with, in that release's versions: newer ones don't fit. In particular, with a
libunwind later than 1.3 its exceptions end in segmentation faults.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import JuliaUnavailableError
from bridge.files import write_atomically
from bridge.libjulia import find
from bridge.libjulia.environment import cache_folder
from bridge.libjulia.find import MANIFEST, OWN_PREFIX, Julia, Memory

__all__ = ["PACKAGES", "Source", "archives", "install", "set_up"]

SUITE = "bullseye"
COMPONENT = "main"

# Julia's dependencies except those that every Debian has (libc, libstdc++, zlib, liblzma).
_LISTED = """
    julia julia-common libjulia1 libjulia-openblas64 libllvm9 libunwind8 libgit2-1.1 libmbedcrypto3 libmbedx509-0
    libmbedtls12 libopenlibm3 libdsfmt-19937-1 libutf8proc2 libffi7 libhttp-parser2.9 libssh2-1 libpcre3 libedit2
    libbsd0 libmd0 libz3-4 libmpfr6 libgmp10 libpcre2-8-0 libgfortran5 libquadmath0 libcurl3-gnutls libnghttp2-14
    libpsl5 librtmp1 libbrotli1 libidn2-0 libunistring2 libnettle8 libhogweed6 libgnutls30 libp11-kit0 libtasn1-6
    libgcrypt20 libgpg-error0 libldap-2.4-2 libsasl2-2 libtinfo6
"""
PACKAGES = tuple(_LISTED.split())

BYTES_NEEDED = 600_000_000
"""The packages and what they unpack to, at the same time."""

NETWORK_SECONDS = 20
"""How long a server may stand still before apt tries again (twice)."""

# Takes the place of the program, so that whoever starts Julia by its own path (Julia itself, to precompile) gets the
# libraries too. It works wherever the folder is moved to.
_WRAPPER = """#!/bin/sh
# Debian 11's Julia, with the libraries it was built with; they are in this folder alone. Written by TwinGrad.
bin=$(dirname "$(readlink -f "$0")")
root=${{bin%/usr/bin}}
libraries="$root/usr/lib/{triplet}:$root/lib/{triplet}:$root/usr/lib/{triplet}/julia"
LD_LIBRARY_PATH="$libraries${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export LD_LIBRARY_PATH
exec "$bin/{program}" "$@"
"""
_PROGRAM = "julia-program"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """An archive as apt is given it: one entry of a sources file, for Debian 11."""

    text: str
    suffix: str
    """".list" for the one-line format, ".sources" for the other: apt tells them apart by the file's name."""


def set_up(memory: Memory, say: Say) -> tuple[Julia, None]:
    """Install it where `bridge.libjulia.find` looks for it, and prove it: a recipe for `bridge.julia.install`."""
    source = "installed by TwinGrad"
    say("looking for Debian 11’s Julia")
    try:
        install(cache_folder(), lambda program: find.prove(program, source), lambda line: say(f"  {line}"))
        return memory.prove(find.own_executable(), source), None
    except OSError as error:
        raise JuliaUnavailableError(str(error)) from None


def install(folder: Path, prove: Callable[[str], object], say: Say, etc: Path = Path("/etc/apt")) -> Path:
    """Make the prefix in `folder` and return it; `prove` is called with its Julia before it gets its name.

    A prefix that is there already is kept, and an interrupted download resumes where it stopped. Only one process at a
    time does this: others wait for it. Raises `JuliaUnavailableError`, with the reason.
    """
    for tool in ("apt-get", "apt-config", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise JuliaUnavailableError(f"this system has no {tool}: it is not Debian or a close relative")
    sources = archives(etc)
    prefix = folder / OWN_PREFIX
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "install.lock", say):
            if (prefix / MANIFEST).is_file():
                return prefix
            _check_room(folder)
            packages = _download(folder / f"{OWN_PREFIX}.download", sources, say)
            _unpack(packages, prefix, prove, say)
            shutil.rmtree(folder / f"{OWN_PREFIX}.download")
    except OSError as error:
        raise JuliaUnavailableError(f"{folder} can't be written: {error}") from None
    return prefix


def archives(etc: Path = Path("/etc/apt")) -> list[Source]:
    """The entries of the machine's apt sources that may be Debian archives, each turned into one for Debian 11.

    Raises `JuliaUnavailableError` when there is none.
    """
    files = [etc / "sources.list"]
    with contextlib.suppress(OSError):
        files += sorted((etc / "sources.list.d").iterdir())
    found: dict[Source, None] = {}
    for file in files:
        if file.suffix not in (".list", ".sources"):
            continue
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            found |= dict.fromkeys(_from_stanzas(text) if file.suffix == ".sources" else _from_lines(text))
    if not found:
        raise JuliaUnavailableError(f"the package sources in {etc} name no Debian archive")
    return sorted(found, key=_says_debian, reverse=True)  # stable: otherwise in apt's order


_LINE = re.compile(r"deb\s+(?P<options>\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)")


def _from_lines(text: str) -> Iterator[Source]:
    """From the one-line format: ``deb [options] uri suite component ...``"""
    for line in text.splitlines():
        match = _LINE.fullmatch(line.partition("#")[0].strip())
        if match is None or not _may_be_debian(match["uri"], [match["suite"]], match["components"].split()):
            continue
        yield Source(f"deb {match['options'] or ''}{match['uri']} {SUITE} {COMPONENT}\n", ".list")


def _from_stanzas(text: str) -> Iterator[Source]:
    """From the deb822 format: stanzas of ``Field: value`` lines, continued on indented lines."""
    for stanza in re.split(r"\n\s*\n", text):
        fields = _fields(stanza)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        suites, components = fields.get("suites", "").split(), fields.get("components", "").split()
        uris = [uri for uri in fields.get("uris", "").split() if _may_be_debian(uri, suites, components)]
        if not uris:
            continue
        ours = {"types": "deb", "uris": " ".join(uris), "suites": SUITE, "components": COMPONENT}
        yield Source("".join(f"{name}: {value}\n" for name, value in (fields | ours).items()), ".sources")


def _fields(stanza: str) -> dict[str, str]:
    """Field names in lower case; values with their continuation lines (such as a key's) as they are."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1].isspace():
            if name:
                fields[name] += f"\n{line}"
            continue
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name:
            fields[name] = value.strip()
    return fields


def _may_be_debian(uri: str, suites: Sequence[str], components: Sequence[str]) -> bool:
    """By the shape of the entry, since a mirror may be any host; security updates are an archive apart."""
    return (
        COMPONENT in components
        and not uri.startswith("cdrom:")
        and "security" not in uri
        and not all("security" in suite for suite in suites)
    )


def _says_debian(source: Source) -> bool:
    """Whether an entry's address ends as those of Debian's mirrors do."""
    return re.search(r"/debian(\.list)?(/|\s|$)", source.text) is not None


@contextlib.contextmanager
def _alone(lock: Path, say: Say) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is installing Julia")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < BYTES_NEEDED:
        raise JuliaUnavailableError(
            f"{folder} has {free / 1e6:.0f} MB free, and {BYTES_NEEDED / 1e6:.0f} MB are needed: make room, or name "
            "another folder in TWINGRAD_CACHE"
        )


def _download(folder: Path, sources: Sequence[Source], say: Say) -> list[Path]:
    """Bring the packages into `folder`, from the first source that has them; apt checks their signatures."""
    problems = []
    for source in sources:
        try:
            packages = _download_from(folder, source, say)
        except _AptError as error:
            problems.append(str(error))
            continue
        if len(packages) >= len(PACKAGES):
            return packages
        problems.append(f"apt-get brought {len(packages)} of {len(PACKAGES)} packages")
    raise JuliaUnavailableError("Debian 11’s packages can't be fetched: " + "; ".join(problems))


def _download_from(folder: Path, source: Source, say: Say) -> list[Path]:
    packages = folder / "packages"
    for path in (folder / "lists" / "partial", folder / "cache" / "archives" / "partial", packages):
        path.mkdir(parents=True, exist_ok=True)
    listed = folder / f"debian{source.suffix}"
    write_atomically(listed, source.text)
    write_atomically(folder / "apt.conf", _configuration(folder, listed))
    say("reading Debian 11’s package lists (8 MB)")
    _apt(folder, folder, "update")
    say(f"fetching {len(PACKAGES)} packages of Debian 11 (72 MB)")
    # Into its own folder: apt-get completes what an earlier attempt left there, and leaves whole packages alone.
    _apt(folder, packages, "download", *PACKAGES)
    return sorted(packages.glob("*.deb"))


def _configuration(folder: Path, sources: Path) -> str:
    """A configuration of apt that reads and writes in `folder` only.

    Of the machine's own configuration the way to the network is kept (proxies, certificates), and its keys; not what it
    would have run after an update, which concerns the system's own lists.
    """
    dumped = subprocess.run(
        ["apt-config", "dump"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    network = [line for line in dumped.splitlines() if re.match("Acquire::(?!Languages)", line)]
    ours = {
        "Dir::Etc::main": os.devnull,
        "Dir::Etc::parts": os.devnull,
        "Dir::Etc::sourcelist": str(sources),
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferences": os.devnull,
        "Dir::Etc::preferencesparts": os.devnull,
        "Dir::State::lists": str(folder / "lists"),
        "Dir::State::status": os.devnull,
        "Dir::Cache": str(folder / "cache"),
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": str(NETWORK_SECONDS),
        "Acquire::https::Timeout": str(NETWORK_SECONDS),
        # Root's apt would fetch as another user, who can't write here.
        "APT::Sandbox::User": "",
    }
    return "\n".join([*network, *(f'{name} "{value}";' for name, value in ours.items())]) + "\n"


class _AptError(Exception):
    pass


def _apt(folder: Path, cwd: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", "-q", *arguments],
        cwd=cwd,
        env={**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    # apt-get update only warns of a server that it can't reach.
    failed = re.findall(r"^[EW]: (.*)", done.stderr, flags=re.MULTILINE)
    if done.returncode or any("Failed to fetch" in line for line in failed):
        raise _AptError(f"apt-get {arguments[0]}: {failed[0] if failed else f'exit code {done.returncode}'}")


def _unpack(packages: Sequence[Path], prefix: Path, prove: Callable[[str], object], say: Say) -> None:
    """Unpack beside the prefix, and give it its name when it is whole, proved and on the disk."""
    for left in prefix.parent.glob(f".{prefix.name}.*.part"):
        shutil.rmtree(left)
    if prefix.exists():
        shutil.rmtree(prefix)  # without a manifest: never completed
    staging = Path(tempfile.mkdtemp(dir=prefix.parent, prefix=f".{prefix.name}.", suffix=".part"))
    try:
        staging.chmod(0o755)
        say("unpacking (382 MB)")
        for package in packages:
            _run("dpkg-deb", "-x", str(package), str(staging))
        program = _wrap(staging)
        say("starting it: threads, exceptions, BLAS")
        names = [package.name for package in packages]
        (staging / MANIFEST).write_text(json.dumps({"packages": names}, indent=1) + "\n", encoding="utf-8")
        prove(str(program))
        os.sync()
        os.replace(staging, prefix)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _wrap(root: Path) -> Path:
    """Put the script that names the folders of the libraries in the program's place."""
    found = sorted(root.glob("usr/lib/*/libjulia.so.1"))
    program = root / "usr" / "bin" / "julia"
    if not found or not program.is_file():
        raise JuliaUnavailableError("Debian 11’s packages hold no Julia for this kind of machine")
    program.rename(program.with_name(_PROGRAM))
    program.write_text(_WRAPPER.format(triplet=found[0].parent.name, program=_PROGRAM), encoding="utf-8")
    program.chmod(0o755)
    return program


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise JuliaUnavailableError(f"{command[0]} {Path(command[2]).name}: {reason}")
