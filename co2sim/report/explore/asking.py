"""What a server is asked, and its answers, as plain values; runs in its own processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from inspect import getdoc
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from co2sim.catalog import load_cluster, load_model, names
from co2sim.catalog.facts import Kind, Tree, key_of, rates, read
from co2sim.common.errors import CatalogError, Co2simError, OptionError, nearest
from co2sim.prediction import driver
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.step_memory import StepMemory
from co2sim.report.explore.exploration import (
    MAX_STRATEGIES,
    Control,
    Exploration,
    controls,
    figures,
    lost,
)
from co2sim.report.explore.page import asked
from co2sim.report.html import render
from co2sim.report.study_page import Study, page
from co2sim.report.text.cases import of_strategies
from co2sim.report.text.memory import fitting
from co2sim.strategies import STRATEGIES, strategy_options
from co2sim.studies.candidates import command_of, with_tokens
from co2sim.studies.grid import gpu_counts, with_changes

_LONG = 1000
_MANY = 200
Text = Annotated[str, StringConstraints(max_length=_LONG)]


class PageView(BaseModel):
    """What a page asks about. `options` are fields of a case, `set` overrides; all are texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: Text
    model: Text
    strategies: Annotated[tuple[Text, ...], Field(max_length=_MANY)]
    tokens: float | None = None
    gpus: int | None = None
    options: Annotated[dict[Text, Text], Field(max_length=_MANY)] = {}
    set: Annotated[dict[Text, Text], Field(max_length=_MANY)] = {}


Settings = Annotated[dict[Text, Text], Field(max_length=_MANY)]


class Place(BaseModel):
    """A view, what sliders set besides, and the place of one of its strategies."""

    model_config = ConfigDict(extra="forbid")

    view: PageView
    settings: Settings
    place: Annotated[int, Field(ge=0, lt=MAX_STRATEGIES)]


class Positions(BaseModel):
    """A view, and what sliders set besides, once or several times."""

    model_config = ConfigDict(extra="forbid")

    view: PageView
    settings: Annotated[list[Settings], Field(min_length=1, max_length=64)]


OPTIONS = tuple(
    one.name
    for one in fields(Question)
    if "option" in one.metadata and one.metadata["option"].group in {"job", "pipeline"}
    if one.name != "overrides"
)
"""Fields of a case that a view may set."""
_GIVEN = ("cluster", "model", "strategy")
PARTS: Mapping[str, Kind] = {"gpu": "gpus", "failures": "failures"}
"""What a cluster, or a setting, may name instead of spelling it out."""


