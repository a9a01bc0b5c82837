"""Find and load a target's config, tokenizer and weights, with clear errors before long work."""

import contextlib
import platform
from pathlib import Path

import torch
from torch import nn

from ...heads.checkpoint import find_head
from ...heads.head import Head
from ...heads.storage.hub_answer import ask_hub, hub_options
from ...heads.storage.hub_id import near_folder
from ...heads.storage.remote_code import check_config_code, check_same_code, config_code, tokenizer_code
from .division import WHOLE
from .support import decoder_class

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# vLLM's other names of them.
DTYPE_NAMES = DTYPES | {"half": torch.float16, "float": torch.float32}
# Files of a repository that a target needs; not its weights in other formats, and code only if it may be run.
TARGET_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def at_revision(model, revision, download_dir, trust_remote_code=False):
    """The model, or the folder of this revision (a branch, tag or commit) of a Hub id, downloaded below download_dir.

    Raises ValueError where there is nothing to choose a revision of, and where the Hub does not give it.
    """
    for name, value in (("revision", revision), ("download_dir", download_dir)):
        if value is not None and not (isinstance(value, str | Path) and str(value)):
            raise ValueError(f"{name} must be None or a string, got {value!r:.80}")
    local = not isinstance(model, str) or Path(model).exists()
    if revision is not None and local:
        raise ValueError(
            f"revision {revision!r} is of a model on the Hub (OWNER/NAME), and the model here is "
            f"{model if isinstance(model, str | Path) else type(model).__name__}: leave it out"
        )
    if local or (revision is None and download_dir is None):
        return model
    from huggingface_hub import snapshot_download

    files = [*TARGET_FILES, "*.py"] if trust_remote_code else list(TARGET_FILES)
    where = {"revision": revision, "cache_dir": download_dir, "allow_patterns": files}
    try:
        return snapshot_download(model, **where, **hub_options(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read revision {revision or 'main'!r} of the model {model!r}: {error}") from error


def check_model_folder(name):
    """ValueError if a name can only be a folder's, and no target is there. No weight is read, and the Hub is not asked."""
    path = Path(name)
    if path.is_dir():
        if find_head(path):
            raise ValueError(
                f"{name} holds a head, not a target: give the target as model, and the head as "
                "speculative_config={'model': ...} (on the command line --head)"
            )
        if not (path / "config.json").is_file():
            raise ValueError(f"{name} holds no config.json: expected a model folder in Hugging Face layout")
    elif path.exists():
        raise ValueError(f"{name} is a file: expected a model folder in Hugging Face layout, or a Hub id")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no model folder {name}{near_folder(name)}")


def target_config(model, load_format, trust_remote_code=False):
    """(Hugging Face config, name) of a target, with a clear error if there is no config.

    trust_remote_code: whether code that the model brings along may be run (remote_code.py).
    """
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(model, nn.Module):
        check_causal_lm(model)
        check_same_code(model)
        if load_format != "auto":
            raise ValueError("a loaded model has its weights: load_format belongs to a folder, a Hub id or a config")
        return model.config, getattr(model.config, "_name_or_path", "") or type(model).__name__
    if isinstance(model, PreTrainedConfig):
        if load_format != "dummy":
            raise ValueError("a config has no weights: pass load_format='dummy' for random ones, or a model folder")
        check_config_code(model, trust_remote_code)
        return model, model.model_type
    name = str(model)
    if not isinstance(model, str | Path) or not name.strip():
        raise ValueError(
            "model must be a folder or Hub id (str or Path), a loaded *ForCausalLM, a Hugging Face config or an LLM, "
            f"got {model!r:.80}"
        )
    check_model_folder(name)
    path = Path(name)
    if path.is_dir():
        own = config_code(name, trust_remote_code, **hub_options(name))
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=own), name
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path / 'config.json'}: {error}") from error
    own = config_code(name, trust_remote_code, **hub_options(name))
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=own, **hub_options(name)), name
    except (OSError, ValueError) as error:
        hub = ask_hub()
        told = "" if hub.local_files_only else f" ({error})"
        raise ValueError(
            f"cannot read the model {name!r}: no such folder{near_folder(name)}, and {hub.words} did not give it{told}. "
            "Check the name, the network, HF_HUB_OFFLINE, and `hf auth login` for gated models"
        ) from error


