"""The suggested radius equals closed forms in float64: rho = 0.1 mean(L) / mean(g . eps_1)."""

import copy
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ddp_cases
import fsdp_cases
import mesh_cases
from flatmin import SAM, suggest_rho
from references import dual_exponent, flat, scaled_eq2

CHUNKS = (3, 4)  # the sizes of the two parameters: a norm per tensor would be seen


def quadratic(**settings):
    """L(w) = mean_x (x . w)^2 / 2 = w . A w / 2 with A = mean x x^T, for two tensors of one vector w."""
    torch.manual_seed(0)
    parts = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in CHUNKS]
    radii = settings.pop("radii", (None, None))
    groups = [
        {"params": [p]} if r is None else {"params": [p], "sam_rho": r} for p, r in zip(parts, radii, strict=True)
    ]
    opt = SAM(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **settings)
    return parts, opt, lambda x: (x @ torch.cat(parts)).square().mean() / 2


def examples(*sizes):
    torch.manual_seed(1)
    return [torch.randn(n, sum(CHUNKS), dtype=torch.float64) for n in sizes]


def expected(parts, batches, scale, p=2.0, rise=0.1):
    """Return rho, the loss and the gradient norm: examples count alike, and each batch has its own perturbation."""
    w = flat(parts)
    loss = first_order = norm = 0.0
    for x in batches:
        a = x.T @ x / len(x)
        g = a @ w
        loss += len(x) * (w @ a @ w).item() / 2
        first_order += len(x) * (g @ scaled_eq2(g, scale, p)).item()
        norm += len(x) * torch.linalg.vector_norm(g, dual_exponent(p)).item()
    n = sum(len(x) for x in batches)
    return rise * loss / first_order, loss / n, norm / n


def spans(first, second):
    return torch.cat([torch.full((n,), r, dtype=torch.float64) for n, r in zip(CHUNKS, (first, second), strict=True)])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(
    ("radii", "ratios"),
    [((None, None), (1, 1)), ((None, 0.02), (1, 0.4)), ((0.1, 0.02), (2, 0.4)), ((None, 0.0), (1, 0))],
)
@pytest.mark.parametrize("eta", [None, 0.01])
def test_suggestion_is_the_closed_form(p, radii, ratios, eta):
    """Groups keep the ratio of their radius to opt.rho, here 0.05; the batches are of different sizes."""
    parts, opt, loss_fn = quadratic(rho=0.05, p=p, radii=radii, adaptive=False if eta is None else eta)
    batches = examples(8, 5, 2)
    ratio = spans(*ratios)
    found = suggest_rho(opt, loss_fn, batches)
    scale = ratio if eta is None else ratio * (flat(parts).abs() + eta)
    rho, loss, norm = expected(parts, batches, scale, p)
    assert found.rho == pytest.approx(rho, rel=1e-12)
    assert found.radii == pytest.approx([rho * r for r in ratios], rel=1e-12)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.per_batch == pytest.approx([expected(parts, [x], scale, p)[0] for x in batches], rel=1e-12)
    assert found.spread == pytest.approx(max(found.per_batch) / min(found.per_batch))
    if 0 not in ratios:  # the norm is over parameters with a radius
        assert found.grad_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_examples_that_share_a_perturbation_are_one_gradient(m):
    """The last micro-batches are smaller, and count less."""
    parts, opt, loss_fn = quadratic()
    batches = examples(8, 5, 2)
    pieces = [piece for x in batches for piece in x.split(m)]
    found = suggest_rho(opt, loss_fn, batches, m=m)
    assert found.rho == pytest.approx(expected(parts, pieces, spans(1, 1))[0], rel=1e-12)
    assert len(found.per_batch) == 3


def test_number_of_batches_and_rise():
    parts, opt, loss_fn = quadratic()
    batches = examples(4, 4, 4)
    found = suggest_rho(opt, loss_fn, iter(batches), num_batches=2, rise=0.3)
    assert found.rho == pytest.approx(expected(parts, batches[:2], spans(1, 1), rise=0.3)[0], rel=1e-12)
    alone = [expected(parts, [x], spans(1, 1), rise=0.3)[0] for x in batches[:2]]
    assert found.per_batch == pytest.approx(alone, rel=1e-12)


