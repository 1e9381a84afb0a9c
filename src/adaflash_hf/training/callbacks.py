"""Callbacks of training: the plot of acceptance by domain."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

PLOT_NAME = "acceptance.png"
_PREFIX = "eval_acceptance_length"
# Paul Tol's bright colours, told apart by colour-blind readers too.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66ccee", "#aa3377")


def draw_acceptance(axes: Any, log_history: Sequence[dict[str, Any]]) -> None:
    """Draws acceptance length over training: held-out prompts by domain, and what the training blocks gave.

    Args:
        axes: Matplotlib axes.
        log_history: `trainer.state.log_history`.

    Raises:
        ValueError: Nothing was evaluated.
    """
    held = [entry for entry in log_history if _PREFIX in entry]
    if not held:
        raise ValueError(f"log_history holds no {_PREFIX}: give eval_dataset, and an eval_strategy or evaluate().")
    seen = [(entry["step"], float(entry["acceptance_length"])) for entry in log_history if "acceptance_length" in entry]
    if seen:
        axes.plot(*zip(*seen), color="#bbbbbb", label="training text (blocks at random)")
    names = {key.removeprefix(_PREFIX + "_") for entry in held for key in entry if key.startswith(_PREFIX + "_")}
    domains = sorted(names - {"min", "std"})
    for place, domain in enumerate(domains):
        points = [(e["step"], float(e[f"{_PREFIX}_{domain}"])) for e in held if f"{_PREFIX}_{domain}" in e]
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(*zip(*points), color=colour, marker="o", markersize=3, label=f"held out: {domain}")
    every = [(entry["step"], float(entry[_PREFIX])) for entry in held]
    label = "held out: all" if domains else "held out"
    axes.plot(*zip(*every), color="black", linewidth=2, marker="o", markersize=3, label=label)
    axes.set(xlabel="training step", ylabel="acceptance length (tokens a round)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def plot_acceptance(log_history: Sequence[dict[str, Any]], path: str | os.PathLike) -> None:
    """Writes [`draw_acceptance`] to an image file.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: Nothing was evaluated.
    """
    _require_matplotlib("plot_acceptance")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_acceptance(figure.subplots(), log_history)
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=130)
    os.replace(temporary, path)


class AcceptancePlotCallback(TrainerCallback):
    """Draws `acceptance.png` into `output_dir` anew at each evaluation.

    Raises:
        ImportError: Matplotlib is not installed.
    """

    def __init__(self) -> None:
        _require_matplotlib("acceptance_plot=True")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the metrics are in the log."""
        if state.is_world_process_zero and any(_PREFIX in entry for entry in state.log_history):
            os.makedirs(args.output_dir, exist_ok=True)
            plot_acceptance(state.log_history, Path(args.output_dir) / PLOT_NAME)


def _require_matplotlib(wanted: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{wanted} needs matplotlib: pip install 'adaflash-hf[bench]'.")
