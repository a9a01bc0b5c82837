"""Ranks on GPUs that end while they load, compute prompts or decode: every process has ended within seconds, with one error."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from headstart.tests.inference.ranks.test_faults import assert_gone

pytestmark = [pytest.mark.gpu]
WITHIN = 10  # seconds
PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
from headstart.inference.llm import LLM
from headstart.inference.models import weights
from headstart.inference.ranks import processes
from headstart.inference.ranks.processes import RanksEnded
from headstart.inference.sampling_params import SamplingParams

folder, device, phase, size = sys.argv[1:]
start, read, pids = processes.start_worker, weights._read, []

def noted(connection):
    pids.append((started := start(connection)).pid)
    return started

def told(*given, **named):
    if phase == "load":
        print(*pids, flush=True)
        sys.stdin.readline()
    return read(*given, **named)

processes.start_worker, weights._read = noted, told
try:
    llm = LLM(folder, device=device, dtype="float32", max_num_seqs=8, max_model_len=256, tensor_parallel_size=int(size))
    length, new = (200, 1) if phase == "prefill" else (2, 200)
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    llm.generate([[1] * length] * 8, params)
    print(*pids, flush=True)
    for turn in range(10000):
        llm.generate([[1 + turn % 90] * length] * 100, params)
except RanksEnded as error:
    sys.exit(f"ended: {error}")
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


@pytest.fixture
def start(divided_folder):
    """start(phase, size=2) -> the process of rank 0, the pids of the others; all are in that phase."""
    started = []

    def run(phase, size=2):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if torch.cuda.device_count() < size:
            environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        command = [sys.executable, "-c", PROGRAM, str(divided_folder), DEVICE, phase, str(size)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # A shell's background job ignores SIGINT, and so would what it starts.
        heeds = dict(start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        process = subprocess.Popen(command, env=environment, text=True, **heeds, **pipes)
        started.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, [int(word) for word in line.split()]

    yield run
    for process in started:
        process.kill()
        process.wait()


DEVICE = "cuda"


def check_killed(process, others, rank, told=None):
    """kill -9 of this rank ends all: within seconds no process is left, and rank 0, if it lives, says which ended.

    told: what rank 0 waits for before it goes on
    """
    os.kill([process.pid, *others][rank], signal.SIGKILL)
    if told and rank:
        process.stdin.write(told)
        process.stdin.close()
    code = process.wait(WITHIN)
    assert_gone(others, WITHIN)
    if rank:
        assert code == 1
        said = process.stderr.read().splitlines()[-1]
        assert said.startswith(f"ended: rank {rank} of {len(others) + 1} was ended by SIGKILL")
    else:
        assert code == -signal.SIGKILL


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_a_rank_that_is_killed_ends_all(start, phase, rank):
    check_killed(*start(phase), rank, told="\n" if phase == "load" else None)


@pytest.mark.parametrize("rank", range(4))
def test_each_of_four_ranks_that_is_killed_ends_all(start, rank):
    check_killed(*start("decode", 4), rank)


@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_ctrl_c_ends_all(start, phase):
    """As a terminal sends it: to the whole group."""
    process, others = start(phase)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(WITHIN) == 1
    assert process.stderr.read().splitlines()[-1] == "interrupted"
    assert_gone(others, WITHIN)
