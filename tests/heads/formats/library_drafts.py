"""Drafts of our files by the speculators library, and files that it writes: how recorded/speculators-0.9.0.safetensors was made.

    python -m headstart.tests.heads.formats.library_drafts export FOLDER            # here: heads in our format "speculators"
    python tests/heads/formats/library_drafts.py draft FOLDER RECORD                # where speculators is installed, on a CPU
    cp RECORD tests/heads/formats/recorded/speculators-0.9.0.safetensors

`draft` loads each folder with SpeculatorModel.from_pretrained, as the library's users do, runs its own training forward over a
packed row with a block at every anchor it finds, and writes it again with save_pretrained. RECORD holds per head: the tensors that
the library wrote, what it was given and its logits; its config.json is in the file's metadata. The library needs a target's folder
for its tables, so `export` writes one, too. FOLDER: a relative path, which is recorded as the target's name; "drafts" here.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

H, V, TOKENS, BLOCK = 16, 40, 24, 4
SHAPE = dict(
    hidden_size=H, vocab_size=V, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
SHAPE |= dict(num_hidden_layers=2, mask_token_id=39, aux_layer_ids=(1, 3), num_target_layers=4, rope_theta=1e4)
DSPARK = dict(edge_rank=3, confidence=True, sample_from_anchor=True, num_speculative_tokens=BLOCK)
HEADS = {
    "dflash": {},
    "dflash-sliding": dict(sliding_layers=(0, 1), sliding_window=5, sliding_is_causal=True, window_of_block=True),
    "dflash-sliding-non_causal": dict(sliding_layers=(0,), sliding_window=5, window_of_block=True),
    "dflash-draft_vocabulary": dict(draft_vocab_size=20),
    "dspark": DSPARK,
    "dspark-sliding": DSPARK
    | dict(sliding_layers=(1,), sliding_window=4, sliding_is_causal=True, window_of_block=True),
    "dspark-own_place": dict(edge_rank=3, num_speculative_tokens=BLOCK - 1),
}


def export(folder):
    from headstart.heads.block import BlockHead
    from headstart.heads.block_config import BlockConfig
    from headstart.heads.checkpoint import save_head

    torch.manual_seed(0)
    tables = {"model.embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    folder.mkdir(parents=True)
    target = folder / "target"
    target.mkdir()
    save_file(tables | {"model.norm.weight": torch.rand(H) + 0.5}, target / "model.safetensors", {"format": "pt"})
    same = {name: SHAPE[name] for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")}
    of_target = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4} | same
    (target / "config.json").write_text(json.dumps(of_target))
    for name, changes in HEADS.items():
        shape = dict(num_speculative_tokens=BLOCK - 1, base_model_name_or_path=str(target))
        head = BlockHead(BlockConfig(**SHAPE | shape | changes))
        for parameter in head.parameters():
            parameter.data = (
                torch.rand_like(parameter) + 0.5 if parameter.dim() == 1 else torch.randn_like(parameter) / 4
            )
        if head.d2t is not None:
            ids = torch.arange(0, V, 2)
            head.set_draft_vocabulary(ids - torch.arange(20), torch.isin(torch.arange(V), ids))
        head.initialize_from_target(tables["lm_head.weight"], tables["model.embed_tokens.weight"])
        save_head(head, folder / name, "speculators", lm_head_weight=tables["lm_head.weight"])


def draft(folder, record):
    from speculators import SpeculatorModel

    torch.manual_seed(1)
    given = {
        "features": torch.randn(1, TOKENS, 2 * H),
        "input_ids": torch.randint(V, (1, TOKENS)),
        "position_ids": torch.cat((torch.arange(15), torch.arange(9)))[None],
        "document_ids": torch.cat((torch.zeros(15), torch.ones(9)))[None].long(),
        "loss_mask": (torch.rand(1, TOKENS) < 0.8).long(),
    }
    given["loss_mask"][0, [0, 15]] = 0  # a document's first token has nothing before it
    found, metadata = {f"given/{name}": tensor for name, tensor in given.items()}, {}
    for path in sorted(one for one in folder.iterdir() if one.name in HEADS):
        config = json.loads((path / "config.json").read_text())
        model = SpeculatorModel.from_pretrained(str(path)).eval()
        model.config.transformer_layer_config._attn_implementation = "eager"
        model._create_mask_fn = as_float_mask()
        for layer in model.layers:
            layer.self_attn.config._attn_implementation = "eager"
        usable = given["loss_mask"].clone()
        usable[:, -config["block_size"] :] = 0
        anchors = usable[0].nonzero()[:, 0]  # all that it may choose: it takes each once, in order
        masked = torch.zeros_like(usable)
        masked[0, anchors] = 1
        with torch.no_grad():
            hidden, logits, _, _, places = model._backbone_forward(
                given["features"], given["input_ids"], masked, torch.zeros(1, TOKENS, H), given["document_ids"],
                given["position_ids"], max_anchors=len(anchors),
            )  # fmt: skip
        blocks = given["input_ids"][0, places].view(len(anchors), -1)
        states, logits = hidden.view(*blocks.shape, -1), logits.view(*blocks.shape, -1)
        before = blocks if config["sample_from_anchor"] else torch.cat((blocks[:, :1], blocks[:, :-1]), 1)
        with torch.no_grad():
            if getattr(model, "markov_head", None) is not None:
                logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
            if getattr(model, "confidence_head", None) is not None:
                read = torch.cat((states, model.markov_head.prev_embeddings(before)), -1)
                found[f"{path.name}/confidence"] = model.confidence_head(read)
        found |= {f"{path.name}/anchors": anchors, f"{path.name}/logits": logits, f"{path.name}/before": before}
        written = path.with_name(path.name + "-written")
        model.save_pretrained(str(written))
        for name, tensor in load_file(written / "model.safetensors").items():
            found[f"{path.name}/file/{name}"] = tensor
        for name in ("embed_tokens.weight", "lm_head.weight"):
            found[f"{path.name}/ours/{name}"] = load_file(path / "model.safetensors")[name]
        metadata[path.name] = (written / "config.json").read_text()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, record, metadata)


def as_float_mask():
    """The library's own masks, made of its rule, as its attention "eager" adds them to the scores."""
    from speculators.models.attention import create_float_mask

    return lambda *rule, **shape: create_float_mask(*rule, **shape, dtype=torch.float32)


if __name__ == "__main__":
    step, *paths = sys.argv[1:]
    {"export": export, "draft": draft}[step](*map(Path, paths))
