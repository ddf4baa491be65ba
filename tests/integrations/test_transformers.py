"""SAM in the Hugging Face Trainer, compared with plain loops."""

import copy
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
import transformers_cases as cases
from transformers import Trainer

from flatmin import SAM, suggest_rho
from flatmin.integrations.transformers import SAMMixin, SAMTrainer
from two_processes import as_under_torchrun

pytestmark = pytest.mark.filterwarnings(r"ignore:.*pin_memory.*", "ignore:.*Gradient accumulation.*")


class Recording(SAMTrainer):
    """Keeps the micro-batches of every step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.num_items = [], []

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self._micro_batches:
            self.steps.append([])
            self.num_items.append(num_items_in_batch)
        self.steps[-1].append({name: value.clone() for name, value in inputs.items()})
        return super().training_step(model, inputs, num_items_in_batch)


def difference(a, b):
    return max((s - t).abs().max().item() for s, t in zip(a.values(), b.values(), strict=True))


def plain_loop(steps, loss_of, rho=0.1, part=1.0, clip=None, language_model=False, lr=0.1, **settings):
    """Return the weights and losses of the same steps in a plain loop on whole batches."""
    model = cases.make_model(language_model).train()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=lr), rho=rho, model=model, **settings)
    if clip is not None:
        opt.base.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), clip) and None)
    losses = []
    for micro_batches in steps:
        # The part of the batch is made of the parts of its micro-batches.
        cut = [round(part * len(b["labels"])) for b in micro_batches]
        pieces = [{k: v[:c] for k, v in b.items()} for b, c in zip(micro_batches, cut, strict=True)]
        pieces += [{k: v[c:] for k, v in b.items()} for b, c in zip(micro_batches, cut, strict=True)]
        batch = {k: torch.cat([piece[k] for piece in pieces]) for k in micro_batches[0]}
        losses.append(opt.step_batch(lambda b: loss_of(model, b), batch, part=part).item())
    return model.state_dict(), losses


def mean_loss(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize(
    ("sam", "clip"),
    [
        ({}, None),
        ({}, 0.1),
        ({"part": 0.25}, None),
        ({"part": 0.5}, 0.1),
        ({"weight": 2.0}, 0.1),
        ({"ascent_steps": 2}, 0.1),
    ],
    ids=str,
)
def test_trains_as_a_plain_loop_does(sam, clip):
    """Classification, where BERT returns the mean loss of a micro-batch."""
    settings = {"max_grad_norm": clip or 0.0, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    trainer = cases.make_trainer({"rho": 0.1, **sam}, Recording, **settings)
    trainer.train()
    expected, losses = plain_loop(trainer.steps, mean_loss, clip=clip, **sam)
    assert difference(trainer.model.state_dict(), expected) < 1e-6
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx(losses, abs=1e-4)
    assert logged[0]["sharpness"] > 0
    assert logged[0]["sam_grad_norm"] > 0
    assert difference(plain_loop(trainer.steps, mean_loss, rho=0.0, clip=clip)[0], expected) > 1e-5


def two_optimizers(model):
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def test_a_list_of_optimizers_in_place_of_one(tmp_path):
    settings = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "bases": two_optimizers}
    trainer = cases.make_trainer({"rho": 0.1}, Recording, **settings)
    trainer.train()
    model = cases.make_model().train()
    opt = SAM(two_optimizers(model), rho=0.1, model=model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / len(trainer.steps))
    for (batch,) in trainer.steps:
        opt.step_batch(lambda b: mean_loss(model, b), batch)
        schedule.step()
    assert difference(trainer.model.state_dict(), model.state_dict()) < 1e-6
    settings |= {"save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path)}
    cases.make_trainer({"rho": 0.1}, **settings).train()
    resumed = cases.make_trainer({"rho": 0.1}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert difference(trainer.model.state_dict(), resumed.model.state_dict()) == 0


def test_accumulation_of_language_models_counts_every_token_once():
    """With a part, the plain gradient is over all tokens, however many each example has."""
    settings = {"language_model": True, "gradient_accumulation_steps": 3, "lr_scheduler_type": "constant"}
    weights = {}
    for name, sam in {
        "SGD": {"rho": 0.0},
        "weight 0": {"part": 0.5, "weight": 0.0},
        "tiny": {"part": 0.5, "rho": 1e-7},
    }.items():
        trainer = cases.make_trainer(sam, Recording, **settings)
        trainer.train()
        weights[name] = trainer.model.state_dict()
    model = cases.make_model(language_model=True).train()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [len(step) for step in trainer.steps] == [3, 3, 2]
    for micro_batches, num_items in zip(trainer.steps, trainer.num_items, strict=True):
        batch = {k: torch.cat([b[k] for b in micro_batches]) for k in micro_batches[0]}
        opt.zero_grad()
        model(**batch, num_items_in_batch=num_items).loss.backward()
        opt.step()
    for name, state in weights.items():
        assert difference(state, model.state_dict()) < (1e-4 if name == "tiny" else 1e-6), name


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_perturbation_for_all_micro_batches(accumulation):
    settings = {"gradient_accumulation_steps": accumulation, "lr_scheduler_type": "constant"}
    trainer = cases.make_trainer({"rho": 0.1}, Recording, language_model=True, **settings)
    trainer.train()
    num_items = iter([n for n in trainer.num_items for _ in range(2)])  # two passes

    def token_loss(model, batch):
        return model(**batch, num_items_in_batch=next(num_items)).loss

    expected, _ = plain_loop(trainer.steps, token_loss, language_model=True)
    assert difference(trainer.model.state_dict(), expected) < 1e-6


@pytest.mark.parametrize("sam", [{}, {"part": 0.5}, {"direction": "random"}], ids=str)
def test_resume_from_checkpoint_is_exact(sam, tmp_path):
    settings = {"dropout": 0.1, "optim": "adamw_torch", "learning_rate": 1e-3}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    whole = cases.make_trainer({"rho": 0.1, **sam}, output_dir=str(tmp_path), **settings)
    whole.train()
    torch.manual_seed(7)
    resumed = cases.make_trainer({"rho": 0.1, **sam}, output_dir=str(tmp_path), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert difference(whole.model.state_dict(), resumed.model.state_dict()) == 0


class Overflowing(Recording):
    """Has a gradient that is not finite in its first step."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if len(self.steps) == 1:
            next(model.parameters()).grad.fill_(torch.inf)
        return loss


