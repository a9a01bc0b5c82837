"""Bias, forbidden tokens and penalties, row by row and token by token in Python against the kernel and its reference."""

import numpy as np
import pytest
import torch

from headstart.kernels.sampling.process_logits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    LogitTables,
    NodeRows,
    process_logits,
)

SLOTS, LONGEST = 4, 40
MASKS = 3  # deeper nodes take the last one


def make_tables(vocab_size, generator):
    def numbers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    bias = torch.randn(SLOTS, vocab_size, generator=generator) * (numbers(3, SLOTS, vocab_size) == 0)
    bias[numbers(20, SLOTS, vocab_size) == 0] = -torch.inf
    words = torch.full((SLOTS, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32)
    return LogitTables(
        bias=bias,
        stop_mask=numbers(8, SLOTS, vocab_size) == 0,
        counts=(numbers(3, SLOTS, vocab_size) * (numbers(4, SLOTS, vocab_size) == 0)).int(),
        seen=numbers(5, SLOTS, vocab_size) == 0,
        words=words,
        tokens=numbers(vocab_size, SLOTS, LONGEST).int(),
        masks=(numbers(2**32, SLOTS, MASKS, vocab_size // 32 + 2) - 2**31).int(),
    )


def make_nodes(vocab_size, depth, generator):
    """Rows of all seats and all depths from -1 (the end of a prompt) to `depth`, their paths of random tokens."""
    rows = [(seat, d) for seat in range(SLOTS) for d in range(-1, depth + 1)]
    root = [20 + 3 * seat for seat, _ in rows]
    path = torch.randint(vocab_size, (len(rows), depth), generator=generator)
    path[torch.arange(depth) >= torch.tensor([d for _, d in rows])[:, None]] = -1
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.0, 0.7], [0.8, -0.4, 0.0], [1.1, 1.5, -0.3]])
    of_rows = penalties[[seat for seat, _ in rows]].T
    return NodeRows(
        seat=torch.tensor([seat for seat, _ in rows]),
        root=torch.tensor(root),
        position=torch.tensor([at + d + 1 for at, (_, d) in zip(root, rows)]),
        min_position=torch.tensor([at + 2 for at in root]),
        repetition=of_rows[0].contiguous(),
        presence=of_rows[1].contiguous(),
        frequency=of_rows[2].contiguous(),
        path=path,
    )


def sequence_of(nodes, tables, row):
    """All tokens before the one that is drawn after the row's node."""
    seat, root, position = (x[row].item() for x in (nodes.seat, nodes.root, nodes.position))
    path = [token for token in nodes.path[row].tolist() if token >= 0]
    return (tables.tokens[seat, : root + 1].tolist() + path)[:position]


def add_words(nodes, tables):
    """Bad words that end the sequences of some rows, and some that do so but for one token.  -> {row: forbidden tokens}"""
    forbidden, number = {row: set() for row in range(len(nodes.seat))}, [0] * SLOTS
    for row in range(len(nodes.seat)):
        sequence, seat = sequence_of(nodes, tables, row), nodes.seat[row].item()
        for length in (1, 2, 5, MAX_BAD_WORD_TOKENS - 1):
            wrong = (length + row) % 3 == 0
            first = sequence[-length:]
            if wrong:
                first[row % length] += 1
            last = (7 * row + length) % tables.bias.shape[1]
            tables.words[seat, number[seat], -length - 1 :] = torch.tensor([*first, last])
            number[seat] += 1
    for row in forbidden:
        sequence = sequence_of(nodes, tables, row)
        for word in tables.words[nodes.seat[row]].tolist():
            word = [token for token in word if token >= 0]
            if word and sequence[len(sequence) - len(word) + 1 :] == word[:-1]:
                forbidden[row].add(word[-1])
    return forbidden


