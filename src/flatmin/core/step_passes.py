"""The passes of a SAM step, and the move to w + eps and back between them."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatmin.core import ddp
from flatmin.core.checks import Closure, Settings, check_rho, keep_loss
from flatmin.core.flat_buffers import VectorOf
from flatmin.core.gradients import GradientSum, drop_gradients
from flatmin.core.joint_optimizer import has_momentum, momentum_in
from flatmin.core.other_optimizers import note_summed
from flatmin.core.pass_state import ModelState, PassState, has_running_statistics
from flatmin.core.replay import Replay
from flatmin.core.step_functions import StepFunction, combine_gradients, kept_gradients
from flatmin.core.step_state import SAMMetrics, StepState
from flatmin.core.weight_perturber import AscentNorms

# In the first parameter group, because that is what checkpoints keep, torch.distributed's too.
GENERATOR_KEY = "sam_generator"
RHO_KEY = "sam_default_rho"
FUNCTION_KEYS = ("sam_direction", "sam_combine")

ACCUMULATION_WARNING = (
    "The closure accumulated into an existing gradient: SAM's direction then comes from both, but its second pass is "
    "the closure's alone. Zero the gradients in the closure. To accumulate over micro-batches, pass a list of "
    "closures, or run all of them in both passes of `with opt.perturbed():`."
)


class FirstPass(NamedTuple):
    """A first pass that has been run already."""

    start: PassState
    loss: Tensor


class SAMPasses(NamedTuple):
    """What the passes of one closure measured."""

    metrics: SAMMetrics
    loss: Tensor
    """Of the closure: at w, or at w + eps if there was no pass at w."""


class Share(NamedTuple):
    """How much the gradients of one closure's passes count, and in what they are summed up."""

    total: GradientSum
    share: float
    """Of the closure in the batch."""
    weight: float
    """Of the correction: g + weight * (g(w + eps) - g)."""


