"""``flatmin show``: the settings, metrics and environment of a run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from flatmin.lab.commands.console import find_run, metric, number, table, write_event
from flatmin.lab.runs.directory import is_finished, last_metrics, read_spec
from flatmin.lab.runs.environment import read_sessions
from flatmin.lab.spec.fields import plain


@dataclass(frozen=True)
class Show:
    """Show a run: its settings, its last metrics, where it ran."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the start of it) in the directory of runs."""
    runs: Path = Path("runs")
    """The directory of all runs."""
    output: Literal["table", "json"] = "table"
    """table: human-readable; json: one JSON object."""

    def run(self, console: Console) -> None:
        """Print it."""
        path = find_run(self.run_name, self.runs)
        spec, metrics, sessions = plain(read_spec(path)), last_metrics(path), read_sessions(path)
        if self.output == "json":
            content = {"directory": str(path), "finished": is_finished(path), "spec": spec, "metrics": metrics}
            write_event("run", content | {"sessions": sessions})
            return
        rows = [
            (f"{part}.{name}", json.dumps(v)) for part in ("data", "model", "optim") for name, v in spec[part].items()
        ]
        rows += [(name, json.dumps(value)) for name, value in spec.items() if not isinstance(value, dict)]
        console.print(table(str(path), ("setting", "value"), rows))
        console.print(table("Last epoch", ("metric", "value"), [(n, metric(n, v)) for n, v in metrics.items()]))
        if sessions:
            facts = [(n, " ".join(map(str, v)) if isinstance(v, list) else number(v)) for n, v in sessions[-1].items()]
            title = f"Where it ran (the last of {len(sessions)} sessions)" if len(sessions) > 1 else "Where it ran"
            console.print(table(title, ("what", "value"), facts))
