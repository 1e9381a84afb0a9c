"""The trainer: what training computes is what decoding computes, and it behaves as a `Trainer` should."""

from __future__ import annotations

import copy

import pytest
import torch
from decoding_helpers import plain, settings
from helpers import tiny_drafter, tiny_target
from peft import LoraConfig
from text_helpers import tiny_tokenizer

from adaflash_hf import AdaFlashDraftModel, OPDConfig, OPDTrainer
from adaflash_hf.draft_settings import DraftSettings
from adaflash_hf.generation.draft_head import DraftHead, noise_embeddings
from adaflash_hf.generation.drafting import BlockDrafter
from adaflash_hf.training.blocks import block_positions, block_visibility
from adaflash_hf.training.features import FeatureStore, target_features

BLOCK = 4


@pytest.fixture(scope="module")
def target():
    found = tiny_target("llama", num_hidden_layers=4)
    found.generation_config.eos_token_id = None
    return found


def rows(count=8, response=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 64, (n,), generator=generator).tolist()
    return [
        {"prompt_ids": draw(4 + i % 3), "response_ids": draw(response), "domain": "ab"[i % 2]} for i in range(count)
    ]


def config(tmp_path, **kw):
    base = dict(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        lmbda=0.0,
        max_new_tokens=16,
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
    )
    return OPDConfig(**{**base, **kw})


def fresh(target, **kw):
    torch.manual_seed(0)
    return tiny_drafter(target, block_size=BLOCK, **kw)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"mask_token_id": 7, "normalize_taps": False}),
        ("gemma3", {}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "causal_layers": [True, False]}),
    ],
    ids=["mask embedding", "mask token", "scaled embeddings", "windows and causality"],
)
@torch.no_grad()
def test_c1_logits_in_training_are_those_of_decoding(kind, options):
    model = tiny_target(kind, num_hidden_layers=4)
    drafter = fresh(model, num_hidden_layers=2, **options).eval()
    ids = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    taps = target_features(model, ids, None, drafter.config.target_layer_ids)["taps"]
    anchors = torch.tensor([[3, 4, 9, 15]])
    output = drafter(
        noise_embeds=noise_embeddings(model, drafter, ids[0, anchors], BLOCK).flatten(1, 2),
        context_hidden_states=taps,
        attention_mask=block_visibility(anchors, BLOCK, torch.ones_like(ids)),
        position_ids=block_positions(anchors, BLOCK),
        context_position_ids=torch.arange(20)[None],
    )
    trained = DraftHead(model, drafter)(output.last_hidden_state.view(4, BLOCK, -1)[:, 1:])
    # Decoding meets the context in pieces and keeps its keys and values.
    decoding = BlockDrafter(model, drafter, DraftSettings("fixed"), 1, False)
    known = 0
    for place, anchor in enumerate(anchors[0].tolist()):
        decoding.add_context(0, taps[0, known:anchor])
        known = anchor
        served = decoding._forward([int(ids[0, anchor])], [anchor])
        torch.testing.assert_close(decoding.block_logits(served, [anchor])[0], trained[place], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(served.length_ratio[0], output.length_ratio.flatten()[place], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            served.survival_logits[0], output.survival_logits.view(4, -1)[place], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_c2_c3_blocks_do_not_see_each_other(target, implementation):
    drafter = fresh(target).eval()
    drafter.set_attn_implementation(implementation)
    ids = torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    taps = target_features(target, ids, None, drafter.config.target_layer_ids)["taps"]
    anchors = torch.tensor([[5, 6, 7]])  # closer together than a block

    def run(change=None):
        noise = noise_embeddings(target, drafter, ids[0, anchors], BLOCK)
        if change is not None:
            noise[0, change] += 1.0
        return drafter(
            noise_embeds=noise.flatten(1, 2),
            context_hidden_states=taps,
            attention_mask=block_visibility(anchors, BLOCK, torch.ones_like(ids)),
            position_ids=block_positions(anchors, BLOCK),
            context_position_ids=torch.arange(16)[None],
        ).last_hidden_state.view(3, BLOCK, -1)

    before, after = run(), run(change=1)
    torch.testing.assert_close(before[[0, 2]], after[[0, 2]], atol=1e-6, rtol=1e-6)
    assert (before[1] - after[1]).abs().max() > 1e-2
    if implementation != "sdpa":
        drafter.set_attn_implementation("sdpa")
        torch.testing.assert_close(before, run(), atol=1e-5, rtol=1e-4)


def train(target, tmp_path, drafter=None, data=None, **kw):
    trainer = OPDTrainer(drafter or fresh(target), target, config(tmp_path, **kw), data or rows())
    trainer.train()
    return trainer


def test_c4_accumulation_equals_one_batch(target, tmp_path):
    kw = dict(max_steps=2, alpha=0.5, num_anchors=99, train_sampling_strategy="sequential")
    one = train(target, tmp_path, per_device_train_batch_size=8, **kw)
    four = train(target, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **kw)
    for a, b in zip(one.model.parameters(), four.model.parameters()):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (one, four)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)


def test_c5_samples_without_room_for_a_block(target, tmp_path):
    data = rows(3) + [{"prompt_ids": [5, 6, 7], "response_ids": [8]}]
    trainer = train(target, tmp_path, data=data, max_steps=1)
    assert trainer.skipped_samples == 1
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    with pytest.raises(ValueError, match="no response of 1 is as long as one block of block_size=4"):
        OPDTrainer(fresh(target), target, config(tmp_path), [{"prompt_ids": [5, 6], "response_ids": [8]}])


def test_c7_stop_and_resume(target, tmp_path):
    frozen = copy.deepcopy(target.state_dict())
    whole = train(target, tmp_path / "a", save_strategy="steps", save_steps=2)
    half = OPDTrainer(fresh(target), target, config(tmp_path / "b", save_strategy="steps", save_steps=2), rows())
    half.args.max_steps = 4
    half.add_callback(_StopAt(2))
    half.train()
    again = OPDTrainer(fresh(target), target, config(tmp_path / "b", save_strategy="steps", save_steps=2), rows())
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "out" / "checkpoint-2"))
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters()):
        assert torch.equal(a, b), name
    assert whole.lr_scheduler.get_last_lr() == again.lr_scheduler.get_last_lr()
    for a, b in zip(whole.optimizer.state_dict()["state"].values(), again.optimizer.state_dict()["state"].values()):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    assert all(torch.equal(frozen[name], value) for name, value in target.state_dict().items())
    assert not any(p.requires_grad for p in target.parameters())


