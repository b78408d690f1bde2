// The operators coneheads::cpp_attention and coneheads::cpp_attention_backward for the CPU, on torch's stable ABI.
// Their schemas, shapes for tracing and autograd are in cpp.py.

#include <torch/csrc/stable/library.h>

#include <optional>

#include "backward.h"
#include "forward.h"

namespace coneheads {

using torch::stable::Tensor;

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

std::tuple<Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask,
                                     std::optional<Tensor> seed, std::vector<Tensor> tensors,
                                     std::vector<double> numbers, int64_t score, int64_t lift, bool is_causal,
                                     double dropout_p) {
  Tensor out = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2), value.size(3)});
  Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Double);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p =
        problem_of<T>(query, key, value, mask, seed, tensors, numbers, score, lift, is_causal, dropout_p);
    Forward<T>{p, static_cast<char*>(out.data_ptr()), query.scalar_type(), static_cast<double*>(lse.data_ptr())}.run();
  };
  query.scalar_type() == ScalarType::Double ? run(0.0) : run(0.0f);
  return {out, lse};
}

/// -> dq, dk, dv, then the gradient of the mask and of each tensor, of shape [0] where not wanted
std::vector<Tensor> attention_backward(Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask,
                                       std::optional<Tensor> seed, std::vector<Tensor> tensors,
                                       std::vector<double> numbers, int64_t score, int64_t lift, bool is_causal,
                                       double dropout_p, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse,
                                       bool mask_wanted) {
  const ScalarType dtype = query.scalar_type();
  const ScalarType wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  auto zeros = [&](const Tensor& like) { return torch::stable::new_zeros(query, like.sizes(), wide); };
  std::vector<Tensor> grads{zeros(query), zeros(key), zeros(value)};
  grads.push_back(mask_wanted ? zeros(*mask) : torch::stable::new_empty(query, {0}, wide));
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
    // Half precision: gradients were gathered in float.
    if (dtype == wide) return;
    for (int i = 0; i < 3; ++i) {
      Tensor narrow = torch::stable::new_empty(query, grads[i].sizes());
      const T* from = static_cast<const T*>(grads[i].data_ptr());
      char* to = static_cast<char*>(narrow.data_ptr());
      constexpr int64_t kBlock = 1 << 14;
      const int64_t n = grads[i].numel();
      for_each_task((n + kBlock - 1) / kBlock, n < 4 * kBlock, [&](int64_t block) {
        const int64_t at = block * kBlock;
        write_row<T>(from + at, dtype, std::min(kBlock, n - at), to + at * bytes_of(dtype));
      });
      grads[i] = narrow;
    }
  };
  dtype == ScalarType::Double ? run(0.0) : run(0.0f);
  if (mask_wanted && mask->scalar_type() != wide) grads[3] = torch::stable::to(grads[3], mask->scalar_type());
  return grads;
}

}  // namespace coneheads

STABLE_TORCH_LIBRARY_IMPL(coneheads, CPU, library) {
  library.impl("cpp_attention", TORCH_BOX(&coneheads::attention));
  library.impl("cpp_attention_backward", TORCH_BOX(&coneheads::attention_backward));
}
