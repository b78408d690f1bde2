// Forward: for a few rows at a time, the scores with a block of keys, their running softmax, and the output.
//
// A strip of kRows queries and a block of keys make scores that stay in the first cache; the block's keys and values
// stay in the second while the strips of a task pass over it. Keys and values are packed once a head.
#pragma once

#include "few_rows.h"

namespace coneheads {

inline constexpr int64_t kForwardRows = 16 * kRows;  // queries of a task

template <class T>
struct Forward : Strips<T> {
  using Strip = typename Strips<T>::Strip;
  using Strips<T>::p, Strips<T>::wide, Strips<T>::place, Strips<T>::begin, Strips<T>::begin_block, Strips<T>::finish;
  using Strips<T>::accumulate;

  void run() const {
    if (p.batch * p.heads * p.length == 0) return;
    if (p.length <= kFewRows) return FewRows<T>{*this}.run();
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
};

}  // namespace coneheads
