"""Answers from our engine: many dialogues in flight at once; each one's next turn is added as soon as its last answer has ended."""

import zlib
from pathlib import Path

import torch

from ...inference.llm import LLM
from ...inference.models.adapter import choose_adapter
from ...inference.models.architectures import UnsupportedArchitecture
from ...inference.models.checkpoint_files import find_files, sample_checksum
from ...inference.models.decoder import position_limit
from ...inference.models.support import check_supported
from ...inference.models.target_source import faster_cpu_dtype, load_tokenizer, named_dtype, target_config
from ...inference.open_batch import OpenBatch
from ...inference.prompt_files import render_chat
from ...inference.sampling_params import SamplingParams
from ...inference.speculation.options import SpeculativeOptions
from ...inference.speculation.speculation import choose_speculation
from ...inference.threads import choose_threads
from .dialogue import REFUSED, TOO_LONG, Answer, Unanswerable


def describe_target(model, *, adapter, head, max_model_len, dtype, device):
    """({facts of the target that decide the answers}, name of the dtype that "auto" stands for), without loading its weights.

    Raises ValueError for a target that the engine does not run or that has no chat template, for an adapter that cannot be merged
    into it, and for a head of another target.
    """
    config, _ = target_config(model, "auto")
    try:
        check_supported(config)
    except UnsupportedArchitecture as error:
        raise ValueError(f"{error} Serve it with another engine and give its address: --endpoint URL") from None
    merged = choose_adapter(adapter, model, "auto", config)
    choose_speculation(SpeculativeOptions.parse(_speculation(head)), config, max_num_seqs=1)
    limit = position_limit(config)
    if max_model_len is not None and not 2 <= max_model_len <= limit:
        raise ValueError(f"--max-model-len must be from 2 to the model's own limit of {limit}, got {max_model_len}")
    tokenizer = load_tokenizer(None, model)
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{model} has no chat template: a conversation is answered through the one it was tuned with")
    used = named_dtype(dtype)
    if used is None and torch.device(device).type == "cpu":
        used = faster_cpu_dtype()
    elif used is None:
        used = getattr(config, "dtype", None) or torch.bfloat16
    template = zlib.crc32(str(tokenizer.chat_template).encode())
    facts = {"max_model_len": max_model_len or limit, "dtype": dtype, "chat_template_checksum": template}
    facts["adapter"] = merged and merged.fingerprint
    facts["weights_checksum"] = (
        sample_checksum(find_files(model)) if Path(model).is_dir() else None
    )  # a Hub id identifies its weights
    return facts, str(used).removeprefix("torch.")


def build_engine(model, *, adapter, head, max_model_len, dtype, device, concurrency):
    """An LLM for `answer_by_engine`. Sets the number of threads of the whole process (see choose_threads)."""
    choose_threads(target_config(model, "auto")[0], torch.device(device))
    return LLM(
        model,
        dtype=dtype,
        device=device,
        adapter=adapter,
        max_model_len=max_model_len,
        max_num_seqs=concurrency,
        speculative_config=_speculation(head),
    )


def answer_by_engine(llm, dialogues, sampling, concurrency, stop):
    """Yield each of `dialogues` (open ones) when it has ended, with `concurrency` in flight.

    sampling: SamplingParams of every turn, as a dict, without the seed. stop.requested: stop early.
    """
    waiting = iter(dialogues)
    with OpenBatch(llm) as batch:
        ready = []  # dialogues whose prompt is to be added
        while not stop.requested:
            ready += [one for _, one in zip(range(concurrency - len(batch) - len(ready)), waiting)]
            if not ready and not batch:
                return
            for dialogue in ready:
                try:
                    prompt = _tokenize(llm, dialogue.prompt)
                except Unanswerable as error:
                    dialogue.end(error.reason, str(error))
                    yield dialogue
                else:
                    batch.add(prompt, SamplingParams(**sampling, seed=dialogue.next_seed), tag=dialogue)
            ready = []
            for dialogue, output in batch.step() if batch else ():
                (one,) = output.outputs
                spec = one.spec_decode_metrics
                counts = (len(one.token_ids), spec.num_steps, spec.num_accepted_tokens)
                dialogue.take(Answer(one.text, one.finish_reason, *counts))
                if dialogue.is_open:
                    ready.append(dialogue)
                else:
                    yield dialogue


def _speculation(head):
    """speculative_config for many requests at once: adaptive depth. At any depth the answers are those of plain decoding."""
    return {"model": head, "tree": "chain", "adaptive": True} if head else None


def _tokenize(llm, messages):
    """The prompt of a dialogue as token ids. Raises Unanswerable if the template refuses it, or if it leaves no room."""
    try:
        text = render_chat(llm.tokenizer, messages)
    except ValueError as error:
        raise Unanswerable(REFUSED, str(error)) from None
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes its own special tokens
    if len(ids) >= llm.max_model_len:
        raise Unanswerable(TOO_LONG, f"{len(ids)} tokens leave no room within {llm.max_model_len}")
    return ids
