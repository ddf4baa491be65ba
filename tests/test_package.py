"""The package: its layers, its names, and how users get it, as a wheel and an sdist in an empty environment."""

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib

import flatmin
from flatmin.cli import main
from two_processes import WorkerProcesses
from versions import NEWEST, OLDEST

ROOT = Path(__file__).parents[1]
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


def test_a_pair_of_processes_that_failed_can_be_closed_and_used_again():
    """The pair that other tests use."""
    pair = WorkerProcesses(2)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pair.run(divmod, 0)  # divmod(rank, 0)
    pair.close()
    assert pair.run(max, 5) == [5, 5]
    pair.close()


def test_version_option(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"flatmin {flatmin.__version__} (torch ")


def test_citation_has_the_version():
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == flatmin.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build an sdist from a copy of the tracked files, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    tracked = ["pyproject.toml", "README.md", "LICENSE", "src"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in tracked), str(source)], check=True)
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*hatchling, "-t", "sdist"], cwd=source, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run(
        [*hatchling, "-t", "wheel"], cwd=folder / sdist.name.removesuffix(".tar.gz"), check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_has_every_file_of_the_sources(built):
    with zipfile.ZipFile(built) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("flatmin/")}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/flatmin").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources


def test_wheel_works_in_an_empty_environment(built, tmp_path):
    """Dependencies are those of this environment; flatmin itself is the wheel's."""
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(built)], check=True, capture_output=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    code = "import flatmin; print(flatmin.__file__, flatmin.SAM.__name__)"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == [str(packages / "flatmin/__init__.py"), "SAM"], done.stderr
    done = subprocess.run([tmp_path / "bin/flatmin", "--version"], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"flatmin {flatmin.__version__}"), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shell_completion_is_printed_as_documented(shell, capsys):
    command = f"flatmin --tyro-print-completion {shell} >"
    assert command in (ROOT / "docs/lab.md").read_text()
    with pytest.raises(SystemExit) as stopped:
        main(command.split()[1:-1])
    assert not stopped.value.code
    assert "flatmin" in capsys.readouterr().out


def test_users_get_extras_and_developers_groups():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert list(project["project"]["optional-dependencies"]) == ["lab", "ray"]
    assert set(project["dependency-groups"]) == {"dev", "docs", "recipes"}
    command = "--group dev -e"
    assert all(command in (ROOT / name).read_text() for name in ("Makefile", "CONTRIBUTING.md", "pyproject.toml"))


def test_the_walk_in_contributing_names_files_that_exist_each_once():
    walk = (ROOT / "CONTRIBUTING.md").read_text().partition("## A walk through")[2].partition("`flatmin collect`")[0]
    named = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(named) > 30
    assert len(set(named)) == len(named)
    roots = (ROOT, ROOT / "src" / "flatmin")
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_package_promises_the_versions_of_the_table_and_no_others():
    rows = re.findall(
        r"^\| (\d+\.\d+)\.\d+ \| (\d+\.\d+) \| \d{4}-\d\d-\d\d \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    torches, pythons = (sorted(set(column), key=numbers) for column in zip(*rows, strict=True))
    project = (ROOT / "pyproject.toml").read_text()
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # The lab is run on what `make test` runs; an older torch is promised for core and measures only.
    assert re.findall(r'"torch>=([\d.]+)"', project) == [torches[0], pinned]
    assert f'requires-python = ">={pythons[0]}"' in project
    assert re.findall(r'"Programming Language :: Python :: ([\d.]+)"', project) == pythons
    sentence = f"torch {torches[0]} and Python {pythons[0]} or newer; the lab (`flatmin[lab]`) needs torch {pinned}."
    for page in ("README.md", "docs/index.md"):
        assert sentence in (ROOT / page).read_text(), page
    tried = [tuple(numbers(version)[:2] for version in pair) for pair in (OLDEST, NEWEST)]
    assert tried == [tuple(numbers(column[i]) for column in (torches, pythons)) for i in (0, -1)]
