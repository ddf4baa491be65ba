"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""

from flatmin.core import (
    SAM,
    RealisedPerturbation,
    SAMGradient,
    SAMMetrics,
    ascent_step,
    random_step,
    realised_perturbation,
    sam_gradient,
)

__version__ = "0.1.0"

__all__ = [
    "SAM",
    "RealisedPerturbation",
    "SAMGradient",
    "SAMMetrics",
    "ascent_step",
    "random_step",
    "realised_perturbation",
    "sam_gradient",
]
