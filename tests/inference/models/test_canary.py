"""The canary passes on a sound engine, and names what differs where a row's bits depend on what is computed beside it."""

import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import headstart.inference.models.blocks as blocks_module
import headstart.inference.models.canary as canary
import headstart.inference.models.division as division_module
from headstart.inference.llm import LLM
from headstart.inference.models.decoder import Decoder
from headstart.inference.models.division import Division
from headstart.inference.models.transport import ALONE
from headstart.inference.models.weights import random_weights
from headstart.kernels.attention import tile_attention as tile_module, tree_attention as tree_module
from headstart.kernels.linear.linear import linear_reference, linear_sums
from headstart.kernels.numerics import NUMERICS, Numerics
from headstart.tests.kernels.mutants import mutated

SHAPE = dict(
    hidden_size=96,
    intermediate_size=200,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    vocab_size=131,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
)
MODELS = {
    "llama": {},
    "biases": dict(attention_bias=True, mlp_bias=True),
    "head norms and windows": dict(
        model_type="qwen3",
        use_sliding_window=True,
        sliding_window=37,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "scales": dict(model_type="granite", attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=5.0),
}


def make_model(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**({"model_type": "llama"} | SHAPE | changes))).eval()


def make_decoder(dtype=torch.float32, device="cpu", **changes):
    return Decoder.from_module(make_model(**changes).to(device, dtype), max_positions=512)


@pytest.fixture
def decoder():
    return make_decoder()


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headstart"


@pytest.fixture
def runs(monkeypatch):
    """One entry for every time the canary ran instead of being looked up."""
    runs, find = [], canary.find_fault
    monkeypatch.setattr(canary, "find_fault", lambda decoder: runs.append(1) or find(decoder))
    return runs


