"""Paper files: one TOML per study, naming its model, dataset, settings, reported numbers, tables and figures.

A paper is data, not code: a new study is a new file in `experiments/papers`. Each setting carries its source
(`paper`, `code` or `ours`), and what a study reported is kept apart from anything measured here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bridge import toml
from bridge.errors import TwinGradError

PAPERS_DIR = Path(__file__).parent / "papers"
MODELS_DIR = Path(__file__).parent / "models"
FORMAT = "twingrad-paper"
VERSION = 1

Source = Literal["paper", "code", "ours"]
Measure = Literal["time", "memory", "race", "scaling"]
ProfileName = Literal["full", "quick"]
MEASURES: tuple[Measure, ...] = ("time", "memory", "race", "scaling")
PROFILES: tuple[ProfileName, ...] = ("full", "quick")

T = TypeVar("T")
PositiveInt = Annotated[int, Field(ge=1)]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class ConfigError(TwinGradError):
    """A paper file that cannot be used: names the file, the place in it, what was expected and found."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Setting(_Record, Generic[T]):
    """One value with the place it comes from: the paper's text, its authors' code, or our own choice."""

    value: T
    source: Source
    note: str = ""


class EngineRow(_Record):
    """An engine to run, and the row of the paper's tables that it stands beside (none when empty)."""

    name: Identifier
    reported_as: str = ""


class Environment(_Record):
    """The machine on which the paper's own numbers were made, in its words."""

    description: str


class Training(_Record):
    """How the network is trained, the same for every engine."""

    optimizer: Setting[Literal["sgd", "rmsprop", "adam", "adamw"]]
    learning_rate: Setting[Annotated[float, Field(gt=0)]]
    momentum: Setting[Annotated[float, Field(ge=0, lt=1)]]
    batch_size: Setting[PositiveInt]
    epochs: Setting[PositiveInt]
    shuffle: Setting[bool]
    pixels: Setting[str]
    dtype: Setting[Literal["float32", "float64"]]
    threads: Setting[PositiveInt]


class Runs(_Record):
    """How often a profile runs what. Seeds count from 0; `engine_seeds` overrides them for single engines."""

    seeds: Setting[PositiveInt]
    memory_seeds: Setting[PositiveInt]
    memory_threads: Setting[PositiveInt]
    measures: Setting[list[Measure]]
    race_rounds: Setting[PositiveInt]
    race_threads: Setting[list[PositiveInt]]
    scaling_engines: Setting[list[str]]
    batch_sizes: Setting[list[PositiveInt]]
    sequence_lengths: Setting[list[PositiveInt]]
    engine_seeds: dict[str, Setting[PositiveInt]] = {}

    def seed_count(self, engine: str, measure: str = "time") -> int:
        """How many seeds `engine` runs for `measure`."""
        own = self.engine_seeds.get(engine)
        count = own.value if own else self.seeds.value
        return min(count, self.memory_seeds.value) if measure == "memory" else count


class Profiles(_Record):
    """The two sizes of a sweep: `full` as the paper did it, `quick` to see that everything works."""

    full: Runs
    quick: Runs


class Reported(_Record):
    """One thing a study reports: a number, a number per epoch, or words where it prints none.

    `quantity` carries its unit (`seconds_per_epoch`, `gibibytes_total`, `train_accuracy` as a fraction).
    `kind` is "paper" for what the paper prints and "rerun" for its authors' code run on another machine.
    """

    row: str
    quantity: Identifier | Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    where: str
    value: float | None = None
    by_epoch: list[float] = []
    words: str = ""
    precision: Literal["stated", "approximate", "words"] = "stated"
    kind: Literal["paper", "rerun"] = "paper"
    note: str = ""

    @model_validator(mode="after")
    def _one_content(self) -> Reported:
        given = [self.value is not None, bool(self.by_epoch), bool(self.words)]
        if sum(given) != 1:
            raise ValueError("give exactly one of value, by_epoch and words")
        if bool(self.words) != (self.precision == "words"):
            raise ValueError('precision = "words" goes with words, and only with words')
        return self


class Output(_Record):
    """A table or figure of the report: `producer` names the function that makes it."""

    id: Identifier
    producer: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    title: str
    reproduces: str = ""
    caption: str = ""


