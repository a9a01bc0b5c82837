"""Record the behaviour of a checkout of the project, and compare two records: proves that a refactoring changes nothing.

    python benchmarks/proofs/unchanged.py record --checkout DIR --python DIR/.venv/bin/python --output RECORD
    python benchmarks/proofs/unchanged.py record ... --steps 12 --old-record OLD    # quick; goes on with OLD's killed runs, too
    python benchmarks/proofs/unchanged.py compare OLD NEW                           # status 0: equal, 1: not, 2: cannot be told

Parts, a JSON file each:

    train        every quickstart recipe: a whole run, and one that is killed after its first checkpoint and resumed. Every tensor,
                 optimiser states, configs, names of files, metrics, acceptance, notes, the report page
    speculation  token ids, log-probabilities and counts of accepted drafts, for the heads just trained: chain, static and dynamic
                 trees, every verifier, n-gram, draft model; bench speculation, generate, tree, regenerate, verify-lossless
    export       every format of every head: tensors, configs, cards; `inspect --json`; `heads.export verify`
    help         --help of every command, and some messages of errors

With --old-record the killed runs of OLD (in OLD/work) go on in the new code, as RECIPE/resumed_from_old, and `compare` compares
them with OLD's own resumed runs. The checkout is driven through its commands and `from headstart import LLM, SamplingParams`, and
nothing is written into it. Text that depends on date, machine, speed, version or place is masked (recorded_checkout.py).

Not covered: GPUs, several processes, the Hub, W&B's binary log, the script that makes the embedded target, and choices by measured
times (`--autocast auto`, `--dtype auto`, `tree --budget auto`, adaptive depths: fp32 is set). Records of two machines, or of two
versions of torch, differ. Files above 64 KiB and .svg files are recorded as a checksum only.
"""

import argparse
import difflib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recorded_checkout import Checkout, fail

PARTS = ("train", "speculation", "export", "help")
TARGET, SHIPPED = "assets/stdlib-coder", "assets/stdlib-coder-medusa"

# name: (script, config, further keys, formats). medusa2 starts from the whole run of medusa, and medusa-shared is not resumed.
RECIPES = {
    "medusa": ("medusa", "quickstart", (), ("medusa", "vllm")),
    "medusa-shared": ("medusa", "quickstart", ("--shared_lm_head",), ("medusa-shared", "vllm")),
    "eagle": ("eagle", "eagle-quickstart", (), ("eagle-vllm", "eagle-sglang")),
    "eagle3": ("eagle3", "eagle3-quickstart", (), ("eagle3", "speculators")),
    "mlp-speculator": ("mlp_speculator", "mlp-speculator-quickstart", (), ("mlp-speculator",)),
    "medusa2": ("medusa", "medusa2-quickstart", (), ("medusa",)),
}
# Further keys of a run with --steps, beside max_steps.
SHORT = "--log_every 1 --max_tokens 10000 --row_length 128 --batch_rows 4 --eval_prompts 2 --eval_tokens 16"

RICH = dict(temperature=0.9, seed=5, n=2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.3)
RICH |= dict(frequency_penalty=0.2, logprobs=3, min_tokens=4, bad_words=["return"], stop=["\n\n\n"])
RICH |= dict(logit_bias={100: 2.0, 7: -5.0})
TREES = {"static.json": {"parents": [-1, 0, 0, 1, 1, 2, 3], "ranks": [0, 0, 1, 0, 1, 0, 0]}}
TREES |= {"dynamic.json": {"dynamic": {"max_depth": 3, "width": 4, "num_nodes": 12}}}


def in_parallel(jobs, tasks):
    """{name: result} of {name: (function, argument ...)}."""
    with ThreadPoolExecutor(jobs) as pool:
        started = {name: pool.submit(*task) for name, task in tasks.items()}
        return {name: task.result() for name, task in started.items()}


def record_train(checkout, recipes):
    checkout.place("train")
    made = {name: threading.Event() for name in recipes}  # set when the whole run is finished
    found = in_parallel(checkout.jobs, {name: (train, checkout, name, made) for name in recipes})
    return {key: item for items in found.values() for key, item in items.items()}


