import json

import pytest

from adaflash_hf.cli import build_parser, main


def test_help_names_the_commands_and_imports_nothing_heavy(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_a_missing_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_counts_must_be_positive(value, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--max-new-tokens", value])
    assert f"'{value}' is not a number of 1 or more" in capsys.readouterr().err


def test_arguments_reach_the_demo(monkeypatch):
    import adaflash_hf.demo.run as run

    seen = {}
    monkeypatch.setattr(run, "run_demo", lambda **arguments: seen.update(arguments))
    arguments = ["demo", "--drafter", "d", "--max-new-tokens", "7", "--prompts", "2", "--stream", "none"]
    assert main([*arguments, "--threads", "1", "--json", "f", "--cache-dir", "c"]) == 0
    assert seen == {
        "drafter": "d",
        "cache_dir": "c",
        "max_new_tokens": 7,
        "prompts_per_domain": 2,
        "stream": "none",
        "threads": 1,
        "json_file": "f",
    }


def test_errors_are_one_line_without_a_traceback(monkeypatch, capsys):
    import adaflash_hf.demo.run as run

    def fail(**arguments):
        raise ValueError("the drafter does not fit")

    monkeypatch.setattr(run, "run_demo", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "adaflash demo: the drafter does not fit\n"


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    import adaflash_hf.demo.run as run

    def interrupt(**arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_defaults_keep_the_demo_short():
    args = build_parser().parse_args(["demo"])
    assert (args.max_new_tokens, args.prompts, args.stream) == (128, 4, "first")
    assert json.dumps(vars(args))
