"""Figure 3, right (Section 4.1): how well m-sharpness predicts the generalization gap, over m.

    flatmin reproduce predictive --scale laptop    # two hours on two cores

The models are stopped where the training set, evaluated, has one loss: the loss alone predicts the gap otherwise. What
is left of it is a predictor in the same plot, and m is judged again with its ranks taken out. All verdicts are in
docs/reproduction.md.
"""

from collections.abc import Sequence

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.figures.prediction import LOSS, NUM_RESAMPLES, Prediction, predict, smallest_m
from flatmin.lab.foret2021.figures.zoo import (
    RHOS,
    SEEDS,
    TRAIN_SIZE,
    ZOOS,
    Member,
    Zoo,
    counts,
    laptop_settings,
    members,
    zoo_jobs,
)
from flatmin.lab.foret2021.item_findings import findings, item
from flatmin.lab.foret2021.scales import about_scale
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Series, Table, Verdict, VerdictStatus, own_settings
from flatmin.lab.studies.statistics import SIGNIFICANT, holm, p_text
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.training.schedule import TOLERANCE

PGDL = (
    "At the paper's scale this needs the models of the two public tasks of the NeurIPS 2020 competition 'Predicting "
    "Generalization in Deep Learning' (https://competitions.codalab.org/competitions/25301), which cannot be trained "
    "again from what is published. Nothing was run. The laptop scale trains its own zoo."
)
ABOUT_ZOO = (
    "Its own zoo instead of the competition's models: small Wide ResNets in {settings} settings, of which each is "
    "trained with {seeds} seeds on {size:,} images of {dataset}, over width, depth, batch size, weight decay, dropout, "
    "augmentation and learning rate, until the loss on the training set, evaluated, is within {tolerance:.0%} of "
    "{loss:g}."
)
SCORES = ("score", "score, adjusted for the training loss")
ADJUSTED = "Adjusted for the training loss, too:"
LOW, HIGH = ZOOS["laptop"].band
RULES = (
    f"Models: {len(laptop_settings())} settings (half of all combinations of width 1 or 2, depth 10 or 16, batch size "
    "16 or 48, weight decay 0 or 0.001, dropout 0 or 0.2, images mirrored or not, and a learning rate of 0.04, 0.08 or "
    f"0.16, in which every two values meet equally often), each with {len(SEEDS)} seeds, whose means count: gap, "
    "sharpness, training loss.",
    f"Stop: the loss on all {TRAIN_SIZE} training images, as at test time, is evaluated after every epoch. The "
    "learning rate is constant until that loss is 10 times the target (or half of the epochs are done), at most 0.3 of "
    "it then, and at most 0.1 from 4 times (or three quarters) on; it is set so that the loss falls by about 20 % per "
    "epoch at most. A model stops at the first epoch whose loss "
    f"is at most {HIGH:g}. It counts if the loss is in [{LOW:g}, {HIGH:g}] and the learning rate is at most 0.1 of its "
    "peak. A setting counts if both of its models do; the others are dropped and counted. Nothing is replaced.",
    f"Gate: at least {ZOOS['laptop'].least} settings count. Otherwise the verdict is “not tested at this scale”.",
    "rho: one for each m and for all models, so that sharpness differs by model alone: what flatmin.suggest_rho says "
    "for m before training, the mean of WRN-10-2 and WRN-16-2 (seed 2000): "
    f"{', '.join(f'{rho:g} for m = ' + str(m or 'n') for m, rho in RHOS.items())}.",
    "Score: the competition's, the smallest normalized mutual information given two hyperparameters. Tests: the ranks "
    f"of m = 1 and m = n are swapped at random, model by model, {NUM_RESAMPLES:,} times; two-sided, 5 %. Two "
    "comparisons with Holm's correction: the scores, and the scores of what is left of the ranks of sharpness and gap "
    "when a line through the ranks of the training loss is taken out. The claim holds if m = 1 scores significantly "
    "more, more than a shuffled measure may (97.5 %), and orders the models the right way round.",
    "The training loss is a predictor in the same table and plot.",
    "Known when the plan was registered: 47 models of an earlier protocol, stopped at a running loss of 0.05, whose "
    "evaluated loss was between 0.0095 and 0.126 and predicted the gap better than m-sharpness with any m; pilots "
    "(seed 2000, which no other run has). Four corners of the grid (depth 10 with weight decay, dropout and mirrored "
    "images; batch size 48 with a learning rate of 0.04, 16 with 0.16) stopped at losses of 0.054 and 0.051 after 34 "
    "and 37 epochs with width 2, and of 0.054 and 0.054 after 48 and 40 with width 1. With random crops a model was at "
    "0.23 after 110 epochs, and one whose learning rate fell to a tenth at once, at 4 times the target, jumped from "
    "0.126 to 0.038: hence mirrored images, and two decays.",
)


