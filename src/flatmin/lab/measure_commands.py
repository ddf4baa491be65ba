"""``flatmin measure``: how flat is the minimum that a run found?"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from flatmin.lab.progress import write_event
from flatmin.lab.shown import find_run, number, table


@dataclass(frozen=True)
class Measured(ABC):
    """What all measures have in common."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the beginning of it) in the folder of runs."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    data_root: Path | None = None
    """The first folder in which datasets are looked for."""
    num_examples: int | None = None
    """Measure on the first so many training examples; on all if None."""
    output: Literal["table", "json"] = "table"
    """table: for people; json: one JSON object, for scripts."""

    @abstractmethod
    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure, and write what was found into a folder."""

    def run(self, console: Console) -> None:
        """Measure, write JSON and pictures into RUN/measures, print the numbers."""
        from flatmin.lab.trained import load_trained

        path = find_run(self.run_name, self.runs)
        facts = self.measure(load_trained(path, data_root=self.data_root), path / "measures")
        if self.output == "json":
            write_event("measure", facts)
            return
        rows = [(name, number(value)) for name, value in facts.items() if not isinstance(value, list)]
        console.print(table(f"{path}/measures", ("what", "value"), rows))


@dataclass(frozen=True)
class MeasureSharpness(Measured):
    """m-sharpness: how far the loss rises within rho, on subsets of m examples (Section 4.1)."""

    rho: float = 0.05
    """Radius of the ball."""
    m: int | None = None
    """Examples in a subset; all if None."""
    steps: int = 1
    """Ascent steps."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_sharpness

        keywords: dict[str, Any] = {"rho": self.rho, "m": self.m, "steps": self.steps}
        return measure_sharpness(trained, folder / "sharpness", num_examples=self.num_examples, **keywords)


@dataclass(frozen=True)
class MeasureSpectrum(Measured):
    """The Hessian's largest eigenvalues and spectral density (Section 4.2)."""

    num_eigenvalues: int = 5
    """How many of the largest."""
    steps: int = 80
    """Lanczos steps of the density."""
    probes: int = 4
    """Random starts of the density."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_spectrum

        keywords = {"num_eigenvalues": self.num_eigenvalues, "steps": self.steps, "probes": self.probes}
        return measure_spectrum(trained, folder / "spectrum", num_examples=self.num_examples, **keywords)


@dataclass(frozen=True)
class MeasureLandscape(Measured):
    """The loss on a plane of random, filter-normalised directions (Figure 1)."""

    span: float = 1.0
    """How far the plane goes, in units of the directions."""
    points: int = 51
    """Points along each side; odd."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_landscape

        return measure_landscape(
            trained, folder / "landscape", span=self.span, points=self.points, num_examples=self.num_examples
        )


@dataclass(frozen=True)
class MeasureBound(Measured):
    """The PAC-Bayes bound on the error, term by term (Appendix A)."""

    rho: float = 0.05
    """Radius of the ball."""
    delta: float = 0.05
    """The probability with which the bound may fail."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_bound

        return measure_bound(trained, folder / "bound", rho=self.rho, delta=self.delta, num_examples=self.num_examples)


@dataclass(frozen=True)
class Measure:
    """Measure how flat the minimum is that a run found; needs no finished run, only a checkpoint."""

    what: (
        Annotated[MeasureSharpness, tyro.conf.subcommand("sharpness", prefix_name=False)]
        | Annotated[MeasureSpectrum, tyro.conf.subcommand("spectrum", prefix_name=False)]
        | Annotated[MeasureLandscape, tyro.conf.subcommand("landscape", prefix_name=False)]
        | Annotated[MeasureBound, tyro.conf.subcommand("bound", prefix_name=False)]
    )

    def run(self, console: Console) -> None:
        """Measure."""
        self.what.run(console)
