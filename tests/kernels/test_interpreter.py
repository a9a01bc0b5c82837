"""Runs every test marked `interpreter` in a process of its own, where Triton kernels run on the CPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_pass_in_the_interpreter():
    here = Path(__file__).parent
    inference = here.parent / "inference"
    files = "models/test_canary.py", "ranks/test_peer_ranks.py", "engine/test_known_rows.py"
    places = map(str, (here, *(inference / name for name in files)))
    found = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-m", "interpreter", *places],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", found.stdout).group(1)) > 0
