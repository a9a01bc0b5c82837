"""The `headstart` command: parses, then calls into the folders. `headstart COMMAND --help` teaches each command."""

import argparse
import os
import sys
from pathlib import Path

from headstart.inference.benchmarks.command import add_benchmarks, add_measurement
from headstart.inference.benchmarks.speculation_command import add_bench_speculation
from headstart.inference.command_arguments import add_command, add_device, plain_warnings
from headstart.inference.generate_command import add_generate
from headstart.inference.lossless_command import add_verify_lossless
from headstart.inference.tree_command import add_tree
from headstart.train import regenerate_options


@plain_warnings()
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
        epilog="Training: accelerate launch train/medusa.py --help\nExport: heads.export --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def command(*arguments):
        return add_command(commands, *arguments)

    add_generate(commands)
    add_tree(commands)

    bench = command(
        "bench",
        lambda _: bench.print_help(),
        "Measure: speculation against plain decoding; one step, one kernel, the whole engine; another library beside it.",
        "headstart bench speculation --model assets/stdlib-coder --head assets/stdlib-coder-medusa\n"
        "  headstart bench step --help",
    )
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="WHAT", dest="what")
    add_bench_speculation(benchmarks)
    add_benchmarks(benchmarks, add_command, add_device)
    _add_bench_train(benchmarks)

    add_verify_lossless(commands)

    inspect = command(
        "inspect",
        _inspect,
        "Tell what a head is: sizes, target, what it reads, what drafting costs, and which engines take its files as they lie.",
        "headstart inspect runs/quickstart\n  headstart inspect OWNER/HEAD --model OWNER/TARGET --json",
        "Of the target config.json is read and, for the stop tokens, generation_config.json. Exit status: 0 where the head could\n"
        "be described, whatever is said of its config, its target and the engines; 1 where it is damaged; 2 where there is none.\n"
        "A script that needs more asks --json: problems, target.fits, and of each of engines loads, problems, and silent (what it\n"
        "computes wrong without a word).",
    )
    inspect.add_argument("source", metavar="HEAD", help="a head folder, a run, a checkpoint or a Hub id, in any layout")
    inspect.add_argument("--model", help="the target to check it against (default: the one that the head names)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")

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


def _add_bench_train(benchmarks):
    bench = add_command(
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
        "--head",
        type=lambda name: {"mlp": "mlp_speculator"}.get(name, name),
        default="medusa",
        choices=["medusa", "eagle3", "mlp_speculator"],
        help="default medusa; mlp is short for mlp_speculator",
    )
    bench.add_argument("--loss", default="kl", choices=["hard", "kl", "lk", "lk-log"], help="default kl")
    bench.add_argument("--sequence", type=int, default=4096, help="tokens of a row (default 4096)")
    bench.add_argument("--rows", type=int, default=1, help="rows of a step (default 1)")
    bench.add_argument("--lm-head", choices=["own", "shared"], help="the Medusa heads' lm_heads (default shared)")
    bench.add_argument("--chunk-tokens", type=int, default=1024, help="labels projected at once (default 1024)")
    bench.add_argument("--repeats", type=int, default=5, help="steps that are timed (default 5)")
    add_measurement(bench, add_device)


def _bench_train(arguments):
    from headstart.inference.benchmarks.command import measurement
    from headstart.train.benchmark import bench_train, check_settings

    bench_train(check_settings(arguments), **measurement(arguments))


def _inspect(arguments):
    from headstart.hub_export.inspect_head import inspect

    return inspect(arguments.source, arguments.model, arguments.json)


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


if __name__ == "__main__":
    sys.exit(main())
