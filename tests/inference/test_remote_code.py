"""Code that a model brings along: refused before it is run, run where it is trusted, and then said."""

import json
import shutil
import sys
import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart import LLM, SamplingParams
from headstart.cli import main
from headstart.heads.storage import remote_code
from headstart.inference.models.architectures import UnsupportedArchitecture
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.train.teacher.features import load_target

PARAMS = [SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True) for temperature in (0.0, 0.9)]
PROMPTS = [[7, 3, 90, 12], list(range(20, 60))]

CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
# A Llama whose logits are scaled, so that nothing else can be taken for it. {attend}: what its layers do.
MODEL = """
import pathlib
import torch
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

pathlib.Path({mark!r}).touch()

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = {logits}
        return output
"""
SCALED, MIXING = "output.logits * 0.25", "output.logits.cumsum(-1)"


@pytest.fixture(scope="module", autouse=True)
def modules_of_these_tests(tmp_path_factory):
    """transformers copies code into a folder of the home, and imports it as a package from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == remote_code.PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def own_folder(tmp_path, request):
    """own_folder(logits) -> folder of a small model of a type of its own; `ran` in it appears once its code has been run."""

    def make(logits=SCALED):
        torch.manual_seed(0)
        folder = tmp_path / request.node.name  # the name of a package, too, which is imported once
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.3,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        content = json.loads((folder / "config.json").read_text()) | {
            "model_type": "own_llama",
            "architectures": ["OwnForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_own.OwnConfig",
                "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
            },
        }
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "configuration_own.py").write_text(CONFIG)
        (folder / "modeling_own.py").write_text(MODEL.format(mark=str(folder / "ran"), logits=logits))
        return folder

    return make


def make_llm(model, **options):
    return LLM(model, device="cpu", dtype="float32", max_model_len=100, max_num_seqs=3, **options)


def tokens(llm):
    return [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] for params in PARAMS]


def test_it_is_not_run_unless_it_is_trusted(own_folder, capsys):
    folder = own_folder()
    message = (
        r"is of model type 'own_llama', which transformers .* does not know, and brings code of its own for it "
        r"\(configuration_own\.OwnConfig, modeling_own\.OwnForCausalLM\)\. That code is not run: .*trust_remote_code=True"
    )
    for refuse in (
        lambda: make_llm(str(folder)),
        lambda: make_llm(str(folder), trust_remote_code=False),
        lambda: load_target(str(folder), torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match=message.partition(": .*")[0]) as refused:
            refuse()
        assert "\n" not in str(refused.value)
    assert main(["generate", "hello", "--model", str(folder)]) == 2
    assert "trust_remote_code=True" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    with pytest.raises(ValueError, match="trust_remote_code must be True or False, got 'yes'"):
        make_llm(str(folder), trust_remote_code="yes")


def test_trusted_it_is_run_and_that_is_said_once(own_folder, capsys):
    folder = own_folder()
    with pytest.warns(UserWarning, match=r"code of .* is run \(configuration_own\.OwnConfig, modeling_own") as said:
        llm = make_llm(str(folder), trust_remote_code=True)
    assert len([one for one in said if "is run" in str(one.message)]) == 1
    assert isinstance(llm.engine.decoder, ModuleDecoder)
    assert type(llm.engine.decoder.module).__name__ == "OwnForCausalLM"
    plain = tokens(llm)
    # At temperature 0.9 its logits count: they are a quarter of those of the Llama with these weights.
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert tokens(make_llm(model)) == plain
    llama = LlamaForCausalLM.from_pretrained(
        folder, config=LlamaConfig(**json.loads((folder / "config.json").read_text()))
    )
    assert [a == b for a, b in zip(tokens(make_llm(llama)), plain)] == [True, False]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert tokens(LLM(llm, max_model_len=100, max_num_seqs=3, speculative_config=ngram)) == plain
    with pytest.raises(ValueError, match=r"OwnConfig is defined in the model's own code.*That code is not run"):
        make_llm(llm.config, load_format="dummy")
    dummy = make_llm(llm.config, load_format="dummy", trust_remote_code=True)
    assert type(dummy.engine.decoder.module).__name__ == "OwnForCausalLM"
    # It stays a matter of each call.
    with pytest.raises(ValueError, match="That code is not run"):
        make_llm(str(folder))
    assert main(["generate", "hello", "--model", str(folder), "--trust-remote-code", "--max-model-len", "100"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_trusted_it_is_refused_by_name_where_its_operations_cannot_be_accounted_for(own_folder):
    with pytest.warns(UserWarning, match="is run"), pytest.raises(UnsupportedArchitecture, match=r"own_llama .*cumsum"):
        make_llm(str(own_folder(MIXING)), trust_remote_code=True).generate([[1, 2]], PARAMS[0])


def test_the_librarys_own_class_comes_before_it(own_folder, tmp_path):
    folder = shutil.copytree(own_folder(), tmp_path / "known")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"model_type": "llama"}))
    for trusted in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tokens(make_llm(str(folder), trust_remote_code=trusted))
    assert not list(tmp_path.glob("*/ran"))


def test_a_module_of_its_own_code_on_a_config_of_the_librarys_is_refused(own_folder):
    folder = own_folder()
    content = json.loads((folder / "config.json").read_text())
    del content["auto_map"]["AutoConfig"]
    (folder / "config.json").write_text(json.dumps(content | {"model_type": "llama"}))
    path = folder / "modeling_own.py"
    path.write_text(
        path.read_text().replace("from .configuration_own import", "from transformers import LlamaConfig as")
    )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(
        ValueError, match=r"OwnForCausalLM is defined in the model's own code, and its config is .* LlamaConfig"
    ):
        make_llm(model)


def test_a_tokenizers_code_is_run_only_if_it_is_trusted(tmp_path, own_folder):
    folder = own_folder()
    (folder / "tokenization_own.py").write_text(
        "from transformers import ByT5Tokenizer\n\nclass OwnTokenizer(ByT5Tokenizer):\n    pass\n"
    )
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.warns(UserWarning, match=r"is run for its tokenizer \(tokenization_own\.OwnTokenizer\)"):
        llm = make_llm(str(folder), trust_remote_code=True)
    assert type(llm.tokenizer).__name__ == "OwnTokenizer"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        make_llm(model, tokenizer=str(folder))
