"""The arguments of `headstart bench step`, `draft`, `kernel`, `engine` and `peer`, and the calls they lead to.

Imports nothing heavy until a benchmark runs, so that `headstart --help` stays quick.
"""

import sys

HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3")


def add_benchmarks(benchmarks, add_command, add_device):
    """Add the five to the subparsers `benchmarks`, with the command line's own ways to add a command and the device arguments."""
    step = add_command(
        benchmarks,
        "step",
        _bench_step,
        "One step of the engine on random weights of a named shape, against the memory floor and the library.",
        "headstart bench step --shape llama-3-8b --rows 1,8,16,32,64 --context 1024,8192 --batch 1,8,32\n"
        "  headstart bench step --shape llama-3-8b --rows 5 --context 1024 --batch 16",
        "A line is one CUDA graph. forward: the target over a tree of so many rows (nodes) of each request, its own token\n"
        "behind every node included. For the largest tree also: drafting with Medusa heads, the verify rule, the commit, and\n"
        "the whole step; 'on top' is what that takes beyond the forward pass and beyond reading the heads' weights once.\n"
        "x floor: times what reading the weights and the cached keys and values once takes, at the rate of a copy.\n"
        "library: the same pass with cuBLAS, scaled_dot_product_attention and torch.compile, in one CUDA graph.\n"
        "Below each line: which share of the time goes to which kernel.",
    )
    step.add_argument("--rows", default="1,8,16,32,64", help="nodes of one request, up to 64 (default 1,8,16,32,64)")
    step.add_argument(
        "--context", help="committed tokens of a request (default 1024,8192, where the model's positions reach so far)"
    )
    step.add_argument("--batch", default="1,8,32", help="requests (default 1,8,32)")
    step.add_argument(
        "--lm-head",
        default="own,shared",
        help="whose lm_head the Medusa heads use: own, shared, own,shared for both (default) or none",
    )
    step.add_argument(
        "--baseline",
        default="compiled",
        choices=["compiled", "eager", "none"],
        help="the library's elementwise operations through torch.compile (default), plain, or no baseline",
    )
    step.add_argument("--repeats", type=int, default=20, help="replays per line (default 20)")
    add_measurement(step, add_device)

    draft = add_command(
        benchmarks,
        "draft",
        _bench_draft,
        "Drafting alone with random heads for a named shape: a level, the first one, the pass after a step, the whole chain.",
        "headstart bench draft --shape llama-3-8b --head eagle3,eagle,mlp_speculator,medusa --batch 1,16\n"
        "  headstart bench draft --shape llama-3-8b --head eagle3 --tree dynamic",
        "first level: what drafts the token behind the root. level: each further one (the head's layer, its lm_head, the draw);\n"
        "from the whole chain, less the first level. after a step: the pass over what was emitted, for heads with keys of their\n"
        "own. chain: the whole draft; Medusa heads draft all depths at once and have this line alone.\n"
        "With --tree dynamic also: the whole draft of a tree grown in every step; the same levels with as many rows where the\n"
        "tree is known beforehand; and the difference, which is what choosing the nodes takes.\n"
        "x floor: times what reading the part's weights once takes, at the rate of a copy. Keys and values are not counted.\n"
        "Published EAGLE-3 heads have 32,000 draft tokens; the MLP speculator is tied and as wide as the target.",
    )
    draft.add_argument("--head", default=",".join(HEADS[::-1]), help="heads to measure (default: all four)")
    draft.add_argument("--batch", default="1,16", help="requests (default 1,16)")
    draft.add_argument("--depth", type=int, default=5, help="how many tokens deep to draft (default 5)")
    draft.add_argument(
        "--tree",
        default="chain",
        choices=["chain", "dynamic"],
        help="dynamic: lines of dynamic trees too (default chain)",
    )
    draft.add_argument("--context", default="1024", help="committed tokens of a request (default 1024)")
    draft.add_argument("--repeats", type=int, default=20, help="replays per line (default 20)")
    add_measurement(draft, add_device)

    kernel = add_command(
        benchmarks,
        "kernel",
        _bench_kernel,
        "One operation at the sizes of a named shape, against the library and the floor of bytes and operations.",
        "headstart bench kernel linear --shape llama-3-8b --rows 1,64,2048\n"
        "  headstart bench kernel linear --shape llama-3-8b --sweep\n"
        "  headstart bench kernel prefill-attention --shape llama-3-8b --tokens 4096,16384",
        "Operations: linear (a layer's four products and the lm_head), gated_mlp, attention (over draft trees),\n"
        "prefill_attention, rms_norm, rotary, embedding, res_block, sample, verify, commit, rules (every verifier from logits to\n"
        "verdict, requests x nodes, with a temperature alone and cut by top-k and top-p too), distill_loss (of training), or all.",
    )
    kernel.add_argument("op", help="the operation, or all")
    kernel.add_argument("--rows", default="1,16,64,2048", help="rows of the input (default 1,16,64,2048)")
    kernel.add_argument("--context", default="1024,8192", help="keys that attention goes over (default 1024,8192)")
    kernel.add_argument("--batch", default="1", help="requests, for attention, verify and commit (default 1)")
    kernel.add_argument(
        "--tokens", default="4096,16384", help="prompt lengths for prefill_attention (default 4096,16384)"
    )
    kernel.add_argument("--sweep", action="store_true", help="linear: try launch configurations and print the winners")
    kernel.add_argument("--repeats", type=int, default=15, help="replays per line (default 15)")
    add_measurement(kernel, add_device)

    engine = add_command(
        benchmarks,
        "engine",
        _bench_engine,
        "Tokens per second of the whole engine on random weights, drafts accepted at given rates, beside plain decoding.",
        "headstart bench engine --shape llama-3-8b --head medusa --acceptance 2.0,3.0 --batch 1,4,16,64\n"
        "  headstart bench engine --shape llama-3-8b --head eagle3 --num-speculative-tokens 5 --acceptance 2.98 --batch 1,16",
        "Through LLM.generate, at the steady state between the last prompt and the first end of an output.\n"
        "of graph: the step's CUDA graph alone over the time the engine takes per step.\n"
        "Also: the time to the first token of one prompt, from the start of a process to its first token with a cold and a\n"
        "warm Triton cache, and the greatest memory taken.",
    )
    engine.add_argument(
        "--head",
        default="medusa",
        choices=[*HEADS, "none"],
        help="what drafts, with random weights (default medusa); eagle3 with a draft vocabulary of 32,000",
    )
    engine.add_argument("--num-speculative-tokens", type=int, help="how many tokens deep the head drafts (default 4)")
    engine.add_argument("--acceptance", help="tokens per step to accept of a head's drafts (default 2.0,3.0)")
    engine.add_argument("--batch", default="1,4,16,64", help="requests at once (default 1,4,16,64)")
    engine.add_argument("--lm-head", choices=["own", "shared"], help="the Medusa heads' lm_heads (default own)")
    engine.add_argument("--tree", help="of the head's drafts: chain (default), static, or a tree file")
    engine.add_argument(
        "--adaptive", action="store_true", help="also let the engine choose how deep to draft in every step"
    )
    engine.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt (default 1000)")
    engine.add_argument("--new-tokens", type=int, default=256, help="length of an output (default 256)")
    engine.add_argument("--no-startup", action="store_true", help="leave out the two processes that start-up takes")
    add_measurement(engine, add_device)

    peer = add_command(
        benchmarks,
        "peer",
        _bench_peer,
        "The same random model by transformers' generate (static cache, compiled) and by this engine, in one run.",
        "headstart bench peer --shape llama-3-8b --batch 1",
        "Milliseconds between tokens. start: until everything is compiled and warm. agreeing: tokens of an output that are\n"
        "the same before the first near-tie falls differently.",
    )
    peer.add_argument("--batch", default="1", help="requests at once (default 1)")
    peer.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt (default 1000)")
    peer.add_argument("--new-tokens", type=int, default=64, help="length of an output (default 64)")
    add_measurement(peer, add_device)


