"""`headstart bench serve`: load on a server, and what its clients see."""

import math
import shlex
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

from ...benchmarks.measurement import at_least_one
from ...heads.storage.user_errors import CommandParser
from ..serve import add_llm, build_llm, llm_arguments, speculative_of
from .traffic import span

EXAMPLE = (
    "headstart bench serve assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static --num-prompts 32 \\\n"
    "      --prompts assets/stdlib-coder/heldout.jsonl --outputs 16-64\n"
    "  headstart bench serve --base-url http://127.0.0.1:8000 --vocab-size 128256 --request-rate 4 --goodput ttft:200,tpot:50"
)
DETAILS = (
    "With MODEL a server is started for it, with the options of the groups engine and speculation, and ended; with\n"
    "--base-url a running one of OpenAI's API is measured. Names are those of `vllm bench serve` where they mean the same.\n"
    "ttft: from sending a request to its first piece; itl: from one piece to the next; tpot: a request's mean per token after\n"
    "the first; e2el: to the last piece. client: share of one core that the client took, which must not come near 1.\n"
    "goodput: requests per second whose times keep the limits. tokens/step: acceptance length by the server's own counters.\n"
    "Random prompts accept few drafts: to measure a head, give real ones, like --prompts assets/stdlib-coder/heldout.jsonl.\n"
    "On a CPU few and short requests suffice: --num-prompts 16 --outputs 16-64."
)
PROMPTS, OUTPUTS = (100, 2000), (32, 512)  # tokens, shortest and longest, where no others are given
LIMITS = ("ttft", "itl", "tpot", "e2el")


def add_options(parser):
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the target: a folder or Hub id")
    parser.add_argument("--base-url", help="measure this server instead of starting one, like http://127.0.0.1:8000")
    parser.add_argument("--api-key", help="the server's key; better in the variable HEADSTART_API_KEY")
    parser.add_argument("--served-model-name", help="the name that requests give (default: the first that it serves)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="random tokens are below it (default: MODEL's; needed with --base-url without MODEL)",
    )
    parser.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second, with random (Poisson) arrivals; inf (default): all at once",
    )
    parser.add_argument("--max-concurrency", type=int, help="the most requests at once (default: no limit)")
    parser.add_argument("--num-prompts", type=int, help="number of requests (default 256, or all of a file)")
    parser.add_argument(
        "--prompts",
        help="shortest and longest prompt in random tokens (default 100-2000, or less for a short MODEL), or a JSONL file",
    )
    parser.add_argument("--outputs", help="shortest and longest output in tokens (default 32-512, or less, likewise)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals (default 0)")
    parser.add_argument("--num-warmups", type=int, default=8, help="requests before the measured ones (default 8)")
    parser.add_argument(
        "--goodput",
        nargs="+",
        metavar="TIME:MS",
        help=f"limits in milliseconds, like ttft:200,tpot:50, of {', '.join(LIMITS)} (itl: of the longest gap)",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="first run the same requests without HTTP: as streams; without --max-concurrency also by LLM.generate, and in the "
        "order in which they come",
    )
    parser.add_argument(
        "--output", help="write the JSON object here; a bare NAME stands for benchmarks/results/<date>-NAME.json"
    )
    parser.add_argument("--commit", help="commit of the code, if this is not a git checkout")
    add_llm(parser)


def run(arguments):
    from ...benchmarks.serving.serve import ServeSettings, bench_serve
    from ...benchmarks.serving.server_process import server_process
    from ...inference.models.decoder import position_limit
    from ...inference.models.target_source import choose_device, target_config
    from ...inference.prompt_files import read_prompts
    from ...inference.server.options import keys_of

    model, base_url = arguments.model_tag, arguments.base_url
    words = llm_words(arguments)
    if model is None and base_url is None:
        raise ValueError("name what is measured: MODEL, or --base-url of a running server")
    if base_url and (words or arguments.offline):
        raise ValueError(
            f"{'--offline' if arguments.offline else words[0]} is for a server that is started: leave --base-url out"
        )
    if arguments.offline and arguments.request_rate != math.inf:
        raise ValueError("--offline does not wait for arrivals: leave --request-rate out")
    if not arguments.request_rate > 0:
        raise ValueError(f"--request-rate must be above 0, or inf, got {arguments.request_rate}")
    entries, prompts, vocab_size = None, arguments.prompts, arguments.vocab_size
    if prompts is not None and not prompts.replace("-", "").isdecimal():
        entries = read_prompts(prompts, count=arguments.num_prompts)
    elif model is None and vocab_size is None:
        raise ValueError("random prompts need the size of the vocabulary: name MODEL, or give --vocab-size")
    elif prompts is not None:
        prompts = span("--prompts", prompts)
    outputs = None if arguments.outputs is None else span("--outputs", arguments.outputs)
    count = len(entries) if entries else 256 if arguments.num_prompts is None else arguments.num_prompts
    at_least_one("--num-prompts", count)
    if arguments.max_concurrency is not None:
        at_least_one("--max-concurrency", arguments.max_concurrency)
    goodput = limits(arguments.goodput or ())
    most = None  # what the server takes, if it is not running yet
    if model is not None and (base_url is None or entries is None):
        config, _ = target_config(model, "auto", arguments.trust_remote_code)
        vocab_size = config.vocab_size if vocab_size is None else vocab_size
        if base_url is None:
            most = arguments.max_model_len or position_limit(config)
    prompts, outputs = fitting(prompts, outputs, most)
    settings = ServeSettings(
        model=model,
        base_url=base_url,
        served_model_name=arguments.served_model_name,
        request_rate=arguments.request_rate,
        max_concurrency=arguments.max_concurrency,
        num_prompts=count,
        prompts=prompts,
        outputs=outputs,
        temperature=arguments.temperature,
        seed=arguments.seed,
        num_warmups=arguments.num_warmups,
        goodput=goodput,
        offline=arguments.offline,
    )
    server = nullcontext((base_url, None))
    if base_url is None:
        server = server_process([model, *words, "--max-waiting", str(settings.num_prompts)])
    bench_serve(
        settings,
        entries,
        vocab_size,
        server=server,
        max_model_len=most,
        offline=partial(_in_a_child, arguments) if arguments.offline else None,
        api_key=next(iter(keys_of([arguments.api_key] if arguments.api_key else None)), None),
        device=str(choose_device(arguments.device)),
        command=shlex.join(["headstart", *sys.argv[1:]]),
        output=arguments.output,
        commit=arguments.commit,
    )


