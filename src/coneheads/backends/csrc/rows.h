// What is done to one row of pairs, a query with many keys, by every score: functions for kernels that know no score.
#pragma once

#include <new>
#include <type_traits>

#include "score_row.h"
#include "slope_row.h"

namespace coneheads {

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
