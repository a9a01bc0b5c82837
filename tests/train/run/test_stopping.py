"""How a training script ends: train/run/stopping.py."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from headstart.train.run.stopping import run_script

def main(argv):
    if argv:
        raise ValueError("two\\nlines")
    for _ in range(100000):
        print("a line of many", flush=True)

run_script(main)
"""


def test_bad_input_is_one_line_and_status_2():
    done = subprocess.run([sys.executable, "-c", SCRIPT, "given"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "<string>: error: two lines\n")


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["stdout alone", "both"])
def test_output_that_breaks_off_is_no_success(stderr):
    """`accelerate launch ... | tee log`, and tee dies: the training did not end well, and the launcher has to know."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=stderr) as process:
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(timeout=120) != 0