# --- what it shows ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_it_passes(model, dtype):
    assert canary.find_fault(make_decoder(dtype, **MODELS[model])) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_it_passes_on_the_gpu(model, dtype):
    wide = dict(hidden_size=2048, intermediate_size=1536, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    assert canary.find_fault(make_decoder(dtype, "cuda", **(wide | MODELS[model]))) is None


@pytest.mark.gpu
def test_another_order_of_sums_in_large_batches_is_found_on_the_gpu(monkeypatch):
    """As libraries choose it. (Which of a library's products differ at which sizes changes with its versions.)"""

    def in_halves_where_rows_are_many(x, w, b=None, **_):
        half = w.shape[1] // 2 if len(x) >= 300 else w.shape[1]
        first, rest = (linear_reference(*(y[:, k].float() for y in (x, w))) for k in (slice(half), slice(half, None)))
        return (first + rest).to(x.dtype)[None]

    wide = dict(hidden_size=2048, intermediate_size=1536, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    decoder = make_decoder(torch.bfloat16, "cuda", **wide)
    monkeypatch.setattr(blocks_module, "linear_parts", in_halves_where_rows_are_many)
    assert "gives a row other bits among" in canary.find_fault(decoder)


def nudged(function, least, which=lambda *given: True):
    """A function of rows that changes the last bit of one number if there are `least` rows or more."""

    def faulty(*given, **named):
        found = function(*given, **named)
        first = found[0] if isinstance(found, tuple) else found
        if given[0].shape[-2] >= least and which(*given):
            first.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.tensor(9.0))
        return found

    return faulty


@pytest.mark.parametrize("least", [2, 6, 18])
@pytest.mark.parametrize("name", ["input_norm", "qkv", "out", "post_norm", "gate_up_silu", "down", "lm_head"])
def test_a_product_that_differs_by_rows_is_named(name, least, decoder, monkeypatch):
    layer = decoder.layers[0]
    weights = {"qkv": layer.attention.qkv.weight, "out": layer.attention.out.weight, "down": layer.mlp.down.weight}
    module, function = {
        "input_norm": (blocks_module, "rms_norm"),
        "post_norm": (blocks_module, "add_rms_norm"),
        "gate_up_silu": (canary, "gate_up_silu"),
        "lm_head": (blocks_module, "linear"),
    }.get(name, (blocks_module, "linear_parts"))
    of_this = (lambda x, w, *_: w is weights[name]) if name in weights else (lambda *_: True)
    monkeypatch.setattr(module, function, nudged(getattr(module, function), least, of_this))
    fault = canary.find_fault(decoder)
    assert fault.startswith(name)
    assert f"among {next(rows for rows in canary.CPU_ROWS if rows >= least)} rows" in fault


@pytest.mark.parametrize("name", ["out", "down"])
def test_a_product_in_ranges_that_differs_by_rows_is_named(name, monkeypatch):
    config = LlamaConfig(**SHAPE)
    division = Division(config, ALONE, invariant=2)
    ranged = Decoder(random_weights(config, torch.float32, "cpu", division=division), config, 512, division)
    assert canary.find_fault(ranged) is None
    layer = ranged.layers[0]
    last = {"out": layer.attention.out, "down": layer.mlp.down}[name].weights[1]

    def faulty(x, w, *given):
        found = linear_sums(x, w, *given)
        if w is last and len(x) >= 6:
            found[0, 0] += 1  # the last bit of a part may be lost in the sum
        return found

    monkeypatch.setattr(division_module, "linear_sums", faulty)
    assert canary.find_fault(ranged).startswith(name)


def test_a_product_that_differs_by_the_place_of_a_row_is_named(decoder, monkeypatch):
    linear = blocks_module.linear

    def by_place(x, w, **named):
        found = linear(x, w, **named)
        found[10:, 0] += 1e-6
        return found

    monkeypatch.setattr(blocks_module, "linear", by_place)
    assert canary.find_fault(decoder) == (
        "lm_head [131, 96] gives a row other bits among 17 rows than alone or among 5"
    )


def test_a_library_product_is_found(monkeypatch):
    decoder = make_decoder(hidden_size=256, intermediate_size=704, num_attention_heads=8, head_dim=32)
    monkeypatch.setattr(blocks_module, "linear_parts", lambda x, w, b=None, **_: linear_reference(x, w, b)[None])
    assert "gives a row other bits among" in canary.find_fault(decoder)


FAULTS = {
    "a tail key too many": (
        "> node_positions[:, :, None]",
        "> node_positions[:, :, None] + 1",
        "in a tree after 60 committed keys",
    ),
    "keys by node instead of depth": (
        "ancestors.gather(2, beyond_root[:, None]",
        "torch.arange(num_depths).expand_as(ancestors).gather(2, beyond_root[:, None]",
        "in a tree after 60 committed keys",
    ),
    "a chain's key too many": (
        "(positions > row_positions)",
        "(positions > row_positions + 1)",
        "in a chain after 60 committed keys",
    ),
    "the longest prefix of a batch": ("position >= base,", "position >= base.max(),", "in a batch of 8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_attention_with_a_fault_is_named(fault, decoder, monkeypatch, tmp_path):
    before, after, company = FAULTS[fault]
    mutant = mutated(tile_module, before, after, tmp_path)
    monkeypatch.setattr(tree_module, "build_tile_rows", mutant.build_tile_rows)
    found = canary.find_fault(decoder)
    assert found.startswith("attention (6 heads on 2 of 20, window None) gives the node at position ")
    assert f"other bits {company} than alone after 6" in found


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.interpreter)]
)
def on_kernels(request, monkeypatch):
    """A decoder on Triton's kernels; in the interpreter with fewer rows and requests, which take the same ways."""
    if request.param == "cpu":
        monkeypatch.setattr(canary, "GPU_ROWS", (17, 130))
        monkeypatch.setattr(canary, "GPU_LENGTHS", (252,))
        monkeypatch.setattr(canary, "MANY", 8)
        monkeypatch.setattr(tree_module, "WALK_PROGRAMS", 8)
    few = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    return make_decoder(device=request.param, **few)


def test_it_passes_on_the_kernels(on_kernels):
    assert canary.find_fault(on_kernels) is None


@pytest.mark.parametrize(
    ("before", "after", "company"),
    [
        ("seen = (key <= position) &", "seen = (key <= position + 1) &", "in a tree after"),
        ("        if starts_chunk(begin):", "        if starts_chunk(begin) & (n < 4):", "in a tree after"),
        ("chain_attention(q, kv, table, committed, ", "chain_attention(q, kv, table, committed - 1, ", "chains"),
    ],
    ids=["a tail key too many", "chunks not closed in the tail", "chains begin a key too early"],
)
def test_a_fault_in_an_attention_kernel_is_named(before, after, company, on_kernels, monkeypatch, tmp_path):
    mutant = mutated(tree_module, before, after, tmp_path)
    monkeypatch.setattr(mutant, "WALK_PROGRAMS", tree_module.WALK_PROGRAMS)
    monkeypatch.setattr(canary, "build_tree_index", mutant.build_tree_index)
    monkeypatch.setattr(canary, "_products", lambda decoder: [])
    assert company in canary.find_fault(on_kernels)


