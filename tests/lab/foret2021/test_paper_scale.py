"""What `--scale paper` plans, as a table: a change of the paper's settings is seen in review.

After an intended change: PYTHONPATH=src python tests/lab/foret2021/test_paper_scale.py
"""

import csv
import io
from pathlib import Path

from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.studies.study import planned_jobs

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
