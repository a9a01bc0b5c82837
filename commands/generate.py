"""`headstart generate`: its arguments and its work."""

import sys

from ..inference.arguments import (
    add_model,
    add_ranks,
    add_speculation,
    choose_threads_for,
    ranks_of,
    speculative_config,
)

EXAMPLE = (
    "headstart generate --model assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static --compare \\\n"
    "      'Write the Python function `count_words`: Count the words of a text.'"
)


def add_options(parser):
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_model(parser)
    add_ranks(parser)
    add_speculation(parser)
    parser.add_argument("--raw", action="store_true", help="skip the chat template")
    parser.add_argument("--compare", action="store_true", help="answer with and without speculation, and compare")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the fewest likeliest tokens that reach this probability (default 1: all)",
    )
    parser.add_argument("--top-k", type=int, default=0, help="number of likeliest tokens to keep (default 0: all)")
    parser.add_argument("--max-tokens", type=int, default=256, help="the most new tokens (default 256)")
    parser.add_argument("--stop", action="append", default=[], help="end before this string; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise at temperatures above 0 (default 0)")


def run(arguments):
    from ..inference.llm import LLM
    from ..inference.prompt_files import render_prompt
    from ..inference.sampling_params import SamplingParams

    speculative = speculative_config(arguments)
    if arguments.compare and speculative is None:
        raise ValueError("--compare shows a head beside plain decoding: name a head with --head")
    if arguments.compare and (arguments.tensor_parallel_size > 1 or arguments.tensor_parallel_invariant):
        raise ValueError(
            "--compare runs two engines on the same weights, and divided ones (--tensor-parallel-size, "
            "--tensor-parallel-invariant) are not shared yet: leave out one or the other"
        )
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        seed=arguments.seed,
    )
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text.strip():
        raise ValueError("the prompt is empty: give some text")
    choose_threads_for(arguments.model, arguments.device, arguments.trust_remote_code)
    shared = dict(max_model_len=arguments.max_model_len, max_num_seqs=1)
    llm = LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
        speculative_config=speculative,
        **ranks_of(arguments),
        **shared,
    )
    if llm.tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer: the command needs one")
    prompt = text
    if not arguments.raw and llm.tokenizer.chat_template:
        prompt = render_prompt(llm.tokenizer, {"messages": [{"role": "user", "content": text}]})

    fast = _stream_and_time(llm, prompt, params, show=True)
    if arguments.compare:
        plain = LLM(llm, **shared)
        slow = _stream_and_time(plain, prompt, params, show=False)
        same = fast[0].token_ids == slow[0].token_ids
        print()
        for name, (output, seconds) in (("with speculation", fast), ("plain decoding", slow)):
            metrics = output.spec_decode_metrics
            steps = f", {metrics.acceptance_length:.2f} tokens per step" if metrics.num_steps else ""
            rate = len(output.token_ids) / seconds
            print(f"{name:17} {len(output.token_ids)} tokens in {seconds:.2f} s: {rate:.0f} tokens/s{steps}")
        print(f"same tokens: {'yes, every one' if same else 'NO - this is a bug, please report it'}")
        print(f"speed-up: {slow[1] / fast[1]:.2f}x")
        return 0 if same else 1
    return 0


def _stream_and_time(llm, prompt, params, show):
    """(CompletionOutput, seconds) of one answer, printed as it comes if `show`. Start-up costs come before the timing."""
    import time

    from ..inference.sampling_params import SamplingParams

    llm.generate([prompt], SamplingParams(temperature=params.temperature, max_tokens=4, seed=0))
    stream = llm.stream(prompt, params)
    start = time.perf_counter()
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            seconds = time.perf_counter() - start
            if show:
                print()
            return end.value.outputs[0], seconds
        if show:
            print(piece, end="", flush=True)
