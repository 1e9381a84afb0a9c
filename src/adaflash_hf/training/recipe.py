"""`adaflash train`: a training run described by a YAML file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from ..modeling_adaflash import AdaFlashDraftModel
from .opd_config import OPDConfig
from .opd_trainer import OPDTrainer
from .rollout_buffer import RolloutPlan

# Weights, gradients and AdamW's two moments of what is trained, in float32.
_TRAINED_BYTES = 16


@dataclass
class TrainRecipe:
    """Models and data of a run; everything else of a recipe is [`OPDConfig`]."""

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    train_file: str = field(metadata={"help": "JSON lines with `prompt`, `messages` or `prompt_ids`."})
    drafter: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the drafter to start from; a new one is made without it."}
    )
    new_drafter: str | None = field(
        default=None, metadata={"help": "Arguments of AdaFlashDraftModel.from_target for a new drafter, as a mapping."}
    )
    add_length_heads: bool = field(default=False, metadata={"help": "Give the drafter the length heads it lacks."})
    lora: str | None = field(
        default=None, metadata={"help": "Arguments of peft.LoraConfig, as a mapping: trains an adapter."}
    )
    eval_file: str | None = field(default=None, metadata={"help": "JSON lines of held-out prompts."})
    target_dtype: str = field(default="auto", metadata={"help": "Dtype of the target: auto, bfloat16, float32, ..."})
    save_to: str | None = field(default=None, metadata={"help": "Folder of the result (output_dir/drafter)."})

    def __post_init__(self) -> None:
        for name in ("new_drafter", "lora"):
            value = getattr(self, name)
            try:
                found = json.loads(value) if isinstance(value, str) else value
            except json.JSONDecodeError:
                found = value
            if found is not None and not isinstance(found, dict):
                raise ValueError(f"{name}={value!r} is not valid: expected a mapping of arguments.")
            setattr(self, name, found)
        if self.drafter is not None and self.new_drafter is not None:
            raise ValueError("drafter and new_drafter are both given: a run starts from one or makes the other.")
        for name in ("train_file", "eval_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}={path!r} is not valid: there is no such file.")


def read_recipe(path: str, overrides: Sequence[str] = ()) -> tuple[TrainRecipe, OPDConfig]:
    """Reads a recipe.

    Args:
        path: YAML file, a mapping of names of [`TrainRecipe`] and [`OPDConfig`].
        overrides: `--name value` pairs that replace the file's.

    Raises:
        ValueError: The file is no mapping, a name is unknown, or a value is not accepted.
    """
    try:
        found = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config={path!r} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"config={path!r} is not valid: expected a mapping of names to values.")
    known = {entry.name for kind in (TrainRecipe, OPDConfig) for entry in dataclasses.fields(kind) if entry.init}
    given = [text[2:].split("=")[0].replace("-", "_") for text in overrides if text.startswith("--")]
    unknown = sorted(str(name) for name in {*found, *given} - known)
    if unknown:
        raise ValueError(f"unknown names in {path!r} or on the command line: {', '.join(unknown)}.")
    arguments: list[str] = []
    for name, value in found.items():
        if value is None or name in given:
            continue
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in values)]
    parser = HfArgumentParser((TrainRecipe, OPDConfig), allow_abbrev=False, prog="adaflash train")
    parser.error = _refuse  # argparse would leave the process
    recipe, settings, rest = parser.parse_args_into_dataclasses([*arguments, *overrides], return_remaining_strings=True)
    if rest:
        raise ValueError(f"not understood on the command line: {' '.join(rest)}.")
    return recipe, settings


def _refuse(message: str) -> None:
    raise ValueError(message)


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a JSON lines file.

    Raises:
        ValueError: A line is no JSON object; the message names it.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}.")
            rows.append(row)
    return rows


def plan(recipe: TrainRecipe, settings: OPDConfig) -> str:
    """What a run would do, and the size of what it holds whatever the text; activations come on top. In text."""
    rows = len(read_rows(recipe.train_file))
    held = len(read_rows(recipe.eval_file)) if recipe.eval_file else 0
    config = AutoConfig.from_pretrained(recipe.target)
    text = config.get_text_config()
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        if recipe.drafter is None:
            drafter = AdaFlashDraftModel.from_target(target, **(recipe.new_drafter or {}))
        else:
            drafter = AdaFlashDraftModel.from_pretrained(recipe.drafter, device_map="meta")
    size = {"float32": 4, "float64": 8}.get(
        str(config.dtype).removeprefix("torch.") if recipe.target_dtype == "auto" else recipe.target_dtype, 2
    )
    batch = settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    sequences, text_from = rows, "the rows' own answers, missing ones written by the target beforehand"
    kept = 0
    if settings.lmbda > 0:
        order = RolloutPlan(max(rows, 1), settings.rollout_buffer_size, settings.rollout_epochs, batch, seed=0)
        sequences = len(order)
        text_from = (
            f"{settings.lmbda:.0%} written by the target while training, {order.buffer_size} answers at a time, each "
            f"trained on {order.passes} times"
        )
        kept = order.buffer_size if settings.keep_features and order.passes > 1 else 0
    steps = settings.max_steps if settings.max_steps > 0 else math.ceil(sequences / batch * settings.num_train_epochs)
    vocabulary = drafter.config.draft_vocab_size or text.vocab_size
    states = (len(drafter.config.target_layer_ids) + 1) * text.hidden_size
    stored = 4 if settings.feature_dtype == "float32" else 2
    lines = [
        ("target", f"{recipe.target}: {target.num_parameters() / 1e6:,.1f}M parameters, frozen"),
        ("drafter", f"{recipe.drafter or 'new'}: {drafter.num_parameters() / 1e6:,.2f}M parameters"),
        ("trained", "an adapter" if recipe.lora else settings.train_only or "drafter and length heads"),
        ("data", f"{rows} training rows, {held} held out, at most {settings.max_length} tokens each"),
        ("text", text_from),
        ("steps", f"{steps} of {batch} sequences, {settings.num_anchors} blocks each at most"),
        ("memory: target", _size(target.num_parameters() * size)),
        ("memory: drafter", f"{_size(drafter.num_parameters() * _TRAINED_BYTES)} with gradients and optimizer"),
        (
            "memory: logits",
            _size(size * settings.train_batch_size * settings.max_length * text.vocab_size) + " of the target",
        ),
        ("memory: loss", _size(6 * 4 * settings.loss_chunk_size * vocabulary)),
        ("memory: states", _size(4 * settings.train_batch_size * settings.max_length * states) + " a batch"),
        ("memory: buffer", _size(kept * settings.max_length * states * size) + " of kept states" if kept else "-"),
        (
            "disk: features",
            _size((rows + held) * settings.max_length * states * stored) if settings.feature_cache else "-",
        ),
        ("result", recipe.save_to or f"{settings.output_dir}/drafter"),
    ]
    return "\n".join(f"{name:16s} {value}" for name, value in lines)


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def run_recipe(path: str, overrides: Sequence[str] = (), dry_run: bool = False) -> None:
    """Runs a recipe, or prints what it would do."""
    recipe, settings = read_recipe(path, overrides)
    if dry_run:
        print(plan(recipe, settings))
        return
    target = AutoModelForCausalLM.from_pretrained(recipe.target, dtype=recipe.target_dtype)
    tokenizer = AutoTokenizer.from_pretrained(recipe.target, padding_side="left")
    if recipe.drafter is None:
        drafter = AdaFlashDraftModel.from_target(target, tokenizer=tokenizer, **(recipe.new_drafter or {})).float()
    else:
        drafter = AdaFlashDraftModel.from_pretrained(recipe.drafter, dtype=torch.float32)
    if recipe.add_length_heads:
        drafter.add_length_heads()
    adapter = None
    if recipe.lora is not None:
        from peft import LoraConfig

        adapter = LoraConfig(**recipe.lora)
    trainer = OPDTrainer(
        model=drafter,
        target_model=target,
        args=settings,
        train_dataset=read_rows(recipe.train_file),
        eval_dataset=read_rows(recipe.eval_file) if recipe.eval_file else None,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
    folder = recipe.save_to or f"{settings.output_dir}/drafter"
    trainer.save_model(folder)
    print(f"saved to {folder}")
