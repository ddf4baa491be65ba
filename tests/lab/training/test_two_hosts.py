"""Two hosts that share no file system, under torchrun with gloo."""

import json
import re
import shutil
import time

import pytest
import torch

from flatmin.lab.models.build import build_model
from flatmin.lab.runs.checkpoint import latest_checkpoint
from flatmin.lab.spec.experiment import Model
from two_hosts import output, torchrun, two_hosts

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
def one_host(hosts, settings):
    """The directory of runs of two workers on one host."""
    disk = hosts[0].disk.with_name("one-host")
    disk.mkdir()
    shutil.copy(hosts[0].disk / "w.pt", disk)
    process = hosts[0].start(torchrun(hosts[0], hosts, *settings, num_hosts=1), disk)
    text = output(process)
    assert process.returncode == 0, text
    return disk / "runs"


def train(hosts, *arguments, restarts=0):
    processes = [host.start(torchrun(host, hosts, *arguments, restarts=restarts)) for host in hosts]
    return [(output(process), process.returncode) for process in processes]


def assert_same_runs(found, expected):
    names = sorted(path.name for path in expected.iterdir())
    assert len(names) == 2  # with bootstrap a run and its first stage
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert (found / name / "metrics.jsonl").read_bytes() == (expected / name / "metrics.jsonl").read_bytes()
        states = [latest_checkpoint(runs / name / "checkpoints")["model"] for runs in (found, expected)]
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_two_hosts_end_with_the_weights_of_one_and_can_be_run_again(hosts, settings, one_host):
    first, second = train(hosts, *settings)
    assert first[1] == second[1] == 0, first[0] + second[0]
    assert_same_runs(hosts[0].disk / "runs", one_host)
    assert not (hosts[1].disk / "runs").exists()
    written = {path: path.stat().st_mtime_ns for path in hosts[0].disk.glob("runs/*/*.json*")}
    again, other = train(hosts, *settings)
    assert again[1] == other[1] == 0, again[0] + other[0]
    assert '"event": "result"' in again[0]
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_host_that_is_killed_and_restarted_resumes_the_run(hosts, settings, one_host):
    settings = (*settings, "--runs", "killed")
    first, second = (host.start(torchrun(host, hosts, *settings, restarts=3)) for host in hosts)
    runs = hosts[0].disk / "killed"

    def under_way():
        files = runs.glob("*/metrics.jsonl")
        return any(2 <= file.read_text().count("\n") < EPOCHS for file in files) or first.poll() is not None

    while not under_way():
        time.sleep(0.005)
    hosts[1].kill()
    output(second)
    second = hosts[1].start(torchrun(hosts[1], hosts, *settings, restarts=3))
    texts = output(first), output(second)
    assert first.returncode == second.returncode == 0, "\n".join(texts)
    assert_same_runs(runs, one_host)
    sessions = [len(json.loads(file.read_text())["sessions"]) for file in runs.glob("*/environment.json")]
    assert sorted(sessions)[-1] == 2


def test_data_that_one_host_lacks_is_reported_once(hosts):
    for split in ("train", "test"):
        (hosts[0].disk / f"images/{split}/class").mkdir(parents=True)
        torch.save(0, hosts[0].disk / f"images/{split}/class/0.png")  # never read: the other host has no such file
    first, second = train(hosts, "--data.name", f"folder:{hosts[0].path}/images", "--runs", "missing")
    assert first[1] != 0
    assert second[1] != 0
    text = first[0] + second[0]
    assert text.count("error: folder:") == 1, text
    assert "(worker 1 on " in text
    # Tracebacks are torchrun's own: of the worker that failed, and of a host whose partner is gone.
    assert not re.search(r'File "[^"]*flatmin/(lab|core|cli)', text), text
    assert not (hosts[0].disk / "missing").exists() or not list((hosts[0].disk / "missing").iterdir())
