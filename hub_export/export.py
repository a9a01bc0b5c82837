"""heads.export: write trained heads in a format that others read, with a model card, and push them to the Hub.

    heads.export runs/first --format medusa --output exports/first-medusa
    heads.export runs/first --format vllm --output exports/first-vllm --dtype bfloat16
    heads.export runs/first --format medusa --output exports/first --push-to-hub you/first --private
    heads.export runs/medusa2 --format medusa --output exports/medusa2 --merge-adapter exports/medusa2-target
    heads.export push exports/first you/first                                (hub_export/push_command.py)
    heads.export verify exports/first-medusa --model assets/stdlib-coder     (hub_export/verify.py)

(from the checkout also `python -m heads.export ...`). The folder appears only when it is complete: it is written aside, read back,
compared with the source bit by bit, then renamed. Heads trained together with an adapter of their target (Medusa-2) are exported
with the adapter. Not done here: converting between own and shared lm_heads.
"""

import argparse
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id
from torch import nn

from ..heads.checkpoint import check_head_fits, describe_choice, read_head, resolve_head, write_head
from ..heads.families import FORMATS, check_format, family_of
from ..heads.storage.atomic_write import check_is_free, staged_folder
from ..heads.storage.hub_answer import hub_options
from ..heads.storage.user_errors import CommandParser, ending_cleanly, exit_status, say
from ..inference.arguments import choose_threads_for, plain_warnings
from ..inference.models.adapter import find_adapter_of, has_adapter, read_adapter
from ..inference.models.support import check_supported
from ..inference.models.target_source import target_config
from . import provenance, push_command, verify
from .acceptance import choose_prompts, measure as measure_acceptance
from .measurements import find_measurements
from .model_card import Extras, is_hub_id, model_card, target_name, with_tracked_run, write_plots
from .push import check_can_push
from .replay import check_finite, compare_with_source
from .replay_file import replay_on_target, write_replay

DESCRIPTION = """\
Write a trained head in a format that others read, with a model card, and optionally push it to the Hub. `heads.export verify DIR`
checks what was written, `heads.export push DIR` pushes it (write a SOURCE of this name as ./verify or ./push).

formats
  medusa          heads with their own lm_heads ("V1"): Headstart, the original Medusa code, text-generation-inference
  medusa-shared   heads that use the target's lm_head ("V2"): Headstart, the original's legacy class, TGI
  vllm            Medusa in vLLM 0.20 to 0.32, and Headstart; heads that share the target's lm_head carry a copy of it
  mlp-speculator  IBM's: Headstart, text-generation-inference, fms-extras, vLLM to 0.9
  eagle-vllm      EAGLE-1 and 2: Headstart, vLLM, the original EAGLE code
  eagle-sglang    the same weights for SGLang, and Headstart
  eagle3          EAGLE-3, the plain layout: Headstart, vLLM, SGLang, the original EAGLE code
  speculators     EAGLE-3 and block drafters as Red Hat's library and vLLM read them, and Headstart
  dflash          block drafters: Headstart, vLLM, SGLang; z-lab's code, if they are DFlash's or DFlash2's
"""

EXAMPLES = """\
examples
  heads.export runs/first --format medusa --output exports/first-medusa
      the best heads of a run that was measured, else its final ones (of an unfinished run: those of its newest checkpoint)
  heads.export runs/first/checkpoints/step-000200 --format medusa --output exports/step-200
  heads.export assets/stdlib-coder-medusa --format vllm --output exports/for-vllm --dtype bfloat16
  heads.export runs/first --format medusa --output exports/first --base-model you/target --license apache-2.0 \\
      --push-to-hub you/first --private
      log in first (`hf auth login`) or set HF_TOKEN; the default REPO is your account and the name of the output folder

  heads.export push exports/first you/first
      push an existing export, or the rest of a push that broke off (see `heads.export push --help`)

  heads.export runs/first --format medusa --output exports/first --measure assets/stdlib-coder
      the card gets the acceptance per depth and temperature, for verify to compare: `heads.export verify --help`
  heads.export runs/medusa2 --format medusa --output exports/medusa2 --merge-adapter exports/medusa2-target
      heads trained together with an adapter of their target: the export holds adapter/, and the merged target is written too

Nothing is overwritten: --output must be a new or an empty folder. Exit status: 0 done, 2 failed.
"""


