// Forward: for a few rows at a time, the scores with a block of keys, their running softmax, and the output.
//
// A strip of kRows queries and a block of keys make scores that stay in the first cache; the block's keys and values
// stay in the second while the strips of a task pass over it.
#pragma once

#include "points.h"
#include "softmax.h"

namespace coneheads {

inline constexpr int64_t kForwardKeys = 512;  // keys of a block
inline constexpr int64_t kForwardRows = 16 * kRows;  // queries of a task
inline constexpr int64_t kSumKeys = 256;  // keys whose values are summed before they are added to the output: rounds less

template <class T>
struct Forward {
  const Problem<T>& p;
  char* out;
  ScalarType out_dtype;
  double* lse;

  int64_t wide() const { return round_up<int64_t>(p.values, kPanel<T>); }

  /// The rows of a strip, and their running softmax.
  struct Strip {
    int64_t b, h, first, count;
    int64_t padded = 0;  // rows of the products: whole tiles, if there is room for them
    Tokens<T> tokens{};
    const T* position = nullptr;  // [kRows][position_row]
    int64_t position_row = 0;
    T sq[kRows] = {}, largest[kRows] = {}, total[kRows] = {};
    T base[kRows] = {}, own_base[kRows] = {};  // what is left out of the scores of this block, and of `largest`
    bool is_nan[kRows] = {};
    T* output = nullptr;  // [kRows][wide]
  };

  /// What a block of keys adds to a strip. `products` hold the products, or the measures themselves.
  void accumulate(Strip& strip, const MadeScore& made, const Keys<T>& keys, const uint8_t* bad, int64_t from, int64_t n,
                  T* products, int64_t row, bool measured, Panels<T> values, T* spare) const {
    weigh(strip, made, keys, bad, from, n, products, row, measured, spare);
    const int64_t used = std::min(n, p.last_key(strip.first + strip.count - 1) - from);  // what pads them has weight 0
    for (int64_t first = 0; first < used; first += kSumKeys)
      multiply<T, Read::rows>(strip.padded, wide(), std::min(kSumKeys, used - first), {products + first, row},
                              {values.data + first * kPanel<T>, values.row, values.panel}, strip.output, wide(), true);
  }

  /// The part of it before the values: products or measures become weights, relative to the largest score so far.
  void weigh(Strip& strip, const MadeScore& made, const Keys<T>& keys, const uint8_t* bad, int64_t from, int64_t n,
             T* products, int64_t row, bool measured, T* spare) const {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    // All scores before all exponentials: no row waits for the largest of its own scores.
    T best[kRows];
    for (int64_t i = 0; i < strip.count; ++i) {
      const int64_t number = strip.first + i, valid = p.last_key(number) - from;
      T* scores = products + i * row;
      const Query<T> query{strip.position + i * strip.position_row, strip.sq[i], strip.tokens.level[i],
                           strip.tokens.aux[i]};
      best[i] = p.score.score(made.bytes, {n, scores, scores, query, keys, measured, false, valid, &strip.base[i]});
      if (p.has_mask || bad)
        best[i] = apply_masks<T>(p, strip.b, strip.h, number, from, valid, n, bad, scores, spare, strip.is_nan[i]);
    }
    for (int64_t i = 0; i < strip.count; ++i) {
      T& largest = strip.largest[i];
      double relative = largest;  // to what this block leaves out
      if (strip.base[i] != strip.own_base[i])
        relative += p.score.left_out(made.bytes, T(0), strip.own_base[i] - strip.base[i]);
      if (best[i] > relative) {
        if (largest != -infinity) {  // what is there counts less now
          const T kept = T(std::exp2(relative - double(best[i])));
          strip.total[i] *= kept;
          for (int64_t j = 0; j < wide(); j += kLanes<T>)
            store<T>(strip.output + i * wide() + j, load<T>(strip.output + i * wide() + j) * kept);
        }
        relative = largest = best[i];
        strip.own_base[i] = strip.base[i];
      }
      T* weights = products + i * row;
      if (largest == -infinity) strip.total[i] += exp_row<T>(weights, n, T(0));
      else if (T(relative) == relative) strip.total[i] += exp_row<T>(weights, n, T(relative));
      else strip.total[i] += exp_row<T, true>(weights, n, T(relative), T(relative - double(T(relative))));
    }
    if (p.dropout_p > 0)
      for (int64_t i = 0; i < strip.count; ++i)
        drop_row<T>(p, strip.b, strip.h, strip.first + i, from, n, products + i * row);
  }

