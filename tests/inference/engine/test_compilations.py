"""No kernel is compiled, or read from the cache on disk, once an engine is built: nobody who serves should wait for a compiler."""

import subprocess
import sys

import pytest

# In a process of its own, because a kernel that any test used before counts no more.
SCRIPT = """
import random, sys
import torch
from transformers import LlamaConfig
from headstart import LLM, SamplingParams
from headstart.benchmarks.engine.traffic import prepared_kernels
from headstart.benchmarks.random_heads import random_head

method, asked = sys.argv[1:]
config = LlamaConfig(
    vocab_size=3000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=4096,
)
where = dict(dtype="bfloat16", load_format="dummy", max_model_len=2500, enable_prefix_caching=False)
base = LLM(config, max_num_seqs=1, enforce_eager=True, **where)
speculative = None
if method != "plain":
    method, *rounded = method.split()
    head = random_head(method, config, base.engine.decoder, 3)
    speculative = {"model": head, "tree": "chain", "num_speculative_tokens": 3, "quantization": rounded[0] if rounded else None}
torch.cuda.empty_cache()
llm = LLM(base, max_model_len=2500, max_num_seqs=20, speculative_config=speculative, enable_prefix_caching=False)
dice = random.Random(0)
changes = {
    "temperature": [{}, dict(temperature=0)],
    "filters": [{}, dict(top_k=5), dict(top_p=0.9, min_p=0.01), dict(repetition_penalty=1.2), dict(logit_bias={3: 2.0})],
    "logprobs": [{}, dict(logprobs=3), dict(prompt_logprobs=2), dict(logprobs=0, top_k=20)],
}[asked]
prompts = [[dice.randrange(3000) for _ in range(dice.choice([1, 2, 3, 17, 63, 64, 65, 130, 333, 1025, 2311]))] for _ in range(70)]
params = [
    SamplingParams(**{"temperature": 0.8, **changes[i % len(changes)]}, seed=i, max_tokens=dice.randint(1, 60), ignore_eos=True)
    for i in range(len(prompts))
]
with prepared_kernels() as found:
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(prompts[:1], params[:1], use_tqdm=False)
print("prepared:", dict(found))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["temperature", "filters", "logprobs"])
@pytest.mark.parametrize("method", ["plain", "medusa", "eagle3", "eagle3 fp8"])
def test_no_kernel_is_compiled_after_start_up(method, asked):
    done = subprocess.run([sys.executable, "-c", SCRIPT, method, asked], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "prepared: {}", done.stdout
