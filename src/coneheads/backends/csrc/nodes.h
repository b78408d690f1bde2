// The nodes of a graph as its edges read them, and what an edge computes for all heads at once.
#pragma once

#include "points.h"

namespace coneheads {

/// The nodes of one side: all that an edge reads of a node, in one place. A record holds, for all heads, the position padded
/// with zeros to whole vectors, a row of values (or of gradients of the output) padded likewise, level, aux, scale, and
/// whether the head is bad.
template <class T>
struct Nodes {
  int64_t count, heads, wide, wide_values, record;
  Buffer<T> memory;

  T* at(int64_t node) const { return memory.get() + node * record; }
  const T* position(int64_t node) const { return at(node); }
  const T* values(int64_t node) const { return at(node) + heads * wide; }
  const T* level(int64_t node) const { return values(node) + heads * wide_values; }
  const T* aux(int64_t node) const { return level(node) + heads; }
  const T* scale(int64_t node) const { return level(node) + 2 * heads; }
  const T* bad(int64_t node) const { return level(node) + 3 * heads; }
  void prefetch(int64_t node) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = 0; i < record; i += kLine) __builtin_prefetch(at(node) + i);
  }

  Nodes(const Problem<T>& p, const View& features, const View* rows, int64_t count)
      : count(count),
        heads(p.heads),
        wide(round_up<int64_t>(p.coordinates, kLanes<T>)),
        wide_values(rows ? round_up<int64_t>(rows->size[3], kLanes<T>) : 0),
        record(round_up<int64_t>(heads * (wide + wide_values + 4), 64 / sizeof(T))),
        memory(count * record) {
    constexpr int64_t kBlock = 64;
    for_each_task((count + kBlock - 1) / kBlock, count * record < (1 << 14), [&](int64_t block) {
      const int64_t from = block * kBlock, to = std::min(count, from + kBlock);
      T scales[kBlock], levels[kBlock], auxs[kBlock];
      uint8_t marks[kBlock];
      std::vector<T> spare(size_t(2 * p.features + 2 * kLanes<T> + p.values));
      std::fill(at(from), at(to), T(0));
      for (int64_t h = 0; h < heads; ++h) {
        Tokens<T>{scales, levels, auxs, marks}.make(p, features, 0, h, p.made(0, h), from, to, spare.data());
        for (int64_t i = from; i < to; ++i) {
          T* numbers = at(i) + heads * (wide + wide_values) + h;
          numbers[0] = levels[i - from];
          numbers[heads] = auxs[i - from];
          numbers[2 * heads] = scales[i - from];
          numbers[3 * heads] = marks[i - from];
          point<T>(p, features, 0, h, i, scales[i - from], marks[i - from], nullptr, spare.data(), at(i) + h * wide);
          if (!rows) continue;
          const T* row = rows->row<T>(0, h, i, spare.data());
          std::copy(row, row + rows->size[3], at(i) + heads * wide + h * wide_values);
        }
      }
    });
  }
};

/// For each head a.b, or |a - b|^2, of rows padded to whole vectors; head h goes to to[h * step].
template <class T, bool kProduct>
CONE_INLINE void measure_heads(const T* a, const T* b, int64_t heads, int64_t wide, T* to, int64_t step) {
  auto vector_of = [&](int64_t h) {
    Vec<T> total = {};
    for (int64_t i = h * wide; i < (h + 1) * wide; i += kLanes<T>) {
      const Vec<T> x = load<T>(a + i), y = load<T>(b + i);
      if constexpr (kProduct) {
        total += x * y;
      } else {
        total += (x - y) * (x - y);
      }
    }
    return total;
  };
  int64_t h = 0;
  for (; h + kLanes<T> <= heads; h += kLanes<T>) {
    Vec<T> square[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) square[i] = vector_of(h + i);
    const Vec<T> sums = sums_of<T>(square);
    for (int i = 0; i < kLanes<T>; ++i) to[(h + i) * step] = sums[i];
  }
  for (; h < heads; ++h) to[h * step] = sum<T>(vector_of(h));
}

/// to += factor * from, of rows padded to whole vectors
template <class T>
CONE_INLINE void add_scaled(T* to, T factor, const T* from, int64_t wide) {
  for (int64_t i = 0; i < wide; i += kLanes<T>) store<T>(to + i, load<T>(to + i) + load<T>(from + i) * factor);
}

}  // namespace coneheads
