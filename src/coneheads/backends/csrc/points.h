// The tokens of a head as points, and packed as the products read them.
#pragma once

#include "memory.h"
#include "problem.h"

namespace coneheads {

/// With so few queries to a head, packing its keys costs more than it saves.
inline constexpr int64_t kFewRows = 4;

/// Whether a row holds NaN or inf.
template <class T>
bool is_bad(const T* row, int64_t n) {
  Vec<T> tests = {};
  for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY { tests += vector.load(row + i) * T(0); });
  return any<T>(tests != T(0));
}

/// The position of a row of features: saturated, scaled, saturated again, relative to `centre` (null: 0). Its square norm.
template <class T>
CONE_INLINE T positions(const Lifter<T>& lifter, const T* f, int64_t n, T scale, const T* centre, T* to) {
  const T limit = lifter.feature_limit(), most = T(kPositionLimit);
  auto clamp = [](Vec<T> x, T bound) CONE_BODY { return vmin<T>(vmax<T>(x, splat<T>(-bound)), splat<T>(bound)); };
  Vec<T> squares = {};
  auto put = [&](int64_t i, auto vector, Vec<T> x) CONE_BODY {
    if (centre) x -= vector.load(centre + i);
    vector.store(to + i, x);
    squares += x * x;
  };
  if (lifter.is_direction())
    for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
      put(i, vector, clamp(vector.load(f + i), limit) / scale);
    });
  else
    for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
      put(i, vector, clamp(clamp(vector.load(f + i), limit) * scale, most));
    });
  return sum<T>(squares);
}
template <class T>
CONE_INLINE T dot_product(const T* x, const T* y, int64_t n) {
  Vec<T> total = {};
  for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY { total += vector.load(x + i) * vector.load(y + i); });
  return sum<T>(total);
}
template <class T>
CONE_INLINE T distance_sq(const T* x, const T* y, int64_t n) {
  Vec<T> total = {};
  for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
    const Vec<T> difference = vector.load(x + i) - vector.load(y + i);
    total += difference * difference;
  });
  return sum<T>(total);
}
/// That less |x|^2, to the last bits of what keys y near the origin differ by.
template <class T>
CONE_INLINE T distance_sq_less(const T* x, const T* y, int64_t n) {
  Vec<T> total = {};
  for_vectors<T>(n, [&](int64_t i, auto vector) CONE_BODY {
    const Vec<T> b = vector.load(y + i);
    total += b * (b - vector.load(x + i) * T(2));
  });
  return sum<T>(total);
}
/// scale, level and aux of tokens of a head: of every `step`-th in [from, to). A bad row counts as zeros, and is marked.
template <class T>
struct Tokens {
  T *scale, *level, *aux;
  uint8_t* bad;

  void make(const Problem<T>& p, const View& features, int64_t b, int64_t h, const MadeScore& made, int64_t from,
            int64_t to, T* spare, int64_t step = 1) const {
    constexpr int64_t kBlock = 64;
    T last[kBlock], norm_sq[kBlock], scales[kBlock], levels[kBlock], auxs[kBlock];
    const int64_t count = (to - from + step - 1) / step;
    for (int64_t start = 0; start < count; start += kBlock) {
      const int64_t n = std::min(kBlock, count - start), padded = round_up<int64_t>(n, kLanes<T>);
      std::fill_n(last, padded, T(0));
      std::fill_n(norm_sq, padded, T(0));
      for (int64_t i = 0; i < n; ++i) {
        const int64_t number = from + (start + i) * step;
        features.prefetch(b, h, number);
        const T* f = features.row<T>(b, h, number, spare);
        bad[start + i] = is_bad<T>(f, p.features);
        if (bad[start + i]) continue;
        last[i] = f[p.features - 1];
        if (p.lifter.is_direction())
          norm_sq[i] = positions<T>(p.lifter, f, p.coordinates, T(1), nullptr, spare + p.features);
      }
      p.lifter.lift(padded, last, norm_sq, scales, levels);
      p.score.aux(made.bytes, n, levels, auxs);
      std::copy(scales, scales + n, scale + start);
      std::copy(levels, levels + n, level + start);
      std::copy(auxs, auxs + n, aux + start);
    }
  }
};

/// The position of row i of a head, relative to `centre` (null: 0), into `to`, and its square norm. A bad row is 0 before
/// centring.
template <class T>
T point(const Problem<T>& p, const View& features, int64_t b, int64_t h, int64_t i, T scale, bool bad, const T* centre,
        T* spare, T* to) {
  if (bad) std::fill_n(spare, p.features, T(0));
  return positions<T>(p.lifter, bad ? spare : features.row<T>(b, h, i, spare), p.coordinates, bad ? T(1) : scale, centre,
                      to);
}

/// The keys of all key heads as points: tokens, and the centre of each head.
///
/// Distances do not change under translation, but |a|^2 + |b|^2 - 2ab loses digits when all points are far from the
/// origin. So a coordinate is taken relative to the mean of some queries where that is larger than their spread, and the
/// mean of some keys is nearer to it than to the origin; elsewhere not, so that differences stay exact: those of near
/// points, and those of keys that are small beside the queries. (Only a pair of near points needs it. It is not the mean of
/// the keys, since that would be moved by those that are masked out, whatever they hold.) Few queries need none.
template <class T>
struct KeyTokens {
  int64_t padded;
  Buffer<T> numbers, centres;
  Buffer<uint8_t> bad;
  std::vector<uint8_t> any_bad, is_centred;

