"""`headstart report`: one self-contained HTML page about a run, or comparing several."""

from pathlib import Path

EXAMPLE = "headstart report runs/quickstart\n  headstart report runs/medusa runs/eagle3 --output comparison.html"


def add_options(parser):
    parser.add_argument("source", metavar="RUN", nargs="+", help="the run folder; several are compared on one page")
    parser.add_argument("--output", help="the file to write (default: report.html in RUN; required for several runs)")


def run(arguments):
    from ..train.report.report import write_comparison, write_report

    if len(arguments.source) == 1:
        print(write_report(Path(arguments.source[0]), Path(arguments.output) if arguments.output else None))
    elif not arguments.output:
        raise ValueError("several runs belong to no folder of their own: name the page with --output")
    else:
        print(write_comparison(arguments.source, arguments.output))
    return 0
