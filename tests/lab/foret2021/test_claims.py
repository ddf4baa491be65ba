"""The paper's numbers agree with each other where the paper says so, and the notes and statements with the numbers."""

import math
from itertools import product

import pytest
from scipy import stats

from flatmin.lab.foret2021.claims.appendix import (
    ASCENT_STEPS,
    CIFAR_RHO_005,
    FINETUNING_RHO_005,
    NOISE_VALIDATION,
    SVHN_FASHION,
)
from flatmin.lab.foret2021.claims.figures import FIGURES, HESSIAN, IN_TEXT, error_reductions
from flatmin.lab.foret2021.claims.tables import (
    AUGMENTATIONS,
    CIFAR,
    CIFAR_ROWS,
    FINETUNING,
    FINETUNING_DATASETS,
    IMAGENET,
    LABEL_NOISE,
    NOISE_LITERATURE,
    NOISE_METHODS,
    NOISE_PERCENT,
    PREVIOUS_BEST,
    PREVIOUS_METHODS,
)
from flatmin.lab.foret2021.settings import CIFAR as CIFAR_SETTINGS
from flatmin.lab.foret2021.settings import LABEL_NOISE as NOISE_SETTINGS
from flatmin.lab.foret2021.settings import RHO_GRID
from flatmin.lab.studies.printed import Claimed

ALL_CLAIMS = (
    CIFAR, IMAGENET, FINETUNING, LABEL_NOISE, SVHN_FASHION, NOISE_VALIDATION, CIFAR_RHO_005, FINETUNING_RHO_005,
    ASCENT_STEPS, HESSIAN,
)  # fmt: skip
RESNETS = ("resnet-50", "resnet-101", "resnet-152")
NETWORKS = ("efficientnet-b7", "efficientnet-l2")


def pairs(claims):
    """All (key of SAM, SAM, baseline)."""
    return [(key, claimed, claims[(*key[:-1], "sgd")]) for key, claimed in claims.cells.items() if key[-1] == "sam"]


def test_numbers_print_as_they_were_printed():
    for text in ("2.7 ± 0.1", "2.1 ± <0.1", "19.0 ± <0.01", "20.4 ± <0.0", "5.80 ± 0.1", "0.63", "1", "up to 11.4"):
        assert Claimed.read(text).printed == text
    assert Claimed.read("2.1 ± <0.1") == Claimed(printed="2.1 ± <0.1", mean=2.1, ci=0.1, ci_below=True)
    assert Claimed.read("up to 11.4").mean == 11.4
    assert Claimed.read("2.77 ± 0.03", spread="std").ci is None
    assert Claimed.read("2.77 ± 0.03", spread="std").printed == "2.77 ± 0.03"
    with pytest.raises(ValueError, match="not a number as papers print them: '-'"):
        Claimed.read("-")


@pytest.mark.parametrize(
    ("claims", "count"),
    [
        (CIFAR, 5 * 3 * 2 * 2),
        (IMAGENET, 3 * 3 * 2 * 2),
        (FINETUNING, 9 * 2 * 2),
        (LABEL_NOISE, 8 * 4 - 4 + 5 * 4),
        (SVHN_FASHION, 2 * 2 * 2 * 2),
        (NOISE_VALIDATION, 7 * 4),
        (CIFAR_RHO_005, 5 * 3 * 2 * 2),
        (FINETUNING_RHO_005, 8 * 3),
        (ASCENT_STEPS, 4 * 2 * 2),
        (HESSIAN, 4),
    ],
    ids=lambda value: getattr(value, "title", ""),
)
def test_no_cell_is_missing(claims, count):
    assert len(claims.cells) == count
    assert claims.statements


def test_every_group_names_its_place():
    places = [claims.source for claims in (*ALL_CLAIMS, *FIGURES.values())]
    assert len(places) == len(set(places))
    assert set(CIFAR.cells) == set(CIFAR_RHO_005.cells)
    assert set(CIFAR.cells) == set(product(CIFAR_ROWS, AUGMENTATIONS, ("cifar10", "cifar100"), ("sam", "sgd")))
    assert set(FINETUNING.cells) == set(product(FINETUNING_DATASETS, NETWORKS, ("sam", "sgd")))
    assert set(PREVIOUS_BEST) == set(product(FINETUNING_DATASETS, NETWORKS))
    assert {best.method for best in PREVIOUS_BEST.values()} == set(PREVIOUS_METHODS)


