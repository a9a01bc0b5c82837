"""Common to all tests: no network, no files outside pytest's own folders, no GPU test without a GPU, and a tiny target.

The guard against the network watches this process; programs that a test starts inherit the offline switches instead.
"""

import gc
import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports huggingface_hub or wandb: both read their switches once. A separate home keeps the tests away from the
# user's caches and tokens.
_HOME = tempfile.mkdtemp(prefix="headstart-tests-")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HOME=f"{_HOME}/huggingface",
    XDG_CACHE_HOME=f"{_HOME}/cache",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_ERROR_REPORTING="false",
    WANDB_CONFIG_DIR=f"{_HOME}/wandb/config",
    WANDB_CACHE_DIR=f"{_HOME}/wandb/cache",
    WANDB_DATA_DIR=f"{_HOME}/wandb/data",
    MPLBACKEND="Agg",
)
# Tests run beside each other, and their products are small. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(_name, None)


class _RootIsNotATestPackage:
    """The root holds an __init__.py, so pytest takes it for a package of tests and imports it a second time, under the name of
    the checkout's folder. A plain directory is not imported."""

    @staticmethod
    def pytest_collect_directory(path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config):
    config.pluginmanager.register(_RootIsNotATestPackage(), "root-is-not-a-test-package")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from headstart.tests import interpreter_patches, interpreter_products

        interpreter_patches.install()
        interpreter_products.install()


def pytest_unconfigure():
    shutil.rmtree(_HOME, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    # Under the interpreter every CPU tensor goes through Triton, so those tests run in a separate process.
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = [item for item in items if bool(item.get_closest_marker("interpreter")) != interpreting]
    on_gpu = [item for item in items if item.get_closest_marker("gpu") and item not in left_out]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            left_out += on_gpu
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]
    # The longest one by far begins at once: at the end the other processes would wait for it.
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")


def pytest_collection_finish():
    """What lives until the end, 800,000 objects of modules and tests, is not walked by every collection: one took 0.5 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def thawed_heap():
    """The heap as programs have it, where engines freeze it for each call."""
    from headstart.inference import frozen_heap

    gc.unfreeze()
    frozen_heap._looks_again = 0.0
    yield
    gc.collect()
    gc.freeze()


def _is_loopback(host):
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: even looking it up would use the network


@pytest.fixture(scope="session", autouse=True)
def no_network():
    """Connections and name look-ups that would leave this machine raise; those to loopback addresses go through."""
    patch = pytest.MonkeyPatch()

    def guard(name, host_of):
        real = getattr(socket, name) if hasattr(socket, name) else getattr(socket.socket, name)

        def guarded(*args, **kwargs):
            host = host_of(*args)
            if host is not None and not _is_loopback(host):
                raise RuntimeError(
                    f"a test reached for the network: {name} to {host!r}; tests use loopback addresses only"
                )
            return real(*args, **kwargs)

        return guarded

    def host_of_address(sock, address, *_):
        return address[0] if sock.family in (socket.AF_INET, socket.AF_INET6) else None

    def host_of_name(host, *_):
        return host.decode() if isinstance(host, bytes) else host

    for name in ("connect", "connect_ex"):
        patch.setattr(socket.socket, name, guard(name, host_of_address))
    patch.setattr(socket, "getaddrinfo", guard("getaddrinfo", host_of_name))
    yield
    patch.undo()


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """Folder of a random Llama (hidden 32, 2 layers, 4 heads over 2 KV heads, vocabulary 320) with a tokenizer that chats."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-target")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        [path.read_text(encoding="utf-8") for path in sorted((ROOT / "heads").rglob("*.py"))], trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # large enough that one token clearly wins
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder
