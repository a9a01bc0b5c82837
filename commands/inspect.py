"""`headstart inspect`: describe a head, check that it fits its target, and list the engines that take its files."""

EXAMPLE = "headstart inspect runs/quickstart\n  headstart inspect OWNER/HEAD --model OWNER/TARGET --json"
DETAILS = (
    "Of the target config.json is read and, for the stop tokens, generation_config.json. Exit status: 0 where the head could\n"
    "be described, whatever is said of its config, its target and the engines; 1 where it is damaged; 2 where there is none.\n"
    "A script that needs more asks --json: problems, target.fits, and of each of engines loads, problems, and silent (what it\n"
    "computes wrong without a word)."
)


def add_options(parser):
    parser.add_argument("source", metavar="HEAD", help="a head folder, a run, a checkpoint or a Hub id, in any layout")
    parser.add_argument("--model", help="the target to check it against (default: the one that the head names)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments):
    from ..hub_export.inspect_head import inspect

    return inspect(arguments.source, arguments.model, arguments.json)
