"""Whole runs: exact resume, files, stops and mistakes."""

import dataclasses
import errno
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from flatmin.cli import main
from flatmin.lab.errors import DivergedError, RunError, StorageError
from flatmin.lab.runs import checkpoint
from flatmin.lab.runs import directory as run_directory
from flatmin.lab.runs.checkpoint import checkpoints, latest_checkpoint
from flatmin.lab.runs.directory import RunDirectory, read_result
from flatmin.lab.runs.json_files import read_json
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.sweeps import jobs as jobs_module
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Cosine
from flatmin.lab.training import run as run_module
from flatmin.lab.training import session
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import deterministic_algorithms
from flatmin.lab.training.steps import Stepper
from flatmin.lab.training.trained_model import load_trained
from sweep_process import AtStep, tiny

CPU = torch.device("cpu")


def small(epochs=2, model="cnn-4", **changes):
    data = changes.pop("data", Data(train_size=60, batch_size=20))
    return Experiment(data=data, model=Model(name=model), epochs=epochs, precision="float32", **changes)


class CrashError(Exception):
    """Stands for kill -9."""


def crash_at(step):
    def crash():
        raise CrashError

    return AtStep(step, crash)


def final_state(result):
    return latest_checkpoint(result.directory / "checkpoints")


def assert_bit_identical(first, second):
    assert (first.directory / "metrics.jsonl").read_bytes() == (second.directory / "metrics.jsonl").read_bytes()
    a, b = final_state(first), final_state(second)
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    assert repr(a["optimizer"]["param_groups"]) == repr(b["optimizer"]["param_groups"])
    for key, values in a["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer"]["state"][key][name]))


VARIANTS = {
    "sgd-augmented-mixup": small(
        data=Data(
            train_size=60, batch_size=20, augment="cutout", cutout_size=3, mixup=1.0, label_noise=0.4, validation=0.1
        ),
        model="wrn-10-1",
    ),
    "sam-m-batch-norm": small(model="wrn-10-1", optim=Optim(rho=0.1, m=7, clip_norm=1.0, warmup_epochs=1)),
    "asam-adamw": small(optim=Optim(name="adamw", lr=1e-3, rho=0.5, adaptive=0.01)),
    "random-direction": small(optim=Optim(rho=0.1, direction="random")),
    "shake-shake": small(model="shake-shake-8-2x4d", optim=Optim(rho=0.1)),
    "measured-radius": small(model="wrn-10-1", optim=Optim(rho="0.5x", every=2, m=7)),
    "norm-layers": small(model="wrn-10-1", optim=Optim(rho="0.5x", perturb="norm", warmup_epochs=1)),
    "second-order": small(optim=Optim(rho=0.1, second_order=True, decay="loss")),
    "bfloat16": dataclasses.replace(small(model="wrn-10-1", optim=Optim(rho=0.1)), precision="bfloat16"),
    "autoaugment": small(data=Data(train_size=60, batch_size=20, augment="autoaugment", cutout_size=3)),
}


@pytest.mark.parametrize("experiment", VARIANTS.values(), ids=VARIANTS)
def test_a_run_that_crashed_in_the_middle_of_epochs_ends_bit_identical(experiment, tmp_path):
    whole = train(experiment, seed=3, runs=tmp_path / "whole")
    for crash in (1, 4, 5):
        # Saved after every step, crashed after the second one of this session.
        with pytest.raises(CrashError):
            train(experiment, seed=3, runs=tmp_path / "broken", callback=crash_at(crash + 1), checkpoint_seconds=0)
    resumed = train(experiment, seed=3, runs=tmp_path / "broken")
    assert_bit_identical(whole, resumed)
    assert all(t.dtype in (torch.float32, torch.int64) for t in final_state(whole)["model"].values())


