"""The studies of figures on invented runs with known numbers: what is said of them."""

import math

import numpy as np
import pytest

from flatmin.lab.foret2021.figures.bound import NOISE_SCALES, TERMS
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.findings import Comparison
from flatmin.lab.studies.study import planned_jobs
from invented_runs import cells, invented_findings, only, wobble


def found_in(name, *how, scale="laptop"):
    return invented_findings(ITEMS[name], scale, *how)


def tuned(job):
    """Metrics of runs that choose rho, and of replicas where only measures matter."""
    return {"test_error": 0.1, "train_loss": 0.01, "valid_error": 0.1}


def rho_of(job):
    return job.experiment.optim.rho


def own(job):
    """A deviation of each run: the pairs of SGD and SAM spread."""
    return wobble(job.seed + (rho_of(job) > 0))


def plane(measurement, steepness):
    at = np.linspace(-1, 1, measurement.points)
    loss = 0.01 + steepness * (at[:, None] ** 2 + at**2)
    return {"coordinates": at.tolist(), "loss": loss.tolist(), "accuracy": loss.tolist()}


def heights(height):
    """Facts of a landscape; ``height`` is a function of the job."""
    return lambda job, measurement: plane(measurement, height(job))


@pytest.mark.parametrize(
    ("sgd", "sam", "held"),
    [(5.0, 1.0, "reproduced"), (1.0, 5.0, "not reproduced"), (2.0, 2.0, "inconclusive")],
)
def test_the_wider_minimum_is_the_one_whose_loss_rises_less(sgd, sam, held):
    found = found_in("landscape", tuned, heights(lambda job: (sam if rho_of(job) else sgd) + own(job)))
    (verdict,) = found.verdicts
    assert verdict.status == held
    assert "n = 10" in verdict.evidence
    rises = cells(found)[:2]
    # Of a^2 + b^2 on a grid of step 0.2 within 0.5: 4 points each at 0.04, 0.08 and 0.16, and 8 at 0.2.
    mean_square = (4 * 0.04 + 4 * 0.08 + 4 * 0.16 + 8 * 0.2) / 20
    assert [cell.measured.mean for cell in rises] == pytest.approx([sgd * mean_square, sam * mean_square], rel=1e-3)
    assert len(rises[0].values) == len(rises[0].runs) == 10


@pytest.mark.parametrize("num", [1, 2])
def test_nothing_is_judged_by_the_replicas_that_went_well_which_are_shown(num):
    """One or two of ten pairs are far apart, in the claimed direction, with next to no spread."""
    facts = heights(lambda job: (1.0 if rho_of(job) else 24.0) + own(job))
    found = found_in("landscape", only(lambda job: job.seed in (*range(num), TUNING_SEED), tuned), facts)
    assert found.num_missing == 2 * (10 - num)
    verdict = found.verdicts[0]
    assert verdict.status == "not tested"
    assert f"{num} of 10 pairs are available" in verdict.evidence
    assert "Holm" not in verdict.evidence
    assert not cells(found, Comparison)
    assert len(found.figures) == 1


def test_rho_is_the_one_with_the_lowest_validation_error_and_nothing_is_trained_before_it_is_known():
    def metrics(job):
        return tuned(job) | {"valid_error": abs(rho_of(job) - 0.1)}

    def sam_runs(found):
        return {run.split("-")[-3] for run in found.runs if "sam" in run and not run.endswith(f"seed{TUNING_SEED}")}

    facts = heights(lambda job: 1.0)
    assert sam_runs(found_in("landscape", metrics, facts)) == {"sam0.1"}
    half = found_in("landscape", only(lambda job: rho_of(job) != 0.2, metrics), facts)
    assert sam_runs(half) == set()
    assert {v.status for v in half.verdicts} == {"not tested"}


