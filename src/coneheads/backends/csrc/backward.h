// Backward: the tiles of the scores once more, from the log-sum-exp that forward saved.
//
// With P the weights, S the scores and dO the gradient of the output:
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP) + dlse)
// and dS goes through the score to positions and levels (slope_row.h), from there through the lift to the features (lifts.h).
//
// A chunk of keys is packed; strips of queries pass over it. What a strip adds to its own gradient is added at once; for
// the keys, P and the slopes of a block of rows are kept, and two products over all those rows add to dV and dK.
//
// Tasks own keys and, in one phase, queries: in phase i, task t takes the key chunks c = t and the row blocks r = t + i
// modulo the number of tasks to a head. So no two threads add to the same place, and the order of all sums is fixed.
#pragma once

#include "points.h"
#include "softmax.h"

namespace coneheads {

inline constexpr int64_t kBackwardRows = 18 * kRows;  // rows of a block, at the most
inline constexpr int64_t kStripRows = 2 * kRows;
/// Up to so many keys a row is in one chunk (with is_causal, the first rows always), and the sum of P dP is taken from the
/// row itself: the gradients of a row then cancel as they should, however small. Longer rows take dO.O for it, in chunks
/// of kChunkKeys, and what that is off by is made good afterwards where it counts: see `settle`. Few queries have whole
/// rows of any length: forward measures their keys in another way, and weights by its lse would not add up to 1.
inline constexpr int64_t kWholeRow = 512;
inline constexpr int64_t kChunkKeys = 512;

template <class T>
struct Backward {
  const Problem<T>& p;
  View out, grad_out;
  const double *lse, *grad_lse;  // [B, H, L]
  // where gradients are gathered: [B, H, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev], contiguous
  T *grad_q, *grad_k, *grad_v;
  T* grad_mask;  // null, or the shape of the mask, contiguous
  bool parameters_wanted;

  std::vector<double> parameter_sums;  // [B, H, splits, kMaxParameters]
  int64_t splits = 1;
  /// Of a row in several chunks [B, H, L]: the sum of dS, and the key that has more than half of the weight, or -1.
  struct RowSum {
    T score_grad = 0;
    int64_t key = -1;
  };
  std::vector<RowSum> row_sums;

  int64_t wide_values() const { return round_up<int64_t>(p.values, kPanel<T>); }
  int64_t wide_features() const { return round_up<int64_t>(p.features, kPanel<T>); }
  /// The rows of a block: blocks of nearly one size, since a short one costs the keys as much as a long one.
  int64_t block_rows() const {
    const int64_t blocks = (p.length + kBackwardRows - 1) / kBackwardRows;
    return round_up<int64_t>((p.length + blocks - 1) / blocks, kRows);
  }
  bool whole_rows() const { return p.keys <= kWholeRow || p.length <= kFewRows; }
  int64_t chunk_size() const { return whole_rows() ? round_up<int64_t>(p.keys, kPanel<T>) : kChunkKeys; }

  void run() {
    const int64_t heads = p.batch * p.kv_heads, rows = p.batch * p.heads * p.length;
    if (rows == 0) return;
    KeyTokens<T> tokens(p);
    for_each_task(heads, p.is_small(), [&](int64_t head) { tokens.make(p, head / p.kv_heads, head % p.kv_heads); });

    // A mask that serves several heads gathers the gradients of all: they take turns.
    const bool shared_mask = grad_mask && (p.mask.size[0] < p.batch || p.mask.size[1] < p.heads);
    const bool one_number = grad_mask && p.mask.size[2] == 1 && p.mask.size[3] == 1;
    const int64_t threads = p.is_small() ? 1 : int64_t(torch::stable::get_num_threads());
    const int64_t at_once = shared_mask ? 1 : heads;
    splits = one_number || p.heads_are_enough(at_once) ? 1 : threads;
    parameter_sums.assign(size_t(p.batch * p.heads * splits * kMaxParameters), 0.0);
    if (!whole_rows()) row_sums.assign(size_t(rows), RowSum{});

    for (int64_t turn = 0; turn < heads; turn += at_once)
      for (int64_t phase = 0; phase < splits; ++phase)
        for_each_task(at_once * splits, p.is_small(), [&](int64_t task) {
          const int64_t head = turn + task / splits, owner = task % splits;
          keys(head / p.kv_heads, head % p.kv_heads, owner, (owner + phase) % splits, tokens);
        });
    if (!whole_rows())
      for_each_task(heads, p.is_small() || shared_mask,
                    [&](int64_t head) { settle(head / p.kv_heads, head % p.kv_heads, tokens); });
    finish();
  }

