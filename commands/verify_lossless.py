"""`headstart verify-lossless`: its arguments and its work."""

from pathlib import Path

from ..heads.storage.atomic_write import check_writable, write_json
from ..inference.arguments import (
    add_model,
    add_speculation,
    check_count,
    choose_threads_for,
    prompt_file,
    speculative_config,
)

EXAMPLE = "headstart verify-lossless --model assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static"
DETAILS = (
    "bits: tokens and log-probabilities against plain decoding, one request at a time. distribution: many short samples with and\n"
    "without speculation, compared by a two-sample G-test; the control is the same test between two temperatures. Exit status 1\n"
    "if a check fails. docs/lossless.md says what each verifier promises."
)


def add_options(parser):
    add_model(parser)
    add_speculation(parser)
    parser.add_argument("--verifier", default="strict", help="the rule that accepts drafts (default strict)")
    parser.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl in the target's folder)")
    parser.add_argument("--num-prompts", type=int, default=8, help="number of prompts, the first ones (default 8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt (default 64)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 0.8)")
    parser.add_argument(
        "--samples",
        type=int,
        default=500,
        help="samples per side and temperature for the distribution; 0: none (default 500)",
    )
    parser.add_argument("--output", help="also write the checks as JSON here")


def run(arguments):
    from ..evaluation.lossless import as_rows, verdict, verify_lossless
    from ..inference.llm import LLM
    from ..inference.models.target_source import target_config
    from ..inference.prompt_files import read_prompts, render_prompt
    from ..inference.sampling_params import SamplingParams
    from ..inference.speculation.options import SpeculativeOptions
    from ..inference.speculation.speculation import choose_speculation

    speculative = speculative_config(arguments, verifier=arguments.verifier)
    if speculative is None:
        raise ValueError("verify-lossless checks speculation: name a drafter with --head or --method")
    check_count(arguments.num_prompts)
    if arguments.samples < 0:
        raise ValueError(f"--samples must be at least 0, got {arguments.samples}")
    if arguments.output:
        check_writable(Path(arguments.output))
    if arguments.verifier == "synthetic":
        raise ValueError(
            "--verifier synthetic accepts at given rates, so there is nothing to check: choose strict or a ratio rule"
        )
    temperatures = tuple(arguments.temperature or (0.0, 0.8))
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens)  # raises for values out of range
    # Checked before the target's weights are read: the head, a tree that it can draft, the verifier.
    target, _ = target_config(arguments.model, "auto", arguments.trust_remote_code)
    choose_speculation(SpeculativeOptions.parse(speculative), target, max_num_seqs=1)
    prompts = read_prompts(prompt_file(arguments.prompts, arguments.model), count=arguments.num_prompts)
    choose_threads_for(arguments.model, arguments.device, arguments.trust_remote_code)
    base = LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
        max_model_len=arguments.max_model_len,
        max_num_seqs=1,
        num_gpu_blocks_override=64,  # it only holds the weights
        enforce_eager=True,
    )
    if base.tokenizer is None and not all("prompt_token_ids" in prompt for prompt in prompts):
        raise ValueError(f"{arguments.model} has no tokenizer: give prompts with prompt_token_ids")
    checks = verify_lossless(
        base,
        speculative,
        [render_prompt(base.tokenizer, prompt) for prompt in prompts],
        temperatures=temperatures,
        max_tokens=arguments.max_tokens,
        samples=arguments.samples,
        use_tqdm=True,
    )
    for check in checks:
        print(check.line())
    passed, sentence = verdict(checks, arguments.verifier)
    print(sentence)
    if arguments.output:
        write_json(arguments.output, {"lossless": passed, "checks": as_rows(checks)}, indent=1, ensure_ascii=True)
    return 0 if passed else 1
