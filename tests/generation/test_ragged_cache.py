"""The cache whose rows have lengths of their own."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from adaflash_hf.generation.ragged_cache import DraftContextCache, RaggedCache


def states(counts, value=0.0, heads=2, width=3):
    """Packed states whose entries say which row and token they are: row * 100 + token + value."""
    marks = [row * 100 + token + value for row, count in enumerate(counts) for token in range(count)]
    return torch.tensor(marks).view(1, 1, -1, 1).expand(1, heads, -1, width).clone()


def marks(cache, row, layer=0):
    keys, values = cache.row_states(row, layer, 0, cache.lengths[row])
    assert torch.equal(keys[0], keys[1]) and torch.equal(values, -keys)
    return keys[0, :, 0].tolist()


def write(cache, counts, value=0.0, layers=(0,)):
    cache.write_to(counts)
    for layer in layers:
        keys = states(counts, value)
        cache.update(keys, -keys, layer)


def test_rejected_tokens_are_overwritten():
    cache = RaggedCache(2)
    write(cache, [3, 1])
    cache.commit([3, 1])
    write(cache, [2, 4], 0.5)
    cache.commit([1, 2])
    write(cache, [1, 1], 0.25)
    cache.commit([1, 1])
    assert cache.lengths == [5, 4]
    assert marks(cache, 0) == [0, 1, 2, 0.5, 0.25]
    assert marks(cache, 1) == [100, 100.5, 101.5, 100.25]


def test_what_update_returns_reaches_to_the_longest_row():
    cache = RaggedCache(2)
    cache.write_to([3, 1])
    keys, values = cache.update(states([3, 1]), states([3, 1]), 0)
    assert keys.shape == values.shape == (2, 2, 3, 3)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2] and keys[1, 0, 0, 0] == 100


def test_growing_keeps_everything():
    cache, expected = RaggedCache(2), [[], []]
    for turn in range(40):
        counts = [1 + turn % 7, 1 + turn % 3]
        write(cache, counts, turn / 64, layers=(0, 3))
        cache.commit(counts)
        for row, count in enumerate(counts):
            expected[row] += [row * 100 + token + turn / 64 for token in range(count)]
    for layer in (0, 3):
        assert [marks(cache, row, layer) for row in (0, 1)] == expected
    assert cache.get_seq_length() == len(expected[0])


def test_one_row_takes_the_same_path():
    cache = RaggedCache(1)
    for turn in range(30):
        write(cache, [5], turn)
        cache.commit([3])
    assert marks(cache, 0) == [turn + token for turn in range(30) for token in range(3)]


def test_dropping_rows():
    cache = RaggedCache(3, starts=[0, 4, 7])
    write(cache, [2, 1, 3])
    cache.commit([2, 1, 3])
    cache.keep_rows([2, 0])
    assert cache.num_rows == 2 and cache.lengths == [3, 2] and cache.starts == [7, 0]
    assert marks(cache, 0) == [200, 201, 202] and marks(cache, 1) == [0, 1]
    write(cache, [1, 1], 0.5)
    cache.commit([1, 1])
    assert marks(cache, 0) == [200, 201, 202, 0.5]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reading_an_ordinary_cache(kind):
    from helpers import tiny_target

    config = tiny_target("llama", num_hidden_layers=2).config
    ordinary = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=20)
    keys = torch.arange(2 * 7.0).view(2, 1, 7, 1).expand(2, 2, 7, 8).clone()
    for layer in (0, 1):
        ordinary.update(keys, -keys, layer)
    cache = RaggedCache(2)
    cache.read_prefix(ordinary, [0, 3])  # row 1 is padded on the left by three
    assert cache.lengths == [7, 4]
    for layer in (0, 1):
        assert marks(cache, 0, layer) == [0, 1, 2, 3, 4, 5, 6]
        assert marks(cache, 1, layer) == [10, 11, 12, 13]


def test_reading_a_window_that_has_dropped_its_oldest_tokens():
    from helpers import tiny_target

    config = tiny_target("mistral", num_hidden_layers=2, sliding_window=4).config
    ordinary = DynamicCache(config=config)
    for token in range(9):
        keys = torch.full((1, 2, 1, 8), float(token))
        for layer in (0, 1):
            ordinary.update(keys, -keys, layer)
    kept = ordinary.layers[0].keys.shape[2]
    assert kept < 9 and ordinary.get_seq_length() == 9
    cache = RaggedCache(1)
    cache.read_prefix(ordinary, [0])
    assert cache.lengths == [9]
    assert marks(cache, 0)[9 - kept :] == list(range(9 - kept, 9))


def test_positions_of_a_drafters_context():
    cache = DraftContextCache(2, starts=[0, 5])
    write(cache, [2, 2])
    new = torch.zeros(1, 4, dtype=torch.long)
    positions, real = cache.context_positions(new)
    assert positions.tolist() == [[0, 1], [5, 6]] and real is None
    cache.commit([2, 2])
    cache.write_to([3, 1])
    positions, real = cache.context_positions(new)
    assert positions.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert real.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
