"""Ranks on GPUs, one each; where there are fewer, several share one. (The CPU's: test_ranks.py, test_faults.py.)"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.benchmarks.random_heads import random_head
from headstart.heads.checkpoint import save_head
from headstart.inference.llm import LLM
from headstart.inference.ranks.processes import RanksEnded
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.lm_heads import DividedLMHead
from headstart.tests.inference.models.small_architectures import small_config
from headstart.tests.inference.ranks.test_lm_heads import drafted, head_of, lm_heads_of
from headstart.tests.inference.ranks.test_ranks import outputs_of, speculations

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(with )?tensor_parallel_size")]
SMALL = dict(device="cuda", dtype="bfloat16", max_num_seqs=3, max_model_len=256, num_gpu_blocks_override=40)


@pytest.fixture
def may_share(monkeypatch):
    """may_share(size): ranks share GPUs if there are fewer."""

    def share(size):
        if torch.cuda.device_count() < size:
            monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

    return share


@pytest.fixture
def gpu_llm(may_share):
    """gpu_llm(model, size, **arguments) -> an LLM; all ranks have ended after the test."""
    made = []

    def make(model, size, **arguments):
        may_share(size)
        made.append(LLM(model, tensor_parallel_size=size, **SMALL | arguments))
        return made[-1]

    yield make
    for llm in made:
        if llm.session.ranks is not None:
            llm.session.ranks.end()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("over", ["peers", "host"])
def test_parts_of_all_ranks_come_in_their_order(size, over, may_share, tmp_path):
    """In passes with an odd number of gathers, in graphs and without, of parts that fit a buffer and of those that do not."""
    may_share(size)
    command = [sys.executable, "-m", "headstart.tests.inference.ranks.gather_on_gpus", str(tmp_path), str(size)]
    ranks = [
        subprocess.Popen([*command, str(rank), over], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, said


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_gives_the_bits_of_one(divided_folder, gpu_llm, size, eager):
    how = dict(tensor_parallel_invariant=4, enforce_eager=eager)
    one = gpu_llm(divided_folder, 1, **how)
    llm = gpu_llm(divided_folder, size, **how)
    assert outputs_of(llm) == outputs_of(one)


@pytest.mark.parametrize(
    ("name", "config"),
    [(name, config) for name, _, config in speculations()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_speculation_changes_no_bit_on_gpus(divided_folder, gpu_llm, tmp_path, name, config):
    if name == "the target itself":
        config = config | dict(model=str(divided_folder))
    elif "model" in config:  # each rank reads it onto its own GPU
        save_head(config["model"], tmp_path / "head")
        config = config | dict(model=str(tmp_path / "head"))
    plain = gpu_llm(divided_folder, 2)
    expected = outputs_of(plain)
    plain.session.ranks.end()
    llm = gpu_llm(divided_folder, 2, speculative_config=config)
    assert outputs_of(llm) == expected
    assert llm.get_stats()["num_draft_tokens"] > 0


# Wide enough that most weights are divided, at numbers that nothing divides evenly; others are left whole.
WIDE = dict(vocab_size=32003, hidden_size=2560, intermediate_size=8200, ffn_dim=8200, word_embed_proj_dim=2560)
WIDE |= dict(num_attention_heads=20, num_key_value_heads=4, head_dim=128)


def drafting(method, config, one, folder):
    if method is None:
        return None
    save_head(random_head(method, config, one.engine.decoder, 3), folder)
    return dict(model=str(folder), tree="dynamic" if method == "eagle3" else "chain")


@pytest.mark.parametrize(
    ("model_type", "size", "method", "eager"),
    [
        ("opt", 2, None, True),
        ("opt", 4, "eagle3", False),
        ("gemma3_text", 2, "medusa", False),
        ("phi3", 3, None, False),
        ("mixtral", 2, "medusa", False),
        ("mixtral", 4, None, False),
        ("gpt_oss", 2, None, False),
    ],
)
def test_modules_on_ranks_give_the_bits_of_one(model_type, size, method, eager, gpu_llm, tmp_path):
    config = small_config(model_type, **WIDE)
    how = dict(load_format="dummy", enforce_eager=eager)
    one = gpu_llm(config, 1, **how)
    expected, held = outputs_of(one), one.engine.decoder.weight_bytes
    speculative = drafting(method, config, one, tmp_path / "head")
    llm = gpu_llm(config, size, speculative_config=speculative, **how)
    assert outputs_of(llm) == expected
    assert llm.engine.decoder.weight_bytes < 0.8 * held


@pytest.mark.parametrize("method", ["medusa", "eagle3", "mlp_speculator", "block"])
def test_drafts_are_the_same_however_lm_heads_are_placed(method, divided_folder, gpu_llm, tmp_path):
    """Whole on each rank, and divided."""
    save_head(head_of(method.removesuffix("_speculator")), tmp_path / "head")
    tree, found = "dynamic" if method == "eagle3" else "chain", []
    for asked in (1, 2):
        spec = dict(model=str(tmp_path / "head"), tree=tree, draft_tensor_parallel_size=asked)
        llm = gpu_llm(divided_folder, 2, speculative_config=spec)
        placed = {isinstance(one, DividedLMHead) for one in lm_heads_of(llm.engine.drafter)}
        assert placed == {asked == 2}
        found.append(drafted(llm))
        llm.session.ranks.end()
    assert found[0] == found[1]


def test_modules_on_ranks_read_their_parts_of_files(gpu_llm, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("mixtral", **WIDE), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert outputs_of(gpu_llm(tmp_path, 2)) == outputs_of(gpu_llm(tmp_path, 1))


@pytest.fixture
def apart(monkeypatch):
    """GPUs that do not reach each other's memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("a GPU reaches its own memory: this takes two")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


def test_gpus_that_do_not_reach_each_others_memory_give_the_same_bits(divided_folder, gpu_llm, tmp_path, request):
    """Their sums pass through the host's, which is said. With and without speculation, and prompts of many rows."""
    expected = outputs_of(gpu_llm(divided_folder, 2))
    config = next(config for name, _, config in speculations() if name == "eagle3")
    request.getfixturevalue("apart")
    with pytest.warns(UserWarning, match="pass through the host's memory"):
        assert outputs_of(gpu_llm(divided_folder, 2)) == expected
    save_head(config["model"], tmp_path / "head")
    config = config | dict(model=str(tmp_path / "head"))
    assert outputs_of(gpu_llm(divided_folder, 2, speculative_config=config)) == expected


@pytest.mark.parametrize("over", [None, "apart"])
def test_a_rank_that_is_killed_ends_the_call(divided_folder, gpu_llm, over, request):
    """In a step: the other rank's kernels wait for it then."""
    if over:
        request.getfixturevalue(over)
    llm = gpu_llm(divided_folder, 2)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    killer = threading.Timer(0.05, os.kill, (llm.session.ranks.pids[0], signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(RanksEnded, match="rank 1 of 2 was ended by SIGKILL"):
        llm.generate([[1, 2, 3]] * 1000, params)
    assert time.monotonic() - started < 30
    torch.cuda.synchronize()  # nothing waits on the device