def test_suggestion_follows_the_scale_of_weights_and_not_of_the_loss():
    """A loss times 1000 has the same rho; weights twice as large, in a model that halves them, have twice the rho."""
    parts, opt, loss_fn = quadratic(rho=0.0)  # a radius of 0 does not matter
    batches = examples(8, 5)
    rho = suggest_rho(opt, loss_fn, batches).rho
    assert suggest_rho(opt, lambda x: 1000 * loss_fn(x), batches).rho == pytest.approx(rho, rel=1e-12)
    for part in parts:
        part.data.mul_(2)
    assert suggest_rho(opt, lambda x: loss_fn(x / 2), batches).rho == pytest.approx(2 * rho, rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"p": math.inf}, {"radii": (None, 0.02)}, {"adaptive": 0.01}], ids=str)
def test_measured_rise_is_the_closed_form(settings):
    """L(w + eps) - L(w) = g . eps + eps . A eps / 2."""
    eta = settings.get("adaptive")
    parts, opt, loss_fn = quadratic(**settings)
    batches = examples(8, 3)
    found = suggest_rho(opt, loss_fn, batches, m=4)
    curve = found.measure([0.0, 10.0, 0.01])
    assert curve.rhos == tuple(sorted([0.0, 0.01, found.rho, 10.0]))
    ratio = spans(1, 0.4) if "radii" in settings else spans(1, 1)
    scale = ratio if eta is None else ratio * (flat(parts).abs() + eta)
    w, pieces = flat(parts), [*batches[0].split(4), batches[1]]
    for rho, rise, line in zip(curve.rhos, curve.rises, curve.first_order, strict=True):
        first = second = 0.0
        for x in pieces:
            a = x.T @ x / len(x)
            eps = rho * scaled_eq2(a @ w, scale, settings.get("p", 2.0))
            first += len(x) * (a @ w @ eps).item() / 11
            second += len(x) * (eps @ a @ eps).item() / 22
        assert line == pytest.approx(first, rel=1e-12)
        assert rise == pytest.approx(first + second, rel=1e-9, abs=1e-15)
    assert curve.loss == pytest.approx(found.loss)
    assert curve.first_order[curve.rhos.index(found.rho)] == pytest.approx(0.1 * found.loss, rel=1e-12)
    assert len(found.measure().rhos) == 9


def test_curvature_and_spread_are_told_in_words():
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = SAM(torch.optim.SGD([w], lr=0.1))
    batches = [torch.ones(2, dtype=torch.float64)]
    linear = suggest_rho(opt, lambda x: (x * w).mean(), batches)
    assert str(linear.measure([0.5])).splitlines() == [
        "       rho       rise  first order  rise / loss",
        "       0.1        0.1          0.1          0.1  <- suggested",
        "       0.5        0.5          0.5          0.5",
    ]
    assert dataclasses.replace(linear, per_batch=(-0.1, 0.1)).spread == math.inf
    assert linear.message == linear.measure().message == ""
    steep = suggest_rho(opt, lambda x: (x * torch.exp(20 * (w - 1))).mean() + 3, batches)  # rises 1.23 times as much
    assert steep.measure().message == ""
    steep = suggest_rho(opt, lambda x: (x * torch.exp(20 * (w - 1))).mean() + 19, batches)  # (e^2 - 1) / 2 times
    assert "rises 3.2 times as much as its gradient predicts" in str(steep.measure())
    # With d = w - 1, L = 1 + d + c d^2 rises by d + c d^2.
    for ratio, is_told in ((0.4, True), (0.6, False), (1.9, False), (2.1, True)):
        bent = suggest_rho(opt, lambda x, c=(ratio - 1) / 0.1: (x * (w + c * (w - 1) ** 2)).mean(), batches)
        curve = bent.measure()
        assert curve.rises[curve.rhos.index(bent.rho)] == pytest.approx(0.1 * ratio)
        assert bool(curve.message) == is_told
    assert curve.rhos == pytest.approx([0.1 * 2.0**k for k in range(-4, 5)])
    falling = suggest_rho(opt, lambda x: (x * torch.sin(10 * w)).mean() + 40, batches)
    assert "measure again" in falling.measure().message
    assert falling.plot() is not None
    three = [torch.ones(2, dtype=torch.float64), torch.full((2,), 3.0, dtype=torch.float64)]
    spread = suggest_rho(opt, lambda x: (x.square() * (w - 1)).mean() + x.mean(), three)
    assert spread.per_batch == pytest.approx([0.1, 0.1 / 3])
    assert spread.message == ""
    three[1] += 0.1
    assert "differ by a factor of 3.1" in str(
        suggest_rho(opt, lambda x: (x.square() * (w - 1)).mean() + x.mean(), three)
    )


