// The derivatives of the scores of one query and many keys, times the gradients of these scores.
#pragma once

#include "pairs.h"
#include "scores.h"

namespace coneheads {

/// From the weights of a row and their gradients: the gradients of measures, levels and parameters.
///
/// With g = weight (gradient - shift), the gradient of a score, and w = 2 g d score / d D^2, a query gets the sum of
/// w (a_q - a_k), a key that of w (a_k - a_q). It becomes a product with `slopes` = -w and a sum of it; near pairs are
/// left out of both and added one by one. For the product, `slopes` = g d score / d (ab), and there is no sum.
template <class T>
struct SlopeRow {
  int64_t n;
  const T* measures;
  const T* weights;
  T* slopes;  // in: gradients of the weights
  T shift;
  Query<T> query;
  Keys<T> keys;
  T* key_level_grad;  // [n], added to
  T* key_slope_sum;  // [n], added to
  T* score_grad;  // [n] or null: g
  T* near_query_grad;  // [coordinates]
  T* near_key_grad;  // rows of `near_key_row` numbers
  int64_t near_key_row;
  // results
  T query_level_grad = 0, query_slope_sum = 0, score_grad_sum = 0;
  double parameter_grad[kMaxParameters] = {};
};

template <class T>
__attribute__((noinline)) Vec<T> near_pairs(SlopeRow<T>& row, int64_t j, Int<T> near, Vec<T> slopes) {
  const T* q = row.query.position;
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    if (!near[lane]) continue;
    const T w = -slopes[lane];
    slopes[lane] = 0;
    if (w == 0) continue;
    const T* k = row.keys.column(j + lane);
    T* key_grad = row.near_key_grad + (j + lane) * row.near_key_row;
    for (int64_t i = 0; i < row.keys.coordinates; ++i) {
      const T step = w * (q[i] - k[i * kPanel<T>]);
      row.near_query_grad[i] += step;
      key_grad[i] -= step;
    }
  }
  return slopes;
}

/// slope_row at work. kAll: with the gradients of the parameters.
template <class T, class Score, bool kAll>
struct RowSloper {
  const Score score;
  SlopeRow<T>& given;
  const SlopeRow<T> row = given;  // a copy: as far as the compiler knows, a store may change what was given
  const Token<T> q{splat<T>(row.query.level), splat<T>(row.query.aux)};
  Vec<T> level_sum = {}, slope_sum = {}, g_sum = {}, parameter_sum[kMaxParameters] = {};

  /// The vectors of keys from `first` on, which share their tests.
  template <int kVectors>
  CONE_INLINE void step(int64_t first) {
    Vec<T> m[kVectors], w[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) m[i] = load<T>(row.measures + first + i * kLanes<T>);
    if constexpr (Score::kHasFar && sizeof(T) == 4) {
      Vec<T> nearest = m[0];
#pragma GCC unroll 4
      for (int i = 1; i < kVectors; ++i) nearest = vmin<T>(nearest, m[i]);
      if (score.all_far(nearest, q)) each<kVectors, true>(first, m, w);
      else each<kVectors, false>(first, m, w);
    } else {
      each<kVectors, false>(first, m, w);
    }
    if constexpr (!Score::kProduct) {
      Vec<T> above[kVectors], least;  // by how much pairs are not near
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        above[i] = m[i] - (load<T>(row.keys.sq + first + i * kLanes<T>) + row.query.sq) * kNear<T>;
        least = i == 0 ? above[0] : vmin<T>(least, above[i]);
      }
      if (any_less<T>(least, Vec<T>{}))
        for (int i = 0; i < kVectors; ++i)
          w[i] = near_pairs<T>(given, first + i * kLanes<T>, above[i] < T(0), w[i]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        slope_sum += w[i];
        add(row.key_slope_sum + first + i * kLanes<T>, w[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store<T>(row.slopes + first + i * kLanes<T>, w[i]);
  }
  template <int kVectors, bool kFar>
  CONE_INLINE void each(int64_t first, const Vec<T>* m, Vec<T>* w) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int64_t j = first + i * kLanes<T>;
      const Vec<T> g = load<T>(row.weights + j) * (load<T>(row.slopes + j) - row.shift);
      g_sum += g;
      const Token<T> k{load<T>(row.keys.level + j), load<T>(row.keys.aux + j)};
      Slopes<T> s{};
      if constexpr (kFar) score.slopes_far(g, m[i], q, k, s, kAll);
      else score.slopes(g, m[i], q, k, s, kAll);
      w[i] = s.measure;
      if constexpr (!Score::kProduct) {
        level_sum += s.q_level;
        add(row.key_level_grad + j, s.k_level);
      }
      if constexpr (kAll)
        for (int c = 0; c < kMaxParameters; ++c) parameter_sum[c] += s.parameter[c];
    }
  }
  CONE_INLINE static void add(T* to, Vec<T> x) { store<T>(to, load<T>(to) + x); }

  template <int kVectors>
  CONE_INLINE void all() {
    for (int64_t j = 0; j < row.n; j += kVectors * kLanes<T>) step<kVectors>(j);
    given.query_level_grad = sum<T>(level_sum);
    given.query_slope_sum = sum<T>(slope_sum);
    given.score_grad_sum = sum<T>(g_sum);
    for (int i = 0; i < kMaxParameters; ++i) given.parameter_grad[i] = double(sum<T>(parameter_sum[i]));
  }
};
template <class T, class Score>
void slope_row(const void* made, SlopeRow<T>& row, bool parameters_wanted) {
  const Score& score = *static_cast<const Score*>(made);
  if (row.score_grad)
    for (int64_t j = 0; j < row.n; j += kLanes<T>)
      store<T>(row.score_grad + j, load<T>(row.weights + j) * (load<T>(row.slopes + j) - row.shift));
  // Double and parameters take what is shorter to compile.
  if constexpr (kTogether<T> > 1)
    if (!parameters_wanted) return RowSloper<T, Score, false>{score, row}.template all<kTogether<T>>();
  RowSloper<T, Score, true>{score, row}.template all<1>();
}

}  // namespace coneheads