@pytest.mark.parametrize(
    ("claims", "key", "printed"),
    [
        (CIFAR, ("WRN-28-10 (200 epochs)", "basic", "cifar10", "sam"), "2.7 ± 0.1"),
        (CIFAR, ("PyramidNet", "basic", "cifar100", "sam"), "14.6 ± 0.4"),
        (CIFAR, ("PyramidNet+ShakeDrop", "autoaugment", "cifar10", "sgd"), "1.6 ± <0.1"),
        (IMAGENET, ("resnet-152", 100, 1, "sgd"), "20.4 ± <0.0"),
        (IMAGENET, ("resnet-50", 100, 5, "sgd"), "6.62 ± 0.11"),
        (FINETUNING, ("aircraft", "efficientnet-l2", "sgd"), "5.80 ± 0.1"),
        (FINETUNING, ("imagenet", "efficientnet-b7", "sgd"), "15.3"),
        (LABEL_NOISE, ("Bootstrap + SAM", 80), "79.9"),
        (LABEL_NOISE, ("MentorMix (Jiang et al., 2019)", 60), "91.3"),
        (SVHN_FASHION, ("Wide-ResNet-28-10", "autoaugment", "svhn", "sam"), "0.99 ± 0.01"),
        (NOISE_VALIDATION, (0.05, 80), "21.0"),
        (FINETUNING_RHO_005, ("cars", "efficientnet-b7", "sam"), "5.57"),
        (ASCENT_STEPS, (5, "cifar100", "sharpness"), "2.82 ± 0.04"),
        (HESSIAN, ("lambda_max", "sgd"), "approximately 24"),
    ],
)
def test_cells_are_the_papers(claims, key, printed):
    assert claims[key].printed == printed


def test_numbers_in_the_text_are_those_of_the_tables():
    said = [claim.numbers for claim in IN_TEXT]
    wrn = ("WRN-28-10 (1800 epochs)", "autoaugment", "cifar10", "sam")
    assert (CIFAR[wrn].mean, CIFAR[(*wrn[:-1], "sgd")].mean) == said[0] == (1.6, 2.2)
    assert (CIFAR["PyramidNet+ShakeDrop", "autoaugment", "cifar100", "sam"].mean,) == said[1]
    resnet = (IMAGENET["resnet-152", 200, 1, "sgd"], IMAGENET["resnet-152", 400, 1, "sam"])
    assert tuple(number.mean for number in resnet) == said[3]
    tuned = [FINETUNING[name, "efficientnet-l2", "sam"].mean for name in ("cifar10", "cifar100", "imagenet")]
    assert tuple(tuned) == said[5]


def test_fashions_3_59_is_shake_shakes_and_not_a_wide_resnets():
    svhn, fashion = IN_TEXT[2].numbers
    assert SVHN_FASHION["Wide-ResNet-28-10", "autoaugment", "svhn", "sam"].mean == svhn
    assert SVHN_FASHION["Shake-Shake (26 2x96d)", "autoaugment", "fashion-mnist", "sam"].mean == fashion
    assert SVHN_FASHION["Wide-ResNet-28-10", "autoaugment", "fashion-mnist", "sam"].mean == 3.61


def test_sam_is_better_in_all_of_tables_1_2_3_and_9():
    for claims in (CIFAR, IMAGENET, FINETUNING, CIFAR_RHO_005):
        assert all(sam.mean < sgd.mean for _, sam, sgd in pairs(claims)), claims.source
    assert len(pairs(CIFAR)) == 30
    assert len(pairs(IMAGENET)) == len(pairs(FINETUNING)) == 18


def test_table_1s_intervals_do_not_overlap():
    for key, sam, sgd in pairs(CIFAR):
        gap = (sgd.mean - sgd.ci) - (sam.mean + sam.ci)
        narrower = sam.ci_below or sgd.ci_below  # then intervals that would touch do not
        assert gap > 1e-9 or (narrower and gap > -1e-9), key