def train(checkout, name, made):
    """A whole run, a run that is killed and resumed, and a resumed run of the old record."""
    script, config, keys, _ = RECIPES[name]
    config, run = checkout.root / f"configs/{config}.yaml", checkout.run_of(name)
    every = int(re.search(r"(?m)^checkpoint_every: (\d+)", config.read_text())[1])
    keys = ["--autocast", "no", *keys]  # auto measures
    if checkout.steps:
        every = max(1, checkout.steps // 3)
        keys += f"{SHORT} --max_steps {checkout.steps} --checkpoint_every {every} --eval_every {every + 2}".split()
    if name == "medusa2":
        made["medusa"].wait()
        keys += ["--start_from", checkout.run_of("medusa")]
    launch = ["accelerate", "launch", "--config_file", "configs/accelerate/cpu.yaml", f"train/{script}.py", "--config"]
    try:
        told = checkout.told(*launch, config, "--output", run, *keys)
    finally:
        made[name].set()
    items = {f"{name}/fresh": {"told": told} | run_folder(checkout, run)}
    if name != "medusa-shared":
        run = run.parent / "resumed"
        kill(checkout, [*launch, config, "--output", run, *keys], run, every + 2)
        shutil.copytree(run, run.parent / "killed")
        runs = [run]
        if checkout.old and (killed := checkout.old / "train" / name / "killed").is_dir():
            runs.append(Path(shutil.copytree(killed, run.parent / "resumed_from_old")))
        for run in runs:
            told = checkout.told(*launch, run / "config.yaml", "--output", run, "--resume")
            items[f"{name}/{run.name}"] = {"told": told} | run_folder(checkout, run)
    return items


def kill(checkout, command, run, step):
    """Kill a training and all its processes once it has a checkpoint and a line of metrics for that step."""
    with open(run.parent / "killed.log", "wb") as log:
        how = dict(cwd=checkout.root, env=checkout.environment, stdout=log, stderr=log, start_new_session=True)
        process = subprocess.Popen([checkout.bin / command[0], *command[1:]], **how)
        while process.poll() is None and last_step(run) < step:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        fail(f"{run} ended before it was killed, with {process.returncode}: see {run.parent / 'killed.log'}")


def last_step(run):
    """The last step in metrics.jsonl; 0 before the first checkpoint."""
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1] if [*run.glob("checkpoints/*/state.json")] else []
    return json.loads(lines[-1])["step"] if lines else 0


def run_folder(checkout, run):
    """The files of a finished run. Of W&B's files only the names of media, which contain a checksum of their content."""
    names = [str(file.relative_to(run)) for file in sorted(run.rglob("*")) if file.is_file()]
    names = [checkout.masked(name) for name in names if not name.startswith("wandb/") or "/media/" in name]
    page, newest = run.parent / f"{run.name}.html", sorted(run.glob("checkpoints/*"))[-1:]
    found = {"files": sorted(set(names)), "report told": checkout.told("headstart", "report", run, "--output", page)}
    for path in [page, *(file for file in run.iterdir() if file.is_file())]:
        found[path.name] = checkout.file(path) if path.is_file() else None
    found["report.html"] = found.pop(page.name)
    found["metric names"] = sorted({key for line in found.get("metrics.jsonl", ()) for key in line})
    return found | {"head": checkout.folder(run / "head"), "newest": [checkout.folder(path) for path in newest]}


