"""Every block of docs/variants.md trains as its paper's formula says, written out slowly in float64."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from flatmin import SAM, norm_parameters
from references import eq2, flat, scaled_eq2, unflat
from test_recipes import ROOT, run_recipe

LR, MOMENTUM, NUM_STEPS = 0.1, 0.9, 4
run_block = partial(run_recipe, page="variants")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(i, n=32):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    return x, (x.sum(dim=1) * 2).long().remainder(3)


class Case:
    """A model with SGD for the page's code, and its weights as a flat vector for the formula."""

    def __init__(self):
        self.model = make_model()
        self.base = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.names = {"model": self.model, "base": self.base, "loss_fn": self.loss_fn}
        self._copy = copy.deepcopy(self.model)
        self.shapes = list(self._copy.parameters())
        self.w, self.v = flat(self.shapes), 0.0

    def loss_fn(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)

    def outputs(self, w, x):
        named = zip(dict(self._copy.named_parameters()), unflat(w, self.shapes), strict=True)
        return torch.func.functional_call(self._copy, dict(named), (x,))

    def grad(self, w, x, y, weights=None):
        w = w.clone().requires_grad_()
        losses = nn.functional.cross_entropy(self.outputs(w, x), y, reduction="none")
        return torch.autograd.grad(losses.mean() if weights is None else (weights * losses).sum(), w)[0]

    def sgd(self, g):
        """The step of torch.optim.SGD with momentum."""
        self.v = MOMENTUM * self.v + g
        self.w = self.w - LR * self.v

    def step(self, opt, x, y):
        def closure():
            opt.zero_grad()
            loss = self.loss_fn(x, y)
            loss.backward()
            return loss

        opt.step(closure)

    def train(self, opt, gradient):
        """Take steps with both; ``gradient(w, x, y)`` is the formula's."""
        for i in range(NUM_STEPS):
            x, y = batch(i)
            self.step(opt, x, y)
            self.sgd(gradient(self.w, x, y))
        self.check()

    def check(self):
        torch.testing.assert_close(flat(self.model.parameters()), self.w, rtol=1e-9, atol=1e-11)


@pytest.fixture
def case():
    return Case()


def per_tensor(case, function):
    """Apply a function to each tensor of a flat vector."""
    return lambda g: flat([function(t) for t in unflat(g, case.shapes)])


def test_sam(case):
    opt = run_block("SAM", **case.names).opt
    case.train(opt, lambda w, x, y: case.grad(w + eq2(case.grad(w, x, y), 0.05, 2.0), x, y))


def test_asam(case):
    opt = run_block("ASAM", **case.names).opt

    def gradient(w, x, y):
        return case.grad(w + scaled_eq2(case.grad(w, x, y), 0.5 * (w.abs() + 0.01), 2.0), x, y)

    case.train(opt, gradient)


def test_m_sam(case):
    x, y = batch(0, n=40)
    run_block("m-SAM", x=x, y=y, **case.names)
    total = torch.zeros_like(case.w)
    for part in (slice(16), slice(16, 32), slice(32, 40)):
        g = case.grad(case.w, x[part], y[part])
        total += len(x[part]) / 40 * case.grad(case.w + eq2(g, 0.05, 2.0), x[part], y[part])
    case.sgd(total)
    case.check()


def test_p_norms(case):
    opt = run_block("p-norms", **case.names).opt
    case.train(opt, lambda w, x, y: case.grad(w + 0.005 * case.grad(w, x, y).sign(), x, y))


def test_sam_on(case):
    opt = run_block("SAM-ON", norm_parameters=norm_parameters, **case.names).opt
    is_norm = flat([torch.full_like(p, name.startswith("1.")) for name, p in case.model.named_parameters()])
    case.train(opt, lambda w, x, y: case.grad(w + eq2(is_norm * case.grad(w, x, y), 0.5, 2.0), x, y))


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_wsam(case, gamma):
    """Yue et al., Eq. 5: the gradient of (1 - 2 gamma) / (1 - gamma) L + gamma / (1 - gamma) L(w + eps)."""
    opt = run_block("WSAM", gamma=gamma, **case.names).opt

    def gradient(w, x, y):
        g = case.grad(w, x, y)
        at_eps = case.grad(w + eq2(g, 0.05, 2.0), x, y)
        return (1 - 2 * gamma) / (1 - gamma) * g + gamma / (1 - gamma) * at_eps

    case.train(opt, gradient)


