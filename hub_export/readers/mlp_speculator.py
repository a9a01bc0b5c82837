"""Requirements of each reader on the files of MLP speculators, and what it does silently if they are not met."""

from .readers import APART, BUILDS, NO, SGLANG, TGI, VLLM, WRONG, Asks, Reader, asked, names_target

FORMATS_ARE, FROM_LM_HEAD = APART, False

TGI_ASKS = (
    Asks("model_type", 'config.json must say "model_type": "mlp_speculator"', value="mlp_speculator"),
    Asks(
        "architectures",
        'without "architectures": ["MLPSpeculatorPreTrainedModel"] it serves without speculation',
        value=["MLPSpeculatorPreTrainedModel"],
    ),
)


def tgi(files):
    config, head = files.config, files.head.config
    if not any(name.endswith(".safetensors") for name in files.files):
        yield NO, "it reads .safetensors files, and there are none"
    yield from names_target(files)
    yield from asked(files, TGI_ASKS)
    if "inner_dim" not in config:
        yield NO, "config.json lacks `inner_dim`"
    elif config["inner_dim"] != head.inner_size:
        yield (
            WRONG,
            f"it weighs tokens by `inner_dim` {config['inner_dim']} as it stands, the inner size is {head.inner_size}",
        )
    yield from _steps_said(files)
    if head.scale_input:
        yield WRONG, "it takes no notice of `scale_input`, which is true here"


ASKS = (
    Asks("vocab_size", BUILDS, of="vocab_size", default=32000),
    Asks("emb_dim", BUILDS, of="hidden_size", default=4096),
)


def vllm_and_fms(files):
    config, head = files.config, files.head.config
    yield from asked(files, ASKS)
    if (config.get("inner_dim") or config.get("emb_dim", 4096)) != head.inner_size:
        yield NO, f"it builds inner_dim {config.get('inner_dim', 0)} by config.json, the tensors have {head.inner_size}"
    yield from _steps_said(files)


def _steps_said(files):
    said, head = files.config.get("n_predict", 3), files.head.config
    if type(said) is not int:
        yield NO, f"config.json's `n_predict` is {said!r}, which is not a number of steps"
    elif said != head.num_steps:
        kind = WRONG if said < head.num_steps else NO
        yield kind, f"it drafts {said} steps by config.json, {head.num_steps} are here"
    if head.tie_weights and head.num_steps == 1:
        yield NO, "it wants two projections of tied steps, one step has one"


READERS = (
    Reader(TGI, {"mlp-speculator": "yes"}, tgi),
    Reader(VLLM, {"mlp-speculator": "to 0.9"}, vllm_and_fms),
    Reader("fms-extras", {"mlp-speculator": "yes"}, vllm_and_fms),
    Reader(SGLANG, without="no support of MLP speculators"),
)


def in_card(head):
    shared = "shared by all steps" if head.config.tie_weights else "one set per step"
    return "An MLP speculator", "drafts", [("inner size", head.config.inner_size), ("weights", shared)]


def title(config):
    return f"MLP speculator, {config['num_steps']} steps, weights {'tied' if config['tie_weights'] else 'of their own'}"


def features(head, depth):
    return {"kind": "final"}


def tables(head):
    return ("own, one for all steps" if head.config.tie_weights else "own, one per step",) * 2
