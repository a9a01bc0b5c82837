"""A small Llama's shape, changes to its files, and the tensors made from them."""

from safetensors.torch import load_file, save_file

from headstart.inference.models.checkpoint_files import read_header

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=67,
    initializer_range=0.3,
)


def file_of(folder, name):
    """The safetensors file that holds a tensor."""
    return next(path for path in folder.glob("*.safetensors") if name in read_header(path))


def rewrite(folder, name, change):
    """Rewrite the file that holds `name`, with its tensors changed by `change`."""
    path = file_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def packed(weights):
    yield from (weights.embedding, weights.norm, weights.lm_head)
    for layer in weights.layers:
        yield from (layer.qkv[0], layer.out[0], layer.gate_up[0], layer.down[0], layer.input_norm, layer.post_norm)
