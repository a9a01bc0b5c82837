"""The training script on a CUDA device: bf16 target, fp32 heads and optimiser, checkpoints that resume."""

import pytest
import torch
from safetensors.torch import load_file

from headstart.train import medusa

pytestmark = pytest.mark.gpu


def test_a_resumed_run_on_the_gpu_goes_on_where_it_stopped(arguments, read_metrics, tmp_path):
    whole = arguments(output=tmp_path / "whole", autocast="bf16", checkpoint_every=3, max_steps=6, eval_prompts=4)
    assert medusa.main(whole) == 0
    half = arguments(
        output=tmp_path / "half", autocast="bf16", checkpoint_every=3, max_steps=3, eval_prompts=4, warmup_ratio=0
    )
    assert medusa.main(half) == 0
    longer = arguments(
        output=tmp_path / "half", autocast="bf16", checkpoint_every=3, max_steps=6, eval_prompts=4, warmup_ratio=0
    )
    assert medusa.main([*longer, "--resume"]) == 0
    assert [line["step"] for line in read_metrics(run="half")] == [1, 2, 3, 4, 5, 6]
    losses = [line["loss"] for line in read_metrics(run="whole")]
    assert losses[-1] < losses[0]
    measured = read_metrics("acceptance", run="whole")
    assert measured[-1]["source"] == "engine"
    assert measured[-1]["acceptance_length"] >= 1
    head = load_file(tmp_path / "whole" / "head" / "medusa_lm_head.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in head.values())
