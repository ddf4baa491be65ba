"""Trainers import torchvision where it is installed, whose compiled operators may be missing."""

import flatmin.lab.data.torchvision_operators  # noqa: F401
