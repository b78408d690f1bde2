// What is done to one row of pairs, a query with many keys: measure, score, derivatives. One function a score.
#pragma once

#include <algorithm>
#include <limits>
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

/// That less |q|^2, to the last bits of what keys near the origin differ by.
template <class T>
__attribute__((noinline)) Vec<T> direct_less_query(const T* q, const T* k, int64_t coordinates) {
  Vec<T> total = {};
  for (int64_t i = 0; i < coordinates; ++i) {
    const Vec<T> b = load<T>(k + i * kPanel<T>);
    total += b * (b - T(2) * q[i]);
  }
  return total;
}

/// Products of a row, in `measures`, become measures, where `keep`; `scores` receives the scores. Returns the largest.
template <class T>
struct ScoreRow {
  int64_t n;  // a multiple of kPanel
  T* measures;
  T* scores;
  Query<T> query;
  Keys<T> keys;
  bool measured;  // `measures` are that already; if `base` is not 0, less |q|^2
  bool keep;
  int64_t valid;  // scores from there on are -inf
  /// Of a score that is relative: the distance that is left out, `full_base` or 0. It becomes 0 where a key of the row is
  /// much nearer to the query, since such distances would lose their digits.
  T* base;
};
/// What a relative score leaves out: |q|, or nothing if its root could be 0.
template <class T>
T full_base(bool relative, T query_sq) {
  return relative && query_sq > T(1e-30) ? std::sqrt(query_sq) : T(0);
}
/// A squared distance below this share of |q|^2 is that of a key much nearer to the query than the origin is.
template <class T>
inline constexpr T kMuchNearer = T(1) / 16;

/// Scores [from, to) of a row are -inf beyond `valid`; the largest of them, and of `best`.
template <class T>
__attribute__((noinline)) Vec<T> cut_scores(T* scores, int64_t from, int64_t to, int64_t valid, Vec<T> best) {
  const Vec<T> none = splat<T>(-std::numeric_limits<T>::infinity());
  for (int64_t j = from; j < to; j += kLanes<T>) {
    const int left = int(std::max<int64_t>(0, std::min<int64_t>(kLanes<T>, valid - j)));
    const Vec<T> s = select<T>(lane_numbers<T>() < (left - Int<T>{}), load<T>(scores + j), none);
    store<T>(scores + j, s);
    best = vmax<T>(best, s);
  }
  return best;
}

/// Vectors of keys that are scored together. Not of double, which is for checks: the compiler would take longer.
template <class T>
inline constexpr int kTogether = sizeof(T) == 4 ? kPanelVectors : 1;

/// Measures of vectors of keys from the differences of positions, and those less |q|^2. Whether a key that counts is much
/// nearer to the query than the origin is.
template <class T, int kVectors>
struct NearMeasures {
  Vec<T> m[kVectors], n[kVectors];
  bool leaves_base;
};
template <class T, int kVectors>
__attribute__((noinline)) NearMeasures<T, kVectors> near_measures(const ScoreRow<T>& row, int64_t first) {
  NearMeasures<T, kVectors> made{};
  const Keys<T>& keys = row.keys;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t j = first + i * kLanes<T>;
    const Vec<T> key_sq = load<T>(keys.sq + j);
    const Vec<T> m = direct_distance_sq<T>(row.query.position, keys.column(j), keys.coordinates);
    const Vec<T> n = keys.coordinates <= kFewCoordinates
                         ? direct_less_query<T>(row.query.position, keys.column(j), keys.coordinates)
                         : key_sq - load<T>(row.measures + j) * T(2);
    made.m[i] = m;
    made.n[i] = select<T>(m < (key_sq + row.query.sq) * kNear<T>, m - row.query.sq, n);
    for (int lane = 0; lane < kLanes<T> && j + lane < row.valid; ++lane)
      made.leaves_base |= m[lane] < row.query.sq * kMuchNearer<T>;
  }
  return made;
}
/// The scores of the first keys of a row get back what they left out.
template <class T>
__attribute__((noinline)) T leave_base(const ScoreRow<T>& row, int64_t count, T shift) {
  for (int64_t j = 0; j < count; j += kLanes<T>) store<T>(row.scores + j, load<T>(row.scores + j) + shift);
  *row.base = 0;
  return shift;
}

