"""The training script on a CUDA device: bf16 target, fp32 heads and optimiser, checkpoints that resume."""

import pytest
import torch
from safetensors.torch import load_file

from headstart.tests.train.tiny_runs import Killed, die, in_step
from headstart.train import medusa

pytestmark = pytest.mark.gpu


def test_a_resumed_run_on_the_gpu_goes_on_where_it_stopped(arguments, read_metrics, tmp_path):
    keys = {"autocast": "bf16", "checkpoint_every": 3, "max_steps": 6, "eval_prompts": 4}
    assert medusa.main(arguments(output=tmp_path / "whole", **keys)) == 0

    with in_step(4, die), pytest.raises(Killed):  # checkpoint 3 is written before step 4 begins
        medusa.main(arguments(output=tmp_path / "half", **keys))
    assert [path.name for path in (tmp_path / "half" / "checkpoints").iterdir()] == ["step-000003"]
    assert [line["step"] for line in read_metrics(run="half")] == [1, 2, 3]
    assert medusa.main([*arguments(output=tmp_path / "half", **keys), "--resume"]) == 0

    whole, half = read_metrics(run="whole"), read_metrics(run="half")
    assert [line["step"] for line in half] == [1, 2, 3, 4, 5, 6]
    losses = [line["loss"] for line in whole]
    assert [line["loss"] for line in half] == pytest.approx(losses, rel=1e-3)
    assert [line["lr"] for line in half] == [line["lr"] for line in whole]
    assert losses[-1] < losses[0]
    heads = [load_file(tmp_path / name / "head" / "medusa_lm_head.safetensors") for name in ("whole", "half")]
    assert all(tensor.dtype == torch.float32 for tensor in heads[0].values())
    torch.testing.assert_close(heads[1], heads[0], rtol=1e-3, atol=1e-5)
    measured = read_metrics("acceptance", run="whole")
    assert measured[-1]["source"] == "engine"
    assert measured[-1]["acceptance_length"] >= 1
