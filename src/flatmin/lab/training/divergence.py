"""What may help if the loss diverges (NaN or inf)."""

from flatmin.lab.spec.experiment import Optim


def fixes(optim: Optim, precision: str) -> list[str]:
    """Return what to try next.

    Args:
        optim: the run's optimizer settings.
        precision: the precision it used, "auto" resolved.

    Example:
        >>> fixes(Optim(lr=3.0, clip_norm=5.0), "float32")
        ['a smaller optim.lr than 3', 'optim.warmup_epochs']
    """
    advice = [f"a smaller optim.lr than {optim.lr:g}", "optim.warmup_epochs"]
    advice += [f"a smaller optim.rho than {optim.rho_text}"] if optim.uses_sam else []
    advice += ["optim.clip_norm (the reference code has 5.0)"] if optim.clip_norm is None else []
    advice += ["precision float32"] if precision == "bfloat16" else []
    return advice
