// Attention on the edges of a graph: for each target node, a softmax over its incoming edges.
//
// The edges come in two orders: by target (rows, for the softmax and the queries) and by source (columns, for the gradients
// of keys and values). A task owns nodes, so nothing is written twice and the order of all sums is fixed. Nodes are points
// once; an edge costs the distance of two of them, and no message is kept. Backward keeps three numbers for each edge and
// head: its weight, and what the gradients of measure and level are.
#pragma once

#include "nodes.h"
#include "softmax.h"

namespace coneheads {

/// One order of the edges: those of node i are [start[i], start[i + 1]).
struct EdgeOrder {
  const int64_t* start;
  const int32_t* other;  // the node at the other end
  const int32_t* place;  // by target: the number of the edge; by source: its place in the order by target
  int64_t nodes;
  int64_t degree(int64_t i) const { return start[i + 1] - start[i]; }
};

/// Blocks of nodes with about as many edges each.
inline std::vector<int64_t> blocks_of_nodes(const EdgeOrder& order) {
  constexpr int64_t kEdges = 4096, kNodes = 1024;
  std::vector<int64_t> bounds{0};
  for (int64_t i = 0; i < order.nodes; ++i)
    if (i + 1 - bounds.back() >= kNodes || order.start[i + 1] - order.start[bounds.back()] >= kEdges)
      bounds.push_back(i + 1);
  if (bounds.back() < order.nodes) bounds.push_back(order.nodes);
  return bounds;
}

template <class T>
struct Edges {
  const Problem<T>& p;  // batch 1; length: targets, keys: sources
  EdgeOrder rows;

  /// The incoming edges of one node: rows of numbers, one for each head, `row` apart.
  struct Work {
    int64_t row = 0;
    Buffer<T> memory{};
    T *measures = nullptr, *weights = nullptr, *levels = nullptr, *auxs = nullptr, *zeros = nullptr;
    T *slopes = nullptr, *level_grads = nullptr, *slope_sums = nullptr;
    T* kept = nullptr;  // of dropout
    std::vector<uint32_t> columns{};
  };
  Work work_for(int64_t first, int64_t last, bool backward) const {
    int64_t most = 0;
    for (int64_t i = first; i < last; ++i) most = std::max(most, rows.degree(i));
    Work w;
    w.row = round_up<int64_t>(most, kPanel<float>);  // of which there are more than of double
    const int64_t all = w.row * p.heads;
    w.memory = Buffer<T>((backward ? 8 : 5) * all + w.row);
    w.columns.resize(size_t(w.row));
    T* next = w.memory.get();
    auto take = [&](T*& place, int64_t n) {
      place = next;
      next += n;
    };
    take(w.measures, all);
    take(w.weights, all);
    take(w.levels, all);
    take(w.auxs, all);
    take(w.kept, all);
    take(w.zeros, w.row);
    std::fill_n(w.zeros, w.row, T(0));
    if (backward) {
      take(w.slopes, all);
      take(w.level_grads, all);
      take(w.slope_sums, all);
    }
    return w;
  }

