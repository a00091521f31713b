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


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_tiny_gguf(path, without=None):
    """A random Qwen2 model with the same tokenizer as a GGUF file, maybe without one tensor; the model."""
    import gguf
    import transformers as tf

    torch.manual_seed(99)
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **TOKENS)).eval().requires_grad_(False)
    config, writer = model.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
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
    for name, tensor in model.state_dict().items():
        part, _, what = name.rpartition(".")
        if part in _GGUF_NAMES:
            there = _GGUF_NAMES[part]
        else:
            _, _, layer, part = part.split(".", 3)
            there = f"blk.{layer}.{_GGUF_NAMES[part]}"
        if f"{there}.{what}" != without:
            writer.add_tensor(f"{there}.{what}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
