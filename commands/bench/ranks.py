"""`headstart bench ranks`: the same model on one rank and on several."""

from ...benchmarks.measurement import HEADS, add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench ranks --shape llama-3-8b --tensor-parallel-size 1,2 --batch 1,16,64\n"
    "  headstart bench ranks --shape llama-3-8b --tensor-parallel-size 1,2,4 --head eagle3 --num-speculative-tokens 5"
)
DETAILS = (
    "Plain decoding, in the steady state, with random weights; and the time to the first token of one prompt after a pause.\n"
    "of one: over the time at the first size. floor: of one rank's own weights, keys and values.\n"
    "drafts: with --head, the head's own lm_heads whole on each rank and divided.\n"
    "same: all tokens are those of the first size without drafts."
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
    parser.add_argument(
        "--head",
        choices=HEADS,
        help="also time steps that draft a chain, with a head of random weights",
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="depth of the head's drafts (default 4)")
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
        head=arguments.head,
        num_speculative_tokens=at_least_one("--num-speculative-tokens", arguments.num_speculative_tokens),
    )
    bench_ranks(settings, **measurement(arguments))