  explicit KeyTokens(const Problem<T>& p)
      : padded(round_up<int64_t>(p.keys, kPanel<T>)),
        numbers(p.batch * p.kv_heads * 4 * padded),
        centres(p.batch * p.kv_heads * p.coordinates),
        bad(p.batch * p.kv_heads * padded),
        any_bad(size_t(p.batch * p.kv_heads)),
        is_centred(size_t(p.batch * p.kv_heads)),
        coordinates_(p.coordinates) {}
  T* scale(int64_t head) const { return numbers.get() + head * 4 * padded; }
  T* level(int64_t head) const { return scale(head) + padded; }
  T* aux(int64_t head) const { return scale(head) + 2 * padded; }
  T* sq(int64_t head) const { return scale(head) + 3 * padded; }
  /// null if no coordinate of the head is relative to anything
  const T* centre(int64_t head) const { return is_centred[size_t(head)] ? centres.get() + head * coordinates_ : nullptr; }
  uint8_t* marks(int64_t head) const { return bad.get() + head * padded; }

  void make(const Problem<T>& p, int64_t b, int64_t h) {
    const int64_t head = b * p.kv_heads + h, d = p.coordinates;
    std::vector<T> spare(size_t(2 * p.features + 2 * kLanes<T>)), first(size_t(d + kLanes<T>)),
        second(size_t(d + kLanes<T>)), of_keys(size_t(d + kLanes<T>)), x(size_t(d + kLanes<T>));
    std::fill(scale(head), scale(head) + 4 * padded, T(0));
    std::fill(marks(head), marks(head) + padded, uint8_t(0));
    Tokens<T>{scale(head), level(head), aux(head), marks(head)}.make(p, p.k, b, h, p.made(b, h * p.group), 0, p.keys,
                                                                     spare.data());
    // What pads the keys has weight 0, and must not make NaN of it.
    if (p.keys > 0) {
      std::fill(level(head) + p.keys, level(head) + padded, level(head)[0]);
      std::fill(aux(head) + p.keys, aux(head) + padded, aux(head)[0]);
    }
    T* c = centres.get() + head * d;
    std::fill(c, c + d, T(0));
    if (p.score.product || d <= kFewCoordinates || p.length <= kFewRows) return;
    constexpr int64_t kSample = 32;
    const int64_t step = std::max<int64_t>(1, (p.length * p.group + kSample - 1) / kSample);
    T query_scale[kSample], query_level[kSample], query_aux[kSample];
    uint8_t mark[kSample];
    const Tokens<T> sample{query_scale, query_level, query_aux, mark};
    int64_t good = 0, offset = 0;
    for (int64_t query_head = h * p.group; query_head < (h + 1) * p.group; ++query_head) {
      // every step-th query of all heads that share the keys
      if (offset < p.length)
        sample.make(p, p.q, b, query_head, p.made(b, query_head), offset, p.length, spare.data(), step);
      for (int64_t n = 0; offset < p.length; ++n, offset += step) {
        if (mark[n]) continue;
        ++good;
        point<T>(p, p.q, b, query_head, offset, query_scale[n], false, nullptr, spare.data(), x.data());
        for (int64_t j = 0; j < d; j += kLanes<T>) {
          const Vec<T> v = load<T>(x.data() + j);
          store<T>(first.data() + j, load<T>(first.data() + j) + v);
          store<T>(second.data() + j, load<T>(second.data() + j) + v * v);
        }
      }
      offset -= p.length;
    }
    int64_t good_keys = 0;
    for (int64_t i = 0; i < p.keys; i += (p.keys + kSample - 1) / kSample) {
      if (marks(head)[i]) continue;
      ++good_keys;
      point<T>(p, p.k, b, h, i, scale(head)[i], false, nullptr, spare.data(), x.data());
      for (int64_t j = 0; j < d; j += kLanes<T>)
        store<T>(of_keys.data() + j, load<T>(of_keys.data() + j) + load<T>(x.data() + j));
    }
    for (int64_t j = 0; j < d && good > 0 && good_keys > 0; ++j) {
      const T mean = first[j] / T(good), mean_sq = mean * mean;
      const bool among_keys = of_keys[size_t(j)] / T(good_keys) * mean > mean_sq / 2;
      if (among_keys && mean_sq > second[j] / T(good) - mean_sq) {
        c[j] = mean;
        is_centred[size_t(head)] = 1;
      }
    }
  }

 private:
  int64_t coordinates_;
};

