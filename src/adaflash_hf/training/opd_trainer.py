"""Training a drafter and its length heads on text its target wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput
from transformers.utils import logging

from ..evaluation.acceptance import acceptance_metrics, measure_acceptance
from ..generation.draft_head import DraftHead, noise_embeddings
from ..generation.stats import DraftStats
from ..modeling_adaflash import AdaFlashDraftModel
from .blocks import block_positions, block_visibility, label_positions, sample_anchors, valid_anchors
from .calibration import SurvivalRounds, fit_calibration, reliability, simulated_acceptances
from .callbacks import AcceptancePlotCallback
from .collator import RolloutCollator, RolloutDataset
from .features import FeatureStore, target_features
from .losses import (
    DraftLoss,
    DraftLossOutput,
    DraftTargets,
    accepted_lengths,
    default_gamma,
    drafter_loss,
    position_weights,
    ratio_head_loss,
    reach_probabilities,
    survival_head_loss,
)
from .metrics import SlotMetrics, simulated_acceptance, walked_rounds
from .on_policy import OnPolicyText
from .opd_config import OPDConfig
from .rollout_buffer import RolloutPlan, last_whole_checkpoint
from .rollouts import Prompt, Rollout, collect_rollouts, read_prompts, require_blocks

logger = logging.get_logger(__name__)
_FEATURES = ("taps", "states", "argmax", "log_normalizers")


def _is_length_head(name: str) -> bool:
    return "ratio_head." in name or "survival_head." in name


class _LengthGroupedSampler(LengthGroupedSampler):
    """Transformers' sampler with an order that depends on the epoch alone, as resuming needs."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.generator.manual_seed(self.seed + epoch)


