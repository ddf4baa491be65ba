"""Interleaved timing: on a shared machine only ratios within one run mean anything, and only their medians."""

import platform
import statistics
import time
from collections.abc import Callable

import numpy
import psutil
import torch
from torch import nn
from torch.nn import functional as F


def machine() -> str:
    """Return one line that says what the figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            model = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{model}, {psutil.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, "
        f"torch {torch.__version__} ({torch.get_num_threads()} threads), numpy {numpy.__version__}"
    )


def interleaved(methods: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the CPU seconds of each method in each round; a round runs every one of them once, in turning order.

    CPU time, with one thread, because on a machine that is shared the time on the clock measures the others too.
    """
    names = list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warm_up + rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.process_time()
            methods[name]()
            if index >= warm_up:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> tuple[float, float, float]:
    """Return the median and the quartiles of a method's time over the reference's, round by round."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that torch held at once, beyond what it held before, while the function ran."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


class Block(nn.Module):
    def __init__(self, inner, outer, stride, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=not norm), layer_norm(outer, norm)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=not norm), layer_norm(outer, norm)
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def layer_norm(width, norm):
    return nn.BatchNorm2d(width) if norm else nn.Identity()


def resnet20(norm=True):
    """ResNet-20 for 32 x 32 images, 272,282 weights with batch norm."""
    layers, inner = [nn.Conv2d(3, 16, 3, 1, 1, bias=not norm), layer_norm(16, norm), nn.ReLU()], 16
    for stage, outer in enumerate((16, 32, 64)):
        for block in range(3):
            layers.append(Block(inner, outer, 2 if stage and not block else 1, norm))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