def test_gradient_scaler():
    """As ``fp16=True`` makes one on a GPU. The scale cancels out, and a skipped step changes nothing."""
    settings = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    trainer = cases.make_trainer({"rho": 0.1, "weight": 2.0}, Overflowing, **settings)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 512
    expected, _ = plain_loop(trainer.steps[1:], mean_loss, weight=2.0)
    assert difference(trainer.model.state_dict(), expected) < 1e-6


def test_bf16():
    trainer = cases.make_trainer(
        {"rho": 0.1}, Recording, bf16=True, gradient_accumulation_steps=1, lr_scheduler_type="constant"
    )
    trainer.train()
    expected, _ = plain_loop(trainer.steps, mean_loss)
    assert 0 < difference(trainer.model.state_dict(), expected) < 2e-2


class Accounting(Recording):
    """Prepares inputs and keeps records as TRL's trainers do: counts, metrics in a dict of dicts of lists."""

    num_prepared = num_tokens = 0

    def __init__(self, *args, **kwargs):
        self._metrics = {"train": defaultdict(list)}
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, inputs):
        self.num_prepared += 1
        return super()._prepare_inputs(inputs)

    def compute_loss(self, model, inputs, **kwargs):
        labels = inputs.pop("labels")  # as label smoothing does
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
        loss = loss * (1 + 0.1 * (self.num_tokens % 5))
        self.num_tokens += inputs["input_ids"].numel()
        self._metrics["train"]["examples"].extend(labels.tolist())
        self._metrics["train"]["num_tokens"] = [self.num_tokens]
        return loss


