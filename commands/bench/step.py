"""`headstart bench step`: one step of the engine, against the memory floor and the library."""

from ...benchmarks.measurement import add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench step --shape llama-3-8b --rows 1,8,16,32,64 --context 1024,8192 --batch 1,8,32\n"
    "  headstart bench step --shape llama-3-8b --rows 5 --context 1024 --batch 16"
)
DETAILS = (
    "A line is one CUDA graph. forward: the target over a tree of this many rows (nodes) per request, including its own\n"
    "token after every node. For the largest tree also: drafting with Medusa heads, the verify rule, the commit, and the\n"
    "whole step; 'on top' is its time beyond the forward pass and beyond reading the heads' weights once.\n"
    "x floor: time over that of reading the weights and the cached keys and values once, at the rate of a copy.\n"
    "library: the same pass with cuBLAS, scaled_dot_product_attention and torch.compile, in one CUDA graph.\n"
    "Below each line: the share of each kernel in the time."
)


def add_options(parser):
    parser.add_argument("--rows", default="1,8,16,32,64", help="nodes of one request, up to 64 (default 1,8,16,32,64)")
    parser.add_argument(
        "--context", help="committed tokens of a request (default 1024,8192, where the model's positions reach so far)"
    )
    parser.add_argument("--batch", default="1,8,32", help="requests (default 1,8,32)")
    parser.add_argument(
        "--lm-head",
        default="own,shared",
        help="whose lm_head the Medusa heads use: own, shared, own,shared for both (default) or none",
    )
    parser.add_argument(
        "--baseline",
        default="compiled",
        choices=["compiled", "eager", "none"],
        help="the library's elementwise operations through torch.compile (default), plain, or no baseline",
    )
    parser.add_argument("--repeats", type=int, default=20, help="replays per line (default 20)")
    parser.add_argument(
        "--as-module",
        action="store_true",
        help="run the model's own module of transformers, as the engine does for models without kernels of their own",
    )
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.step import StepSettings, bench_step

    lm_heads = () if arguments.lm_head == "none" else tuple(arguments.lm_head.split(","))
    for name in lm_heads:
        if name not in ("own", "shared"):
            raise ValueError(f"--lm-head takes own, shared, own,shared or none, got {arguments.lm_head!r}")
    settings = StepSettings(
        shape=arguments.shape,
        rows=numbers("--rows", arguments.rows),
        contexts=numbers("--context", arguments.context) if arguments.context else None,
        batches=numbers("--batch", arguments.batch),
        lm_heads=lm_heads,
        baseline=arguments.baseline,
        repeats=at_least_one("--repeats", arguments.repeats),
        as_module=arguments.as_module,
    )
    bench_step(settings, **measurement(arguments))