def test_a_batch_without_loss_and_gradient_suggests_nothing_alone():
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = SAM(torch.optim.SGD([w], lr=0.1))
    batches = [torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    found = suggest_rho(opt, lambda x: (x * w).mean(), batches)
    assert (found.rho, found.per_batch) == (pytest.approx(0.1), (pytest.approx(0.1), math.inf))
    assert "differ by a factor of inf" in found.message


def test_groups_with_radii_of_their_own_are_told_of_unless_they_are_left_out():
    for radius, told in ((0.1, True), (0.0, False)):
        _, opt, loss_fn = quadratic(radii=(None, radius))
        found = suggest_rho(opt, loss_fn, examples(8))
        assert ("Groups have radii of their own" in str(found)) == told
        for group, radius in zip(opt.param_groups, found.radii, strict=True):
            group["sam_rho"] = radius
        opt.rho = found.rho
        again = suggest_rho(opt, loss_fn, examples(8))
        assert (again.rho, again.radii) == (pytest.approx(found.rho), pytest.approx(found.radii))


def test_plot_has_logarithmic_axes_and_three_lines():
    _, opt, loss_fn = quadratic()
    suggestion = suggest_rho(opt, loss_fn, examples(8))
    curve = suggestion.measure([0.01, 0.1])
    (axes,) = suggestion.plot([0.01, 0.1]).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    measured, line, mark = axes.lines
    assert list(measured.get_xdata()) == list(line.get_xdata()) == list(curve.rhos)
    assert list(measured.get_ydata()) == pytest.approx([rise / curve.loss for rise in curve.rises])
    assert list(line.get_ydata()) == pytest.approx([rise / curve.loss for rise in curve.first_order])
    assert list(mark.get_xdata()) == [suggestion.rho] * 2


def test_a_fall_of_the_loss_has_no_place_on_logarithmic_axes():
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    falling = suggest_rho(SAM(torch.optim.SGD([w], lr=0.1)), lambda x: (x * (2 - (w - 2) ** 2)).mean(), [torch.ones(2)])
    curve = falling.measure([5.0])
    assert [rise > 0 for rise in curve.rises] == [True, False]
    assert math.isnan(falling.plot([5.0]).axes[0].lines[0].get_ydata()[1])


def test_measured_passes_are_forward_passes_and_radii_are_checked():
    _, opt, loss_fn = quadratic()
    modes = []

    def listening(x):
        modes.append(torch.is_grad_enabled())
        return loss_fn(x)

    suggestion = suggest_rho(opt, listening, examples(8))
    assert modes == [True]
    suggestion.measure([0.01])
    assert modes[1:] == [True, False, False]
    with pytest.raises(ValueError, match="rho"):
        suggestion.measure([-1.0])


def test_the_noise_of_a_pass_that_came_before_is_still_repeated_after_a_suggestion():
    """Between the first pass and the block: neither the record of noise nor what `zero_grad()` told is touched."""
    ends = []
    for asks in (False, True):
        model, opt, loader, loss_fn = noisy_case()
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        x, y = next(iter(loader))
        opt.zero_grad()
        loss_fn(x, y).backward()
        if asks:

            def loss_and_zero(x, y):
                opt.zero_grad()
                return loss_fn(x, y)

            suggest_rho(opt, loss_and_zero, [(x, y)])
        with opt.perturbed():
            loss_fn(x, y).backward()
        if asks:
            suggest_rho(opt, loss_and_zero, [(x, y)])
        opt.step()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("whose", ["loader", "sampler", "both"])
def test_generators_of_a_loader_and_of_its_sampler_are_put_back(whose):
    _, opt, loss_fn = quadratic()
    of_loader, of_sampler = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    data = examples(8)[0]
    sampler = RandomSampler(data, generator=of_sampler) if whose != "loader" else None
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=sampler,
        generator=None if whose == "sampler" else of_loader,
        shuffle=sampler is None,
    )
    before = [g.get_state() for g in (of_loader, of_sampler)]
    suggest_rho(opt, loss_fn, loader)
    assert all(torch.equal(g.get_state(), state) for g, state in zip((of_loader, of_sampler), before, strict=True))


