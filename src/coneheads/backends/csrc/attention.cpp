// The operators coneheads::cpp_attention and coneheads::cpp_edge_attention and their backwards for the CPU, on torch's stable
// ABI. Their schemas, shapes for tracing and autograd are in cpp.py and cpp_edges.py.

#include <torch/csrc/stable/library.h>

#include <optional>

#include "backward.h"
#include "edges.h"
#include "forward.h"

namespace coneheads {

using torch::stable::Tensor;

/// A contiguous tensor without values. torch::stable::new_empty would look its operator up by name at every call, which
/// small calls feel.
Tensor new_tensor(std::initializer_list<int64_t> size, ScalarType dtype) {
  int64_t strides[4], stride = 1;
  for (size_t i = size.size(); i-- > 0; stride *= std::max<int64_t>(size.begin()[i], 1)) strides[i] = stride;
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(size.size()), size.begin(), strides, number,
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

template <class T>
Problem<T> problem_of(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                      const std::optional<Tensor>& seed, const std::vector<Tensor>& tensors,
                      const std::vector<double>& numbers, int64_t score, int64_t lift, bool is_causal,
                      double dropout_p) {
  Problem<T> p;
  p.q = View(query);
  p.k = View(key);
  p.v = View(value);
  p.has_mask = mask.has_value();
  if (p.has_mask) p.mask = View(*mask);
  p.is_causal = is_causal;
  p.dropout_p = seed.has_value() ? dropout_p : 0;
  if (seed.has_value()) p.seed = uint64_t(*static_cast<const int64_t*>(seed->data_ptr()));
  p.batch = p.q.size[0];
  p.heads = p.q.size[1];
  p.length = p.q.size[2];
  p.features = p.q.size[3];
  p.kv_heads = p.k.size[1];
  p.keys = p.k.size[2];
  p.values = p.v.size[3];
  p.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 1;
  // numbers: the parameters of the score, then the inner parameter of the lift and the scale of the last feature
  const size_t own = numbers.size() - 2;
  for (size_t i = 0; i < own && i < size_t(kMaxParameters); ++i) p.numbers[i] = T(numbers[i]);
  p.lifter = {static_cast<Lift>(lift), T(numbers[own]), T(numbers[own + 1])};
  p.coordinates = p.lifter.coordinates(p.features);
  p.score = kScores<T>[score];
  for (const Tensor& tensor : tensors) p.tensors.emplace_back(tensor);
  return p;
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& mask, const std::optional<Tensor>& seed,
                                     const std::vector<Tensor>& tensors, const std::vector<double>& numbers,
                                     int64_t score, int64_t lift, bool is_causal, double dropout_p) {
  Tensor out = new_tensor({query.size(0), query.size(1), query.size(2), value.size(3)}, query.scalar_type());
  Tensor lse = new_tensor({query.size(0), query.size(1), query.size(2)}, ScalarType::Double);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p =
        problem_of<T>(query, key, value, mask, seed, tensors, numbers, score, lift, is_causal, dropout_p);
    Forward<T>{{p, static_cast<char*>(out.data_ptr()), query.scalar_type(), static_cast<double*>(lse.data_ptr())}}.run();
  };
  query.scalar_type() == ScalarType::Double ? run(0.0) : run(0.0f);
  return {out, lse};
}

/// Gradients that were gathered in T, in the dtype of `like`: half precision saturates.
template <class T>
Tensor in_dtype_of(const Tensor& like, const Tensor& gathered) {
  const ScalarType dtype = like.scalar_type();
  if (dtype == gathered.scalar_type()) return gathered;
  Tensor narrow = torch::stable::new_empty(like, gathered.sizes());
  const T* from = static_cast<const T*>(gathered.data_ptr());
  char* to = static_cast<char*>(narrow.data_ptr());
  constexpr int64_t kBlock = 1 << 14;
  const int64_t n = gathered.numel();
  for_each_task((n + kBlock - 1) / kBlock, n < 4 * kBlock, [&](int64_t block) {
    const int64_t at = block * kBlock;
    write_row<T>(from + at, dtype, std::min(kBlock, n - at), to + at * bytes_of(dtype));
  });
  return narrow;
}

/// -> dq, dk, dv, then the gradient of the mask and of each tensor, of shape [0] where not wanted
std::vector<Tensor> attention_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const std::optional<Tensor>& mask, const std::optional<Tensor>& seed,
                                       const std::vector<Tensor>& tensors, const std::vector<double>& numbers,
                                       int64_t score, int64_t lift, bool is_causal, double dropout_p, const Tensor& out,
                                       const Tensor& lse, const Tensor& grad_out, const Tensor& grad_lse,
                                       bool mask_wanted) {
  const ScalarType dtype = query.scalar_type();
  const ScalarType wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  auto zeros = [&](const Tensor& like) { return torch::stable::new_zeros(query, like.sizes(), wide); };
  std::vector<Tensor> grads{zeros(query), zeros(key), zeros(value)};
  grads.push_back(mask_wanted ? zeros(*mask) : new_tensor({0}, wide));
  for (const Tensor& tensor : tensors) grads.push_back(zeros(tensor));
  const Tensor contiguous_lse = torch::stable::contiguous(lse), contiguous_grad = torch::stable::contiguous(grad_lse);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p =
        problem_of<T>(query, key, value, mask, seed, tensors, numbers, score, lift, is_causal, dropout_p);
    Backward<T> backward{p,
                         View(out),
                         View(grad_out),
                         static_cast<const double*>(contiguous_lse.data_ptr()),
                         static_cast<const double*>(contiguous_grad.data_ptr()),
                         static_cast<T*>(grads[0].data_ptr()),
                         static_cast<T*>(grads[1].data_ptr()),
                         static_cast<T*>(grads[2].data_ptr()),
                         mask_wanted ? static_cast<T*>(grads[3].data_ptr()) : nullptr,
                         !tensors.empty(),
                         {},
                         1};
    backward.run();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const View shape(tensors[i]);
      T* to = static_cast<T*>(grads[4 + i].data_ptr());
      for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t h = 0; h < p.heads; ++h)
          for (int64_t s = 0; s < backward.splits; ++s)
            to[b % shape.size[0] * shape.size[1] + h % shape.size[1]] += T(
                backward.parameter_sums[size_t(((b * p.heads + h) * backward.splits + s) * kMaxParameters + int64_t(i))]);
    }
    for (int i = 0; i < 3; ++i) grads[size_t(i)] = in_dtype_of<T>(query, grads[size_t(i)]);
  };
  dtype == ScalarType::Double ? run(0.0) : run(0.0f);
  if (mask_wanted && mask->scalar_type() != wide) grads[3] = torch::stable::to(grads[3], mask->scalar_type());
  return grads;
}

