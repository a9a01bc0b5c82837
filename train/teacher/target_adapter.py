"""A LoRA adapter of the target, trained beside a head (Medusa-2) with peft; the loaded model's own weights stay frozen.

    adapter = TargetAdapter(target, rank=32, alpha=16)
    target.forward(...)            # of the adapted target, with a graph
    with adapter.disabled(): ...   # the frozen target, bit by bit
    with adapter.merged(): ...     # the target as it will be served: the adapter in the weights, rounded to their dtype

A and B are fp32 whatever the target's dtype. B starts at zero, so the adapted target starts equal to the frozen one. Not done here:
adapting lm_head or the embedding (heads share them), quantising the target, training biases.
"""

import contextlib
from dataclasses import replace

import torch
from safetensors.torch import save
from torch import nn

from ...heads.checkpoint import read_tensors
from ...heads.storage.atomic_write import staged_folder
from ...inference.models.adapter import WEIGHTS_FILE, fingerprint_of_bytes

ALL_LINEAR = "all-linear"


class TargetAdapter:
    """LoRA layers in the model of a FrozenTarget, which then computes as the adapted target.

    rank, alpha, dropout: LoRA's; modules: names of the layers to adapt, with commas, or "all-linear", which leaves out lm_head.
    Build an engine that shares the model's weights before this. Raises ValueError for names that match no layer.
    """

    def __init__(self, target, rank, alpha, dropout=0.0, modules=ALL_LINEAR):
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        if target.is_sharded:
            raise ValueError(
                "an adapter is trained on a target that every GPU holds whole: launch with configs/accelerate/ddp.yaml"
            )
        names = [name.strip() for name in modules.split(",") if name.strip()]
        shared = (target.model.get_output_embeddings(), target.model.get_input_embeddings())
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
            task_type="CAUSAL_LM",
        )
        try:
            self.peft_model = get_peft_model(target.model, config)
        except ValueError as error:
            raise ValueError(
                f"lora_targets {modules!r} fit no layer of the target that can be adapted: {error}"
            ) from error
        if (target.model.get_output_embeddings(), target.model.get_input_embeddings()) != shared:
            raise ValueError(
                f"lora_targets {modules!r} name the lm_head or the embedding, which stay as they are: leave them out"
            )
        self.layers = [module for module in target.model.modules() if isinstance(module, LoraLayer)]
        # Its own container, so that the optimiser, norms and sums over ranks treat these weights like a head's.
        self.weights = nn.ParameterList(p for p in target.model.parameters() if p.requires_grad)
        target.model.eval()
        for layer in self.layers:
            layer.lora_dropout.train()  # peft's dropout acts only in training passes: measuring merges the adapter

    @property
    def num_parameters(self):
        return sum(weight.numel() for weight in self.weights)

    def parameter_group(self, rate):
        """The adapter's weights as a group of the optimiser, with a learning rate of `rate` times the head's."""
        return {"params": list(self.weights), "weight_decay": 0.0, "rate": rate}

    @contextlib.contextmanager
    def disabled(self):
        """Inside this context the model is the frozen target."""
        for layer in self.layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.enable_adapters(True)

    @contextlib.contextmanager
    @torch.no_grad()
    def merged(self):
        """Inside this context the target's own weights hold the adapter, for the model and for an engine that shares them.

        Training is not possible inside. The frozen weights wait in the host's memory and are copied back, equal bit by bit.
        """
        kept = []
        try:
            with self.disabled():
                for layer in self.layers:
                    weight, delta = layer.get_base_layer().weight, layer.get_delta_weight("default")
                    kept.append((weight, weight.to("cpu", copy=True)))
                    weight.copy_(weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta)
                yield
        finally:
            for weight, frozen in kept:
                weight.copy_(frozen)

    # --- files, in peft's format ---

    def copy(self):
        """Copy its files to the host's memory: (write(folder), which writes them whole or not at all, their fingerprint)."""
        from peft import get_peft_model_state_dict

        config = replace(self.peft_model.peft_config["default"], inference_mode=True)
        config.target_modules = sorted(config.target_modules)  # the order of a set differs between processes
        state = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        content = save({name: t.detach().cpu().contiguous() for name, t in state.items()}, {"format": "pt"})

        def write(folder):
            with staged_folder(folder) as staging:
                config.save_pretrained(staging)
                (staging / WEIGHTS_FILE).write_bytes(content)

        return write, fingerprint_of_bytes(content)

    def load(self, folder):
        """Take the weights of a saved adapter of the same shape, in place."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        tensors = read_tensors(folder / WEIGHTS_FILE)
        own = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in own.items()}:
            raise ValueError(f"{folder} holds an adapter of other layers or another rank than this run's")
        set_peft_model_state_dict(self.peft_model, tensors)
