"""Run every benchmark: `python -m benchmarks`; with `--write`, put what it printed into benchmarks/README.md."""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import machine

HERE = Path(__file__).parent
PREAMBLE = """# Benchmarks

What `make bench` printed. Only ratios within one run mean anything on a shared machine: methods take turns, figures
are medians over the rounds, with their spread. To measure again: `make bench`; to put it here:
`.venv/bin/python -m benchmarks --write`.

"""


def main() -> None:
    output = [f"Measured on: {machine()}\n"]
    print(output[0], flush=True)
    # A process each: some set the number of threads.
    for name in sorted(path.stem for path in HERE.glob("*.py")):
        if "def main(" in (HERE / f"{name}.py").read_text() and not name.startswith("__"):
            command = [sys.executable, "-m", f"benchmarks.{name}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as process:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    output.append(line)
            if process.returncode:
                sys.exit(f"benchmarks.{name} failed")
    if "--write" in sys.argv[1:]:
        (HERE / "README.md").write_text(PREAMBLE + "".join(output))


if __name__ == "__main__":
    main()