  /// Memory of one task.
  struct Work {
    Buffer<T> memory{};
    T *transposed = nullptr, *key_rows = nullptr, *values = nullptr;  // the chunk of keys
    T *key_level_grad = nullptr, *key_slope_sum = nullptr;
    T *weights = nullptr, *slopes = nullptr;  // of a block of rows
    T* measures = nullptr;  // of a strip
    T *position = nullptr, *grad_rows = nullptr, *numbers = nullptr;  // of the queries of a block
    T *spare = nullptr, *score_grad = nullptr, *query_near = nullptr;
    std::vector<uint8_t> bad{};
    int64_t row = 0;  // numbers of a row of weights, slopes and measures
  };
  Work work() const {
    const int64_t n = chunk_size(), row = n + kPanel<T>, rows = round_up<int64_t>(block_rows(), kStripRows);
    Work w;
    const std::pair<T**, int64_t> parts[] = {{&w.transposed, n * p.coordinates},
                                             {&w.key_rows, n * wide_features()},
                                             {&w.values, n * p.values},
                                             {&w.key_level_grad, n},
                                             {&w.key_slope_sum, n},
                                             {&w.weights, rows * row},
                                             {&w.slopes, rows * row},
                                             {&w.measures, kStripRows * row},
                                             {&w.position, rows * wide_features()},
                                             {&w.grad_rows, rows * wide_values()},
                                             {&w.numbers, 4 * rows},
                                             {&w.spare, n + 2 * p.features + p.values + 4 * kLanes<T>},
                                             {&w.score_grad, n},
                                             {&w.query_near, p.features}};
    int64_t total = 0;
    for (const auto& [place, size] : parts) total += round_up<int64_t>(size, 16);
    w.memory = Buffer<T>(total);
    T* next = w.memory.get();
    for (const auto& [place, size] : parts) {
      *place = next;
      next += round_up<int64_t>(size, 16);
    }
    w.bad.assign(size_t(std::max(n, kBackwardRows)), 0);
    w.row = row;
    return w;
  }

  /// All chunks of keys that `owner` has, with the row blocks of its turn.
  void keys(int64_t b, int64_t kv, int64_t owner, int64_t turn, const KeyTokens<T>& tokens) {
    Work w = work();
    const int64_t head = b * p.kv_heads + kv, size = chunk_size(), block = block_rows();
    int64_t number = 0;
    for (int64_t from = 0; from < p.keys; from += size, ++number) {
      if (number % splits != owner) continue;
      const int64_t n = std::min(size, p.keys - from), padded = round_up<int64_t>(n, kPanel<T>);
      uint8_t* bad = tokens.marks(head) + from;
      bool any_bad = false;
      for (int64_t j = 0; j < n; ++j) {
        bad[j] |= is_bad<T>(p.v.template row<T>(b, kv, from + j, w.spare), p.values);
        any_bad |= bad[j];
      }
      pack_keys<T>(p, tokens, b, kv, from, n, w.transposed, w.key_rows, size * kPanel<T>, tokens.sq(head) + from);
      pack_values_transposed<T>(p, b, kv, from, n, bad, w.values);
      const Keys<T> keys{w.transposed, tokens.sq(head) + from, tokens.level(head) + from, tokens.aux(head) + from,
                         p.coordinates};
      std::fill_n(w.key_level_grad, padded, T(0));
      std::fill_n(w.key_slope_sum, padded, T(0));
      for (int64_t h = kv * p.group; h < (kv + 1) * p.group; ++h)
        for (int64_t first = turn * block; first < p.length; first += splits * block) {
          if (p.last_key(std::min(p.length, first + block) - 1) <= from) continue;
          rows(b, h, first, std::min(block, p.length - first), from, n, keys, any_bad ? bad : nullptr,
               tokens.centre(head), owner, w);
        }
      // The part of the keys' gradients that is a sum of slopes: dK = slopes^T Q - a_k sum(slopes), and the levels.
      if (p.score.product) continue;
      for (int64_t j = 0; j < n; ++j) {
        T* g = grad_k + (head * p.keys + from + j) * p.features;
        const T *row = w.key_rows + j * kPanel<T>, total = w.key_slope_sum[j];
        for_vectors<T>(p.coordinates, [&](int64_t i, auto vector) CONE_BODY {
          const Vec<T> position = load<T>(row + i / kPanel<T> * (size * kPanel<T>) + i % kPanel<T>);
          vector.store(g + i, vector.load(g + i) - position * total);
        });
        if (p.lifter.has_level()) g[p.coordinates] += w.key_level_grad[j];
      }
    }
  }

