// Forward of few queries to a head: every key is read once, as it lies.
#pragma once

#include "strips.h"

namespace coneheads {

template <class T>
struct FewRows : Strips<T> {
  using Strip = typename Strips<T>::Strip;
  using Strips<T>::p, Strips<T>::wide, Strips<T>::place, Strips<T>::begin, Strips<T>::begin_block, Strips<T>::finish;
  using Strips<T>::accumulate, Strips<T>::weigh;

  void run() const {
    const bool same = sizeof(T) == size_t(p.k.bytes) && p.k.stride[3] == 1 && p.v.stride[3] == 1;
    const bool plain = same && !p.lifter.is_direction() && p.values % kLanes<T> == 0;
    for_each_task(p.batch * p.heads, p.is_small(), [&](int64_t task) {
      const int64_t b = task / p.heads, h = task % p.heads;
      if constexpr (sizeof(T) == 4)
        if (plain && plain_rows(b, h)) return;
      rows(b, h);
    });
  }

  /// All queries of a head, as points in rows of `wide_d` numbers.
  Strip strip_of(int64_t b, int64_t h, const MadeScore& made, const Tokens<T>& tokens, T* position, int64_t wide_d,
                 T* spare, T* output) const {
    Strip strip{b, h, 0, p.length};
    strip.tokens = tokens;
    strip.tokens.make(p, p.q, b, h, made, 0, p.length, spare);
    strip.position = position;
    strip.position_row = wide_d;
    strip.output = output;
    strip.padded = p.length;
    std::fill_n(position, kRows * wide_d, T(0));
    for (int64_t i = 0; i < p.length; ++i) place(strip, i, nullptr, spare, position + i * wide_d);
    begin(strip);
    return strip;
  }

  /// rows() for keys and values that can be read where they lie, without a look at whether they are numbers and
  /// within their limits. False if the result shows that they are not: then nothing was written.
  bool plain_rows(int64_t b, int64_t h) const {
    const int64_t d = p.coordinates, kv = h / p.group, columns = p.values;
    constexpr int64_t n = kForwardKeys;
    const int64_t wide_d = round_up<int64_t>(d, kLanes<T>);
    Buffer<T> memory(kRows * (wide_d + wide() + n + 3) + 4 * n + 2 * p.features + 4 * kLanes<T> + n);
    T* position = memory.get();
    T* output = position + kRows * wide_d;
    T* scores = output + kRows * wide();
    T* numbers = scores + kRows * n;
    T *scale = numbers + 3 * kRows, *level = scale + n, *aux = level + n, *last = aux + n, *spare = last + n;
    uint8_t bad[kRows] = {};
    const MadeScore made = p.made(b, h);
    const Tokens<T> queries{numbers, numbers + kRows, numbers + 2 * kRows, bad};
    Strip strip = strip_of(b, h, made, queries, position, wide_d, spare, output);
    for (int64_t start = 0; start < p.last_key(p.length - 1); start += n) {
      const int64_t count = std::min(n, p.keys - start), padded = round_up<int64_t>(count, kPanel<T>);
      const T* key = reinterpret_cast<const T*>(p.k.at(b, kv, start));
      const T* value = reinterpret_cast<const T*>(p.v.at(b, kv, start));
      bool fine = true;
      begin_block(strip);
      constexpr int64_t kPart = 64;  // so that rows stay in the first cache while they are lifted and measured
      for (int64_t part = 0; part < padded; part += kPart) {
        const int64_t rows = std::max<int64_t>(0, std::min(kPart, count - part)), all = std::min(kPart, padded - part);
        const T* first = key + part * p.k.stride[2];
        for (int64_t j = 0; j < rows; ++j) {
          __builtin_prefetch(first + (j + 8) * p.k.stride[2]);
          last[j] = first[j * p.k.stride[2] + p.features - 1];
        }
        std::fill(last + rows, last + all, T(0));
        p.lifter.lift(all, last, nullptr, scale + part, level + part);
        p.score.aux(made.bytes, all, level + part, aux + part);
        for (int64_t i = 0; i < p.length; ++i) {
          T* row = scores + i * n + part;
          auto terms = [&](int64_t j, bool less_query) CONE_BODY {
            return scaled_terms(position + i * wide_d, first + j * p.k.stride[2], scale[part + j], d, less_query);
          };
          const bool less_query = strip.base[i] > T(0);
          int64_t j = 0;
          for (; j + kLanes<T> <= rows; j += kLanes<T>) {
            Vec<T> several[kLanes<T>];
#pragma GCC unroll 1
            for (int lane = 0; lane < kLanes<T>; ++lane) several[lane] = terms(j + lane, less_query);
            store<T>(row + j, sums_of<T>(several));
          }
          for (; j < rows; ++j) row[j] = sum<T>(terms(j, less_query));
          std::fill(row + rows, row + all, T(0));
          if (less_query) {
            const T limit = near_limit(strip, i);
            for (j = 0; j < rows; j += kLanes<T>) {
              const Int<T> near = load<T>(row + j) < limit;
              for (int lane = 0; any<T>(near) && lane < kLanes<T>; ++lane)
                if (near[lane])
                  put_near(strip, i, sum<T>(terms(j + lane, false)), scores + i * n, part + j + lane, part + all);
            }
          }
          Int<T> small = ~Int<T>{};
          for (j = 0; j < all; j += kLanes<T>) small &= vabs<T>(load<T>(row + j)) < T(1e25);
          fine &= coneheads::all<T>(small);
        }
      }
      if (!fine) return false;
      weigh(strip, made, {nullptr, nullptr, level, aux, d}, nullptr, start, padded, scores, n, true, spare);
      for (int64_t i = 0; i < p.length; ++i) add_rows(scores + i * n, value, count, output + i * wide(), columns);
    }
    for (int64_t i = 0; i < p.length; ++i)
      if (is_bad<T>(output + i * wide(), columns)) return false;
    finish(strip, made);
    return true;
  }

