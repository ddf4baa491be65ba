"""Datasets, augmentation, label noise and the input pipeline. May import spec."""
