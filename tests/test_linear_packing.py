import pytest
import torch
from helpers import tiny_drafter, tiny_target

from adaflash_hf import packed_linears
from adaflash_hf.linear_packing import is_packed, packing_available

pytestmark = pytest.mark.skipif(not packing_available(), reason="this torch has no packed linear product")


def linears(model):
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


@torch.no_grad()
def test_same_results_and_everything_restored():
    target = tiny_target("gpt_oss", tie_word_embeddings=True)
    ids = torch.arange(3, 12)[None]
    before = target(ids).logits
    with packed_linears(target):
        assert all(is_packed(layer) for layer in linears(target))
        torch.testing.assert_close(target(ids).logits, before, atol=1e-5, rtol=1e-4)
    assert not any(is_packed(layer) or "forward" in layer.__dict__ for layer in linears(target))
    assert torch.equal(target(ids).logits, before)


@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_its_neighbours():
    layer = torch.nn.Linear(96, 80)
    inputs = torch.randn(16, 96)
    with packed_linears(layer):
        together = layer(inputs)
        alone = torch.cat([layer(row[None]) for row in inputs])
    assert torch.equal(together, alone)


def test_nested_and_shared_layers():
    target = tiny_target("llama")
    outer = packed_linears(target)
    with packed_linears(target) as inner:
        assert inner.layers == []
    assert all(is_packed(layer) for layer in linears(target))
    outer.restore()
    assert not any(is_packed(layer) for layer in linears(target))


def test_an_exception_restores():
    target = tiny_target("llama")
    with pytest.raises(RuntimeError), packed_linears(target):
        raise RuntimeError
    assert not any(is_packed(layer) for layer in linears(target))


def test_generate_never_packs_by_itself_and_decodes_the_same_when_packed():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_token_ids=list(range(40)))
    ids = torch.arange(3, 9)[None]
    call = dict(max_new_tokens=10, do_sample=False)
    plain = target.generate(ids, **call)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **call), plain)
    assert not any(is_packed(layer) for layer in linears(target) + linears(drafter))
    with packed_linears(target, drafter):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **call), plain)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **call), plain)


def test_a_build_without_the_operator_warns_and_packs_nothing(monkeypatch, caplog):
    from adaflash_hf import linear_packing

    monkeypatch.setattr(linear_packing, "packing_available", lambda: False)
    layer = torch.nn.Linear(4, 4)
    said = []
    monkeypatch.setattr(linear_packing.logger, "warning", said.append)
    with packed_linears(layer):
        assert not is_packed(layer)
    assert len(said) == 1 and "nothing is packed" in said[0]


def test_dtypes_without_a_packed_product_are_left_as_they_are_and_said(monkeypatch):
    from adaflash_hf import linear_packing

    said = []
    monkeypatch.setattr(linear_packing.logger, "warning", said.append)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double(), torch.nn.Linear(8, 8))
    with packed_linears(model):
        assert [is_packed(layer) for layer in model] == [True, False, True]
    assert not any(is_packed(layer) for layer in model)
    assert said == [
        "packed_linears: this CPU has no packed linear product for ['torch.float64'], so layers of that dtype are left as "
        "they are."
    ]
