"""The command line: flags from specs, output for people and scripts, exit codes, mistakes without tracebacks."""

import json
import re
import shlex
from pathlib import Path

import pytest

from cli_cases import QUICK, run, trained_run
from flatmin.cli import main
from flatmin.lab.commands.collect import Collect
from flatmin.lab.commands.demo import Demo
from flatmin.lab.commands.list import List, Show
from flatmin.lab.commands.measure import Measure
from flatmin.lab.commands.report import Report
from flatmin.lab.commands.reproduce import Reproduce
from flatmin.lab.commands.train import Train
from flatmin.lab.spec.datasets import DATASETS

pytestmark = pytest.mark.usefixtures("nothing_outside")


def test_training_shows_epochs_and_the_result_and_again_returns_at_once(capsys, tmp_path):
    code, out, _ = run(capsys, *QUICK)
    assert code == 0
    assert "epoch   1  train loss" in out
    assert "sharpness" in out
    assert "images/s" in out
    assert "test error" in out.splitlines()[-1]
    code, again, _ = run(capsys, *QUICK)
    assert code == 0
    assert "epoch" in again.splitlines()[-1]
    assert "train loss" not in again


def test_json_lines_can_be_parsed_and_tell_start_epochs_and_result(capsys):
    code, out, _ = run(capsys, *QUICK, "--output", "json")
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["start", "epoch", "epoch", "result"]
    assert events[1]["images_per_second"] > 0
    assert events[-1]["test_error"] == events[2]["test_error"]


def test_quiet_prints_only_the_result(capsys):
    code, out, err = run(capsys, *QUICK, "--output", "quiet")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert err == ""


def test_every_field_of_the_specs_is_a_flag_with_help(capsys):
    from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim

    code, out, _ = run(capsys, "train", "--help")
    assert code == 0
    for prefix, kind in (("data.", Data), ("model.", Model), ("optim.", Optim), ("", Experiment)):
        for name in kind.__dataclass_fields__:
            if name not in ("data", "model", "optim"):
                assert f"--{prefix}{name.replace('_', '-')}" in out
    assert "SAM's neighborhood size" in out


MISTAKES = [
    (["train", "--optim.rho", "-1"], 2, "rho must be finite and not negative, got -1"),
    (["train", "--epochs", "many"], 2, "invalid literal for int()"),
    (["train", "--data.augment", "rotate"], 2, "autoaugment"),
    (["train", "--model.name", "wrn-17-2"], 2, "6 n + 4"),
    (["train", "--model.name", "timm/resnet51x"], 2, "has no model"),
    (["train", "--model.checkpoint", "nowhere.pt"], 2, "no file nowhere.pt. Give the path of a file of weights"),
    (["train", "--model.checkpoint", "run:nothing"], 2, "no finished run runs/nothing. Train it first"),
    (["trian"], 2, "train"),
    (["train", "--data.train-size", "9999"], 3, "train_size is 9999"),
    (["train", "--data.name", "folder:nowhere"], 3, "nowhere/train/CLASS"),
    (["train", "--data.name", "folder:/etc/passwd"], 3, "/etc/passwd/train/CLASS"),
    (["train", "--data.name", "imagenet"], 3, "ILSVRC2012_devkit_t12.tar.gz"),
    (["train", "--data.name", "cifar10"], 3, DATASETS["cifar10"].files),
    (["train", "--runs", "/dev/null/runs"], 4, "cannot be written to"),
    (["train", "--optim.lr", "1e30", "--model.name", "cnn-4", "--epochs", "3"], 5, "diverged"),
    (["report", "--runs", "nowhere"], 2, "There are no runs in nowhere"),
    (["report", "table1", "--scale", "smoke", "--out", "/dev/null/page"], 4, "cannot be written"),
    (["reproduce", "table1", "--scale", "smoke", "--only", "tabel1/wrn"], 2, "no run has that in its name"),
    (["show", "nothing"], 2, "'nothing' is neither the directory of a run nor the start"),
    (["measure", "sharpness", "nothing"], 2, "'nothing' is neither"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[" ".join(m[0][-2:]) for m in MISTAKES])
def test_a_mistake_has_its_exit_code_and_says_what_is_wrong(arguments, code, message, capsys):
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert message in " ".join((out + err).replace("│", " ").split())


def test_list_names_datasets_networks_and_runs(capsys, tmp_path):
    trained_run(capsys, tmp_path)
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in DATASETS)
    assert "pyramidnet-272-200-shakedrop" in out
    assert "digits-cnn-4-sam0.1-" in out
    assert run(capsys, "list", "models")[0] == 0


