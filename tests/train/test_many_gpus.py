"""One process, two and four train the same on GPUs, over NCCL, launched as a user does. (The CPU's: test_many_processes.py.)"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.gpu

SEVERAL = Path(__file__).with_name("several_runs.py")
SHARES = {1: {"batch_rows": 8}, 2: {"batch_rows": 2, "accumulate": 2}, 4: {"batch_rows": 2}}  # 8 rows per step
# With a bf16 target and bf16 products a changed order of sums is a changed last bit of half precision.
PRECISIONS = {
    "fp32": ({"target_dtype": "float32", "autocast": "no"}, 2e-4, 2e-5),
    "bf16": ({"target_dtype": "bfloat16", "autocast": "bf16"}, 2e-2, 3e-3),
}


@pytest.fixture
def launched(launch_nodes, tmp_path):
    """launched(config, num_processes, *command): what the first node said; more processes than there are GPUs share them."""

    def launched(config, num_processes, *command):
        gpus = min(num_processes, torch.cuda.device_count())
        if num_processes % gpus:
            pytest.skip(f"{num_processes} processes do not share {gpus} GPUs evenly")
        launch_nodes(config, num_processes, gpus, command, {"HF_HUB_OFFLINE": "1"}, tmp_path, 400)
        return (tmp_path / "node-0.txt").read_text()

    return launched


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_a_divided_target_gives_the_whole_ones_bits(tmp_path, launched, num_processes, model_type):
    """The same kernels compute both. A file of Mixtral's holds each expert by itself."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 500, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "vocab_size": 100, "initializer_range": 0.1}
    if model_type == "mixtral":
        shape |= {"intermediate_size": 512, "num_local_experts": 3}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).save_pretrained(tmp_path)
    said = launched("fsdp2.yaml", num_processes, Path(__file__).with_name("sharded_features.py"), tmp_path)
    assert "rank 0: the same bits" in said


def assert_same_curve(one, other, metrics, each, mean, since=0):
    """Loss curves whose residuals are at most `each`, and their mean at most `mean`."""
    curves = [[line for line in metrics(run=name) if line["step"] > since] for name in (one, other)]
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]] != []
    residuals = [a["loss"] / b["loss"] - 1 for a, b in zip(*curves)]
    assert max(map(abs, residuals)) < each, (one, other, residuals)
    assert abs(sum(residuals) / len(residuals)) < mean, (one, other, residuals)


FAMILIES = {
    "medusa": ("fp32", {"eval_prompts": 4, "eval_tokens": 8, "loss": "lk"}),
    "mlp_speculator": ("bf16", {}),
    "eagle": ("fp32", {"cache_features": True}),
    "eagle3": ("bf16", {"eval_prompts": 4, "eval_tokens": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_many_gpus_train_as_one(trainers, read_metrics, tmp_path, launched, num_processes, name):
    """Every trainer, with the same rows per step, whole and divided target; a run of one GPU goes on on many, and back.

    Each in one precision: what a family does and in which precision have nothing to do with each other.
    """
    precision, own = FAMILIES[name]
    keys, each, mean = PRECISIONS[precision]
    shared = {"checkpoint_every": 10, "max_steps": 20, "keep_checkpoints": 9} | own | keys

    def a_run(count, suffix, since=None):
        """The run NAME-SUFFIX; since: of which suffix the checkpoint of step 10 is that it goes on from."""
        going_on = {"resume_from": tmp_path / f"{name}-{since}" / "checkpoints" / "step-000010"} if since else {}
        given = shared | SHARES[count] | going_on
        return [name, trainers[name].arguments(**given, output=tmp_path / f"{name}-{suffix}")]

    def train(config, count, *todo):
        return launched(config, count, SEVERAL, json.dumps(todo))

    train("single.yaml", 1, a_run(1, "one"))
    train("ddp.yaml", num_processes, a_run(num_processes, "ddp"), a_run(num_processes, "one-ddp", since="one"))
    said = train("fsdp2.yaml", num_processes, a_run(num_processes, "fsdp"))
    too_many = num_processes > torch.cuda.device_count()  # for the engine, which needs a GPU for each
    assert said.count("acceptance is teacher-forced") == ("eval_prompts" in own and too_many)
    train("single.yaml", 1, a_run(1, "fsdp-one", since="fsdp"))
    for suffix, since in (("ddp", 0), ("fsdp", 0), ("one-ddp", 10), ("fsdp-one", 10)):
        assert_same_curve(f"{name}-one", f"{name}-{suffix}", read_metrics, each, mean, since)
    for path in (tmp_path / f"{name}-one" / "head").glob("*.safetensors") if precision == "fp32" else ():
        expected = load_file(path)
        for suffix in ("ddp", "fsdp"):
            found = load_file(tmp_path / f"{name}-{suffix}" / "head" / path.name)
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-2, atol=1e-3, msg=f"{name} {key}")
