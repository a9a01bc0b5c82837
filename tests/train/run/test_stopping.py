"""How a training script ends: train/run/stopping.py."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from headstart.train.run.stopping import StopSignals

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


GROUP = """
import atexit, sys
import torch.distributed as dist
from headstart.train.run.stopping import run_script

class Witness:
    def __del__(self):
        print("finalised")

def main(argv):
    if argv:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(print, "at exit")
    sys.modules["witness"] = Witness()
    print("worked")
    return 3

run_script(main)
"""


@pytest.mark.parametrize(
    ("argv", "said"), [(["group"], ["worked", "at exit"]), ([], ["worked", "at exit", "finalised"])]
)
def test_a_process_of_a_group_ends_without_finalising_python(argv, said):
    """Threads of the group that want Python's lock while it is finalised abort the process."""
    done = subprocess.run([sys.executable, "-c", GROUP, *argv], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (3, said)


def test_one_process_sees_its_signal_without_asking_its_device():
    alone = SimpleNamespace(num_processes=1)  # nothing that a tensor could be made on
    with StopSignals() as stop:
        assert stop.agreed(alone) is False
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(alone) is True
