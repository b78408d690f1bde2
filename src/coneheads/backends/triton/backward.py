"""The backward kernels in Triton: sums over rows; gradients of the queries, of keys and values, and of a float mask.

Each program owns what it writes, so nothing is added by two of them and the order of all sums is fixed. Every kernel
computes the scores of its tiles again, and from them

    P = 2^(S - lse),  dP = dO V^T,  dS = P (dP + shift),  shift = dlse - rowsum(P dP) = dlse - rowsum(dO O).

Through a squared distance, a pair gives w (q - k) to its query and w (k - q) to its key, w = 2 dS d score / d D^2. Both
are products, q sum(w) - sum(w k), except for near pairs, which would cancel in them: these are added one by one.
"""

import triton
import triton.language as tl

from coneheads.backends.triton import functions, memory, scores, tiles


@triton.jit
def weights_of(s, lse, rest, RESTS: tl.constexpr):
    """The weights of a tile. The log-sum-exp, in base 2, comes as it is rounded and, with RESTS, what is left: scores
    can be large and near to it. Scores may be so large that what rounding puts them above it would overflow: no weight
    is above 1.
    """
    below = s - lse[:, None]
    if RESTS:
        below = below - rest[:, None]
    return tl.exp2(tl.minimum(below, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def weights_and_gradients(
    s, lse, rest, shift, grad_weights, seed, row_numbers, columns, dropout_p,
    DROPOUT: tl.constexpr, RESTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The weights of a tile after dropout, and the gradients of its scores.

    EXACT: the shift was made of these very numbers by `backward_rows`, and must cancel them.
    """
    weights = weights_of(s, lse, rest, RESTS)
    kept_weights = weights
    if DROPOUT:
        kept = tiles.kept(seed, row_numbers, columns, dropout_p)
        kept_weights = weights * kept
        grad_weights = grad_weights * kept
    if EXACT:
        return kept_weights, weights * functions.rounded_sum(grad_weights, shift[:, None])
    return kept_weights, weights * (grad_weights + shift[:, None])


@triton.jit
def backward_rows(
    Q, K, V, Q_SQ, K_SQ, Q_LEVEL, K_LEVEL, Q_AUX, K_AUX, Q_PARTS, K_PARTS, Q_SIDES, K_SIDES, CONSTANTS, MASK, SEED,
    GRAD_OUT, LSE, REST, SHIFT,
    mask_batch, mask_head, mask_row, mask_column, heads, group, length, keys, positions, coordinates, values, dropout_p,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, ONES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    WIDEN: tl.constexpr, LENGTH_CLASS: tl.constexpr, RESTS: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Before the others, in float32: takes the sum of P dP off SHIFT, and makes the weights add up to 1 by REST.

    Where a query attends to almost one key, the gradients of its scores are small differences of numbers that are not:
    they cancel as they should only if the sum is that of the very numbers which the other kernels find.
    """
    blocks, all_rows = tl.cdiv(length, BM), memory.rows_in_memory(length, SUMS)
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
    grads_of_head = memory.of_head(GRAD_OUT, head, length, values, DV, SUMS)
    grad_out = memory.load_rows(grads_of_head, first_row, length, values, BM, DV, SUMS=SUMS)
    lse = memory.load_saved(LSE, head, first_row, length, BM, SUMS)
    rest = memory.load_saved(REST, head, first_row, length, BM, SUMS)
    shift = memory.load_saved(SHIFT, head, first_row, length, BM, SUMS)

    total, products = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    end = tl.minimum(keys, first_row + BM) if CAUSAL else keys
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        k = memory.load_rows(K, start, keys, positions, BN, DP, SUMS=SUMS)
        k_sq = memory.load_numbers(K_SQ + kv_head * keys, columns, keys)
        k_level = memory.load_levels(K_LEVEL + kv_head * keys, columns, keys, SCORE)
        k_aux = memory.load_levels(K_AUX + kv_head * keys, columns, keys, SCORE)
        k_sides = memory.load_parts(K_PARTS, kv_head, start, keys, SUMS, True, BN)
        v = memory.load_rows(V, start, keys, values, BN, DV, SUMS=SUMS)
        grad_weights = tiles.product(grad_out, tl.trans(v), PRECISION, WIDEN)
        m, excess, any_near = tiles.measure(
            q, tl.trans(k), q_sq, k_sq, q_sides, k_sides, Q, K, first_row, start, length, keys, positions, coordinates,
            SCORE, MEASURE, ROUND, WIDEN, BM, BN,
        )  # fmt: skip
        terms = tiles.terms_of(m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides, SCORE, True, SUMS, WIDEN)
        s = tiles.scores_of(
            m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
            MASK, mask_row, mask_column, rows, columns, length, keys, SCORE, SUMS, SCALED, MASKED, CAUSAL,
        )  # fmt: skip
        _, product = weights_and_gradients(
            s, lse, rest, tl.zeros([BM], tl.float32), grad_weights, tl.load(SEED), head * length + rows,
            columns, dropout_p, DROPOUT, RESTS, False,
        )  # fmt: skip
        total += tl.sum(weights_of(s, lse, rest, RESTS), 1)
        products += functions.total(product, 1)
    total = tl.where(total == 0, 1.0, total)
    tl.store(SHIFT + head * all_rows + rows, shift - tl.div_rn(products, total), mask=rows < length)
    tl.store(REST + head * all_rows + rows, rest + tl.log2(total), mask=rows < length)


@triton.jit
def backward_queries(
    Q, K, V, Q_SQ, K_SQ, Q_LEVEL, K_LEVEL, Q_AUX, K_AUX, Q_PARTS, K_PARTS, Q_SIDES, K_SIDES, CONSTANTS, MASK, SEED,
    GRAD_OUT, LSE, REST, SHIFT, GRAD_Q, GRAD_Q_LEVEL, GRAD_PARAMETERS,
    mask_batch, mask_head, mask_row, mask_column, heads, group, length, keys, positions, coordinates, values, dropout_p,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, ONES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, WIDEN: tl.constexpr, LENGTH_CLASS: tl.constexpr, RESTS: tl.constexpr,
    EXACT: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """GRAD_Q [B, H, L, P], GRAD_Q_LEVEL [B, H, L], and GRAD_PARAMETERS [2, B, H, L], a sum a row.

    FIRST, SECOND: which of the two parameters of the score want theirs.
    """
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
    grads_of_head = memory.of_head(GRAD_OUT, head, length, values, DV, SUMS)
    grad_out = memory.load_rows(grads_of_head, first_row, length, values, BM, DV, SUMS=SUMS)
    lse = memory.load_saved(LSE, head, first_row, length, BM, SUMS)
    rest = memory.load_saved(REST, head, first_row, length, BM, SUMS)
    shift = memory.load_saved(SHIFT, head, first_row, length, BM, SUMS)

    grad = tl.zeros([BM, DP], tl.float32)  # the sum of w k
    pull = tl.zeros([BM], tl.float32)  # the sum of w
    grad_level = tl.zeros([BM, BN], tl.float32)
    first, second = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    end = tl.minimum(keys, first_row + BM) if CAUSAL else keys
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        k = memory.load_rows(K, start, keys, positions, BN, DP, SUMS=SUMS)
        k_sq = memory.load_numbers(K_SQ + kv_head * keys, columns, keys)
        k_level = memory.load_levels(K_LEVEL + kv_head * keys, columns, keys, SCORE)
        k_aux = memory.load_levels(K_AUX + kv_head * keys, columns, keys, SCORE)
        k_sides = memory.load_parts(K_PARTS, kv_head, start, keys, SUMS, True, BN)
        v = memory.load_rows(V, start, keys, values, BN, DV, SUMS=SUMS)
        k_turned = memory.turned(k, K, start, BN, DP, SUMS and ROUND == "tf32" and DP == 64)
        grad_weights = tiles.product(grad_out, tl.trans(v), PRECISION, WIDEN)
        m, excess, any_near = tiles.measure(
            q, k_turned, q_sq, k_sq, q_sides, k_sides, Q, K, first_row, start, length, keys, positions, coordinates,
            SCORE, MEASURE, ROUND, WIDEN, BM, BN,
        )  # fmt: skip
        terms = tiles.terms_of(m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides, SCORE, True, SUMS, WIDEN)
        s = tiles.scores_of(
            m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
            MASK, mask_row, mask_column, rows, columns, length, keys, SCORE, SUMS, SCALED, MASKED, CAUSAL,
        )  # fmt: skip
        _, g = weights_and_gradients(
            s, lse, rest, shift, grad_weights, tl.load(SEED), head * length + rows, columns, dropout_p,
            DROPOUT, RESTS, EXACT,
        )  # fmt: skip
        w, grad_level, for_first, for_second = scores.slopes(
            SCORE, SUMS, SCALED, True, g, m, terms,
            q_level[:, None], k_level[None, :], q_aux[:, None], k_aux[None, :], a, b, c, factor, grad_level,
        )  # fmt: skip
        if FIRST:
            first += functions.total(for_first, 1)
        if SECOND:
            second += functions.total(for_second, 1)
        grad, pull = tiles.add_gradients(
            grad, pull, w, m, any_near, q_sq, k, Q, K, first_row, start, length, keys, positions, coordinates, True,
            MEASURE, ONES, ROUND, WIDEN, DP, BM, BN,
        )  # fmt: skip
    unit = scores.unit(SCORE, SCALED, q_level, a, b)
    grad = tiles.gradient_of(q, pull, grad, coordinates, unit, True, MEASURE, ONES, ROUND, DP)
    memory.store_rows(GRAD_Q + head * length * positions, grad, first_row, length, positions, BM, DP)
    tl.store(GRAD_Q_LEVEL + head * length + rows, tl.sum(grad_level, 1) * unit, mask=rows < length)
    if FIRST:
        tl.store(GRAD_PARAMETERS + head * length + rows, first, mask=rows < length)
    if SECOND:
        of_all_heads = tl.num_programs(0).to(tl.int64) // blocks * length
        tl.store(GRAD_PARAMETERS + of_all_heads + head * length + rows, second, mask=rows < length)


@triton.jit
def backward_keys(
    Q, K, V, Q_SQ, K_SQ, Q_LEVEL, K_LEVEL, Q_AUX, K_AUX, Q_PARTS, K_PARTS, Q_SIDES, K_SIDES, CONSTANTS, MASK, SEED,
    GRAD_OUT, LSE, REST, SHIFT, GRAD_K, GRAD_K_LEVEL, GRAD_V,
    mask_batch, mask_head, mask_row, mask_column, heads, group, length, keys, positions, coordinates, values, dropout_p,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, ONES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    WIDEN: tl.constexpr, LENGTH_CLASS: tl.constexpr, RESTS: tl.constexpr, EXACT: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """GRAD_K [B, Hkv, S, P], GRAD_K_LEVEL [B, Hkv, S], GRAD_V [B, Hkv, S, Ev]: over the queries of all heads."""
    blocks = tl.cdiv(keys, BN)
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)
    first_column = tl.program_id(0) % blocks * BN
    columns = first_column + tl.arange(0, BN)
    K = memory.of_head(K, kv_head, keys, positions, DP, SUMS)
    V = memory.of_head(V, kv_head, keys, values, DV, SUMS)

    k = memory.load_rows(K, first_column, keys, positions, BN, DP, coordinates)
    v = memory.load_rows(V, first_column, keys, values, BN, DV, SUMS=SUMS)
    k_sq = memory.load_numbers(K_SQ + kv_head * keys, columns, keys)
    k_level = memory.load_levels(K_LEVEL + kv_head * keys, columns, keys, SCORE)
    k_aux = memory.load_levels(K_AUX + kv_head * keys, columns, keys, SCORE)
    k_sides = memory.load_sides(K_SIDES, kv_head, first_column, keys, SCORE, SUMS, True, BN)

    grad = tl.zeros([BN, DP], tl.float32)  # the sum of w q
    pull = tl.zeros([BN], tl.float32)  # the sum of w
    grad_level = tl.zeros([BM, BN], tl.float32)
    grad_v = tl.zeros([BN, DV], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        queries = memory.of_head(Q, head, length, positions, DP, SUMS)
        mask = MASK + head // heads * mask_batch + head % heads * mask_head
        a, b, c, factor = memory.constants(CONSTANTS, head, SCALED)
        for start in range(first_column // BM * BM if CAUSAL else 0, length, BM):
            rows = start + tl.arange(0, BM)
            q = memory.load_rows(queries, start, length, positions, BM, DP, SUMS=SUMS)
            q_sq = memory.load_numbers(Q_SQ + head * length, rows, length)
            q_level = memory.load_levels(Q_LEVEL + head * length, rows, length, SCORE)
            q_aux = memory.load_levels(Q_AUX + head * length, rows, length, SCORE)
            grads_of_head = memory.of_head(GRAD_OUT, head, length, values, DV, SUMS)
            grad_out = memory.load_rows(grads_of_head, start, length, values, BM, DV, SUMS=SUMS)
            lse = memory.load_saved(LSE, head, start, length, BM, SUMS)
            rest = memory.load_saved(REST, head, start, length, BM, SUMS)
            shift = memory.load_saved(SHIFT, head, start, length, BM, SUMS)
            q_sides = memory.load_parts(Q_PARTS, head, start, length, SUMS, False, BM)
            m, excess, any_near = tiles.measure(
                q, tl.trans(k), q_sq, k_sq, q_sides, k_sides, queries, K, start, first_column, length, keys, positions,
                coordinates, SCORE, MEASURE, ROUND, WIDEN, BM, BN,
            )  # fmt: skip
            terms = tiles.terms_of(
                m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides, SCORE, False, SUMS, WIDEN
            )
            s = tiles.scores_of(
                m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
                mask, mask_row, mask_column, rows, columns, length, keys, SCORE, SUMS, SCALED, MASKED, CAUSAL,
            )  # fmt: skip
            grad_weights = tiles.product(grad_out, tl.trans(v), PRECISION, WIDEN)
            weights, g = weights_and_gradients(
                s, lse, rest, shift, grad_weights, tl.load(SEED), head * length + rows, columns, dropout_p,
                DROPOUT, RESTS, EXACT,
            )  # fmt: skip
            grad_v += tiles.product(tl.trans(weights).to(grad_out.dtype), grad_out, PRECISION, WIDEN)
            w, grad_level, _, _ = scores.slopes(
                SCORE, SUMS, SCALED, False, g, m, terms,
                q_level[:, None], k_level[None, :], q_aux[:, None], k_aux[None, :], a, b, c, factor, grad_level,
            )  # fmt: skip
            grad, pull = tiles.add_gradients(
                grad, pull, w, m, any_near, q_sq, q, queries, K, start, first_column, length, keys, positions,
                coordinates, False, MEASURE, ONES, ROUND, WIDEN, DP, BM, BN,
            )  # fmt: skip
    a, b, _, _ = memory.constants(CONSTANTS, kv_head * group, SCALED)
    unit = scores.unit(SCORE, SCALED, k_level, a, b)
    grad = tiles.gradient_of(k, pull, grad, coordinates, unit, False, MEASURE, ONES, ROUND, DP)
    memory.store_rows(GRAD_K + kv_head * keys * positions, grad, first_column, keys, positions, BN, DP)
    memory.store_rows(GRAD_V + kv_head * keys * values, grad_v, first_column, keys, values, BN, DV)
    tl.store(GRAD_K_LEVEL + kv_head * keys + columns, tl.sum(grad_level, 0) * unit, mask=columns < keys)


@triton.jit
def backward_mask(
    Q, K, V, Q_SQ, K_SQ, Q_LEVEL, K_LEVEL, Q_AUX, K_AUX, Q_PARTS, K_PARTS, Q_SIDES, K_SIDES, CONSTANTS, MASK, SEED,
    GRAD_OUT, LSE, REST, SHIFT, GRAD_MASK,
    mask_batch, mask_head, mask_row, mask_column, heads, group, length, keys, positions, coordinates, values, dropout_p,
    batches, mask_batches, mask_heads, mask_rows, mask_columns,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, ONES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    WIDEN: tl.constexpr, LENGTH_CLASS: tl.constexpr, RESTS: tl.constexpr, EXACT: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """GRAD_MASK, of the mask's own shape [B|1, H|1, L|1, S|1]: a program sums over all pairs that share an entry."""
    row_blocks = 1 if ONE_ROW else tl.cdiv(length, BM)
    column_blocks = 1 if ONE_COLUMN else tl.cdiv(keys, BN)
    program = tl.program_id(0).to(tl.int64)
    own_column = (program % column_blocks).to(tl.int32) * BN
    own_row = (program // column_blocks % row_blocks).to(tl.int32) * BM
    own_head = program // column_blocks // row_blocks % mask_heads
    own_batch = program // column_blocks // row_blocks // mask_heads
    total = tl.zeros([BM, BN], tl.float32)
    for other_batch in range(batches // mask_batches):
        for other_head in range(heads // mask_heads):
            head = (own_batch + other_batch) * heads + own_head + other_head
            kv_head = head // group
            queries = memory.of_head(Q, head, length, positions, DP, SUMS)
            keys_of_head = memory.of_head(K, kv_head, keys, positions, DP, SUMS)
            values_of_head = memory.of_head(V, kv_head, keys, values, DV, SUMS)
            mask = MASK + head // heads * mask_batch + head % heads * mask_head
            a, b, c, factor = memory.constants(CONSTANTS, head, SCALED)
            for row in range(own_row, length if ONE_ROW else tl.minimum(own_row + BM, length), BM):
                rows = row + tl.arange(0, BM)
                q = memory.load_rows(queries, row, length, positions, BM, DP, coordinates)
                q_sq = memory.load_numbers(Q_SQ + head * length, rows, length)
                q_level = memory.load_levels(Q_LEVEL + head * length, rows, length, SCORE)
                q_aux = memory.load_levels(Q_AUX + head * length, rows, length, SCORE)
                q_sides = memory.load_sides(Q_SIDES, head, row, length, SCORE, SUMS, False, BM)
                grads_of_head = memory.of_head(GRAD_OUT, head, length, values, DV, SUMS)
                grad_out = memory.load_rows(grads_of_head, row, length, values, BM, DV, SUMS=SUMS)
                lse = memory.load_saved(LSE, head, row, length, BM, SUMS)
                rest = memory.load_saved(REST, head, row, length, BM, SUMS)
                shift = memory.load_saved(SHIFT, head, row, length, BM, SUMS)
                for column in range(own_column, keys if ONE_COLUMN else tl.minimum(own_column + BN, keys), BN):
                    columns = column + tl.arange(0, BN)
                    k = memory.load_rows(keys_of_head, column, keys, positions, BN, DP)  # masks save registers here
                    k_sq = memory.load_numbers(K_SQ + kv_head * keys, columns, keys)
                    k_level = memory.load_levels(K_LEVEL + kv_head * keys, columns, keys, SCORE)
                    k_aux = memory.load_levels(K_AUX + kv_head * keys, columns, keys, SCORE)
                    k_sides = memory.load_parts(K_PARTS, kv_head, column, keys, SUMS, True, BN)
                    m, excess, any_near = tiles.measure(
                        q, tl.trans(k), q_sq, k_sq, q_sides, k_sides, queries, keys_of_head, row, column, length, keys,
                        positions, coordinates, SCORE, MEASURE, ROUND, WIDEN, BM, BN,
                    )  # fmt: skip
                    terms = tiles.terms_of(
                        m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides, SCORE, True, SUMS, WIDEN
                    )
                    s = tiles.scores_of(
                        m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c,
                        factor, mask, mask_row, mask_column, rows, columns, length, keys,
                        SCORE, SUMS, SCALED, MASKED, CAUSAL,
                    )  # fmt: skip
                    v = memory.load_rows(values_of_head, column, keys, values, BN, DV, SUMS=SUMS)
                    grad_weights = tiles.product(grad_out, tl.trans(v), PRECISION, WIDEN)
                    _, g = weights_and_gradients(
                        s, lse, rest, shift, grad_weights, tl.load(SEED), head * length + rows, columns,
                        dropout_p, DROPOUT, RESTS, EXACT,
                    )  # fmt: skip
                    total += g
    # An entry that all rows, or all columns, share is the sum over them, in the first place of the tile.
    rows, columns = own_row + tl.arange(0, BM), own_column + tl.arange(0, BN)
    if ONE_ROW:
        total = tl.where(rows[:, None] == 0, tl.sum(total, 0)[None, :], 0.0)
    if ONE_COLUMN:
        total = tl.where(columns[None, :] == 0, tl.sum(total, 1)[:, None], 0.0)
    place = ((own_batch * mask_heads + own_head) * mask_rows + rows[:, None]) * mask_columns + columns[None, :]
    tl.store(GRAD_MASK + place, total, mask=(rows < mask_rows)[:, None] & (columns < mask_columns)[None, :])
