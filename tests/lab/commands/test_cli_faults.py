"""The command line under faults: what is given is broken, memory or disk runs out, output is closed, Ctrl-C comes."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flatmin
from cli_cases import QUICK, run, trained_run
from flatmin.lab.models.build import build_model
from flatmin.lab.runs.json_files import read_json, write_json
from flatmin.lab.spec.experiment import Model

pytestmark = pytest.mark.usefixtures("nothing_outside")


def saved(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


WEIGHTS = {
    "empty": lambda: b"",
    "text": lambda: b"weights, more or less\n",
    "truncated": lambda: saved({"a": torch.ones(1000)})[:2000],
    "zip": lambda: b"PK\x03\x04" + bytes(100),
    "integer keys": lambda: saved({0: torch.ones(3)}),
    "sparse": lambda: saved({"conv1.weight": torch.eye(3).to_sparse()}),
    "quantized": lambda: saved({"conv1.weight": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}),
    "meta": lambda: saved({"conv1.weight": torch.ones(3, device="meta")}),
    "list": lambda: saved([torch.ones(3)]),
}
TYPES = {"integers": torch.int32, "complex": torch.complex64}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS)
def test_a_weights_file_that_cannot_be_used_is_named(content, suffix, capsys, tmp_path):
    (tmp_path / f"weights.{suffix}").write_bytes(content())
    code, _, err = run(capsys, *QUICK, "--model.checkpoint", f"weights.{suffix}")
    assert code == 2
    assert f"model.checkpoint: weights.{suffix} " in err
    assert [path.name for path in tmp_path.iterdir()] == [f"weights.{suffix}"]  # no directory of runs


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_weights_of_another_type_are_not_cast(dtype, capsys, tmp_path):
    network = build_model(Model(name="cnn-4"), num_classes=10, in_channels=1)
    weights = {name: tensor.to(dtype) for name, tensor in network.state_dict().items()}
    (tmp_path / "weights.pt").write_bytes(saved(weights))
    code, _, err = run(capsys, *QUICK, "--model.checkpoint", "weights.pt")
    assert code == 2
    assert "of another shape or type" in err
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


LONG, FILE = "x" * 5000, "file/runs"
PLACES = [
    (4, ["list", "runs", "--runs", LONG]),
    (2, ["list", "runs", "--runs", FILE]),
    (4, ["show", LONG]),
    (4, ["measure", "bound", LONG]),
    (2, ["report", "--runs", LONG]),
    (4, ["report", "table1", "--out", LONG]),
    *((4, [*QUICK, "--runs", place]) for place in (LONG, FILE)),
    (4, [*QUICK, "--model.checkpoint", LONG]),
    (3, [*QUICK, "--data.name", f"folder:{LONG}"]),
    (4, [*QUICK, "--data.name", "cifar10", "--data-root", LONG]),
]


@pytest.mark.parametrize(("expected", "command"), PLACES, ids=[" ".join(p)[:40] for _, p in PLACES])
def test_a_place_that_cannot_exist_is_one_line_and_an_exit_code(expected, command, capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    code, out, err = run(capsys, *command)
    assert code == expected
    assert out.strip() == ""
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("file", ["lock", "speed.jsonl"])
def test_a_link_in_place_of_a_runs_file_is_not_written_through(file, capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    (path / "result.json").unlink()
    next(path.glob("checkpoints/step-00000006-*")).unlink()
    (path / file).unlink()
    (tmp_path / "precious").write_text("mine")
    (path / file).symlink_to(tmp_path / "precious")
    code, _, err = run(capsys, *QUICK)
    assert code == 4
    assert "symbolic link" in err
    assert (tmp_path / "precious").read_text() == "mine"


def test_text_from_files_cannot_control_the_terminal(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    content = read_json(path / "environment.json")
    content["sessions"][0]["cpu"] = "\x1b[2J\x1b]0;title\x07\x9b31m"
    write_json(path / "environment.json", content)
    code, out, _ = run(capsys, "show", path.name)
    assert code == 0
    assert "\\x1b[2J\\x1b]0;title\\x9b31m" in out
    (path / "spec.json").write_text('{"\x1b[2J": 1, "\\u001b[2J": 1}')
    code, out, err = run(capsys, "show", path.name)
    assert code == 2
    assert not set(out + err) & set("\x1b\x07\x9b")


@pytest.mark.parametrize("word", ["--data.drop-last=maybe", "--data.no-drop_last=1", "--deterministic=True"])
def test_a_switch_with_a_value_is_named(word, capsys):
    flag, _, value = word.partition("=")
    code, _, err = run(capsys, *QUICK, word)
    assert code == 2
    assert f"{flag} is a switch without a value; got {value!r}." in err


SETTINGS = [
    ("--optim.adaptive", "inf"),
    ("--optim.lr", "1e308"),
    ("--optim.rho", "1e308"),
    ("--optim.weight-decay", "1e308"),
    ("--data.mixup", "inf"),
    ("--data.image-size", "999999999"),
    ("--epochs", "9" * 400),
    ("--checkpoint-seconds", "nan"),
    ("--checkpoint-seconds", "-1"),
    ("--name", "a\nb"),
    ("--name", "\udcff"),
]


@pytest.mark.parametrize(("flag", "value"), SETTINGS)
def test_a_setting_that_no_run_can_have_is_named(flag, value, capsys, tmp_path):
    code, _, err = run(capsys, *QUICK, flag, value)
    assert code == 2
    name = flag.strip("-").rpartition(".")[2].replace("-", "_")
    assert f"{name} must be" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "settings", [("--optim.name", "adamw"), ("--optim.decay", "loss"), ("--optim.clip-norm", "1e308")]
)
def test_the_largest_settings_diverge_but_never_crash(settings, capsys):
    largest = ("--optim.lr", "1e30", "--optim.weight-decay", "1e6", "--optim.rho", "1e30", "--optim.adaptive", "1e6")
    code, _, err = run(capsys, *QUICK, *largest, *settings)
    assert code == 5
    assert "The loss diverged" in err


def test_what_is_not_ours_is_never_markup(capsys, tmp_path):
    runs = "bar [/x] :smile: [bold]"
    code, out, err = run(capsys, *QUICK, "--runs", runs)
    assert code == 0, err
    assert runs in out
    assert runs in run(capsys, "list", "runs", "--runs", runs)[1]
    name = next((tmp_path / runs).iterdir()).name
    assert runs in run(capsys, "show", name, "--runs", runs)[1]
    assert runs in run(capsys, "measure", "bound", name, "--runs", runs)[1]
    assert "'[ray]' is neither" in run(capsys, "show", "[ray]", "--runs", runs)[2]


ERRORS = {
    "memory": (MemoryError("Unable to allocate 3 TiB"), 2, "Out of memory (Unable to allocate 3 TiB)"),
    "torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "a smaller data.batch_size"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "Stopped by Ctrl-C."),
}


@pytest.mark.parametrize(("error", "code", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("command", [["list", "datasets"], ["measure", "bound", "x"]])
def test_errors_from_outside_have_their_exit_codes(error, code, message, command, capsys, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr("flatmin.lab.commands.list.table", fails)
    monkeypatch.setattr("flatmin.lab.commands.measure.find_run", fails)
    found, _, err = run(capsys, *command)
    assert found == code
    assert message in err


def test_an_internal_error_is_raised(monkeypatch, capsys):
    monkeypatch.setattr("flatmin.lab.commands.list.table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys, "list", "datasets")


@pytest.mark.parametrize("command", [["list"], ["show", "digits", "--output", "json"]])
def test_output_that_is_closed_or_full_ends_quietly(command, capsys, tmp_path, monkeypatch):
    trained_run(capsys, tmp_path)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run(capsys, *command)[0] == 141
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = run(capsys, *command)
        assert code == 4
        assert "No space left" in err
    monkeypatch.setattr(sys, "stdout", None)
    assert run(capsys, *command)[0] == 0
    sys.stdout.close()


def test_a_full_disk_while_events_are_written_is_one_error(capsys, tmp_path, monkeypatch):
    """TensorBoard writes in a thread, whose own traceback must not appear."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    code, _, err = run(capsys, *QUICK)
    assert code == 4
    assert "tensorboard cannot be written to: [Errno 28] No space left on device" in err
    assert len(err.splitlines()) == 1


