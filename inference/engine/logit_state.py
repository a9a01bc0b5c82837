"""Tables on the device that change the logits of each seat: bias, stop tokens, counts, bad words.

Each table is made when the first request needs it, so requests without such parameters cost nothing. The host writes a seat's rows
when its request's known tokens have been computed, and again after a preemption; then the step itself keeps the counts up to date
(`record`). The row of a request that does not need the table changes nothing. Bad words are looked for in the seats' history,
which is always kept (seats.py).

Letters: S seats, B rows of a batch, V vocabulary, T tokens of the longest sequence, J tokens emitted at most.
"""

from contextlib import contextmanager

import torch

from ...kernels.sampling.process_logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, LogitTables

# Values of a row without a request; zero in other tables.
CLEAN = {"words": -1}


class LogitState:
    """LogitTables of seats. The last one is the padding seat and stays clean.

    history int32 [S, T]: the seats' tokens, kept by SeatTable; on_device: moves a list or CPU tensor there without waiting.
    """

    def __init__(self, history, vocab_size, on_device):
        self.history, self.vocab_size, self.on_device = history, vocab_size, on_device
        self.num_seats = len(history)
        self.tables = LogitTables()
        self._written = {}  # name of a table -> seats whose row is not clean

    @property
    def num_tables(self):
        """Number of tables. It only grows; then a graph that holds the tables' addresses is out of date."""
        return sum(table is not None for table in self.tables)

    @contextmanager
    def all_tables(self):
        """Inside this context every table exists, and changes nothing: a step then runs whatever kernels any request needs."""
        shape, device, before = (self.num_seats, self.vocab_size), self.history.device, self.tables
        dtypes = {"bias": torch.float32, "stop_mask": torch.bool, "counts": torch.int32, "seen": torch.bool}
        tables = {name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        words = torch.full((self.num_seats, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32, device=device)
        self.tables = LogitTables(**tables, words=words, tokens=self.history)
        try:
            yield
        finally:
            self.tables = before

    def write(self, requests, stop_tokens):
        """Write the rows of these requests, from the host's tokens.  stop_tokens(request): ids that min_tokens forbids"""
        rows = {name: {} for name in LogitTables._fields}
        for request in requests:
            for name, row in self._rows(request, stop_tokens):
                rows[name][request.seat] = row
        # Make all missing tables or none: some are useful only in pairs.
        made = {name: self._table(name, given) for name, given in rows.items() if given}
        self.tables = self.tables._replace(**made | ({"tokens": self.history} if "words" in made else {}))
        for name, given in rows.items():
            written = self._written.get(name, set())
            # Before they are written: if that breaks off, they are not clean.
            self._written[name] = written | given.keys()
            stale = [request.seat for request in requests if request.seat in written and request.seat not in given]
            if stale:
                getattr(self.tables, name).index_fill_(0, self.on_device(stale), CLEAN.get(name, 0))
            if given:
                table = getattr(self.tables, name)
                table[self.on_device(list(given))] = self.on_device(torch.stack(list(given.values())))
            self._written[name] = (written - set(stale)) | given.keys()

    def record(self, seats, emitted):
        """Count emitted tokens.  seats [B]; emitted [B, 1 + J]: the number of tokens, then the tokens"""
        num_emitted, tokens = emitted[:, :1], emitted[:, 1:]
        step = torch.arange(tokens.shape[1], device=tokens.device)
        kept = (step < num_emitted) & (seats != self.num_seats - 1)[:, None]
        if self.tables.counts is not None:
            at = seats[:, None] * self.vocab_size + tokens
            # Whole numbers: the order in which they are added does not matter.
            self.tables.counts.view(-1).scatter_add_(0, at.flatten(), kept.int().flatten())

    def _table(self, name, given):
        """The table of this name, made if it does not exist.  given: {seat: row}, not empty"""
        row, table = next(iter(given.values())), getattr(self.tables, name)
        if table is None:
            shape = (self.num_seats, *row.shape)
            table = torch.full(shape, CLEAN.get(name, 0), dtype=row.dtype, device=self.history.device)
        return table

    def _rows(self, request, stop_tokens):
        """(name of a table, row) for every table that the request needs."""
        params = request.params
        if params.min_tokens:
            row = torch.zeros(self.vocab_size, dtype=torch.bool)
            row[list(stop_tokens(request))] = True
            yield "stop_mask", row
        single = [word[0] for word in request.bad_words if len(word) == 1]
        if params.logit_bias or params.allowed_token_ids is not None or single:
            row = torch.zeros(self.vocab_size)
            if params.allowed_token_ids is not None:
                row.fill_(-torch.inf)[list(params.allowed_token_ids)] = 0
            for token, bias in params.logit_bias:
                row[token] += bias
            row[single] = -torch.inf
            yield "bias", row
        if params.has_penalties:
            output = torch.tensor(request.output_token_ids, dtype=torch.int64)
            yield "counts", output.bincount(minlength=self.vocab_size).int()
            row = torch.zeros(self.vocab_size, dtype=torch.bool)
            row[request.prompt_token_ids] = True
            yield "seen", row
        several = [word for word in request.bad_words if len(word) > 1]
        if several:
            row = torch.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32)
            for place, word in zip(row, several):
                place[-len(word) :] = torch.tensor(word)
            yield "words", row