  /// The position of row i.
  void place(Strip& strip, int64_t i, const T* centre, T* spare, T* position) const {
    strip.sq[i] = point<T>(p, p.q, strip.b, strip.h, strip.first + i, strip.tokens.scale[i], strip.tokens.bad[i], centre,
                           spare, position);
  }
  /// What is left out of the scores of a block, before its keys are seen.
  void begin_block(Strip& strip) const {
    for (int64_t i = 0; i < strip.count; ++i) strip.base[i] = full_base<T>(p.score.relative, strip.sq[i]);
  }
  void begin(Strip& strip) const {
    std::fill_n(strip.largest, kRows, -std::numeric_limits<T>::infinity());
    std::fill_n(strip.output, strip.padded * wide(), T(0));
  }

  void finish(const Strip& strip, const MadeScore& made) const {
    const int64_t head = (strip.b * p.heads + strip.h) * p.length;
    for (int64_t i = 0; i < strip.count; ++i) {
      T* row = strip.output + i * wide();
      const bool empty = strip.total[i] == T(0) && !strip.is_nan[i];
      const bool is_nan = strip.is_nan[i] || (strip.tokens.bad[i] && !empty);
      const T factor = empty ? T(0) : is_nan ? std::numeric_limits<T>::quiet_NaN() : T(1) / strip.total[i];
      for (int64_t j = 0; j < wide(); j += kLanes<T>) store<T>(row + j, load<T>(row + j) * factor);
      const int64_t number = head + strip.first + i;
      write_row<T>(row, out_dtype, p.values, out + number * p.values * bytes_of(out_dtype));
      const double left_out = p.score.left_out(made.bytes, strip.tokens.level[i], strip.own_base[i]);
      lse[number] = empty ? -std::numeric_limits<double>::infinity()
                          : is_nan ? std::numeric_limits<double>::quiet_NaN()
                                   : (left_out + double(strip.largest[i]) + std::log2(double(strip.total[i]))) / kLog2E;
    }
  }

  // ---- many queries: keys and values packed once a head ----

  void run() const {
    if (p.batch * p.heads * p.length == 0) return;
    if (p.length <= kFewRows) return run_few();
    KeyTokens<T> tokens(p);
    const int64_t heads = p.batch * p.kv_heads, padded = tokens.padded;
    const int64_t key_size = padded * p.coordinates, value_size = padded * wide();
    auto pack = [&](int64_t head, T* keys, T* values) {
      const int64_t b = head / p.kv_heads, h = head % p.kv_heads;
      tokens.make(p, b, h);
      pack_keys<T>(p, tokens, b, h, 0, p.keys, keys, nullptr, 0, tokens.sq(head));
      tokens.any_bad[size_t(head)] = pack_values<T>(p, b, h, 0, p.keys, values, padded * kPanel<T>, tokens.marks(head));
    };
    const int64_t blocks = (p.length + kForwardRows - 1) / kForwardRows;
    auto block_of_rows = [&](int64_t b, int64_t h, int64_t block, const T* keys, const T* values) {
      rows(b, h, block * kForwardRows, std::min(p.length, (block + 1) * kForwardRows), tokens, keys, values);
    };
    if (p.heads_are_enough(heads)) {
      for_each_task(heads, p.is_small(), [&](int64_t head) {
        Buffer<T> keys(key_size), values(value_size);
        pack(head, keys.get(), values.get());
        for (int64_t i = 0; i < p.group * blocks; ++i)
          block_of_rows(head / p.kv_heads, head % p.kv_heads * p.group + i / blocks, i % blocks, keys.get(),
                        values.get());
      });
    } else {
      Buffer<T> keys(heads * key_size), values(heads * value_size);
      for_each_task(heads, p.is_small(), [&](int64_t head) {
        pack(head, keys.get() + head * key_size, values.get() + head * value_size);
      });
      for_each_task(p.batch * p.heads * blocks, p.is_small(), [&](int64_t task) {
        // The last rows first: with is_causal they take longest.
        const int64_t block = blocks - 1 - task % blocks, h = task / blocks % p.heads, b = task / blocks / p.heads;
        const int64_t head = b * p.kv_heads + h / p.group;
        block_of_rows(b, h, block, keys.get() + head * key_size, values.get() + head * value_size);
      });
    }
  }

