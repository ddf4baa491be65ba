"""The command ``flatmin``: demo, train, reproduce, report, list, show, measure.

Exit codes: 0 done; 1 a fault of flatmin; 2 a wrong command, setting, network or run; 3 data missing or damaged; 4
nothing can be written; 5 the loss diverged; 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM), everything saved.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

try:
    import tyro
    from rich.console import Console
except ImportError as missing:  # pragma: no cover (the tests have them)
    sys.exit(f"flatmin's command line needs the extra `lab` ({missing.name} is missing): pip install 'flatmin[lab]'")

from flatmin.lab.commands.demo import Demo
from flatmin.lab.commands.list import List
from flatmin.lab.commands.measure import Measure
from flatmin.lab.commands.report import Report
from flatmin.lab.commands.reproduce import Reproduce
from flatmin.lab.commands.show import Show
from flatmin.lab.commands.train import Train
from flatmin.lab.errors import DataError, DivergedError, InterruptedRun, ModelError, RunError, SpecError, StorageError

DESCRIPTION = "Sharpness-Aware Minimization: train networks to flat minima, and measure how flat they are."


EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (SpecError, 2),
    (ModelError, 2),
    (RunError, 2),
    (DataError, 3),
    (StorageError, 4),
    (DivergedError, 5),
)


COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "train": Train,
    "reproduce": Reproduce,
    "report": Report,
    "list": List,
    "show": Show,
    "measure": Measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(soft_wrap=not sys.stdout.isatty())
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    warnings.showwarning = lambda message, *_: errors.print(f"[yellow]warning:[/yellow] {message}")
    try:
        markers = (tyro.conf.OmitArgPrefixes,) if arguments[:1] == ["measure"] else ()
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="flatmin", description=DESCRIPTION, args=arguments, config=markers
        )
        command.run(console)
    except InterruptedRun as stopped:
        if not _main_process_prints(stopped):
            errors.print(f"[yellow]stopped:[/yellow] {stopped}")
        return 128 + stopped.signal_number
    except tuple(kind for kind, _ in EXIT_CODES) as mistake:
        if not _main_process_prints(mistake):
            errors.print(f"[red]error:[/red] {mistake}")
        return next(code for kind, code in EXIT_CODES if isinstance(mistake, kind))
    except Exception as error:
        if _main_process_prints(error):
            return 1
        raise
    return 0


def _main_process_prints(error: Exception) -> bool:
    """Return whether another worker, the main process, prints this error for all."""
    return os.environ.get("RANK", "0") != "0" and getattr(error, "is_on_all_workers", False)


if __name__ == "__main__":
    sys.exit(main())
