// Strips of queries and their running softmax: what forward does with the scores of a block of keys.
#pragma once

#include "points.h"
#include "softmax.h"

namespace coneheads {

inline constexpr int64_t kForwardKeys = 512;  // keys of a block
inline constexpr int64_t kSumKeys = 256;  // keys whose values are summed before they are added to the output: rounds less

template <class T>
struct Strips {
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
};

}  // namespace coneheads
