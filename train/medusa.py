"""Train Medusa heads (heads/medusa.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/medusa.py --config configs/quickstart.yaml
    accelerate launch train/medusa.py --config configs/medusa.yaml --target ORG/MODEL --data conversations.jsonl --lr 5e-4
    accelerate launch train/medusa.py --config configs/quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the target's features -> K heads -> loss against the target's law or
the text, summed and divided by the number of labels of the whole optimiser step. `--help` lists every key. A run writes only
into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, head/.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: train the target (Medusa-2), shard heads over ranks, mix several data sets.
"""

import contextlib
import math
import signal
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from tqdm import tqdm

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.acceptance import AcceptanceMeter, choose_held_out
from headstart.train.checkpointing import (
    check_output,
    check_same_run,
    choose_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
    save_final_head,
)
from headstart.train.data import BUILT_IN, load_conversations, write_conversations
from headstart.train.distillation import Objective, accumulate_gradients, find_labels, medusa_predictions, summarize
from headstart.train.features import FeatureCache, FrozenTarget, load_target
from headstart.train.losses import LOSSES, Loss
from headstart.train.optimization import build_optimizer, choose_autocast, sum_gradients, update, warmup_cosine
from headstart.train.recipe import check_values, key, parse_recipe, resolved_values, save_recipe
from headstart.train.rows import (
    build_rows,
    describe_rows,
    fingerprint,
    row_of_many_documents,
    rows_of_step,
    select_rows,
)
from headstart.train.stopping import StopSignals, leave_with_launcher
from headstart.train.tracking import TRACKERS, MetricsFile, Speedometer, WandbTracker, has_wandb, write_json