  /// One block of rows with one chunk of keys.
  void rows(int64_t b, int64_t h, int64_t first, int64_t count, int64_t from, int64_t n, const Keys<T>& keys,
            const uint8_t* bad_keys, const T* centre, int64_t owner, Work& w) {
    const int64_t head = b * p.heads + h, kv_head = b * p.kv_heads + h / p.group, d = p.coordinates;
    const int64_t position_row = wide_features(), size = chunk_size();
    const MadeScore made = p.made(b, h);
    const int64_t most = round_up<int64_t>(block_rows(), kStripRows);
    const Tokens<T> queries{w.numbers, w.numbers + most, w.numbers + 2 * most, w.bad.data()};
    queries.make(p, p.q, b, h, made, first, first + count, w.spare);
    T* sq = w.numbers + 3 * most;
    const int64_t padded_count = round_up<int64_t>(count, kStripRows);
    std::fill_n(w.position, padded_count * position_row, T(0));
    std::fill_n(w.grad_rows, padded_count * wide_values(), T(0));
    for (int64_t i = 0; i < count; ++i) {
      T* x = w.position + i * position_row;
      sq[i] = point<T>(p, p.q, b, h, first + i, queries.scale[i], queries.bad[i], centre, w.spare, x);
      if (queries.bad[i]) continue;  // its output is NaN whatever happens; it passes no gradient on
      const T* g = grad_out.row<T>(b, h, first + i, w.spare);
      std::copy(g, g + p.values, w.grad_rows + i * wide_values());
    }
    const int64_t block_keys =
        std::min(round_up<int64_t>(n, kPanel<T>),
                 round_up<int64_t>(std::max<int64_t>(0, p.last_key(first + count - 1) - from), kPanel<T>));
    for (int64_t start = 0; start < count; start += kStripRows) {
      const int64_t strip = std::min<int64_t>(kStripRows, count - start), padded = round_up<int64_t>(strip, kRows);
      const int64_t needed = std::max<int64_t>(0, p.last_key(first + start + strip - 1) - from);
      const int64_t m = std::min(block_keys, round_up<int64_t>(needed, kPanel<T>)), whole = std::min(needed, n);
      const int64_t columns = round_up<int64_t>(whole, kLanes<T>);  // of the products; up to m there may be one vector more
      T* weights = w.weights + start * w.row;
      T* slopes = w.slopes + start * w.row;
      const T* position = w.position + start * position_row;
      const T* grad_rows = w.grad_rows + start * wide_values();
      if (m > 0) {
        if (d > kFewCoordinates || p.score.product)
          multiply<T, Read::rows>(padded, columns, d, {position, position_row},
                                  {keys.transposed, kPanel<T>, kPanel<T> * d}, w.measures, w.row, false);
        multiply<T, Read::rows>(padded, columns, p.values, {grad_rows, wide_values()},
                                {w.values, kPanel<T>, kPanel<T> * p.values}, slopes, w.row, false);
        for (int64_t i = 0; i < padded && columns < m; ++i) {
          std::fill(w.measures + i * w.row + columns, w.measures + i * w.row + m, T(0));
          std::fill(slopes + i * w.row + columns, slopes + i * w.row + m, T(0));
        }
      }
      for (int64_t i = 0; i < strip; ++i) {
        const int64_t row = start + i;
        const Query<T> query{position + i * position_row, sq[row], queries.level[row], queries.aux[row]};
        // With is_causal, a row may end before its strip.
        int64_t own = std::min(m, round_up<int64_t>(std::max<int64_t>(0, p.last_key(first + row) - from), kPanel<T>));
        if (queries.bad[row]) own = 0;
        if (own > 0)
          one_row(b, h, first + row, from, n, own, made, query, keys, bad_keys, grad_rows + i * wide_values(),
                  w.measures + i * w.row, weights + i * w.row, slopes + i * w.row, kv_head, owner, w);
        std::fill(weights + i * w.row + own, weights + i * w.row + block_keys, T(0));
        std::fill(slopes + i * w.row + own, slopes + i * w.row + block_keys, T(0));
      }
      multiply<T, Read::rows>(strip, p.features, whole, {slopes, w.row}, {w.key_rows, kPanel<T>, size * kPanel<T>},
                              grad_q + (head * p.length + first + start) * p.features, p.features, true);
    }
    const int64_t used = std::min(n, block_keys);
    multiply<T, Read::columns>(used, p.values, count, {w.weights, w.row}, {w.grad_rows, wide_values(), kPanel<T>},
                               grad_v + (kv_head * p.keys + from) * p.values, p.values, true);
    multiply<T, Read::columns>(used, p.features, count, {w.slopes, w.row}, {w.position, position_row, kPanel<T>},
                               grad_k + (kv_head * p.keys + from) * p.features, p.features, true);
  }

