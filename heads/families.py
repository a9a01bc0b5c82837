"""The families of heads and the file formats of each.

A family is recognised by its tensors' names. Every format module answers the same questions: FORMATS (what it writes),
`recognises`, `native_format`, `check_format`, `to_file`, and `from_file`, which gives a Reading (heads/storage/reading.py). This
file touches no disk (heads/checkpoint.py does).
"""

from .eagle import Eagle
from .eagle3 import Eagle3
from .formats import (
    eagle as eagle_format,
    eagle3 as eagle3_format,
    medusa as medusa_format,
    mlp_speculator as mlp_speculator_format,
)
from .medusa import Medusa
from .mlp_speculator import MLPSpeculator
from .storage.reading import listed
from .storage.user_errors import list_names

# Name as users read it -> the module's class and its formats; in the order in which a file is tried.
FAMILIES = {
    "Medusa": (Medusa, medusa_format),
    "MLP speculator": (MLPSpeculator, mlp_speculator_format),
    "EAGLE-3": (Eagle3, eagle3_format),
    "EAGLE": (Eagle, eagle_format),
}
FORMATS = tuple(format for _, formats in FAMILIES.values() for format in formats.FORMATS)

# The file names that readers of a format expect. FasterDecoding's classes open only the .pt, TGI only the .safetensors of
# that name.
SAFETENSORS_FILE = dict.fromkeys(FORMATS, "model.safetensors")
SAFETENSORS_FILE |= dict.fromkeys(("medusa", "medusa-shared"), "medusa_lm_head.safetensors")
TORCH_FILE = dict.fromkeys(("medusa", "medusa-shared"), "medusa_lm_head.pt")
# In the order in which a folder is searched: where both are there, the .pt repeats the .safetensors. Published EAGLE heads
# are .bin files.
INDEX_SUFFIX = ".index.json"
WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
WEIGHT_FILES += (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# What is split where it is large. Readers of the others open the one file of that name and nothing else.
SHARDED_FILES = ("model.safetensors",)

# What files put before the names of all their tensors: data-parallel training, and the attribute of a model that holds the head.
PREFIXES = ("module.", "medusa_heads.", "medusa_head.", "model.")
OUTSIDE = ("lm_head.weight", "d2t", "t2d")  # beside "model.", as of a causal language model
# What config.json says of the family ("architectures", "model_type"). LlamaForCausalLM says nothing: every EAGLE calls itself so.
NAMED_FAMILIES = {"medusa": "Medusa", "MedusaModel": "Medusa"}
NAMED_FAMILIES |= dict.fromkeys(("mlp_speculator", "MLPSpeculatorPreTrainedModel"), "MLP speculator")
NAMED_FAMILIES |= dict.fromkeys(("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), "EAGLE")
NAMED_FAMILIES |= dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel"), "EAGLE-3")


def family_of(head):
    """The name of a head's family; ValueError for a module that is no head."""
    for family, (kind, _) in FAMILIES.items():
        if isinstance(head, kind):
            return family
    raise ValueError(f"a {type(head).__name__} is no head: expected one of {', '.join(FAMILIES)}")


def check_family(head, expected):
    """ValueError naming both, unless `head` is of the family `expected` (a key of FAMILIES)."""
    found = family_of(head)
    if found != expected:
        raise ValueError(f"this is a head of the family {found}, expected one of the family {expected}")


def recognise(names):
    """The family whose tensor names these are, or None."""
    names, _ = without_prefix(dict.fromkeys(names))
    return next((family for family, (_, formats) in FAMILIES.items() if formats.recognises(names)), None)


def without_prefix(tensors):
    """({name: tensor} without the prefix of PREFIXES that every name has, but for those that stay outside; the prefix or "")."""
    inside = [name for name in tensors if name not in OUTSIDE]
    prefix = next((prefix for prefix in PREFIXES if inside and all(name.startswith(prefix) for name in inside)), "")
    # A target's names begin with "model.", too, and those of one layer are much like a head's.
    if prefix == "model." and "model.fc.weight" not in tensors:
        prefix = ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, prefix


def native_format(head):
    """The format that a head is written in unless another is asked for: it needs nothing but the head."""
    return _formats_of(head).native_format(head)


def check_format(head, format):
    """ValueError where `format` cannot say `head`. Returns what the family's own check_format does."""
    formats = _formats_of(head)
    if format not in formats.FORMATS:
        kind = "unknown format" if format not in FORMATS else f"a head of the family {family_of(head)} has no format"
        raise ValueError(f"{kind} {format!r}: expected one of {', '.join(formats.FORMATS)}")
    return formats.check_format(head, format)


def to_file(head, format, lm_head_weight=None):
    """The tensors and the config that say `head` in `format`: ({name: tensor}, config dict).

    lm_head_weight: the target's lm_head [V, H], for the one format that carries a copy. ValueError as check_format.
    """
    check_format(head, format)
    return _formats_of(head).to_file(head, format, lm_head_weight)


def from_file(tensors, config):
    """Read a file's tensors: (class of the head, Reading), whatever the family.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError listing names if no
    family is recognised, and what the family's from_file raises.
    """
    given = tensors
    tensors, prefix = without_prefix(given)
    if twice := [name for name in tensors if prefix and name in given and prefix + name in given]:
        raise ValueError(f'it holds {list_names(twice)} both with "{prefix}" and without: leave one of the two out')
    family = recognise(tensors)
    if family is None:
        raise ValueError(
            f"its tensors follow no known format of heads ({', '.join(FORMATS)}); it holds {list_names(tensors)}"
        )
    kind, formats = FAMILIES[family]
    notes = []
    if prefix:
        notes.append(f'the names of its tensors begin with "{prefix}", which is left out')
    for name in (*listed(config.get("architectures")), *listed([config.get("model_type")])):
        if NAMED_FAMILIES.get(name, family) != family:
            notes.append(f"config.json calls itself {name}, which is {NAMED_FAMILIES[name]}; its tensors are {family}")
    reading = formats.from_file(tensors, config)
    return kind, reading._replace(notes=notes + reading.notes)


def _formats_of(head):
    return FAMILIES[family_of(head)][1]
