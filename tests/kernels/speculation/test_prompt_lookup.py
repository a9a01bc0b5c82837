"""Prompt lookup against a loop over all places, written independently."""

import random

import pytest
import torch

from headstart.kernels.speculation import prompt_lookup as module
from headstart.kernels.speculation.prompt_lookup import prompt_lookup, prompt_lookup_reference
from headstart.tests.kernels.mutants import mutated


def look_up(x, shortest, longest, num_drafted):
    """The rule, from suffixes rather than from places."""
    for size in range(min(longest, len(x)), shortest - 1, -1):
        for start in range(len(x) - size - 1, -1, -1):
            if x[start : start + size] == x[len(x) - size :]:
                told = list(x)
                while len(told) < len(x) + num_drafted:
                    told.append(told[start + size + len(told) - len(x)])
                return told[len(x) :]
    return [-1] * num_drafted


def in_a_table(sequences, width, device="cpu", seed=0):
    """tokens [S, T], seats and length [B] of sequences in shuffled seats; everything else is filled with tokens that occur."""
    generator = torch.Generator().manual_seed(seed)
    seats = torch.randperm(len(sequences) + 2, generator=generator)[: len(sequences)]
    tokens = torch.randint(0, 3, (len(sequences) + 2, width), generator=generator, dtype=torch.int32)
    for seat, x in zip(seats.tolist(), sequences):
        tokens[seat, : len(x)] = torch.tensor(x, dtype=torch.int32)
    return [x.to(device) for x in (tokens, seats, torch.tensor([len(x) for x in sequences]))]


def texts(count, longest, seed):
    """Random tokens of few kinds, texts that repeat themselves, and ones in which nothing occurs twice."""
    generator = random.Random(seed)
    for i in range(count):
        size = generator.randrange(longest + 1)
        kinds, period = generator.choice([2, 3, 30]), generator.randrange(1, 9)
        x = [generator.randrange(kinds) for _ in range(size)]
        if i % 3 == 1:
            x = [x[j % period] if j > size // 3 else token for j, token in enumerate(x)]
        yield list(range(size)) if i % 7 == 6 else x


CASES = [(1, 1, 1), (1, 3, 5), (2, 4, 7), (3, 3, 2), (5, 9, 4), (40, 60, 3)]


@pytest.mark.parametrize(("shortest", "longest", "num_drafted"), CASES)
def test_drafts_are_those_of_a_loop(monkeypatch, device, shortest, longest, num_drafted):
    monkeypatch.setattr(module, "_BLOCK", 16)
    sequences = list(texts(14, 61, seed=shortest))
    given = in_a_table(sequences, 61, device)
    found = prompt_lookup(*given, shortest, longest, num_drafted)
    assert found.dtype == torch.int64
    expected = [look_up(x, shortest, longest, num_drafted) for x in sequences]
    assert found.tolist() == expected
    assert torch.equal(found.cpu(), prompt_lookup_reference(*[x.cpu() for x in given], shortest, longest, num_drafted))
    assert any(x[0] >= 0 for x in expected) == (shortest < 40)


@pytest.mark.parametrize(
    ("x", "draft"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3, 4, 2, 3]),  # the copy reaches the end and goes on
        ([5, 6, 9, 5, 6, 8, 5, 6], [8, 5, 6, 8, 5, 6]),  # the latest of two
        ([7, 5, 6, 9, 4, 6, 8, 7, 5, 6], [9, 4, 6, 8, 7, 5]),  # three tokens that agree count more than one
        ([4, 4, 4], [4, 4, 4, 4, 4, 4]),  # an occurrence that overlaps the end
        ([3, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),
        ([1, 2, 3, 4], [-1] * 6),  # the newest token is new
        ([1], [-1] * 6),
        ([], [-1] * 6),
    ],
)
def test_the_rule_by_hand(device, x, draft):
    assert prompt_lookup(*in_a_table([x], 10, device), 1, 3, 6).tolist() == [draft]


def test_less_than_the_shortest_match_proposes_nothing(device):
    given = in_a_table([[1, 2, 3, 9, 2, 3], [1, 2, 3, 9, 1, 2, 3], [2, 3]], 7, device)
    assert prompt_lookup(*given, 3, 5, 2).tolist() == [[-1, -1], [9, 1], [-1, -1]]


def test_more_than_the_longest_match_is_not_looked_at(device):
    x = [1, 2, 3, 8, 0, 2, 3, 7, 1, 2, 3]
    assert prompt_lookup(*in_a_table([x], 11, device), 1, 2, 1).tolist() == [[7]]
    assert prompt_lookup(*in_a_table([x], 11, device), 1, 3, 1).tolist() == [[8]]


