"""Make the embedded target: a small Llama that answers "Write the Python function ..." requests, trained from scratch.

    python assets/make/make_stdlib_coder.py --output my-target          one GPU, about ten minutes
    python assets/make/make_stdlib_coder.py --output my-target --device cpu --seconds 60 --max_pairs 2000 ...          a trial

The data are the Python files on this machine: the standard library and the installed packages under permissive licences
(train/data/stdlib_pairs.py). Held-out modules are left out of the tokenizer, too. The result is a folder in Hugging Face
layout with a model card, the figures on held-out functions (recipe.json) and the held-out prompts (heldout.jsonl).
The clock decides the number of steps, so two runs give similar models, not equal bits.
"""

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from headstart.assets.make.target_card import write_card
from headstart.assets.make.target_corpus import CHAT_TEMPLATE, SPECIAL_TOKENS, Corpus, HeldOut, build_corpus
from headstart.heads.storage.user_errors import exit_status
from headstart.train.data.packed.packing import PackedRows, block_attention_mask
from headstart.train.data.stdlib_pairs import Pair
from headstart.train.run.muon import Muon


def option(default, help):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TargetRecipe:
    """All settings of the training. The recipe.json beside a model holds those it was made with."""

    output: str = option("assets/stdlib-coder", "new folder for the model; an existing one is never written to")
    seconds: float = option(420.0, "training time in seconds, without compilation and data")
    epochs: float = option(
        0.0, "stop after this number of passes over the pairs, if that comes before the time; 0: only the time counts"
    )
    device: str = option("cuda", "cuda, or cpu for a trial with a tiny model")
    workers: int = option(0, "processes that read source files; 0: one per CPU")
    seed: int = option(0, "seed of the weights and the order of rows")
    packages: bool = option(True, "read installed packages under permissive licences besides the standard library")
    further: bool = option(True, "train on undocumented and long functions, classes and tests of packages too")
    max_pairs: int = option(0, "number of training pairs, for trials; 0: all")
    # 0.15 gave seven passes over the documented pairs at the falling rate: they were learnt by heart, and the held-out
    # answers of the standard library went from 0.734 bits per byte to 0.816.
    final_documented: float = option(0.0, "share of the time, at its end, that sees only pairs with a docstring")
    prompt_weight: float = option(0.1, "weight of the loss on the request's tokens; the answer's tokens have weight 1")
    documents: bool = option(True, "keep attention inside each pair; otherwise rows are cut from one long text")
    row_length: int = option(1024, "tokens of a row")
    batch_rows: int = option(96, "rows of a step")
    optimizer: str = option("muon", "muon for the matrices and adamw for the rest, or adamw for all")
    learning_rate: float = option(0.01, "peak rate of adamw")
    matrix_learning_rate: float = option(0.02, "peak rate of muon")
    weight_decay: float = option(0.1, "decoupled, times the rate, on matrices")
    warmup_steps: int = option(200, "steps of linear warm-up")
    decay: float = option(0.6, "share of the time, at its end, in which the rate falls linearly to 2 % of its peak")
    hidden_size: int = option(256, "width")
    intermediate_size: int = option(704, "inner width of the MLPs")
    num_layers: int = option(8, "decoder layers")
    num_heads: int = option(8, "attention heads")
    num_kv_heads: int = option(4, "key and value heads")
    vocab_size: int = option(6144, "tokens of the byte-level BPE")
    compare: str = option("", "folder of an earlier run, whose figures the model card then shows beside this run's")

    def __post_init__(self):
        for name in ("seconds", "row_length", "batch_rows", "learning_rate", "hidden_size", "num_layers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("final_documented", "prompt_weight", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer {self.optimizer!r} does not exist; choose muon or adamw")
        if self.vocab_size < 300 or self.vocab_size > 2**15:
            raise ValueError(f"vocab_size {self.vocab_size} must lie between 300 and 32768")
        if self.row_length % 128:
            raise ValueError(f"row_length {self.row_length} must be a multiple of 128, the tile of the attention mask")

    def llama_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=2 * self.row_length,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=2,
        )


