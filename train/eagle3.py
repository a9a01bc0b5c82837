"""Train an EAGLE-3 head (heads/eagle3.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/eagle3.py --config configs/eagle3-quickstart.yaml
    accelerate launch train/eagle3.py --config configs/eagle3.yaml --target ORG/MODEL --data conversations.jsonl --lr 1e-4
    accelerate launch train/eagle3.py --config configs/eagle3-quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the residual streams that enter some of the target's layers ->
num_steps steps, each on the states of the step before, as in drafting ("training-time test") -> loss against the target's
distribution or the text, summed and divided by the number of labels of the whole optimiser step. `--help` lists every key. A run
writes only into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, best/, head/; and into
`feature_cache`, if that is given.

The loss differs from the original code's. The original renormalises the target's distribution over the draft vocabulary, drops rows
whose likeliest token lies outside, and averages over all positions, masked ones too. Here the distribution is normalised over the
whole vocabulary and the loss sums over the draft vocabulary: a position with little mass in it teaches little, and no position is
dropped. Only supervised positions count, in the sum and in the divisor, which is the number of labels of the first step. A label
counts if its own token is the assistant's; in the original, if the token two places before it is (docs/training.md).

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step.
"""

from dataclasses import dataclass, replace

from headstart.heads.eagle3 import MOST_STEPS, Eagle3, Eagle3Config, default_aux_layers
from headstart.inference.models.target_source import eos_token_ids
from headstart.train.data.packed.draft_vocabulary import choose_draft_vocabulary
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.loss.distillation import Objective, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer, wants_checkpointing
from headstart.train.run.recipe import key, parse_layers, parse_recipe
from headstart.train.run.run_folder import start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.run.start_head import head_with_vocabulary, load_layer_start, take_weights
from headstart.train.run.stopping import run_script
from headstart.train.teacher.features import FrozenTarget, load_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Settings of a run: the keys of every trainer, and those of EAGLE-3 heads."""

    lr: float = key(5e-5, "peak learning rate of AdamW", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(
        0.5,
        "longer gradients are cut to this norm; 0: never. The original averages its loss over all positions, so its gradients are "
        "shorter by the labels' share of them, and its 0.5 is 0.5 / share here",
        least=0,
    )
    num_steps: int = key(7, "unrolled steps; all but the first run on the head's own states", least=1, most=MOST_STEPS)
    step_decay: float = key(0.8, "weight of step i's loss (from 0): this to the power i", least=0)
    draft_vocab_size: int = key(
        0,
        "size of the draft vocabulary: the most frequent supervised tokens and the target's stop tokens; 0: all tokens, or with "
        "start_from the tokens of that head",
        least=0,
    )
    aux_layers: str = key(
        "",
        "layers whose entering residual streams the head reads, such as 2,16,29; empty: 2, n/2 and n-3 of n, as in published "
        "heads, or with start_from those of that head",
    )
    hidden_size: int = key(
        0,
        "width of the head, below the target's: cheaper to draft, and trains an embedding of its own; 0: the target's, or with "
        "start_from that head's",
        least=0,
    )
    checkpoint_activations: str = key(
        "auto",
        "yes: each step is computed again in the backward pass instead of kept, with the same gradients: less memory, more time; "
        "auto: for rows of more than 8192 tokens, if num_steps is above 1",
        choices=("auto", "yes", "no"),
    )
    num_speculative_tokens: int = key(
        5, "default depth of the head's drafts, and the depth it is measured at", least=1, most=MOST_STEPS
    )

    def __post_init__(self):
        super().__post_init__()
        parse_layers(self.aux_layers)  # refuses bad text

    @property
    def aux_layer_ids(self):
        """aux_layers as a tuple of int; None for the default ones."""
        return parse_layers(self.aux_layers)

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.step_decay**i for i in range(self.num_steps)])


def choose_aux_layers(recipe, target):
    """The aux layers that the recipe asks for; ValueError if the target does not have them."""
    layers = recipe.aux_layer_ids
    if layers is None:
        try:
            layers = default_aux_layers(target.num_layers)
        except ValueError as error:
            raise ValueError(f"{error}: in a recipe aux_layers, as 1,4") from error
    target.check_layers(layers)
    return layers


def choose_config(recipe, target, start):
    """The config of the head; with `start`, the head that it begins with, that head's, with the recipe's size of the vocabulary.

    Raises ValueError if the recipe asks for aux layers or a width that `start` does not have.
    """
    own = {"num_speculative_tokens": recipe.num_speculative_tokens, "base_model_name_or_path": recipe.target}
    if start is None:
        return target.layer_config(
            Eagle3Config,
            draft_vocab_size=recipe.draft_vocab_size or target.vocab_size,
            aux_layer_ids=choose_aux_layers(recipe, target),
            hidden_size=recipe.hidden_size or target.hidden_size,
            **own,
        )
    for name, given in (("aux_layers", recipe.aux_layer_ids), ("hidden_size", recipe.hidden_size)):
        found = start.features if name == "aux_layers" else start.config.hidden_size
        if given and given != found:
            raise ValueError(
                f"start_from {recipe.start_from!r} has {name} {found!r}, this run asks for {given!r}: leave {name} out"
            )
    return replace(start.config, draft_vocab_size=recipe.draft_vocab_size or start.config.draft_vocab_size, **own)


def main(argv):
    """Train as `argv` (list of str) asks. Returns 0, or 128 + the signal that ended the run early, after a checkpoint."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "eagle3")
    device, note = processes.device, processes.note

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    target.check_row_length(recipe.row_length)
    start = load_layer_start(recipe, processes, Eagle3, target, called="an EAGLE-3 head")
    config = choose_config(recipe, target, start)
    documents, held_out = load_documents(recipe, tokenizer, processes)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*rows_to_check(packed, device))
    head = Eagle3(config)
    known = head_with_vocabulary(recipe, processes, start, Eagle3)
    if known and known.config.draft_vocab_size == config.draft_vocab_size:
        if known.d2t is not None:
            head.set_draft_vocabulary(known.d2t, known.t2d)
    elif config.draft_vocab_size < target.vocab_size:
        vocabulary = choose_draft_vocabulary(
            packed,
            config.draft_vocab_size,
            eos_token_ids(model, model.config, tokenizer),
            vocab_size=target.vocab_size,
            tokenizer=tokenizer,
            note=note,
        )
        head.set_draft_vocabulary(*vocabulary)
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
                with training.autocast:
                    predictions = head.predict(batch.features, *batch.inputs, target.lm_head.weight, recipe.num_steps)
                    step.backward(predictions, batch)
            totals = step.finish()
            if step.logs:
                step.record(summarize(totals, step.objective, step.num_labels))
    return training.status


if __name__ == "__main__":
    run_script(main)
