"""heads.export verify: check that an export has the files that were written, the outputs of its source, and its card's figures.

    heads.export verify exports/first --model assets/stdlib-coder

Compared exactly: checksums of files and tensors, config.json key by key, the card's figures with those in replay.json. Compared
within a tolerance (replay.py), as machines add in different orders: the head's outputs for drawn inputs, and on the target's
features of the stored prompts. Compared within a confidence interval (acceptance.py): acceptance, measured again by the engine on
the same prompts with the same settings. Loading and computing happen in a separate process (replay_file.py).
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError

from ..evaluation.acceptance import pool
from ..heads.checkpoint import TREE_FILE, read_config
from ..heads.families import WEIGHT_FILES
from ..heads.storage.hub_answer import ask_hub
from ..heads.storage.hub_id import check_may_be_id, split_revision
from ..heads.storage.user_errors import CommandParser, ending_cleanly, exit_status, say
from ..inference.models import adapter
from ..inference.models.support import check_supported
from ..inference.models.target_source import target_config
from .acceptance import LENGTH, MAX_TOKENS, NUM_PROMPTS, POSITION, disagreements, intervals, read_card, short
from .replay import FEATURE_TOLERANCES, TOLERANCES
from .replay_file import file_checksums, in_clean_process, read_replay, tolerance

DESCRIPTION = """\
Check an export: its files and tensors against the checksums that were written, what its head computes against what the source's
computed, and with --model its acceptance, measured again, against the figures in its card.
"""
EXAMPLES = """\
examples
  heads.export verify exports/first --model assets/stdlib-coder
  heads.export verify you/first --model you/target --device cuda
  heads.export verify exports/first --model you/target --prompts runs/first/heldout.jsonl
      figures of a training run need its prompts, which are not in the export: heldout.jsonl of the run, else of its target