  /// The measure m of a near pair, into its place in a row of `done` measures less |q|^2. If the key is much nearer than
  /// the base of the row, that is left: measures are whole from there on.
  void put_near(Strip& strip, int64_t i, T m, T* row, int64_t place, int64_t done) const {
    if (strip.base[i] > T(0) && m < strip.sq[i] * kMuchNearer<T>) {
      for (int64_t j = 0; j < done; ++j) row[j] += strip.sq[i];
      strip.base[i] = 0;
    }
    row[place] = strip.base[i] > T(0) ? m - strip.sq[i] : m;
  }
  /// below it, a measure less |q|^2 is that of a near pair
  static T near_limit(const Strip& strip, int64_t i) { return strip.sq[i] * (kNear<T> - T(1)); }
  /// Terms that add up to the measure of a query at `a` and a key of features f at scale * f, or to that less |a|^2.
  CONE_INLINE Vec<T> scaled_terms(const T* a, const T* f, T scale, int64_t n, bool less_query) const {
    Vec<T> total = {};
    if (less_query)
      for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
        const Vec<T> x = vector.load(f + i) * scale;
        total += x * (x - vector.load(a + i) * T(2));
      });
    else if (p.score.product)
      for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY { total += vector.load(a + i) * vector.load(f + i); });
    else
      for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
        const Vec<T> difference = vector.load(f + i) * scale - vector.load(a + i);
        total += difference * difference;
      });
    return total;
  }
  /// output += sum of weights[j] values[j]
  void add_rows(const T* weights, const T* values, int64_t count, T* output, int64_t columns) const {
    constexpr int kVectors = 8;
    const int64_t step = p.v.stride[2];
    int64_t c = 0;
    for (; c + kVectors * kLanes<T> <= columns; c += kVectors * kLanes<T>) {
      Vec<T> total[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) total[i] = load<T>(output + c + i * kLanes<T>);
      for (int64_t j = 0; j < count; ++j)
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) total[i] += load<T>(values + j * step + c + i * kLanes<T>) * weights[j];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) store<T>(output + c + i * kLanes<T>, total[i]);
    }
    for (; c < columns; c += kLanes<T>) {
      Vec<T> total = load<T>(output + c);
      for (int64_t j = 0; j < count; ++j) total += load<T>(values + j * step + c) * weights[j];
      store<T>(output + c, total);
    }
  }

  void rows(int64_t b, int64_t h) const {
    const int64_t d = p.coordinates, kv = h / p.group, wide_d = round_up<int64_t>(p.features, kLanes<T>);
    constexpr int64_t n = kForwardKeys;
    Buffer<T> memory(kRows * (wide_d + wide() + n + 3) + 4 * n + n * wide() + n + 3 * p.features + 4 * kLanes<T>);
    T* position = memory.get();
    T* output = position + kRows * wide_d;
    T* scores = output + kRows * wide();
    T* numbers = scores + kRows * n;
    T* key_numbers = numbers + 3 * kRows;
    T* values = key_numbers + 4 * n;
    T* spare = values + n * wide();
    uint8_t bad[kRows] = {}, bad_keys[n];
    const MadeScore made = p.made(b, h);
    const Tokens<T> queries{numbers, numbers + kRows, numbers + 2 * kRows, bad};
    Strip strip = strip_of(b, h, made, queries, position, wide_d, spare, output);
    const Tokens<T> keys{key_numbers, key_numbers + n, key_numbers + 2 * n, bad_keys};
    T* x = spare + n + 2 * p.features + 2 * kLanes<T>;
    for (int64_t start = 0; start < p.last_key(p.length - 1); start += n) {
      const int64_t count = std::min(n, p.keys - start), padded = round_up<int64_t>(count, kPanel<T>);
      std::fill_n(key_numbers, 4 * n, T(0));
      std::fill_n(bad_keys, n, uint8_t(0));
      keys.make(p, p.k, b, kv, made, start, start + count, spare);
      begin_block(strip);
      for (int64_t j = 0; j < count; ++j) {
        point<T>(p, p.k, b, kv, start + j, keys.scale[j], bad_keys[j], nullptr, spare, x);
        for (int64_t i = 0; i < p.length; ++i) {
          const T* own = position + i * wide_d;
          T& measure = scores[i * n + j];
          if (strip.base[i] > T(0)) {
            measure = distance_sq_less<T>(own, x, d);
            if (measure < near_limit(strip, i)) put_near(strip, i, distance_sq<T>(own, x, d), scores + i * n, j, j);
          } else {
            measure = p.score.product ? dot_product<T>(own, x, d) : distance_sq<T>(own, x, d);
          }
        }
      }
      for (int64_t i = 0; i < p.length; ++i) std::fill(scores + i * n + count, scores + i * n + padded, T(0));
      const bool any_bad = pack_values<T>(p, b, kv, start, count, values, n * kPanel<T>, bad_keys);
      accumulate(strip, made, {nullptr, nullptr, keys.level, keys.aux, d}, any_bad ? bad_keys : nullptr, start,
                 padded, scores, n, true, {values, kPanel<T>, n * kPanel<T>}, spare);
    }
    finish(strip, made);
  }
};

}  // namespace coneheads
