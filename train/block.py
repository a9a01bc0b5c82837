"""Train a block drafter (heads/block.py) against a frozen target: the script, from top to bottom.

    accelerate launch train/block.py --config configs/block-quickstart.yaml
    accelerate launch train/block.py --config configs/block.yaml --target ORG/MODEL --data conversations.jsonl --lr 3e-4
    accelerate launch train/block.py --config configs/block-quickstart.yaml --resume

conversations -> token ids and assistant mask -> packed rows -> the residual streams that enter some of the target's layers ->
random anchors, each with a block that sees its document before it -> one pass over all blocks -> loss of every depth against the
text or the target's distribution, weighted, summed and divided by the number of labels of the whole optimiser step
(train/loss/blocks.py). `--help` lists every key. A run writes only into its `output` folder: config.yaml, metrics.jsonl,
checkpoints/, acceptance.json, best/, head/; and into `feature_cache`, if that is given.

Every rank draws the anchors of all rows of a step, so label counts need no communication; gradients are summed over the ranks once
per optimiser step. Not done here: training the embedding or the lm_head, which are the target's.
"""

import math
from dataclasses import dataclass, replace

import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.inference.models.target_source import eos_token_ids
from headstart.train.data.packed.draft_vocabulary import choose_draft_vocabulary
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.loss.blocks import BlockObjective, accumulate_block_gradients, draw_blocks, summarize_blocks
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer, wants_checkpointing
from headstart.train.run.recipe import key, parse_layers, parse_recipe
from headstart.train.run.run_folder import start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.run.start_head import head_with_vocabulary, load_layer_start, take_weights
from headstart.train.run.stopping import run_script
from headstart.train.teacher.features import FrozenTarget, load_target

NUM_LAYERS = 2  # with an edge two are accepted more than five without (DSpark, figure 3)
NUM_AUX_LAYERS = 5  # as published heads read
# Optional parts of a head, by the key that asks for them, with the keys that shape their tensors. A start keeps those that it has.
PARTS = {"edge_rank": (), "selector_rank": (), "conv_kernel_size": ("conv_group_size",)}


