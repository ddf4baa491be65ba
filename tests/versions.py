"""Runs tests/core and tests/measures on other versions of torch and Python, each in its own environment.

``python tests/versions.py`` runs the oldest torch on the oldest Python, and the newest on the newest; README.md lists
what has passed.
Environments are kept in ``.venv-versions``. Interpreters are found on the PATH and in ``~/.pyenv/versions``.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
PACKAGES = ["numpy", "scipy", "matplotlib", "plotly", "pytest", "pytest-xdist", "hypothesis"]
# What pyproject.toml promises: torch and Python.
OLDEST, NEWEST = ("2.6.0", "3.10"), ("2.15.0", "3.13")


def interpreter(python):
    """Return the path of a Python: a path, a command, or a version such as 3.10."""
    # pyenv's own come first: on the PATH its commands may be shims of versions that are not switched on.
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{python}.*/bin/python"))
    found = pyenv[-1] if pyenv else shutil.which(python) or shutil.which(f"python{python}")
    if not found:
        raise SystemExit(
            f"There is no Python {python} on the PATH or in ~/.pyenv/versions. Install it, or pass --python."
        )
    return str(found)


def run(torch, python):
    """Make the environment if it is not there, run the tests in it, and return whether they pass."""
    environment = ENVIRONMENTS / f"torch-{torch}-python-{Path(python).name}"
    ready = environment / ".ready"
    if not ready.exists():
        print(f"Setting up {environment.relative_to(ROOT)} ...", flush=True)
        subprocess.run([interpreter(python), "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch}", *PACKAGES], check=True)
        ready.touch()
    # importlib.metadata knows flatmin only where it is installed; the sources are tested.
    tests = ["tests/core", "tests/measures", "--override-ini", "testpaths=", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [str(environment / "bin/python"), "-m", "pytest", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode == 0


def main():
    """Run the pairs that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="one version of torch, such as 2.8.0")
    parser.add_argument("--python", help="its Python, such as 3.11", default="3.11")
    arguments = parser.parse_args()
    pairs = [(arguments.torch, arguments.python)] if arguments.torch else [OLDEST, NEWEST]
    results = {pair: run(*pair) for pair in pairs}
    for (torch, python), passed in results.items():
        print(f"torch {torch}, Python {python}: {'passed' if passed else 'FAILED'}")
    sys.exit(not all(results.values()))


if __name__ == "__main__":
    main()