def test_checkpoints_that_are_rare_change_nothing(tmp_path):
    experiment = small(epochs=3, optim=Optim(rho=0.1))
    often = train(experiment, runs=tmp_path / "often", checkpoint_seconds=0)
    with pytest.raises(CrashError):
        train(experiment, runs=tmp_path / "rare", callback=crash_at(7), checkpoint_seconds=1e9)
    assert_bit_identical(often, train(experiment, runs=tmp_path / "rare"))


def test_a_finished_run_is_returned_at_once(tmp_path, monkeypatch):
    first = train(small(), runs=tmp_path)
    monkeypatch.setattr(Stepper, "step", lambda *a: pytest.fail("trained again"))
    again = train(dataclasses.replace(small(), name="another label"), runs=tmp_path)
    assert again.history == first.history
    assert again.directory == first.directory


def test_seeds_are_replicas_and_the_same_seed_is_the_same_run(tmp_path):
    a, b = (train(small(), seed=s, runs=tmp_path / "a") for s in (0, 1))
    assert a.history != b.history
    again = train(small(), seed=0, runs=tmp_path / "b")
    assert_bit_identical(a, again)


def test_the_caller_s_random_state_is_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(small(epochs=1), runs=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_directory_holds_what_it_should(tmp_path):
    experiment = small(
        epochs=3, optim=Optim(rho=0.1), data=Data(train_size=50, batch_size=25, label_noise=0.4, validation=0.1)
    )
    result = train(experiment, seed=2, runs=tmp_path)
    path = tmp_path / experiment.run_name(2)
    assert result.directory == path
    assert Experiment.from_json((path / "spec.json").read_text()) == experiment
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    names = {"train_loss", "train_error", "perturbed_error", "sharpness", "test_loss", "test_error", "valid_error"}
    assert {*names, "lr"} <= lines[0].keys()
    assert all(0 <= line["test_error"] <= 1 for line in lines)
    assert lines[0]["sharpness"] == pytest.approx(lines[0]["perturbed_loss"] - lines[0]["train_loss"])
    speeds = [json.loads(line) for line in (path / "speed.jsonl").read_text().splitlines()]
    assert all(speed["images_per_second"] > 0 for speed in speeds)
    assert list((path / "tensorboard").glob("events*"))
    assert 1 <= len(checkpoints(path / "checkpoints")) <= 2
    assert read_json(path / "result.json") == {"epoch": 3, "step": lines[-1]["step"], "time_seconds": ANY}
    session = json.loads((path / "environment.json").read_text())["sessions"][0]
    assert session["torch"] == torch.__version__
    assert {"commit", "cpu", "num_cores", "num_workers", "precision", "python"} <= session.keys()
    noise = json.loads((path / "label_noise.json").read_text())
    assert noise["num_flipped"] == len(noise["flipped"]) == 20
    assert read_result(path).history == result.history
    written = {f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir()} - {"lock"}
    docs = (Path(__file__).parents[3] / "docs" / "lab.md").read_text()
    for name in {*written, "problem.json", "measures/", "weights/", "predicted_labels.json"}:
        assert name in run_directory.__doc__
        assert f"| `{name}` |" in docs


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_the_time_is_that_of_training_without_evaluation_and_saving(checkpoint_seconds, tmp_path, monkeypatch):
    slow, passed = 1e6, [0.0]

    def slowly(function):
        def wrapped(*arguments, **keywords):
            passed[0] += slow
            return function(*arguments, **keywords)

        return wrapped

    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    monkeypatch.setattr(run_module, "evaluate", slowly(run_module.evaluate))
    monkeypatch.setattr(run_module, "save_checkpoint", slowly(run_module.save_checkpoint))
    result = train(small(), runs=tmp_path, checkpoint_seconds=checkpoint_seconds)
    assert passed[0] >= 4 * slow  # two epochs, the first and the last checkpoint
    assert 0 < result.time_seconds < slow
    assert final_state(result)["time_seconds"] == result.time_seconds
    speeds = [json.loads(line) for line in (result.directory / "speed.jsonl").read_text().splitlines()]
    assert result.time_seconds == pytest.approx(sum(60 / speed["images_per_second"] for speed in speeds))


def test_test_metrics_come_after_every_so_many_epochs_and_the_last_and_perturbed_ones_only_with_sam(tmp_path):
    result = train(small(epochs=5, evaluate_every=2), runs=tmp_path)
    assert [line["test_error"] is not None for line in result.history] == [False, True, False, True, True]
    assert (result.metrics["perturbed_error"], result.metrics["sharpness"]) == (None, None)


def test_the_logged_error_is_that_of_the_network_on_the_whole_test_set(tmp_path):
    from flatmin.lab.training.trained_model import load_trained

    result = train(small(model="wrn-10-1", optim=Optim(rho=0.05)), runs=tmp_path)
    trained = load_trained(result.directory)
    images = trained.dataset.test.pixels.float()
    logits = trained.network((images / 255 - 0.3045) / 0.3760)
    wrong = (logits.argmax(1).numpy() != trained.dataset.test.labels).mean()
    assert result.metrics["test_error"] == pytest.approx(wrong, abs=2e-3)
    batches = trained.batches(trained.dataset.train, 33, batch_size=10)
    assert [len(labels) for _, labels in batches] == [10, 10, 10, 3]


@pytest.mark.parametrize("rho", [0.0, 0.05])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint(rho, tmp_path):
    experiment = small(epochs=50, optim=Optim(lr=1e20, momentum=0.0, nesterov=False, schedule="constant", rho=rho))
    with pytest.raises(DivergedError) as caught:
        train(experiment, runs=tmp_path, checkpoint_seconds=0)
    message = str(caught.value)
    for part in ("diverged (NaN or inf) at step", "batch", "examples", "optim.lr than 1e+20"):
        assert part in message
    assert ("optim.rho" in message) == (rho > 0)
    directory = tmp_path / experiment.run_name(0)
    kept = latest_checkpoint(directory / "checkpoints")
    assert all(math.isfinite(t.abs().max()) for t in kept["model"].values())
    assert not (directory / "result.json").exists()


def test_a_disk_that_fills_up_stops_cleanly_and_the_run_goes_on_later(tmp_path, monkeypatch):
    whole = train(small(), runs=tmp_path / "whole")
    save, calls = torch.save, []

    def fills_up(content, file):
        calls.append(file)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, file)

    monkeypatch.setattr(checkpoint.torch, "save", fills_up)
    with pytest.raises(StorageError, match=r"No space left on device.*rerun the command"):
        train(small(), runs=tmp_path / "full", checkpoint_seconds=0)
    monkeypatch.undo()
    assert_bit_identical(whole, train(small(), runs=tmp_path / "full"))


