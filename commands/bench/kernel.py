"""`headstart bench kernel`: one operation."""

from ...benchmarks.measurement import add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench kernel linear --shape llama-3-8b --rows 1,64,2048\n"
    "  headstart bench kernel linear --shape llama-3-8b --sweep\n"
    "  headstart bench kernel prefill-attention --shape llama-3-8b --tokens 4096,16384"
)
DETAILS = (
    "Operations: linear (a layer's four products and the lm_head), gated_mlp, attention (over draft trees),\n"
    "prefill_attention, rms_norm, layer_norm, rotary, embedding, res_block, sample, verify, commit, rules (every\n"
    "verifier from logits to verdict, requests x nodes, with a temperature alone and cut by top-k and top-p too),\n"
    "distill_loss and trained_parts (of training), block_convolution (of DFlash2), or all."
)


def add_options(parser):
    parser.add_argument("op", help="the operation, or all")
    parser.add_argument("--rows", default="1,16,64,2048", help="rows of the input (default 1,16,64,2048)")
    parser.add_argument("--context", default="1024,8192", help="number of keys for attention (default 1024,8192)")
    parser.add_argument("--batch", default="1", help="requests, for attention, verify and commit (default 1)")
    parser.add_argument(
        "--tokens", default="4096,16384", help="prompt lengths for prefill_attention (default 4096,16384)"
    )
    parser.add_argument("--sweep", action="store_true", help="linear: try launch configurations and print the winners")
    parser.add_argument("--repeats", type=int, default=15, help="replays per line (default 15)")
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.ops.kernel import OPERATIONS, bench_kernel, sweep_kernel
    from ...benchmarks.ops.kernel_bench import KernelSettings

    op = arguments.op.replace("-", "_")
    if op not in (*OPERATIONS, "all"):
        raise ValueError(f"there is no operation {arguments.op!r}: choose one of {', '.join(OPERATIONS)} or all")
    (batch,) = numbers("--batch", arguments.batch, most=1)
    settings = KernelSettings(
        op=op,
        shape=arguments.shape,
        rows=numbers("--rows", arguments.rows),
        contexts=numbers("--context", arguments.context),
        batch=batch,
        tokens=numbers("--tokens", arguments.tokens),
        repeats=at_least_one("--repeats", arguments.repeats),
    )
    (sweep_kernel if arguments.sweep else bench_kernel)(settings, **measurement(arguments))
