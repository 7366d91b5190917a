"""The log of a training: a row per logging interval, and its settings."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from pydantic import TypeAdapter, ValidationError

from co2sim.common.errors import CatalogError, OptionError
from co2sim.common.files import MAX_RECORD_BYTES, text_of, write_atomically
from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.common.validation import first_problem
from realrun.train.constants import Estimates
from realrun.train.folder import LOG, RECORD
from realrun.train.settings import TrainSettings

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """Where a training stands after a step.

    `tokens` (images or clouds, in other tasks than text) are those of all ranks. `seconds` are on
    rank 0's clock, without validation and checkpoints. `train_loss` is rank 0's own, averaged over
    the steps since the row before: it costs no communication. `validation_loss` and `accuracy` are
    those of the mean of all workers' parameters; None where they were not taken. The rest is what
    the outer step tells: see `realrun.algorithms`. What the losses are, the task says.
    """

    step: int
    tokens: int
    seconds: float
    train_loss: float
    lr: float
    validation_loss: float | None = None
    accuracy: float | None = None
    rounds: int | None = None
    penalty: float | None = None
    clipped: float | None = None
    waited: float | None = None
    bytes_sent: int | None = None
    late: int | None = None
    delay: int | None = None
    clip_residual: float | None = None
    rounding_residual: float | None = None
    running_residual: float | None = None
    tau: int | None = None


_NAMES = tuple(field.name for field in fields(LogRow))
OF_OUTER_STEP = _NAMES[_NAMES.index("rounds") :]
"""Columns that an outer step tells, by their names in `Stats`."""
_ROW = TypeAdapter(LogRow)


@dataclass(frozen=True, slots=True)
class History:
    """A training as one rank saw it. `stopped` if it ended before its last step.

    `facts` say what the data, the model and the machine are. `estimates` are there if asked for.
    """

    settings: TrainSettings
    rows: tuple[LogRow, ...]
    facts: Mapping[str, Any]
    stopped: bool = False
    estimates: Estimates | None = None

    @property
    def chosen(self) -> TrainSettings:
        """The settings, with the tau that the training has chosen."""
        return self.settings.chosen(self.rows[-1].tau if self.rows else None)

    @property
    def figures(self) -> dict[str, Any]:
        """The last row, the last and the best validation loss, and the speed."""
        seen = [row for row in self.rows if row.validation_loss is not None]
        if not self.rows:
            return {"step": 0}
        row = self.rows[-1]
        last = asdict(row) | self._waiting(row)
        if seen:
            last |= {"validation_loss": seen[-1].validation_loss, "accuracy": seen[-1].accuracy}
        return {
            "strategy": self.settings.name,
            **last,
            "best_validation_loss": min(
                (row.validation_loss for row in seen if row.validation_loss is not None),
                default=None,
            ),
            "tokens_per_s": last["tokens"] / last["seconds"] if last["seconds"] else None,
        }

    def _waiting(self, row: LogRow) -> dict[str, Any]:
        """How many averages there were, and the share of the time that passed waiting for them."""
        if row.rounds is None or row.waited is None:
            return {"averages": None, "waiting_share": None}
        fragments = self.facts.get("outer_step", {}).get("fragments") or 1
        share = row.waited / row.seconds if row.seconds else 0.0
        return {"averages": row.rounds * fragments, "waiting_share": share}


class Log:
    """Rows, in memory and, if there is a folder, in its log.csv: each is there once it is added."""

    def __init__(self, folder: Path | None, kept: Sequence[LogRow] = ()) -> None:
        """Begin with the rows that are kept of a run that is resumed."""
        self.rows = list(kept)
        self._path = folder / LOG if folder else None
        self._file: IO[str] | None = None
        self._rewrite()

    def add(self, row: LogRow) -> None:
        """Add a row. Raises OptionError if it cannot be written, as all methods do."""
        self.rows.append(row)
        if self._file:
            with self._writing():
                self._file.write(_line(row))
                self._file.flush()

    def fill(self, step: int, validation_loss: float, accuracy: float | None) -> None:
        """Add to the row of a step what was found out later."""
        for index, row in enumerate(self.rows):
            if row.step == step:
                self.rows[index] = replace(row, validation_loss=validation_loss, accuracy=accuracy)
        self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            with self._writing():
                self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Within, the file is written. Once that has failed, it is written no more."""
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):
                if file:
                    file.close()
            reason = (error.strerror or str(error)).lower()
            raise OptionError(f"cannot write {self._path}: {reason}") from error

    def _rewrite(self) -> None:
        if self._path:
            self.close()
            text = ",".join(_NAMES) + "\n" + "".join(map(_line, self.rows))
            write_atomically({self._path: text.encode()})
            with self._writing():
                self._file = self._path.open("a", encoding="utf-8")


def _line(row: LogRow) -> str:
    out = io.StringIO()
    csv.DictWriter(out, _NAMES, lineterminator="\n").writerow(asdict(row))
    return out.getvalue()


def read(folder: Path) -> tuple[LogRow, ...]:
    """The rows of a folder's log. Raises CatalogError if there is none, or of another form."""
    path = folder / LOG
    try:
        whole, _, _ = text_of(path, MAX_RECORD_BYTES).rpartition("\n")  # the last may be torn
        lines = csv.DictReader(whole.splitlines())
        cells = [{name: text or None for name, text in line.items()} for line in lines]
        return tuple(map(_ROW.validate_python, cells))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise CatalogError(f"{path} is not the log of a training: {reason}") from error


def write_record(folder: Path, history: History) -> None:
    """Write the settings, the facts and the figures. Raises OptionError when that fails."""
    text = json.dumps(
        {
            "settings": history.settings.to_dict(),
            "facts": dict(history.facts),
            "figures": history.figures,
            "stopped": history.stopped,
        },
        indent=2,
    )
    write_atomically({folder / RECORD: f"{text}\n".encode()})


MARKERS = "osD^vP*X"

_AXES = {"step": "step", "tokens": "{}s of all ranks", "seconds": "seconds, without validation"}
_PALE = 0.35


def draw(
    runs: Mapping[str, Sequence[LogRow]],
    title: str,
    unit: str = "token",
    loss: str = "cross-entropy, nats per token",
) -> bytes:
    """A PNG, a colour for each run: pale its training loss, with markers its validation loss."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(11.0, 3.9), layout="constrained")
        axes = figure.subplots(1, len(_AXES), sharey=True)
        for axis, (name, label) in zip(axes, _AXES.items(), strict=True):
            for index, (run, rows) in enumerate(runs.items()):
                _lines(axis, name, rows, f"{run}: " if len(runs) > 1 else "", index)
            axis.set_xlabel(label.format(unit))
            axis.set_xlim(left=0)
            if name != "seconds":
                axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].set_ylabel(loss)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(title if len(runs) > 1 else f"{next(iter(runs))}: {title}")
        return render(figure, "png")


def _lines(axis: Axes, name: str, rows: Sequence[LogRow], prefix: str, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    seen = [row for row in rows if row.validation_loss is not None]
    axis.plot(
        [getattr(row, name) for row in rows],
        [row.train_loss for row in rows],
        color=colour,
        alpha=_PALE,
        linewidth=1,
        label=f"{prefix}training, rank 0",
    )
    axis.plot(
        [getattr(row, name) for row in seen],
        [row.validation_loss for row in seen],  # type: ignore[arg-type]
        color=colour,
        marker=MARKERS[index % len(MARKERS)],
        markersize=4,
        label=f"{prefix}validation, mean of the workers",
    )
