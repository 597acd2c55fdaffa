"""A Julia is installed whole or not at all, for this user alone, from the archive that the machine already uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.errors import JuliaUnavailableError
from contrib import debian
from contrib.debian import PACKAGES, Source

STANZA = """\
Types: deb
# a comment
URIs: {uri}
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

# The machine's sources.


def etc_with(folder: Path, **files: str) -> Path:
    """An /etc/apt: `etc_with(tmp_path, list="deb ...", debian_sources="Types: ...")`."""
    etc = folder / "etc"
    (etc / "sources.list.d").mkdir(parents=True)
    for name, text in files.items():
        file = "sources.list" if name == "list" else f"sources.list.d/{name.replace('_', '.')}"
        (etc / file).write_text(text, encoding="utf-8")
    return etc


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "deb http://mirror.example/debian bookworm main",
            "deb http://mirror.example/debian bullseye main",
        ),
        (
            "deb  [ arch=amd64 signed-by=/k.gpg ]  https://mirror.example/debian/  trixie  main contrib # ours",
            "deb [ arch=amd64 signed-by=/k.gpg ]  https://mirror.example/debian/ bullseye main",
        ),
        (
            "deb file:/srv/debian stable non-free main",
            "deb file:/srv/debian bullseye main",
        ),
    ],
)
def test_the_one_line_format(line: str, expected: str, tmp_path: Path) -> None:
    assert debian.archives(etc_with(tmp_path, list=f"# sources\n\n{line}\n")) == [Source(expected + "\n", ".list")]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# deb http://mirror.example/debian bookworm main",
        "deb-src http://mirror.example/debian bookworm main",
        "deb cdrom:[Debian GNU/Linux 12]/ bookworm main",
        "deb http://mirror.example/debian-security bookworm-security main",
        "deb http://mirror.example/debian bookworm-security main",
        "deb http://mirror.example/debian bookworm contrib",
        "deb http://mirror.example/debian ./",
        "deb http://mirror.example/debian",
    ],
)
def test_entries_that_can_not_serve(line: str, tmp_path: Path) -> None:
    etc = etc_with(tmp_path, list=line)
    with pytest.raises(JuliaUnavailableError, match=f"package sources in {etc} name no Debian archive"):
        debian.archives(etc)


def test_no_sources_at_all(tmp_path: Path) -> None:
    with pytest.raises(JuliaUnavailableError, match="name no Debian archive"):
        debian.archives(tmp_path / "nowhere")


def test_the_deb822_format(tmp_path: Path) -> None:
    etc = etc_with(tmp_path, debian_sources=STANZA.format(uri="http://mirror.example/debian"))
    [source] = debian.archives(etc)
    assert source.suffix == ".sources"
    assert source.text.splitlines() == [
        "types: deb",
        "uris: http://mirror.example/debian",
        "suites: bullseye",
        "components: main",
        "signed-by: /usr/share/keyrings/debian-archive-keyring.gpg",
    ]


def test_a_key_within_a_stanza_is_kept_with_its_lines(tmp_path: Path) -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n -----END PGP PUBLIC KEY BLOCK-----\n"
    fields = "Enabled: yes\nTypes: deb deb-src\nURIs: http://mirror.example/debian\nSuites: sid\nComponents: main\n"
    [source] = debian.archives(etc_with(tmp_path, debian_sources=fields + key))
    assert "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n -----END" in source.text
    assert "types: deb\n" in source.text


def test_stanzas_that_can_not_serve_are_left_out(tmp_path: Path) -> None:
    disabled = "Enabled: no\n" + STANZA.format(uri="http://off.example/debian")
    only_sources = STANZA.format(uri="http://src.example/debian").replace("Types: deb", "Types: deb-src")
    security = STANZA.format(uri="http://mirror.example/debian-security").replace("bookworm", "bookworm-security")
    good = STANZA.format(uri="http://mirror.example/debian")
    stanzas = "\n".join((disabled, only_sources, security, good))
    [source] = debian.archives(etc_with(tmp_path, debian_sources=stanzas))
    assert "uris: http://mirror.example/debian\n" in source.text


