"""What the findings of all items have in common: what differs at a scale, what was cut, what could be shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.foret2021.claims.figures import CLAIMS, said_in_text
from flatmin.lab.foret2021.scales import CUTS, NUM_CURVATURE_REPLICAS, TABLE8_REPLICAS, about_scale
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.condition_tables import condition_tables
from flatmin.lab.studies.conditions import NUM_REPLICAS, Condition, MethodResult, conditions_item
from flatmin.lab.studies.contrasts import Contrast
from flatmin.lab.studies.findings import Findings, Hyperparameter, Table, own_settings
from flatmin.lab.studies.statistics import detectable_effect
from flatmin.lab.studies.study import Groups, Item, Known, Scale

Further = Sequence[tuple[str, Sequence[Contrast]]]
"""Claims, each with the comparisons that it consists of."""
ERROR_SPREAD = (0.8, "points of test error", NUM_REPLICAS, "Table 1 on Fashion-MNIST")
FINE_TUNING_SPREAD = (0.56, "points of test error", NUM_REPLICAS, "five pairs of its earlier protocol")
SPREADS: dict[str, tuple[float, str, int, str]] = {
    **dict.fromkeys(("table1", "imagenet", "label-noise", "svhn-fashion", "rho-0.05"), ERROR_SPREAD),
    **dict.fromkeys(("p-norm", "second-order", "inner-steps"), ERROR_SPREAD),
    **dict.fromkeys(("fine-tuning", "fine-tuning-rho-0.05"), FINE_TUNING_SPREAD),
    "m-and-rho": (1.13, "points of test error", NUM_REPLICAS, "two independent ones of Table 1 on Fashion-MNIST (0.8)"),
    "landscape": (1.2, "in the mean rise of the loss", NUM_CURVATURE_REPLICAS, "five pairs of Figure 1"),
    "hessian": (0.12, "in log10 of lambda_max", NUM_CURVATURE_REPLICAS, "an earlier protocol at epochs 4 and 20"),
    "noise-and-rho": (0.8, "points of validation error", TABLE8_REPLICAS, "Table 1 on Fashion-MNIST"),
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


def hyperparameters(
    item: str, scale: Scale, experiments: Sequence[Experiment], *more: tuple[str, object]
) -> Sequence[Hyperparameter]:
    """Return the paper's hyperparameters with their sources, or at another scale ours: `own_settings`."""
    return HYPERPARAMETERS[item] if scale == "paper" else own_settings(experiments, *more)


def findings(
    item: str, scale: Scale, *, notes: Sequence[str] = (), rules: Sequence[str] = (), **shown: Any
) -> Findings:
    """Return findings with what all items have in common.

    ``notes`` follow the notes on the paper's claims; ``rules`` are the laptop's registered protocol, if any,
    and are followed by its power; ``shown`` are verdicts, tables, figures and others.
    """
    claims = CLAIMS[item]
    common = {"title": claims.title, "source": claims.source, "about_scale": about_scale(item, scale)}
    return Findings(
        **{**common, **shown},
        item=item,
        scale=scale,
        notes=[*claims.notes, *notes, *power_note(item, scale), *said_in_text(item)],
        rules=[*rules, *power_note(item, scale)] if rules and scale == "laptop" else [],
        cut=CUTS.get(item, ()) if scale == "laptop" else (),
    )


def table_findings(
    item: str,
    scale: Scale,
    entries: Sequence[MethodResult],
    further: Further = (),
    more: Sequence[Table] = (),
    rules: Sequence[str] = (),
    **shape: Any,
) -> Findings:
    """Return what the conditions of a table show.

    ``further`` are claims on several conditions, ``more`` tables that follow, ``rules`` the protocol's; ``shape`` are
    the other arguments of `condition_tables`.
    """
    claims = CLAIMS[item]
    given = HYPERPARAMETERS[item] if scale == "paper" else ()
    shown = condition_tables(entries, claims, scale, hyperparameters=given, further=further, **shape)
    said = [f'The paper says: "{s.claim}" {s.own_numbers}' for s in claims.statements]
    found = findings(item, scale, rules=rules, **shown)
    return replace(found, tables=[*found.tables, *more], notes=[*said, *found.notes])


def table_item(
    name: str,
    conditions: Callable[[Scale], Sequence[Condition]],
    further: Callable[[Sequence[MethodResult]], Further] = lambda _: (),
    shape: Callable[[Scale], dict[str, Any]] = lambda _: {},
    first: Callable[[Scale], Groups] = lambda _: {},
) -> Item:
    """Return a table as an item: its conditions, claims on several of them, its shape, and runs that come first."""

    def findings_of(scale: Scale, entries: Sequence[MethodResult]) -> Findings:
        return table_findings(name, scale, entries, further(entries), **shape(scale))

    return conditions_item(name, CLAIMS[name].title, CLAIMS[name].source, conditions, findings_of, first)


def item(name: str, jobs: Callable[[Scale, Known], Groups], findings_of: Callable[[Scale, Known], Findings]) -> Item:
    """Return one of the paper's tables or figures."""
    return Item(name=name, title=CLAIMS[name].title, source=CLAIMS[name].source, jobs=jobs, findings=findings_of)