def record_speculation(checkout, recipes):
    place = checkout.place("speculation")
    for name, tree in TREES.items():
        (place / name).write_text(json.dumps(tree))
    runs = {name: str(checkout.run_of(name)) for name in recipes}
    static, dynamic = str(place / "static.json"), str(place / "dynamic.json")
    drafting = {"model": TARGET, "method": "draft_model", "num_speculative_tokens": 3}
    drafting = [drafting | dict(tree=tree, verifier=rule) for tree, rule in (("chain", "block"), (dynamic, "strict"))]
    lookup = [dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)]
    groups = {"": {"plain": [None], "ngram": lookup, "draft model": drafting}}  # a process each
    for name, head in {"shipped": SHIPPED, **runs}.items():
        shapes = [("chain", rule) for rule in ("strict", "token", "block")]
        shapes += [(static, rule) for rule in ("strict", "recursive", "traversal")] + [(dynamic, "strict")]
        shapes += [("static", "strict")] * (name in ("shipped", "medusa"))
        shapes += [(dynamic, "traversal"), ("dynamic", "strict")] * (name == "eagle3")
        configs = [dict(model=head, tree=tree, verifier=rule) for tree, rule in shapes]
        # Acceptance here does not depend on the target, so the outputs are the drafts themselves.
        configs += [dict(model=head, tree="chain", verifier="synthetic", acceptance_length=2.5)]
        groups.setdefault(name if name in ("eagle", "eagle3", "medusa2") else "", {})[name] = configs
    num_prompts, max_tokens = (1, 12) if checkout.steps else (4, 48)
    tasks = {}
    for group, cases in groups.items():
        told = dict(cases=cases, num_prompts=num_prompts, max_tokens=max_tokens, adapter=None)
        told["adapter"] = runs[group] if group == "medusa2" else None
        (place / f"cases{group}.json").write_text(json.dumps(told))
        tasks[f"cases/{group}"] = (decode_in_checkout, checkout, place / f"cases{group}.json")
    model, dtype, prompts = f"--model {TARGET}", "--dtype float32", f"--num-prompts {num_prompts}"
    small = f"{prompts} --max-tokens {max_tokens} {dtype}"
    heads = "".join(f" --head {run}" for name, run in runs.items() if name != "medusa2")
    trees = [name for name in ("medusa", "eagle3", "mlp-speculator") if name in runs]
    commands = {f"tree of {name}": f"tree {runs[name]} --budget 12 {prompts} {dtype}" for name in trees}
    commands["bench speculation"] = f"bench speculation {model} --head {SHIPPED}{heads} {small}"
    commands["verify-lossless"] = f"verify-lossless {model} --head {SHIPPED} {small} --samples 8"
    commands["regenerate"] = f"regenerate stdlib {model} --num-conversations 3 --max-tokens 24 {dtype}"
    for name, command in commands.items():
        output = place / f"{name}.json{'l' if name == 'regenerate' else ''}"
        tasks[name] = (writing, checkout, ("headstart", *command.split(), "--output", output), output)
    answer = f"generate {model} --head {SHIPPED} --tree static {dtype} --temperature 0.8 --max-tokens 32 --compare"
    tasks["generate"] = (checkout.told, "headstart", *answer.split(), "Write the Python function `count_words`.")
    items = in_parallel(checkout.jobs, tasks)
    for name in ("bench speculation", "verify-lossless"):
        del items[name]["told"]["stdout"]  # its columns are as wide as paths; the file has the same content
    return {key: item for name in items for key, item in (items[name] if "/" in name else {name: items[name]}).items()}


def writing(checkout, command, output):
    """Output of a command, the file it wrote, and files it may have written beside that."""
    told = checkout.told(*command)
    return {"told": told, "written": {path.name: checkout.file(path) for path in output.parent.glob(f"{output.name}*")}}


def decode_in_checkout(checkout, cases):
    done = checkout.run("python", Path(__file__).resolve(), "_decode", cases)
    if done.returncode:
        fail(f"decoding of {cases} failed:\n{done.stderr[-3000:]}")
    return checkout.masked(json.loads(cases.with_suffix(".found").read_text("utf-8")))


def decode(cases):
    """The outputs of every case, in the checkout's own Python, through the public API only."""
    from headstart import LLM, SamplingParams

    told, room = json.loads(Path(cases).read_text()), dict(max_num_seqs=8, num_gpu_blocks_override=128)
    base = LLM(TARGET, dtype="float32", device="cpu", adapter=told["adapter"], **room)
    lines = Path(TARGET, "heldout.jsonl").read_text("utf-8").splitlines()[: told["num_prompts"]]
    chats = [[{"role": "user", "content": "Write a Python function."}]]  # many answers are likely
    chats += [[turn for turn in json.loads(line)["messages"] if turn["role"] != "assistant"] for line in lines]
    kinds = {"greedy": dict(temperature=0.0), "warm": dict(temperature=0.8, seed=11)}
    asked = [(f"{kind} {i}", chat, given) for kind, given in kinds.items() for i, chat in enumerate(chats)]
    asked += [("rich", chats[0], RICH), ("prompt", chats[-1], dict(temperature=0.0, prompt_logprobs=1))]
    params = [SamplingParams(max_tokens=told["max_tokens"], **given) for _, _, given in asked]
    found = {}
    for name, configs in told["cases"].items():
        for config in configs:
            words = [Path(config[word]).name for word in ("tree", "verifier") if word in (config or {})]
            key = "/".join([name, *words])
            try:
                llm = LLM(base, speculative_config=config, **room)
                results = llm.chat([chat for _, chat, _ in asked], params)
            except ValueError as error:
                found[key] = {"refused": str(error)}
                continue
            found[key] = {"counts": llm.get_metrics()}
            for (what, _, _), result in zip(asked, results, strict=True):
                found[key][what] = [*result.outputs, *([result.prompt_logprobs] if what == "prompt" else [])]
    Path(cases).with_suffix(".found").write_text(json.dumps(found, default=vars, ensure_ascii=False), "utf-8")


