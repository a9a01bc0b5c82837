"""Ranks that end: all others end within seconds, and one error says which was the first, and why.

Also what LLM refuses before it starts any.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from headstart.inference.engine.engine import Engine
from headstart.inference.llm import LLM
from headstart.inference.models import weights
from headstart.inference.models.transport import GlooRanks
from headstart.inference.ranks import processes, worker
from headstart.inference.ranks.processes import RanksEnded
from headstart.inference.ranks.tensor_parallel import check_gpus
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.inference.speculation.small_drafters import llama

pytestmark = pytest.mark.filterwarnings("ignore:with tensor_parallel_size")
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


def assert_gone(pids, seconds=10):
    limit = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < limit, "a rank still runs"
        time.sleep(0.02)


@pytest.mark.parametrize(("size", "killed"), [(2, 1), (4, 2)])
def test_a_killed_rank_ends_the_others_with_one_error(divided_folder, forked_llm, size, killed):
    llm = forked_llm(divided_folder, size)
    pids = llm.session.ranks.pids
    threading.Timer(0.3, os.kill, (pids[killed - 1], signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(RanksEnded, match=f"^rank {killed} of {size} was ended by SIGKILL, and the other ranks with it"):
        llm.generate([[1, 2, 3]] * 100, LONG)
    assert time.monotonic() - started < 10
    assert_gone(pids)
    with pytest.raises(RanksEnded, match=f"rank {killed} of {size} was ended by SIGKILL"):
        llm.generate([1, 2, 3], LONG)


def test_an_idle_rank_that_ends_is_told_to_the_next_caller(divided_folder, forked_llm):
    llm = forked_llm(divided_folder, 2)
    os.kill(llm.session.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RanksEnded, match="rank 1 of 2 was ended by SIGKILL"):
        llm.generate([1, 2, 3], LONG)


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (ValueError("the weights do not fit"), ValueError, "^the weights do not fit$"),
        (TypeError("a bug"), RanksEnded, "^rank 1 of 2 failed: TypeError: a bug"),
    ],
)
def test_what_goes_wrong_in_another_rank_is_told(divided_folder, forked_llm, monkeypatch, error, raised, told):
    def fail(**arguments):
        raise error

    monkeypatch.setattr(worker, "LLM", fail)
    with pytest.raises(raised, match=told):
        forked_llm(divided_folder, 2)


def test_an_error_in_the_step_of_another_rank_is_told(divided_folder, forked_llm, monkeypatch):
    owner, step = os.getpid(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: step(engine) if os.getpid() == owner else 1 / 0)
    llm = forked_llm(divided_folder, 2)
    pids = llm.session.ranks.pids
    for _ in range(2):
        with pytest.raises(RanksEnded, match=r"^rank 1 of 2 failed: ZeroDivisionError"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert_gone(pids)


@pytest.mark.parametrize(("size", "fault"), [(2, "a token"), (4, "a token"), (2, "no tokens"), (4, "a sum")])
def test_a_rank_that_computes_something_else_ends_all(divided_folder, forked_llm, monkeypatch, tmp_path, size, fault):
    """The last rank takes another seventh token than it drew, in the middle of a step; or says that nothing advanced; or reads
    parts of sums that are a little wrong, and all ranks draw the same tokens."""
    owner, begun = os.getpid(), tmp_path / "begun"
    usual, step, gather = Engine._hand_back, Engine.step, GlooRanks.gather

    def is_faulty(engine):
        return os.getpid() != owner and engine.decoder.ranks.rank == size - 1

    def changed(engine, request, tokens, logprobs):
        place = 6 - len(request.output_token_ids)
        if is_faulty(engine) and 0 <= place < len(tokens):
            tokens = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        return usual(engine, request, tokens, logprobs)

    def silent(engine):
        advanced = step(engine)
        return [] if advanced and is_faulty(engine) and len(advanced[0].output_token_ids) > 4 else advanced

    def misread(ranks, part):
        parts = gather(ranks, part)
        if os.getpid() != owner and ranks.rank == size - 1 and part.is_floating_point() and begun.exists():
            parts[0] *= 1.0001
        return parts

    if fault == "a sum":
        monkeypatch.setattr(GlooRanks, "gather", misread)
    elif fault == "a token":
        monkeypatch.setattr(Engine, "_hand_back", changed)
    else:
        monkeypatch.setattr(Engine, "step", silent)
    drafting = {"model": str(divided_folder), "method": "draft_model", "num_speculative_tokens": 3}
    llm = forked_llm(divided_folder, size, speculative_config=drafting)
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
    begun.touch()
    pids = llm.session.ranks.pids
    told = f"^rank {size - 1} of {size} computed other tokens or hidden states than rank 0"
    for _ in range(2):
        with pytest.raises(RanksEnded, match=told) as raised:
            llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=12))
        assert raised.value.__cause__ is None
    assert_gone(pids)


def test_an_error_here_while_the_ranks_start_ends_them(divided_folder, forked_llm, monkeypatch):
    started = []
    start = processes.start_worker

    def noted(connection):
        started.append(start(connection))
        return started[-1]

    monkeypatch.setattr(processes, "start_worker", noted)
    with pytest.raises(ValueError, match="num_gpu_blocks_override"):
        forked_llm(divided_folder, 2, num_gpu_blocks_override=10**9)
    assert_gone([process.pid for process in started])


def test_a_rank_killed_during_the_load_of_another_is_noticed(divided_folder, forked_llm, monkeypatch):
    """Rank 0 takes long for each tensor."""
    pids, copy = [], weights._read
    start = processes.start_worker

    def noted(connection):
        started = start(connection)
        pids.append(started.pid)
        return started

    def slow(*given, **named):
        os.kill(pids[0], signal.SIGKILL)
        time.sleep(0.2)
        return copy(*given, **named)

    monkeypatch.setattr(processes, "start_worker", noted)
    monkeypatch.setattr(
        GlooRanks, "__init__", then(GlooRanks.__init__, lambda: monkeypatch.setattr(weights, "_read", slow))
    )
    started = time.monotonic()
    with pytest.raises(RanksEnded, match="rank 1 of 2 was ended by SIGKILL"):
        forked_llm(divided_folder, 2)
    assert time.monotonic() - started < 3  # all tensors would take 10


def test_an_error_that_follows_from_the_end_of_a_rank_is_told_as_that_end(forked_llm):
    """What stops kernels is called even where it is known after the end."""
    ranks, stopped = processes.RankProcesses(2), []

    def fail():
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert_gone(ranks.pids)
        while not ranks.have_ended():
            time.sleep(0.01)
        ranks.stop_by(lambda: stopped.append(True))
        with ranks.starting():
            raise ValueError("the check at start-up failed")

    with pytest.raises(RanksEnded, match="rank 1 of 2 was ended by SIGKILL") as raised:
        fail()
    assert isinstance(raised.value.__cause__, ValueError)
    assert stopped


def then(work, after):
    """The method, after which something is done in this process, and in none that it forked."""
    owner = os.getpid()

    def changed(*given, **named):
        work(*given, **named)
        if os.getpid() == owner:
            after()

    return changed


def test_the_ranks_end_with_the_llm(divided_folder, forked_llm, monkeypatch):
    monkeypatch.setattr(processes, "LEAVE", 5.0)
    ranks = processes.RankProcesses(3)
    pids, folder = ranks.pids, ranks.folder
    assert all(map(is_running, pids))
    del ranks
    assert_gone(pids)
    assert not os.path.exists(folder)


PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2)
(output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
print(*llm.session.ranks.pids, *output.outputs[0].token_ids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_start_without_a_main_guard_and_end_with_a_killed_parent(divided_folder, forked_llm):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(divided_folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, *tokens = map(int, done.stdout.split())
    expected = forked_llm(divided_folder, 2).generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    assert tokens == expected[0].outputs[0].token_ids
    assert_gone([pid])


def test_what_ranks_cannot_divide_is_refused_before_any_starts(divided_folder, tmp_path, monkeypatch):
    def start(connection):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(processes, "start_worker", start)
    monkeypatch.setattr("headstart.inference.models.weights.load_weights", start)
    two = dict(tensor_parallel_size=2, device="cpu")
    with pytest.raises(ValueError, match="give the model's folder, not a loaded model"):
        LLM(llama(), **two)
    with pytest.raises(ValueError, match="tensor_parallel_size=8 does not divide the 4 query heads on 2 key heads"):
        LLM(divided_folder, tensor_parallel_size=8, device="cpu")
    gpus = dict(tensor_parallel_size=2, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"takes the GPUs 0 to 1, one for each rank, and 1 can be seen.*: 1 would fit"):
        LLM(divided_folder, **gpus)


def test_gpus_that_do_not_reach_each_others_memory_are_told_of(monkeypatch):
    """Before weights are read. Which GPU does not reach which, and what it costs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {1, 3})
    with warnings.catch_warnings(record=True) as told:
        check_gpus(torch.device("cuda", 0), 3)
    assert not told
    with pytest.warns(UserWarning, match=r"GPU 1 cannot reach the memory of GPU 3 .*the same bits, but a step takes"):
        check_gpus(torch.device("cuda"), 4)


def test_divided_weights_are_not_shared(divided_folder):
    ranged = LLM(divided_folder, device="cpu", dtype="float32", tensor_parallel_invariant=2)
    whole = LLM(divided_folder, device="cpu", dtype="float32")
    for model, arguments in ((ranged, {}), (whole, dict(tensor_parallel_size=2))):
        with pytest.raises(ValueError, match="cannot be shared by two LLMs yet"):
            LLM(model, **arguments)
