"""`headstart bench draft`: drafting alone."""

from ...benchmarks.measurement import HEADS, add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench draft --shape llama-3-8b --head eagle3,eagle,mlp_speculator,medusa --batch 1,16\n"
    "  headstart bench draft --shape llama-3-8b --head eagle3 --tree dynamic"
)
DETAILS = (
    "first level: drafting the token after the root. level: each further one (the head's layer, its lm_head, the draw);\n"
    "from the whole chain, less the first level. after a step: the pass over the emitted tokens, for heads with their own\n"
    "keys. chain: the whole draft; Medusa heads draft all depths at once and have only this line.\n"
    "With --tree dynamic also: the whole draft of a tree grown in every step; the same levels with as many rows for a tree\n"
    "known beforehand; and the difference, which is the time of choosing the nodes.\n"
    "x floor: time over that of reading the part's weights once, at the rate of a copy. Keys and values are not counted.\n"
    "Published EAGLE-3 heads have 32,000 draft tokens; the MLP speculator is tied and as wide as the target. The block drafter\n"
    "has two layers and an edge of rank 256: its first level is the pass of the whole block."
)


def add_options(parser):
    parser.add_argument("--head", default=",".join(HEADS[::-1]), help="heads to measure (default: all)")
    parser.add_argument("--batch", default="1,16", help="requests (default 1,16)")
    parser.add_argument("--depth", type=int, default=5, help="depth of the drafts (default 5)")
    parser.add_argument(
        "--tree",
        default="chain",
        choices=["chain", "dynamic"],
        help="dynamic: also measure dynamic trees (default chain)",
    )
    parser.add_argument("--context", default="1024", help="committed tokens of a request (default 1024)")
    parser.add_argument("--repeats", type=int, default=20, help="replays per line (default 20)")
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.draft import DraftSettings, bench_draft

    heads = tuple(arguments.head.split(","))
    for name in heads:
        if name not in HEADS:
            raise ValueError(f"--head takes some of {', '.join(HEADS)}, separated by commas, got {arguments.head!r}")
    (context,) = numbers("--context", arguments.context, most=1)
    settings = DraftSettings(
        shape=arguments.shape,
        heads=heads,
        batches=numbers("--batch", arguments.batch),
        depth=arguments.depth,
        dynamic=arguments.tree == "dynamic",
        context=context,
        repeats=at_least_one("--repeats", arguments.repeats),
    )
    bench_draft(settings, **measurement(arguments))
