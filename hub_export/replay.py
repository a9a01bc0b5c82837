"""Compute a head's outputs: compare them with the written files, and describe them for replay.json so that anybody can repeat them.

Inputs are drawn by a fixed rule (any machine, no target). If the target is available, further inputs are its own features on a few
prompts, computed by the transformers library: a path independent of the engine.
Heads compute in float32 on the CPU here, whatever dtype their files have. Then machines differ only in the order of sums, by about
1e-6 of an output's spread; TOLERANCES are far above that and far below any wrong formula. For every output row the mean, the spread
and the WIDTH largest values are kept. Exact things are compared exactly, by checksums of tensors.

Letters: T rows, S depths, F size of a feature, H hidden size, V vocabulary.
"""

import contextlib
import hashlib
from dataclasses import dataclass

import torch

from ..heads.checkpoint import load_head, read_tensors
from ..heads.families import WEIGHT_FILES, to_file
from ..heads.storage.hub_answer import hub_options
from ..inference.models.adapter import has_adapter
from ..inference.models.target_source import choose_device

NUM_ROWS = 4  # of drawn inputs
ROW_STRIDE = 31  # positions between rows, so that a wrong rotation shows
WIDTH = 8  # values kept of a row
NUM_PROJECTIONS = 16  # of the target's features
NUM_TARGET_PROMPTS, CONTEXT, NUM_TARGET_ROWS = (
    8,
    32,
    2,
)  # prompts, rows computed per prompt, and rows of these that count
# The largest error, in units of an output's spread, by the bits of the dtype in which the target computed its features. For the
# embedded target of 8 layers in bfloat16 instead of float32 it is 0.02 to 0.04, and the features are 0.009 away.
TOLERANCES = {"drawn": 1e-3, "32 bits": 1e-3, "16 bits": 0.3}
# The same for the target's features, in units of their length. Another target's features are unrelated: about 1.4.
FEATURE_TOLERANCES = {"32 bits": 1e-3, "16 bits": 0.15}


@dataclass(frozen=True)
class Inputs:
    """Inputs of a head over T rows.  lm_head and embedding [V, H]: the target's, None if not needed."""

    features: torch.Tensor  # [1, T, F]
    tokens: torch.Tensor  # [1, T, S] at t + 1 to t + S
    positions: torch.Tensor  # [1, T]
    documents: torch.Tensor  # [1, T]
    rows: torch.Tensor  # rows whose outputs count
    lm_head: torch.Tensor | None = None
    embedding: torch.Tensor | None = None


def draw(shape, stream, dtype=torch.float32):
    """Numbers of mean 0 and variance 1, hashed from their places: the same on every machine and with every version."""
    values = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    for first in range(0, len(values), 1 << 22):  # int64 of a whole table would be twice its size
        part = values[first : first + (1 << 22)]
        # Uniform over 2^32 values, stretched to variance 1.
        part.copy_((_hash(torch.arange(first, first + len(part)), stream) / 2**31 - 1) * 3**0.5)
    return values.view(shape)


def draw_tokens(shape, vocab_size, stream):
    """int64 tokens below `vocab_size`, the same everywhere."""
    return (_hash(torch.arange(torch.Size(shape).numel()), stream) % vocab_size).view(shape)


