"""The house stands as designed: dependencies point one way, and every public name is documented."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flatmin
from two_processes import WorkerProcesses

SOURCE = Path(flatmin.__file__).parent
LEVELS = {"__init__": 1, "core": 0, "integrations": 1, "measures": 1, "lab": 2, "cli": 3}
LAB_LEVELS = {
    **{"errors": 0, "spec": 1, "data": 2, "models": 3, "runs": 4, "training": 5, "sweeps": 6, "studies": 7},
    **{"demo": 8, "foret2021": 8, "rho_rule": 9, "cheap_sam": 10, "report": 11, "commands": 12},
}
"""Inside the lab; packages of one level do not import each other."""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def test_dependencies_point_one_way():
    allowed = sys.stdlib_module_names | {"torch", "flatmin"}
    wrong = []
    for path in SOURCE.rglob("*.py"):
        own, *inner = path.relative_to(SOURCE).with_suffix("").parts
        for parts in imports_of(path):
            top, lab = [*parts, "", ""][1:3]
            if (
                (parts[0] == "flatmin" and LEVELS.get(top, 0) > LEVELS[own])
                or (own == "core" and parts[0] not in allowed)
                or (own == top == "lab" and lab in LAB_LEVELS and inner[0] not in (lab, "__init__")
                    and LAB_LEVELS[lab] >= LAB_LEVELS[inner[0]])
            ):  # fmt: skip
                wrong.append(f"{path} imports {'.'.join(parts)}")
    assert wrong == []
    assert {path.stem for path in (SOURCE / "lab").iterdir()} - {"__pycache__"} == {"__init__", *LAB_LEVELS}


def test_importing_flatmin_imports_no_lab_and_nothing_heavy():
    heavy = ["flatmin.lab", "torchvision", "timm", "matplotlib", "plotly", "tyro", "rich", "ray", "scipy"]
    code = f"import sys, flatmin; print([m for m in {[*heavy, 'tensorboard']!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_are_documented_and_the_version_is_the_packages():
    assert [name for name in flatmin.__all__ if not getattr(flatmin, name).__doc__] == []
    assert flatmin.__version__ == version("flatmin")


# The pair of processes that other tests use.


def test_a_pair_that_failed_can_be_closed_and_used_again():
    pair = WorkerProcesses(2)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pair.run(divmod, 0)  # divmod(rank, 0)
    pair.close()
    assert pair.run(max, 5) == [5, 5]
    pair.close()
