"""`flatmin collect`: what becomes evidence, what is refused, what goes."""

import json
import subprocess

import pytest

import report_cases
from cli_cases import run
from flatmin.lab.commands.report import ITEMS
from flatmin.lab.runs.json_files import write_json
from flatmin.lab.runs.record import read_records
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.findings import Findings, LineFigure, Series
from flatmin.lab.studies.replicas import replicas_of
from flatmin.lab.studies.study import Item
from flatmin.lab.sweeps.jobs import Job

START = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), optim=Optim(), epochs=2)
JOBS = [Job(experiment=START, seed=seed, curves=("test_error",) if seed == 0 else ()) for seed in range(4)]
NAMES = [job.name for job in JOBS]


@pytest.fixture
def item(monkeypatch):
    """An item of the first three runs, and a function that lets it ask for others."""

    def ask_for(*seeds):
        def findings(scale, known):
            errors = replicas_of({"SGD": [JOBS[seed] for seed in seeds]}, known)["SGD"].by_seed("test_error")
            series = Series(name="SGD", x=list(errors), y=list(errors.values()))
            figure = LineFigure(title=f"Seeds {seeds}", x_label="seed", y_label="error, %", series=[series])
            return Findings(item="mine", scale=scale, title="", source="", about_scale="", figures=[figure])

        jobs = {"SGD": [JOBS[seed] for seed in seeds]}
        asked = Item(name="mine", title="", source="", jobs=lambda scale, known: jobs, findings=findings)
        monkeypatch.setitem(ITEMS, "mine", asked)

    ask_for(0, 1, 2)
    return ask_for


@pytest.fixture
def results(tmp_path):
    """A directory in a repository with one commit."""
    repository = tmp_path / "repository"
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for command in (["init", "-q", str(repository)], ["commit", "-q", "--allow-empty", "-m", "x"]):
        at = () if command[0] == "init" else ("-C", str(repository))
        subprocess.run(["git", *at, *identity, *command], check=True)
    return repository / "results" / "mine"


@pytest.fixture
def commit(results):
    command = ["git", "-C", str(results.parent.parent), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_run(runs, seed, commits, end="result.json"):
    failure = "It diverged." if end == "problem.json" else None
    sessions = [{"commit": commit} for commit in commits]
    report_cases.write_run(runs, START, seed, 20.0, failure=failure, finished=bool(end), sessions=sessions)


def states(results):
    return {NAMES.index(name): record.state for name, record in read_records(results).items()}


def test_complete_runs_that_items_ask_for_are_kept_and_others_go(tmp_path, results, commit, item, capsys):
    for seed, end in enumerate(("result.json", "problem.json", "", "result.json")):
        write_run(tmp_path / "first", seed, [commit], end=end)
    arguments = (str(results), "--items", "mine", "--title", "Mine")
    code, out, err = run(capsys, "collect", str(tmp_path / "first"), *arguments)
    assert (code, err) == (0, "")
    assert "2 of 3 runs are in" in out
    assert states(results) == {0: "finished", 1: "failed"}  # the third is not finished, the fourth not asked for
    assert len(read_records(results)[NAMES[0]].history) == 4  # a curve was asked for
    study = json.loads((results / "study.json").read_text())
    assert study == {"items": ["mine"], "scale": "laptop", "title": "Mine"}
    assert (results / "report.md").read_text().startswith("# Mine")
    (figure,) = (results / "figures").iterdir()
    assert "seeds-0-1-2" in figure.name

    # Later runs are added; items, scale and title are those of before.
    write_run(tmp_path / "second", 2, [commit])
    assert run(capsys, "collect", str(tmp_path / "second"), str(results))[0] == 0
    assert states(results) == {0: "finished", 1: "failed", 2: "finished"}
    # What the item does not ask for any more goes, and so does its figure.
    item(0, 2)
    assert run(capsys, "collect", str(tmp_path / "second"), str(results))[0] == 0
    assert states(results) == {0: "finished", 2: "finished"}
    (figure,) = (results / "figures").iterdir()
    assert "seeds-0-2" in figure.name
    assert {path.name for path in results.iterdir()} == {
        *("runs.jsonl", "environments.json", "study.json", "report.md", "figures")
    }


@pytest.mark.usefixtures("item")
def test_what_was_measured_and_the_curves_stay_if_a_run_comes_again_and_another_result_is_told(
    tmp_path, results, commit, capsys
):
    def write(runs, error=20.0, **measured):
        report_cases.write_run(runs, START, 0, error, sessions=[{"commit": commit}])
        for name, value in measured.items():
            (runs / NAMES[0] / "measures").mkdir(exist_ok=True)
            write_json(runs / NAMES[0] / "measures" / f"{name}.json", {"value": value})
        code, out, err = run(capsys, "collect", str(runs), str(results), "--items", "mine")
        assert (code, err) == (0, "")
        record = read_records(results)[NAMES[0]]
        return record.measured, len(record.history), f"{NAMES[0]} replaces an earlier run" in " ".join(out.split())

    assert write(tmp_path / "first", a=1.5, b=2.5) == ({"a": {"value": 1.5}, "b": {"value": 2.5}}, 4, False)
    both = {"a": {"value": 1.5}, "b": {"value": 3.5}}
    assert write(tmp_path / "second", b=3.5) == (both, 4, False)
    assert write(tmp_path / "third") == (both, 4, False)
    assert write(tmp_path / "fourth", error=21.0) == ({}, 4, True)


@pytest.mark.usefixtures("item")
def test_runs_whose_code_nobody_can_look_up_are_refused_by_name(tmp_path, results, commit, capsys):
    write_run(tmp_path / "runs", 0, [commit])
    write_run(tmp_path / "runs", 3, [f"{commit}+"])  # nobody asks for it
    command = ("collect", str(tmp_path / "runs"), str(results), "--items", "mine")
    for commits in ([f"{commit}+"], ["0" * 40], [commit, f"{commit}+"], [None], [], ["--all"]):
        write_run(tmp_path / "runs", 1, commits)
        code, _, err = run(capsys, *command)
        assert (code, results.exists()) == (2, False)
        assert [name in " ".join(err.split()) for name in NAMES] == [False, True, False, False], commits
    assert run(capsys, *command, "--allow-unknown-code")[0] == 0
    assert states(results) == {0: "finished", 1: "finished"}


@pytest.mark.usefixtures("item")
def test_a_directory_outside_of_a_repository_knows_no_code_and_items_are_needed(tmp_path, commit, capsys):
    write_run(tmp_path / "runs", 0, [commit])
    code, _, err = run(capsys, "collect", str(tmp_path / "runs"), str(tmp_path / "elsewhere"))
    assert (code, "pass --items" in err) == (2, True)
    code, _, err = run(capsys, "collect", str(tmp_path / "runs"), str(tmp_path / "elsewhere"), "--items", "mine")
    assert (code, NAMES[0] in " ".join(err.split())) == (2, True)
