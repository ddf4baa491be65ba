"""Fails where the host would have to wait for the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")


class NoDeviceSync(TorchDispatchMode):
    """Raises an error for each operation whose result the host needs, and for copies from the device.

    The CPU stands for a device, so that an `.item()` counts. The device "meta" holds no data, so that `tolist()` and
    NumPy fail there as well.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in WAITS:
            raise AssertionError(f"{name} waits for the device")
        if any(source.device.type != "cpu" and target == "cpu" for source, target in copies(name, args, kwargs)):
            raise AssertionError(f"{name} copies from the device")
        return function(*args, **kwargs)


def copies(name, args, kwargs):
    """Return the tensors that an operation copies, each with the kind of device it is copied to."""
    if name == "_to_copy":
        return [(args[0], torch.device(kwargs.get("device") or args[0].device).type)]
    if name == "copy_":
        return [(args[1], args[0].device.type)]
    if name == "_foreach_copy_":
        return [(source, target.device.type) for target, source in zip(args[0], args[1], strict=True)]
    return []
