"""On-disk formats of Medusa heads, each as one rename table that loading and writing share.

A table maps our tensor names to the file's, with {k} the head, {j} the residual block and {R} the number of blocks per
head. The inverse is derived from it, and so are the counts K and R of a file that is read. Published configs can be wrong
(medusa-vicuna-7b-v1.3 says 2 heads and holds 5), so tensors decide and the config only fills gaps.
The names of a table are complete: a missing or an additional name is an error that lists it.

    medusa         FasterDecoding's layout with own lm_heads ("V1"): its original code and TGI read it
    medusa-shared  the same without lm_heads ("V2"): logits come from the target's own lm_head
    vllm           vLLM 0.20 to 0.32; `vllm-shared` where the file holds one copy of the target's lm_head for all heads

This file touches no disk and reads no `token_map` (vLLM's truncated draft vocabulary).
"""

import re
from importlib.metadata import version

import torch

from ..medusa import MedusaConfig
from ..storage.reading import Reading, UnknownVocabulary, compare
from ..storage.tensor_checks import check_names, check_tensors

# The target's lm_head, which vllm-shared files carry along; a head that shares it holds no such tensor of its own.
TARGET_LM_HEAD = "target.lm_head.weight"
# The key of config.json that says which adapter of the target the heads were trained with.
ADAPTER_KEY = "target_adapter"

RENAMES = {
    "medusa": {
        "heads.{k}.blocks.{j}.linear.weight": "{k}.{j}.linear.weight",
        "heads.{k}.blocks.{j}.linear.bias": "{k}.{j}.linear.bias",
        "heads.{k}.lm_head.weight": "{k}.{R}.weight",
    },
    "medusa-shared": {
        "heads.{k}.blocks.{j}.linear.weight": "{k}.{j}.linear.weight",
        "heads.{k}.blocks.{j}.linear.bias": "{k}.{j}.linear.bias",
    },
    "vllm": {
        "heads.{k}.blocks.{j}.linear.weight": "blocks.{k}.layers.{j}.weight",
        "heads.{k}.blocks.{j}.linear.bias": "blocks.{k}.layers.{j}.bias",
        "heads.{k}.lm_head.weight": "lm_heads.{k}.weight",
    },
    "vllm-shared": {
        "heads.{k}.blocks.{j}.linear.weight": "blocks.{k}.layers.{j}.weight",
        "heads.{k}.blocks.{j}.linear.bias": "blocks.{k}.layers.{j}.bias",
        TARGET_LM_HEAD: "lm_heads.0.weight",
    },
}

# config.json's keys for the number of heads, and of blocks per head.
COUNT_KEYS = {"medusa": ("medusa_num_heads", "medusa_num_layers"), "vllm": ("num_heads", "num_hidden_layers")}
FORMATS = ("medusa", "medusa-shared", "vllm")  # formats that a user can ask for
CONFIG_NAMES = ("medusa", "MedusaModel")  # names in config.json that mean Medusa


def recognises(names):
    """Whether a file with tensors of these names holds Medusa heads."""
    return any(_matches(table, names) for table in ("medusa", "vllm"))


def native_format(head):
    """The format that holds this head without anything of the target's: "medusa" or "medusa-shared"."""
    return "medusa-shared" if head.config.shared_lm_head else "medusa"


def family(table):
    """ "medusa" or "vllm": what decides config keys.  table: a key of RENAMES"""
    return table.removesuffix("-shared")


def check_format(head, format):
    """The table of RENAMES that writes `head` in `format`; ValueError where the two do not go together."""
    shared = head.config.shared_lm_head
    if format == "medusa" and shared:
        raise ValueError("format 'medusa' cannot say that heads share the target's lm_head: use 'medusa-shared'")
    if format == "medusa-shared" and not shared:
        raise ValueError(
            "format 'medusa-shared' would lose the lm_heads that these heads have of their own: use 'medusa'"
        )
    return "vllm-shared" if format == "vllm" and shared else format


