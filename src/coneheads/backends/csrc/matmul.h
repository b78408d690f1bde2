// Products of small matrices that lie in the caches: C (+)= A B, on register tiles of kRows x kPanel.
//
// A is read one number at a time and may lie in any order (strides for rows and for the summed index). B is read in
// vectors: its columns are contiguous in panels of kPanel. So one micro-kernel serves all products of attention:
//   scores   Q K^T      B = K packed transposed        output      P V       B = V as it is
//   dP       dO V^T     B = V packed transposed        dQ          W K       B = K, row by row
//   dV, dK   P^T dO, W^T Q                             B = dO, Q row by row; A is read down its columns
#pragma once

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

template <class T>
struct Strided {
  const T* data;
  int64_t row, column;  // steps in elements
};

template <class T, int M>
CONE_INLINE void micro_kernel(int64_t depth, Strided<T> a, const T* __restrict b, int64_t b_row, T* __restrict c,
                              int64_t c_row, bool add) {
  Vec<T> total[M][kPanelVectors] = {};
  const T* rows = a.data;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) __builtin_prefetch(c + i * c_row, 1);
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> right[kPanelVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) right[j] = load<T>(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const T left = rows[i * a.row];
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) total[i][j] += left * right[j];
    }
    rows += a.column;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      T* to = c + i * c_row + j * kLanes<T>;
      store<T>(to, add ? load<T>(to) + total[i][j] : total[i][j]);
    }
}

/// the last rows of A, fewer than kRows
template <class T, int M = kRows - 1>
__attribute__((noinline)) void micro_kernel_rest(int64_t rows, int64_t depth, Strided<T> a, const T* b, int64_t b_row,
                                                 T* c, int64_t c_row, bool add) {
  if (rows == M) return micro_kernel<T, M>(depth, a, b, b_row, c, c_row, add);
  if constexpr (M > 1) micro_kernel_rest<T, M - 1>(rows, depth, a, b, b_row, c, c_row, add);
}

template <class T>
__attribute__((noinline)) void micro_kernel_full(int64_t depth, Strided<T> a, const T* b, int64_t b_row, T* c,
                                                 int64_t c_row, bool add) {
  micro_kernel<T, kRows>(depth, a, b, b_row, c, c_row, add);
}

/// B in panels: row k of panel p starts at data + p * panel + k * row
template <class T>
struct Panels {
  const T* data;
  int64_t row, panel;
};

/// C[rows x columns] (+)= A[rows x depth] B[depth x columns]. Reads whole panels of B; writes just `columns` of C.
template <class T>
void multiply(int64_t rows, int64_t columns, int64_t depth, Strided<T> a, Panels<T> b, T* c, int64_t c_row, bool add) {
  T spare[kRows * kPanel<T>];
  for (int64_t column = 0, p = 0; column < columns; column += kPanel<T>, ++p) {
    const T* panel = b.data + p * b.panel;
    const bool whole = columns - column >= kPanel<T>;
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = rows - row < kRows ? rows - row : kRows;
      const Strided<T> block{a.data + row * a.row, a.row, a.column};
      T* to = whole ? c + row * c_row + column : spare;
      const int64_t to_row = whole ? c_row : kPanel<T>;
      if (count == kRows)
        micro_kernel_full<T>(depth, block, panel, b.row, to, to_row, add && whole);
      else
        micro_kernel_rest<T>(count, depth, block, panel, b.row, to, to_row, add && whole);
      if (whole) continue;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < columns - column; ++j) {
          T& sum = c[(row + i) * c_row + column + j];
          sum = spare[i * kPanel<T> + j] + (add ? sum : T(0));
        }
    }
  }
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

}  // namespace coneheads
