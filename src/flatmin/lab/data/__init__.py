"""Datasets, augmentation, label noise and the order in which examples are seen."""
