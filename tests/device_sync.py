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
        result = function(*args, **kwargs)
        source = args[1] if name in ("copy_", "_foreach_copy_") else args[0] if name == "_to_copy" else None
        tensors = source if isinstance(source, (list, tuple)) else [source]
        target = args[0][0] if name == "_foreach_copy_" else result
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu" and target.device.type == "cpu":
                raise AssertionError(f"{name} copies from the device")
        return result
