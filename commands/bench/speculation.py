"""`headstart bench speculation`: its arguments and its work."""

import shlex
import sys
import tempfile
from pathlib import Path

from ...heads.storage.atomic_write import check_writable
from ...inference.arguments import add_adapter, add_device, check_count, choose_threads_for, prompt_file

COMPARED_PROMPTS = 16  # number of held-out prompts, the first ones


EXAMPLE = "headstart bench speculation --model assets/stdlib-coder --head assets/stdlib-coder-medusa"


def add_options(parser):
    parser.add_argument("--model", required=True, help="the target: a folder or Hub id")
    add_adapter(parser)
    parser.add_argument(
        "--head", action="append", required=True, help="a head folder, run or Hub id; may be given again"
    )
    parser.add_argument("--prompts", help="JSONL of prompts (default: heldout.jsonl in the target's folder)")
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=COMPARED_PROMPTS,
        help=f"number of prompts, the first ones (default {COMPARED_PROMPTS})",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        action="append",
        default=[],
        help="also measure the best static tree of this number of nodes; may be given again",
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens per prompt (default 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 0.8)")
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="also measure transformers' own generate, plain and with prompt lookup (loads the target a second time)",
    )
    parser.add_argument(
        "--output", help="also write the rows as JSON here; `headstart report` shows benchmark.json of the run"
    )
    add_device(parser)


def run(arguments):
    from ...evaluation.compare import candidate_trees, compare, format_table, hardware_name, save_comparison
    from ...heads.checkpoint import describe_choice, resolve_head
    from ...inference.llm import LLM
    from ...inference.models.target_source import target_config
    from ...inference.prompt_files import read_prompts, render_prompt
    from ...inference.speculation.options import SpeculativeOptions
    from ...inference.speculation.proposers import find_proposer

    check_count(arguments.num_prompts)
    if arguments.transformers and arguments.adapter:
        raise ValueError("--transformers measures the target without an adapter: leave --adapter out")
    if arguments.output:
        check_writable(Path(arguments.output))
    prompts = read_prompts(prompt_file(arguments.prompts, arguments.model), count=arguments.num_prompts)
    folders = [resolve_head(source) for source in arguments.head]
    for choice in filter(None, map(describe_choice, arguments.head, folders)):
        print(choice, file=sys.stderr)
    choose_threads_for(arguments.model, arguments.device)
    shared = dict(max_num_seqs=1, num_gpu_blocks_override=2)  # only the weights of this LLM are used
    base = LLM(arguments.model, device=arguments.device, dtype=arguments.dtype, adapter=arguments.adapter, **shared)
    prompts = [render_prompt(base.tokenizer, prompt) for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        heads = []
        for number, (source, folder) in enumerate(zip(arguments.head, folders)):
            head = find_proposer(SpeculativeOptions(model=folder), target_config(arguments.model, "auto")[0])
            try:
                tree_file = head.static_tree_file()
            except ValueError as error:
                if arguments.nodes:
                    raise
                print(f"{source}: compared as a chain alone, for there is {error}", file=sys.stderr)
                heads.append((source, str(folder), [(f"chain of {head.depth}", "chain")]))
                continue
            place = Path(scratch) / str(number)
            place.mkdir()
            drafts = candidate_trees(head.depth, tree_file, arguments.nodes, place)
            heads.append((source, str(folder), drafts))
        rows, library_rows = compare(
            base,
            heads,
            prompts,
            temperatures=arguments.temperature or (0.0, 0.8),
            max_tokens=arguments.max_tokens,
            module=_module(arguments.model, base) if arguments.transformers else None,
        )
    dtype = str(base.dtype).removeprefix("torch.")
    what = f"{len(prompts)} held-out prompts, {arguments.max_tokens} new tokens each, batch 1"
    print(f"\n{what}, {dtype} on {hardware_name(base.device)}\n")
    print(format_table(rows, library_rows))
    if arguments.output:
        command = shlex.join(["headstart", *sys.argv[1:]])
        save_comparison(rows, arguments.output, base.device, base.dtype, command, library_rows)
        print(f"\nwritten to {arguments.output}")
    if not all(row["identical"] for row in rows):
        print("some outputs differ from plain decoding: this is a bug, please report it", file=sys.stderr)
        return 1
    return 0


def _module(model, base):
    """The target as a transformers model, in the engine's dtype and on its device."""
    from transformers import AutoModelForCausalLM

    from ...heads.storage.hub_answer import hub_options

    return (
        AutoModelForCausalLM.from_pretrained(model, dtype=base.dtype, trust_remote_code=False, **hub_options(model))
        .to(base.device)
        .eval()
    )
