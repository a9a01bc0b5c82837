"""`headstart bench engine`: tokens per second of the whole engine."""

from ...benchmarks.measurement import HEADS, add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench engine --shape llama-3-8b --head medusa --acceptance 2.0,3.0 --batch 1,4,16,64\n"
    "  headstart bench engine --shape llama-3-8b --head eagle3 --num-speculative-tokens 5 --acceptance 2.98 --batch 1,16"
)
DETAILS = (
    "Measured through LLM.generate, in the steady state between the last prompt and the first end of an output.\n"
    "of graph: the step's CUDA graph alone over the time the engine takes per step; the line below names its kernels.\n"
    "floor: the weights' products or bytes, whichever take longer, the keys and values, the drafts' weights, at the rates\n"
    "of a copy and of a large product under load. library: the library's products for the same rows and weights alone.\n"
    "x library: over the floor with that time of the products, since few rows never reach a large product's rate.\n"
    "MHz, W: the clock and power of the card under that graph; at its power limit a card lowers its clock.\n"
    "Also: the time to the first token of one prompt, from the start of a process to its first token with a cold and a\n"
    "warm Triton cache, and the greatest memory taken."
)


def add_options(parser):
    parser.add_argument(
        "--head",
        default="medusa",
        choices=[*HEADS, "none"],
        help="the head, with random weights (default medusa); eagle3 has 32,000 draft tokens, block two layers and an edge",
    )
    parser.add_argument("--num-speculative-tokens", type=int, help="depth of the head's drafts (default 4)")
    parser.add_argument("--acceptance", help="acceptance lengths (tokens per step) to simulate (default 2.0,3.0)")
    parser.add_argument("--batch", default="1,4,16,64", help="requests at once (default 1,4,16,64)")
    parser.add_argument("--lm-head", choices=["own", "shared"], help="the Medusa heads' lm_heads (default own)")
    parser.add_argument("--tree", help="shape of the head's drafts: chain (default), static, or a tree file")
    parser.add_argument(
        "--adaptive", action="store_true", help="also measure with the engine choosing the depth of every step's drafts"
    )
    parser.add_argument(
        "--draft-quantization", choices=["fp8"], help="also measure with the head's weights rounded to 8 bits"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt (default 1000)")
    parser.add_argument("--new-tokens", type=int, default=256, help="length of an output (default 256)")
    parser.add_argument(
        "--text",
        action="store_true",
        help="also measure with stop strings and 5 log-probabilities, and with these and every output streamed",
    )
    parser.add_argument("--no-startup", action="store_true", help="do not measure start-up, which takes two processes")
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.engine import EngineSettings, bench_engine

    drafts = arguments.head != "none"
    for option in ("acceptance", "lm_head", "tree", "num_speculative_tokens", "adaptive", "draft_quantization"):
        given = getattr(arguments, option)
        if given is not None and given is not False and not drafts:
            raise ValueError(f"--{option.replace('_', '-')} {given} says how heads draft, and --head none has none")
    if arguments.lm_head and arguments.head != "medusa":
        raise ValueError(f"--lm-head {arguments.lm_head} is for Medusa heads, and --head {arguments.head} is none")
    depth = 4 if arguments.num_speculative_tokens is None else arguments.num_speculative_tokens
    settings = EngineSettings(
        shape=arguments.shape,
        head=arguments.head if drafts else None,
        num_speculative_tokens=at_least_one("--num-speculative-tokens", depth),
        acceptance=numbers("--acceptance", arguments.acceptance or "2.0,3.0", float) if drafts else (),
        batches=numbers("--batch", arguments.batch),
        lm_head=arguments.lm_head or "own",
        tree=arguments.tree or "chain",
        adaptive=arguments.adaptive,
        draft_quantization=arguments.draft_quantization,
        prompt_tokens=at_least_one("--prompt-tokens", arguments.prompt_tokens),
        new_tokens=at_least_one("--new-tokens", arguments.new_tokens),
        text=arguments.text,
        startup=not arguments.no_startup,
    )
    bench_engine(settings, **measurement(arguments))
