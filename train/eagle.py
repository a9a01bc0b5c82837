"""Train an EAGLE-1 / EAGLE-2 head (heads/eagle.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/eagle.py --config configs/eagle-quickstart.yaml
    accelerate launch train/eagle.py --config configs/eagle.yaml --target ORG/MODEL --data conversations.jsonl --lr 1e-4
    accelerate launch train/eagle.py --config configs/eagle-quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the target's last features, with noise -> the next feature -> loss.
The loss is the feature's distance from the target's own and the loss of its token against the target's distribution or the text,
summed and divided by the number of labels of the whole optimiser step. With num_steps above 1 further steps run on the head's own
states, as in drafting (HASS, arXiv 2408.15766). `--help` lists every key. A run writes only into its `output` folder: config.yaml,
metrics.jsonl, checkpoints/, acceptance.json, best/, head/; and into `feature_cache`, if that is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. Not done here: training the embedding or the lm_head, which are the target's.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.loss.distillation import Objective, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer, wants_checkpointing
from headstart.train.run.recipe import key, parse_recipe
from headstart.train.run.run_folder import start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.run.start_head import load_layer_start, take_weights
from headstart.train.run.stopping import run_script
from headstart.train.teacher.features import FrozenTarget, load_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Settings of a run: the keys of every trainer, and those of EAGLE heads."""

    lr: float = key(3e-5, "peak learning rate of AdamW", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(0.0, "longer gradients are cut to this norm; 0: never", least=0)
    max_grad_value: float = key(0.5, "every entry of the gradient is cut to plus or minus this; 0: never", least=0)
    feature_weight: float = key(1.0, "weight of the smooth L1 distance from the target's next feature", least=0)
    token_weight: float = key(0.1, "weight of the token's loss, HASS's term included", least=0)
    hass_weight: float = key(
        0.0, "weight of a further cross entropy, over the target's likeliest tokens only (HASS)", least=0
    )
    hass_top: int = key(10, "number of these likeliest tokens", least=1)
    noise: float = key(
        0.2, "width of the uniform noise on the features in a document of 512 tokens; less in longer ones", least=0
    )
    num_steps: int = key(1, "steps; all but the first run on the head's own states (HASS); 1: EAGLE", least=1, most=8)
    step_decay: float = key(1.0, "weight of step i's loss (from 0): this to the power i", least=0)
    checkpoint_activations: str = key(
        "auto",
        "yes: each step is computed again in the backward pass instead of kept, with the same gradients: less memory, more time; "
        "auto: for rows of more than 8192 tokens, if num_steps is above 1",
        choices=("auto", "yes", "no"),
    )
    num_speculative_tokens: int = key(
        5, "default depth of the head's drafts, and the depth it is measured at", least=1, most=8
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

    document_ids [B, T]; seeds: list of B. A row's noise does not depend on the other rows of its batch.
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
    """Train as `argv` (list of str) asks. Returns 0, or 128 + the signal that ended the run early, after a checkpoint."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "eagle")
    device, note = processes.device, processes.note

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    target.check_row_length(recipe.row_length)
    if target.lm_head.bias is not None:
        raise ValueError(
            "the target's lm_head has a bias, which EAGLE heads, that end in it, cannot use: train Medusa heads"
        )
    start = load_layer_start(recipe, processes, Eagle, target, called="an EAGLE head")
    own = {"base_model_name_or_path": recipe.target, "num_speculative_tokens": recipe.num_speculative_tokens}
    config = replace(start.config, **own) if start else target.layer_config(EagleConfig, **own)
    documents, held_out = load_documents(recipe, tokenizer, processes)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*rows_to_check(packed, device))
    head = Eagle(config)
    target.initialize(head)
    if start:
        take_weights(head, start, note)
    head.to(device)
    head.checkpoint_steps = wants_checkpointing(recipe.checkpoint_activations, recipe.row_length, recipe.num_steps)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)
    meter = build_meter(recipe, target, head, held_out, tokenizer=tokenizer, note=note)

    with Training(
        recipe,
        processes,
        target=target,
        tokenizer=tokenizer,
        head=head,
        optimizer=optimizer,
        packed=packed,
        labels_per_row=labels_per_row,
        held_out=held_out,
        meter=meter,
    ) as training:
        for step in training:
            for batch in step:
                features = batch.features
                if recipe.noise:
                    _, _, document_ids = batch.inputs
                    seeds = noise_seeds(recipe.seed, step.number, range(batch.first, batch.first + len(features)))
                    features = add_noise(features, document_ids, recipe.noise, seeds)
                with training.autocast:
                    predictions = head.predict(features, *batch.inputs, target.lm_head.weight, recipe.num_steps)
                    step.backward(predictions, batch)
            totals = step.finish(recipe.max_grad_value)
            if step.logs:
                step.record(summarize(totals, step.objective, step.num_labels))
    return training.status


if __name__ == "__main__":
    run_script(main)
