"""Two worker processes under torchrun, with gloo: on one host, and on two that share no file system."""

import dataclasses
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import worker_cases
from flatmin import sam_gradient
from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.errors import RunError
from flatmin.lab.models.build import build_model
from flatmin.lab.runs.checkpoint import latest_checkpoint
from flatmin.lab.runs.directory import read_result
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.distributed import _unused_part
from flatmin.lab.training.engine import train
from two_hosts import output, two_hosts
from two_hosts import torchrun as torchrun_on
from two_processes import torchrun

EXPERIMENT = Experiment(
    data=Data(train_size=75, batch_size=20, augment="basic", mixup=0.5),
    model=Model(name="wrn-10-1"),
    optim=Optim(rho=0.2, lr=0.05, clip_norm=1.0),
    epochs=2,
    precision="float32",
)


RADIUS = dataclasses.replace(EXPERIMENT, optim=Optim(rho="auto", lr=0.05), epochs=1)
SECOND_ORDER = Experiment(
    data=Data(train_size=20, batch_size=20),
    model=Model(name="cnn-4"),
    optim=Optim(rho=0.2, second_order=True, momentum=0.0, nesterov=False, weight_decay=0.0, schedule="constant"),
    epochs=1,
    precision="float32",
)


def train_and_kill(experiment, folder, die_at):
    """Train with two workers in a new folder; one of them is killed at a step."""
    folder.mkdir()
    (folder / "asked.json").write_text(experiment.to_json())
    script = f"import pathlib, worker_cases as w; w.train_and_die(pathlib.Path('.').resolve(), {die_at})"
    errors = torchrun(folder, script, options=["--max-restarts=2"], PYTHONPATH=os.pathsep.join(sys.path))
    assert "deprecated" not in errors
    return folder / experiment.run_name(0)


def final_weights(directory):
    return latest_checkpoint(directory / "checkpoints")["model"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, two_processes):
    """The directories of three runs of two workers that are started without torchrun."""
    runs = tmp_path_factory.mktemp("two")
    experiments = [EXPERIMENT, RADIUS, SECOND_ORDER]
    two_processes.run(worker_cases.train_all, [experiment.to_json() for experiment in experiments], runs)
    return [runs / experiment.run_name(0) for experiment in experiments]


@pytest.fixture(scope="module")
def two_workers(trained):
    return trained[0]


