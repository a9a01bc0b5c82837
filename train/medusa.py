"""Train Medusa heads (heads/medusa.py) against a frozen target, or together with an adapter of it: the script, from top to bottom.

    accelerate launch train/medusa.py --config configs/quickstart.yaml
    accelerate launch train/medusa.py --config configs/medusa.yaml --target ORG/MODEL --data conversations.jsonl --lr 5e-4
    accelerate launch train/medusa.py --config configs/quickstart.yaml --resume
    accelerate launch train/medusa.py --config configs/medusa2-quickstart.yaml --start_from runs/quickstart

conversations -> token ids and assistant mask -> packed rows -> the target's features -> K heads -> loss against the target's
distribution or the text, summed and divided by the number of labels of the whole optimiser step. Stage `joint` (Medusa-2,
train/loss/joint.py) starts from heads of the stage `heads` and trains a LoRA adapter of the target with them. `--help` lists
every key. A run writes only into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, best/, head/; and
into `feature_cache`, if that is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step.
"""

from dataclasses import dataclass

import torch

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.loss.distillation import Objective, summarize
from headstart.train.loss.joint import TARGET_LOSSES, AdaptedMeter, accumulate_joint_gradients, summarize_joint
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer
from headstart.train.run.recipe import key, parse_recipe
from headstart.train.run.run_folder import start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.run.start_head import check_same_shape, load_start
from headstart.train.run.stopping import run_script
from headstart.train.teacher.features import FrozenTarget, load_target
from headstart.train.teacher.sharded_target import check_whole_target
from headstart.train.teacher.target_adapter import ALL_LINEAR, TargetAdapter


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Settings of a run: the keys of every trainer, and those of Medusa heads."""

    lk_eta: float = key(10.0, "lk only: the larger, the sooner the rate of acceptance replaces kl", least=0)
    num_heads: int = key(4, "number of heads; head k (from 0) predicts the token k + 2 places ahead", least=1)
    num_layers: int = key(1, "residual blocks per head", least=1)
    shared_lm_head: bool = key(False, "heads use the target's lm_head instead of their own")
    head_weight_decay: float = key(0.8, "weight of head k's loss: this to the power k", least=0)
    stage: str = key(
        "heads",
        "heads: the heads alone; joint: heads and a LoRA adapter of the target together (Medusa-2)",
        choices=("heads", "joint"),
    )
    start_from: str = key(
        "",
        "begin with the weights of these heads (run, checkpoint, folder or Hub id, in any format that is read) of the same shape; "
        "joint needs them, from the stage heads. A resumed run does not read them again",
    )
    target_loss: str = key(
        "kl",
        "joint: loss of the adapted target itself. kl: KL from the frozen target's distribution (self-distillation); hard: cross "
        "entropy against the text",
        choices=TARGET_LOSSES,
    )
    medusa_weight: float = key(
        0.1,
        "joint: weight of the heads' loss beside the target's own: a larger one accepts more drafts and keeps less of the target "
        "(the paper: 0.2)",
        least=0,
    )
    target_lr: float = key(5e-4, "joint: peak learning rate of the adapter; lr is the heads'", least=0)
    lora_rank: int = key(32, "joint: rank of the adapter", least=1)
    lora_alpha: float = key(16.0, "joint: the adapter's products are scaled by alpha / rank", least=0)
    lora_dropout: float = key(0.0, "joint: dropout of the adapter's inputs", least=0, most=0.99)
    lora_targets: str = key(
        ALL_LINEAR, "joint: names of the layers to adapt, with commas; all-linear: every Linear but lm_head"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stage == "joint":
            if not self.start_from:
                raise ValueError(
                    "stage joint continues from heads trained in stage heads: name their run or folder with start_from"
                )
            if self.cache_features:
                raise ValueError("stage joint changes the features in every step: set cache_features to false")
            if not self.lr or not self.lora_alpha:
                raise ValueError(
                    "stage joint needs lr and lora_alpha above 0: the adapter learns at target_lr / lr of the heads' rate"
                )

    @property
    def objective(self):
        weight = self.medusa_weight if self.stage == "joint" else 1.0
        weights = [weight * self.head_weight_decay**k for k in range(self.num_heads)]
        return Objective(Loss(self.loss, self.lk_eta), weights)


def build_head(recipe, target, processes):
    """The heads that the recipe describes: new ones, or those it starts from, which must have that shape.

    A resumed run does not need a start: its checkpoint will be loaded into them.
    """
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=recipe.num_heads,
        num_layers=recipe.num_layers,
        shared_lm_head=recipe.shared_lm_head,
        base_model_name_or_path=recipe.target,
    )
    head = Medusa(config)
    target.initialize(head)
    if recipe.start_from and not processes.resumed:
        start = load_start(recipe.start_from, Medusa, called="Medusa heads", note=processes.note)
        check_same_shape(start, head.config, recipe.start_from)
        head.load_state_dict(start.state_dict())
    return head


def main(argv):
    """Train as `argv` (list of str) asks. Returns 0, or 128 + the signal that ended the run early, after a checkpoint."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "medusa")
    device, note = processes.device, processes.note
    if recipe.stage == "joint":
        check_whole_target("stage joint")

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    target.check_row_length(recipe.row_length)
    documents, held_out = load_documents(recipe, tokenizer, processes)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*rows_to_check(packed, device))
    head = build_head(recipe, target, processes).to(device)
    meter = build_meter(recipe, target, head, held_out, tokenizer=tokenizer, note=note)

    # What is trained. The adapter comes after the meter's engine, which shares the weights of plain layers.
    adapter, groups = None, []
    if recipe.stage == "joint":
        adapter = TargetAdapter(
            target,
            rank=recipe.lora_rank,
            alpha=recipe.lora_alpha,
            dropout=recipe.lora_dropout,
            modules=recipe.lora_targets,
        )  # the same on every rank; dropout's choices are not
        torch.manual_seed(recipe.seed + processes.accelerator.process_index)
        note(f"the adapter has {adapter.num_parameters:,} parameters in {len(adapter.layers)} layers of the target")
        groups = [adapter.parameter_group(recipe.target_lr / recipe.lr)]
        meter = meter and AdaptedMeter(meter, adapter)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2, *groups)

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
        adapter=adapter,
    ) as training:
        for step in training:
            for batch in step:
                if adapter:
                    totals = accumulate_joint_gradients(
                        head,
                        target,
                        adapter,
                        inputs=batch.inputs,
                        labels=batch.labels,
                        objective=step.objective,
                        target_loss=recipe.target_loss,
                        num_labels=step.num_labels,
                        chunk_tokens=recipe.chunk_tokens,
                        autocast=training.autocast,
                        with_hits=step.logs,
                    )
                    step.add(totals)  # [1 + K, 5]
                else:
                    with training.autocast:
                        predictions = head.predict(batch.features, *batch.inputs, target.lm_head.weight)
                        step.backward(predictions, batch)
            totals = step.finish()
            if step.logs:
                summary = summarize_joint if adapter else summarize
                step.record(summary(totals, step.objective, step.num_labels))
    return training.status


if __name__ == "__main__":
    run_script(main)
