"""One process, two and four train the same on GPUs, over NCCL, launched as a user does. (The CPU's: test_many_processes.py.)"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.train import medusa

pytestmark = pytest.mark.gpu

ROOT = Path(medusa.__file__).parents[1]
SEVERAL = Path(__file__).with_name("several_runs.py")
SHARES = {1: {"batch_rows": 8}, 2: {"batch_rows": 2, "accumulate": 2}, 4: {"batch_rows": 2}}  # 8 rows per step
# With a bf16 target and bf16 products a changed order of sums is a changed last bit of half precision.
PRECISIONS = {
    "fp32": ({"target_dtype": "float32", "autocast": "no"}, 2e-4, 2e-5),
    "bf16": ({"target_dtype": "bfloat16", "autocast": "bf16"}, 2e-2, 3e-3),
}


def launch(config, num_processes, port, *command):
    """Run it as `accelerate launch` does, one process per GPU. More processes than there are share them, as machines of which
    each says that it is another host: NCCL takes two on one GPU for an error otherwise, and speaks to them over the network."""
    gpus = min(num_processes, torch.cuda.device_count())
    nodes, rest = divmod(num_processes, gpus)
    if rest:
        pytest.skip(f"{num_processes} processes do not share {gpus} GPUs evenly")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    words += ["--config_file", str(ROOT / "configs" / "accelerate" / config), "--main_process_port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if nodes > 1:
        words += ["--num_machines", str(nodes), "--main_process_ip", "127.0.0.1"]
        environment["NCCL_SOCKET_IFNAME"] = "lo"
    started, said = [], []
    for node in range(nodes):
        environment["NCCL_HOSTID"] = f"node-{node}"
        own = ["--machine_rank", str(node)] if nodes > 1 else []
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*words, *own, *map(str, command)], env=environment, **pipes))
    with ThreadPoolExecutor(nodes) as threads:  # nobody may wait for a reader
        try:
            said = list(threads.map(lambda process: process.communicate(timeout=400)[1], started))
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0] * nodes, "\n".join(said)
    return said[0]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_a_divided_target_gives_the_whole_ones_bits(tmp_path, free_port, num_processes):
    """The same kernels compute both."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 500, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, initializer_range=0.1, **shape)).save_pretrained(tmp_path)
    launch("fsdp2.yaml", num_processes, free_port(), Path(__file__).with_name("sharded_features.py"), tmp_path)


def assert_same_curve(one, other, metrics, each, mean, since=0):
    """Loss curves whose residuals are at most `each`, and their mean at most `mean`."""
    curves = [[line for line in metrics(run=name) if line["step"] > since] for name in (one, other)]
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]] != []
    residuals = [a["loss"] / b["loss"] - 1 for a, b in zip(*curves)]
    assert max(map(abs, residuals)) < each, (one, other, residuals)
    assert abs(sum(residuals) / len(residuals)) < mean, (one, other, residuals)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_many_gpus_train_as_one(
    arguments, speculator_arguments, eagle_arguments, eagle3_arguments, read_metrics, tmp_path, free_port, num_processes
):
    """Every trainer, with the same rows per step, whole and divided target; a run of one GPU goes on on many, and back."""
    shared = {"checkpoint_every": 10, "max_steps": 20, "keep_checkpoints": 9}
    trainers = {
        "medusa": (arguments, {"eval_prompts": 4, "eval_tokens": 8, "loss": "lk"}),
        "mlp_speculator": (speculator_arguments, {}),
        "eagle": (eagle_arguments, {"cache_features": True}),
        "eagle3": (eagle3_arguments, {"eval_prompts": 4, "eval_tokens": 8}),
    }

    def runs(count, suffix, since=None):
        """The runs NAME-PRECISION-SUFFIX; since: of which suffix the checkpoint of step 10 is that they go on from."""
        found = []
        for name, (build, own) in trainers.items():
            for precision, (keys, *_) in PRECISIONS.items():
                folder, going_on = f"{name}-{precision}", {}
                if since:
                    going_on = {"resume_from": tmp_path / f"{folder}-{since}" / "checkpoints" / "step-000010"}
                output = tmp_path / f"{folder}-{suffix}"
                found.append([name, build(**shared, **own, **keys, **SHARES[count], **going_on, output=output)])
        return found

    def train(config, count, todo):
        return launch(config, count, free_port(), SEVERAL, json.dumps(todo))

    train("single.yaml", 1, runs(1, "one"))
    train("ddp.yaml", num_processes, [*runs(num_processes, "ddp"), *runs(num_processes, "one-ddp", since="one")])
    said = train("fsdp2.yaml", num_processes, runs(num_processes, "fsdp"))
    assert said.count("the target is sharded over the GPUs") == 4
    train("single.yaml", 1, runs(1, "fsdp-one", since="fsdp"))
    for name in trainers:
        for precision, (_, each, mean) in PRECISIONS.items():
            folder = f"{name}-{precision}"
            for suffix, since in (("ddp", 0), ("fsdp", 0), ("one-ddp", 10), ("fsdp-one", 10)):
                assert_same_curve(f"{folder}-one", f"{folder}-{suffix}", read_metrics, each, mean, since)
        for path in (tmp_path / f"{name}-fp32-one" / "head").glob("*.safetensors"):
            expected = load_file(path)
            for suffix in ("ddp", "fsdp"):
                found = load_file(tmp_path / f"{name}-fp32-{suffix}" / "head" / path.name)
                for key, tensor in expected.items():
                    torch.testing.assert_close(found[key], tensor, rtol=1e-2, atol=1e-3, msg=f"{name} {key}")