from transformers import TrainerCallback  # noqa: E402 - beside its one use


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_c8_evaluation_during_training(target, tmp_path):
    trainer = OPDTrainer(
        fresh(target),
        target,
        config(tmp_path, eval_strategy="steps", eval_steps=2),
        rows(),
        eval_dataset=rows(5, seed=3),
    )
    trainer.train()
    evaluations = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert len(evaluations) == 2 and trainer.model.training
    for name in ("eval_acceptance_length", "eval_acceptance_length_a", "eval_acceptance_length_std"):
        assert name in evaluations[0]
    assert trainer.evaluate()["eval_acceptance_length"] == pytest.approx(evaluations[1]["eval_acceptance_length"])


def test_c10_everything_saved_learns(target, tmp_path):
    drafter = fresh(target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    train(target, tmp_path, drafter, alpha=0.5, weight_decay=0.0)
    unchanged = [name for name, value in drafter.state_dict().items() if torch.equal(value, before[name])]
    assert unchanged == []


def test_c11_nan_names_the_sample(tmp_path):
    broken = tiny_target("llama", num_hidden_layers=4)
    broken.get_input_embeddings().weight.data[63] = float("nan")
    data = rows(2) + [{"prompt_ids": [5, 63, 7], "response_ids": [8] * 8}]
    trainer = OPDTrainer(fresh(broken), broken, config(tmp_path, train_sampling_strategy="sequential"), data)
    with pytest.raises(ValueError, match=r"NaN or infinity for samples? .*2"):
        trainer.train()


def test_evaluation_is_what_greedy_decoding_does(target, tmp_path):
    trainer = train(target, tmp_path, max_steps=30, data=_answered(target, 8))
    drafter = trainer.model.eval()
    held_out = _answered(target, 4, seed=9)
    walked, decoded = (
        OPDTrainer(
            drafter,
            target,
            config(tmp_path, max_new_tokens=16, eval_acceptance=how),
            rows(),
            eval_dataset=held_out,
        ).evaluate()
        for how in ("text", "decoding")
    )
    emitted = rounds = 0
    with settings(drafter, length_policy="fixed"):
        for row in held_out:
            prompt = torch.tensor([row["prompt_ids"]])
            target.generate(prompt, assistant_model=drafter, max_new_tokens=16, do_sample=False)
            emitted += drafter.last_draft_stats.emitted
            rounds += drafter.last_draft_stats.rounds
    assert walked["eval_acceptance_length"] == pytest.approx(emitted / rounds, abs=1e-6)
    for name in walked:
        if "acceptance" in name:
            assert decoded[name] == pytest.approx(walked[name], abs=1e-6), name


def _answered(target, count, seed=0):
    found = rows(count, seed=seed)
    for row in found:
        row["response_ids"] = plain(target, torch.tensor([row["prompt_ids"]]), max_new_tokens=16)[0]
    return found


def test_the_target_answers_prompts(target, tmp_path):
    tokenizer = tiny_tokenizer()
    data = [
        {"prompt": "w10 w11 w12"},
        {"prompt": [{"role": "user", "content": "w10"}]},
        {"messages": [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11"}]},
        {"prompt_ids": [9, 8, 7]},
    ]
    trainer = OPDTrainer(
        fresh(target), target, config(tmp_path, max_new_tokens=9, max_steps=1), data, processing_class=tokenizer
    )
    found = trainer.train_dataset.rollouts
    given = found.pop(2)  # a last turn of the assistant is an answer
    assert given.input_ids == [*found[1].input_ids[: given.prompt_length], 11, tokenizer.eos_token_id]
    assert found[0].input_ids[:3] == [10, 11, 12]
    for rollout in found:
        prompt = rollout.input_ids[: rollout.prompt_length]
        assert rollout.input_ids[rollout.prompt_length :] == plain(target, torch.tensor([prompt]), max_new_tokens=9)[0]
    trainer.train()
    with pytest.raises(ValueError, match="needs 'prompt', 'messages' or 'prompt_ids'"):
        OPDTrainer(fresh(target), target, config(tmp_path), [{"text": "w1"}], processing_class=tokenizer)


@pytest.mark.parametrize(
    "option",
    [
        {"alpha": 1.0},
        {"divergence": "forward_kl"},
        {"divergence": "jsd"},
        {"divergence": "jsd", "jsd_beta": 0.2},
        {"divergence": "total_variation"},
        {"divergence_clip": 0.05},
        {"position_weighting": "dpace"},
    ],
)
def test_the_loss_is_the_one_that_is_configured(target, tmp_path, option):
    kw = dict(max_steps=1, train_sampling_strategy="sequential")
    reference = {"divergence": "jsd"} if "jsd_beta" in option else {}
    usual, other = (
        train(target, tmp_path, **kw, **extra).state.log_history[0]["drafter_loss"] for extra in (reference, option)
    )
    assert abs(usual - other) > 1e-3


def test_length_heads_alone(target, tmp_path):
    """A drafter without heads gets some, and only they learn; the drafts stay what they were."""
    drafter = fresh(target, length_heads=[])
    with pytest.raises(ValueError, match=r"call drafter.add_length_heads\(\) first"):
        OPDTrainer(drafter, target, config(tmp_path, train_only="length_head"), rows())
    before = copy.deepcopy(drafter.state_dict())
    drafter.add_length_heads()
    assert drafter.config.length_heads == ["ratio", "survival"]
    added = copy.deepcopy(drafter.state_dict())
    kw = dict(train_only="length_head", max_steps=20, head_learning_rate=1e-2, calibrate_at_end=True)
    settings = config(tmp_path, **kw)
    with pytest.raises(ValueError, match="calibrate_at_end=True needs an eval_dataset"):
        OPDTrainer(drafter, target, settings, rows())
    trainer = OPDTrainer(drafter, target, settings, _answered(target, 16), eval_dataset=_answered(target, 12, seed=5))
    trainer.train()
    found = drafter.state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert all(not torch.equal(found[name], added[name]) for name in added.keys() - before.keys())
    losses = [entry["survival_loss"] for entry in trainer.state.log_history if "survival_loss" in entry]
    assert losses[-1] < losses[0]
    assert set(drafter.config.survival_calibration) == {"greedy"}
    assert "calibration_ece" in trainer.state.log_history[-1]
    trainer.save_model(str(tmp_path / "upgraded"))
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path / "upgraded")
    assert loaded.config.survival_calibration == drafter.config.survival_calibration
    assert all(torch.equal(value, found[name]) for name, value in loaded.state_dict().items())


def test_contradictions_are_refused(target, tmp_path):
    alone = config(tmp_path, train_only="length_head")
    with pytest.raises(ValueError, match="cannot be combined with train_only='length_head'"):
        OPDTrainer(fresh(target), target, alone, rows(), peft_config=LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"needs a survival head, and the drafter has length_heads=\['ratio'\]"):
        OPDTrainer(fresh(target, length_heads=["ratio"]), target, config(tmp_path, calibrate_at_end=True), rows())
    with pytest.raises(ValueError, match=r"names=\['length'\] is not valid"):
        fresh(target).add_length_heads(["length"])


def test_saved_drafters_and_adapters_load(target, tmp_path):
    whole = train(target, tmp_path, max_steps=1)
    whole.save_model(str(tmp_path / "whole"))
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), loaded.parameters()))
    drafter = fresh(target)
    before = copy.deepcopy(drafter.state_dict())
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    trainer = OPDTrainer(drafter, target, config(tmp_path), rows(), peft_config=adapter)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert all(torch.equal(before[n], v) for n, v in drafter.state_dict().items() if n in before)


