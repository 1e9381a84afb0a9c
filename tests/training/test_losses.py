import math

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from adaflash_hf.generation.draft_head import DraftHead
from adaflash_hf.training.divergences import divergence, dpace_weights, forward_kl, generalized_jsd, reverse_kl
from adaflash_hf.training.losses import (
    DraftLoss,
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
        slots=torch.cat([torch.arange(size) for size in SIZES]),
    )
    return head, states, targets, full


SIZES = [4, 4, 4, 3, 4, 4]  # slots of each block, one of them cut


def reference(target, states, targets, full, mixture, ids):
    """The same in float64, written plainly."""
    weight = target.get_output_embeddings().weight.double()
    kept = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    log_q = (states.double() @ weight[kept].T).log_softmax(-1)
    p_full = full.double().softmax(-1)[targets.state_index]
    losses, outside, acceptance, right = [], 0, [], []
    for slot in range(SLOTS):
        p, q = p_full[slot, kept], log_q[slot].exp()
        own = p / p.sum()
        hard, right_probability = torch.tensor(0.0).double(), math.exp(-20.0)
        if int(targets.token_ids[slot]) in kept.tolist():
            place = kept.tolist().index(int(targets.token_ids[slot]))
            hard, right_probability = -log_q[slot, place], float(q[place])
        else:
            outside += 1
        middle = mixture.jsd_beta * own + (1 - mixture.jsd_beta) * q
        soft = {
            "forward_kl": (own * (own.log() - log_q[slot])).sum(),
            "reverse_kl": (q * (log_q[slot] - p.log())).sum(),
            "total_variation": ((q - p).clamp(min=0)).sum(),
            "jsd": mixture.jsd_beta * (own * (own / middle).log()).sum()
            + (1 - mixture.jsd_beta) * (q * (q / middle).log()).sum(),
        }[mixture.divergence]
        if mixture.clip is not None and float(soft) > mixture.clip:
            soft = torch.tensor(mixture.clip).double()
        losses.append(mixture.alpha * hard + (1 - mixture.alpha) * soft)
        acceptance.append(torch.minimum(p, q).sum())
        right.append(right_probability)
    weights = targets.weights.double()
    if mixture.dpace:
        weights = weights.clone()
        for piece in torch.arange(SLOTS).split(SIZES):
            reached = torch.tensor([math.prod(right[place] for place in piece[: k + 1]) for k in range(len(piece))])
            shares = torch.stack([reached[k:].sum() for k in range(len(piece))]).double()
            weights[piece] = shares / shares.sum() * targets.weights[piece].double().sum()
    return (weights * torch.stack(losses)).sum(), outside, torch.stack(acceptance)


MIXTURES = {
    "cross-entropy": DraftLoss(alpha=1.0),
    "adaflash": DraftLoss(alpha=0.8),
    "reverse": DraftLoss(alpha=0.0),
    "forward": DraftLoss(alpha=0.5, divergence="forward_kl"),
    "jsd": DraftLoss(alpha=0.3, divergence="jsd", jsd_beta=0.3),
    "rejection": DraftLoss(alpha=0.1, divergence="total_variation"),
    "clipped": DraftLoss(alpha=0.5, clip=1.0),
    "dpace": DraftLoss(alpha=0.8, dpace=True),
}


@pytest.mark.parametrize("ids", [None, [3, 5, 8, 13, 21, 34, 55, 0, 1, 2, 60, 61, 62, 40, 41, 42]], ids=["all", "some"])
@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("chunk", [4, 9, 1024])
def test_drafter_loss_and_gradient_against_float64(target, ids, mixture, chunk):
    head, states, targets, full = make(target, ids)
    found = drafter_loss(states, head, targets, normalizer=7.0, mixture=mixture, chunk_size=chunk)
    found.loss.backward()
    double = states.detach().double().requires_grad_()
    wanted, outside, acceptance = reference(target, double, targets, full, mixture, ids)
    (wanted / 7.0).backward()
    torch.testing.assert_close(found.loss, (wanted / 7.0).float().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad, double.grad.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.acceptance, acceptance.float().detach(), rtol=1e-4, atol=1e-5)
    assert found.outside == outside and (outside > 0) == (ids is not None)
    kept = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    best = kept[(states.detach() @ target.get_output_embeddings().weight[kept].T).argmax(-1)]
    assert found.matched.tolist() == (best == targets.token_ids).tolist()