def test_a_batch_smaller_than_the_number_of_workers_is_refused(tmp_path, monkeypatch):
    from flatmin.lab.training.distributed import Workers
    from flatmin.lab.training.run import Run

    experiment = small(data=Data(train_size=60, batch_size=2))
    monkeypatch.setattr(run_module, "Stepper", lambda *a: None)
    for name in ("on_main", "on_each"):
        monkeypatch.setattr(Workers, name, lambda self, function: function())
    with pytest.raises(RunError, match="A batch of 2 examples cannot be divided among 3 workers"):
        Run(RunDirectory(experiment, 0, tmp_path), Workers(count=3, device=CPU), None)


def test_two_processes_do_not_work_on_one_run(tmp_path):
    directory = RunDirectory(small(), 0, tmp_path)
    directory.open()
    with pytest.raises(RunError, match="Another process is working on"):
        train(small(), runs=tmp_path)
    directory.close()
    train(small(epochs=1), runs=tmp_path)


def test_fine_tuning_starts_from_a_checkpoint_with_frozen_statistics(tmp_path):
    donor = train(small(model="wrn-10-1"), runs=tmp_path)
    weights = final_state(donor)["model"]
    path = tmp_path / "weights.pt"
    torch.save(weights, path)
    experiment = Experiment(
        data=Data(train_size=60, batch_size=20),
        model=Model(name="wrn-10-1", checkpoint=str(path), freeze_batch_norm=True, head="new"),
        optim=Optim(lr=0.01, rho=0.05),
        epochs=1,
        precision="float32",
    )
    tuned = final_state(train(experiment, runs=tmp_path))["model"]
    for name, value in weights.items():
        frozen = "running" in name or "num_batches" in name
        assert torch.equal(tuned[name], value) == frozen, name


