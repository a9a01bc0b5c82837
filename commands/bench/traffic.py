"""`headstart bench traffic`: throughput of mixed requests, and what entering prompts cost the requests that run."""

from ...benchmarks.measurement import HEADS, add_measurement, at_least_one, measurement, numbers

EXAMPLE = (
    "headstart bench traffic --shape llama-3-8b\n"
    "  headstart bench traffic --shape llama-3-8b --head eagle3 --num-speculative-tokens 5 --acceptance 2.98"
)
DETAILS = (
    "Throughput: all requests are handed in at once. floor: the products of the decode steps' nodes or the weights' bytes,\n"
    "whichever take longer, keys and values, the drafts' weights, and the products of the prompts, at the rates of a copy\n"
    "and of a large product under load.\n"
    "Stalls: a batch that is kept full by prompts of one length or span. plain: time of the steps that compute no prompt;\n"
    "admitting: of those that do; first token: from the moment a prompt is handed in.\n"
    "Also: the time to the first token of one prompt alone, and the number of Triton kernels compiled, or read from the\n"
    "cache on disk, after the engine was built."
)


def add_options(parser):
    parser.add_argument(
        "--head",
        choices=HEADS,
        help="also measure drafts of this head, with random weights (default: plain decoding alone)",
    )
    parser.add_argument("--num-speculative-tokens", type=int, help="depth of the head's drafts (default 4)")
    parser.add_argument("--acceptance", help="the acceptance length (tokens per step) to simulate (default 3.0)")
    parser.add_argument(
        "--adaptive", action="store_true", help="also measure with the engine choosing the depth of every step's drafts"
    )
    parser.add_argument(
        "--draft-quantization", choices=["fp8"], help="also measure with the head's weights rounded to 8 bits"
    )
    parser.add_argument("--requests", type=int, default=256, help="requests handed in at once (default 256)")
    parser.add_argument(
        "--prompts", default="100-2000", help="shortest and longest prompt in tokens (default 100-2000)"
    )
    parser.add_argument("--outputs", default="32-512", help="shortest and longest output in tokens (default 32-512)")
    parser.add_argument("--seats", type=int, default=64, help="requests that run at once (default 64)")
    parser.add_argument(
        "--stalls",
        default="20,256,1000,3000",
        help="lengths or spans of prompts that enter a full batch, like 20,100-2000, or none (default 20,256,1000,3000)",
    )
    parser.add_argument("--stall-seats", type=int, default=16, help="requests of the full batch (default 16)")
    parser.add_argument("--stall-requests", type=int, default=256, help="prompts of each length (default 256)")
    parser.add_argument(
        "--first-prompt", type=int, default=1000, help="length of the prompt that runs alone (default 1000)"
    )
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.traffic import TrafficSettings, bench_traffic

    for option in ("acceptance", "num_speculative_tokens", "adaptive", "draft_quantization"):
        given = getattr(arguments, option)
        if given not in (None, False) and arguments.head is None:
            said = option.replace("_", "-") + ("" if given is True else f" {given}")
            raise ValueError(f"--{said} says how heads draft: name one with --head")
    depth = 4 if arguments.num_speculative_tokens is None else arguments.num_speculative_tokens
    settings = TrafficSettings(
        shape=arguments.shape,
        head=arguments.head,
        num_speculative_tokens=at_least_one("--num-speculative-tokens", depth),
        acceptance=numbers("--acceptance", arguments.acceptance or "3.0", float, most=1)[0],
        requests=at_least_one("--requests", arguments.requests),
        prompts=span("--prompts", arguments.prompts),
        outputs=span("--outputs", arguments.outputs),
        seats=at_least_one("--seats", arguments.seats),
        stalls=()
        if arguments.stalls == "none"
        else tuple(span("--stalls", part) for part in arguments.stalls.split(",")),
        stall_seats=at_least_one("--stall-seats", arguments.stall_seats),
        stall_requests=at_least_one("--stall-requests", arguments.stall_requests),
        first_prompt=at_least_one("--first-prompt", arguments.first_prompt),
        adaptive=arguments.adaptive,
        draft_quantization=arguments.draft_quantization,
    )
    bench_traffic(settings, **measurement(arguments))


def span(name, text):
    """`100-2000` as (100, 2000) and `20` as (20, 20); ValueError naming the option for anything else, or for a falling pair."""
    try:
        low, high = map(int, text.split("-") if "-" in text else [text] * 2)
    except ValueError:
        low, high = 1, 0
    if not 1 <= low <= high:
        raise ValueError(
            f"{name} takes lengths in tokens like 256, or the shortest and the longest like 100-2000, got {text!r}"
        )
    return low, high
