"""Paper files: one TOML per study, naming its model, dataset, settings, reported numbers, tables and figures.

A paper is data, not code: a new study is a new file beside this one (`experiments.papers.file` says how it is read).
Each setting carries its source (`paper`, `code` or `ours`), and what a study reported is kept apart from anything
measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)

from bridge import registry as engines
from bridge import spec as model_spec
from bridge import toml
from bridge.errors import SpecError, TwinGradError, printable, shown, suggestion
from bridge.session import OPTIMIZERS
from bridge.spec import ModelSpec
from experiments import data
from experiments.measures.measure import Measure
from experiments.measures.registry import MEASURES
from experiments.papers import file, network
from experiments.quantities import QUANTITIES

PAPERS_DIR = Path(__file__).parent
MODELS_DIR = PAPERS_DIR.parent / "models"
MOST_SHOWN = 20
"""Problems of one file that a message names."""

Source = Literal["paper", "code", "ours"]
ProfileName = Literal["full", "quick", "sample"]
if TYPE_CHECKING:  # type checkers read no literals that are computed
    OptimizerName: TypeAlias = str
    MeasureName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    MeasureName = Literal[tuple(MEASURES)]
PixelScale = Literal["0 to 1", "normalised"]
PROFILES: tuple[ProfileName, ...] = ("full", "quick", "sample")

T = TypeVar("T")

MOST_EPOCHS, MOST_SEEDS, MOST_ROUNDS, MOST_THREADS = 10_000, 1_000, 10_000, 1_024
MOST_ROWS = 100_000_000
"""Of a mini-batch, an evaluation, or a series of steps or of elements."""
LARGEST_SEED = 2**63 - 1
MOST_ITEMS = 1_000
"""Of every list and table of a paper's file."""
LONGEST_TEXT = 10_000
"""Characters of every text in it."""


def _quantity(name: str) -> str:
    if name not in QUANTITIES:
        near = suggestion(name, QUANTITIES)
        raise ValueError(f"no quantity {shown(name)}{near}; quantities: {', '.join(QUANTITIES)}")
    return name


QuantityName = Annotated[str, AfterValidator(_quantity)]
Epochs = Annotated[int, Field(ge=1, le=MOST_EPOCHS)]
Seeds = Annotated[int, Field(ge=1, le=MOST_SEEDS)]
Rounds = Annotated[int, Field(ge=1, le=MOST_ROUNDS)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=100)]
ModelName = Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9-]*|.*\.toml)$", max_length=1_000)]
"""A model that comes with the project, or a spec's file, from the folder of the paper's file."""
Items = Annotated[list[T], Field(max_length=MOST_ITEMS)]
Table = Annotated[dict[str, T], Field(max_length=MOST_ITEMS)]


class PaperFileError(TwinGradError):
    """A paper file that cannot be used: names the file, the place in it, what was expected and found."""


class _Record(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT
    )


class Setting(_Record, Generic[T]):
    """One value with the place it comes from: the paper's text, its authors' code, or our own choice.

    A bare value is our own.
    """

    value: T
    source: Source = "ours"
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, given: Any) -> Any:
        return given if isinstance(given, dict | Setting) else {"value": given}


class EngineRow(_Record):
    """An engine to run, and the row of the paper's tables that it is shown beside (none when empty)."""

    name: Identifier
    reported_as: str = ""
    optional: bool = False
    """Whether it has a row only where something was measured of it."""


class Environment(_Record):
    """The machine on which the paper's own numbers were made, in its words."""

    description: str


class Training(_Record):
    """How the network is trained, the same for every engine."""

    optimizer: Setting[OptimizerName]
    learning_rate: Setting[Rate]
    momentum: Setting[Annotated[float, Field(ge=0, lt=1)]] | None = None
    batch_size: Setting[Count]
    epochs: Setting[Epochs]
    shuffle: Setting[bool]
    pixels: Setting[PixelScale] | None = None
    """How image data are scaled; none for text."""
    dtype: Setting[Literal["float32", "float64"]]
    threads: Setting[Threads]
    train_evaluation_rows: Setting[Count] | None = None
    """On how many of the training rows (the first ones) accuracy and loss are evaluated; all when absent."""


