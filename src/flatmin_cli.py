"""The entry point of the command ``flatmin``.

It is not in the package because importing anything from there imports torch, which takes seconds: a signal in that time
must end the command like any other.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

SHOW_CURSOR = "\x1b[?25h"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run the command and return its exit code."""
    # An exception in the middle of torch's imports, or of the interpreter's exit, can come out as another error, so
    # nothing is raised: a signal ends the process. What a run had saved is complete.
    for number in SIGNALS:
        signal.signal(number, _stop)
    from flatmin import cli

    try:
        return cli.main()
    except KeyboardInterrupt:  # before or after the command's own handling of it
        _stop(signal.SIGINT, None)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the command has ended, and its exit code is known


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stderr is not None:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)  # a progress bar hides it
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        sys.stderr.write(f"stopped: Stopped by {name}.\n")
        sys.stderr.flush()
    os._exit(128 + number)
