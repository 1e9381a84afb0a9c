import pytest
import torch
from helpers import tiny_drafter, tiny_target

from adaflash_hf.generation.draft_head import DraftHead
from adaflash_hf.training.losses import (
    DraftTargets,
    accepted_lengths,
    default_gamma,
    drafter_loss,
    position_weights,
    ratio_head_loss,
    reach_probabilities,
    survival_head_loss,
)

SLOTS, HIDDEN, VOCAB = 23, 32, 64


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def make(target, ids=None, dtype=torch.float32):
    torch.manual_seed(0)
    drafter = tiny_drafter(target, draft_token_ids=ids)
    head = DraftHead(target, drafter)
    states = torch.randn(SLOTS, HIDDEN).to(dtype).requires_grad_()
    final = torch.randn(11, HIDDEN)
    full = target.get_output_embeddings()(final).detach()
    index = torch.randint(0, 11, (SLOTS,))
    targets = DraftTargets(
        token_ids=full.argmax(-1)[index],
        weights=torch.rand(SLOTS),
        state_index=index,
        states=final,
        log_normalizers=full.logsumexp(-1),
    )
    return head, states, targets, full


def reference(target, states, targets, full, soft, ids):
    """The same in float64, written plainly."""
    weight = target.get_output_embeddings().weight.double()
    kept = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    log_q = (states.double() @ weight[kept].T).log_softmax(-1)
    p_full = full.double().softmax(-1)[targets.state_index]
    total, outside, acceptance = 0.0, 0, []
    for slot in range(SLOTS):
        p = p_full[slot, kept]
        hard = torch.tensor(0.0).double()
        if int(targets.token_ids[slot]) in kept.tolist():
            hard = -log_q[slot, kept.tolist().index(int(targets.token_ids[slot]))]
        else:
            outside += 1
        soft_term = -(p / p.sum() * log_q[slot]).sum()
        total = total + targets.weights[slot].double() * ((1 - soft) * hard + soft * soft_term)
        acceptance.append(torch.minimum(p, log_q[slot].exp()).sum())
    return total, outside, torch.stack(acceptance)


@pytest.mark.parametrize("ids", [None, [3, 5, 8, 13, 21, 34, 55, 0, 1, 2, 60, 61, 62, 40, 41, 42]])
@pytest.mark.parametrize("soft", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_drafter_loss_and_gradient_against_float64(target, ids, soft, chunk):
    head, states, targets, full = make(target, ids)
    found = drafter_loss(states, head, targets, normalizer=7.0, soft_label_weight=soft, chunk_size=chunk)
    found.loss.backward()
    double = states.detach().double().requires_grad_()
    wanted, outside, acceptance = reference(target, double, targets, full, soft, ids)
    (wanted / 7.0).backward()
    torch.testing.assert_close(found.loss, (wanted / 7.0).float().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad, double.grad.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.acceptance, acceptance.float().detach(), rtol=1e-4, atol=1e-5)
    assert found.outside == outside and (outside > 0) == (ids is not None)
    kept = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    best = kept[(states.detach() @ target.get_output_embeddings().weight[kept].T).argmax(-1)]
    assert found.matched.tolist() == (best == targets.token_ids).tolist()


def test_bfloat16_states_are_computed_in_float32(target):
    head, states, targets, full = make(target, dtype=torch.bfloat16)
    found = drafter_loss(states, head, targets, normalizer=1.0, soft_label_weight=0.5)
    assert found.loss.dtype == torch.float32
    wanted, _, _ = reference(target, states.detach(), targets, full, 0.5, None)
    torch.testing.assert_close(found.loss, wanted.float(), rtol=1e-4, atol=1e-4)


def test_no_tensor_of_all_slots_by_the_vocabulary_is_kept(target):
    head, states, targets, _ = make(target)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        loss = drafter_loss(states, head, targets, 1.0, 0.5, chunk_size=4).loss
        kept = list(seen)
        loss.backward()
    assert (4, VOCAB) in seen and (SLOTS, VOCAB) not in seen
    assert (SLOTS, HIDDEN) in kept  # what remains is the gradient of the states


def test_soft_labels_without_states_say_so(target):
    head, states, targets, _ = make(target)
    targets.states = None
    with pytest.raises(ValueError, match=r"soft_label_weight=0.5 needs the target's final states"):
        drafter_loss(states, head, targets, 1.0, soft_label_weight=0.5)


def test_gamma_and_position_weights():
    assert [default_gamma(size) for size in (16, 8)] == [7.0, 4.0]
    assert default_gamma(10) == pytest.approx(5.0, abs=0.3)
    weights = position_weights(4, 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.60653, 0.36788]), rtol=1e-4, atol=1e-4)


def test_reach_and_accepted():
    accept = torch.tensor([[0.5, 0.4, 0.1]])
    torch.testing.assert_close(reach_probabilities(accept), torch.tensor([[1.0, 0.5, 0.2]]))
    assert accepted_lengths(torch.tensor([[True, True, False, True], [False, True, True, True]])).tolist() == [2, 0]


def test_length_head_losses():
    ratio, accepted = torch.tensor([[0.5, 0.9]]), torch.tensor([[1, 3]])
    loss = ratio_head_loss(ratio, accepted, torch.tensor([[True, False]]), 4)
    assert loss.item() == pytest.approx((0.5 - 2 / 4) ** 2)
    loss = ratio_head_loss(ratio, accepted, torch.tensor([[True, True]]), 4)
    assert loss.item() == pytest.approx((0.9 - 1.0) ** 2, rel=1e-5)
    logits, labels = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[1.0, 0.0]]])
    reach, counted = torch.tensor([[[1.0, 0.25]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    wanted = torch.log(torch.tensor(2.0)) + 0.25 * torch.log(1 + torch.exp(torch.tensor(2.0)))
    torch.testing.assert_close(survival_head_loss(logits, labels, reach, counted), wanted)