/// score_row at work.
template <class T, class Score>
struct RowScorer {
  const Score score;
  const ScoreRow<T>& given;
  const ScoreRow<T> row = given;  // a copy: as far as the compiler knows, a store may change what was given
  const Token<T> q{splat<T>(row.query.level), splat<T>(row.query.aux)};
  Vec<T> best = splat<T>(-std::numeric_limits<T>::infinity()), best_of_whole = best;
  T base = Score::kRelative ? *row.base : T(0);

  CONE_INLINE Token<T> key(int64_t j) const { return {load<T>(row.keys.level + j), load<T>(row.keys.aux + j)}; }
  CONE_INLINE void put(int64_t j, Vec<T> s) {
    store<T>(row.scores + j, s);
    best = vmax<T>(best, s);
  }
  /// The measures of the vectors of keys from `first` on. One test for all of them whether a pair is near.
  template <int kVectors>
  CONE_INLINE void measure(int64_t first, Vec<T>* m) const {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) m[i] = load<T>(row.measures + first + i * kLanes<T>);
    if (Score::kProduct || row.measured) return;
    Vec<T> least;  // by how much the nearest pair is not near
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vec<T> total = load<T>(row.keys.sq + first + i * kLanes<T>) + row.query.sq;
      m[i] = total - m[i] * T(2);
      const Vec<T> above = m[i] - total * kNear<T>;
      least = i == 0 ? above : vmin<T>(least, above);
    }
    if (row.keys.coordinates <= kFewCoordinates || any_less<T>(least, Vec<T>{}))
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i)
        m[i] = direct_distance_sq<T>(row.query.position, row.keys.column(first + i * kLanes<T>), row.keys.coordinates);
    if (row.keep)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) store<T>(row.measures + first + i * kLanes<T>, m[i]);
  }
  /// Scores relative to `base` from `first` on, until `until` or until there is a key so near that it is to be 0 from now
  /// on. Returns how far it came.
  template <int kVectors>
  CONE_INLINE int64_t relative(int64_t first, int64_t until) {
    const Token<T> query = q;
    const Vec<T> query_sq = splat<T>(row.query.sq), near = query_sq * kNear<T>;
    T *const measures = row.measures, *const scores = row.scores;
    const T *const key_sq = row.keys.sq, *const key_level = row.keys.level;
    const bool few = row.keys.coordinates <= kFewCoordinates, measured = row.measured, keep = row.keep;
    Vec<T> best_here = best;
    for (; first < until; first += kVectors * kLanes<T>) {
      Vec<T> m[kVectors], n[kVectors], least = {};  // measures; those less |q|^2; by how much none is near
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const int64_t j = first + i * kLanes<T>;
        n[i] = load<T>(measures + j);
        if (!measured) n[i] = load<T>(key_sq + j) - n[i] * T(2);
        m[i] = n[i] + query_sq;
        if (measured) continue;
        const Vec<T> above = m[i] - load<T>(key_sq + j) * kNear<T>;
        least = i == 0 ? above : vmin<T>(least, above);
      }
      if (!measured && __builtin_expect(few || any_less<T>(least, near), false)) {
        const NearMeasures<T, kVectors> again = near_measures<T, kVectors>(given, first);
        if (again.leaves_base) {
          const T shift = leave_base<T>(given, first, T(score.left_out(T(0), base)));
          best_here += shift;
          best_of_whole += shift;
          base = 0;
          break;
        }
        std::copy(again.m, again.m + kVectors, m);
        std::copy(again.n, again.n + kVectors, n);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const int64_t j = first + i * kLanes<T>;
        const Vec<T> s = score.value_from(m[i], n[i], base, query, {load<T>(key_level + j), Vec<T>{}});
        store<T>(scores + j, s);
        best_here = vmax<T>(best_here, s);
        if (keep) store<T>(measures + j, m[i]);
      }
    }
    best = best_here;
    return first;
  }
  template <int kVectors>
  CONE_INLINE void at_once(int64_t first) {
    Vec<T> m[kVectors];
    measure<kVectors>(first, m);
    if constexpr (Score::kHasFar && kVectors > 1)
      if (is_far<kVectors>(m)) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
          put(first + i * kLanes<T>, score.value_far(m[i], q, key(first + i * kLanes<T>)));
        return;
      }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) put(first + i * kLanes<T>, score.value(m[i], q, key(first + i * kLanes<T>)));
  }
  /// The parts of the score, each a pass over some vectors; `x` is what the part before left.
  template <int kPart>
  CONE_INLINE void parts(int64_t first, int vectors, const Vec<T>* m, Vec<T>* x) {
    constexpr bool kLast = kPart + 1 == Score::kParts;
    for (int i = 0; i < vectors; ++i) {
      const int64_t j = first + i * kLanes<T>;
      const Vec<T> y = score.template part<kPart>(kPart == 0 ? m[i] : x[i], m[i], q, key(j));
      if constexpr (kLast) put(j, y);
      else x[i] = y;
    }
    if constexpr (!kLast) parts<kPart + 1>(first, vectors, m, x);
  }
  template <int kVectors>
  CONE_INLINE bool is_far(const Vec<T>* m) const {
    Vec<T> nearest = m[0];
#pragma GCC unroll 4
    for (int i = 1; i < kVectors; ++i) nearest = vmin<T>(nearest, m[i]);
    return score.all_far(nearest, q);
  }
  CONE_INLINE void all() {
    // Short scores by kTogether vectors, long ones in parts over more of them.
    constexpr int kVectors = Score::kParts == 1 ? kTogether<T> : 16;
    constexpr int64_t kStep = kVectors * kLanes<T>;
    const int64_t valid = std::max<int64_t>(0, std::min(row.valid, row.n));
    const int64_t whole = valid / kStep * kStep, end = round_up<int64_t>(valid, kPanel<T>);
    int64_t first = 0;
    for (const int64_t until : {whole, end}) {
      best_of_whole = best;
      if constexpr (Score::kRelative)
        if (base > T(0)) first = relative<kVectors>(first, until);
      for (; first < until; first += kStep) some<kVectors>(first, std::min<int64_t>(kVectors, (end - first) / kLanes<T>));
    }
    if (valid < row.n) {
      if (whole < end) best = cut_scores<T>(row.scores, whole, end, valid, best_of_whole);
      std::fill(row.scores + end, row.scores + row.n, -std::numeric_limits<T>::infinity());
    }
  }
  template <int kVectors>
  CONE_INLINE void some(int64_t first, int64_t vectors) {
    if constexpr (Score::kParts == 1) {
      at_once<kVectors>(first);
    } else {
      Vec<T> m[kVectors], x[kVectors];
      for (int i = 0; i < vectors; i += kTogether<T>) measure<kTogether<T>>(first + i * kLanes<T>, m + i);
      parts<0>(first, int(vectors), m, x);
    }
  }
};
template <class T, class Score>
T score_row(const void* made, const ScoreRow<T>& row) {
  RowScorer<T, Score> scorer{*static_cast<const Score*>(made), row};
  scorer.all();
  return largest<T>(scorer.best);
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

template <class T, class Score>
void aux_row(const void* made, int64_t n, const T* level, T* aux) {
  const Score& score = *static_cast<const Score*>(made);
  for (int64_t i = 0; i < n; ++i) aux[i] = score.aux(level[i]);
}

/// What the scores of a query at a level leave out, in base 2.
template <class T, class Score>
double left_out_of([[maybe_unused]] const void* made, [[maybe_unused]] T query_level, [[maybe_unused]] T base) {
  if constexpr (Score::kRelative) return static_cast<const Score*>(made)->left_out(query_level, base);
  else return 0;
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
  bool product, relative;
  void (*make)(const T*, void*);
  void (*aux)(const void*, int64_t, const T*, T*);
  T (*score)(const void*, const ScoreRow<T>&);
  double (*left_out)(const void*, T, T);
  void (*slopes)(const void*, SlopeRow<T>&, bool);
};
template <class T, class Score>
constexpr ScoreFunctions<T> functions_of() {
  return {Score::kProduct,     Score::kRelative,     make_score<T, Score>, aux_row<T, Score>,
          score_row<T, Score>, left_out_of<T, Score>, slope_row<T, Score>};
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
