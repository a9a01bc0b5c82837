"""What the HTTP side knows of an engine: sizes, names, the draft tree, and all that decides its bits, in one fingerprint."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import PurePath

from ...checked_prompt import PromptChecker
from ...grammar.library import library_version
from ...metrics import counts_of


@dataclass(frozen=True)
class EngineInfo:
    """Plain data, made where the LLM is.

    prompt_checker: without its tokenizer and grammars; generation_defaults: what the model's generation config says about sampling,
    by the names of SamplingParams; device: its type; counts: counts_of(engine)
    """

    model_name: str
    max_num_seqs: int
    tree: object
    device: str
    fingerprint: str
    prompt_checker: PromptChecker
    generation_defaults: dict
    counts: dict

    @classmethod
    def of(cls, llm):
        return cls(
            model_name=llm.model_name,
            max_num_seqs=llm.engine.max_num_seqs,
            tree=llm.tree,
            device=llm.device.type,
            fingerprint=fingerprint(llm),
            prompt_checker=replace(llm.session.prompt_checker, tokenizer=None, grammars=None),
            generation_defaults=llm.generation_defaults,
            counts=counts_of(llm.engine),
        )


def fingerprint(llm):
    """system_fingerprint: model, adapter and all that decides its bits. Not the head, because it changes none.

    The weights are known by the model's last name and its config: their own digest would take minutes for a large model.
    """
    config = {k: v for k, v in llm.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    parts = [PurePath(llm.model_name).name, config, llm.adapter or "", llm.numerics, llm.device.type, library_version()]
    if llm.engine.decoder.cut is not None:
        parts.append(llm.engine.decoder.cut)
    return f"fp_{hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]}"
