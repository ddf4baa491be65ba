"""Checkpoints: whole or not there; what a session records of its machine."""

import errno
import shutil

import pytest
import torch

from flatmin.lab.errors import StorageError
from flatmin.lab.runs import checkpoint
from flatmin.lab.runs.checkpoint import checkpoints, latest_checkpoint, prepare_directory, save_checkpoint
from flatmin.lab.runs.environment import environment

CPU = torch.device("cpu")


def state(step):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step, "history": "[]"}


def test_what_is_saved_comes_back_and_the_two_latest_are_kept(tmp_path):
    for step in (1, 2, 300, 40):
        save_checkpoint(tmp_path, step, state(step))
    assert [p.name[:13] for p in checkpoints(tmp_path)] == ["step-00000300", "step-00000040"]
    loaded = latest_checkpoint(tmp_path)
    assert loaded["step"] == 300
    assert torch.equal(loaded["model"]["w"], torch.full((100,), 300.0))


@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(damage, tmp_path):
    save_checkpoint(tmp_path, 1, state(1))
    path = save_checkpoint(tmp_path, 2, state(2))
    content = path.read_bytes()
    changed = content[:700] + bytes([content[700] ^ 1]) + content[701:]
    path.write_bytes({"truncated": content[:-50], "changed": changed, "emptied": b""}[damage])
    with pytest.warns(UserWarning, match=rf"{path.name} is corrupt .*falling back"):
        assert latest_checkpoint(tmp_path)["step"] == 1


def test_without_a_whole_checkpoint_there_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    path = save_checkpoint(tmp_path, 1, state(1))
    path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="corrupt"):
        assert latest_checkpoint(tmp_path) is None


def test_a_file_that_a_killed_process_left_half_written_is_never_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, state(1))
    (tmp_path / "step-00000002.part").write_bytes(b"half")
    assert latest_checkpoint(tmp_path)["step"] == 1
    prepare_directory(tmp_path, 1000)
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_loses_nothing_already_saved(tmp_path, monkeypatch):
    kept = save_checkpoint(tmp_path, 1, state(1))

    def full(content, file):
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(StorageError, match=rf"step 2 cannot be written .*No space left.*Saved so far: {kept.name}"):
        save_checkpoint(tmp_path, 2, state(2))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [kept]
    assert latest_checkpoint(tmp_path)["step"] == 1


def test_too_little_room_is_an_error_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10_000_000))
    prepare_directory(tmp_path, 3_000_000)
    with pytest.raises(StorageError, match=r"10\.0 MB free, but .* need 12\.0 MB"):
        prepare_directory(tmp_path, 4_000_000)


def test_an_unwritable_folder_is_an_error_beforehand(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot be written to.*--runs"):
        prepare_directory(tmp_path / "file" / "checkpoints", 10)


def test_the_version_of_torch_names_its_build(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")  # the package's metadata say 2.13.0
    assert environment()["torch"] == "2.13.0+cu130"
