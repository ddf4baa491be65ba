"""The loop that runs a study; and its protocol: grids that grow, a gate, plans that do not change in silence."""

import json
import math
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flatmin.lab.commands.collect import registrations
from flatmin.lab.commands.report import ITEMS
from flatmin.lab.errors import SpecError
from flatmin.lab.foret2021 import protocol
from flatmin.lab.runs.record import Records, RunRecord
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.condition_tables import condition_tables
from flatmin.lab.studies.conditions import (
    Condition,
    best_candidate,
    better,
    condition_jobs,
    condition_results,
    tuning_job,
)
from flatmin.lab.studies.findings import Findings, Verdict
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.registered_plan import (
    PLAN_FILE,
    Change,
    Registration,
    differences,
    plan_of,
    read_plan,
    register,
    with_plan,
)
from flatmin.lab.studies.study import Item, describe, planned_jobs, run_study
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Sharpness
from invented_runs import invented, invented_runs

ROOT = Path(__file__).parents[3]
GATED = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), epochs=4)
CLAIMS = Claims(source="Table 0", title="Invented")
CONDITION = Condition(
    labels=("net",), column="data", start=GATED, methods=protocol.few_arms(), claimed={}, most_train_error=2.0
)
SEEDS = (0, 1, 2, 3, 4)


def study(condition=CONDITION):
    def findings(scale, known):
        entries = condition_results([condition], known, "item", SEEDS)
        shown = condition_tables(entries, CLAIMS, scale, label_columns=("model",), metrics=protocol.METRICS)
        common = {"item": "item", "title": "", "source": "", "about_scale": ""}
        return Findings(**common, **shown, scale=scale, rules=protocol.RULES)

    def jobs(scale, known):
        return condition_jobs([condition], known, "item", SEEDS)

    return Item(name="item", title="", source="", jobs=jobs, findings=findings)


def runs(best_factor=1.0, train_error=0.0, gain=0.05):
    """Runs whose validation error is lowest at one factor of the suggested rho, and where SAM lowers what is tested."""

    def metrics(job):
        optim = job.experiment.optim
        far = abs((optim.rho_factor or best_factor) / best_factor - 1) + abs(
            best_factor / (optim.rho_factor or best_factor) - 1
        )
        noise = 1e-3 * ((7 * job.seed + 3 * bool(optim.rho)) % 5)
        error = 0.4 - (gain if optim.uses_sam else 0.0) + noise
        return {
            "valid_error": 0.3 + 0.01 * far,
            "test_error": error,
            "test_loss": 10 * error,
            "test_ece": error / 10,
            "train_error": train_error,
        }

    known = Records()
    run_study(study(), "laptop", known, invented(metrics))
    return known


@pytest.mark.parametrize(
    ("best", "chosen", "num_tried"),
    [(1.0, 1.0, 5), (0.25, 0.25, 5), (4.0, 4.0, 7), (1 / 16, 1 / 16, 7), (100.0, 16.0, 8), (1e-6, 1 / 64, 8)],
)
def test_a_grid_grows_by_factors_of_2_at_most_three_times_until_the_best_is_inside(best, chosen, num_tried):
    known = runs(best)
    for entry in condition_results([CONDITION], known, "item", SEEDS):
        if entry.method.name.startswith("SAM"):
            assert entry.chosen.optim.rho_factor == pytest.approx(chosen)
            assert len(entry.tried) == num_tried
            inside = 1e-5 < best < 50
            assert (entry.gate_note is None) == inside


def test_while_a_candidate_beyond_the_grid_is_missing_nothing_is_chosen():
    known = runs(4.0)
    (lost,) = [
        n for n, r in known.items() if r.experiment.optim.rho == "4x" and r.experiment.optim.m and r.seed == 1000
    ]
    del known[lost]
    by_name = {e.method.name: e for e in condition_results([CONDITION], known, "item", SEEDS)}
    assert by_name["SAM, m = 16"].chosen is None
    assert by_name["SAM on 1/8"].chosen is not None


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"train_error": 0.03}, "SGD ends with a training error of 3.0 %, above 2 %"),
        ({"best_factor": 100.0}, "SAM, m = 16's rho is at the edge of its grid"),
        ({}, None),
    ],
)
def test_a_comparison_that_fails_the_gate_is_not_tested_at_this_scale(known, reason):
    verdicts = study().findings("laptop", runs(**known)).verdicts
    verdict = next(v for v in verdicts if v.claim.startswith("net, data: SAM, m = 16 has a lower test error"))
    assert verdict.status == ("reproduced" if reason is None else "not tested at this scale")
    assert (reason or "points") in verdict.evidence


