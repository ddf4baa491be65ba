"""Figure 6 (Appendix C.5): test error over rho, for several norms and for random perturbations.

    flatmin reproduce p-norm --scale laptop    # 25 minutes on two cores

Adversarial perturbations beat random ones; p = 2 and p = inf look alike, but p = inf chose the largest rho of its grid.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import LAPTOP_RHOS, jobs_for, start
from flatmin.lab.foret2021.settings import NORMS, RHO_GRID, VALIDATION, rho_of_sup_norm
from flatmin.lab.studies.conditions import edge_note, replica_seeds
from flatmin.lab.studies.contrasts import Family, mean
from flatmin.lab.studies.cost import num_weights
from flatmin.lab.studies.findings import Findings, Hyperparameter, LineFigure, Row, Series, Table
from flatmin.lab.studies.replicas import Replicas, replicas_of, runs_of, series_over
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job

NORM_GRIDS: Mapping[Scale, Mapping[str, tuple[float, ...]]] = {
    "paper": {"p = 2": RHO_GRID, "p = inf": RHO_GRID, "random": (*RHO_GRID, 1.0, 2.0, 5.0)},
    "laptop": {"p = 2": LAPTOP_RHOS, "p = inf": (*LAPTOP_RHOS, 1.0), "random": (0.5, 1.0, 2.0, 5.0)},
    "smoke": {"p = 2": (0.1,), "p = inf": (0.1,), "random": (0.1, 1.0)},
}
"""Euclidean lengths of the perturbation. A random direction rises far less than the gradient: it may go further. On a
laptop p = inf chose 0.5, the largest of its first grid."""
HELD_OUT = f"All runs hold out {VALIDATION:.0%} of the training set, so that rho is chosen without the test set."


@dataclass(frozen=True)
class Curve:
    """A way to train at several values of rho, with replicas; one rho is chosen by the validation error."""

    name: str
    replicas: Mapping[float, Replicas]

    @property
    def chosen_rho(self) -> float | None:
        """The rho with the lowest mean validation error; None while a replica of any rho is not finished."""
        if not all(record.is_complete for group in self.replicas.values() for record in group.records):
            return None
        # A rho with which a replica diverges is not a candidate: the others alone would flatter it.
        errors = {
            rho: mean(group.by_seed("valid_error").values())
            for rho, group in self.replicas.items()
            if len(group.runs) == len(group.records)
        }
        return min(errors, key=errors.__getitem__) if errors else None

    @property
    def chosen(self) -> Replicas:
        """The replicas with the chosen rho; none while it is not chosen."""
        rho = self.chosen_rho
        return Replicas(self.name, () if rho is None else self.replicas[rho].records)

    @property
    def gate_note(self) -> str | None:
        """Says that the best rho may lie outside of a grid of several; None if it does not seem to."""
        at_edge = len(self.replicas) > 2 and edge_note(self.chosen_rho, self.replicas)
        return f"{self.name}'s rho is at the edge of its grid" if at_edge else None

    def series(self) -> Series:
        """Return the test error over rho."""
        errors = {rho: group.by_seed("test_error") for rho, group in self.replicas.items()}
        hover = [f"{self.name}, rho = {rho:g}, n = {len(values)}" for rho, values in errors.items() if values]
        return series_over(self.name, errors, hover=hover)

    def row(self) -> Row:
        """Return the curve's row of a table: its name, the chosen rho, validation and test error with it."""
        rho = self.chosen_rho
        return [
            self.name,
            "not chosen yet" if rho is None else f"{rho:g}",
            self.chosen.cell("valid_error"),
            self.chosen.cell("test_error", note=edge_note(rho, self.replicas)),
        ]


def p_norm(scale: Scale, known: Known) -> Findings:
    """Perturb along the gradient in the 2-norm and the sup norm, and at random, over rho (Appendix C.5)."""
    replicas = replicas_of(p_norm_jobs(scale, known), known)
    baseline = replicas.pop("SGD")
    curves = {
        kind: Curve(kind, {rho: replicas[_norm_name(kind, rho)] for rho in rhos})
        for kind, rhos in NORM_GRIDS[scale].items()
    }
    two, sup, noise = (curves[kind].chosen for kind in ("p = 2", "p = inf", "random"))
    contrasts = [
        lower.lower_than(higher, "test error, %", "test_error")
        for lower, higher in ((two, noise), (sup, noise), (two, sup))
    ]
    if not any(contrast.waits for contrast in contrasts):
        contrasts = [contrast.gated(curve.gate_note for curve in curves.values()) for contrast in contrasts]
    family = Family(contrasts)
    verdict = family.judge(CLAIMS["p-norm"].statements[0].claim, contrasts)
    two_noise, sup_noise, two_sup = map(family.comparison, contrasts)
    table = Table(
        title="Test error at the rho that the validation set chooses for each perturbation",
        columns=[
            *("perturbation", "rho", "validation error", "test error"),
            *("compared with random", "compared with p = inf"),
        ],
        rows=[
            [*curves["p = 2"].row(), two_noise, two_sup],
            [*curves["p = inf"].row(), sup_noise, ""],
            [*curves["random"].row(), "", ""],
            ["SGD", "0", baseline.cell("valid_error"), baseline.cell("test_error"), "", ""],
        ],
        note="rho is the Euclidean length; for p = inf each weight moves by rho / sqrt(number of weights).",
    )
    figure = LineFigure(
        title="Test error over the length of the perturbation",
        x_label="Euclidean length of the perturbation",
        y_label="test error, %",
        series=[curve.series() for curve in curves.values()],
        log_x=True,
        runs=runs_of(replicas.values()),
    )
    grids = [
        Hyperparameter(name=f"rho grid, {kind}", value=rhos, source="ours", note="Euclidean length; not given")
        for kind, rhos in NORM_GRIDS[scale].items()
    ]
    given = hyperparameters("p-norm", scale, [experiment for r in baseline.records[:1] if (experiment := r.experiment)])
    return findings(
        "p-norm",
        scale,
        tables=[table],
        figures=[figure],
        verdicts=[verdict],
        hyperparameters=[*(h for h in given if not h.name.startswith("rho grid")), *grids],
        notes=[HELD_OUT],
    )


def p_norm_jobs(scale: Scale, known: Known) -> dict[str, list[Job]]:
    """Return the replicas of each perturbation and length, and of SGD."""
    seeds = replica_seeds(scale)
    base = start(scale, NORMS, rho=0.0)
    base = replace(base, data=replace(base.data, validation=VALIDATION))
    jobs = {"SGD": jobs_for(base, "p-norm/SGD", seeds)}
    for kind, rhos in NORM_GRIDS[scale].items():
        for rho in rhos:
            optim = replace(base.optim, rho=rho)
            if kind == "p = inf":
                optim = replace(optim, rho=rho_of_sup_norm(rho, num_weights(base)), p=math.inf)
            elif kind == "random":
                optim = replace(optim, direction="random")
            name = _norm_name(kind, rho)
            jobs[name] = jobs_for(replace(base, optim=optim), f"p-norm/{name}", seeds)
    return jobs


def _norm_name(kind: str, rho: float) -> str:
    return f"{kind}, rho={rho:g}"


P_NORM = item("p-norm", p_norm_jobs, p_norm)
