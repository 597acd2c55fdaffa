"""Commands that look around: `list` and `doctor`."""

from __future__ import annotations

from pathlib import Path

from experiments.cli.common import checked_paper, cli, examples, option_data, option_results, reporting
from experiments.formats import counted
from experiments.output import Output
from experiments.papers import models, paper_keys
from experiments.progress import table


@cli.command(
    "list", short_help="Show the papers, engines, models and data sets.", epilog=examples("list", "list --json -")
)
@reporting
def list_(output: Output) -> None:
    """Show the papers, engines, models and data sets there are."""
    from bridge import registry
    from experiments import data

    rows = []
    for key in paper_keys():
        paper = checked_paper(key)
        rows.append([key, paper.model, paper.dataset, paper.title])
        output.add([{"kind": "paper", "name": key, "model": paper.model, "title": paper.title}])
    table(output.console, ["PAPER", "MODEL", "DATA", "TITLE"], rows, numbers=4)
    rows = []
    for name in registry.names():
        label, found = registry.get(name).label, registry.availability(name)
        versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
        rows.append([name, label, *(("yes", versions) if found.ok else ("no", found.reason))])
        about = {"available": found.ok, "reason": found.reason, "versions": found.versions}
        output.add([{"kind": "engine", "name": name, "label": label, **about}])
    output.say()
    table(output.console, ["ENGINE", "LABEL", "AVAILABLE", "VERSION OR REASON"], rows, numbers=4)
    output.say()
    files = {name: str(path) for name, path in models().items()}
    table(output.console, ["MODEL", "FILE"], list(files.items()), numbers=2)
    output.add({"kind": "model", "name": name, "file": path} for name, path in files.items())
    output.say()
    table(output.console, ["DATA"], [[name] for name in sorted(data.LOADERS)])
    output.add({"kind": "data", "name": name} for name in sorted(data.LOADERS))


@cli.command(
    short_help="Look at this machine: what is there and what is missing.",
    epilog=examples("doctor", "doctor --data-dir /data"),
)
@option_results()
@option_data
@reporting
def doctor(output: Output, results_dir: Path, data_dir: Path | None) -> None:
    """Look at this machine: what is there, what is missing, and what to do about it.

    Ends with code 0 unless something essential is broken. Downloads nothing; it may fill TwinGrad's cache, and let
    Julia compile the packages of engines for its own.
    """
    from experiments import doctor

    findings = doctor.examine(output.console, results_dir, data_dir)
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    rows = [[marks[item.state], item.name, item.found] for item in findings]
    table(output.console, ["", "", ""], rows, numbers=3)
    advice: dict[str, list[str]] = {}  # each once, with all that it is about
    for item in findings:
        if item.advice:
            advice.setdefault(item.advice, []).append(item.name)
    if advice:
        output.say()
    for text, names in advice.items():
        output.say(f"{', '.join(names)}: {text}")
    output.add(vars(item) for item in findings)
    problems = [item for item in findings if item.state == "problem"]
    for item in problems:
        output.fail(f"{item.name}: {item.found}; {item.advice}")
    output.say()
    output.say(counted(len(problems), "problem") if problems else "Everything essential is there.")