def add_measurement(parser, add_device):
    """What every benchmark on random weights takes."""
    parser.add_argument("--shape", required=True, help="a named shape, e.g. llama-3-8b, or a folder with a config.json")
    parser.add_argument(
        "--output", help="write the JSON object here; a bare NAME stands for benchmarks/results/<date>-NAME.json"
    )
    parser.add_argument("--commit", help="of the code, where this is no git checkout")
    add_device(parser)


def _bench_step(arguments):
    from .step import StepSettings, bench_step

    lm_heads = () if arguments.lm_head == "none" else tuple(arguments.lm_head.split(","))
    for name in lm_heads:
        if name not in ("own", "shared"):
            raise ValueError(f"--lm-head takes own, shared, own,shared or none, got {arguments.lm_head!r}")
    settings = StepSettings(
        shape=arguments.shape,
        rows=_numbers("--rows", arguments.rows),
        contexts=_numbers("--context", arguments.context) if arguments.context else None,
        batches=_numbers("--batch", arguments.batch),
        lm_heads=lm_heads,
        baseline=arguments.baseline,
        repeats=_at_least_one("--repeats", arguments.repeats),
    )
    bench_step(settings, **measurement(arguments))


def _bench_draft(arguments):
    from .draft import DraftSettings, bench_draft

    heads = tuple(arguments.head.split(","))
    for name in heads:
        if name not in HEADS:
            raise ValueError(f"--head takes some of {', '.join(HEADS)}, separated by commas, got {arguments.head!r}")
    (context,) = _numbers("--context", arguments.context, most=1)
    settings = DraftSettings(
        shape=arguments.shape,
        heads=heads,
        batches=_numbers("--batch", arguments.batch),
        depth=arguments.depth,
        dynamic=arguments.tree == "dynamic",
        context=context,
        repeats=_at_least_one("--repeats", arguments.repeats),
    )
    bench_draft(settings, **measurement(arguments))


