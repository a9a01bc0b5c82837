"""The list of families of heads; recognise, read and write files of any family.

Adding a family adds its line to FAMILIES and modules called by its key: heads/<key>.py, heads/formats/<key>.py,
inference/speculation/drafters/<key>.py, hub_export/readers/<key>.py and, where it is trained here, train/<key>.py. Nobody else
asks which family a head is of.

A file's family is recognised by its tensors' names. Every format module has the same members: FORMATS (the formats it writes),
CONFIG_NAMES, `recognises`, `native_format`, `check_format`, `to_file`, and `from_file`, which gives a Reading
(heads/storage/reading.py). This file touches no disk (heads/checkpoint.py does).
"""

from dataclasses import dataclass
from types import ModuleType

from .block import BlockHead
from .eagle import Eagle
from .eagle3 import Eagle3
from .formats import (
    block as block_format,
    eagle as eagle_format,
    eagle3 as eagle3_format,
    medusa as medusa_format,
    mlp_speculator as mlp_speculator_format,
)
from .medusa import Medusa
from .mlp_speculator import MLPSpeculator
from .storage.reading import listed
from .storage.user_errors import list_names


@dataclass(frozen=True)
class Family:
    """A family of heads."""

    key: str  # name of its modules, and the "method" of a speculative_config
    name: str  # the name that users read
    head: type  # the subclass of Head
    formats: ModuleType  # of heads/formats/
    paper: str  # arXiv number


# In the order in which they are tried on a file.
FAMILIES = (
    Family("medusa", "Medusa", Medusa, medusa_format, "2401.10774"),
    Family("mlp_speculator", "MLP speculator", MLPSpeculator, mlp_speculator_format, "2404.19124"),
    Family("block", "DFlash", BlockHead, block_format, "2602.06036"),
    Family("eagle3", "EAGLE-3", Eagle3, eagle3_format, "2503.01840"),
    Family("eagle", "EAGLE", Eagle, eagle_format, "2401.15077"),
)
# Two families have a format "speculators".
FORMATS = tuple(dict.fromkeys(format for family in FAMILIES for format in family.formats.FORMATS))

# The file names that readers of a format expect. FasterDecoding's classes open only this .pt, TGI only this .safetensors.
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
# Files that are split where they are large. Readers of the others open the one file of that name and nothing else.
SHARDED_FILES = ("model.safetensors",)

# Prefixes that some files put before all tensor names: of data-parallel training, or of the model's attribute that holds the head.
PREFIXES = ("module.", "medusa_heads.", "medusa_head.", "model.")
OUTSIDE = ("lm_head.weight", "d2t", "t2d")  # without the prefix "model.", as in a causal language model
# Names of the families in config.json ("architectures", "model_type").
NAMED_FAMILIES = {name: family for family in FAMILIES for name in family.formats.CONFIG_NAMES}


def family_of(head):
    """The Family of a head; ValueError for a module that is not a head."""
    for family in FAMILIES:
        if isinstance(head, family.head):
            return family
    names = ", ".join(family.name for family in FAMILIES)
    raise ValueError(f"a {type(head).__name__} is not a head: expected one of {names}")


def check_family(head, expected):
    """ValueError naming both, unless `head` is of the Family `expected`."""
    found = family_of(head)
    if found != expected:
        raise ValueError(f"this is a head of the family {found.name}, expected one of the family {expected.name}")


def recognise(names):
    """The Family whose tensor names these are, or None."""
    names, _ = without_prefix(dict.fromkeys(names))
    return next((family for family in FAMILIES if family.formats.recognises(names)), None)


def without_prefix(tensors):
    """({name: tensor} without the prefix of PREFIXES that all names share, names in OUTSIDE aside; the prefix, or "")."""
    inside = [name for name in tensors if name not in OUTSIDE]
    prefix = next((prefix for prefix in PREFIXES if inside and all(name.startswith(prefix) for name in inside)), "")
    # A target's names begin with "model.", too, and names of one of its layers are much like a head's.
    if prefix == "model." and "model.fc.weight" not in tensors:
        prefix = ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, prefix


def native_format(head):
    """The default format of a head, which needs nothing but the head."""
    return family_of(head).formats.native_format(head)


def check_format(head, format):
    """ValueError if `format` cannot hold `head`. Returns the result of the family's own check_format."""
    family = family_of(head)
    formats = family.formats
    if format not in formats.FORMATS:
        kind = "unknown format" if format not in FORMATS else f"a head of the family {family.name} has no format"
        raise ValueError(f"{kind} {format!r}: expected one of {', '.join(formats.FORMATS)}")
    return formats.check_format(head, format)


def to_file(head, format, lm_head_weight=None):
    """`head` as a file in `format`: ({name: tensor}, config dict).

    lm_head_weight: the target's lm_head [V, H], for formats that carry a copy. ValueError as check_format.
    """
    check_format(head, format)
    return family_of(head).formats.to_file(head, format, lm_head_weight)


def from_file(tensors, config):
    """Read a file's tensors: (class of the head, Reading), whatever the family.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError listing names if no
    family is recognised, and the errors of the family's from_file (UnknownVocabulary if only the target knows the size).
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
    notes = []
    if prefix:
        notes.append(f'the names of its tensors begin with "{prefix}", which is left out')
    for name in (*listed(config.get("architectures")), *listed([config.get("model_type")])):
        if NAMED_FAMILIES.get(name, family) != family:
            notes.append(
                f"config.json calls itself {name}, which is {NAMED_FAMILIES[name].name}; its tensors are {family.name}"
            )
    reading = family.formats.from_file(tensors, config)
    return family.head, reading._replace(notes=notes + reading.notes)
