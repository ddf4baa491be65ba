"""What bfloat16 does to SAM's test error: five seeds in bfloat16 and in float32 on real Fashion-MNIST.

python experiments/bf16_against_float32.py         # about twenty minutes on one core; resumes when killed
"""

import dataclasses
from pathlib import Path

import torch

from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.statistics import mean_and_interval, paired_p_value
from flatmin.lab.training.engine import train

SEEDS = range(5)
EXPERIMENT = Experiment(
    name="bfloat16 against float32",
    data=Data(name="fashion-mnist", train_size=1000, batch_size=128),
    model=Model(name="wrn-10-2"),
    optim=Optim(rho=0.1),
    epochs=15,
    evaluate_every=15,
)


def main():
    torch.set_num_threads(1)
    errors = {"bfloat16": [], "float32": []}
    for seed in SEEDS:
        for precision, found in errors.items():
            experiment = dataclasses.replace(EXPERIMENT, precision=precision)
            result = train(experiment, seed=seed, runs=Path("runs/bf16"))
            found.append(100 * result.metrics["test_error"])
            print(f"seed {seed} {precision}: test error {found[-1]:.2f} %, {result.time_seconds:.0f} s", flush=True)
    for precision, found in errors.items():
        print(f"{precision}: test error {mean_and_interval(found)} % (mean of {len(found)}, 95 % interval)")
    print(f"paired t-test: p = {paired_p_value(*errors.values()):.2f}")


if __name__ == "__main__":
    main()