class NativeTraining(_Record):
    """How an engine trains from its own initialisation: what differs from `Training`, as the study had it."""

    model: Setting[ModelName] | None = None
    optimizer: Setting[OptimizerName] | None = None
    learning_rate: Setting[Rate] | None = None
    batch_size: Setting[Count] | None = None
    pixels: Setting[PixelScale] | None = None

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """What differs, by name."""
        for name in type(self).model_fields:
            setting = getattr(self, name)
            if setting is not None:
                yield name, setting


class Variant(_Record):
    """Another network on the same data with the same training, to be compared with the paper's."""

    id: Identifier
    title: str
    model: Setting[ModelName]


class Family(_Record):
    """A network in several sizes, trained in one way, on rows that are drawn for it."""

    id: Identifier
    title: str
    model: ModelName
    optimizer: OptimizerName
    learning_rate: Rate
    over: str
    """What the sizes are numbers of, in words."""
    sizes: Annotated[dict[Annotated[str, Field(pattern=r"^[1-9][0-9]*$")], Table[Any]], Field(max_length=MOST_ITEMS)]
    """By its name what differs from the model, as `"<layer id>.<key>"` or `"input.shape"`: the smallest size first."""


class WholeTraining(_Record):
    """A network and how a study trains it, on rows that are drawn for it, as many as the study trains on."""

    id: Identifier
    """The key of the study."""
    title: str
    model: ModelName
    optimizer: OptimizerName
    learning_rate: Rate
    batch_size: Count
    epochs: Epochs
    rows: Count
    """Training rows."""


KINDS: dict[str, Any] = {
    "seeds": Setting[Seeds],
    "seeds by engine": Table[Setting[Seeds]],
    "epochs": Setting[Epochs],
    "rounds": Setting[Rounds],
    "count": Setting[Count],
    "counts": Setting[Items[Count]],
    "threads": Setting[Threads],
    "threads list": Setting[Items[Threads]],
    "engines": Setting[Items[str]],
    "names": Setting[Items[str]],
}
"""What the options of a measure may be."""


class RunsOfAll(_Record):
    """How often a profile runs what, apart from the measures' own options.

    Seeds count from 0; `engine_seeds` allows single engines fewer of them.
    """

    engines: Setting[Items[str]] | None = None
    """The engines that run at all; those of the paper when absent."""
    epochs: Setting[Epochs] | None = None
    """Fewer epochs than `training` says."""
    seeds: Setting[Seeds]
    engine_seeds: Table[Setting[Seeds]] = {}
    measures: Setting[Items[MeasureName]]

    @model_validator(mode="after")
    def _usable(self) -> RunsOfAll:
        for measure in MEASURES.values():
            if problem := measure.check(self.option):
                raise ValueError(problem)
        return self

    def option(self, name: str) -> Any:
        """The value of a key; None where there is none."""
        setting = getattr(self, name)
        return setting.value if isinstance(setting, Setting) else setting

    def seed_count(self, engine: str, measure: Measure, asked: int | None = None) -> int:
        """How many seeds an engine runs for a measure; `asked` replaces its first limit."""
        limits = [self._seeds(name, engine) for name in measure.seeds]
        planned = min(limits)
        return planned if asked is None or not planned else min([asked, *limits[1:]])

    def _seeds(self, name: str, engine: str) -> int:
        """The seeds of an option, or the fewer of a single engine."""
        by_engine = getattr(self, name.replace("seeds", "engine_seeds"), {})
        given = [self.option(name), by_engine[engine].value if engine in by_engine else None]
        return min((count for count in given if count is not None), default=0)

    def engines_of(self, measure: Measure) -> list[str] | None:
        """The engines that alone run a measure; None when it is all of them."""
        found: list[str] | None = self.option(measure.engines) if measure.engines else None
        return [] if found is None and measure.only_listed else found

    def engine_names(self) -> dict[str, Collection[str]]:
        """The engines that each key names."""
        found: dict[str, Collection[str]] = {"engines": self.option("engines") or [], "engine_seeds": self.engine_seeds}
        for name, kind in _OPTIONS.items():
            if kind in ("engines", "seeds by engine"):
                found[name.removesuffix("?")] = self.option(name.removesuffix("?")) or ()
        return found


_OPTIONS = {name: kind for measure in MEASURES.values() for name, kind in measure.options.items()}
"""The options of all measures with their kinds; one that may be left out ends with a question mark."""