@pytest.mark.parametrize("sam", [{}, {"part": 0.5}], ids=str)
def test_inputs_are_prepared_and_losses_recorded_once_per_step(sam):
    trainers = {}
    for rho in (0.0, 1e-7):
        trainers[rho] = cases.make_trainer({"rho": rho, **sam}, Accounting, learning_rate=0.0)
        trainers[rho].train()
    plain, trainer = trainers.values()
    assert trainer.num_prepared == plain.num_prepared == 8
    assert trainer.num_tokens == plain.num_tokens == 32 * 6
    assert trainer._metrics["train"]["num_tokens"] == [32 * 6]
    assert len(trainer._metrics["train"]["examples"]) == 32
    assert sorted(trainer._metrics["train"]["examples"]) == sorted(plain._metrics["train"]["examples"])
    assert "_prepare_inputs" not in vars(trainer)
    # The second pass begins with the counts that the first one began with, so it has the same loss.
    assert max(abs(entry["sharpness"]) for entry in trainer.state.log_history if "loss" in entry) < 1e-5


def test_noise_of_numpy_is_the_same_in_both_passes():
    """Speech models mask their input with NumPy's generator (SpecAugment)."""

    class Masking(SAMTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            ids = inputs["input_ids"]
            mask = torch.from_numpy(np.random.rand(*ids.shape) < 0.5)  # noqa: NPY002
            return super().compute_loss(model, {**inputs, "input_ids": ids.masked_fill(mask, 0)}, **kwargs)

    trainer = cases.make_trainer({"rho": 1e-7}, Masking)
    trainer.train()
    assert max(abs(entry["sharpness"]) for entry in trainer.state.log_history if "loss" in entry) < 1e-5


def test_check_names_what_cannot_be_repeated():
    class Noisy(Recording):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs, **kwargs) * (1 + generator.random())

    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="check=True: The pass is not repeatable"):
        cases.make_trainer({"rho": 0.1}, partial(Noisy, check=True)).train()
    trainers = [cases.make_trainer({"rho": 0.1}, partial(Recording, check=check), dropout=0.1) for check in (0, 1)]
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.train()
    assert difference(*(trainer.model.state_dict() for trainer in trainers)) == 0