def token_losses(model, ids, mask):
    """Cross entropy of each token after the first, [B, T - 1] fp32."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        logits = F.linear(hidden[:, :-1], model.lm_head.weight)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


class Run:
    """A model on its device, with the compiled functions that training and measuring share."""

    def __init__(self, recipe: TargetRecipe):
        torch.manual_seed(recipe.seed)
        self.device = torch.device(recipe.device)
        on_gpu = self.device.type == "cuda"
        # FlexAttention skips the tiles between documents; on the CPU it has no backward.
        attention = "flex_attention" if on_gpu else "sdpa"
        self.model = LlamaForCausalLM._from_config(recipe.llama_config(), attn_implementation=attention).to(self.device)
        self.losses = torch.compile(token_losses) if on_gpu else token_losses

    def batch(self, rows: PackedRows, index, prompt_weight):
        """Losses [B, T - 1] of some rows, and the weights of the labels: 0 where a label begins another pair."""
        ids, documents = rows.input_ids[index].to(self.device).long(), rows.document_ids[index].to(self.device)
        supervised = rows.supervised[index].to(self.device)[:, 1:]
        inside = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        weights = torch.where(supervised, 1.0, prompt_weight) * inside
        return self.losses(self.model, ids, self.mask(documents)), weights

    def mask(self, documents):
        if self.device.type == "cpu":
            return block_attention_mask(documents)
        from torch.nn.attention.flex_attention import create_block_mask

        def same_document(b, h, q, k):
            return (q >= k) & (documents[b, q] == documents[b, k])

        return create_block_mask(same_document, len(documents), None, *documents.shape[1:] * 2, device=self.device)

    def measure(self, heldout: HeldOut, batch_rows: int) -> dict:
        """Bits per byte of the answers given their requests, of the whole texts, and nats per token of these.

        <|end|> is part of the answer's bits, and the special tokens of the whole text's; neither adds bytes.
        """
        answer = whole = tokens = 0.0
        for index in torch.arange(len(heldout.rows.input_ids)).split(batch_rows):
            # The last batch is filled with its own first rows, which do not count: shapes stay as compiled.
            index, count = torch.cat([index, index[:1].expand(batch_rows - len(index))]), len(index)
            losses, weights = self.batch(heldout.rows, index, 0.0)  # with gradients, as compiled for training
            losses = losses.detach()
            inside = heldout.rows.document_ids[index].to(self.device)
            inside = (inside[:, 1:] == inside[:, :-1]) & (inside[:, 1:] >= 0)
            answer += (losses * weights)[:count].sum().item()
            whole += (losses * inside)[:count].sum().item()
            tokens += inside[:count].sum().item()
        return {
            "answer_bits_per_byte": answer / heldout.answer_bytes / math.log(2),
            "whole_bits_per_byte": whole / heldout.whole_bytes / math.log(2),
            "whole_nats_per_token": whole / tokens,
            "num_functions": heldout.num_pairs,
        }


def train(recipe: TargetRecipe, corpus: Corpus) -> tuple[Run, dict]:
    """The trained run and its figures: steps, passes, speed, and a curve of ten points (held-out: the first group)."""
    run = Run(recipe)
    first, final = (on_device(rows, run.device) for rows in (corpus.first, corpus.final))
    matrices = [p for name, p in run.model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in run.model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices) if recipe.optimizer == "muon" else None
    if muon is None:
        others = list(run.model.parameters())
    decayed = [{"params": [p for p in others if p.ndim == 2], "weight_decay": recipe.weight_decay}]
    plain = [{"params": [p for p in others if p.ndim != 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decayed + plain, lr=recipe.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(recipe.seed)
    row_tokens = int((first.document_ids >= 0).sum()) / len(first.input_ids)
    limit = recipe.epochs * len(first.input_ids) or math.inf
    order = {id(rows): torch.empty(0, dtype=torch.int64) for rows in (first, final)}
    bar = tqdm(
        total=round(recipe.seconds), desc="training", unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total} s{postfix}"
    )
    step, recent, started, curve = 0, 0.0, None, []
    watched = next(iter(corpus.heldout.values()))
    while True:
        elapsed = time.monotonic() - started if started else 0.0
        progress = max(elapsed / recipe.seconds, step * recipe.batch_rows / limit)
        if progress >= 1:
            break
        if progress >= (len(curve) + 1) / 10:
            bits = run.measure(watched, recipe.batch_rows)["answer_bits_per_byte"]
            curve.append({"seconds": round(elapsed), "training_loss": recent, "heldout_answer_bits_per_byte": bits})
        rows = final if progress > 1 - recipe.final_documented else first
        if len(order[id(rows)]) < recipe.batch_rows:
            order[id(rows)] = torch.cat([order[id(rows)], torch.randperm(len(rows.input_ids), generator=generator)])
        index, order[id(rows)] = order[id(rows)][: recipe.batch_rows], order[id(rows)][recipe.batch_rows :]
        losses, weights = run.batch(rows, index.to(run.device), recipe.prompt_weight)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        rate = min(1, (step + 1) / recipe.warmup_steps) if recipe.warmup_steps else 1.0
        rate *= 0.02 + 0.98 * min(1, (1 - progress) / recipe.decay) if recipe.decay else 1.0
        if muon:
            muon.step(recipe.matrix_learning_rate * rate, recipe.weight_decay)
        for group in adamw.param_groups:
            group["lr"] = recipe.learning_rate * rate
        adamw.step()
        run.model.zero_grad(set_to_none=True)
        step += 1
        if started is None:  # the first step includes the compilation
            loss.item()
            started = time.monotonic()
        elif step % 50 == 0:
            recent = loss.item()
            if not math.isfinite(recent):
                raise ValueError(
                    f"the loss became {recent} at step {step} (gradient norm {norm.item()}); lower the rates"
                )
            elapsed = time.monotonic() - started
            bar.total = round(elapsed / max(progress, 1e-3)) if recipe.epochs else bar.total
            bar.n = min(round(elapsed), bar.total)
            speed = step * recipe.batch_rows * row_tokens / elapsed
            bar.set_postfix_str(f", step {step}, loss {recent:.3f}, {speed / 1e6:.2f}M tokens/s")
    seconds = time.monotonic() - started
    bar.close()
    return run, {
        "num_steps": step,
        "seconds": round(seconds),
        "num_pairs": corpus.num_pairs,
        "num_tokens": round(row_tokens * len(first.input_ids)),
        "passes": step * recipe.batch_rows / len(first.input_ids),
        "tokens_per_second": round(step * recipe.batch_rows * row_tokens / seconds),
        "training_loss": recent,
        "curve": curve,
        "num_parameters": sum(p.numel() for p in run.model.parameters()),
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else platform.machine(),
    }


def on_device(rows: PackedRows, device) -> PackedRows:
    """Move the rows to the device in small types: the whole corpus stays there."""
    return PackedRows(
        rows.input_ids.to(torch.int16).to(device),
        rows.position_ids[:0],  # attention inside a pair depends on distances alone
        rows.document_ids.to(torch.int32).to(device),
        rows.supervised.to(device),
    )


def save(run: Run, corpus: Corpus, folder: Path) -> None:
    """Write the model in bf16, the tokenizer with its chat template, and the held-out prompts."""
    run.model.bfloat16().save_pretrained(folder)
    run.model.generation_config.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=corpus.tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[2],
        additional_special_tokens=list(SPECIAL_TOKENS[:2]),
        model_max_length=run.model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    with open(folder / "heldout.jsonl", "w", encoding="utf-8") as file:
        for pair in corpus.heldout_pairs:
            file.write(json.dumps({"messages": pair.conversation(), "module": pair.module}, ensure_ascii=False) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone


def sample(folder: Path, pairs: list[Pair], device: str, num_samples: int = 4) -> list[tuple[str, str]]:
    """(request, greedy answer) of the saved model for some held-out functions."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = []
    for pair in pairs[:: max(1, len(pairs) // num_samples)][:num_samples]:
        inputs = tokenizer.apply_chat_template(
            pair.conversation()[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(device)
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        samples.append(
            (pair.prompt, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        )
    return samples


def parse_recipe(arguments: list[str] | None = None) -> TargetRecipe:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for f in fields(TargetRecipe):
        text = f"{f.metadata['help']} (default: {f.default!r})".replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type, "metavar": "X"}
        parser.add_argument(f"--{f.name}", default=f.default, help=text, **kind)
    return TargetRecipe(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> None:
    recipe = parse_recipe(arguments)
    output = Path(recipe.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"the output {output} exists and is not empty; name a new folder with --output")
    if recipe.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU was found; --device cpu runs a trial with a tiny model (see --help)")
    compared = None
    if recipe.compare:
        if not (Path(recipe.compare) / "recipe.json").is_file():
            raise ValueError(f"{recipe.compare} holds no recipe.json; --compare names the folder of an earlier run")
        compared = json.loads((Path(recipe.compare) / "recipe.json").read_text())
    aside = output.with_name(output.name + ".unfinished")
    try:  # before the long work: fails now if the place cannot be written
        output.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    except OSError as error:
        if aside.is_dir():
            raise ValueError(
                f"{aside} is left from a run that was killed, or another run writes it; remove it"
            ) from None
        raise ValueError(f"the output {output} cannot be written: {error.strerror or error}") from None
    try:
        transformers_logging.disable_progress_bar()
        began = time.monotonic()
        print("reading Python source ...", flush=True)
        corpus = build_corpus(recipe)
        held = sum(group.num_pairs for group in corpus.heldout.values())
        took = f"{time.monotonic() - began:.0f} s"
        print(
            f"{corpus.num_pairs} pairs to train on, {held} held out, {len(corpus.sources)} sources, {took}", flush=True
        )
        run, training = train(recipe, corpus)
        with torch.no_grad():  # measure the saved model: the weights rounded to bf16
            for parameter in run.model.parameters():
                parameter.copy_(parameter.bfloat16())
        figures = {name: run.measure(group, recipe.batch_rows) for name, group in corpus.heldout.items()}
        save(run, corpus, aside)
        settings = {name: value for name, value in asdict(recipe).items() if name not in ("output", "compare")}
        report = {"figures": figures, "training": training, "recipe": settings}
        (aside / "recipe.json").write_text(json.dumps(report, indent=2) + "\n")
        samples = sample(aside, corpus.heldout_pairs, recipe.device)
        changed = "".join(
            f" --{f.name} {getattr(recipe, f.name)}"
            for f in fields(recipe)
            if f.type is not bool and f.name not in ("output", "compare") and getattr(recipe, f.name) != f.default
        )
        write_card(aside, report, corpus.sources, samples, len(corpus.heldout_pairs), changed, compared)
        os.rename(aside, output)
    except BaseException:
        shutil.rmtree(aside)
        raise
    print(json.dumps({**figures, **training}))


if __name__ == "__main__":
    sys.exit(exit_status("make_stdlib_coder.py", main))
