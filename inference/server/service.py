"""What the routes share: the model's names and fingerprint, the tokenizer's side of requests, the client of the engine."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..grammar.grammars import Grammars
from .asked import Asker
from .driver.engine_client import EngineClient
from .errors import ApiError
from .figures import Figures
from .token_logprobs import TokenTexts


class Service:
    """engine: an EngineProcess whose engine is built; tokenizer: the LLM's; options: ServerOptions"""

    def __init__(self, engine, tokenizer, options):
        info = engine.info
        self.options, self.tokenizer, self.fingerprint = options, tokenizer, info.fingerprint
        self.names, self.root = options.served_model_names or (info.model_name,), info.model_name
        self.started = int(time.time())
        self.tree, self.figures = info.tree, Figures(self.names[0])
        self.client = EngineClient(engine, tokenizer, options, self.figures)
        self.figures.follow(self.client)
        checker = info.prompt_checker
        self._grammars = Grammars(tokenizer, checker.vocab_size, checker.eos_token_ids)
        checker = replace(checker, tokenizer=tokenizer, grammars=self._grammars)
        self.max_model_len = checker.max_model_len
        self.asker = Asker(checker, info.generation_defaults, options)
        self.texts = TokenTexts(tokenizer)
        self._forms = ThreadPoolExecutor(1, "forms")

    def thread_for(self, fields):
        """The executor that checks a request. A form may take seconds, so forms wait for each other and hold up nobody else."""
        return self._forms if fields.has_form else None

    def stop(self):
        """End what checks forms."""
        self._forms.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    def check_model(self, fields):
        """ApiError 404 for a model that is not served; without a name it is the one that is."""
        if fields.model is not None:
            self.check_name(fields.model)

    def check_name(self, name):
        """ApiError 404 for a name that is not served."""
        if name not in self.names:
            message = f"the model {name!r:.200} is not served here; GET /v1/models lists what is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_tokenizer(self):
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: ask for text by token ids", param="prompt")

    def decode(self, token_ids):
        """Text with its special tokens."""
        return self.tokenizer.decode(token_ids) if self.tokenizer else ""

    def tokenizer_info(self):
        """What a client needs to count and render as the tokenizer does: its special tokens and chat template."""
        own = self.tokenizer
        told = {"tokenizer_class": type(own).__name__, "model_max_length": own.model_max_length}
        return {**told, **own.special_tokens_map, "chat_template": self.asker.chat_template}
