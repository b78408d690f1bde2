// One call of attention, as forward and backward see it; and the tokens of a head as points, packed for the kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "lifts.h"
#include "rows.h"
#include "tensors.h"

namespace coneheads {

inline constexpr std::align_val_t kAlignment{64};

/// Freed blocks of memory, a few for each thread, to be used again: new memory comes page by page from the system, which
/// can take longer than what is done with it.
class Blocks {
 public:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };
  static Block take(size_t bytes) {
    for (Block& block : of_this_thread().kept_)
      if (block.data && block.bytes >= bytes && block.bytes <= 2 * bytes + kPage) return std::exchange(block, Block{});
    return {::operator new(bytes, kAlignment), bytes};
  }
  static void give(Block block) {
    if (block.bytes <= kLargest) {
      Blocks& blocks = of_this_thread();
      std::swap(block, blocks.kept_[blocks.next_]);
      blocks.next_ = (blocks.next_ + 1) % kCount;
    }
    ::operator delete(block.data, kAlignment);
  }

 private:
  static constexpr int kCount = 6;
  static constexpr size_t kPage = 1 << 16, kLargest = 2 << 20;
  Block kept_[kCount];
  int next_ = 0;
  static Blocks& of_this_thread() {
    static thread_local Blocks blocks;
    return blocks;
  }
  Blocks() = default;
  ~Blocks() {
    for (Block& block : kept_) ::operator delete(block.data, kAlignment);
  }
};

/// Memory for n numbers, not initialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : block_(Blocks::take(sizeof(T) * size_t(std::max<int64_t>(n, 1)))) {}
  Buffer(Buffer&& other) noexcept : block_(std::exchange(other.block_, {})) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Buffer() {
    if (block_.data) Blocks::give(block_);
  }
  T* get() const { return static_cast<T*>(block_.data); }

 private:
  Blocks::Block block_;
};

