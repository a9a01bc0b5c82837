"""Train an EAGLE-3 head (heads/eagle3.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/eagle3.py --config configs/eagle3-quickstart.yaml
    accelerate launch train/eagle3.py --config configs/eagle3.yaml --target ORG/MODEL --data conversations.jsonl --lr 1e-4
    accelerate launch train/eagle3.py --config configs/eagle3-quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the residual streams that enter some of the target's layers ->
num_steps steps, each on the states of the one before, as the head drafts ("training-time test") -> loss against the target's law or
the text, summed and divided by the number of labels of the whole optimiser step. `--help` lists every key. A run writes only into
its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, head/; and into `feature_cache`, if that is given.

The loss is not quite the original code's. That one renormalises the target's law over the draft vocabulary, drops rows whose
likeliest token lies outside, and averages over all positions, masked ones too. Here the law is normalised over the whole vocabulary
and the loss sums over the draft's part of it: a position of which little can be drafted teaches little, and none is dropped. Only
supervised positions count, in the sum and in the divisor, which is the number of labels of the first step.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: mix several data sets.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm

from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle3 import MOST_STEPS, Eagle3, Eagle3Config, default_aux_layers
from headstart.inference.models.target_source import eos_token_ids
from headstart.train.data.conversations import load_conversations
from headstart.train.data.held_out import choose_held_out
from headstart.train.data.rows import (
    answer_ends,
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
    """Everything a run is told: the keys of every trainer, and those of EAGLE-3 heads."""

    lr: float = key(5e-5, "peak learning rate of AdamW", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(0.5, "longer gradients are cut to this norm; 0: never", least=0)
    num_steps: int = key(7, "unrolled steps, all but the first on the head's own states", least=1, most=MOST_STEPS)
    step_decay: float = key(0.8, "step i's loss (from 0) counts this to the power i", least=0)
    draft_vocab_size: int = key(
        0,
        "draft over so many tokens, the most frequent supervised ones and the target's stop tokens; 0: over all",
        least=0,
    )
    aux_layers: str = key(
        "",
        "layers whose entering residual streams the head reads, as 2,16,29; empty: 2, n/2 and n-3 of n, as published heads do",
    )
    hidden_size: int = key(
        0,
        "width of the head, below the target's: cheaper to draft, and trains an embedding of its own; 0: the target's",
        least=0,
    )
    num_speculative_tokens: int = key(
        5, "how deep the head drafts unless told otherwise, and is measured", least=1, most=MOST_STEPS
    )

    def __post_init__(self):
        super().__post_init__()
        parse_layers(self.aux_layers)  # or is refused

    @property
    def aux_layer_ids(self):
        """aux_layers as a tuple of int; None for the default ones."""
        return parse_layers(self.aux_layers)

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.step_decay**i for i in range(self.num_steps)])


def parse_layers(text):
    """ "1,4,7" as a tuple of int, an empty text as None; ValueError for anything else."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdigit() for word in words):
        raise ValueError(f"aux_layers must be layer numbers with commas between them, as 2,16,29, got {text!r}")
    return tuple(int(word) for word in words) or None


def choose_aux_layers(recipe, target):
    """The layers that the recipe asks for; ValueError if the target does not have them."""
    layers = recipe.aux_layer_ids
    if layers is None:
        try:
            layers = default_aux_layers(target.num_layers)
        except ValueError as error:
            raise ValueError(f"{error}: in a recipe aux_layers, as 1,4") from error
    target.check_layers(layers)
    return layers


def choose_draft_vocabulary(packed, size, stop_ids, vocab_size, tokenizer, note):
    """(d2t, t2d) of the `size` tokens that the rows supervise most, stop_ids in any case; `note(text)` is told what it costs."""
    tokens = packed.input_ids[packed.supervised]
    d2t, t2d = build_draft_vocabulary(torch.bincount(tokens, minlength=vocab_size), size, stop_ids)
    share = t2d[tokens].double().mean().item()
    note(f"draft vocabulary: {size} of {vocab_size} tokens, {share:.2%} of the supervised ones")
    ends = packed.input_ids[answer_ends(packed)]
    lost = ends[~t2d[ends]]
    if len(lost) > 0.01 * len(ends):
        token = int(lost.mode().values)
        note(
            f"warning: {len(lost) / len(ends):.0%} of the answers end with a token that is not in the draft vocabulary, mostly "
            f"{tokenizer.decode([token])!r} ({token}). It cannot be drafted, so each of them takes one pass of the target more, in "
            f"{len(tokens) / len(ends):.0f} tokens: raise draft_vocab_size, or name it among the target's eos_token_id"
        )
    return d2t, t2d


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    accelerator, note, resumed = start_processes(recipe, "eagle3")
    device, main_rank = accelerator.device, accelerator.is_main_process

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    layers = choose_aux_layers(recipe, target)
    config = target.layer_config(
        Eagle3Config,
        draft_vocab_size=recipe.draft_vocab_size or target.vocab_size,
        aux_layer_ids=layers,
        hidden_size=recipe.hidden_size or target.hidden_size,
        num_speculative_tokens=recipe.num_speculative_tokens,
        base_model_name_or_path=recipe.target,
    )
    conversations = load_conversations(recipe.data, note=note)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts, note
    )
    documents = choose_documents(tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    head = Eagle3(config)
    if config.draft_vocab_size < target.vocab_size:
        stop_ids = eos_token_ids(model, model.config, tokenizer)
        sizes = config.draft_vocab_size, stop_ids, target.vocab_size
        head.set_draft_vocabulary(*choose_draft_vocabulary(packed, *sizes, tokenizer, note))
    target.initialize(head)
    head.to(device)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)

    def predict(features, *batch, num_steps=recipe.num_speculative_tokens):
        return head.predict(features[..., target.hidden_size :], *batch, num_steps=num_steps)

    # The engine is built before any feature is trained on: it packs the target's weights, and packed products may differ from
    # separate ones in the last bit, which a resumed run must not see.
    meter = None
    if held_out:
        options = {
            "max_tokens": recipe.eval_tokens,
            "max_length": min(longest, 2 * recipe.row_length),
            "layers": layers,
        }
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
            cache = cache_features(run, recipe, target, packed, stop, layers)
            if cache is None:
                run.save(head, optimizer)
                return run.leave_early(stop)
            bar.unpause()  # steps take what steps take, not what the features took

        def make_ready(index):
            parts = select_rows(packed, index, device)
            return *parts, cache.rows(index, device) if cache else target.features(*parts[:3], layers)

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
                index, *batch, supervised, features = next(batches)  # [B], [B, T] each, [B, T, (1 + A) H]
                input_ids, _, document_ids = batch
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_steps)
                projection = (target.lm_head, objective, num_labels, recipe.chunk_tokens)
                last = features[..., : target.hidden_size].flatten(0, 1)  # [M, H]
                with autocast:
                    predictions = predict(features, *batch, num_steps=recipe.num_steps)
                    share = accumulate_gradients(predictions, last, labels, *projection, logs)
                fed.append(index.tolist())
                shares.append(share)  # [K, 5]

            # The ranks' shares add up; a number that is not finite stops the run before it reaches the weights.
            lr = recipe.learning_rate(step, num_steps)
            with describe_non_finite(step, packed, fed, tokenizer):
                totals, grad_norm = finish_step(head, optimizer, shares, accelerator, lr, recipe.max_grad_norm)

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
