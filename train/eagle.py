"""Train an EAGLE-1 / EAGLE-2 head (heads/eagle.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/eagle.py --config configs/eagle-quickstart.yaml
    accelerate launch train/eagle.py --config configs/eagle.yaml --target ORG/MODEL --data conversations.jsonl --lr 1e-4
    accelerate launch train/eagle.py --config configs/eagle-quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the target's last features, with noise -> the next feature -> its
distance from the target's own, and the loss of its token against the target's law or the text, summed and divided by the number of
labels of the whole optimiser step. With num_steps above 1 further steps run on the head's own states, as it drafts (HASS, arXiv
2408.15766). `--help` lists every key. A run writes only into its `output` folder: config.yaml, metrics.jsonl, checkpoints/,
acceptance.json, head/; and into `feature_cache`, if that is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: train the embedding or the lm_head, which are the target's; mix data sets.
"""

from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.train.data.conversations import load_conversations
from headstart.train.data.held_out import choose_held_out
from headstart.train.data.rows import (
    build_rows,
    choose_documents,
    deal_rows,
    describe_non_finite,
    fingerprint,
    row_of_many_documents,
    rows_of_step,
    select_rows,
)
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import AcceptanceMeter
from headstart.train.run.optimization import build_optimizer, finish_step
from headstart.train.run.recipe import key, parse_recipe
from headstart.train.run.run_folder import RunFolder, start_processes
from headstart.train.run.run_recipe import CHANGEABLE, RunRecipe, is_due
from headstart.train.run.stopping import StopSignals, run_script
from headstart.train.run.tracking import Speedometer
from headstart.train.teacher.feature_cache import cache_features
from headstart.train.teacher.features import FrozenTarget, load_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Everything a run is told: the keys of every trainer, and those of EAGLE heads."""

    lr: float = key(3e-5, "peak learning rate of AdamW", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(0.0, "longer gradients are cut to this norm; 0: never", least=0)
    max_grad_value: float = key(0.5, "every entry of the gradient is cut to plus or minus this; 0: never", least=0)
    feature_weight: float = key(1.0, "weight of the smooth L1 distance from the target's next feature", least=0)
    token_weight: float = key(0.1, "weight of the token's loss, HASS's term included", least=0)
    hass_weight: float = key(
        0.0, "beside it, a cross entropy over the target's likeliest tokens alone (HASS) counts this much", least=0
    )
    hass_top: int = key(10, "how many tokens that are", least=1)
    noise: float = key(
        0.2, "width of the uniform noise on the features in a document of 512 tokens; less in longer ones", least=0
    )
    num_steps: int = key(1, "steps, all but the first on the head's own states (HASS); 1: EAGLE", least=1, most=8)
    step_decay: float = key(1.0, "step i's loss (from 0) counts this to the power i", least=0)
    num_speculative_tokens: int = key(
        5, "how deep the head drafts unless told otherwise, and is measured", least=1, most=8
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_grad_norm and self.max_grad_value:
            raise ValueError(
                f"max_grad_norm {self.max_grad_norm} and max_grad_value {self.max_grad_value} both cut the gradient: set one to 0"
            )
        if not self.feature_weight and not self.token_weight:
            raise ValueError("feature_weight and token_weight are both 0: nothing would be learned")

    @property
    def objective(self):
        loss = Loss(self.loss, self.lk_eta, self.hass_weight, self.hass_top)
        weights = [self.step_decay**i for i in range(self.num_steps)]
        return Objective(loss, weights, self.token_weight, self.feature_weight)


def add_noise(features, document_ids, width, seeds):
    """Features [B, T, H] with uniform noise of up to +- width / 2 * 512 / (tokens of the document), drawn per row from its seed.

    document_ids [B, T]; seeds: list of B. A row's noise does not depend on what it is batched with.
    """
    lengths = (document_ids[:, :, None] == document_ids[:, None]).sum(-1, keepdim=True)  # [B, T, 1]
    draws = []
    for seed in seeds:
        generator = torch.Generator(features.device).manual_seed(seed)
        draws.append(torch.rand(features.shape[1:], generator=generator, device=features.device))
    return features + (torch.stack(draws) - 0.5) * (width * 512 / lengths)


def noise_seeds(seed, step, places):
    """One seed per place in the rows of an optimiser step (list of int)."""
    return [int(np.random.SeedSequence((seed, step, place)).generate_state(1, np.uint64)[0]) for place in places]


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    accelerator, note, resumed = start_processes(recipe, "eagle")
    device, main_rank = accelerator.device, accelerator.is_main_process

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    if target.lm_head.bias is not None:
        raise ValueError(
            "the target's lm_head has a bias, which EAGLE heads, that end in it, cannot use: train Medusa heads"
        )
    named = {"base_model_name_or_path": recipe.target, "num_speculative_tokens": recipe.num_speculative_tokens}
    config = target.layer_config(EagleConfig, **named)
    conversations = load_conversations(recipe.data, note=note)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts, note
    )
    documents = choose_documents(tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    head = Eagle(config)
    target.initialize(head)
    head.to(device)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)

    def predict(features, *batch, num_steps=recipe.num_speculative_tokens):
        return head.predict(features, *batch, target.lm_head.weight, num_steps)

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
        RunFolder(recipe, resumed, CHANGEABLE, rows, num_steps, head, optimizer, target, accelerator, note) as run,
        tqdm(total=num_steps, initial=run.step, desc="training", unit="step", disable=not main_rank) as bar,
    ):
        run.keep_held_out(held_out)
        cache = None
        if recipe.cache_features and run.step < num_steps:
            cache = cache_features(run, recipe, target, packed, stop)
            if cache is None:
                run.save(head, optimizer)
                return run.leave_early(stop)
            bar.unpause()  # steps take what steps take, not what the features took

        def make_ready(index):
            parts = select_rows(packed, index, device)
            return *parts, cache.rows(index, device) if cache else target.features(*parts[:3])

        order = deal_rows(range(run.step, num_steps), len(labels_per_row), recipe, accelerator)
        batches = ((index, *make_ready(index)) for index in order)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16")
        tokens_per_row = (packed.document_ids >= 0).sum(1).numpy()  # [R]
        objective = recipe.objective.at(run.rates)
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
                index, *batch, supervised, features = next(batches)  # [B], [B, T] each, [B, T, H]
                input_ids, _, document_ids = batch
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_steps)
                projection = (target.lm_head, objective, num_labels, recipe.chunk_tokens)
                noisy = features
                if recipe.noise:
                    seeds = noise_seeds(recipe.seed, step, range(first, first + len(index)))
                    noisy = add_noise(features, document_ids, recipe.noise, seeds)
                with autocast:
                    predictions = predict(noisy, *batch, num_steps=recipe.num_steps)
                    share = accumulate_gradients(predictions, features.flatten(0, 1), labels, *projection, logs)
                fed.append(index.tolist())
                shares.append(share)  # [K, 5 or 6]

            # The ranks' shares add up; a number that is not finite stops the run before it reaches the weights.
            lr = recipe.learning_rate(step, num_steps)
            with describe_non_finite(step, packed, fed, tokenizer):
                totals, grad_norm = finish_step(
                    head, optimizer, shares, accelerator, lr, recipe.max_grad_norm, recipe.max_grad_value
                )

            objective = objective.after(totals)
            run.advance(int(tokens_per_row[rows].sum()), objective.rates)
            bar.update()
            if logs:
                figures = summarize(totals, objective, num_labels) | {"lr": lr, "grad_norm": grad_norm}
                run.record_step(figures, speed, bar)
        run.finish(head)
    return 0


if __name__ == "__main__":
    run_script(main)
