"""`headstart bench train`: training steps of heads, beside a plain PyTorch loop."""

from ...benchmarks.measurement import add_measurement, measurement

EXAMPLE = (
    "headstart bench train --shape llama-3-8b --head medusa\n"
    "  headstart bench train --shape llama-3-8b --head eagle3 --loss lk --sequence 2048 --rows 2\n"
    "  headstart bench train --shape llama-3-8b --head block --sequence 3072"
)
DETAILS = (
    "of product: rate of the step's necessary products, as a share of the rate of a large matrix product.\n"
    "memory: the trainers' estimate before the first step, to compare with the peak.\n"
    "above rest: peak memory above the memory held between steps (weights and the optimiser's state)."
)


def add_options(parser):
    parser.add_argument(
        "--head",
        type=lambda name: {"mlp": "mlp_speculator"}.get(name, name),
        default="medusa",
        choices=["medusa", "eagle3", "mlp_speculator", "block"],
        help="default medusa; mlp is short for mlp_speculator",
    )
    parser.add_argument("--loss", default="kl", help="a loss of the trainers: hard, kl, lk, lk-log ... (default kl)")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step (default 1)")
    parser.add_argument("--lm-head", choices=["own", "shared"], help="the Medusa heads' lm_heads (default shared)")
    parser.add_argument("--anchors", type=int, help="blocks of a row, of a block drafter (default 512)")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="labels projected at once (default 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed (default 5)")
    parser.add_argument("--parts", action="store_true", help="also say where the time of a step goes: phases, kernels")
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.training.train import bench_train, check_settings

    bench_train(check_settings(arguments), **measurement(arguments))