def test_sgd_gains_from_1800_epochs_in_one_condition_of_six():
    def sgd(row, key):
        return CIFAR[(row, *key, "sgd")].mean

    conditions = list(product(AUGMENTATIONS, ("cifar10", "cifar100")))
    gains = [key for key in conditions if sgd(CIFAR_ROWS[1], key) < sgd(CIFAR_ROWS[0], key)]
    assert gains == [("autoaugment", "cifar10")]


def test_on_svhn_one_condition_is_worse_with_sam():
    worse = [key for key, sam, sgd in pairs(SVHN_FASHION) if sam.mean >= sgd.mean]
    assert worse == [("Shake-Shake (26 2x96d)", "autoaugment", "svhn", "sam")]
    assert len(pairs(SVHN_FASHION)) == 8


def test_figure_1_has_one_condition_without_a_reduction():
    reductions = error_reductions()
    assert len(reductions) == 30 + 9 + 18 + 8
    assert [name for name, value in reductions.items() if value <= 0] == ["svhn, Shake-Shake (26 2x96d), autoaugment"]


def test_on_imagenet_at_equal_computation_one_comparison_is_worse_with_sam():
    compared = [
        (model, epochs, top)
        for model, epochs, top in product(RESNETS, (100, 200), (1, 5))
        if IMAGENET[model, epochs, top, "sam"].mean >= IMAGENET[model, 2 * epochs, top, "sgd"].mean
    ]
    assert compared == [("resnet-50", 100, 1)]


def test_on_imagenet_sam_gains_from_epochs_and_sgd_loses_except_resnet_50():
    for model, top in product(RESNETS, (1, 5)):
        sam = [IMAGENET[model, epochs, top, "sam"].mean for epochs in (100, 200, 400)]
        assert sam[0] > sam[1] > sam[2]
        before, after = (IMAGENET[model, epochs, top, "sgd"] for epochs in (200, 400))
        assert (after.mean - after.ci > before.mean + before.ci) == (model != "resnet-50")


def test_finetuning_beats_the_previous_best_on_5_and_8_of_9_datasets():
    def beats(network, method):
        return {
            dataset
            for dataset in FINETUNING_DATASETS
            if FINETUNING[dataset, network, method].mean < PREVIOUS_BEST[dataset, network].error.mean
        }

    assert beats("efficientnet-b7", "sam") == {"flowers102", "pets", "cifar10", "cifar100", "birdsnap"}
    assert beats("efficientnet-l2", "sam") == set(FINETUNING_DATASETS) - {"cars"}
    assert len(beats("efficientnet-l2", "sgd")) == 5


def test_imagenets_finetuning_baselines_are_the_checkpoints():
    for network, accuracy in zip(NETWORKS, IN_TEXT[4].numbers, strict=True):
        baseline = FINETUNING["imagenet", network, "sgd"]
        assert baseline.mean == pytest.approx(100 - accuracy)
        assert baseline.ci is None


def test_with_noisy_labels_sam_is_behind_mentormix_alone():
    margins = []
    for percent in NOISE_PERCENT:
        own = {method: LABEL_NOISE[method, percent].mean for method in NOISE_METHODS}
        assert own["Bootstrap + SAM"] > own["SAM"] > max(own["SGD"], own["Mixup"], own["Bootstrap + Mixup"])
        assert own["Mixup"] < LABEL_NOISE["Mixup (Zhang et al., 2017)", percent].mean
        for method in NOISE_LITERATURE[:-1]:
            published = LABEL_NOISE.cells.get((method, percent))
            if published is not None:
                margins.append(own["SAM"] - published.mean)
    assert len(margins) == 24
    assert min(margins) == pytest.approx(0.2)
    mentormix = [LABEL_NOISE[NOISE_LITERATURE[-1], percent].mean for percent in NOISE_PERCENT]
    bootstrapped = [LABEL_NOISE["Bootstrap + SAM", percent].mean for percent in NOISE_PERCENT]
    assert [(b > m) - (b < m) for b, m in zip(bootstrapped, mentormix, strict=True)] == [-1, 0, 1, -1]


