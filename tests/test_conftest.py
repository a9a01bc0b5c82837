"""The promises that tests/conftest.py makes to all other tests."""

import gc
import os
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.org", 443)])
def test_connections_that_leave_the_machine_raise(address):
    with pytest.raises(RuntimeError, match="reached for the network"):
        socket.create_connection(address, timeout=0.01)
    with socket.socket() as sock, pytest.raises(RuntimeError, match="reached for the network"):
        sock.connect(address)


def test_connections_to_loopback_go_through():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5) as client,
    ):
        client.sendall(b"x")
        peer, _ = server.accept()
        with peer:
            assert peer.recv(1) == b"x"


def test_libraries_are_offline_and_away_from_home():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["WANDB_MODE"] == "offline"
    assert not Path(os.environ["HF_HOME"]).is_relative_to(Path.home())


def test_collections_do_not_walk_what_was_collected():
    assert gc.get_freeze_count() > 10_000
    assert not any(one is pytest for one in gc.get_objects())


def test_root_package_is_imported_once():
    import headstart

    names = [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "") == str(ROOT / "__init__.py")
    ]
    assert names == ["headstart"]
    assert Path(headstart.__file__).resolve() == ROOT / "__init__.py"


def test_tiny_target_loads_and_marks_what_the_assistant_says(tiny_target):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    messages = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "return x"}]
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors=None
    )
    said = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"]) if m]
    assert tokenizer.decode(said) == "return x<|end|>"
    assert model.config.vocab_size == len(tokenizer)
