// Rows of strided tensors in any of the four dtypes, read and written as float or double.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>

#include "simd.h"

namespace coneheads {

using torch::headeronly::ScalarType;

inline float half_to_float(uint16_t h) {
  // Shifted into place the exponent is 112 too low; a multiplication corrects it, for denormal numbers too.
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff) << 13;
  float value;
  if (rest >= 0x0f800000u) {  // inf and NaN
    const uint32_t bits = sign | 0x7f800000u | (rest & 0x007fffffu);
    std::memcpy(&value, &bits, 4);
    return value;
  }
  std::memcpy(&value, &rest, 4);
  value *= 5.192296858534828e33f;  // 2^112
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}
/// to the nearest float16, ties to even; magnitudes above its largest number saturate there
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00;  // NaN
  if (bits >= 0x477ff000u) return sign | 0x7bff;
  if (bits < 0x38800000u) {  // denormal: the addition rounds at its last bit
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return sign | uint16_t(bits - 0x3f000000u);
  }
  return sign | uint16_t((bits + 0x0fffu + (bits >> 13 & 1) - 0x38000000u) >> 13);
}
inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The same for a vector of floats.
typedef uint16_t HalfVector __attribute__((vector_size(kVectorBytes / 2)));
CONE_INLINE Vec<float> bfloats_to_floats(const uint16_t* from) {
  HalfVector v;
  std::memcpy(&v, from, sizeof(v));
  return (Vec<float>)(__builtin_convertvector(v, Bits<float>) << 16);
}
CONE_INLINE void floats_to_bfloats(Vec<float> value, uint16_t* to) {
  const Bits<float> bits = (Bits<float>)value, rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const HalfVector v = __builtin_convertvector(value == value ? rounded : (bits >> 16 | 0x40), HalfVector);
  std::memcpy(to, &v, sizeof(v));
}

template <class T>
void read_row(const char* from, ScalarType dtype, int64_t step, int64_t n, T* __restrict to) {
  switch (dtype) {
    case ScalarType::Float: {
      const float* p = reinterpret_cast<const float*>(from);
      if (step == 1)
        for (int64_t i = 0; i < n; ++i) to[i] = T(p[i]);
      else
        for (int64_t i = 0; i < n; ++i) to[i] = T(p[i * step]);
      break;
    }
    case ScalarType::Double: {
      const double* p = reinterpret_cast<const double*>(from);
      for (int64_t i = 0; i < n; ++i) to[i] = T(p[i * step]);
      break;
    }
    case ScalarType::BFloat16: {
      const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
      int64_t i = 0;
      if constexpr (sizeof(T) == 4)
        if (step == 1)
          for (; i + kLanes<T> <= n; i += kLanes<T>) store<T>(to + i, bfloats_to_floats(p + i));
      for (; i < n; ++i) to[i] = T(bfloat_to_float(p[i * step]));
      break;
    }
    default: {  // Half
      const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
      int64_t i = 0;
#if defined(__F16C__)
      if constexpr (sizeof(T) == 4)
        if (step == 1)
          for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
      for (; i < n; ++i) to[i] = T(half_to_float(p[i * step]));
    }
  }
}

/// rows that are written are contiguous: the kernels made their tensors
template <class T>
void write_row(const T* __restrict from, ScalarType dtype, int64_t n, char* to) {
  switch (dtype) {
    case ScalarType::Float:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(to)[i] = float(from[i]);
      break;
    case ScalarType::Double:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<double*>(to)[i] = double(from[i]);
      break;
    case ScalarType::BFloat16: {
      uint16_t* p = reinterpret_cast<uint16_t*>(to);
      int64_t i = 0;
      if constexpr (sizeof(T) == 4)
        for (; i + kLanes<T> <= n; i += kLanes<T>) floats_to_bfloats(load<T>(from + i), p + i);
      for (; i < n; ++i) p[i] = float_to_bfloat(float(from[i]));
      break;
    }
    default: {
      uint16_t* p = reinterpret_cast<uint16_t*>(to);
      int64_t i = 0;
#if defined(__F16C__)
      if constexpr (sizeof(T) == 4) {
        const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
        for (; i + 8 <= n; i += 8) {
          // NaN, in the second place, stays what it is.
          const __m256 bounded = _mm256_min_ps(most, _mm256_max_ps(least, _mm256_loadu_ps(from + i)));
          _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT));
        }
      }
#endif
      for (; i < n; ++i) p[i] = float_to_half(float(from[i]));
    }
  }
}

inline int64_t bytes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return 8;
    case ScalarType::Float: return 4;
    case ScalarType::Bool: return 1;
    default: return 2;
  }
}

/// A tensor of four dimensions [B, H, L, E]. A size of 1 has stride 0, and so broadcasts.
struct View {
  char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t size[4] = {0, 0, 0, 0}, stride[4] = {0, 0, 0, 0}, bytes = 4;

  View() = default;
  explicit View(const torch::stable::Tensor& t) : data(static_cast<char*>(t.data_ptr())), dtype(t.scalar_type()) {
    bytes = bytes_of(dtype);
    for (int i = 0; i < 4; ++i) {
      size[i] = t.size(i);
      stride[i] = size[i] == 1 ? 0 : t.stride(i);
    }
  }
  char* at(int64_t b, int64_t h, int64_t row = 0) const {
    return data + bytes * (b * stride[0] + h * stride[1] + row * stride[2]);
  }
  /// Asks for a row that will be read some rows after this one.
  void prefetch(int64_t b, int64_t h, int64_t row) const {
    constexpr int64_t kAhead = 6, kLine = 64;
    const char* later = at(b, h, row + kAhead);
    for (int64_t byte = 0; byte < size[3] * bytes; byte += kLine) __builtin_prefetch(later + byte);
  }
  /// The row as numbers of type T: where it lies if it can, otherwise copied to `spare`.
  template <class T>
  const T* row(int64_t b, int64_t h, int64_t i, T* spare) const {
    const char* p = at(b, h, i);
    const bool same = dtype == (sizeof(T) == 4 ? ScalarType::Float : ScalarType::Double);
    if (same && (stride[3] == 1 || size[3] == 1)) return reinterpret_cast<const T*>(p);
    read_row<T>(p, dtype, stride[3], size[3], spare);
    return spare;
  }
};

}  // namespace coneheads
