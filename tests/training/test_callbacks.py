"""The plot of acceptance by domain over training."""

from __future__ import annotations

import importlib.util

import pytest
from helpers import tiny_drafter, tiny_target

from adaflash_hf import OPDConfig, OPDTrainer
from adaflash_hf.training import AcceptancePlotCallback, callbacks, plot_acceptance

HISTORY = [
    {"step": 0, "eval_acceptance_length": 1.1, "eval_acceptance_length_a": 1.0, "eval_acceptance_length_b": 1.2},
    {"step": 5, "acceptance_length": 1.3, "loss": 2.0},
    {
        "step": 10,
        "eval_acceptance_length": 1.4,
        "eval_acceptance_length_a": 1.3,
        "eval_acceptance_length_b": 1.5,
        "eval_acceptance_length_min": 1.3,
        "eval_acceptance_length_std": 0.1,
    },
]


def test_lines_are_the_logged_figures():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    callbacks.draw_acceptance(axes, HISTORY)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "training text (blocks at random)": [[5, 1.3]],
        "held out: a": [[0, 1.0], [10, 1.3]],
        "held out: b": [[0, 1.2], [10, 1.5]],
        "held out: all": [[0, 1.1], [10, 1.4]],
    }
    with pytest.raises(ValueError, match="log_history holds no eval_acceptance_length"):
        callbacks.draw_acceptance(axes, [{"loss": 1.0}])


def test_drawn_at_each_evaluation(tmp_path):
    target = tiny_target("llama", num_hidden_layers=4)
    rows = [{"prompt_ids": [5, 6 + n], "response_ids": [8] * 9, "domain": "ab"[n % 2]} for n in range(4)]
    trainer = OPDTrainer(
        tiny_drafter(target, block_size=4),
        target,
        OPDConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            lmbda=0.0,
            max_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            max_new_tokens=6,
            save_strategy="no",
            acceptance_plot=True,
        ),
        rows,
        eval_dataset=rows,
    )
    trainer.train()
    image = (tmp_path / "acceptance.png").read_bytes()
    assert image.startswith(b"\x89PNG") and [path.name for path in tmp_path.glob("*.png")] == ["acceptance.png"]


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="acceptance_plot=True needs matplotlib: pip install"):
        AcceptancePlotCallback()
    with pytest.raises(ImportError, match="plot_acceptance needs matplotlib"):
        plot_acceptance(HISTORY, tmp_path / "x.png")