def fitting(prompts, outputs, most):
    """Lengths of the prompts and of the outputs, each (shortest, longest): those given, and for None the defaults, or less of them.

    prompts: also the name of a file, whose lengths are not known; most: tokens of a prompt and its output, None: no limit
    """
    if most is None:
        return prompts or PROMPTS, outputs or OUTPUTS
    if outputs is None:
        outputs = _at_most(OUTPUTS, most - prompts[1] if isinstance(prompts, tuple) else most // 4)
    return prompts or _at_most(PROMPTS, most - outputs[1]), outputs


def _at_most(lengths, most):
    """(shortest, longest), neither above `most`, nor below 1."""
    return tuple(max(1, min(length, most)) for length in lengths)


def llm_words(arguments):
    """The options of add_llm that were given, as words of a command line."""
    parser = CommandParser()
    add_llm(parser)
    words = []
    for name, default in vars(parser.parse_args([])).items():
        if (value := getattr(arguments, name)) != default:
            option = name.replace("_", "-")
            switch = f"--{option}" if value else f"--no-{option}"
            words.append(switch if isinstance(value, bool) else f"--{option}={value}")
    return words


def limits(given):
    """((time, ms), ...) of words like `ttft:200,tpot:50`; ValueError for others."""
    found = []
    for part in ",".join(given).split(",") if given else ():
        name, _, number = part.partition(":")
        try:
            most = float(number)
        except ValueError:
            most = 0.0
        if name not in LIMITS or not most > 0:
            raise ValueError(
                f"--goodput takes limits in ms like ttft:200,tpot:50, of {', '.join(LIMITS)}; got {part!r}"
            )
        found.append((name, most))
    return tuple(found)


def _in_a_child(arguments, warm, requests):
    """`_offline` in a process of its own, which leaves no memory of the device behind."""
    sent = Namespace(**{name: value for name, value in vars(arguments).items() if name not in ("parser", "run")})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        return child.submit(_offline, sent, warm, requests).result()


def _offline(arguments, warm, requests):
    """Run LoadRequests without HTTP.  -> [Offline]"""
    import time

    from ...benchmarks.serving.serve import Offline
    from ...inference.prompt_files import render_prompt
    from ...inference.sampling_params import SamplingParams

    llm = build_llm(llm_arguments(arguments.model_tag, arguments, speculative_of(arguments)))

    def measure(run, requests):
        prompts = [
            render_prompt(llm.tokenizer, {"messages": one.prompt}) if one.is_chat else one.prompt for one in requests
        ]
        params = [
            SamplingParams(temperature=one.temperature, max_tokens=one.max_tokens, seed=one.seed, ignore_eos=True)
            for one in requests
        ]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = run(llm, prompts, params)
        return time.perf_counter() - start, outputs

    most, found = arguments.max_concurrency, []
    ways = [("LLM.generate", _generate), ("in order", partial(_run_in_order, is_stream=False))] * (most is None)
    ways.append(("streams", partial(_run_in_order, most=most)))
    for by, run in ways:
        if warm:
            measure(run, warm)
        seconds, outputs = measure(run, requests)
        drafts = [output.outputs[0].spec_decode_metrics for output in outputs]
        steps, accepted = sum(one.num_steps for one in drafts), sum(one.num_accepted_tokens for one in drafts)
        lengths = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]
        firsts = [output.metrics.first_token_latency for output in outputs]
        found.append(Offline(by, seconds, lengths, 1 + accepted / steps if steps else None, firsts))
    return found


def _generate(llm, prompts, params):
    return llm.generate(prompts, params)


def _run_in_order(llm, prompts, params, most=None, is_stream=True):
    """First come, first served, as the server's engine does it.  most: at once, None: no limit

    is_stream: whether somebody waits for every token of each
    """
    from ...inference.frozen_heap import frozen_heap
    from ...inference.line import Call

    session, waiting, submissions, running = llm.session, list(zip(prompts, params)), [], []
    with frozen_heap():
        while waiting or running:
            count = len(waiting) if most is None else most - len(running)
            entering = [session.submit(*pair, call=Call(is_stream)) for pair in waiting[:count]]
            submissions += entering
            running += entering
            del waiting[:count]
            session.step()
            running = [submission for submission in running if not submission.finished]
    return [session.output(submission) for submission in submissions]
