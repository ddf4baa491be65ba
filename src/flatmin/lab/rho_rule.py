"""The suggested radius and the tuned one: does ``flatmin.suggest_rho`` make the search unnecessary?

Not in the paper: a study of our own, on the conditions of Tables 1, 4 and 5, on a text and on a table.

    flatmin reproduce rho-rule --scale laptop      # about two hours of two cores beyond those tables
    flatmin reproduce rho-rule --scale smoke       # seconds
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flatmin.lab.errors import SpecError
from flatmin.lab.foret2021 import protocol
from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.foret2021.tables.from_scratch import svhn_fashion_conditions, table1_conditions
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import Condition, MethodResult, better, by_condition, conditions_item
from flatmin.lab.studies.contrasts import Family, OneSided, mean
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Series, Table, Verdict, VerdictStatus, own_settings
from flatmin.lab.studies.methods import Method, with_rho
from flatmin.lab.studies.replicas import metric, runs_of
from flatmin.lab.studies.statistics import SIGNIFICANT
from flatmin.lab.studies.study import Scale

KEPT = 0.9
"""The share of the tuned gain that the suggestion has to keep."""
NEAR, MOST_OF_THEM = (0.5, 2.0), 0.8
"""Where the best factor should be, and in how many of the conditions."""
TUNED = protocol.SAM_WITH_M
SUGGESTED, DEFAULT = f"{TUNED}, suggested rho", f"{TUNED}, rho 0.05"
AUGMENTS = ("basic", "none")
NOISE = (40, 80)
"""The augmentations of Table 1 and the noise levels of Table 4, in %, that are in the study."""
TITLE, SOURCE = "The suggested radius and the tuned one", "Our own study, not in the paper"
ABOUT = (
    "The conditions of Tables 1 and 5 (Cutout apart) and of Table 4 by the same protocol, and two that are not images "
    "with a ResNet: a character transformer with AdamW on 2,000 texts of 64 characters, and a perceptron on a table of "
    "500 digits with 40 % noisy labels. One eps for 16 examples throughout."
)
KEEPS = f"The suggested rho keeps at least {KEPT:.0%} of the gain of the tuned one, over conditions."
LIES = f"The best factor of the suggestion is in [1/2, 2] in at least {MOST_OF_THEM:.0%} of the conditions."
RULES = (
    *protocol.RULES[:2],
    "In each condition that passes the gate: e0 is the mean test error of the baseline that counts, e* with the factor "
    "that was chosen, e1 with factor 1 (the suggestion itself), five replicas each.",
    f"Claim 1 holds if e1 - (e0 - {KEPT:g} (e0 - e*)), in % of e0, is below 0 in the mean over conditions (one-sided "
    "t-test, 5 %; a condition is one value). It does not if the 95 % interval of the mean lies above 0.",
    "A condition in which the chosen factor has no lower mean error than the baseline has no gain to keep, and is not "
    "counted for claim 1.",
    f"Claim 2 holds if the chosen factor is in [1/2, 2] in at least {MOST_OF_THEM:.0%} of the conditions: a count.",
    "Shares of a gain are printed only where the gain itself is significant (paired t-test by seed, 5 %).",
    "Before the plan, one pilot each without SAM (seed 2000, which no other run has) showed that the conditions that "
    "are not in Tables 1 and 5 fit their training sets. The text's learning rate, 0.003, is the better of two for "
    "AdamW. They were not run with SAM.",
    "Known when the plan was registered: Table 5's choice (its best factor is 1/4) and its replicas with that factor.",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one condition says of the rule."""

    name: str
    tuned: MethodResult
    suggested: MethodResult
    default: MethodResult
    baseline: MethodResult
    """The one with the lowest mean error."""

    @property
    def factor(self) -> float:
        """The best factor on the validation split."""
        assert self.tuned.chosen is not None
        return self.tuned.chosen.optim.rho_number

    @property
    def gate_note(self) -> str | None:
        """Why the condition does not count; None if it does."""
        return self.baseline.unfit_note or self.tuned.gate_note

    @property
    def gain_note(self) -> str | None:
        """Says that there is no gain to keep; None if there is one."""
        e0, best = _error(self.baseline), _error(self.tuned)
        return None if best < e0 else f"tuned, its error is {best:.1f} %, and {self.baseline.method.name}'s {e0:.1f} %"

    @property
    def gain_is_significant(self) -> bool:
        """Whether the tuned radius has a lower error than the baseline."""
        contrast = self.tuned.replicas.lower_than(self.baseline.replicas, "test error", "test_error")
        return contrast.p_value < SIGNIFICANT and mean(contrast.differences) < 0

    @property
    def excess(self) -> float:
        r"""By how much the error at factor 1 is above :math:`e_0 - k (e_0 - e_*)`, in % of :math:`e_0`."""
        e0, best, at_one = (_error(r) for r in (self.baseline, self.tuned, self.suggested))
        return 100 * (at_one - (e0 - KEPT * (e0 - best))) / e0


