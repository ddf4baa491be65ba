"""How fast the measures are, as ratios in one run: ``python -m benchmarks.measures [--repeats 5]``.

Every method runs once in every round, in turn, on one thread, and the medians over the rounds of its CPU
time are compared, so that a busy machine changes the ratios little. The peers (PyHessian, and curvlinops with
scipy's eigsh) are left out where they are not installed.
"""

import argparse
import importlib
import importlib.util
import statistics
import time
import warnings

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call

from benchmarks.harness import resnet20, table
from flatmin.measures import GGNOperator, HessianOperator, m_sharpness, top_eigenvalues

LOSS = nn.CrossEntropyLoss()
NUM_TOP, TOL = 5, 1e-3


def problem(norm=True, num=256, steps=20):
    """A model that was trained a little, so that its spectrum has outliers, and one batch."""
    torch.manual_seed(0)
    model = resnet20(norm)
    y = torch.randint(10, (num,))
    x = torch.randn(num, 3, 32, 32) + torch.randn(10, 3, 32, 32)[y]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if norm else 0.01, momentum=0.9)
    for index in torch.randint(num, (steps, 64)):
        optimizer.zero_grad()
        LOSS(model(x[index]), y[index]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), x, y


def medians(methods, rounds, warm_up=1):
    """Run each in turn, and return the median CPU seconds of each."""
    seconds = {name: [] for name in methods}
    for index in range(warm_up + rounds):
        for name, run in methods.items():
            start = time.process_time()
            run()
            if index >= warm_up:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def gradient(model, x, y):
    model.zero_grad()
    LOSS(model(x), y).backward()


def products(model, x, y):
    """One Hessian-vector product by each method, and by flatmin; all in the same direction."""
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    direction = [torch.randn_like(w) for w in weights]

    def loss(at):
        return LOSS(functional_call(model, dict(zip(names, at, strict=True)), (x,)), y)

    kept = torch.autograd.grad(loss(weights), weights, create_graph=True)

    def fresh():
        grads = torch.autograd.grad(loss(weights), weights, create_graph=True)
        torch.autograd.grad(grads, weights, direction)

    def dual():
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(w, v) for w, v in zip(weights, direction, strict=True)]
            grads = torch.autograd.grad(loss(duals), duals)
            return [forward_ad.unpack_dual(g).tangent for g in grads]

    v = torch.cat([d.flatten() for d in direction])
    one = HessianOperator(model, LOSS, [(x, y)])
    several = HessianOperator(model, LOSS, list(zip(x.split(64), y.split(64), strict=True)))
    return {
        "gradient": lambda: gradient(model, x, y),
        "flatmin, one batch": lambda: one @ v,
        "flatmin, four batches": lambda: several @ v,
        "reused graph": lambda: torch.autograd.grad(kept, weights, direction, retain_graph=True),
        "fresh graph": fresh,
        "dual numbers": dual,
    }


def report_products(repeats, norm):
    model, x, y = problem(norm)
    seconds = medians(products(model, x, y), repeats)
    kind = "with" if norm else "without"
    rows = [
        [name, f"{value / seconds['gradient']:.2f}", "at most 3.3" if name == "flatmin, one batch" and norm else ""]
        for name, value in seconds.items()
    ]
    print(f"\nOne Hessian-vector product over one gradient, batch 256, {kind} batch norm\n")
    print(table(["", "over one gradient", "to reach"], rows))