  /// Measures and levels of the edges of target i; whether a node of them is bad, for each head.
  void gather(int64_t i, const Nodes<T>& queries, const Nodes<T>& keys, Work& w, T* bad) const {
    const int64_t first = rows.start[i], n = rows.degree(i), heads = p.heads;
    const T* q = queries.position(i);
    std::copy(queries.bad(i), queries.bad(i) + heads, bad);
    for (int64_t e = 0; e < n; ++e) {
      const int64_t j = rows.other[first + e];
      const int64_t ahead = first + e + 3;
      if (ahead < rows.start[rows.nodes]) keys.prefetch(rows.other[ahead]);
      if (p.score.product) {
        measure_heads<T, true>(q, keys.position(j), heads, keys.wide, w.measures + e, w.row);
      } else {
        measure_heads<T, false>(q, keys.position(j), heads, keys.wide, w.measures + e, w.row);
      }
      const T *level = keys.level(j), *aux = keys.aux(j), *mark = keys.bad(j);
      for (int64_t h = 0; h < heads; ++h) {
        w.levels[h * w.row + e] = level[h];
        w.auxs[h * w.row + e] = aux[h];
        bad[h] += mark[h];
      }
    }
    // What pads a row has weight 0, and must not make NaN of it.
    const int64_t padded = round_up<int64_t>(n, kPanel<T>);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t e = n; e < padded; ++e)
        for (T* numbers : {w.measures, w.levels, w.auxs}) numbers[h * w.row + e] = numbers[h * w.row + n - 1];
  }
  /// The weights of the edges of target i, before dropout. NaN where the node or one that it attends to is bad.
  void weigh(int64_t i, const Nodes<T>& queries, const Nodes<T>& keys, const std::vector<MadeScore>& made, Work& w,
             T* bad) const {
    gather(i, queries, keys, w, bad);
    const int64_t n = rows.degree(i), padded = round_up<int64_t>(n, kPanel<T>);
    for (int64_t h = 0; h < p.heads; ++h) {
      T* weights = w.weights + h * w.row;
      T base = 0;  // measures are whole
      const T best = p.score.score(made[size_t(h)].bytes, {padded, w.measures + h * w.row, weights, query(i, h, queries),
                                                           keys_of(h, w), true, false, n, &base});
      const T total = exp_row<T>(weights, padded, best);
      const T factor = bad[h] != T(0) ? std::numeric_limits<T>::quiet_NaN() : T(1) / total;
      for (int64_t e = 0; e < padded; e += kLanes<T>) store<T>(weights + e, load<T>(weights + e) * factor);
    }
  }
  Query<T> query(int64_t i, int64_t h, const Nodes<T>& queries) const {
    return {queries.position(i) + h * queries.wide, T(0), queries.level(i)[h], queries.aux(i)[h]};
  }
  /// Squared norms of 0: no pair is near, since measures are exact.
  Keys<T> keys_of(int64_t h, const Work& w) const {
    return {nullptr, w.zeros, w.levels + h * w.row, w.auxs + h * w.row, p.coordinates};
  }
  /// Whether the weights of target i are kept, by the numbers of its edges: 1/(1-p) or 0 for each, in `kept`.
  void draw(int64_t i, Work& w) const {
    if (p.dropout_p == 0) return;
    const int64_t first = rows.start[i], n = rows.degree(i);
    const uint32_t high = uint32_t(p.seed >> 32), low = uint32_t(p.seed), limit = uint32_t(p.dropout_p * 4294967296.0);
    const T scale = T(1) / T(1 - p.dropout_p);
    for (int64_t e = 0; e < n; ++e) w.columns[e] = mix(uint32_t(rows.place[first + e]) ^ high);
    for (int64_t h = 0; h < p.heads; ++h) {
      // The counter of dropout.py, with the head as the row and the edge as the column.
      const uint32_t word = mix(mix(uint32_t(h) ^ low) ^ mix(high));
      T* kept = w.kept + h * w.row;
      for (int64_t e = 0; e < n; e += kLanes<float>) {
        Bits<float> x;
        std::memcpy(&x, w.columns.data() + e, sizeof x);
        x ^= word;
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        x ^= x >> 16;
        for (int lane = 0; lane < kLanes<float>; ++lane) kept[e + lane] = x[lane] >= limit ? scale : T(0);
      }
    }
  }
  /// Multiplies rows of numbers of target i by what ``draw`` has found.
  void drop(int64_t i, T* numbers, const Work& w) const {
    if (p.dropout_p == 0) return;
    const int64_t padded = round_up<int64_t>(rows.degree(i), kLanes<T>);
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t e = 0; e < padded; e += kLanes<T>) {
        T* place = numbers + h * w.row + e;
        store<T>(place, load<T>(place) * load<T>(w.kept + h * w.row + e));
      }
  }
  std::vector<MadeScore> made() const {
    std::vector<MadeScore> scores(static_cast<size_t>(p.heads));
    for (int64_t h = 0; h < p.heads; ++h) scores[size_t(h)] = p.made(0, h);
    return scores;
  }
  bool is_small() const { return rows.start[rows.nodes] * p.heads * (p.features + p.values) < (int64_t(1) << 16); }
};

/// out [targets][heads][values] in `dtype`; weights [edges][heads] in `dtype` or null, in the order that they were given in.
template <class T>
struct EdgeForward {
  Edges<T> edges;
  char *out, *weights;
  ScalarType dtype;