def _hash(places, stream):
    """32 bits of every place, int64 (the finaliser of MurmurHash3)."""
    x = (places + 0x9E3779B9 * (stream + 1)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x


def drawn_inputs(head):
    """Inputs that need no target."""
    config, dtype = head.config, next(head.parameters()).dtype
    table = None
    # For a head that drafts on its own states, to any depth, these are enough output: they have as many values as its features.
    if head.needs_embedding or (head.uses_target_lm_head and head.max_speculative_tokens is not None):
        table = draw((config.vocab_size, config.hidden_size), 0, dtype)
    return Inputs(
        draw((1, NUM_ROWS, head.feature_size), 1, dtype),
        draw_tokens((1, NUM_ROWS, head.num_checked_tokens), config.vocab_size, 2),
        torch.arange(NUM_ROWS)[None] * ROW_STRIDE,
        torch.zeros(1, NUM_ROWS, dtype=torch.int64),
        torch.arange(NUM_ROWS),
        lm_head=table,
        embedding=table,
    )


@torch.no_grad()
def read_target_inputs(head, target, folder, prompts, *, device="auto"):
    """Inputs for a head over the ends of a few prompts.

    target: folder or Hub id; folder: the head's, whose adapter/, if any, is merged into the target; prompts: lists of token
    ids. Returns (Inputs, bits of the dtype that the target computed in): float32 on a CPU, the checkpoint's dtype on a GPU.
    Raises ValueError if no prompt is long enough or the target cannot be read.
    """
    depths = head.num_checked_tokens
    fitting = [ids for ids in prompts if len(ids) > depths][:NUM_TARGET_PROMPTS]
    if not fitting:
        raise ValueError(f"none of {len(prompts)} prompts has more than {depths} tokens: give longer ones")
    device = choose_device(device)
    model = _load_target(target, folder, device)
    head.take_depth(model.config.get_text_config().num_hidden_layers)
    parts, rows, count = [], [], 0
    for number, ids in enumerate(fitting):
        features = _features(model, torch.tensor([ids], device=device), head.aux_layers)  # [T, F]
        positions = torch.arange(len(ids) - depths)[-CONTEXT:]
        tokens = torch.tensor(ids)[positions[:, None] + 1 + torch.arange(depths)]  # [T, S]
        parts.append((features[positions], tokens, positions, torch.full_like(positions, number)))
        count += len(positions)
        rows += range(max(count - NUM_TARGET_ROWS, count - len(positions)), count)
    packed = [torch.cat(column)[None] for column in zip(*parts)]

    def weight(module):
        return module.weight.detach().float().cpu()

    inputs = Inputs(
        *packed,
        torch.tensor(rows),
        lm_head=weight(model.get_output_embeddings()) if head.uses_target_lm_head else None,
        embedding=weight(model.get_input_embeddings()) if head.needs_embedding else None,
    )
    return inputs, 8 * model.dtype.itemsize


def _load_target(target, folder, device):
    from transformers import AutoModelForCausalLM  # seconds to import, and a plain export needs no target

    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, trust_remote_code=False, **hub_options(target)
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"the target {str(target)!r} cannot be loaded ({reason}): give its folder or Hub id"
        ) from error
    if has_adapter(folder):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder / "adapter")).merge_and_unload()
    return model.eval().to(device)


def _features(model, ids, streams):
    """The last hidden states after the final norm [T, H], or the residual streams entering layers, side by side [T, A H]."""
    decoder, found = model.base_model, {}
    with contextlib.ExitStack() as hooks:
        for layer in streams:
            # The final norm follows the last layer.
            module = decoder.layers[layer] if layer < len(decoder.layers) else decoder.norm

            def keep(_, given, named, layer=layer):
                found[layer] = given[0] if given else named["hidden_states"]

            hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        last = decoder(input_ids=ids, use_cache=False).last_hidden_state
    chosen = torch.cat([found[layer] for layer in streams], -1) if streams else last
    return chosen[0].float().cpu()


@torch.no_grad()
def compute_outputs(head, inputs):
    """A head's outputs, depth by depth: tensors [rows, V], or its states [rows, H] if the target's lm_head is missing."""
    lacking, taken = head.needs_embedding, head.embedding_is_targets
    if lacking:
        head.take_embedding(inputs.embedding)
    try:
        packed = inputs.features, inputs.tokens, inputs.positions, inputs.documents
        return head.outputs_at(inputs.rows, *packed, lm_head_weight=inputs.lm_head)
    finally:
        if lacking:
            head.embed_tokens, head.embedding_is_targets = None, taken


def check_finite(head):
    """ValueError naming the first tensor with a value that is not finite."""
    for name, tensor in head.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds values that are not finite in {str(tensor.dtype).removeprefix('torch.')}")


