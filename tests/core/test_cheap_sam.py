"""Cheap SAM: a part of the batch, a weight, a radius of 0, the momentum. All against closed forms in float64."""

import copy
import math

import pytest
import torch
from torch import nn

import references
from flatmin import SAM

RHO, LR = 0.3, 0.1


@pytest.fixture
def problem():
    """Per-example quadratics L_i(w) = w.A_i w / 2 + b_i.w in four dimensions; twelve examples."""
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(12, 4, 4, generator=generator, dtype=torch.float64)
    a = root @ root.mT / 4
    b = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(4, generator=generator, dtype=torch.float64)
    return a, b, w


def mean_gradient(a, b, w):
    return a.mean(0) @ w + b.mean(0)


def part_gradient(a, b, w, indices, rho=RHO):
    """The formula of the method: g_batch(w) + g_part(w + eps) - g_part(w)."""
    of_part = mean_gradient(a[indices], b[indices], w)
    eps = rho * of_part / of_part.norm()
    return mean_gradient(a, b, w) + mean_gradient(a[indices], b[indices], w + eps) - of_part


def make(w, **settings):
    # Two tensors, so that a norm per tensor would fail.
    first, second = nn.Parameter(w[:3].clone()), nn.Parameter(w[3:].clone())
    opt = SAM(torch.optim.SGD([first, second], lr=LR), **({"rho": RHO} | settings))

    def loss_fn(a, b):
        both = torch.cat([first, second])
        return ((both @ a * both).sum(-1) / 2 + b @ both).mean()

    return opt, loss_fn, lambda: torch.cat([first.detach(), second.detach()])


def closure_of(opt, loss_fn, a, b):
    return references.closure_of(opt, lambda: loss_fn(a, b))


