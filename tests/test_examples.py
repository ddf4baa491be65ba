"""Every example runs, and what it trains is SAM: the weights are as after two passes written out by hand."""

import copy
import runpy
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_cases
import fsdp_cases
from flatmin import SAM
from references import closure_of

EXAMPLES = Path(__file__).parents[1] / "examples"
# Of third parties, on import or in every run of them.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*(LeafSpec|torch\.jit).*deprecated"),
    pytest.mark.filterwarnings("ignore:The '(train_dataloader|val_dataloader)' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* no accelerator is found"),
]


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def by_hand(model, base, micro_batches, backward, rho, clip=None):
    """Take one step of Eq. 2 and 3: one perturbation from the summed gradient of the micro-batches.

    Both passes begin at the same state of torch's generator, which ends as after one of them. Buffers are those after
    the first pass.
    """

    def both():
        base.zero_grad()
        for micro_batch in micro_batches:
            backward(model, micro_batch)
        return [p.grad.clone() for p in parameters]

    parameters = list(model.parameters())
    w = [p.detach().clone() for p in parameters]
    noise = torch.get_rng_state()
    g = both()
    buffers = [b.clone() for b in model.buffers()]
    norm = torch.cat([t.double().flatten() for t in g]).norm()
    with torch.no_grad():
        for p, t in zip(parameters, g, strict=True):
            p.add_((rho * t.double() / norm).to(p.dtype))
    torch.set_rng_state(noise)
    both()
    with torch.no_grad():
        for p, t in zip(parameters, w, strict=True):
            p.copy_(t)
        for b, t in zip(model.buffers(), buffers, strict=True):
            b.copy_(t)
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    base.step()


def cross_entropy(model, batch, scale=1.0):
    x, y = batch
    (nn.functional.cross_entropy(model(x), y) * scale).backward()


def difference(model, reference):
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def momentum_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("train", "settings", "clip"),
    [
        ("train_with_autocast", {}, None),
        # The scale is a power of 2 and changes no digit of the gradients.
        ("train_with_scaler", {"max_norm": 0.5}, 0.5),
    ],
)
def test_mixed_precision(train, settings, clip):
    amp = example("amp")

    def backward(model, batch):
        amp["loss_of"](model, *batch).backward()

    reference = amp["make_model"]()
    base = momentum_sgd(reference)
    for _ in range(5):
        by_hand(reference, base, [amp["make_data"]()], backward, rho=0.05, clip=clip)
    assert difference(amp[train](5, **settings), reference) < 1e-6


def test_gradient_accumulation_is_a_step_of_the_whole_batch():
    accumulation = example("gradient_accumulation")
    assert accumulation["main"]() < 1e-6
    reference = accumulation["make_model"]()
    base = momentum_sgd(reference)
    for _ in range(5):
        by_hand(reference, base, [accumulation["make_data"]()], cross_entropy, rho=0.1)
    assert difference(accumulation["train"](20), reference) < 1e-6


def test_m_sharpness_averages_the_sam_gradients_of_micro_batches():
    m_sharpness = example("m_sharpness")
    x, y = m_sharpness["make_data"]()
    reference = m_sharpness["make_model"]()
    base = momentum_sgd(reference)
    keep = torch.optim.SGD(reference.parameters(), lr=0.0)  # leaves the SAM gradient where it is
    for _ in range(5):
        mean = [torch.zeros_like(p) for p in reference.parameters()]
        for batch in zip(x.split(40), y.split(40), strict=True):
            by_hand(reference, keep, [batch], cross_entropy, rho=0.1)
            for total, p in zip(mean, reference.parameters(), strict=True):
                total += p.grad * len(batch[0]) / len(x)
        for total, p in zip(mean, reference.parameters(), strict=True):
            p.grad = total
        base.step()
    model, sharpness = m_sharpness["train"](40, 5)
    assert difference(model, reference) < 1e-6
    # A perturbation for each micro-batch climbs higher than one for all.
    assert m_sharpness["train"](8, 5)[1] > sharpness > m_sharpness["train"](96, 5)[1] > 0


def test_cheap_sam_corrects_a_part_and_passes_the_rest_once():
    cheap = example("cheap_sam")
    reference = cheap["make_model"]()
    opt, generator = SAM(momentum_sgd(reference), rho=0.05, model=reference), torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(64, 16, generator=generator)
        y = x[:, :4].argmax(dim=1)
        part, rest = (
            closure_of(opt, lambda rows=rows: nn.functional.cross_entropy(reference(x[rows]), y[rows]))
            for rows in (slice(16), slice(16, 64))
        )
        opt.step(part, rest=rest, weights=[16, 48])
    model, num_passed = cheap["train"](1 / 4, 3)
    assert difference(model, reference) < 1e-6
    assert num_passed == 3 * 64 * 1.25


def test_a_resumed_run_ends_with_the_same_bits():
    whole, resumed = example("checkpoint_resume")["main"]()
    assert difference(whole, resumed) == 0