  /// One row: measures (products on entry) -> weights; slopes (dP on entry) -> slopes.
  void one_row(int64_t b, int64_t h, int64_t number, int64_t from, int64_t n, int64_t m, const MadeScore& made,
               const Query<T>& query, const Keys<T>& keys, const uint8_t* bad_keys, const T* grad_row, T* measures,
               T* weights, T* slopes, int64_t kv_head, int64_t owner, Work& w) {
    const int64_t place = (b * p.heads + h) * p.length + number;
    const int64_t valid = std::min(n, p.last_key(number) - from);
    bool is_nan = false;
    T base = full_base<T>(p.score.relative, query.sq);
    p.score.score(made.bytes, {m, measures, weights, query, keys, false, true, valid, &base});
    // As scores are: in base 2, and without what they leave out.
    const double exact = lse[place] * kLog2E - p.score.left_out(made.bytes, query.level, base);
    if (p.has_mask || bad_keys)
      apply_masks<T>(p, b, h, number, from, valid, m, bad_keys, weights, w.spare, is_nan);
    T shift = -T(grad_lse[place]), total = 0;
    if (std::isnan(exact)) {
      for (int64_t j = 0; j < m; ++j)
        weights[j] = weights[j] == -std::numeric_limits<T>::infinity() ? T(0) : std::numeric_limits<T>::quiet_NaN();
    } else if (exact == -std::numeric_limits<double>::infinity()) {
      std::fill_n(weights, m, T(0));
    } else {
      // Scores can be large and near to lse: it is subtracted as it is rounded, and then the rest of it.
      total = exp_row<T, true>(weights, m, T(exact), T(exact - double(T(exact))));
    }
    if (p.dropout_p > 0) drop_row<T>(p, b, h, number, from, m, slopes);
    if (from == 0 && p.last_key(number) <= n) {  // the whole row
      // Weights that add up to 1 as they are here, not as they were in forward.
      const T factor = total > T(0) ? T(1) / total : T(1);
      Vec<T> sums = {};
      for (int64_t j = 0; j < m; j += kLanes<T>) {
        const Vec<T> w = load<T>(weights + j) * factor;
        store<T>(weights + j, w);
        sums += w * load<T>(slopes + j);
      }
      shift += sum<T>(sums);
    } else {
      const T* o = out.row<T>(b, h, number, w.spare);
      shift += dot_product<T>(grad_row, o, p.values);
      if (total > T(0.5)) {
        const T* most = std::max_element(weights, weights + valid);
        if (*most > T(0.5)) row_sums[size_t(place)].key = from + (most - weights);
      }
    }
    SlopeRow<T> row{m, measures, weights, slopes, shift, query, keys, w.key_level_grad, w.key_slope_sum,
                    grad_mask ? w.score_grad : nullptr, w.query_near,
                    grad_k + (kv_head * p.keys + from) * p.features, p.features};
    std::fill_n(w.query_near, p.coordinates, T(0));
    p.score.slopes(made.bytes, row, parameters_wanted);
    if (!row_sums.empty()) row_sums[size_t(place)].score_grad += row.score_grad_sum;
    if (p.dropout_p > 0) drop_row<T>(p, b, h, number, from, m, weights);
    if (!p.score.product) {
      T* g = grad_q + place * p.features;
      for_vectors<T>(p.coordinates, [&](int64_t i, auto vector) CONE_BODY {
        const Vec<T> own = vector.load(query.position + i) * row.query_slope_sum;
        vector.store(g + i, vector.load(g + i) + (vector.load(w.query_near + i) - own));
      });
      if (p.lifter.has_level()) g[p.coordinates] += row.query_level_grad;
    }
    if (parameters_wanted)
      for (int i = 0; i < kMaxParameters; ++i)
        parameter_sums[size_t(((b * p.heads + h) * splits + owner) * kMaxParameters + i)] += row.parameter_grad[i];
    if (grad_mask) add_mask_grad(b, h, number, from, valid, w.score_grad);
  }