def test_events_can_be_read_by_tensorboard(capsys, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = trained_run(capsys, tmp_path)
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert {"train_loss", "test_error", "images_per_second"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("test_error")] == [1, 2]


SOURCE = Path(flatmin.__file__).parents[1]
SLOW_TORCH = """
import sys, time
print("importing", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:  # as C++ code may
    raise ImportError("half of torch is there") from None
"""


LATE = """
import atexit, time
def late():
    print("exiting", flush=True)
    time.sleep(1)
def main():
    atexit.register(late)
    return 5
"""


def entry_point(tmp_path):
    (script,) = re.findall(r'^flatmin = "(\w+:\w+)"$', (SOURCE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    module, _, function = script.partition(":")
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, {module}; sys.exit({module}.{function}())", "list"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_while_torch_is_imported_is_one_like_any_other(number, name, tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    process = entry_point(tmp_path)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert errors == f"stopped: Stopped by {name}.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_interpreter_exits_changes_nothing(number, tmp_path):
    (tmp_path / "flatmin").mkdir()
    (tmp_path / "flatmin/__init__.py").write_text("")
    (tmp_path / "flatmin/cli.py").write_text(LATE)
    process = entry_point(tmp_path)
    assert process.stdout.readline() == "exiting\n"
    for _ in range(2):
        process.send_signal(number)
    assert process.communicate() == ("", "")
    assert process.returncode == 5