@dataclass(frozen=True)
class Recipe(RunRecipe):
    """Settings of a run: the keys of every trainer, and those of block drafters."""

    lr: float = key(6e-4, "peak learning rate of AdamW", least=0)
    warmup_ratio: float = key(
        0.04, "share of the steps in which the learning rate rises; then it falls as a cosine", least=0, most=1
    )
    beta2: float = key(0.95, "AdamW's decay of the gradient's square", least=0, most=0.99999)
    num_layers: int = key(0, "decoder layers; 0: 2, or with start_from those of that head", least=0)
    block_size: int = key(8, "slots of a block, of which all but the first predict a token", least=2, most=64)
    sample_from_anchor: bool = key(False, "every slot, the first too, predicts the token after its place (DSpark)")
    is_causal: bool = key(False, "a slot sees only the slots of its block up to itself")
    sliding_window: int = key(
        0,
        "tokens that all layers but the last few see; 0: all layers see the whole text, or with start_from as many as that head's",
        least=0,
    )
    num_full_layers: int = key(1, "so many last layers see the whole text beside layers with a sliding_window", least=0)
    sliding_is_causal: bool = key(
        True, "in layers with a sliding_window a slot sees only the slots of its block up to itself"
    )
    window_of_block: bool = key(
        False,
        "the sliding_window counts from the block, as format speculators has it, and not from the slot, as dflash",
    )
    edge_rank: int = key(
        256,
        "rank of the edge, which corrects a slot's scores by the token before (DSpark); 0: none, and a draft's tokens do not know "
        "each other. A head of start_from without an edge gets one",
        least=0,
    )
    selector_rank: int = key(
        0,
        "rank of the selector, which chooses among the likeliest tokens of a slot by the token before (DFlash2: 256), in the place "
        "of an edge: set edge_rank to 0; 0: none. A head of start_from without a selector gets one",
        least=0,
    )
    selector_top_k: int = key(16, "tokens that the selector chooses among", least=2, most=64)
    selector_weight: float = key(1.0, "weight of the loss of the selector's choice", least=0)
    conv_kernel_size: int = key(
        0,
        "slots that a convolution before and after every attention and MLP reads, its own and those before (DFlash2: 2); 0: no "
        "convolutions. A head of start_from without them gets them",
        least=0,
    )
    conv_group_size: int = key(16, "channels that share a convolution's correction", least=1)
    draft_vocab_size: int = key(
        0,
        "size of the draft vocabulary: the most frequent supervised tokens and the target's stop tokens, with the target's rows of "
        "lm_head; 0: all tokens, or with start_from the tokens of that head",
        least=0,
    )
    aux_layers: str = key(
        "",
        "layers whose entering residual streams the head reads, such as 2,10,18; empty: five between 2 and n-2 of n, or with "
        "start_from those of that head",
    )
    mask_token_id: int = key(
        -1,
        "the token in the slots to be predicted, whose embedding is the target's; -1: the highest id with an embedding that is no "
        "stop or padding token, or with start_from that head's",
        least=-1,
    )
    num_anchors: int = key(512, "blocks a row at most, at supervised tokens drawn anew in every step", least=1)
    depth_weights: str = key(
        "exponential",
        "weights of the depths. exponential: exp(-k / gamma) at depth k (from 0); dpace: from a block's own losses, for loss hard "
        "(arXiv 2605.18810); none: all 1",
        choices=("exponential", "dpace", "none"),
    )
    gamma: float = key(0.0, "of exponential; 0: 7, 5 or 4 for blocks of 16, 10 or fewer slots", least=0)
    checkpoint_activations: str = key(
        "auto",
        "yes: each layer is computed again in the backward pass instead of kept, with the same gradients: less memory, more time; "
        "auto: for rows of more than 8192 tokens, if there are layers above the first",
        choices=("auto", "yes", "no"),
    )
    confidence_weight: float = key(
        0.0,
        "weight of the loss of the confidence, which tells how likely a slot's token is accepted (DSpark: 1); 0: the head has none",
        least=0,
    )

    def __post_init__(self):
        super().__post_init__()
        parse_layers(self.aux_layers)  # refuses bad text
        if self.depth_weights == "dpace" and self.loss != "hard":
            raise ValueError(f"depth_weights dpace weighs the loss hard, got loss {self.loss!r}: set loss to hard")
        dflash2 = [name for name in ("selector_rank", "conv_kernel_size") if getattr(self, name)]
        dspark = [name for name in ("edge_rank", "confidence_weight") if getattr(self, name)]
        if dflash2 and dspark:
            raise ValueError(
                f"{' and '.join(dflash2)} ask for parts of DFlash2, {' and '.join(dspark)} for parts of DSpark, and no file holds "
                f"both: set {' and '.join(dspark)} to 0"
            )

    @property
    def num_depths(self):
        """How many tokens a block drafts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def objective(self):
        gamma = self.gamma or (7 if self.block_size >= 16 else 5 if self.block_size >= 10 else 4)
        decay = math.exp(-1 / gamma) if self.depth_weights == "exponential" else 1.0
        weights, dynamic = [decay**k for k in range(self.num_depths)], self.depth_weights == "dpace"
        own = {"dynamic": dynamic, "confidence_weight": self.confidence_weight}
        own["selector_weight"] = self.selector_weight if self.selector_rank else 0.0
        return BlockObjective(Loss(self.loss, self.lk_eta), weights, **own)


def default_aux_layers(num_layers):
    """Five layers spread over a target of num_layers, or all but the first of a small one."""
    if num_layers <= NUM_AUX_LAYERS + 2:
        return tuple(range(min(1, num_layers - 1), num_layers))[-NUM_AUX_LAYERS:]
    return tuple(torch.linspace(2, num_layers - 2, NUM_AUX_LAYERS).round().int().tolist())


def sliding_layers(recipe, num_layers):
    """The fields of BlockConfig for a recipe's sliding_window in a head of num_layers."""
    if not recipe.sliding_window:
        return {}
    layers = tuple(range(num_layers - recipe.num_full_layers))
    if not layers:
        raise ValueError(
            f"num_full_layers {recipe.num_full_layers} of {num_layers} layers leaves none to the sliding_window: lower "
            "num_full_layers, or set sliding_window to 0"
        )
    same = {name: getattr(recipe, name) for name in ("sliding_window", "sliding_is_causal", "window_of_block")}
    return {"sliding_layers": layers, **same}


def choose_mask_token(embedding, reserved):
    """The highest id that is not in `reserved` and whose row of the embedding [V, H] is not next to nothing.

    An untrained row of zeros would leave the slots without anything to tell their places by.
    """
    norms = torch.cat([part.float().norm(dim=1) for part in embedding.split(8192)])  # [V]
    fit = norms > 0.1 * norms.median()
    fit[[id for id in reserved if 0 <= id < len(fit)]] = False
    if not fit.any():
        raise ValueError("no row of the target's embedding is fit for a mask token: name one with mask_token_id")
    return int(fit.nonzero()[-1])


