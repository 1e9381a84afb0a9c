import pytest
import torch

from adaflash_hf.training.blocks import (
    block_positions,
    block_visibility,
    label_positions,
    sample_anchors,
    valid_anchors,
)


def mask(*rows):
    return torch.tensor([[c == "r" for c in row] for row in rows])


def test_anchors_only_where_a_whole_block_of_response_follows():
    # The last prompt token may be an anchor; position 0 has no context.
    assert valid_anchors(mask("pprrrrr"), 4).tolist() == [[False, True, True, True, False, False, False]]
    assert valid_anchors(mask("prrr..."), 4).tolist() == [[False] * 7]
    assert valid_anchors(mask("pprr"), 4).any().item() is False
    assert valid_anchors(mask("pprr"), 4, partial=True).tolist() == [[False, True, True, False]]
    assert valid_anchors(mask("pr"), 4).shape == (1, 2)


def test_anchors_stay_inside_their_document():
    response, documents = mask("prrrrrprrrrr"), torch.tensor([[0] * 6 + [1] * 6])
    valid = valid_anchors(response, 3, documents)[0].nonzero().flatten().tolist()
    assert valid == [1, 2, 3, 7, 8, 9]


def test_sampled_anchors_are_distinct_valid_and_uniform():
    valid = torch.zeros(2, 12, dtype=torch.bool)
    valid[0, 2:10], valid[1, 5] = True, True
    counts = torch.zeros(12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(800):
        anchors = sample_anchors(valid, 4, generator)
        assert anchors.shape == (2, 4)
        assert anchors[1].tolist().count(-1) == 3 and 5 in anchors[1].tolist()
        row = anchors[0].tolist()
        assert row == sorted(set(row)) and all(valid[0, a] for a in row)
        counts[row] += 1
    assert counts[2:10].min() > 330 and counts[2:10].max() < 470 and counts.sum() == 3200
    assert sample_anchors(torch.zeros(1, 5, dtype=torch.bool), 4).shape == (1, 0)


def test_visibility_is_context_before_the_anchor_and_the_own_block():
    visible = block_visibility(torch.tensor([[2, 3]]), 2, torch.tensor([[1, 1, 1, 1, 0]]))[0, 0]
    assert visible[:, :5].tolist() == [[True, True, False, False, False]] * 2 + [[True, True, True, False, False]] * 2
    assert visible[:, 5:].tolist() == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def test_context_of_another_document_is_hidden():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    visible = block_visibility(torch.tensor([[4]]), 2, torch.ones(1, 6), documents)[0, 0]
    assert visible[0, :6].tolist() == [False, False, False, True, False, False]


def test_positions_and_labels():
    anchors = torch.tensor([[1, 4, -1]])
    assert block_positions(anchors, 3).tolist() == [[1, 2, 3, 4, 5, 6, 0, 1, 2]]
    positions, counted = label_positions(anchors, 3, mask("prrrrr"))
    assert positions[0, :2].tolist() == [[2, 3], [5, 5]]
    assert counted[0].tolist() == [[True, True], [True, False], [False, False]]


@pytest.mark.parametrize("size", [2, 5])
def test_every_counted_slot_of_a_whole_block_is_response(size):
    response = mask("pprrrrrrr.", "prrrrrrrrr")
    anchors = sample_anchors(valid_anchors(response, size), 99)
    _, counted = label_positions(anchors, size, response)
    assert counted[anchors >= 0].all()
