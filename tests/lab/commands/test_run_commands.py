"""``flatmin list`` and ``show``, runs that are damaged, and runs that never began."""

import json
import warnings

import pytest

from cli_cases import QUICK, cut_short, run, trained_run
from flatmin.lab.errors import RunError, SpecError
from flatmin.lab.runs.directory import RunDirectory, read_result
from flatmin.lab.runs.json_files import read_json, write_json
from flatmin.lab.spec.experiment import Experiment

pytestmark = pytest.mark.usefixtures("nothing_outside")


def set_num_workers(path, *numbers):
    session = read_json(path / "environment.json")["sessions"][0]
    write_json(path / "environment.json", {"sessions": [session | {"num_workers": number} for number in numbers]})


def test_a_finished_run_of_another_number_of_workers_is_refused(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    set_num_workers(path, 2, 2)
    code, out, err = run(capsys, *QUICK)
    assert code == 2
    assert out.strip() == ""
    assert "trained by 2 workers" in err
    assert "now there is 1 worker" in err
    assert "--nproc-per-node 2" in err
    assert "--runs" in err


def test_two_workers_do_not_take_over_the_result_of_one(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    directory = RunDirectory(Experiment.from_json((path / "spec.json").read_text()), 0, tmp_path / "runs")
    with pytest.raises(RunError, match=r"trained by 1 worker, but now there are 2 workers.*without torchrun"):
        directory.open(num_workers=2)
    directory.open(num_workers=1)
    directory.close()
    directory.open()  # whoever does not train may have it
    directory.close()


def test_an_unfinished_run_goes_on_with_another_number_of_workers_and_says_so(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    history = (path / "metrics.jsonl").read_bytes()
    set_num_workers(path, 2)
    (path / "result.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run(capsys, *QUICK)
    assert code == 0
    assert "started by 2 workers and resumes with 1 worker" in err
    assert (path / "metrics.jsonl").read_bytes() == history
    # Now both have had a part in it: the result is returned to either.
    assert run(capsys, *QUICK)[0] == 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_none_is_refused_before_anything_is_created(seed, capsys, tmp_path):
    code, _, err = run(capsys, *QUICK, "--seed", str(seed))
    assert code == 2
    assert f"seed must be at least 0 and below 2**64; got {seed}" in err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SpecError, match="seed must be"):
        RunDirectory(Experiment(), seed, tmp_path)


@pytest.mark.parametrize(
    ("mistake", "code"), [(["--data.name", "folder:nowhere"], 3), (["--model.checkpoint", "nowhere.pt"], 2)]
)
def test_a_run_that_could_not_begin_leaves_nothing_behind(mistake, code, capsys, tmp_path):
    assert run(capsys, *QUICK, *mistake)[0] == code
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_marked_in_the_list_which_goes_on(capsys, tmp_path):
    paths = [trained_run(capsys, tmp_path, "--seed", str(seed)) for seed in range(4)]
    cut_short(paths[0] / "spec.json")
    cut_short(paths[1] / "result.json")
    (paths[2] / "result.json").unlink()
    with (paths[2] / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "tr')  # as a killed process leaves it
    code, out, _ = run(capsys, "list", "runs")
    assert code == 0
    rows = {line.split()[1]: line for line in out.splitlines() if "seed" in line}
    assert "corrupt: spec.json" in rows[paths[0].name]
    assert "corrupt: result.json" in rows[paths[1].name]
    assert "unfinished" in rows[paths[2].name]
    assert " 2 " in rows[paths[2].name]
    assert rows[paths[3].name].count(" %") == 2


DAMAGED = [
    (["show"], "spec.json"),
    (["measure", "bound"], "result.json"),
    (QUICK, "environment.json"),
]


@pytest.mark.parametrize(("command", "file"), DAMAGED, ids=[f"{c[0]} {f}" for c, f in DAMAGED])
def test_a_damaged_file_is_named_and_its_remedy_mends_it(command, file, capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    before = (path / "metrics.jsonl").read_text()
    cut_short(path / file)
    named = () if command is QUICK else (path.name,)
    code, _, err = run(capsys, *command, *named)
    assert code == 2
    assert f"runs/{path.name}/{file} is corrupt" in err
    assert "Delete it" in err
    (path / file).unlink()
    assert run(capsys, *QUICK)[0] == 0
    assert run(capsys, *command, *named)[0] == 0
    assert (path / "metrics.jsonl").read_text() == before


def test_show_says_where_the_run_was_and_gives_errors_in_percent(capsys, tmp_path):
    path = trained_run(capsys, tmp_path)
    out = run(capsys, "show", path.name)[1]
    session = json.loads((path / "environment.json").read_text())["sessions"][0]
    for name in ("started", "torch", "num_workers", "precision", "num_threads"):
        assert name in out
        assert str(session[name]) in out
    assert f"{100 * read_result(path).metrics['test_error']:.2f} %" in out


def test_one_epoch_is_no_plural_and_the_largest_seed_trains(capsys, tmp_path):
    arguments = ("--epochs", "1", "--output", "quiet", "--seed", str(2**64 - 1))
    assert "after 1 epoch," in run(capsys, *QUICK, *arguments)[1]
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.endswith(f"seed{2**64 - 1}")


def make_runs(folder, *names):
    """Make directories of runs that nothing is known of."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "spec.json").write_text("{}")


def test_a_name_that_fits_many_runs_shows_the_first_few(capsys, tmp_path):
    make_runs(tmp_path / "runs", *(f"digits-{number:02d}" for number in range(12)))
    code, _, err = run(capsys, "show", "digits")
    assert code == 2
    assert "12 runs in runs start with 'digits'" in err
    assert "digits-04, ..." in err
    assert "digits-05" not in err


def test_the_whole_name_of_a_run_is_not_only_the_beginning_of_another(capsys, tmp_path):
    make_runs(tmp_path / "runs", *(Experiment().run_name(seed) for seed in (1, 11)))
    assert run(capsys, "show", Experiment().run_name(1))[0] == 0


def test_a_folder_that_is_not_there_is_said_to_be_missing(capsys):
    code, _, err = run(capsys, "list", "runs", "--runs", "nowhere")
    assert code == 2
    assert "There is no directory nowhere" in err
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "There is no directory runs" in out


def test_folders_with_runs_inside_the_folder_are_named(capsys, tmp_path):
    make_runs(tmp_path / "runs/reproduce", "digits-x")
    hint = "There are runs in runs/reproduce: choose one with --runs."
    assert hint in run(capsys, "list", "runs")[1]
    code, _, err = run(capsys, "show", "digits-x")
    assert code == 2
    assert hint in err