def test_training_goes_on_where_it_was_interrupted():
    """``train()`` twice is one training with twice the steps, and what an interrupted step left does not count."""

    class Interrupted(Recording):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            if len(self.steps) == 2 and self._micro_batches:
                raise KeyboardInterrupt
            return loss

    settings = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = cases.make_trainer({"rho": 0.1}, Interrupted, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    sam = trainer.sam
    trainer.train()
    trainer.train()
    assert trainer.sam is sam
    assert [len(micro_batches) for micro_batches in trainer.steps] == [2, 1, 2, 2, 2, 2, 2, 2]
    del trainer.steps[1]
    expected, _ = plain_loop(trainer.steps, lambda model, batch: 2 * mean_loss(model, batch))  # the sum of two means
    assert difference(trainer.model.state_dict(), expected) < 1e-6


def test_a_batch_size_that_does_not_fit_is_reduced():
    class Small(Recording):
        def compute_loss(self, model, inputs, **kwargs):
            if len(inputs["labels"]) == 4 and self.sam.is_perturbed:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, **kwargs)

    settings = {"auto_find_batch_size": True, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1}
    trainer = cases.make_trainer({"rho": 0.1}, Small, **settings)
    trainer.train()
    sizes = [len(batch["labels"]) for step in trainer.steps for batch in step]
    assert sizes == [4] + 10 * [3] + [2]
    del trainer.steps[0]
    assert difference(trainer.model.state_dict(), plain_loop(trainer.steps, mean_loss)[0]) < 1e-6


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_auto_finds_the_radius_in_the_first_eight_steps(part, tmp_path):
    """With lr = 0 it is the suggestion for these batches; all micro-batches of a step share a perturbation."""
    settings = {"num_train_epochs": 3, "learning_rate": 0.0, "language_model": True}
    settings |= {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 10}
    trainer = cases.make_trainer({"rho": "auto", "part": part}, Recording, **settings)
    trainer.train()
    model = cases.make_model(language_model=True).train()
    batches, num_items = [], []
    for micro_batches, count in zip(trainer.steps[:8], trainer.num_items, strict=False):
        batches.append({k: torch.cat([b[k][: round(4 * part)] for b in micro_batches]) for k in micro_batches[0]})
        num_items.append(count * part)
    counts = iter(num_items)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    suggestion = suggest_rho(opt, lambda b: model(**b, num_items_in_batch=next(counts)).loss, batches)
    assert trainer.sam.rho == pytest.approx(suggestion.rho, rel=1e-5)
    assert trainer.state.log_history[-2]["rho"] == trainer.sam.rho
    resumed = cases.make_trainer({"rho": "auto", "part": part}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.sam.rho == trainer.sam.rho


def test_a_checkpoint_with_another_radius_is_reported(tmp_path):
    settings = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    cases.make_trainer({"rho": 0.2}, **settings).train()
    trainer = cases.make_trainer({"rho": 0.1}, **settings)
    with pytest.warns(UserWarning, match="rho=0.2, which replaces rho=0.1"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.sam.rho == 0.2


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"])
def test_trainers_that_sample_in_every_step_are_refused(name):
    sampling = type(name, (Trainer,), {})
    with pytest.raises(TypeError, match=f"{name} samples completions"):
        cases.make_trainer({}, type("Own", (SAMMixin, sampling), {}))


def test_mixin_for_other_trainers_and_own_optimizers():
    class Own(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    class OwnWithSAM(SAMMixin, Own):
        pass

    trainer = cases.make_trainer({"rho": 0.1}, OwnWithSAM, gradient_accumulation_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 1  # twice log(2)
    trainer = cases.make_trainer({"rho": 0.1})
    trainer.optimizer = SAM(torch.optim.SGD(trainer.model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="SAM already"):
        trainer.train()


@pytest.mark.parametrize(
    ("sam", "error", "message"),
    [({"rho": -1.0}, ValueError, "rho"), ({"part": 0}, ValueError, "part"), ({"radius": 1}, TypeError, "radius")],
)
def test_wrong_settings_raise_at_once(sam, error, message):
    with pytest.raises(error, match=message):
        cases.make_trainer(sam)


def test_ddp(two_processes, tmp_path):
    two_processes.run(as_under_torchrun, cases.train_with_ddp, tmp_path)
    for name, part in {"whole": 1.0, "part": 0.5}.items():
        (steps, state), (others, same) = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert difference(state, same) == 0
        model = cases.make_model().train()
        num_steps = len(steps) // 2  # of two micro-batches
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(num_steps):
            grads = []
            for micro_batches in (steps, others):
                worker = copy.deepcopy(model)
                sam = SAM(torch.optim.SGD(worker.parameters(), lr=0.0), rho=0.1)
                first, second = micro_batches[2 * step : 2 * step + 2]
                cut = round(part * 4)
                pieces = (
                    [first, second] if part == 1 else [b | {k: v[:cut] for k, v in b.items()} for b in (first, second)]
                )
                rests = [{k: v[cut:] for k, v in b.items()} for b in (first, second)]

                def closure(pieces=pieces, sam=sam, worker=worker):
                    sam.zero_grad()
                    loss = sum(worker(**piece).loss for piece in pieces)
                    loss.backward()
                    return loss

                if part == 1:
                    sam.step(closure)
                else:
                    sam.step([closure], rest=lambda: closure(rests), weights=[1, 1])
                grads.append([p.grad for p in worker.parameters()])
            for p, g, h in zip(model.parameters(), *grads, strict=True):
                p.grad = (g + h) / 2
            base.param_groups[0]["lr"] = 0.1 * (1 - step / num_steps)
            base.step()
        assert difference(state, model.state_dict()) < 1e-6, name
