"""Arguments of [`OPDTrainer`]."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .divergences import DIVERGENCES

POSITION_WEIGHTINGS = ("exponential", "dpace")
ANCHOR_SAMPLINGS = ("uniform", "decoding")
EVAL_ACCEPTANCES = ("decoding", "text")


@dataclass
class OPDConfig(TrainingArguments):
    """Arguments for training a drafter: those of `TrainingArguments` and the ones below.

    Learning rate, schedule and clipping default to DFlash's (2602.06036, 6e-4, cosine, 1.0), the loss to AdaFlash's mixture
    (2607.19223: `0.8 * CE + 0.2 * KL(p_S || p_T)`).

    Raises:
        ValueError: A value is outside what is accepted; the message names it.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of the drafter."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping."})
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must stay false: the columns are prompts, not the drafter's arguments."}
    )
    train_only: str | None = field(
        default=None,
        metadata={
            "help": "'length_head' freezes the drafter and trains its length heads alone; by default all learns."
        },
    )
    calibrate_at_end: bool = field(
        default=False,
        metadata={
            "help": "Fit the survival head's calibration on eval_dataset when training ends (temperature 0 or 1)."
        },
    )
    head_learning_rate: float = field(default=2e-4, metadata={"help": "Peak learning rate of the length heads."})
    lmbda: float = field(
        default=1.0,
        metadata={
            "help": "Share of the training text that the target writes while training; the rest are the dataset's own "
            "answers. 0 trains on given text alone, missing answers being written once beforehand."
        },
    )
    rollout_buffer_size: int = field(
        default=128,
        metadata={"help": "Answers written at a time (rounded up to whole optimizer steps), then trained on."},
    )
    rollout_epochs: int = field(
        default=2, metadata={"help": "How often each answer is trained on before others are written."}
    )
    keep_features: bool = field(
        default=True,
        metadata={"help": "Keep the target's states of the written answers in memory from one pass to the next."},
    )
    anchor_sampling: str = field(
        default="uniform",
        metadata={
            "help": "Where blocks are opened: uniform over the response, or decoding, where decoding it opened its own."
        },
    )
    eval_acceptance: str = field(
        default="decoding",
        metadata={
            "help": "How evaluate() measures acceptance: decoding the prompts, or text, walking the rounds that greedy "
            "decoding would have made over the held-out answers (faster, equal for the target's greedy text)."
        },
    )
    acceptance_plot: bool = field(
        default=False,
        metadata={"help": "Draw acceptance by domain over training into output_dir at each evaluation (matplotlib)."},
    )
    max_new_tokens: int = field(default=512, metadata={"help": "Most tokens the target writes for a prompt."})
    max_length: int = field(
        default=2048,
        metadata={"help": "Longest prompt and response together; responses are cut, long prompts dropped."},
    )
    rollout_batch_size: int = field(default=32, metadata={"help": "Prompts the target answers at once."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature of the rollouts; 0 is greedy."})
    num_anchors: int = field(default=512, metadata={"help": "Most blocks trained on a sequence and step."})
    gamma: float | None = field(
        default=None,
        metadata={"help": "Decay of the position weights; by default 7 / 5 / 4 for blocks of 16 / 10 / 8."},
    )
    alpha: float = field(
        default=0.8,
        metadata={"help": "Share of the cross-entropy on the target's argmax in the loss; the rest is `divergence`."},
    )
    divergence: str = field(
        default="reverse_kl",
        metadata={"help": "From the target's whole distribution: reverse_kl, forward_kl, jsd or total_variation."},
    )
    jsd_beta: float = field(
        default=0.5, metadata={"help": "Of divergence='jsd', as in TRL: 0 is forward KL, 1 is reverse KL."}
    )
    divergence_clip: float | None = field(
        default=None, metadata={"help": "Most nats of one slot's divergence, before anything is normalised."}
    )
    position_weighting: str = field(
        default="exponential",
        metadata={"help": "How slots of a block are weighted: exponential (gamma), or dpace within what gamma gives."},
    )
    loss_chunk_size: int = field(default=1024, metadata={"help": "Drafted slots whose logits exist at a time."})
    feature_cache: str | None = field(
        default=None,
        metadata={"help": "Folder for the target's states, computed once; without it they are computed every step."},
    )
    feature_dtype: str = field(default="bfloat16", metadata={"help": "How the states in feature_cache are stored."})

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("max_new_tokens", "max_length", "rollout_batch_size", "num_anchors", "loss_chunk_size")
        positive += ("rollout_buffer_size", "rollout_epochs")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"OPDConfig: {name}={getattr(self, name)} is not valid: expected at least 1.")
        for name in ("alpha", "jsd_beta", "lmbda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"OPDConfig: {name}={getattr(self, name)} is not valid: expected a share in [0, 1].")
        for name, accepted in (
            ("divergence", DIVERGENCES),
            ("position_weighting", POSITION_WEIGHTINGS),
            ("anchor_sampling", ANCHOR_SAMPLINGS),
            ("eval_acceptance", EVAL_ACCEPTANCES),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"OPDConfig: {name}={getattr(self, name)!r} is not valid: expected one of "
                    f"{', '.join(map(repr, accepted))}."
                )
        if self.lmbda > 0 and self.feature_cache is not None:
            raise ValueError(
                f"OPDConfig: feature_cache={self.feature_cache!r} keeps states of text that does not change, and with "
                f"lmbda={self.lmbda} the target writes it anew: set lmbda=0 to train on given text, or leave it out."
            )
        if self.lmbda > 0 and self.train_sampling_strategy == "group_by_length":
            raise ValueError(
                "OPDConfig: train_sampling_strategy='group_by_length' needs text that is there beforehand: set lmbda=0, or "
                "leave it out."
            )
        if self.train_only not in (None, "length_head"):
            raise ValueError(
                f"OPDConfig: train_only={self.train_only!r} is not valid: expected 'length_head' or nothing."
            )
        if self.calibrate_at_end and self.temperature not in (0.0, 1.0):
            raise ValueError(
                f"OPDConfig: temperature={self.temperature} is not valid with calibrate_at_end=True: expected 0 or 1."
            )
        if self.divergence_clip is not None and self.divergence_clip <= 0:
            raise ValueError(
                f"OPDConfig: divergence_clip={self.divergence_clip} is not valid: expected a positive number of nats."
            )
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"OPDConfig: gamma={self.gamma} is not valid: expected a positive number.")
        if self.temperature < 0:
            raise ValueError(f"OPDConfig: temperature={self.temperature} is not valid: expected 0 or more.")
        if self.feature_dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(
                f"OPDConfig: feature_dtype={self.feature_dtype!r} is not valid: expected 'bfloat16', 'float16' or "
                "'float32'."
            )
        if self.remove_unused_columns:
            raise ValueError("OPDConfig: remove_unused_columns=True would drop the prompts: leave it out.")
