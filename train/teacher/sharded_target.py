"""The frozen target divided over all ranks with FSDP2, for one that does not fit on each: every rank reads its part of the files.

configs/accelerate/fsdp2.yaml asks for it. The decoder's layers are divided, and gathered one at a time while a pass runs through
them; every rank holds the embedding, the last norm and the lm_head whole. The loss multiplies with the lm_head chunk by chunk, as
often as a rank has chunks, which a gathered one could not follow; and heads start from it and from the embedding. Both together
are 4.2 GB for a 70B Llama in bf16, beside 137 GB / N of layers.

Every pass is a collective: all ranks make equally many. Not done here: offloading to the CPU, tensor parallelism, quantised
targets, architectures whose modules are named otherwise than the tensors of their files.
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


def wants_sharded_target():
    """Was this process launched with FSDP (the environment that `accelerate launch` makes of fsdp2.yaml)?"""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_whole_target(what):
    """ValueError, before anything is loaded, where `what` is asked for and the target would be divided."""
    if wants_sharded_target():
        raise ValueError(
            f"{what} needs the whole target in every process: launch with configs/accelerate/ddp.yaml, not fsdp2.yaml"
        )


def is_sharded(model):
    """Has `shard_layers` divided this model?"""
    return isinstance(model.get_decoder(), FSDPModule)


def load_sharded(source, dtype, device):
    """A *ForCausalLM of this folder or Hub id, divided over all ranks, in eval mode and frozen.

    No rank ever holds more than its parts and what is whole on all. Raises ValueError if files and modules do not match.
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
    model = build_sharded(AutoConfig.from_pretrained(folder), dtype, device)
    if Path(folder, "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    # Tied parameters have one name here, as in the files.
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except dcp.CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]).strip().splitlines()[0]
        raise ValueError(
            f"the .safetensors of the target {source!r} cannot be read into the parts of a {type(model).__name__}: {reason}. A "
            "file is damaged, or its tensors are named otherwise than the modules: then take configs/accelerate/ddp.yaml"
        ) from error
    return model.eval().requires_grad_(False)


def build_sharded(config, dtype, device):
    """The model of a transformers config, divided over all ranks; its parameters are allocated and hold anything."""
    with init_empty_weights():  # parameters only: buffers (rotary frequencies) are computed and in no file
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shard_layers(model, device)
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
    return model


def shard_layers(model, device):
    """Divide the layers of the decoder over all ranks, each a unit of its own; everything else stays whole."""
    decoder = model.get_decoder()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = decoder_layers(decoder, model.config.get_text_config().num_hidden_layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The decoder as their root gathers the next layer's weights while one computes.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - set(layers.parameters()))


def decoder_layers(decoder, count):
    """The ModuleList of a decoder's layers. Raises ValueError if not exactly one list of `count` is there."""
    stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(decoder).__name__} holds {len(stacks)} lists of {count} layers, not one: they cannot be found in it"
        )
    return stacks[0]
