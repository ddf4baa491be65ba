"""The command line in tests: a small run, and a call that returns what a shell would see."""

import shutil
import tempfile
import urllib.error
from functools import cache
from pathlib import Path

from flatmin.cli import main

QUICK = [
    *("train", "--model.name", "cnn-4", "--epochs", "2", "--precision", "float32"),
    *("--data.train-size", "60", "--data.batch-size", "20", "--optim.rho", "0.1"),
]


def in_an_empty_folder(folder, monkeypatch):
    """Let nothing of this machine (datasets, the network, width of the terminal) change what a command does."""

    def refuse(*_, **__):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.chdir(folder)
    monkeypatch.delenv("FLATMIN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("flatmin.lab.data.roots.DEBIAN_FASHION_MNIST", folder / "no-debian")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("warnings.showwarning", lambda *a: None)


def run(capsys, *arguments):
    """Return the exit code of a command, and what it printed."""
    try:
        code = main(list(arguments))
    except SystemExit as stopped:  # tyro's, for a command that cannot be parsed, and for --help
        code = stopped.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return code, captured.out, captured.err


@cache
def _trained(*arguments):
    """Train the small run once for all tests of this process; return the directory that removes itself, and the run."""
    folder = tempfile.TemporaryDirectory()
    assert main([*QUICK, "--output", "quiet", "--runs", folder.name, *arguments]) == 0
    (path,) = Path(folder.name).iterdir()
    return folder, path


def trained_run(capsys, tmp_path, *arguments):
    """Return the directory of the small run, in ./runs."""
    _, path = _trained(*arguments)
    capsys.readouterr()
    return shutil.copytree(path, tmp_path / "runs" / path.name, dirs_exist_ok=True)


def cut_short(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
