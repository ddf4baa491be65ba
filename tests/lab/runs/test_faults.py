"""Runs whose files, inputs or surroundings have changed: an error that says so, or the right result."""

import dataclasses
import hashlib
import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.errors import CorruptFileError, InterruptedRun, ModelError, RunError, StorageError
from flatmin.lab.runs import environment as inputs
from flatmin.lab.runs.checkpoint import (
    checkpoints,
    latest_checkpoint,
    read_state,
    save_checkpoint,
    save_epoch_weights,
)
from flatmin.lab.runs.directory import last_metrics, read_result, run_directories
from flatmin.lab.runs.json_files import read_json, write_atomic, write_json
from flatmin.lab.runs.record import read_record
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.sweeps.measurements import Bound, measure_run
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import deferred_signals
from flatmin.lab.training.trained_model import load_trained
from sweep_process import AtStep

CPU = torch.device("cpu")
SMALL = Experiment(data=Data(train_size=60, batch_size=20), model=Model(name="cnn-4"), epochs=2, precision="float32")


def interrupted(experiment, runs, step, seed=0, **keywords):
    stop = AtStep(step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(InterruptedRun):
        train(experiment, runs=runs, seed=seed, callback=stop, **keywords)
    return runs / experiment.run_name(seed)


def flip(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def edit(path, change):
    """Change a JSON file as somebody would who also corrects its checksum."""
    content = read_json(path)
    change(content)
    write_json(path, content)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(SMALL, runs=tmp_path_factory.mktemp("runs"), checkpoint_seconds=0)


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished run, with its two checkpoints (steps 5 and 6)."""
    return shutil.copytree(finished.directory, tmp_path / "runs" / finished.directory.name)


# Checkpoints


def test_corrupt_checkpoints_never_count_among_those_that_are_kept(finished, tmp_path):
    """Both are corrupt, training starts over, and a signal comes early: what was saved then is there."""
    run = interrupted(SMALL, tmp_path, 5, checkpoint_seconds=0)
    for path in checkpoints(run / "checkpoints"):
        flip(path)
    with pytest.warns(UserWarning, match="is corrupt"):
        interrupted(SMALL, tmp_path, 1)
    assert latest_checkpoint(run / "checkpoints")["step"] == 1
    assert train(SMALL, runs=tmp_path).history == finished.history


def test_the_latest_intact_checkpoint_stays_whatever_the_others_are(tmp_path):
    first = save_checkpoint(tmp_path, 1, {"step": 1})
    for step in (7, 8):
        flip(save_checkpoint(tmp_path, step, {"step": step}))
    kept = save_checkpoint(tmp_path, 2, {"step": 2})
    assert set(checkpoints(tmp_path)) == {first, kept}


def test_a_checkpoint_that_is_removed_while_they_are_listed_is_left_out(tmp_path, monkeypatch):
    paths = [save_checkpoint(tmp_path, step, {"step": step}) for step in (1, 2)]
    lstat = Path.lstat

    def removed_meanwhile(path):
        if path == paths[0]:
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed_meanwhile)
    assert checkpoints(tmp_path) == [paths[1]]


def garbage(state):
    return {"model": {"nothing": torch.ones(3)}}


def beyond_the_last_epoch(state):
    return state | {"epoch": 9, "step": 27, "batch": 0}


def of_another_model(state):
    return state | {"model": {name: tensor.repeat(2) for name, tensor in state["model"].items() if tensor.ndim == 1}}


@pytest.mark.parametrize("wrong", [garbage, beyond_the_last_epoch, of_another_model])
def test_a_checkpoint_with_the_right_checksum_and_the_wrong_content_is_skipped(wrong, copy, finished):
    (copy / "result.json").unlink()
    state = latest_checkpoint(copy / "checkpoints")
    save_checkpoint(copy / "checkpoints", 9999, wrong(state))
    with pytest.warns(UserWarning, match=r"step-00009999-\w+\.pt is corrupt \(.*falling back"):
        resumed = train(SMALL, runs=copy.parent)
    assert resumed.history == finished.history


@pytest.mark.parametrize("kind", ["directory", "dangling link"])
def test_a_checkpoint_that_is_no_file_is_skipped(kind, copy, finished):
    (copy / "result.json").unlink()
    latest = checkpoints(copy / "checkpoints")[0]
    latest.unlink()
    latest.mkdir() if kind == "directory" else latest.symlink_to("nowhere")
    with pytest.warns(UserWarning, match="is corrupt"):
        assert train(SMALL, runs=copy.parent).history == finished.history


def test_a_resumed_run_removes_what_a_killed_one_left_half_written(copy):
    (copy / "result.json").unlink()
    (copy / "weights").mkdir()
    leftovers = [copy / "environment.part", copy / "checkpoints/step-00000003.part", copy / "weights/epoch-000001.part"]
    for leftover in leftovers:
        leftover.write_text("half")
    train(SMALL, runs=copy.parent)
    assert not any(leftover.exists() for leftover in leftovers)


def test_a_finished_run_is_returned_from_a_disk_that_is_read_only(copy, finished, monkeypatch):
    def read_only(path, mode="r", *args, **kwargs):
        if "w" in mode or "a" in mode:
            raise OSError(30, "Read-only file system", str(path))
        return open_(path, mode, *args, **kwargs)

    open_ = Path.open
    monkeypatch.setattr(Path, "open", read_only)
    assert train(SMALL, runs=copy.parent).history == finished.history


# Weights of another run


def tuned(name, **changes):
    return dataclasses.replace(SMALL, model=Model(name="cnn-4", checkpoint=f"run:{name}"), epochs=1, **changes)


def test_the_weights_of_another_run_are_checked(copy):
    flip(checkpoints(copy / "checkpoints")[0])
    with pytest.raises(ModelError, match=r"step-00000006-\w+\.pt is corrupt.*result\.json"):
        train(tuned(copy.name), runs=copy.parent)


def test_an_unfinished_run_is_no_starting_point(tmp_path):
    run = interrupted(SMALL, tmp_path, 4)
    with pytest.raises(ModelError, match=f"there is no finished run .*{run.name}. Train it first"):
        train(tuned(run.name), runs=tmp_path)


def test_another_run_of_the_same_name_is_noticed(copy):
    experiment = tuned(copy.name)
    first = train(experiment, runs=copy.parent)
    shutil.rmtree(copy)
    assert train(experiment, runs=copy.parent).history == first.history  # it need not exist any more
    train(SMALL, runs=copy.parent)
    last = checkpoints(copy / "checkpoints")[0]
    state = read_state(last)
    state["model"]["conv1.weight"] += 1
    last.unlink()
    save_checkpoint(copy / "checkpoints", 6, state)
    with pytest.raises(RunError, match="weights file of .* changed"):
        train(experiment, runs=copy.parent)


def test_kept_weights_with_the_right_checksum_and_the_wrong_content_are_named(kept):
    for weights in ({"nothing": torch.ones(3)}, [1], {"conv1.weight": "text"}):
        for path in kept.glob("weights/epoch-000001-*"):
            path.unlink()
        save_epoch_weights(kept / "weights", 1, weights)
        with pytest.raises(RunError, match="The weights of .* cannot be loaded: they belong to another model"):
            load_trained(kept, epoch=1)
    (path,) = kept.glob("weights/epoch-000001-*")
    path.write_bytes(b"no weights")
    path.rename(path.with_name(f"epoch-000001-{hashlib.sha256(b'no weights').hexdigest()[:16]}.pt"))
    with pytest.raises(RunError, match="is corrupt .torch cannot load it.*Measure another epoch"):
        load_trained(kept, epoch=1)


def test_initial_weights_that_did_not_fit_on_the_disk_are_written_later(tmp_path, monkeypatch):
    experiment = dataclasses.replace(SMALL, keep_every=1)

    def full(*_):
        raise StorageError("No space left")

    with monkeypatch.context() as patch:
        patch.setattr("flatmin.lab.training.run.save_epoch_weights", full)
        with pytest.raises(StorageError):
            train(experiment, runs=tmp_path)
    run = train(experiment, runs=tmp_path).directory
    assert [path.name[:12] for path in sorted((run / "weights").iterdir())] == [f"epoch-{k:06d}" for k in range(3)]


def test_the_final_checkpoint_is_read_once_to_be_measured(copy, monkeypatch):
    read_bytes, read = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.suffix) or read_bytes(path))
    load_trained(copy)
    assert read.count(".pt") == 1


# Signals


def test_a_signal_while_data_are_read_stops_before_anything_is_created(tmp_path, monkeypatch):
    def slow(*arguments, **keywords):
        signal.raise_signal(signal.SIGTERM)
        return load_dataset(*arguments, **keywords)

    monkeypatch.setattr("flatmin.lab.training.run.load_dataset", slow)
    with pytest.raises(InterruptedRun, match="Stopped by SIGTERM before training started") as stopped:
        train(SMALL, runs=tmp_path / "runs")
    assert stopped.value.signal_number == signal.SIGTERM
    assert not (tmp_path / "runs").exists()


def test_a_second_ctrl_c_has_the_effect_it_had_before():
    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    before = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(StoppedError), deferred_signals() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal_number == signal.SIGINT
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# Inputs from outside


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{number}.bmp")
    return tmp_path / "images"


def photographs(images):
    data = Data(name=f"folder:{images}", image_size=8, batch_size=4)
    return dataclasses.replace(SMALL, data=data)


def test_other_images_in_the_same_directory_are_noticed(images, tmp_path):
    experiment, runs = photographs(images), tmp_path / "runs"
    run = train(experiment, runs=runs).directory
    assert train(experiment, runs=runs).directory == run
    image = images / "train/dog/2.bmp"
    before = image.read_bytes()
    image.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))  # one pixel: the same name, the same size
    for use in (lambda: train(experiment, runs=runs), lambda: load_trained(run)):
        with pytest.raises(RunError, match=r"image files of .* changed after training started.*Restore.*--runs"):
            use()
    image.write_bytes(before)
    assert train(experiment, runs=runs).directory == run
    shutil.rmtree(images)
    assert train(experiment, runs=runs).directory == run  # there is nothing to compare any more


def test_an_unfinished_run_does_not_resume_on_other_images(images, tmp_path):
    experiment = photographs(images)
    interrupted(experiment, tmp_path / "runs", 2)
    shutil.copy(images / "test/cat/0.bmp", images / "train/cat/4.bmp")
    with pytest.raises(RunError, match="image files of .* changed"):
        train(experiment, runs=tmp_path / "runs")


def test_of_a_large_dataset_only_names_labels_and_sizes_are_compared(images, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_HASHED_BYTES", 100)
    experiment = photographs(images)
    train(experiment, runs=tmp_path / "runs")
    flip(images / "train/cat/1.bmp", 0.99)
    train(experiment, runs=tmp_path / "runs")
    (images / "train/cat/1.bmp").rename(images / "train/cat/9.bmp")
    with pytest.raises(RunError, match="image files"):
        train(experiment, runs=tmp_path / "runs")


def test_another_weights_file_at_the_same_path_is_noticed(finished, tmp_path):
    state = latest_checkpoint(finished.directory / "checkpoints")["model"]
    torch.save(state, tmp_path / "weights.pt")
    model = Model(name="cnn-4", checkpoint=str(tmp_path / "weights.pt"))
    experiment = dataclasses.replace(SMALL, model=model, epochs=1)
    first = train(experiment, runs=tmp_path)
    torch.save(state | {"conv1.weight": state["conv1.weight"] + 1}, tmp_path / "weights.pt")
    with pytest.raises(RunError, match="weights file of .* changed"):
        train(experiment, runs=tmp_path)
    (tmp_path / "weights.pt").unlink()
    assert train(experiment, runs=tmp_path).history == first.history


@pytest.mark.parametrize("num_threads", [1, 3])
def test_another_number_of_threads_is_said_when_a_run_resumes(num_threads, copy, recwarn):
    edit(copy / "environment.json", lambda content: content["sessions"][0].update(num_threads=num_threads))
    train(SMALL, runs=copy.parent)
    assert not recwarn  # finished
    (copy / "result.json").unlink()
    train(SMALL, runs=copy.parent)
    said = [str(warning.message) for warning in recwarn if "OMP_NUM_THREADS=3" in str(warning.message)]
    assert len(said) == (num_threads == 3)


# Files that were edited


def test_a_number_that_was_changed_is_never_returned(copy):
    text = (copy / "metrics.jsonl").read_text()
    place = text.rindex('"test_error": 0.') + len('"test_error": 0.')
    (copy / "metrics.jsonl").write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    for read in (read_result, last_metrics, load_trained, lambda path: train(SMALL, runs=path.parent)):
        with pytest.raises(CorruptFileError, match=r"metrics\.jsonl is corrupt \(a line is corrupt\)"):
            read(copy)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_finished_run_that_lost_epochs_is_not_returned(lines, copy):
    text = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(text[:lines]))
    with pytest.raises(CorruptFileError, match="does not end where result.json says"):
        read_result(copy)
    (copy / "result.json").unlink()
    with pytest.raises(CorruptFileError, match=f"it has {lines} of the 2 epochs of the latest checkpoint"):
        train(SMALL, runs=copy.parent)
    (copy / "metrics.jsonl").write_text(text[1])
    with pytest.raises(CorruptFileError, match="an epoch is missing"):
        last_metrics(copy)


# Files of another run


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Return the same experiment with another seed, and kept weights."""
    return train(dataclasses.replace(SMALL, keep_every=1), seed=1, runs=tmp_path_factory.mktemp("other")).directory


@pytest.fixture(scope="module")
def keeping(tmp_path_factory):
    return train(dataclasses.replace(SMALL, keep_every=1), runs=tmp_path_factory.mktemp("kept")).directory


@pytest.fixture
def kept(keeping, tmp_path):
    """Return a copy of a run that kept the weights of every epoch."""
    return shutil.copytree(keeping, tmp_path / "runs" / keeping.name)


@pytest.mark.parametrize("file", ["metrics.jsonl", "result.json", "environment.json"])
def test_a_file_of_another_run_is_refused(file, kept, other):
    shutil.copy(other / file, kept / file)
    with pytest.raises(CorruptFileError, match=rf"{file} is corrupt \(it belongs to .*restore the name or the file"):
        train(dataclasses.replace(SMALL, keep_every=1), runs=kept.parent)


def test_weights_of_another_run_are_not_measured(kept, other):
    for file in ("weights/epoch-000001-*.pt", "checkpoints/step-00000006-*.pt"):
        (own,), (foreign,) = kept.glob(file), other.glob(file)
        own.unlink()
        shutil.copy(foreign, own.parent)
    for epoch in (1, None):
        with pytest.raises(RunError, match=r"is corrupt \(it belongs to the run \w+-seed1\)"):
            load_trained(kept, epoch=epoch)


def test_a_checkpoint_of_another_run_is_not_trained_on(finished, tmp_path):
    run = interrupted(SMALL, tmp_path / "runs", 4)
    other = interrupted(SMALL, tmp_path / "other", 5, seed=1)
    for path in checkpoints(other / "checkpoints"):
        shutil.copy(path, run / "checkpoints")
    with pytest.warns(UserWarning, match="is corrupt .it belongs to the run"):
        assert train(SMALL, runs=tmp_path / "runs").history == finished.history


def test_a_renamed_run_does_not_resume(tmp_path):
    run = interrupted(SMALL, tmp_path, 2, seed=1)
    run.rename(tmp_path / SMALL.run_name(0))
    with pytest.raises(CorruptFileError, match=r"environment\.json is corrupt .it belongs to another run.*was renamed"):
        train(SMALL, runs=tmp_path)


def test_an_edited_spec_is_not_measured(copy):
    (copy / "spec.json").write_text(dataclasses.replace(SMALL, epochs=3).to_json())
    with pytest.raises(CorruptFileError, match="belongs to another experiment"):
        load_trained(copy)


def test_a_copied_directory_is_not_another_run(copy):
    again = shutil.copytree(copy, copy.with_name(f"{copy.name} (copy)"))
    other_seed = shutil.copytree(copy, copy.with_name(copy.name.replace("seed0", "seed1")))
    with pytest.raises(CorruptFileError, match="copied or renamed"):
        read_result(again)
    with pytest.raises(CorruptFileError, match="belongs to another run.*renamed"):
        read_result(other_seed)


def test_a_run_may_be_named_by_a_link(copy, monkeypatch):
    copy.with_name("latest").symlink_to(copy.name)
    assert read_result(copy.with_name("latest")).seed == 0
    monkeypatch.chdir(copy)
    assert read_result(Path()).seed == 0


def test_directories_whose_names_cannot_be_printed_are_no_runs(copy):
    for name in ("a\nb", "\udcff-seed0", "\x1b[31m"):
        copy.with_name(name).mkdir()
        (copy.with_name(name) / "spec.json").write_text("{}")
    assert run_directories(copy.parent) == [copy]


def test_json_files_have_no_nan_and_prove_themselves(tmp_path):
    write_json(tmp_path / "a.json", {"loss": [float("nan"), float("inf"), 0.1], "name": "é"})
    assert "NaN" not in (tmp_path / "a.json").read_text()
    assert read_json(tmp_path / "a.json") == {"loss": [None, None, 0.1], "name": "é"}
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("0.1", "0.2"))
    with pytest.raises(CorruptFileError, match="its checksum differs"):
        read_json(tmp_path / "a.json")


def test_several_writers_of_one_file_are_not_in_each_others_way(tmp_path):
    contents = [bytes([number]) * 100_000 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda content: [write_atomic(tmp_path / "a.json", content) for _ in range(25)], contents))
    assert (tmp_path / "a.json").read_bytes() in contents
    assert len(list(tmp_path.iterdir())) == 1