  /// The gradients of a row's scores add up to that of its lse. Where one key has most of the weight they are all small, its
  /// own being the difference of numbers that are not, and what dO.O was off by is as large: it is taken off that key's.
  void settle(int64_t b, int64_t kv, const KeyTokens<T>& tokens) {
    const int64_t kv_head = b * p.kv_heads + kv, d = p.coordinates;
    std::vector<T> spare(size_t(2 * p.features + 2 * kLanes<T>)), q(size_t(p.features)), k(size_t(p.features));
    for (int64_t h = kv * p.group; h < (kv + 1) * p.group; ++h) {
      const MadeScore made = p.made(b, h);
      for (int64_t i = 0; i < p.length; ++i) {
        const int64_t place = (b * p.heads + h) * p.length + i, j = row_sums[size_t(place)].key;
        if (j < 0) continue;
        const T rest = T(grad_lse[place]) - row_sums[size_t(place)].score_grad;
        T scale, level, aux;
        uint8_t bad;
        Tokens<T>{&scale, &level, &aux, &bad}.make(p, p.q, b, h, made, i, i + 1, spare.data());
        point<T>(p, p.q, b, h, i, scale, false, tokens.centre(kv_head), spare.data(), q.data());
        point<T>(p, p.k, b, kv, j, tokens.scale(kv_head)[j], false, tokens.centre(kv_head), spare.data(), k.data());
        // A row of this one pair: the other lanes repeat it with weight 0, and squared norms of 0 make no pair near.
        T measures[kPanel<T>], levels[kPanel<T>], auxs[kPanel<T>], weights[kPanel<T>] = {T(1)}, sq[kPanel<T>] = {};
        T slopes[kPanel<T>] = {rest}, level_grad[kPanel<T>] = {}, slope_sum[kPanel<T>] = {};
        std::fill_n(measures, kPanel<T>,
                    p.score.product ? dot_product<T>(q.data(), k.data(), d) : distance_sq<T>(q.data(), k.data(), d));
        std::fill_n(levels, kPanel<T>, tokens.level(kv_head)[j]);
        std::fill_n(auxs, kPanel<T>, tokens.aux(kv_head)[j]);
        SlopeRow<T> row{kPanel<T>, measures, weights, slopes, T(0), {q.data(), T(0), level, aux},
                        {nullptr, sq, levels, auxs, d}, level_grad, slope_sum, nullptr, nullptr, nullptr, 0};
        p.score.slopes(made.bytes, row, parameters_wanted);
        T *for_q = grad_q + place * p.features, *for_k = grad_k + (kv_head * p.keys + j) * p.features;
        for (int64_t c = 0; c < d; ++c) {
          for_q[c] += slopes[0] * (p.score.product ? k[c] : k[c] - q[c]);
          for_k[c] += slopes[0] * (p.score.product ? q[c] : q[c] - k[c]);
        }
        if (p.lifter.has_level()) {
          for_q[d] += row.query_level_grad;
          for_k[d] += level_grad[0];
        }
        if (parameters_wanted)
          for (int c = 0; c < kMaxParameters; ++c)
            parameter_sums[size_t((b * p.heads + h) * splits * kMaxParameters + c)] += row.parameter_grad[c];
        if (grad_mask) add_mask_grad(b, h, i, j, 1, &rest);
      }
    }
  }

