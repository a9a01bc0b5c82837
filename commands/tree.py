"""`headstart tree`: its arguments and its work."""

import sys
from pathlib import Path

from ..heads.storage.atomic_write import check_writable
from ..inference.arguments import (
    add_adapter,
    add_device,
    check_count,
    choose_threads_for,
    prompt_file,
    target_of,
)
from .bench.speculation import COMPARED_PROMPTS

# Use of the held-out prompts: a tree is never measured on the prompts that `bench speculation` reports.
TREE_PROMPTS = 32
# Pages of 64 tokens of the engine that measures acceptance. They are few: the engines that time trees need memory, too.
TREE_PAGES = 512


EXAMPLE = "headstart tree runs/quickstart\n  headstart tree runs/quickstart --budget 16"
DETAILS = (
    "Measures how often each candidate of the draft is right, and times steps over trees of several sizes and depths here.\n"
    "Then compares the best expected tree with plain decoding and with dynamic trees.\n"
    "tree.json keeps the figures for `headstart report`; --tree static finds it in a run or beside a head."
)


def add_options(parser):
    parser.add_argument("source", metavar="RUN", help="a run, a checkpoint, a head folder, or a smaller draft model")
    parser.add_argument(
        "--model", help="the target (default: the head's own, with the adapter that the head was trained with)"
    )
    add_adapter(parser)
    parser.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl of the run, else of the target)")
    parser.add_argument(
        "--num-prompts", type=int, default=TREE_PROMPTS, help=f"number of prompts (default {TREE_PROMPTS})"
    )
    parser.add_argument(
        "--budget",
        default="auto",
        help="number of nodes, root included, of a static tree chosen by acceptance alone; auto (default): the fastest, by timing",
    )
    parser.add_argument("--batch-size", type=int, help="with --budget auto: requests that decode at once (default 1)")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="greatest depth of the drafts (default: the head's own; required for a draft model)",
    )
    parser.add_argument(
        "--output",
        help="file to write (default: tree.json in RUN; required for a Hub head and for a draft model)",
    )
    add_device(parser)


def run(arguments):
    from ..evaluation.acceptance import measure_acceptance
    from ..evaluation.tree_choice import best_static_trees, check_budget
    from ..evaluation.tree_measurement import TreeMeasurement
    from ..evaluation.tree_text import outcome
    from ..heads.checkpoint import describe_choice, load_head, resolve_head
    from ..inference.llm import LLM
    from ..inference.models.adapter import find_adapter_of
    from ..inference.prompt_files import read_prompts, render_prompt
    from ..inference.speculation.proposers import is_draft_model
    from ..inference.speculation.tree import build_static_tree, save_tree

    budget, batch_size = check_budget(arguments.budget, arguments.batch_size)
    check_count(arguments.num_prompts)
    # The drafter: a head, or a model (for which tree="static" looks for no file).
    is_model = is_draft_model(arguments.source)
    for name in ("model", "num_speculative_tokens", "output") if is_model else ():
        if getattr(arguments, name) is None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{arguments.source} holds no head: to draft with it as a model, give {option}")
    drafts = arguments.source if is_model else str(resolve_head(arguments.source))
    if not is_model and (choice := describe_choice(arguments.source, Path(drafts))):
        print(choice, file=sys.stderr)
    # A folder with a repository's name would be taken for the head from then on.
    if not arguments.output and not Path(arguments.source).is_dir():
        raise ValueError(f"{arguments.source} is not a folder here to keep the tree in: name a file with --output")
    output = Path(arguments.output) if arguments.output else Path(arguments.source) / "tree.json"
    check_writable(output)
    model, adapter = arguments.model, arguments.adapter
    if model is None:
        head = load_head(drafts)
        model = target_of(arguments.source, head)
        adapter = adapter or find_adapter_of(head, arguments.source, drafts)
    own = Path(arguments.source) / "heldout.jsonl"  # the prompts held out of the training
    if arguments.prompts or is_model or not own.is_file():
        source = prompt_file(arguments.prompts, model)
        # The first of the target's own prompts are for `bench`.
        start = 0 if arguments.prompts else COMPARED_PROMPTS
        prompts = read_prompts(source, start=start, count=arguments.num_prompts)
    else:
        source, prompts = own, read_prompts(own)[: arguments.num_prompts]
    choose_threads_for(model, arguments.device)
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
    best_static_trees(rates)  # raises for a draft that is never right
    if budget is None:
        print(f"timing steps on this machine, {batch_size} request(s) at once ...", file=sys.stderr)
        # Another engine on the head needs no second copy of it.
        head = drafts if is_model else llm.engine.drafter.head
        tree, choice = TreeMeasurement(llm, head, prompts, batch_size).choose(rates)
    else:
        tree = build_static_tree(rates, budget)
    save_tree(tree, output, rates, choice)
    print(outcome(tree, found, rates, choice, len(prompts)))
    print(f"written to {output}")
    return 0