def test_a_compiled_network_trains_to_the_same_metrics(tmp_path, monkeypatch):
    """With the cheapest backend: what is tested is that the engine's passes survive compilation."""
    compile_ = torch.compile
    monkeypatch.setattr(run_module.torch, "compile", lambda module: compile_(module, backend="aot_eager"))
    plain = train(small(model="wrn-10-1", optim=Optim(rho=0.1)), runs=tmp_path)
    compiled = train(dataclasses.replace(small(model="wrn-10-1", optim=Optim(rho=0.1)), compile=True), runs=tmp_path)
    assert compiled.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], rel=1e-3)
    assert compiled.directory != plain.directory


def test_no_epochs_only_evaluate_the_checkpoint(tmp_path):
    trained = train(dataclasses.replace(tiny(), epochs=2), runs=tmp_path)
    model = dataclasses.replace(tiny().model, checkpoint=f"run:{trained.directory.name}", head="keep")
    evaluated = train(dataclasses.replace(tiny(), model=model, epochs=0), seed=3, runs=tmp_path)
    assert evaluated.metrics["test_error"] == trained.metrics["test_error"]
    assert evaluated.metrics["test_loss"] == pytest.approx(trained.metrics["test_loss"])
    assert (evaluated.metrics["epoch"], evaluated.metrics["step"], evaluated.metrics["train_loss"]) == (0, 0, None)
    weights = [load_trained(r.directory).network.state_dict() for r in (trained, evaluated)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))
    assert len(list((evaluated.directory / "checkpoints").glob("*.pt"))) == 1
    assert train(dataclasses.replace(tiny(), model=model, epochs=0), seed=3, runs=tmp_path).metrics == evaluated.metrics


# Deterministic algorithms, if asked for.


@pytest.mark.parametrize("flag", [(), ("--deterministic",)])
def test_flag_turns_deterministic_algorithms_on_for_training_only(flag, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    step, seen = run_module.Stepper.step, []

    def recorded(self, *arguments):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return step(self, *arguments)

    monkeypatch.setattr(run_module.Stepper, "step", recorded)
    arguments = ["--data.train-size", "20", "--model.name", "cnn-2", "--epochs", "1", "--output", "quiet"]
    assert main(["train", *arguments, "--runs", str(tmp_path), *flag]) == 0
    assert set(seen) == {(bool(flag), ":4096:8" if flag else None)}
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_jobs_train_and_measure_with_deterministic_algorithms(deterministic, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = []

    def record(owner, name):
        function = getattr(owner, name)

        def recorded(*arguments, **keywords):
            seen.append((name, torch.are_deterministic_algorithms_enabled()))
            return function(*arguments, **keywords)

        monkeypatch.setattr(owner, name, recorded)

    record(run_module.Stepper, "step")
    record(jobs_module, "measure_run")
    job = Job(experiment=tiny(), measurements=(Cosine(num_examples=20),))
    assert jobs_module.run_job(job, tmp_path, None, 60.0, deterministic).kind == "done"
    assert set(seen) == {("step", deterministic), ("measure_run", deterministic)}
    assert not torch.are_deterministic_algorithms_enabled()


def test_algorithms_are_as_before_after_an_error(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
