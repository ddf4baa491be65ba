"""How flat is a minimum: m-sharpness, Hessian spectra, loss landscapes, the bound, predictive power."""

from flatmin.measures.curvature import GGNOperator, HessianOperator, sam_update_cosine
from flatmin.measures.landscape import Landscape, loss_landscape
from flatmin.measures.pac_bayes import Bound, pac_bayes_bound
from flatmin.measures.predictive import Score, predictive_power
from flatmin.measures.sharpness import Sharpness, m_sharpness
from flatmin.measures.spectrum import Eigenvalues, SpectralDensity, spectral_density, top_eigenvalues
from flatmin.measures.weight_noise import AverageSharpness, average_sharpness

__all__ = [
    "AverageSharpness",
    "Bound",
    "Eigenvalues",
    "GGNOperator",
    "HessianOperator",
    "Landscape",
    "Score",
    "Sharpness",
    "SpectralDensity",
    "average_sharpness",
    "loss_landscape",
    "m_sharpness",
    "pac_bayes_bound",
    "predictive_power",
    "sam_update_cosine",
    "spectral_density",
    "top_eigenvalues",
]
