"""What the findings of all items have in common: what differs at a scale, what was cut, what could be shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.foret2021.claims.figures import CLAIMS, said_in_text
from flatmin.lab.foret2021.scales import (
    CUTS,
    NUM_CURVATURE_REPLICAS,
    PAPER_SUMMARY,
    SMOKE_SUMMARY,
    laptop_summary,
    replica_seeds,
)
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.condition_tables import condition_tables
from flatmin.lab.studies.conditions import NUM_REPLICAS, Condition, MethodResult, run_conditions
from flatmin.lab.studies.contrasts import Contrast, verdicts_at
from flatmin.lab.studies.findings import Findings, Hyperparameter, Verdict, own_settings
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.replicas import RecordingRunner
from flatmin.lab.studies.statistics import detectable_effect
from flatmin.lab.sweeps.runners import Runner

ERROR_SPREAD = (0.8, "points of test error", NUM_REPLICAS, "Table 1 on Fashion-MNIST")
SPREADS: dict[str, tuple[float, str, int, str]] = {
    **dict.fromkeys(("table1", "imagenet", "fine-tuning", "label-noise", "svhn-fashion"), ERROR_SPREAD),
    **dict.fromkeys(("rho-0.05", "fine-tuning-rho-0.05", "m-and-rho", "p-norm"), ERROR_SPREAD),
    **dict.fromkeys(("second-order", "inner-steps"), ERROR_SPREAD),
    "landscape": (1.2, "in the mean rise of the loss", NUM_CURVATURE_REPLICAS, "five pairs of Figure 1"),
    "hessian": (0.26, "in lambda_max at the end", NUM_CURVATURE_REPLICAS, "five pairs of Figure 3"),
}
"""Standard deviation of the differences between pairs, its unit, the number of pairs on a laptop, and where the spread
was seen: before the other runs began."""


def power_note(item: str, scale: Scale) -> list[str]:
    """Return how large an effect an item's replicas can show, as it was known before they were run."""
    if scale != "laptop" or item not in SPREADS:
        return []
    spread, unit, num_pairs, seen_in = SPREADS[item]
    effect = detectable_effect(spread, num_pairs)
    return [
        f"Power, computed before the runs: {num_pairs} pairs show a difference of {effect:.2g} {unit} with a "
        f"probability of 80 % (paired t-test, two-sided, 5 %, before Holm's correction) if the differences have a "
        f"standard deviation of {spread:g}, as in {seen_in}. A smaller difference is likely to stay inconclusive."
    ]


def about_scale(item: str, scale: Scale) -> str:
    """Return what differs from the paper's experiment."""
    return {"paper": PAPER_SUMMARY, "laptop": laptop_summary(item), "smoke": SMOKE_SUMMARY}[scale]


def hyperparameters(
    item: str, scale: Scale, experiments: Sequence[Experiment], *more: tuple[str, object]
) -> Sequence[Hyperparameter]:
    """Return the paper's hyperparameters with their sources, or at another scale ours: `own_settings`."""
    return HYPERPARAMETERS[item] if scale == "paper" else own_settings(experiments, *more)


def findings(
    item: str,
    scale: Scale,
    recorder: RecordingRunner,
    *,
    verdicts: Sequence[Verdict],
    notes: Sequence[str] = (),
    **shown: Any,
) -> Findings:
    """Return findings with the runs that a recorder has noted; at the scale of a smoke test nothing is judged.

    ``notes`` follow those of the paper's claims; ``shown`` are tables, figures, hyperparameters and other fields.
    """
    claims = CLAIMS[item]
    common = {"title": claims.title, "source": claims.source, "about_scale": about_scale(item, scale)}
    return Findings(
        **{**common, **shown},
        item=item,
        scale=scale,
        verdicts=verdicts_at(scale, verdicts),
        notes=[*claims.notes, *notes, *power_note(item, scale), *said_in_text(item), *recorder.notes],
        cut=CUTS.get(item, ()) if scale == "laptop" else (),
        runs=recorder.runs,
        num_missing=recorder.num_missing,
    )


def table_findings(
    item: str,
    scale: Scale,
    runner: Runner,
    conditions: Sequence[Condition],
    further: Callable[[Sequence[MethodResult]], Sequence[tuple[str, Sequence[Contrast]]]] = lambda _: (),
    **shape: Any,
) -> Findings:
    """Run the conditions of a table and return what they show.

    ``further`` returns claims on several conditions, with the comparisons that each consists of; ``shape`` are the
    other arguments of `condition_tables`.
    """
    recorder, claims = RecordingRunner(runner), CLAIMS[item]
    entries = run_conditions(conditions, recorder, item, replica_seeds(scale))
    given = HYPERPARAMETERS[item] if scale == "paper" else ()
    shown = condition_tables(entries, claims, scale, hyperparameters=given, further=further(entries), **shape)
    said = [f'The paper says: "{s.claim}" {s.own_numbers}' for s in claims.statements]
    return replace(
        findings(item, scale, recorder, **shown),
        notes=[*said, *claims.notes, *power_note(item, scale), *said_in_text(item)],
        runs=recorder.complete_runs,
        num_missing=recorder.num_missing + sum(entry.chosen is None for entry in entries),
    )
