// One call of attention, as forward and backward see it, and how its work is shared among threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <vector>

#include "lifts.h"
#include "rows.h"
#include "tensors.h"

namespace coneheads {

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

}  // namespace coneheads