def record_export(checkout, recipes):
    place = checkout.place("export")
    measure = ("--measure", TARGET, "--license", "apache-2.0")
    tasks = {"shipped/medusa": (export, checkout, SHIPPED, "medusa", place / "shipped-medusa", *measure)}
    tasks["shipped/eagle3 (refused)"] = (export, checkout, SHIPPED, "eagle3", place / "refused")
    for name in recipes:
        run = checkout.run_of(name)
        if name in ("medusa", "eagle3"):
            tasks[f"{name}/inspect"] = (checkout.told, "headstart", "inspect", run, "--model", TARGET)
        for format in RECIPES[name][-1]:
            more = ("--merge-adapter", place / "merged") if name == "medusa2" else ()
            more += ("--dtype", "bfloat16", "--base-model", "some/target") if format == "eagle-sglang" else ()
            tasks[f"{name}/{format}"] = (export, checkout, run, format, place / f"{name}-{format}", *more)
    items = in_parallel(checkout.jobs, tasks)
    return items | ({"medusa2/merged": checkout.folder(place / "merged")} if "medusa2" in recipes else {})


def export(checkout, source, format, output, *more):
    told = checkout.told("heads.export", source, "--format", format, "--output", output, *more)
    item = {"told": told, "folder": checkout.folder(output)}
    if output.is_dir():
        seen = checkout.run("headstart", "inspect", output, "--model", TARGET, "--json")
        item["inspect"] = [seen.returncode, checkout.masked(json.loads(seen.stdout or "null"))]
    if "--measure" in more:
        item["verify"] = checkout.told("heads.export", "verify", output, "--model", TARGET)
    return item


def record_help(checkout, recipes):
    commands = ["generate", "tree", "bench", "verify-lossless", "inspect", "regenerate", "report", "dashboard"]
    commands += [f"bench {what}" for what in ("speculation", "step", "draft", "kernel", "engine", "peer", "train")]
    tasks = ["headstart --help", *(f"headstart {command} --help" for command in commands)]
    tasks += ["heads.export --help", "heads.export verify --help", "heads.export push --help"]
    scripts = ("medusa", "eagle", "eagle3", "mlp_speculator", "regenerate")
    tasks += [f"python train/{script}.py --help" for script in scripts]
    tasks += ["headstart nosuch", "headstart bench", "headstart inspect assets", "headstart generate --model no/such x"]
    tasks += ["heads.export nosuch --format medusa --output nosuch"]
    tasks += ["python train/medusa.py --config configs/quickstart.yaml --loss_ kl"]
    tasks += ["python train/eagle3.py --config configs/eagle3-quickstart.yaml --num_steps 0"]
    return in_parallel(checkout.jobs, {task: (checkout.told, *task.split()) for task in tasks})


def record(given):
    parts, recipes = given.parts.split(","), [name for name in RECIPES if name in given.recipes.split(",")]
    if unknown := ({*parts} - {*PARTS}) | ({*given.recipes.split(",")} - {*RECIPES}):
        fail(f"unknown: {', '.join(sorted(unknown))}; parts are {','.join(PARTS)}, recipes {','.join(RECIPES)}")
    if "medusa2" in recipes and "medusa" not in recipes:
        fail("the recipe medusa2 starts from the run of medusa: name both")
    checkout = Checkout(given)
    checkout.work.mkdir(parents=True, exist_ok=True)
    commit = checkout.run(shutil.which("git"), "rev-parse", "HEAD").stdout.strip()
    missing = [name for name in recipes if not (checkout.run_of(name) / "head").is_dir()]
    if {*parts} & {"speculation", "export"} and "train" not in parts and missing:
        fail(f"record the part train first: {given.output} holds no finished run of {', '.join(missing)}")
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    for part in (part for part in PARTS if part in parts):
        path, started = checkout.output / f"{part}.json", time.monotonic()
        path.unlink(missing_ok=True)
        items = globals()[f"record_{part}"](checkout, recipes)
        made = {"checkout": str(checkout.root), "commit": commit, "at": time.strftime("%Y-%m-%d %H:%M")}
        made["seconds"] = round(time.monotonic() - started)
        cpu, cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN), cpu
        made["cpu seconds"] = round(cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime)
        told = {"made": made, "options": {"steps": given.steps, "recipes": recipes}, "items": items}
        path.with_suffix(".partial").write_text(json.dumps(told, indent=1, sort_keys=True, ensure_ascii=False), "utf-8")
        path.with_suffix(".partial").replace(path)
        print(f"{part}: {len(items)} items in {made['seconds']} s, {made['cpu seconds']} s of CPU", flush=True)
        if failed := [name for name, item in items.items() if part == "train" and item["told"]["status"]]:
            fail(f"training failed: {', '.join(failed)}; {path} holds what was printed")
    return 0


