"""Figure 6 (Appendix C.5): the norm of the perturbation.

    flatmin reproduce p-norm --scale laptop    # 25 minutes on two cores

Adversarial perturbations beat random ones; p = 2 and p = inf look alike. All verdicts are in docs/reproduction.md.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.figures.m_and_rho import HELD_OUT, Curve, baseline_row, contrast_of
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import LAPTOP_RHOS, jobs_for, replica_seeds, start
from flatmin.lab.foret2021.settings import NORMS, RHO_GRID, VALIDATION, rho_of_sup_norm
from flatmin.lab.studies.contrasts import Family
from flatmin.lab.studies.cost import num_weights
from flatmin.lab.studies.findings import Findings, Hyperparameter, LineFigure, Table
from flatmin.lab.studies.replicas import replicas_of, runs_of
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job

NORM_GRIDS: Mapping[Scale, Mapping[str, tuple[float, ...]]] = {
    "paper": {"p = 2": RHO_GRID, "p = inf": RHO_GRID, "random": (*RHO_GRID, 1.0, 2.0, 5.0)},
    "laptop": {"p = 2": LAPTOP_RHOS, "p = inf": LAPTOP_RHOS, "random": (0.5, 1.0, 2.0, 5.0)},
    "smoke": {"p = 2": (0.1,), "p = inf": (0.1,), "random": (0.1, 1.0)},
}
"""Euclidean lengths of the perturbation. A random direction rises far less than the gradient: it may go further."""


def p_norm(scale: Scale, known: Known) -> Findings:
    """Perturb along the gradient in the 2-norm and the sup norm, and at random, over rho (Appendix C.5)."""
    replicas = replicas_of(p_norm_jobs(scale, known), known)
    baseline = replicas.pop("SGD")
    curves = {
        kind: Curve(name=kind, replicas={rho: replicas[_norm_name(kind, rho)] for rho in rhos})
        for kind, rhos in NORM_GRIDS[scale].items()
    }
    two, sup, noise = (curves[kind] for kind in ("p = 2", "p = inf", "random"))
    contrasts = [contrast_of(two, noise), contrast_of(sup, noise), contrast_of(two, sup)]
    family = Family(contrasts)
    two_noise, sup_noise, two_sup = map(family.comparison, contrasts)
    comparisons = {"p = 2": (two_noise, two_sup), "p = inf": (sup_noise, ""), "random": ("", "")}
    rows = [[*curve.row(), *comparisons[kind]] for kind, curve in curves.items()]
    rows.append([*baseline_row(baseline), "", ""])
    grids = [
        Hyperparameter(name=f"rho grid, {kind}", value=rhos, source="ours", note="Euclidean length; not given")
        for kind, rhos in NORM_GRIDS[scale].items()
    ]
    given = hyperparameters("p-norm", scale, [experiment for r in baseline.records[:1] if (experiment := r.experiment)])
    return findings(
        "p-norm",
        scale,
        tables=[
            Table(
                title="Test error at the rho that the validation set chooses for each perturbation",
                columns=[
                    *("perturbation", "rho", "validation error", "test error"),
                    *("compared with random", "compared with p = inf"),
                ],
                rows=rows,
                note="rho is the Euclidean length; for p = inf each weight moves by rho / sqrt(number of weights).",
            )
        ],
        figures=[
            LineFigure(
                title="Test error over the length of the perturbation",
                x_label="Euclidean length of the perturbation",
                y_label="test error, %",
                series=[curve.series() for curve in curves.values()],
                log_x=True,
                runs=runs_of(replicas.values()),
            )
        ],
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
