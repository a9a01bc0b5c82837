"""Divide the frozen target over all ranks with FSDP2, if it does not fit on each: every rank reads its part of the files.

configs/accelerate/fsdp2.yaml asks for it. The decoder's layers are divided, and gathered one at a time while a pass runs through
them. Every rank holds the embedding, the last norm and the lm_head whole: heads start from the embedding and the lm_head, and the
loss multiplies with the lm_head once per chunk, while ranks differ in their number of chunks. Both together are 4.2 GB for a 70B
Llama in bf16, beside 137 GB / N of layers.

Files may hold a layer's experts one by one, or older names: stored_tensors.py follows the library's conversions, and of experts
every rank reads its own.

Every pass is a collective: all ranks make equally many. Not done here: offloading to the CPU, tensor parallelism, quantised
targets.
"""

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from accelerate.utils import parse_flag_from_env
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ...heads.storage.hub_answer import hub_options
from .stored_tensors import StoredTensors


def wants_sharded_target():
    """Whether this process was launched with FSDP (by the environment that `accelerate launch` makes from fsdp2.yaml)."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_whole_target(what):
    """ValueError, before anything is loaded, if the target would be divided; `what` names the work that needs it whole."""
    if wants_sharded_target():
        raise ValueError(
            f"{what} needs the whole target in every process: launch with configs/accelerate/ddp.yaml, not fsdp2.yaml"
        )


def is_sharded(model):
    """Whether `shard_layers` has divided this model."""
    return isinstance(find_decoder(model), FSDPModule)


def load_sharded(source, dtype, device):
    """A *ForCausalLM of this folder or Hub id, divided over all ranks, in eval mode and frozen.

    No rank ever holds more than its own parts and the undivided modules. Raises ValueError if files and modules do not match.
    """
    folder = source
    if not Path(source).is_dir():
        wanted = {"allow_patterns": ["*.safetensors", "*.json"], **hub_options(source)}
        if dist.get_rank() == 0:
            snapshot_download(source, **wanted)
        dist.barrier()
        folder = snapshot_download(source, **wanted)
    if not list(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{source!r} holds no .safetensors: a target can be divided over GPUs only if they can be read in parts"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"the target {source!r} has quantised weights, which cannot be divided: give it in 16 or 32 bits"
        )
    model = build_sharded(config, dtype, device)
    if Path(folder, "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    # Tied parameters have one name here, as in the files.
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    kind = type(model).__name__
    # Of the whole module, since dividing changes the classes that the library finds conversions by.
    stored = StoredTensors(_empty_model(config, dtype), Path(folder).glob("*.safetensors"))
    _check_tensors(source, stored, tensors, kind)
    as_stored = {stored.names[name]: tensor for name, tensor in tensors.items() if name not in stored.made}
    try:
        dcp.load(as_stored, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except dcp.CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]).strip().splitlines()[0]
        raise ValueError(
            f"the .safetensors of the target {source!r} cannot be read into the parts of a {kind}: {reason}. A "
            "file is damaged, or its config.json is another model's: copy or download the model again"
        ) from error
    stored.load_converted(tensors)
    return model.eval().requires_grad_(False)


def _check_tensors(source, stored, tensors, kind):
    """ValueError unless the files hold every tensor, or what it is made of."""
    wrong = [name for name in tensors if name not in stored.names and name not in stored.made]
    if wrong:
        raise ValueError(
            f"the .safetensors of the target {source!r} lack {len(wrong)} of the {len(tensors)} tensors of a {kind}, such as "
            f"{min(wrong)}. A file is missing, or its config.json is another model's: copy or download the model again"
        )
    wrong = [name for name, shape in stored.made.items() if name not in tensors or shape != tensors[name].shape]
    if wrong:
        found, wanted = stored.made[wrong[0]], tensors.get(wrong[0])
        raise ValueError(
            f"the .safetensors of the target {source!r} make a {wrong[0]} of {list(found)}, and its config.json says "
            f"{'that there is none' if wanted is None else list(wanted.shape)}: a part of a layer is missing, or the config is "
            "another model's"
        )


def _empty_model(config, dtype):
    """The *ForCausalLM of a config with parameters on `meta`; buffers (rotary frequencies) are computed: no file holds them."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def build_sharded(config, dtype, device):
    """The model of a transformers config, divided over all ranks; its parameters are allocated but not set."""
    model = _empty_model(config, dtype)
    shard_layers(model, device)
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
    return model


def shard_layers(model, device):
    """Divide the layers of the decoder over all ranks, each layer as one unit; everything else stays whole."""
    decoder = find_decoder(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = decoder_layers(decoder, model.config.get_text_config().num_hidden_layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The decoder is the root: so the next layer's weights are gathered while a layer computes.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - set(layers.parameters()))


def find_decoder(model):
    """The module of a *ForCausalLM that turns token ids into last states."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder  # Llama4ForCausalLM.get_decoder returns the whole model


def decoder_layers(decoder, count):
    """The ModuleList of a decoder's layers. Raises ValueError unless there is exactly one list of `count` modules."""
    stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(decoder).__name__} holds {len(stacks)} lists of {count} layers, not one: they cannot be found in it"
        )
    return stacks[0]
