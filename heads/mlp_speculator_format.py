"""On-disk format of the MLP speculator: IBM's, which fms-extras, TGI and vLLM (to 0.9) read.

Tensors: `speculator.` before the names of heads/mlp_speculator.py, complete. A tied file says what steps share once (emb.0, proj.0,
proj.1, ln.0, head.0); published ones may repeat it for every step. Sizes are those of the tensors, and so is the number of steps of
an untied file; config.json answers what tensors cannot: whether steps are tied, how many there are then, and scale_input.

This file touches no disk.
"""

from importlib.metadata import version

import torch

from .mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from .reading import Reading
from .tensor_checks import check_tensors, shape_of

FORMATS = ("mlp-speculator",)
PREFIX = "speculator."


def native_format(head):
    return FORMATS[0]


def check_format(head, format):
    """The one format says every MLP speculator."""
    return format


def to_file(head, format=FORMATS[0], lm_head_weight=None):
    """The tensors and the config that say `head`: ({name: tensor}, config dict)."""
    config = head.config
    tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    # Every key that a reader would guess when it is missing. inner_dim is never 0, though readers know it: TGI takes it as it is.
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
    return any(name.startswith(PREFIX) for name in names)


def from_file(tensors, config):
    """Read a file's tensors: Reading of an MLPSpeculatorConfig.

    tensors: {name: tensor} as the file holds them; config: its config.json as a dict. Raises ValueError naming tensors that are
    missing, unexpected, misshapen, no floating point or not the ones that tied steps share, and config keys that are needed.
    """
    tensors, tied = dict(tensors), config.get("tie_weights", False)
    for key in ("tie_weights", "scale_input"):
        if not isinstance(config.get(key, False), bool):
            raise ValueError(f'config.json says "{key}": {config[key]!r}, expected true or false')
    if tied:
        _drop_repeated(tensors)
    steps = _num_steps(tensors, config, tied)
    sizes = [shape_of(tensors, PREFIX + name) for name in ("emb.0.weight", "proj.0.weight")]
    shape = MLPSpeculatorConfig(
        hidden_size=sizes[1][1],
        vocab_size=sizes[0][0],
        inner_size=sizes[0][1],
        num_steps=steps,
        tie_weights=tied,
        scale_input=config.get("scale_input", False),
        base_model_name_or_path=config.get("base_model_name_or_path") or "",
    )
    with torch.device("meta"):
        expected = {PREFIX + name: tensor.shape for name, tensor in MLPSpeculator(shape).state_dict().items()}
    check_tensors(tensors, expected)
    _check_sizes(shape, config)
    state = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return Reading(shape, state, FORMATS[0], [])


def _drop_repeated(tensors):
    """Take away what a tied file says again for later steps; ValueError where it says something else."""
    for name in list(tensors):
        kind, _, rest = name.removeprefix(PREFIX).partition(".")
        step, _, what = rest.partition(".")
        first = 1 if kind == "proj" else 0
        if name.startswith(PREFIX) and step.isdigit() and int(step) > first:
            shared = f"{PREFIX}{kind}.{first}.{what}"
            if shared not in tensors or not torch.equal(tensors[name], tensors[shared]):
                raise ValueError(f"config.json says that steps are tied, but {name} is not {shared}")
            del tensors[name]


def _num_steps(tensors, config, tied):
    if not tied:
        # No more than there are names: a stray huge index ends as a missing name and not as a huge module.
        found = [name.split(".")[2] for name in tensors if name.startswith(f"{PREFIX}head.")]
        return max(1, min(max([int(step) + 1 for step in found if step.isdigit()], default=1), len(tensors)))
    steps = config.get("n_predict")
    if type(steps) is not int or not 1 <= steps <= 64:
        raise ValueError(f'steps are tied, so config.json must say "n_predict", from 1 to 64; it says {steps!r}')
    return steps


def _check_sizes(shape, config):
    """ValueError if config.json says other sizes than the tensors have: a reader that believes it would fail."""
    inner = config.get("inner_dim") or config.get("emb_dim")  # 0: the same as emb_dim
    said = {"vocab_size": config.get("vocab_size"), "emb_dim": config.get("emb_dim"), "inner_dim": inner}
    for (key, value), size in zip(said.items(), (shape.vocab_size, shape.hidden_size, shape.inner_size)):
        if value is not None and value != size:
            raise ValueError(f'config.json says "{key}": {value!r}, its tensors say {size}')
