"""Sharpness-Aware Minimization: the optimizer and its maths. Needs only torch."""
