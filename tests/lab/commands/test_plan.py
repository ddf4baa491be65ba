"""What `flatmin reproduce ITEM --plan` prints."""

import dataclasses

import pytest
import tyro

from flatmin.cli import main
from flatmin.lab.commands.plan import gpu_hours, train_flags
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.cost import disk_bytes, model_flops, training_flops
from flatmin.lab.studies.study import planned_jobs
from flatmin.lab.sweeps.jobs import Job

TINY = Experiment(data=Data(train_size=100), model=Model(name="cnn-2"), optim=Optim(rho=0.1), epochs=3)


def test_plan_runs_nothing_and_names_numbers_and_commands(tmp_path, capsys):
    runs = tmp_path / "runs"
    arguments = ["landscape", "--scale", "paper", "--plan", "--images-per-second", "1000", "--runs", str(runs)]
    assert main(["reproduce", *arguments]) == 0
    text = capsys.readouterr().out
    jobs = list(planned_jobs(ITEMS["landscape"], "paper").values())
    row = next(line for line in text.splitlines() if line.startswith("│ landscape"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    passes = sum(j.experiment.epochs * 50_000 * (2 if j.experiment.optim.rho else 1) for j in jobs)
    assert cells[1:3] == [str(len(jobs)), f"{passes / 1e6:,.0f}"]
    assert float(cells[5]) == pytest.approx(gpu_hours(jobs, 1000), rel=0.1)
    for command in ("flatmin reproduce landscape --scale paper", "--engine ray --address auto", "torchrun --nnodes 2"):
        assert command in text
    assert not runs.exists()


@pytest.mark.parametrize("arguments", [["--plan", "--images-per-second", "0"], ["--images-per-second", "5"]])
def test_speed_must_be_positive_and_goes_with_plan(arguments, tmp_path, capsys):
    assert main(["reproduce", "landscape", *arguments, "--runs", str(tmp_path)]) == 2
    assert "--images-per-second must be positive, and goes with --plan" in capsys.readouterr().err


def test_cost_counts_passes_flops_and_checkpoints():
    job = Job(experiment=TINY)
    assert training_flops([job]) == 100 * 3 * 2 * 3 * model_flops(TINY)  # images, epochs, SAM, forward and backward
    num_weights = sum(p.numel() for p in build_model(TINY.model, num_classes=10, in_channels=1).parameters())
    assert disk_bytes([job]) == 2 * 2 * 4 * num_weights  # two checkpoints of weights and momentum
    kept = Job(experiment=dataclasses.replace(TINY, keep_every=1))
    assert disk_bytes([kept]) == (2 * 2 + 4) * 4 * num_weights
    assert disk_bytes([job, job]) == disk_bytes([job])


def test_flags_of_every_planned_run_make_the_same_experiment():
    for name in ("table1", "label-noise", "fine-tuning", "hessian"):
        experiments = {job.experiment for job in planned_jobs(ITEMS[name], "paper").values()}
        for experiment in list(experiments)[:5]:
            assert tyro.cli(Experiment, args=train_flags(experiment)) == experiment
