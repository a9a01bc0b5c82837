"""RunRecipe: the keys that the recipes of all head trainers share, and the values derived from them.

A script declares `Recipe(RunRecipe)` with the keys of its head; a key that it repeats has its own default there.
"""

import math
from dataclasses import MISSING, dataclass

from ..data.held_out import eval_sets
from ..data.sources.data_sets import data_sets
from ..data.template_date import check_date
from ..loss.losses import LOSSES
from .checkpointing import choose_checkpoint
from .optimization import warmup_cosine
from .recipe import check_values, key
from .tracking import TRACKERS


@dataclass(frozen=True)
class RunRecipe:
    """Fields are the keys of the config file and of the command line.

    A new key's default must keep the old behaviour, so that older checkpoints resume unchanged.
    """

    target: str = key(MISSING, "the frozen model: a folder or Hub id of any AutoModelForCausalLM")
    data: str = key(
        MISSING,
        "conversations: stdlib, installed (Python source here), a .json/.jsonl (also .gz, .zst) or .parquet file, a pattern of "
        "files, a `datasets` name or folder; a split other than train follows a colon: OWNER/NAME:train_sft. Several, with commas "
        "(or a list in YAML): a.jsonl:0.7,OWNER/NAME:train_sft:0.3. A weight is a set's share of the rows of an epoch, which has "
        "as many as all sets together: a smaller set is repeated, a larger one goes on in the next epoch",
        several=True,
    )
    output: str = key(MISSING, "the run folder, e.g. runs/first; it must be new unless the run is resumed")
    template_date: str = key(
        "",
        "date (YYYY-MM-DD) that a chat template prints where it prints today's; empty: the day of the run's start, kept there",
    )
    data_rules: int = key(
        0,
        "rules by which data become labels. 2, of new runs: a conversation longer than a row is split at turns; 1 and 2: "
        "reasoning_content, tools and tool_calls are rendered, and no label comes after an end token; 0: those of a run begun "
        "before there were others. A run keeps the rules that it was begun with",
        least=0,
        most=2,
    )
    target_dtype: str = key(
        "auto",
        "dtype of its weights; auto: bfloat16 on a GPU, float32 on the CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    start_from: str = key(
        "",
        "begin with the weights of this head (run, checkpoint, folder or Hub id, in any format that is read) instead of a new one; "
        "all else begins anew. A resumed run does not read it again",
    )
    dry_run: bool = key(
        False,
        "check all that the run needs, run two steps without training, say what memory and time it takes, and write nothing into "
        "`output`",
    )
    resume: bool = key(False, "go on from the newest checkpoint in `output`")
    resume_from: str = key("", "go on from this checkpoint folder instead")
    seed: int = key(0, "seed of the order of the rows and of every random generator", least=0)
    max_tokens: int = key(
        0, "use at most this many tokens of each data set, whole conversations picked at random; 0: all", least=0
    )
    max_examples: int = key(
        0,
        "use at most this many conversations of each data set, picked at random (the same ones with a larger number, and more); 0: "
        "all",
        least=0,
    )
    packed_data: str = key(
        "",
        "folder where the data are kept, encoded, for all processes and further runs; empty: headstart/packed in the user's cache "
        "folder (~/.cache), for data of 16 MB and more; memory: none, and every process encodes them",
    )
    document: str = key(
        "conversation",
        "what is packed. conversation: conversations, split at turns if they are longer than a row; answer: each answer with what "
        "comes before it, as the template renders it then, and only it is supervised, for templates that drop earlier thoughts",
        choices=("conversation", "answer"),
    )
    row_length: int = key(1024, "tokens per packed row", least=4)
    loss: str = key(
        "kl",
        "hard: cross entropy against the text; kl: forward KL from the target's distribution; lk: kl, with more and more weight on "
        "the rate of acceptance as it rises (arXiv 2602.23881); lk-log: minus the logarithm of the rate of acceptance; tv: one "
        "minus that rate; hard-l1: DSpark's, 0.1 hard and 1.8 tv",
        choices=LOSSES,
    )
    lk_eta: float = key(3.0, "lk only: the larger, the sooner the rate of acceptance replaces kl", least=0)
    lr: float = key(1e-3, "peak learning rate of AdamW", least=0)
    warmup_ratio: float = key(
        0.1, "share of the steps in which the learning rate rises; then it falls as a cosine", least=0, most=1
    )
    min_lr_ratio: float = key(0.0, "the learning rate ends at this share of its peak", least=0, most=1)
    weight_decay: float = key(0.0, "AdamW's weight decay, on matrices only", least=0)
    beta1: float = key(0.9, "AdamW's decay of the gradient's mean", least=0, most=0.99999)
    beta2: float = key(0.999, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    max_grad_norm: float = key(1.0, "longer gradients are cut to this norm; 0: never", least=0)
    max_skipped_steps: int = key(
        0,
        "leave out up to so many steps whose loss or gradient is not finite; one more, or with 0 the first, stops the run. Their "
        "rows are written to non-finite-steps.jsonl",
        least=0,
    )
    batch_rows: int = key(4, "rows per device and micro-step", least=1)
    accumulate: int = key(1, "micro-steps per optimiser step", least=1)
    num_epochs: float = key(1.0, "passes over the rows, if max_steps is 0", least=0)
    max_steps: int = key(0, "optimiser steps; 0: num_epochs decides", least=0)
    chunk_tokens: int = key(1024, "number of labels projected to the vocabulary at once; it limits the memory", least=1)
    autocast: str = key(
        "auto",
        "bf16: heads multiply in bfloat16; no: in fp32; auto: bf16 on a GPU, on the CPU whichever is measured faster",
        choices=("auto", "no", "bf16"),
    )
    cache_features: bool = key(False, "compute the target's features once for all rows and keep them on disk")
    feature_cache: str = key(
        "",
        "folder of these features, which other runs on the same target and rows may share; empty: in the run folder, removed at "
        "the end of the run",
    )
    cache_dtype: str = key(
        "auto",
        "dtype of the features on disk; auto: the target's. float8_e4m3fn takes half of bfloat16's disk and is off by 2 %",
        choices=("auto", "float32", "bfloat16", "float8_e4m3fn"),
    )
    log_every: int = key(10, "steps between lines of metrics.jsonl; a line describes its own step", least=1)
    eval_every: int = key(200, "steps between measurements of the acceptance; 0: at the end only", least=0)
    eval_prompts: int = key(
        16, "number of held-out conversations, of each set, to measure the acceptance on; 0: never", least=0
    )
    eval_tokens: int = key(96, "new tokens per held-out prompt", least=2)
    eval_data: str = key(
        "",
        "source of the held-out conversations, as `data`; those in the training data are left out. Empty: for stdlib the target's "
        "heldout.jsonl, else taken out of the data. Several by name, NAME=SOURCE,NAME=SOURCE: each has its own figures, at "
        "temperatures 0 and 1, of first and later turns",
    )
    patience: int = key(0, "end the run after this many measurements in a row without a better one; 0: never", least=0)
    checkpoint_every: int = key(200, "steps between checkpoints; 0: at the end only", least=0)
    keep_checkpoints: int = key(2, "number of newest checkpoints to keep", least=1)
    checkpoint_checksums: bool = key(
        False,
        "keep a checksum of every file of a checkpoint and compare it when a run is resumed: all bytes are read again",
    )
    tracker: str = key(
        "wandb",
        "wandb (online if logged in, else offline in the run folder) or none, beside metrics.jsonl",
        choices=TRACKERS,
    )
    log_checkpoints: bool = key(
        False,
        "wandb: log every checkpoint's head of up to 2 GiB as a version of the artifact, as a copy; false: only the finished head",
    )

    log_samples: bool = key(
        True,
        "wandb: log up to four held-out prompts in full, with the outputs; false: no text of a prompt or an output goes to W&B",
    )

    def __post_init__(self):
        check_values(self)
        data_sets(self.data)
        check_date(self.template_date)
        eval_sets(self.eval_data)  # raises for names that are not all there
        if not self.max_steps and not self.num_epochs:
            raise ValueError("num_epochs and max_steps are both 0: give one of them, or nothing is trained")
        if self.patience and not (self.eval_prompts and self.eval_every):
            raise ValueError(
                f"patience {self.patience} counts measurements, and there are none before the end: set eval_prompts and eval_every "
                "above 0, or leave it out"
            )
        if self.dry_run and (self.resume or self.resume_from):
            raise ValueError("dry_run looks at a new run: leave resume and resume_from out")
        if self.feature_cache and not self.cache_features:
            raise ValueError(
                f"feature_cache {self.feature_cache!r} is given and cache_features is false: set that to true, or leave it out"
            )

    @property
    def checkpoint_to_resume(self):
        """The checkpoint folder, or None for a new run."""
        going_on = self.resume or self.resume_from
        return choose_checkpoint(self.output, self.resume_from) if going_on else None

    def num_updates(self, num_rows, rows_per_step):
        """Optimiser steps of the run."""
        return self.max_steps or math.ceil(self.num_epochs * num_rows / rows_per_step)

    def learning_rate(self, step, num_steps):
        return warmup_cosine(step, num_steps, self.lr, self.warmup_ratio, self.min_lr_ratio)


# Keys that may change in a resumed run; any other would make it another run. (The product of batch_rows, accumulate and the number
# of processes must stay: checkpointing.check_same_run.)
CHANGEABLE = {"output", "max_steps", "num_epochs", "log_every", "tracker", "log_checkpoints", "log_samples"}
CHANGEABLE |= {
    "max_skipped_steps",
    "checkpoint_activations",  # the bits stay the same
    "checkpoint_every",
    "keep_checkpoints",
    "checkpoint_checksums",
    "eval_every",
    "eval_tokens",
    "eval_data",
    "patience",
    "template_date",  # the rows tell whether it is the run's
    "feature_cache",
    "packed_data",
    "batch_rows",
    "accumulate",
}


def is_due(step, num_steps, every):
    """Whether work is due after `step` steps that comes after every `every` steps (0: never) and at the end."""
    return step == num_steps or (every > 0 and step > 0 and step % every == 0)
