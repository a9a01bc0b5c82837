"""The `headstart` command: parses, then calls into the folders. `headstart COMMAND --help` teaches each command."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from headstart.inference.benchmarks.command import add_benchmarks, add_measurement
from headstart.inference.output_files import check_writable
from headstart.train import regenerate_options

# Which held-out prompts are for what: a tree is never measured on the prompts that the comparison reports.
COMPARED_PROMPTS = 16
TREE_PROMPTS = 32
# Cache of the engine that measures acceptance, in pages of 64 tokens; those that time trees need memory, too.
TREE_PAGES = 512


def main(argv=None):
    """Entry point. Returns the exit status: 0, or 2 with one line on stderr for bad input."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:
        os._exit(0)  # the reader of our output left: nothing more to say
    except (ValueError, OSError) as error:
        print(f"{_name(arguments)}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_name(arguments)}: interrupted", file=sys.stderr)
        return 130


def _name(arguments):
    """The command as it was typed, e.g. `headstart bench step`."""
    what = [arguments.what] if arguments.command == "bench" and arguments.what else []
    return " ".join(["headstart", arguments.command, *what])


def build_parser():
    parser = argparse.ArgumentParser(
        prog="headstart",
        description="Speculative decoding that changes no output bit: run heads, measure them, draw what they do.",
        epilog="Training: accelerate launch train/medusa.py --help    Export: heads.export --help",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def command(*arguments):
        return _add_command(commands, *arguments)

    generate = command(
        "generate",
        _generate,
        "Answer a prompt, streamed; with --compare, also show plain decoding beside it.",
        "headstart generate --model assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static --compare \\\n"
        "      'Write the Python function `read_lines`: Read a file and return its lines.'",
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    _add_model(generate)
    _add_speculation(generate)
    generate.add_argument(
        "--raw", action="store_true", help="feed the text as it is instead of through the chat template"
    )
    generate.add_argument("--compare", action="store_true", help="answer with and without speculation, and compare")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (default 1: all)"
    )
    generate.add_argument("--top-k", type=int, default=0, help="keep so many likeliest tokens (default 0: all)")
    generate.add_argument("--max-tokens", type=int, default=256, help="at most so many new tokens (default 256)")
    generate.add_argument("--stop", action="append", default=[], help="end before this string; may be given again")
    generate.add_argument("--seed", type=int, default=0, help="of the noise at temperatures above 0 (default 0)")

    tree = command(
        "tree",
        _tree,
        "Choose the draft tree that decodes fastest: from acceptance and step times, both measured by the engine.",
        "headstart tree runs/quickstart\n  headstart tree runs/quickstart --budget 16",
        "Measures how often each candidate of the draft is right and what steps over trees of several sizes and depths take here;\n"
        "then tries the tree that promises most against plain decoding, and against dynamic trees where the drafter grows them.\n"
        "The file holds the figures and `headstart report` shows them; tree='static' finds it in a run or beside a head.",
    )
    tree.add_argument(
        "source", metavar="RUN", help="a run, a checkpoint, a head folder, or a smaller model that drafts"
    )
    tree.add_argument(
        "--model", help="the target (default: the one the head was trained for, with its adapter if it has one)"
    )
    _add_adapter(tree)
    tree.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl of the run, else of the target)")
    tree.add_argument("--num-prompts", type=int, default=TREE_PROMPTS, help=f"how many (default {TREE_PROMPTS})")
    tree.add_argument(
        "--budget",
        default="auto",
        help="nodes of a static tree, root included, and nothing is timed; auto (default): whatever is fastest here",
    )
    tree.add_argument("--batch-size", type=int, help="with --budget auto: requests that decode at once (default 1)")
    tree.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="tokens drafted ahead at most (default: what the head was made for; a model that drafts needs it)",
    )
    tree.add_argument(
        "--output", help="where to write (default: tree.json in RUN; for a model that drafts there is none)"
    )
    _add_device(tree)

    bench = command(
        "bench",
        lambda _: bench.print_help(),
        "Measure: speculation against plain decoding; one step, one kernel, the whole engine; another library beside it.",
        "headstart bench speculation --model assets/stdlib-coder --head assets/stdlib-coder-medusa\n"
        "  headstart bench step --help",
    )
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="WHAT", dest="what")
    _add_bench_speculation(benchmarks)
    add_benchmarks(benchmarks, _add_command, _add_device)
    _add_bench_train(benchmarks)

    lossless = command(
        "verify-lossless",
        _verify_lossless,
        "Check on your own model that speculation leaves the output as it was: bit by bit, and in law.",
        "headstart verify-lossless --model assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static",
        "bits: tokens and log-probabilities against plain decoding, one request at a time. law: many short samples with and\n"
        "without speculation, by a two-sample G-test, and as a control the same test between two temperatures. Ends with 1 if a\n"
        "check fails. docs/lossless.md says what each verifier promises.",
    )
    _add_model(lossless)
    _add_speculation(lossless)
    lossless.add_argument("--verifier", default="strict", help="the rule that accepts drafts (default strict)")
    lossless.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl in the target's folder)")
    lossless.add_argument("--num-prompts", type=int, default=8, help="the first so many (default 8)")
    lossless.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt (default 64)")
    lossless.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 0.8)")
    lossless.add_argument(
        "--samples", type=int, default=500, help="per side and temperature for the law; 0: none (default 500)"
    )
    lossless.add_argument("--output", help="also write the checks as JSON here")

    regenerate = command(
        "regenerate",
        _regenerate,
        regenerate_options.SUMMARY,
        regenerate_options.EXAMPLES,
        regenerate_options.DETAILS,
    )
    regenerate_options.add_options(regenerate)

    report = command(
        "report",
        _report,
        "Write one self-contained HTML page about a run (curves, acceptance, the tree, the speed table) or comparing several.",
        "headstart report runs/quickstart\n  headstart report runs/medusa runs/eagle3 --output comparison.html",
    )
    report.add_argument("source", metavar="RUN", nargs="+", help="the run folder; several are compared on one page")
    report.add_argument("--output", help="where to write (default: report.html in RUN; several have none)")

    dashboard = command(
        "dashboard",
        _dashboard,
        "Make or update the W&B workspace of the training runs: the panels of the report, live and over all runs.",
        "headstart dashboard --entity my-team",
        'Needs the extra "dashboard" (wandb-workspaces) and `wandb login`. Called again, it updates the view that it made.',
    )
    dashboard.add_argument("--entity", default="", help="user or team (default: W&B's own for this login)")
    dashboard.add_argument("--project", default="headstart", help="where the runs are (default headstart)")
    dashboard.add_argument("--name", default="Headstart", help="title of the view (default Headstart)")
    dashboard.add_argument(
        "--print", dest="show", action="store_true", help="write the workspace's JSON to stdout and contact nobody"
    )
    return parser