@plain_warnings()
def main(argv=None):
    """The command line.  argv: list of str, None for the process's own.  Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["verify"]:
        return verify.main(argv[1:])
    if argv[:1] == ["push"]:
        return push_command.main(argv[1:])
    parser = CommandParser(
        prog="heads.export",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a run, a checkpoint, a folder of heads or a Hub id")
    parser.add_argument("--format", required=True, choices=FORMATS, help="the format to write, see above")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write; it must be new or empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype to cast to (default: keep)")
    parser.add_argument("--base-model", metavar="ID", help="the target that the export names (default: SOURCE's)")
    parser.add_argument(
        "--license",
        metavar="ID",
        help='licence in the model card, like apache-2.0 (default: what SOURCE\'s own card says, where it has one, else "other")',
    )
    parser.add_argument(
        "--push-to-hub",
        nargs="?",
        const="",
        metavar="REPO",
        help="push the export; REPO defaults to the name of the output folder",
    )
    parser.add_argument(
        "--merge-adapter",
        metavar="DIR",
        help="also write the target, the adapter that the heads were trained with merged into its weights, to this new folder",
    )
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="TARGET",
        help="measure acceptance with the engine, at temperatures 0 and 0.8, and keep what the head computes on the target's "
        "features, for the card and for verify; TARGET defaults to the named target",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSONL to measure on; their token ids go into the export (default: the target's heldout.jsonl, else ones of our own)",
    )
    push_command.add_push_options(parser)
    args = parser.parse_args(argv)
    options = push_command.push_options(args)
    if args.push_to_hub is None and (given := push_command.given_options(options)):
        parser.error(f"{given[0]} belongs to --push-to-hub")
    if args.prompts and args.measure is None:
        parser.error("--prompts belongs to --measure")
    return exit_status("heads.export", lambda: _export(args, options))


@ending_cleanly("heads.export")
def _export(args, options):
    provenance.check_license(args.license)
    output = Path(args.output).resolve()
    repo_id = None if args.push_to_hub is None else check_can_push(args.push_to_hub, output.name, options)
    if repo_id is not None:
        push_command.check_is_not_there(output, repo_id, options)
    export_head(
        args.source,
        output,
        args.format,
        dtype=args.dtype,
        base_model=args.base_model,
        license=args.license,
        name=None if repo_id is None else push_command.name_on_hub(repo_id, options),
        merged=args.merge_adapter,
        measure=args.measure,
        prompts=args.prompts,
    )
    if repo_id is not None:
        push_command.push(output, repo_id, options)


def export_head(
    source,
    output,
    format,
    *,
    dtype=None,
    base_model=None,
    license=None,
    name=None,
    merged=None,
    measure=None,
    prompts=None,
):
    """Write the head of `source` to the new folder `output` and check it by reading it back.

    source: as resolve_head takes it; format: one of FORMATS; dtype: None keeps the source's; base_model: the target to name
    instead of the source's; name: the name in the card's commands (default: the folder's); merged: a new folder for the target
    with the head's adapter in its weights, or None; measure: the target to measure acceptance with, "" for the named target, None
    for no measurement; prompts: a JSONL file to measure on.
    Raises ValueError (source, format, output) or OSError (cannot write), and leaves `output` unchanged. The merged target is
    written first.
    """
    output = Path(output).resolve()
    check_is_free(output)
    if merged is not None:
        check_apart(output, Path(merged).resolve())
    folder = resolve_head(source)
    file = read_head(folder, dtype)
    for text in file.notes:
        warnings.warn(f"{folder}: {text}", stacklevel=2)
    head = file.head
    if format == "speculators" and head.needs_embedding:
        weight = read_target(base_model or head.config.base_model_name_or_path, format).get_input_embeddings().weight
        head.take_embedding(weight.to(next(head.parameters()).dtype))
    table = check_format(head, format)
    adapter_folder, merged_from = find_adapter_of(head, source, folder), None
    if merged is not None:
        if adapter_folder is None:
            raise ValueError(f"--merge-adapter: the heads in {folder} were trained without an adapter")
        adapter = read_adapter(adapter_folder)
        merged_from = provenance.check_can_merge(adapter, base_model or head.config.base_model_name_or_path, merged)
    measured = find_measurements(folder, source)
    origin = provenance.find_origin(source, folder, measured.origin)
    measured = replace(measured, origin=origin and origin.record)
    if measure is not None:
        measure = measure or base_model or head.config.base_model_name_or_path
        if not measure:
            raise ValueError("--measure needs a target, and the head names no target: give --measure TARGET")
        target = target_config(str(measure), "auto")[0]
        check_supported(target)
        check_head_fits(head, target)
        chosen = choose_prompts(prompts, measure)
        choose_threads_for(measure, "auto")
    if base_model:
        check_is_target(base_model)
        head.config = replace(head.config, base_model_name_or_path=base_model)
    check_finite(head)
    lm_head_weight, with_lm_head = (
        None,
        table == "vllm-shared" or (format == "speculators" and head.uses_target_lm_head),
    )
    if with_lm_head:
        lm_head_weight = read_target_lm_head(head.config.base_model_name_or_path, format)
        lm_head_weight = lm_head_weight.to(next(head.parameters()).dtype)

    if choice := describe_choice(source, folder):
        say(choice)
    if measured.left_out:
        say(
            f"note: left out {' and '.join(map(str, measured.left_out))}: measured on other weights of that run; measure them with "
            f"{folder}, and keep the files in it"
        )
    say(f"exporting a head of the family {family_of(head).name} from {folder}")
    if merged_from is not None:
        text = provenance.merged_card(target_name(head.config.base_model_name_or_path), adapter, name or output.name)
        changed = provenance.write_merged_target(adapter, merged_from, merged, text)
        where = Path(merged).resolve()
        say(f"wrote {where}: the target with the adapter in {changed} of its tensors, read back and compared")
    with staged_folder(output) as staging:
        write_head(head, staging, format, torch_file=True, lm_head_weight=lm_head_weight)
        if adapter_folder is not None:
            provenance.copy_adapter(adapter_folder, staging, head.config.base_model_name_or_path)
        if measured.tree is not None:
            shutil.copyfile(measured.tree, staging / measured.tree.name)
        num_compared = compare_with_source(staging, head, format, lm_head_weight)
        tokenizer = write_beside(
            staging,
            head,
            format,
            name=name or output.name,
            measured=measured,
            license=license,
            dtype_changed=file.stored_dtypes != {file.dtype},
            holds=copied_parts(head, format, with_lm_head),
            source=folder,
            origin=origin,
            target=measure,
            chosen=chosen if measure else None,
        )
    say(f"read back: {num_compared} tensors and what the head computes are equal bit by bit")
    say(f"wrote {output} ({', '.join(sorted(path.name for path in output.iterdir()))})")
    target = head.config.base_model_name_or_path
    if not tokenizer:
        say(
            f"note: no tokenizer files: there are none of the target {target!r} here (neither its folder nor the Hub's cache)"
        )
    if not is_hub_id(target):
        named = f"the target it names ({target!r}) is not a Hub id" if target else "it names no target"
        say(f"note: {named}; for others to use it, export with --base-model OWNER/NAME")


def write_beside(
    output, head, format, *, name, measured, license, dtype_changed, holds, source, origin, target=None, chosen=None
):
    """Write the files beside the weights in `output`: tokenizer, licence, drawings, replay.json, card.

    source: the head's own folder; origin: of find_origin, whose licence counts if `license` is None; target: the target to measure
    with, or None; chosen: of choose_prompts.  Returns the names of the tokenizer files.
    """
    theirs = provenance.find_target(target or head.config.base_model_name_or_path)
    tokenizer = provenance.copy_tokenizer(theirs, output)
    has_text = provenance.write_license(license or (origin and origin.license.get("license")), output)
    prompts, record = measured.prompts, None
    if target is not None:
        prompts, words = chosen
        adapter = str(output) if has_adapter(output) else None
        say(f"measuring acceptance on {len(prompts)} prompts with {target} ...")
        figures = measure_acceptance(output, target, prompts, adapter=adapter)
        measured = replace(measured, acceptance=tuple(figure | {"prompts": words} for figure in figures))
        record = replay_on_target(output, target, target_name(target), prompts)
        dtype_changed = False
    plots = write_plots(output, measured, source)
    extras = Extras(
        license=license,
        dtype_changed=dtype_changed,
        plots=tuple(plots),
        tokenizer=tuple(tokenizer),
        target_license=provenance.license_of(theirs),
        license_text=has_text,
        holds=holds,
        origin=origin,
    )
    card = model_card(head, format, name, measured, extras)
    (output / "README.md").write_text(with_tracked_run(card, measured.tracked), encoding="utf-8")
    write_replay(output, measured, prompts, record)
    return tokenizer


def copied_parts(head, format, with_lm_head):
    """The target's weights that the files hold copies of, in words; "" for none.  with_lm_head: whether its lm_head is written"""
    # A frozen table is the target's, or rows of it. The other formats leave out an embedding that is known to be the target's.
    frozen = {name for name, parameter in head.named_parameters() if not parameter.requires_grad}
    parts = ["the lm_head"] if with_lm_head or "lm_head.weight" in frozen else []
    if "embed_tokens.weight" in frozen and (format == "speculators" or not head.embedding_is_targets):
        parts.append("the embedding")
    return f"a copy of {' and of '.join(parts)}" if parts else ""


def check_is_target(name):
    """ValueError for a target's name that is neither a folder here nor OWNER/NAME: no engine can load it."""
    if Path(name).is_dir():
        return
    try:
        validate_repo_id(name)
    except ValueError:
        revision = " (a revision cannot be named: it goes into commands and files that know none)" * ("@" in name)
        raise ValueError(
            f"--base-model {name!r} is neither a folder here nor OWNER/NAME of the Hub{revision}"
        ) from None


def check_apart(output, merged):
    """ValueError if the two folders to write are the same, or one lies inside the other."""
    if output == merged or output in merged.parents or merged in output.parents:
        raise ValueError(f"--output {output} and --merge-adapter {merged} lie in one another: name two folders apart")


def read_target(target, format):
    """The loaded model of a target (folder or Hub id), for formats that store a part of it."""
    if not target:
        raise ValueError(
            f"format {format!r} stores a part of the target, and the head names no target: give --base-model"
        )
    from transformers import AutoModelForCausalLM  # seconds to import, and only these formats need it

    try:
        return AutoModelForCausalLM.from_pretrained(
            target, dtype="auto", trust_remote_code=False, **hub_options(target)
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"format {format!r} stores a part of the target, and the target {target!r} cannot be loaded "
            f"({str(error).splitlines()[0]}): give --base-model with a folder or a Hub id"
        ) from error


def read_target_lm_head(target, format):
    """The lm_head [V, H] of a target (folder or Hub id), of which the formats vllm and speculators hold a copy with some heads."""
    lm_head = read_target(target, format).get_output_embeddings()
    if not isinstance(lm_head, nn.Linear) or lm_head.bias is not None:
        raise ValueError(f"the target {target!r} has no lm_head that is one matrix without bias")
    return lm_head.weight.detach()


if __name__ == "__main__":
    raise SystemExit(main())
