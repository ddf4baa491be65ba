"""Run every benchmark: `python -m benchmarks`."""

import importlib
import pkgutil

import benchmarks
from benchmarks.harness import machine

if __name__ == "__main__":
    print(machine())
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name not in ("__main__", "harness"):
            importlib.import_module(f"benchmarks.{module.name}").main()