def test_two_workers_see_every_example_exactly_once_an_epoch(two_workers):
    seen = [json.loads((two_workers.parent / f"seen-0-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(seen[0]) == len(seen[1]) == 8
    for epoch in (0, 1):
        examples = [i for worker in seen for _, batch in worker[4 * epoch : 4 * epoch + 4] for i in batch]
        assert sorted(examples) == list(range(75))


def test_two_workers_with_an_eps_each_equal_one_process_with_m_half_the_batch(two_workers, tmp_path):
    """Weights, batch-norm statistics and metrics, up to the order of float32 sums."""
    optim = dataclasses.replace(EXPERIMENT.optim, m=10)
    alone = train(dataclasses.replace(EXPERIMENT, optim=optim), runs=tmp_path)
    expected, found = final_weights(alone.directory), final_weights(two_workers)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
    line = json.loads((two_workers / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["train_loss"] == pytest.approx(alone.metrics["train_loss"], rel=1e-3)
    assert line["perturbed_loss"] == pytest.approx(alone.metrics["perturbed_loss"], rel=1e-3)
    whole = train(dataclasses.replace(EXPERIMENT), runs=tmp_path)  # one eps for the whole batch is another thing
    other = final_weights(whole.directory)
    assert not all(torch.allclose(found[name], other[name], rtol=2e-3, atol=2e-4) for name in other)


def test_two_workers_measure_the_radius_of_one_process_with_m_half_the_batch(trained, tmp_path):
    found = read_result(trained[1]).metrics["rho"]
    alone = train(dataclasses.replace(RADIUS, optim=dataclasses.replace(RADIUS.optim, m=10)), runs=tmp_path)
    assert found == pytest.approx(alone.metrics["rho"], rel=1e-4)


def test_the_result_of_two_workers_is_not_returned_to_one_process(two_workers):
    with pytest.raises(RunError, match="was trained by 2 workers, but now there is 1 worker"):
        train(EXPERIMENT, runs=two_workers.parent)


def test_a_worker_that_is_killed_is_restarted_from_the_last_checkpoint(two_workers, tmp_path):
    directory = train_and_kill(EXPERIMENT, tmp_path / "killed", die_at=5)
    sessions = json.loads((directory / "environment.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert sessions[0]["num_workers"] == 2
    assert (directory / "metrics.jsonl").read_bytes() == (two_workers / "metrics.jsonl").read_bytes()
    found, expected = final_weights(directory), final_weights(two_workers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_second_order_gradients_are_averaged_over_workers(trained):
    """One step, against the mean of the two halves' exact SAM gradients."""
    experiment, found = SECOND_ORDER, final_weights(trained[2])
    torch.manual_seed(torch_seed(0, Purpose.NETWORK_INIT))
    network = build_model(experiment.model, num_classes=10, in_channels=1)
    info = dataset_info("digits")
    pipeline = Pipeline(
        data=experiment.data, info=info, mean=info.mean, std=info.std, seed=0, device=torch.device("cpu")
    )
    (batch,) = pipeline.training(load_dataset(experiment.data).train, epoch=0)
    grads = []
    for part in batch.split(2):

        def loss(parameters, part=part):
            logits = torch.func.functional_call(network, parameters, (part.inputs,))
            return F.cross_entropy(logits, part.labels)

        grads.append(sam_gradient(loss, dict(network.named_parameters()), rho=0.2, second_order=True).grads)
    for name, value in network.named_parameters():
        expected = value - 0.1 * (grads[0][name] + grads[1][name]) / 2
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)


def test_work_of_the_main_process_may_take_days(two_processes):
    """A download, say: torch's own limit for a collective is ten minutes with NCCL."""
    for timeouts, result in two_processes.run(worker_cases.groups_of_long_work):
        assert result == "from 0"
        assert timeouts
        assert min(timeouts) >= timedelta(days=7)


def test_workers_ignore_what_dead_ones_left_in_the_store():
    """torchrun's store has the questions and answers of earlier workers; a host that was restarted starts late."""
    store = dist.HashStore()
    store.set("flatmin/question/1", "of a dead worker")
    store.set("flatmin/answer/of a dead worker", "old")
    with ThreadPoolExecutor() as pool:
        main = pool.submit(_unused_part, store, 0, 3)
        parts = [pool.submit(_unused_part, store, rank, 3) for rank in (2, 1)]
        parts = [future.result() for future in (main, *parts)]
    parts[0].set("key", "value")
    assert all(part.check(["key"]) for part in parts)
    assert not dist.PrefixStore("old", store).check(["key"])


EPOCHS = 12
SETTINGS = (
    *("--data.train-size", "60", "--data.batch-size", "20", "--data.label-noise", "0.4", "--data.bootstrap"),
    *("--model.name", "cnn-2", "--optim.rho", "0.1", "--precision", "float32", "--epochs", str(EPOCHS)),
    *("--checkpoint-seconds", "0", "--output", "json"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        # A checkpoint to start from, which only the first host has.
        torch.manual_seed(1)
        torch.save(build_model(Model(name="cnn-2"), num_classes=10, in_channels=1).state_dict(), found[0].disk / "w.pt")
        yield found


@pytest.fixture(scope="module")
def settings(hosts):
    return (*SETTINGS, "--model.checkpoint", hosts[0].path / "w.pt")


@pytest.fixture(scope="module")
def one_host(hosts, two_processes, tmp_path_factory):
    """The directory of runs of two workers on this host, of an experiment with the same settings."""
    checkpoint = hosts[0].path / "w.pt"
    shutil.copy(hosts[0].disk / "w.pt", checkpoint)
    experiment = Experiment(
        data=Data(train_size=60, batch_size=20, label_noise=0.4, bootstrap=True),
        model=Model(name="cnn-2", checkpoint=str(checkpoint)),
        optim=Optim(rho=0.1),
        epochs=EPOCHS,
        precision="float32",
    )
    runs = tmp_path_factory.mktemp("one-host")
    two_processes.run(worker_cases.train_all, [experiment.to_json()], runs)
    return runs


def train_on(hosts, *arguments, restarts=0):
    processes = [host.start(torchrun_on(host, hosts, *arguments, restarts=restarts)) for host in hosts]
    return [(output(process), process.returncode) for process in processes]


def assert_same_runs(found, expected):
    names = sorted(path.name for path in expected.iterdir() if path.is_dir())
    assert len(names) == 2  # with bootstrap a run and its first stage
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert (found / name / "metrics.jsonl").read_bytes() == (expected / name / "metrics.jsonl").read_bytes()
        states = [latest_checkpoint(runs / name / "checkpoints")["model"] for runs in (found, expected)]
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_two_hosts_end_with_the_weights_of_one_and_can_be_run_again(hosts, settings, one_host):
    first, second = train_on(hosts, *settings)
    assert first[1] == second[1] == 0, first[0] + second[0]
    assert_same_runs(hosts[0].disk / "runs", one_host)
    assert not (hosts[1].disk / "runs").exists()
    written = {path: path.stat().st_mtime_ns for path in hosts[0].disk.glob("runs/*/*.json*")}
    again, other = train_on(hosts, *settings)
    assert again[1] == other[1] == 0, again[0] + other[0]
    assert '"event": "result"' in again[0]
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_host_that_is_killed_and_restarted_resumes_the_run(hosts, settings, one_host):
    settings = (*settings, "--runs", "killed")
    first, second = (host.start(torchrun_on(host, hosts, *settings, restarts=3)) for host in hosts)
    runs = hosts[0].disk / "killed"

    def under_way():
        files = runs.glob("*/metrics.jsonl")
        return any(2 <= file.read_text().count("\n") < EPOCHS for file in files) or first.poll() is not None

    while not under_way():
        time.sleep(0.005)
    hosts[1].kill()
    output(second)
    second = hosts[1].start(torchrun_on(hosts[1], hosts, *settings, restarts=3))
    texts = output(first), output(second)
    assert first.returncode == second.returncode == 0, "\n".join(texts)
    assert_same_runs(runs, one_host)
    sessions = [len(json.loads(file.read_text())["sessions"]) for file in runs.glob("*/environment.json")]
    assert sorted(sessions)[-1] == 2


def test_data_that_one_host_lacks_is_reported_once(hosts):
    for split in ("train", "test"):
        (hosts[0].disk / f"images/{split}/class").mkdir(parents=True)
        torch.save(0, hosts[0].disk / f"images/{split}/class/0.png")  # never read: the other host has no such file
    first, second = train_on(hosts, "--data.name", f"folder:{hosts[0].path}/images", "--runs", "missing")
    assert first[1] != 0
    assert second[1] != 0
    text = first[0] + second[0]
    assert text.count("error: folder:") == 1, text
    assert "(worker 1 on " in text
    # Tracebacks are torchrun's own: of the worker that failed, and of a host whose partner is gone.
    assert not re.search(r'File "[^"]*flatmin/(lab|core|cli)', text), text
    assert not (hosts[0].disk / "missing").exists() or not list((hosts[0].disk / "missing").iterdir())
