"""Figure 1, middle and right (Section 1): the loss around the minima that SGD and SAM find.

    flatmin reproduce landscape --scale laptop    # 25 minutes on two cores

With five replicas, and rho not tuned, the loss rose less around SAM's weights, but not significantly. Now there are
ten. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figure_settings import curvature_seeds, jobs_for, start, tuned_rho
from flatmin.lab.foret2021.item_findings import findings
from flatmin.lab.foret2021.settings import LANDSCAPES
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.studies.contrasts import (
    BySeed,
    Family,
    contrast_between,
    measured_by_seed,
    metric_by_seed,
    number_cell,
)
from flatmin.lab.studies.findings import Cell, Comparison, Findings, Table, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.measured_figures import landscape_figures
from flatmin.lab.sweeps.jobs import Job, Measurement, MeasurementResult, Outcome
from flatmin.lab.sweeps.runners import RecordingRunner, Runner

RADIUS = 0.5
"""How far from the weights the rise of the loss is judged, in units of the weights: directions are as long as they are.
Nearer than the figure's edge, where the loss of a model without residual connections says little of the minimum."""
SPAN = 1.0
NETWORK: dict[Scale, str] = {"paper": LANDSCAPES.model, "laptop": "resnet-20-noshort", "smoke": "resnet-20-noshort"}
# The number of points in each direction, and of training images: a fine grid to look at, of one replica, and a coarse
# one for the numbers, of each.
PICTURE: dict[Scale, tuple[int, int | None]] = {"paper": (51, None), "laptop": (21, 300), "smoke": (5, 8)}
NUMBERS: dict[Scale, tuple[int, int | None]] = {"paper": (21, 10_000), "laptop": (11, 300), "smoke": (5, 8)}


LI_CHECKPOINT = Path("checkpoints/resnet-56-noshort.pth")
"""The model that the paper shows for SGD, of Li et al. (2018), relative to the working directory."""
LI_NAME = "SGD, the checkpoint of Li et al."


def landscape(scale: Scale, runner: Runner) -> Findings:
    """Show the loss on a plane through the weights of a model trained with SGD and with SAM (Figure 1).

    The directions are the same draws for both models, scaled to the filters of each (Li et al., 2018).
    """
    recorder, claims = RecordingRunner(runner), FIGURES["landscapes"]
    sgd = landscape_experiment(scale)
    rho = tuned_rho(recorder, "landscape", scale, LANDSCAPES, sgd)
    picture, numbers = _plane(*PICTURE[scale]), _plane(*NUMBERS[scale])
    jobs: dict[str, list[Job]] = {"SGD": [], "SAM": []}
    for method, radius in (("SGD", 0.0), ("SAM", rho)):
        if radius is not None:
            experiment = replace(sgd, optim=replace(sgd.optim, rho=radius))
            first, *others = jobs_for(experiment, f"landscape/{method}", curvature_seeds(scale), (numbers,))
            jobs[method] = [replace(first, measurements=tuple(dict.fromkeys((picture, numbers)))), *others]
    if scale == "paper" and LI_CHECKPOINT.is_file():
        published = replace(sgd, model=replace(sgd.model, checkpoint=str(LI_CHECKPOINT), head="keep"), epochs=0)
        jobs[LI_NAME] = jobs_for(published, "landscape/Li et al.", (0,), (picture,))
    found = recorder.replicas(jobs, "landscape: models and their surroundings")

    rise = contrast_between(
        f"mean rise of the loss within {RADIUS:g} of the weights",
        ("SAM", found["SAM"]),
        ("SGD", found["SGD"]),
        partial(measured_by_seed, measurement=numbers, read=rise_within(RADIUS)),
        unit="",
    )
    family = Family([rise])
    return findings(
        item="landscape",
        scale=scale,
        claims=claims,
        recorder=recorder,
        tables=[_table(found, numbers, family.comparison(rise))],
        figures=landscape_figures(
            {method: outcomes[0] for method, outcomes in found.items() if outcomes},
            picture,
            "The loss around the weights, first replica of each",
        ),
        verdicts=[family.judge(claims.statements[0].claim, [rise])],
        hyperparameters=HYPERPARAMETERS["landscapes"]
        if scale == "paper"
        else own_settings([sgd], ("rho, chosen on validation", rho or "not chosen yet")),
        notes=[
            "The plane is through the weights, along two Gaussian directions, each filter as long as the model's; "
            "batch norm has the statistics of the trained model everywhere.",
            *(
                ["The paper's SGD model is the checkpoint of Li et al. (2018); " + _whose(jobs)]
                if scale == "paper"
                else []
            ),
        ],
    )


def _whose(jobs: Mapping[str, Sequence[Job]]) -> str:
    if LI_NAME in jobs:
        return "it is shown, and ours are compared with SAM."
    return f"{LI_CHECKPOINT} does not exist, so that only ours are shown."


def landscape_experiment(scale: Scale) -> Experiment:
    """Return the model of Figure 1 that is trained with SGD."""
    return replace(start(scale, LANDSCAPES, rho=0.0), model=Model(name=NETWORK[scale]))


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


def _plane(points: int, num_examples: int | None) -> Measurement:
    settings = (("span", SPAN), ("points", points), ("num_examples", num_examples))
    return Measurement(kind="landscape", settings=settings)


def _table(found: dict[str, list[Outcome]], numbers: Measurement, compared: Comparison | str) -> Table:
    everywhere = rise_within(2 * SPAN)
    readings: list[tuple[str, str, Callable[[list[Outcome]], BySeed]]] = [
        (f"mean rise of the loss within {RADIUS:g}", "", lambda o: measured_by_seed(o, numbers, rise_within(RADIUS))),
        ("mean rise of the loss over the plane", "", lambda o: measured_by_seed(o, numbers, everywhere)),
        ("training loss", "", lambda o: measured_by_seed(o, numbers, _center)),
        ("test error", "%", lambda o: metric_by_seed(o, "test_error")),
    ]
    rows: list[list[str | Cell | Comparison]] = [
        [name, *(number_cell(read(found[method]), found[method], unit=unit) for method in ("SGD", "SAM")), ""]
        for name, unit, read in readings
    ]
    rows[0][-1] = compared
    return Table(title="How fast the loss rises around the weights", columns=["", "SGD", "SAM", "SAM - SGD"], rows=rows)


def _center(facts: MeasurementResult) -> float:
    middle = len(facts["coordinates"]) // 2
    return float(facts["loss"][middle][middle])