def test_the_clip_binds_in_its_test(target):
    head, states, targets, _ = make(target)
    free, clipped = (drafter_loss(states, head, targets, 1.0, DraftLoss(0.5, clip=clip)).loss for clip in (None, 1.0))
    assert clipped < free


def test_jsd_runs_from_forward_to_reverse_kl():
    torch.manual_seed(0)
    draft, teacher = torch.randn(5, 9).log_softmax(-1), torch.randn(5, 9).log_softmax(-1)
    torch.testing.assert_close(generalized_jsd(draft, teacher, 0.0), forward_kl(draft, teacher))
    torch.testing.assert_close(generalized_jsd(draft, teacher, 1.0), reverse_kl(draft, teacher))
    # Divided by what vanishes, the interior meets both ends (GKD, 2306.13649).
    torch.testing.assert_close(
        generalized_jsd(draft, teacher, 1e-3) / 1e-3, forward_kl(draft, teacher), rtol=2e-2, atol=1e-3
    )


def test_dpace_weights_are_the_gradient_of_the_expected_length():
    torch.manual_seed(0)
    log_a = torch.rand(3, 4).log().requires_grad_()
    weights = torch.tensor([[1.0, 0.7, 0.5, 0.3]] * 2 + [[1.0, 0.7, 0.0, 0.0]])
    counted = weights > 0
    (log_a.cumsum(-1).exp() * counted).sum().backward()
    shares = log_a.grad / log_a.grad.sum(-1, keepdim=True)
    torch.testing.assert_close(dpace_weights(log_a, weights), shares * weights.sum(-1, keepdim=True))
    lost = dpace_weights(torch.tensor([[-torch.inf, -0.1]]), torch.ones(1, 2))
    assert lost.isfinite().all() and lost.sum() == pytest.approx(2.0)


def test_unknown_divergences_are_named():
    with pytest.raises(ValueError, match="divergence='kl' is not valid: expected one of 'reverse_kl'"):
        divergence("kl", torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("mixture", [MIXTURES["adaflash"], MIXTURES["dpace"]], ids=["adaflash", "dpace"])
def test_bfloat16_states_are_computed_in_float32(target, mixture):
    head, states, targets, full = make(target, dtype=torch.bfloat16)
    found = drafter_loss(states, head, targets, 1.0, mixture)
    assert found.loss.dtype == torch.float32
    wanted, _, _ = reference(target, states.detach(), targets, full, mixture, None)
    torch.testing.assert_close(found.loss, wanted.float(), rtol=1e-4, atol=1e-4)


def test_no_tensor_of_all_slots_by_the_vocabulary_is_kept(target):
    head, states, targets, _ = make(target)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        loss = drafter_loss(states, head, targets, 1.0, DraftLoss(0.5), chunk_size=4).loss
        kept = list(seen)
        loss.backward()
    assert (4, VOCAB) in seen and (SLOTS, VOCAB) not in seen
    assert (SLOTS, HIDDEN) in kept  # what remains is the gradient of the states


def test_what_a_mixture_lacks_is_named(target):
    head, states, targets, _ = make(target)
    targets.states = targets.slots = None
    with pytest.raises(ValueError, match=r"alpha=0.5 needs the target's final states"):
        drafter_loss(states, head, targets, 1.0, DraftLoss(0.5))
    with pytest.raises(ValueError, match="dpace=True needs the slots' places"):
        drafter_loss(states, head, targets, 1.0, DraftLoss(1.0, dpace=True))


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
