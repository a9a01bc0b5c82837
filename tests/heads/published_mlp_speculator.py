"""Published MLP speculators: IBM's layout, and fms-extras' own."""

from types import SimpleNamespace

import torch

from headstart.tests.heads.published_file import Published, draw, prefixed, wide
from headstart.tests.heads.test_mlp_speculator import H, S, V, by_hand

MLP_FEATURES = torch.randn(1, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def mlp(steps=3, tied=False):
    shapes = {}
    for i in range(1 if tied else steps):
        shapes |= {f"emb.{i}.weight": (V, S), f"head.{i}.weight": (V, S)}
        shapes |= {f"ln.{i}.weight": (S,), f"ln.{i}.bias": (S,)}
    shapes |= {f"proj.{i}.weight": (S, S if i else H) for i in range(min(steps, 2) if tied else steps)}
    return draw(shapes)


def repeated(tensors, steps=3):
    """A tied file that repeats every tensor for every step."""
    found = {}
    for name, tensor in tensors.items():
        kind, first, what = name.split(".")
        for i in range(int(first), 1 if kind == "proj" and first == "0" else steps):
            found[f"{kind}.{i}.{what}"] = tensor.clone()
    return found


def mlp_config(steps=3, tied=False, scaled=False, **keys):
    names = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "torch_dtype": "float32",
    }
    sizes = {"vocab_size": V, "emb_dim": H, "inner_dim": S, "n_predict": steps, "n_candidates": 5}
    flags = {"top_k_tokens_per_head": [5, 4, 3][:steps], "tie_weights": tied, "scale_input": scaled}
    return names | sizes | flags | keys


def mlp_logits(tensors, steps=3, tied=False, scaled=False):
    def logits():
        config = SimpleNamespace(num_steps=steps, tie_weights=tied, scale_input=scaled)
        head = SimpleNamespace(config=config, state_dict=lambda: wide(tensors))
        return list(by_hand(head, MLP_FEATURES[0], list(range(steps)))[:, None])

    return logits


def mlp_layouts():
    own, one, tied = mlp(), mlp(1), mlp(tied=True)
    partly = {name: one for name, one in repeated(tied).items() if name not in ("emb.1.weight", "ln.2.bias")}
    kind, prefix = "mlp-speculator", "speculator."
    file = Published
    lies = dict(n_predict=4, vocab_size=7, emb_dim=8, inner_dim=0)
    silent = {key: value for key, value in mlp_config().items() if key != "scale_input"}
    untold = {key: value for key, value in mlp_config().items() if key != "tie_weights"}
    return {
        "MLP speculator": file(prefixed(prefix, own), mlp_config(), mlp_logits(own), kind),
        "MLP speculator, scaled": file(
            prefixed(prefix, one), mlp_config(1, scaled=True), mlp_logits(one, 1, scaled=True), kind
        ),
        "MLP speculator, tied, repeated": file(
            prefixed(prefix, repeated(tied)),
            mlp_config(tied=True),
            mlp_logits(tied, tied=True),
            kind,
            (),
            "pytorch_model.bin",
        ),
        "MLP speculator, tied": file(prefixed(prefix, tied), mlp_config(tied=True), mlp_logits(tied, tied=True), kind),
        "MLP speculator, tied, not said": file(
            *(prefixed(prefix, tied), untold, mlp_logits(tied, tied=True), kind),
            ('does not say "tie_weights": True; the tensors hold what tied steps share',),
        ),
        "MLP speculator, tied said in vain": file(
            *(prefixed(prefix, own), mlp_config(tied=True), mlp_logits(own), kind),
            ('"tie_weights": True; the tensors of the steps are different ones',),
        ),
        "MLP speculator, 2 steps said and 3 repeated": file(
            prefixed(prefix, repeated(tied)),
            *(mlp_config(2, True), mlp_logits(tied, tied=True), kind),
            ('"n_predict": 2; .* it is 3', r'2 numbers as "top_k_tokens_per_head"; there are 3 steps'),
        ),
        "MLP speculator, 5 steps said and 3 repeated": file(
            *(prefixed(prefix, repeated(tied)), mlp_config(3, True, n_predict=5), mlp_logits(tied, tied=True), kind),
            ('"n_predict": 5; .* it is 3',),
        ),
        "MLP speculator, no steps said and a part of 3 repeated": file(
            *(prefixed(prefix, partly), mlp_config(3, True, n_predict=None), mlp_logits(tied, tied=True), kind)
        ),
        "MLP speculator, scale not said": file(
            prefixed(prefix, own), silent, mlp_logits(own), kind, ('does not say "scale_input": taken as False',)
        ),
        "MLP speculator, lies": file(
            *(prefixed(prefix, own), mlp_config(**lies), mlp_logits(own), kind),
            ('"n_predict": 4; .* 3', '"vocab_size": 7; .* 23', '"emb_dim": 8; .* 12', '"inner_dim": 8; .* 20'),
        ),
        "fms-extras' MLP speculator": file(
            own, mlp_config(), mlp_logits(own), kind, ('the names of its tensors lack the prefix "speculator."',)
        ),
    }
