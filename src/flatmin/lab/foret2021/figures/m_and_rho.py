"""Figure 3, middle (Section 4.1): test error over rho for several m.

    flatmin reproduce m-and-rho --scale laptop    # 30 minutes on two cores

Not judged yet. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import jobs_for, start
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.scales import LAPTOP_RHOS, replica_seeds
from flatmin.lab.foret2021.settings import M_GRID, M_SHARPNESS, RHO_GRID, VALIDATION
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.contrasts import (
    Contrast,
    Family,
    contrast_between,
    mean,
    metric_by_seed,
    number_cell,
    run_names,
    series_over,
)
from flatmin.lab.studies.findings import Cell, Comparison, Findings, LineFigure, Series, Table, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.sweeps.jobs import Job, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

M_VALUES: Mapping[Scale, tuple[int, ...]] = {"paper": M_GRID, "laptop": (16, 32, 64, 128), "smoke": (8, 20)}
RHO_VALUES: Mapping[Scale, tuple[float, ...]] = {
    "paper": RHO_GRID,
    "laptop": LAPTOP_RHOS,
    "smoke": (0.05, 0.2),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A way to train at several values of rho, with replicas; one rho is chosen by the validation error."""

    name: str
    outcomes: Mapping[float, list[Outcome]]

    @property
    def chosen(self) -> float | None:
        """The rho with the lowest mean validation error; None while a replica of any rho is not finished."""
        if not all(outcome.complete for outcomes in self.outcomes.values() for outcome in outcomes):
            return None
        # A rho with which a replica diverges is no candidate: the others alone would flatter it.
        errors = {
            rho: mean(metric_by_seed(outcomes, "valid_error").values())
            for rho, outcomes in self.outcomes.items()
            if all(outcome.result is not None for outcome in outcomes)
        }
        return min(errors, key=errors.__getitem__) if errors else None

    @property
    def chosen_outcomes(self) -> list[Outcome]:
        """The replicas with the chosen rho."""
        return self.outcomes[self.chosen] if self.chosen is not None else []

    def test_errors(self) -> dict[int, float]:
        """Return the test error with the chosen rho, in %, by seed."""
        return metric_by_seed(self.chosen_outcomes, "test_error")

    def series(self) -> Series:
        """Return the test error over rho."""
        errors = {rho: metric_by_seed(o, "test_error") for rho, o in self.outcomes.items()}
        hover = [f"{self.name}, rho = {rho:g}, n = {len(values)}" for rho, values in errors.items() if values]
        return series_over(self.name, errors, hover=hover)

    def row(self) -> list[str | Cell | Comparison]:
        """Return the curve's row of a table: its name, the chosen rho, validation and test error with it."""
        rho, outcomes = self.chosen, self.chosen_outcomes
        edge = rho is not None and len(self.outcomes) > 1 and rho in (min(self.outcomes), max(self.outcomes))
        return [
            self.name,
            "not chosen yet" if rho is None else f"{rho:g}",
            number_cell(metric_by_seed(outcomes, "valid_error"), outcomes),
            number_cell(self.test_errors(), outcomes, note="rho at the edge of its grid" if edge else None),
        ]


def baseline_row(outcomes: Sequence[Outcome]) -> list[str | Cell | Comparison]:
    """Return SGD's row, next to those of curves."""
    errors = (number_cell(metric_by_seed(outcomes, metric), outcomes) for metric in ("valid_error", "test_error"))
    return ["SGD", "0", *errors]


def contrast_of(lower: Curve, higher: Curve) -> Contrast:
    """Return the claim that one curve, at its chosen rho, has a lower test error than another at its own."""
    return contrast_between(
        "test error, %",
        (lower.name, lower.chosen_outcomes),
        (higher.name, higher.chosen_outcomes),
        partial(metric_by_seed, metric="test_error"),
    )


def m_and_rho(scale: Scale, runner: Runner) -> Findings:
    """Train with SAM for several m and rho and show the test error (Figure 3, middle)."""
    recorder, claims = RecordingRunner(runner), FIGURES["m-sharpness"]
    found = recorder.replicas(m_and_rho_jobs(scale), "m-and-rho: replicas")
    baseline = found.pop("SGD")
    curves = {
        m: Curve(name=f"m = {m}", outcomes={rho: found[_name(m, rho)] for rho in RHO_VALUES[scale]})
        for m in M_VALUES[scale]
    }
    smallest, largest = curves[min(curves)], curves[max(curves)]
    contrast = contrast_of(smallest, largest)
    rows = [[*curve.row(), ""] for curve in curves.values()]
    family = Family([contrast])
    rows[0][-1] = family.comparison(contrast)
    sgd_errors = metric_by_seed(baseline, "test_error")
    rows.append([*baseline_row(baseline), ""])
    experiment = m_and_rho_experiment(scale, rho=0.0, m=None)
    own = own_settings([experiment], ("m", M_VALUES[scale]), ("rho grid", RHO_VALUES[scale]))
    return findings(
        item="m-and-rho",
        scale=scale,
        claims=claims,
        recorder=recorder,
        tables=[
            Table(
                title="Test error at the rho that the validation set chooses for each m",
                columns=["", "rho", "validation error", "test error", f"{smallest.name} - {largest.name}"],
                rows=rows,
            )
        ],
        figures=[
            LineFigure(
                title="Test error over rho",
                x_label="rho",
                y_label="test error, %",
                series=[*(curve.series() for curve in curves.values()), *_level("SGD", sgd_errors, RHO_VALUES[scale])],
                log_x=True,
                runs=run_names([*baseline, *(o for outcomes in found.values() for o in outcomes)]),
            )
        ],
        verdicts=[family.judge(claims.statements[0].claim, [contrast])],
        hyperparameters=HYPERPARAMETERS["m-sharpness"] if scale == "paper" else own,
        notes=[
            f"All runs hold out {VALIDATION:.0%} of the training set, so that rho is chosen without the test set.",
            "Batch norm normalizes each micro-batch by itself, as it does on accelerators: a smaller m makes it "
            "noisier too.",
        ],
    )


def m_and_rho_jobs(scale: Scale) -> dict[str, list[Job]]:
    """Return the replicas of each m and rho, and of SGD."""
    seeds = replica_seeds(scale)
    jobs = {"SGD": jobs_for(m_and_rho_experiment(scale, rho=0.0, m=None), "m-and-rho/SGD", seeds)}
    for m in M_VALUES[scale]:
        for rho in RHO_VALUES[scale]:
            name = _name(m, rho)
            jobs[name] = jobs_for(m_and_rho_experiment(scale, rho=rho, m=m), f"m-and-rho/{name}", seeds)
    return jobs


def m_and_rho_experiment(scale: Scale, *, rho: float, m: int | None) -> Experiment:
    """Return one point of the figure; the whole batch shares an eps where m is its size."""
    experiment = start(scale, M_SHARPNESS, rho=rho)
    whole = m is None or m == experiment.data.batch_size
    return replace(
        experiment,
        data=replace(experiment.data, validation=VALIDATION),
        optim=replace(experiment.optim, m=None if whole else m),
    )


def _name(m: int, rho: float) -> str:
    return f"m={m}, rho={rho:g}"


def _level(name: str, errors: Mapping[int, float], rhos: Sequence[float]) -> list[Series]:
    """Return a horizontal line for a method that has no rho."""
    if not errors:
        return []
    level = mean(errors.values())
    return [Series(name=name, x=[min(rhos), max(rhos)], y=[level, level], mode="lines")]