class StepPasses:
    """Runs the passes of one closure, or moves the weights around a pass of the user's.

    The groups and the state of the base optimizer are looked up in every step.
    """

    def __init__(
        self, base: Optimizer, settings: Settings, state: StepState, generator: torch.Generator | None
    ) -> None:
        self.base, self.settings, self.state, self.generator = base, settings, state, generator
        self.direction = StepFunction("direction", settings.direction) if callable(settings.direction) else None
        self.combine = None if settings.combine is None else StepFunction("combine", settings.combine)
        self.functions = [function for function in (self.direction, self.combine) if function is not None]
        self.replay = Replay(self)
        self._others_key: Any = None
        self._found_others: list[Tensor] = []

    def sam_gradient(
        self,
        closure: Closure,
        *,
        ascent: Closure | None = None,
        share: Share | None = None,
        first: FirstPass | None = None,
        keep_state: bool = True,
    ) -> SAMPasses:
        """Run the passes of one closure.

        The SAM gradient is left in the parameters' gradients, reduced over the workers, or added to ``share.total`` and
        left on its worker. ``keep_state`` is False where the caller puts the model's state back.
        """
        settings, state = self.settings, self.state
        if not settings.sync_perturbation and state.warn_once("workers"):
            ddp.warn_if_passes_cannot_be_local(state.model, self.parameters())
        state.marks.revoke_step()
        weight = 1.0 if share is None else share.weight
        if first is None and self.needs_first_pass(weight):
            first = FirstPass(self.start(), self._first_pass(ascent or closure))
        several = settings.ascent_steps > 1
        # Without a first pass the one at w + eps is the only one.
        with self.at_perturbed_weights(share, several=several, keep_state=keep_state and first is not None) as norms:
            for _ in range(1, settings.ascent_steps):
                if first is not None:
                    first.start.restore()
                self.run(ascent or closure, reduce=settings.sync_perturbation)
                norms = norms._replace(perturbation=self._ascend(self.radii(), several=True).perturbation)
                drop_gradients(self.parameters())
            if first is not None:
                first.start.restore()
            # A function of reduced gradients needs both of them reduced.
            reduce = share is None or (self.combine is not None and settings.sync_perturbation)
            perturbed_loss = self.run(closure, reduce=reduce)
        unknown = perturbed_loss.new_full((), math.nan)
        loss = unknown if first is None else first.loss
        metrics = SAMMetrics(
            loss=loss,
            perturbed_loss=perturbed_loss,
            sharpness=unknown if ascent is not None else perturbed_loss - loss,
            grad_norm=norms.gradient,
            perturbation_norm=norms.perturbation,
        )
        return SAMPasses(metrics, perturbed_loss if first is None or ascent is not None else loss)

    @contextlib.contextmanager
    def at_perturbed_weights(
        self, share: Share | None = None, *, several: bool = False, keep_state: bool = True, stay: bool = False
    ) -> Iterator[AscentNorms]:
        """Move to w + eps on entry and come back on exit, whatever happens in between.

        With a ``share``, the gradients on entry and of the block are added to its total. With ``combine``, its result
        takes the place of the block's gradients. ``stay`` stays at w.
        """
        state = self.state
        radii = [0.0 if stay else radius for radius in self.radii()]
        state.perturber.prepare(self.base.param_groups, radii)
        if (self.settings.follows_gradient or self.combine is not None) and not self._has_gradient(radii):
            raise ValueError(
                "There are no gradients to ascend along: none of the parameters with a radius above 0 has one. "
                "Call backward() on the loss first (in a closure: before it returns)."
            )
        first = None if self.combine is None or stay else kept_gradients(self.parameters(), state.model)
        state.marks.revoke_step()
        state.perturber.save()
        after_first = ModelState(state.model if keep_state else None, self.parameters())
        state.is_perturbed = True
        try:
            norms = self._ascend(radii, several)
            if share is not None and share.weight != 1.0:
                share.total.take(share.share * (1 - share.weight))
            drop_gradients(self.parameters())
            writes = {p: state.marks.mark_older([p]) for p in self._others() if p.grad is not None}
            yield norms
            # Zeroing in place would be one write more than there are backward passes.
            most = state.marks.num_backwards()
            note_summed([p for p, written in writes.items() if 0 < (written() or 0) <= most], state)
        finally:
            state.perturber.restore()
            ddp.forget_gathered_weights(state.model, self.parameters())
            state.is_perturbed = False
            after_first.restore()
        if self.combine is not None and first is not None:
            combine_gradients(self.combine, first)
        if share is not None:
            share.total.take(share.share * share.weight)

    def run(self, closure: Closure, *, reduce: bool) -> Tensor:
        """Call a closure and return its loss; its gradients are reduced over the workers or stay on this one."""
        return keep_loss(self._call(closure, reduce=reduce))

    def run_keeping_gradients(self, closure: Closure) -> Tensor:
        """Call a closure whose gradient is added to the current ones, and reduced over the workers with them."""
        marks = self.state.marks
        writes = marks.mark_older(self.parameters())
        has_older = writes() is not None
        marks.is_held = True
        try:
            loss = self.run(closure, reduce=True)
        finally:
            marks.is_held = False
        # With this setting DDP itself replaces the gradients by views of its buckets.
        replaced = getattr(ddp.unwrap(self.state.model), "gradient_as_bucket_view", False)
        if has_older and not replaced and writes() is None:
            raise ValueError(
                "rest dropped the gradients of the other closures: it must zero them with opt.zero_grad(), which SAM "
                "holds off here, and not with model.zero_grad() or by hand."
            )
        return loss

    def _call(self, closure: Closure, *, reduce: bool) -> Any:
        local: AbstractContextManager[Any] = contextlib.nullcontext() if reduce else ddp.local_pass(self.state.model)
        was_paused, self.replay.is_paused = self.replay.is_paused, True
        try:
            with torch.enable_grad(), local:
                return closure()
        finally:
            self.replay.is_paused = was_paused

    def _first_pass(self, closure: Closure) -> Tensor:
        """Call a closure at w, and warn if it added its gradient to an older one."""
        marks = self.state.marks
        writes = marks.mark_older(self.parameters())
        marks.zeroed = False
        loss = self.run(closure, reduce=self.settings.sync_perturbation)
        num_writes = writes()
        # One write is the backward pass; with a second one something else than opt.zero_grad() zeroed it in place.
        added = num_writes is not None and num_writes <= 1 and not marks.zeroed
        if added and self.state.warn_once("accumulation"):
            warnings.warn(ACCUMULATION_WARNING, UserWarning, stacklevel=5)
        return loss

    def call_after_a_pass(self, closure: Closure) -> FirstPass | None:
        """Call a closure that comes after ``perturbed()``; None if it does nothing, like a trainer's wrapper.

        One that computes gradients is a real one, and this was its first pass.
        """
        start, marks = self.start(), self.state.marks
        before = marks.versions(self.parameters())
        loss = self._call(closure, reduce=self.settings.sync_perturbation)
        return None if before == marks.versions(self.parameters()) else FirstPass(start, keep_loss(loss))

    def _ascend(self, radii: list[float], several: bool) -> AscentNorms:
        settings, groups = self.settings, self.base.param_groups
        noise = self.generator if settings.direction == "random" else None
        momentum = settings.direction == "momentum"
        vector_of: VectorOf = momentum_in(self.base) if momentum else lambda p: p.grad
        if self.direction is not None:
            parameters = self.perturbed_parameters(radii)
            vector_of = self.direction(parameters, {p: p.grad for p in parameters}).get
        norms = self.state.perturber.ascend(
            radii,
            p=settings.p,
            eta=settings.eta,
            # The momentum is what the weights move against, whether the loss is maximized or not: eps = -rho v / |v|.
            maximize=[momentum or bool(group.get("maximize", False)) for group in groups],
            vector_of=vector_of,
            noise=noise,
            several=several,
        )
        ddp.forget_gathered_weights(self.state.model, self.parameters())
        if noise is not None:
            groups[0][GENERATOR_KEY] = noise.get_state()
        unknown = torch.full_like(norms.gradient, math.nan)
        return norms if settings.direction == "gradient" else norms._replace(gradient=unknown)

    def _others(self) -> list[Tensor]:
        """Return the model's parameters that are not SAM's; they are looked up when the model or the groups change."""
        key = (self.state.model, [len(group["params"]) for group in self.base.param_groups])
        if key != self._others_key:
            own = set(map(id, self.parameters()))
            model = ddp.unwrap(self.state.model)
            every = model.parameters() if model is not None else ()
            self._others_key, self._found_others = key, [p for p in every if id(p) not in own]
        return self._found_others

    def parameters(self) -> Iterator[Tensor]:
        """Return the parameters of all groups."""
        return (p for group in self.base.param_groups for p in group["params"])

    def perturbed_parameters(self, radii: list[float]) -> list[Tensor]:
        """Return the trainable parameters of the groups with a radius above 0, each once."""
        groups = [group for group, radius in zip(self.base.param_groups, radii, strict=True) if radius > 0]
        return [p for p in dict.fromkeys(p for group in groups for p in group["params"]) if p.requires_grad]

    def start(self) -> PassState:
        """Return what the next pass starts from."""
        return PassState(self.state.model, self.parameters(), statistics=self.replay.reads_statistics)

    def radii(self) -> list[float]:
        """Return the radius of each parameter group."""
        return [check_rho(group.get("sam_rho", self.state.rho), "sam_rho") for group in self.base.param_groups]

    def create_function_states(self) -> None:
        """Make the state of functions exist, for a distributed checkpoint to be loaded into."""
        if self.direction is not None:
            self.direction.create_state(self.perturbed_parameters(self.radii()), num_inputs=1)
        if self.combine is not None:
            self.combine.create_state([p for p in dict.fromkeys(self.parameters()) if p.requires_grad], num_inputs=2)

    def needs_perturbed_pass(self) -> bool:
        """Return whether the next step needs a pass at w + eps."""
        if max(self.radii()) == 0 or self.settings.weight == 0:
            return False
        return self.settings.direction != "momentum" or has_momentum(self.base, self.state.num_steps)

    def needs_first_pass(self, weight: float = 1.0) -> bool:
        """Return whether a pass at w is needed: for the direction, for the gradient there, or for batch norm."""
        if self.settings.direction == "random":
            mixes = weight != 1.0 or self.combine is not None
            return mixes or has_running_statistics(self.state.model)
        return self.settings.follows_gradient

    def _has_gradient(self, radii: list[float]) -> bool:
        groups = [group for group, radius in zip(self.base.param_groups, radii, strict=True) if radius > 0]
        return not groups or any(p.grad is not None for group in groups for p in group["params"] if p.requires_grad)