@pytest.mark.parametrize(("part", "size"), [(1 / 4, 3), (1 / 2, 6), (1 / 12, 1)])
def test_a_part_is_corrected_at_full_strength(problem, part, size):
    a, b, w = problem
    opt, loss_fn, now = make(w)
    loss = opt.step_batch(loss_fn, (a, b), part=part)
    torch.testing.assert_close(now(), w - LR * part_gradient(a, b, w, range(size)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, loss_of(a, b, w))
    metrics = opt.metrics
    of_part = mean_gradient(a[:size], b[:size], w)
    eps = RHO * of_part / of_part.norm()
    rise = loss_of(a[:size], b[:size], w + eps) - loss_of(a[:size], b[:size], w)
    torch.testing.assert_close(metrics.loss, loss_of(a, b, w))
    torch.testing.assert_close(metrics.perturbed_loss, loss_of(a[:size], b[:size], w + eps))
    torch.testing.assert_close(metrics.sharpness, rise)
    assert metrics.perturbation_norm.item() == pytest.approx(RHO)


def loss_of(a, b, w):
    return (torch.einsum("i,nij,j->n", w, a, w) / 2 + b @ w).mean()


@pytest.mark.parametrize("n", [12, 11, 9])
def test_micro_batches_of_a_part_and_ragged_ones(problem, n):
    """Micro-batches of 2 in half of a batch, whose last one may be smaller."""
    a, b, w = problem
    a, b = a[:n], b[:n]
    size = round(n / 2)
    pieces = [range(i, min(i + 2, size)) for i in range(0, size, 2)]
    correction = torch.zeros_like(w)
    for piece in pieces:
        g = mean_gradient(a[piece], b[piece], w)
        moved = mean_gradient(a[piece], b[piece], w + RHO * g / g.norm())
        correction += len(piece) / size * (moved - g)
    opt, loss_fn, now = make(w)
    opt.step_batch(loss_fn, [a, b], part=0.5, m=2)
    torch.testing.assert_close(now(), w - LR * (mean_gradient(a, b, w) + correction), rtol=1e-12, atol=1e-12)


def test_step_batch_is_exactly_the_closures_it_stands_for(problem):
    a, b, w = problem
    opt, loss_fn, now = make(w)
    first = opt.step_batch(loss_fn, (a, b), part=1 / 2, m=4)
    other, other_fn, other_now = make(w)
    pieces = [closure_of(other, other_fn, a[i:j], b[i:j]) for i, j in ((0, 4), (4, 6))]
    rest = closure_of(other, other_fn, a[6:], b[6:])
    assert torch.equal(first, other.step(pieces, rest=rest, weights=[4, 2, 6]))
    assert torch.equal(now(), other_now())


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "tensor"])
def test_a_batch_is_a_tensor_or_a_collection_of_tensors(problem, kind):
    a, b, w = problem
    opt, loss_fn, now = make(w)
    if kind == "dict":
        opt.step_batch(lambda batch: loss_fn(batch["a"], batch["b"]), {"a": a, "b": b}, part=0.5)
    elif kind == "tensor":
        both = torch.cat([a, b[:, None]], dim=1)
        opt.step_batch(lambda batch: loss_fn(batch[:, :4], batch[:, 4]), both, part=0.5)
    else:
        opt.step_batch(loss_fn, (a, b) if kind == "tuple" else [a, b], part=0.5)
    torch.testing.assert_close(now(), w - LR * part_gradient(a, b, w, range(6)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["closure", "two passes"])
@pytest.mark.parametrize("weight", [0.5, 2.0, 7.0])
def test_a_weight_scales_the_correction(problem, weight, form):
    """On L = w.A w / 2 the step uses A w + c rho A A w / |A w|."""
    a = problem[0][:1]
    b, w = torch.zeros_like(problem[1][:1]), problem[2]
    g = a[0] @ w
    expected = w - LR * (g + weight * RHO * a[0] @ g / g.norm())
    opt, loss_fn, now = make(w, weight=weight)
    if form == "closure":
        opt.step(closure_of(opt, loss_fn, a, b))
    else:
        opt.zero_grad()
        loss_fn(a, b).backward()
        with opt.perturbed():
            loss_fn(a, b).backward()
        opt.step()
    torch.testing.assert_close(now(), expected, rtol=1e-12, atol=1e-12)


def test_backward_passes_after_the_block_add_the_rest_of_the_batch(problem):
    """The two-pass form of a part: losses weighted by hand, the correction at weight 1 / part."""
    a, b, w = problem
    opt, loss_fn, now = make(w, weight=4.0)
    opt.zero_grad()
    (loss_fn(a[:3], b[:3]) / 4).backward()
    with opt.perturbed():
        (loss_fn(a[:3], b[:3]) / 4).backward()
    (loss_fn(a[3:], b[3:]) * 3 / 4).backward()
    opt.step()
    torch.testing.assert_close(now(), w - LR * part_gradient(a, b, w, range(3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["closure", "two passes"])
def test_sam_in_every_third_step_is_a_schedule_of_rho_and_a_weight(form):
    """L = w^2 / 2 in one dimension: eps = rho sign(w), so SAM's step uses w + 3 rho sign(w), the others w."""
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = SAM(torch.optim.SGD([w], lr=LR), rho=0.01, weight=3.0)
    expected, calls = 1.0, []
    for step in range(7):
        num_calls = 0

        def loss():
            nonlocal num_calls
            num_calls += 1
            return (w**2).sum() / 2

        closure = references.closure_of(opt, loss)
        opt.rho = 0.01 if step % 3 == 0 else 0.0
        if form == "closure":
            opt.step(closure)
        else:
            closure()
            if opt.needs_perturbed_pass:
                with opt.perturbed():
                    closure()
            opt.step()
        calls.append(num_calls)
        expected -= LR * (expected + (0.03 if step % 3 == 0 else 0.0))
        assert w.item() == pytest.approx(expected, abs=1e-15)
        plain = step % 3 != 0
        assert (opt.metrics.perturbation_norm.item() == 0) == plain
        assert opt.metrics.perturbed_loss.isnan().item() == (plain or form == "two passes")
    assert calls == [2, 1, 1, 2, 1, 1, 2]


@pytest.mark.parametrize(("base", "key"), [("sgd", "momentum_buffer"), ("adam", "exp_avg")])
def test_the_momentum_as_direction_matches_a_loop_by_hand(problem, base, key):
    a, b, w = problem
    a, b = a[:1], b[:1]

    def build(parameters):
        if base == "adam":
            return torch.optim.Adam(parameters, lr=LR)
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True)

    p = nn.Parameter(w.clone())
    opt = SAM(build([p]), rho=0.5, direction="momentum")
    q = nn.Parameter(w.clone())
    by_hand = build([q])
    calls = 0

    def loss():
        nonlocal calls
        calls += 1
        return loss_of(a, b, p)

    for _ in range(20):
        opt.step(references.closure_of(opt, loss))
        v = by_hand.state[q].get(key)
        at = q.detach() if v is None else q.detach() - 0.5 * v / v.norm()
        q.grad = a[0] @ at + b[0]
        by_hand.step()
    assert calls == 20
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)


def test_the_momentum_as_direction_needs_one(problem):
    a, b, w = problem
    opt, loss_fn, _ = make(w, direction="momentum")
    opt.step(closure_of(opt, loss_fn, a, b))  # the first step is plain
    with pytest.raises(ValueError, match="needs a base optimizer with a momentum"):
        opt.step(closure_of(opt, loss_fn, a, b))


BASES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("form", ["closure", "list", "step_batch", "two passes"])
@pytest.mark.parametrize("off", [{"rho": 0.0}, {"rho": 0.3, "weight": 0.0}], ids=["rho 0", "weight 0"])
@pytest.mark.parametrize("base", BASES)
def test_without_a_correction_a_step_is_exactly_the_base_optimizers(base, off, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))
    other = copy.deepcopy(model)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    opt = SAM(BASES[base](model.parameters()), model=model, **off)
    plain = BASES[base](other.parameters())
    num_calls = 0

    def loss_fn(x, y):
        nonlocal num_calls
        num_calls += 1
        return nn.functional.cross_entropy(model(x), y)

    for seed in range(3):
        torch.manual_seed(seed)
        if form == "closure":
            opt.step(closure_of(opt, loss_fn, x, y))
        elif form == "list":
            opt.step([closure_of(opt, loss_fn, x, y)])
        elif form == "step_batch":
            opt.step_batch(loss_fn, (x, y), part=0.25)
        else:
            opt.zero_grad()
            loss_fn(x, y).backward()
            assert not opt.needs_perturbed_pass
            opt.step()
        torch.manual_seed(seed)
        plain.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        plain.step()
    assert num_calls == 3
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_radius_may_come_and_go_and_is_part_of_the_state_dict(problem):
    a, b, w = problem
    opt, loss_fn, now = make(w, rho=0.0)
    calls = []
    for rho in (0.0, 0.1, 0.0, 0.1):
        opt.rho = rho
        before, calls_before = now(), len(calls)
        opt.step_batch(lambda *batch: calls.append(1) or loss_fn(*batch), (a, b))
        assert len(calls) - calls_before == (2 if rho else 1)
        expected = (
            references.sam_gradient(lambda v: loss_of(a, b, v), before, rho)[0] if rho else mean_gradient(a, b, before)
        )
        torch.testing.assert_close(now(), before - LR * expected, rtol=1e-12, atol=1e-12)
    other, _, _ = make(w, rho=0.7)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.rho == 0.1
    untouched, _, _ = make(w, rho=0.7)
    untouched.load_state_dict(torch.optim.SGD([w[:3], w[3:]], lr=LR).state_dict())  # the base's: without a radius
    assert untouched.rho == 0.7