inline EdgeOrder order_of(const Tensor& start, const Tensor& other, const Tensor& place) {
  return {static_cast<const int64_t*>(start.data_ptr()), static_cast<const int32_t*>(other.data_ptr()),
          static_cast<const int32_t*>(place.data_ptr()), start.size(0) - 1};
}

/// query [1, H, targets, E], key and value [1, H, sources, ...] -> out [targets, H, Ev], and weights [edges, H], or [0]
std::tuple<Tensor, Tensor> edge_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const std::vector<Tensor>& by_target, const std::vector<Tensor>&,
                                          const std::optional<Tensor>& seed, const std::vector<Tensor>& tensors,
                                          const std::vector<double>& numbers, int64_t score, int64_t lift,
                                          double dropout_p, bool weights_wanted) {
  const int64_t heads = query.size(1), count = by_target[1].size(0);
  const ScalarType dtype = query.scalar_type();
  Tensor out = new_tensor({query.size(2), heads, value.size(3)}, dtype);
  Tensor weights = weights_wanted ? new_tensor({count, heads}, dtype) : new_tensor({0}, dtype);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p =
        problem_of<T>(query, key, value, std::nullopt, seed, tensors, numbers, score, lift, false, dropout_p);
    EdgeForward<T>{{p, order_of(by_target[0], by_target[1], by_target[2])},
                   static_cast<char*>(out.data_ptr()),
                   weights_wanted ? static_cast<char*>(weights.data_ptr()) : nullptr,
                   query.scalar_type()}
        .run();
  };
  query.scalar_type() == ScalarType::Double ? run(0.0) : run(0.0f);
  return {out, weights};
}

/// -> dq [targets, H, E], dk [sources, H, E], dv [sources, H, Ev], then the gradient of each tensor
std::vector<Tensor> edge_attention_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const std::vector<Tensor>& by_target, const std::vector<Tensor>& by_source,
                                            const std::optional<Tensor>& seed, const std::vector<Tensor>& tensors,
                                            const std::vector<double>& numbers, int64_t score, int64_t lift,
                                            double dropout_p, const Tensor& grad_out,
                                            const std::optional<Tensor>& grad_weights) {
  const ScalarType dtype = query.scalar_type();
  const ScalarType wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  auto like = [&](const Tensor& t) { return new_tensor({t.size(2), t.size(1), t.size(3)}, wide); };
  std::vector<Tensor> grads{like(query), like(key), like(value)};
  for (const Tensor& tensor : tensors) grads.push_back(torch::stable::new_zeros(query, tensor.sizes(), wide));
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p =
        problem_of<T>(query, key, value, std::nullopt, seed, tensors, numbers, score, lift, false, dropout_p);
    EdgeBackward<T> backward{{p, order_of(by_target[0], by_target[1], by_target[2])},
                             order_of(by_source[0], by_source[1], by_source[2]),
                             View(grad_out),
                             grad_weights.has_value() ? static_cast<const T*>(grad_weights->data_ptr()) : nullptr,
                             static_cast<T*>(grads[0].data_ptr()),
                             static_cast<T*>(grads[1].data_ptr()),
                             static_cast<T*>(grads[2].data_ptr()),
                             !tensors.empty(),
                             {}};
    backward.run();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t own = View(tensors[i]).size[1];
      for (int64_t h = 0; h < p.heads; ++h)
        static_cast<T*>(grads[3 + i].data_ptr())[h % own] += T(backward.parameter_sums[size_t(h * kMaxParameters) + i]);
    }
    for (int i = 0; i < 3; ++i) grads[size_t(i)] = in_dtype_of<T>(query, grads[size_t(i)]);
  };
  dtype == ScalarType::Double ? run(0.0) : run(0.0f);
  return grads;
}

}  // namespace coneheads

// TORCH_BOX would copy what a function takes by value, at every call.
STABLE_TORCH_LIBRARY_IMPL(coneheads, CPU, library) {
  library.impl("cpp_edge_attention", TORCH_BOX(&coneheads::edge_attention));
  library.impl("cpp_edge_attention_backward", TORCH_BOX(&coneheads::edge_attention_backward));
  library.impl("cpp_attention", TORCH_BOX(&coneheads::attention));
  library.impl("cpp_attention_backward", TORCH_BOX(&coneheads::attention_backward));
}