class OPDTrainer(Trainer):
    """Trains a drafter on its target's text: AdaFlash's mixture loss over many blocks a sequence, length heads beside.

    Args:
        model: The drafter, or a path or Hub id of one.
        target_model: The target, frozen; or a path or Hub id.
        args: [`OPDConfig`].
        train_dataset: Rows with `prompt` (text or messages), `messages`, or `prompt_ids`, and perhaps an answer
            (`response_ids`, `completion`, a last turn of the assistant) and a `domain`. How much of the text are answers
            that the target writes while training, with the drafter's help, is `args.lmbda`.
        eval_dataset: Prompts for [`evaluate`]; `response_ids` are taken as they are, the others are answered by the target.
        processing_class: The target's tokenizer; needed for prompts that are text.
        peft_config: Trains an adapter instead of the whole drafter.
        callbacks: As for `Trainer`.
        optimizers: As for `Trainer`.

    Raises:
        ValueError: No training row is long enough for one block, or drafter and target do not fit.
    """

    _tag_names = ["adaflash", "dflash", "speculative-decoding"]
    # Divided by the weight of the whole accumulated batch already.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: AdaFlashDraftModel | str,
        target_model: PreTrainedModel | str,
        args: OPDConfig | None = None,
        train_dataset: Iterable[dict[str, Any]] | None = None,
        eval_dataset: Iterable[dict[str, Any]] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        args = OPDConfig(output_dir="trainer_output") if args is None else args
        if isinstance(model, str):
            model = AdaFlashDraftModel.from_pretrained(model)
        if isinstance(target_model, str):
            target_model = AutoModelForCausalLM.from_pretrained(target_model)
        self.drafter, self.target = model, target_model.eval().requires_grad_(False)
        # Checked before the target writes anything.
        from ..generation.compatibility import check_drafter_fits

        check_drafter_fits(self.target, self.drafter)
        self._check_heads(args, peft_config, eval_dataset)
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        self.block_size = self.drafter.config.block_size
        self.weights = position_weights(self.block_size, args.gamma or default_gamma(self.block_size))
        self.mixture = DraftLoss(
            # Where only the heads learn, the divergence would be computed for nothing.
            alpha=1.0 if args.train_only == "length_head" else args.alpha,
            divergence=args.divergence,
            jsd_beta=args.jsd_beta,
            clip=args.divergence_clip,
            dpace=args.position_weighting == "dpace",
        )
        self.metrics_seen = SlotMetrics(self.block_size - 1)
        self._evaluated: SlotMetrics | None = None
        self._rounds: dict[int, SurvivalRounds] | None = None
        self.skipped_samples = 0
        if args.device.type != self.target.device.type and self.target.device.type != "meta":
            self.target.to(args.device)
        # Sampled rollouts are the same on every rank and when a run is taken up again.
        set_seed(args.seed)
        self.on_policy: OnPolicyText | None = None
        train: Any = None
        if train_dataset is not None:
            prompts = read_prompts(train_dataset, processing_class, args.max_length)
            if not prompts:
                raise ValueError("train_dataset: there is no prompt that is short enough for max_length.")
            train = self._on_policy(prompts, args) if args.lmbda > 0 else self._given_text(prompts, args)
        held_out = None
        if eval_dataset is not None:
            held_out = self._answered(
                read_prompts(eval_dataset, processing_class, args.max_length, written_answers=False), args, "eval"
            )
        super().__init__(
            model=model,
            args=args,
            data_collator=RolloutCollator() if self.on_policy is None else self._collate,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), *([AcceptancePlotCallback()] if args.acceptance_plot else [])],
            optimizers=optimizers,
        )
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)

    def _check_heads(self, args: OPDConfig, peft_config: Any, eval_dataset: Any) -> None:
        heads = self.drafter.config.length_heads
        if args.train_only == "length_head":
            if not heads:
                raise ValueError(
                    "OPDConfig: train_only='length_head' needs a drafter with length heads, and this one has none: "
                    "call drafter.add_length_heads() first."
                )
            if peft_config is not None:
                raise ValueError(
                    "peft_config cannot be combined with train_only='length_head': heads are trained whole."
                )
        if args.calibrate_at_end:
            if "survival" not in heads:
                raise ValueError(
                    f"OPDConfig: calibrate_at_end=True needs a survival head, and the drafter has length_heads={heads}."
                )
            if eval_dataset is None:
                raise ValueError("OPDConfig: calibrate_at_end=True needs an eval_dataset, text held out from training.")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; with `calibrate_at_end` the survival head is calibrated on `eval_dataset` afterwards.

        `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str) and self.on_policy is not None:
            self.on_policy.load(resume_from_checkpoint)
        frozen = []
        if self.args.train_only == "length_head":
            frozen = [p for name, p in self.drafter.named_parameters() if p.requires_grad and not _is_length_head(name)]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            for parameter in frozen:  # the drafter is the caller's, who may train all of it next
                parameter.requires_grad_(True)
        if self.args.calibrate_at_end:
            self.log({f"calibration_{name}": value for name, value in self.calibrate()["after"].items()})
        return result

    def _on_policy(self, prompts: list[Prompt], args: OPDConfig) -> RolloutPlan:
        answered = sum(prompt.answer is not None for prompt in prompts)
        if args.lmbda == 1 and answered:
            logger.warning(
                f"{answered} rows of train_dataset bring an answer, which lmbda=1 leaves aside: the target writes its own. "
                "Set lmbda=0 to train on the given text."
            )
        self.on_policy = OnPolicyText(
            prompts,
            self.target,
            self._decoding_drafter,
            args,
            self.block_size,
            self.drafter.config.target_layer_ids,
        )
        return self.on_policy.plan

    def _given_text(self, prompts: list[Prompt], args: OPDConfig) -> RolloutDataset:
        if args.anchor_sampling == "decoding" and any(prompt.anchors is None for prompt in prompts):
            raise ValueError(
                "OPDConfig: anchor_sampling='decoding' needs to know where decoding opened its rounds: train on-policy "
                "(lmbda > 0), or give every row of train_dataset its 'anchors'."
            )
        train = self._answered(prompts, args, "train")
        require_blocks(train.rollouts, self.block_size)
        return train

    def _answered(self, prompts: list[Prompt], args: OPDConfig, split: str) -> RolloutDataset:
        rollouts = collect_rollouts(
            prompts,
            self.target,
            max_new_tokens=args.max_new_tokens,
            max_length=args.max_length,
            batch_size=args.rollout_batch_size,
            temperature=args.temperature,
        )
        store = None
        if args.feature_cache is not None:
            with args.main_process_first(desc="target features"):
                store = FeatureStore(
                    f"{args.feature_cache}/{split}",
                    self.target,
                    self.drafter.config.target_layer_ids,
                    [rollout.input_ids for rollout in rollouts],
                    dtype=getattr(torch, args.feature_dtype),
                )
        return RolloutDataset(rollouts, store)

    def _collate(self, items: list[Any]) -> dict[str, Any]:
        """Held-out rollouts are padded; of a plan's places the text is not written yet."""
        return {"places": items} if isinstance(items[0], int) else RolloutCollator()(items)

    def _decoding_drafter(self) -> AdaFlashDraftModel:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "The drafter is sharded (FSDP or DeepSpeed), and a sharded drafter cannot decode: use lmbda=0 and "
                "eval_acceptance='text', or several processes with a whole drafter each."
            )
        return self.drafter

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.on_policy is not None and self.args.should_save and not self.args.save_only_model:
            # Before the rest: the trainer's state, written last, says that a checkpoint is whole.
            folder = f"{self._get_output_dir(trial=trial)}/{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.on_policy.save(folder)
        super()._save_checkpoint(model, trial)

    def create_optimizer(self, model: Any = None) -> Any:
        """Drafter and length heads in groups of their own, each with its learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        decay = set(self.get_decay_parameter_names(model))
        groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                key = (_is_length_head(name), name in decay)
                groups.setdefault(key, []).append(parameter)
        optimizer_class, arguments = self.get_optimizer_cls_and_kwargs(self.args, model)
        self.optimizer = optimizer_class(
            [
                {
                    "params": parameters,
                    "weight_decay": self.args.weight_decay if decayed else 0.0,
                    "lr": self.args.head_learning_rate if head else self.args.learning_rate,
                }
                for (head, decayed), parameters in groups.items()
            ],
            **arguments,
        )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.on_policy is not None:
            return self.on_policy.sampler()
        if dataset is not None and getattr(self.args, "train_sampling_strategy", "") == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return _LengthGroupedSampler(size, dataset.lengths, self.args.data_seed or self.args.seed)
        return super()._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if getattr(self.args, "train_sampling_strategy", "") == "group_by_length":
            return _LengthGroupedSampler(self.args.eval_batch_size, eval_dataset.lengths, seed=0)
        return super()._get_eval_sampler(eval_dataset)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Draws the anchors of a whole optimizer step, so that its loss is divided by the step's total weight."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.on_policy is not None:
            batches = [self.on_policy.batch(batch["places"]) for batch in batches]
        total = torch.zeros((), device=device)
        self.metrics_seen.steps += 1
        # Drawn for the step and rank alone: a run that is taken up again restores the global generator only later.
        step = self.state.global_step * self.args.world_size + self.args.process_index
        generator = torch.Generator().manual_seed(self.args.seed + step)
        for batch in batches:
            valid = valid_anchors(batch["response_mask"], self.block_size)
            if self.args.anchor_sampling == "decoding" and "placed" in batch:
                valid &= batch["placed"]
            self.skipped_samples += int((~valid.any(1)).sum())
            batch["anchors"] = sample_anchors(valid, self.args.num_anchors, generator)
            total += self.weights.sum() * (batch["anchors"] >= 0).sum().to(device)
        # The ranks' gradients are averaged, hence the average weight.
        return batches, self.accelerator.reduce(total, "mean") if batches else None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one batch: the drafter's, and the length heads' on detached states."""
        if "anchors" not in inputs:
            valid = valid_anchors(inputs["response_mask"], self.block_size)
            inputs = {**inputs, "anchors": sample_anchors(valid, self.args.num_anchors)}
        weight_sum = float(self.weights.sum())
        if num_items_in_batch is None:
            num_items_in_batch = weight_sum * (inputs["anchors"] >= 0).sum()
        # Without any block the loss is 0, whatever divides it.
        normalizer = num_items_in_batch.float().masked_fill(num_items_in_batch == 0, weight_sum)
        output, matched, counted, drafted = self._draft(model, inputs, normalizer)
        loss = output.loss if self.args.train_only is None else torch.zeros_like(output.loss)
        blocks = normalizer / weight_sum
        accepted = accepted_lengths(matched)
        values = {"drafter_loss": output.loss.detach()}
        if drafted.length_ratio is not None:
            ratio = drafted.length_ratio.view(accepted.shape)
            ratio_loss = ratio_head_loss(ratio, accepted, counted.any(-1), self.block_size) / blocks
            values["ratio_loss"], loss = ratio_loss.detach(), loss + ratio_loss
        if drafted.survival_logits is not None:
            labels = matched.float()
            if self.args.temperature > 0 and output.acceptance is not None:
                labels = torch.zeros_like(labels).masked_scatter(counted, output.acceptance.clamp(0, 1))
            survival = survival_head_loss(
                drafted.survival_logits.view(labels.shape), labels, reach_probabilities(labels), counted
            )
            values["survival_loss"], loss = (survival / blocks).detach(), loss + survival / blocks
        if model.training:
            self.metrics_seen.add_blocks(matched, counted, values, output.outside)
        if not return_outputs:
            return loss
        outputs = {"matched": matched, "counted": counted}
        if self._rounds is not None:
            outputs["logits"] = drafted.survival_logits.view(counted.shape)
            for name in ("text_acceptance", "log_confidence"):
                zeros = torch.zeros(counted.shape, device=counted.device)
                outputs[name] = zeros.masked_scatter(counted, getattr(output, name).float())
        return loss, outputs

    def _draft(
        self, model: Any, inputs: dict[str, Any], normalizer: torch.Tensor
    ) -> tuple[DraftLossOutput, torch.Tensor, torch.Tensor, Any]:
        """Runs the drafter on the batch's blocks.

        Returns:
            The drafter's loss; `matched` and `counted`, both `[batch, anchors, block_size - 1]`; the model's output.
        """
        ids, anchors, response = inputs["input_ids"], inputs["anchors"], inputs["response_mask"]
        batch, length = ids.shape
        features = self._features(inputs)
        size, dtype = self.block_size, self.drafter.fc.weight.dtype
        if anchors.shape[1] == 0:
            # A block that counts nowhere: a zero loss that still touches all parameters keeps every rank in step.
            anchors = anchors.new_full((batch, 1), -1)
        anchor_ids = ids.gather(1, anchors.clamp(min=0))
        noise = noise_embeddings(self.target, self.drafter, anchor_ids, size).flatten(1, 2)
        output = model(
            noise_embeds=noise,
            context_hidden_states=features["taps"].to(dtype),
            attention_mask=block_visibility(anchors, size, inputs["attention_mask"]),
            position_ids=block_positions(anchors, size),
            context_position_ids=torch.arange(length, device=ids.device)[None].expand(batch, -1),
        )
        states = output.last_hidden_state.unflatten(1, (-1, size))[:, :, 1:]
        positions, counted = label_positions(anchors, size, response)
        # The state that predicts the token at position p is the target's at p - 1.
        rows = torch.arange(batch, device=ids.device)[:, None, None] * length + positions - 1
        index = rows[counted]
        targets = DraftTargets(
            token_ids=features["argmax"].flatten()[index],
            weights=self.weights.to(ids.device).expand(counted.shape)[counted],
            state_index=index,
            slots=torch.arange(size - 1, device=ids.device).expand(counted.shape)[counted],
        )
        if self._rounds is not None:
            targets.text_ids = ids.flatten()[index + 1]
        if self.mixture.alpha < 1 or self.args.temperature > 0 or self._rounds is not None:
            targets.states = features["states"].flatten(0, 1)
            targets.log_normalizers = features["log_normalizers"].flatten()
        result = drafter_loss(
            states[counted],
            DraftHead.shared(self.target, self.drafter),
            targets,
            normalizer,
            mixture=self.mixture,
            chunk_size=self.args.loss_chunk_size,
        )
        matched = torch.zeros_like(counted).masked_scatter(counted, result.matched)
        return result, matched, counted, output

    def _features(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What the target says about the batch, from the store or from the target itself."""
        if "taps" in inputs:
            features = {name: inputs[name] for name in _FEATURES}
        elif "slots" in inputs:
            features = self.on_policy.features(inputs["slots"], inputs["input_ids"].shape[1])
        else:
            layer_ids = self.drafter.config.target_layer_ids
            features = target_features(self.target, inputs["input_ids"], inputs["attention_mask"], layer_ids)
        finite = features["taps"].isfinite().flatten(1).all(1) & features["log_normalizers"].isfinite().all(1)
        if not finite.all():
            samples = [sample for sample, fine in zip(inputs["samples"], finite.tolist(), strict=True) if not fine]
            raise ValueError(
                f"The target's hidden states or logits hold NaN or infinity for samples {samples} of the dataset (in its "
                "order, dropped rows left out): check the target's dtype and these samples' text."
            )
        return features

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the slots' accuracy and the simulated acceptance length to the training logs."""
        if "loss" in logs:
            logs = {**logs, **self.metrics_seen.result()}
            if self.on_policy is not None:
                logs |= self.on_policy.seen
            if self.skipped_samples:
                logs["skipped_samples"] = self.skipped_samples
            self.metrics_seen = SlotMetrics(self.block_size - 1)
        super().log(logs, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Every response position opens a block; the rounds that decoding would make are walked over them."""
        inputs = self._prepare_inputs(inputs)
        response = inputs["response_mask"]
        # Decoding's first anchor is the response's first token; training may open a block at the prompt's last.
        valid = valid_anchors(response, self.block_size, partial=True) & response
        anchors = sample_anchors(valid, valid.shape[1])
        _, counted = label_positions(anchors, self.block_size, response)
        items = (self.weights.to(counted.device) * counted).sum()
        loss, pieces = torch.zeros((), device=counted.device), []
        with torch.no_grad(), self.compute_loss_context_manager():
            inputs = {**inputs, **self._features(inputs)}
            # As many blocks at a time as in training: the mask grows with their square.
            for piece in anchors.split(self.args.num_anchors, dim=1):
                part, seen = self.compute_loss(
                    model, {**inputs, "anchors": piece}, return_outputs=True, num_items_in_batch=items
                )
                loss = loss + part
                pieces.append({name: value[:, : piece.shape[1]] for name, value in seen.items()})
        seen = {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]} if pieces else {}
        if self._rounds is not None:
            self._add_survival_rounds(inputs["samples"], anchors, seen)
        if self._evaluated is not None:
            matched = seen["matched"]
            for row, (sample, domain) in enumerate(zip(inputs["samples"], inputs["domains"], strict=True)):
                rounds = simulated_acceptance(anchors[row], matched[row], counted[row])
                self._evaluated.add_rounds(sample, domain, *rounds)
        return loss, None, None

    def _add_survival_rounds(self, samples: list[int], anchors: torch.Tensor, seen: dict[str, torch.Tensor]) -> None:
        """Keeps the rounds that decoding each text in whole blocks would have made."""
        sampled = self.args.temperature > 0
        for row, sample in enumerate(samples):
            generator = torch.Generator().manual_seed(self.args.seed + sample)
            ratio = seen["text_acceptance"][row].cpu() if sampled else None
            counted = seen["counted"][row].cpu()
            accepted = simulated_acceptances(seen["matched"][row].cpu(), ratio, generator) & counted
            places = walked_rounds(anchors[row], accepted_lengths(accepted).tolist())
            self._rounds[sample] = SurvivalRounds(
                logits=seen["logits"][row].float().cpu()[places],
                accepted=accepted[places].long().cumprod(-1).bool(),
                counted=counted[places],
                log_confidence=seen["log_confidence"][row].float().cpu()[places],
            )

    def survival_rounds(self, dataset: Iterable[dict[str, Any]] | None = None) -> SurvivalRounds:
        """What the survival head says about the rounds of decoding held-out text, and what became of them.

        Args:
            dataset: Rows as for `eval_dataset`, which is the default. Their text must have been written at this trainer's
                `temperature`: greedily at 0, sampled from the target's own distribution at 1.

        Raises:
            ValueError: The drafter has no survival head, or the trainer's temperature is neither 0 nor 1.
        """
        if self.drafter.survival_head is None:
            raise ValueError(
                f"survival_rounds needs a drafter with a survival head, and this one has length_heads="
                f"{self.drafter.config.length_heads}."
            )
        if self.args.temperature not in (0.0, 1.0):
            raise ValueError(
                f"OPDConfig: temperature={self.args.temperature} is not valid here: acceptance of sampled text is known at "
                "temperature=1 (and of greedy text at 0)."
            )
        if dataset is not None and not isinstance(dataset, RolloutDataset):
            prompts = read_prompts(dataset, self.processing_class, self.args.max_length, written_answers=False)
            dataset = self._answered(prompts, self.args, "calibration")
        self._rounds = {}
        try:
            self.predict(self.eval_dataset if dataset is None else dataset)
            for rounds in gather_object([self._rounds]):
                self._rounds |= rounds
            return SurvivalRounds.concatenate([self._rounds[sample] for sample in sorted(self._rounds)])
        finally:
            self._rounds = None

    def calibrate(self, dataset: Iterable[dict[str, Any]] | None = None) -> dict[str, dict[str, float]]:
        """Fits the survival head's calibration on held-out text and writes it to the drafter's configuration.

        The entry is `"greedy"` for a trainer with `temperature=0` and `"sampling"` for one with `temperature=1`.

        Args:
            dataset: See [`survival_rounds`].

        Returns:
            `{"before", "after"}`: [`calibration.reliability`] on the text it was fitted on; use text held out from
            both to judge it.

        Raises:
            ValueError: See [`survival_rounds`]; or there are too few rounds.
        """
        rounds = self.survival_rounds(dataset)
        fit = fit_calibration(rounds)
        mode = "sampling" if self.args.temperature > 0 else "greedy"
        config = self.drafter.config
        config.survival_calibration = {**(config.survival_calibration or {}), mode: fit}
        return {"before": reliability(rounds, None), "after": reliability(rounds, fit)}

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Adds acceptance length, per slot and by domain, to what the loop reports."""
        self._evaluated = SlotMetrics(self.block_size - 1)
        training = self.model.training
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
            if self._rounds is not None or self.args.eval_acceptance == "text":
                for rounds in gather_object([self._evaluated.rounds]):
                    self._evaluated.rounds |= rounds
                found = self._evaluated.result()
            else:
                found = self._decoded_acceptance(dataloader.dataset.rollouts)
            prefix = kwargs.get("metric_key_prefix", "eval")
            output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        finally:
            self._evaluated = None
            self.model.train(training)
        return output

    def _decoded_acceptance(self, rollouts: list[Rollout]) -> dict[str, float]:
        found = measure_acceptance(
            self.target,
            self._decoding_drafter(),
            [(rollout.input_ids[: rollout.prompt_length], rollout.domain) for rollout in rollouts],
            max_new_tokens=self.args.max_new_tokens,
            batch_size=self.args.rollout_batch_size,
            temperature=self.args.temperature,
            seed=self.args.seed,
            part=(self.args.process_index, self.args.world_size),
        )
        every: dict[str, DraftStats] = {}
        for part in gather_object([found]):
            for domain, stats in part.items():
                every[domain] = every[domain].merge(stats) if domain in every else stats
        return acceptance_metrics(every)