def test_table_8_holds_errors_and_its_best_rho_is_the_one_used():
    for percent in NOISE_PERCENT:
        column = {rho: NOISE_VALIDATION[rho, percent].mean for rho in (0.0, *RHO_GRID)}
        assert min(column, key=column.__getitem__) == NOISE_SETTINGS[percent].optim.rho
        assert column[0.0] == pytest.approx(100 - LABEL_NOISE["SGD", percent].mean, abs=1)
        best = 100 - LABEL_NOISE["Bootstrap + SAM", percent].mean
        assert min(column.values()) == pytest.approx(best, abs=1)


def test_table_9_repeats_table_1s_sgd():
    for key, claimed in CIFAR_RHO_005.cells.items():
        if key[-1] == "sgd":
            assert claimed.mean == CIFAR[key].mean


def test_table_9s_pyramidnet_on_cifar_10_is_shakedrops():
    """The slip: with rho = 0.05 in both tables, the numbers ought to be Table 1's."""
    assert CIFAR_SETTINGS["PyramidNet", "cifar10"].optim.rho == 0.05
    for augment in AUGMENTATIONS:
        plain = ("PyramidNet", augment, "cifar10", "sam")
        assert CIFAR_RHO_005[plain] == CIFAR_RHO_005[("PyramidNet+ShakeDrop", *plain[1:])]
        assert CIFAR_RHO_005[plain].mean < CIFAR[plain].mean


def test_table_9_equals_table_1_where_rho_was_0_05_except_for_the_slip():
    differ = [
        key
        for key, claimed in CIFAR_RHO_005.cells.items()
        if key[-1] == "sam" and CIFAR_SETTINGS[key[0], key[2]].optim.rho == 0.05 and claimed.mean != CIFAR[key].mean
    ]
    assert {(key[0], key[2]) for key in differ} == {("PyramidNet", "cifar10")}
    for row, augment in product(CIFAR_ROWS[:2], AUGMENTATIONS):
        key = (row, augment, "cifar100", "sam")
        assert CIFAR_SETTINGS[row, "cifar100"].optim.rho == 0.1  # and yet:
        assert CIFAR_RHO_005[key].mean == CIFAR[key].mean


def test_table_10_repeats_table_3_and_is_ordered():
    same = set()
    for dataset in FINETUNING_DATASETS[:-1]:
        best, default, sgd = (
            FINETUNING_RHO_005[dataset, "efficientnet-b7", method].mean for method in ("sam, best rho", "sam", "sgd")
        )
        assert best == FINETUNING[dataset, "efficientnet-b7", "sam"].mean
        assert sgd == FINETUNING[dataset, "efficientnet-b7", "sgd"].mean
        assert best <= default < sgd
        same |= {dataset} if best == default else set()
    assert same == {"cifar10", "birdsnap"}


def test_one_test_for_both_datasets_finds_ascent_steps_significant_and_their_effect_small():
    def p_value(dataset, steps):
        one, many = (ASCENT_STEPS[n, dataset, "test_error"] for n in (1, steps))
        return stats.ttest_ind_from_stats(one.mean, one.std, 20, many.mean, many.std, 20, equal_var=False).pvalue

    assert all(p_value("cifar100", steps) < 0.001 for steps in (2, 3, 5))
    assert p_value("cifar10", 3) == pytest.approx(0.001, abs=1e-4)
    assert min(p_value("cifar10", steps) for steps in (2, 5)) > 0.2
    for dataset, largest in (("cifar10", 0.04), ("cifar100", 0.13)):
        sharpness = [ASCENT_STEPS[steps, dataset, "sharpness"].mean for steps in (1, 2, 3, 5)]
        assert sharpness == sorted(sharpness)
        errors = [ASCENT_STEPS[steps, dataset, "test_error"].mean for steps in (1, 2, 3, 5)]
        assert max(abs(e - errors[0]) for e in errors) == pytest.approx(largest)
    gained = [ASCENT_STEPS[steps, "cifar10", "sharpness"].mean for steps in (1, 5)]
    assert math.isclose(gained[1] - gained[0], 2.09)
