"""Train Medusa heads (heads/medusa.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/medusa.py --config configs/quickstart.yaml
    accelerate launch train/medusa.py --config configs/medusa.yaml --target ORG/MODEL --data conversations.jsonl --lr 5e-4
    accelerate launch train/medusa.py --config configs/quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the target's features -> K heads -> loss against the target's law or
the text, summed and divided by the number of labels of the whole optimiser step. `--help` lists every key. A run writes only
into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, head/.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: train the target (Medusa-2), mix several data sets.
"""

import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.acceptance import AcceptanceMeter, choose_held_out
from headstart.train.data import load_conversations
from headstart.train.distillation import Objective, accumulate_gradients, find_labels, summarize
from headstart.train.features import FrozenTarget, cache_features, load_target
from headstart.train.losses import Loss
from headstart.train.optimization import NonFiniteLoss, build_optimizer, finish_step
from headstart.train.predictions import medusa_predictions
from headstart.train.recipe import key, parse_recipe
from headstart.train.rows import (
    build_rows,
    choose_documents,
    describe_non_finite,
    fingerprint,
    row_of_many_documents,
    rows_of_step,
    select_rows,
)
from headstart.train.run_folder import RunFolder, start_processes
from headstart.train.run_recipe import CHANGEABLE, RunRecipe, is_due
from headstart.train.stopping import StopSignals, leave_group, leave_with_launcher
from headstart.train.tracking import Speedometer


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Everything a run is told: the keys of every trainer, and those of Medusa heads."""

    lk_eta: float = key(10.0, "of lk: the larger, the sooner the rate of acceptance takes over from kl", least=0)
    num_heads: int = key(4, "heads; head k (from 0) predicts the token k + 2 places ahead", least=1)
    num_layers: int = key(1, "residual blocks per head", least=1)
    shared_lm_head: bool = key(False, "heads end in the target's lm_head instead of one of their own")
    head_weight_decay: float = key(0.8, "head k's loss counts this to the power k", least=0)

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.head_weight_decay**k for k in range(self.num_heads)])


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    accelerator, note, resumed = start_processes(recipe, "medusa")
    device, main_rank = accelerator.device, accelerator.is_main_process

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    conversations = load_conversations(recipe.data)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts
    )
    documents = choose_documents(tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    shape = (target.hidden_size, target.vocab_size, recipe.num_heads, recipe.num_layers, recipe.shared_lm_head)
    head = Medusa(MedusaConfig(*shape, base_model_name_or_path=recipe.target)).to(device)
    target.initialize(head)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)

    def predict(features, input_ids, position_ids, document_ids):
        return medusa_predictions(head, features, target.lm_head.weight)

    # The engine is built before any feature is trained on: it packs the target's weights, and packed products may differ from
    # separate ones in the last bit, which a resumed run must not see.
    meter = None
    if held_out:
        options = {"max_tokens": recipe.eval_tokens, "max_length": min(longest, 2 * recipe.row_length)}
        meter = AcceptanceMeter(target, tokenizer, head, predict, held_out, recipe.chunk_tokens, note, **options)
    rows_per_step = recipe.batch_rows * recipe.accumulate * accelerator.num_processes
    num_steps = recipe.num_updates(len(labels_per_row), rows_per_step)
    rows = {"rows": fingerprint(packed), "rows_per_step": rows_per_step}

    # From here on the run folder exists, and a signal leaves a run that resumes.
    with (
        StopSignals() as stop,
        RunFolder(recipe, resumed, CHANGEABLE, rows, head, optimizer, target, accelerator, note) as run,
        tqdm(total=num_steps, initial=run.step, desc="training", unit="step", disable=not main_rank) as bar,
    ):
        run.keep_held_out(held_out)
        cache = None
        if recipe.cache_features and run.step < num_steps:
            cache = cache_features(run, recipe, target, packed, stop)
            if cache is None:
                run.save(head, optimizer)
                return run.leave_early(stop)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16")
        tokens_per_row = (packed.document_ids >= 0).sum(1).numpy()  # [R]
        speed = Speedometer(run.tokens)

        while True:
            # Once in a while: measure, save, leave. It comes first, so that a resumed run makes up for what was due.
            step, stopping = run.step, stop.agreed(accelerator)
            if meter and is_due(step, num_steps, recipe.eval_every) and not stopping:
                run.measure(meter)
                speed.start(run.tokens)
            if stopping or is_due(step, num_steps, recipe.checkpoint_every):
                run.save(head, optimizer)
            if stopping:
                return run.leave_early(stop)
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
                *batch, supervised = select_rows(packed, index, device)  # [B, T] each
                features = cache.rows(index, device) if cache else target.features(*batch)  # [B, T, H]
                input_ids, _, document_ids = batch
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_heads)
                projection = (target.lm_head, recipe.objective, num_labels, recipe.chunk_tokens)
                with autocast:
                    predictions = predict(features, *batch)
                    share = accumulate_gradients(predictions, features.flatten(0, 1), labels, *projection, logs)
                fed.append(index.tolist())
                shares.append(share)  # [K, 4]

            # The ranks' shares add up; a number that is not finite stops the run before it reaches the weights.
            lr = recipe.learning_rate(step, num_steps)
            with describe_non_finite(step, packed, fed, tokenizer):
                totals, grad_norm = finish_step(head, optimizer, shares, accelerator, lr, recipe.max_grad_norm)

            run.advance(int(tokens_per_row[rows].sum()))
            bar.update()
            if logs:
                figures = summarize(totals, recipe.objective, num_labels) | {"lr": lr, "grad_norm": grad_norm}
                run.record_step(figures, speed, bar)
        run.finish(head)
    return 0


if __name__ == "__main__":
    leave_with_launcher()
    try:
        status = main(sys.argv[1:])
        leave_group()
    except (ValueError, OSError, NonFiniteLoss) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