def file_names(table, num_heads, num_layers):
    """{our tensor name: the file's} for K heads of R blocks, complete."""
    names = {}
    for ours, theirs in RENAMES[table].items():
        for k in range(num_heads if "{k}" in ours else 1):
            for j in range(num_layers if "{j}" in ours else 1):
                names[ours.format(k=k, j=j)] = theirs.format(k=k, j=j, R=num_layers)
    return names


def to_file(head, format, lm_head_weight=None):
    """`head` as a file in `format`: ({name: tensor}, config dict).

    lm_head_weight: the target's lm_head [V, H]; only "vllm" with a shared lm_head needs it, its file carries a copy.
    Raises ValueError if the head does not fit the format or the lm_head is missing or of another shape.
    """
    table = check_format(head, format)
    config = head.config
    state = dict(head.state_dict())
    if table == "vllm-shared":
        expected = (config.vocab_size, config.hidden_size)
        if lm_head_weight is None:
            raise ValueError('format "vllm" stores the target\'s lm_head with heads that share it: pass lm_head_weight')
        if tuple(lm_head_weight.shape) != expected:
            raise ValueError(f"the target's lm_head is {tuple(lm_head_weight.shape)}, these heads expect {expected}")
        state[TARGET_LM_HEAD] = lm_head_weight.to(next(head.parameters()).dtype)
    names = file_names(table, config.num_heads, config.num_layers)
    assert names.keys() == state.keys(), "the rename table and the module disagree"
    tensors = {names[ours]: tensor.detach().cpu().contiguous() for ours, tensor in state.items()}
    return tensors, _file_config(table, config)


def _file_config(table, config):
    """config.json of a file. Every key that a reader would guess when it is missing is written."""
    # The adapter that the heads were trained with has our own key, which other readers ignore.
    adapted = {ADAPTER_KEY: config.adapter} if config.adapter else {}
    if family(table) == "medusa":
        keys = {
            "base_model_name_or_path": config.base_model_name_or_path,
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "transformers_version": version("transformers"),
        }
        # No "architectures": with it, TGI silently serves without speculation. The sizes are our own keys: without an lm_head no
        # tensor tells the vocabulary.
        if table == "medusa-shared":
            keys |= {"version": "2", "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        return keys | adapted
    # Its reader takes any key with both "num" and "heads" in it for num_heads: none but num_heads may be added here.
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": config.base_model_name_or_path,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_paths": 64,
        "topk": 10,
        "logit_scale": 1.0,
        "medusa_fc_bias": True,  # without it the reader drops every bias
        "original_lm_head": table == "vllm-shared",
        "transformers_version": version("transformers"),
        **adapted,
    }


def _pattern(template):
    return re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>[0-9]+)", re.escape(template)))


def _matches(table, names):
    """[(our template, {"k": .., "j": .., "R": ..})] for every name that the table knows."""
    patterns = [(ours, _pattern(theirs)) for ours, theirs in RENAMES[table].items()]
    found = []
    for name in names:
        for ours, pattern in patterns:
            match = pattern.fullmatch(name)
            if match:
                found.append((ours, {letter: int(value) for letter, value in match.groupdict().items()}))
    return found


def detect_table(names, config):
    """Which table of RENAMES the tensor names of a file of Medusa heads follow; the config tells only what names cannot."""
    if "token_map" in names:
        raise ValueError(
            "it holds token_map: heads with lm_heads of a truncated vocabulary, which have no logits of the other tokens; "
            "expected lm_heads of the target's whole vocabulary, and no token_map"
        )
    best = max(("medusa", "vllm"), key=lambda table: len(_matches(table, names)))
    matches = _matches(best, names)
    lm_heads = [at["k"] for ours, at in matches if "lm_head" in ours]
    if best == "medusa":
        return "medusa" if lm_heads else "medusa-shared"
    # With a single head both tables have the same names, and the config tells whose lm_head it is.
    return "vllm-shared" if lm_heads == [0] and config.get("original_lm_head") else "vllm"