def test_feature_store(target, tmp_path):
    sequences = [[3, 4, 5, 6, 7], [8, 9, 10], [11] * 9]
    store = FeatureStore(tmp_path / "f", target, [1, 2], sequences, dtype=torch.float32, shard_size=2)
    for index, ids in enumerate(sequences):
        wanted = target_features(target, torch.tensor([ids]), None, [1, 2])
        for name, value in store[index].items():
            torch.testing.assert_close(value, wanted[name][0], atol=1e-5, rtol=1e-5)
    (tmp_path / "f" / "features-00001.safetensors").unlink()
    again = FeatureStore(tmp_path / "f", target, [1, 2], sequences, dtype=torch.float32, shard_size=2)
    assert torch.equal(again[2]["argmax"], store[2]["argmax"])
    with pytest.raises(ValueError, match="was made for something else .sequences differ"):
        FeatureStore(tmp_path / "f", target, [1, 2], sequences[:2], dtype=torch.float32, shard_size=2)
    (tmp_path / "f" / "features-00000.safetensors").write_bytes(b"broken")
    damaged = FeatureStore(tmp_path / "f", target, [1, 2], sequences, dtype=torch.float32, shard_size=2)
    with pytest.raises(ValueError, match=r"features-00000.safetensors is damaged"):
        damaged[0]


