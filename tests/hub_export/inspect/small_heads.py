"""Small random heads of every family for the tests of inspect, and changes to the files that they are saved to."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig

H, V, VD = 16, 66, 22
LAYER = dict(
    hidden_size=H, vocab_size=V, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4
)
LAYER |= dict(rope_theta=500.0, base_model_name_or_path="target")
EAGLE3 = LAYER | dict(target_hidden_size=H, draft_vocab_size=VD, aux_layer_ids=(1, 4, 6))


def medusa(num_heads=3, num_layers=1, shared=False):
    return random(Medusa(MedusaConfig(H, V, num_heads, num_layers, shared, "target")))


def mlp_speculator(**changes):
    return MLPSpeculator(replace(MLPSpeculatorConfig(H, V, 12, base_model_name_or_path="target"), **changes))


def untied():
    return mlp_speculator(tie_weights=False)


def eagle(**changes):
    head = random(Eagle(EagleConfig(**LAYER | changes)))
    head.take_embedding(torch.zeros(V, H))
    return head


def eagle3(**changes):
    head = random(Eagle3(Eagle3Config(**EAGLE3 | changes)))
    head.take_embedding(torch.zeros(head.config.vocab_size, H))
    return head


def block(**changes):
    shape = dict(num_hidden_layers=2, mask_token_id=V - 1, aux_layer_ids=(1, 4, 6), num_speculative_tokens=7)
    return random(BlockHead(BlockConfig(**LAYER | shape | changes)))


def random(head):
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data.normal_(generator=generator)
    return head


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def say(**keys):
    return lambda folder: edit_config(folder, lambda config: config.update(keys))


def leave_out(*keys):
    return lambda folder: edit_config(folder, lambda config: [config.pop(key) for key in keys])


def rewrite(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors")

    return spoil