def test_show_finds_a_run_by_the_beginning_of_its_name(capsys, tmp_path):
    trained_run(capsys, tmp_path)
    code, out, _ = run(capsys, "show", "digits-cnn")
    assert code == 0
    assert "optim.rho" in out
    code, out, _ = run(capsys, "show", "digits-cnn", "--output", "json")
    facts = json.loads(out)
    assert facts["finished"]
    assert facts["spec"]["optim"]["rho"] == 0.1
    assert facts["sessions"][0]["torch"]
    trained_run(capsys, tmp_path, "--seed", "1")
    code, _, err = run(capsys, "show", "digits-cnn")
    assert code == 2
    assert "seed0" in err
    assert "seed1" in err


MEASURES = [
    (["sharpness", "--m", "20"], {"m_sharpness", "standard_error", "rho"}, {".json", ".svg"}),
    (["spectrum", "--steps", "10", "--probes", "1"], {"lambda_max", "eigenvalues"}, {".json", ".svg"}),
    (["landscape", "--points", "3"], {"loss", "coordinates"}, {".cache", ".json", ".svg", ".html"}),
    (["bound"], {"total", "vacuous", "complexity"}, {".json", ".svg"}),
]


@pytest.mark.parametrize(("arguments", "facts", "suffixes"), MEASURES, ids=[m[0][0] for m in MEASURES])
def test_a_run_is_measured_and_what_was_found_is_written_beside_it(arguments, facts, suffixes, capsys, tmp_path):
    trained_run(capsys, tmp_path)
    code, out, err = run(capsys, "measure", arguments[0], "digits-cnn", *arguments[1:], "--output", "json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert facts <= found.keys()
    files = list(tmp_path.glob(f"runs/digits-cnn*/measures/{arguments[0]}-*"))
    assert {file.suffix for file in files} == suffixes
    assert all(file.stat().st_size > 0 for file in files)
    if arguments[0] == "sharpness":
        assert found["num_examples"] == 60
    code, out, _ = run(capsys, "measure", arguments[0], "digits-cnn", *arguments[1:])
    assert code == 0


def documented_commands():
    """Return the arguments of every ``flatmin`` command in the shell blocks of the README and the docs."""
    root = Path(__file__).parents[3]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for language, block in re.findall(r"^```(.*?)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines() if language in ("sh", "bash") else ():
                line = re.sub(r'"\$\(.*\)"', "PATH", line)  # what another command prints
                found = re.match(r"(?:\w+=\S+ )*(?:torchrun .*--no-python )?flatmin (.+)", line)
                if found and "--tyro-print-completion" not in line:
                    yield page.name, [word for word in shlex.split(found[1], comments=True) if word != "..."]


def test_every_command_in_the_readme_and_the_docs_is_understood(monkeypatch, capsys):
    done = []
    for kind in (Collect, Demo, List, Measure, Report, Reproduce, Show, Train):
        monkeypatch.setattr(kind, "run", lambda command, console: done.append(type(command)))
    commands = list(documented_commands())
    for page, arguments in commands:
        assert main(arguments) == 0, (page, arguments, capsys.readouterr().err)
    assert len(done) == len(commands) > 25
    assert len(set(done)) > 5
