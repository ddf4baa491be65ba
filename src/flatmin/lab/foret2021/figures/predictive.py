"""Figure 3, right (Section 4.1): how well m-sharpness predicts the generalization gap, over m.

    flatmin reproduce predictive --scale laptop    # 14 minutes on two cores

Over 47 models m-sharpness tells more of the gap the larger m is. All verdicts are in docs/reproduction.md.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import rankdata

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import about_scale, findings, item
from flatmin.lab.foret2021.scales import start
from flatmin.lab.foret2021.settings import DEFAULT_RHO, M_SHARPNESS
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Model, Optim
from flatmin.lab.studies.findings import (
    Cell,
    Findings,
    LineFigure,
    Row,
    Series,
    Table,
    Verdict,
    VerdictStatus,
    own_settings,
)
from flatmin.lab.studies.statistics import SIGNIFICANT, Interval
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Sharpness
from flatmin.measures import predictive_power
from flatmin.measures.predictive import Score

PGDL = (
    "At the paper's scale this needs the models of the two public tasks of the NeurIPS 2020 competition 'Predicting "
    "Generalization in Deep Learning' (https://competitions.codalab.org/competitions/25301), which cannot be trained "
    "again from what is published. Nothing was run. The laptop scale trains its own zoo."
)
ABOUT_ZOO = (
    "Its own zoo instead of the competition's models: {num} small Wide ResNets on {size:,} images of {dataset}, "
    "over width, depth, learning rate, batch size and weight decay, each trained until the mean loss of an epoch is at "
    "most {loss:g}."
)
HYPERPARAMETER_NAMES = ("width", "depth", "learning rate", "batch size", "weight decay")
NUM_SWAPS = 199
"""Of the test whether one measure predicts better than another."""


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """A grid of models, and when to stop each of them."""

    grid: list[tuple[int, int, float, int, float]]
    """Width, depth, learning rate, batch size and weight decay of each model."""
    stop_loss: float
    epochs: int
    m_values: tuple[int, ...]
    """In addition to m = n, all of the training set."""


ZOOS: dict[Scale, Zoo] = {
    "laptop": Zoo(
        grid=list(itertools.product((1, 2), (10, 16), (0.03, 0.1), (32, 64, 128), (0.0, 1e-3))),
        stop_loss=0.05,
        epochs=60,
        m_values=(1, 4, 16, 64, 256),
    ),
    "smoke": Zoo(
        grid=list(itertools.product((1, 2), (10,), (0.05, 0.1), (20,), (0.0,))),
        stop_loss=100.0,
        epochs=1,
        m_values=(4,),
    ),
}


@dataclass(frozen=True)
class Member:
    """A model of the zoo that counts."""

    run: str
    hyperparameters: tuple[float, ...]
    gap: float
    """Test error minus training error, in points."""
    sharpness: Mapping[int | None, float]
    """By m; None is the whole training set."""


def predictive(scale: Scale, known: Known) -> Findings:
    """Score m-sharpness as a predictor of the generalization gap over a zoo of models, for several m.

    Models that do not reach the loss at which all are stopped, or have no finite sharpness, are left out and counted.
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
    zoo, jobs, measurements = ZOOS[scale], zoo_jobs(scale), sharpness_measurements(ZOOS[scale])
    members: list[Member] = []
    num_short, num_not_finite = 0, 0
    num_missing = sum(not job.is_complete(known[job.name]) for job in jobs)
    for h, record in zip(zoo.grid, (known[job.name] for job in jobs), strict=True):
        if record.state != "finished" or not all(m.name in record.measured for m in measurements.values()):
            continue
        sharpness = {m: float(record.measured[how.name]["m_sharpness"]) for m, how in measurements.items()}
        metrics = record.metrics
        if (loss := metrics["train_loss"]) is None or loss > zoo.stop_loss:
            num_short += 1
        elif not all(map(math.isfinite, sharpness.values())):
            num_not_finite += 1
        else:
            gap = 100 * (float(metrics["test_error"] or 0.0) - float(metrics["train_error"] or 0.0))
            members.append(Member(record.name, h, gap, sharpness))
    scores = {m: score for m in measurements if (score := _score(members, m)) is not None}
    size, dataset = jobs[0].experiment.data.train_size or 0, jobs[0].experiment.data.name
    about = ABOUT_ZOO.format(num=len(jobs), size=size, dataset=dataset, loss=zoo.stop_loss)
    return findings(
        "predictive",
        scale,
        tables=[_table(scores, members)] if scores else [],
        figures=_figures(scores, members, size) if scores else [],
        verdicts=[_verdict(claim, scores, members, num_missing)],
        hyperparameters=own_settings(
            [job.experiment for job in jobs], ("loss to stop at", zoo.stop_loss), ("rho of the measure", DEFAULT_RHO)
        ),
        notes=[
            f"{len(members)} models of {len(jobs)} are counted; {num_short} did not come to the loss of "
            f"{zoo.stop_loss:g} in {zoo.epochs} epochs and are left out.",
            *([f"{num_not_finite} more have a sharpness that is not finite, and are left out."] * bool(num_not_finite)),
            "The gap is test error minus training error (of the last epoch, as it was trained).",
        ],
        about_scale=about if scale == "laptop" else f"{about_scale('predictive', scale)} {about}",
    )


