"""The entry point of the command ``flatmin``.

It is not in the package because importing anything from there imports torch, which takes seconds: a Ctrl-C in that time
must end the command like any other.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

STOPPED = "stopped: Stopped by Ctrl-C.\n"
EXIT_CODE = 128 + signal.SIGINT


def main() -> int:
    """Run the command and return its exit code."""
    # A KeyboardInterrupt in the middle of torch's imports can come out as another error, so nothing is raised here.
    signal.signal(signal.SIGINT, _stop)
    from flatmin import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    except KeyboardInterrupt:  # before or after the command's own handling of it
        _stop(signal.SIGINT, None)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stderr is not None:
        sys.stderr.write(STOPPED)
        sys.stderr.flush()
    os._exit(EXIT_CODE)