def by_hand(logits, nodes, tables, forbidden):
    found = np.array(logits.float().numpy(), dtype=np.float32)
    f32 = np.float32
    for row in range(len(found)):
        seat = nodes.seat[row].item()
        path = nodes.path[row].tolist()
        r, p, f = (f32(x[row].item()) for x in (nodes.repetition, nodes.presence, nodes.frequency))
        early = nodes.position[row] < nodes.min_position[row]
        depth = (nodes.position[row] - nodes.root[row] - 1).item()
        words = tables.masks[seat, min(max(depth, 0), MASKS - 1)].tolist()
        for token in range(found.shape[1]):
            x = f32(found[row, token] + f32(tables.bias[seat, token].item()))
            if not words[token // 32] >> token % 32 & 1:
                x = f32(-np.inf)
            if early and tables.stop_mask[seat, token]:
                x = f32(-np.inf)
            count = tables.counts[seat, token].item() + path.count(token)
            if count or tables.seen[seat, token]:
                x = f32(x / r) if x > 0 else f32(x * r)
            x = f32(x - f32(f * f32(count)))
            x = f32(x - (p if count else f32(0)))
            found[row, token] = f32(-np.inf) if token in forbidden[row] else x
    return torch.from_numpy(found)


@pytest.mark.parametrize(("vocab_size", "depth"), [(13, 3), (97, 0), (1030, 5)])
def test_every_token_is_changed_as_the_formulas_say(device, vocab_size, depth):
    generator = torch.Generator().manual_seed(vocab_size)
    tables, nodes = make_tables(vocab_size, generator), make_nodes(vocab_size, depth, generator)
    forbidden = add_words(nodes, tables)
    assert all(forbidden.values())
    logits = torch.randn(len(nodes.seat), vocab_size, generator=generator) * 3
    expected = by_hand(logits, nodes, tables, forbidden)
    there = LogitTables(*(x.to(device) for x in tables)), NodeRows(*(x.to(device) for x in nodes))
    found = process_logits(logits.to(device), there[1], there[0])
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_tables_and_in_clean_rows_nothing_changes(device, dtype):
    generator = torch.Generator().manual_seed(0)
    tables, nodes = make_tables(300, generator), make_nodes(300, 4, generator)
    logits = torch.randn(len(nodes.seat), 300, generator=generator).to(dtype).to(device)
    nodes = NodeRows(*(x.to(device) for x in nodes))
    assert torch.equal(process_logits(logits, nodes, LogitTables()), logits.float())
    clean = LogitTables(*(torch.zeros_like(x) for x in tables))
    clean.words.fill_(-1), clean.masks.fill_(-1)
    clean = LogitTables(*(x.to(device) for x in clean))
    neutral = nodes._replace(
        repetition=torch.ones_like(nodes.repetition),
        **dict.fromkeys(("presence", "frequency"), torch.zeros_like(nodes.presence)),
    )
    assert torch.equal(process_logits(logits, neutral, clean), logits.float())
    # Counts that somebody else left behind change nothing either: a seat's row is written when a request that needs it comes.
    dirty = clean._replace(
        counts=tables.counts.to(device), seen=tables.seen.to(device), tokens=tables.tokens.to(device)
    )
    assert torch.equal(process_logits(logits, neutral, dirty), logits.float())


def test_the_logits_given_are_left_as_they_are(device):
    generator = torch.Generator().manual_seed(1)
    tables, nodes = make_tables(50, generator), make_nodes(50, 2, generator)
    add_words(nodes, tables)
    tables, nodes = LogitTables(*(x.to(device) for x in tables)), NodeRows(*(x.to(device) for x in nodes))
    logits = torch.randn(len(nodes.seat), 50, generator=generator).to(device)
    before, counts = logits.clone(), tables.counts.clone()
    for given in (tables, LogitTables()):
        process_logits(logits, nodes, given).fill_(3)
        assert torch.equal(logits, before)
    assert torch.equal(tables.counts, counts)


def test_shapes_that_do_not_fit_are_refused():
    generator = torch.Generator().manual_seed(2)
    tables, nodes = make_tables(20, generator), make_nodes(20, 1, generator)
    with pytest.raises(ValueError, match="one entry per row"):
        process_logits(torch.zeros(2, 20), nodes, tables)
    with pytest.raises(ValueError, match=r"bias must be \[S, 21\], got \(4, 20\)"):
        process_logits(torch.zeros(len(nodes.seat), 21), nodes, tables)
    with pytest.raises(ValueError, match="a bit for each of 20 tokens"):
        process_logits(torch.zeros(len(nodes.seat), 20), nodes, LogitTables(masks=torch.zeros(4, 1, 0).int()))