def choose_config(recipe, target, start, reserved):
    """The config of the head; with `start`, the head that it begins with, that head's, with the recipe's block and edge.

    reserved: ids of stop and padding tokens. Raises ValueError if the recipe asks for what `start` does not have.
    """
    own = {"num_speculative_tokens": recipe.num_depths, "base_model_name_or_path": recipe.target}
    own |= {name: getattr(recipe, name) for part in PARTS if getattr(recipe, part) for name in (part, *PARTS[part])}
    own |= {"selector_top_k": recipe.selector_top_k} if recipe.selector_rank else {}
    own["confidence"] = recipe.confidence_weight > 0
    own["confidence_sees_token"] = recipe.edge_rank > 0 or not recipe.confidence_weight
    if recipe.draft_vocab_size:
        whole = recipe.draft_vocab_size == target.vocab_size
        own["draft_vocab_size"] = None if whole else recipe.draft_vocab_size
    places = {"is_causal": recipe.is_causal, "sample_from_anchor": recipe.sample_from_anchor}
    chosen = {"num_layers": recipe.num_layers or None, "aux_layers": parse_layers(recipe.aux_layers)}
    chosen["mask_token_id"] = None if recipe.mask_token_id < 0 else recipe.mask_token_id
    if start is None:
        layers, mask = chosen["aux_layers"] or default_aux_layers(target.num_layers), chosen["mask_token_id"]
        target.check_layers(layers)
        if layers[-1] >= target.num_layers:
            raise ValueError(
                f"aux_layers must be below the target's {target.num_layers} layers, got {recipe.aux_layers}"
            )
        num_layers = recipe.num_layers or NUM_LAYERS
        return target.layer_config(
            BlockConfig,
            num_hidden_layers=num_layers,
            aux_layer_ids=layers,
            mask_token_id=choose_mask_token(target.embedding, reserved) if mask is None else mask,
            **own,
            **places,
            **sliding_layers(recipe, num_layers),
        )
    found = {"num_layers": start.config.num_hidden_layers, "aux_layers": start.features}
    chosen |= sliding_layers(recipe, start.config.num_hidden_layers)
    found |= {name: getattr(start.config, name) for name in {"mask_token_id", *places, *chosen} - found.keys()}
    kept = [name for part in PARTS if getattr(start.config, part) for name in (part, *PARTS[part])]
    found |= {name: getattr(start.config, name) for name in kept}
    asked = {name: getattr(recipe, name) for name in kept}
    for name, given in (chosen | places | asked).items():
        if given is not None and given != found.get(name, given):
            mend = "leave it out" if name in chosen else f"set it to {found[name]}"
            raise ValueError(
                f"start_from {recipe.start_from!r} has {name} {found[name]!r}, this run asks for {given!r}: {mend}"
            )
    if start.config.confidence:
        if not recipe.confidence_weight:
            raise ValueError(
                f"start_from {recipe.start_from!r} has a confidence, and this run trains none: set confidence_weight above 0"
            )
        own["confidence_sees_token"] = start.config.confidence_sees_token
    return replace(start.config, **own)


def main(argv):
    """Train as `argv` (list of str) asks. Returns 0, or 128 + the signal that ended the run early, after a checkpoint."""
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "block")
    device, note = processes.device, processes.note

    # Target, rows, head.
    model, tokenizer = load_target(recipe.target, device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    target.check_row_length(recipe.row_length)
    start = load_layer_start(recipe, processes, BlockHead, target, called="a block drafter")
    stops = eos_token_ids(model, model.config, tokenizer)
    config = choose_config(recipe, target, start, {*stops, tokenizer.pad_token_id} - {None})
    documents, held_out = load_documents(recipe, tokenizer, processes)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, note)
    target.check(*rows_to_check(packed, device))
    head = BlockHead(config)
    known = head_with_vocabulary(recipe, processes, start, BlockHead)
    if known and known.config.draft_vocab_size == config.draft_vocab_size:
        if known.d2t is not None:
            head.set_draft_vocabulary(known.d2t, known.t2d)
    elif config.draft_vocab_size is not None:
        of_target = {"vocab_size": target.vocab_size, "tokenizer": tokenizer, "note": note}
        head.set_draft_vocabulary(*choose_draft_vocabulary(packed, config.draft_vocab_size, stops, **of_target))
    target.initialize(head)
    if start:
        take_weights(head, start, note)
    head.to(device)
    head.checkpoint_steps = wants_checkpointing(
        recipe.checkpoint_activations, recipe.row_length, config.num_hidden_layers
    )
    note(
        f"blocks of {config.block_size} slots, mask token {tokenizer.decode([config.mask_token_id])!r} ({config.mask_token_id})"
    )
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)
    meter = build_meter(recipe, target, head, held_out, tokenizer=tokenizer, note=note)

    with Training(
        recipe,
        processes,
        target=target,
        tokenizer=tokenizer,
        head=head,
        optimizer=optimizer,
        packed=packed,
        labels_per_row=labels_per_row,
        held_out=held_out,
        meter=meter,
        every=max(recipe.row_length // recipe.num_anchors, 1),
    ) as training:
        for step in training:
            drawn = {"seed": recipe.seed, "step": step.number}
            blocks = draw_blocks(packed.select(step.rows), recipe.num_anchors, recipe.num_depths, **drawn)
            step.num_labels = max(blocks.num_labels, 1)
            for batch in step:
                input_ids, position_ids, document_ids = batch.inputs
                own = blocks.of_rows(batch.first, len(input_ids))
                with training.autocast:
                    states = head(batch.features, *own.seen(input_ids), position_ids, document_ids)  # [B, R, S, H]
                    totals = accumulate_block_gradients(
                        head,
                        states[:, :, config.first_slot :],
                        own,
                        input_ids,
                        batch.last,
                        lm_head=target.lm_head,
                        objective=step.objective,
                        num_labels=step.num_labels,
                        chunk_tokens=recipe.chunk_tokens,
                        with_hits=step.logs,
                    )
                step.add(totals)  # [K, 10]
            totals = step.finish()
            if step.logs:
                step.record(summarize_blocks(totals, step.objective, step.num_labels))
    return training.status


if __name__ == "__main__":
    run_script(main)
