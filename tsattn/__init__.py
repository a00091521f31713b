"""tsattn: query-aware page selection for long-context decoding over a paged KV cache."""