@dataclass(frozen=True)
class Recipe:
    """Everything a run is told. Fields are the keys of the config file and of the command line."""

    target: str = key(MISSING, "the frozen model: a folder or Hub id of any AutoModelForCausalLM")
    data: str = key(
        MISSING,
        "conversations: stdlib, installed (Python source here), a .json/.jsonl file, a `datasets` name or folder",
    )
    output: str = key(MISSING, "the run folder, e.g. runs/first; it must be new unless the run is resumed")
    target_dtype: str = key(
        "auto", "its weights; auto: bfloat16 on a GPU, float32 on the CPU", choices=("auto", "float32", "bfloat16")
    )
    resume: bool = key(False, "go on from the newest checkpoint in `output`")
    resume_from: str = key("", "go on from this checkpoint folder instead")
    seed: int = key(0, "of the order of the rows and of every random generator", least=0)
    max_tokens: int = key(
        0, "use at most so many tokens of the data, whole conversations picked at random; 0: all", least=0
    )
    row_length: int = key(1024, "tokens per packed row; a longer conversation loses its end", least=4)
    num_heads: int = key(4, "heads; head k (from 0) predicts the token k + 2 places ahead", least=1)
    num_layers: int = key(1, "residual blocks per head", least=1)
    shared_lm_head: bool = key(False, "heads end in the target's lm_head instead of one of their own")
    loss: str = key(
        "kl",
        "hard: cross entropy against the text; kl: forward KL from the target's law; lk: from kl over to the rate of acceptance "
        "(arXiv 2602.23881); lk-log: minus its logarithm",
        choices=LOSSES,
    )
    lk_eta: float = key(10.0, "of lk: the larger, the sooner the rate of acceptance takes over from kl", least=0)
    head_weight_decay: float = key(0.8, "head k's loss counts this to the power k", least=0)
    lr: float = key(1e-3, "peak learning rate of AdamW", least=0)
    warmup_ratio: float = key(
        0.1, "part of the steps in which the rate rises; then it falls as a cosine", least=0, most=1
    )
    min_lr_ratio: float = key(0.0, "the learning rate ends at this part of its peak", least=0, most=1)
    weight_decay: float = key(0.0, "AdamW's, on matrices (biases have none)", least=0)
    beta1: float = key(0.9, "AdamW's decay of the gradient's mean", least=0, most=0.99999)
    beta2: float = key(0.999, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(1.0, "longer gradients are cut to this norm; 0: never", least=0)
    batch_rows: int = key(4, "rows per device and micro-step", least=1)
    accumulate: int = key(1, "micro-steps per optimiser step", least=1)
    num_epochs: float = key(1.0, "passes over the rows, where max_steps is 0", least=0)
    max_steps: int = key(0, "optimiser steps; 0: num_epochs decides", least=0)
    chunk_tokens: int = key(1024, "labels projected to the vocabulary at once: bounds the memory", least=1)
    autocast: str = key(
        "auto",
        "bf16: heads multiply in bfloat16; no: in fp32; auto: bf16 on a GPU, on the CPU whichever is measured faster",
        choices=("auto", "no", "bf16"),
    )
    cache_features: bool = key(False, "compute the target's features once for all rows, in a file of the run folder")
    cache_dtype: str = key("auto", "of that file; auto: the target's", choices=("auto", "float32", "bfloat16"))
    log_every: int = key(10, "steps between lines of metrics.jsonl; a line describes its own step", least=1)
    eval_every: int = key(200, "steps between measurements of the acceptance; 0: at the end only", least=0)
    eval_prompts: int = key(16, "held-out conversations to measure it on; 0: never", least=0)
    eval_tokens: int = key(96, "new tokens per prompt", least=2)
    eval_data: str = key(
        "", "where they come from; empty: for stdlib the target's heldout.jsonl, else taken out of the data"
    )
    checkpoint_every: int = key(200, "steps between checkpoints; 0: at the end only", least=0)
    keep_checkpoints: int = key(2, "how many of the newest checkpoints stay", least=1)
    tracker: str = key(
        "wandb",
        "wandb (online if logged in, else offline in the run folder) or none, beside metrics.jsonl",
        choices=TRACKERS,
    )

    def __post_init__(self):
        check_values(self)

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.head_weight_decay**k for k in range(self.num_heads)])

    @property
    def checkpoint_to_resume(self):
        """Folder, or None for a run that starts."""
        going_on = self.resume or self.resume_from
        return choose_checkpoint(self.output, self.resume_from) if going_on else None

    def num_steps(self, num_rows, rows_per_step):
        return self.max_steps or math.ceil(self.num_epochs * num_rows / rows_per_step)

    def learning_rate(self, step, num_steps):
        return warmup_cosine(step, num_steps, self.lr, self.warmup_ratio, self.min_lr_ratio)