Exit status: 0 all checks passed, 1 a check failed, 2 the export could not be checked.
"""
OK, FAILED, SKIPPED = "ok", "FAILED", "not checked"


@dataclass(frozen=True)
class Check:
    """The result of one check.  state: OK, FAILED or SKIPPED; evidence: a sentence"""

    name: str
    state: str
    evidence: str


def main(argv):
    """The command line behind `heads.export verify`.  Returns the exit status."""
    parser = CommandParser(
        prog="heads.export verify",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("export", metavar="DIR", help="the exported folder, or a Hub id (also ID@REVISION)")
    parser.add_argument(
        "--model", metavar="TARGET", help="its target; without it only checks that need no target are made"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSONL that figures of a training run were measured on")
    parser.add_argument("--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda ...")
    parser.add_argument("--dtype", help="dtype of the target (default: that of the figures)")
    args = parser.parse_args(argv)
    if args.prompts and not args.model:
        parser.error("--prompts belongs to --model")
    return exit_status("heads.export verify", lambda: _verify(args))


def _verify(args):
    """Check, and print each check and the verdict.  Returns 1 if a check failed."""
    with ending_cleanly("heads.export verify"):
        checks = verify(args.export, args.model, prompts=args.prompts, device=args.device, dtype=args.dtype)
    for check in checks:
        say(f"{check.state:11}  {check.name}: {check.evidence}")
    failed = [check.name for check in checks if check.state == FAILED]
    skipped = [check.name for check in checks if check.state == SKIPPED]
    verdict = f"it is NOT what it says: {'; '.join(failed)}" if failed else "what was checked is what was written"
    say(f"verdict: {args.export}: {verdict}{f' (not checked: {len(skipped)})' if skipped else ''}")
    return 1 if failed else 0


def verify(export, target=None, *, prompts=None, device="auto", dtype=None):
    """Check an export.  -> list of Check

    export: folder or Hub id; target: folder or Hub id, or None; prompts: JSONL for figures whose prompts are not in the export.
    Raises ValueError if there is nothing to compare with, or a named file does not exist.
    """
    folder = _folder_of(export)
    stored = read_replay(folder)
    if prompts and not Path(prompts).is_file():
        raise ValueError(f"no prompt file {prompts}")
    if target:
        check_supported(target_config(str(target), "auto")[0])
    figures = [_request(figure, stored["prompts"], prompts) for figure in stored["acceptance"]]
    request = {
        "folder": str(folder),
        "target": str(Path(target).resolve()) if target and Path(target).is_dir() else target,
        "prompts": str(Path(prompts).resolve()) if prompts else None,
        "device": device,
        "dtype": dtype,
        "figures": [figure for figure in figures if figure],
    }
    checks = [_files(folder, stored), _config(folder, stored), *_card(folder, stored)]
    measured = f", and acceptance with {target}" if target and request["figures"] else ""
    print(f"loading {export} and computing its outputs{measured} anew ...", file=sys.stderr, flush=True)
    reply = in_clean_process(request)
    if "error" in reply:
        return [*checks, Check("loading", FAILED, reply["error"])]
    checks += [_tensors(reply["tensors"], stored), _drawn(reply["drawn"])]
    checks.append(_on_target(reply.get("target"), stored, target))
    measured = iter(reply.get("acceptance", ()))
    for figure, asked in zip(stored["acceptance"], figures):
        checks.append(_acceptance(figure, next(measured, None) if asked else None, target))
    return _each_reason_once(checks)


def _each_reason_once(checks):
    """Shorten repeated reasons: if a file does not load, all checks on it fail alike, and later ones just name the first."""
    first, told = {}, []
    for check in checks:
        earlier = first.setdefault((check.state, check.evidence), check.name)
        repeats = check.state == FAILED and earlier != check.name
        told.append(replace(check, evidence=f"as {earlier}") if repeats else check)
    return told


def _folder_of(export):
    if Path(export).is_dir():
        return Path(export).resolve()
    check_may_be_id(export)
    repo_id, revision = split_revision(export)
    hub = ask_hub()
    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=hub.local_files_only))
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        told = "" if hub.local_files_only else f": {reason}"
        raise ValueError(f"there is no folder {export}, and {hub.words} gave no such repository{told}") from error


def _request(figure, stored_prompts, prompts_file):
    """The settings to measure a figure again; None if that is impossible."""
    if figure.get("source", "engine") != "engine" or (not figure.get("by_request") and prompts_file is None):
        return None
    return {
        "temperature": figure["temperature"],
        "max_tokens": figure.get("max_tokens", MAX_TOKENS),
        "num_prompts": figure.get("num_prompts", NUM_PROMPTS),
        "dtype": figure.get("dtype", "auto"),
        "prompts": stored_prompts if figure.get("by_request") else None,
    }


def _files(folder, stored):
    found, wanted = file_checksums(folder), stored["files"]
    missing = [name for name in wanted if name not in found]
    changed = [name for name in wanted if name in found and found[name] != wanted[name]]
    added = [name for name in found if name not in wanted and _would_be_read(name)]
    if missing or changed or added:
        pairs = (missing, "missing"), (changed, "changed"), (added, "was not exported and would be read: move it away")
        said = [f"{', '.join(names)} {what}" for names, what in pairs if names]
        return Check("files", FAILED, "; ".join(said))
    return Check("files", OK, f"{len(wanted)} have the SHA-256 that was written")


def _would_be_read(name):
    """Whether loading an export would read an additional file of this name: other weights, a tree, an adapter."""
    *parents, name = name.split("/")
    folder = "/".join(parents).removeprefix("head/")  # a head/ inside is read before the files beside it
    if folder == adapter.FOLDER:
        return name in (adapter.CONFIG_FILE, adapter.WEIGHTS_FILE)
    # Engines read every .safetensors of a folder.
    names = (*WEIGHT_FILES, TREE_FILE, adapter.CONFIG_FILE)
    return folder in ("", "head") and (name in names or name.endswith(".safetensors"))


def _config(folder, stored):
    found, wanted = read_config(folder), stored["config"]
    wrong = [key for key in {**wanted, **found} if found.get(key, _absent) != wanted.get(key, _absent)]
    if not wrong:
        return Check("config.json", OK, f"{len(wanted)} keys say what was written")
    key = wrong[0]
    told = [repr(one[key]) if key in one else "nothing" for one in (found, wanted)]
    return Check("config.json", FAILED, f"{key} is {told[0]}, {told[1]} was written ({len(wrong)} key(s) differ)")


_absent = object()


def _card(folder, stored):
    """Compare the card's figures with those of replay.json, and those with the counts behind them."""
    figures, wanted = stored["acceptance"], {}
    for figure in figures:
        named = [(LENGTH, figure.get("acceptance_length"))]
        named += [(f"{POSITION} {i}", rate) for i, rate in enumerate(figure["per_position"], start=1)]
        wanted |= {(f"{figure['temperature']:g}", name): short(value) for name, value in named if value is not None}
    for figure in figures:
        if figure.get("by_request"):
            own = pool(figure["by_request"])
            if any(figure[name] != own[name] for name in own):
                yield Check(
                    "figures",
                    FAILED,
                    f"those at temperature {figure['temperature']:g} are not those of their own counts",
                )
    path = folder / "README.md"
    if not path.is_file():
        yield Check("card", FAILED, "README.md is missing")
        return
    try:
        told = read_card(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Check("card", FAILED, str(error))
        return
    for where, found in zip(("its table", "its model-index"), told):
        wrong = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
        if wrong:
            (temperature, name), number = wrong[0], len(wrong)
            told = [one.get(wrong[0], "nothing") for one in (found, wanted)]
            text = f"{where} says {told[0]} for {name} at temperature {temperature}, measured was {told[1]} ({number} differ)"
            yield Check("card", FAILED, text)
            return
    yield Check(
        "card", OK, f"{len(wanted)} acceptance figures, as they were measured" if wanted else "it tells no acceptance"
    )


def _tensors(found, stored):
    if "error" in found:
        return Check("tensors", FAILED, found["error"])
    found, wanted = found["checksums"], stored["tensors"]
    wrong = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if wrong:
        return Check("tensors", FAILED, f"{wrong[0]} is not what was written ({len(wrong)} of {len(wanted)} differ)")
    return Check("tensors", OK, f"{len(wanted)}, as loaded, have the bits that were written")


def _drawn(found):
    name, most = "outputs, drawn inputs", TOLERANCES["drawn"]
    if "error" in found:
        return Check(name, FAILED, found["error"])
    worst = max(found["errors"])
    text = f"largest error {worst:.1e} of an output's spread over {len(found['errors'])} depths, allowed {most:g}"
    return Check(name, OK if worst <= most else FAILED, text)


def _on_target(found, stored, target):
    name, wanted = "outputs, target's features", stored["target"]
    if wanted is None or target is None:
        why = "no --model was given" if target is None else "it was exported without --measure, so none were kept"
        return Check(name, SKIPPED, why)
    if "error" in found:
        return Check(name, FAILED, found["error"])
    key = tolerance(min(found["bits"], wanted["bits"]))
    if not found["distance"] <= FEATURE_TOLERANCES[key]:
        text = f"{target} gives features {found['distance']:.2g} of their length away from those of {wanted['name']}, allowed "
        return Check(
            name, FAILED, f"{text}{FEATURE_TOLERANCES[key]:g}: it is another target, or another revision of it"
        )
    worst = max(found["errors"])
    text = (
        f"features {found['distance']:.1e} of their length away, largest error {worst:.1e} of an output's spread over "
        f"{len(found['errors'])} depths, allowed {FEATURE_TOLERANCES[key]:g} and {TOLERANCES[key]:g}"
    )
    return Check(name, OK if worst <= TOLERANCES[key] else FAILED, text)


def _acceptance(figure, found, target):
    name = f"acceptance at temperature {figure['temperature']:g}"
    if found is None:
        if target is None:
            why = "no --model was given"
        elif figure.get("source", "engine") != "engine":
            why = "the figure is teacher-forced, not the engine's"
        else:
            why = f"it was measured on {figure.get('prompts')}, which did not come along: name them with --prompts"
        return Check(name, SKIPPED, why)
    if "error" in found:
        return Check(name, FAILED, found["error"])
    counts = found["by_request"]
    now, (low, high) = pool(counts), intervals(counts)[0]
    wrong = disagreements(figure, counts)
    if wrong:
        return Check(name, FAILED, "; ".join(wrong[:2]))
    same = " (the same steps)" if counts == figure.get("by_request") else ""
    text = (
        f"{now['acceptance_length']:.3f} tokens per step{same}, 99 % {low:.3f} to {high:.3f} over {len(counts)} prompts"
    )
    return Check(name, OK, f"{text}; {figure['acceptance_length']:.3f} is claimed")