def test_attention_is_tried_with_every_window(decoder, monkeypatch):
    """A fault of windows alone is found, though the first layer has none."""
    decoder = make_decoder(**MODELS["head norms and windows"])
    attend = tree_module.tile_attention

    def nudging(q, kv, rows, options):
        found = attend(q, kv, rows, options)
        return found * 1.001 if options.window == 37 and found.shape[0] > 1 else found

    monkeypatch.setattr(tree_module, "tile_attention", nudging)
    assert "window 37) gives the node" in canary.find_fault(decoder)


# --- what becomes of it ---


def test_an_llm_with_a_fault_never_serves(monkeypatch, cache_home):
    model = make_model()
    monkeypatch.setattr(blocks_module, "linear", nudged(blocks_module.linear, 6))
    for _ in range(2):  # and a failure is not recorded as a success
        with pytest.raises(RuntimeError, match="the check at start-up failed") as raised:
            LLM(model, max_model_len=64)
        numerics = Numerics.of(torch.device("cpu"), torch.float32)
        for word in (
            "lm_head [131, 96]",
            "among 17 rows",
            f"numerics {NUMERICS} ({numerics.digest})",
            numerics.device,
            "issue",
        ):
            assert word in str(raised.value)
        assert f"torch {torch.__version__}, triton {numerics.triton}" in str(raised.value)
    assert not cache_home.exists()


def test_an_llm_says_its_numerics():
    found = LLM(make_model().to(torch.bfloat16), max_model_len=64).numerics
    assert (found["version"], found["dtype"], found["torch"]) == (NUMERICS, "bfloat16", torch.__version__)
    assert list(found) == ["version", "digest", "torch", "triton", "device", "dtype"]


def test_a_second_start_does_not_run_it(runs, cache_home):
    for _ in range(2):
        LLM(make_model(), max_model_len=64)
    assert len(runs) == 1
    assert len(list(cache_home.iterdir())) == 1
    LLM(make_model(intermediate_size=104), max_model_len=64)
    LLM(make_model().double(), max_model_len=64)
    assert len(runs) == 3


def test_another_llms_weights_are_not_checked_again(runs, monkeypatch, tmp_path):
    first = LLM(make_model(), max_model_len=64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    LLM(first, max_model_len=64)
    assert len(runs) == 1


@pytest.mark.parametrize("name", ["version", "digest", "torch", "triton", "device"])
def test_other_versions_are_checked_anew(name, decoder, runs, monkeypatch):
    canary.check_exactness(decoder)
    numerics = Numerics.of(decoder.device, decoder.dtype)
    other = vars(numerics) | {name: "another"}
    monkeypatch.setattr(canary.Numerics, "of", lambda *_: Numerics(**other))
    canary.check_exactness(decoder)
    assert len(runs) == 2


def test_other_threads_are_checked_anew(decoder, runs, monkeypatch):
    canary.check_exactness(decoder)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    canary.check_exactness(decoder)
    assert len(runs) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 0}', "\udcff"])
def test_a_broken_record_is_written_anew(content, decoder, runs, cache_home):
    canary.check_exactness(decoder)
    (path,) = cache_home.iterdir()
    good = path.read_bytes()
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    canary.check_exactness(decoder)
    assert (len(runs), path.read_bytes()) == (2, good)


def test_a_folder_that_cannot_be_written_is_no_error(decoder, runs, cache_home):
    cache_home.parent.write_text("a file where the folder should be")
    for _ in range(2):
        canary.check_exactness(decoder)
    assert len(runs) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_no_half_file(error, decoder, runs, cache_home, monkeypatch):
    def interrupted(descriptor):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                canary.check_exactness(decoder)
        else:
            canary.check_exactness(decoder)
    assert list(cache_home.iterdir()) == []
    canary.check_exactness(decoder)
    (path,) = cache_home.iterdir()
    assert len(runs) == 2
    assert json.loads(path.read_text(encoding="utf-8"))["products"]["lm_head"] == [131, 96, False]


def test_records_lie_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):  # which the specification of XDG says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert canary.record_path({}).parent == tmp_path / ".cache" / "headstart"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert canary.record_path({}).parent == tmp_path / "here" / "headstart"