def check_causal_lm(module):
    """ValueError for a loaded module that is not a target, such as a model without an lm_head, a wrapper or a speculator head."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel) and module.can_generate():
        return
    kind = type(module).__name__
    if isinstance(module, Head):
        advice = "that is a head: give it as speculative_config={'model': head}, and its target as model"
    else:
        advice = "load it with AutoModelForCausalLM, and give what a wrapper wraps (an adapter: after merge_and_unload)"
    raise ValueError(f"model must be a loaded *ForCausalLM of transformers, got a {kind} module: {advice}")


def load_tokenizer(tokenizer, model, trust_remote_code=False):
    """The tokenizer asked for, or the model's own; None if the model has none. trust_remote_code: see target_config."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    if tokenizer is None and not isinstance(model, str | Path):
        return None
    from transformers import AutoTokenizer

    name = str(model if tokenizer is None else tokenizer)
    try:
        own = tokenizer_code(name, trust_remote_code, **hub_options(name))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=own, **hub_options(name))
    except (OSError, ValueError) as error:
        if tokenizer is None and Path(name).is_dir() and not any(Path(name).glob("*token*")):
            return None  # a model folder without a tokenizer can still be fed token ids
        silent = not Path(name).is_dir() and (hub := ask_hub()).local_files_only
        told = f"there is no such folder, and {hub.words} did not give it" if silent else error
        raise ValueError(f"cannot read the tokenizer of {name!r}: {told}") from error


def named_dtype(dtype):
    """A torch.dtype, or None for "auto". ValueError for anything else."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in ("auto", *DTYPE_NAMES):
        *names, last = DTYPE_NAMES
        raise ValueError(f"dtype must be auto, {', '.join(names)} or {last}, got {dtype!r}")
    return DTYPE_NAMES.get(dtype)


def named_device(device):
    """A torch.device, or None for "auto" and None. ValueError if the device is absent or the engine does not run on it."""
    if device is None or device == "auto":
        return None
    try:
        found = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ValueError(f"device {str(device)!r} was asked for, but torch sees no GPU: use 'cpu' or 'auto'")
        if (found.index or 0) >= count:
            raise ValueError(f"device {str(device)!r} was asked for, but the last GPU here is 'cuda:{count - 1}'")
    return found


def choose_device(device):
    """The torch.device asked for; for "auto" and None a GPU if there is one. ValueError as `named_device`."""
    return named_device(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_used_in_place(loaded, dtype, device):
    """ValueError if dtype or device differ from those of a loaded model (or decoder)."""
    device = named_device(device) or loaded.device
    same_device = device.type == loaded.device.type and device.index in (None, loaded.device.index)
    if named_dtype(dtype) not in (None, loaded.dtype) or not same_device:
        raise ValueError(
            f"the loaded model is {loaded.dtype} on {loaded.device} and is used in place: leave dtype and device at 'auto'"
        )


def settled_dtype(config, dtype, device):
    """The torch.dtype of weights that are read for a torch.device. dtype: as LLM takes it"""
    found = named_dtype(dtype)
    if found is not None:
        return found
    return faster_cpu_dtype() if device.type == "cpu" else (getattr(config, "dtype", None) or torch.bfloat16)


def load_decoder(model, config, *, dtype, device, max_positions, load_format, adapter=None, division=WHOLE):
    """The decoder of a target from any source.

    adapter: an Adapter to merge into the weights of files, or None; division: the part of a packed decoder that is held.
    """
    if isinstance(model, nn.Module):
        check_used_in_place(model, dtype, device)
        return decoder_class(config).from_module(model, max_positions)
    device = choose_device(device)
    source, divided = str(model) if isinstance(model, str | Path) else None, {}
    if division is not WHOLE:
        divided["division"] = division
    return decoder_class(config).from_pretrained(
        source,
        config,
        dtype=settled_dtype(config, dtype, device),
        device=device,
        max_positions=max_positions,
        load_format=load_format,
        adapter=adapter,
        **divided,
    )


def faster_cpu_dtype():
    """bfloat16 where this CPU multiplies it, float32 elsewhere.

    A fact of the machine, and nothing that is measured: the same model has to give the same bits after a restart.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        multiplies = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if multiplies else torch.float32


def generation_config(model):
    """The generation config of a target, or None."""
    if isinstance(model, str | Path):
        from transformers import GenerationConfig

        with contextlib.suppress(OSError):  # not every model has one
            return GenerationConfig.from_pretrained(str(model), **hub_options(model))
    return getattr(model, "generation_config", None)


def eos_token_ids(model, config, tokenizer):
    """All tokens that end an output: the generation config's, else the config's, else the tokenizer's."""
    for source in (generation_config(model), config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()
