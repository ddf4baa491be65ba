"""``flatmin measure`` and the measures of sweeps: what is refused, printed and kept; nothing is measured twice."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cli_cases import cut_short, run, trained_run
from flatmin.lab.errors import StorageError
from flatmin.lab.runs.json_files import write_json
from flatmin.lab.runs.record import read_record
from flatmin.lab.sweeps import measurements
from flatmin.lab.sweeps.jobs import Job, run_job
from flatmin.lab.sweeps.measurements import Bound, Cosine, Landscape, Noise, Sharpness, Spectrum, measure_run
from flatmin.lab.training import trained_model
from flatmin.lab.training.engine import train
from sweep_process import tiny

pytestmark = pytest.mark.usefixtures("nothing_outside")


def reject(constant):
    raise AssertionError(f"{constant} is not JSON")


WRONG_SETTINGS = [
    (["sharpness", "--rho", "-1"], "--rho must be finite and not negative; got -1.0"),
    (["sharpness", "--rho", "nan"], "--rho must be finite and not negative; got nan"),
    (["sharpness", "--m", "0"], "--m must be at least 1; got 0"),
    (["sharpness", "--m", "61"], "m must be at most the number of examples, 60, got 61"),
    (["sharpness", "--steps", "0"], "--steps must be at least 1; got 0"),
    (["sharpness", "--num-examples", "0"], "--num-examples must be at least 1; got 0"),
    (["sharpness", "--epoch", "-1"], "--epoch must be at least 0; got -1"),
    (["sharpness", "--epoch", "1"], "has not saved its weights after epoch 1: train with keep_every"),
    (["spectrum", "--num-eigenvalues", "0"], "--num-eigenvalues must be at least 1; got 0"),
    (["spectrum", "--steps", "0"], "--steps must be at least 1; got 0"),
    (["spectrum", "--probes", "0"], "--probes must be at least 1; got 0"),
    (["landscape", "--points", "4"], "--points must be odd, and at least 3; got 4"),
    (["landscape", "--span", "0"], "--span must be positive and finite; got 0.0"),
    (["rho", "--m", "0"], "--m must be at least 1; got 0"),
    (["rho", "--m", "21"], "m must be at least 1 and at most the 20 examples"),
    (["bound", "--rho", "0"], "--rho must be positive and finite; got 0.0"),
    (["bound", "--delta", "2"], "--delta must be between 0 and 1; got 2.0"),
    (["bound", "--num-examples", "1"], "--num-examples must be at least 2; got 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_SETTINGS, ids=[" ".join(w[0]) for w in WRONG_SETTINGS])
def test_a_wrong_setting_is_named_with_its_value(arguments, message, capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    code, _, err = run(capsys, "measure", arguments[0], str(path), *arguments[1:])
    assert code == 2
    assert message in err
    assert not (path / "measures").exists()


def test_a_landscape_is_measured_once_for_each_setting_and_its_table_says_what_it_found(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    for points in ("3", "5", "3"):
        code, out, err = run(capsys, "measure", "landscape", path.name, "--points", points, "--num-examples", "40")
        assert code == 0, err
    files = sorted((path / "measures").glob("landscape-*.json"))
    facts = [json.loads(file.read_text()) for file in files]
    assert sorted(f["points"] for f in facts) == [3, 5]
    three = next(f for f in facts if f["points"] == 3)
    heights = [height for row in three["loss"] for height in row]
    assert three["loss_at_centre"] == heights.pop(4)
    assert three["highest_loss"] == max(heights)
    assert three["mean_rise"] == pytest.approx(sum(heights) / 8 - three["loss_at_centre"])
    for name in ("loss_at_centre", "highest_loss", "mean_rise"):
        assert f"{name} " in out
        assert f"{three[name]:.4g}" in out
    assert "num_examples" in out
    name = Landscape(points=3, num_examples=40).name
    assert all(name + suffix in out for suffix in (".html", ".json", ".svg"))


def test_a_radius_is_suggested_with_its_curve_and_words_only_where_something_is_wrong(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    code, out, err = run(capsys, "measure", "rho", path.name)
    assert code == 0, err
    (file,) = (path / "measures").glob("rho-*.json")
    facts = json.loads(file.read_text())
    assert f"{facts['rho']:.4g}" in out
    assert all(name in out for name in ("per_batch", "to first order", file.with_suffix(".svg").name))
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.count("│") == 4]
    expected = zip(facts["rhos"], facts["rises"], facts["first_order"], strict=True)
    assert [[float(number) for number in row] for row in rows] == [
        [pytest.approx(v, 1e-3) for v in e] for e in expected
    ]
    assert len(rows) == 9


def test_measurements_of_a_sweep_and_of_the_command_line_are_shared(capsys, tmp_path, monkeypatch):
    path = trained_run(capsys, tmp_path)
    ((name, facts),) = measure_run(path, [Bound(delta=0.1)]).items()
    other = run(capsys, "measure", "bound", path.name, "--output", "json")
    monkeypatch.setattr(measurements, "load_trained", None)  # nothing is measured again
    printed = json.loads(run(capsys, "measure", "bound", path.name, "--delta", "0.1", "--output", "json")[1])
    assert printed == {"event": "measure", "file": f"runs/{path.name}/measures/{name}.json", **facts}
    assert run(capsys, "measure", "bound", path.name, "--output", "json") == other
    assert sorted(m["delta"] for m in read_record(path.name, path.parent).measured.values()) == [0.05, 0.1]


def test_what_is_no_number_is_null_in_json_and_explained_in_the_table(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    code, out, _ = run(capsys, "measure", "sharpness", path.name, "--output", "json")
    assert code == 0
    printed = json.loads(out, parse_constant=reject)
    assert printed["standard_error"] is None
    (file,) = path.glob("measures/sharpness-*.json")
    assert json.loads(file.read_text(), parse_constant=reject)["standard_error"] is None
    assert printed["file"] == str(file.relative_to(tmp_path))
    assert "unknown (one subset)" in run(capsys, "measure", "sharpness", path.name)[1]
    out = run(capsys, "measure", "sharpness", path.name, "--m", "20", "--output", "json")[1]
    assert math.isfinite(json.loads(out)["standard_error"])


def test_studies_read_a_loss_that_was_no_number_as_such(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    (path / "measures").mkdir()
    write_json(path / "measures/landscape-0.json", {"loss": [[1.0, math.nan]], "accuracy": None})
    facts = read_record(path.name, path.parent).measured["landscape-0"]
    assert facts["loss"][0][0] == 1
    assert math.isnan(facts["loss"][0][1])
    assert facts["accuracy"] is None


def test_the_weights_that_were_measured_are_named(capsys, tmp_path):
    path = trained_run(capsys, tmp_path, "--keep-every", "1")
    last, first = (
        json.loads(run(capsys, "measure", "sharpness", path.name, *epoch, "--output", "json")[1])
        for epoch in ((), ("--epoch", "1"))
    )
    assert (last["epoch"], last["step"]) == (2, 6)
    assert (first["epoch"], first["step"]) == (1, None)
    assert last["loss"] != first["loss"]
    assert trained_model.load_trained(path).at_epoch(1).epoch == 1
    out = run(capsys, "measure", "sharpness", path.name)[1]
    assert "epoch " in out
    assert "step " in out


def test_a_measure_shows_that_it_is_working_where_that_disturbs_no_script(capsys, tmp_path, monkeypatch):
    path = trained_run(capsys, tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    spectrum = ["spectrum", str(path), "--steps", "5", "--probes", "1", "--num-eigenvalues", "1"]
    code, out, err = run(capsys, "measure", *spectrum, "--output", "json")
    assert code == 0
    assert f"spectrum of {path.name}" in err
    assert len(json.loads(out)["eigenvalues"]) == 1


def test_a_finished_run_is_not_measured_at_an_earlier_checkpoint(capsys, tmp_path):
    path = trained_run(capsys, tmp_path, "--keep-every", "1")
    (last,) = path.glob("checkpoints/step-00000006-*.pt")
    whole = last.read_bytes()
    cut_short(last)
    code, _, err = run(capsys, "measure", "sharpness", path.name)
    assert code == 2
    assert str(last.relative_to(tmp_path)) in err
    assert "is corrupt" in err
    assert "result.json" in err
    assert "--epoch (kept: 0, 1, 2)" in err
    assert not (path / "measures").exists()
    assert run(capsys, "measure", "sharpness", path.name, "--epoch", "2")[0] == 0
    last.unlink()
    assert "is missing" in run(capsys, "measure", "sharpness", path.name)[2]
    # The remedy that the error names.
    history = (path / "metrics.jsonl").read_text()
    (path / "result.json").unlink()
    trained_run(capsys, tmp_path, "--keep-every", "1")
    assert (path / "metrics.jsonl").read_text() == history
    last.write_bytes(whole)
    assert run(capsys, "measure", "sharpness", path.name)[0] == 0


def test_an_unfinished_run_is_measured_where_it_stands(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    (path / "result.json").unlink()
    next(path.glob("checkpoints/step-00000006-*.pt")).unlink()
    out = json.loads(run(capsys, "measure", "sharpness", path.name, "--output", "json")[1])
    assert out["step"] == 0
    assert out["file"].endswith("-step0.json")  # not what is measured when it is finished


MEASUREMENTS = (
    Cosine(rho=0.1, num_examples=20, epoch=1),
    Cosine(rho=0.1, num_examples=20, epoch=2),
    Spectrum(steps=4, probes=1, num_examples=20, epoch=1),
    Sharpness(num_examples=20),
    Landscape(points=3, num_examples=20),
    Bound(num_examples=20),
    Bound(num_examples=20, rho=0.2),
    Noise(num_draws=3, num_examples=20),
)


@pytest.fixture
def job(tmp_path):
    job = Job(experiment=replace(tiny(epochs=3), keep_every=1), measurements=MEASUREMENTS)
    train(job.experiment, runs=tmp_path)
    return job


def noted_calls(monkeypatch, name):
    function, calls = getattr(trained_model, name), []

    def noting(*arguments, **keywords):
        calls.append(arguments)
        return function(*arguments, **keywords)

    monkeypatch.setattr(trained_model, name, noting)
    return calls


def test_all_measurements_of_a_run_read_its_dataset_and_each_epochs_weights_once(job, tmp_path, monkeypatch):
    datasets, weights = (noted_calls(monkeypatch, name) for name in ("load_dataset", "_load_weights"))
    assert run_job(job, tmp_path, None, 60.0).kind == "done"
    assert len(datasets) == 1
    assert sorted(arguments[2] or 99 for arguments in weights) == [1, 2, 99]
    files = {path.relative_to(tmp_path / job.name / "measures").as_posix() for path in tmp_path.rglob("measures/*")}
    names = {m.name for m in MEASUREMENTS}
    assert {file.removesuffix(".json") for file in files if file.endswith(".json")} == names
    assert not any(file.endswith(".svg") for file in files)  # nobody looks at the plots of a sweep
    measured = read_record(job.name, tmp_path).measured
    assert measured.keys() == names
    # Whoever asks next, for one or for all, gets the same facts, and nothing is measured again.
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "load_trained", None)
        assert measure_run(tmp_path / job.name, MEASUREMENTS, draw=False) == measured
        (some,) = measure_run(tmp_path / job.name, MEASUREMENTS[3:4], draw=False).items()
        assert some == next((name, facts) for name, facts in measured.items() if "sharp" in name)
    # The command draws, and then it is there; the facts are not written again.
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("measures/*.json")}
    assert measure_run(tmp_path / job.name, MEASUREMENTS) == measured
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("measures/*.json")} == written
    assert len(list(tmp_path.rglob("measures/*.svg"))) == 5  # cosines and noise have no plot
    monkeypatch.setattr(measurements, "load_trained", None)
    measure_run(tmp_path / job.name, MEASUREMENTS[3:4])


def test_a_measurement_among_others_finds_what_it_finds_alone(job, tmp_path):
    together = measure_run(tmp_path / job.name, MEASUREMENTS)
    for file in tmp_path.rglob("measures/*"):
        file.unlink()
    for measurement in MEASUREMENTS:
        assert measure_run(tmp_path / job.name, [measurement]) == {measurement.name: together[measurement.name]}


def test_facts_that_cannot_be_written_are_an_error_and_leave_nothing(job, tmp_path, monkeypatch):
    run, measurement = tmp_path / job.name, MEASUREMENTS[0]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(os, "fsync", full)
        measure_run(run, [measurement])
    assert list((run / "measures").iterdir()) == []
    (run / "measures").rmdir()
    (run / "measures").touch()
    with pytest.raises(StorageError, match=f"{run.name}/measures cannot be written to"):
        measure_run(run, [measurement])
    (run / "measures").unlink()
    assert measure_run(run, [measurement])[measurement.name]["rho"] == 0.1


def test_a_run_may_be_the_current_directory(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / job.name)
    assert measure_run(Path(), MEASUREMENTS[:1]) == measure_run(Path(), MEASUREMENTS[:1])
