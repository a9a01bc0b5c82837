"""What drafts: the families of heads that are trained, the draft model, the sequence itself. A further family is a further line."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """Something that drafts.

    name: as the tables say it; trainer: the module of train/ that trains it, and its key in random_heads.py, or None; keys: of the
    trainer's recipe, where the name of a setting in braces stands for its value, {slots} for one more than the depth; trees:
    whether trees are measured beside the chain; rival: the source that it is compared with, which differs in the loss alone;
    replayed: whether it stands in the table of speed, for which random_heads.py must know it
    """

    name: str
    trainer: str | None = None
    keys: dict = field(default_factory=dict)
    trees: bool = True
    rival: str | None = None
    replayed: bool = True

    @property
    def slug(self):
        """The name as a file's."""
        return self.name.lower().replace(",", "").replace(" ", "-")

    def recipe(self, settings):
        """The keys as the trainer takes them."""
        return {
            name: value.format(**vars(settings), slots=settings.depth + 1) if isinstance(value, str) else value
            for name, value in self.keys.items()
        }


MEDUSA = {"num_heads": "{depth}", "lr": 1e-3, "warmup_ratio": 0.05, "head_weight_decay": 0.8}
MLP_SPECULATOR = {"num_steps": "{depth}", "lr": 2e-3, "warmup_ratio": 0.05}
EAGLE = {"num_speculative_tokens": "{depth}", "lr": 1e-3, "warmup_ratio": 0.05, "noise": 0.2}
EAGLE_3 = {"num_speculative_tokens": "{depth}", "num_steps": "{depth}", "lr": 1e-3, "warmup_ratio": 0.05}
BLOCK = {"block_size": "{slots}", "num_layers": 2, "lr": 1e-3, "warmup_ratio": 0.05}
LK = {"loss": "lk"}

# In the order that papers give, the weakest first. All start from the recipes of configs/, at a depth that they share.
HEADS = (
    Source("Medusa", "medusa", MEDUSA),
    Source("MLP speculator", "mlp_speculator", MLP_SPECULATOR),
    Source("EAGLE", "eagle", EAGLE),
    Source("EAGLE-3", "eagle3", EAGLE_3),
    Source("block drafter", "block", BLOCK),  # DFlash's layers with DSpark's edge
    Source("Medusa, LK", "medusa", MEDUSA | LK, trees=False, rival="Medusa", replayed=False),
    Source("EAGLE-3, LK", "eagle3", EAGLE_3 | LK, trees=False, rival="EAGLE-3", replayed=False),
)
DRAFT_MODEL = Source("draft model")
NGRAM = Source("n-gram", trees=False)
SOURCES = (*HEADS, DRAFT_MODEL, NGRAM)


def choose(names):
    """The sources of these names, in their own order; all for None. ValueError for a name that there is not."""
    known = {source.name.lower(): source for source in SOURCES}
    asked = [name.strip().lower() for name in names.split(";")] if names else list(known)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r} is not known; choose of {'; '.join(one.name for one in SOURCES)}")
    return [source for name, source in known.items() if name in asked]
