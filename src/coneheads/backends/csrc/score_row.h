// The scores of one query and many keys: measures of pairs, and what a score makes of them.
#pragma once

#include <algorithm>
#include <limits>

#include "pairs.h"
#include "scores.h"

namespace coneheads {

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

}  // namespace coneheads
