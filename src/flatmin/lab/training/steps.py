"""One optimization step, in each of its kinds: plain, SAM, SAM over micro-batches, SAM with second-order terms."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from flatmin import SAM, norm_parameters, sam_gradient
from flatmin.lab.data.pipeline import Batch
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.errors import ModelError
from flatmin.lab.models.shake import true_gradient
from flatmin.lab.spec.experiment import Experiment, Optim
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.evaluation import autocast, loss_and_error, resolve_precision


class PassMetrics(NamedTuple):
    """What one pass found on this worker's examples: means over the examples, on the device."""

    loss: Tensor
    error: Tensor


class StepMetrics(NamedTuple):
    """What a step found at w and at w + eps (the same where there is no SAM)."""

    at_w: PassMetrics
    perturbed: PassMetrics


def base_optimizer(optim: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that SAM wraps; it clips the gradient it is given, which is the synchronized one."""
    decay = optim.weight_decay if optim.decay == "optimizer" else 0.0
    parameters, groups = list(network.parameters()), parameter_groups(optim, network)
    optimizer: torch.optim.Optimizer
    if optim.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, weight_decay=decay
        )
    if optim.clip_norm is not None:
        limit = optim.clip_norm

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(parameters, limit)

        optimizer.register_step_pre_hook(clip)
    return optimizer


def parameter_groups(optim: Optim, network: nn.Module) -> list[dict[str, Any]]:
    """Return all parameters: in one group, or in two if only those of normalization layers have a radius."""
    if optim.perturb == "all":
        return [{"params": list(network.parameters())}]
    try:
        return norm_parameters(network)
    except ValueError:
        raise ModelError(
            "optim.perturb is norm, but the model has no normalization layer with parameters. Use another model, or "
            "all."
        ) from None


class Stepper:
    """Takes the steps of a run; noise and random directions come from its seed, the step and the worker."""

    def __init__(self, experiment: Experiment, network: nn.Module, seed: int, workers: Workers) -> None:
        self.optim, self.network, self.seed, self.workers = experiment.optim, network, seed, workers
        self.precision = resolve_precision(experiment.precision, workers.device)
        self.forward: Any = network
        if workers.count > 1:
            # Statistics of batch norm are averaged after each step instead of being broadcast before each pass.
            self.forward = DistributedDataParallel(network, forward_sync_buffers=False)
        if experiment.compile:
            self.forward = torch.compile(self.forward)
        self.statistics = normalization_statistics(network)
        self.optimizer = base_optimizer(self.optim, network)
        self.generator = torch.Generator(workers.device)
        self.rho = self.optim.rho_number  # a factor until the radius is measured or read from a checkpoint
        weight = self.optim.weight
        if weight is None and self.optim.every > 1:  # SAM's strength, although only every k-th step has a correction
            weight = self.optim.every / self.optim.part
        if self.optim.uses_sam and not self.optim.second_order:
            self.optimizer = SAM(
                self.optimizer,
                rho=self.rho,
                p=self.optim.p,
                adaptive=False if self.optim.adaptive is None else self.optim.adaptive,
                ascent_steps=self.optim.ascent_steps,
                direction=self.optim.direction,
                weight=weight,
                generator=self.generator if self.optim.direction == "random" else None,
                model=self.forward,
                sync_perturbation=self.optim.sync_perturbation,
            )

    def set_rho(self, rho: float) -> None:
        """Set the radius that was measured, or read from a checkpoint."""
        self.rho = rho
        if isinstance(self.optimizer, SAM):
            self.optimizer.rho = rho

    def examples_per_eps(self, batch: Batch) -> int:
        """Return how many of this worker's examples share a perturbation."""
        part = _cut(batch, self.optim.part)[0] if self.optim.part < 1 else batch
        part = _cut(part, self.optim.ascent_part)[0] if self.optim.ascent_part < 1 else part
        return max(len(piece.examples) for piece in self._micro_batches(part))

    def step(self, batch: Batch, number: int, lr: float) -> StepMetrics:
        """Take step ``number`` of the run on this worker's part of a batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Drawn from the step's number: there are no generators to save.
        torch.manual_seed(torch_seed(self.seed, Purpose.NETWORK_NOISE, number, self.workers.rank))
        shared = 0 if self.optim.sync_perturbation else self.workers.rank
        self.generator.manual_seed(torch_seed(self.seed, Purpose.PERTURBATION, number, shared))
        if isinstance(self.optimizer, SAM) and self.optim.every > 1:
            self.optimizer.rho = 0.0 if number % self.optim.every else self.rho  # 0: a plain step
        if not self.optim.uses_sam:
            measured = self._plain_step(batch)
        elif self.optim.second_order:
            measured = self._second_order_step(batch)
        else:
            measured = self._sam_step(batch)
        # Running averages are linear in a batch's statistics: their mean is the average over workers.
        self.workers.average_(self.statistics)
        return measured

    def _plain_step(self, batch: Batch) -> StepMetrics:
        parts = self._micro_batches(batch)
        means = MicroBatchStatistics(self.network, self.statistics, len(parts))
        metrics = []
        self.optimizer.zero_grad()
        for number, part in enumerate(parts):
            means.restart()
            last = number == len(parts) - 1
            with nullcontext() if last or self.workers.count == 1 else self.forward.no_sync():
                metrics.append(self._pass(part, part.share, add=True))
            means.add()
        means.finish()
        self.optimizer.step()
        measured = _mean(metrics, [float(len(part.examples)) for part in parts])
        return StepMetrics(measured, measured)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.split(1 if self.optim.m is None else -(-len(batch.examples) // self.optim.m))

    def _sam_step(self, batch: Batch) -> StepMetrics:
        assert isinstance(self.optimizer, SAM)
        part, rest = batch, None  # what SAM is applied to and, in steps with a correction, what takes a plain pass
        if self.optim.part < 1 and self.optimizer.needs_perturbed_pass:
            part, rest = _cut(batch, self.optim.part)
        parts = self._micro_batches(part)
        sizes = [float(len(piece.examples)) for piece in parts]
        passes: list[list[PassMetrics]] = [[] for _ in parts]
        other: list[PassMetrics] = []
        # With a rest, SAM takes the running averages from the plain pass on it.
        means = MicroBatchStatistics(self.network, self.statistics, len(parts) if rest is None else 1)

        def closure(piece: Batch, done: list[PassMetrics], num_ascents: int = 0) -> Callable[[], Tensor]:
            def run() -> Tensor:
                if not done:  # at w
                    means.restart()
                with true_gradient(self.network) if len(done) < num_ascents else nullcontext():
                    done.append(self._pass(piece, batch.share))
                if len(done) == 1:
                    means.add()
                return done[-1].loss

            return run

        before: list[PassMetrics] = []
        if self.optim.direction == "random" and self.optim.part == 1 and not self.statistics:
            with torch.no_grad():  # SAM itself needs no pass at w
                before = [PassMetrics(*self._forward(piece)) for piece in parts]
        ascends = self.optim.direction == "gradient" and self.optimizer.needs_perturbed_pass
        whole = self.optim.ascent_steps if ascends and self.optim.ascent_part == 1 else 0
        closures = [closure(piece, done, whole) for piece, done in zip(parts, passes, strict=True)]
        weights = sizes
        if rest is not None:
            weights = [*sizes, float(len(rest.examples))]
            self.optimizer.step(closures, rest=closure(rest, other), weights=weights)
        elif self.optim.ascent_part < 1:
            small, _ = _cut(batch, self.optim.ascent_part)
            self.optimizer.step(closures[0], ascent=closure(small, other, num_ascents=1))
            return StepMetrics(other[0], passes[0][-1])
        elif len(parts) > 1:
            self.optimizer.step(closures, weights=sizes)
        else:
            self.optimizer.step(closures[0])
        means.finish()
        at_w = before or [done[0] for done in passes] + other
        return StepMetrics(_mean(at_w, weights), _mean([done[-1] for done in passes], sizes))

    def _second_order_step(self, batch: Batch) -> StepMetrics:
        calls: list[PassMetrics] = []
        names = [name for name, _ in self.network.named_parameters()]
        own = dict(self.network.named_buffers())

        def loss_fn(parameters: dict[str, Tensor]) -> Tensor:
            # The pass at w writes its statistics into the model, passes at w + eps into copies.
            buffers = {name: b.clone() for name, b in own.items()} if calls else own
            with autocast(self.precision, self.workers.device):
                logits = functional_call(self.network, {**parameters, **buffers}, (batch.inputs,))
            loss, error = loss_and_error(logits, batch, self.optim.label_smoothing)
            calls.append(PassMetrics(loss.detach(), error))
            return (loss + self._decay(list(parameters.values()))) * batch.share

        with true_gradient(self.network):
            gradient = sam_gradient(
                loss_fn,
                dict(self.network.named_parameters()),
                rho=self.rho,
                p=self.optim.p,
                ascent_steps=self.optim.ascent_steps,
                direction="random" if self.optim.direction == "random" else "gradient",
                second_order=True,
                generator=self.generator,
            )
        self.workers.average_([gradient.grads[name] for name in names])
        for name, parameter in self.network.named_parameters():
            parameter.grad = gradient.grads[name]
        self.optimizer.step()
        return StepMetrics(calls[0], calls[-1])

    def _pass(self, batch: Batch, share: float, *, add: bool = False) -> PassMetrics:
        """Leave the gradient of this worker's part of the loss in the parameters, or add it to theirs."""
        if not add:
            self.optimizer.zero_grad()
        loss, error = self._forward(batch)
        # Workers' gradients are averaged; a part with more examples counts more. SAM's eps does not see the factor.
        total = loss + self._decay(list(self.network.parameters()))
        (total if share == 1.0 else total * share).backward()  # type: ignore[no-untyped-call]
        return PassMetrics(loss.detach(), error)

    def loss(self, batch: Batch) -> Tensor:
        """Return the training loss of some examples, with weight decay where it is part of the loss."""
        return self._forward(batch)[0] + self._decay(list(self.network.parameters()))

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with autocast(self.precision, self.workers.device):
            logits = self.forward(batch.inputs)
        return loss_and_error(logits, batch, self.optim.label_smoothing)

    def _decay(self, parameters: list[Tensor]) -> Tensor | float:
        if self.optim.decay == "optimizer" or self.optim.weight_decay == 0:
            return 0.0
        return self.optim.weight_decay / 2 * torch.stack([p.square().sum() for p in parameters]).sum()


class MicroBatchStatistics:
    """The running averages of a step on micro-batches: each starts from the same ones, and their mean is kept.

    That is what as many accelerators do whose statistics are averaged. With one micro-batch there is nothing to do.
    """

    def __init__(self, network: nn.Module, statistics: list[Tensor], num_parts: int) -> None:
        several = num_parts > 1
        self.num_parts, self.statistics = num_parts, statistics if several else []
        self.buffers = list(network.buffers()) if several else []
        self.start = [b.clone() for b in self.buffers]
        self.means = [torch.zeros_like(s) for s in self.statistics]

    def restart(self) -> None:
        """Begin a micro-batch."""
        for buffer, first in zip(self.buffers, self.start, strict=True):
            buffer.copy_(first)

    def add(self) -> None:
        """Take the averages of a micro-batch into the mean."""
        for mean, statistic in zip(self.means, self.statistics, strict=True):
            mean.add_(statistic, alpha=1 / self.num_parts)

    def finish(self) -> None:
        """Put the mean into the model."""
        for mean, statistic in zip(self.means, self.statistics, strict=True):
            statistic.copy_(mean)


def normalization_statistics(network: nn.Module) -> list[Tensor]:
    """Return the running averages of all normalization layers (not their integer counts of batches)."""
    return [
        buffer
        for module in network.modules()
        for name, buffer in module._buffers.items()
        if name.startswith("running_") and buffer is not None
    ]


def _cut(batch: Batch, part: float) -> tuple[Batch, Batch | None]:
    """Return the first part of a batch, at least one example, and the rest of it, if there is one."""
    size = max(1, round(part * len(batch.examples)))
    return batch.slice(0, size), batch.slice(size, len(batch.examples)) if size < len(batch.examples) else None


def _mean(parts: list[PassMetrics], sizes: list[float]) -> PassMetrics:
    if len(parts) == 1:
        return parts[0]
    weights = torch.tensor(sizes, device=parts[0].loss.device) / sum(sizes)
    loss, error = ((torch.stack(values) * weights).sum() for values in zip(*parts, strict=True))
    return PassMetrics(loss, error)