  void rows(int64_t b, int64_t h, int64_t from, int64_t to, const KeyTokens<T>& tokens, const T* packed_keys,
            const T* packed_values) const {
    const int64_t head = b * p.kv_heads + h / p.group, count = to - from, d = p.coordinates;
    const int64_t score_row = kForwardKeys + kPanel<T>, padded_count = round_up<int64_t>(count, kRows);
    Buffer<T> memory(padded_count * (d + wide() + 3) + kRows * score_row + kForwardKeys + 2 * p.features +
                     4 * kLanes<T>);
    T* position = memory.get();
    T* output = position + padded_count * d;
    T* numbers = output + padded_count * wide();
    T* scores = numbers + 3 * padded_count;
    T* spare = scores + kRows * score_row;
    std::vector<uint8_t> bad(size_t(padded_count), 0);
    std::fill_n(numbers, 3 * padded_count, T(0));
    std::fill_n(position + count * d, (padded_count - count) * d, T(0));
    std::fill_n(scores, kRows * score_row, T(0));
    const MadeScore made = p.made(b, h);
    const Tokens<T> queries{numbers, numbers + padded_count, numbers + 2 * padded_count, bad.data()};
    queries.make(p, p.q, b, h, made, from, to, spare);

    std::vector<Strip> strips;
    strips.reserve(size_t(padded_count / kRows));
    for (int64_t first = 0; first < count; first += kRows) {
      Strip strip{b, h, from + first, std::min<int64_t>(kRows, count - first)};
      strip.tokens = {queries.scale + first, queries.level + first, queries.aux + first, queries.bad + first};
      strip.position = position + first * d;
      strip.position_row = d;
      strip.output = output + first * wide();
      strip.padded = kRows;
      for (int64_t i = 0; i < strip.count; ++i)
        place(strip, i, tokens.centre(head), spare, position + (first + i) * d);
      begin(strip);
      strips.push_back(strip);
    }
    const uint8_t* bad_keys = tokens.any_bad[size_t(head)] ? tokens.marks(head) : nullptr;
    for (int64_t start = 0; start < p.last_key(to - 1); start += kForwardKeys) {
      const int64_t block = std::min(kForwardKeys, tokens.padded - start);
      const Keys<T> keys{packed_keys + start * d, tokens.sq(head) + start, tokens.level(head) + start,
                         tokens.aux(head) + start, d};
      for (Strip& strip : strips) {
        const int64_t needed = p.last_key(strip.first + strip.count - 1) - start;
        if (needed <= 0) continue;
        begin_block(strip);
        const int64_t n = std::min(block, round_up<int64_t>(needed, kPanel<T>));
        const Panels<T> values{packed_values + start * kPanel<T>, kPanel<T>, tokens.padded * kPanel<T>};
        if (d > kFewCoordinates || p.score.product)
          multiply<T, Read::rows>(strip.padded, std::min(n, round_up<int64_t>(needed, kLanes<T>)), d,
                                  {strip.position, d}, {keys.transposed, kPanel<T>, kPanel<T> * d}, scores, score_row,
                                  false);
        accumulate(strip, made, keys, bad_keys ? bad_keys + start : nullptr, start, n, scores, score_row, false, values,
                   spare);
      }
    }
    for (const Strip& strip : strips) finish(strip, made);
  }

  // ---- few queries: every key is read once, as it lies ----

  void run_few() const {
    const bool same = sizeof(T) == size_t(p.k.bytes) && p.k.stride[3] == 1 && p.v.stride[3] == 1;
    const bool plain = same && !p.lifter.is_direction() && p.values % kLanes<T> == 0;
    for_each_task(p.batch * p.heads, p.is_small(), [&](int64_t task) {
      const int64_t b = task / p.heads, h = task % p.heads;
      if constexpr (sizeof(T) == 4)
        if (plain && plain_few_rows(b, h)) return;
      few_rows(b, h);
    });
  }

  /// few_rows for keys and values that can be read where they lie, without a look at whether they are numbers and
  /// within their limits. False if the result shows that they are not: then nothing was written.
  bool plain_few_rows(int64_t b, int64_t h) const {
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
    std::fill_n(position, kRows * wide_d, T(0));
    Strip strip{b, h, 0, p.length};
    strip.tokens = {numbers, numbers + kRows, numbers + 2 * kRows, bad};
    strip.tokens.make(p, p.q, b, h, made, 0, p.length, spare);
    strip.position = position;
    strip.position_row = wide_d;
    strip.output = output;
    strip.padded = p.length;
    for (int64_t i = 0; i < p.length; ++i) place(strip, i, nullptr, spare, position + i * wide_d);
    begin(strip);
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

  void few_rows(int64_t b, int64_t h) const {
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
    std::fill_n(position, kRows * wide_d, T(0));
    Strip strip{b, h, 0, p.length};
    strip.tokens = {numbers, numbers + kRows, numbers + 2 * kRows, bad};
    strip.tokens.make(p, p.q, b, h, made, 0, p.length, spare);
    strip.position = position;
    strip.position_row = wide_d;
    strip.output = output;
    strip.padded = p.length;
    for (int64_t i = 0; i < p.length; ++i) place(strip, i, nullptr, spare, position + i * wide_d);
    begin(strip);
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
