"""SAM in Lightning: ``Trainer(callbacks=[SAMCallback(rho=0.05)])`` and nothing else."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from flatmin.core.batch_split import split_batch
from flatmin.core.sam import SAM
from flatmin.integrations.deferred_step import DeferredSAM, TrainerSettings
from flatmin.integrations.records import RecordedPass, UnrecordedPass

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
except ImportError:  # the older package
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

PATCHED = ("training_step", "optimizer_step")


class SAMCallback(pl.Callback):
    """Turns the optimizers of a LightningModule into SAM.

    With automatic optimization nothing else changes: gradient clipping, ``precision="16-mixed"`` and ``"bf16-mixed"``,
    schedulers, DDP and resuming from a checkpoint work as before. Values that ``training_step`` logs are from w,
    once per step. Two more values are logged: ``sharpness``, the loss at w + eps minus the loss at w, and
    ``grad_norm``, the norm of the gradient at w.

    With manual optimization the callback wraps the optimizers, and ``training_step`` runs both passes, the second
    within ``with opt.perturbed():``.

    Args:
        rho: the radius, as of :class:`flatmin.SAM`; "auto" measures it on the first eight batches, as
            :func:`flatmin.suggest_rho` does, at one more gradient in each of these steps.
        part: the share of each batch that SAM is applied to; the rest takes a plain pass, so a step costs
            1 + part passes. Batches must be a tensor, or a tuple, list or dict of tensors; ``training_step`` must
            return the mean loss. What it logs comes from the rest.
        log: whether to log ``sharpness`` and ``grad_norm``.
        check: whether to check at the first step that the pass can be repeated, with :func:`flatmin.check_pass`.
            Needs automatic optimization.
        **settings: all other settings of :class:`flatmin.SAM`, such as ``adaptive=True``.

    Raises:
        TypeError, ValueError: a setting that SAM does not take, now; when ``fit`` starts: gradient accumulation with
            automatic optimization, an optimizer that is a SAM already, FSDP1, DeepSpeed.
    """

    def __init__(
        self,
        rho: float | Literal["auto"] = 0.05,
        *,
        part: float = 1.0,
        log: bool = True,
        check: bool = False,
        **settings: Any,
    ) -> None:
        self.settings = TrainerSettings({"rho": rho, "part": part, **settings}, check=check)
        self.log_metrics = log
        self.optimizers: list[SAM] = []
        self._piece: Any | None = None  # what training_step sees in place of the batch
        self._is_silent = False  # training_step does not log

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the optimizers: the strategy has made them, and no checkpoint has been restored yet."""
        automatic, settings = pl_module.automatic_optimization, self.settings
        _check_trainer(trainer, automatic)
        if settings.part < 1 and not automatic:
            raise ValueError(
                f"part={settings.part} needs automatic optimization: with manual optimization, training_step decides "
                "which examples each pass sees."
            )
        if settings.is_auto and not automatic:
            raise ValueError('rho="auto" needs automatic optimization. Use flatmin.suggest_rho, and pass a number.')
        if settings.check and not automatic:
            raise ValueError("check=True needs automatic optimization. Call flatmin.check_pass in training_step.")
        kind = DeferredSAM if automatic else _ManualSAM
        self.optimizers = [settings.wrap(base, kind, trainer.model) for base in trainer.strategy.optimizers]
        trainer.strategy.optimizers = list(self.optimizers)  # the setter makes Lightning's wrappers
        if automatic:
            self._patch(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the radius with the checkpoint's, which has been restored by now."""
        self.settings.begin()
        for sam in self.optimizers:
            self.settings.warn_if_rho_differs(sam, self.settings.sam["rho"])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Log what the step measured."""
        if not self.log_metrics:
            return
        for i, sam in enumerate(self.optimizers):
            suffix = f"_{i}" if len(self.optimizers) > 1 else ""
            pl_module.log(f"sharpness{suffix}", sam.metrics.sharpness)
            pl_module.log(f"grad_norm{suffix}", sam.metrics.grad_norm)
            if self.settings.is_auto:
                pl_module.log(f"rho{suffix}", sam.rho)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own methods back."""
        for name in PATCHED:
            pl_module.__dict__.pop(name, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module its own methods back."""
        self.teardown(trainer, pl_module, "fit")

    def _patch(self, pl_module: pl.LightningModule) -> None:
        """Put SAM's passes where Lightning runs one: it calls these two methods of the module in every step."""
        training_step, optimizer_step = pl_module.training_step, pl_module.optimizer_step
        (sam,) = self.optimizers

        @functools.wraps(training_step)
        def pieces_of_training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._piece is not None:
                batch = self._piece
            if not self._is_silent:
                return training_step(batch, *args, **kwargs)
            pl_module.log = lambda *args, **kwargs: None
            try:
                return training_step(batch, *args, **kwargs)
            finally:
                del pl_module.log

        @functools.wraps(optimizer_step)
        def sam_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> Any:
            gradient = functools.partial(self._compute_gradient, sam, optimizer_closure, pl_module)
            return optimizer_step(epoch, batch_idx, optimizer, gradient)

        pl_module.training_step, pl_module.optimizer_step = pieces_of_training_step, sam_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        """Keep the batch, to split it."""
        self._batch: Any = batch if self.settings.part < 1 else None

    def _compute_gradient(self, sam: Any, closure: Any, pl_module: pl.LightningModule) -> Any:
        """Run SAM's passes; Lightning reads the outputs of ``training_step`` from its closure, and gets them at w."""
        outputs = None

        def run(piece: Any | None, silent: bool) -> Any:
            nonlocal outputs
            self._piece, self._is_silent = piece, silent
            try:
                loss = closure()
            finally:
                self._piece, self._is_silent = None, False
            if loss is None:
                raise _BatchSkippedError
            if not silent:
                outputs = closure._result
            return loss

        def pass_on(piece: Any | None, silent: bool = False) -> RecordedPass:
            recorded = RecordedPass(lambda: run(piece, silent or recorded.is_repeated), modules)
            return recorded

        # What may keep records; torch's own layers do not.
        modules = [m for m in pl_module.modules() if not type(m).__module__.startswith("torch.nn.")]
        split = split_batch(self._batch, self.settings.part, None) if self.settings.part < 1 else None
        part = None if split is None else split.micro_batches[0]
        try:
            silent_pass = UnrecordedPass(lambda: run(part, silent=True), modules)
            scaler = getattr(pl_module.trainer.precision_plugin, "scaler", None)
            self.settings.before_gradient(sam, silent_pass, scaler)
            if split is None or split.rest is None or not sam.needs_perturbed_pass:
                loss = sam.compute_gradient(pass_on(None))
            else:
                passes = {"closure": pass_on(part, silent=True), "rest": pass_on(split.rest)}
                loss = sam.compute_gradient(**passes, weights=split.sizes)
        except _BatchSkippedError:
            sam.zero_grad()
            return None
        closure._result = outputs
        return loss


class _BatchSkippedError(Exception):
    """``training_step`` returned None, which skips the batch in Lightning."""


class _ManualSAM(SAM):
    """Says what is missing in a ``training_step`` with manual optimization that has one pass."""

    def _closure_gradient(self, closure: Callable[[], Any], *args: Any) -> Any:
        """Run the passes of a closure; Lightning passes one that does nothing where the module passes none."""
        if not self.needs_perturbed_pass:
            loss = closure()
            return None if loss is None else super()._closure_gradient(lambda: loss, *args)

        def with_loss() -> Any:
            loss = closure()
            if loss is None:
                raise TypeError(
                    "opt.step() came without a pass at w + eps. With manual optimization training_step runs both "
                    "passes of SAM: opt.zero_grad(); self.manual_backward(loss); then, within `with opt.perturbed():`, "
                    "compute the loss again and call self.manual_backward on it; then opt.step()."
                )
            return loss

        return super()._closure_gradient(with_loss, *args)


def _check_trainer(trainer: pl.Trainer, automatic: bool) -> None:
    accumulation = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    accumulates = trainer.accumulate_grad_batches > 1
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            accumulation, accumulates = f"GradientAccumulationScheduler({callback.scheduling})", True
    if automatic and accumulates:
        raise ValueError(
            f"{accumulation} does not work with SAM under automatic optimization: Lightning's closure holds the last "
            "micro-batch only, so the second pass would not see the others. Use larger batches, not accumulation, or "
            "manual optimization: run all micro-batches, and all of them again within `with opt.perturbed():`."
        )
    strategy = type(trainer.strategy).__name__
    if "DeepSpeed" in strategy or strategy == "FSDPStrategy":
        raise ValueError(
            f"strategy {strategy} replaces the parameters that SAM perturbs. Use 'ddp', or ModelParallelStrategy with "
            "torch.distributed.fsdp.fully_shard."
        )
