"""Invented findings, and the directories of the runs that they name."""

import contextlib
import math

import pytest

from flatmin.lab.runs.history import write_history
from flatmin.lab.runs.json_files import write_json
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.contrasts import Contrast, Family
from flatmin.lab.studies.findings import (
    Cell,
    Comparison,
    Findings,
    Hyperparameter,
    LineFigure,
    Series,
    Surface,
    SurfaceFigure,
    Table,
    Verdict,
)
from flatmin.lab.studies.statistics import Interval, mean_and_interval

SEEDS = range(5)


@contextlib.contextmanager
def without_pictures():
    """Write pages in which nothing is drawn, which takes long."""
    with pytest.MonkeyPatch.context() as patch:
        no_picture = {"file": "figure.svg", "inline": "", "content": ""}
        patch.setattr("flatmin.lab.report.content._pictures", lambda *a: no_picture)
        yield


SESSION = {
    **{"started": "2026-01-02T03:04:05Z", "command": ["/home/somebody/secret/bin/flatmin", "train"]},
    **{"flatmin": "0.1.0", "commit": "0123456789abcdef0123456789abcdef01234567+"},
    **{"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "precision": "bfloat16"},
    **{"platform": "Linux-6.1-x86_64", "cpu": "Example CPU 9000", "gpus": []},
    **{"num_cores": 2, "num_threads": 1, "num_workers": 1},
}
METHODS = {  # test errors in %, with and without wrong labels
    "SGD": (16.0, 40.4),
    "SGD, twice the epochs": (15.5, 41.2),
    "SAM": (14.7, 27.5),
    "SAM, m = 16": (14.5, 22.3),
}


def experiment(method="SGD", noise=0.0, **changes):
    """Return an experiment of one of the methods."""
    rho = {"SAM": 0.2, "SAM, m = 16": 0.1}.get(method, 0.0)
    optim = Optim(rho=rho, m=16 if method.endswith("16") else None)
    data = Data(name="fashion-mnist", train_size=2000, label_noise=noise, validation=0.1)
    epochs = 80 if "twice" in method else 40
    return Experiment(data=data, model=Model(name="wrn-10-2"), optim=optim, epochs=epochs, **changes)


def write_run(runs, spec, seed, test_error, *, failure=None, finished=True, sessions=(SESSION,)):
    """Write the directory of a run, as training leaves it, and return its name."""
    path = runs / spec.run_name(seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "spec.json").write_text(spec.to_json())
    write_json(path / "environment.json", {"sessions": list(sessions)})
    if failure is not None:
        write_json(path / "problem.json", {"problem": failure})
    elif finished:
        history = [
            {
                "epoch": epoch,
                "step": 10 * epoch,
                "train_error": 0.4 / epoch**2,
                "valid_error": test_error / 100 * (1 + 1 / epoch),
                "test_error": test_error / 100 * (1 + 0.8 / epoch) if epoch < 4 else test_error / 100,
            }
            for epoch in (1, 2, 3, 4)
        ]
        write_history(path, history)
        write_json(path / "result.json", {"epoch": 4, "step": 40, "time_seconds": 93.4})
    return path.name


def spread(mean, seed, method):
    """Return a test error that depends on the seed, in the same way at every call."""
    return mean + 0.35 * math.sin(7 * seed + len(method) + mean) + 0.2 * math.cos(3 * seed)


def findings_with_runs(runs):
    """Write 42 runs, two of which came to nothing or were not finished, and return what a study would find in them."""
    errors, names = {}, {}
    for column, noise in enumerate((0.0, 0.4)):
        for method, means in METHODS.items():
            key = method, noise
            errors[key] = tuple(spread(means[column], seed, method) for seed in SEEDS)
            names[key] = tuple(
                write_run(runs, experiment(method, noise), seed, error)
                for seed, error in zip(SEEDS, errors[key], strict=True)
            )
    failure = "The loss is not finite in epoch 3 <b>/home/somebody/secret/x.pt</b>"
    diverged = write_run(runs, experiment("SAM", 0.8), 0, 0, failure=failure)
    unfinished = write_run(runs, experiment("SAM", 0.8), 1, 0, finished=False)
    return [
        table_findings(errors, names, [diverged, unfinished]),
        landscape_findings([names["SGD", 0.0][0], names["SAM", 0.0][0]]),
    ]


def table_findings(errors, names, others):
    """Return findings in the shape of Table 1."""
    claims = {"SGD": ("3.5 ± 0.1", "31.2"), "SAM": ("2.7 ± 0.1", "20.6")}
    contrasts = {
        (method, noise): Contrast(
            quantity="test error",
            lower_name=method,
            higher_name="SGD",
            lower=dict(enumerate(errors[method, noise])),
            higher=dict(enumerate(errors["SGD", noise])),
            num_asked=len(SEEDS),
            runs=names[method, noise] + names["SGD", noise],
        )
        for noise in (0.0, 0.4)
        for method in ("SAM", "SAM, m = 16")
    }
    family = Family(contrasts.values())
    compared = {key: family.comparison(contrast) for key, contrast in contrasts.items()}
    rows = []
    for method in METHODS:
        row = [method]
        for number, noise in enumerate((0.0, 0.4)):
            cell = Cell(
                claimed=claims[method][number] if method in claims else None,
                measured=mean_and_interval(errors[method, noise]),
                values=errors[method, noise],
                runs=names[method, noise],
                note="80 epochs" if "twice" in method else None,
            )
            row += [cell, compared.get((method, noise), "")]
        rows.append(row)
    rows.append(["Mixup", Cell(claimed="4.1", note="not run"), "", Cell(), ""])
    rhos = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    grid = LineFigure(
        title="Test error over rho",
        x_label="rho",
        y_label="test error, %",
        log_x=True,
        series=[
            Series(name=f"m = {m}", x=rhos, y=[16 - m**-0.2 * math.log1p(40 * r) for r in rhos], half_width=[0.3] * 6)
            for m in (16, 64, 128)
        ],
        note="Mean over five replicas and its 95 % confidence interval.",
        runs=names["SAM", 0.0],
    )
    reduction = LineFigure(
        title="Error reduction by SAM per condition",
        x_label="condition",
        y_label="error reduction, %",
        series=[
            Series(name="paper", x=[0, 1, 2], y=[22.9, 34.0, 41.0], mode="markers"),
            Series(name="100 $ and <i>80 %</i>", x=[0, 1, 2], y=[8.1, 31.9, 35.0], half_width=[2.0, 3.1, math.nan]),
        ],
    )
    longer = [
        Comparison(
            **{"name": "SGD, twice the epochs minus SGD", "quantity": quantity, "baseline": 16.0},
            **{"difference": Interval(-0.5, half_width), "p_value": p, "p_holm": p, "num_pairs": num_pairs},
            runs=names["SGD, twice the epochs", 0.0][:num_pairs],
        )
        for quantity, half_width, num_pairs, p in (("test error", 0.2, 5, 0.01), ("top-5 error", math.nan, 1, math.nan))
    ]
    return Findings(
        item="table1",
        scale="laptop",
        title="Fashion-MNIST, with and without wrong labels",
        source="Table 1, Section 3.1; Table 4, Section 3.3",
        about_scale="WRN-10-2 on 2,000 images of Fashion-MNIST instead of WRN-28-10 on CIFAR-10.",
        tables=[
            Table(
                title="Test error",
                columns=["method", "clean labels", "clean, against SGD", "40 % wrong labels", "40 %, against SGD"],
                rows=rows,
                note="SGD reports the better mean of two lengths of training.",
            )
        ],
        figures=[grid, reduction],
        verdicts=[
            Verdict(
                claim="SAM has lower test error than SGD.",
                status="reproduced",
                evidence="-1.3 ± 0.3 points.",
                comparisons=[compared["SAM", 0.0]],
            ),
            Verdict(claim="Smaller m is better.", status="inconclusive", evidence="-0.2 ± 0.4 points, p = 0.31."),
            Verdict(claim="SAM needs no more than one ascent step.", status="not tested", evidence=""),
            Verdict(claim="Longer training does not help.", status="not reproduced", evidence="", comparisons=longer),
        ],
        hyperparameters=[
            Hyperparameter(name="batch size", value=128, source="ours", note="256 in the paper"),
            Hyperparameter(name="rho", value=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5), source="paper"),
        ],
        notes=["The paper's table over rho says accuracy and holds errors."],
        cut=["CIFAR-100 <all of it>: a hundred classes need more images than two cores can train on."],
        runs=sorted(name for group in names.values() for name in group) + others,
        num_missing=3,
    )


def landscape_findings(runs):
    """Return findings with two surfaces."""
    axis = [number / 10 - 1 for number in range(21)]
    surfaces = [
        Surface(name=name, coordinates=axis, height=[[0.05 + k * (a * a + 0.5 * b * b) for b in axis] for a in axis])
        for name, k in (("SGD", 6.0), ("SAM", 2.0))
    ]
    return Findings(
        item="landscape",
        scale="laptop",
        title="Loss landscapes of SGD and SAM",
        source="Figure 1",
        about_scale="One network each; the paper has ResNet-56 without skip connections on CIFAR-10.",
        figures=[
            SurfaceFigure(title="Training loss around the weights", height_label="loss", surfaces=surfaces, runs=runs),
            SurfaceFigure(title="Once more, without runs", height_label="loss", surfaces=surfaces),
        ],
        verdicts=[Verdict(claim="SAM's minimum is wider.", status="reproduced", evidence="See the figure.")],
        runs=runs,
    )
