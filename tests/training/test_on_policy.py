"""On-policy training: who is answered when, that it is the target's text, and that a run can be stopped anywhere."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoding_helpers import plain
from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback

from adaflash_hf import OPDConfig, OPDTrainer
from adaflash_hf.training.rollout_buffer import RolloutPlan, last_whole_checkpoint
from adaflash_hf.training.rollouts import read_prompts

BLOCK = 4


@pytest.fixture(scope="module")
def target():
    found = tiny_target("llama", num_hidden_layers=4)
    found.generation_config.eos_token_id = None
    return found


def prompts(count=10):
    generator = torch.Generator().manual_seed(5)
    return [
        {"prompt_ids": torch.randint(3, 64, (4 + n % 3,), generator=generator).tolist(), "domain": "ab"[n % 2]}
        for n in range(count)
    ]


def trainer(target, folder, data=None, callbacks=None, eval_dataset=None, **kw):
    torch.manual_seed(0)
    drafter = tiny_drafter(target, block_size=BLOCK)
    drafter.generation_config.length_policy = kw.pop("length_policy", "fixed")
    base = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=3e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        rollout_buffer_size=8,
        rollout_batch_size=4,
        max_new_tokens=12,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
    )
    return OPDTrainer(
        drafter, target, OPDConfig(**{**base, **kw}), data or prompts(), eval_dataset=eval_dataset, callbacks=callbacks
    )


def test_a_plan_trains_on_every_answer_as_often_as_asked():
    plan = RolloutPlan(prompts=10, buffer_size=7, passes=3, step_size=4, seed=1)
    assert (plan.buffer_size, plan.fillings, len(plan)) == (8, 2, 48)
    for epoch in range(2):
        fillings = [plan.prompts_of(2 * epoch + part) for part in range(2)]
        assert {*fillings[0], *fillings[1]} == set(range(10)) and len(set(fillings[0])) == 8
    assert plan.prompts_of(0) != plan.prompts_of(2)
    for once in range(6):
        assert sorted(plan.slots_of(list(range(8 * once, 8 * once + 8)))) == list(range(8))
    assert [plan.filling_of(place) for place in (0, 23, 24, 47, 48)] == [0, 0, 1, 1, 2]
    assert RolloutPlan(3, 128, 2, 8, 0).buffer_size == 8


def test_rollouts_are_the_targets_own_text(target, tmp_path):
    run = trainer(target, tmp_path, max_steps=5)
    before = copy.deepcopy(run.drafter.state_dict())
    seen = []
    fill = run.on_policy.buffer.fill
    run.on_policy.buffer.fill = lambda filling, write: (seen.append(filling), fill(filling, write))
    run.train()
    assert seen == [0, 1]  # 8 rollouts, twice, by 4 a step
    buffer = run.on_policy.buffer
    for sample, rollout in zip(buffer.samples, buffer.rollouts):
        prompt = prompts()[sample]["prompt_ids"]
        assert rollout.input_ids == prompt + plain(target, torch.tensor([prompt]), max_new_tokens=12)[0]
        # The first round opens at the first answered token, which the prompt's forward gave.
        assert rollout.anchors[0] == len(prompt) and rollout.anchors == sorted(set(rollout.anchors))
    assert any(not torch.equal(value, before[name]) for name, value in run.drafter.state_dict().items())
    logged = run.state.log_history[0]
    assert logged["rollout_tokens"] == 96 and logged["rollout_tokens_per_round"] >= 1


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "length_policy": "throughput"}, {"keep_features": False}],
    ids=["greedy", "sampled", "throughput", "recomputed"],
)
def test_stop_and_resume_is_exact(target, tmp_path, options):
    """Stopped in the middle of a filling and at the end of one."""
    kw = dict(save_strategy="steps", save_steps=1, max_steps=7, **options)
    if "length_policy" in options:
        # What lengths follow is measured, so both runs are given the same curve.
        whole = trainer(target, tmp_path / "a", **kw)
        whole.train()
        for stop in (3, 4):
            resume = trainer(target, tmp_path / "a", **kw)
            resume.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{stop}"))
            assert resume.on_policy._verify_cost == whole.on_policy._verify_cost is not None
            assert_equal(whole, resume)
        return
    whole = trainer(target, tmp_path / "a", **kw)
    whole.train()
    for stop in (3, 4):
        half = trainer(target, tmp_path / f"b{stop}", callbacks=[_StopAt(stop)], **kw)
        half.train()
        again = trainer(target, tmp_path / f"b{stop}", **kw)
        again.train(resume_from_checkpoint=True)
        assert_equal(whole, again)


def assert_equal(one, other):
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters()):
        assert torch.equal(a, b), name
    assert one.on_policy.buffer.rollouts == other.on_policy.buffer.rollouts


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads({threads})  # as the other runs: it decides the order of sums
from test_on_policy import trainer, tiny_target
from transformers import TrainerCallback
class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
target = tiny_target("llama", num_hidden_layers=4)
target.generation_config.eos_token_id = None
trainer(target, {folder!r}, callbacks=[Kill()], save_strategy="steps", save_steps=2, max_steps=7).train()
"""


