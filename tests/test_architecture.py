"""The house stands as designed: dependencies point one way, and every public name is documented."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flatmin

SOURCE = Path(flatmin.__file__).parent
LEVELS = {"core": 0, "integrations": 1, "measures": 1, "lab": 2, "cli": 3}
LAB_LEVELS = {
    **{"errors": 0, "spec": 1, "data": 2, "models": 3, "runs": 4, "training": 5, "sweeps": 6, "studies": 7},
    **{"demo": 8, "foret2021": 8, "cheap_sam": 8, "report": 9, "commands": 10},
}
"""Inside the lab; packages of one level do not import each other."""
FILES = sorted(SOURCE.rglob("*.py"))
LAB_FILES = [path for path in FILES if path.is_relative_to(SOURCE / "lab") and path.parent != SOURCE / "lab"]


def level_of(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return LEVELS.get(part)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_dependencies_point_one_way(path):
    level = level_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "flatmin" and len(parts) > 1 and parts[1] in LEVELS:
            if level is None:  # flatmin/__init__.py
                assert LEVELS[parts[1]] <= LEVELS["measures"], f"{path} imports {name}"
            else:
                assert LEVELS[parts[1]] <= level, f"{path} imports {name}"
        if level == 0 and parts[0] not in sys.stdlib_module_names | {"torch", "flatmin"}:
            pytest.fail(f"core needs only torch, but {path} imports {name}")


@pytest.mark.parametrize("path", LAB_FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_packages_of_the_lab_import_only_lower_ones(path):
    own = path.relative_to(SOURCE / "lab").parts[0]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[:2] == ["flatmin", "lab"] and len(parts) > 2 and parts[2] != own:
            assert LAB_LEVELS[parts[2]] < LAB_LEVELS[own], f"{path} imports {name}"


def test_lab_has_no_module_of_its_own_but_errors():
    assert {path.name for path in (SOURCE / "lab").glob("*.py")} == {"__init__.py", "errors.py"}


def test_importing_flatmin_imports_no_lab_and_nothing_heavy():
    heavy = ["flatmin.lab", "torchvision", "timm", "matplotlib", "plotly", "tyro", "rich", "ray", "scipy"]
    code = f"import sys, flatmin; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_is_there_and_documented():
    for name in flatmin.__all__:
        assert getattr(flatmin, name).__doc__, name


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert flatmin.__version__ == version("flatmin")
