"""Figure 6 (Appendix C.5): test error over rho, for several norms and for random perturbations.

    flatmin reproduce p-norm --scale laptop    # 25 minutes on two cores

Adversarial perturbations beat random ones; p = 2 and p = inf look alike. All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import LAPTOP_RHOS, jobs_for, replica_seeds, start
from flatmin.lab.foret2021.settings import NORMS, RHO_GRID, VALIDATION, rho_of_sup_norm
from flatmin.lab.studies.conditions import edge_note
from flatmin.lab.studies.contrasts import Contrast, Family, mean
from flatmin.lab.studies.cost import num_weights
from flatmin.lab.studies.findings import Comparison, Findings, Hyperparameter, LineFigure, Row, Series, Table
from flatmin.lab.studies.replicas import Replicas, replicas_of, runs_of, series_over
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job

NORM_GRIDS: Mapping[Scale, Mapping[str, tuple[float, ...]]] = {
    "paper": {"p = 2": RHO_GRID, "p = inf": RHO_GRID, "random": (*RHO_GRID, 1.0, 2.0, 5.0)},
    "laptop": {"p = 2": LAPTOP_RHOS, "p = inf": LAPTOP_RHOS, "random": (0.5, 1.0, 2.0, 5.0)},
    "smoke": {"p = 2": (0.1,), "p = inf": (0.1,), "random": (0.1, 1.0)},
}
"""Euclidean lengths of the perturbation. A random direction rises far less than the gradient: it may go further."""
Compared = Mapping[str, Sequence[Comparison | str]]
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


def contrast_of(lower: Curve, higher: Curve) -> Contrast:
    """Return the claim that one curve, at its chosen rho, has a lower test error than another at its own."""
    return lower.chosen.lower_than(higher.chosen, "test error, %", "test_error")


def table_of(what: str, curves: Iterable[Curve], sgd: Replicas, compared: Compared, note: str = "") -> Table:
    """Return each curve at its chosen rho, and SGD, with comparisons by the titles of their columns."""
    rows = [[*curve.row(), *comparisons] for curve, *comparisons in zip(curves, *compared.values(), strict=True)]
    rows.append(["SGD", "0", sgd.cell("valid_error"), sgd.cell("test_error"), *[""] * len(compared)])
    return Table(
        title=f"Test error at the rho that the validation set chooses for each {what}",
        columns=[what, "rho", "validation error", "test error", *compared],
        rows=rows,
        note=note,
    )


def figure_of(over: str, x_label: str, series: Sequence[Series], replicas: Iterable[Replicas]) -> LineFigure:
    """Return the test error over rho."""
    title, runs = f"Test error over {over}", runs_of(replicas)
    return LineFigure(title=title, x_label=x_label, y_label="test error, %", series=series, log_x=True, runs=runs)


def p_norm(scale: Scale, known: Known) -> Findings:
    """Perturb along the gradient in the 2-norm and the sup norm, and at random, over rho (Appendix C.5)."""
    replicas = replicas_of(p_norm_jobs(scale, known), known)
    baseline = replicas.pop("SGD")
    curves = {
        kind: Curve(kind, {rho: replicas[_norm_name(kind, rho)] for rho in rhos})
        for kind, rhos in NORM_GRIDS[scale].items()
    }
    two, sup, noise = (curves[kind] for kind in ("p = 2", "p = inf", "random"))
    contrasts = [contrast_of(two, noise), contrast_of(sup, noise), contrast_of(two, sup)]
    family = Family(contrasts)
    two_noise, sup_noise, two_sup = map(family.comparison, contrasts)
    compared: Compared = {
        "compared with random": (two_noise, sup_noise, ""),
        "compared with p = inf": (two_sup, "", ""),
    }
    note = "rho is the Euclidean length; for p = inf each weight moves by rho / sqrt(number of weights)."
    over, length = "the length of the perturbation", "Euclidean length of the perturbation"
    grids = [
        Hyperparameter(name=f"rho grid, {kind}", value=rhos, source="ours", note="Euclidean length; not given")
        for kind, rhos in NORM_GRIDS[scale].items()
    ]
    given = hyperparameters("p-norm", scale, [experiment for r in baseline.records[:1] if (experiment := r.experiment)])
    return findings(
        "p-norm",
        scale,
        tables=[table_of("perturbation", curves.values(), baseline, compared, note)],
        figures=[figure_of(over, length, [curve.series() for curve in curves.values()], replicas.values())],
        verdicts=[family.judge(CLAIMS["p-norm"].statements[0].claim, contrasts)],
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
            optim = start(scale, NORMS, rho=rho_of_sup_norm(rho, num_weights(base)) if kind == "p = inf" else rho).optim
            if kind == "p = inf":
                optim = replace(optim, p=math.inf)
            elif kind == "random":
                optim = replace(optim, direction="random")
            name = _norm_name(kind, rho)
            jobs[name] = jobs_for(replace(base, optim=optim), f"p-norm/{name}", seeds)
    return jobs


def _norm_name(kind: str, rho: float) -> str:
    return f"{kind}, rho={rho:g}"


P_NORM = item("p-norm", p_norm_jobs, p_norm)
