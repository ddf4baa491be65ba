"""Collect the evidence: copies what is small of finished runs into results/, writes the page and the docs' tables.

    python experiments/collect_results.py RUNS

Weights, events and logs stay behind. The tables between the markers of docs/reproduction.md are rewritten, so that
no number in them is typed in by hand; a test compares them with the runs.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from image_passes import cost, num_models, weighted_cost

from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.scales import CUTS
from flatmin.lab.report import write_report
from flatmin.lab.runs.directory import read_result
from flatmin.lab.runs.json_files import write_json
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.plan import planned_jobs, with_all_missing
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.runners import ReadOnlyRunner

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "foret2021-laptop"
DOCS = ROOT / "docs" / "reproduction.md"
FILES = ("spec.json", "result.json", "environment.json", "problem.json")
TITLE = "Foret et al. (2021) on two cores: paper vs. measured"


def findings(runs: Path) -> list[Findings]:
    """Return what every item shows; those without a finished run have verdicts alone: "not tested"."""
    archive = ReadOnlyRunner(runs)
    found = [with_all_missing(i.study("laptop", archive), i.study, archive) for i in ITEMS.values()]
    return [
        f if any((runs / name / "result.json").exists() for name in f.runs) else replace(f, tables=(), figures=())
        for f in found
    ]


def collect(source: Path, target: Path) -> None:
    """Copy the small files of the runs that the evidence uses."""
    if source.resolve() == target.resolve():
        raise SystemExit(f"{source} is where the runs go. Give no directory to rewrite the page from the stored runs.")
    copy_small_files({run for found in findings(source) for run in found.runs}, source, target)


def copy_small_files(asked: set[str], source: Path, target: Path) -> None:
    """Copy what is small of those runs that are finished; what was there before goes."""
    names = {run for run in asked if any((source / run / end).exists() for end in ("result.json", "problem.json"))}
    shutil.rmtree(target, ignore_errors=True)
    for name in sorted(names):
        (target / name).mkdir(parents=True)
        for file in FILES:
            if (source / name / file).exists():
                text = (source / name / file).read_text()
                # A path on the machine of the run says nothing to others: its last part is enough.
                short = re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', text)
                if short == text:
                    (target / name / file).write_text(text)
                else:  # with a checksum of what is left
                    content = {key: value for key, value in json.loads(short).items() if key != "checksum"}
                    write_json(target / name / file, content)
        for file in sorted((source / name / "measures").glob("*.json")):
            (target / name / "measures").mkdir(exist_ok=True)
            # The densities and grids have more digits than the page shows; half of the bytes are enough.
            content = json.loads(file.read_text(), parse_float=lambda text: float(f"{float(text):.6g}"))
            content.pop("checksum", None)  # of all digits
            (target / name / "measures" / file.name).write_text(json.dumps(content) + "\n")


def claims_table(found: list[Findings]) -> str:
    """Return the verdicts, claim by claim, as Markdown; claims that wait for runs are in a list below."""
    lines = ["| item | claim | verdict | evidence |", "|---|---|---|---|"]
    waiting: dict[str, str] = {}
    for item in found:
        for v in item.verdicts:
            if item.num_missing and v.status == "not tested" and all(c.num_pairs < 2 for c in v.comparisons):
                waiting[item.item] = f"`{item.item}` ({item.num_missing} runs)"
            else:
                claim, evidence = (text.replace("|", r"\|") for text in (v.claim, v.evidence))
                lines.append(f"| `{item.item}` | {claim} | **{v.status}** | {evidence} |")
    waits = f"\n\nNot tested, or not in full, with the runs that are missing: {', '.join(waiting.values())}."
    return "\n".join(lines) + (waits if waiting else "")


def seconds_per_pass(runs: Path) -> dict[str, float]:
    """Return how long a core takes for one unit of `weighted_cost`, by model: the median of its runs."""
    times: dict[str, list[float]] = {}
    for path in sorted(runs.glob("*/result.json")):
        result = read_result(path.parent)
        if not result.experiment.data.bootstrap:  # which trains two models
            job = Job(experiment=replace(result.experiment, epochs=len(result.history)))
            times.setdefault(result.experiment.model.name, []).append(result.time_seconds / weighted_cost([job]))
    return {model: median(values) for model, values in times.items()}


def cost_table(runs: Path) -> str:
    """Return what each item costs on a laptop, as Markdown."""
    seconds = seconds_per_pass(runs)
    lines = ["| item | where | models | images forward and backward | hours of two cores |", "|---|---|---|---|---|"]
    for name, item in ITEMS.items():
        jobs = planned_jobs(item.study, "laptop")
        by_model: dict[str, list[Job]] = {}
        for job in jobs:
            by_model.setdefault(job.experiment.model.name, []).append(job)
        hours = sum(weighted_cost(group) * seconds[model] for model, group in by_model.items()) / 2 / 3600
        models, passes = num_models(jobs), cost(jobs)
        lines.append(f"| `{name}` | {item.source} | {models} | {passes / 1e6:.1f} million | {hours:.1f} |")
    return "\n".join(lines)


def cuts_list() -> str:
    """Return what was cut, as Markdown."""
    return "\n".join(f"- `{item}`: {'; '.join(cuts)}." for item, cuts in CUTS.items())


def blocks(runs: Path) -> dict[str, str]:
    """Return the tables of docs/reproduction.md by the names of their markers."""
    return {"claims": claims_table(findings(runs)), "cuts": cuts_list(), "costs": cost_table(runs)}


def with_block(text: str, name: str, block: str) -> str:
    """Return a text with the part between two markers replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{block}\n{end}{tail}"


def main() -> None:
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]), RESULTS / "runs")
    shutil.rmtree(RESULTS / "figures", ignore_errors=True)
    write_report(findings(RESULTS / "runs"), runs=RESULTS / "runs", out=RESULTS, title=TITLE)
    text = DOCS.read_text()
    for name, block in blocks(RESULTS / "runs").items():
        text = with_block(text, name, block)
    DOCS.write_text(text)


if __name__ == "__main__":
    main()
