// What is done to one row of pairs, a query with many keys: measure, score, derivatives. One function a score.
#pragma once

#include <new>
#include <type_traits>

#include "matmul.h"
#include "scores.h"

namespace coneheads {

/// A squared distance |a|^2 + |b|^2 - 2ab below this share of |a|^2 + |b|^2 has lost digits: it is computed directly.
template <class T>
inline constexpr T kNear = T(0.25);
/// Positions of so few coordinates have many near pairs: all their distances are computed directly.
inline constexpr int64_t kFewCoordinates = 8;

/// The keys of a block, padded to whole panels: positions with zeros, levels with the level of a key.
template <class T>
struct Keys {
  const T* transposed;  // positions in panels [panel][coordinate][kPanel]
  const T *sq, *level, *aux;
  int64_t coordinates;
  CONE_INLINE const T* column(int64_t j) const {
    return transposed + j / kPanel<T> * (kPanel<T> * coordinates) + j % kPanel<T>;
  }
};
template <class T>
struct Query {
  const T* position;
  T sq, level, aux;
};

/// The squared distances of one query and a vector of keys from the differences of their positions.
template <class T>
__attribute__((noinline)) Vec<T> direct_distance_sq(const T* q, const T* k, int64_t coordinates) {
  Vec<T> even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 <= coordinates; i += 2) {
    Vec<T> a = q[i] - load<T>(k + i * kPanel<T>), b = q[i + 1] - load<T>(k + (i + 1) * kPanel<T>);
    even += a * a;
    odd += b * b;
  }
  if (i < coordinates) {
    Vec<T> a = q[i] - load<T>(k + i * kPanel<T>);
    even += a * a;
  }
  return even + odd;
}

/// Products of a row, in `measures`, become measures, where `keep`; `scores` receives the scores. Returns the largest.
template <class T>
struct ScoreRow {
  int64_t n;  // a multiple of kLanes
  T* measures;
  T* scores;
  Query<T> query;
  Keys<T> keys;
  bool measured;  // `measures` are that already
  bool keep;
};

template <class T, class Score>
T score_row(const void* made, const ScoreRow<T>& row) {
  const Score score = *static_cast<const Score*>(made);
  const Token<T> q{splat<T>(row.query.level), splat<T>(row.query.aux)};
  // Copies: as far as the compiler knows, a store may change what `row` holds.
  T *const measures = row.measures, *const scores = row.scores;
  const T *const sq = row.keys.sq, *const level = row.keys.level, *const aux = row.keys.aux;
  const T q_sq = row.query.sq;
  const bool measured = row.measured, keep = row.keep, few = row.keys.coordinates <= kFewCoordinates;
  const int64_t n = row.n;
  Vec<T> best = splat<T>(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    Vec<T> m = load<T>(measures + j);
    if constexpr (!Score::kProduct) {
      if (!measured) {
        Vec<T> total = load<T>(sq + j) + q_sq;
        m = total - m * T(2);
        if (few || any<T>(m < total * kNear<T>))
          m = direct_distance_sq<T>(row.query.position, row.keys.column(j), row.keys.coordinates);
      }
      if (keep) store<T>(measures + j, m);
    }
    const Token<T> k{load<T>(level + j), load<T>(aux + j)};
    if constexpr (Score::kInParts) {
      store<T>(scores + j, score.argument(m, q, k));
    } else {
      Vec<T> s = score.value(m, q, k);
      store<T>(scores + j, s);
      best = vmax<T>(best, s);
    }
  }
  if constexpr (Score::kInParts)
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      Vec<T> s = score.read(load<T>(scores + j));
      store<T>(scores + j, s);
      best = vmax<T>(best, s);
    }
  return largest<T>(best);
}

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
  T query_level_grad, query_slope_sum;
  double parameter_grad[kMaxParameters];
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