def _add_command(commands, name, run, summary, example, more=""):
    """One command: its summary, what else there is to know, an example."""
    sub = commands.add_parser(
        name,
        help=summary,
        description="\n\n".join(filter(None, (summary, more))),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(run=run)
    return sub


def _add_bench_speculation(benchmarks):
    bench = _add_command(
        benchmarks,
        "speculation",
        _bench_speculation,
        "Speculation against plain decoding on prompts: same tokens, tokens per step, tokens per second.",
        "headstart bench speculation --model assets/stdlib-coder --head assets/stdlib-coder-medusa",
    )
    bench.add_argument("--model", required=True, help="the target: a folder or Hub id")
    _add_adapter(bench)
    bench.add_argument(
        "--head", action="append", required=True, help="a head folder, run or Hub id; may be given again"
    )
    bench.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl in the target's folder)")
    bench.add_argument(
        "--num-prompts", type=int, default=COMPARED_PROMPTS, help=f"the first so many (default {COMPARED_PROMPTS})"
    )
    bench.add_argument(
        "--nodes", type=int, action="append", default=[], help="also the best tree of so many nodes; may be given again"
    )
    bench.add_argument("--max-tokens", type=int, default=96, help="new tokens per prompt (default 96)")
    bench.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 0.8)")
    bench.add_argument("--output", help="also write the rows as JSON here")
    _add_device(bench)


