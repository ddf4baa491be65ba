"""What a study found, in the paper's shape: tables, figures and verdicts, each number with the runs behind it.

A study returns these; ``report`` turns them into a page. Nothing here knows about HTML.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.statistics import Interval

VerdictStatus = Literal[
    "reproduced", "not reproduced", "kept", "not kept", "inconclusive", "not tested at this scale", "not tested"
]
"""Of the paper's claims: reproduced or not. Of a method that should keep a gain, in a study of our own: kept or not.
Not tested at this scale: the runs exist, and cannot tell; not tested: runs are missing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number as claimed, as measured, or both."""

    claimed: str | None = None
    """The paper's number as it is printed, for example "2.7 ± 0.1"."""
    measured: Interval | None = None
    """Mean and half the width of its 95 % confidence interval, over replicas."""
    unit: str = "%"
    values: tuple[float, ...] = ()
    """One for each replica."""
    runs: tuple[str, ...] = ()
    """The runs it comes from, by the names of their directories."""
    note: str | None = None
    """For example "twice the epochs", "1 of 5 diverged"."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """SAM vs. its baseline, paired by seed."""

    name: str
    difference: Interval
    """Of SAM minus the baseline: negative errors are better."""
    baseline: float = math.nan
    """The baseline's mean over the same pairs: what the difference is relative to."""
    quantity: str = ""
    """What is compared, for example "test error"."""
    p_value: float
    p_holm: float
    """Corrected for all comparisons of the table (Holm, 1979)."""
    num_pairs: int
    unit: str = "%"
    """Of what is compared: a difference of errors in % is in points."""
    values: tuple[float, ...] = ()
    """The difference for each pair."""
    runs: tuple[str, ...] = ()


Entry = str | Cell | Comparison
Row = list[Entry]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table in the shape of the paper's."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    note: str = ""
    folded: bool = False
    """Whether it opens only when clicked: what few readers look for."""

    @property
    def entries(self) -> list[Entry]:
        """All of its rows, one after the other."""
        return [entry for row in self.rows for entry in row]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve or a set of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    half_width: Sequence[float] | None = None
    """Of the 95 % confidence intervals of y."""
    hover: Sequence[str] | None = None
    """What a point says when it is pointed at."""
    mode: Literal["lines", "markers", "lines+markers"] = "lines+markers"


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Curves or points over one axis."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    runs: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A height over a square grid."""

    name: str
    coordinates: Sequence[float]
    """Of both axes."""
    height: Sequence[Sequence[float]]
    """height[i][j] is at (coordinates[i], coordinates[j])."""


@dataclass(frozen=True, kw_only=True)
class SurfaceFigure:
    """Landscapes side by side, on one logarithmic scale."""

    title: str
    height_label: str
    surfaces: Sequence[Surface]
    note: str = ""
    runs: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim of the paper, and whether it was reproduced at this scale."""

    claim: str
    status: VerdictStatus
    evidence: str
    """In a sentence."""
    comparisons: Sequence[Comparison] = ()
    """What it was judged by: effect, interval, number of pairs and p-value of each comparison."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameter:
    """A setting, and where it comes from."""

    name: str
    value: Any
    source: Literal["paper", "reference code", "ours", "validation"]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a study found."""

    item: str
    scale: str
    title: str
    source: str
    """Where it is in the paper, for example "Table 1, Section 3.1"."""
    about_scale: str
    """What differs from the paper's experiment, human-readable."""
    headline: str = ""
    """The result in one sentence; a page of one item then opens with it and with the figures."""
    tables: Sequence[Table] = ()
    figures: Sequence[LineFigure | SurfaceFigure] = ()
    verdicts: Sequence[Verdict] = ()
    hyperparameters: Sequence[Hyperparameter] = ()
    planned: Sequence[str] = ()
    """Every comparison of the families that Holm's correction is for, in words."""
    rules: Sequence[str] = ()
    """How it is decided what counts, as registered before the runs: the gate, grids, baselines, tests."""
    notes: Sequence[str] = ()
    """Slips of the paper, departures, warnings."""
    cut: Sequence[str] = ()
    """What of the paper's item is not run at this scale, and why."""
    runs: Sequence[str] = ()
    """All runs of the study, by the names of their directories, those that chose hyperparameters included."""
    num_missing: int = 0
    """Runs that the study needs and that are not there."""
    is_registered: bool = False
    """Whether its plan was registered."""

    @property
    def place(self) -> str:
        """Where it is in the paper without the section, for example "Table 1"; the item's name elsewhere."""
        return re.split(r", (?:Section|Appendix)", self.source)[0] or self.item


def own_settings(experiments: Sequence[Experiment], *more: tuple[str, object]) -> list[Hyperparameter]:
    """Return the settings of a scale of our own; ``more`` replace settings of the same name."""
    seen: dict[str, dict[object, None]] = {}
    for e in experiments:
        size = f"{e.data.train_size:,}" if e.data.train_size is not None else "all"
        for name, value in (
            ("model", e.model.name if e.model.norm == "batch" else f"{e.model.name}, without batch norm"),
            ("training images", f"{size} of {e.data.name}"),
            ("augmentation", e.data.augment),
            ("batch size", e.data.batch_size),
            ("learning rate", e.optim.lr),
            ("learning-rate schedule", e.optim.schedule),
            ("momentum", f"{e.optim.momentum:g}, Nesterov's" if e.optim.nesterov else e.optim.momentum),
            ("weight decay", e.optim.weight_decay),
            ("epochs", e.epochs),
        ):
            seen.setdefault(name, {})[value] = None
    values: dict[str, object] = {name: next(iter(v)) if len(v) == 1 else tuple(v) for name, v in seen.items()}
    return [Hyperparameter(name=name, value=value, source="ours") for name, value in (values | dict(more)).items()]
