"""Settings of the headline, and its two scales: `full` for one H200, `tiny` for a CPU and a minute or two."""

from dataclasses import dataclass, field, fields
from pathlib import Path

STAGES = ("target", "answers", "heads", "acceptance", "speed")
HEAD_WIDTH = 64  # of attention


def option(default, help, tiny=None):
    """A field: its value at full scale, its explanation, and its value at tiny scale where that is another."""
    return field(default=default, metadata={"help": help, "tiny": default if tiny is None else tiny})


@dataclass(frozen=True)
class Settings:
    """Everything that the figures follow from, beside the installed packages and the clock."""

    math: str = option("", "JSONL of mathematical conversations to train on, such as gsm8k_train.jsonl")
    seed: int = option(0, "seed of weights, orders, draws and answers")
    device: str = option("auto", "auto, cuda or cpu", tiny="cpu")
    packages: bool = option(True, "code of installed packages, too, not of the standard library alone", tiny=False)
    max_pairs: int = option(0, "at most so many pairs of code, and of mathematics, to train on; 0: all", tiny=600)
    math_test: int = option(512, "conversations of mathematics that are held out", tiny=32)
    math_repeats: int = option(3, "how often a pass holds each conversation of mathematics", tiny=1)
    heldout_pairs: int = option(512, "held-out pairs of code, and of mathematics, for bits per byte", tiny=32)
    vocab_size: int = option(16384, "tokens of the byte-level BPE", tiny=512)
    width: int = option(1024, "width of the target; with `layers` it decides the target's size", tiny=128)
    layers: int = option(10, "layers of the target", tiny=7)
    draft_width: int = option(384, "width of the draft model", tiny=64)
    draft_layers: int = option(4, "layers of the draft model", tiny=1)
    row_length: int = option(1024, "tokens of a packed row", tiny=256)
    target_rows: int = option(64, "rows of a step of the target and of the draft model", tiny=2)
    head_rows: int = option(16, "rows of a step of the heads", tiny=4)
    target_minutes: float = option(4.0, "minutes of training of the target", tiny=0.1)
    head_minutes: float = option(1.0, "minutes of training of each head and of the draft model", tiny=0.02)
    speed_minutes: float = option(9.0, "the second table starts no further line after so many minutes", tiny=0.5)
    trial_steps: int = option(150, "steps of the trial that tells how many steps a head makes in its minutes", tiny=4)
    num_answers: int = option(32000, "training prompts that the target answers", tiny=48)
    answer_tokens: int = option(256, "longest answer to train on", tiny=32)
    concurrency: int = option(256, "answers in flight", tiny=8)
    depth: int = option(5, "depth of chains and trees, for every family", tiny=3)
    nodes: int = option(64, "nodes of a tree", tiny=8)
    rate_prompts: int = option(32, "prompts of each subject that trees are built on", tiny=2)
    prompts: int = option(128, "further prompts of each subject that are measured, 64 at a time", tiny=4)
    alone: int = option(16, "of these, the first ones are measured alone, too", tiny=2)
    batch: int = option(64, "requests at once", tiny=4)
    max_tokens: int = option(128, "new tokens of a measured prompt", tiny=16)
    shape: str = option("llama-3-8b", "shape of the second table; `target`: the trained target's own", tiny="target")
    speed_prompt: int = option(1000, "prompt tokens of the second table", tiny=32)
    speed_tokens: int = option(512, "new tokens of the second table; the first steps admit prompts", tiny=40)

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in ("seed", "max_pairs") else 1 if isinstance(value, int) else 1e-6
            if one.type in (int, float) and value < least:
                raise ValueError(f"--{one.name.replace('_', '-')} must be at least {least:g}, got {value}")
        for name in ("width", "draft_width"):
            if getattr(self, name) % HEAD_WIDTH:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be a multiple of {HEAD_WIDTH}, got {getattr(self, name)}"
                )
        if self.layers < 7:
            raise ValueError(
                f"--layers must be at least 7, from where on EAGLE-3 has its three layers, got {self.layers}"
            )
        if self.alone > self.prompts:
            raise ValueError(f"--alone {self.alone} prompts are the first of --prompts {self.prompts}: lower it")

    @classmethod
    def at(cls, scale, **given):
        """The settings of a scale, with those `given` in their place."""
        values = {one.name: one.default if scale == "full" else one.metadata["tiny"] for one in fields(cls)}
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    def architecture(self, width, layers):
        """The keys of assets/make's recipe that say what a model of this width and depth is."""
        heads = width // HEAD_WIDTH
        return {
            "hidden_size": width,
            "intermediate_size": max(int(2.75 * width) // 128 * 128, 128),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": heads // 2 or 1,
            "vocab_size": self.vocab_size,
        }


def check_math(settings):
    """ValueError unless the mathematics is there."""
    if not settings.math:
        raise ValueError("--math must name a JSONL of conversations to train on, such as gsm8k_train.jsonl")
    if not Path(settings.math).is_file():
        raise ValueError(f"there is no file {settings.math}: --math names a JSONL of conversations (gsm8k_train.jsonl)")
