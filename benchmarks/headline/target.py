"""The first stage: a chat target trained from scratch; and the draft model, which is trained in the same way on less.

The training is that of assets/make/make_stdlib_coder.py: Muon for the matrices, AdamW for the rest, bf16, packed rows with
attention inside each document, torch.compile on a GPU; the clock decides the number of steps. What is saved is an ordinary Llama
folder of transformers with a chat template whose markers tell what is supervised.
"""

import shutil
import time
from types import SimpleNamespace

import torch
from transformers import PreTrainedTokenizerFast

from ...evaluation.compare import hardware_name
from ...evaluation.timing import release
from ...heads.storage.atomic_write import staged_folder
from ...train.data.conversations import load_conversations
from ...train.data.packed.packing import PackedRows, pack
from .corpus import SUBJECTS, build_corpus, measure_size

DRAFT_FINAL = 0.5  # share of the draft model's time, at its end, that sees the target's answers alone


def load_make():
    """The modules of assets/make. They are in a checkout and not in an installed package: ValueError there."""
    try:
        from ...assets.make import make_stdlib_coder, target_corpus
    except ImportError as error:
        raise ValueError(f"the headline needs a checkout, with its folder assets/make ({error})") from error
    return SimpleNamespace(run=make_stdlib_coder, corpus=target_corpus)


def train_target(settings, work, device):
    """Train the target, save it, keep its figures."""
    make = load_make()
    began = time.perf_counter()
    print("reading source and mathematics, training the tokenizer ...", flush=True)
    corpus = build_corpus(settings, work, make)
    seconds = time.perf_counter() - began
    print(f"{corpus.num_pairs:,} pairs in {len(corpus.first.input_ids):,} rows, {seconds:.0f} s", flush=True)
    size = settings.architecture(settings.width, settings.layers)
    recipe = make_recipe(make, settings, device, size, settings.target_minutes)
    figures = train_model(make, recipe, corpus, work.target)
    work.keep("target", "all", figures | {"corpus_seconds": round(seconds), "packages": len(corpus.sources)})


def train_draft(settings, work, device):
    """Train a smaller model: half of its time on the target's corpus, then on the target's answers."""
    make = load_make()
    work.needs("answers")
    kept = torch.load(work.rows)
    first = PackedRows(kept["input_ids"], kept["input_ids"][:, :0], kept["document_ids"], kept["supervised"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work.target).backend_tokenizer
    pairs = read_pairs(work.answers)
    answers = pack(make.corpus.encode(tokenizer, pairs), settings.row_length)
    heldout = {
        subject: measure_size(read_pairs(work.heldout(subject)), tokenizer, settings, make) for subject in SUBJECTS
    }
    corpus = make.corpus.Corpus(tokenizer, first, answers, len(pairs), heldout, [], [])
    size = settings.architecture(settings.draft_width, settings.draft_layers)
    recipe = make_recipe(make, settings, device, size, settings.head_minutes, final_documented=DRAFT_FINAL)
    figures = train_model(make, recipe, corpus, work.draft)
    work.keep("heads", "draft-model", figures | {"steps": figures["training"]["num_steps"]})


def read_pairs(path):
    """The first request and the last answer of each conversation of a file."""
    return [
        SimpleNamespace(prompt=messages[0]["content"], answer=messages[-1]["content"])
        for messages in load_conversations(str(path), with_fields=False)
    ]


def make_recipe(make, settings, device, size, minutes, final_documented=0.0):
    """The recipe of assets/make for a model.  size: of Settings.architecture"""
    return make.run.TargetRecipe(
        output="",
        seconds=60 * minutes,
        device=device.type,
        seed=settings.seed,
        row_length=settings.row_length,
        batch_rows=settings.target_rows,
        final_documented=final_documented,
        # The width of 256 that assets/make is tuned for takes 0.01; a wider tied embedding takes less.
        learning_rate=0.01 * (256 / size["hidden_size"]) ** 0.5,
        warmup_steps=100 if device.type == "cuda" else 5,
        **size,
    )


def train_model(make, recipe, corpus, folder):
    """Train as the recipe says, save into the folder.  -> the figures, on the weights as they are saved"""
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed before its figures were written
    minutes = recipe.seconds / 60
    print(f"training for {minutes:.2f} minutes after the compilation, to {folder.name} ...", flush=True)
    run, training = make.run.train(recipe, corpus)
    with torch.no_grad():  # measure what is saved: the weights rounded to bf16
        for parameter in run.model.parameters():
            parameter.copy_(parameter.bfloat16())
    bits = {name: run.measure(group, recipe.batch_rows) for name, group in corpus.heldout.items()}
    with staged_folder(folder) as place:
        make.run.save(run, corpus, place)
    said = ", ".join(f"{name} {found['answer_bits_per_byte']:.3f}" for name, found in bits.items())
    print(
        f"{training['num_parameters'] / 1e6:.1f} M parameters, {training['num_steps']} steps, {training['passes']:.1f} passes, "
        f"{training['tokens_per_second'] / 1e6:.2f} M tokens/s; held-out bits per byte of answers: {said}",
        flush=True,
    )
    device = run.device
    del run
    torch._dynamo.reset()  # the compiled losses hold the model
    release(device)
    return {"bits_per_byte": bits, "training": training, "hardware": hardware_name(device)}
