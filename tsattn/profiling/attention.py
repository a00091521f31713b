"""What dense attention would have done with a step's queries: how much of it lies on what was read, and how spread it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tsattn.quantisation import dequantise


@dataclass(frozen=True)
class Attention:
    """Means over rows and query heads.

    Attributes
    ----------
    mass : Tensor
        Share of dense attention's weight on the tokens that were read.
    entropy : Tensor
        Of dense attention, in nats.
    """

    mass: Tensor
    entropy: Tensor


def observed(found: dict[str, Tensor | None], options: dict[str, Any]) -> Attention:
    """Read all keys of the rows of a call of "attend" or "decode", which costs what dense attention costs."""
    q, k_cache, table, lengths = (found[name] for name in ("q", "k_cache", "page_table", "seq_lens"))
    assert q is not None and k_cache is not None and table is not None and lengths is not None
    ids, counts = found.get("page_ids"), found.get("page_counts")
    page_size, heads = k_cache.shape[1], k_cache.shape[2]
    masses, entropies = [], []
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = -(-length // page_size)
        store = k_cache.view(torch.uint8) if k_cache.dtype == torch.float8_e4m3fn else k_cache
        tokens = store[table[row, :pages].long()].view(k_cache.dtype).flatten(0, 1)[:length]  # [L, HKV, D]
        scale = options.get("k_scale")
        keys = tokens.float() if scale is None and k_cache.dtype.is_floating_point else dequantise(tokens, scale)
        group = q[row].float().view(heads, -1, q.shape[2])  # [HKV, G, D]
        logits = group @ keys.permute(1, 2, 0) * options["softmax_scale"]
        if options.get("softcap"):
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        weights = torch.softmax(logits, -1)  # [HKV, G, L]
        entropies.append(-torch.special.xlogy(weights, weights).sum(-1).mean())
        if ids is None or counts is None:
            masses.append(torch.ones((), device=q.device))
            continue
        picked = torch.zeros((ids.shape[1], pages + 1), dtype=torch.bool, device=q.device)
        place = torch.arange(ids.shape[2], device=q.device) < counts[row][:, None]
        picked.scatter_(1, torch.where(place, ids[row].long(), pages), True)
        read = picked[:, :pages].repeat_interleave(page_size, 1)[:, :length]  # [lists, L]
        by_list = weights.reshape(ids.shape[1], -1, length)
        masses.append((by_list * read[:, None]).sum(-1).mean())
    nothing = torch.zeros(1, device=q.device)
    return Attention(*(torch.stack(values).mean() if values else nothing.mean() for values in (masses, entropies)))