def test_the_statistics_of_batch_norm_come_from_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    other = copy.deepcopy(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, model=model)
    opt.step_batch(lambda x: model(x).square().mean(), x, part=1 / 4)
    other(x[2:])
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_exception_in_the_rest_leaves_weights_and_statistics_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = copy.deepcopy(model.state_dict())
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, model=model)

    def loss_fn(x):
        if len(x) == 6:
            raise RuntimeError("out of memory")
        return model(x).square().mean()

    with pytest.raises(RuntimeError, match="out of memory"):
        opt.step_batch(loss_fn, torch.randn(8, 3), part=1 / 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):  # torch's own words
        opt.step_batch(loss_fn, torch.randn(8, 3), part=1 / 8)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_groups_asam_and_other_norms_keep_their_meaning_on_a_part(problem):
    """eps of the part is T dual_p(T g_part), T = sam_rho (|w| + eta) per group."""
    a, b, w = problem
    first, second = nn.Parameter(w[:3].clone()), nn.Parameter(w[3:].clone())
    groups = [{"params": [first], "sam_rho": 0.2}, {"params": [second], "sam_rho": 0.6}]
    opt = SAM(torch.optim.SGD(groups, lr=LR), adaptive=0.5, p=math.inf)

    def loss_fn(a, b):
        return loss_of(a, b, torch.cat([first, second]))

    opt.step_batch(loss_fn, (a, b), part=1 / 4)
    scale = torch.tensor([0.2, 0.2, 0.2, 0.6], dtype=torch.float64) * (w.abs() + 0.5)
    of_part = mean_gradient(a[:3], b[:3], w)
    eps = references.scaled_eq2(of_part, scale, math.inf)
    g = mean_gradient(a, b, w) + mean_gradient(a[:3], b[:3], w + eps) - of_part
    now = torch.cat([first.detach(), second.detach()])
    torch.testing.assert_close(now, w - LR * g, rtol=1e-12, atol=1e-12)


