"""The loop that runs what a study asks for, and what is said of runs that are missing or failed."""

from dataclasses import replace

from flatmin.lab.runs.record import Records, RunRecord
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import best_candidate, tuning_job
from flatmin.lab.studies.findings import Findings, Verdict
from flatmin.lab.studies.study import Item, describe, planned_jobs, run_study
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Sharpness
from invented_runs import invented, invented_runs

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