def zoo_jobs(scale: Scale) -> list[Job]:
    """Return a model for each point of the grid, in the order of ``Zoo.grid``."""
    zoo = ZOOS[scale]
    base = start(scale, M_SHARPNESS, rho=0.0)
    base = replace(base, epochs=zoo.epochs, evaluate_every=zoo.epochs, stop_loss=zoo.stop_loss)
    measurements = tuple(sharpness_measurements(zoo).values())
    jobs = []
    for width, depth, lr, batch_size, decay in zoo.grid:
        experiment = replace(
            base,
            name=f"predictive/width {width}, depth {depth}, lr {lr:g}, batch {batch_size}, decay {decay:g}",
            data=replace(base.data, batch_size=batch_size),
            model=Model(name=f"wrn-{depth}-{width}"),
            # Constant: when the loss is reached must not depend on a schedule that ends at 0.
            optim=Optim(lr=lr, weight_decay=decay, schedule="constant"),
        )
        jobs.append(Job(experiment=experiment, measurements=measurements))
    return jobs


def sharpness_measurements(zoo: Zoo) -> dict[int | None, Sharpness]:
    """Return how m-sharpness is measured, by m; None is the whole training set."""
    return {m: Sharpness(rho=DEFAULT_RHO, m=m) for m in (*zoo.m_values, None)}


def _score(members: Sequence[Member], m: int | None) -> Score | None:
    """Return the score; None where no two models share two hyperparameters and differ in the gap: too few, so far."""
    gaps_of: dict[tuple[float, ...], set[float]] = {}
    for member in members:
        h = member.hyperparameters
        for first, second in itertools.combinations(range(len(h)), 2):
            gaps_of.setdefault((first, second, h[first], h[second]), set()).add(member.gap)
    if not any(len(gaps) > 1 for gaps in gaps_of.values()):
        return None
    gaps, grid = [member.gap for member in members], [member.hyperparameters for member in members]
    return predictive_power([member.sharpness[m] for member in members], gaps, grid)


def better_predictor(
    first: Sequence[float], second: Sequence[float], gaps: Sequence[float], grid: Sequence[tuple[float, ...]]
) -> float:
    """Return the two-sided p-value that two measures predict the gap equally well.

    If they do, it does not matter which of the two ranks of a model belongs to which measure: they are swapped at
    random, model by model, and the difference of the scores is compared with the differences after swapping.
    """
    ranks = np.stack([rankdata(first), rankdata(second)])
    rng = np.random.default_rng(0)

    def difference(pair: np.ndarray) -> float:
        one, two = (predictive_power(row.tolist(), gaps, grid, permutations=1).score for row in pair)
        return one - two

    observed = abs(difference(ranks))
    swapped = [np.where(rng.random(len(gaps)) < 0.5, ranks, ranks[::-1]) for _ in range(NUM_SWAPS)]
    as_large = sum(abs(difference(pair)) >= observed - 1e-12 for pair in swapped)
    return (1 + as_large) / (1 + NUM_SWAPS)