def test_the_cache_does_not_change_training(target, tmp_path):
    kw = dict(alpha=0.5, train_sampling_strategy="group_by_length")
    plain_run = train(target, tmp_path / "a", **kw)
    cached = train(target, tmp_path / "b", feature_cache=str(tmp_path / "cache"), feature_dtype="float32", **kw)
    for a, b in zip(plain_run.model.parameters(), cached.model.parameters()):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_anchors": 0}, "num_anchors=0 is not valid: expected at least 1"),
        ({"alpha": 1.5}, r"alpha=1.5 is not valid: expected a share in \[0, 1\]"),
        ({"jsd_beta": -0.1}, r"jsd_beta=-0.1 is not valid: expected a share in \[0, 1\]"),
        ({"divergence": "kl"}, "divergence='kl' is not valid: expected one of 'reverse_kl', 'forward_kl'"),
        ({"position_weighting": "flat"}, "position_weighting='flat' is not valid: expected one of 'exponential'"),
        ({"train_only": "head"}, "train_only='head' is not valid: expected 'length_head'"),
        ({"calibrate_at_end": True, "temperature": 0.7}, "temperature=0.7 is not valid with calibrate_at_end=True"),
        ({"divergence_clip": 0.0}, "divergence_clip=0.0 is not valid"),
        ({"gamma": -1.0}, "gamma=-1.0 is not valid"),
        ({"temperature": -0.5}, "temperature=-0.5 is not valid"),
        ({"feature_dtype": "int8"}, "feature_dtype='int8' is not valid"),
        ({"remove_unused_columns": True}, "would drop the prompts"),
    ],
)
def test_config_errors(tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **bad)