def compare_with_source(folder, head, format, lm_head_weight=None):
    """Check that `folder` holds exactly `head`: the tensors of every file, the loaded head's tensors, and its outputs, bit by bit.

    lm_head_weight: the target's lm_head [V, H] as given to the writer, for heads that share it.
    Raises ValueError naming the first difference. Returns the number of tensors compared in files.
    """
    expected, _ = to_file(head, format, lm_head_weight)
    num_compared = 0
    for path in (folder / name for name in WEIGHT_FILES):
        if not path.is_file():
            continue
        found = read_tensors(path)
        if found.keys() != expected.keys():
            raise ValueError(f"{path.name} read back holds other tensors than were written")
        for name, tensor in expected.items():
            _check_same_bits(f"{path.name}: {name}", found[name], tensor)
        num_compared += len(expected)

    loaded = load_head(folder)
    if loaded.config != head.config:
        raise ValueError(f"the head read back is {loaded.config}, written was {head.config}")
    if loaded.needs_embedding and not head.needs_embedding:
        loaded.take_embedding(head.embed_tokens.weight)  # the target's, which the file leaves out
    for name, tensor in head.state_dict().items():
        _check_same_bits(name, loaded.state_dict()[name], tensor)
    inputs = drawn_inputs(head)
    outputs = [compute_outputs(one, inputs) for one in (loaded, head)]
    for depth, (found, wanted) in enumerate(zip(*outputs)):
        _check_same_bits(f"output {depth} of the head", found, wanted)
    return num_compared


def _check_same_bits(name, found, expected):
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    # Compared as bytes: -0.0 differs from 0.0 here, and a NaN equals itself.
    if not same_kind or not torch.equal(*(one.contiguous().view(torch.uint8) for one in (found, expected))):
        raise ValueError(f"{name} read back differs from what was written")


def describe(outputs):
    """Outputs in the form of replay.json: per depth and row the mean, the spread, and the largest values with their places."""
    described = []
    for output in outputs:
        top = output.topk(min(WIDTH, output.shape[-1]))
        row = {"mean": output.mean(-1), "spread": output.std(-1), "values": top.values}
        described.append({name: rounded(values) for name, values in row.items()} | {"places": top.indices.tolist()})
    return described


def largest_errors(outputs, described):
    """Per depth, the largest distance of outputs from the described outputs, in units of their spread.

    ValueError if depths or rows differ, or there are too few values.
    """
    errors = []
    if len(outputs) != len(described):
        raise ValueError(f"the head computes {len(outputs)} depths, the export was made of one with {len(described)}")
    for output, wanted in zip(outputs, described):
        places = torch.tensor(wanted["places"])
        if len(places) != len(output) or int(places.max()) >= output.shape[-1]:
            raise ValueError(
                f"the head computes {list(output.shape)} values, the export's were {len(places)} rows of more than {places.max()}"
            )
        mean, spread, values = (torch.tensor(wanted[name]) for name in ("mean", "spread", "values"))
        apart = torch.cat(
            (
                (output.gather(-1, places) - values).abs().amax(-1, keepdim=True),
                (output.mean(-1) - mean).abs()[:, None],
                (output.std(-1) - spread).abs()[:, None],
            ),
            -1,
        )
        errors.append(float((apart.amax(-1) / spread.clamp_min(1e-6)).max()))
    return errors


def project(features):
    """A few numbers that identify features [R, F]: their products with fixed directions.  -> [R, P]"""
    return features @ draw((features.shape[-1], NUM_PROJECTIONS), 3) / features.shape[-1] ** 0.5


def distance(found, wanted):
    """Distance of projections from the wanted ones, in units of the wanted ones' length."""
    return float((found - wanted).norm() / wanted.norm())


def checksums(head):
    """{name: checksum} of a head's tensors, over dtype, shape and bits."""
    found = {}
    for name, tensor in head.state_dict().items():
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        found[name] = digest.hexdigest()[:16]
    return found


def rounded(values):
    """A tensor as lists of numbers with seven digits, the precision of float32."""
    values = values.tolist() if isinstance(values, torch.Tensor) else values
    return [rounded(one) for one in values] if isinstance(values, list) else float(f"{values:.7g}")