class Noisy(nn.Module):
    """Draws from every generator, and has buffers that each pass changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.outside = nn.Parameter(torch.ones(8))  # which the optimizer does not have
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, x):
        self.num_passes += 1
        scale = self.num_passes + random.random() + np.random.rand()  # noqa: NPY002
        hidden = torch.dropout(torch.relu(self.norm(self.first(x))), 0.5, True)
        return self.last(hidden * self.outside) * scale


def noisy_case():
    torch.manual_seed(0)
    model = Noisy()
    base = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1, momentum=0.9)
    opt = SAM(base, model=model)
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
    return model, opt, loader, lambda x, y: nn.functional.cross_entropy(model(x), y)


def snapshot(model, opt, loader):
    grads = [None if p.grad is None else (id(p.grad), p.grad._version, p.grad.tolist()) for p in model.parameters()]
    values = {name: value.tolist() for name, value in model.state_dict(keep_vars=True).items()}
    generators = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002
    generators.append(loader.generator.get_state().tolist())
    metrics = [id(value) for value in vars(opt.metrics).values()]
    return copy.deepcopy([grads, values, generators, metrics, str(opt.state_dict())])


@pytest.mark.parametrize("num_passes", [None, 1, 3, 7])
@pytest.mark.parametrize("steps", [0, 2])
def test_everything_is_left_exactly_as_it_was(steps, num_passes):
    """At the start and during training, in the middle of a two-pass step, and after an exception in any pass."""
    model, opt, loader, loss_fn = noisy_case()
    for x, y in list(loader)[:steps]:
        opt.step_batch(loss_fn, (x, y))
    if steps:  # gradients of a step that is still to come
        opt.zero_grad()
        loss_fn(x, y).backward()
        with opt.perturbed():
            loss_fn(x, y).backward()
    before, calls = snapshot(model, opt, loader), []

    def failing(x, y):
        calls.append(1)
        if len(calls) == num_passes:
            raise KeyboardInterrupt
        return loss_fn(x, y)

    def run():
        return suggest_rho(opt, failing, loader, num_batches=2).measure([0.1])

    if num_passes is None:
        assert run().loss > 0
        assert len(calls) == 2 + 2 * 3  # a gradient per batch; then a gradient and two radii
    else:
        with pytest.raises(KeyboardInterrupt):
            run()
    assert snapshot(model, opt, loader) == before
    if steps:
        opt.step()


def test_passes_of_a_batch_draw_the_same_noise_and_batches_draw_their_own():
    _model, opt, loader, loss_fn = noisy_case()
    drawn = []

    def listening(x, y):
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))  # noqa: NPY002
        return loss_fn(x, y)

    curve = suggest_rho(opt, listening, loader, num_batches=2).measure([0.0])
    assert curve.rises[0] == 0
    first, second, *others = drawn
    assert first != second
    assert others == [first] * 3 + [second] * 3


WRONG = [
    ({"opt": "base"}, TypeError, "opt must be a flatmin.SAM, got SGD"),
    ({"direction": "random"}, ValueError, "direction='random'"),
    ({"maximize": True}, ValueError, "a parameter group has maximize=True"),
    ({"num_batches": 0}, ValueError, "num_batches must be"),
    ({"num_batches": True}, ValueError, "num_batches must be"),
    ({"rise": 0.0}, ValueError, "rise must be"),
    ({"rise": math.inf}, ValueError, "rise must be"),
    ({"rise": "0.1"}, ValueError, "rise must be"),
    ({"m": 9}, ValueError, "m must be at least 1 and at most the 8 examples"),
    ({"batches": []}, ValueError, "batches is empty"),
    ({"radii": (0.0, 0.0)}, ValueError, "Every parameter group has sam_rho=0"),
    ({"radii": (None, 0.1), "rho": 0.0}, ValueError, "Set opt.rho to a positive radius"),
    ({"loss": lambda loss: 0 * loss}, ValueError, "The loss is 0, .* Shift the loss, or choose rho by hand"),
    ({"loss": lambda loss: -loss}, ValueError, "The loss is -.* Shift the loss"),
    ({"loss": lambda loss: loss * math.nan}, ValueError, "The loss is nan.* Look for bad inputs"),
    ({"loss": lambda loss: 1 + 0 * loss}, ValueError, "The gradient is 0 .* Take a few training steps"),
    ({"loss": lambda loss: 1 + (loss - loss).sqrt()}, ValueError, "The gradient's norm is nan"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_errors_say_what_to_do(changes, error, message):
    settings = {key: changes[key] for key in ("direction", "radii", "rho") if key in changes}
    _, opt, loss_fn = quadratic(**settings)
    opt.param_groups[-1]["maximize"] = "maximize" in changes
    change = changes.get("loss", lambda loss: loss)
    options = {key: changes[key] for key in ("m", "num_batches", "rise") if key in changes}
    with pytest.raises(error, match=message):
        suggest_rho(
            opt.base if "opt" in changes else opt,
            lambda x: change(loss_fn(x)),
            changes.get("batches", examples(8)),
            **options,
        )


def test_it_is_refused_inside_a_perturbed_block():
    _, opt, loss_fn = quadratic()
    (x,) = examples(4)
    loss_fn(x).backward()
    with opt.perturbed(), pytest.raises(ValueError, match="suggest_rho\\(\\) was called inside"):
        suggest_rho(opt, loss_fn, [x])


# Several workers: the same radius on each, and the one that a single process finds.

needs_workers = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not available")


def one_process(model, loss_of, batches, settings):
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
    found = suggest_rho(opt, lambda x, y: loss_of(model, (x, y)), batches, num_batches=99)
    curve = found.measure([0.2])
    return [found.rho, found.loss, found.grad_norm, *curve.rises]


def joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@needs_workers
@pytest.mark.parametrize("ddp_settings", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("sync", [False, True])
def test_two_ddp_workers_equal_one_process(two_processes, sync, ddp_settings):
    steps = range(3)
    if sync:
        batches = [joined([ddp_cases.whole_batch(rank, step) for rank in range(2)]) for step in steps]
    else:
        batches = [ddp_cases.whole_batch(rank, step) for rank in range(2) for step in steps]
    known = one_process(ddp_cases.make_model(), ddp_cases.loss_of, batches, {})
    (first, same), others = two_processes.run(ddp_cases.suggestion, sync, ddp_settings)
    assert others == (first, same)
    assert same
    assert first == pytest.approx(known, rel=1e-10)


@needs_workers
@pytest.mark.parametrize("settings", [{}, {"p": 1.0}, {"adaptive": 0.01}], ids=str)
def test_two_fsdp_workers_equal_one_process(two_processes, settings):
    batches = [joined([fsdp_cases.batch(rank, step) for rank in range(2)]) for step in range(2)]
    known = one_process(fsdp_cases.make_model(), fsdp_cases.loss_of, batches, settings)
    first, second = two_processes.run(fsdp_cases.suggestion, settings)
    assert first == second
    assert first == pytest.approx(known, rel=1e-10)


@needs_workers
@pytest.mark.parametrize("sync", [False, True])
def test_hsdp_equals_one_process(four_processes, sync):
    """Without sync_perturbation a replica, which is two ranks, has its own perturbation."""
    shared = [range(4)] if sync else [range(2), range(2, 4)]
    batches = [joined([fsdp_cases.batch(rank, step) for rank in ranks]) for ranks in shared for step in range(2)]
    known = one_process(mesh_cases.make_model(), fsdp_cases.loss_of, batches, {})
    first, *others = four_processes.run(mesh_cases.suggestion, sync)
    assert others == [first] * 3
    assert first == pytest.approx(known, rel=1e-10)