def _field(name: str, kind: str) -> tuple[Any, Any]:
    """A measure's option as a field: its type, and its default or that it must be given."""
    if kind == "seeds by engine":
        return KINDS[kind], {}
    return (KINDS[kind] | None, None) if name.endswith("?") else (KINDS[kind], ...)


if TYPE_CHECKING:
    Runs: TypeAlias = RunsOfAll
else:
    _fields: dict[str, Any] = {name.removesuffix("?"): _field(name, kind) for name, kind in _OPTIONS.items()}
    Runs = create_model("Runs", __base__=RunsOfAll, **_fields)
    """How often a profile runs what, with the options of every measure."""


class Profiles(_Record, Generic[T]):
    """The sizes of what is run: `full` as the paper did it, `quick` to see that everything works, `sample` for the
    embedded sample, which is small and of which nothing is concluded. The latter two need to say only what differs from
    `full`.
    """

    full: T
    quick: T
    sample: T

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("full"), dict):
            return given
        own = {name: given.get(name, {}) for name in ("quick", "sample")}
        return given | {name: {**given["full"], **runs} for name, runs in own.items() if isinstance(runs, dict)}

    def profile(self, name: ProfileName) -> T:
        """The sizes of a profile."""
        found: T = getattr(self, name)
        return found


class MicrobenchmarkRuns(_Record):
    """How much a profile measures of the micro-benchmarks: see `experiments.microbenchmarks.measure.Sizes`."""

    systems: Setting[Items[Identifier]] | None = None
    """The systems that run at all; all of the paper's when absent."""
    rounds: Setting[Rounds]
    samples: Setting[Rounds]
    seconds: Setting[Annotated[float, Field(gt=0, le=3_600)]]
    array: Setting[Count]
    rows: Setting[Count]
    chunked: Setting[Count]
    chunks: Setting[Items[Count]]
    chunk_rounds: Setting[Rounds]
    lengths: Setting[Items[Count]]


class Microbenchmarks(Profiles[MicrobenchmarkRuns]):
    """Small functions, each alone and with its gradient, in systems that need not be engines: see
    `experiments.microbenchmarks`.
    """

    systems: Setting[Items[Identifier]]


class Reported(_Record):
    """One thing a study reports: a number, a number per epoch, or words where it prints none.

    `quantity` carries its unit (`seconds_per_epoch`, `gibibytes_total`, `train_accuracy` as a fraction).
    `kind` is "paper" for what the paper prints and "rerun" for what somebody got from its authors' code once, which no
    run here can make again: every table and text that shows it says so.
    """

    row: str
    quantity: Identifier | Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    where: str
    value: float | None = None
    by_epoch: Items[float] = []
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


class Cited(_Record):
    """A number that a study cites from other work, with the table that shows it."""

    table: Identifier
    row: str
    column: str
    where: str
    value: float | None = None


class Claim(_Record):
    """Something a study says, and what decides whether it holds here: a closed set of tests on tidy results.

    The value tested is `quantity` of `engine`; with `than` it is that of `engine` divided by that of `than` (for
    accuracies and losses: the difference). The claim holds when the value lies between `low` and `high`. Where one of
    the two is an engine of ours, it stands for the study's own engine, which is not run here (or for what `stands_for`
    names): such a claim is never said to be reproduced, only to hold for ours. One that no result can decide says so
    in `untestable`.
    """

    id: Identifier
    text: str
    where: str
    quantity: QuantityName | None = None
    engine: str = ""
    than: str = ""
    of: str = ""
    """The technique ("all": all of them together), the variant, or the function of the micro-benchmarks ("all": the
    geometric mean over them) that a quantity is about."""
    stands_for: str = "the study's own engine"
    """What an engine of ours stands for in this claim."""
    low: float | None = None
    high: float | None = None
    untestable: str = ""

    @model_validator(mode="after")
    def _one_test(self) -> Claim:
        if bool(self.untestable) == (self.quantity is not None):
            raise ValueError("give either a quantity to test or the reason why the claim is untestable")
        if self.quantity is not None and (not self.engine or (self.low is None and self.high is None)):
            raise ValueError("a test needs an engine and at least one of low and high")
        about = [name for name, quantity in QUANTITIES.items() if quantity.about]
        if (self.quantity in about) != bool(self.of):
            raise ValueError(f"`of` goes with {', '.join(about)}, and only with them")
        return self