def test_several_addresses_of_one_stanza(tmp_path: Path) -> None:
    uris = "http://one.example/debian\n http://one.example/debian-security http://two.example/debian"
    [source] = debian.archives(etc_with(tmp_path, debian_sources=STANZA.format(uri=uris)))
    assert "uris: http://one.example/debian http://two.example/debian\n" in source.text


def test_debians_own_archive_comes_first_and_each_once(tmp_path: Path) -> None:
    main, updates = (f"deb http://mirror.example/debian {suite} main\n" for suite in ("bookworm", "bookworm-updates"))
    etc = etc_with(
        tmp_path,
        list="deb http://other.example/tools stable main\n" + main + updates,
        more_sources=STANZA.format(uri="mirror+file:/etc/apt/mirrors/debian.list"),
        old_disabled="deb http://off.example/debian bookworm main\n",
    )
    texts = [source.text for source in debian.archives(etc)]
    assert texts[0] == "deb http://mirror.example/debian bullseye main\n"
    assert "mirror+file:/etc/apt/mirrors/debian.list" in texts[1]
    assert texts[2] == "deb http://other.example/tools bullseye main\n"
    assert len(texts) == 3


# The prefix, with a stand-in for apt. It logs its calls; files in `trouble` make it fail.

APT_GET = """#!/bin/sh
echo "$@" >> {log}
cp "$APT_CONFIG" {here}/seen.conf
sources=$(sed -n 's/^Dir::Etc::sourcelist "\\(.*\\)";$/\\1/p' "$APT_CONFIG")
cp "$sources" {here}/seen.sources
if [ "$2" = update ]; then
  if grep -q off.example "$sources"; then
    echo 'W: Failed to fetch http://off.example/debian  Could not resolve' >&2
    echo 'W: Some index files failed to download.' >&2
  fi
  [ ! -e {trouble}/update ] || {{ echo 'E: The repository does not have a Release file.' >&2; exit 100; }}
  exit 0
fi
[ "$2" = download ] || exit 1
[ ! -e {trouble}/slow ] || sleep 0.3
shift 2
for package in "$@"; do
  if [ -e {trouble}/download ] && [ "$package" = libunwind8 ]; then
    echo 'E: Failed to fetch libunwind8  Connection timed out' >&2; exit 100
  fi
  [ -e "${{package}}_1_amd64.deb" ] || {{ echo "fetched $package" >> {log}; echo > "${{package}}_1_amd64.deb"; }}
done
"""

APT_CONFIG = """#!/bin/sh
echo 'Acquire::http::Proxy "http://proxy.example:3128";'
echo 'Acquire::Languages:: "de";'
echo 'APT::Update::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";'
echo 'Dir::Cache "var/cache/apt";'
"""

DPKG_DEB = """#!/bin/sh
[ ! -e {trouble}/unpack ] || [ "$(basename "$2")" != libz3-4_1_amd64.deb ] || {{
  echo 'dpkg-deb: error: unexpected end of file' >&2; exit 2; }}
case "$(basename "$2")" in
  julia_*) mkdir -p "$3/usr/bin" && cp {here}/program "$3/usr/bin/julia" && chmod +x "$3/usr/bin/julia" ;;
  libjulia1_*) mkdir -p "$3/usr/lib/m68k-linux-gnu" && echo > "$3/usr/lib/m68k-linux-gnu/libjulia.so.1" ;;
esac
"""

PROGRAM = """#!/bin/sh
echo "libraries=$LD_LIBRARY_PATH"
echo "program=$0"
for argument in "$@"; do echo "argument=$argument"; done
"""


