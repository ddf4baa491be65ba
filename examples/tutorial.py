"""From SGD to SAM in ten minutes: the code of the tutorial in docs/tutorial.md, which takes seconds to run.

Run it with ``python examples/tutorial.py``, or with a directory for the plots: ``python examples/tutorial.py plots``.
"""

import sys
from pathlib import Path

# --8<-- [start:data]
import numpy as np
import torch
from torch import nn

from flatmin import SAM, HessianOperator, loss_landscape, m_sharpness, spectral_density, suggest_rho, top_eigenvalues
from flatmin.lab.data.embedded import load_digits

images, labels = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels, embedded in flatmin
order = np.random.default_rng(0).permutation(len(labels))
x, y = torch.tensor(images[order] / 255.0).flatten(1).float(), torch.tensor(labels[order])
x_train, x_val, x_test = x[:500], x[500:1000], x[1000:]
y_train, y_val, y_test = y[:500].clone(), y[500:1000], y[1000:]

generator = torch.Generator().manual_seed(0)
is_noisy = torch.rand(500, generator=generator) < 0.3  # 30 % of the training labels become random ones
y_train[is_noisy] = torch.randint(0, 10, (int(is_noisy.sum()),), generator=generator)
# --8<-- [end:data]


# --8<-- [start:train]
def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


loss_fn = nn.CrossEntropyLoss()


def train(rho, num_epochs=60):
    model = make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=rho, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, num_epochs)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_epochs):
        for i in torch.randperm(len(x_train), generator=generator).split(50):

            def closure():
                opt.zero_grad()
                loss = loss_fn(model(x_train[i]), y_train[i])
                loss.backward()
                return loss

            opt.step(closure)
        schedule.step()
    return model, opt


@torch.no_grad()
def error(model, x, y):
    return (model(x).argmax(dim=1) != y).float().mean().item()


# --8<-- [end:train]


def main(plots: Path | None = None) -> dict[str, float]:
    # --8<-- [start:compare]
    sgd, _ = train(rho=0.0)  # a radius of 0 is plain SGD
    sam, opt = train(rho=0.05)
    for name, model in {"SGD": sgd, "SAM": sam}.items():
        print(f"{name}: training error {error(model, x_train, y_train):.1%}, ", end="")
        print(f"test error {error(model, x_test, y_test):.1%}")
    print(f"last step: loss {opt.metrics.loss:.3f}, sharpness {opt.metrics.sharpness:.3f}")
    # --8<-- [end:compare]

    # --8<-- [start:choose]
    model = make_model()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    batches = list(zip(x_train.split(50), y_train.split(50), strict=True))
    suggestion = suggest_rho(opt, lambda x, y: loss_fn(model(x), y), batches)
    print(suggestion)

    models = {factor: train(factor * suggestion.rho)[0] for factor in (0.25, 0.5, 1.0)}
    errors = {factor: error(model, x_val, y_val) for factor, model in models.items()}
    for factor, value in errors.items():
        print(
            f"rho {factor * suggestion.rho:.2f}: training error {error(models[factor], x_train, y_train):.1%}, ", end=""
        )
        print(f"validation error {value:.1%}")
    best = min(errors, key=errors.get)
    sam = models[best]
    print(f"SAM with rho {best * suggestion.rho:.2f}: training error {error(sam, x_train, y_train):.1%}, ", end="")
    print(f"test error {error(sam, x_test, y_test):.1%}")
    # --8<-- [end:choose]

    # --8<-- [start:sharpness]
    data = [(x_train, y_train)]
    sharpness, spectra = {}, {}
    for name, model in {"SGD": sgd, "SAM": sam}.items():
        sharpness[name] = m_sharpness(model, loss_fn, data, rho=0.05, m=50)
        spectra[name] = top_eigenvalues(HessianOperator(model, loss_fn, data), k=5)
        print(f"{name}: sharpness {sharpness[name].mean:.3f}, largest eigenvalue {spectra[name].values[0]:.1f}")
    # --8<-- [end:sharpness]

    # --8<-- [start:landscape]
    density = spectral_density(HessianOperator(sam, loss_fn, data), steps=40, probes=2)
    landscape = loss_landscape({"SGD": sgd, "SAM": sam}, loss_fn, data, points=21)
    figures = {"spectrum": density.plot(), "landscape": landscape.plot()}  # matplotlib's, with .savefig(file)
    # --8<-- [end:landscape]
    if plots is not None:
        for name, figure in figures.items():
            figure.savefig(plots / f"tutorial-{name}.png")
    return {
        "SGD test error": error(sgd, x_test, y_test),
        "SAM test error": error(sam, x_test, y_test),
        "SGD sharpness": sharpness["SGD"].mean,
        "SAM sharpness": sharpness["SAM"].mean,
        "SGD eigenvalue": float(spectra["SGD"].values[0]),
        "SAM eigenvalue": float(spectra["SAM"].values[0]),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
