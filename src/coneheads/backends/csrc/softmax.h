// What is done to a row of scores: masks, exponentials, dropout.
#pragma once

#include "problem.h"

namespace coneheads {

/// Adds the mask to the scores of row `row` for keys [from, from + n); -inf beyond `valid` of them. The largest score.
/// `is_nan` is set where a score became NaN or +inf, or where the row attends to a bad key.
template <class T>
T apply_masks(const Problem<T>& p, int64_t b, int64_t h, int64_t row, int64_t from, int64_t valid, int64_t n,
              const uint8_t* bad, T* scores, T* spare, bool& is_nan) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  valid = std::max<int64_t>(0, std::min(valid, n));
  if (p.has_mask) {
    const int64_t step = p.mask.stride[3];
    const char* m = p.mask.at(b, h, row) + p.mask.bytes * from * step;
    if (p.mask.dtype == ScalarType::Bool) {
      const uint8_t* attend = reinterpret_cast<const uint8_t*>(m);
      if (step == 1) {
        for (int64_t j = 0; j < valid; ++j) scores[j] = attend[j] ? scores[j] : -infinity;
      } else {
        for (int64_t j = 0; j < valid; ++j) scores[j] = attend[j * step] ? scores[j] : -infinity;
      }
    } else {
      read_row<T>(m, p.mask.dtype, step, valid, spare);
      bool wrong = false;
      for (int64_t j = 0; j < valid; ++j) {
        scores[j] += spare[j] * T(kLog2E);
        wrong |= !(scores[j] < infinity);
      }
      is_nan |= wrong;
    }
  }
  for (int64_t j = valid; j < n; ++j) scores[j] = -infinity;
  if (bad)
    for (int64_t j = 0; j < valid; ++j) is_nan |= bad[j] && scores[j] != -infinity;
  Vec<T> best = splat<T>(-infinity);
  for (int64_t j = 0; j < n; j += kLanes<T>) best = vmax<T>(best, load<T>(scores + j));
  return largest<T>(best);
}

/// scores -> 2^(scores - base - rest), and their sum; `rest` only with kRest
template <class T, bool kRest = false>
T exp_row(T* scores, int64_t n, T base, T rest = T(0)) {
  Vec<T> total = {};
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    Vec<T> x = load<T>(scores + j) - base;
    if constexpr (kRest) x -= rest;
    const Vec<T> e = vexp2<T>(x);
    store<T>(scores + j, e);
    total += e;
  }
  return sum<T>(total);
}

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
/// Multiplies a row by 1/(1-p) where kept and by 0 where dropped: the counter of dropout.py.
template <class T>
void drop_row(const Problem<T>& p, int64_t b, int64_t h, int64_t row, int64_t from, int64_t n, T* weights) {
  const uint32_t high = uint32_t(p.seed >> 32), low = uint32_t(p.seed);
  const uint64_t number = uint64_t((b * p.heads + h) * p.length + row);
  const uint32_t word = mix(mix(uint32_t(number) ^ low) ^ mix(uint32_t(number >> 32) ^ high));
  const uint32_t limit = uint32_t(p.dropout_p * 4294967296.0);
  const T kept = T(1) / T(1 - p.dropout_p);
  for (int64_t j = 0; j < n; ++j)
    weights[j] *= mix(word ^ mix(uint32_t(from + j) ^ high)) >= limit ? kept : T(0);
}

}  // namespace coneheads
