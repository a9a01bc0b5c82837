"""Published checkpoints give the right logits and notes on wrong configs, and convert without loss.

Damaged checkpoints: test_published_damage.py.
"""

import re
import shutil
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import load_head, read_head, save_head
from headstart.heads.families import family_of, from_file, to_file
from headstart.tests.heads.published import LAYOUTS, logits_of
from headstart.tests.heads.published_eagle import EMBEDDING, NO_IDS
from headstart.tests.heads.test_eagle import LM_HEAD

# One for each table of names; the others are these with another config, or other names.
SWEPT = (
    "Medusa",
    "Medusa, shared lm_head",
    "vLLM's Medusa",
    "MLP speculator",
    "MLP speculator, tied",
    "SGLang's EAGLE",
)
SWEPT += ("EAGLE of a Qwen2", "EAGLE-3, original", "speculators")
M, VM, P, E, E3 = "Medusa", "vLLM's Medusa", "MLP speculator", "EAGLE, wide heads", "EAGLE-3, original"


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_heads_load_with_the_right_maths(tmp_path, name):
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    file = read_head(tmp_path, dtype="float64")
    assert file.format == layout.format
    assert len(file.notes) == len(layout.notes), file.notes
    assert all(any(re.search(pattern, note) for note in file.notes) for pattern in layout.notes), file.notes
    assert len(file.weight_files) == layout.num_shards
    assert all(path.is_file() and path.name != "config.json" for path in file.weight_files)
    with torch.no_grad():
        found, expected = logits_of(file.head), layout.logits()
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def same_bits(one, other):
    states = [head.state_dict() for head in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name].view(torch.uint8), states[1][name].view(torch.uint8)) for name in states[0]
    )


def can_say(head, format):
    """Whether a format can hold a head. It cannot: own or shared lm_heads in the other layout, a bias of fc in vLLM's dialect, a
    normed residual in the plain layout."""
    config, family = head.config, family_of(head).name
    if family == "Medusa":
        return format == "vllm" or (format == "medusa-shared") == config.shared_lm_head
    return not (format == "eagle-vllm" and config.fc_bias) and not (format == "eagle3" and config.norm_before_residual)


def write(head, folder, format):
    """The file's tensors, and the head read from it; None if the format refuses the head."""
    if head.needs_embedding and format == "speculators":
        head.take_embedding(EMBEDDING)
    if not can_say(head, format):
        with pytest.raises(ValueError, match=rf"format '{format}' .*use '"):
            save_head(head, folder, format=format)
        return None
    save_head(head, folder, format=format, lm_head_weight=LM_HEAD.float())
    file = read_head(folder)
    assert file.format == format
    notes = [note for note in file.notes if not re.search(NO_IDS, note)]  # they follow from the target's depth
    assert not notes
    assert file.head.config == head.config
    return file


CONVERTED = (*SWEPT, "Medusa, tied blocks", "vLLM's Medusa, shared lm_head", "vLLM's Medusa, no biases")
CONVERTED += ("MLP speculator, tied, repeated", "EAGLE, fc.bias without the key", "EAGLE, wide heads")
CONVERTED += ("EAGLE-3, whole vocabulary", "speculators, little said")


@pytest.mark.parametrize("name", CONVERTED)
def test_formats_convert_there_and_back_to_the_same_file(tmp_path, name):
    """A written config is complete, so there are no notes; a format that cannot hold a head names the format that can."""
    LAYOUTS[name].write(tmp_path / "published")
    formats = family_of(read_head(tmp_path / "published").head).formats.FORMATS
    written = {}
    for format in formats:
        head = read_head(tmp_path / "published").head
        if written_file := write(head, tmp_path / format, format):
            written[format] = written_file
            assert head.needs_embedding or written_file.head.needs_embedding or same_bits(written_file.head, head)
    assert written
    for one, other in permutations(written, 2):
        there = write(read_head(tmp_path / one).head, tmp_path / "there", other)
        back = write(there.head, tmp_path / "back", one)
        assert [path.read_bytes() for path in back.weight_files] == [
            path.read_bytes() for path in written[one].weight_files
        ]
        assert logits_equal(back.head, written[one].head)
        shutil.rmtree(tmp_path / "there")
        shutil.rmtree(tmp_path / "back")


def logits_equal(one, other):
    with torch.no_grad():
        return all(torch.equal(a, b) for a, b in zip(logits_of(one.double()), logits_of(other.double())))


@pytest.mark.parametrize("format", ["vllm", "mlp-speculator", "eagle-vllm", "speculators"])
def test_large_heads_are_written_in_shards(tmp_path, format):
    name = next(name for name, layout in LAYOUTS.items() if layout.format == format)
    LAYOUTS[name].write(tmp_path / "published")
    head = read_head(tmp_path / "published").head
    save_head(head, tmp_path / "whole", format=format)
    save_head(head, tmp_path / "shards", format=format, max_shard_size=8000)
    file = read_head(tmp_path / "shards")
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        *(path.name for path in file.weight_files),
    }
    assert len(file.weight_files) > 2
    held = [load_file(path).values() for path in file.weight_files]
    assert all(len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 8000 for tensors in held)
    assert same_bits(file.head, head)
    modes = {path.stat().st_mode for path in (tmp_path / "shards").iterdir()}
    assert len(modes) == 1
    assert [path.name for path in read_head(tmp_path / "whole").weight_files] == ["model.safetensors"]


def test_a_file_that_readers_open_by_its_name_is_never_split(tmp_path):
    LAYOUTS["Medusa"].write(tmp_path / "published")
    save_head(read_head(tmp_path / "published").head, tmp_path / "head", max_shard_size=100)
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"config.json", "medusa_lm_head.safetensors"}


def test_a_scaled_rope_is_written_in_both_spellings():
    """A reader that knows only one spelling would rotate differently, without an error."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    for name, format in ((E, "eagle-vllm"), (E3, "eagle3")):
        config = LAYOUTS[name].config | {"rope_theta": 500.0, "rope_scaling": scaling, "max_position_embeddings": None}
        kind, reading = from_file(LAYOUTS[name].tensors, config)
        assert sum("max_position_embeddings" in note for note in reading.notes) == 1
        _, written = to_file(kind(reading.config), format)
        assert (written["rope_theta"], written["rope_scaling"]) == (500.0, scaling)
        assert written["rope_parameters"] == scaling | {"rope_theta": 500.0}


def test_loading_warns_of_every_note_once(tmp_path):
    LAYOUTS["EAGLE, no fc.bias and no key"].write(tmp_path)
    with pytest.warns(UserWarning, match="no fc.bias") as caught:
        load_head(tmp_path)
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f'{tmp_path}: config.json does not say "bias": False')
    assert caught[0].filename == __file__
