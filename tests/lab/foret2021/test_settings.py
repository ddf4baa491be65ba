"""The paper's settings: complete, usable, each with its source; and what `--scale paper` plans, as a table.

After an intended change: PYTHONPATH=src python tests/lab/foret2021/test_settings.py
"""

import csv
import io
from pathlib import Path

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
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.study import planned_jobs


def test_every_condition_with_a_claim_has_a_setting():
    assert set(settings.CIFAR) == {(key[0], key[2]) for key in CIFAR.cells}
    assert set(settings.SVHN_FASHION) == {(key[0], key[2]) for key in SVHN_FASHION.cells}
    assert set(settings.IMAGENET) == {key[:2] for key in IMAGENET.cells}
    assert set(settings.LABEL_NOISE) == set(NOISE_PERCENT)
    assert set(settings.FINETUNING_TRAIN_SIZES) == set(FINETUNING_DATASETS)


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


def test_training_sets_have_the_catalogs_sizes():
    for dataset, size in settings.FINETUNING_TRAIN_SIZES.items():
        if dataset != "birdsnap":
            assert f"{size:,}" in DATASETS[dataset].title


def test_names_without_a_setting_are_refused():
    with pytest.raises(ValueError, match="but got 'efficientnet-b0' on 'pets'"):
        settings.finetuning("efficientnet-b0", "pets")
    with pytest.raises(ValueError, match="basic, cutout or autoaugment, but got 'mixup'"):
        settings.small_image_augment("svhn", "mixup")


def test_every_item_has_hyperparameters_with_a_source_and_ours_say_why():
    # One figure is drawn from the tables; Figure 7 is of the runs of Table 11.
    assert set(FIGURES) - {"error-reduction", "ascent-along-training"} <= set(HYPERPARAMETERS)
    assert set(ITEMS) - {"error-reduction"} <= set(HYPERPARAMETERS)
    for item, hyperparameters in HYPERPARAMETERS.items():
        assert hyperparameters, item
        for hyperparameter in hyperparameters:
            assert hyperparameter.source != "ours" or hyperparameter.note, (item, hyperparameter.name)
    assert {h.source for h in REFERENCE_CODE if h.name != "precision"} == {"reference code"}


def test_settings_say_which_of_them_are_the_papers():
    found = {h.name: (h.value, h.source) for h in HYPERPARAMETERS["hessian"]}
    assert found["model"] == ("wrn-40-10", "paper")
    assert found["learning rate"] == (0.05, "ours")
    assert found["m"] == (32, "ours")
    assert not {"rho", "m"} & {h.name for h in settings_of(settings.HESSIAN, "rho", "m")}


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


TABLE = Path(__file__).with_name("paper_scale.csv")
WITHOUT_RUNS = ("predictive", "error-reduction")  # other people's networks; the runs of four tables
JOINED = ("augment", "rho", "noise", "mixup")  # rows that differ in these alone are one


def row(item, job):
    e = job.experiment
    data, model, optim = e.data, e.model, e.optim
    number = "{:.6g}".format
    sam = [f"p={optim.p}"] * (optim.p != 2) + ["random"] * (optim.direction == "random")
    sam += ["second order"] * optim.second_order + [f"{optim.ascent_steps} steps"] * (optim.ascent_steps > 1)
    model_details = [model.design] * (model.design != "standard") + ["no norm"] * (model.norm == "none")
    model_details += ["frozen norm"] * model.freeze_batch_norm + [f"head {model.head}"] * (model.head != "auto")
    model_details += ["checkpoint"] * (model.checkpoint is not None)
    crops = [str(data.image_size)] * (data.image_size is not None) + [data.resize] * (data.resize != "bilinear")
    crops += [f"padding {data.crop_padding}"] * (data.crop_padding is not None)
    regularization = [f"dropout {model.dropout}"] * (model.dropout > 0)
    regularization += [f"drop-connect {model.drop_connect}"] * (model.drop_connect > 0)
    regularization += [f"smoothing {optim.label_smoothing}"] * (optim.label_smoothing > 0)
    return {
        "item": item,
        "model": " ".join([model.name, *model_details]),
        "data": " ".join([data.name, *["extra"] * data.extra, *[f"without {data.validation}"] * (data.validation > 0)]),
        "augment": data.augment + " shared" * data.cutout_shared,
        "crops": " ".join(crops),
        "noise": number(data.label_noise),
        "mixup": number(data.mixup) + " bootstrap" * data.bootstrap,
        "epochs": str(e.epochs),
        "batch": f"{data.batch_size}{' drop last' * data.drop_last}",
        "lr": f"{number(optim.lr)} {optim.schedule} {optim.name} {optim.momentum}{' nesterov' * optim.nesterov}",
        "decay": f"{number(optim.weight_decay)} {optim.decay}",
        "clip": str(optim.clip_norm),
        "rho": number(optim.rho),
        "m": str(optim.m),
        "sam": " ".join(sam),
        "regularization": " ".join(regularization),
    }


def table():
    """One row for all runs of an item that differ only in seed and in `JOINED`; `runs` counts them."""
    groups = {}
    for name, item in ITEMS.items():
        if name in WITHOUT_RUNS:
            continue
        for job in planned_jobs(item, "paper").values():
            found = row(name, job)
            key = tuple(value for column, value in found.items() if column not in JOINED)
            groups.setdefault(key, []).append((found, job.seed))
    rows = []
    for members in groups.values():
        found = dict(members[0][0])
        for column in JOINED:
            found[column] = " / ".join(dict.fromkeys(member[column] for member, _ in members))
        found["seeds"] = str(len({seed for _, seed in members}))
        found["runs"] = str(len(members))
        rows.append(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def test_what_every_item_plans_at_the_papers_scale_is_the_checked_in_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no checkpoints: they would be shown too
    assert table().splitlines() == TABLE.read_text().splitlines()


if __name__ == "__main__":
    TABLE.write_text(table())
