"""The command ``flatmin``: demo, train, reproduce, report, collect, list, show, measure.

Exit codes: 0 done; 1 internal error; 2 wrong command, setting, model or run, or out of memory; 3 data missing or
corrupt; 4 a file cannot be written or read; 5 the loss diverged; 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

import dataclasses
import os
import platform
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch

try:
    import tyro
    from rich.text import Text

    from flatmin.lab.commands.console import SafeConsole
except ImportError as missing:  # pragma: no cover (the tests have them)
    sys.exit(f"flatmin's command line needs the extra `lab` ({missing.name} is missing): pip install 'flatmin[lab]'")

import flatmin
from flatmin.lab.errors import DataError, DivergedError, InterruptedRun, ModelError, RunError, SpecError, StorageError

DESCRIPTION = (
    "Sharpness-Aware Minimization: train models to flat minima, and measure how flat they are. `flatmin --version` "
    "prints the versions of flatmin, torch and Python."
)

EXIT_CODES = {SpecError: 2, ModelError: 2, RunError: 2, DataError: 3, StorageError: 4, DivergedError: 5}
OUT_OF_MEMORY = "Use a smaller data.batch_size, data.image_size or model (measure: --num-examples)."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed_streams()
    if arguments == ["--version"]:
        print(f"flatmin {flatmin.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        return 0
    # Paths and messages are never markup: `pip install 'flatmin[ray]'`.
    console = SafeConsole(soft_wrap=not sys.stdout.isatty(), markup=False, emoji=False)
    errors = SafeConsole(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def say(kind: str, style: str, message: object) -> None:
        errors.print(Text.assemble((f"{kind}:", style), f" {message}"))

    warnings.showwarning = lambda message, *_: say("warning", "yellow", message)
    try:
        _run(arguments, console)
        sys.stdout.flush()
        return 0
    except InterruptedRun as stopped:
        if not _main_process_prints(stopped):
            say("stopped", "yellow", stopped)
        return 128 + stopped.signal_number
    except KeyboardInterrupt:
        say("stopped", "yellow", "Stopped by Ctrl-C.")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _discard_output()
        return 128 + 13  # SIGPIPE, as for other commands whose output is closed
    except Exception as error:
        code, message = _explain(error)
        if _main_process_prints(error):
            return code
        if code == 1:
            raise
        if code == 4:
            _discard_output()
        say("error", "red", message)
        return code


def _run(arguments: Sequence[str], console: SafeConsole) -> None:
    # Not at the top: a Ctrl-C while they are imported is one like any other.
    from flatmin.lab.commands.collect import Collect
    from flatmin.lab.commands.demo import Demo
    from flatmin.lab.commands.list import List, Show
    from flatmin.lab.commands.measure import Measure
    from flatmin.lab.commands.report import Report
    from flatmin.lab.commands.reproduce import Reproduce
    from flatmin.lab.commands.train import Train

    kinds: tuple[Any, ...] = (Demo, Train, Reproduce, Report, Collect, List, Show, Measure)
    commands = {kind.__name__.lower(): kind for kind in kinds}
    _check_switches(arguments, commands.get(arguments[0]) if arguments else None)
    markers = (tyro.conf.OmitArgPrefixes,) if arguments[:1] == ["measure"] else ()
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="flatmin", description=DESCRIPTION, args=arguments, config=markers
    )
    if not isinstance(command, Train):  # it saves first; the others have nothing to save, and pools to close
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command.run(console)


def _check_switches(arguments: Sequence[str], command: Any) -> None:
    """Raise a SpecError for a switch with a value, of which tyro would only say the value."""
    switches = _switches(command) if dataclasses.is_dataclass(command) else {}
    for flag, equals, value in (word.partition("=") for word in arguments):
        opposite = switches.get(flag.replace("_", "-"))
        if equals and opposite is not None:
            raise SpecError(f"{flag} is a switch without a value; got {value!r}. Use {flag} or {opposite}.")


def _switches(kind: Any, prefix: str = "") -> dict[str, str]:
    """Return each switch of a command with its opposite."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        if hint is bool:
            word = name.replace("_", "-")
            found |= {f"--{prefix}{word}": f"--{prefix}no-{word}", f"--{prefix}no-{word}": f"--{prefix}{word}"}
        elif dataclasses.is_dataclass(hint):
            found |= _switches(hint, "" if name == "experiment" else f"{name}.")
    return found


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code of an error and what to print; 1 for an internal error."""
    known = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if known is not None:
        return known, str(error)
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return 2, f"Out of memory ({text.splitlines()[0] if text else type(error).__name__}). {OUT_OF_MEMORY}"
    if isinstance(error, OSError):
        return 4, f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or text}."
    return 1, text


def _main_process_prints(error: Exception) -> bool:
    """Return whether another worker, the main process, prints this error for all."""
    return os.environ.get("RANK", "0") != "0" and getattr(error, "is_on_all_workers", False)


def _replace_closed_streams() -> None:
    """Write to nowhere if standard output or standard error was closed (``>&-``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)


def _discard_output() -> None:
    """Let what could not be written go nowhere, or Python complains about it when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
