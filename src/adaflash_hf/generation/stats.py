"""What happened in one call of `generate()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class DraftStats:
    """Counts over all rows of one call; a round of four rows counts as four.

    Args:
        policy: Length policy in force.
        survival: What the `"throughput"` policy took as survival: `"head"` (the survival head), `"head (calibrated)"`,
            or `"confidence"` (prefix product of the largest draft probabilities); `None` for other policies.
        rounds: Target forwards after prefill.
        rounds_with_draft: Of which with at least one drafted token.
        planned: Tokens the policy wanted verified.
        drafted: Tokens that were verified (after caps and the end of the text).
        accepted: Drafted tokens that became part of the output.
        emitted: Tokens committed in rounds (prefill's own token is not counted).
        paused: Rounds that the `"throughput"` policy made plain decoding steps because drafts did not pay.
        measured: Rounds of its sweep over draft lengths, by which it measures what verifying costs.
        slot_reached: For each slot, rounds that verified it after accepting all before it.
        slot_accepted: Of which it was accepted.
        anchors: For each row of the batch, where its rounds opened their blocks: positions counted from its first token.
    """

    policy: str
    rounds: int = 0
    rounds_with_draft: int = 0
    planned: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    paused: int = 0
    measured: int = 0
    survival: str | None = None
    slot_reached: list[int] = field(default_factory=list)
    slot_accepted: list[int] = field(default_factory=list)
    anchors: list[list[int]] = field(default_factory=list)

    def add_round(self, planned: int, drafted: int, accepted: int, emitted: int) -> None:
        """Adds one row's round; `accepted` is what verification accepted, `emitted` what reached the output."""
        self.rounds += 1
        self.rounds_with_draft += drafted > 0
        self.planned += planned
        self.drafted += drafted
        self.accepted += min(accepted, emitted)
        self.emitted += emitted
        while len(self.slot_reached) < drafted:
            self.slot_reached.append(0)
            self.slot_accepted.append(0)
        # An output cut short (EOS, a stop string) says nothing about the slots after the cut.
        for slot in range(min(drafted, accepted + 1, max(emitted, 1))):
            self.slot_reached[slot] += 1
            self.slot_accepted[slot] += slot < accepted

    def merge(self, other: DraftStats) -> DraftStats:
        """Adds the counts of other rows of the same call, and returns itself."""
        for name in ("rounds", "rounds_with_draft", "planned", "drafted", "accepted", "emitted", "paused", "measured"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slot_reached, self.slot_accepted = (
            [sum(pair) for pair in zip_longest(mine, theirs, fillvalue=0)]
            for mine, theirs in (
                (self.slot_reached, other.slot_reached),
                (self.slot_accepted, other.slot_accepted),
            )
        )
        self.anchors = self.anchors + other.anchors
        return self

    @property
    def rounds_without_draft(self) -> int:
        """Rounds that were plain decoding steps."""
        return self.rounds - self.rounds_with_draft

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a target forward after prefill."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_draft_length(self) -> float:
        """Mean drafted tokens a round."""
        return self.drafted / self.rounds if self.rounds else 0.0

    @property
    def slot_acceptance(self) -> list[float]:
        """For each slot, the share accepted of the rounds that reached it."""
        return [
            accepted / reached if reached else 0.0
            for accepted, reached in zip(self.slot_accepted, self.slot_reached, strict=True)
        ]
