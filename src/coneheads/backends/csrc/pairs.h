// A query and its keys, and their distances from the differences of positions.
#pragma once

#include "matmul.h"

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

/// Vectors of keys that are scored together. Not of double, which is for checks: the compiler would take longer.
template <class T>
inline constexpr int kTogether = sizeof(T) == 4 ? kPanelVectors : 1;

}  // namespace coneheads
