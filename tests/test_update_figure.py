"""The figure of one update in the docs: its points are those of the formulas."""

import importlib.util
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[1] / "docs" / "make_update_figure.py"


def test_the_points_of_the_figure_are_eq_2_and_the_gradient_at_the_perturbed_weights():
    """For L = c (w_1 w_2 - 1)^2 / 2 the gradient is c (w_1 w_2 - 1) (w_2, w_1), c the mean square of the inputs."""
    spec = importlib.util.spec_from_file_location("make_update_figure", SCRIPT)
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    scale = float(figure.INPUTS.square().mean())

    def gradient(w):
        return scale * (w[0] * w[1] - 1) * w[::-1]

    w, at = np.array(figure.START), figure.update()
    perturbed = w + figure.RHO * gradient(w) / np.linalg.norm(gradient(w))
    np.testing.assert_allclose(at["perturbed"], perturbed, rtol=1e-12)
    np.testing.assert_allclose(at["sgd"], w - figure.LR * gradient(w), rtol=1e-12)
    np.testing.assert_allclose(at["sam"], w - figure.LR * gradient(perturbed), rtol=1e-12)
    assert at["sam"][0] < w[0] < at["sgd"][0]  # as the page says: only SAM turns toward (1, 1)
    assert figure.draw(at).axes
