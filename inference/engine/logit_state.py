"""Tables on the device that change the logits of each seat: bias, stop tokens, counts, bad words, masks of grammars.

Each table is made when the first request needs it, so requests without such parameters cost nothing. The host writes a seat's rows
when its request's known tokens have been computed, and again after a preemption; then the step itself keeps the counts up to date
(`record`). The row of a request that does not need the table changes nothing. Bad words are looked for in the seats' history,
which is always kept (seats.py).

The seat of an output with a grammar is written before each of its steps (`write_grammars`), because the host alone knows what may
follow. Beside the masks it gets its drafts, a chain of tokens that the grammar forces, in place of the drafter's: other drafted
tokens have no mask. The step puts them into the tree (`constrain`).

Letters: S seats, B rows of a batch, N nodes, V vocabulary, T tokens of the longest sequence, J tokens emitted at most, K masks of a
step, W words of 32 bits.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch

from ...kernels.sampling.process_logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, LogitTables

# Values of a row without a request; zero in other tables.
CLEAN = {"words": -1, "masks": -1}
FREE = 2**31 - 1  # number of drafts of a seat without a grammar: as many as the tree has


class LogitState:
    """LogitTables of seats. The last one is the padding seat and stays clean.

    history int32 [S, T]: the seats' tokens, kept by SeatTable; on_device: moves a list or CPU tensor there without waiting;
    most_host_drafts: the most tokens that the host may draft for a seat in a step.
    """

    def __init__(self, history, vocab_size, on_device, most_host_drafts=0):
        self.history, self.vocab_size, self.on_device = history, vocab_size, on_device
        self.most_host_drafts = most_host_drafts
        self.host_drafts = (
            None  # int64 [S, K] beside the masks: a number of drafts, then these tokens; FREE without a grammar
        )
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
        masks = (self.num_seats, self.most_host_drafts + 1, -(-self.vocab_size // 32))
        masks, drafts = torch.full(masks, -1, dtype=torch.int32, device=device), self.host_drafts
        self.tables = LogitTables(**tables, words=words, tokens=self.history, masks=masks)
        self.host_drafts = self._no_host_drafts()
        try:
            yield
        finally:
            self.tables, self.host_drafts = before, drafts

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
        if self.tables.masks is not None:
            if self.host_drafts is None:
                self.host_drafts = self._no_host_drafts()
            self._write_host_drafts(requests)

    def write_grammars(self, requests):
        """Write masks and drafts of those of the requests that have a grammar, for their next step."""
        requests = [request for request in requests if request.matcher is not None]
        if requests:
            seats = self.on_device([request.seat for request in requests])
            self.tables.masks[seats] = self.on_device(torch.stack([self._masks(request) for request in requests]))
            self._write_host_drafts(requests)

    def constrain(self, batch, draft):
        """Let seats with a grammar draft what the host drafted, nothing else.  -> BatchRows, Draft; an empty node holds -1"""
        drafts = self.host_drafts[batch.seats]
        count = drafts[:, 0]
        # The tokens that may be emitted decide how deep a node may be accepted.
        integers = batch.integers.clone()
        integers[2] = torch.minimum(batch.remaining, 1 + count)
        if self.most_host_drafts and draft.tree.max_depth:
            path = draft.tree.ancestors[draft.tree.tree.deepest, 1:]  # nodes at depths 1, 2, ...
            chain = torch.full_like(draft.tokens, -1)
            chain[:, 0] = draft.tokens[:, 0]
            chain[:, path] = drafts[:, 1 : 1 + len(path)]
            draft = draft._replace(tokens=torch.where((count == FREE)[:, None], draft.tokens, chain))
        return replace(batch, integers=integers), draft

    def record(self, seats, emitted):
        """Count emitted tokens.  seats [B]; emitted [B, 1 + J]: the number of tokens, then the tokens"""
        num_emitted, tokens = emitted[:, :1], emitted[:, 1:]
        step = torch.arange(tokens.shape[1], device=tokens.device)
        kept = (step < num_emitted) & (seats != self.num_seats - 1)[:, None]
        if self.tables.counts is not None:
            at = seats[:, None] * self.vocab_size + tokens
            # Whole numbers: the order in which they are added does not matter.
            self.tables.counts.view(-1).scatter_add_(0, at.flatten(), kept.int().flatten())

    def _no_host_drafts(self):
        drafts = torch.full((self.num_seats, self.most_host_drafts + 1), -1, device=self.history.device)
        drafts[:, 0] = FREE
        return drafts

    def _write_host_drafts(self, requests):
        rows = []
        for request in requests:
            drafts = request.matcher.drafts if request.matcher is not None else []
            count = FREE if request.matcher is None else len(drafts)
            rows.append([count, *drafts, *[-1] * (self.most_host_drafts - len(drafts))])
        self.host_drafts[self.on_device([request.seat for request in requests])] = self.on_device(rows)

    def _masks(self, request):
        """int32 [K, W]; those after the last draft are of no node."""
        masks = torch.from_numpy(request.matcher.masks)
        return torch.nn.functional.pad(masks, (0, 0, 0, self.most_host_drafts + 1 - len(masks)), value=-1)

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
        if params.min_tokens and request.matcher is None:  # else its masks leave them out
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
        if request.matcher is not None:
            yield "masks", self._masks(request)
        several = [word for word in request.bad_words if len(word) > 1]
        if several:
            row = torch.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32)
            for place, word in zip(row, several):
                place[-len(word) :] = torch.tensor(word)
            yield "words", row
