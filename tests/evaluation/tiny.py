"""A tiny random model with a tokenizer, saved as a directory that the demo can read."""

import json
import string

from tests.integrations.models import build

PIECES = ["<pad>", "<bos>", "<eos>", "<unk>", *string.digits, *string.ascii_letters, " ", "\n", *".,:;!?'\"-()"]


def save_tiny_model(folder, name="gemma3"):
    """A character-level tokenizer (97 entries at most) and a random model."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))  # no merges: one token per character
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    build(name).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] >= len(PIECES)
    return folder