@pytest.mark.parametrize("exists", [False, True])
def test_the_checkpoint_of_li_et_al_is_shown_if_its_file_exists(exists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if exists:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints/resnet-56-noshort.pth").touch()
    found = found_in("landscape", tuned, heights(lambda job: 1.0 + wobble(job.seed)), scale="paper")
    names = [surface.name for surface in found.figures[0].surfaces]
    assert names == ["SGD", "SAM", *["SGD, the checkpoint of Li et al."] * exists]
    assert any(("it is shown" if exists else "does not exist") in note for note in found.notes)
    jobs = planned_jobs(ITEMS["landscape"], "paper").values()
    published = [job.experiment for job in jobs if job.experiment.model.checkpoint is not None]
    assert [(e.epochs, e.model.name, e.model.head) for e in published] == [(0, "resnet-56-noshort", "keep")] * exists
    assert found.verdicts[0].comparisons[0].num_pairs == 5  # ours, with SAM


LAPTOP_WEIGHTS = 303_834  # of its model


def kind_of(optim):
    if not optim.rho:
        return None
    return "random" if optim.direction == "random" else "p = inf" if optim.p == math.inf else optim.m or 128


def errors_over_rho(best, at_best, slope=None):
    """Test and validation errors that are lowest at the best rho of each kind of run; ``slope`` is over seeds."""

    def metrics(job):
        optim, kind = job.experiment.optim, kind_of(job.experiment.optim)
        if kind is None:
            return {"valid_error": 0.3, "test_error": 0.3}
        error = at_best[kind] + wobble(job.seed)
        length = optim.rho * (math.sqrt(LAPTOP_WEIGHTS) if optim.p == math.inf else 1)
        away = 0.05 * (abs(math.log(length / best[kind])) > 0.01)
        # On the test set the other values of rho are better: choosing by it would show.
        return {"valid_error": error + away, "test_error": error - away + (slope or {}).get(kind, 0.0) * job.seed}

    return metrics


@pytest.mark.parametrize(
    ("two", "sup", "noise", "held"),
    [
        (0.12, 0.15, 0.2, "reproduced"),
        (0.15, 0.12, 0.2, "not reproduced"),
        (0.12, 0.2, 0.15, "not reproduced"),
        (0.12, 0.12, 0.2, "inconclusive"),
    ],
)
def test_norms_are_judged_each_at_its_own_rho(two, sup, noise, held):
    best, at_best = {128: 0.2, "p = inf": 0.1, "random": 2.0}, {128: two, "p = inf": sup, "random": noise}
    slope = {128: 0.0001, "p = inf": 0.0002 if two != sup else 0.0001, "random": 0.0003}
    found = found_in("p-norm", errors_over_rho(best, at_best, slope))
    assert found.verdicts[0].status == held
    rows = {row[0]: row for row in found.tables[0].rows}
    assert [rows[kind][1] for kind in ("p = 2", "p = inf", "random")] == ["0.2", "0.1", "2"]
    assert [[e.name for e in row if isinstance(e, Comparison)] for row in found.tables[0].rows] == [
        ["p = 2 - random", "p = 2 - p = inf"],
        ["p = inf - random"],
        [],
        [],
    ]
    assert all(c.p_holm >= c.p_value and c.num_pairs == 5 for c in cells(found, Comparison))


@pytest.mark.parametrize("edge", [0.05, 1.0])
def test_a_norm_whose_best_rho_is_at_the_edge_of_its_grid_is_not_tested(edge):
    best, at_best = {128: 0.2, "p = inf": edge, "random": 2.0}, {128: 0.12, "p = inf": 0.15, "random": 0.2}
    verdict = found_in("p-norm", errors_over_rho(best, at_best)).verdicts[0]
    assert verdict.status == "not tested at this scale"
    assert "p = inf's rho is at the edge of its grid." in verdict.evidence


@pytest.mark.parametrize(
    ("start", "end", "first", "second", "held"),
    [
        (0.99, 0.5, 0.10, 0.12, ("reproduced", "reproduced")),
        (0.99, 0.5, 0.12, 0.10, ("reproduced", "not reproduced")),
        (0.95, 0.99, 0.10, 0.10, ("not reproduced", "inconclusive")),
        (0.7, 0.3, 0.10, 0.10, ("not reproduced", "inconclusive")),  # not close to 1 to begin with
        (0.99, 0.99, 0.10, 0.10, ("inconclusive", "inconclusive")),
    ],
)
def test_the_second_order_terms_are_judged_by_cosine_and_test_error(start, end, first, second, held):
    def metrics(job):
        """Ten looks at a training: the error at w + eps falls, the test error is known at the end."""
        is_second = job.experiment.optim.second_order
        error = (second if is_second else first) + wobble(job.seed)
        error += 0.0003 * job.seed if is_second and first != second else 0.0
        return [
            {"epoch": epoch, "perturbed_error": 0.5 - 0.01 * epoch, "train_error": 0.1, "test_error": error}
            for epoch in range(1, job.experiment.epochs + 1)
        ]

    def facts(job, measurement):
        last = measurement.epoch == job.experiment.epochs
        return {"cosine": (end if last else start) + (0.002 * job.seed if start != end and last else 0.0)}

    found = found_in("second-order", metrics, facts)
    assert tuple(v.status for v in found.verdicts) == held
    errors, cosines = found.figures
    kinds = ("train, at w + eps", "test")
    assert [s.name for s in errors.series] == [f"{kind}, {o} order" for o in ("first", "second") for kind in kinds]
    assert errors.series[0].y[0] == pytest.approx(49.0)
    assert list(cosines.series[0].x) == list(range(4, 41, 4))
    assert cosines.series[0].y[0] == pytest.approx(start)


def ascent(sharpness, errors):
    """Sharpness (a function of steps and of the fraction of training) and test error, by ascent steps."""

    def metrics(job):
        steps, num = job.experiment.optim.ascent_steps * job.experiment.optim.uses_sam, job.experiment.epochs
        noise = 1e-4 * np.random.default_rng((job.seed, steps)).standard_normal(num)
        return [
            {
                "epoch": epoch,
                "train_error": 0.01,
                "perturbed_error": 0.01 + sharpness(steps, epoch / num) + noise[epoch - 1],
                "test_error": errors[steps] + wobble(job.seed + steps),
            }
            for epoch in range(1, num + 1)
        ]

    return metrics


EQUAL_ERRORS = {0: 0.18, **dict.fromkeys((1, 2, 3, 5), 0.15)}
"""Without SAM (0 steps) and with it: half of SAM's gain is 1.5 points."""


def test_ascent_steps_as_in_the_paper():
    found = found_in("inner-steps", ascent(lambda steps, at: 0.002 * steps if at > 0.8 else 0.001, EQUAL_ERRORS))
    assert [v.status for v in found.verdicts] == ["reproduced", "not tested", "reproduced", "reproduced"]
    table = found.tables[0]
    first = table.rows[0]
    assert [row[0] for row in table.rows] == ["1", "2", "3", "5"]
    assert (first[1].claimed, first[2].claimed) == ("2.77 ± 0.03", "0.17 ± 0.03")
    assert first[1].measured.mean == pytest.approx(15.0)
    assert first[1].note == "standard deviation 0.16"  # of -0.2, 0, 0.2, -0.1, 0.1 points
    assert table.rows[3][2].measured.mean == pytest.approx(1.0, abs=0.02)
    (figure,) = found.figures
    assert [s.name for s in figure.series] == ["1 step", "2 steps", "3 steps", "5 steps"]
    assert len(figure.series[0].x) == 40
    assert figure.series[3].y[0] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("sharpness", "said"),
    [
        # Several steps find far more from the start, and a little more at the end.
        (lambda steps, at: (0.02 if at > 0.8 else 0.018) * steps, "less than 80 % of what 5 find: 20 %"),
        # Several steps always find less, at the end a little less so.
        (lambda steps, at: 0.1 - (0.002 if at > 0.8 else 0.004) * steps, "-0.8"),
    ],
)
def test_steps_that_find_more_from_the_start_or_never_are_not_what_is_claimed(sharpness, said):
    verdict = found_in("inner-steps", ascent(sharpness, EQUAL_ERRORS)).verdicts[3]
    assert verdict.status == "not reproduced"
    assert said in verdict.evidence


