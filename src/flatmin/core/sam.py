"""SAM as a torch optimizer that wraps a built one."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin.core import ddp, dtensor
from flatmin.core.batchnorm import NormalizationBuffers
from flatmin.core.checks import (
    check_adaptive,
    check_ascent_steps,
    check_base,
    check_closures,
    check_generator,
    check_p,
    check_rho,
    shares_of,
)
from flatmin.core.metrics import SAMMetrics, weighted_mean
from flatmin.core.micro_batches import GradientMean
from flatmin.core.rng import direction_generator
from flatmin.core.step_passes import GENERATOR_KEY, SPENT_WARNING, Closure, Passes
from flatmin.core.step_state import SharedState


class SAM(Passes):
    r"""Sharpness-Aware Minimization (Foret et al., 2021) around any optimizer.

    A step computes the gradient g at w, climbs to the highest point nearby as the gradient sees it,

    .. math:: \hat\epsilon = \rho \operatorname{sign}(g) |g|^{q-1} / (\lVert g \rVert_q^q)^{1/p}, \quad 1/p + 1/q = 1,

    (Eq. 2; for p = 2 that is :math:`\rho g / \lVert g \rVert_2`), computes the gradient there, returns to w, and lets
    the base optimizer step with that gradient (Eq. 3). The norm is joint over all parameters.

    There are three ways to take a step::

        loss = opt.step(closure)                # 1. a closure: zero the gradients, loss, backward, return the loss

        opt.zero_grad()                         # 2. two visible passes: AMP, accumulation, clipping, any trainer
        loss_fn(model(x), y).backward()
        with opt.perturbed():
            loss_fn(model(x), y).backward()
        opt.step()

        opt.step([closure_1, closure_2])        # 3. m-sharpness: a perturbation for each micro-batch (Section 4.1)

    SAM shares ``param_groups`` and ``state`` with its base: schedulers may hold either, and a state dict of one can be
    loaded into the other. A parameter group may have a radius of its own under the key ``sam_rho``: then
    :math:`\epsilon = T\, dual_p(T g)` with T the group's radius, still with one joint norm. 0 takes the group out.

    What holds: weights come back bit for bit, also after an exception; a zero or non-finite gradient gives
    :math:`\epsilon = 0`; nothing waits for the device. In way 1 and 3, random layers (dropout) draw the same noise in
    all passes of a closure; a closure must not draw a new batch, as it is called twice.

    Args:
        base: a built optimizer, such as ``torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)``.
        rho: the radius of the neighborhood. May be changed between steps by assigning to ``opt.rho``.
        p: the norm of the neighborhood, in [1, inf].
        adaptive: ASAM (Kwon et al., 2021): :math:`T = \rho (|w| + \eta)`. A float is eta; True is 0.01. Its rho is
            larger than SAM's: 0.5 to 2.
        ascent_steps: how many steps of projected gradient ascent find :math:`\epsilon` (Appendix C.6). A step costs
            ``ascent_steps + 1`` passes; more than one needs p in {1, 2, inf}, a closure, and another copy of the
            parameters.
        direction: "gradient", or "random" for a Gaussian direction of the same norm (Appendix C.5). Then the first pass
            is left out, unless ``model`` has running statistics that must come from it.
        generator: where random directions come from; part of the state dict. If None, one is made from
            ``torch.initial_seed()`` (and the worker's rank, where each has its own perturbation). Generators given to
            several workers must be seeded alike for sharded parameters or a shared perturbation, else differently.
        model: the model, as you call it (so the DistributedDataParallel or compiled one). With it, the running
            statistics of batch norm are those of the first pass, and under DDP the first pass stays on its worker.
        sync_perturbation: under DDP, share one perturbation instead of having one for each worker, which the paper
            recommends and which needs one reduction of gradients a step instead of two.

    Raises:
        TypeError: base is not an optimizer instance, or one that needs a closure itself.
        ValueError: an argument out of its range.

    Example:
        For :math:`L(w) = w^2 / 2` at w = 1, the gradient is taken at 1 + rho:

        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure)
        tensor(0.5000)
        >>> w.data
        tensor([0.8500])
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float = 0.05,
        p: float = 2.0,
        adaptive: bool | float = False,
        ascent_steps: int = 1,
        direction: Literal["gradient", "random"] = "gradient",
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
        sync_perturbation: bool = False,
    ) -> None:
        check_base(base)
        if isinstance(base, SAM):
            raise TypeError("base is a SAM already: wrap the optimizer inside it, once.")
        self.base = base
        self.p = check_p(p)
        self.eta = check_adaptive(adaptive)
        self.ascent_steps = check_ascent_steps(ascent_steps, self.p, direction)
        self.direction = direction
        self.generator = check_generator(generator)
        self.sync_perturbation = sync_perturbation
        self.__setstate__({"rho": check_rho(rho), "model": None})
        self._radii()
        self.model = model
        if direction == "random":
            shared = sync_perturbation or any(dtensor.is_sharded(p) for p in self._parameters())
            self.generator = generator or direction_generator(self._devices()[0], shared=shared)
            self.param_groups[0][GENERATOR_KEY] = self.generator.get_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may have a radius ``sam_rho`` of its own."""
        if "sam_rho" in param_group:
            check_rho(param_group["sam_rho"], "sam_rho")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        if not self._state.is_perturbed:
            self._state.revoke_step()  # a new step begins
        self._state.zeroed = True
        super().zero_grad(set_to_none)

    @property
    def rho(self) -> float:
        """The radius of the groups that have none of their own."""
        return self._state.rho

    @rho.setter
    def rho(self, rho: float) -> None:
        self._state.rho = check_rho(rho)

    @property
    def model(self) -> nn.Module | None:
        """The model whose running statistics and gradient reduction SAM looks after. May be assigned to."""
        return self._state.model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        ddp.check_model(model, self._parameters(), self.sync_perturbation)
        self._state.model = model
        self._state.buffers = NormalizationBuffers(model)

    @property
    def metrics(self) -> SAMMetrics:
        """What the last step measured."""
        return self._state.metrics

    # Steps.

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        r"""Stand at :math:`w + \epsilon` within the block, with the direction of the gradients that are there on entry.

        The gradients are reset on entry; those of the pass within the block are what the next ``step()`` uses. On exit,
        by an exception too, w comes back bit for bit. The running statistics of ``model`` are those from before.

        Gradients from several backward passes before the block, and again within it, are gradient accumulation with one
        shared perturbation. Gradients of a scaled loss need no unscaling before the block: :math:`\epsilon` does not
        depend on the scale.

        Raises:
            ValueError: within another ``perturbed()``, without gradients, or with ``ascent_steps`` above 1, which needs
                a closure.
        """
        if self.ascent_steps > 1:
            raise ValueError(
                f"perturbed() takes one ascent step, but ascent_steps={self.ascent_steps}: the steps in between need "
                "gradients of their own. Use step(closure), or ascent_steps=1."
            )
        self._check_not_perturbed("perturbed()")
        if self._state.holds_spent_gradients(self._parameters()) and self._state.warn_once("spent gradients"):
            warnings.warn(SPENT_WARNING, UserWarning, stacklevel=3)
        with self._at_perturbed_weights() as norms:
            self._state.metrics = SAMMetrics(grad_norm=norms.gradient, perturbation_norm=norms.perturbation)
            yield
        self._state.allow_step(self._parameters())

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure, *, ascent: Closure | None = None) -> Tensor | None: ...
    @overload
    def step(self, closure: Sequence[Closure], *, weights: Sequence[float] | None = None) -> Tensor: ...

    def step(
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        ascent: Closure | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Take a step.

        Args:
            closure: a function that zeroes the gradients, computes the loss, calls ``backward()`` and returns the loss;
                or a list of them, one for each micro-batch, each of which gets its own perturbation (m-sharpness): the
                average of their SAM gradients is used, for which one more copy of the gradients is needed. None after
                a pass within ``perturbed()``.
            ascent: another closure that the direction comes from (a part of the batch, say). Each is called once.
            weights: how much each micro-batch counts, such as its number of examples; equal if None.

        Returns:
            The loss at w (the weighted mean, for a list). With ``ascent``, or where no first pass was needed, the loss
            at w + eps. None without a closure.

        Raises:
            TypeError: neither a closure nor a pass within ``perturbed()`` came before, or the closure returned no loss.
        """
        self._check_not_perturbed("step()")
        if closure is not None and not callable(closure):
            return self._step_micro_batches(check_closures(closure), ascent, weights)
        if weights is not None:
            raise ValueError("weights goes with a list of closures, one weight for each.")
        if closure is None:
            self._step_ready()
            return None
        first = None
        if ascent is None and self._state.step_allowed(self._parameters()):
            first = self._call_after_a_pass(closure)
            if first is None:
                self._step_ready()
                return None
        measured_at_w = ascent is None and (first is not None or self._needs_first_pass())
        metrics = self._state.metrics = self._sam_gradient(closure, ascent, reduce=True, first=first)
        self.base.step()
        return metrics.loss if measured_at_w else metrics.perturbed_loss

    def _step_ready(self) -> None:
        """Take the base step after ``perturbed()``."""
        if not self._state.step_allowed(self._parameters()) and not self._is_initialization():
            raise TypeError(
                "SAM.step() needs a closure, or a pass at the perturbed weights before it: SAM evaluates the loss "
                "twice. Pass a function that zeroes the gradients, computes the loss, calls backward() and returns the "
                "loss; or run the second pass, with its backward(), inside `with opt.perturbed():`. The gradients of "
                "that pass must still be there: change them in place, or inside the block."
            )
        self._state.consume_step()
        self.base.step()

    def _step_micro_batches(
        self, closures: list[Closure], ascent: Closure | None, weights: Sequence[float] | None
    ) -> Tensor:
        if ascent is not None:
            raise ValueError("ascent goes with one closure, not with a list: each closure gives its own direction.")
        shares = shares_of(closures, weights)
        parameters = list(self._parameters())
        mean = GradientMean(parameters)
        measured = []
        for closure, share in zip(closures, shares, strict=True):
            measured.append(self._sam_gradient(closure, None, reduce=False))
            mean.take(share)
        mean.put()
        if ddp.is_parallel() and hasattr(ddp.unwrap(self.model), "no_sync"):
            ddp.average_gradients(parameters, self.model)
        self._state.metrics = weighted_mean(measured, shares)
        self.base.step()
        metrics = self._state.metrics
        return metrics.loss if self._needs_first_pass() else metrics.perturbed_loss

    # Checkpoints and copies.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of SAM or of its base optimizer."""
        super().load_state_dict(state_dict)
        self._state.revoke_step()
        generator_state = self.param_groups[0].get(GENERATOR_KEY)
        if generator_state is not None and self.generator is not None:
            self.generator.set_state(generator_state.cpu())

    def __getstate__(self) -> dict[str, Any]:
        names = ("base", "p", "eta", "ascent_steps", "direction", "generator", "sync_perturbation", "rho", "model")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self._state = SharedState(rho=rest.pop("rho"), model=rest.pop("model"))
        super().__setstate__(rest)

    def __repr__(self) -> str:
        settings = f"rho={self.rho}, p={self.p}"
        settings += f", adaptive={self.eta}" if self.eta is not None else ""
        settings += f", ascent_steps={self.ascent_steps}" if self.ascent_steps > 1 else ""
        settings += ', direction="random"' if self.direction == "random" else ""
        return f"SAM({settings}, base={self.base!r})"

    def _check_not_perturbed(self, call: str) -> None:
        if self._state.is_perturbed:
            raise ValueError(
                f"{call} was called inside `with opt.perturbed():`, where the weights are perturbed. "
                "Leave the block first: step() comes after it, and one block cannot stand in another."
            )

    def _is_initialization(self) -> bool:
        """Whether this is the bare step by which torch.distributed.checkpoint makes an optimizer create its state."""
        return not self.state and all(float(group.get("lr", 1.0)) == 0 for group in self.param_groups)