@pytest.mark.parametrize(
    ("name", "diverged", "said"),
    [
        ("test_loss", ("SAM, m = 16",), "not every replica of SAM, m = 16 has a finite test loss"),
        ("test_loss", ("SGD", "SGD, twice the epochs"), "not every replica of SGD has a finite test loss"),
        ("train_error", ("SGD", "SGD, twice the epochs"), "1 of 5 replicas of SGD end without a finite training error"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_replica_that_diverges_does_not_make_a_comparison_vanish_or_pass_its_gate(name, diverged, said, value):
    known = runs()
    for key, record in list(known.items()):
        if record.seed == 2 and record.experiment.name.rpartition("data/")[2] in diverged:
            known |= {key: replace(record, history=[{**record.metrics, name: value}])}
    claim = f"net, data: SAM, m = 16 has a lower {'test loss' if name == 'test_loss' else 'test error'} than SGD"
    found = [v for v in study().findings("laptop", known).verdicts if v.claim.startswith(claim)]
    assert [v.status for v in found] == ["not tested at this scale"]
    assert said in found[0].evidence


def test_of_several_baselines_one_without_any_number_is_not_the_better_one():
    entries = condition_results([CONDITION], runs(), "item", SEEDS)
    sgd, sam = (next(e for e in entries if e.method.name == name) for name in ("SGD", "SAM, m = 16"))
    gone = [replace(record, history=[{**record.metrics, "test_error": math.inf}]) for record in sam.replicas.records]
    diverged = replace(sam, replicas=replace(sam.replicas, records=gone))
    assert better([diverged, sgd], "test_error") is sgd


def test_claims_of_ours_are_marked_and_corrected_apart():
    found = study().findings("laptop", runs())
    papers = [v for v in found.verdicts if not v.claim.endswith("(ours)")]
    assert [v.claim for v in papers] == ["net, data: SAM, m = 16 has a lower test error than SGD."]
    (comparison,) = papers[0].comparisons
    assert comparison.p_holm == comparison.p_value
    ours = [v for v in found.verdicts if v.claim.endswith("(ours)")]
    assert len(ours) == 5  # cheap SAM's error, and loss and calibration of both
    loss = next(v for v in ours if "SAM, m = 16 has a lower test loss" in v.claim)
    assert loss.comparisons[0].difference.mean == pytest.approx(-0.5, abs=0.01)
    assert "nats" in loss.evidence


def test_the_plan_has_every_group_grid_comparison_and_rule():
    plan = plan_of(study(), "laptop")
    assert plan["comparisons"][0] == "net, data: test error: SAM, m = 16 vs. SGD or SGD, twice the epochs"
    assert len(plan["comparisons"]) == 6
    assert plan["rules"] == list(protocol.RULES)
    grid = plan["groups"]["net, data, SAM, m = 16, choosing"]
    assert [candidate["optim.rho"] for candidate in grid["varies"]] == ["0.125x", "0.25x", "0.5x", "auto", "2x"]
    assert plan["groups"]["net, data, SGD, twice the epochs"]["spec"]["epochs"] == 8
    assert plan["groups"]["net, data, SGD"]["seeds"] == list(SEEDS)
    assert plan_of(study(), "laptop") == json.loads(json.dumps(plan))


def test_a_registered_plan_changes_only_with_an_entry_that_says_why(tmp_path):
    plan = plan_of(study(), "laptop")
    assert register(tmp_path, {"item": plan}, []) == ["item"]
    assert register(tmp_path, {"item": plan}, []) == []
    fewer = plan | {"comparisons": plan["comparisons"][:2]}
    with pytest.raises(SpecError, match="plan of item would change"):
        register(tmp_path, {"item": fewer}, [])
    assert read_plan(tmp_path)[0]["item"] == plan
    change = Change(item="item", date="2026-01-01", what="Four comparisons less.", why="Time.", known="Nothing.")
    assert register(tmp_path, {"item": fewer}, [change]) == ["item"]
    assert read_plan(tmp_path) == ({"item": fewer}, [change])


def test_differences_between_plan_and_runs_are_found():
    known, registered = runs(), plan_of(study(), "laptop")
    assert differences(study(), "laptop", known, registered) == []
    extended = differences(study(), "laptop", runs(4.0), registered)
    assert extended == ["4 runs more than the plan's first grids have, by its rule for grids."]
    dropped = registered | {"comparisons": [*registered["comparisons"], "SAM vs. Adam"]}
    assert differences(study(), "laptop", known, dropped) == [
        "Not made, though planned: the comparison “SAM vs. Adam”."
    ]
    longer = study(replace(CONDITION, start=replace(GATED, epochs=8)))
    lines = differences(longer, "laptop", known, registered)
    assert "The runs of “net, data, SGD” are not those that were planned." in lines
    assert lines[-1].endswith("runs are missing.")


@pytest.mark.parametrize(
    ("time", "said"), [("11:00", "before the first run"), ("13:15", "when 4 of its 30 runs had begun")]
)
def test_a_page_says_when_its_plan_was_registered(time, said, tmp_path):
    known = runs()
    times = {0: "12:00:00+00:00", 1: "14:30:00+02:00"}  # the second is half an hour later
    for name, record in known.items():
        known[name] = replace(record, sessions=[{"started": f"2026-01-01T{times.get(record.seed, times[1])}"}])
    register(tmp_path, {"item": plan_of(study(), "laptop")}, [])
    registration = Registration("0123456789abcdef", f"2026-01-01T{time}:00+01:00")
    findings = with_plan(describe(study(), "laptop", known), study(), known, tmp_path, {"item": registration})
    assert findings.notes[0] == f"The plan was registered {said} (commit 0123456789): 6 comparisons."
    alone = with_plan(describe(study(), "laptop", known), study(), known, tmp_path, {})
    assert alone.notes[0] == "The plan is in no commit: 6 comparisons."


STUDIES = [path.parent for path in sorted((ROOT / "results").glob(f"*/{PLAN_FILE}"))]


@pytest.mark.parametrize(("study", "name"), [(study, name) for study in STUDIES for name in read_plan(study)[0]])
def test_the_code_is_what_the_registered_plan_says(study, name):
    now = json.loads(json.dumps(plan_of(ITEMS[name], "laptop")))
    again = f"flatmin reproduce {name} --plan --write {study.name} --what ... --why ... --known ..."
    assert now == read_plan(study)[0][name], again


def _git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("study", STUDIES)
def test_pages_name_the_commit_that_registered_each_plan(study):
    if not _git("log", "-1", "--format=%H", "--", str(study)) or (ROOT / ".git/shallow").exists():
        pytest.skip("not a whole clone")
    plans = json.loads((study / "study.json").read_text())["plans"]
    assert plans == {name: asdict(when) for name, when in registrations(study).items()}
    assert plans.keys() == read_plan(study)[0].keys()


@pytest.mark.parametrize("study", STUDIES)
def test_no_committed_plan_changed_without_an_entry(study):
    file = f"results/{study.name}/{PLAN_FILE}"
    try:
        commits = _git("log", "--reverse", "--format=%H", "--", file).split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone")
    before = {"items": {}, "changes": []}
    for commit in commits:
        after = json.loads(_git("show", f"{commit}:{file}"))
        for name in before["items"]:
            entries = [sum(change["item"] == name for change in plan["changes"]) for plan in (before, after)]
            if after["items"].get(name) != before["items"][name]:
                assert entries[1] > entries[0], f"{commit[:10]} changed the plan of {name} without an entry"
        assert after["changes"][: len(before["changes"])] == before["changes"], f"{commit[:10]} rewrote an entry"
        before = after


START = Experiment(data=Data(train_size=50), model=Model(name="cnn-2"), epochs=1, name="item/SGD")
CANDIDATES = [replace(START, name="item/SAM", optim=Optim(rho=rho)) for rho in (0.1, 0.2)]
SHARPNESS = Sharpness()


def jobs(scale, known):
    """Two runs of SGD, which are measured; and two of SAM when rho is chosen."""
    choosing = [tuning_job(candidate) for candidate in CANDIDATES]
    best = best_candidate(CANDIDATES, [job.record(known) for job in choosing])
    sgd = [Job(experiment=START, seed=seed, measurements=(SHARPNESS,)) for seed in (0, 1)]
    return {"choosing": choosing, "SGD": sgd, "SAM": [Job(experiment=best, seed=s) for s in (0, 1)] if best else []}


def findings(scale, known):
    verdict = Verdict(claim="It holds.", status="reproduced", evidence="p < 0.01.")
    return Findings(
        item="item", scale=scale, title="", source="", about_scale="", verdicts=[verdict], notes=["A note."]
    )


ITEM = Item(name="item", title="", source="", jobs=jobs, findings=findings)
FIRST, SECOND = (Job(experiment=START, seed=seed).name for seed in (0, 1))


def best_is_02(job):
    return {"valid_error": 0.3 - job.experiment.optim.rho, "test_error": 0.1}


def test_a_plan_takes_the_first_candidate_while_a_choice_is_open_and_the_chosen_one_later():
    def rhos(known=None):
        plan = planned_jobs(ITEM, "laptop", known).values()
        return [job.experiment.optim.rho for job in plan if job.experiment.name == "item/SAM"]

    assert rhos() == [0.1, 0.1]
    known = invented_runs(ITEM, "laptop", best_is_02)
    assert rhos(known) == [0.2, 0.2]
    assert len(known) == len(planned_jobs(ITEM, "laptop", known)) == 6
    assert describe(ITEM, "laptop", known).num_missing == 0


def test_the_loop_ends_when_jobs_fail_and_a_later_call_tries_again_what_is_not_final():
    def one_is_killed_and_one_diverges(job):
        killed = RunRecord(name=job.name, state="failed", reason="killed", is_final=False)
        return {FIRST: killed, SECOND: "diverged"}.get(job.name, best_is_02(job))

    known, asked = Records(), []

    def sweep(metrics):
        def run(jobs, what):
            asked.append([job.name for job in jobs])
            return invented(metrics)(jobs, what)

        return run

    assert run_study(ITEM, "laptop", known, sweep(one_is_killed_and_one_diverges)) == 6
    assert [len(names) for names in asked] == [4, 2]
    found = describe(ITEM, "laptop", known)
    assert found.num_missing == 1
    assert list(found.notes) == ["A note.", f"{FIRST} failed: killed", f"{SECOND} failed: diverged"]
    assert run_study(ITEM, "laptop", known, sweep(best_is_02)) == 1
    assert asked[2:] == [[FIRST]]
    assert run_study(ITEM, "laptop", known, sweep(best_is_02)) == 0


def test_only_what_is_meant_is_run_and_a_choice_waits_for_all_its_candidates():
    known = Records()
    assert run_study(ITEM, "laptop", known, invented(best_is_02), only=("SGD/seed1", "choosing")) == 3
    assert {name for name, record in known.items() if record.state == "finished"} > {SECOND}
    assert known[FIRST].state == "missing"
    assert run_study(ITEM, "laptop", known, invented(best_is_02), only=("item/SAM",)) == 2


def test_a_run_is_missing_until_it_is_measured_in_full_and_a_smoke_test_judges_nothing():
    def unmeasured(job, measurement):
        return None if job.name == FIRST else {}

    known = invented_runs(ITEM, "smoke", best_is_02, unmeasured)
    found = describe(ITEM, "smoke", known)
    assert (found.num_missing, set(found.runs)) == (1, set(planned_jobs(ITEM, "smoke", known)))
    (verdict,) = found.verdicts
    assert (verdict.status, verdict.evidence) == ("not tested", "A smoke test judges nothing. p < 0.01.")
    assert describe(ITEM, "laptop", known).verdicts[0].status == "reproduced"
    assert list(describe(ITEM, "laptop", Records()).runs) == []
