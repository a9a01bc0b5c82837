"""`headstart bench ranks`: the same model on one rank and on several."""

from ...benchmarks.measurement import add_measurement, at_least_one, measurement, numbers

EXAMPLE = "headstart bench ranks --shape llama-3-8b --tensor-parallel-size 1,2 --batch 1,16,64"
DETAILS = (
    "Plain decoding, in the steady state, with random weights; and the time to the first token of one prompt after a pause.\n"
    "of one: over the time at the first size. floor: of one rank's own weights, keys and values.\n"
    "same: all tokens are those of the first size."
)


def add_options(parser):
    parser.add_argument("--tensor-parallel-size", "-tp", default="1,2", help="numbers of ranks (default 1,2)")
    parser.add_argument(
        "--tensor-parallel-invariant",
        type=int,
        choices=[2, 4, 8],
        help="cut products into so many ranges on every number of ranks",
    )
    parser.add_argument("--batch", default="1,16,64", help="requests at once (default 1,16,64)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt (default 1000)")
    parser.add_argument("--new-tokens", type=int, default=128, help="length of an output (default 128)")
    parser.add_argument(
        "--first-prompts", default="1000,2048", help="lengths of prompts whose first token is timed (default 1000,2048)"
    )
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.ranks import RanksSettings, bench_ranks

    settings = RanksSettings(
        shape=arguments.shape,
        sizes=numbers("--tensor-parallel-size", arguments.tensor_parallel_size),
        invariant=arguments.tensor_parallel_invariant,
        batches=numbers("--batch", arguments.batch),
        prompt_tokens=at_least_one("--prompt-tokens", arguments.prompt_tokens),
        new_tokens=at_least_one("--new-tokens", arguments.new_tokens),
        first_prompts=numbers("--first-prompts", arguments.first_prompts),
    )
    bench_ranks(settings, **measurement(arguments))
