"""Figure 1, middle and right (Section 1): the loss around the minima that SGD and SAM find.

    flatmin reproduce landscape --scale laptop    # 10 minutes on two cores

The loss rises less around SAM's weights.
All verdicts are in docs/reproduction.md.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item
from flatmin.lab.foret2021.scales import curvature_seeds, jobs_for, start
from flatmin.lab.foret2021.settings import LANDSCAPES
from flatmin.lab.runs.record import MeasurementResult
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.conditions import best_candidate, tuning_job
from flatmin.lab.studies.contrasts import Family
from flatmin.lab.studies.findings import Findings, Row, Table
from flatmin.lab.studies.replicas import Read, landscape_figures, measured, metric, replicas_of
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Landscape

RADIUS = 0.5
"""How far from the weights the rise of the loss is judged, in units of the weights: directions are as long as they are.
Nearer than the figure's edge, where the loss of a model without residual connections says little of the minimum."""
SPAN = 1.0
RHOS = (0.05, 0.1, 0.2)
"""What rho is chosen from, but at the paper's scale."""
MODEL_NAMES: dict[Scale, str] = {
    "paper": LANDSCAPES.model.name,
    "laptop": "resnet-20-noshort",
    "smoke": "resnet-20-noshort",
}
# The number of points in each direction, and of training images: a fine grid to look at, of one replica, and a coarse
# one for the numbers, of each.
PICTURE: dict[Scale, tuple[int, int | None]] = {"paper": (51, None), "laptop": (21, 300), "smoke": (5, 8)}
NUMBERS: dict[Scale, tuple[int, int | None]] = {"paper": (21, 10_000), "laptop": (11, 300), "smoke": (5, 8)}


LI_CHECKPOINT = Path("checkpoints/resnet-56-noshort.pth")
"""The model that the paper shows for SGD, of Li et al. (2018), relative to the working directory."""
LI_NAME = "SGD, the checkpoint of Li et al."
LI_MODEL = "The paper's SGD model is the checkpoint of Li et al. (2018);"


def landscape_jobs(scale: Scale, known: Known) -> dict[str, list[Job]]:
    """Return the runs that choose rho, and the models with their surroundings."""
    sgd = landscape_experiment(scale)
    rho, choosing = _chosen_rho(scale, known)
    picture, numbers = _planes(scale)
    jobs: dict[str, list[Job]] = {"choosing": choosing, "SGD": [], "SAM": []}
    for method, radius in (("SGD", 0.0), ("SAM", rho)):
        if radius is not None:
            experiment = replace(sgd, optim=replace(sgd.optim, rho=radius))
            first, *others = jobs_for(experiment, f"landscape/{method}", curvature_seeds(scale), (numbers,))
            jobs[method] = [replace(first, measurements=tuple(dict.fromkeys((picture, numbers)))), *others]
    if scale == "paper" and LI_CHECKPOINT.is_file():
        published = replace(sgd, model=replace(sgd.model, checkpoint=str(LI_CHECKPOINT), head="keep"), epochs=0)
        jobs[LI_NAME] = jobs_for(published, "landscape/Li et al.", (0,), (picture,))
    return jobs


def _chosen_rho(scale: Scale, known: Known) -> tuple[float | None, list[Job]]:
    """Return SAM's rho and the runs that choose it; it is None while they are missing, and the paper's at its scale."""
    if scale == "paper":
        return LANDSCAPES.optim.rho_number, []
    sgd = landscape_experiment(scale)
    candidates = [replace(sgd, name="landscape/SAM", optim=replace(sgd.optim, rho=rho)) for rho in RHOS]
    jobs = [tuning_job(e) for e in candidates]
    best = best_candidate(candidates, [job.record(known) for job in jobs])
    return None if best is None else best.optim.rho_number, jobs