/// Calls task(i) for i < count on torch's threads, each thread taking the next one when it is free.
template <class Task>
void for_each_task(int64_t count, bool alone, const Task& task) {
  const int64_t threads = alone ? 1 : std::min<int64_t>(count, torch::stable::get_num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

template <class T>
struct Problem {
  View q, k, v, mask;
  bool has_mask = false, is_causal = false;
  double dropout_p = 0;
  uint64_t seed = 0;
  int64_t batch, heads, kv_heads, group, length, keys, features, coordinates, values;
  Lifter<T> lifter;
  ScoreFunctions<T> score;
  // parameters of the score: numbers, or tensors [B|1, H|1, 1, 1]
  T numbers[kMaxParameters] = {0, 0};
  std::vector<View> tensors;

  /// The score with the parameters of a head.
  MadeScore made(int64_t b, int64_t h) const {
    T parameters[kMaxParameters];
    for (int i = 0; i < kMaxParameters; ++i)
      parameters[i] = i < int(tensors.size()) ? *reinterpret_cast<const T*>(tensors[i].at(b, h)) : numbers[i];
    MadeScore made;
    score.make(parameters, made.bytes);
    return made;
  }
  /// Whether the call is too small for a second thread to pay.
  bool is_small() const { return batch * heads * length * keys * (features + values + 32) < (int64_t(1) << 18); }
  /// Whether the key heads alone keep all threads busy to the end, so that a task can be a whole head.
  bool heads_are_enough(int64_t at_once) const {
    const int64_t threads = is_small() ? 1 : int64_t(torch::stable::get_num_threads());
    return at_once % threads == 0 || at_once >= 4 * threads;
  }
  /// the keys that row i may attend to, with is_causal
  int64_t last_key(int64_t i) const { return is_causal ? std::min(keys, i + 1) : keys; }
};

/// Whether a row holds NaN or inf.
template <class T>
bool is_bad(const T* row, int64_t n) {
  T test = 0;
  int64_t i = 0;
  Vec<T> tests = {};
  for (; i + kLanes<T> <= n; i += kLanes<T>) tests += load<T>(row + i) * T(0);
  for (; i < n; ++i) test += row[i] * T(0);
  return !(test + sum<T>(tests) == T(0));
}

/// The position of a row of features: saturated, scaled, saturated again.
template <class T>
CONE_INLINE void positions(const Lifter<T>& lifter, const T* f, int64_t n, T scale, T* to) {
  const T limit = lifter.feature_limit(), most = T(kPositionLimit);
  auto clamp = [](Vec<T> x, T bound) { return vmin<T>(vmax<T>(x, splat<T>(-bound)), splat<T>(bound)); };
  int64_t i = 0;
  if (lifter.is_direction()) {
    for (; i + kLanes<T> <= n; i += kLanes<T>) store<T>(to + i, clamp(load<T>(f + i), limit) / scale);
    for (; i < n; ++i) to[i] = std::clamp(f[i], -limit, limit) / scale;
  } else {
    for (; i + kLanes<T> <= n; i += kLanes<T>)
      store<T>(to + i, clamp(clamp(load<T>(f + i), limit) * scale, most));
    for (; i < n; ++i) to[i] = std::clamp(std::clamp(f[i], -limit, limit) * scale, -most, most);
  }
}
template <class T>
CONE_INLINE T square_norm(const T* x, int64_t n) {
  Vec<T> total = {};
  T rest = 0;
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    Vec<T> v = load<T>(x + i);
    total += v * v;
  }
  for (; i < n; ++i) rest += x[i] * x[i];
  return sum<T>(total) + rest;
}

/// scale, level and aux of tokens [from, to) of a head. A bad row counts as zeros, and is marked.
template <class T>
struct Tokens {
  T *scale, *level, *aux;
  uint8_t* bad;

  void make(const Problem<T>& p, const View& features, int64_t b, int64_t h, const MadeScore& made, int64_t from,
            int64_t to, T* spare) const {
    constexpr int64_t kBlock = 64;
    T last[kBlock], norm_sq[kBlock], scales[kBlock], levels[kBlock], auxs[kBlock];
    for (int64_t start = from; start < to; start += kBlock) {
      const int64_t n = std::min(kBlock, to - start);
      for (int64_t i = 0; i < kBlock; ++i) last[i] = norm_sq[i] = 0;
      for (int64_t i = 0; i < n; ++i) {
        const T* f = features.row<T>(b, h, start + i, spare);
        bad[start - from + i] = is_bad<T>(f, p.features);
        if (bad[start - from + i]) continue;
        last[i] = f[p.features - 1];
        if (p.lifter.is_direction()) {
          positions<T>(p.lifter, f, p.coordinates, T(1), spare + p.features);
          norm_sq[i] = square_norm<T>(spare + p.features, p.coordinates);
        }
      }
      p.lifter.lift(round_up<int64_t>(n, kLanes<T>), last, norm_sq, scales, levels);
      p.score.aux(made.bytes, n, levels, auxs);
      std::copy(scales, scales + n, scale + (start - from));
      std::copy(levels, levels + n, level + (start - from));
      std::copy(auxs, auxs + n, aux + (start - from));
    }
  }
};

/// The position of row i of a head, relative to `centre` (null: 0), into `to`. A bad row is 0 before centring.
template <class T>
void point(const Problem<T>& p, const View& features, int64_t b, int64_t h, int64_t i, T scale, bool bad,
           const T* centre, T* spare, T* to) {
  if (bad) {
    std::fill(to, to + p.coordinates, T(0));
  } else {
    positions<T>(p.lifter, features.row<T>(b, h, i, spare), p.coordinates, scale, to);
  }
  if (!centre) return;
  int64_t j = 0;
  for (; j + kLanes<T> <= p.coordinates; j += kLanes<T>) store<T>(to + j, load<T>(to + j) - load<T>(centre + j));
  for (; j < p.coordinates; ++j) to[j] -= centre[j];
}

/// The keys of all key heads as points: tokens, and the centre of each head.
///
/// Distances do not change under translation, but |a|^2 + |b|^2 - 2ab loses digits when all points are far from the
/// origin. So a coordinate is taken relative to the mean of the keys where that is larger than their spread; elsewhere
/// not, so that the differences of near points stay exact.
template <class T>
struct KeyTokens {
  int64_t padded;
  Buffer<T> numbers, centres;
  Buffer<uint8_t> bad;
  std::vector<uint8_t> any_bad;

  explicit KeyTokens(const Problem<T>& p)
      : padded(round_up<int64_t>(p.keys, kPanel<T>)),
        numbers(p.batch * p.kv_heads * 4 * padded),
        centres(p.batch * p.kv_heads * p.coordinates),
        bad(p.batch * p.kv_heads * padded),
        any_bad(size_t(p.batch * p.kv_heads)) {}
  T* scale(int64_t head) const { return numbers.get() + head * 4 * padded; }
  T* level(int64_t head) const { return scale(head) + padded; }
  T* aux(int64_t head) const { return scale(head) + 2 * padded; }
  T* sq(int64_t head) const { return scale(head) + 3 * padded; }
  T* centre(int64_t head) const { return centres.get() + head * coordinates_; }
  uint8_t* marks(int64_t head) const { return bad.get() + head * padded; }

  void make(const Problem<T>& p, int64_t b, int64_t h) {
    coordinates_ = p.coordinates;
    const int64_t head = b * p.kv_heads + h, d = p.coordinates;
    std::vector<T> spare(size_t(2 * p.features + 2 * kLanes<T>)), first(size_t(d + kLanes<T>)),
        second(size_t(d + kLanes<T>)), x(size_t(d + kLanes<T>));
    std::fill(scale(head), scale(head) + 4 * padded, T(0));
    std::fill(marks(head), marks(head) + padded, uint8_t(0));
    Tokens<T>{scale(head), level(head), aux(head), marks(head)}.make(p, p.k, b, h, p.made(b, h * p.group), 0, p.keys,
                                                                     spare.data());
    // What pads the keys has weight 0, and must not make NaN of it.
    if (p.keys > 0) {
      std::fill(level(head) + p.keys, level(head) + padded, level(head)[0]);
      std::fill(aux(head) + p.keys, aux(head) + padded, aux(head)[0]);
    }
    T* c = centre(head);
    std::fill(c, c + d, T(0));
    if (p.score.product || d <= kFewCoordinates) return;
    for (int64_t i = 0; i < p.keys; ++i) {
      point<T>(p, p.k, b, h, i, scale(head)[i], marks(head)[i], nullptr, spare.data(), x.data());
      for (int64_t j = 0; j < d; j += kLanes<T>) {
        const Vec<T> v = load<T>(x.data() + j);
        store<T>(first.data() + j, load<T>(first.data() + j) + v);
        store<T>(second.data() + j, load<T>(second.data() + j) + v * v);
      }
    }
    for (int64_t j = 0; j < d; ++j) {
      const T mean = first[j] / T(p.keys), mean_sq = mean * mean;
      if (mean_sq > second[j] / T(p.keys) - mean_sq) c[j] = mean;
    }
  }

 private:
  int64_t coordinates_ = 0;
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
      point<T>(p, p.k, b, h, key, tokens.scale(head)[key], tokens.marks(head)[key], tokens.centre(head), spare.data(),
               to);
      if (sq) sq[start + i] = square_norm<T>(to, d);
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

// ---- the softmax side of a row ----

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
        scores[j] += spare[j];
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

/// scores -> exp(scores - base - rest), and their sum
template <class T>
T exp_row(T* scores, int64_t n, T base, T rest = T(0)) {
  Vec<T> total = {};
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    Vec<T> e = vexp_weight<T>(load<T>(scores + j) - base - rest);
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
