"""Every file of a run in turn broken in every way, then every command: a clear message, or the right result."""

import contextlib
import io
import json
import os
import re
import shutil
import warnings

import pytest

from cli_cases import in_an_empty_folder
from flatmin.cli import main
from flatmin.lab.sweeps import measurements
from report_cases import without_pictures

SETTINGS = (
    *("--model.name", "cnn-2", "--epochs", "2", "--precision", "float32", "--data.train-size", "20"),
    *("--data.batch-size", "10", "--data.label-noise", "0.4", "--data.bootstrap", "--keep-every", "1"),
)
FILES = {  # and the commands that may read them
    **dict.fromkeys(("spec.json", "environment.json", "result.json", "predicted_labels.json"), None),
    "metrics.jsonl": ("list", "show", "train"),
    **dict.fromkeys(("checkpoints/step-00000004-*", "checkpoints/step-00000003-*"), ("list", "measure", "train")),
    "weights/epoch-000001-*": ("measure epoch", "train"),
    **dict.fromkeys(("lock", "tensorboard/events*"), ("train",)),
}


def flip(path):
    content = bytearray(path.read_bytes())
    for place in range(7, len(content), 211):  # in keys, values and structure
        content[place] ^= 1
    path.write_bytes(content)


def flip_a_digit(path):
    """Change the last digit in the file, which leaves it valid JSON with another number."""
    content = bytearray(path.read_bytes())
    places = [place for place in range(len(content) - 30) if chr(content[place]).isdigit()]
    if places:
        content[places[-1]] ^= 1
    path.write_bytes(content)


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path):
    path.unlink()
    path.symlink_to("nowhere")


FAULTS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "digit flipped": flip_a_digit,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": os.unlink,
    "list": lambda path: path.write_text("[[1, null]]"),
    "other object": lambda path: path.write_text(
        '{"sessions": 3, "history": {}, "labels": "x", "seed": [], "data": 7}'
    ),
    "directory": replace_by_directory,
    "dangling link": replace_by_dangling_link,
}
COMMANDS = {
    "list": ["list", "runs"],
    "show": ["show", "RUN", "--output", "json"],
    "measure": ["measure", "bound", "RUN", "--num-examples", "5", "--output", "json"],
    "measure epoch": ["measure", "bound", "RUN", "--num-examples", "5", "--epoch", "1", "--output", "json"],
    "report": ["report"],
    "train": ["train", *SETTINGS, "--output", "json"],  # last: it repairs
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a directory with a finished and an unfinished bootstrapped run."""
    path = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        in_an_empty_folder(path, patch)
        measure = measurements.Bound.measure
        patch.setattr(measurements.Bound, "measure", lambda *given: (measure(*given)[0], None))
        assert main(["train", *SETTINGS, "--output", "quiet", "--runs", "finished", "--checkpoint-seconds", "0"]) == 0
        shutil.copytree("finished", "unfinished")
        run = second_stage(path / "unfinished")
        (run / "result.json").unlink()
        next(run.glob("checkpoints/step-00000004-*")).unlink()
        yield path


def second_stage(runs):
    return next(path.parent for path in runs.glob("*/predicted_labels.json"))


def outcome(command, name):
    """Return the exit code of a command, and what it says: its numbers, or its error."""
    arguments = [name if word == "RUN" else word for word in COMMANDS[command]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([*arguments, "--runs", "runs"])
    if code != 0:
        return code, err.getvalue()
    if command == "list":
        return 0, re.findall(r"\d+\.\d+ %", out.getvalue())
    if command == "report":
        with open("runs/report/report.md") as page:
            return 0, re.findall(r"\d+\.\d+", page.read().partition("## Runs")[0])
    content = json.loads(out.getvalue().splitlines()[-1])
    left_out = ("file", "sessions", "finished", "directory")
    return 0, {key: value for key, value in content.items() if key not in left_out}


def errors_of(line):
    return [f"{100 * line[key]:.2f} %" for key in ("train_error", "test_error") if line[key] is not None]


@pytest.fixture(scope="module")
def expected(home):
    """Return what the commands say about runs that are not broken."""
    found = {}
    for state in ("finished", "unfinished"):
        shutil.copytree(home / state, "runs", dirs_exist_ok=True)
        found[state] = {command: outcome(command, second_stage(home / "runs").name) for command in COMMANDS}
        shutil.rmtree("runs")
        assert all(code == 0 for code, _ in found[state].values()), found[state]
    assert found["finished"]["train"] == found["unfinished"]["train"]
    return found


@pytest.mark.parametrize("state", ["finished", "unfinished"])
@pytest.mark.parametrize("file", FILES)
def test_a_broken_file_gives_a_clear_message_or_the_right_result(file, state, home, expected):
    name = second_stage(home / state).name
    if not list((home / state / name).glob(file)):
        pytest.skip("an unfinished run has no such file")
    history = [json.loads(line) for line in (home / state / name / "metrics.jsonl").read_text().splitlines()]
    history = [{key: value for key, value in line.items() if key not in ("run", "crc32")} for line in history]
    wrong = []
    for fault, broken in FAULTS.items():
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(home / state, "runs")
        path = next((home / "runs" / name).glob(file))
        broken(path)
        for command in FILES[file] or (COMMANDS if state == "finished" else ("list", "show", "measure", "train")):
            code, found = outcome(command, name)
            right = expected[state][command][1]
            if code == 0 and command in ("list", "report"):  # a corrupt run is marked and has no numbers
                good = set(found) <= set(right)
            elif code == 0:
                good = found == right
            else:
                good = code in (2, 4) and (name in found or path.name in found)
            if file == "metrics.jsonl" and code == 0 and command in ("list", "show"):
                # A lost line is like one that a killed process did not write.
                shown = {error for line in history for error in errors_of(line)}
                good = set(found) <= {*right, *shown} if command == "list" else found["metrics"] in ({}, *history)
            if not good:
                wrong.append((fault, command, code, found))
    assert not wrong
