"""``flatmin demo``: SGD and SAM on 500 embedded digits, in minutes on two cores."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flatmin.lab.demo.page import write_page
from flatmin.lab.demo.study import (
    NOISE_RATES,
    SEEDS,
    DemoRun,
    demo_experiments,
    demo_settings,
    run_one,
    summarize,
    verdict,
)
from flatmin.lab.spec.experiment import Experiment


@dataclass(frozen=True)
class Demo:
    """Train on 500 embedded digits with SGD and SAM, clean and with noisy labels; write a page with the difference."""

    runs: Path = Path("runs/demo")
    """Where the runs and the page (index.html) go."""
    processes: int = 0
    """How many networks to train at once, each on one thread; 0 is one for each core."""

    def run(self, console: Console) -> None:
        """Train, measure, print the table, write the page."""
        torch.set_num_threads(1)  # small networks: a second thread would only wait
        jobs = [
            (noise, method, experiment, seed, self.runs)
            for seed in SEEDS
            for (noise, method), experiment in demo_experiments(seed).items()
        ]
        found = self._trained(jobs, console)
        rows = summarize(found)
        table = Table(title="500 digits, mean of 3 seeds with 95 % confidence intervals", title_justify="left")
        for column in ("wrong labels", "method", "test error %", "train error %", "m-sharpness", "lambda_max"):
            table.add_column(column)
        for row in rows:
            numbers = (row.test_error, row.train_error, row.m_sharpness, row.lambda_max)
            table.add_row(f"{row.noise:.0%}", row.method, *map(str, numbers))
        console.print(table)
        verdicts = [verdict(rows, noise) for noise in NOISE_RATES]
        for sentence in verdicts:
            console.print(sentence)
        page = write_page(self.runs / "index.html", rows, verdicts, demo_settings())
        console.print(f"The page with curves, spectra and landscapes: {page}")

    def _trained(self, jobs: list[tuple[float, str, Experiment, int, Path]], console: Console) -> list[DemoRun]:
        # Long ones first, so that no core waits at the end; fresh processes, because threads do not survive a fork.
        jobs = sorted(jobs, key=lambda job: -job[2].epochs * (2 if job[2].optim.rho else 1))
        context = multiprocessing.get_context("spawn")
        workers = self.processes or os.cpu_count() or 1
        found = []
        with ProcessPoolExecutor(workers, mp_context=context) as pool, Progress(console=console) as bar:
            task = bar.add_task("training 18 networks", total=len(jobs))
            for future in as_completed([pool.submit(run_one, *job) for job in jobs]):
                found.append(future.result())
                bar.advance(task)
        return found
