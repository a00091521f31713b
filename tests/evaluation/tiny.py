"""A tiny random model with a tokenizer, saved as a directory that the demo can read."""

import json
import string

import torch

from tests.integrations.models import SIZES, TOKENS, build

PIECES = ["<pad>", "<bos>", "<eos>", "<unk>", *string.digits, *string.ascii_letters, " ", "\n", *".,:;!?'\"-()"]


def tiny_tokenizer(*, bos="<bos>", added=False):
    """A character-level tokenizer (97 entries at most); maybe without a token that begins texts, or one that adds it itself."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))  # no merges: one token per character
    tokenizer.decoder = decoders.Fuse()
    if added:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def save_tiny_model(folder, name="gemma3"):
    """Its tokenizer and a random model."""
    tiny_tokenizer().save_pretrained(folder)
    build(name).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] >= len(PIECES)
    return folder


GGUF_FAMILIES = ("qwen2", "llama", "gpt2")


def _gguf_model(family):
    import transformers as tf

    if family == "gpt2":  # Transformers takes any such file for one of 1,024 positions, its default
        return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=64, n_layer=2, n_head=4, **TOKENS))
    if family == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **TOKENS))
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **TOKENS))


def _stored(name, tensor, family, config):
    """A tensor as a GGUF file of its family holds it."""
    if family == "gpt2" and tensor.ndim == 2 and ".h." in name:
        return tensor.T.contiguous()  # Conv1D has its weights the other way round
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if family == "llama" and heads is not None:  # The halves that rotate together lie side by side.
        heads = getattr(config, heads)
        return tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensor


def save_tiny_gguf(path, family="qwen2", without=None):
    """A random model with the same tokenizer as a GGUF file, maybe without one tensor; the model."""
    import gguf

    torch.manual_seed(99)
    model = _gguf_model(family).eval().requires_grad_(False)
    config, writer = model.config, gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = [{" ": "\u0120", "\n": "\u010a"}.get(piece, piece) for piece in PIECES]
    words += ["qx", *(f"<{i}>" for i in range(config.vocab_size - len(words) - 1))]  # a merge needs a word
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["q x"])
    writer.add_bos_token_id(PIECES.index("<bos>"))
    writer.add_eos_token_id(PIECES.index("<eos>"))
    writer.add_unk_token_id(PIECES.index("<unk>"))
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family), config.num_hidden_layers)
    tied = {"lm_head.weight"} if family == "gpt2" else set()
    for name, tensor in model.state_dict().items():
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name not in tied and there != without:
            writer.add_tensor(there, _stored(name, tensor, family, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
