"""Train Medusa heads (heads/medusa.py) against a frozen target, or together with an adapter of it: the script, from top to bottom.

    accelerate launch train/medusa.py --config configs/quickstart.yaml
    accelerate launch train/medusa.py --config configs/medusa.yaml --target ORG/MODEL --data conversations.jsonl --lr 5e-4
    accelerate launch train/medusa.py --config configs/quickstart.yaml --resume
    accelerate launch train/medusa.py --config configs/medusa2-quickstart.yaml --start_from runs/quickstart

conversations -> token ids and assistant mask -> packed rows -> the target's features -> K heads -> loss against the target's law or
the text, summed and divided by the number of labels of the whole optimiser step. Stage `joint` (Medusa-2, train/loss/joint.py)
goes on with heads of the stage `heads` and trains a LoRA adapter of the target with them. `--help` lists every key. A run writes
only into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, head/; and into `feature_cache`, if that
is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: mix several data sets.
"""

from dataclasses import dataclass, fields

import torch
from tqdm import tqdm

from headstart.heads.checkpoint import load_head
from headstart.heads.families import family_of
from headstart.heads.medusa import Medusa, MedusaConfig
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
from headstart.train.loss.joint import (
    TARGET_LOSSES,
    AdaptedMeter,
    accumulate_joint_gradients,
    build_joint_optimizer,
    summarize_joint,
)
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
from headstart.train.teacher.sharded_target import check_whole_target
from headstart.train.teacher.target_adapter import ALL_LINEAR, TargetAdapter


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Everything a run is told: the keys of every trainer, and those of Medusa heads."""

    lk_eta: float = key(10.0, "of lk: the larger, the sooner the rate of acceptance takes over from kl", least=0)
    num_heads: int = key(4, "heads; head k (from 0) predicts the token k + 2 places ahead", least=1)
    num_layers: int = key(1, "residual blocks per head", least=1)
    shared_lm_head: bool = key(False, "heads end in the target's lm_head instead of one of their own")
    head_weight_decay: float = key(0.8, "head k's loss counts this to the power k", least=0)
    stage: str = key(
        "heads",
        "heads: the heads alone; joint: heads and a LoRA adapter of the target together (Medusa-2)",
        choices=("heads", "joint"),
    )
    start_from: str = key(
        "",
        "begin with these heads (run, checkpoint, folder or Hub id) of the same shape; joint needs them, from the stage heads",
    )
    target_loss: str = key(
        "kl",
        "joint, of the adapted target itself: kl: from the frozen target's law (self-distillation); hard: cross entropy against "
        "the text",
        choices=TARGET_LOSSES,
    )
    medusa_weight: float = key(
        0.1,
        "joint: what the heads' loss counts beside the target's own: more accepts more and keeps less of the target "
        "(the paper: 0.2)",
        least=0,
    )
    target_lr: float = key(5e-4, "joint: peak learning rate of the adapter; lr is the heads'", least=0)
    lora_rank: int = key(32, "joint: rank of the adapter", least=1)
    lora_alpha: float = key(16.0, "joint: the adapter's products count alpha / rank", least=0)
    lora_dropout: float = key(0.0, "joint: part of the adapter's inputs left out", least=0, most=0.99)
    lora_targets: str = key(
        ALL_LINEAR, "joint: names of the layers to adapt, by commas; all-linear: every Linear but lm_head"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stage == "joint":
            if not self.start_from:
                raise ValueError(
                    "stage joint goes on with the heads of stage heads: give their run or folder as start_from"
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


def build_head(recipe, target, resumed):
    """The heads that the recipe describes: new ones, or those it starts from, which must be of that shape.

    resumed: the checkpoint that will be loaded into them, which makes a start of another run's heads needless; or None.
    """
    shape = (target.hidden_size, target.vocab_size, recipe.num_heads, recipe.num_layers, recipe.shared_lm_head)
    head = Medusa(MedusaConfig(*shape, base_model_name_or_path=recipe.target))
    target.initialize(head)
    if recipe.start_from and not resumed:
        start = load_head(recipe.start_from, dtype="float32")
        if not isinstance(start, Medusa):
            raise ValueError(
                f"start_from {recipe.start_from!r} holds a head of the family {family_of(start).name}, not Medusa heads"
            )
        if start.config.adapter:
            raise ValueError(
                f"start_from {recipe.start_from!r} was trained with an adapter already: give heads of stage heads"
            )
        for f in fields(head.config):
            found, wanted = getattr(start.config, f.name), getattr(head.config, f.name)
            if found != wanted and f.name != "base_model_name_or_path":
                raise ValueError(
                    f"start_from {recipe.start_from!r} has {f.name} {found!r}, this run asks for {wanted!r}"
                )
        head.load_state_dict(start.state_dict())
    return head


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    accelerator, note, resumed = start_processes(recipe, "medusa")
    if recipe.stage == "joint":
        check_whole_target("stage joint")
    device, main_rank = accelerator.device, accelerator.is_main_process

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    conversations = load_conversations(recipe.data, note=note)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts, note
    )
    documents = choose_documents(tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    head = build_head(recipe, target, resumed).to(device)

    def predict(features, input_ids, position_ids, document_ids):
        return head.predict(features, input_ids, position_ids, document_ids, target.lm_head.weight)

    # The engine is built before any feature is trained on: it packs the target's weights, and packed products may differ from
    # separate ones in the last bit, which a resumed run must not see.
    meter = None
    if held_out:
        options = {"max_tokens": recipe.eval_tokens, "max_length": min(longest, 2 * recipe.row_length)}
        meter = AcceptanceMeter(target, tokenizer, head, predict, held_out, recipe.chunk_tokens, note, **options)

    # What is trained. The adapter comes behind the engine, which shares the weights of plain layers.
    adapter, trained_parts, adamw = None, head, (recipe.weight_decay, recipe.beta1, recipe.beta2)
    if recipe.stage == "joint":
        lora = (recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, recipe.lora_targets)
        adapter = TargetAdapter(target, *lora)  # the same on every rank; what dropout leaves out is not
        torch.manual_seed(recipe.seed + accelerator.process_index)
        note(f"the adapter has {adapter.num_parameters:,} parameters in {len(adapter.layers)} layers of the target")
        trained_parts = torch.nn.ModuleList([head, adapter.weights])
        optimizer = build_joint_optimizer(head, adapter, recipe.target_lr / recipe.lr, *adamw)
        meter = meter and AdaptedMeter(meter, adapter)
    else:
        optimizer = build_optimizer(head, *adamw)
    rows_per_step = recipe.batch_rows * recipe.accumulate * accelerator.num_processes
    num_steps = recipe.num_updates(len(labels_per_row), rows_per_step)
    rows = {"rows": fingerprint(packed), "rows_per_step": rows_per_step}

    # From here on the run folder exists, and a signal leaves a run that resumes.
    with (
        StopSignals() as stop,
        RunFolder(
            recipe, resumed, CHANGEABLE, rows, num_steps, head, optimizer, target, accelerator, note, adapter
        ) as run,
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
            if adapter:  # its features change in every step: the joint stage makes them itself
                return *parts, parts[0]
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
            for _ in range(recipe.accumulate):
                index, *batch, supervised, features = next(batches)  # [B], [B, T] each, [B, T, H]
                input_ids, _, document_ids = batch
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_heads)
                sizes = (num_labels, recipe.chunk_tokens)
                if adapter:
                    objectives = (objective, recipe.target_loss)
                    given = (target, adapter, predict, batch, labels, *objectives, *sizes, autocast, logs)
                    share = accumulate_joint_gradients(*given)  # [1 + K, 5]
                else:
                    projection = (target.lm_head, objective, *sizes)
                    with autocast:
                        predictions = predict(features, *batch)
                        share = accumulate_gradients(predictions, features.flatten(0, 1), labels, *projection, logs)
                fed.append(index.tolist())
                shares.append(share)  # [K, 5]

            # The ranks' shares add up; a number that is not finite stops the run before it reaches the weights.
            lr = recipe.learning_rate(step, num_steps)
            with describe_non_finite(step, packed, fed, tokenizer):
                totals, grad_norm = finish_step(trained_parts, optimizer, shares, accelerator, lr, recipe.max_grad_norm)

            objective = objective.after(totals[1:] if adapter else totals)
            run.advance(int(tokens_per_row[rows].sum()), objective.rates)
            bar.update()
            if logs:
                summary = (summarize_joint if adapter else summarize)(totals, objective, num_labels)
                figures = summary | {"lr": lr, "grad_norm": grad_norm}
                run.record_step(figures, speed, bar)
        run.finish(head)
    return 0


if __name__ == "__main__":
    run_script(main)
