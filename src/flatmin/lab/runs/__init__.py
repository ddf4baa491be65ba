"""A run's directory: its files, checkpoints, lock and environment. May import spec, data and models."""
