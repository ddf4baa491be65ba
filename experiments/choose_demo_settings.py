"""Chooses the settings of `flatmin demo` by validation error and writes them to src/flatmin/lab/demo/settings.json.

As in the paper (Section 3.1), model and learning rate are those with which SGD does best, over both noise rates;
then rho, for each noise rate, is the factor of the suggested radius with which SAM does best. The demo has other seeds.

    python experiments/choose_demo_settings.py          # about ten minutes on two cores
"""

import dataclasses
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from flatmin.lab.demo.study import NOISE_RATES, demo_experiment
from flatmin.lab.studies.statistics import mean_and_interval
from flatmin.lab.training.engine import train

NETWORKS = ("cnn-16", "cnn-32")
LEARNING_RATES = (0.05, 0.1, 0.2)
RADII = ("0.125x", "0.25x", "0.5x", "auto", "2x")
SEEDS = (100, 101, 102)
TARGET = Path(__file__).parent.parent / "src/flatmin/lab/demo/settings.json"


def valid_error(job):
    torch.set_num_threads(1)
    network, lr, rho, noise, seed = job
    experiment = demo_experiment(network=network, lr=lr, rho=rho, noise=noise, seed=seed)
    experiment = dataclasses.replace(experiment, evaluate_every=experiment.epochs)
    return 100 * train(experiment, seed=seed, runs=Path("runs/demo_sweep")).metrics["valid_error"]


def sweep(pool, settings):
    jobs = [(*setting, seed) for setting in settings for seed in SEEDS]
    errors = list(pool.map(valid_error, jobs))
    lines = []
    for i, (network, lr, rho, noise) in enumerate(settings):
        interval = mean_and_interval(errors[i * len(SEEDS) : (i + 1) * len(SEEDS)])
        line = {"network": network, "lr": lr, "rho": rho, "noise": noise, "valid_error": dataclasses.asdict(interval)}
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def main():
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        grid = [(network, lr, 0.0, noise) for network in NETWORKS for lr in LEARNING_RATES for noise in NOISE_RATES]
        baselines = sweep(pool, grid)

        def score(network, lr):
            return sum(b["valid_error"]["mean"] for b in baselines if (b["network"], b["lr"]) == (network, lr))

        network, lr = min(((n, r) for n in NETWORKS for r in LEARNING_RATES), key=lambda pair: score(*pair))
        perturbed = sweep(pool, [(network, lr, rho, noise) for rho in RADII for noise in NOISE_RATES])
    rho = {
        str(noise): min((p for p in perturbed if p["noise"] == noise), key=lambda p: p["valid_error"]["mean"])["rho"]
        for noise in NOISE_RATES
    }
    chosen = {"network": network, "lr": lr, "rho": rho}
    content = {"chosen": chosen, "seeds": SEEDS, "sweep": [*baselines, *perturbed]}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    print("chosen:", chosen)


if __name__ == "__main__":
    main()