def compare(given):
    compared = different = 0
    absent = []
    for part in PARTS:
        paths = [Path(folder, f"{part}.json") for folder in (given.old, given.new)]
        if missing := [str(path) for path in paths if not path.is_file()]:
            absent.append(f"{part} NOT COMPARED: there is no {' and no '.join(missing)}")
            continue
        old, new = (json.loads(path.read_text("utf-8")) for path in paths)
        if old["options"]["steps"] != new["options"]["steps"]:
            fail(f"{part}: one record is of {old['options']['steps']} steps, the other of {new['options']['steps']}")
        left_out = {*old["options"]["recipes"]} ^ {*new["options"]["recipes"]}
        old, new = old["items"], new["items"]
        names = sorted(name for name in {**old, **new} if name in new or not name.endswith("/resumed_from_old"))
        print(f"{part}: {len(names)} items")
        for name in names:
            if name.removeprefix("tree of ").split("/")[0] in left_out:
                print(f"  {name}: not compared, one record is without the recipe")
                continue
            before = old.get(name.replace("/resumed_from_old", "/resumed"), "missing")
            found = list(differences(before, new.get(name, "missing")))
            compared, different = compared + 1, different + bool(found)
            for line in found[:40] + [f"... and {len(found) - 40} more lines"] * (len(found) > 40):
                print(f"  {name}: {line}")
    print("\n".join([*absent, f"{compared} items compared, {different} differ"]))
    return 1 if different else 0 if compared else 2


def differences(old, new, path=""):
    """Lines that describe the differences of two values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({**old, **new}):
            yield from differences(old.get(key, "missing"), new.get(key, "missing"), f"{path}[{key}]")
    elif old != new and isinstance(old, list) and isinstance(new, list):
        if all(isinstance(line, str) for line in old + new):
            changed = difflib.unified_diff(old, new, "old", "new", n=0, lineterm="")
            yield from (f"{path} {line[:300]}" for line in changed if not line.startswith(("---", "+++")))
        else:
            both = [values + ["missing"] * (max(len(old), len(new)) - len(values)) for values in (old, new)]
            for i, (one, other) in enumerate(zip(*both, strict=True)):
                yield from differences(one, other, f"{path}[{i}]")
    elif old != new:
        yield f"{path} was {old!r:.300} and is {new!r:.300}"


def main():
    if sys.argv[1:2] == ["_decode"]:
        return decode(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    make = commands.add_parser("record", help="run a checkout and write down what it does")
    make.add_argument("--checkout", required=True, metavar="DIR", help="its root holds train/, configs/ and assets/")
    make.add_argument("--python", help="where `headstart` is that checkout (default: DIR/.venv/bin/python)")
    make.add_argument("--output", required=True, metavar="RECORD", help="to write: PART.json, and work/, some GB")
    make.add_argument("--parts", default=",".join(PARTS), help="default %(default)s; the middle two need the first")
    make.add_argument("--recipes", default=",".join(RECIPES), help="default %(default)s")
    make.add_argument("--steps", type=int, default=0, help="quick: so many steps on few rows (default: whole recipes)")
    make.add_argument("--old-record", metavar="OLD", help="also resume the killed runs of that record")
    make.add_argument("--jobs", type=int, default=2, help="commands at once, of one thread each (default 2)")
    make.set_defaults(run=record)
    check = commands.add_parser("compare", help="print what differs between two records; status 1 if anything does")
    check.add_argument("old", metavar="OLD")
    check.add_argument("new", metavar="NEW")
    check.set_defaults(run=compare)
    given = parser.parse_args()
    return given.run(given)


if __name__ == "__main__":
    sys.exit(main())
