"""The code of docs/language-models.md trains with SAM, and what the page says of it holds."""

import copy
import importlib
from functools import partial

import pytest
import torch
from torch import nn

from flatmin import SAM, suggest_rho
from references import closure_of, eq2, flat, unflat
from test_examples import by_hand, example
from test_recipes import run_recipe

pytestmark = pytest.mark.filterwarnings(r"ignore:.*(LeafSpec|torch\.jit|register_constant).*")
char = example("char_transformer")
run_block = partial(run_recipe, page="language-models", __name__="page")


def make_model(dropout=0.0):
    torch.manual_seed(0)
    model = char["CharTransformer"](11)
    for block in model.blocks:
        block.mlp.append(nn.Dropout(dropout))
    return model


def make_batch():
    windows = torch.randint(11, (16, 9), generator=torch.Generator().manual_seed(1))
    return windows[:, :-1], windows[:, 1:]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def step(opt, model, x, y):
    opt.step(closure_of(opt, lambda: loss_of(model, x, y)))


def assert_same(model, reference, **tolerance):
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def test_a_step_on_a_part_is_the_gradient_of_the_batch_and_the_correction_of_the_part():
    model, (x, y) = make_model().double(), make_batch()
    reference, parameters = copy.deepcopy(model), list(model.parameters())
    run_block("Language models and adapters", model=model, tokens=x, targets=y)

    def grads(x, y):
        return flat(torch.autograd.grad(loss_of(reference, x, y), reference.parameters()))

    of_batch, of_part = grads(x, y), grads(x[:2], y[:2])
    eps = unflat(0.02 * of_part / of_part.norm(), parameters)
    with torch.no_grad():
        for p, e in zip(reference.parameters(), eps, strict=True):
            p.add_(e)
    at_eps = grads(x[:2], y[:2])
    with torch.no_grad():
        for p, e in zip(reference.parameters(), eps, strict=True):
            p.sub_(e)
    for p, g in zip(reference.parameters(), unflat(of_batch + at_eps - of_part, parameters), strict=True):
        p.grad = g
    torch.optim.AdamW(reference.parameters(), lr=1e-3).step()
    assert_same(model, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("at_start", [True, False])
def test_lora_moves_weights_within_the_spaces_of_its_adapters(at_start):
    """W moves by s (eps_B A + B eps_A + eps_B eps_A): of rank 2 r, and of rank r in A's row space where B is 0."""
    original, (x, y) = make_model(), make_batch()
    names = run_block("LoRA", model=original)
    model, opt = names.model.double(), names.opt
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    if not at_start:
        with torch.no_grad():
            for name, p in trained.items():
                if "lora_B" in name:
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    layer = model.base_model.model.blocks[0].attend

    def weight():
        return (layer.get_base_layer().weight + layer.get_delta_weight("default")).detach().clone()

    before, frozen = weight(), layer.get_base_layer().weight.clone()
    A, B = (getattr(layer, f"lora_{which}")["default"].weight.detach().clone() for which in "AB")
    loss_of(model, x, y).backward()
    with opt.perturbed():
        moved = weight() - before
        eps_A, eps_B = layer.lora_A["default"].weight - A, layer.lora_B["default"].weight - B
        loss_of(model, x, y).backward()
    expected = layer.scaling["default"] * (eps_B @ A + B @ eps_A + eps_B @ eps_A)
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(frozen, layer.get_base_layer().weight)
    assert torch.linalg.matrix_rank(moved) == (2 if at_start else 4)
    outside_rows = moved - moved @ torch.linalg.pinv(A) @ A
    assert (outside_rows.norm() < 1e-9 * moved.norm()) == at_start
    # Of first order in eps, nothing is left outside of both spaces.
    both = (outside_rows - B @ torch.linalg.pinv(B) @ outside_rows).norm() if not at_start else 0.0
    assert both <= layer.scaling["default"] * eps_B.norm() * eps_A.norm() + 1e-12
    assert (eps_A.norm() == 0) == at_start


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_change_no_bit(use_reentrant):
    x, y = make_batch()
    plain, checkpointed = make_model(dropout=0.3), make_model(dropout=0.3)
    run_block("Gradient checkpointing", model=checkpointed, use_reentrant=use_reentrant)
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        opt = SAM(torch.optim.AdamW(model.parameters(), lr=1e-3), rho=0.1, model=model)
        for _ in range(2):
            step(opt, model, x, y)
    assert_same(plain, checkpointed, rtol=0, atol=0)
    assert not torch.equal(plain.head.weight, make_model().head.weight)


@pytest.mark.filterwarnings("ignore")  # their own, on import
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_8_bit_optimizers_get_sams_gradient(library):
    AdamW8bit = importlib.import_module(f"{library}.optim").AdamW8bit
    x, y = make_batch()
    model, reference = make_model(), make_model()
    base = AdamW8bit(reference.parameters(), lr=1e-3)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        opt = run_block("8-bit optimizers", model=model, AdamW8bit=AdamW8bit).opt
        for _ in range(2):
            step(opt, model, x, y)
            by_hand(reference, base, [(x, y)], lambda m, batch: loss_of(m, *batch).backward(), rho=0.02)
    # A moment that rounding moves to the next of 256 values moves its weight by a small part of the learning rate.
    assert_same(model, reference, rtol=0, atol=0.05 * 1e-3)
    moment = opt.state[model.blocks[0].mlp[0].weight]["exp_avg" if library == "torchao" else "state1"]
    assert getattr(moment, "codes", moment).dtype == torch.uint8


def test_a_tied_embedding_counts_once():
    model, (x, y) = make_model(), make_batch()
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=1e-3), rho=0.5, model=model)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, x, y).backward()
    with opt.perturbed():
        assert model.head.weight is model.embed.weight
        eps = flat(model.parameters()) - flat(before)
        loss_of(model, x, y).backward()
    opt.step()
    assert eps.norm() == pytest.approx(0.5, rel=1e-5)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_functional_sam_takes_the_gradient_in_the_outputs_from_w(rho):
    """J(w + eps)^T dL/dz(w), with every derivative taken on its own."""
    model, (x, y) = make_model().double(), make_batch()
    reference, lr = copy.deepcopy(model), 0.1
    opt = SAM(torch.optim.SGD(model.parameters(), lr=lr), rho=rho, model=model)
    if rho:
        run_block("Functional SAM", model=model, opt=opt, tokens=x, targets=y)
    else:
        step(opt, model, x, y)
    parameters = list(reference.parameters())
    z = reference(x).detach().requires_grad_()
    (dz,) = torch.autograd.grad(nn.functional.cross_entropy(z.flatten(0, 1), y.flatten()), z)
    w, g = flat(parameters), flat(torch.autograd.grad(loss_of(reference, x, y), parameters))
    with torch.no_grad():
        for p, value in zip(parameters, unflat(w + eq2(g, rho, 2.0), parameters), strict=True):
            p.copy_(value)
    pulled = flat(torch.autograd.grad(reference(x), parameters, dz))
    torch.testing.assert_close(flat(model.parameters()), w - lr * pulled, rtol=1e-9, atol=1e-10)


def test_the_example_trains_with_every_method_and_suggests_a_radius():
    lowest = char["main"](num_steps=2)
    assert set(lowest) == {"AdamW", "SAM", "SAM on 1/8"}
    assert len(set(lowest.values())) == 3
    plain, _ = char["train"](None, 2)
    train_text, _, num_characters = char["make_text"]()
    torch.manual_seed(0)
    model, generator = char["CharTransformer"](num_characters), torch.Generator().manual_seed(1)
    base = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(base, max_lr=5e-3, total_steps=2, pct_start=0.1)
    for _ in range(2):
        base.zero_grad()
        loss_of(model, *char["batch_of"](train_text, generator)).backward()
        base.step()
        schedule.step()
    assert_same(plain, model)


def test_suggest_rho_of_a_transformer():
    model, batch = make_model(), make_batch()
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)
    run_block("The radius", opt=opt, suggest_rho=suggest_rho, loss_fn=partial(loss_of, model), loader=[batch])
    loss = loss_of(model, *batch)
    g = flat(torch.autograd.grad(loss, model.parameters()))
    assert opt.rho == pytest.approx(0.01 * float(loss.detach()) / float(g.norm()), rel=1e-4)
