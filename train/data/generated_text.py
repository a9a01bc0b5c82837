"""Generate text with the target, for trainers whose second stage learns from it.

Prompts are cut from the data, the engine draws the answers, and one file of the run folder keeps them.

    generated.jsonl    first line {"made_from": {...}}, then per text {"ids": [...], "prompt": number of ids of the prompt}

The file is written whole or not at all; a resumed run reads it again. An answer depends only on the prompt, its place and the seed,
not on the number of processes. Not done here: chat templates, answers to whole requests, filtering.
"""

import json
import random
import zlib
from itertools import cycle, islice
from pathlib import Path

from tqdm import tqdm

from ...inference.llm import LLM
from ...inference.models.decoder import UnsupportedArchitecture
from ...inference.open_batch import OpenBatch
from ...inference.sampling_params import SamplingParams
from .part_files import PartFiles, forget_parts

FILE = "generated.jsonl"
TEMPERATURE, TOP_K = 1.0, 10  # values of IBM's training
AT_ONCE = 64  # prompts in the engine


def build_generator(target, tokenizer, max_length):
    """The engine on the loaded target (FrozenTarget), without a second copy of it.

    Raises ValueError if the engine does not run this target, or texts of max_length tokens.
    """
    if target.is_sharded:
        raise ValueError(
            "stage 2 generates with the engine, which needs the whole target in every process: launch it with "
            "configs/accelerate/ddp.yaml, or train stage 1 on answers that the target wrote elsewhere"
        )
    try:
        return LLM(model=target.model, tokenizer=tokenizer, max_model_len=max_length, max_num_seqs=AT_ONCE)
    except UnsupportedArchitecture as error:
        raise ValueError(
            f"stage 2 without a generator: it learns from text that the target writes, and {error} Train stage 1 "
            "instead, on answers that the target wrote elsewhere"
        ) from error


def cut_prompts(documents, length, count, seed):
    """`count` pieces (0: all) of `length` tokens, cut from documents (list of (ids, supervised)), in an order drawn from `seed`.

    A document is cut into as many pieces as fit, one after the other. Raises ValueError if no document is long enough.
    """
    pieces = [ids[i : i + length] for ids, _ in documents for i in range(0, len(ids) - length + 1, length)]
    if not pieces:
        longest = max((len(ids) for ids, _ in documents), default=0)
        raise ValueError(
            f"prompt_tokens is {length} and the longest of {len(documents)} conversations has {longest} tokens: lower it"
        )
    random.Random(seed).shuffle(pieces)
    return pieces[:count] if count else pieces


def standing_documents(prompts, answer_tokens):
    """Documents of the lengths that generated ones have if no answer ends early: each prompt, then itself again as the answer."""
    documents = []
    for ids in prompts:
        answer = list(islice(cycle(ids), answer_tokens))
        documents.append(([*ids, *answer], [False] * len(ids) + [True] * answer_tokens))
    return documents


def generated_documents(run, llm, target_name, *, prompts, answer_tokens, seed, accelerator, note):
    """Documents (ids, supervised) with answers drawn by the target, which are supervised; read from the run folder if they exist.

    run: the run folder; prompts: lists of token ids. Every rank generates its share (the main rank shows a bar), and all return the
    same documents. Raises ValueError if the folder holds texts made from something else.
    """
    path = Path(run, FILE)
    made_from = {
        "target": target_name,
        "num_prompts": len(prompts),
        "prompts": zlib.crc32(json.dumps(prompts).encode()),
    }
    made_from |= {"answer_tokens": answer_tokens, "seed": seed, "temperature": TEMPERATURE, "top_k": TOP_K}
    accelerator.wait_for_everyone()  # all ranks see the same: either no file, or the whole file
    if path.exists():
        if accelerator.is_main_process:
            forget_parts(path)  # of a run killed in its last moment
        note(f"the target's texts are those of {path}")
    else:
        _generate(path, llm, prompts, made_from, accelerator)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if lines[0]["made_from"] != made_from:
        raise ValueError(
            f"{path} was made from {lines[0]['made_from']}, this run asks for {made_from}: name a new output, or remove the file"
        )
    return [(line["ids"], [i >= line["prompt"] for i in range(len(line["ids"]))]) for line in lines[1:]]


def _generate(path, llm, prompts, made_from, accelerator):
    """Write the file. Every rank writes its texts to a part as they end; then the main rank writes all of them, in order."""
    parts = PartFiles(path, made_from, {}, accelerator)
    mine = parts.share(range(len(prompts)))
    drawn = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": made_from["answer_tokens"]}
    waiting, told = iter(mine), accelerator.is_main_process
    with OpenBatch(llm) as batch, tqdm(total=len(mine), desc="generating", unit=" texts", disable=not told) as bar:
        while True:
            for i in islice(waiting, AT_ONCE - len(batch)):
                batch.add(prompts[i], SamplingParams(**drawn, seed=_seed(made_from["seed"], i)), tag=i)
            if not batch:
                break
            for i, one in batch.step():
                prompt, answer = one.prompt_token_ids, one.outputs[0].token_ids
                parts.append(i, {"ids": [*prompt, *answer], "prompt": len(prompt)})
                bar.update()
    texts = parts.collect()
    if accelerator.is_main_process:
        parts.finish(json.dumps(line) for line in [{"made_from": made_from}, *(texts[i] for i in range(len(prompts)))])
    accelerator.wait_for_everyone()


def _seed(seed, place):
    """Seed of the text at this place, different for every text of a run."""
    return seed * 1_000_003 + place
