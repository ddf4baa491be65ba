"""The passes of a SAM step, and the walk to w + eps and back between them."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatmin.core import ddp
from flatmin.core.checks import check_rho, keep_loss
from flatmin.core.metrics import SAMMetrics
from flatmin.core.optimizer_wrapper import OptimizerWrapper
from flatmin.core.rng import RandomState
from flatmin.core.step_state import SharedState
from flatmin.core.weight_perturber import AscentNorms

Closure = Callable[[], Any]

# In the first parameter group, because that is what checkpoints keep, those of torch.distributed too.
GENERATOR_KEY = "sam_generator"

OLDER = "_sam_older"  # an attribute of gradients
ACCUMULATION_WARNING = (
    "The closure added its gradient to one that was there before: SAM's direction then comes from both, but its second "
    "pass is the closure's alone. Zero the gradients in the closure. To accumulate over micro-batches, pass a list of "
    "closures, or run all of them in both passes of `with opt.perturbed():`."
)
SPENT_WARNING = (
    "The gradients of the last step were still there when the first pass began, and its gradient was added to them: "
    "SAM's direction then comes from both. Call opt.zero_grad() before the first pass."
)


class FirstPass(NamedTuple):
    """A first pass that has been run already."""

    random: RandomState  # as it was before
    loss: Tensor | None


class Passes(OptimizerWrapper):
    """Runs the passes of one closure, or the walk around a pass of the user's."""

    p: float
    eta: float | None
    ascent_steps: int
    direction: str
    generator: torch.Generator | None
    sync_perturbation: bool
    _state: SharedState

    def _sam_gradient(
        self, closure: Closure, ascent: Closure | None, *, reduce: bool, first: FirstPass | None = None
    ) -> SAMMetrics:
        """Run the passes of one closure; the SAM gradient is left in the parameters' gradients."""
        if ascent is not None and self.direction == "random":
            raise ValueError('ascent gives the direction, but direction="random" needs none. Leave one of them out.')
        if not self.sync_perturbation and self._state.warn_once("workers"):
            ddp.warn_if_passes_cannot_be_local(self._state.model, self._parameters())
        self._state.revoke_step()
        random, loss = first or FirstPass(RandomState(self._devices()), None)
        if loss is None and self._needs_first_pass():
            loss = self._first_pass(ascent or closure)
        with self._at_perturbed_weights(several=self.ascent_steps > 1) as norms:
            for _ in range(1, self.ascent_steps):
                random.restore()
                self._pass(ascent or closure, reduce=self.sync_perturbation)
                norms = norms._replace(perturbation=self._ascend(several=True).perturbation)
                self._drop_gradients()
            random.restore()
            perturbed_loss = self._pass(closure, reduce=reduce)
        unknown = perturbed_loss.new_full((), math.nan)
        return SAMMetrics(
            loss=unknown if loss is None else loss,
            perturbed_loss=perturbed_loss,
            sharpness=unknown if loss is None or ascent is not None else perturbed_loss - loss,
            grad_norm=norms.gradient,
            perturbation_norm=norms.perturbation,
        )

    def _pass(self, closure: Closure, *, reduce: bool) -> Tensor:
        """Call a closure and return its loss."""
        return keep_loss(self._call(closure, reduce=reduce))

    def _call(self, closure: Closure, *, reduce: bool) -> Any:
        with torch.enable_grad(), contextlib.nullcontext() if reduce else ddp.local_pass(self._state.model):
            return closure()

    def _first_pass(self, closure: Closure) -> Tensor:
        """Call a closure at w, and warn if it added its gradient to an older one."""
        # A mark and not a reference, which would keep the older gradient's memory through the pass.
        older, mark = next((p for p in self._parameters() if p.grad is not None), None), object()
        if older is not None:
            setattr(older.grad, OLDER, mark)
        self._state.zeroed = False
        loss = self._pass(closure, reduce=self.sync_perturbation)
        added = older is not None and getattr(older.grad, OLDER, None) is mark and not self._state.zeroed
        if added and self._state.warn_once("accumulation"):
            warnings.warn(ACCUMULATION_WARNING, UserWarning, stacklevel=5)
        return loss

    def _call_after_a_pass(self, closure: Closure) -> FirstPass | None:
        """Call a closure that comes after ``perturbed()``; None if it does nothing, as that of a trainer's wrapper.

        One that computes gradients is a real one, and this was its first pass.
        """
        random = RandomState(self._devices())
        before = self._state.versions(self._parameters())
        loss = self._call(closure, reduce=self.sync_perturbation)
        return None if before == self._state.versions(self._parameters()) else FirstPass(random, keep_loss(loss))

    @contextlib.contextmanager
    def _at_perturbed_weights(self, several: bool = False) -> Iterator[AscentNorms]:
        """Climb on entry, come back on exit, whatever happens in between."""
        state = self._state
        state.perturber.prepare(self.param_groups, self._radii())
        if self.direction == "gradient" and not self._has_gradient():
            raise ValueError(
                "There are no gradients to climb along: none of the parameters with a radius above 0 has one. "
                "Call backward() on the loss first (in a closure: before it returns)."
            )
        state.revoke_step()
        state.perturber.save()
        self._state.buffers.save()
        state.is_perturbed = True
        try:
            norms = self._ascend(several)
            self._drop_gradients()
            yield norms
        finally:
            state.perturber.restore()
            self._state.buffers.restore()
            state.is_perturbed = False

    def _ascend(self, several: bool) -> AscentNorms:
        noise = self.generator if self.direction == "random" else None
        maximize = [bool(group.get("maximize", False)) for group in self.param_groups]
        norms = self._state.perturber.ascend(
            self._radii(), p=self.p, eta=self.eta, maximize=maximize, noise=noise, several=several
        )
        if noise is not None:
            self.param_groups[0][GENERATOR_KEY] = noise.get_state()
            return norms._replace(gradient=torch.full_like(norms.gradient, math.nan))
        return norms

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _drop_gradients(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(group["params"][0].device for group in self.param_groups if group["params"]))

    def _radii(self) -> list[float]:
        return [check_rho(group.get("sam_rho", self._state.rho), "sam_rho") for group in self.param_groups]

    def _has_gradient(self) -> bool:
        groups = [group for group, radius in zip(self.param_groups, self._radii(), strict=True) if radius > 0]
        return not groups or any(p.grad is not None for group in groups for p in group["params"] if p.requires_grad)

    def _needs_first_pass(self) -> bool:
        return self.direction == "gradient" or self._state.buffers.present()