  void run() const {
    const Problem<T>& p = edges.p;
    const Nodes<T> keys(p, p.k, &p.v, p.keys);
    // Where nodes attend with the features that they are attended by, a node is one point.
    const bool same = p.q.data == p.k.data && p.length == p.keys && std::equal(p.q.stride, p.q.stride + 4, p.k.stride);
    const Nodes<T> others(p, p.q, nullptr, same ? 0 : p.length);
    const Nodes<T>& queries = same ? keys : others;
    const std::vector<MadeScore> made = edges.made();
    const std::vector<int64_t> bounds = blocks_of_nodes(edges.rows);
    for_each_task(int64_t(bounds.size()) - 1, edges.is_small(), [&](int64_t block) {
      const int64_t from = bounds[size_t(block)], to = bounds[size_t(block) + 1], wide = keys.wide_values;
      auto w = edges.work_for(from, to, false);
      std::vector<T> sums(size_t(p.heads * wide)), by_head(size_t(p.heads));
      for (int64_t i = from; i < to; ++i) {
        std::fill(sums.begin(), sums.end(), T(0));
        const int64_t first = edges.rows.start[i], n = edges.rows.degree(i);
        if (n > 0) {
          edges.weigh(i, queries, keys, made, w, by_head.data());
          edges.draw(i, w);
          edges.drop(i, w.weights, w);
        }
        for (int64_t e = 0; e < n; ++e) {
          const T* v = keys.values(edges.rows.other[first + e]);
          for (int64_t h = 0; h < p.heads; ++h) {
            by_head[size_t(h)] = w.weights[h * w.row + e];
            add_scaled<T>(sums.data() + h * wide, by_head[size_t(h)], v + h * wide, wide);
          }
          if (weights)
            write_row<T>(by_head.data(), dtype, p.heads,
                         weights + edges.rows.place[first + e] * p.heads * bytes_of(dtype));
        }
        for (int64_t h = 0; h < p.heads; ++h)
          write_row<T>(sums.data() + h * wide, dtype, p.values,
                       out + (i * p.heads + h) * p.values * bytes_of(dtype));
      }
    });
  }
};

/// Gradients of the points and values, [nodes][heads][features or values], gathered in T; then of the features.
template <class T>
struct EdgeBackward {
  Edges<T> edges;
  EdgeOrder columns;  // by source
  View grad_out;  // [1, H, targets, values]
  const T* grad_weights;  // [edges][heads], or null
  T *grad_q, *grad_k, *grad_v;
  bool parameters_wanted;
  std::vector<double> parameter_sums;  // [heads][kMaxParameters]

  void run() {
    const Problem<T>& p = edges.p;
    const Nodes<T> queries(p, p.q, &grad_out, p.length), keys(p, p.k, &p.v, p.keys);
    // of each edge: the weights of all heads, then their slopes, then the gradients of the key's levels
    const Buffer<T> numbers(edges.rows.start[edges.rows.nodes] * 3 * p.heads);
    by_target(queries, keys, numbers.get());
    by_source(queries, keys, numbers.get());
  }

 private:
  bool has_levels() const { return edges.p.lifter.has_level() && !edges.p.score.product; }

