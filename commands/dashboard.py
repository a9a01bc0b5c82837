"""`headstart dashboard`: the W&B workspace of the training runs, made or updated."""

EXAMPLE = "headstart dashboard --entity my-team"
DETAILS = (
    'Needs the extra "dashboard" (wandb-workspaces) and `wandb login`. Called again, it updates the view that it made.'
)


def add_options(parser):
    parser.add_argument("--entity", default="", help="user or team (default: W&B's own for this login)")
    parser.add_argument("--project", default="headstart", help="W&B project of the runs (default headstart)")
    parser.add_argument("--name", default="Headstart", help="title of the view (default Headstart)")
    parser.add_argument(
        "--print", dest="show", action="store_true", help="write the workspace's JSON to stdout, and send nothing"
    )


def run(arguments):
    from ..train.report.workspace import build_view, save_dashboard, view_json

    where = (arguments.entity, arguments.project, arguments.name)
    print(view_json(build_view(*where)) if arguments.show else save_dashboard(*where))
    return 0