def test_wsam_with_decoupling(case):
    """Yue et al., Algorithm 1: w - lr (what the base optimizer makes of g) - lr gamma / (1 - gamma) (g_eps - g)."""
    opt = run_block("WSAM", 1, gamma=0.8, **case.names).opt
    for i in range(NUM_STEPS):
        x, y = batch(i)
        case.step(opt, x, y)
        g = case.grad(case.w, x, y)
        correction = case.grad(case.w + eq2(g, 0.05, 2.0), x, y) - g
        case.sgd(g)
        case.w = case.w - LR * 4 * correction
    case.check()


def test_wsam_with_decoupling_uses_the_rate_of_each_group_and_leaves_out_one_without_a_radius(case):
    """The first group has sam_rho 0 and another learning rate; its gradient differs at w + eps all the same."""
    first, *others = case.model.parameters()
    case.base = torch.optim.SGD([{"params": [first], "lr": 0.5, "sam_rho": 0.0}, {"params": others}], lr=LR)
    opt = run_block("WSAM", 1, gamma=0.8, **(case.names | {"base": case.base})).opt
    x, y = batch(0)
    case.step(opt, x, y)
    moves = flat([torch.full_like(p, p is not first) for p in case.model.parameters()])
    rates = flat([torch.full_like(p, 0.5 if p is first else LR) for p in case.model.parameters()])
    g = case.grad(case.w, x, y)
    correction = case.grad(case.w + eq2(moves * g, 0.05, 2.0), x, y) - g
    case.w = case.w - rates * (g + 4 * correction)
    case.check()


def test_gsam(case):
    """Zhuang et al., Algorithm 1: with angles and unit vectors, as there."""
    opt = run_block("GSAM", **case.names).opt

    def gradient(w, x, y):
        g = case.grad(w, x, y)
        at_eps = case.grad(w + eq2(g, 0.05, 2.0), x, y)
        cosine = (g @ at_eps) / (g.norm() * at_eps.norm())
        parallel = g.norm() * cosine * at_eps / at_eps.norm()
        return at_eps - 0.1 * (g - parallel)

    case.train(opt, gradient)


def test_gsam_at_a_zero_gradient_stays_finite(case):
    gsam = run_block("GSAM", **case.names).gsam
    assert all(torch.equal(g, torch.zeros(2)) for g in gsam([torch.zeros(2)], [torch.zeros(2)]))


def test_f_sam(case):
    """Li et al., Algorithm 1: m = lambda m + (1 - lambda) g; eps along g - sigma m."""
    opt = run_block("F-SAM", **case.names).opt
    m = torch.zeros_like(case.w)

    def gradient(w, x, y):
        nonlocal m
        g = case.grad(w, x, y)
        m = 0.9 * m + 0.1 * g
        return case.grad(w + eq2(g - 1.0 * m, 0.05, 2.0), x, y)

    case.train(opt, gradient)


def test_f_sam_survives_an_infinite_gradient_and_a_checkpoint(case):
    names = run_block("F-SAM", **case.names)
    opt, other = names.opt, names.Friendly()
    opt.load_state_dict(opt.state_dict())  # before there is an average
    case.step(opt, *batch(0))
    names.opt.direction([g * torch.inf for g in opt.direction.average])
    assert all(m.isfinite().all() for m in opt.direction.average)
    other.load_state_dict(opt.state_dict()["param_groups"][0]["sam_direction"])
    assert torch.equal(flat(other.average), flat(opt.direction.average))


