"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""