@pytest.mark.parametrize(
    ("at_five", "held"),
    [(0.15, "reproduced"), (0.151, "reproduced"), (0.2, "not reproduced"), (0.1, "not reproduced")],
)
def test_a_test_error_that_changes_with_the_steps_is_seen(at_five, held):
    found = found_in("inner-steps", ascent(lambda s, at: 0.001, EQUAL_ERRORS | {5: at_five}))
    assert [v.status for v in found.verdicts] == [held, "not tested", "inconclusive", "inconclusive"]


@pytest.mark.parametrize(
    ("without_sam", "held"), [(0.18, "reproduced"), (0.155, "inconclusive"), (0.14, "inconclusive")]
)
def test_the_margin_is_half_of_sams_gain(without_sam, held):
    """The steps change the error by at most 0.4 points, with 95 % confidence: too much for a gain of 0.5."""
    found = found_in("inner-steps", ascent(lambda s, at: 0.001, EQUAL_ERRORS | {0: without_sam}))
    assert found.verdicts[0].status == held
    assert f"more than {max(0.0, 50 * (without_sam - 0.15)):.2g} would be a strong effect" in found.verdicts[0].evidence


def with_test_error(error):
    """Runs whose test error is a function of the job."""
    return lambda job: {"train_error": 0.0, "perturbed_error": 0.01, "test_error": error(job)}


