import runpy
from pathlib import Path

from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_quickstart_with_named_models(tmp_path, capsys):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    text = main([*arguments, "--prompt", "w9 w10", "--max-new-tokens", "8"])
    printed = capsys.readouterr().out
    assert text in printed
    assert "a forward of the target" in printed