  void by_target(const Nodes<T>& queries, const Nodes<T>& keys, T* numbers) {
    const Problem<T>& p = edges.p;
    const std::vector<MadeScore> made = edges.made();
    const std::vector<int64_t> bounds = blocks_of_nodes(edges.rows);
    const int64_t blocks = int64_t(bounds.size()) - 1, each = p.heads * kMaxParameters, heads = p.heads;
    std::vector<double> sums(size_t(blocks * each), 0.0);
    for_each_task(blocks, edges.is_small(), [&](int64_t block) {
      const int64_t from = bounds[size_t(block)], to = bounds[size_t(block) + 1];
      auto w = edges.work_for(from, to, true);
      std::vector<T> pulled(size_t(heads * keys.wide)), bad(static_cast<size_t>(heads)), spare(size_t(p.features));
      for (int64_t i = from; i < to; ++i) {
        T* g = grad_q + i * heads * p.features;
        std::fill_n(g, heads * p.features, T(0));
        const int64_t first = edges.rows.start[i], n = edges.rows.degree(i), padded = round_up<int64_t>(n, kPanel<T>);
        if (n == 0) continue;
        edges.weigh(i, queries, keys, made, w, bad.data());
        // slopes: first the gradients of the weights
        for (int64_t e = 0; e < n; ++e) {
          const T* v = keys.values(edges.rows.other[first + e]);
          measure_heads<T, true>(queries.values(i), v, heads, keys.wide_values, w.slopes + e, w.row);
          if (!grad_weights) continue;
          const T* more = grad_weights + edges.rows.place[first + e] * heads;
          for (int64_t h = 0; h < heads; ++h) w.slopes[h * w.row + e] += more[h];
        }
        edges.draw(i, w);
        edges.drop(i, w.slopes, w);
        for (int64_t h = 0; h < heads; ++h) {
          T *s = w.slopes + h * w.row, *weight = w.weights + h * w.row;
          std::fill(s + n, s + padded, T(0));
          Vec<T> products = {};
          for (int64_t e = 0; e < padded; e += kLanes<T>) products += load<T>(weight + e) * load<T>(s + e);
          std::fill_n(w.level_grads + h * w.row, padded, T(0));
          std::fill_n(w.slope_sums + h * w.row, padded, T(0));
          SlopeRow<T> row{padded, w.measures + h * w.row, weight, s, sum<T>(products), edges.query(i, h, queries),
                          edges.keys_of(h, w), w.level_grads + h * w.row, w.slope_sums + h * w.row, nullptr, nullptr,
                          nullptr, 0};
          p.score.slopes(made[size_t(h)].bytes, row, parameters_wanted);
          if (has_levels()) g[h * p.features + p.coordinates] = row.query_level_grad;
          for (int k = 0; k < kMaxParameters && parameters_wanted; ++k)
            sums[size_t(block * each + h * kMaxParameters + k)] += row.parameter_grad[k];
        }
        edges.drop(i, w.weights, w);
        std::fill(pulled.begin(), pulled.end(), T(0));
        for (int64_t e = 0; e < n; ++e) {
          const T* k = keys.position(edges.rows.other[first + e]);
          T* to_edge = numbers + (first + e) * 3 * heads;
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t own = h * w.row + e;
            to_edge[h] = w.weights[own];
            to_edge[heads + h] = w.slopes[own];
            to_edge[2 * heads + h] = w.level_grads[own];
            pull(pulled.data() + h * keys.wide, w.slopes[own], queries.position(i) + h * keys.wide, k + h * keys.wide);
          }
        }
        finish(p.q, i, queries, pulled.data(), g, spare.data());
      }
    });
    parameter_sums.assign(size_t(each), 0.0);
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t k = 0; k < each; ++k) parameter_sums[size_t(k)] += sums[size_t(block * each + k)];
  }

  void by_source(const Nodes<T>& queries, const Nodes<T>& keys, const T* numbers) const {
    const Problem<T>& p = edges.p;
    const std::vector<int64_t> bounds = blocks_of_nodes(columns);
    const int64_t heads = p.heads, wide = keys.wide, wide_values = keys.wide_values, last = columns.start[columns.nodes];
    for_each_task(int64_t(bounds.size()) - 1, edges.is_small(), [&](int64_t block) {
      std::vector<T> pulled(size_t(heads * wide)), sums(size_t(heads * wide_values)), spare(size_t(p.features));
      for (int64_t j = bounds[size_t(block)]; j < bounds[size_t(block) + 1]; ++j) {
        T *g = grad_k + j * heads * p.features, *gv = grad_v + j * heads * p.values;
        std::fill_n(g, heads * p.features, T(0));
        std::fill(pulled.begin(), pulled.end(), T(0));
        std::fill(sums.begin(), sums.end(), T(0));
        const T* k = keys.position(j);
        for (int64_t at = columns.start[j]; at < columns.start[j + 1]; ++at) {
          if (at + 3 < last) {
            queries.prefetch(columns.other[at + 3]);
            __builtin_prefetch(numbers + int64_t(columns.place[at + 3]) * 3 * heads);
            __builtin_prefetch(numbers + int64_t(columns.place[at + 3]) * 3 * heads + 2 * heads);
          }
          const int64_t i = columns.other[at];
          const T* edge = numbers + int64_t(columns.place[at]) * 3 * heads;
          const T *q = queries.position(i), *grad = queries.values(i);
          for (int64_t h = 0; h < heads; ++h) {
            add_scaled<T>(sums.data() + h * wide_values, edge[h], grad + h * wide_values, wide_values);
            pull(pulled.data() + h * wide, edge[heads + h], k + h * wide, q + h * wide);
            if (has_levels()) g[h * p.features + p.coordinates] += edge[2 * heads + h];
          }
        }
        for (int64_t h = 0; h < heads; ++h)
          std::copy_n(sums.data() + h * wide_values, p.values, gv + h * p.values);
        finish(p.k, j, keys, pulled.data(), g, spare.data());
      }
    });
  }

  /// What an edge with this slope gives to the point `own`: see SlopeRow.
  CONE_INLINE void pull(T* g, T slope, const T* own, const T* other) const {
    const int64_t wide = round_up<int64_t>(edges.p.coordinates, kLanes<T>);
    if (edges.p.score.product) return add_scaled<T>(g, slope, other, wide);
    for (int64_t i = 0; i < wide; i += kLanes<T>)
      store<T>(g + i, load<T>(g + i) + (load<T>(other + i) - load<T>(own + i)) * slope);
  }
  /// The gradient of a node's positions, and of its levels in g, become that of its features.
  void finish(const View& features, int64_t node, const Nodes<T>& nodes, const T* pulled, T* g, T* spare) const {
    const Problem<T>& p = edges.p;
    for (int64_t h = 0; h < p.heads; ++h) {
      T* own = g + h * p.features;
      std::copy_n(pulled + h * nodes.wide, p.coordinates, own);
      if (nodes.bad(node)[h] != T(0)) {
        std::fill_n(own, p.features, T(0));
      } else {
        lift_backward<T>(p.lifter, p.features, features.row<T>(0, h, node, spare), nodes.scale(node)[h], own);
      }
    }
  }
};

}  // namespace coneheads
