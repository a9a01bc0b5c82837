"""heads.export push: send a folder written by heads.export to the Hub, or the rest of it after an earlier push broke off."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from ..heads.checkpoint import find_head, read_config
from ..heads.storage.user_errors import CommandParser, exit_status
from ..inference.models.adapter import MERGED_KEY
from .provenance import read_front_matter
from .push import WEIGHTS, PushOptions, check_can_push, push_folder

EXAMPLES = """\
examples
  heads.export push exports/first you/first --private
      run the same command again to go on after a failure: only missing files are sent
  heads.export push exports/first you/first --dry-run
      show what would be sent and what is there already; nothing is changed
  heads.export push exports/first you/first --revision bf16 --collection "Heads for my target"

Log in first (`hf auth login`) or set HF_TOKEN. Exit status: 0 done, 2 failed.
"""


def main(argv):
    """The command line behind `heads.export push`.  argv: list of str.  Returns the exit status."""
    parser = CommandParser(
        prog="heads.export push",
        description="Send an exported folder to the Hugging Face Hub. Only files that the Hub lacks are sent.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that heads.export wrote")
    parser.add_argument(
        "repo", metavar="REPO", nargs="?", help="USER/NAME (default: your account and the folder's name)"
    )
    add_push_options(parser)
    args = parser.parse_args(argv)
    return exit_status("heads.export push", lambda: _push(args))


def _push(args):
    folder, options = Path(args.folder).resolve(), push_options(args)
    check_is_export(folder)
    push(folder, check_can_push(args.repo, folder.name, options), options)


def add_push_options(parser):
    """Add the options of a push, also for an export with --push-to-hub."""
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--revision", metavar="BRANCH", help="push to this branch, made from main if it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="show what would be sent; change nothing on the Hub")
    parser.add_argument(
        "--collection",
        metavar="SLUG_OR_TITLE",
        help="add the repository to this collection; a new title makes a new collection",
    )


def push_options(args):
    """PushOptions of a command line."""
    return PushOptions(args.private, args.revision, args.dry_run, args.collection)


def check_is_export(folder):
    """ValueError unless heads.export wrote `folder`: heads, or a target with a merged adapter."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: name one that heads.export wrote")
    lacking = [name for name in ("config.json", "README.md") if not (folder / name).is_file()]
    lacking += [] if any(path.suffix in WEIGHTS for path in folder.iterdir()) else ["weights"]
    if lacking:
        is_head = find_head(folder) is not None
        advice = f": export it first (`heads.export {shlex.quote(str(folder))} --format ... --output DIR`)"
        raise ValueError(f"{folder} holds no {lacking[0]}, so heads.export did not write it{advice if is_head else ''}")
    if find_head(folder) is None and MERGED_KEY not in read_config(folder):
        raise ValueError(
            f"{folder} holds neither a head that can be read nor a target with an adapter merged by heads.export, and only these "
            "are pushed here: name the folder that heads.export wrote (another model goes with `hf upload`)"
        )


def check_is_not_there(output, repo_id, options):
    """ValueError, with the command that pushes `output`, if the export to push exists already."""
    try:
        check_is_export(output)
    except ValueError:
        return
    raise ValueError(
        f"{output} holds an export already: `{push_again(output, repo_id, options)}` pushes it as it is, or name a new folder"
    )


def push(folder, repo_id, options):
    """Push a complete export and print the address, which is also written to the W&B run of the head."""
    command = push_again(folder, repo_id, options)
    try:
        address = push_folder(folder, repo_id, options, command)
    except KeyboardInterrupt:
        print(f"\ninterrupted; `{command}` sends what is missing", file=sys.stderr)
        raise SystemExit(130) from None
    if options.dry_run:
        print(f"`{command}` pushes it")
        return
    print(f"pushed to {address}")
    name = name_on_hub(repo_id, options)
    if name not in (folder / "README.md").read_text(encoding="utf-8"):
        print(f"note: the commands in its README.md do not name {name}: others have to put that in")
    tell_tracked_run(folder, address)


def name_on_hub(repo_id, options):
    """The name that loads a pushed head: OWNER/NAME, or OWNER/NAME@BRANCH."""
    return repo_id + (f"@{options.revision}" if options.revision else "")


def push_again(folder, repo_id, options):
    """The command that pushes a complete export with these options."""
    words = [word for word in given_options(options) if word != "--dry-run"]
    return shlex.join(["heads.export", "push", str(folder), repo_id, *words])


def given_options(options):
    """These PushOptions as words of a command line."""
    words = []
    for option, value in (
        ("--private", options.private),
        ("--revision", options.revision),
        ("--dry-run", options.dry_run),
        ("--collection", options.collection),
    ):
        words += [option] if value is True else [option, value] if value else []
    return words


def tell_tracked_run(folder, address):
    """Write the Hub's address into the metadata and the description of the W&B artifact that an export's card names.

    A refusal by W&B becomes a note and does not end the push.
    """
    tracked = read_front_matter(folder).get("wandb")
    tracked = tracked if isinstance(tracked, dict) else {}
    if tracked.get("offline"):
        print(f"note: the run {tracked['run']} was logged to W&B offline, so its artifact does not know the address")
    elif artifact := tracked.get("artifact"):
        try:
            _tell(artifact, address)
            print(f"the W&B artifact {artifact} names the address")
        except Exception as error:  # W&B raises many types, and the push is already done
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"note: the W&B artifact {artifact} does not know the address ({said})")


def _tell(name, address):
    """Write the address into an artifact's metadata and description.  name: "entity/project/name:alias"."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    # The key is verified with the first request; without a prompt, which would wait for input.
    if not wandb.login(prompt=False, verify=False):
        raise ValueError("W&B is not logged in here, or WANDB_MODE is offline")
    artifact = wandb.Api().artifact(name)
    artifact.metadata = artifact.metadata | {"hub": address}
    line = f"On the Hugging Face Hub: {address}"
    if line not in (artifact.description or ""):
        artifact.description = "\n".join(filter(None, (artifact.description, line)))
    artifact.save()
