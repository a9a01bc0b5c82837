"""Let the target answer the conversations of a data set, to train heads on its answers: `headstart regenerate`, and this script.

    accelerate launch train/regenerate.py conversations.jsonl --model ORG/MODEL --output answers.jsonl
    headstart regenerate conversations.jsonl --model ORG/MODEL --output answers.jsonl

data -> dialogues, many in flight at once (dialogue.py) -> our engine (engine_answers.py) or a server (chat_endpoint.py) -> parts
(part_files.py) -> one JSONL in the order of the data, which `load_conversations` reads: {"conversation": place in the data,
"messages": [...]}, every answer with its "finish_reason". OUTPUT.made_from.json holds the settings and counts. `--help`
explains the options.

Not done here: filtering or rating answers, tools, keeping a reasoning model's thoughts if the chat template drops them.
"""

import argparse
import json
import random
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

import headstart
from headstart.heads.storage.atomic_write import check_writable, write_json
from headstart.inference.models.target_source import named_dtype
from headstart.inference.sampling_params import SamplingParams
from headstart.train.data.chat_endpoint import ChatEndpoint, EndpointUnavailable, answer_by_endpoint, completions_url
from headstart.train.data.conversations import load_conversations
from headstart.train.data.dialogue import REFUSED, Dialogue
from headstart.train.data.engine_answers import answer_by_engine, build_engine, describe_target
from headstart.train.data.part_files import PartFiles, differences, forget_parts
from headstart.train.data.regenerate_options import DETAILS, EXAMPLES, SUMMARY, add_options
from headstart.train.run.run_folder import patient_processes
from headstart.train.run.stopping import StopSignals, run_script

# After this many refusals without one answer, the fault is not the conversations'.
MOST_REFUSED = 8


