"""SAM in the Hugging Face Trainer: ``SAMTrainer(..., sam={"rho": 0.05})``."""

import contextlib
import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer

from flatmin.core.batch_split import split_batch
from flatmin.integrations.deferred_step import DeferredSAM, TrainerSettings
from flatmin.integrations.records import RecordedPass, UnrecordedPass

Inputs = Mapping[str, Any]
_Trainer: Any = Trainer if TYPE_CHECKING else object

# These of TRL sample completions from the model within a step, so a second pass would be of another batch.
SAMPLING = frozenset(
    f"{name}Trainer"
    for name in (
        *("GRPO", "AsyncGRPO", "RLOO", "OnlineDPO", "PPO", "GKD", "GOLD", "SDFT", "SDPO", "A2PO", "IWOPD"),
        *("Distillation", "AsyncDistillation"),
    )
)


class SAMMixin(_Trainer):
    """Makes a subclass of :class:`transformers.Trainer` train with SAM: ``class MyTrainer(SAMMixin, Seq2SeqTrainer)``.

    One optimizer step is one SAM step, with one perturbation for all micro-batches of a worker. Gradient accumulation,
    clipping, schedules, DDP, bf16, fp16 with its scaler, and ``resume_from_checkpoint`` work as before.
    ``training_step`` keeps the micro-batches of a step, runs all passes when it gets the last one, and returns the loss
    at w. Inputs are prepared once per step, and what ``compute_loss`` records in attributes of the trainer (TRL's
    metrics, say) is recorded once, at w.

    The training logs have two more values: ``sharpness``, the loss at w + eps minus the loss at w in the last step,
    and ``sam_grad_norm``, the norm of the gradient at w. ``grad_norm`` is the norm of SAM's gradient, which is clipped.

    Args:
        sam: the settings of :class:`flatmin.SAM`, such as ``{"rho": 0.05, "p": 2}``; ``"rho": "auto"`` measures the
            radius in the first eight steps, as :func:`flatmin.suggest_rho` does, at one more gradient in each. And
            ``part``: the share of each micro-batch that SAM is applied to. Inputs must then be tensors of examples.
        check: whether to check at the first step that the pass can be repeated, with :func:`flatmin.check_pass`.

    Raises:
        TypeError, ValueError: a setting that SAM does not take, DeepSpeed, or a trainer of TRL that samples
            completions while it trains (GRPO, RLOO, online DPO): its pass cannot be repeated.
    """

    def __init__(self, *args: Any, sam: Mapping[str, Any] | None = None, check: bool = False, **kwargs: Any) -> None:
        self.sam_settings = TrainerSettings(sam or {}, check=check)
        for kind in type(self).__mro__:
            if kind.__name__ in SAMPLING:
                raise TypeError(
                    f"{kind.__name__} samples completions in every step, so SAM's second pass would not repeat the "
                    "first one. Use SAM with SFTTrainer, DPOTrainer or RewardTrainer, or a plain Trainer here."
                )
        self._micro_batches: list[Inputs] = []
        super().__init__(*args, **kwargs)
        if getattr(self, "is_deepspeed_enabled", False):
            raise ValueError(
                "DeepSpeed replaces the optimizer's step, so SAM cannot be used with it. Use DDP or FSDP2."
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Wrap the Trainer's optimizer, or the one that was passed to it, in SAM."""
        self._micro_batches = []  # of a training that was interrupted
        base = super().create_optimizer(*args, **kwargs)
        # When training continues, this is Accelerate's wrapper of our SAM.
        if not isinstance(getattr(base, "optimizer", base), DeferredSAM):
            self.optimizer = self.sam = self.sam_settings.wrap(base, DeferredSAM)
        self.sam_settings.begin()
        return self.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        rho = self.sam.rho
        super()._load_optimizer_and_scheduler(checkpoint)
        self.sam_settings.warn_if_rho_differs(self.sam, rho)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor | None:
        """Keep the micro-batch; if it is the last of its step, run all passes over all micro-batches."""
        self._micro_batches.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._micro_batches = self._micro_batches, []
        if self.sam.model is not model:
            self.sam.model = model  # as the Trainer wrapped it
        model.train()
        prepared = [self._prepare_inputs(inputs) for inputs in micro_batches]
        self.__dict__["_prepare_inputs"] = copy.copy  # the Trainer calls it in each pass; compute_loss may pop entries
        try:
            return self._compute_gradient(model, prepared, num_items_in_batch)
        finally:
            del self.__dict__["_prepare_inputs"]

    def _compute_gradient(self, model: nn.Module, micro_batches: list[Inputs], num_items: Any) -> Tensor | None:
        """Run the passes of a step, with its loss and records at w."""

        def pass_on(pieces: list[_Piece], share: float) -> RecordedPass:
            return RecordedPass(lambda: self._run(model, pieces, num_items, share), [self])

        whole = [_Piece(inputs, share=1.0) for inputs in micro_batches]
        share = self.sam_settings.part
        splits = [split_batch(dict(inputs), share, None) for inputs in micro_batches if share < 1]
        parts = [_Piece(s.micro_batches[0], share=s.sizes[0] / sum(s.sizes)) for s in splits]
        rests = [_Piece(s.rest, share=s.sizes[1] / sum(s.sizes)) for s in splits if s.rest is not None]
        num_examples = [sum(s.sizes[0] for s in splits), sum(sum(s.sizes[1:]) for s in splits)]
        part, rest = (count / sum(num_examples) if rests else 1.0 for count in num_examples)
        unrecorded = UnrecordedPass(lambda: self._run(model, parts or whole, num_items, part), [self])
        self.sam_settings.before_gradient(self.sam, unrecorded, self.accelerator.scaler)
        if not rests or not self.sam.needs_perturbed_pass:
            return self.sam.compute_gradient(pass_on(whole, 1.0))
        return self.sam.compute_gradient(pass_on(parts, part), rest=pass_on(rests, rest), weights=[part, rest])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add SAM's metrics to the training logs."""
        if "loss" in logs and hasattr(self, "sam"):
            metrics = self.sam.metrics
            logs |= {"sharpness": metrics.sharpness.item(), "sam_grad_norm": metrics.grad_norm.item()}
            logs |= {"rho": self.sam.rho} if self.sam_settings.is_auto else {}
        super().log(logs, *args, **kwargs)

    def _run(self, model: nn.Module, pieces: list["_Piece"], num_items: Any, share: float) -> Tensor:
        """Run the forward and backward passes of some pieces, and return their mean loss.

        SAM multiplies the gradient by the ``share`` of the pieces in the batch. The Trainer divides losses by the
        number of items (tokens, say) in the whole batch, or takes the mean of each micro-batch and divides by their
        number. Both divisors are scaled: the sum over all pieces is the Trainer's gradient.
        """
        self.sam.zero_grad()
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # of DistributedDataParallel
        num_micro_batches: float = self.current_gradient_accumulation_steps  # type: ignore[has-type]
        num_items = num_items if share == 1 or num_items is None else num_items * share
        losses = []
        try:
            for i, piece in enumerate(pieces):
                self.current_gradient_accumulation_steps = num_micro_batches * share / piece.share
                with no_sync() if i < len(pieces) - 1 else contextlib.nullcontext():
                    losses.append(super().training_step(model, piece.inputs, num_items))
        finally:
            self.current_gradient_accumulation_steps = num_micro_batches
        return torch.stack(losses).sum()


class _Piece(NamedTuple):
    """Some examples of a micro-batch."""

    inputs: Inputs
    share: float
    """Of the examples of the micro-batch."""


class SAMTrainer(SAMMixin, Trainer):
    """The Hugging Face Trainer with SAM: ``SAMTrainer(model, args, train_dataset=..., sam={"rho": 0.05})``."""
