"""On-disk format of the MLP speculator: IBM's, which fms-extras, TGI and vLLM (to 0.9) read.

Tensors: `speculator.` before the names of heads/mlp_speculator.py, all of them; fms-extras's own checkpoints lack this prefix, and
all of its readers accept that. A tied file holds the tensors that steps share once (emb.0, proj.0, proj.1, ln.0, head.0); published
files may repeat them for every step. Tensors decide sizes, whether steps are tied, and the number of steps where every step has
tensors. config.json tells the rest: the number of steps of a tied file that repeats nothing, and scale_input.

This file touches no disk.
"""

from importlib.metadata import version

import torch

from ..mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from ..storage.reading import Reading, assume, compare
from ..storage.tensor_checks import check_tensors, shape_of

FORMATS = ("mlp-speculator",)
CONFIG_NAMES = ("mlp_speculator", "MLPSpeculatorPreTrainedModel")
PREFIX = "speculator."


def native_format(head):
    return FORMATS[0]


def check_format(head, format):
    """Never fails: the one format holds every MLP speculator."""
    return format


def to_file(head, format=FORMATS[0], lm_head_weight=None):
    """`head` as a file: ({name: tensor}, config dict)."""
    config = head.config
    tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    # Every key that a reader would guess if it were missing. inner_dim is never 0: other readers know that value, TGI does not.
    return tensors, {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": config.base_model_name_or_path,
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "n_predict": config.num_steps,
        "n_candidates": 5,
        "top_k_tokens_per_head": [max(5 - i, 1) for i in range(config.num_steps)],
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "transformers_version": version("transformers"),
    }


def recognises(names):
    """Whether a file with tensors of these names holds an MLP speculator."""
    bare = sum(f"{kind}.0.weight" in names for kind in ("emb", "proj", "ln", "head"))
    return bare >= 3 or any(name.startswith(PREFIX) for name in names)


def from_file(tensors, config):
    """Read a file's tensors: Reading of an MLPSpeculatorConfig.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen, not floating point, or unequal although steps are tied; and missing config keys.
    """
    notes = []
    if not any(name.startswith(PREFIX) for name in tensors):
        notes.append(f'the names of its tensors lack the prefix "{PREFIX}"')
        tensors = {PREFIX + name: tensor for name, tensor in tensors.items()}
    for key in ("tie_weights", "scale_input"):
        if config.get(key) is not None and not isinstance(config[key], bool):
            raise ValueError(f'config.json says "{key}": {config[key]!r}, expected true or false')
    tensors, tied, steps = _read_steps(tensors, config, notes)
    if config.get("scale_input") is None:
        assume(notes, "scale_input", False, "as its readers do")
    sizes = [shape_of(tensors, PREFIX + name) for name in ("emb.0.weight", "proj.0.weight")]
    shape = MLPSpeculatorConfig(
        hidden_size=sizes[1][1],
        vocab_size=sizes[0][0],
        inner_size=sizes[0][1],
        num_steps=steps,
        tie_weights=tied,
        scale_input=config.get("scale_input") or False,
        base_model_name_or_path=config.get("base_model_name_or_path") or "",
    )
    with torch.device("meta"):
        expected = {PREFIX + name: tensor.shape for name, tensor in MLPSpeculator(shape).state_dict().items()}
    check_tensors(tensors, expected)
    # inner_dim of 0, or none at all, means emb_dim.
    config = config | {"inner_dim": config.get("inner_dim") or config.get("emb_dim")}
    found = {"n_predict": steps, "vocab_size": shape.vocab_size, "emb_dim": shape.hidden_size}
    for key, value in (found | {"inner_dim": shape.inner_size}).items():
        compare(notes, config, key, value)
    widths = config.get("top_k_tokens_per_head")
    if isinstance(widths, list) and len(widths) != steps:
        notes.append(f'config.json says {len(widths)} numbers as "top_k_tokens_per_head"; there are {steps} steps')
    state = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return Reading(shape, state, FORMATS[0], notes)


def _read_steps(tensors, config, notes):
    """(tensors without a tied file's repetitions, whether steps are tied, number of steps), as the tensors tell.

    A file that calls itself tied but holds different tensors for every step is untied. A file that does not, but holds a second
    proj and nothing else of a second step, is tied. ValueError if a tied file holds different tensors for only some steps.
    """
    said, held = config.get("tie_weights") or False, _num_held(tensors)
    repeated, differing = _find_repeated(tensors)
    most = 5 * held - 6  # repeatable tensors: emb, proj, ln's two and head, without those of step 0 and proj.1
    tied, whole = said, len(repeated) == most
    if said and differing:
        if differing != repeated or 2 * len(repeated) < most:
            first = differing[0]
            raise ValueError(f"config.json says that steps are tied, but {first} is not {_shared_name(first)}")
        tied = False
        notes.append('config.json says "tie_weights": True; the tensors of the steps are different ones')
    if not said and not repeated and f"{PREFIX}proj.1.weight" in tensors:
        tied = True
        notes.append('config.json does not say "tie_weights": True; the tensors hold what tied steps share')
    if not tied:
        return tensors, False, held
    steps = config.get("n_predict")
    if repeated and (whole or type(steps) is not int or steps < held):
        steps = held
    if type(steps) is not int or not 1 <= steps <= 64:
        raise ValueError(f'steps are tied, so config.json must say "n_predict", from 1 to 64; it says {steps!r}')
    return {name: tensor for name, tensor in tensors.items() if name not in repeated}, True, steps


def _num_held(tensors):
    """Number of steps that have tensors, by the names.

    Bounded by the number of names, so that a stray huge index ends as a missing name and not as a huge module.
    """
    steps = [name.removeprefix(PREFIX).split(".")[1:2] for name in tensors if name.startswith(PREFIX)]
    found = [int(step[0]) + 1 for step in steps if step and step[0].isdigit()]
    return max(1, min(max(found, default=1), len(tensors)))


def _find_repeated(tensors):
    """([names of shared tensors that are repeated for a later step], those of them that differ from the shared tensor)"""
    shared = {name: _shared_name(name) for name in tensors}
    repeated = [name for name, first in shared.items() if first not in (None, name)]
    return repeated, [name for name in repeated if not _same(tensors[name], tensors.get(shared[name]))]


def _same(one, other):
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _shared_name(name):
    """The name under which a tied file holds a step's tensor; None for a tensor that belongs to no step.

    The first proj has another shape, so the second is shared.
    """
    kind, _, rest = name.removeprefix(PREFIX).partition(".")
    step, _, what = rest.partition(".")
    if not name.startswith(PREFIX) or not step.isdigit():
        return None
    return f"{PREFIX}{kind}.{min(int(step), 1 if kind == 'proj' else 0)}.{what}"
