"""The operations in float64 numpy, written for plainness: what every backend is measured against."""

import numpy as np


def block_score(queries, keys, cu_seqlens, num_blocks, block_size, scale, normalise=True):
    """Mass and peak per block, and the log-sum-exp of every row, float64."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    batch, window, heads, _ = queries.shape
    group = heads // keys.shape[1]
    mass, peak = np.zeros((batch, num_blocks)), np.zeros((batch, num_blocks))
    log_sum_exp = np.zeros((batch, window, heads))
    for r in range(batch):
        first, last = int(cu_seqlens[r]), int(cu_seqlens[r + 1])
        length = last - first
        valid = min(window, length)
        if valid == 0:
            continue
        ends = length - valid + np.arange(valid)  # each row sees the keys up to its own
        visible = np.arange(length)[None, :] <= ends[:, None]
        for h in range(heads):
            s = scale * (queries[r, window - valid :, h] @ keys[first:last, h // group].T)
            s = np.where(visible, s, -np.inf)
            top = s.max(1, keepdims=True)
            weights = np.exp(s - top)
            total = weights.sum(1, keepdims=True)
            log_sum_exp[r, window - valid :, h] = (top + np.log(total))[:, 0]
            blocks = np.add.reduceat(weights / total, np.arange(0, length, block_size), axis=1)
            mass[r, : blocks.shape[1]] += blocks.sum(0)
            peak[r, : blocks.shape[1]] = np.maximum(peak[r, : blocks.shape[1]], blocks.max(0))
        if normalise:
            mass[r] /= valid * heads
    return mass, peak, log_sum_exp


def top_p_select(scores, cu_seqlens, top_p, num_rows, block_size, sink, window, cut, over):
    """Kept rows (list), kept lengths, kept blocks, normalised scores and margin, float64."""
    batch, num_blocks = scores.shape
    top_p = np.broadcast_to(np.asarray(top_p, np.float64), batch)
    rows_out, lengths_out = [], []
    kept_blocks = np.zeros(scores.shape, bool)
    normalised = np.zeros(scores.shape)
    margins = np.full(batch, np.inf)
    for r in range(batch):
        first, length = int(cu_seqlens[r]), int(cu_seqlens[r + 1] - cu_seqlens[r])
        count = -(-length // block_size)
        forced = np.array([i < sink or i >= length - window for i in range(length)], bool)
        blocks = [np.arange(b * block_size, min((b + 1) * block_size, length)) for b in range(count)]
        values = np.asarray(scores[r, :count], np.float64)
        if count and values.sum() > 0:
            normalised[r, :count] = values / values.sum()
        part = [b for b in range(count) if over == "all" or not forced[blocks[b]].all()]
        total = sum(values[b] for b in part)
        before = 0.0
        for rank, b in enumerate(sorted(part, key=lambda b: (-values[b], -b))):
            share = values[b] / total if total > 0 else 0.0
            deciding = before if cut == "crossing" else before + share
            keep = deciding <= top_p[r] or top_p[r] >= 1 or (cut == "below" and rank == 0)
            kept_blocks[r, b] = keep
            margins[r] = min(margins[r], abs(deciding - top_p[r]))
            before += share
        stays = forced.copy()
        for b in range(count):
            if forced[blocks[b]].all():
                kept_blocks[r, b] = True
            if kept_blocks[r, b]:
                stays[blocks[b]] = True
        rows_out += [first + int(i) for i in np.flatnonzero(stays)]
        lengths_out.append(int(stays.sum()))
    return rows_out, lengths_out, kept_blocks, normalised, margins


def gated_delta_rule(queries, keys, values, log_decay, strength, cu_seqlens, initial_state, normalise=True):
    """Outputs of every row (zero in padding) and final states, float64, one row after another."""
    queries, keys, values = (np.asarray(array, np.float64) for array in (queries, keys, values))
    key_dim, group = queries.shape[-1], values.shape[1] // keys.shape[1]
    if normalise:
        queries, keys = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (queries, keys))
        queries = queries * key_dim**-0.5
    queries, keys = (np.repeat(x, group, axis=1) for x in (queries, keys))
    outputs = np.zeros(values.shape)
    states = np.zeros((len(cu_seqlens) - 1, values.shape[1], key_dim, values.shape[2]))
    if initial_state is not None:
        states += initial_state
    for request, state in enumerate(states):
        for row in range(cu_seqlens[request], cu_seqlens[request + 1]):
            state *= np.exp(np.asarray(log_decay[row], np.float64))[:, None, None]
            error = values[row] - np.einsum("hkv,hk->hv", state, keys[row])
            state += np.einsum("hk,hv,h->hkv", keys[row], error, np.asarray(strength[row], np.float64))
            outputs[row] = np.einsum("hkv,hk->hv", state, queries[row])
    return outputs, states


def paged_attention(queries, key_pages, value_pages, page_table, lengths, first_visible, scale):
    """Attention of one query per request over the rows [first_visible, length) of its pages, float64."""
    outputs = np.zeros(queries.shape)
    kv_heads, page = key_pages.shape[1:3]
    for r in range(len(queries)):
        rows = np.arange(max(first_visible[r], 0), lengths[r])
        if not len(rows):
            continue
        # [KV, rows, d]
        keys, values = (
            np.asarray(pages[page_table[r, rows // page], :, rows % page], np.float64).swapaxes(0, 1)
            for pages in (key_pages, value_pages)
        )
        grouped = np.asarray(queries[r], np.float64).reshape(kv_heads, -1, queries.shape[2])
        scores = scale * grouped @ keys.swapaxes(1, 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs[r] = (weights / weights.sum(-1, keepdims=True) @ values).reshape(outputs[r].shape)
    return outputs