def test_lightning_automatic_optimization():
    lightning = example("lightning_automatic")
    model = lightning["main"](num_epochs=2)
    reference = lightning["Classifier"]()
    base = momentum_sgd(reference)
    for _ in range(2):
        for batch in lightning["make_data"]():
            by_hand(reference, base, [batch], lambda m, b: cross_entropy(m.net, b), rho=0.1, clip=1.0)
    assert difference(model, reference) < 1e-6
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        lightning["main"](accumulate_grad_batches=2)


def test_lightning_manual_optimization():
    lightning = example("lightning_manual")
    model = lightning["main"](num_epochs=2)
    reference = lightning["Classifier"]()
    base = momentum_sgd(reference)
    for _ in range(2):
        for batch in lightning["make_data"]():
            halves = list(zip(*(part.split(32) for part in batch), strict=True))
            backward = lambda m, b: cross_entropy(m.net, b, scale=len(b[0]) / 64)  # noqa: E731
            by_hand(reference, base, halves, backward, rho=0.1, clip=1.0)
    assert difference(model, reference) < 1e-6


def test_accelerate():
    accelerate = example("accelerate_loop")
    model = accelerate["main"](num_epochs=2)
    reference = accelerate["make_model"]()
    base = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for _ in range(2):
        for batch in accelerate["make_data"]():
            by_hand(reference, base, [batch], cross_entropy, rho=0.1, clip=1.0)
    assert difference(model, reference) < 1e-6


@pytest.mark.parametrize("accumulation", [1, 3])
def test_hugging_face_trainer(accumulation):
    trainers = example("hf_trainer")
    steps, noise = [], []

    class Recording(trainers["SAMTrainer"]):
        """Notes the micro-batches of each step and the state of the generator before it."""

        def training_step(self, model, inputs, num_items_in_batch=None):
            if not self._micro_batches:
                steps.append([])
                noise.append(torch.get_rng_state())
            steps[-1].append({name: value.clone() for name, value in inputs.items()})
            return super().training_step(model, inputs, num_items_in_batch)

    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1, "max_grad_norm": 0.1}
    trainer = trainers["main"](Recording, gradient_accumulation_steps=accumulation, num_train_epochs=1, **settings)
    # 8 batches: the last step has fewer micro-batches.
    assert [len(micro_batches) for micro_batches in steps] == ([1] * 8 if accumulation == 1 else [3, 3, 2])

    reference = trainers["make_model"]().train()
    base = torch.optim.SGD(reference.parameters(), lr=0.1)
    for micro_batches, state in zip(steps, noise, strict=True):
        torch.set_rng_state(state)
        by_hand(reference, base, micro_batches, lambda m, b: m(**b).loss.backward(), rho=0.01, clip=0.1)
    assert difference(trainer.model, reference) < 1e-6


def test_ddp(two_processes):
    closure, perturbed, shared = two_processes.run(ddp_cases.train_example, EXAMPLES / "ddp.py")[0]
    ddp = example("ddp")
    parts = [ddp["make_data"](rank) for rank in range(2)]
    own, same = ddp["make_model"](), ddp["make_model"]()
    own_base, same_base = momentum_sgd(own), momentum_sgd(same)
    for _ in range(ddp["NUM_STEPS"]):
        by_hand(same, same_base, parts, lambda m, b: cross_entropy(m, b, scale=0.5), rho=0.1)
        copies = [copy.deepcopy(own) for _ in parts]
        for worker, part in zip(copies, parts, strict=True):
            by_hand(worker, torch.optim.SGD(worker.parameters(), lr=0.0), [part], cross_entropy, rho=0.1)
        for p, *workers in zip(own.parameters(), *(worker.parameters() for worker in copies), strict=True):
            p.grad = sum(q.grad for q in workers) / 2
        own_base.step()
    for saved, reference in [(closure, own), (perturbed, own), (shared, same)]:
        assert max((saved[name] - t).abs().max().item() for name, t in reference.state_dict().items()) < 1e-6
    assert difference(own, same) > 1e-5  # neither passes for the other


def test_fsdp2(two_processes):
    saved = two_processes.run(fsdp_cases.train_example, EXAMPLES / "fsdp2.py")[0]
    fsdp2 = example("fsdp2")
    reference = fsdp2["make_model"]()
    base = torch.optim.AdamW(reference.parameters(), lr=0.01)
    parts = [fsdp2["make_data"](rank) for rank in range(2)]
    for _ in range(fsdp2["NUM_STEPS"]):
        by_hand(reference, base, parts, lambda m, b: cross_entropy(m, b, scale=0.5), rho=0.1)
    assert max((saved[name] - t).abs().max().item() for name, t in reference.state_dict().items()) < 1e-6


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_distributed_examples_run_alone(name, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for variable, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(variable, str(value))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "rank 0" in capsys.readouterr().out