BAD_CALLS = [
    ({"part": 0.0}, ValueError, r"part must be in \(0, 1\], got 0.0"),
    ({"part": 1.5}, ValueError, r"part must be in \(0, 1\], got 1.5"),
    ({"part": "half"}, TypeError, "part must be a number"),
    ({"part": 0.01}, ValueError, "less than one example. Use a part of at least 0.08"),
    ({"part": 0.25, "m": 4}, ValueError, "at most the 3 examples"),
    ({"m": 0}, ValueError, "m must be at least 1"),
    ({"m": 2.0}, TypeError, "m must be a whole number"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_CALLS)
def test_a_batch_that_cannot_be_split_that_way(problem, arguments, kind, message):
    a, b, w = problem
    opt, loss_fn, now = make(w)
    with pytest.raises(kind, match=message):
        opt.step_batch(loss_fn, (a, b), **arguments)
    assert torch.equal(now(), w)


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ((torch.ones(3), torch.ones(4)), ValueError, r"one length, at least 1, got \[3, 4\]"),
        ((torch.ones(3), [1, 2, 3]), TypeError, "got a list"),
        ("text", TypeError, "got str"),
        (torch.tensor(1.0), TypeError, "without dimensions"),
        ((), ValueError, r"got \[\]"),
    ],
)
def test_what_is_not_a_batch_of_tensors(problem, batch, kind, message):
    opt, loss_fn, _ = make(problem[2])
    with pytest.raises(kind, match=message):
        opt.step_batch(loss_fn, batch)


def test_arguments_of_step_that_do_not_go_together(problem):
    a, b, w = problem
    opt, loss_fn, now = make(w)
    closure = closure_of(opt, loss_fn, a, b)
    with pytest.raises(ValueError, match="rest needs weights"):
        opt.step(closure, rest=closure)
    with pytest.raises(ValueError, match="3 entries for 1 closures; give one each and one for the rest"):
        opt.step(closure, rest=closure, weights=[1, 2, 3])
    with pytest.raises(ValueError, match="ascent goes with one closure"):
        opt.step(closure, rest=closure, ascent=closure, weights=[1, 2])
    with pytest.raises(ValueError, match="The weight of `rest` must be positive"):
        opt.step(closure, rest=closure, weights=[1, 0])
    with pytest.raises(TypeError, match="rest must be a function"):
        opt.step(closure, rest=[closure], weights=[1, 2])
    weighted, weighted_fn, _ = make(w, weight=2.0)
    closure = closure_of(weighted, weighted_fn, a, b)
    with pytest.raises(ValueError, match="ascent has no gradient of the closure at w"):
        weighted.step(closure, ascent=closure)
    assert torch.equal(now(), w)


def test_a_part_costs_its_share_of_a_pass():
    """Counted in examples that pass forward: n + 2 n_part - n_part."""
    w = nn.Parameter(torch.ones(3))
    opt = SAM(torch.optim.SGD([w], lr=0.1))
    seen = []
    opt.step_batch(lambda x: seen.append(len(x)) or (x @ w).square().mean(), torch.ones(64, 3), part=1 / 8)
    assert seen == [8, 8, 56]
    assert sum(seen) == 64 * 1.125