# What a resumed run may be told anew; anything else would make it another run.
CHANGEABLE = {"output", "max_steps", "num_epochs", "log_every", "tracker", "checkpoint_every"}
CHANGEABLE |= {"keep_checkpoints", "eval_every", "eval_tokens", "eval_data"}


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is not finite; no optimiser step was made with it."""


def is_due(step, num_steps, every):
    """Is something due after `step` steps that comes every so many (0: never) and at the end?"""
    return step == num_steps or (every > 0 and step > 0 and step % every == 0)


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    run = Path(recipe.output)
    check_output(run, recipe.resume, recipe.resume_from)
    resumed = recipe.checkpoint_to_resume
    tracked = recipe.tracker == "wandb" and has_wandb()
    accelerator = Accelerator(mixed_precision="no", log_with="wandb" if tracked else None)
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise ValueError(
            f"accelerate is set up for {accelerator.distributed_type}; this script runs as plain processes"
        )
    device, main_rank = accelerator.device, accelerator.is_main_process

    def note(text):
        if main_rank:
            tqdm.write(f"[medusa] {text}", file=sys.stderr)

    if recipe.tracker == "wandb" and not tracked:
        note("wandb is not installed: figures go to metrics.jsonl only")
    if recipe.resume and not resumed:
        note(f"{run} was stopped before its first checkpoint: starting from step 0")
    set_seed(recipe.seed)

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    conversations = load_conversations(recipe.data)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts
    )
    packed, labels_per_row = build_rows(
        tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed, note
    )
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    shape = (target.hidden_size, target.vocab_size, recipe.num_heads, recipe.num_layers, recipe.shared_lm_head)
    head = Medusa(MedusaConfig(*shape, base_model_name_or_path=recipe.target)).to(device)
    target.initialize(head)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)
    # The engine is built before any feature is trained on: it packs the target's weights, and packed products may differ from
    # separate ones in the last bit, which a resumed run must not see.
    meter = None
    if held_out:
        options = {"max_tokens": recipe.eval_tokens, "max_length": min(longest, 2 * recipe.row_length)}
        meter = AcceptanceMeter(target, tokenizer, head, held_out, recipe.chunk_tokens, note, **options)
    rows_per_step = recipe.batch_rows * recipe.accumulate * accelerator.num_processes
    num_steps = recipe.num_steps(len(labels_per_row), rows_per_step)

    with StopSignals() as stop, contextlib.ExitStack() as closing:
        # The run folder: from here on it exists, and a signal leaves a run that resumes.
        state = {"step": 0, "tokens": 0, "rows": fingerprint(packed), "rows_per_step": rows_per_step}
        if resumed and recipe.autocast == "auto":  # what was measured when the run was started
            precision = read_state(resumed)["recipe"]["autocast"]
        else:
            precision = choose_autocast(recipe.autocast, target.hidden_size, target.vocab_size, device)
        state["recipe"] = resolved_values(recipe) | {"autocast": precision, "resume": False, "resume_from": ""}
        if resumed:
            state = check_same_run(read_state(resumed), state, CHANGEABLE, note)
            load_checkpoint(resumed, head, optimizer, accelerator)
            note(f"going on from {resumed}, after step {state['step']}")
        if main_rank:
            run.mkdir(parents=True, exist_ok=True)
            save_recipe(state["recipe"], run / "config.yaml")
            if held_out and recipe.data not in BUILT_IN:
                write_conversations(run / "heldout.jsonl", held_out)  # `headstart tree RUN` measures on them
        accelerator.wait_for_everyone()
        metrics = MetricsFile(run / "metrics.jsonl" if main_rank else None)
        metrics.truncate_after(state["step"] if resumed else -1)
        curves = WandbTracker(accelerator if tracked and main_rank else None, run, state["recipe"], note)
        closing.callback(curves.close)

        def record(line):
            metrics.write(line)
            curves.log(line)

        def save():
            save_checkpoint(run, state["step"], head, optimizer, state, accelerator, recipe.keep_checkpoints)

        def describe(fed):
            if not fed:
                return "another rank says what it was fed"
            return f"this process was fed {describe_rows(packed, [row for rows in fed for row in rows], tokenizer)}"

        def leave_early():
            note(
                f"stopped by signal {stop.requested} after step {state['step']}; go on with --config {run / 'config.yaml'} --resume"
            )
            return 128 + (stop.requested or signal.SIGTERM)

        def measure():
            measured = meter.measure()
            if measured:
                names = ("acceptance_length", "per_position", "num_steps", "source")
                record({"step": state["step"], "kind": "acceptance"} | {name: measured[name] for name in names})
                positions = " ".join(f"{share:.2f}" for share in measured["per_position"])
                how = "" if measured["source"] == "engine" else ", teacher-forced"
                note(
                    f"step {state['step']}: {measured['acceptance_length']:.2f} tokens per step on held-out prompts{how}; "
                    f"accepted by position {positions}"
                )
                write_json(run / "acceptance.json", {"step": state["step"], **measured})
                curves.log_acceptance(state["step"], measured["per_position"], measured["samples"])

        cache = None
        if recipe.cache_features and state["step"] < num_steps:
            dtype = target.dtype if recipe.cache_dtype == "auto" else getattr(torch, recipe.cache_dtype)
            cache = FeatureCache(run, *packed.input_ids.shape, target.hidden_size, dtype, accelerator, note)
            if not cache.fill(target, packed, recipe.batch_rows, accelerator, stop):
                if not resumed:
                    save()
                return leave_early()
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        tokens_per_row = (packed.document_ids >= 0).sum(1).numpy()  # [R]
        bar = tqdm(total=num_steps, initial=state["step"], desc="training", unit="step", disable=not main_rank)
        closing.callback(bar.close)
        speed, saved_step = Speedometer(state["tokens"]), state["step"] if resumed else -1

        while True:
            # Once in a while: measure, save, leave. It comes first, so that a resumed run makes up for what was due.
            step, stopping = state["step"], stop.agreed(accelerator)
            if meter and is_due(step, num_steps, recipe.eval_every) and not stopping:
                if main_rank and not metrics.has("acceptance", step):
                    measure()
                accelerator.wait_for_everyone()
                speed.start(state["tokens"])
            if (stopping or is_due(step, num_steps, recipe.checkpoint_every)) and step != saved_step:
                save()
            if stopping:
                return leave_early()
            if step == num_steps:
                break

            # Forward and backward. The divisor is the whole step's, over all micro-steps and ranks, known beforehand.
            rows = rows_of_step(step, rows_per_step, len(labels_per_row), recipe.seed)
            logs = is_due(step + 1, num_steps, recipe.log_every)
            num_labels = int(labels_per_row[rows].sum())
            fed, shares = [], []
            for micro in range(recipe.accumulate):
                first = (micro * accelerator.num_processes + accelerator.process_index) * recipe.batch_rows
                index = rows[first : first + recipe.batch_rows]
                input_ids, position_ids, document_ids, supervised = select_rows(packed, index, device)  # [B, T]
                if cache:
                    features = cache.rows(index, device)  # [B, T, H]
                else:
                    features = target.features(input_ids, position_ids, document_ids)
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_heads)
                projection = (target.lm_head, recipe.objective, num_labels, recipe.chunk_tokens)
                features = features.flatten(0, 1)  # [B T, H]
                with autocast:
                    predictions = medusa_predictions(head, features, target.lm_head.weight)
                    share = accumulate_gradients(predictions, features, labels, *projection, with_hits=logs)
                fed.append(index.tolist())
                shares.append(share)  # [K, 4]

            # The ranks' shares add up; a number that is not finite stops the run before it reaches the weights.
            totals = accelerator.reduce(sum(shares), "sum")
            sum_gradients(accelerator, head)
            if not totals[:, 0].isfinite().all():
                bad = [one for one, share in zip(fed, shares) if not share[:, 0].isfinite().all()]
                raise NonFiniteLoss(f"the loss of step {step + 1} is not finite; {describe(bad)}")
            lr = recipe.learning_rate(step, num_steps)
            grad_norm = update(head, optimizer, lr, recipe.max_grad_norm)
            if not math.isfinite(grad_norm):
                raise NonFiniteLoss(f"the gradient of step {step + 1} is not finite; {describe(fed)}")

            state["step"], state["tokens"] = step + 1, state["tokens"] + int(tokens_per_row[rows].sum())
            bar.update()
            if logs:
                line = summarize(totals, recipe.objective, num_labels)
                line |= {"lr": lr, "grad_norm": grad_norm, "tokens": state["tokens"]}
                line |= {"tokens_per_second": speed.read(state["tokens"])}
                record({"step": step + 1, "kind": "train"} | line)
                bar.set_postfix_str(
                    f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s", refresh=False
                )

        if main_rank:
            save_final_head(head, run)
        note(f"done: {run / 'head'} after {num_steps} steps; next: headstart tree {run}, heads.export {run}")
    return 0


if __name__ == "__main__":
    leave_with_launcher()
    try:
        status = main(sys.argv[1:])
    except (ValueError, OSError, NonFiniteLoss) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
