"""The forward kernel in Triton: one pass over the keys of a block of queries, with a running softmax."""

import triton
import triton.language as tl

from coneheads.backends.triton import memory, scores, tiles


@triton.jit
def forward(
    Q, K, V, Q_SQ, K_SQ, Q_LEVEL, K_LEVEL, Q_AUX, K_AUX, Q_PARTS, K_PARTS, Q_SIDES, K_SIDES, CONSTANTS, MASK, SEED,
    K_MARK, OUT, TOP, TOTAL,
    mask_batch, mask_head, mask_row, mask_column, heads, group, length, keys, positions, coordinates, values, dropout_p,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, ONES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    WIDEN: tl.constexpr, LENGTH_CLASS: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT [B, H, L, Ev]; TOP and TOTAL [B, H, L]: the largest score in base 2, and the sum of 2^(score - largest).

    K_MARK [B, Hkv, S]: NaN for a bad key, else 0; with SCALED the level of a bad key is NaN instead. Umbral cones in
    float32 have q_aux 0, and 1 from the first near key on that a row attends to (see `umbral_relative` in scores.py);
    the sum of such a row is written with a minus.
    """
    RELATIVE: tl.constexpr = SCORE == scores.UMBRAL and not SUMS
    SEEN: tl.constexpr = SCALED and MASKED == "none" and not CAUSAL  # no pair is masked out
    blocks = tl.cdiv(length, BM)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_row = tl.program_id(0) % blocks * BM
    rows = first_row + tl.arange(0, BM)
    kv_head = head // group
    Q = memory.of_head(Q, head, length, positions, DP, SUMS)
    K = memory.of_head(K, kv_head, keys, positions, DP, SUMS)
    V = memory.of_head(V, kv_head, keys, values, DV, SUMS)
    MASK += head // heads * mask_batch + head % heads * mask_head
    a, b, c, factor = memory.constants(CONSTANTS, head, SCALED)

    q = memory.load_rows(Q, first_row, length, positions, BM, DP, coordinates)
    q_sq = memory.load_numbers(Q_SQ + head * length, rows, length)
    q_level = memory.load_levels(Q_LEVEL + head * length, rows, length, SCORE)
    q_aux = memory.load_levels(Q_AUX + head * length, rows, length, SCORE)
    q_sides = memory.load_sides(Q_SIDES, head, first_row, length, SCORE, SUMS, False, BM)

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, DV], tl.float32)
    # With CAUSAL, tiles that are masked whole are skipped.
    end = tl.minimum(keys, first_row + BM) if CAUSAL else keys
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        k = memory.load_rows(K, start, keys, positions, BN, DP, SUMS=SUMS)
        k_sq = memory.load_numbers(K_SQ + kv_head * keys, columns, keys)
        k_level = memory.load_levels(K_LEVEL + kv_head * keys, columns, keys, SCORE)
        k_aux = memory.load_levels(K_AUX + kv_head * keys, columns, keys, SCORE)
        k_sides = memory.load_parts(K_PARTS, kv_head, start, keys, SUMS, True, BN)
        m, excess, any_near = tiles.measure(
            q, tl.trans(k), q_sq, k_sq, q_sides, k_sides, Q, K, first_row, start, length, keys, positions, coordinates,
            SCORE, MEASURE, ROUND, WIDEN, BM, BN,
        )  # fmt: skip
        terms = tiles.terms_of(
            m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides, SCORE, True, SUMS, WIDEN, SLOPES=False
        )
        if RELATIVE:
            if any_near:  # what was found of rows that become close here is made one of their scores
                close = tiles.rows_with_near_keys(
                    m, q_sq, q_aux, MASK, mask_row, mask_column, rows, columns, length, keys, MASKED, CAUSAL
                )
                top = tl.where(close > q_aux, top - tl.sqrt(q_sq) * factor, top)
                q_aux = close
        s = tiles.scores_of(
            m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
            MASK, mask_row, mask_column, rows, columns, length, keys, SCORE, SUMS, SCALED, MASKED, CAUSAL,
            SLOPES=False, mark=None if SCALED else memory.load_numbers(K_MARK + kv_head * keys, columns, keys),
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        base = higher
        if not SEEN:  # a row that is masked so far has -inf here; 0 in its place keeps its exponentials 0
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        if DROPOUT:
            weights *= tiles.kept(tl.load(SEED), head * length + rows, columns, dropout_p)
        v = memory.load_rows(V, start, keys, values, BN, DV, SUMS=SUMS)
        out = out * shrink[:, None] + tiles.product(weights.to(v.dtype), v, PRECISION, WIDEN)
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    memory.store_rows(OUT + head * length * values, out, first_row, length, values, BM, DV)
    tl.store(TOP + head * length + rows, top, mask=rows < length)
    if RELATIVE:
        total = tl.where(q_aux > 0, -total, total)
    tl.store(TOTAL + head * length + rows, total, mask=rows < length)
