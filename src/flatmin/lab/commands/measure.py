"""``flatmin measure``: how flat is the minimum of a run?"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flatmin.lab.commands.console import find_run, number, table
from flatmin.lab.commands.progress import write_event
from flatmin.lab.errors import RunError, SpecError
from flatmin.lab.sweeps.jobs import MeasurementKind, MeasurementResult

Range = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is, to follow "must be"."""
COUNT: Range = (lambda count: count >= 1, "at least 1")
SHOWN_LISTS = (
    "eigenvalues",
    "residuals",
    "per_batch",
    "rhos",
    "rises",
    "first_order",
)  # the others are curves and grids, which are only in the files


@dataclass(frozen=True)
class MeasureCommand:
    """The settings that all measures share."""

    kind: ClassVar[MeasurementKind]
    ranges: ClassVar[dict[str, Range]] = {"epoch": (lambda epoch: epoch >= 0, "at least 0"), "num_examples": COUNT}

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the start of it) in the directory of runs."""
    runs: Path = Path("runs")
    """The directory of all runs."""
    data_root: Path | None = None
    """The first directory in which datasets are searched for."""
    epoch: int | None = None
    """Measure the weights after this epoch, which the run saved (--keep-every); the final ones if None."""
    num_examples: int | None = None
    """Measure on this many training examples, the first ones; on all if None."""
    output: Literal["table", "json"] = "table"
    """table: human-readable; json: one JSON object."""

    def check(self) -> None:
        """Check every setting before anything is read.

        Raises:
            SpecError: a setting has a value that is not allowed.
        """
        for name, (holds, allowed) in self.ranges.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise SpecError(f"--{name.replace('_', '-')} must be {allowed}; got {value}.")

    def run(self, console: Console) -> None:
        """Measure, write JSON and plots to RUN/measures, print the numbers."""
        from flatmin.lab.sweeps.measurements import MEASURES  # not at the top: no other command needs them
        from flatmin.lab.training.trained_model import load_trained

        self.check()
        path = find_run(self.run_name, self.runs)
        trained = load_trained(path, data_root=self.data_root, epoch=self.epoch)
        origin = trained.origin
        weights = f"epoch{origin.epoch}" if origin.step is None else f"step{origin.step}"
        target = path / "measures" / f"{self.kind}-{weights}-{self._hash(origin.checksum)}"
        with self._shown_to_be_working(path):
            try:
                facts = MEASURES[self.kind][0](trained, target, **self._settings())
            except ValueError as error:  # what the measures say of settings, losses and data they cannot take
                raise RunError(f"{path} cannot be measured with these settings: {error}") from error
        if self.output == "json":
            write_event("measure", {"file": f"{target}.json", **facts})
            return
        rows = [(name, text) for name, value in facts.items() if (text := _cell(name, value)) is not None]
        files = sorted(file.name for file in target.parent.glob(f"{target.name}.*") if file.suffix != ".cache")
        console.print(table(f"{path}/measures", ("what", "value"), [*rows, ("files", "\n".join(files))]))

    def _settings(self) -> MeasurementResult:
        """Return the settings of the measure itself."""
        common = {field.name for field in dataclasses.fields(MeasureCommand)} - {"num_examples"}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in common}

    def _hash(self, checksum: str) -> str:
        """Return ten digits that name settings and weights, so that no others share their results and caches."""
        key = json.dumps([self._settings(), checksum], sort_keys=True)
        return hashlib.sha256(key.encode()).hexdigest()[:10]

    def _shown_to_be_working(self, path: Path) -> Any:
        if self.kind == "landscape":  # it has its own progress bar
            return nullcontext()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(f"{self.kind} of {path.name}", total=None)
        return bar


@dataclass(frozen=True)
class MeasureSharpness(MeasureCommand):
    """m-sharpness: how far the loss rises within rho, on subsets of m examples (Section 4.1)."""

    kind = "sharpness"
    ranges = MeasureCommand.ranges | {
        "rho": (lambda rho: 0 <= rho < math.inf, "finite and not negative"),
        "m": COUNT,
        "steps": COUNT,
    }

    rho: float = 0.05
    """Radius of the ball."""
    m: int | None = None
    """Examples in a subset; all if None."""
    steps: int = 1
    """Ascent steps."""


@dataclass(frozen=True)
class MeasureSpectrum(MeasureCommand):
    """The Hessian's largest eigenvalues and spectral density (Section 4.2)."""

    kind = "spectrum"
    ranges = MeasureCommand.ranges | {"num_eigenvalues": COUNT, "steps": COUNT, "probes": COUNT}

    num_eigenvalues: int = 5
    """How many of the largest eigenvalues."""
    steps: int = 80
    """Lanczos steps of the density."""
    probes: int = 4
    """Random starts of the density."""


@dataclass(frozen=True)
class MeasureLandscape(MeasureCommand):
    """The loss on a plane of random, filter-normalized directions (Figure 1)."""

    kind = "landscape"
    ranges = MeasureCommand.ranges | {
        "span": (lambda span: 0 < span < math.inf, "positive and finite"),
        "points": (lambda points: points >= 3 and points % 2 == 1, "odd, and at least 3"),
    }

    span: float = 1.0
    """How far the plane goes, in units of the directions."""
    points: int = 51
    """Points along each side; odd."""


@dataclass(frozen=True)
class MeasureBound(MeasureCommand):
    """The PAC-Bayes bound on the error, term by term (Appendix A)."""

    kind = "bound"
    ranges = MeasureCommand.ranges | {
        "rho": (lambda rho: 0 < rho < math.inf, "positive and finite"),
        "delta": (lambda delta: 0 < delta < 1, "between 0 and 1"),
        "num_examples": (lambda count: count >= 2, "at least 2"),
    }

    rho: float = 0.05
    """Radius of the ball."""
    delta: float = 0.05
    """The probability with which the bound may fail."""


@dataclass(frozen=True)
class MeasureRho(MeasureCommand):
    """The radius that the training loss suggests (`flatmin.suggest_rho`), and the rise of the loss over rho."""

    kind = "rho"
    ranges = MeasureCommand.ranges | {"m": COUNT}

    m: int | None = None
    """Examples that share a perturbation; as many as in the run if None."""


@dataclass(frozen=True)
class Measure:
    """Measure how flat the minimum of a run is; the run need not be finished."""

    what: (
        Annotated[MeasureSharpness, tyro.conf.subcommand("sharpness", prefix_name=False)]
        | Annotated[MeasureSpectrum, tyro.conf.subcommand("spectrum", prefix_name=False)]
        | Annotated[MeasureLandscape, tyro.conf.subcommand("landscape", prefix_name=False)]
        | Annotated[MeasureBound, tyro.conf.subcommand("bound", prefix_name=False)]
        | Annotated[MeasureRho, tyro.conf.subcommand("rho", prefix_name=False)]
    )

    def run(self, console: Console) -> None:
        """Measure."""
        self.what.run(console)


def _cell(name: str, value: Any) -> str | None:
    """Return a fact as the table shows it; None if it does not."""
    if name == "standard_error" and math.isnan(value):
        return "unknown (one subset)"
    if not isinstance(value, list):
        return number(value)
    return ", ".join(map(number, value)) if name in SHOWN_LISTS else None