template <class T, class Score>
void slope_row(const void* made, SlopeRow<T>& row, bool parameters_wanted) {
  const Score score = *static_cast<const Score*>(made);
  const Token<T> q{splat<T>(row.query.level), splat<T>(row.query.aux)};
  const T *const measures = row.measures, *const weights = row.weights;
  const T *const sq = row.keys.sq, *const level = row.keys.level, *const aux = row.keys.aux;
  T *const slopes = row.slopes, *const score_grad = row.score_grad;
  T *const level_grad = row.key_level_grad, *const slope_total = row.key_slope_sum;
  const T q_sq = row.query.sq, shift = row.shift;
  const int64_t n = row.n;
  Vec<T> level_sum = {}, slope_sum = {}, parameter_sum[kMaxParameters] = {};
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    Vec<T> m = load<T>(measures + j);
    Vec<T> g = load<T>(weights + j) * (load<T>(slopes + j) - shift);
    if (score_grad) store<T>(score_grad + j, g);
    Slopes<T> s{};
    score.slopes(g, m, q, {load<T>(level + j), load<T>(aux + j)}, s, parameters_wanted);
    if constexpr (!Score::kProduct) {
      Vec<T> w = s.measure * T(-2);
      Int<T> near = m < (load<T>(sq + j) + q_sq) * kNear<T>;
      if (any<T>(near)) w = near_pairs<T>(row, j, near, w);
      store<T>(slopes + j, w);
      slope_sum += w;
      level_sum += s.q_level;
      store<T>(slope_total + j, load<T>(slope_total + j) + w);
      store<T>(level_grad + j, load<T>(level_grad + j) + s.k_level);
    } else {
      store<T>(slopes + j, s.measure);
    }
    if (parameters_wanted)
      for (int i = 0; i < kMaxParameters; ++i) parameter_sum[i] += s.parameter[i];
  }
  row.query_level_grad = sum<T>(level_sum);
  row.query_slope_sum = sum<T>(slope_sum);
  for (int i = 0; i < kMaxParameters; ++i) row.parameter_grad[i] = double(sum<T>(parameter_sum[i]));
}

template <class T, class Score>
void aux_row(const void* made, int64_t n, const T* level, T* aux) {
  const Score& score = *static_cast<const Score*>(made);
  for (int64_t i = 0; i < n; ++i) aux[i] = score.aux(level[i]);
}

inline constexpr size_t kScoreBytes = 64;
template <class T, class Score>
void make_score(const T* parameters, void* place) {
  static_assert(sizeof(Score) <= kScoreBytes && std::is_trivially_copyable_v<Score>);
  new (place) Score(parameters);
}
/// A score made for one head.
struct alignas(16) MadeScore {
  unsigned char bytes[kScoreBytes];
};

/// The functions of one score, for kernels that know no score.
template <class T>
struct ScoreFunctions {
  bool product;
  void (*make)(const T*, void*);
  void (*aux)(const void*, int64_t, const T*, T*);
  T (*score)(const void*, const ScoreRow<T>&);
  void (*slopes)(const void*, SlopeRow<T>&, bool);
};
template <class T, class Score>
constexpr ScoreFunctions<T> functions_of() {
  return {Score::kProduct, make_score<T, Score>, aux_row<T, Score>, score_row<T, Score>, slope_row<T, Score>};
}

/// numbered as the kernels in cpp.py
template <class T>
inline constexpr ScoreFunctions<T> kScores[] = {
    functions_of<T, Dot<T>>(),
    functions_of<T, Laplacian<T>>(),
    functions_of<T, Penumbral<T, Readout::height>>(),
    functions_of<T, Penumbral<T, Readout::height_sq>>(),
    functions_of<T, Penumbral<T, Readout::distance>>(),
    functions_of<T, Umbral<T, Readout::height>>(),
    functions_of<T, Umbral<T, Readout::height_sq>>(),
    functions_of<T, Umbral<T, Readout::distance>>(),
    functions_of<T, FiniteCone<T>>(),
    functions_of<T, HalfSpaceDistance<T>>(),
    functions_of<T, HyperboloidDistance<T>>(),
    functions_of<T, Concatenation<T>>(),
};

}  // namespace coneheads
