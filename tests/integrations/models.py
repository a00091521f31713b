"""Tiny random models of the architectures that the Transformers integration is tested with."""

import copy
import inspect
from functools import cache as once

import torch
import transformers as tf

VOCAB = 97
PAD = 0
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
TOKENS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}
HYBRID = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def _llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **TOKENS))


def _qwen3():
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2}, **TOKENS))


def _gemma3():
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZES | HYBRID | {"num_key_value_heads": 1}, **TOKENS))


def _gemma2():
    config = SIZES | HYBRID | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**config, **TOKENS))


def _gpt_oss():
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES | HYBRID, num_local_experts=2, num_experts_per_tok=1, **TOKENS))
    model.set_experts_implementation("eager")  # the grouped one has no fp64
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    return model


def _gpt2():
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3, **TOKENS)
    )


def _opt():
    return tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            init_std=0.3,
            **TOKENS,
        )
    )


BUILDERS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
}
NAMES = tuple(BUILDERS)
SDPA = ("llama", "qwen3", "gemma3", "gpt2", "opt")
"""Architectures whose baseline is `sdpa`; the others have softcap or sinks, which only `eager` computes."""


@once
def _built(name):
    torch.manual_seed(1234)
    model = BUILDERS[name]().eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def build(name):
    """A fresh copy, with the architecture's exact attention as its implementation."""
    model = copy.deepcopy(_built(name))
    model.set_attn_implementation("sdpa" if name in SDPA else "eager")
    return model


def prompts(lengths, seed=0):
    """Left-padded token ids [B, max] and their attention mask."""
    rng = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, VOCAB, (length,), generator=rng)
    return ids, (ids != PAD).long()


def given(name, mask, new=None):
    """The mask and positions of the last ``new`` tokens, as arguments of forward."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    own_positions = name == "opt"
    return {"attention_mask": mask} | ({} if own_positions else {"position_ids": positions[:, -(new or mask.shape[1]) :]})


CACHE = "cache" if "cache" in inspect.signature(tf.LlamaForCausalLM.forward).parameters else "past_key_values"
"""How this version of Transformers calls the cache."""