class Output(_Record):
    """A table or figure of the report: `producer` names the function that makes it."""

    id: Identifier
    producer: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    title: str
    reproduces: str = ""
    caption: str = ""
    quantities: Items[QuantityName] = []
    """What the producers `quantities` and `bars` show."""


class Paper(_Record):
    """A study to reproduce, as its file in `experiments/papers` describes it."""

    format: Literal["twingrad-paper"]
    version: Literal[1, 2]
    key: Identifier
    title: str
    authors: Items[str]
    task: str
    model: ModelName
    dataset: Identifier
    runs_of_paper: Identifier | None = None
    """The study whose runs this one shows, since it trains the same network in the same way."""
    environment: Environment
    engines: Items[EngineRow]
    data: Table[Setting[Any]] = {}
    """Options of the dataset's loader."""
    pretrained: Table[Setting[str]] = {}
    """Parameters that start from what comes with the dataset: parameter name -> name there."""
    network: Table[Setting[Any]]
    training: Training
    own: Table[NativeTraining] = {}
    """The engines that also train from their own initialisation, and how."""
    variants: Items[Variant] = []
    families: Items[Family] = []
    series: Items[Family] = []
    """Networks whose time is followed over their size, each in one thing that grows."""
    trainings: Items[WholeTraining] = []
    """Networks of studies that are trained as a whole, start-up included."""
    runs: Profiles[Runs]
    reproduced: Table[ProfileName] = {}
    """Which profiles `reproduce` runs in the place of others: of a study whose own take hours."""
    microbenchmarks: Microbenchmarks | None = None
    reported: Items[Reported]
    cited: Items[Cited] = []
    claims: Items[Claim] = []
    tables: Items[Output]
    figures: Items[Output]
    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """The file that it was read from; None for a text."""
        return self._file

    @property
    def comes_along(self) -> bool:
        """Whether it comes with the project; False for a paper of the user's own."""
        return self._file is not None and self._file.parent.resolve() == PAPERS_DIR.resolve()

    @model_validator(mode="after")
    def _consistent(self) -> Paper:
        names = self.engine_names()
        for kind, given in (
            ("engine", names),
            ("table", ids(self.tables)),
            ("figure", ids(self.figures)),
            ("claim", ids(self.claims)),
            ("variant", ids(self.variants)),
            ("family", ids(self.families)),
            ("series", ids(self.series)),
            ("training", ids(self.trainings)),
        ):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} given twice: {', '.join(twice)}")
        for profile in PROFILES:
            for place, found in self.runs_of(profile).engine_names().items():
                unknown = sorted(set(found) - set(names))
                if unknown:
                    raise ValueError(f"runs.{profile}.{place}: {unknown[0]!r} is not among the engines")
            networks = {f"{one.id}-{size}" for one in self.families for size in one.sizes}
            for option in ("sizes_networks", "sizes_ablation_networks"):
                if unknown := sorted({*(self.runs_of(profile).option(option) or [])} - networks):
                    raise ValueError(f"runs.{profile}.{option}: {unknown[0]!r} is in no family")
        for name in self.own:
            if name not in names:
                raise ValueError(f"own: {name!r} is not among the engines")
        return self

    def engine_names(self) -> list[str]:
        """The engines to run, in the order of the tables' rows."""
        return [engine.name for engine in self.engines]

    def runs_of(self, profile: ProfileName) -> Runs:
        """The counts of a profile."""
        return self.runs.profile(profile)

    def epochs(self, profile: ProfileName) -> int:
        """How many epochs a profile trains."""
        fewer = self.runs_of(profile).epochs
        return fewer.value if fewer else self.training.epochs.value

    def seeds_of(self, profile: ProfileName, measure: Measure, engine: str, asked: int | None = None) -> int:
        """How many seeds an engine runs for a measure in a profile; `asked`: of as many as the user asks for."""
        if measure.native and engine not in self.own:
            return 0
        return self.runs_of(profile).seed_count(engine, measure, asked)

    def loader_options(self) -> dict[str, Any]:
        """What the dataset's loader is given."""
        return {name: setting.value for name, setting in self.data.items()}

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every setting of data, network and training as (`network.units`, Setting), in file order."""
        for part in ("data", "pretrained", "network"):
            for name, setting in getattr(self, part).items():
                yield f"{part}.{name}", setting
        for name in Training.model_fields:
            setting = getattr(self.training, name)
            if setting is not None:
                yield f"training.{name}", setting
        for engine, own in self.own.items():
            for name, setting in own.settings():
                yield f"own.{engine}.{name}", setting

    def reported_for(self, quantity: str, kind: str = "paper") -> list[Reported]:
        """What was reported of a quantity, in file order."""
        return [item for item in self.reported if item.quantity == quantity and item.kind == kind]

    def model_file(self, name: str | None = None) -> Path:
        """The spec file of the paper's model, or of another one that the paper names."""
        name = name or self.model
        if not name.endswith(".toml"):
            return model_path(name)
        return (self._file.parent if self._file else Path()) / name

    def spec(self, name: str | None = None) -> ModelSpec:
        """The spec of the paper's model, or of another one that the paper names."""
        return _loaded(self.model_file(name))

    def sized(self, family: Family, size: str) -> ModelSpec:
        """The spec of a family in one of its sizes."""
        spec = self.spec(family.model)
        given = toml.parse(toml.read(self.model_file(family.model)))
        return network.changed(spec, given, family.sizes[size], f"{family.id}-{size}")

    def check(self, source: str) -> None:
        """Raise PaperFileError for what does not fit together with other files; `source` names this one.

        Those are the models, the data set's options, the registry of engines, and the report's producers.
        """
        problems: list[str] = []
        try:
            spec = self.spec()
            others = {f"variants.{item.id}.model": self.spec(item.model.value) for item in self.variants}
            others |= {f"own.{name}.model": self.spec(own.model.value) for name, own in self.own.items() if own.model}
            for family in (*self.families, *self.series):
                for size in family.sizes:
                    self.sized(family, size)  # or it is no network
            for training in self.trainings:
                self.spec(training.model)
        except (PaperFileError, SpecError) as error:
            raise PaperFileError(f"{source}: {error}") from None
        for place, other in others.items():
            if (other.input, other.target) != (spec.input, spec.target):
                problems.append(f"{place}: {other.name} does not read and compare the same data as {spec.name}")
        for key, setting in self.network.items():
            if problem := network.disagreement(key, setting.value, spec):
                problems.append(f"network.{_short(key)}: {problem} (model {spec.name})")
        for key in self.pretrained:
            if key not in spec.parameters():
                problems.append(
                    f"pretrained.{_short(key)}: model {spec.name} has no such parameter"
                    f"{suggestion(key, spec.parameters())}; it has {', '.join(spec.parameters())}"
                )
        for index, row in enumerate(self.engines):
            if row.name not in engines.names():
                near = suggestion(row.name, engines.names())
                problems.append(f"engines[{index}].name: no engine {shown(row.name)}{near}")
        problems += self._wrong_data()
        if self.runs_of_paper and self.runs_of_paper not in paper_keys():
            near = suggestion(self.runs_of_paper, paper_keys())
            problems.append(f"runs_of_paper: no paper {shown(self.runs_of_paper)}{near}")
        if problems:
            raise PaperFileError(f"{source}: {_joined(iter(problems))}")

    def _wrong_data(self) -> Iterator[str]:
        if self.dataset not in data.LOADERS:
            near = suggestion(self.dataset, data.LOADERS)
            yield f"dataset: no data set {shown(self.dataset)}{near}; data sets: {', '.join(sorted(data.LOADERS))}"
            return
        options = data.options(self.dataset)
        for key in self.data:
            if key not in options:
                near, known = suggestion(key, options), ", ".join(options) or "none"
                yield f"data.{_short(key)}: {self.dataset} has no such option{near}; options: {known}"

    def check_producers(self, tables: Collection[str], figures: Collection[str]) -> None:
        """Raise PaperFileError for a table or figure that nothing produces."""
        for kind, outputs, known in (("tables", self.tables, tables), ("figures", self.figures, figures)):
            for index, output in enumerate(outputs):
                if output.producer not in known:
                    raise PaperFileError(
                        f'paper {self.key}: {kind}[{index}] (id "{output.id}").producer: nothing produces '
                        f"{output.producer!r}{suggestion(output.producer, known)}; "
                        f"known: {', '.join(sorted(known))}"
                    )


