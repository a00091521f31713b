"""The examples in docstrings and in the README do what they show."""

import doctest
import re
from pathlib import Path

import pytest
import torch

import tsattn
from tests.evaluation.tiny import save_tiny_model

README = Path(__file__).resolve().parents[2] / "README.md"


NAMES = ("SparseConfig", "PagedKVCache", "sparse_decode", "sparse_attn_with_kvcache", "hf.sparse")


def documented(name):
    """One of the functions and classes that users meet first."""
    from tsattn.integrations import hf

    return hf.sparse if name == "hf.sparse" else getattr(tsattn, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_main_public_functions_have_examples_that_run(name):
    torch.manual_seed(0)
    (test,) = doctest.DocTestFinder(recurse=False).find(documented(name), name)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["Parameters", "Raises", "Examples"])
def test_the_main_public_functions_say_what_they_take_and_raise(name, section):
    assert re.search(rf"^ +{section}\n +-+$", documented(name).__doc__, re.MULTILINE)


def test_the_snippets_of_the_readme_run(tmp_path, capsys):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 3
    text = tmp_path / "long.txt"
    text.write_text("It was late. " * 20, encoding="utf-8")
    own = {
        "path/to/a/model": str(save_tiny_model(tmp_path / "model")),
        "long.txt": str(text),
        "max_new_tokens=100": "max_new_tokens=5",
    }
    for number, snippet in enumerate(snippets):
        for shown, here in own.items():
            assert (shown in snippet) == (number == 2)
            snippet = snippet.replace(shown, here)
        exec(compile(snippet, f"README, snippet {number + 1}", "exec"), {})
    printed = capsys.readouterr().out
    assert "torch.Size([2, 32, 128])" in printed
    assert "It was late" not in printed.splitlines()[-1]  # the answer, not the prompt