def _add_device(parser):
    parser.add_argument("--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")


def _add_adapter(parser):
    parser.add_argument(
        "--adapter",
        help="a LoRA adapter of the target, merged into its weights: a folder, a Hub id, or a run or head trained with one",
    )


def _add_bench_train(benchmarks):
    bench = _add_command(
        benchmarks,
        "train",
        _bench_train,
        "Training steps on random weights of a named shape, beside a plain PyTorch loop, against the rate of matrix products.",
        "headstart bench train --shape llama-3-8b --head medusa\n"
        "  headstart bench train --shape llama-3-8b --head eagle3 --loss lk --sequence 2048 --rows 2",
        "of product: the share of the rate of a large matrix product, over the products that a step cannot do without.\n"
        "above rest: the peak of the memory above what is held between steps (weights and the optimiser's state).",
    )
    bench.add_argument(
        "--head", default="medusa", choices=["medusa", "eagle3", "mlp_speculator"], help="default medusa"
    )
    bench.add_argument("--loss", default="kl", choices=["hard", "kl", "lk", "lk-log"], help="default kl")
    bench.add_argument("--sequence", type=int, default=4096, help="tokens of a row (default 4096)")
    bench.add_argument("--rows", type=int, default=1, help="rows of a step (default 1)")
    bench.add_argument("--lm-head", choices=["own", "shared"], help="the Medusa heads' lm_heads (default shared)")
    bench.add_argument("--chunk-tokens", type=int, default=1024, help="labels projected at once (default 1024)")
    bench.add_argument("--repeats", type=int, default=5, help="steps that are timed (default 5)")
    add_measurement(bench, _add_device)


def _add_model(parser):
    parser.add_argument("--model", required=True, help="the target: a folder or Hub id")
    _add_adapter(parser)
    parser.add_argument(
        "--max-model-len", type=int, help="longest prompt + output in tokens (default: the model's limit)"
    )
    _add_device(parser)


def _add_speculation(parser):
    parser.add_argument(
        "--head",
        help="what drafts: a head (a folder, a run or a Hub id) or a smaller model of the same vocabulary (a folder); default: "
        "plain decoding",
    )
    parser.add_argument(
        "--method",
        help="ngram drafts without a head, by looking up what followed the newest tokens before; otherwise it is found out",
    )
    parser.add_argument("--tree", help="the drafts' shape: chain (default), static, dynamic, or a tree file")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="depth of the drafts (default: what the head was made for; needed for models and ngram)",
    )


def _speculative_config(arguments, **more):
    """The speculative_config that the options of _add_speculation say, None for plain decoding; more: keys besides."""
    if not arguments.head and not arguments.method:
        for option, given in (
            ("--tree", arguments.tree),
            ("--num-speculative-tokens", arguments.num_speculative_tokens),
        ):
            if given is not None:
                raise ValueError(f"{option} {given} says how a head drafts: name one with --head, or leave it out")
        return None
    return {
        "model": arguments.head,
        "method": arguments.method,
        "tree": arguments.tree or "chain",
        "num_speculative_tokens": arguments.num_speculative_tokens,
        **more,
    }