  void add_mask_grad(int64_t b, int64_t h, int64_t row, int64_t from, int64_t n, const T* g) const {
    const int64_t* size = p.mask.size;
    T* to = grad_mask + ((b % size[0] * size[1] + h % size[1]) * size[2] + row % size[2]) * size[3];
    if (size[3] > 1) {
      for (int64_t j = 0; j < n; ++j) to[from + j] += g[j];
    } else {
      for (int64_t j = 0; j < n; ++j) to[0] += g[j];
    }
  }

  /// From points to features, in place.
  void finish() const {
    constexpr int64_t kBlock = 256;
    auto blocks_of = [](int64_t n) { return (n + kBlock - 1) / kBlock; };
    const int64_t q_blocks = blocks_of(p.length), k_blocks = blocks_of(p.keys);
    const int64_t q_tasks = p.batch * p.heads * q_blocks, k_tasks = p.batch * p.kv_heads * k_blocks;
    if (p.lifter.kind == Lift::none && p.score.product) return finish_product();
    for_each_task(q_tasks + k_tasks, p.is_small(), [&](int64_t task) {
      const bool of_query = task < q_tasks;
      if (!of_query) task -= q_tasks;
      const int64_t blocks = of_query ? q_blocks : k_blocks, total = of_query ? p.length : p.keys;
      const int64_t head = task / blocks, from = task % blocks * kBlock, to = std::min(total, from + kBlock);
      const int64_t heads = of_query ? p.heads : p.kv_heads, b = head / heads, h = head % heads;
      const View& features = of_query ? p.q : p.k;
      T scale[kBlock], level[kBlock], aux[kBlock];
      uint8_t bad[kBlock];
      std::vector<T> spare(size_t(2 * p.features + 2 * kLanes<T>));
      const MadeScore made = p.made(b, of_query ? h : h * p.group);
      Tokens<T>{scale, level, aux, bad}.make(p, features, b, h, made, from, to, spare.data());
      T* grads = (of_query ? grad_q : grad_k) + (head * total + from) * p.features;
      for (int64_t i = 0; i < to - from; ++i) {
        T* g = grads + i * p.features;
        if (bad[i]) {
          std::fill_n(g, p.features, T(0));
        } else {
          lift_backward<T>(p.lifter, p.features, features.row<T>(b, h, from + i, spare.data()), scale[i], g);
        }
      }
    });
  }
  void finish_product() const {
    // Features that saturated or are not numbers pass no gradient on.
    auto clear = [&](const View& features, int64_t heads, int64_t rows, T* grads) {
      std::vector<T> spare(size_t(p.features));
      for (int64_t i = 0; i < p.batch * heads * rows; ++i) {
        const T* f = features.row<T>(i / rows / heads, i / rows % heads, i % rows, spare.data());
        const bool bad = is_bad<T>(f, p.features);
        for (int64_t j = 0; j < p.features; ++j)
          if (bad || std::abs(f[j]) > T(kPositionLimit)) grads[i * p.features + j] = 0;
      }
    };
    clear(p.q, p.heads, p.length, grad_q);
    clear(p.k, p.kv_heads, p.keys, grad_k);
  }
};

}  // namespace coneheads