def ids(outputs: Sequence[Output | Claim | Variant | Family | WholeTraining]) -> list[str]:
    """The ids of tables, figures, claims, variants, families or whole trainings, in order."""
    return [output.id for output in outputs]


def paper_keys() -> list[str]:
    """The keys of all papers that can be run, sorted."""
    return sorted(path.stem for path in PAPERS_DIR.glob("[!_]*.toml"))


def keys_of_others() -> list[str]:
    """The keys of those papers that reproduce a study of others, and so report something; the rest are our own."""
    return [key for key in paper_keys() if load_paper(key).reported]


def load_paper(name: str | Path) -> Paper:
    """The paper with this key, or the one in this TOML file (a name that ends in `.toml`), checked in full."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.exists():
            raise PaperFileError(f"no paper file {path}")
    else:
        path = PAPERS_DIR / f"{name}.toml"
        if str(name) not in paper_keys():
            known = paper_keys()
            raise PaperFileError(
                f"no paper {shown(str(name))}{suggestion(str(name), known)}; papers: {', '.join(known)}"
            )
    try:
        text = toml.read(path)
    except toml.TomlError as error:
        raise PaperFileError(f"{path}: {error}") from None
    paper = loads(text, source=str(path), expected_key=path.stem)
    paper._file = path
    if not paper.comes_along and paper.key in paper_keys():
        raise PaperFileError(
            f'{path}: key is "{paper.key}", and a paper that comes with TwinGrad has it: choose another'
        )
    paper.check(str(path))
    return paper


def loads(text: str, source: str = "<string>", expected_key: str | None = None) -> Paper:
    """A paper from TOML text, without looking at other files; `source` names it in errors."""
    try:
        document = file.document(text)
    except (toml.TomlError, file.RowError) as error:
        raise PaperFileError(f"{source}: {error}") from None
    try:
        paper = Paper.model_validate(document)
    except ValidationError as error:
        raise PaperFileError(f"{source}: {_joined(_lines(error, document))}") from None
    if expected_key is not None and paper.key != expected_key:
        raise PaperFileError(f'{source}: key is "{paper.key}", expected "{_short(expected_key)}" as the file is named')
    return paper


def _loaded(path: Path) -> ModelSpec:
    """The spec in a file, parsed again only when its text has changed: a study asks for it at every job."""
    try:
        return _parsed(toml.read(path), str(path))
    except toml.TomlError:
        return model_spec.load(path)  # which says what is wrong


@cache
def _parsed(text: str, source: str) -> ModelSpec:
    return model_spec.loads(text, source)


def models() -> dict[str, Path]:
    """The model specs that come with the project, by name."""
    return {path.stem: path for path in sorted(MODELS_DIR.glob("*.toml"))}


def model_path(name: str) -> Path:
    """The spec file of a model that comes with the project."""
    known = models()
    if name not in known:
        raise PaperFileError(f"no model {shown(name)}{suggestion(name, known)}; models: {', '.join(known) or 'none'}")
    return known[name]


def _joined(problems: Iterator[str]) -> str:
    """The first problems of many, and that there are more."""
    first = list(itertools.islice(problems, MOST_SHOWN))
    rest = next(problems, None)
    return "; ".join(first) + ("; and more" if rest is not None else "")


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
            yield f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}, found {shown(item['input'])}"


def _place(location: tuple[int | str, ...], document: Any) -> str:
    """`tables[1] (id "race").producer` for ("tables", 1, "producer"), without pydantic's own steps."""
    text, here = "", document
    for step in location:
        if isinstance(step, int):
            here = here[step] if isinstance(here, list) and step < len(here) else None
            label = here.get("id") or here.get("name") or here.get("row") if isinstance(here, dict) else None
            text += f"[{step}]" + (f' (id "{_short(label)}")' if isinstance(label, str) else "")
        elif isinstance(here, dict) or here is None:
            here = here.get(step) if isinstance(here, dict) else None
            text += f".{_short(step)}" if text else _short(step)
    return text or "the file"


def _short(key: str) -> str:
    """A key of the user's, cut where it is long."""
    return printable(key if len(key) <= 80 else f"{key[:80]}…")
