"""What the routes share: the model's names and fingerprint, the tokenizer's side of requests, the client of the engine."""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from ..grammar.library import library_version
from .asked import Asker
from .driver.engine_client import EngineClient
from .errors import ApiError
from .figures import Figures
from .token_logprobs import TokenTexts


class Service:
    """llm: an LLM that nobody else calls; options: ServerOptions"""

    def __init__(self, llm, options):
        self.options = options
        self.names = options.served_model_names or (llm.model_name,)
        self.max_model_len, self.tokenizer, self.started = llm.max_model_len, llm.tokenizer, int(time.time())
        self.figures = Figures(self.names[0])
        self.client = EngineClient(llm, options.max_waiting, self.figures)
        self.figures.follow(self.client, llm.tree)
        self.asker = Asker(llm, options, self.client.check)
        self._forms = ThreadPoolExecutor(1, "forms")
        self.texts = TokenTexts(llm.tokenizer)
        self.fingerprint = fingerprint(llm)

    def thread_for(self, fields):
        """The executor that checks a request. A form may take seconds, so forms wait for each other and hold up nobody else."""
        return self._forms if fields.has_form else None

    def stop(self):
        """End what checks forms, and the engine's thread.  -> whether that has ended"""
        self._forms.shutdown(wait=False, cancel_futures=True)
        return self.client.stop()

    def check_model(self, fields):
        """ApiError 404 for a model that is not served; without a name it is the one that is."""
        if fields.model is not None and fields.model not in self.names:
            message = f"the model {fields.model!r:.200} is not served here; GET /v1/models lists what is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_tokenizer(self):
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: ask for text by token ids", param="prompt")

    def decode(self, token_ids):
        """Text with its special tokens."""
        return self.tokenizer.decode(token_ids) if self.tokenizer else ""


def fingerprint(llm):
    """system_fingerprint: model, adapter and all that decides its bits. Not the head, because it changes none.

    The weights are known by the model's last name and its config: their own digest would take minutes for a large model.
    """
    config = {k: v for k, v in llm.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    parts = [PurePath(llm.model_name).name, config, llm.adapter or "", llm.numerics, llm.device.type, library_version()]
    return f"fp_{hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]}"
