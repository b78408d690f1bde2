// Products of small matrices that lie in the caches: C (+)= A B, on register tiles of kRows x kPanel.
//
// A is read one number at a time, by rows or by columns. B is read in vectors: its columns are contiguous in panels of
// kPanel. So one micro-kernel serves all products of attention:
//   scores   Q K^T      B = K packed transposed        output      P V       B = V as it is
//   dP       dO V^T     B = V packed transposed        dQ          W K       B = K, row by row
//   dV, dK   P^T dO, W^T Q                             B = dO, Q row by row; A is read down its columns
#pragma once

#include <algorithm>

#include "simd.h"

namespace coneheads {

#if defined(__AVX512F__)
inline constexpr int kRows = 12;  // 24 sums, 2 vectors of B and one of A in 32 registers
#else
inline constexpr int kRows = 6;  // 12 sums in 16 registers
#endif
inline constexpr int kPanelVectors = 2;
template <class T>
inline constexpr int kPanel = kPanelVectors * kLanes<T>;

template <class Number>
constexpr Number round_up(Number n, Number step) {
  return (n + step - 1) / step * step;
}

/// How A is read: row by row with B in packed panels, or down its columns with B row by row.
enum class Read { rows, columns };

/// A number (i, k) of A is at data + i * step + k (rows) or data + i + k * step (columns).
template <class T>
struct Left {
  const T* data;
  int64_t step;
};
/// Row k of panel p of B is at data + p * panel + k * row; packed panels have rows of kPanel.
template <class T>
struct Panels {
  const T* data;
  int64_t row, panel;
};

/// M rows of A with kVectors vectors of columns of B.
template <class T, Read kRead, int M, int kVectors, bool kUnroll>
CONE_INLINE void micro_kernel(int64_t depth, Left<T> a, const T* __restrict b, int64_t b_row, T* __restrict c,
                              int64_t c_row, bool add) {
  constexpr bool by_rows = kRead == Read::rows;
  const int64_t down = by_rows ? a.step : 1, along = by_rows ? 1 : a.step;
  if constexpr (by_rows) b_row = kPanel<T>;
  Vec<T> total[M][kVectors] = {};
  const T* rows = a.data;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) __builtin_prefetch(c + i * c_row, 1);
  auto step = [&]() __attribute__((always_inline)) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = load<T>(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const T left = rows[i * down];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) total[i][j] += left * right[j];
    }
    rows += along;
    b += b_row;
  };
  int64_t k = depth;
  if constexpr (kUnroll)
    for (; k >= 4; k -= 4) {
      step();
      step();
      step();
      step();
    }
  for (; k > 0; --k) step();
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      T* to = c + i * c_row + j * kLanes<T>;
      store<T>(to, add ? load<T>(to) + total[i][j] : total[i][j]);
    }
}

/// M rows of A with all columns of B. What is left after whole panels goes by single vectors, and the columns after the
/// last whole vector through `spare`.
template <class T, Read kRead, int M>
__attribute__((noinline)) void multiply_strip(int64_t columns, int64_t depth, Left<T> a, Panels<T> b, T* c,
                                              int64_t c_row, bool add) {
  const int64_t whole = columns / kPanel<T>;
  for (int64_t p = 0; p < whole; ++p)
    micro_kernel<T, kRead, M, kPanelVectors, M == kRows>(depth, a, b.data + p * b.panel, b.row, c + p * kPanel<T>,
                                                         c_row, add);
  const T* right = b.data + whole * b.panel;
  for (int64_t done = whole * kPanel<T>; done < columns; done += kLanes<T>, right += kLanes<T>) {
    const int64_t rest = std::min<int64_t>(kLanes<T>, columns - done);
    T spare[M * kLanes<T>];
    const bool is_whole = rest == kLanes<T>;
    micro_kernel<T, kRead, M, 1, false>(depth, a, right, b.row, is_whole ? c + done : spare,
                                        is_whole ? c_row : kLanes<T>, is_whole && add);
    if (is_whole) continue;
    for (int64_t i = 0; i < M; ++i) {
      const FirstLanes<T> lanes{int(rest)};
      T* to = c + i * c_row + done;
      const Vec<T> sums = load<T>(spare + i * kLanes<T>);
      lanes.store(to, add ? lanes.load(to) + sums : sums);
    }
  }
}
template <class T, Read kRead, int M>
CONE_INLINE int64_t multiply_strips(int64_t row, int64_t rows, int64_t columns, int64_t depth, Left<T> a, Panels<T> b,
                                    T* c, int64_t c_row, bool add) {
  const int64_t down = kRead == Read::rows ? a.step : 1;
  for (; row + M <= rows; row += M)
    multiply_strip<T, kRead, M>(columns, depth, {a.data + row * down, a.step}, b, c + row * c_row, c_row, add);
  return row;
}
/// C[rows x columns] (+)= A[rows x depth] B[depth x columns]. Reads whole panels of B; writes just `columns` of C.
template <class T, Read kRead>
void multiply(int64_t rows, int64_t columns, int64_t depth, Left<T> a, Panels<T> b, T* c, int64_t c_row, bool add) {
  int64_t row = multiply_strips<T, kRead, kRows>(0, rows, columns, depth, a, b, c, c_row, add);
  row = multiply_strips<T, kRead, kRows / 2>(row, rows, columns, depth, a, b, c, c_row, add);
  row = multiply_strips<T, kRead, 2>(row, rows, columns, depth, a, b, c, c_row, add);
  multiply_strips<T, kRead, 1>(row, rows, columns, depth, a, b, c, c_row, add);
}

/// Exchanges the off-diagonal blocks of size `step` of two rows that are `step` apart.
template <class T, int kStep, int... kLane>
CONE_INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, kLane...>) {
  constexpr int n = kLanes<T>;
  const Vec<T> low = __builtin_shufflevector(a, b, (kLane / kStep % 2 ? n + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane / kStep % 2 ? n + kLane : kLane + kStep)...);
  a = low;
}
/// A square of kLanes x kLanes numbers, transposed in registers.
template <class T, int kStep = 1>
CONE_INLINE void transpose(Vec<T>* v) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i)
    if (i / kStep % 2 == 0) exchange<T, kStep>(v[i], v[i + kStep], std::make_integer_sequence<int, kLanes<T>>());
  if constexpr (2 * kStep < kLanes<T>) transpose<T, 2 * kStep>(v);
}
/// The sums of as many vectors as a vector has lanes; the vectors are lost.
template <class T>
CONE_INLINE Vec<T> sums_of(Vec<T>* v) {
  transpose<T>(v);
#pragma GCC unroll 16
  for (int gap = kLanes<T> / 2; gap > 0; gap /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < gap; ++i) v[i] += v[i + gap];
  return v[0];
}

}  // namespace coneheads
