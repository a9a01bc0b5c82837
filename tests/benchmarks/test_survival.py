"""Runs that are killed with SIGKILL at random moments and go on: benchmarks/proofs/survival.py, in forks of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The driver's children inherit this: shards of four rows, made by two forwards each.
DRIVER = (
    "import runpy, sys; from headstart.train.teacher import feature_cache;"
    "feature_cache.TOKENS_PER_FORWARD, feature_cache.SHARD_BYTES = 128, 4 * 64 * 32 * 4;"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def prove(arguments, folder, *options, **keys):
    """The row that survival.py reports of Medusa heads."""
    script = [str(ROOT / "train" / "medusa.py"), *arguments(**keys)]
    # sys.argv[0] is "-c" in Python itself: the driver's own name goes in its place.
    command = [sys.executable, "-c", f"import sys; del sys.argv[0]; {DRIVER}"]
    command += [str(ROOT / "benchmarks" / "proofs" / "survival.py"), "--output", str(folder), *options, "--", *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    return figures


def test_killed_runs_go_on_and_end_as_the_undisturbed_one(arguments, tmp_path):
    keys = {"max_steps": 5, "checkpoint_every": 2, "eval_every": 2, "eval_prompts": 2, "eval_tokens": 4}
    keys |= {"cache_features": True, "checkpoint_checksums": True}
    figures = prove(arguments, tmp_path / "survival", "--kills", "4", "--forked", **keys)
    assert (figures["kills"], figures["same"]) == (4, True)
    assert len(set(figures["moments"])) == 4


def test_runs_killed_while_they_write_checkpoints_end_as_the_undisturbed_one(arguments, tmp_path):
    keys = {"max_steps": 9, "checkpoint_every": 1, "eval_every": 4, "eval_prompts": 2, "eval_tokens": 4, "num_heads": 8}
    figures = prove(arguments, tmp_path / "survival", "--kills", "3", "--while-writing", **keys)
    assert (figures["kills"], len(figures["steps_ahead"]), figures["same"]) == (3, 3, True)
