"""Options that several commands share, and the values made from them. Imports nothing heavy, so that --help stays quick."""

import argparse
import warnings
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def plain_warnings():
    """While a command runs, print warnings as one line, without file and line number."""
    before = warnings.formatwarning

    def formatted(message, category, *where):
        return f"note: {message}\n" if category is UserWarning else before(message, category, *where)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def add_command(commands, name, run, summary, example, more=""):
    """Add one command: its summary, further details, an example. Its arguments hold `run`, and `parser`, which parsed them."""
    sub = commands.add_parser(
        name,
        help=summary,
        description="\n\n".join(filter(None, (summary, more))),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(run=run, parser=sub)
    return sub


def add_device(parser):
    """Options for the device and the dtype of a command."""
    parser.add_argument("--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")


def add_ranks(parser):
    """Options for several ranks that divide the target."""
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        help="processes that divide the target's weights (default 1)",
    )
    parser.add_argument(
        "--tensor-parallel-invariant",
        type=int,
        choices=(2, 4, 8),
        help="the same bits for every --tensor-parallel-size that divides it",
    )


def ranks_of(arguments):
    """The arguments of LLM that the options of add_ranks give."""
    return {name: getattr(arguments, name) for name in ("tensor_parallel_size", "tensor_parallel_invariant")}


def add_adapter(parser):
    """Option for a LoRA adapter of the target."""
    parser.add_argument(
        "--adapter",
        help="LoRA adapter to merge into the target: a folder, a Hub id, or a run or head trained with an adapter",
    )


def add_model(parser):
    """Options for the target and for the longest request."""
    parser.add_argument("--model", required=True, help="the target: a folder or Hub id")
    add_adapter(parser)
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that the target brings along, if transformers does not know its model type",
    )
    parser.add_argument(
        "--max-model-len", type=int, help="longest prompt + output in tokens (default: the model's limit)"
    )
    add_device(parser)


def add_speculation(parser):
    """Options for the drafter and the tree."""
    parser.add_argument(
        "--head",
        help="the drafter: a head (a folder, a run or a Hub id, also ID@REVISION) or a smaller model of the same vocabulary (a "
        "folder); default: plain decoding",
    )
    parser.add_argument(
        "--method",
        help="ngram: draft without a head, by copying the tokens after an earlier occurrence of the newest ones (default: found "
        "from --head)",
    )
    parser.add_argument("--tree", help="shape of the drafts: chain (default), static, dynamic, or a tree file")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="depth of the drafts (default: the head's own; required for draft models and ngram)",
    )


def speculative_config(arguments, **more):
    """The speculative_config made from the options of add_speculation, None for plain decoding; more: further keys."""
    if not arguments.head and not arguments.method:
        for option, given in (
            ("--tree", arguments.tree),
            ("--num-speculative-tokens", arguments.num_speculative_tokens),
        ):
            if given is not None:
                raise ValueError(
                    f"{option} {given} says how a head drafts: name a head with --head, or leave {option} out"
                )
        return None
    return {
        "model": arguments.head,
        "method": arguments.method,
        "tree": arguments.tree or "chain",
        "num_speculative_tokens": arguments.num_speculative_tokens,
        **more,
    }


def choose_threads_for(model, device, trust_remote_code=False):
    """Use as many CPU threads as decode the target fastest, unless OMP_NUM_THREADS is set. ValueError for an unsupported target."""
    from .models.support import check_supported
    from .models.target_source import choose_device, target_config
    from .threads import choose_threads

    config, _ = target_config(model, "auto", trust_remote_code)
    check_supported(config)
    choose_threads(config, choose_device(device))


def check_count(number):
    """ValueError unless --num-prompts is at least 1."""
    if number < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {number}")


def prompt_file(given, model):
    """The file of prompts that --prompts names, or the one in the target's folder."""
    path = Path(given) if given else Path(model) / "heldout.jsonl"
    if not given and not path.is_file():
        raise ValueError(f"{model} ships no held-out prompts (heldout.jsonl): name a JSONL file with --prompts")
    return path


def target_of(source, head):
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