def predictive(scale: Scale, known: Known) -> Findings:
    """Score m-sharpness as a predictor of the generalization gap over a zoo of models, for several m.

    Settings whose models do not both stop in the band around the loss are left out and counted.
    """
    claim = CLAIMS["predictive"].statements[0].claim
    if scale not in ZOOS:
        return findings(
            "predictive",
            scale,
            verdicts=[Verdict(claim=claim, status="not tested", evidence=PGDL)],
            hyperparameters=HYPERPARAMETERS["predictive"],
            notes=[PGDL],
        )
    zoo, jobs = ZOOS[scale], [job for group in zoo_jobs(scale).values() for job in group]
    found = members(scale, known)
    complete = [job for job in jobs if job.is_complete(known[job.name])]
    num_missing = len(jobs) - len(complete)
    num_outside = sum(not counts(known[job.name], zoo, job.experiment.optim.lr) for job in complete)
    plain, adjusted = (predict(found, adjust) for adjust in (False, True))
    experiment = jobs[0].experiment
    size = experiment.data.train_size or 0
    about = ABOUT_ZOO.format(
        settings=len(zoo.settings),
        seeds=len(SEEDS),
        size=size,
        dataset=experiment.data.name,
        tolerance=TOLERANCE,
        loss=zoo.target_loss,
    )
    shown = [] if plain is None or adjusted is None else [(plain, adjusted)]
    return findings(
        "predictive",
        scale,
        tables=[_table(*both, found) for both in shown],
        figures=[figure for both in shown for figure in _figures(*both, found, size)],
        verdicts=_verdicts(claim, zoo, shown, num_missing),
        planned=[f"{score}: m = {smallest_m(zoo.rhos)} vs. m = n" for score in SCORES],
        rules=RULES,
        hyperparameters=own_settings(
            [job.experiment for job in jobs],
            ("dropout", tuple(dict.fromkeys(s.dropout for s in zoo.settings))),
            ("loss to stop at", zoo.target_loss),
            *((f"rho of the measure, m = {_text(m)}", rho) for m, rho in zoo.rhos.items()),
        ),
        notes=[
            f"{len(found)} settings of {len(zoo.settings)} count; of {len(jobs)} models {num_outside} "
            f"did not stop in the band, or diverged, and {num_missing} are missing.",
            "The gap is test error minus training error, both evaluated at the weights whose sharpness was measured.",
        ],
        about_scale=about if scale == "laptop" else f"{about_scale('predictive', scale)} {about}",
    )


def _verdicts(claim: str, zoo: Zoo, shown: Sequence[tuple[Prediction, Prediction]], num_missing: int) -> list[Verdict]:
    """Return the verdicts on the scores, and on the adjusted ones."""
    claims = (claim, f"{ADJUSTED} {claim}")
    if num_missing:
        why = f"{num_missing} models of the zoo are missing; nothing is judged before all are available."
    elif not shown:
        why = "Too few settings count to score a measure."
    else:
        p_values = [prediction.p_value() for prediction in shown[0]]
        return [
            _verdict(text, prediction, p, p_holm, zoo)
            for text, prediction, p, p_holm in zip(claims, shown[0], p_values, holm(p_values), strict=True)
        ]
    return [Verdict(claim=text, status="not tested", evidence=why) for text in claims]


