"""The command on heads that lie beside their target, as users type it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import cli
from headstart.tests.hub_export.inspect.small_heads import H, V


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of 12 layers that all heads fit, in bfloat16."""
    folder = tmp_path_factory.mktemp("target")
    shape = dict(vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=12, num_attention_heads=4)
    with torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def beside_the_target(tmp_path, target, monkeypatch):
    """Paths are relative to a folder in which the target lies, as users type them."""
    (tmp_path / "target").symlink_to(target)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inspect(capsys):
    """Run the command: (exit status, stdout, stderr)."""

    def run(*arguments):
        capsys.readouterr()
        status = cli.main(["inspect", *arguments])
        return status, *capsys.readouterr()

    return run