def _generate(arguments):
    from headstart.inference.llm import LLM
    from headstart.inference.prompt_files import render_prompt
    from headstart.inference.sampling import SamplingParams

    speculative = _speculative_config(arguments)
    if arguments.compare and speculative is None:
        raise ValueError("--compare shows a head beside plain decoding: name one with --head")
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        seed=arguments.seed,
    )
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text.strip():
        raise ValueError("the prompt is empty: give some text")
    _choose_threads(arguments.model, arguments.device)
    shared = dict(max_model_len=arguments.max_model_len, max_num_seqs=1)
    llm = LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        speculative_config=speculative,
        **shared,
    )
    if llm.tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer: the command needs one")
    prompt = text
    if not arguments.raw and llm.tokenizer.chat_template:
        prompt = render_prompt(llm.tokenizer, {"messages": [{"role": "user", "content": text}]})

    fast = _stream_and_time(llm, prompt, params, show=True)
    if arguments.compare:
        plain = LLM(llm, **shared)
        slow = _stream_and_time(plain, prompt, params, show=False)
        same = fast[0].token_ids == slow[0].token_ids
        print()
        for name, (output, seconds) in (("with speculation", fast), ("plain decoding", slow)):
            metrics = output.spec_decode_metrics
            steps = f", {metrics.acceptance_length:.2f} tokens per step" if metrics.num_steps else ""
            rate = len(output.token_ids) / seconds
            print(f"{name:17} {len(output.token_ids)} tokens in {seconds:.2f} s: {rate:.0f} tokens/s{steps}")
        print(f"same tokens: {'yes, every one' if same else 'NO - this is a bug, please report it'}")
        print(f"speed-up: {slow[1] / fast[1]:.2f}x")
        return 0 if same else 1
    return 0


def _stream_and_time(llm, prompt, params, show):
    """(CompletionOutput, seconds) of one answer, printed as it comes if `show`. Start-up costs are paid before the clock."""
    import time

    from headstart.inference.sampling import SamplingParams

    llm.generate([prompt], SamplingParams(temperature=params.temperature, max_tokens=4, seed=0))
    stream = llm.stream(prompt, params)
    start = time.perf_counter()
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            seconds = time.perf_counter() - start
            if show:
                print()
            return end.value.outputs[0], seconds
        if show:
            print(piece, end="", flush=True)


def _tree(arguments):
    from headstart.heads.checkpoint import load_head, resolve_head
    from headstart.inference.acceptance import measure_acceptance
    from headstart.inference.adapter import has_adapter
    from headstart.inference.llm import LLM
    from headstart.inference.prompt_files import read_prompts, render_prompt
    from headstart.inference.speculation import is_draft_model
    from headstart.inference.tree import build_static_tree, save_tree
    from headstart.inference.tree_choice import best_static_trees, check_budget
    from headstart.inference.tree_measurement import TreeMeasurement
    from headstart.inference.tree_text import outcome

    budget, batch_size = check_budget(arguments.budget, arguments.batch_size)
    _check_count(arguments.num_prompts)
    # What drafts: a head, or a model, where tree="static" looks for no file.
    is_model = is_draft_model(arguments.source)
    for name in ("model", "num_speculative_tokens", "output") if is_model else ():
        if getattr(arguments, name) is None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{arguments.source} holds no head: to draft with it as a model, give {option}")
    drafts = arguments.source if is_model else str(resolve_head(arguments.source))
    output = Path(arguments.output) if arguments.output else Path(arguments.source) / "tree.json"
    check_writable(output)
    model, adapter = arguments.model, arguments.adapter
    if model is None:
        model = _target_of(arguments.source, load_head(drafts))
        adapter = adapter or (drafts if has_adapter(drafts) else None)
    own = Path(arguments.source) / "heldout.jsonl"  # what the training kept out of its data
    if arguments.prompts or is_model or not own.is_file():
        source = _prompt_file(arguments.prompts, model)
        # Of the target's own prompts, the first are for `bench`.
        start = 0 if arguments.prompts else COMPARED_PROMPTS
        prompts = read_prompts(source, start=start, count=arguments.num_prompts)
    else:
        source, prompts = own, read_prompts(own)[: arguments.num_prompts]
    _choose_threads(model, arguments.device)
    depth = arguments.num_speculative_tokens
    llm = LLM(
        model,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=adapter,
        num_gpu_blocks_override=TREE_PAGES,
        speculative_config={"model": drafts, "tree": "chain", "num_speculative_tokens": depth},
    )
    prompts = [render_prompt(llm.tokenizer, prompt) for prompt in prompts]
    print(f"measuring acceptance per depth and rank on {len(prompts)} prompts of {source} ...", file=sys.stderr)
    found = measure_acceptance(llm, prompts, use_tqdm=True)
    rates, choice = found["rates"][: llm.tree.max_depth], None
    best_static_trees(rates)  # refuses a draft that is never right
    if budget is None:
        print(f"timing steps on this machine, {batch_size} request(s) at once ...", file=sys.stderr)
        # An engine more on the head costs no second copy of it.
        head = drafts if is_model else llm.engine.drafter.head
        tree, choice = TreeMeasurement(llm, head, prompts, batch_size).choose(rates)
    else:
        tree = build_static_tree(rates, budget)
    save_tree(tree, output, rates, choice)
    print(outcome(tree, found, rates, choice, len(prompts)))
    print(f"written to {output}")
    return 0