def _verdict(claim: str, prediction: Prediction, p: float, p_holm: float, zoo: Zoo) -> Verdict:
    smallest = smallest_m(prediction.predictors)
    small, whole = prediction.predictors[smallest], prediction.predictors[None]
    num = len(prediction.gaps)
    said = [
        f"score {small.score:.3f} for m = {smallest} and {whole.score:.3f} for m = n; {num} settings, {p_text(p)}, "
        f"{p_text(p_holm)} after Holm's correction for 2 comparisons"
    ]
    if LOSS in prediction.predictors:
        said.append(f"the training loss scores {prediction.predictors[LOSS].score:.3f}")
    for name, one in ((f"m = {smallest}", small), ("m = n", whole)):
        if one.score <= prediction.null[1]:
            said.append(f"{name} scores no more than a shuffled measure may (up to {prediction.null[1]:.3f})")
        if one.tau < 0:
            said.append(f"{name} orders the models the wrong way round (Kendall's tau {one.tau:.2f})")
    status: VerdictStatus = "inconclusive"
    if p_holm < SIGNIFICANT:
        # A better score that is not evidence, or of the wrong sign, is not what is claimed.
        holds = small.score > whole.score and small.score > prediction.null[1] and small.tau > 0
        status = "reproduced" if holds else "not reproduced"
    if num < zoo.least:
        said.insert(0, f"Not a test of the claim at this scale: {num} settings count, fewer than {zoo.least}")
        status = "not tested at this scale"
    return Verdict(claim=claim, status=status, evidence="; ".join(said) + ".")


def _table(plain: Prediction, adjusted: Prediction, found: Sequence[Member]) -> Table:
    rows: list[Row] = []
    for key, one in plain.predictors.items():
        other = adjusted.predictors.get(key)
        after = ("", "") if other is None else (f"{other.score:.3f}", f"{other.tau:.3f}")
        rows.append([_text(key), f"{one.score:.3f}", after[0], f"{one.tau:.3f}", after[1]])
    (low, high), (low_adjusted, high_adjusted) = plain.null, adjusted.null
    losses = [member.loss for member in found]
    return Table(
        title="Predictive power of m-sharpness",
        columns=["m", "score", "score, adjusted", "Kendall's tau", "Kendall's tau, adjusted"],
        rows=rows,
        note="The score is the smallest normalized mutual information given two hyperparameters, in [0, 1]. Adjusted: "
        "of what is left of the ranks when a line through the ranks of the training loss is taken out. A shuffled "
        f"measure scores {low:.3f} to {high:.3f}, adjusted {low_adjusted:.3f} to {high_adjusted:.3f} (95 %). The "
        f"training losses are between {min(losses):.4f} and {max(losses):.4f}. The runs are those of the figures.",
    )


def _figures(plain: Prediction, adjusted: Prediction, found: Sequence[Member], size: int) -> list[LineFigure]:
    runs = tuple(run for member in found for run in member.runs)
    m_values = [m for m in plain.predictors if m != LOSS]
    x = [float(size if m is None else m) for m in m_values]
    ends = [min(x), max(x)]
    said = [member.setting.name for member in found]
    scores, adjusted_scores = ([one.predictors[m].score for m in m_values] for one in (plain, adjusted))
    return [
        LineFigure(
            title="Predictive power of m-sharpness over m",
            x_label="m (the last: all training images)",
            y_label="score",
            series=[
                Series(name="m-sharpness", x=x, y=scores),
                Series(name="m-sharpness, adjusted", x=x, y=adjusted_scores),
                Series(name=LOSS, x=ends, y=[plain.predictors[LOSS].score] * 2, mode="lines"),
                Series(name="shuffled, 97.5 %", x=ends, y=[plain.null[1]] * 2, mode="lines"),
            ],
            log_x=True,
            runs=runs,
        ),
        LineFigure(
            title="Each setting: m-sharpness and generalization gap",
            x_label="m-sharpness",
            y_label="generalization gap, points",
            series=[
                Series(
                    name=f"m = {_text(m)}",
                    x=[member.sharpness[m] for member in found],
                    y=plain.gaps,
                    hover=said,
                    mode="markers",
                )
                for m in (smallest_m(found[0].sharpness), None)
            ],
            log_x=True,
            runs=runs,
        ),
    ]


def _text(key: int | str | None) -> str:
    return "n" if key is None else str(key)


PREDICTIVE = item("predictive", lambda scale, _: zoo_jobs(scale) if scale in ZOOS else {}, predictive)