def load_peers():
    """Return the peers that are installed; the compiled operators of torchvision may fail to load."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("curvlinops"):
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
            found["curvlinops + eigsh"] = importlib.import_module("curvlinops"), library
        if importlib.util.find_spec("pyhessian"):
            found["PyHessian"] = importlib.import_module("pyhessian"), None
    return found


def report_ggn(repeats):
    """One Gauss-Newton product, of flatmin and of curvlinops, in one batch and in four."""
    peers = load_peers()
    if "curvlinops + eigsh" not in peers:
        return
    model, x, y = problem()
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    rows = []
    for name, size in (("one batch", 256), ("four batches", 64)):
        data = list(zip(x.split(size), y.split(size), strict=True))
        ours = GGNOperator(model, LOSS, data)
        theirs = peers["curvlinops + eigsh"][0].GGNLinearOperator(model, LOSS, list(model.parameters()), data)
        seconds = medians({"flatmin": lambda: ours @ v, "curvlinops": lambda: theirs @ v}, repeats)  # noqa: B023
        rows.append([name, f"{seconds['flatmin'] / seconds['curvlinops']:.2f}", "at most 1"])
    print("\nOne Gauss-Newton product over curvlinops', batch 256\n")
    print(table(["", "time over curvlinops'", "to reach"], rows))


def top_five(model, x, y):
    """The five largest eigenvalues: functions that return values and vectors.

    flatmin and eigsh stop by the same rule, a Ritz residual of at most TOL times the eigenvalue: flatmin asks after
    every product, eigsh (with the number of Lanczos vectors that scipy chooses) at its restarts. PyHessian stops when
    an eigenvalue changes by less than TOL, which is less: the residuals that were reached stand in the table.
    """

    def flatmin_top():
        found = top_eigenvalues(HessianOperator(model, LOSS, [(x, y)]), NUM_TOP, tol=TOL)
        return found.values, found.vectors

    def curvlinops_top():
        from scipy.sparse.linalg import eigsh

        module = peers["curvlinops + eigsh"][0]
        operator = module.HessianLinearOperator(model, LOSS, list(model.parameters()), [(x, y)]).to_scipy()
        start = np.random.default_rng(0).normal(size=operator.shape[0]).astype(np.float32)
        values, vectors = eigsh(operator, k=NUM_TOP, which="LA", tol=TOL, v0=start)
        return values[::-1], torch.from_numpy(vectors[:, ::-1].copy())

    def pyhessian_top():
        computer = peers["PyHessian"][0].hessian(model, LOSS, data=(x, y), cuda=False)
        values, vectors = computer.eigenvalues(maxIter=200, tol=TOL, top_n=NUM_TOP)
        return np.array(values), torch.stack([torch.cat([t.flatten() for t in v]) for v in vectors], dim=1)

    peers = load_peers()
    others = {"curvlinops + eigsh": curvlinops_top, "PyHessian": pyhessian_top}
    return {"flatmin": flatmin_top} | {name: others[name] for name in peers}


def report_top_five():
    model, x, y = problem()
    methods = top_five(model, x, y)
    found = {}

    def keeping(name, run):
        def kept():
            found[name] = run()

        return kept

    # One round, no warm-up: a run is dozens of products, and takes a minute or more.
    seconds = medians({name: keeping(name, run) for name, run in methods.items()}, rounds=1, warm_up=0)
    exact = HessianOperator(model, LOSS, [(x, y)])
    rows = []
    for name, (values, vectors) in found.items():
        values, vectors = torch.tensor(np.array(values)).float(), vectors.float()
        residuals = (exact @ vectors - vectors * values).norm(dim=0) / values.abs()
        goal = "" if name == "flatmin" else "at least 2"
        printed = ", ".join(f"{value:.3f}" for value in values.tolist())
        rows.append([name, f"{seconds[name] / seconds['flatmin']:.2f}", goal, printed, f"{float(residuals.max()):.0e}"])
    print(f"\nThe five largest eigenvalues, batch 256, to a residual of {TOL:g}\n")
    print(table(["", "time over flatmin's", "to reach", "eigenvalues", "worst residual"], rows))


def report_sharpness(repeats):
    model, x, y = problem()
    m = len(x) // 16

    def gradients():
        for part_x, part_y in zip(x.split(m), y.split(m), strict=True):
            gradient(model, part_x, part_y)

    def losses():
        with torch.no_grad():
            for part_x, part_y in zip(x.split(m), y.split(m), strict=True):
                LOSS(model(part_x), part_y)

    methods = {
        "its 16 gradients": gradients,
        "16 losses": losses,
        "flatmin": lambda: m_sharpness(model, LOSS, [(x, y)], m=m),
    }
    seconds = medians(methods, repeats)
    rows = [
        [name, f"{value / seconds['its 16 gradients']:.2f}", "at most 1.3" if name == "flatmin" else ""]
        for name, value in seconds.items()
    ]
    print(f"\nm-sharpness of 256 examples with m = {m}\n")
    print(table(["", "over its gradients", "to reach"], rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the CPU time of several threads adds up
    print(f"torch {torch.__version__}, 1 thread, medians of {options.repeats} interleaved rounds")
    report_products(options.repeats, norm=True)
    report_products(options.repeats, norm=False)
    report_sharpness(options.repeats)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        report_ggn(options.repeats)
        report_top_five()


if __name__ == "__main__":
    main()
