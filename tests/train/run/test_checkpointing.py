"""Checkpoints on disk: whole or not there at all, whatever they are damaged, killed or filled up by, and only the newest stay."""

import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.tests.train.tiny_runs import assert_same_run
from headstart.tests.train.trainings import RESUMABLE
from headstart.train.run.checkpointing import (
    copy_checkpoint,
    copy_head_folder,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    read_state,
    restore_replaced,
)
from headstart.train.run.optimization import build_optimizer


def save(run, head, optimizer, accelerator, num_kept, **state):
    given = {"optimizer": optimizer, "state": state, "accelerator": accelerator, "num_kept": num_kept}
    copy_checkpoint(run, copy_head_folder(head), **given)()


def test_checkpoint_stays_until_the_one_in_its_place_is_whole(tmp_path, monkeypatch):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer = build_optimizer(head, 0.0, 0.9, 0.999)
    save(tmp_path, head, optimizer, accelerator, num_kept=2, step=2, attempt=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, head, optimizer, accelerator, num_kept=2, step=2, attempt=2)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert (read_state(folder)["attempt"], find_damage(folder)) == (1, "")
    save(tmp_path, head, optimizer, accelerator, num_kept=2, step=2, attempt=3)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]
    assert (read_state(folder)["attempt"], find_damage(folder)) == (3, "")


@pytest.mark.parametrize("new", [True, False])
def test_checkpoint_that_was_being_replaced_is_found_again(trainer, finished, copied, new):
    """Killed between the two renames that put a new checkpoint in the place of an old one."""
    killed = copied("medusa", **RESUMABLE)
    checkpoints = killed / "checkpoints"
    (checkpoints / "step-000006").rename(checkpoints / "..step-000006.new.partial-01234567")
    old = checkpoints / ".step-000004.old"
    (checkpoints / "step-000004").rename(old)
    if new:
        shutil.copytree(old, checkpoints / ".step-000004.new")
        (old / "state.json").write_text("{}")  # what was put aside is not what goes on
    trainer.run(**RESUMABLE, output=killed, resume=True)
    assert_same_run(finished("medusa", **RESUMABLE), killed)
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]


def test_checkpoint_that_was_being_removed_is_not_there(tmp_path, monkeypatch):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer, remove = build_optimizer(head, 0.0, 0.9, 0.999), shutil.rmtree

    def remove_half(path, ignore_errors=False):
        remove(path if ignore_errors else path / "head", ignore_errors)
        if not ignore_errors:
            raise KeyboardInterrupt

    save(tmp_path, head, optimizer, accelerator, num_kept=1, step=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_half)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, head, optimizer, accelerator, num_kept=1, step=4)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]
    assert (tmp_path / "checkpoints" / ".step-000002.gone" / "state.json").exists()


def test_only_the_newest_checkpoints_stay(trainer, tmp_path):
    trainer.run(max_steps=9, checkpoint_every=2, keep_checkpoints=2)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000008", "step-000009"]
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"checkpoints", "config.yaml", "head", "metrics.jsonl"}


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt", "head/medusa_lm_head.safetensors", "state.json"])
def test_checkpoint_cut_in_half_is_named_with_the_one_before(trainer, tmp_path, name):
    trainer.run(max_steps=6, checkpoint_every=2, keep_checkpoints=3)
    newest = tmp_path / "run" / "checkpoints" / "step-000006"
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"step-000006/{name} .*--resume_from .*step-000004"):
        trainer.main(max_steps=8, checkpoint_every=2, keep_checkpoints=3, resume=True)
    trainer.run(max_steps=8, checkpoint_every=2, keep_checkpoints=3, resume_from=newest.parent / "step-000004")


def test_flipped_byte_is_damage_where_checksums_were_asked_for_and_a_missing_file_always(trainer, tmp_path):
    trainer.run(max_steps=2, output=tmp_path / "without")
    assert "crc32" not in (list_checkpoints(tmp_path / "without")[-1] / "state.json").read_text()
    trainer.run(max_steps=2, checkpoint_every=2, checkpoint_checksums=True)
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer.pt are not those that were written; no earlier one is whole"):
        trainer.main(max_steps=3, resume=True)
    path.unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        trainer.main(max_steps=3, resume=True)


def test_full_disk_keeps_the_earlier_checkpoint(trainer, tmp_path, monkeypatch):
    save, calls = torch.save, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step-000004 \(No space left on device\); nothing half-written is left"):
        trainer.main(max_steps=6, checkpoint_every=2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.undo()
    trainer.run(max_steps=6, checkpoint_every=2, resume=True)


def test_disk_that_is_really_full_is_one_line(trainer, tmp_path):
    """A process that may write the head but no file as large as the optimiser's."""
    trainer.run(max_steps=2, output=tmp_path / "complete")
    folder = list_checkpoints(tmp_path / "complete")[-1]
    sizes = [(folder / name).stat().st_size for name in ("head/medusa_lm_head.safetensors", "optimizer.pt")]
    assert sizes[0] < sizes[1]
    script = (
        "import resource, runpy, sys; from headstart.train import medusa;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2);"
        "runpy.run_path(medusa.__file__, run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(sum(sizes) // 2), *trainer.arguments(max_steps=2)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert last.startswith(f"medusa.py: error: cannot write {checkpoint} (")
    assert last.endswith("File too large); nothing half-written is left")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_random_generators_go_on_where_they_were(tmp_path):
    head, accelerator = Medusa(MedusaConfig(4, 5, num_heads=1)), Accelerator()
    optimizer = build_optimizer(head, 0.0, 0.9, 0.999)

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()

    draw()  # an odd number of normal draws: numpy keeps the second of a pair
    save(tmp_path, head, optimizer, accelerator, num_kept=1, step=1)
    expected = draw()
    draw()
    load_checkpoint(tmp_path / "checkpoints" / "step-000001", head, optimizer, accelerator)
    assert draw() == expected


def test_what_was_put_aside_comes_back_under_its_own_name(tmp_path):
    """The new one where both are there; nothing where one has that name."""
    checkpoints = tmp_path / "checkpoints"
    for name in (
        ".step-000004.old",
        ".step-000004.new",
        ".step-000006.old",
        "step-000008",
        ".step-000008.new",
        ".step-x.old",
    ):
        (checkpoints / name / name).mkdir(parents=True)
    for _ in range(2):
        restore_replaced(tmp_path)
        found = {path.name: next(path.iterdir()).name for path in checkpoints.iterdir()}
        assert found == {
            "step-000004": ".step-000004.new",
            ".step-000004.old": ".step-000004.old",
            "step-000006": ".step-000006.old",
            "step-000008": "step-000008",
            ".step-000008.new": ".step-000008.new",
            ".step-x.old": ".step-x.old",
        }