class Paper(_Record):
    """A study to reproduce, as its file in `experiments/papers` describes it."""

    format: Literal["twingrad-paper"]
    version: Literal[1]
    key: Identifier
    title: str
    authors: list[str]
    task: str
    model: Identifier
    dataset: Identifier
    environment: Environment
    engines: list[EngineRow]
    network: dict[str, Setting[Any]]
    training: Training
    runs: Profiles
    reported: list[Reported]
    tables: list[Output]
    figures: list[Output]

    @model_validator(mode="after")
    def _consistent(self) -> Paper:
        names = self.engine_names()
        for kind, given in (("engine", names), ("table", ids(self.tables)), ("figure", ids(self.figures))):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} given twice: {', '.join(twice)}")
        for profile in PROFILES:
            runs = self.runs_of(profile)
            for place, found in {
                "engine_seeds": runs.engine_seeds,
                "scaling_engines": runs.scaling_engines.value,
            }.items():
                unknown = sorted(set(found) - set(names))
                if unknown:
                    raise ValueError(f"runs.{profile}.{place}: {unknown[0]!r} is not among the engines")
        return self

    def engine_names(self) -> list[str]:
        """The engines to run, in the order of the tables' rows."""
        return [engine.name for engine in self.engines]

    def engine_for(self, row: str) -> str | None:
        """The engine that stands beside a reported row, or None."""
        return next((engine.name for engine in self.engines if engine.reported_as == row), None)

    def runs_of(self, profile: ProfileName) -> Runs:
        """The counts of a profile."""
        return self.runs.full if profile == "full" else self.runs.quick

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every network and training setting as (`network.units`, Setting), in file order."""
        for name, setting in self.network.items():
            yield f"network.{name}", setting
        for name in Training.model_fields:
            yield f"training.{name}", getattr(self.training, name)

    def reported_for(self, quantity: str, kind: str = "paper") -> list[Reported]:
        """What was reported of a quantity, in file order."""
        return [item for item in self.reported if item.quantity == quantity and item.kind == kind]

    def check_producers(self, tables: Collection[str], figures: Collection[str]) -> None:
        """Raise ConfigError for a table or figure that nothing produces."""
        for kind, outputs, known in (("tables", self.tables, tables), ("figures", self.figures, figures)):
            for index, output in enumerate(outputs):
                if output.producer not in known:
                    raise ConfigError(
                        f'paper {self.key}: {kind}[{index}] (id "{output.id}").producer: nothing produces '
                        f"{output.producer!r}{_did_you_mean(output.producer, known)}; "
                        f"known: {', '.join(sorted(known))}"
                    )


def ids(outputs: list[Output]) -> list[str]:
    """The ids of tables or figures, in order."""
    return [output.id for output in outputs]


def papers() -> list[str]:
    """The keys of all papers that can be run, sorted."""
    return sorted(path.stem for path in PAPERS_DIR.glob("*.toml"))


def load_paper(name: str | Path) -> Paper:
    """The paper with this key, or the one in this TOML file (a name that ends in `.toml`)."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"no paper file {path}")
    else:
        path = PAPERS_DIR / f"{name}.toml"
        if not path.is_file():
            known = papers()
            raise ConfigError(f"no paper {str(name)!r}{_did_you_mean(str(name), known)}; papers: {', '.join(known)}")
    try:
        text = toml.read(path)
    except toml.TomlError as error:
        raise ConfigError(f"{path}: {error}") from None
    return loads(text, source=str(path), expected_key=path.stem)


def loads(text: str, source: str = "<string>", expected_key: str | None = None) -> Paper:
    """A paper from TOML text; `source` names it in errors."""
    try:
        document = toml.parse(text)
    except toml.TomlError as error:
        raise ConfigError(f"{source}: {error}") from None
    try:
        paper = Paper.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_lines(error, document))) from None
    if expected_key is not None and paper.key != expected_key:
        raise ConfigError(f'{source}: key is "{paper.key}", expected "{expected_key}" as the file is named')
    return paper


def models() -> dict[str, Path]:
    """The model specs that come with the project, by name."""
    return {path.stem: path for path in sorted(MODELS_DIR.glob("*.toml"))}


def model_path(name: str) -> Path:
    """The spec file of a model that comes with the project."""
    known = models()
    if name not in known:
        raise ConfigError(f"no model {name!r}{_did_you_mean(name, known)}; models: {', '.join(known) or 'none'}")
    return known[name]


def _lines(error: ValidationError, document: dict[str, Any]) -> Iterator[str]:
    """One line per mistake: its place in the file, expected and actual."""
    for item in error.errors():
        place = _place(item["loc"], document)
        if item["type"] == "extra_forbidden":
            yield f"{place}: unknown key"
        elif item["type"] == "missing":
            yield f"{place}: missing"
        elif item["type"] == "value_error":
            yield f"{place}: {item['ctx']['error']}"
        else:
            yield f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}, found {item['input']!r}"


def _place(location: tuple[int | str, ...], document: Any) -> str:
    """`tables[1] (id "race").producer` for ("tables", 1, "producer"), without pydantic's own steps."""
    text, here = "", document
    for step in location:
        if isinstance(step, int):
            here = here[step] if isinstance(here, list) and step < len(here) else None
            label = here.get("id") or here.get("name") or here.get("row") if isinstance(here, dict) else None
            text += f"[{step}]" + (f' (id "{label}")' if label else "")
        elif isinstance(here, dict) or here is None:
            here = here.get(step) if isinstance(here, dict) else None
            text += f".{step}" if text else step
    return text or "the file"


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
