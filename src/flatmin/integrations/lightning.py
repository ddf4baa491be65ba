"""SAM in Lightning: ``Trainer(callbacks=[SAMCallback(rho=0.05)])`` and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from flatmin.core.batch_split import split_batch
from flatmin.core.sam import SAM
from flatmin.integrations.deferred_step import DeferredSAM, check_base, check_settings

try:
    import lightning.pytorch as pl
except ImportError:  # the older package
    import pytorch_lightning as pl

PATCHED = ("training_step", "optimizer_step")


class SAMCallback(pl.Callback):
    """Turns the optimizers of a LightningModule into SAM.

    With automatic optimization nothing else changes: gradient clipping, ``precision="16-mixed"`` and ``"bf16-mixed"``,
    schedulers, DDP and resuming from a checkpoint work as before. Values that ``training_step`` logs are those at w,
    once per step. Two more values are logged: ``sharpness``, the loss at w + eps minus that at w, and ``grad_norm``,
    the norm of the gradient at w.

    With manual optimization the callback wraps the optimizers, and ``training_step`` runs both passes, the second
    within ``with opt.perturbed():``.

    Args:
        rho: the radius, as of :class:`flatmin.SAM`.
        part: the share of each batch that SAM is applied to; the rest takes a plain pass, so that a step costs
            1 + part passes. Batches must be a tensor, or a tuple, list or dict of tensors; ``training_step`` must
            return the mean loss. What it logs comes from the rest.
        log: whether to log ``sharpness`` and ``grad_norm``.
        **settings: all other settings of :class:`flatmin.SAM`, such as ``adaptive=True``.

    Raises:
        TypeError, ValueError: a setting that SAM does not take, now; when ``fit`` starts: gradient accumulation with
            automatic optimization, an optimizer that is a SAM already, FSDP1, DeepSpeed.
    """

    def __init__(self, rho: float = 0.05, *, part: float = 1.0, log: bool = True, **settings: Any) -> None:
        self.settings = {"rho": rho, **settings}
        self.part, self.log_metrics = part, log
        check_settings(self.settings | {"part": part})
        self.optimizers: list[SAM] = []
        self._piece: Any | None = None  # what training_step sees in place of the batch
        self._is_silent = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the optimizers: the strategy has made them, and no checkpoint has been restored yet."""
        automatic = pl_module.automatic_optimization
        _check_trainer(trainer, automatic)
        if self.part < 1 and not automatic:
            raise ValueError(
                f"part={self.part} needs automatic optimization: with manual optimization, training_step decides which "
                "examples each pass sees."
            )
        self.optimizers = [self._wrap(opt, trainer.model, automatic) for opt in trainer.strategy.optimizers]
        trainer.strategy.optimizers = list(self.optimizers)  # the setter makes Lightning's wrappers
        if automatic:
            self._patch(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Log what the step measured."""
        if not self.log_metrics:
            return
        for i, sam in enumerate(self.optimizers):
            suffix = f"_{i}" if len(self.optimizers) > 1 else ""
            pl_module.log(f"sharpness{suffix}", sam.metrics.sharpness)
            pl_module.log(f"grad_norm{suffix}", sam.metrics.grad_norm)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own methods back."""
        for name in PATCHED:
            pl_module.__dict__.pop(name, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module its own methods back."""
        self.teardown(trainer, pl_module, "fit")

    def _wrap(self, base: Optimizer, model: Any, automatic: bool) -> SAM:
        check_base(base)
        kind = DeferredSAM if automatic else SAM
        return kind(base, model=model, **self.settings)

    def _patch(self, pl_module: pl.LightningModule) -> None:
        """Put SAM's passes where Lightning runs one: it calls these two methods of the module in every step."""
        training_step, optimizer_step = pl_module.training_step, pl_module.optimizer_step
        (sam,) = self.optimizers

        @functools.wraps(training_step)
        def pieces_of_training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._piece is not None:
                batch = self._piece
            if not (self._is_silent or sam.is_perturbed):
                return training_step(batch, *args, **kwargs)
            pl_module.log = lambda *args, **kwargs: None
            try:
                return training_step(batch, *args, **kwargs)
            finally:
                del pl_module.log

        @functools.wraps(optimizer_step)
        def sam_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> Any:
            gradient = functools.partial(self._compute_gradient, sam, optimizer_closure)
            return optimizer_step(epoch, batch_idx, optimizer, gradient)

        pl_module.training_step, pl_module.optimizer_step = pieces_of_training_step, sam_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        """Keep the batch, to split it."""
        self._batch: Any = batch if self.part < 1 else None

    def _compute_gradient(self, sam: Any, closure: Callable[[], Any]) -> Any:
        if self.part == 1 or not sam.needs_perturbed_pass:
            return sam.compute_gradient(closure)
        split = split_batch(self._batch, self.part, None)

        def on(piece: Any, silent: bool) -> Any:
            self._piece, self._is_silent = piece, silent
            try:
                return closure()
            finally:
                self._piece, self._is_silent = None, False

        part = functools.partial(on, split.micro_batches[0], silent=split.rest is not None)
        if split.rest is None:
            return sam.compute_gradient(part)
        rest = functools.partial(on, split.rest, silent=False)
        return sam.compute_gradient(part, rest=rest, weights=split.sizes)


def _check_trainer(trainer: pl.Trainer, automatic: bool) -> None:
    if automatic and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not SAM with automatic optimization: "
            "Lightning's closure holds the last micro-batch only, so that the second pass would not see the others. "
            "Use larger batches, accumulate_grad_batches=1, or manual optimization: run all micro-batches, and all of "
            "them again within `with opt.perturbed():`."
        )
    strategy = type(trainer.strategy).__name__
    if "DeepSpeed" in strategy or strategy == "FSDPStrategy":
        raise ValueError(
            f"strategy {strategy} replaces the parameters that SAM perturbs. Use 'ddp', or ModelParallelStrategy with "
            "torch.distributed.fsdp.fully_shard."
        )