def test_killed_and_taken_up_again(target, tmp_path):
    kw = dict(save_strategy="steps", save_steps=2, max_steps=7)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "generation")]
    script = KILLED.format(paths=paths, threads=torch.get_num_threads(), folder=str(tmp_path / "b"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    # As if it had been killed while writing a checkpoint.
    (tmp_path / "b" / "checkpoint-6").mkdir()
    (tmp_path / "b" / "checkpoint-6" / "trainer_state.json").write_text('{"epo')
    assert last_whole_checkpoint(tmp_path / "b").endswith("checkpoint-4")
    again = trainer(target, tmp_path / "b", **kw)
    again.train(resume_from_checkpoint=True)
    whole = trainer(target, tmp_path / "a", **kw)
    whole.train()
    assert_equal(whole, again)


def test_dataset_answers_are_mixed_in(target, tmp_path):
    data = [{**row, "response_ids": [7] * 9} for row in prompts()]
    given = lambda run: sum(r.input_ids[r.prompt_length :] == [7] * 9 for r in run.on_policy.buffer.rollouts)
    half, own = (trainer(target, tmp_path, data, max_steps=1, lmbda=lmbda) for lmbda in (0.5, 1.0))
    half.train()
    own.train()
    assert 0 < given(half) < 8 and given(own) == 0
    assert trainer(target, tmp_path, data, lmbda=0.0).train_dataset.rollouts[0].input_ids[-9:] == [7] * 9


def test_anchors_where_decoding_placed_them(target, tmp_path):
    run = trainer(target, tmp_path, anchor_sampling="decoding", max_steps=1)
    taken = []
    draft = run._draft
    run._draft = lambda model, inputs, normalizer: (taken.append(inputs), draft(model, inputs, normalizer))[1]
    run.train()
    for inputs in taken:
        for slot, anchors in zip(inputs["slots"], inputs["anchors"].tolist()):
            rollout = run.on_policy.buffer.rollouts[slot]
            places = [p for p in rollout.anchors if p + BLOCK - 1 < len(rollout.input_ids)]
            assert [p for p in anchors if p >= 0] == places
    with pytest.raises(ValueError, match="give every row of train_dataset its 'anchors'"):
        trainer(target, tmp_path, anchor_sampling="decoding", lmbda=0.0)


def test_early_stopping_on_acceptance_length(target, tmp_path):
    run = trainer(
        target,
        tmp_path,
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_acceptance_length",
        load_best_model_at_end=True,
        learning_rate=0.0,
        head_learning_rate=0.0,
        max_steps=6,
        callbacks=[EarlyStoppingCallback(2)],
    )
    run.train()
    assert run.state.global_step == 3
    assert "eval_acceptance_length_std" in next(e for e in run.state.log_history if "eval_loss" in e)


def test_what_is_not_used_says_so(target, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("adaflash_hf"), "propagate", True)
    trainer(target, tmp_path, prompts())
    assert "bring an answer" not in caplog.text
    answered = [{**row, "response_ids": [7] * 9} for row in prompts(4)]
    run = trainer(target, tmp_path, [*prompts(), *answered], eval_dataset=prompts(2))
    assert "4 rows of train_dataset bring an answer, which lmbda=1 leaves aside" in caplog.text
    run.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="sharded drafter cannot decode: use lmbda=0"):
        run.evaluate()


def test_answers_in_words():
    tokenizer = tiny_tokenizer()
    rows = [
        {"prompt": "w10", "completion": "w11 w12"},
        {"messages": [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11"}]},
        {"prompt": "w10"},
    ]
    end = tokenizer.eos_token_id
    assert [p.answer for p in read_prompts(rows, tokenizer, 99)] == [[11, 12, end], [11, end], None]
    assert all(p.answer is None for p in read_prompts(rows, tokenizer, 99, written_answers=False))


def test_what_is_refused(target, tmp_path):
    config = lambda **kw: OPDConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **kw)
    for kw, message in (
        ({"lmbda": 1.5}, r"lmbda=1.5 is not valid: expected a share in \[0, 1\]"),
        ({"rollout_buffer_size": 0}, "rollout_buffer_size=0 is not valid"),
        ({"anchor_sampling": "all"}, "expected one of 'uniform', 'decoding'"),
        ({"eval_acceptance": "x"}, "expected one of 'decoding', 'text'"),
        ({"feature_cache": "x"}, "set lmbda=0 to train on given text"),
        ({"train_sampling_strategy": "group_by_length"}, "needs text that is there beforehand"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**kw)
    with pytest.raises(ValueError, match="no response of 8 is as long as one block"):
        trainer(target, tmp_path / "a", max_new_tokens=2).train()
    kw = dict(save_strategy="steps", save_steps=1, max_steps=1)
    trainer(target, tmp_path / "b", **kw).train()
    with pytest.raises(ValueError, match="other rollouts .prompts: 10 there, 9 here"):
        trainer(target, tmp_path / "b", prompts(9), **kw).train(resume_from_checkpoint=True)
    (tmp_path / "b" / "checkpoint-1" / "rollouts.json").unlink()
    with pytest.raises(ValueError, match=r"holds no rollouts.json"):
        trainer(target, tmp_path / "b", **kw).train(resume_from_checkpoint=True)


RANKS = """
import sys
sys.path[:0] = {paths!r}
import torch
from test_on_policy import tiny_target, trainer, prompts
target = tiny_target("llama", num_hidden_layers=4)
target.generation_config.eos_token_id = None
run = trainer(
    target, {folder!r}, gradient_accumulation_steps=1, ddp_backend="gloo", eval_dataset=prompts(5), **{options!r}
)
assert run.args.world_size == 2
run.train()
metrics = run.evaluate()
if run.args.process_index == 0:
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    torch.save(
        {{"weights": run.drafter.state_dict(), "losses": losses, "metrics": metrics}}, {folder!r} + "/found.pt"
    )
"""


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_two_processes_are_one(target, tmp_path, options):
    """Under `accelerate launch`, as one process that accumulates; also sampled, since seeds belong to batches."""
    options = {"max_steps": 5, **options}
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "generation")]
    script = tmp_path / "script.py"
    (tmp_path / "two").mkdir()
    script.write_text(RANKS.format(paths=paths, folder=str(tmp_path / "two"), options=options))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
    ]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "two" / "found.pt", weights_only=True)
    one = trainer(target, tmp_path / "one", eval_dataset=prompts(5), **options)
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert two["losses"] == pytest.approx(losses, rel=1e-3)
    for name, value in one.drafter.state_dict().items():
        torch.testing.assert_close(two["weights"][name], value, atol=2e-4, rtol=1e-3, msg=name)
    if not options.get("temperature"):
        found = one.evaluate()
        assert two["metrics"]["eval_acceptance_length"] == pytest.approx(found["eval_acceptance_length"], abs=0.05)
