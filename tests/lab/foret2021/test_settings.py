"""The paper's settings: complete, usable, and each with its source."""

from dataclasses import replace

import pytest

from flatmin.lab.data.label_noise import validation_split
from flatmin.lab.data.pipeline import epoch_batches
from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.appendix import SVHN_FASHION
from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.claims.tables import CIFAR, FINETUNING_DATASETS, IMAGENET, NOISE_PERCENT
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.sources import HYPERPARAMETERS, REFERENCE_CODE, settings_of
from flatmin.lab.foret2021.tables.fine_tuning import fine_tuning_conditions
from flatmin.lab.spec.datasets import DATASETS
from flatmin.lab.spec.models import check_model_name
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.study import planned_jobs

TRAININGS = [
    *settings.CIFAR.values(),
    *settings.SVHN_FASHION.values(),
    *settings.IMAGENET.values(),
    *settings.LABEL_NOISE.values(),
    *(settings.finetuning(model, dataset) for model in settings.FINETUNING for dataset in FINETUNING_DATASETS),
    *settings.ASCENT_STEPS.values(),
    settings.LANDSCAPES,
    settings.HESSIAN,
    settings.M_SHARPNESS,
    settings.SECOND_ORDER,
    settings.NORMS,
]


def test_every_training_is_of_a_known_model_with_the_l2_term_in_the_loss():
    for training in TRAININGS:
        check_model_name(training.model.name)
        assert training.optim.decay == "loss"
        assert settings.without_sam(training).optim == replace(training.optim, rho=0.0)


def test_every_condition_with_a_claim_has_a_setting():
    assert set(settings.CIFAR) == {(key[0], key[2]) for key in CIFAR.cells}
    assert set(settings.SVHN_FASHION) == {(key[0], key[2]) for key in SVHN_FASHION.cells}
    assert set(settings.IMAGENET) == {key[:2] for key in IMAGENET.cells}
    assert set(settings.LABEL_NOISE) == set(NOISE_PERCENT)
    assert set(settings.FINETUNING_TRAIN_SIZES) == set(FINETUNING_DATASETS)


def test_shakedrop_has_a_learning_rate_for_each_dataset():
    """Table 6 has two rows for it."""
    found = [settings.CIFAR["PyramidNet+ShakeDrop", name].optim for name in ("cifar10", "cifar100")]
    assert [(optim.lr, optim.rho) for optim in found] == [(0.02, 0.05), (0.05, 0.05)]


def test_the_perturbation_is_each_accelerators():
    assert settings.CIFAR["WRN-28-10 (200 epochs)", "cifar10"].optim.m == 32
    assert settings.IMAGENET["resnet-50", 100].optim.m == 128
    assert settings.finetuning("efficientnet-b7", "pets").optim.m == 16
    assert settings.finetuning("efficientnet-l2", "pets").optim.m == 4


def test_every_rho_the_paper_chose_is_on_its_grid():
    for training in (*settings.CIFAR.values(), *settings.SVHN_FASHION.values()):
        assert training.optim.rho in settings.RHO_GRID


def test_fashion_mnists_auto_augment_is_cutout():
    assert settings.small_image_augment("fashion-mnist", "autoaugment") == "cutout"
    assert settings.small_image_augment("svhn", "autoaugment") == "autoaugment"
    with pytest.raises(ValueError, match="basic, cutout or autoaugment, but got 'mixup'"):
        settings.small_image_augment("svhn", "mixup")


def test_finetuning_takes_the_papers_number_of_steps():
    """To half an epoch, with the batches that the lab really makes; ImageNet has 10 epochs instead."""
    for condition in fine_tuning_conditions("paper"):
        (dataset,), model, start = condition.labels, condition.column, condition.start
        if dataset == "imagenet":
            assert start.epochs == 10
            continue
        batches = epoch_batches(settings.FINETUNING_TRAIN_SIZES[dataset], start.data, seed=0, epoch=0)
        assert {len(batch) for batch in batches} == {start.data.batch_size}  # the last short batch is dropped
        assert abs(start.epochs * len(batches) - settings.FINETUNING[model].num_steps) <= len(batches) / 2


def test_choosing_rho_takes_as_many_steps_as_the_final_runs():
    """To half an epoch of each: the validation split makes the epochs shorter, and there are more of them."""
    steps = {}
    for job in planned_jobs(ITEMS["fine-tuning"], "paper").values():
        e, (_, dataset, model, method) = job.experiment, job.experiment.name.split("/")
        if method.removesuffix(" (choosing)") == "SAM" and dataset != "imagenet" and job.seed in (0, TUNING_SEED):
            size = settings.FINETUNING_TRAIN_SIZES[dataset]
            num = size - len(validation_split(size, e.data.validation, 0)[1])
            per_epoch = len(epoch_batches(num, e.data, seed=0, epoch=0))
            steps.setdefault((dataset, model), {})[e.data.validation] = e.epochs * per_epoch, per_epoch
    assert len(steps) == 8 * 2
    for found in steps.values():
        (choosing, half), (final, whole) = found[0.1], found[0.0]
        assert abs(choosing - final) <= (half + whole) / 2