def _bench_speculation(arguments):
    from headstart.heads.checkpoint import resolve_head
    from headstart.inference.compare import candidate_trees, compare, format_table, hardware_name, save_comparison
    from headstart.inference.llm import LLM
    from headstart.inference.prompt_files import read_prompts, render_prompt
    from headstart.inference.speculation import find_draft_source, static_tree_file
    from headstart.inference.target_source import target_config

    _check_count(arguments.num_prompts)
    if arguments.output:
        check_writable(Path(arguments.output))
    prompts = read_prompts(_prompt_file(arguments.prompts, arguments.model), count=arguments.num_prompts)
    folders = [resolve_head(source) for source in arguments.head]
    _choose_threads(arguments.model, arguments.device)
    shared = dict(max_num_seqs=1, num_gpu_blocks_override=2)  # only its weights are used
    base = LLM(arguments.model, device=arguments.device, dtype=arguments.dtype, adapter=arguments.adapter, **shared)
    prompts = [render_prompt(base.tokenizer, prompt) for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        heads = []
        for number, (source, folder) in enumerate(zip(arguments.head, folders)):
            head = find_draft_source({"model": folder}, target_config(arguments.model, "auto")[0])
            tree_file = static_tree_file(folder, head)
            place = Path(scratch) / str(number)
            place.mkdir()
            drafts = candidate_trees(head.depth, tree_file, arguments.nodes, place)
            heads.append((source, str(folder), drafts))
        rows = compare(
            base,
            heads,
            prompts,
            temperatures=arguments.temperature or (0.0, 0.8),
            max_tokens=arguments.max_tokens,
        )
    dtype = str(base.dtype).removeprefix("torch.")
    what = f"{len(prompts)} held-out prompts, {arguments.max_tokens} new tokens each, batch 1"
    print(f"\n{what}, {dtype} on {hardware_name(base.device)}\n")
    print(format_table(rows))
    if arguments.output:
        command = " ".join(["headstart", *sys.argv[1:]])
        save_comparison(rows, arguments.output, base.device, base.dtype, command)
        print(f"\nwritten to {arguments.output}")
    if not all(row["identical"] for row in rows):
        print("some outputs differ from plain decoding: this is a bug, please report it", file=sys.stderr)
        return 1
    return 0


def _bench_train(arguments):
    from headstart.inference.benchmarks.command import measurement
    from headstart.train.benchmark import bench_train, check_settings

    bench_train(check_settings(arguments), **measurement(arguments))


def _verify_lossless(arguments):
    import json

    from headstart.inference.llm import LLM
    from headstart.inference.lossless import as_rows, verdict, verify_lossless
    from headstart.inference.prompt_files import read_prompts, render_prompt
    from headstart.inference.sampling import SamplingParams
    from headstart.inference.speculation import (
        check_speculative_config,
        check_width,
        choose_drawing,
        choose_tree,
        find_draft_source,
    )
    from headstart.inference.target_source import target_config

    speculative = _speculative_config(arguments, verifier=arguments.verifier)
    if speculative is None:
        raise ValueError("verify-lossless checks speculation: name what drafts with --head")
    _check_count(arguments.num_prompts)
    if arguments.samples < 0:
        raise ValueError(f"--samples must be at least 0, got {arguments.samples}")
    if arguments.output:
        check_writable(Path(arguments.output))
    if arguments.verifier == "synthetic":
        raise ValueError("--verifier synthetic promises nothing that could be checked: it accepts by given rates")
    temperatures = tuple(arguments.temperature or (0.0, 0.8))
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens)  # refuses what is out of range
    # Refused before the target's weights are read: a head that is none, a tree it cannot draft, an unknown verifier.
    target, _ = target_config(arguments.model, "auto")
    tree = choose_tree(speculative, find_draft_source(check_speculative_config(speculative), target))
    check_width(tree, target.get_text_config().vocab_size)
    choose_drawing(speculative, tree)
    prompts = read_prompts(_prompt_file(arguments.prompts, arguments.model), count=arguments.num_prompts)
    _choose_threads(arguments.model, arguments.device)
    base = LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        max_model_len=arguments.max_model_len,
        max_num_seqs=1,
        num_gpu_blocks_override=64,  # it only holds the weights
        enforce_eager=True,
    )
    if base.tokenizer is None and not all("prompt_token_ids" in prompt for prompt in prompts):
        raise ValueError(f"{arguments.model} has no tokenizer: give prompts with prompt_token_ids")
    checks = verify_lossless(
        base,
        speculative,
        [render_prompt(base.tokenizer, prompt) for prompt in prompts],
        temperatures=temperatures,
        max_tokens=arguments.max_tokens,
        samples=arguments.samples,
        use_tqdm=True,
    )
    for check in checks:
        print(check.line())
    passed, sentence = verdict(checks, arguments.verifier)
    print(sentence)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps({"lossless": passed, "checks": as_rows(checks)}, indent=1) + "\n")
    return 0 if passed else 1


