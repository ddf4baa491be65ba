"""Real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from flatmin.lab.runs.checkpoint import latest_checkpoint
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.engine import train

EXPERIMENT = Experiment(
    data=Data(train_size=400, batch_size=20, augment="basic"),
    model=Model(name="cnn-8"),
    optim=Optim(rho=0.1),
    epochs=12,
    precision="float32",
)
COMMAND = [
    *(sys.executable, "-m", "flatmin.cli", "train", "--output", "json", "--checkpoint-seconds", "0.05"),
    *("--data.train-size", "400", "--data.batch-size", "20", "--data.augment", "basic"),
    *("--model.name", "cnn-8", "--optim.rho", "0.1", "--epochs", "12", "--precision", "float32"),
]


def start(runs):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, "--runs", str(runs)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def read_events(process, until):
    """Read the process's JSON lines until one event, and return it."""
    for line in process.stdout:
        event = json.loads(line)
        if until(event):
            return event
    pytest.fail(f"the process ended first: {process.stderr.read()}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    torch.set_num_threads(1)
    return train(EXPERIMENT, runs=tmp_path_factory.mktemp("whole"))


def assert_bit_identical(directory, uninterrupted):
    assert (directory / "metrics.jsonl").read_bytes() == (uninterrupted.directory / "metrics.jsonl").read_bytes()
    found, expected = (latest_checkpoint(d / "checkpoints") for d in (directory, uninterrupted.directory))
    assert all(torch.equal(v, expected["model"][k]) for k, v in found["model"].items())


def test_a_run_that_was_killed_at_odd_moments_ends_bit_identical(tmp_path, uninterrupted):
    directory = tmp_path / EXPERIMENT.run_name(0)
    for epoch, delay in ((2, 0.013), (6, 0.171)):
        process = start(tmp_path)
        read_events(process, lambda event, epoch=epoch: event.get("epoch", 0) >= epoch)
        time.sleep(delay)  # somewhere in the middle of an epoch, or of writing a checkpoint
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (directory / "result.json").exists()
    assert latest_checkpoint(directory / "checkpoints")["step"] > 0  # there is something to go on from
    torch.set_num_threads(1)
    train(EXPERIMENT, runs=tmp_path)
    assert_bit_identical(directory, uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops_with_its_exit_code_and_no_traceback(number, code, tmp_path, uninterrupted):
    directory = tmp_path / EXPERIMENT.run_name(0)
    process = start(tmp_path)
    read_events(process, lambda event: event.get("epoch", 0) >= 3)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert "Everything is saved" in errors
    assert "Traceback" not in errors
    assert "warning" not in errors
    step = latest_checkpoint(directory / "checkpoints")["step"]
    assert f"after step {step} of" in errors
    torch.set_num_threads(1)
    resumed = train(EXPERIMENT, runs=tmp_path)
    assert_bit_identical(resumed.directory, uninterrupted)