def conditions(scale: Scale) -> list[Condition]:
    """Return the conditions, with the methods that the study compares."""
    if scale == "paper":
        raise SpecError("rho-rule is our own study, which is not in the paper: use --scale laptop.")
    if scale == "smoke":
        start = smoke("cnn-2")
        found = [Condition(labels=("cnn-2",), column="digits", start=start, methods=protocol.few_arms(), claimed={})]
    else:
        tables = [*table1_conditions(scale), *svhn_fashion_conditions(scale)]
        found = [condition for condition in tables if condition.start.data.augment in AUGMENTS]
        found += [_own_condition(protocol.noisy(percent), f"{percent}% noise", "fashion-mnist") for percent in NOISE]
        found += [_text(), perceptron_condition()]
    return [_with_the_rule(condition) for condition in found]


def _with_the_rule(condition: Condition) -> Condition:
    tuned = next(method for method in condition.methods if method.name == TUNED)
    needed = {"SGD", *tuned.against[0]}
    methods = [method for method in condition.methods if method.name in needed]
    suggested = Method(name=SUGGESTED, candidates=with_rho(["auto"], protocol.M), after="SGD")
    default = Method(name=DEFAULT, candidates=with_rho([0.05], protocol.M), after="SGD")
    return replace(condition, methods=(*methods, tuned, suggested, default))


def _text() -> Condition:
    start = Experiment(
        data=Data(name="python-text", train_size=2000),
        model=Model(name="char-transformer-2-64"),
        optim=Optim(name="adamw", lr=3e-3, weight_decay=0.1, warmup_epochs=2),
        epochs=60,
        evaluate_every=60,
    )
    return _own_condition(start, "char-transformer, AdamW", "python-text")


def perceptron_condition() -> Condition:
    """Return a perceptron on a table of 500 digits with noisy labels."""
    start = Experiment(
        data=Data(name="digits", train_size=500, label_noise=0.4),
        model=Model(name="mlp-2-256"),
        optim=Optim(lr=0.05),
        epochs=200,
        evaluate_every=200,
    )
    return _own_condition(start, "perceptron, 40% noise", "digits")


def _own_condition(start: Experiment, label: str, column: str) -> Condition:
    limit = protocol.MOST_NOISY_TRAIN_ERROR if start.data.label_noise else protocol.MOST_TRAIN_ERROR
    return Condition(
        labels=(label,), column=column, start=start, methods=protocol.few_arms(), claimed={}, most_train_error=limit
    )


def rho_rule(scale: Scale, entries: Sequence[MethodResult]) -> Findings:
    """Say what the suggestion keeps of the tuned gain, and where the best factor lies."""
    results = by_condition(entries)
    outcomes = [found for own in results if (found := _outcome(own)) is not None]
    return Findings(
        item="rho-rule",
        scale=scale,
        title=TITLE,
        source=SOURCE,
        about_scale=ABOUT if scale == "laptop" else "One epoch on 40 digits: this shows that everything runs.",
        tables=[_outcome_table(outcomes)] if outcomes else [],
        figures=_figures(entries, outcomes),
        verdicts=_verdicts(outcomes, len(results)),
        hyperparameters=own_settings([e.chosen for e in entries if e.chosen is not None]),
        planned=[KEEPS, LIES],
        rules=RULES,
        notes=[
            *(f"Not counted: {o.name}. {o.gate_note}." for o in outcomes if o.gate_note is not None),
            *(
                f"Not counted for claim 1: {o.name}, where {o.gain_note}."
                for o in outcomes
                if o.gate_note is None and o.gain_note is not None
            ),
        ],
    )