def _verdict(claim: str, scores: Mapping[int | None, Score], members: Sequence[Member], num_missing: int) -> Verdict:
    if num_missing:
        why = f"{num_missing} models of the zoo are missing; nothing is judged before all are available."
        return Verdict(claim=claim, status="not tested", evidence=why)
    numbers = [m for m in scores if m is not None]
    if not numbers or None not in scores:
        return Verdict(claim=claim, status="not tested", evidence="Too few models are available to score a measure.")
    smallest = min(numbers)
    small, whole = scores[smallest], scores[None]
    gaps, grid = [member.gap for member in members], [member.hyperparameters for member in members]
    of_small, of_whole = ([member.sharpness[m] for member in members] for m in (smallest, None))
    p = better_predictor(of_small, of_whole, gaps, grid)
    status: VerdictStatus = "inconclusive"
    if p < SIGNIFICANT:
        status = "reproduced" if small.score > whole.score else "not reproduced"
    said = [
        f"score {small.score:.3f} for m = {smallest} and {whole.score:.3f} for m = n; "
        f"{small.num_models} models, p = {p:.2g}"
    ]
    for name, score in ((f"m = {smallest}", small), ("m = n", whole)):
        if score.score <= score.null_high:
            said.append(f"{name} scores no more than a shuffled measure may (up to {score.null_high:.3f})")
        if score.kendall_tau < 0:
            said.append(f"{name} orders the models the wrong way round (Kendall's tau {score.kendall_tau:.2f})")
    if status == "reproduced" and (small.score <= small.null_high or small.kendall_tau < 0):
        status = "not reproduced"  # a better score that is not evidence, or of the wrong sign, is not what is claimed
    return Verdict(claim=claim, status=status, evidence="; ".join(said) + ".")


def _table(scores: Mapping[int | None, Score], members: Sequence[Member]) -> Table:
    runs = tuple(member.run for member in members)
    rows: list[Row] = [
        [
            _m_text(m),
            Cell(measured=Interval(score.score, math.nan), unit="", runs=runs),
            f"{score.null_low:.3f} to {score.null_high:.3f}",
            f"{score.kendall_tau:.3f}",
        ]
        for m, score in scores.items()
    ]
    return Table(
        title="Predictive power of m-sharpness",
        columns=["m", "score", "of a shuffled measure (95 %)", "Kendall's tau"],
        rows=rows,
        note="The score is the smallest normalized mutual information given two hyperparameters, in [0, 1].",
    )


def _figures(scores: Mapping[int | None, Score], members: Sequence[Member], size: int) -> list[LineFigure]:
    runs = tuple(member.run for member in members)
    x = [float(size if m is None else m) for m in scores]
    values = list(scores.values())
    said = [
        ", ".join(f"{n} {v:g}" for n, v in zip(HYPERPARAMETER_NAMES, member.hyperparameters, strict=True))
        for member in members
    ]
    gaps, smallest = [member.gap for member in members], min(m for m in scores if m is not None)
    return [
        LineFigure(
            title="Predictive power of m-sharpness over m",
            x_label="m (the last: all training images)",
            y_label="score",
            series=[
                Series(name="m-sharpness", x=x, y=[s.score for s in values]),
                Series(name="shuffled, 97.5 %", x=x, y=[s.null_high for s in values], mode="lines"),
                Series(name="shuffled, 2.5 %", x=x, y=[s.null_low for s in values], mode="lines"),
            ],
            log_x=True,
            runs=runs,
        ),
        LineFigure(
            title="Each model: m-sharpness and generalization gap",
            x_label="m-sharpness",
            y_label="generalization gap, points",
            series=[
                Series(
                    name=f"m = {_m_text(m)}",
                    x=[member.sharpness[m] for member in members],
                    y=gaps,
                    hover=said,
                    mode="markers",
                )
                for m in (smallest, None)
            ],
            runs=runs,
        ),
    ]


def _m_text(m: int | None) -> str:
    return "n" if m is None else str(m)


PREDICTIVE = item("predictive", lambda scale, _: {"zoo": zoo_jobs(scale)} if scale in ZOOS else {}, predictive)
