"""What a round costs: a monotone curve over the tokens of one verify, measured on the machine that decodes."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..linear_packing import is_packed
from ..modeling_adaflash import AdaFlashDraftModel

_KNOTS_APART = 1.5  # ratio: more knots would follow the noise, and lengths would be chosen by its dips
_VISITS = 3
_REFIT = 64  # most rounds between two fits; rounds between two visits of a length that is not in use
_NEAR = 1.25  # numbers of tokens up to this ratio apart tell of each other
_RECENT = 256  # rounds that are remembered
_meters: WeakKeyDictionary[AdaFlashDraftModel, WeakKeyDictionary[PreTrainedModel, CostMeter]] = WeakKeyDictionary()


@dataclass(frozen=True)
class VerifyCost:
    """Seconds of one round: `T(rows, N) = f(N) + per_row * rows` for the target, `draft_base + draft_per_row * rows` for
    the drafter.

    Args:
        tokens: Packed tokens N at the knots of f, increasing.
        seconds: f at the knots, never falling; linear between them, and past the last with the last slope.
        per_row: Seconds a row, whatever it sends.
        draft_base: Seconds of a draft.
        draft_per_row: More for each row.

    Raises:
        ValueError: A field is not as described; the message names it.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_row: float = 0.0
    draft_base: float = 0.0
    draft_per_row: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not value or not all(map(_is_time, value)):
                raise ValueError(
                    f"verify_cost[{name!r}]={value!r} is not valid: expected a list of numbers, 0 or more."
                )
            object.__setattr__(self, name, tuple(map(float, value)))
        if len(self.tokens) != len(self.seconds) or any(a >= b for a, b in zip(self.tokens, self.tokens[1:])):
            raise ValueError(
                f"verify_cost['tokens']={list(self.tokens)} is not valid: expected increasing numbers, as many as "
                f"verify_cost['seconds'] has ({len(self.seconds)})."
            )
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:])) or self.seconds[-1] <= 0:
            raise ValueError(
                f"verify_cost['seconds']={list(self.seconds)} is not valid: expected numbers that never fall and end above "
                "0, since more tokens do not cost less."
            )
        for name in ("per_row", "draft_base", "draft_per_row"):
            if not _is_time(getattr(self, name)):
                raise ValueError(
                    f"verify_cost[{name!r}]={getattr(self, name)!r} is not valid: expected 0 or more seconds."
                )

    def verify(self, rows: int, tokens: float) -> float:
        """Seconds of one target forward over `tokens` packed tokens of `rows` rows."""
        return self.verify_all(rows, torch.tensor([float(tokens)], dtype=torch.double)).item()

    def verify_all(self, rows: int, tokens: torch.Tensor) -> torch.Tensor:
        """`[candidates]` numbers of tokens -> `[candidates]` seconds, in float64."""
        knots = torch.tensor(self.tokens, dtype=torch.double)
        seconds = torch.tensor(self.seconds, dtype=torch.double)
        tokens = tokens.double()
        if len(knots) == 1:
            return torch.full_like(tokens, float(seconds[0])) + self.per_row * rows
        place = torch.searchsorted(knots, tokens).clamp(1, len(knots) - 1)
        slope = (seconds[place] - seconds[place - 1]) / (knots[place] - knots[place - 1])
        value = seconds[place - 1] + slope * (tokens - knots[place - 1])
        return value.clamp(min=0.0) + self.per_row * rows

    def draft(self, rows: int) -> float:
        """Seconds of one draft for `rows` rows."""
        return self.draft_base + self.draft_per_row * rows

    def to_dict(self) -> dict[str, Any]:
        """As it is saved in `drafter.generation_config.verify_cost`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: Any) -> VerifyCost:
        """Reads what [`to_dict`] wrote.

        Raises:
            ValueError: Not a dictionary of this class's fields.
        """
        if isinstance(saved, VerifyCost):
            return saved
        names = set(cls.__dataclass_fields__)
        if not isinstance(saved, dict) or not {"tokens", "seconds"} <= set(saved) <= names:
            found = sorted(saved) if isinstance(saved, dict) else saved
            raise ValueError(
                f"verify_cost={found!r} is not valid: expected a dictionary with 'tokens' and 'seconds' and optionally "
                f"{sorted(names - {'tokens', 'seconds'})}, as measure_verify_cost() returns it, or None."
            )
        return cls(**saved)

    @classmethod
    def fit(cls, verified: Iterable[tuple[int, int, float]], drafted: Iterable[tuple[int, float]] = ()) -> VerifyCost:
        """Least squares in relative error with every slope at least 0; each `(rows, tokens)` counts by its median, more
        the more often it was seen (up to nine times).

        Args:
            verified: `(rows, tokens, seconds)` of target forwards.
            drafted: `(rows, seconds)` of drafts.

        Raises:
            ValueError: `verified` is empty.
        """
        cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rows, tokens, seconds in verified:
            cells[rows, tokens].append(seconds)
        if not cells:
            raise ValueError("verified=[] is not valid: a cost curve needs at least one timing.")
        seen = sorted({tokens for _, tokens in cells})
        knots = seen[:1]
        for tokens in seen[1:]:
            if tokens >= _KNOTS_APART * knots[-1] or tokens == seen[-1]:
                knots.append(tokens)
        # Rows that hardly differ cannot be told from the constant.
        several = max(rows for rows, _ in cells) >= 2 * min(rows for rows, _ in cells)
        features, times, weights = [], [], []
        for (rows, tokens), seconds in cells.items():
            pieces = [min(max(tokens - a, 0.0), b - a) for a, b in pairwise(knots)]
            features.append([1.0, float(rows) * several, *pieces])
            times.append(median(seconds))
            weights.append(min(len(seconds), 9) ** 0.5)
        solution = _non_negative(features, times, weights)
        heights = [solution[0]]
        for slope, first, last in zip(solution[2:], knots, knots[1:]):
            heights.append(heights[-1] + slope * (last - first))
        draft_cells: dict[int, list[float]] = defaultdict(list)
        for rows, seconds in drafted:
            draft_cells[rows].append(seconds)
        draft = [0.0, 0.0]
        if draft_cells:
            draft = _non_negative(
                [[1.0, float(rows)] for rows in draft_cells],
                [median(found) for found in draft_cells.values()],
                [min(len(found), 9) ** 0.5 for found in draft_cells.values()],
            )
        if heights[-1] <= 0:  # everything was put down to the rows
            heights = [1e-9 + height for height in heights]
        return cls(tuple(knots), tuple(heights), solution[1], *draft)


def rows_class(rows: int) -> int:
    """Numbers of rows up to the same power of two share what is known of them."""
    return max(rows - 1, 0).bit_length()


def _near(tokens: int, known: int) -> bool:
    return known <= _NEAR * tokens and tokens <= _NEAR * known


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _non_negative(features: list[list[float]], times: list[float], weights: list[float]) -> list[float]:
    """Non-negative least squares of weighted relative errors, by coordinate descent on the normal equations."""
    matrix, wanted = torch.tensor(features, dtype=torch.double), torch.tensor(times, dtype=torch.double)
    weight = torch.tensor(weights, dtype=torch.double)
    matrix = matrix * (weight / wanted)[:, None]
    scale = matrix.norm(dim=0).clamp(min=1e-30)
    matrix = matrix / scale
    # A trace of ridge decides between solutions that fit alike.
    gram = (matrix.T @ matrix + 1e-8 * torch.eye(len(scale), dtype=torch.double)).tolist()
    moment = (matrix * weight[:, None]).sum(0).tolist()
    solution = [0.0] * len(moment)
    for _ in range(20_000):
        moved = 0.0
        for place, row in enumerate(gram):
            slack = moment[place] - sum(a * b for a, b in zip(row, solution))
            value = max(0.0, solution[place] + slack / row[place])
            moved = max(moved, abs(value - solution[place]))
            solution[place] = value
        if moved < 1e-9:
            break
    return [value / float(size) for value, size in zip(solution, scale)]


class CostMeter:
    """Collects timings of one drafter with one target, and says what has to be tried next.

    For each power of two of rows it asks for a short sweep in random order over how many tokens a row drafts, less what
    the sweeps of other rows have covered, and fits one curve to all of them and to the latest other rounds. Now and then
    it asks for one more round of a length that may have become cheap. Rounds of a sweep are ordinary rounds with a given
    draft length: nothing is computed for the timing's sake alone, and nothing waits for the device that would not wait
    anyway.
    """

    def __init__(self, state: Any = None) -> None:
        self.state = state
        self.verified: list[tuple[int, int, float]] = []
        self.drafted: list[tuple[int, float]] = []
        self.pauses: dict[int, Any] = {}  # kept here from call to call by the planner
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_RECENT)
        self._recent_drafts: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._observed, self._next_fit = 0, 4
        self._random = random.Random(0)
        self._sweeps: dict[int, list[int]] = {}
        self._lengths: dict[int, list[int]] = {}
        self._cost: VerifyCost | None = None

    def next_length(self, rows: int, cap: int) -> int | None:
        """Draft length that the sweep wants for the next round; `None` where these rows are measured."""
        bucket = rows_class(rows)
        if bucket not in self._sweeps:
            lengths = sorted({0, cap, *(1 << power for power in range(cap.bit_length()))})
            # The first sweep fixes the shape of the curve, and the first rounds of a process are slow.
            visits = _VISITS if not self._sweeps else _VISITS - 1
            known = [tokens for _, tokens, _ in self.verified]
            wanted = [n for n in lengths if n == 0 or not any(_near(rows * (1 + n), tokens) for tokens in known)]
            sweep = [length for _ in range(visits) for length in self._random.sample(wanted, len(wanted))]
            self._sweeps[bucket], self._lengths[bucket] = sweep, lengths
        sweep = self._sweeps[bucket]
        return sweep[-1] if sweep else None

    def add(self, rows: int, tokens: int, verify_seconds: float, draft_seconds: float | None) -> None:
        """Adds a round of the sweep."""
        sweep = self._sweeps.get(rows_class(rows))
        if sweep:
            sweep.pop()
        self.verified.append((rows, tokens, verify_seconds))
        if draft_seconds is not None:
            self.drafted.append((rows, draft_seconds))
        self._cost = None

    def observe(self, rows: int, tokens: int, verify_seconds: float, draft_seconds: float | None) -> None:
        """Adds any other round."""
        self._recent.append((rows, tokens, verify_seconds))
        if draft_seconds is not None:
            self._recent_drafts.append((rows, draft_seconds))
        self._observed += 1
        if self._observed == self._next_fit:  # often at first, when there is most to learn
            self._cost = None
            self._next_fit += min(_REFIT, self._observed)
        if self._observed % _REFIT == 0:
            tried = self._lengths.get(rows_class(rows), [])
            # Not one whose visit would cost more than it can teach.
            limit = 1.5 * self.cost.verify(rows, rows)
            cheap = [length for length in tried if self.cost.verify(rows, rows * (1 + length)) <= limit]
            if cheap:
                self._sweeps[rows_class(rows)].append(self._random.choice(cheap))

    @property
    def cost(self) -> VerifyCost:
        """The curve fitted to the sweeps and the latest rounds."""
        if self._cost is None:
            self._cost = VerifyCost.fit([*self.verified, *self._recent], [*self.drafted, *self._recent_drafts])
        return self._cost

    @classmethod
    def shared(cls, target: PreTrainedModel, drafter: AdaFlashDraftModel) -> CostMeter:
        """The meter of this pair; a new one when the target has moved, changed dtype or had its layers packed."""
        found = _meters.setdefault(drafter, WeakKeyDictionary()).get(target)
        return found if found is not None and found.state == _state(target) else cls.fresh(target, drafter)

    @classmethod
    def fresh(cls, target: PreTrainedModel, drafter: AdaFlashDraftModel) -> CostMeter:
        """Forgets what was measured for this pair."""
        meter = cls(_state(target))
        _meters.setdefault(drafter, WeakKeyDictionary())[target] = meter
        return meter


def _state(target: PreTrainedModel) -> tuple[Any, ...]:
    head = target.get_output_embeddings()
    return str(head.weight.device), head.weight.dtype, is_packed(head)