def _bench_kernel(arguments):
    from .kernel import OPERATIONS, KernelSettings, bench_kernel, sweep_kernel

    op = arguments.op.replace("-", "_")
    if op not in (*OPERATIONS, "all"):
        raise ValueError(f"there is no operation {arguments.op!r}: choose one of {', '.join(OPERATIONS)} or all")
    (batch,) = _numbers("--batch", arguments.batch, most=1)
    settings = KernelSettings(
        op=op,
        shape=arguments.shape,
        rows=_numbers("--rows", arguments.rows),
        contexts=_numbers("--context", arguments.context),
        batch=batch,
        tokens=_numbers("--tokens", arguments.tokens),
        repeats=_at_least_one("--repeats", arguments.repeats),
    )
    (sweep_kernel if arguments.sweep else bench_kernel)(settings, **measurement(arguments))


def _bench_engine(arguments):
    from .engine import EngineSettings, bench_engine

    drafts = arguments.head != "none"
    for option in ("acceptance", "lm_head", "tree", "num_speculative_tokens", "adaptive"):
        given = getattr(arguments, option)
        if given is not None and given is not False and not drafts:
            raise ValueError(f"--{option.replace('_', '-')} {given} says how heads draft, and --head none has none")
    if arguments.lm_head and arguments.head != "medusa":
        raise ValueError(f"--lm-head {arguments.lm_head} is for Medusa heads, and --head {arguments.head} is none")
    depth = 4 if arguments.num_speculative_tokens is None else arguments.num_speculative_tokens
    settings = EngineSettings(
        shape=arguments.shape,
        head=arguments.head if drafts else None,
        num_speculative_tokens=_at_least_one("--num-speculative-tokens", depth),
        acceptance=_numbers("--acceptance", arguments.acceptance or "2.0,3.0", float) if drafts else (),
        batches=_numbers("--batch", arguments.batch),
        lm_head=arguments.lm_head or "own",
        tree=arguments.tree or "chain",
        adaptive=arguments.adaptive,
        prompt_tokens=_at_least_one("--prompt-tokens", arguments.prompt_tokens),
        new_tokens=_at_least_one("--new-tokens", arguments.new_tokens),
        startup=not arguments.no_startup,
    )
    bench_engine(settings, **measurement(arguments))


def _bench_peer(arguments):
    from .peer import PeerSettings, bench_peer

    settings = PeerSettings(
        shape=arguments.shape,
        batches=_numbers("--batch", arguments.batch),
        prompt_tokens=_at_least_one("--prompt-tokens", arguments.prompt_tokens),
        new_tokens=_at_least_one("--new-tokens", arguments.new_tokens),
    )
    bench_peer(settings, **measurement(arguments))


def measurement(arguments):
    """Device, dtype, command line and output of a benchmark on random weights. Chooses the threads, too."""
    import torch

    from ..target_source import DTYPES, choose_device
    from ..threads import choose_threads
    from .shape import config_of_shape

    device = choose_device(arguments.device)
    if arguments.dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPES)}, got {arguments.dtype!r}")
    dtype = DTYPES.get(arguments.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    choose_threads(config_of_shape(arguments.shape), device)
    command = " ".join(["headstart", *sys.argv[1:]])
    return dict(device=str(device), dtype=dtype, command=command, output=arguments.output, commit=arguments.commit)


def _numbers(name, text, kind=int, most=None):
    """A comma-separated list of numbers of at least 1, as a tuple."""
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or (most and len(numbers) > most):
        what = "one number" if most == 1 else "numbers separated by commas"
        raise ValueError(f"{name} takes {what} of at least 1, got {text!r}")
    return numbers


def _at_least_one(name, number):
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
