"""Times to a first token: from the start of a process (`seconds_to_first_token`), and of an idle engine (`first_tokens_ms`).

As a script (what the child runs) it prints {"imported", "built", "first_token"}: seconds since BEGAN, when it was started.

    python -m headstart.benchmarks.engine.startup SHAPE DTYPE DEVICE MAX_NUM_SEQS PROMPT_TOKENS BEGAN
"""

import json
import os
import subprocess
import sys
import tempfile
import time

TIMEOUT = 400  # seconds; a cold Triton cache compiles every kernel
FIRST_TOKENS = 9  # prompts whose first token is timed
NUM_WARM = 2  # of them: those before compile
IDLE = 0.25  # seconds without work before each: prompts without a pause heat the GPU, and its clock falls


def seconds_to_first_token(shape, dtype, device, max_num_seqs, prompt_tokens):
    """Start-up with an empty Triton cache, then with the cache that the first run left.  {"cold": {...}, "warm": {...}}

    Each is {"imported", "built", "first_token"} in seconds since the process was started. No weights are read: they are random.
    Raises RuntimeError with the child's last words if it fails.
    """
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            arguments = [shape, dtype, device, max_num_seqs, prompt_tokens, time.time()]
            command = [sys.executable, "-m", "headstart.benchmarks.engine.startup", *map(str, arguments)]
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
            if done.returncode:
                raise RuntimeError(f"measuring start-up failed: {done.stderr.strip()[-2000:]}")
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def first_tokens_ms(llm, prompts):
    """Milliseconds from the call to the first token of each prompt, alone on an engine after a pause; NUM_WARM are left out."""
    from ...inference.sampling_params import SamplingParams

    params, samples = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), []
    for prompt in prompts:
        time.sleep(IDLE)
        start = time.perf_counter()
        llm.generate([prompt], params)
        samples.append((time.perf_counter() - start) * 1e3)
    return samples[NUM_WARM:]


def main(shape, dtype, device, max_num_seqs, prompt_tokens, began):
    import torch

    from ...inference.llm import LLM
    from ...inference.sampling_params import SamplingParams
    from ...inference.threads import choose_threads
    from ..shape import config_of_shape

    def since():
        return round(time.time() - float(began), 3)

    seconds = {"imported": since()}
    config, count = config_of_shape(shape), int(prompt_tokens)
    choose_threads(config, torch.device(device))
    length = min(config.max_position_embeddings, 2 * count)
    llm = LLM(
        config, load_format="dummy", dtype=dtype, device=device, max_model_len=length, max_num_seqs=int(max_num_seqs)
    )
    seconds["built"] = since()
    prompt = torch.randint(config.vocab_size, (count,)).tolist()
    llm.generate([prompt], SamplingParams(max_tokens=1))
    seconds["first_token"] = since()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
