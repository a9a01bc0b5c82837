"""`headstart inspect`: describe a head, check that it fits its target, and list the engines that take its files."""

EXAMPLE = "headstart inspect runs/quickstart\n  headstart inspect OWNER/HEAD --model OWNER/TARGET --json"
DETAILS = (
    "Only config.json of the target is read and, for the stop tokens, generation_config.json. Exit status: 0 if the head could\n"
    "be described, whatever the findings on its config, its target and the engines; 1 if it is damaged; 2 if there is no head.\n"
    "Scripts read more from --json: problems, target.fits, and for each of engines loads, problems, and silent (what the\n"
    "engine computes wrong without an error)."
)


def add_options(parser):
    parser.add_argument("source", metavar="HEAD", help="a head folder, a run, a checkpoint or a Hub id, in any layout")
    parser.add_argument("--model", help="the target to check it against (default: the target that the head names)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments):
    from ..hub_export.inspect_head import inspect

    return inspect(arguments.source, arguments.model, arguments.json)