def landscape(scale: Scale, known: Known) -> Findings:
    """Show the loss on a plane through the weights of a model trained with SGD and with SAM (Figure 1).

    The directions are the same draws for both models, scaled to the filters of each (Li et al., 2018).
    """
    sgd = landscape_experiment(scale)
    rho, _ = _chosen_rho(scale, known)
    picture, numbers = _planes(scale)
    models = replicas_of(landscape_jobs(scale, known), known)
    del models["choosing"]
    whose = []
    if LI_NAME in models:
        whose = [f"{LI_MODEL} it is shown, and ours are compared with SAM."]
    elif scale == "paper":
        whose = [f"{LI_MODEL} {LI_CHECKPOINT} does not exist, so only ours are shown."]
    readings: list[tuple[str, str, Read]] = [
        (f"mean rise of the loss within {RADIUS:g}", "", measured(numbers, rise_within(RADIUS))),
        ("mean rise of the loss over the plane", "", measured(numbers, rise_within(2 * SPAN))),
        ("training loss", "", measured(numbers, _center)),
        ("test error", "%", metric("test_error")),
    ]
    rows: list[Row] = [
        [name, *(models[method].cell(read, unit=unit) for method in ("SGD", "SAM")), ""]
        for name, unit, read in readings
    ]
    quantity = f"mean rise of the loss within {RADIUS:g} of the weights"
    rise = models["SAM"].lower_than(models["SGD"], quantity, readings[0][2], unit="")
    family = Family([rise])
    rows[0][-1] = family.comparison(rise)
    title, columns = "How fast the loss rises around the weights", ["", "SGD", "SAM", "SAM - SGD"]
    return findings(
        "landscape",
        scale,
        tables=[Table(title=title, columns=columns, rows=rows)],
        figures=landscape_figures(models.values(), picture, "The loss around the weights, first replica of each"),
        verdicts=[family.judge(CLAIMS["landscape"].statements[0].claim, [rise])],
        hyperparameters=hyperparameters(
            "landscape", scale, [sgd], ("rho, chosen on validation", rho or "not chosen yet")
        ),
        notes=[
            "The plane is through the weights, along two Gaussian directions, each filter as long as the model's; "
            "batch norm has the statistics of the trained model everywhere.",
            *whose,
        ],
    )


def rise_within(radius: float) -> Callable[[MeasurementResult], float | None]:
    """Return how to read the mean of L(w + a d_1 + b d_2) - L(w) over 0 < a^2 + b^2 <= radius^2 from a landscape.

    Example:
        >>> facts = {"coordinates": [-1.0, 0.0, 1.0], "loss": [[9.0, 3.0, 9.0], [3.0, 1.0, 3.0], [9.0, 3.0, 9.0]]}
        >>> rise_within(1.0)(facts), rise_within(1.5)(facts)
        (2.0, 5.0)
    """

    def read(facts: MeasurementResult) -> float | None:
        at = np.asarray(facts["coordinates"], dtype=float)
        loss = np.asarray(facts["loss"], dtype=float)
        distance = np.hypot(at[:, None], at[None, :])
        near = (distance > 0) & (distance <= radius * (1 + 1e-9))
        center = loss[len(at) // 2, len(at) // 2]
        return float(np.mean(loss[near] - center)) if near.any() else None

    return read


def landscape_experiment(scale: Scale) -> Experiment:
    """Return the model without shortcuts that is trained with SGD."""
    return replace(start(scale, LANDSCAPES, rho=0.0), model=Model(name=MODEL_NAMES[scale]))


def _planes(scale: Scale) -> list[Landscape]:
    """Return how the plane is measured for the picture and for the numbers."""
    return [
        Landscape(span=SPAN, points=points, num_examples=num_examples)
        for points, num_examples in (PICTURE[scale], NUMBERS[scale])
    ]


def _center(facts: MeasurementResult) -> float:
    middle = len(facts["coordinates"]) // 2
    return float(facts["loss"][middle][middle])


LANDSCAPE = item("landscape", landscape_jobs, landscape)