def test_a_test_loss_that_is_not_finite_is_null_in_every_file(tmp_path, monkeypatch):
    from flatmin.lab.training import run as run_module

    monkeypatch.setattr(run_module, "evaluate", lambda *a: {"loss": float("inf"), "error": 0.9})
    result = train(dataclasses.replace(SMALL, epochs=1), runs=tmp_path)
    assert result.metrics["test_loss"] is None
    for name in ("metrics.jsonl", "result.json"):
        assert "Infinity" not in (result.directory / name).read_text()
    load_trained(result.directory)


# Predicted labels


@pytest.fixture(scope="module")
def relabeled(tmp_path_factory):
    data = Data(train_size=60, label_noise=0.4, batch_size=20, bootstrap=True)
    return train(dataclasses.replace(SMALL, data=data, optim=Optim(lr=0.05)), runs=tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("change", ["a label", "no checksum", "too few"])
def test_predicted_labels_that_were_changed_are_not_trained_on(change, relabeled, tmp_path):
    shutil.copytree(relabeled.directory.parent, tmp_path / "runs")
    run = tmp_path / "runs" / relabeled.directory.name
    file = run / "predicted_labels.json"
    content = json.loads(file.read_text())
    if change == "a label":
        content["labels"][3] = (content["labels"][3] + 1) % 10
    elif change == "no checksum":
        del content["checksum"]
    file.write_text(json.dumps(content))
    if change == "too few":
        edit(file, lambda content: content["labels"].pop())
    (run / "result.json").unlink()
    for use in (lambda: train(relabeled.experiment, runs=run.parent), lambda: load_trained(run)):
        with pytest.raises(CorruptFileError, match=r"predicted_labels\.json is corrupt .*Delete it"):
            use()
    file.unlink()
    with pytest.raises(RunError, match=r"predicted_labels\.json is missing"):
        load_trained(run)
    assert train(relabeled.experiment, runs=run.parent).history == relabeled.history


# Measurements


@pytest.mark.parametrize("damage", ["one digit changed", "another run's"])
def test_a_measurement_that_is_damaged_or_of_another_run_is_not_reported(damage, copy):
    measurement = Bound(num_examples=5)
    ((name, facts),) = measure_run(copy, [measurement]).items()
    record = read_record(copy.name, copy.parent)
    assert record.measured == {name: facts}
    file = copy / "measures" / f"{name}.json"
    if damage == "one digit changed":
        text = file.read_text()
        assert f'"total": {facts["total"]}' in text
        file.write_text(text.replace(f'"total": {facts["total"]}', f'"total": {facts["total"] + 1}'))
        reason = "its checksum differs"
    else:
        other = copy.parent / "digits-cnn-4-0123456789-seed0"
        other.mkdir()
        write_json(other / "x.json", read_json(file))
        shutil.move(other / "x.json", file)
        reason = "it belongs to another run"
    with pytest.raises(CorruptFileError, match=reason):
        measure_run(copy, [measurement])
    damaged = read_record(copy.name, copy.parent)
    assert damaged.state == "not readable"
    assert reason in damaged.reason
