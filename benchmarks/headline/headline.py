"""The headline: what each family of heads is worth on a chat target that is trained here, from one command per seed.

    python benchmarks/headline/headline.py --math gsm8k_train.jsonl --seed 0 --work runs/headline-0 --output headline-seed-0
    python benchmarks/headline/headline.py --math gsm8k_train.jsonl --scale tiny --work runs/tiny    # a CPU, two minutes
    python benchmarks/headline/page.py benchmarks/results/*-headline-seed-*.json                     # the page and the chart

The mathematics is any JSONL of conversations that trainers take. The project's own figures are of the training questions of GSM8K
(arXiv 2110.14168, MIT licence), each a line {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]} without the marks of
its calculator.

Stages, each of which goes on where it was cut off: `target` (a Llama of 135 million parameters, trained on Python functions and
mathematics; --width and --layers change its size), `answers` (it answers training prompts), `heads` (every family and a draft
model, the same minutes each), `acceptance` (tokens per step on held-out prompts), `speed` (these replayed on the 8B shape).

On a machine with several GPUs the parts of `heads`, `acceptance` and `speed` are divided among them (--gpus), one process each.

A part that fails is told and left out, and the others and the stages after it go on; the same command tries it again.

A cluster that lends machines for minutes: figures are small and are kept in WORK/figures, so `speed` can run later, elsewhere, from
them and WORK/settings.json alone. The target cannot wait: its 270 MB in bf16 and the heads' are on the machine's disk, and `target`
to `acceptance` need one machine for as long. Each line below is a command of less than 10 minutes; what was cut off goes on with
the same line. Minutes are those of two H200s on 2026-11-27, 21 a seed; the settings' own values take about 5 more:

    H="python benchmarks/headline/headline.py --math gsm8k_train.jsonl --seed 0 --work runs/headline-0 --target-minutes 3"
    H="$H --target-rows 32 --head-minutes 0.7 --num-answers 16000 --alone 6 --speed-minutes 5"
    $H --stage target,answers                          # one GPU           6.7: 3.0 of training, 1.0 of answers
    $H --stage heads                                   # two GPUs          5.8: four a GPU, 1.4 each
    $H --stage acceptance                              # two GPUs          3.4
    $H --stage speed --output headline-seed-0          # two GPUs          4.8

    tar czf headline-0.tgz -C runs headline-0/figures headline-0/settings.json        # less than a megabyte
    tar xzf headline-0.tgz -C runs && $H --stage speed --output headline-seed-0       # another day, another machine

A signal or a limit in the middle of `target` loses it; of other stages it loses the part that ran.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path

import torch

from headstart.benchmarks.headline.families import DRAFT_MODEL, HEADS, SOURCES, choose
from headstart.benchmarks.headline.heads import answer_prompts, train_head
from headstart.benchmarks.headline.replay import Replay, check_shape
from headstart.benchmarks.headline.settings import STAGES, Settings, check_math
from headstart.benchmarks.headline.target import load_make, train_draft, train_target
from headstart.benchmarks.headline.tokens_per_step import Meter
from headstart.benchmarks.headline.work_folder import WorkFolder
from headstart.evaluation.results import Report, command_line
from headstart.evaluation.timing import release
from headstart.heads.storage.atomic_write import write_json
from headstart.heads.storage.user_errors import exit_status
from headstart.inference.models.target_source import choose_device
from headstart.train.run.stopping import leave_with_parent

LIBRARY = "transformers"  # the part of `speed` that is not a source of drafts
POLL = 2.0  # seconds


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--work", required=True, help="folder for models, data and figures; the same command goes on in it"
    )
    parser.add_argument(
        "--scale", choices=("full", "tiny"), default="full", help="values of all options below (default full)"
    )
    parser.add_argument(
        "--stage", default=",".join(STAGES), help=f"stages to run, with commas (default {','.join(STAGES)})"
    )
    parser.add_argument("--only", help='parts of heads, acceptance and speed, with semicolons: "EAGLE-3; draft model"')
    parser.add_argument("--gpus", type=int, help="GPUs to divide parts among (default: all)")
    parser.add_argument(
        "--output",
        help="write all figures as JSON here; a bare NAME: into benchmarks/results (default: WORK/result.json)",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a call that divides its parts
    parser.add_argument("--commit", help="commit of the code, if this is not a git checkout")
    for one in fields(Settings):
        kind = {"action": argparse.BooleanOptionalAction} if one.type is bool else {"type": one.type, "metavar": "X"}
        text = f"{one.metadata['help']} (full {one.default!r}, tiny {one.metadata['tiny']!r})".replace("%", "%%")
        parser.add_argument(f"--{one.name.replace('_', '-')}", help=text, **kind)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    settings = Settings.at(options.scale, **{one.name: getattr(options, one.name) for one in fields(Settings)})
    stages = [name.strip() for name in options.stage.split(",")]
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        raise ValueError(f"--stage {unknown[0]!r} is not known; stages are {', '.join(STAGES)}")
    sources, device = choose(options.only), choose_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # products this small are slower on several, and far slower beside other work
    if "target" in stages:
        check_math(settings)
        load_make()
    if "speed" in stages:
        check_shape(settings, device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    if options.gpus is not None and not 1 <= options.gpus <= gpus:
        raise ValueError(f"--gpus must be from 1 to the {gpus} that are here, got {options.gpus}")
    command = command_line("benchmarks/headline/headline.py", arguments)
    output = options.output or str(Path(options.work) / "result.json")
    report = Report("headline", {}, device, command, vars(settings), output, options.commit)
    work = WorkFolder(options.work, settings)
    if options.child:
        leave_with_parent()
    else:
        work.add_command(command)
    run = Run(settings, work, device, sources, options.gpus or gpus, sys.argv[1:] if arguments is None else arguments)
    try:
        for stage in stages:
            began = time.perf_counter()
            print(f"\n{stage}: {run.estimate(stage)}", flush=True)
            run.stage(stage)
            print(f"{stage}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    except BaseException:
        # After Ctrl-C, too, what was finished stands beside the result, which an earlier call may have written.
        with contextlib.suppress(Exception):
            write_figures(work, report, report.unfinished)
            print(f"what was finished before: {report.unfinished}", file=sys.stderr)
        raise
    write_figures(work, report, report.path)
    report.unfinished.unlink(missing_ok=True)
    left = {stage: len(run.parts(stage)) for stage in STAGES if run.parts(stage)}
    print(json.dumps({"name": "headline", "written": str(report.path), "rows": len(report.rows), "parts_left": left}))
    if run.failed:
        raise ValueError(f"these parts failed: {'; '.join(run.failed)}. The same command tries them again")
    return 0


class Run:
    """The stages on one device, or their parts on several."""

    def __init__(self, settings, work, device, sources, gpus, arguments):
        self.settings, self.work, self.device, self.sources = settings, work, device, sources
        self.gpus, self.arguments = gpus, arguments
        self.failed = []  # "STAGE of NAME"

    def parts(self, stage):
        """Names of a stage's parts that are not finished."""
        names = {"target": ["all"], "answers": ["all"]}.get(stage)
        if names is None:
            chosen = [one for one in self.sources if stage != "heads" or one in (*HEADS, DRAFT_MODEL)]
            names = [one.slug for one in chosen if stage != "speed" or one.replayed]
            if stage == "speed" and DRAFT_MODEL in self.sources:
                names.append(LIBRARY)
        return [name for name in names if self.work.figures(stage, name) is None]

    def estimate(self, stage):
        """What is left of a stage, in words."""
        left, minutes = self.parts(stage), self.settings
        each = {
            "target": minutes.target_minutes + 3,
            "answers": self.settings.num_answers * self.settings.answer_tokens / 2 / 60_000 / 60 + 0.8,
            "heads": minutes.head_minutes + 1.0,
            "acceptance": 1.1,
            "speed": 1.1,
        }[stage]
        if not left:
            return "finished before"
        share = -(-len(left) // self.gpus)
        rate = f", about {share * each:.0f} minutes" if self.device.type == "cuda" else ""
        return f"{len(left)} part{'s' * (len(left) > 1)} to do{rate}"

    def stage(self, stage):
        left = self.parts(stage)
        if not left:
            return
        if self.gpus > 1 and len(left) > 1:
            self.divide(stage, left)
        elif stage == "target":
            train_target(self.settings, self.work, self.device)
        elif stage == "answers":
            answer_prompts(self.settings, self.work, self.device)
        elif stage == "heads":
            for source in self.in_turn(left):
                if source == DRAFT_MODEL:
                    self.attempt(stage, source.name, train_draft, self.settings, self.work, self.device)
                else:
                    self.attempt(stage, source.name, train_head, source, self.settings, self.work, self.device)
        else:
            self.measure(stage, left)

    def attempt(self, stage, name, do, *given):
        """Do a part. If it fails, say why: the others, and the stages after it, do without it."""
        try:
            do(*given)
        except Exception:
            traceback.print_exc()
            print(f"{stage} of {name} FAILED, the others go on", flush=True)
            self.failed.append(f"{stage} of {name}")
        release(self.device)  # here nothing holds the frames of the error, and what they held, any more

    def named(self, slugs):
        return [source for source in SOURCES if source.slug in slugs]

    def in_turn(self, slugs):
        """The sources one after the other, each announced with the time that the ones before took."""
        sources, began = self.named(slugs), time.perf_counter()
        for done, source in enumerate(sources):
            minutes = (time.perf_counter() - began) / 60
            rest = f", about {minutes / done * (len(sources) - done):.1f} minutes to go" if done else ""
            print(f"\n{source.name} ({done + 1} of {len(sources)}){rest}", flush=True)
            yield source

    def measure(self, stage, left):
        """Measure the parts of a stage that share one loaded target."""
        if stage == "acceptance":
            self.work.needs("target")
            meter = Meter(self.settings, self.work, self.device)
            if meter.plain_differs:
                print(
                    f"{meter.plain_differs} outputs of plain decoding alone DIFFER from those beside others", flush=True
                )
            for source in self.in_turn(left):
                self.attempt(stage, source.name, meter.measure, source)
            return
        measured = [name for name in left if self.work.figures("acceptance", name) is not None]
        if not measured:
            self.work.needs("acceptance", left[0] if left != [LIBRARY] else DRAFT_MODEL.slug)
        replay = Replay(self.settings, self.work, self.device)
        if LIBRARY in left:
            self.attempt(stage, LIBRARY, replay.measure_library)
        for source in self.in_turn(measured):
            if replay.out_of_time():
                break
            self.attempt(stage, source.name, replay.measure, source)
        if rest := self.parts(stage):
            print(f"{len(rest)} parts are left, the same command goes on with {rest[0]}", flush=True)

    def divide(self, stage, left):
        """Run the parts in one process per GPU. Each writes what it prints into a file of the work folder."""
        if DRAFT_MODEL.slug in left:  # whose process measures the library, too
            left = [name for name in left if name != LIBRARY]
        shares = [left[i :: self.gpus] for i in range(self.gpus)]
        children = []
        for gpu, share in enumerate(filter(None, shares)):
            names = [source.name for source in self.named(share)] + [DRAFT_MODEL.name] * (LIBRARY in share)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            device = visible.split(",")[gpu] if visible else str(gpu)
            words = [*self.arguments, "--stage", stage, "--only", ";".join(names), "--gpus", "1", "--child"]
            words += ["--output", str(self.work.folder / f"{stage}-{gpu}.json")]
            log = open(self.work.folder / f"{stage}-{gpu}.log", "w")  # noqa: SIM115  closed with the child
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "PYTHONUNBUFFERED": "1"}
            child = subprocess.Popen(
                [sys.executable, __file__, *words], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            children.append((child, log))
            print(f"GPU {device}: {', '.join(names)}; see {log.name}", flush=True)
        began, told, failed = time.perf_counter(), set(), []
        try:
            while any(child.poll() is None for child, _ in children):
                time.sleep(POLL)
                for name in sorted(set(left) - set(self.parts(stage)) - told):
                    told.add(name)
                    minutes = (time.perf_counter() - began) / 60
                    rest = minutes / len(told) * (len(left) - len(told))
                    print(f"{name} finished, {len(told)} of {len(left)}, about {rest:.1f} minutes to go", flush=True)
                for child, log in children:
                    if child.poll() and log.name not in failed:
                        failed.append(log.name)
                        print(f"a process ended with status {child.returncode}, see {log.name}", flush=True)
        finally:
            for child, log in children:
                if child.poll() is None:
                    child.terminate()
                child.wait()
                log.close()
        failed = [(share, log.name) for share, (child, log) in zip(shares, children) if child.returncode]
        for share, log in failed:
            last = "\n".join(Path(log).read_text(errors="replace").splitlines()[-15:])
            print(f"the end of {log}:\n{last}", flush=True)
            self.failed += [f"{stage} of {name}" for name in share if name in self.parts(stage)]
        if failed and not set(left) - set(self.parts(stage)):
            raise ValueError(f"no part of {stage} was finished, see {', '.join(log for _, log in failed)}")


def write_figures(work, report, path):
    """Write all figures of the folder.  Not Report.finish, which prints the whole object: it has hundreds of kilobytes."""
    collect(work, report)
    write_json(path, report.content, indent=1, ensure_ascii=True)


def collect(work, report):
    """All figures of the folder into the report."""
    for stage in ("target", "answers"):
        if (found := work.figures(stage)) is not None:
            report.facts[stage] = found
    report.facts["commands"] = work.commands()
    report.facts["heads"] = work.all_figures("heads")
    for stage in ("acceptance", "speed"):
        found = work.all_figures(stage)
        report.facts[stage] = {
            name: {key: value for key, value in one.items() if key not in ("rows", "trees")}
            for name, one in found.items()
        }
        report.rows += [row for one in found.values() for row in one["rows"]]


if __name__ == "__main__":
    sys.exit(exit_status("headline.py", main))
