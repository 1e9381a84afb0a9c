"""The target's hidden states as a drafter reads them."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import TARGET_KINDS, tiny_target

from adaflash_hf.generation.taps import TapRecorder, decoder_layers

IDS = torch.arange(3, 10)[None]


@torch.no_grad()
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_taps_are_transformers_hidden_states_the_last_one_after_the_final_norm(kind):
    target = tiny_target(kind, num_hidden_layers=4)
    expected = target(IDS, output_hidden_states=True).hidden_states
    with TapRecorder(target, [0, 2, 3]) as taps:
        target(IDS)
        found = taps.take()
    torch.testing.assert_close(found, torch.cat([expected[1], expected[3], expected[4]], dim=-1))


@torch.no_grad()
def test_only_the_last_forward_is_kept_and_only_once():
    target = tiny_target("llama")
    with TapRecorder(target, [1]) as taps:
        target(IDS)
        target(IDS[:, :3])
        assert taps.take(length=2).shape[:2] == (1, 2)
        with pytest.raises(RuntimeError, match="have not run since the taps were last taken"):
            taps.take()


@torch.no_grad()
def test_hooks_leave_with_the_block_whatever_happens():
    target = tiny_target("llama")
    with pytest.raises(KeyboardInterrupt), TapRecorder(target, [1]) as taps:
        target(IDS)
        raise KeyboardInterrupt
    assert not any(module._forward_hooks for module in target.modules())
    with pytest.raises(RuntimeError):
        taps.take()


@torch.no_grad()
def test_forwards_of_other_threads_are_not_seen():
    target = tiny_target("llama")

    def other():
        with torch.no_grad():
            target(IDS[:, :2])

    with TapRecorder(target, [1]) as taps:
        target(IDS)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert taps.take().shape[1] == 7


@pytest.mark.parametrize("layer_id", [-1, 6])
def test_a13_layers_outside_the_target(layer_id):
    with pytest.raises(ValueError) as error:
        TapRecorder(tiny_target("llama"), [1, layer_id])
    assert str(error.value) == (
        f"target_layer_ids=[1, {layer_id}] of the drafter does not fit target=LlamaForCausalLM: {layer_id} is outside "
        "[0, 5]."
    )


def test_a_layer_that_carries_several_streams_is_refused():
    target = tiny_target("llama")
    target.model.layers[1].register_forward_hook(lambda module, inputs, output: output[None])
    with TapRecorder(target, [1]) as taps:
        taps._modules[0](torch.zeros(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)))
        with pytest.raises(ValueError, match=r"layer 1 puts out \[1, 1, 3, 32\] instead of \[batch, length, hidden\]"):
            taps.take()


def test_a20_layers_are_found_under_any_name():
    assert len(decoder_layers(tiny_target("gpt2"))) == 6
    target = tiny_target("llama")
    target.model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match="target=LlamaForCausalLM: no list of 7 decoder layers was found to read from"):
        decoder_layers(target)