def count(table, names):
    """(K, R) of a file, from its tensor names.

    Bounded by the number of names, so that a stray huge index ends as a missing name and not as a huge module.
    """
    matches = _matches(table, names)
    num_heads = [at["k"] + 1 for _, at in matches if "k" in at]
    num_layers = [at["j"] + 1 for _, at in matches if "j" in at] + [at["R"] for _, at in matches if "R" in at]
    return min(max([1, *num_heads]), len(names)), min(max([1, *num_layers]), len(names))


def from_file(tensors, config):
    """Read a file's tensors: Reading of a MedusaConfig. A copy of the target's lm_head is checked and dropped.

    tensors: {name: tensor} as the file holds them.  config: its config.json as a dict; "vocab_size" must be there for
    heads that share the target's lm_head and carry no copy of it (else UnknownVocabulary).
    Raises ValueError naming missing and unexpected tensors, tensors of a wrong shape, or the config key that is needed.
    """
    table = detect_table(tensors, config)
    num_heads, num_layers = count(table, tensors)
    names = file_names(table, num_heads, num_layers)
    tensors, biased = dict(tensors), any(name.endswith(".bias") for name in tensors)
    if family(table) == "vllm":
        if config.get("logit_scale", 1.0) != 1.0:
            raise ValueError(f"its config scales logits by logit_scale={config['logit_scale']}; only 1.0 is supported")
        if not config.get("medusa_fc_bias") and not biased:
            _add_zero_biases(tensors)
    check_names(names.values(), tensors)

    state = {ours: tensors[theirs] for ours, theirs in names.items()}
    hidden_size = state["heads.0.blocks.0.linear.weight"].shape[-1]
    vocab_size = _vocab_size(table, state, config)
    check_tensors(tensors, {theirs: _shape(ours, hidden_size, vocab_size) for ours, theirs in names.items()})
    state.pop(TARGET_LM_HEAD, None)
    shape = MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        shared_lm_head=table.endswith("-shared"),
        base_model_name_or_path=config.get("base_model_name_or_path") or "",
        adapter=config.get(ADAPTER_KEY) or "",
    )
    dropped = family(table) == "vllm" and biased and not config.get("medusa_fc_bias")
    notes = _notes(table, shape, config, dropped)
    return Reading(shape, state, "vllm" if family(table) == "vllm" else table, notes)


def _notes(table, shape, config, dropped):
    """Notes where config.json contradicts the tensors.  dropped: whether the format's reader would drop the biases"""
    notes = []
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    sizes |= dict(zip(COUNT_KEYS[family(table)], (shape.num_heads, shape.num_layers)))
    if family(table) == "vllm":
        sizes |= {"truncated_vocab_size": shape.vocab_size, "original_lm_head": shape.shared_lm_head}
    for key, found in sizes.items():
        compare(notes, config, key, found)
    if dropped:
        notes.append('config.json does not say "medusa_fc_bias": True; the tensors hold the biases of the blocks')
    shared = str(config.get("version", "1")) == "2"
    if family(table) == "medusa" and shared != shape.shared_lm_head:
        lm_heads = "no lm_heads" if shape.shared_lm_head else "lm_heads of their own"
        notes.append(f'config.json {"says" if shared else "does not say"} "version": "2"; the tensors hold {lm_heads}')
    return notes


def _add_zero_biases(tensors):
    """Give vLLM's blocks, which have no bias by default, a bias of zero."""
    for name in [name for name in tensors if name.startswith("blocks.") and name.endswith(".weight")]:
        tensors[name.removesuffix("weight") + "bias"] = torch.zeros_like(tensors[name][..., 0])


def _vocab_size(table, state, config):
    lm_head = state.get("heads.0.lm_head.weight", state.get(TARGET_LM_HEAD))
    if lm_head is not None:
        return lm_head.shape[0]
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise (ValueError if "vocab_size" in config else UnknownVocabulary)(
            f"{table} heads hold no lm_head, so their config.json must say the target's vocab_size; "
            f"it says {vocab_size!r}"
        )
    return vocab_size


def _shape(name, hidden_size, vocab_size):
    """The shape that a tensor of ours must have."""
    if "lm_head" in name:
        return vocab_size, hidden_size
    return (hidden_size, hidden_size) if name.endswith("weight") else (hidden_size,)
