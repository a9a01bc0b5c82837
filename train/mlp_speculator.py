"""Train an MLP speculator (heads/mlp_speculator.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator-quickstart.yaml
    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator.yaml --target ORG/MODEL --data conversations.jsonl
    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator-stage2.yaml --start_from runs/first

Stage 1: conversations -> token ids and assistant mask -> packed rows -> the target's features -> n steps, each fed the text's own
next token (teacher forcing) -> loss against the target's law or the text, summed and divided by the number of labels of the
whole optimiser step. Stage 2 goes on with a head from stage 1, on text that the target itself writes from short prompts: our engine
generates it before training, into generated.jsonl of the run folder. `--help` lists every key. A run writes only into its
`output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, head/, generated.jsonl; and into `feature_cache`, if
that is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. It does not: mix several data sets, feed steps with their own drafts.
"""

from dataclasses import dataclass, fields

import torch
from tqdm import tqdm

from headstart.heads.checkpoint import load_head
from headstart.heads.families import family_of
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.train.data.conversations import load_conversations
from headstart.train.data.generated_text import build_generator, cut_prompts, generated_documents
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
    supervise_all,
)
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import AcceptanceMeter
from headstart.train.run.optimization import build_optimizer, finish_step
from headstart.train.run.recipe import key, parse_recipe
from headstart.train.run.run_folder import RunFolder, begin_folder, start_processes
from headstart.train.run.run_recipe import CHANGEABLE, RunRecipe, is_due
from headstart.train.run.stopping import StopSignals, run_script
from headstart.train.run.tracking import Speedometer
from headstart.train.teacher.feature_cache import cache_features
from headstart.train.teacher.features import FrozenTarget, load_target
from headstart.train.teacher.sharded_target import check_whole_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Everything a run is told: the keys of every trainer, and those of MLP speculators."""

    weight_decay: float = key(0.1, "AdamW's, on matrices (biases and norms have none)", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    num_steps: int = key(3, "steps; step k (from 0) predicts the token k + 2 places ahead", least=1)
    inner_size: int = key(0, "width of the state; 0: the target's hidden size", least=0)
    tie_weights: bool = key(True, "steps share their weights (but for the first projection)")
    scale_input: bool = key(True, "the feature is normalised before the first step")
    step_weight_decay: float = key(1.0, "step k's loss counts this to the power k", least=0)
    supervise: str = key(
        "assistant",
        "assistant: learn from the assistant's tokens (in stage 2: from those that the target generated); all: from every token",
        choices=("assistant", "all"),
    )
    stage: int = key(1, "1: on the data; 2: on text that the target generates from pieces of the data", least=1, most=2)
    start_from: str = key(
        "", "begin with this head (run, checkpoint, folder or Hub id) of the same shape; stage 2 needs one"
    )
    num_prompts: int = key(4096, "stage 2: pieces of the data to generate from; 0: all that there are", least=0)
    prompt_tokens: int = key(64, "stage 2: tokens per piece", least=1)
    answer_tokens: int = key(
        256, "stage 2: tokens generated per piece, at temperature 1 from the 10 likeliest", least=2
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stage == 2 and not self.start_from:
            raise ValueError("stage 2 goes on with the head of stage 1: give its run or folder as start_from")
        if self.stage == 2 and self.prompt_tokens + self.answer_tokens > self.row_length:
            raise ValueError(
                f"prompt_tokens {self.prompt_tokens} and answer_tokens {self.answer_tokens} do not fit into row_length "
                f"{self.row_length}: raise it"
            )

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.step_weight_decay**k for k in range(self.num_steps)])


def build_head(recipe, target, resumed):
    """The speculator that the recipe describes: new, or the one it starts from, which must be of that shape.

    resumed: the checkpoint that will be loaded into it, which makes a start of another run's head needless; or None.
    """
    inner_size = recipe.inner_size or target.hidden_size
    shape = (
        target.hidden_size,
        target.vocab_size,
        inner_size,
        recipe.num_steps,
        recipe.tie_weights,
        recipe.scale_input,
    )
    config = MLPSpeculatorConfig(*shape, base_model_name_or_path=recipe.target)
    if resumed or not recipe.start_from:
        return MLPSpeculator(config)
    head = load_head(recipe.start_from, dtype="float32")
    if not isinstance(head, MLPSpeculator):
        raise ValueError(
            f"start_from {recipe.start_from!r} holds a head of the family {family_of(head).name}, not an MLP speculator"
        )
    for f in fields(config):
        found, wanted = getattr(head.config, f.name), getattr(config, f.name)
        if found != wanted and f.name != "base_model_name_or_path":
            raise ValueError(
                f"start_from {recipe.start_from!r} is a head of {f.name} {found!r}, this run asks for {wanted!r}"
            )
    return head


def main(argv):
    """Train as `argv` (list of str) says. Returns 0, or 128 + the signal that ended the run early, checkpoint saved."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    accelerator, note, resumed = start_processes(recipe, "mlp_speculator")
    if recipe.stage == 2:
        check_whole_target("stage 2, which generates text with the engine,")
    device, main_rank = accelerator.device, accelerator.is_main_process

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    target = FrozenTarget(model)
    longest = target.check_row_length(recipe.row_length)
    generator = None
    if recipe.stage == 2:
        generator = build_generator(target, tokenizer, recipe.prompt_tokens + recipe.answer_tokens)
    head = build_head(recipe, target, resumed).to(device)
    conversations = load_conversations(recipe.data, note=note)
    conversations, held_out = choose_held_out(
        recipe.data, recipe.eval_data, recipe.target, conversations, recipe.eval_prompts, note
    )
    documents = choose_documents(tokenizer, conversations, recipe.row_length, recipe.max_tokens, recipe.seed)
    kind = "generated texts" if generator else "conversations"
    if generator:
        if not resumed:
            begin_folder(recipe, accelerator)
        prompts = cut_prompts(documents, recipe.prompt_tokens, recipe.num_prompts, recipe.seed)
        given = (prompts, recipe.answer_tokens, recipe.seed)
        documents = generated_documents(recipe.output, generator, recipe.target, *given, accelerator, note)
        generator = None  # its cache is free again
    if recipe.supervise == "all":
        documents = supervise_all(documents)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note, kind)
    target.check(*select_rows(packed, [row_of_many_documents(packed)], device)[:3])
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)

    def predict(features, input_ids, position_ids, document_ids):
        return head.predict(features, input_ids, position_ids, document_ids)

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
            for _ in range(recipe.accumulate):
                index, *batch, supervised, features = next(batches)  # [B], [B, T] each, [B, T, H]
                input_ids, _, document_ids = batch
                labels = find_labels(input_ids, document_ids, supervised, recipe.num_steps)
                projection = (target.lm_head, objective, num_labels, recipe.chunk_tokens)
                with autocast:
                    predictions = predict(features, *batch)
                    share = accumulate_gradients(predictions, features.flatten(0, 1), labels, *projection, logs)
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