def test_a_change_that_noise_may_hide_is_neither_shown_nor_excluded():
    loud = with_test_error(lambda job: 0.15 + 0.05 * ((3 * job.seed + job.experiment.optim.ascent_steps) % 5 - 2))
    assert found_in("inner-steps", loud).verdicts[0].status == "inconclusive"


@pytest.mark.parametrize(
    ("falls", "held"),
    [
        ({}, "reproduced"),
        ({0: 1.2}, "inconclusive"),  # one of 20 intervals ends below 0, as one of 20 does by chance
        ({0: 3.0}, "not reproduced"),
        ({0: -3.0}, "reproduced"),
    ],
)
def test_noise_lowers_the_error_only_if_it_does_after_holms_correction(falls, held):
    def facts(job, measurement):
        if measurement.kind != "noise":
            return dict.fromkeys(("vacuous", *TERMS.values()), 1.0)
        width = 0.0005
        deviations = [falls.get(job.seed, 0.0) if scale == "proof" and rho_of(job) else 0.0 for scale in NOISE_SCALES]
        return {
            scale: {"rise": -width * deviation, "half_width": width, "num_draws": 20}
            for scale, deviation in zip(NOISE_SCALES, deviations, strict=True)
        }

    verdict = found_in("bound", tuned, facts).verdicts[1]
    assert (verdict.status, len(found_in("bound", tuned, facts).verdicts)) == (held, 2)


def test_on_cifar100_several_steps_must_be_better_than_one():
    def error(job):
        steps = job.experiment.optim.ascent_steps
        better = 0.004 * (steps > 1) * (job.experiment.data.name == "cifar100")
        return 0.15 + wobble(job.seed + steps) - better + 1e-5 * job.seed * steps

    found = found_in("inner-steps", with_test_error(error), scale="paper")
    # Significant, yet not a strong effect.
    assert [v.status for v in found.verdicts[:2]] == ["reproduced", "reproduced"]
    assert "n = 20" in found.verdicts[1].evidence
    assert found.tables[0].rows[0][3].claimed == "16.72 ± 0.08"


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_a_strong_effect_of_ascent_steps_on_either_dataset_contradicts_the_claim(dataset):
    def error(job):
        steps = job.experiment.optim.ascent_steps
        return 0.15 + 0.05 * (steps > 1) * (job.experiment.data.name == dataset) + wobble(job.seed + steps)

    assert found_in("inner-steps", with_test_error(error), scale="paper").verdicts[0].status == "not reproduced"