class FakeApt:
    """The stand-in, and what it has seen."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.trouble = here / "trouble"
        self.trouble.mkdir(parents=True)
        self.log = here / "log"
        tools = {"apt-get": APT_GET, "apt-config": APT_CONFIG, "dpkg-deb": DPKG_DEB}
        for name, text in tools.items():
            shell = text.format(here=here, log=self.log, trouble=self.trouble) if name != "apt-config" else text
            (here / name).write_text(shell, encoding="utf-8")
            (here / name).chmod(0o755)
        (here / "program").write_text(PROGRAM, encoding="utf-8")
        self.etc = etc_with(here, list="deb http://mirror.example/debian bookworm main\n")

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    fake = FakeApt(tmp_path / "apt")
    monkeypatch.setenv("PATH", f"{fake.here}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "sync", lambda: None)  # waits for the whole machine's disks
    return fake


Install = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make_prefix(apt: FakeApt, cache: Path) -> Install:
    def make(prove: Callable[[str], object] = lambda program: None) -> Path:
        return debian.install(cache, prove, lambda line: None, apt.etc)

    return make


def test_the_prefix_holds_a_julia_that_finds_its_libraries(make_prefix: Install, cache: Path, tmp_path: Path) -> None:
    prefix = make_prefix()
    assert prefix == cache / "debian-11"
    moved = tmp_path / "moved, with spaces"
    prefix.rename(moved)
    link = tmp_path / "link-to-julia"
    link.symlink_to(moved / "usr" / "bin" / "julia")
    environment = {**os.environ, "LD_LIBRARY_PATH": "/users/own"}
    said = subprocess.run(
        [link, "-e", "1 + 1; $HOME"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    libraries = f"{moved}/usr/lib/m68k-linux-gnu:{moved}/lib/m68k-linux-gnu:{moved}/usr/lib/m68k-linux-gnu/julia"
    assert said == [
        f"libraries={libraries}:/users/own",
        f"program={moved}/usr/bin/julia-program",
        "argument=-e",
        "argument=1 + 1; $HOME",
    ]


def test_nothing_is_left_beside_the_prefix(make_prefix: Install, cache: Path) -> None:
    make_prefix()
    assert sorted(path.name for path in cache.iterdir()) == ["debian-11", "install.lock"]


def test_apt_reads_and_writes_in_our_folder_only(make_prefix: Install, apt: FakeApt, cache: Path) -> None:
    make_prefix()
    settings = dict(
        line.rstrip(";").replace('"', "").split(" ", 1) for line in (apt.here / "seen.conf").read_text().splitlines()
    )
    inside = str(cache / "debian-11.download")
    for name in ("Dir::Etc::sourcelist", "Dir::State::lists", "Dir::Cache"):
        assert settings[name].startswith(inside)
    for name in ("Dir::Etc::main", "Dir::Etc::parts", "Dir::Etc::preferences", "Dir::State::status"):
        assert settings[name] == os.devnull
    assert settings["Dir::Etc::sourceparts"] == "-"
    assert settings["Acquire::http::Proxy"] == "http://proxy.example:3128"
    assert settings["Acquire::Languages"] == "none"
    assert not [name for name in settings if "Invoke" in name]
    assert (apt.here / "seen.sources").read_text() == "deb http://mirror.example/debian bullseye main\n"
    assert apt.calls()[:2] == ["-q update", f"-q download {' '.join(PACKAGES)}"]


def test_a_second_time_there_is_nothing_to_do(make_prefix: Install, apt: FakeApt) -> None:
    first = make_prefix()
    calls = apt.calls()
    proved: list[str] = []
    assert make_prefix(proved.append) == first
    assert apt.calls() == calls
    assert proved == []


def fail(program: str) -> object:
    raise JuliaUnavailableError("exceptions are not caught")


def interrupt(program: str) -> object:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        ("update", "apt-get update: The repository does not have a Release file"),
        ("download", "apt-get download: Failed to fetch libunwind8"),
        ("unpack", "dpkg-deb libz3-4_1_amd64.deb: dpkg-deb: error: unexpected end of file"),
    ],
)
def test_a_failure_leaves_no_prefix_and_the_next_attempt_goes_on(
    trouble: str, expected: str, make_prefix: Install, apt: FakeApt, cache: Path
) -> None:
    (apt.trouble / trouble).touch()
    with pytest.raises(JuliaUnavailableError, match=expected):
        make_prefix()
    assert {path.name for path in cache.iterdir()} <= {"install.lock", "debian-11.download"}
    (apt.trouble / trouble).unlink()
    assert (make_prefix() / "twingrad-julia.json").is_file()
    fetched = [call for call in apt.calls() if call.startswith("fetched")]
    assert len(fetched) == len(set(fetched)) == len(PACKAGES)


@pytest.mark.parametrize(("prove", "error"), [(fail, JuliaUnavailableError), (interrupt, KeyboardInterrupt)])
def test_what_does_not_work_or_was_interrupted_gets_no_name(
    prove: Callable[[str], object], error: type[BaseException], make_prefix: Install, cache: Path
) -> None:
    with pytest.raises(error):
        make_prefix(prove)
    assert sorted(path.name for path in cache.iterdir()) == ["debian-11.download", "install.lock"]


def test_it_is_proved_before_it_gets_its_name(make_prefix: Install, cache: Path) -> None:
    seen = []

    def prove(program: str) -> None:
        seen.append((Path(program).is_file(), (cache / "debian-11").exists()))

    make_prefix(prove)
    assert seen == [(True, False)]


def test_a_half_done_prefix_is_not_taken_for_a_whole_one(make_prefix: Install, cache: Path) -> None:
    torn = cache / "debian-11" / "usr" / "bin" / "julia"
    torn.parent.mkdir(parents=True)
    torn.touch()
    left = cache / ".debian-11.killed.part" / "usr"
    left.mkdir(parents=True)
    prefix = make_prefix()
    assert (prefix / "usr" / "bin" / "julia").stat().st_size > 0
    assert not left.parent.exists()


def test_the_next_source_is_tried_when_one_can_not_be_reached(make_prefix: Install, apt: FakeApt) -> None:
    working = "deb http://mirror.example/debian bookworm main\n"
    (apt.etc / "sources.list").write_text("deb http://off.example/debian bookworm main\n" + working)
    make_prefix()
    assert apt.calls()[:2] == ["-q update", "-q update"]
    assert "mirror.example" in (apt.here / "seen.sources").read_text()


def test_packages_without_a_julia_for_this_machine(make_prefix: Install, apt: FakeApt) -> None:
    text = (apt.here / "dpkg-deb").read_text().replace("julia_*)", "none_*)")
    (apt.here / "dpkg-deb").write_text(text)
    with pytest.raises(JuliaUnavailableError, match="no Julia for this kind of machine"):
        make_prefix()


@pytest.mark.parametrize("tool", ["apt-get", "apt-config", "dpkg-deb"])
def test_another_kind_of_system(tool: str, make_prefix: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else which(name))
    with pytest.raises(JuliaUnavailableError, match=f"no {tool}: it is not Debian or a close relative"):
        make_prefix()


def test_a_full_disk(make_prefix: Install, apt: FakeApt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "BYTES_NEEDED", 10**18)
    with pytest.raises(JuliaUnavailableError, match="MB free, and 1000000000000 MB are needed: make room, or name"):
        make_prefix()
    assert apt.calls() == []


def test_a_cache_that_can_not_be_written(apt: FakeApt, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JuliaUnavailableError, match="can't be written"):
        debian.install(tmp_path / "file", lambda program: None, lambda line: None, apt.etc)


def test_two_at_a_time_install_it_once(make_prefix: Install, apt: FakeApt, cache: Path) -> None:
    (apt.trouble / "slow").touch()
    prefixes: list[Path] = []
    threads = [threading.Thread(target=lambda: prefixes.append(make_prefix())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prefixes == [cache / "debian-11"] * 2
    assert apt.calls().count("-q update") == 1
