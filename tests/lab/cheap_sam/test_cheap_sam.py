"""The study of SAM's gain over its cost, on invented runs: what is asked for, who keeps the gain, the front."""

import pytest
from scipy import stats

from flatmin.lab.cheap_sam.arms import ARMS, RHOS, conditions, cost_in_passes
from flatmin.lab.cheap_sam.study import CHEAP_SAM, share_of_gain
from flatmin.lab.errors import SpecError
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.study import describe
from invented_runs import invented_findings, invented_runs, only

NOISY = "Fashion-MNIST, 14 x 14, 40 % noisy labels"
JITTER = (0.0, 0.4, -0.3, 0.2, -0.1, 0.3, -0.2, 0.1, -0.4, 0.25)


ERRORS = {"no SAM": 40.0, "SAM": 30.0, "part 1/16": 29.0, "part 1/8": 31.0, "every 4th step": 37.0, "momentum": 34.0}


def method_of(job):
    return job.experiment.name.removesuffix(" (choosing)").split("labels/")[-1]


def metrics(job):
    """Give every run an error by its method, and the second radius the best validation error."""
    method, optim = method_of(job), job.experiment.optim
    error = ERRORS.get(method, 35.0)
    if job.seed != TUNING_SEED:
        error += JITTER[job.seed] + 0.05 * JITTER[(job.seed + sum(map(ord, method))) % 10]
    factor = next((arm.factor for arm in ARMS if arm.name == method), None)
    second = factor and optim.rho == pytest.approx(factor * RHOS[1])
    is_best = second if factor else (optim.lr, optim.weight_decay) == (0.1, 5e-4)
    return {"valid_error": 0.2 if is_best else 0.3, "test_error": error / 100, "train_error": 0.0}


@pytest.fixture(scope="module")
def known():
    return invented_runs(CHEAP_SAM, "laptop", metrics)


@pytest.fixture(scope="module")
def found(known):
    return describe(CHEAP_SAM, "laptop", known)


def test_every_arm_has_five_radii_and_costs_what_its_name_says(known):
    runs = known.values()
    noisy = [r for r in runs if r.experiment.data.label_noise and r.experiment.model.name == "wrn-10-2"]
    tuning = [job for job in noisy if job.seed == TUNING_SEED]
    with_radius = [arm for arm in ARMS if arm.factor is not None]
    assert len({job.name for job in tuning}) == 4 + 5 * len(with_radius)
    assert all(job.experiment.data.validation == 0.1 for job in tuning)
    replicas = [job for job in noisy if job.seed != TUNING_SEED]
    assert len({job.name for job in replicas}) == 5 * (1 + len(ARMS))
    costs = {job.experiment.name.split("labels/")[-1]: cost_in_passes(job.experiment, 40) for job in replicas}
    assert costs["no SAM"] == costs["momentum"] == costs["SAM, half the epochs"] == 1
    assert (costs["part 1/4"], costs["part 1/8"], costs["part 1/16"]) == (1.25, 1.125, 1.0625)
    assert (costs["every 4th step"], costs["every 8th step"], costs["ascent on 1/4"]) == (1.25, 1.125, 1.25)
    assert (costs["SAM"], costs["SAM, m = 16"], costs["no SAM, twice the epochs"]) == (2, 2, 2)
    clean = [job for job in runs if "clean" in job.experiment.name and job.experiment.data.image_size == 14]
    assert {job.seed for job in clean} == {*range(10), TUNING_SEED}


def test_an_arm_keeps_the_gain_if_it_is_below_nine_tenths_of_it(found):
    status = {v.claim: v.status for v in found.verdicts if v.claim.startswith(NOISY)}
    by_arm = {claim.removeprefix(f"{NOISY}: ").partition(" keeps")[0]: s for claim, s in status.items()}
    assert by_arm["part 1/16"] == "kept"
    assert by_arm["part 1/8"] == "inconclusive"  # at the limit
    assert by_arm["every 4th step"] == by_arm["momentum"] == "not kept"
    assert not by_arm.keys() & {"SAM", "no SAM", "SAM, m = 16"}


def test_the_test_is_one_sided_paired_and_corrected_over_all_arms(found):
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: part 1/16"))
    (comparison,) = verdict.comparisons
    assert comparison.p_value == pytest.approx(stats.ttest_1samp(comparison.values, 0.0, alternative="less").pvalue)
    assert comparison.difference.mean == pytest.approx(29.0 - 31.0, abs=0.2)
    assert comparison.p_holm > comparison.p_value


def test_nothing_is_judged_while_a_replica_is_missing():
    lost = only(lambda job: (method_of(job), job.seed) != ("part 1/16", 3), metrics)
    found = invented_findings(CHEAP_SAM, "laptop", lost)
    verdict = next(v for v in found.verdicts if v.claim.startswith(f"{NOISY}: part 1/16"))
    assert verdict.status == "not tested"
    assert found.num_missing > 0


def test_the_front_joins_what_nothing_beats(found):
    figure = found.figures[0]
    front = next(series for series in figure.series if series.name == "Pareto front")
    assert list(front.hover) == ["momentum", "part 1/16"]
    assert list(front.x) == [1.0, 1.0625]


def test_which_to_use_is_the_front_of_every_condition(found):
    table, *others = found.tables
    assert table.title.startswith("Which to use")
    assert len(others) == 4
    noisy = [(row[1], row[2], row[3].measured.mean, row[4]) for row in table.rows if row[0] == NOISY]
    assert noisy == [
        ("1", "momentum", pytest.approx(34.0, abs=0.2), 'SAM(..., direction="momentum"); opt.step(closure)'),
        ("1.0625", "part 1/16", pytest.approx(29.0, abs=0.2), "opt.step_batch(loss_fn, batch, part=1 / 16)"),
    ]
    assert all(row[3].runs for row in table.rows)


def test_a_radius_at_the_edge_of_its_grid_is_noted(found):
    """The second of Fashion-MNIST's five radii, 0.2, is the last of CIFAR-10's three."""
    _, noisy, _, cifar, _ = found.tables
    notes = [{row[0]: row[3].note for row in table.rows} for table in (noisy, cifar)]
    assert (notes[0]["SAM"], notes[0]["no SAM"]) == (None, None)
    assert (notes[1]["SAM"], notes[1]["no SAM"]) == ("rho at the edge of its grid", None)


def test_the_share_of_the_gain():
    assert share_of_gain({"no SAM": 40.0, "SAM": 30.0, "x": 35.0}, "x") == "50 %"
    assert share_of_gain({"no SAM": 40.0, "SAM": 30.0, "x": 42.0}, "x") == "-20 %"


def test_there_is_no_share_of_a_gain_that_is_not_known_well(found):
    assert all(row[5] for row in found.tables[1].rows if row[0] not in ("no SAM", "SAM"))

    def no_gain(job):
        values = metrics(job)
        error = 0.35 + 0.01 * JITTER[(3 * job.seed + (method_of(job) == "SAM")) % 10]
        return values if job.seed == TUNING_SEED else values | {"test_error": error}

    table = invented_findings(CHEAP_SAM, "laptop", no_gain).tables[1]
    assert {row[5] for row in table.rows} == {""}
    assert "too wide" in table.note


def test_there_is_no_papers_scale():
    with pytest.raises(SpecError, match="use --scale laptop"):
        conditions("paper")
