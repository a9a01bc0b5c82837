"""What the trainers' tests train: every family of heads and both second stages, and which values of their keys change a run.

How a run of one is started, stopped and compared: tiny_runs.py. What its losses are: formulae.py.
"""

from dataclasses import dataclass, field, fields
from importlib import import_module

from headstart.heads.families import FAMILIES

START = object()  # stands for the folder of heads that a second stage starts from
CHEAP = {"max_steps": 2}
MEASURED = {"max_steps": 3, "eval_every": 2, "eval_prompts": 3, "eval_tokens": 6}
SAVED = {"max_steps": 4, "checkpoint_every": 1}
RESUMABLE = {"max_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9}
EVERYTHING = MEASURED | {"cache_features": True, "checkpoint_every": 2}
JOINT = {"stage": "joint", "start_from": START, "target_lr": 0.005, "lora_rank": 4, "lora_alpha": 8}
STAGE_2 = {"stage": 2, "start_from": START, "prompt_tokens": 5, "answer_tokens": 9, "num_prompts": 20, "loss": "hard"}


@dataclass(frozen=True)
class TinyTraining:
    """A family of heads, or a second stage of it, as the tests train it."""

    family: str  # the key of heads/families.py, which its script is called by
    recipe: dict  # what the script is told beside what all are told
    changes: list  # pairs ({keys of a run}, {another key: a value with which it is another run})
    elsewhere: frozenset = frozenset()  # keys that other tests show to do something
    everything: dict = field(default_factory=lambda: EVERYTHING)  # keys with which a run does all it can

    @property
    def script(self):
        return import_module(f"headstart.train.{self.family}")

    @property
    def keys(self):
        return {item.name for item in fields(self.script.Recipe)}


MEDUSA_CHANGES = {
    "seed": 1,
    "target_dtype": "bfloat16",
    "max_tokens": 300,
    "row_length": 48,
    "num_heads": 2,
    "num_layers": 2,
    "shared_lm_head": True,
    "loss": "lk",
    "head_weight_decay": 0.5,
    "lr": 0.02,
    "warmup_ratio": 0.5,
    "min_lr_ratio": 0.5,
    "weight_decay": 0.3,
    "beta1": 0.5,
    "beta2": 0.9,
    "max_grad_norm": 0.1,
    "batch_rows": 3,
    "accumulate": 2,
    "max_steps": 3,
    "chunk_tokens": 3,
    "autocast": "bf16",
    "log_every": 2,
}
MLP_SPECULATOR_CHANGES = {
    "seed": 1,
    "max_tokens": 300,
    "row_length": 48,
    "loss": "hard",
    "lr": 0.02,
    "weight_decay": 0.9,
    "beta1": 0.5,
    "beta2": 0.5,
    "num_steps": 2,
    "inner_size": 16,
    "tie_weights": False,
    "scale_input": False,
    "step_weight_decay": 0.5,
    "supervise": "all",
}
EAGLE_CHANGES = {
    "seed": 1,
    "loss": "hard",
    "lr": 0.02,
    "beta2": 0.5,
    "max_grad_value": 1e-3,
    "feature_weight": 0.1,
    "token_weight": 1,
    "hass_weight": 1,
    "noise": 0,
    "num_steps": 1,
    "step_decay": 0.5,
}
EAGLE3_CHANGES = {
    "seed": 1,
    "loss": "hard",
    "lr": 0.02,
    "beta2": 0.5,
    "max_grad_norm": 0.01,
    "num_steps": 2,
    "step_decay": 0.5,
    "draft_vocab_size": 0,
    "aux_layers": "0,2",
    "hidden_size": 16,
}
BLOCK_CHANGES = {
    "seed": 1,
    "loss": "tv",
    "lr": 0.02,
    "beta2": 0.5,
    "warmup_ratio": 0.9,
    "num_layers": 1,
    "block_size": 5,
    "is_causal": True,
    "sliding_window": 4,
    "aux_layers": "0,1",
    "mask_token_id": 7,
    "num_anchors": 3,
    "edge_rank": 0,
    "sample_from_anchor": True,
    "confidence_weight": 1,
    "draft_vocab_size": 30,
    "depth_weights": "none",
    "gamma": 1,
}
DFLASH2 = {"edge_rank": 0, "selector_rank": 3, "selector_top_k": 12, "conv_kernel_size": 2, "conv_group_size": 4}
JOINT_CHANGES = {
    "target_lr": 0.01,
    "lora_rank": 2,
    "lora_alpha": 3,
    "lora_dropout": 0.4,
    "lora_targets": "q_proj",
    "medusa_weight": 0.5,
    "target_loss": "hard",
}
STAGE_2_CHANGES = {"prompt_tokens": 4, "answer_tokens": 8, "num_prompts": 18, "seed": 1}

# Keys of every script, shown by the runs of Medusa heads. What follows the others: test_recipes.py, the tests of run/ and teacher/.
OF_ALL = {"target", "data", "output", "resume", "resume_from", "tracker", "num_epochs", "eval_data", "log_checkpoints"}
OF_ALL |= {
    "start_from",
    "max_skipped_steps",
    "dry_run",
    "cache_features",
    "feature_cache",
    "template_date",
    "data_rules",
    "log_samples",
    "packed_data",
    "max_examples",
    "patience",
    "checkpoint_checksums",
    "document",
}

TRAININGS = {
    "medusa": TinyTraining(
        "medusa",
        {"num_heads": 3},
        changes=[
            (CHEAP, MEDUSA_CHANGES),
            (CHEAP | {"cache_features": True}, {"cache_dtype": "bfloat16"}),
            (CHEAP | {"loss": "lk"}, {"lk_eta": 1}),
            (MEASURED, {"eval_every": 1, "eval_prompts": 2, "eval_tokens": 5}),
            (SAVED, {"checkpoint_every": 2, "keep_checkpoints": 1}),
        ],
        elsewhere=frozenset(OF_ALL | {"stage"} | JOINT_CHANGES.keys()),
    ),
    "mlp_speculator": TinyTraining(
        "mlp_speculator",
        {"num_steps": 3, "inner_size": 24},
        changes=[(CHEAP, MLP_SPECULATOR_CHANGES), (CHEAP | {"loss": "lk"}, {"lk_eta": 9})],
        elsewhere=frozenset({"stage"} | STAGE_2_CHANGES.keys()),
    ),
    "eagle": TinyTraining(
        "eagle",
        {"num_steps": 2, "num_speculative_tokens": 3},
        changes=[
            (CHEAP, EAGLE_CHANGES),
            (CHEAP | {"max_grad_value": 0}, {"max_grad_norm": 0.01}),
            (CHEAP | {"hass_weight": 1}, {"hass_top": 2}),
        ],
        elsewhere=frozenset({"num_speculative_tokens", "checkpoint_activations"}),
    ),
    "eagle3": TinyTraining(
        "eagle3",
        {"num_steps": 3, "num_speculative_tokens": 3, "aux_layers": "0,1,2", "draft_vocab_size": 40},
        changes=[(CHEAP, EAGLE3_CHANGES)],
        elsewhere=frozenset({"num_speculative_tokens", "checkpoint_activations"}),
    ),
    "block": TinyTraining(
        "block",
        {"block_size": 4, "num_anchors": 9, "edge_rank": 4},
        changes=[
            (CHEAP, BLOCK_CHANGES),
            (CHEAP | {"loss": "hard"}, {"depth_weights": "dpace"}),
            (
                CHEAP | {"sliding_window": 6},
                {"num_full_layers": 0, "sliding_is_causal": False, "window_of_block": True},
            ),
            (CHEAP | {"edge_rank": 0}, {"selector_rank": 3, "conv_kernel_size": 2}),
            (CHEAP | DFLASH2, {"selector_top_k": 3, "selector_weight": 0.1, "conv_group_size": 8}),
        ],
        elsewhere=frozenset({"checkpoint_activations"}),
    ),
    "joint": TinyTraining(
        "medusa",
        {"num_heads": 3} | JOINT,
        changes=[(CHEAP, JOINT_CHANGES)],
        everything={key: value for key, value in EVERYTHING.items() if key != "cache_features"},
    ),
    "stage 2": TinyTraining(
        "mlp_speculator", {"num_steps": 3, "inner_size": 24} | STAGE_2, changes=[(CHEAP, STAGE_2_CHANGES)]
    ),
}
HEADS = [family.key for family in FAMILIES]  # a new family of heads has to be listed above, too
