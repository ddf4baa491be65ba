"""What differs between releases of torch behaves alike on all of them."""

import pytest
import torch

from flatmin.core import compat


def test_hooks_on_saved_tensors_are_seen_while_they_are_active():
    assert not compat.has_saved_tensors_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert compat.has_saved_tensors_hooks()
    assert not compat.has_saved_tensors_hooks()
    with torch.autograd.graph.save_on_cpu():  # asking did not disable them
        assert compat.has_saved_tensors_hooks()


@pytest.mark.parametrize("torch_version", [compat.TORCH, (2, 6)])
def test_asking_for_hooks_leaves_disabled_ones_disabled(torch_version, monkeypatch):
    monkeypatch.setattr(compat, "TORCH", torch_version)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not compat.has_saved_tensors_hooks()
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
            pass


def test_the_way_of_torch_2_6_to_see_hooks(monkeypatch):
    monkeypatch.setattr(compat, "TORCH", (2, 6))
    test_hooks_on_saved_tensors_are_seen_while_they_are_active()