def test_finetuning_has_the_reference_codes_crops_cutout_and_regularization():
    for condition in fine_tuning_conditions("paper"):
        data, model = condition.start.data, condition.start.model
        small = condition.labels[0] in ("cifar10", "cifar100")
        assert (model.dropout, model.drop_connect) == (0.5, 0.2)
        assert (data.resize, data.crop_padding, data.cutout_shared) == ("bicubic", None if small else 32, small)


def test_models_of_the_reference_code_are_built_as_there_and_others_are_not():
    designs = {training.model.name: training.model.design for training in TRAININGS}
    assert {name for name, design in designs.items() if design == "standard"} == {
        "resnet-20", "resnet-32", "resnet-56-noshort", "resnet-50", "resnet-101", "resnet-152",
        "efficientnet-b7", "efficientnet-l2",
    }  # fmt: skip


def test_on_imagenet_the_papers_number_without_sam_is_next_to_the_checkpoint_itself():
    for condition in fine_tuning_conditions("paper"):
        imagenet = condition.labels == ("imagenet",)
        beside = {name for name, _ in condition.claimed}
        assert beside == {"checkpoint" if imagenet else "without SAM", "SAM"}
        first = condition.methods[0]
        assert (first.name == "checkpoint") == imagenet
        if imagenet:
            (untrained,) = first.candidates(condition.start)
            assert (untrained.epochs, untrained.model.head) == (0, "keep")


def test_both_networks_see_as_many_examples_in_finetuning():
    seen = {
        settings.FINETUNING[model].num_steps * settings.FINETUNING[model].batch_size for model in settings.FINETUNING
    }
    assert seen == {20_000 * 256}


def test_training_sets_have_the_catalogs_sizes():
    for dataset, size in settings.FINETUNING_TRAIN_SIZES.items():
        if dataset != "birdsnap":
            assert f"{size:,}" in DATASETS[dataset].title


def test_finetuning_imagenet_is_ten_epochs_and_other_names_are_refused():
    training = settings.finetuning("efficientnet-l2", "imagenet")
    assert (training.epochs, training.optim.lr, training.optim.rho) == (10, 0.1, 0.05)
    augments = {c.labels[0]: c.start.data.augment for c in fine_tuning_conditions("paper")}
    assert {name for name, augment in augments.items() if augment == "autoaugment"} == {"cifar10", "cifar100"}
    assert set(augments.values()) == {"autoaugment", "imagenet"}
    with pytest.raises(ValueError, match="but got 'efficientnet-b0' on 'pets'"):
        settings.finetuning("efficientnet-b0", "pets")


def test_every_item_has_hyperparameters_with_a_source_and_ours_say_why():
    # One figure is drawn from the tables; Figure 7 is of the runs of Table 11.
    assert set(FIGURES) - {"error-reduction", "ascent-along-training"} <= set(HYPERPARAMETERS)
    assert set(ITEMS) - {"error-reduction"} <= set(HYPERPARAMETERS)
    for item, hyperparameters in HYPERPARAMETERS.items():
        assert hyperparameters, item
        for hyperparameter in hyperparameters:
            assert hyperparameter.source != "ours" or hyperparameter.note, (item, hyperparameter.name)
    assert {h.source for h in REFERENCE_CODE if h.name != "precision"} == {"reference code"}


def test_every_setting_of_a_training_says_whether_it_is_the_papers():
    found = {h.name: (h.value, h.source, h.note) for h in settings_of(settings.HESSIAN, "rho", given=("model",))}
    assert found["model"] == ("wrn-40-10", "paper", "")
    assert found["learning rate"] == (0.05, "ours", "not given")
    assert found["m"][:2] == (32, "ours")
    assert "rho" not in found


def test_the_page_of_the_hessian_has_the_settings_of_its_spectra():
    told = {h.name: str(h.value) for h in HYPERPARAMETERS["hessian"]}
    (job, *_) = planned_jobs(ITEMS["hessian"], "paper").values()
    spectrum = job.measurements[-1]
    assert told["images"].startswith(f"{spectrum.num_examples:,} of")
    assert told["Lanczos"] == f"{spectrum.steps} steps, {spectrum.probes} random starts"
    assert told["batch size"] == str(job.experiment.data.batch_size)


def test_batch_norm_is_listed_once_for_each_item():
    for item, hyperparameters in HYPERPARAMETERS.items():
        assert sum(h.name == "batch-norm statistics" for h in hyperparameters) <= 1, item
    (frozen,) = [h for h in HYPERPARAMETERS["fine-tuning"] if h.name == "batch-norm statistics"]
    assert frozen.value == "the checkpoint's, frozen"
