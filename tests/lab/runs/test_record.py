"""Records of runs: what runs.jsonl keeps of them, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest

from flatmin.lab.errors import CorruptFileError
from flatmin.lab.runs import record as record_module
from flatmin.lab.runs.record import PlannedRecords, Records, RunRecord, read_records, write_records
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim

SPEC = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), optim=Optim(rho=0.5 / 7, p=math.inf), epochs=3)
SESSION = {"started": "2026-01-02T03:04:05Z", "commit": "0123abc", "command": ["flatmin", "train"], "gpus": []}
HISTORY = [
    {"epoch": epoch, "train_loss": 1 / (3 * epoch), "test_error": 0.1 / 3, "valid_error": None} for epoch in (1, 2, 3)
]


def run(seed, spec=SPEC, **facts):
    facts = {"state": "finished", "history": HISTORY, "time_seconds": 1 / 3, "sessions": [SESSION], **facts}
    return RunRecord(name=spec.run_name(seed), experiment=spec, seed=seed, **facts)


def written(tmp_path, *records, curves=None):
    write_records(tmp_path, records, curves or {})
    return read_records(tmp_path)


def test_a_record_is_the_same_after_it_was_written_and_read(tmp_path):
    """With curves of all metrics; measurements keep the seven digits of float32, and nulls in lists are NaN."""
    later = [SESSION, SESSION | {"started": "2026-02-02T03:04:05Z", "commit": "456def"}]
    records = [
        run(0, measured={"spectrum-1": {"lambda_max": 1.234567, "ratio": None, "nodes": [1.0, math.inf]}}),
        run(1, sessions=later),
        run(2, state="failed", reason="The loss is not finite.", history=[]),
        run(3, sessions=[]),
    ]
    found = written(tmp_path, *records, curves={r.name: tuple(HISTORY[0])[1:] for r in records})
    first, *others = (found[record.name] for record in records)
    assert others == records[1:]
    assert math.isnan(first.measured["spectrum-1"]["nodes"].pop())
    assert records[0].measured["spectrum-1"]["nodes"].pop() == math.inf
    assert first == records[0]
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == sorted(found)
    assert len(json.loads((tmp_path / "environments.json").read_text())) == 2
    assert Records(tmp_path)[SPEC.run_name(1)] == records[1]
    assert Records(tmp_path)[SPEC.run_name(9)].state == "missing"


def test_spec_and_metrics_are_exact_measurements_have_seven_digits_and_of_curves_only_those_asked_for_are_kept(
    tmp_path,
):
    asked, other = run(0, measured={"m": {"x": [math.pi]}}), run(1)
    found = written(tmp_path, asked, other, curves={asked.name: ("test_error",)})
    assert found[asked.name].experiment.optim.rho == 0.5 / 7
    kept = [{"epoch": line["epoch"], "test_error": line["test_error"]} for line in HISTORY[:-1]]
    assert found[asked.name].history == [*kept, HISTORY[-1]]
    assert found[other.name].history == HISTORY[-1:]
    assert found[asked.name].metrics == found[other.name].metrics == HISTORY[-1]
    assert found[asked.name].measured == {"m": {"x": [3.141593]}}


def test_an_experiment_of_defaults_is_read_back(tmp_path):
    assert written(tmp_path, run(0, Experiment()))[Experiment().run_name(0)].experiment == Experiment()


def test_a_kill_between_both_files_leaves_each_run_its_own_code(tmp_path, monkeypatch):
    commits = {record.name: record.sessions[0]["commit"] for record in (run(5), run(6))}
    write_records(tmp_path, [run(5), run(6)], {})
    newer = [run(seed, sessions=[SESSION | {"commit": f"new{seed}"}]) for seed in (0, 5)]

    def killed(path, content, write=record_module.write_atomic):
        if len(files := [*files_written, path.name]) > 1:
            raise KeyboardInterrupt
        files_written[:] = files
        write(path, content)

    files_written = []
    monkeypatch.setattr(record_module, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        write_records(tmp_path, newer, {})
    found = read_records(tmp_path)
    assert {name: record.sessions[0]["commit"] for name, record in found.items()} == commits


def test_no_absolute_path_is_written(tmp_path):
    spec = replace(SPEC, data=replace(SPEC.data, name="folder:/home/ada/birds"))
    session = SESSION | {"command": ["/home/ada/bin/flatmin", "--runs", "/home/ada/runs"]}
    failed = run(0, spec, state="failed", reason="It diverged.", history=[], sessions=[session])
    (found,) = written(tmp_path, failed).values()
    assert not [file for file in tmp_path.iterdir() if "ada" in file.read_text()]
    # A spec without its path has another hash: the name is taken as it is.
    assert (found.name, found.experiment.data.name) == (failed.name, "folder:…/birds")


def change(**values):
    def apply(results):
        line = json.loads((results / "runs.jsonl").read_text())
        (results / "runs.jsonl").write_text(json.dumps(line | values))

    return apply


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (change(seed=1), "belongs to another run"),
        (change(spec={"epochs": 4}), "belongs to another run"),
        (change(spec={"epoch": 4}), "unknown field"),
        (change(sessions=[{"started": "", "environment": 1}]), "out of range"),
        (change(curves={"epoch": [1, 2], "test_error": [0.1]}), "shorter"),
        (lambda results: (results / "runs.jsonl").write_text('{"name":'), "Expecting value"),
        (lambda results: (results / "runs.jsonl").write_text("[]"), "must be"),
        (lambda results: (results / "environments.json").unlink(), "No such file"),
    ],
)
def test_a_line_that_is_not_what_was_written_is_refused(tmp_path, harm, why):
    write_records(tmp_path, [run(0)], {})
    harm(tmp_path)
    with pytest.raises(CorruptFileError, match=why) as raised:
        Records(tmp_path)
    assert str(tmp_path / "runs.jsonl") in str(raised.value)


def test_where_a_plan_looks_what_is_not_complete_is_planned():
    known = Records()
    states = {"done": "finished", "diverged": "failed", "killed": "failed", "half": "not finished"}
    for name, state in states.items():
        known[name] = RunRecord(name=name, state=state, is_final=name != "killed")
    planned = PlannedRecords(known)
    found = {name: planned[name].state for name in (*states, "never begun")}
    assert found == states | dict.fromkeys(("killed", "half", "never begun"), "planned")
    assert known["killed"].state == "failed"