def _regenerate(arguments):
    from headstart.train.regenerate import regenerate

    return regenerate(arguments)


def _report(arguments):
    from headstart.train.report import write_comparison, write_report

    if len(arguments.source) == 1:
        print(write_report(Path(arguments.source[0]), Path(arguments.output) if arguments.output else None))
    elif not arguments.output:
        raise ValueError("several runs belong to no folder of their own: name the page with --output")
    else:
        print(write_comparison(arguments.source, arguments.output))
    return 0


def _dashboard(arguments):
    from headstart.train.workspace import build_view, save_dashboard, view_json

    where = (arguments.entity, arguments.project, arguments.name)
    print(view_json(build_view(*where)) if arguments.show else save_dashboard(*where))
    return 0


def _choose_threads(model, device):
    from headstart.inference.decoder import check_supported
    from headstart.inference.target_source import choose_device, target_config
    from headstart.inference.threads import choose_threads

    config, _ = target_config(model, "auto")
    check_supported(config)
    choose_threads(config, choose_device(device))


def _check_count(number):
    if number < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {number}")


def _prompt_file(given, model):
    path = Path(given) if given else Path(model) / "heldout.jsonl"
    if not given and not path.is_file():
        raise ValueError(f"{model} ships no held-out prompts (heldout.jsonl): name a JSONL file with --prompts")
    return path


def _target_of(source, head):
    """The target a head was trained for: from the run's config, else from the head's own."""
    config = Path(source) / "config.yaml"
    if config.is_file():
        import yaml

        target = (yaml.safe_load(config.read_text()) or {}).get("target")
        if target:
            return target
    if head.config.base_model_name_or_path:
        return head.config.base_model_name_or_path
    raise ValueError(f"{source} does not say which target it was trained for: name it with --model")


if __name__ == "__main__":
    sys.exit(main())