def test_sparse_sam(case):
    opt = run_block("Sparse SAM", **case.names).opt

    def gradient(w, x, y):
        g = case.grad(w, x, y)
        keep = torch.zeros_like(g)
        keep[g.abs().argsort(descending=True)[: len(g) // 2]] = 1
        return case.grad(w + eq2(keep * g, 0.05, 2.0), x, y)

    case.train(opt, gradient)


def test_layer_wise_sam(case):
    opt = run_block("Layer-wise SAM", **case.names).opt

    def gradient(w, x, y):
        unit = per_tensor(case, lambda g: g / g.norm())(case.grad(w, x, y))
        return case.grad(w + 0.05 / len(case.shapes) ** 0.5 * unit, x, y)

    case.train(opt, gradient)


def test_zsharp(case):
    """Yun, Algorithm 1: keep what has a |z-score| of at least its 95 % quantile in each layer."""
    opt = run_block("ZSharp", **case.names).opt

    def keep(g):
        scores = ((g - g.mean()) / g.std()).abs()
        return g * (scores >= scores.flatten().quantile(0.95, interpolation="nearest"))

    case.train(opt, lambda w, x, y: case.grad(w + eq2(per_tensor(case, keep)(case.grad(w, x, y)), 0.05, 2.0), x, y))


def test_msam(case):
    """Becker et al., Algorithm 1: the gradient at w - rho v / |v|; the first step has no momentum."""
    opt = run_block("MSAM", **case.names).opt

    def gradient(w, x, y):
        return case.grad(w if isinstance(case.v, float) else w - 2.0 * case.v / case.v.norm(), x, y)

    case.train(opt, gradient)


@pytest.mark.parametrize("heading", ["RST", "Late phase", "Every k-th step"])
def test_schedules(case, heading):
    k = 3
    opt = None if heading == "Every k-th step" else SAM(case.base, rho=0.05, model=case.model)
    loader = [batch(i) for i in range(8)]
    torch.manual_seed(3)
    coins = [bool(torch.rand(()) < 0.5) for _ in loader]
    assert {True, False} <= set(coins)
    torch.manual_seed(3)
    run_block(heading, opt=opt, loader=loader, num_steps=8, k=k, **case.names)
    for step, (x, y) in enumerate(loader):
        g = case.grad(case.w, x, y)
        correction = case.grad(case.w + eq2(g, 0.05, 2.0), x, y) - g
        factor = {"RST": coins[step], "Late phase": step == 7, "Every k-th step": k * (step % k == 0)}[heading]
        case.sgd(g + factor * correction)
    case.check()


def test_ae_sam(case):
    """Jiang et al., Section 3.2: SAM where |g|^2 >= mu + c sigma."""
    opt = SAM(case.base, rho=0.05, model=case.model)
    loader = [batch(i) for i in range(8)]
    settings = {"delta": 0.9, "low": -1.0, "high": 1.0, "num_steps": 8}
    run_block("AE-SAM", opt=opt, loader=loader, **settings, **case.names)
    mu = variance = 0.0
    used = []
    for t, (x, y) in enumerate(loader):
        g = case.grad(case.w, x, y)
        mu = 0.9 * mu + 0.1 * g.norm() ** 2
        variance = 0.9 * variance + 0.1 * (g.norm() ** 2 - mu) ** 2
        c = t / 8 * -1.0 + (1 - t / 8) * 1.0
        used.append(bool(g.norm() ** 2 >= mu + c * variance**0.5))
        case.sgd(case.grad(case.w + eq2(g, 0.05, 2.0), x, y) if used[-1] else g)
    assert {True, False} <= set(used)
    case.check()


def test_rw_sam(case):
    x, y = batch(0)
    norms = torch.stack([case.grad(case.w, x[i : i + 1], y[i : i + 1]).norm() for i in range(len(x))])
    opt = SAM(case.base, rho=0.05, model=case.model)

    def closure():
        opt.zero_grad()
        loss = case.loss_fn(x, y)
        loss.backward()
        return loss

    def losses_of(x, y):
        return nn.functional.cross_entropy(case.model(x), y, reduction="none")

    names = {"gradient_norms": norms, "temperature": 0.5, "losses_of": losses_of, "closure": closure}
    run_block("RW-SAM", opt=opt, x=x, y=y, **names, **case.names)
    weights = (norms / 0.5).exp() / (norms / 0.5).exp().sum()
    case.sgd(case.grad(case.w + eq2(case.grad(case.w, x, y, weights), 0.05, 2.0), x, y))
    case.check()


def test_functional_sam(case):
    """Singh et al.: J(w + eps)^T dL/dz(w)."""
    x, y = batch(0)
    opt = SAM(case.base, rho=0.05, model=case.model)
    run_block("Functional SAM", opt=opt, x=x, y=y, loss_of_outputs=nn.functional.cross_entropy, **case.names)
    z = case.outputs(case.w, x).detach().requires_grad_()
    (dz,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), z)
    there = (case.w + eq2(case.grad(case.w, x, y), 0.05, 2.0)).requires_grad_()
    case.sgd(torch.autograd.grad(case.outputs(there, x), there, dz)[0])
    case.check()


def test_cheap_sam(case):
    x, y = batch(0)
    run_block("Cheap SAM", x=x, y=y, **case.names)
    g = case.grad(case.w, x[:4], y[:4])
    correction = case.grad(case.w + eq2(g, 0.02, 2.0), x[:4], y[:4]) - g
    case.sgd(case.grad(case.w, x, y) + correction)
    case.check()


def test_several_optimizers(case):
    """Each optimizer steps by itself with the gradient at w + eps, whose norm is joint."""
    opt = run_block("Several optimizers", **case.names).opt
    reference = make_model()
    muon = torch.optim.Muon([p for p in reference.parameters() if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in reference.parameters() if p.ndim != 2], lr=1e-3)
    for i in range(NUM_STEPS):
        x, y = batch(i)
        case.step(opt, x, y)
        w = flat(reference.parameters())
        g = case.grad(w + eq2(case.grad(w, x, y), 0.05, 2.0), x, y)
        for p, grad in zip(reference.parameters(), unflat(g, case.shapes), strict=True):
            p.grad = grad
        muon.step()
        adamw.step()
    for p, q in zip(case.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)  # Muon computes in bfloat16


def test_every_block_of_the_page_is_tested():
    page = (ROOT / "docs/variants.md").read_text()
    with_code = {section.splitlines()[0] for section in page.split("\n## ")[1:] if "```python" in section}
    tests = Path(__file__).read_text()
    run = set(re.findall(r'run_block\("([^"]+)"', tests)) | {"RST", "Late phase", "Every k-th step"}
    assert with_code == run
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    headings = {re.sub(r"[^a-z0-9]+", "-", heading.lower()) for heading in with_code}
    assert links == headings, "the table has every section"


# Groups for SAM-ON.


class RMSNorm(nn.Module):  # as Hugging Face's
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class PreNorm(nn.Module):  # a block with a norm inside
    def __init__(self):
        super().__init__()
        self.norm, self.linear = RMSNorm(), nn.Linear(4, 4)


class Scale(nn.BatchNorm2d):
    pass


NORMS = [
    *(nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.LayerNorm(4)),
    *(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), RMSNorm(), Scale(4)),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_norm_parameters_are_those_of_normalization_layers(norm):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    perturbed, others = norm_parameters(model)
    assert [id(p) for p in perturbed["params"]] == [id(p) for p in norm.parameters()]
    assert [id(p) for p in others["params"]] == [id(p) for p in model[0].parameters()]
    assert "sam_rho" not in perturbed
    assert others["sam_rho"] == 0.0


def test_norm_parameters_of_models_of_libraries():
    import timm
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    for model, expected in (
        (timm.create_model("efficientnet_lite0"), r"bn\d*\."),
        (timm.create_model("vit_tiny_patch16_224"), r"norm\d*\."),
        (LlamaForCausalLM(LlamaConfig(**size)), r"norm\."),
    ):
        perturbed = {id(p) for p in norm_parameters(model)[0]["params"]}
        for name, p in model.named_parameters():
            assert (id(p) in perturbed) == bool(re.search(expected, name)), name


def test_norm_parameters_counts_own_parameters_once():
    block = PreNorm()
    model = nn.ModuleList([block, block])
    perturbed, others = norm_parameters(model)
    assert [id(p) for p in perturbed["params"]] == [id(block.norm.weight)]
    assert len(others["params"]) == 2
    (only,) = norm_parameters(nn.LayerNorm(4))
    assert len(only["params"]) == 2


@pytest.mark.parametrize(
    ("model", "error"),
    [(nn.Linear(2, 2), ValueError), (nn.BatchNorm1d(4, affine=False), ValueError), (iter([]), TypeError)],
)
def test_norm_parameters_needs_a_normalization_layer(model, error):
    with pytest.raises(error, match="model"):
        norm_parameters(model)