/// A block of keys, packed: n rows from `from`, padded with zeros to whole panels.
///   transposed [panel][coordinate][kPanel], for the scores; rows [column panel][key][kPanel], for dQ; sq: |a|^2
template <class T>
void pack_keys(const Problem<T>& p, const KeyTokens<T>& tokens, int64_t b, int64_t h, int64_t from, int64_t n,
               T* transposed, T* rows, int64_t rows_panel, T* sq) {
  const int64_t head = b * p.kv_heads + h, d = p.coordinates, wide = round_up<int64_t>(p.features, kPanel<T>);
  constexpr int64_t lanes = kLanes<T>;
  std::vector<T> spare(size_t(2 * p.features + 2 * lanes)), block(size_t(lanes * wide));
  for (int64_t start = 0; start < round_up<int64_t>(n, kPanel<T>); start += lanes) {
    std::fill(block.begin(), block.end(), T(0));
    for (int64_t i = 0; i < lanes && start + i < n; ++i) {
      T* to = block.data() + i * wide;
      const int64_t key = from + start + i;
      sq[start + i] = point<T>(p, p.k, b, h, key, tokens.scale(head)[key], tokens.marks(head)[key], tokens.centre(head),
                               spare.data(), to);
      if (rows)
        for (int64_t j = 0; j < wide; j += kPanel<T>)
          std::copy(to + j, to + j + kPanel<T>, rows + j / kPanel<T> * rows_panel + (start + i) * kPanel<T>);
    }
    T* panel = transposed + start / kPanel<T> * (kPanel<T> * d) + start % kPanel<T>;
    for (int64_t j = 0; j < d; j += lanes) {
      Vec<T> square[kLanes<T>];
      for (int64_t i = 0; i < lanes; ++i) square[i] = load<T>(block.data() + i * wide + j);
      transpose<T>(square);
      for (int64_t i = 0; i < lanes && j + i < d; ++i) store<T>(panel + (j + i) * kPanel<T>, square[i]);
    }
    if (rows)
      for (int64_t i = std::max<int64_t>(0, n - start); i < lanes; ++i)
        for (int64_t j = 0; j < wide; j += kPanel<T>)
          std::fill_n(rows + j / kPanel<T> * rows_panel + (start + i) * kPanel<T>, kPanel<T>, T(0));
  }
}

/// Values of keys [from, from + n): rows in column panels [panel][key][kPanel], bad rows as zeros and marked.
template <class T>
bool pack_values(const Problem<T>& p, int64_t b, int64_t h, int64_t from, int64_t n, T* panels, int64_t panel,
                 uint8_t* bad) {
  const int64_t wide = round_up<int64_t>(p.values, kPanel<T>);
  std::vector<T> spare(size_t(wide), T(0));
  bool found = false;
  for (int64_t i = 0; i < n; ++i) {
    p.v.prefetch(b, h, from + i);
    const T* row = p.v.template row<T>(b, h, from + i, spare.data());
    const bool here = is_bad<T>(row, p.values);
    bad[i] |= here;
    found |= bad[i];
    for (int64_t j = 0; j < wide; j += kPanel<T>) {
      T* to = panels + j / kPanel<T> * panel + i * kPanel<T>;
      const int64_t count = std::min<int64_t>(kPanel<T>, p.values - j);
      if (here) {
        std::fill_n(to, kPanel<T>, T(0));
      } else if (count == kPanel<T>) {
        for (int64_t c = 0; c < kPanel<T>; c += kLanes<T>) store<T>(to + c, load<T>(row + j + c));
      } else {
        std::copy(row + j, row + j + count, to);
        std::fill(to + count, to + kPanel<T>, T(0));
      }
    }
  }
  for (int64_t i = n; i < round_up<int64_t>(n, kPanel<T>); ++i)
    for (int64_t j = 0; j < wide; j += kPanel<T>)
      std::fill_n(panels + j / kPanel<T> * panel + i * kPanel<T>, kPanel<T>, T(0));
  return found;
}

/// Values transposed, in panels [panel][value][kPanel keys], for dO V^T.
template <class T>
void pack_values_transposed(const Problem<T>& p, int64_t b, int64_t h, int64_t from, int64_t n, const uint8_t* bad,
                            T* transposed) {
  constexpr int64_t lanes = kLanes<T>;
  const int64_t wide = round_up<int64_t>(p.values, kLanes<T>);
  std::vector<T> spare(size_t(p.values)), block(size_t(lanes * wide), T(0));
  for (int64_t start = 0; start < round_up<int64_t>(n, kPanel<T>); start += lanes) {
    for (int64_t i = 0; i < lanes; ++i) {
      T* to = block.data() + i * wide;
      if (start + i < n && !bad[start + i]) {
        const T* row = p.v.template row<T>(b, h, from + start + i, spare.data());
        std::copy(row, row + p.values, to);
      } else {
        std::fill(to, to + p.values, T(0));
      }
    }
    T* panel = transposed + start / kPanel<T> * (kPanel<T> * p.values) + start % kPanel<T>;
    for (int64_t j = 0; j < p.values; j += lanes) {
      Vec<T> square[kLanes<T>];
      for (int64_t i = 0; i < lanes; ++i) square[i] = load<T>(block.data() + i * wide + j);
      transpose<T>(square);
      for (int64_t i = 0; i < lanes && j + i < p.values; ++i) store<T>(panel + (j + i) * kPanel<T>, square[i]);
    }
  }
}

}  // namespace coneheads
