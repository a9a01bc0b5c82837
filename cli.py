"""The `headstart` command: the table of its commands. Each command is a file of commands/, loaded when it is called.

A file of commands/, for benchmarks of commands/bench/, holds EXAMPLE, optionally DETAILS, `add_options(parser)`, and
`run(arguments)`, which returns the exit status (None: 0). `headstart COMMAND --help` explains each command.
"""

import argparse
import sys
from importlib import import_module

from headstart.heads.storage.keywords import meant
from headstart.heads.storage.user_errors import CommandParser, exit_status, tell_error
from headstart.inference.arguments import add_command, plain_warnings
from headstart.train.data import regenerate_options

COMMANDS = {
    "generate": "Answer a prompt, streamed; with --compare, also show plain decoding beside it.",
    "serve": "Serve a model over HTTP, for clients of OpenAI's API; an answer with a seed does not depend on load or speculation.",
    "tree": "Choose the draft tree that decodes fastest: from acceptance and step times, both measured by the engine.",
    "bench": "Measure: speculation against plain decoding; one step, one kernel, the whole engine; another library beside it.",
    "verify-lossless": "Check on your own model that speculation leaves the output as it was: bit by bit, and in distribution.",
    "inspect": "Tell what a head is: sizes, target, what it reads, what drafting costs, and which engines take its files as they "
    "lie.",
    "data": "Tell what a data set holds: shapes, lengths, the supervised share, what would be left out and why.",
    "regenerate": regenerate_options.SUMMARY,
    "report": "Write one self-contained HTML page about a run (curves, acceptance, the tree, the speed table) or comparing "
    "several.",
    "dashboard": "Make or update the W&B workspace of the training runs: the panels of the report, live and over all runs.",
}
BENCHMARKS = {
    "speculation": "Speculation against plain decoding on prompts: same tokens, tokens per step, tokens per second.",
    "step": "One step of the engine on random weights of a named shape, against the memory floor and the library.",
    "draft": "Drafting alone with random heads for a named shape: a level, the first one, the pass after a step, the whole "
    "chain.",
    "kernel": "One operation at the sizes of a named shape, against the library and the floor of bytes and operations.",
    "engine": "Tokens per second of the whole engine on random weights, drafts accepted at given rates, beside plain decoding.",
    "traffic": "Requests of mixed lengths on random weights of a named shape: throughput against a floor, stalls by entering "
    "prompts.",
    "serve": "Load on a server of OpenAI's API: requests that arrive at a rate, and the times and tokens per second of their "
    "clients.",
    "ranks": "The same random model on one rank and on several, which divide its weights.",
    "peer": "The same random model by transformers' generate (static cache, compiled) and by this engine, in one run.",
    "train": "Training steps on random weights of a named shape, beside a plain PyTorch loop, against the rate of matrix "
    "products.",
}
BENCH_EXAMPLE = (
    "headstart bench speculation --model assets/stdlib-coder --head assets/stdlib-coder-medusa\n"
    "  headstart bench step --help"
)


@plain_warnings()
def main(argv=None):
    """Entry point. Returns the exit status: 0, or 2 with one line on stderr for bad input."""
    argv = with_dashes(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        from headstart.commands.config_file import with_config

        try:
            argv = with_config(argv)
        except ValueError as error:
            tell_error("headstart serve", error)
            return 2
    parser = build_parser(argv)
    arguments, unknown = parser.parse_known_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    if unknown:
        known_elsewhere = getattr(arguments, "explain_unknown", None)
        told = known_elsewhere and known_elsewhere(unknown)
        tell_error(arguments.parser.prog, told or _of_unknown(unknown, arguments.parser))
        return 2
    return exit_status(arguments.parser.prog, lambda: arguments.run(arguments), reader_may_leave=True)


def with_dashes(argv):
    """The arguments with dashes in the names of options: --max_model_len, as vLLM also spells it, is --max-model-len."""
    options = argv[: argv.index("--")] if "--" in argv else argv

    def spelled(word):
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value if word.startswith("--") else word

    return [spelled(word) for word in options] + argv[len(options) :]


def _of_unknown(words, parser):
    """What to say of words that a command's parser does not know: their first option, without its value, or all of them."""
    option = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    known = [name.removeprefix("--") for name in parser._option_string_actions if name.startswith("--")]
    if option and (name := meant(option.removeprefix("--"), known)):
        return f"unknown option {option}: did you mean --{name}?"
    told = f"option {option}" if option else " ".join(words)
    return f"unknown {told:.200}: {parser.prog} --help lists the options"


def build_parser(argv=None):
    """The parser.  argv: only the command named in it is loaded; None: all commands are loaded."""
    parser = CommandParser(
        prog="headstart",
        description="Speculative decoding that changes no output bit: run heads, measure them, draw what they do.",
        epilog="Training: accelerate launch train/medusa.py --help\nExport: heads.export --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        if name == "bench":
            _add_bench(commands, summary, argv)
        else:
            _add(commands, name, summary, name.replace("-", "_"), argv)
    return parser


def _add_bench(commands, summary, argv):
    """Add `headstart bench`, which has its own commands."""
    bench = add_command(commands, "bench", lambda _: bench.print_help(), summary, BENCH_EXAMPLE)
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="WHAT", dest="what")
    for what, told in BENCHMARKS.items():
        _add(benchmarks, what, told, f"bench.{what}", argv)


def _add(commands, name, summary, module, argv):
    """Add one command, with its options if `argv` may call it."""
    if argv is not None and name not in argv:
        commands.add_parser(name, help=summary)
        return
    command = import_module(f"headstart.commands.{module}")
    details = getattr(command, "DETAILS", "")
    command.add_options(add_command(commands, name, command.run, summary, command.EXAMPLE, details))


if __name__ == "__main__":
    sys.exit(main())