@dataclass(frozen=True)
class Files:
    """Files that may be asked for besides the catalog: their paths, by the names in a page."""

    clusters: Mapping[str, str]
    models: Mapping[str, str]
    parts: frozenset[str] = frozenset()
    """GPUs and failures that the command line gave, by name or file."""

    def cluster(self, name: str) -> str:
        """The file, or the entry of the catalog. Raises CatalogError for any other file."""
        return _known(name, "cluster", self.clusters, "clusters")

    def model(self, name: str) -> str:
        """As `cluster`."""
        return _known(name, "model", self.models, "models")

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise Co2simError for settings that would read another file."""
        for path, value in settings.items():
            if path in _GIVEN:
                raise OptionError(f"{path} has its own field; it cannot be set besides")
            if path in PARTS and value not in self.parts:
                _known(value, path, {}, PARTS[path])


def check_parts(tree: Tree) -> None:
    """Raise CatalogError for the cluster of a stranger that names other files."""
    for path, kind in PARTS.items():
        stated = tree.get(path)
        name = stated.get("value") if isinstance(stated, dict) else stated
        if isinstance(name, str):
            _known(name, path, {}, kind)


def _known(name: str, what: str, files: Mapping[str, str], kind: Kind) -> str:
    if name in files:
        return files[name]
    key, catalog = key_of(kind, name), names(kind)
    if key in catalog:
        return key
    raise CatalogError(f"unknown {what} {name!r}; {nearest(name, [*files, *catalog])}")


def question_of(view: PageView, files: Files, goal: Goal) -> Exploration:
    """The question that a view asks. Raises Co2simError for one that makes no sense."""
    unknown = next((name for name in view.options if name not in OPTIONS), None)
    if unknown:
        raise OptionError(f"nothing is called {unknown!r}; {nearest(unknown, OPTIONS)}")
    options = {name: text.strip() for name, text in view.options.items() if text.strip()}
    job = Question(
        cluster=files.cluster(view.cluster),
        model=files.model(view.model),
        strategy="",
        gpus=view.gpus,
    )
    sets = {path.strip(): text for path, text in view.set.items()}
    files.check(sets)
    if view.gpus is not None:
        gpu_counts(with_changes(job, sets), [view.gpus])
    return Exploration(
        with_changes(job, OPEN_BATCH | options | sets), view.strategies, view.tokens, goal
    )


def gpu_of(cluster: str) -> str:
    """The GPU that the file of a cluster names; empty where it spells it out."""
    stated = read("clusters", cluster).get("gpu")
    named = stated.get("value") if isinstance(stated, dict) else stated
    return named if isinstance(named, str) else ""


def _form(strategy: Any) -> dict[str, Any]:
    """The name of a strategy, and its options that are not as usual, as texts."""
    usual = type(strategy)()
    changed = {
        option: getattr(strategy, option)
        for option, _, _ in strategy_options(type(strategy))
        if getattr(strategy, option) != getattr(usual, option)
    }
    texts = {name: "none" if v is None else str(v).lower() for name, v in changed.items()}
    return {"name": strategy.name, "options": texts}


@cache
def catalog() -> dict[str, Any]:
    """What can be chosen from: names with what they are, and strategies with their options."""
    kinds: tuple[Kind, ...] = ("clusters", "models", "gpus", "stacks")
    listed: dict[str, Any] = {
        kind: [(name, str(read(kind, name)["name"])) for name in names(kind)] for kind in kinds
    }
    prices = [(name, f"{rate.value}, {rate.date}") for name, rate in rates("prices").items()]
    made = {
        name: {
            "what": (getdoc(kind) or "").splitlines()[0],
            "options": [
                {
                    "name": option,
                    "usual": usual,
                    "number": "number" in allowed,
                    "words": [word for word in allowed.split(", ") if "number" not in word],
                }
                for option, usual, allowed in strategy_options(kind)
            ],
        }
        for name, kind in STRATEGIES.items()
    }
    return {"prices": prices, "strategies": made} | listed


class Asker:
    """Answers in a process; what it has read and simulated is kept."""

    def __init__(self, files: Files, goal: Goal) -> None:
        self.files, self.goal = files, goal
        self._question = lru_cache(16)(self._read)
        self._figures = lru_cache(4096)(self._simulated)

    def _read(self, text: str) -> Exploration:
        return question_of(PageView.model_validate_json(text), self.files, self.goal)

    def question(self, view: PageView) -> Exploration:
        """The question, kept."""
        return self._question(view.model_dump_json())

    def check(self, view: PageView) -> None:
        """Raise Co2simError for what cannot be read."""
        question_of(view, self.files, self.goal).case(0, {}).load()

    @staticmethod
    def check_file(kind: str, path: str) -> None:
        """Raise Co2simError unless the file of a stranger is a cluster, or a model."""
        if kind == "cluster":
            check_parts(read("clusters", path))
            load_cluster(path)
        else:
            load_model(path)

    def begin(self, view: PageView) -> dict[str, Any]:
        """The controls, and every number with its source."""
        question = self.question(view)
        hardware, trained = question.case(0, {}).load()
        facts = [("", fact) for fact in hardware.facts]
        facts += [("model.", fact) for fact in trained.facts]
        sliders: list[Control] = controls(question)
        gpu = question.job.overrides.get("gpu") or gpu_of(str(question.job.cluster))
        return {
            "asked": asked(question, sliders),
            "strategies": [_form(strategy) for strategy in question.parsed],
            "gpu": gpu,
            "names": [hardware.value.name, trained.value.name],
            "facts": [{**asdict(fact), "path": before + fact.path} for before, fact in facts],
        }

    def figures(
        self, view: PageView, settings: Sequence[Mapping[str, str]], places: Sequence[int]
    ) -> list[list[Any]]:
        """For each of the settings, the figures of these strategies, or why there are none."""
        for setting in settings:
            self.files.check(setting)
        text = view.model_dump_json()
        return [
            [self._figures(text, index, tuple(sorted(setting.items()))) for index in places]
            for setting in settings
        ]

    def _simulated(self, text: str, index: int, settings: tuple[tuple[str, str], ...]) -> Any:
        try:
            question = self._question(text)
            case = question.loaded(index, dict(settings))
            result = driver.run(case, progress=False)
        except Co2simError as error:
            named = self._question(text).title(index, dict(settings))
            return {"error": " ".join(str(error).split()), "strategy": named}
        taken = lost(case, result)
        return {
            **asdict(figures(case, result, question.goal)),
            **(asdict(taken) if taken else {"lost": None}),
            "notes": [*result.warnings, *result.notes],
        }

    def fitting(self, view: PageView, settings: Mapping[str, str], index: int) -> list[str]:
        """What would fit in memory instead of a strategy that does not: a line for each change."""
        self.files.check(settings)
        case = driver.resolve_auto(self.question(view).loaded(index, settings))
        heading, rows = fitting(StepMemory(case, case))
        return [f"{heading}: {'; '.join(f'{change} ({size})' for change, size in rows)}"]

    def commands(self, view: PageView, settings: Mapping[str, str]) -> list[str]:
        """What repeats the figures, a command for each strategy."""
        self.files.check(settings)
        question = self.question(view)
        cases = (question.case(index, settings) for index in range(len(view.strategies)))
        return [with_tokens(command_of(case), view.tokens, self.goal) for case in cases]

    def report(self, view: PageView, settings: Mapping[str, str]) -> bytes:
        """The page of `co2sim report` about a view: its strategies, on the GPUs that are set."""
        self.files.check(settings)
        question = self.question(view)
        cases = [question.case(index, settings) for index in range(len(view.strategies))]
        results = [driver.run(case, progress=False) for case in cases]
        shown = Study(
            cases=cases,
            results=results,
            goal=question.goal,
            tokens=view.tokens,
            screen=of_strategies(cases, results, question.goal, view.tokens),
            comparisons=(),
            command="\n".join(self.commands(view, settings)),
            panels=[view.cluster] * len(cases),
        )
        return render(page(shown))
