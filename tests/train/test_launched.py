"""train/medusa.py as a user launches it, on a machine that has neither wandb nor datasets, until the launcher gets a SIGTERM."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.tests.train.tiny_runs import all_lines, newest_step
from headstart.train import medusa
from headstart.train.run.checkpointing import list_checkpoints

# Python imports it first of all.
SITECUSTOMIZE = """
import importlib.util
import sys

HIDDEN = ("wandb", "datasets", "matplotlib")
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in HIDDEN else find_spec(name, *rest)


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""
KEYS = {"tracker": "wandb", "max_steps": 100_000, "eval_every": 3, "eval_prompts": 2, "eval_tokens": 4}


@pytest.fixture(scope="module")
def launched(make_trainers, tmp_path_factory):
    """What a launched run said and left: it got a SIGTERM after a few steps. (trainer, run, status, said)"""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    trainer, run, said = make_trainers(folder)["medusa"], folder / "run", folder / "said.txt"
    config = Path(medusa.__file__).parents[1] / "configs" / "accelerate" / "cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), medusa.__file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
    with open(said, "w") as file:
        process = subprocess.Popen(
            [*launch, *trainer.arguments(**KEYS)], env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
            while not (metrics.exists() and len(metrics.read_text().splitlines()) > 4):
                assert process.poll() is None, said.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            while not list_checkpoints(run):
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all gone, as it should be
                os.killpg(process.pid, signal.SIGKILL)
    return SimpleNamespace(trainer=trainer, run=run, status=process.returncode, said=said.read_text())


def test_script_runs_where_wandb_and_datasets_are_not_installed(launched):
    assert "wandb is not installed" in launched.said
    assert "Traceback" not in launched.said
    assert all_lines(launched.run, "acceptance")[0]["step"] == 3


def test_sigterm_to_the_launcher_saves_and_leaves_a_run_that_resumes(launched):
    """The launcher does not hand SIGTERM on by itself."""
    assert launched.status != 0
    stopped = newest_step(launched.run)
    assert stopped > 3
    launched.trainer.run(**(KEYS | {"tracker": "none", "max_steps": stopped + 3}), resume=True)
    assert [line["step"] for line in all_lines(launched.run, "train")] == list(range(1, stopped + 4))
