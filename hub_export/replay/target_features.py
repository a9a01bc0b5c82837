"""What heads read of their target, computed by the transformers library: an independent path beside the engine's own."""

import contextlib

import torch

from ...heads.families import family_of
from ...heads.storage.hub_answer import hub_options
from ...inference.models.adapter import has_adapter
from ...inference.models.target_source import choose_device
from .replay import CONTEXT, NUM_TARGET_PROMPTS, NUM_TARGET_ROWS, Inputs, needs_lm_head, num_depths


@torch.no_grad()
def read_target_inputs(head, target, folder, prompts, device="auto"):
    """Inputs for a head over the ends of a few prompts.

    target: folder or Hub id; folder: the head's, whose adapter/ is merged into the target if there is one; prompts: lists of token
    ids. Returns (Inputs, bits of the dtype that the target computed in): float32 on a CPU, the checkpoint's dtype on a GPU.
    Raises ValueError where no prompt is long enough or the target cannot be read.
    """
    depths = num_depths(head)
    fitting = [ids for ids in prompts if len(ids) > depths][:NUM_TARGET_PROMPTS]
    if not fitting:
        raise ValueError(f"none of {len(prompts)} prompts has more than {depths} tokens: give longer ones")
    device = choose_device(device)
    model = _load(target, folder, device)
    if family_of(head).name == "EAGLE-3":
        head.take_depth(model.config.get_text_config().num_hidden_layers)
    streams = head.features if family_of(head).name == "EAGLE-3" else ()
    parts, rows, count = [], [], 0
    for number, ids in enumerate(fitting):
        features = _features(model, torch.tensor([ids], device=device), streams)  # [T, F]
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
        lm_head=weight(model.get_output_embeddings()) if needs_lm_head(head) else None,
        embedding=weight(model.get_input_embeddings()) if head.needs_embedding else None,
    )
    return inputs, 8 * model.dtype.itemsize


def _load(target, folder, device):
    from transformers import AutoModelForCausalLM  # seconds to import, and a plain export needs no target

    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, **hub_options(target))
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
    """The last hidden states behind the final norm [T, H], or the residual streams entering layers, side by side [T, A H]."""
    decoder, found = model.base_model, {}
    with contextlib.ExitStack() as hooks:
        for layer in streams:
            # Behind the last layer stands the final norm.
            module = decoder.layers[layer] if layer < len(decoder.layers) else decoder.norm

            def keep(_, given, named, layer=layer):
                found[layer] = given[0] if given else named["hidden_states"]

            hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        last = decoder(input_ids=ids, use_cache=False).last_hidden_state
    chosen = torch.cat([found[layer] for layer in streams], -1) if streams else last
    return chosen[0].float().cpu()