def test_what_lies_behind_the_sequence_is_not_looked_at(device):
    x = [1, 2, 9, 4, 1, 2]
    tokens, seats, length = in_a_table([x], 40, device)
    tokens[seats[0], 6:] = torch.tensor([3, 1, 2] * 11 + [4], dtype=torch.int32, device=device)
    assert prompt_lookup(tokens, seats, length, 1, 4, 8).tolist() == [[9, 4, 1, 2, 9, 4, 1, 2]]


@pytest.mark.gpu
def test_long_sequences_too_and_in_a_replayed_graph():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (9, 131_072), generator=generator, dtype=torch.int32).cuda()
    seats = torch.tensor([8, 3, 0, 5, 5], device="cuda")
    length = torch.tensor([131_072, 100_001, 1, 2049, 2], device="cuda")

    def expected():
        return prompt_lookup_reference(tokens.cpu(), seats.cpu(), length.cpu(), 2, 5, 7)

    assert torch.equal(prompt_lookup(tokens, seats, length, 2, 5, 7).cpu(), expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = prompt_lookup(tokens, seats, length, 2, 5, 7)
    for shift in range(3):
        length.copy_(torch.tensor([70_000 + shift, 131_072, 4096, 4097, 40 + shift]))
        graph.replay()
        assert torch.equal(drafts.cpu(), expected())


# Of the reference, and the same of the kernel.
FAULTS = {
    "the end itself counts": ("equal = (place < last)", "equal = (place <= last)"),
    "the place before the end does not": ("equal = (place < last)", "equal = (place < last - 1)"),
    "the earliest": ("<< 32 | place).amax", "<< 32 | x.shape[1] - 1 - place).amax"),
    "the shortest": ("(match << 32", "(torch.where(match > 0, longest + 1 - match, 0) << 32"),
    "one token too many": ("for ago in range(min(longest", "for ago in range(min(longest + 1"),
    "one token too few": ("(match >= shortest).expand", "(match > shortest).expand"),
    "no period": ("device=x.device) % period", "device=x.device)"),
    "the last token of the match": ("place = end + 1 + torch", "place = end + torch"),
}
KERNEL_FAULTS = {
    "the end itself counts": ("equal = place < last\n", "equal = place <= last\n"),
    "the place before the end does not": ("equal = place < last\n", "equal = place < last - 1\n"),
    "the earliest": ("<< 32 | place, 0)", "<< 32 | (width - 1 - place), 0)"),
    "the shortest": ("match.to(tl.int64) << 32", "(longest + 1 - match).to(tl.int64) << 32"),
    "one token too many": ("while (ago < longest)", "while (ago <= longest)"),
    "one token too few": ("mask=here & (match >= shortest)", "mask=here & (match > shortest)"),
    "no period": ("end + 1 + i % period", "end + 1 + i"),
    "the last token of the match": ("end + 1 + i % period", "end + i % period"),
    "a block too few": ("if block * BLOCK < last:", "if (block + 1) * BLOCK < last:"),
    "the first block only": ("mask=block < num_blocks, other=0", "mask=block < 1, other=0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_reference_is_seen(tmp_path, fault):
    assert_wrong(mutated(module, *FAULTS[fault], tmp_path).prompt_lookup_reference)


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_fault_in_the_kernel_is_seen(tmp_path, fault):
    mutant = mutated(module, *KERNEL_FAULTS[fault], tmp_path)
    mutant._BLOCK = 16
    assert_wrong(mutant.prompt_lookup)


def assert_wrong(propose):
    sequences = [*texts(8, 45, seed=2), [1, 2, 3, 4, 5, 0, 9, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5]]
    found = propose(*in_a_table(sequences, 53), 2, 4, 7)
    assert found.tolist() != [look_up(x, 2, 4, 7) for x in sequences]


def test_what_cannot_be_looked_up_is_refused():
    tokens, row = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="tokens int32"):
        prompt_lookup(tokens.long(), row, row, 1, 2, 3)
    with pytest.raises(ValueError, match="length"):
        prompt_lookup(tokens, row, row[:1], 1, 2, 3)
    for shortest, longest, drafted in ((0, 2, 3), (3, 2, 3), (1, 2, 0)):
        with pytest.raises(ValueError, match=f"{shortest}, {longest} and {drafted}"):
            prompt_lookup(tokens, row, row, shortest, longest, drafted)
