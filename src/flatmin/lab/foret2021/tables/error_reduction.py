"""By how much SAM lowers the error, one point for each condition: the left of Figure 1."""

from collections.abc import Mapping, Sequence
from statistics import mean

from scipy.stats import binomtest

from flatmin.lab.foret2021.claims.figures import FIGURES, error_reductions
from flatmin.lab.foret2021.scales import SUMMARIES, replica_seeds
from flatmin.lab.foret2021.tables.fine_tuning import fine_tuning_conditions
from flatmin.lab.foret2021.tables.from_scratch import svhn_fashion_conditions, table1_conditions
from flatmin.lab.foret2021.tables.imagenet import imagenet_conditions
from flatmin.lab.studies.conditions import MethodResult, better, run_conditions
from flatmin.lab.studies.contrasts import verdicts_at
from flatmin.lab.studies.findings import Findings, LineFigure, Series, Verdict, VerdictStatus
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.statistics import SIGNIFICANT, holm
from flatmin.lab.sweeps.runners import Runner

LAPTOP_SUMMARY = (
    "The laptop's conditions of Tables 1, 2, 3 and 5: small networks on 1,000 images of CIFAR-10 or Fashion-MNIST, and "
    "EfficientNet-Lite0 fine-tuned on Flowers-102, in place of the paper's networks and datasets. What can be compared "
    "is the sign of a reduction, not its size."
)


def error_reduction(scale: Scale, runner: Runner) -> Findings:
    """Figure 1, left: 100 (1 - SAM's mean error / the baseline's), over the conditions of Tables 1, 2, 3 and 5."""
    conditions = [*table1_conditions(scale), *imagenet_conditions(scale), *svhn_fashion_conditions(scale)]
    conditions += fine_tuning_conditions(scale, runner)
    conditions = list({condition.name: condition for condition in conditions}.values())  # Tables 1 and 5 may share some
    entries, needed = run_conditions(conditions, runner, "error-reduction", replica_seeds(scale))
    measured = _reductions(entries)
    claimed = sorted(error_reductions().items(), key=lambda pair: pair[1])
    series = [
        Series(
            name="claimed by the paper",
            x=list(range(len(claimed))),
            y=[value for _, value in claimed],
            hover=[name for name, _ in claimed],
            mode="markers",
        )
    ]
    for method in dict.fromkeys(method for _, method in measured):
        points = sorted(((v, name) for (name, m), v in measured.items() if m == method), key=lambda pair: pair[0])
        series.append(
            Series(
                name=f"measured: {method}",
                x=list(range(len(points))),
                y=[value for value, _ in points],
                hover=[name for _, name in points],
                mode="markers",
            )
        )
    figure = FIGURES["error-reduction"]
    done = [outcome for outcome in needed if outcome.complete]
    return Findings(
        item="error-reduction",
        scale=scale,
        title=figure.title,
        source=figure.source,
        about_scale=LAPTOP_SUMMARY if scale == "laptop" else SUMMARIES[scale],
        figures=[
            LineFigure(
                title="Error reduction with SAM, by condition",
                x_label="condition, in ascending order",
                y_label="error reduction, % of the baseline's error",
                series=series,
                runs=[o.job.name for e in entries for o in e.replicas if o.result is not None],
            )
        ],
        verdicts=verdicts_at(scale, [_verdict(measured)]),
        notes=figure.notes,
        runs=list(dict.fromkeys(outcome.job.name for outcome in done)),
        num_missing=len({outcome.job.name for outcome in needed if not outcome.complete})
        + sum(entry.chosen is None for entry in entries),
    )


def _reductions(entries: Sequence[MethodResult]) -> dict[tuple[str, str], float]:
    """Return the reduction in % by condition and method, against the better baseline, where all runs are there."""
    by_name = {(e.condition.name, e.method.name): e for e in entries}
    found = {}
    for entry in entries:
        baselines = [by_name[entry.condition.name, name] for group in entry.method.against[:1] for name in group]
        if baselines and not any(e.incomplete_reason for e in (entry, *baselines)):
            base = mean(better(baselines, "test_error").values("test_error").values())
            if base > 0:
                own = mean(entry.values("test_error").values())
                found[entry.condition.name, entry.method.name] = 100 * (1 - own / base)
    return found


def _verdict(measured: Mapping[tuple[str, str], float]) -> Verdict:
    """Judge by a sign test over the conditions, for each method that has SAM, Holm-corrected; all of them must hold."""
    (statement,) = FIGURES["error-reduction"].statements
    if not measured:
        return Verdict(claim=statement.claim, status="not tested", evidence="No condition has been run.")
    by_method: dict[str, list[float]] = {}
    for (_, method), value in measured.items():
        by_method.setdefault(method, []).append(value)
    p_values = holm([_sign_test(values) for values in by_method.values()])
    statuses: list[VerdictStatus] = []
    said = []
    for (method, values), p in zip(by_method.items(), p_values, strict=True):
        lower, higher = sum(value > 0 for value in values), sum(value < 0 for value in values)
        statuses.append("inconclusive" if p >= SIGNIFICANT else "reproduced" if lower > higher else "not reproduced")
        said.append(
            f"{method}: the mean error is lower in {lower} of {len(values)} conditions (from {min(values):+.1f} to "
            f"{max(values):+.1f} % of the baseline's error), sign test p = {p:.2g}"
        )
    if len(by_method) > 1:
        said.append("p-values are Holm's")
    verdict: VerdictStatus = "reproduced" if set(statuses) == {"reproduced"} else "inconclusive"
    return Verdict(
        claim=statement.claim,
        status="not reproduced" if "not reproduced" in statuses else verdict,
        evidence="; ".join(said) + ". The tables have the test of each condition.",
    )


def _sign_test(values: Sequence[float]) -> float:
    """Return the two-sided p-value that a higher error is as likely as a lower one; ties say nothing."""
    lower, higher = sum(value > 0 for value in values), sum(value < 0 for value in values)
    return float(binomtest(lower, lower + higher).pvalue) if lower + higher else 1.0