def main(argv):
    """Run as a script. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=f"{SUMMARY}\n\n{DETAILS}",
        epilog=f"examples:\n  {EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return regenerate(parser.parse_args(argv))


def regenerate(options):
    """Make the file that `options` (of regenerate_options.py) ask for. Returns 0, or 128 + the signal that ended it early.

    Raises ValueError for bad options and data, for parts or a finished file made from something else, and if no conversation could
    be answered.
    """
    sampling = check_options(options)
    output = Path(options.output)
    check_writable(output)
    processes = Accelerator(kwargs_handlers=[patient_processes()])

    def note(text):
        if processes.is_main_process:
            tqdm.write(f"[regenerate] {text}", file=sys.stderr)

    # The settings that decide the content, known before anything heavy is loaded.
    conversations = load_conversations(options.data, answered=False, note=note, with_fields=False)
    chosen = choose(len(conversations), options.num_conversations, options.seed)
    made_from = {"data": options.data, "num_conversations": len(chosen)}
    made_from["checksum"] = zlib.crc32(json.dumps([[i, conversations[i]] for i in chosen]).encode())
    made_from |= {"model": options.model, "by": "an endpoint" if options.endpoint else "headstart"}
    made_from |= {**sampling, "seed": options.seed}
    versions = {"headstart": headstart.__version__, "torch": torch.__version__}
    begun_with = {"versions": versions, "endpoint": options.endpoint}
    if options.endpoint:
        endpoint = ChatEndpoint(options.endpoint, options.model, sampling, note)
    else:
        device = choose_device(options.device, processes)
        target = {"adapter": options.adapter, "head": options.head, "max_model_len": options.max_model_len}
        facts, dtype = describe_target(options.model, **target, dtype=options.dtype, device=device)
        made_from |= facts
        begun_with = {"versions": versions, "dtype": dtype}
    if is_finished(output, made_from):
        if processes.is_main_process:
            forget_parts(output)  # of a run killed in its last moment
        note(f"{output} is finished already")
        return 0

    parts = PartFiles(output, made_from, begun_with, processes)
    dialogues = [Dialogue(i, conversations[i], options.seed) for i in parts.share(chosen)]
    note(f"{len(chosen)} conversations, {len(parts.done)} of them done before, {processes.num_processes} process(es)")
    if options.temperature == 1 and options.top_p == 1 and not options.top_k:
        note(
            "answers are drawn from the target's own distribution (--temperature 1), as heads meet it in use; 0 takes the "
            "likeliest tokens"
        )
    open_ones = [dialogue for dialogue in dialogues if dialogue.is_open]
    for dialogue in dialogues:
        if not dialogue.is_open:
            parts.append(dialogue.index, dialogue.record())
    start = time.perf_counter()
    with StopSignals() as stop:
        if open_ones:
            if options.endpoint:
                ended = answer_by_endpoint(endpoint, open_ones, min(options.concurrency, len(open_ones)), stop)
            else:
                dtype = parts.begun_with["dtype"]  # that of the run's first part
                llm = build_engine(options.model, **target, dtype=dtype, device=device, concurrency=options.concurrency)
                start = time.perf_counter()
                ended = answer_by_engine(llm, open_ones, sampling, options.concurrency, stop)
            try:
                keep(ended, parts, len(open_ones), processes)
            except EndpointUnavailable:
                note(f"what is done is in {parts.folder}; the same command goes on")
                raise
        if stop.requested:
            note(f"stopped by signal {stop.requested}: what is done is in {parts.folder}; the same command goes on")
            return 128 + stop.requested

    # All records exist, or some rank raised.
    records = parts.collect()
    seconds = time.perf_counter() - start
    if processes.is_main_process:
        summary = summarize(records)
        if not summary["answered"]:
            parts.remove()
            raise ValueError(f"no conversation could be answered: {explain(summary['not_answered'], records)}")
        facts = {"made_from": parts.made_from, "begun_with": parts.begun_with, "summary": summary}
        write_json(facts_file(output), facts)
        answered = [i for i in sorted(records) if is_answered(records[i])]
        lines = [{"conversation": i, "messages": records[i]["messages"]} for i in answered]
        parts.finish(json.dumps(line, ensure_ascii=False) for line in lines)
        new_tokens = summary["tokens"] - sum(record["tokens"] for record in parts.done.values())
        for line in tell(summary, records, new_tokens / seconds if open_ones else None):
            note(line)
        note(f"written to {output}; train on it with data: {output}")
    processes.wait_for_everyone()
    return 0


def check_options(options):
    """Check the options. Returns the sampling parameters as a dict, for SamplingParams and for a server. Raises ValueError."""
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "max_tokens": options.max_tokens}
    if options.top_k or not options.endpoint:  # OpenAI's own protocol has no top_k
        sampling["top_k"] = options.top_k
    SamplingParams(**sampling, seed=options.seed)
    if not options.output.endswith(".jsonl"):
        raise ValueError(
            f"--output must end in .jsonl, as training knows such files by their name; got {options.output}"
        )
    if Path(options.output).resolve() == Path(options.data).resolve():
        raise ValueError(f"--output {options.output} is the data itself: name another file")
    for name in ("concurrency", "num_conversations"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    named_dtype(options.dtype)
    if options.endpoint:
        completions_url(options.endpoint)
        for name in ("adapter", "head", "max_model_len", "device", "dtype"):
            if getattr(options, name) not in (None, "auto"):
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{option} is for our engine; with --endpoint it is the server's to decide: leave it out"
                )
    return sampling


def choose(num_conversations, count, seed):
    """Places of the conversations to answer, in order: all, or `count` of them. A larger count includes those of a smaller one."""
    places = list(range(num_conversations))
    if count is not None and count < num_conversations:
        random.Random(seed).shuffle(places)
        places = sorted(places[:count])
    return places


def choose_device(device, processes):
    """The device of this process."""
    if device == "auto":
        return processes.device if processes.device.type == "cuda" else "cpu"
    if processes.num_processes > 1 and device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} is one device for {processes.num_processes} processes: leave it out")
    return processes.device if device == "cuda" and processes.device.type == "cuda" else device


def keep(ended, parts, count, processes):
    """Write the records of dialogues as they end, with a bar. Raises ValueError if all of the first few are refused."""
    answered = any(is_answered(record) for record in parts.done.values())
    held = []  # refused ones, until an answer shows that the server works
    start, tokens = time.perf_counter(), 0
    share = f" (process 0 of {processes.num_processes})" if processes.num_processes > 1 else ""
    with tqdm(
        total=count,
        desc=f"answering{share}",
        unit=" conversations",
        smoothing=0.05,
        dynamic_ncols=True,
        disable=not processes.is_main_process,
    ) as bar:
        for dialogue in ended:
            record = dialogue.record()
            answered |= is_answered(record)
            held.append(dialogue)
            if not answered and len(held) >= MOST_REFUSED and all(one.ended == REFUSED for one in held):
                raise ValueError(f"the first {len(held)} conversations were all refused, the last: {dialogue.detail}")
            if answered:
                for one in held:
                    parts.append(one.index, one.record())
                held = []
            tokens += record["tokens"]
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
            bar.update()
    for one in held:
        parts.append(one.index, one.record())


def is_answered(record):
    return bool(record["messages"])


def is_finished(output, made_from):
    """Whether the finished file exists. Raises ValueError if it was made with other settings."""
    if not output.exists():
        return False
    facts = facts_file(output)
    if not facts.exists():
        raise ValueError(f"{output} exists and says nowhere what it was made from: name another --output")
    changed = differences(json.loads(facts.read_text(encoding="utf-8"))["made_from"], made_from)
    if changed:
        raise ValueError(f"{output} is finished, and was made with other settings ({changed}): name another --output")
    return True


def facts_file(output):
    return output.with_name(f"{output.name}.made_from.json")


def summarize(records):
    """Counts over all records, as a JSON-able dict."""
    answered = [record for record in records.values() if is_answered(record)]
    finish = Counter(m["finish_reason"] for r in answered for m in r["messages"] if m["role"] == "assistant")
    steps = sum(record["steps"] for record in answered)
    return {
        "conversations": len(records),
        "answered": len(answered),
        "not_answered": dict(Counter(r["ended"] for r in records.values() if not is_answered(r))),
        "ended_early": dict(Counter(record["ended"] for record in answered if record["ended"])),
        "turns_left_out": sum(record["left_out"] for record in answered),
        "answers": finish.total(),
        "answers_cut": finish["length"],
        "tokens": sum(record["tokens"] for record in records.values()),
        "acceptance_length": 1 + sum(record["accepted"] for record in answered) / steps if steps else None,
    }


def tell(summary, records, tokens_per_second):
    """The summary in sentences, one after the other."""
    yield f"{summary['answered']:,} of {summary['conversations']:,} conversations answered"
    if summary["not_answered"]:
        yield f"not answered: {explain(summary['not_answered'], records)}"
    if summary["ended_early"]:
        yield f"ended early: {explain(summary['ended_early'], records)}"
    if summary["turns_left_out"]:
        yield f"{summary['turns_left_out']:,} assistant turns of answered conversations left out"
    speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else ""
    length = summary["acceptance_length"]
    drafted = f", {length:.2f} tokens per step" if length else ""
    cut = f" ({summary['answers_cut']:,} of them cut at --max-tokens)" if summary["answers_cut"] else ""
    yield f"{summary['answers']:,} answers{cut}, {summary['tokens']:,} tokens{speed}{drafted}"


def explain(counts, records):
    """Counts by reason as a text, each with an example of its detail."""
    texts = []
    for reason, count in counts.items():
        details = (record["detail"] for record in records.values() if record["ended"] == reason)
        example = next(filter(None, details), None)
        texts.append(f"{count:,} {reason}" + (f" (one says: {example})" if example else ""))
    return "; ".join(texts)


if __name__ == "__main__":
    run_script(main)