def _outcome(entries: Sequence[MethodResult]) -> Outcome | None:
    """Return what a condition says; None while a replica is missing."""
    if any(entry.incomplete_reason for entry in entries):
        return None
    by_name = {entry.method.name: entry for entry in entries}
    tuned = by_name[TUNED]
    return Outcome(
        name=tuned.condition.name,
        tuned=tuned,
        suggested=by_name[SUGGESTED],
        default=by_name[DEFAULT],
        baseline=better([by_name[name] for name in tuned.method.against[0]], "test_error"),
    )


def _error(result: MethodResult) -> float:
    return mean(result.values("test_error").values())


def _verdicts(outcomes: Sequence[Outcome], num_conditions: int) -> list[Verdict]:
    passing = [o for o in outcomes if o.gate_note is None]
    counted = [o for o in passing if o.gain_note is None]
    contrast = OneSided(
        quantity="error above the limit, % of the baseline's",
        lower_name="suggested rho",
        higher_name="limit",
        lower={n: o.excess for n, o in enumerate(counted)},
        higher=dict.fromkeys(range(len(counted)), 0.0),
        num_asked=2,
        runs=runs_of(r.replicas for o in counted for r in (o.baseline, o.tuned, o.suggested)),
    )
    near = sum(NEAR[0] <= o.factor <= NEAR[1] for o in passing)
    complete = f"{len(outcomes)} of {num_conditions} conditions are complete"
    evidence = f"{complete}, and {len(passing)} of them pass their gate"
    if len(outcomes) < num_conditions or contrast.waits:
        return [Verdict(claim=claim, status="not tested", evidence=f"{evidence}.") for claim in (KEEPS, LIES)]
    lies: VerdictStatus = "kept" if near >= MOST_OF_THEM * len(passing) else "not kept"
    return [
        contrast.kept(Family([contrast]).judge(KEEPS, [contrast])),
        Verdict(claim=LIES, status=lies, evidence=f"{evidence}; the factor is in [1/2, 2] in {near}."),
    ]


def _outcome_table(outcomes: Sequence[Outcome]) -> Table:
    rows: list[Row] = []
    for o in outcomes:
        e0, best, at_one = (_error(r) for r in (o.baseline, o.tuned, o.suggested))
        share = f"{100 * (e0 - at_one) / (e0 - best):.0f} %" if o.gain_is_significant else ""
        rows.append(
            [
                o.name,
                o.suggested.replicas.cell(metric("rho", 1.0), unit=""),
                f"{o.factor:g}",
                o.baseline.replicas.cell("test_error", note=o.baseline.method.name),
                *(result.replicas.cell("test_error") for result in (o.default, o.suggested, o.tuned)),
                share,
            ]
        )
    return Table(
        title="The suggested radius and the tuned one",
        columns=(
            *("condition", "suggested rho", "best factor", "without SAM", "rho 0.05", "suggested", "tuned"),
            "share of the tuned gain that the suggestion keeps",
        ),
        rows=rows,
        note="Test errors, mean and 95 % interval over replicas. The best factor was chosen on the validation split.",
    )


def _figures(entries: Sequence[MethodResult], outcomes: Sequence[Outcome]) -> list[LineFigure]:
    """Return the test error over rho / suggestion, each condition in units of its own gain."""
    gains = {o.name: _error(o.baseline) - _error(o.tuned) for o in outcomes}
    series = []
    for tuned in (entry for entry in entries if entry.method.name == TUNED):
        name, points = tuned.condition.name, {}
        for experiment, record in tuned.tried:
            error = record.metrics.get("test_error")
            if error is not None and math.isfinite(error):
                points[experiment.optim.rho_number] = 100 * error
        if points and gains.get(name, 0.0) > 0:
            lowest = min(points.values())
            x = sorted(points)
            series.append(Series(name=name, x=x, y=[(points[f] - lowest) / gains[name] for f in x]))
    figure = LineFigure(
        title="Test error over rho, in units of the suggestion",
        x_label="rho / suggested rho",
        y_label="test error above the lowest / gain",
        series=series,
        log_x=True,
        note="The runs that choose rho, one for each factor. At 1 all of the gain is lost.",
        runs=[record.name for entry in entries for _, record in entry.tried if record.state == "finished"],
    )
    return [figure] if series else []


RHO_RULE = conditions_item("rho-rule", TITLE, SOURCE, conditions, rho_rule)
