"""Train an MLP speculator (heads/mlp_speculator.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator-quickstart.yaml
    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator.yaml --target ORG/MODEL --data conversations.jsonl
    accelerate launch train/mlp_speculator.py --config configs/mlp-speculator-stage2.yaml --start_from runs/first

Stage 1: conversations (or plain texts, with `document: text`) -> token ids and assistant mask -> packed rows -> the target's
features -> n steps, each fed the text's own next token (teacher forcing) -> loss against the target's distribution or the text,
summed and divided by the number of labels of the whole optimiser step. Stage 2 starts from a head of stage 1, on text that the
target itself writes from short prompts: our engine generates it before training, into generated.jsonl of the run folder. `--help`
lists every key. A run writes only into its `output` folder: config.yaml, metrics.jsonl, checkpoints/, acceptance.json, best/,
head/, generated.jsonl; and into `feature_cache`, if that is given.

Every rank knows all rows and their order, so label counts need no communication; gradients are summed over the ranks once per
optimiser step. Not done here: feeding steps their own drafts.
"""

from dataclasses import dataclass

from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.train.data.generated_text import build_generator, cut_prompts, generated_documents, standing_documents
from headstart.train.data.packed.documents import Documents
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.data.sources.data_sets import data_sets
from headstart.train.loss.distillation import Objective, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer
from headstart.train.run.recipe import key, parse_recipe
from headstart.train.run.run_folder import begin_folder, start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.run.start_head import check_same_shape, load_start
from headstart.train.run.stopping import run_script
from headstart.train.teacher.features import FrozenTarget, load_target
from headstart.train.teacher.sharded_target import check_whole_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Settings of a run: the keys of every trainer, and those of MLP speculators."""

    weight_decay: float = key(0.1, "AdamW's weight decay, on matrices only", least=0)
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    num_steps: int = key(3, "number of steps; step k (from 0) predicts the token k + 2 places ahead", least=1)
    inner_size: int = key(0, "width of the state; 0: the target's hidden size", least=0)
    tie_weights: bool = key(True, "steps share their weights (except the first projection)")
    scale_input: bool = key(True, "the feature is normalised before the first step")
    step_weight_decay: float = key(1.0, "weight of step k's loss: this to the power k", least=0)
    supervise: str = key(
        "assistant",
        "assistant: learn from the assistant's tokens (in stage 2: from those that the target generated); all: from every token",
        choices=("assistant", "all"),
    )
    document: str = key(
        "conversation",
        'what is packed. conversation, answer: as in the recipes of other heads; text: plain texts, {"text": ...}, of which every '
        "token is supervised and a long one goes on in the next row",
        choices=("conversation", "answer", "text"),
    )
    stage: int = key(1, "1: on the data; 2: on text that the target generates from pieces of the data", least=1, most=2)
    start_from: str = key(
        "",
        "begin with the weights of this head (run, checkpoint, folder or Hub id, in any format that is read) of the same shape; "
        "stage 2 needs one. A resumed run does not read it again",
    )
    num_prompts: int = key(4096, "stage 2: number of pieces of the data to generate from; 0: all", least=0)
    prompt_tokens: int = key(64, "stage 2: tokens per piece", least=1)
    answer_tokens: int = key(
        256, "stage 2: tokens generated per piece, at temperature 1 from the 10 likeliest", least=2
    )

    def __post_init__(self):
        super().__post_init__()
        if self.document == "text" and self.eval_prompts and not self.eval_data:
            raise ValueError(
                "plain texts hold no requests to measure the acceptance on: name conversations as eval_data, or set "
                "eval_prompts to 0"
            )
        if self.stage == 2 and not self.start_from:
            raise ValueError("stage 2 goes on with the head of stage 1: give its run or folder as start_from")
        if self.stage == 2 and any(one.weight for one in data_sets(self.data)):
            raise ValueError("stage 2 cuts its pieces from all of the data alike: leave the weights out of `data`")
        if self.stage == 2 and self.prompt_tokens + self.answer_tokens > self.row_length:
            raise ValueError(
                f"prompt_tokens {self.prompt_tokens} and answer_tokens {self.answer_tokens} do not fit into row_length "
                f"{self.row_length}: raise it"
            )

    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [self.step_weight_decay**k for k in range(self.num_steps)])


def build_head(recipe, target, processes):
    """The speculator that the recipe describes: new, or the head that it starts from, which must have that shape.

    A resumed run does not need a start: its checkpoint will be loaded into it.
    """
    config = MLPSpeculatorConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        inner_size=recipe.inner_size or target.hidden_size,
        num_steps=recipe.num_steps,
        tie_weights=recipe.tie_weights,
        scale_input=recipe.scale_input,
        base_model_name_or_path=recipe.target,
    )
    if processes.resumed or not recipe.start_from:
        return MLPSpeculator(config)
    start = load_start(recipe.start_from, MLPSpeculator, called="an MLP speculator", note=processes.note)
    check_same_shape(start, config, recipe.start_from, has="is a head of")
    start.config = config  # which names this run's target
    return start


def main(argv):
    """Train as `argv` (list of str) asks. Returns 0, or 128 + the signal that ended the run early, after a checkpoint."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "mlp_speculator")
    device, note = processes.device, processes.note
    if recipe.stage == 2:
        check_whole_target("stage 2, which generates text with the engine,")

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    target.check_row_length(recipe.row_length)
    generator = None
    if recipe.stage == 2:
        generator = build_generator(target, tokenizer, recipe.prompt_tokens + recipe.answer_tokens)
    head = build_head(recipe, target, processes).to(device)
    documents, held_out = load_documents(recipe, tokenizer, processes)
    kind = "documents"
    if generator:
        prompts, kind = cut_prompts(documents, recipe.prompt_tokens, recipe.num_prompts, recipe.seed), "generated texts"
        if recipe.dry_run:
            note(f"dry run: no text is generated; {len(prompts)} of full length, made of the data, stand for it")
            documents = standing_documents(prompts, recipe.answer_tokens)
        else:
            if not processes.resumed:
                begin_folder(recipe, processes.accelerator)
            documents = generated_documents(
                recipe.output,
                generator,
                recipe.target,
                prompts=prompts,
                answer_tokens=recipe.answer_tokens,
                seed=recipe.seed,
                accelerator=processes.accelerator,
                note=note,
            )
        generator = None  # frees its cache
    if recipe.supervise == "all":
        documents = Documents.of(documents) if isinstance(documents, list) else documents
        documents = documents.all_supervised()
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note, kind)
    target.check(*rows_to_check(packed, device))
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
                    predictions = head.predict(batch.features, *batch.inputs)
                    step.backward(predictions, batch)
            totals = step.finish()
            if step.logs:
                step.record(summarize(totals, step.objective, step.num_labels))
    return training.status


if __name__ == "__main__":
    run_script(main)
