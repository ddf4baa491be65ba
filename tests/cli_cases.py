"""The command line in tests: a small run, and a call that returns what a shell would see."""

from flatmin.cli import main

QUICK = [
    *("train", "--model.name", "cnn-4", "--epochs", "2", "--precision", "float32"),
    *("--data.train-size", "60", "--data.batch-size", "20", "--optim.rho", "0.1"),
]


def in_an_empty_folder(tmp_path, monkeypatch):
    """Let nothing of this machine (datasets, width of the terminal) change what a command does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATMIN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
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


def trained_run(capsys, tmp_path, *arguments):
    """Train the small run and return its directory."""
    code, _, err = run(capsys, *QUICK, "--output", "quiet", *arguments)
    assert code == 0, err
    return max(tmp_path.glob("runs/digits-cnn*"), key=lambda path: path.stat().st_mtime_ns)


def cut_short(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
