// Vectors of the machine's width, and the few functions that kernels need on them.
//
// GCC's vector types give arithmetic and comparisons for every width from one source: 64 bytes with AVX-512, 32 with
// AVX2, 16 otherwise (SSE2, NEON). Only what they lack is written with intrinsics, each with a portable form beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace coneheads {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

#define CONE_INLINE inline __attribute__((always_inline))
#define CONE_BODY __attribute__((always_inline))  // of a lambda

template <class T>
struct Simd;
template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t U __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t U __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename Simd<T>::V;
template <class T>
using Int = typename Simd<T>::I;
/// for the bits of numbers, where lanes that do not count may overflow
template <class T>
using Bits = typename Simd<T>::U;
/// the lanes of a vector
template <class T>
inline constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
CONE_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
CONE_INLINE void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof(v));
}
template <class T>
CONE_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// ---- what vector types lack ----

template <class T>
CONE_INLINE Vec<T> vsqrt(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_sqrt_ps((__m512)x);
  else return (Vec<T>)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_sqrt_ps((__m256)x);
  else return (Vec<T>)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm_sqrt_ps((__m128)x);
  else return (Vec<T>)_mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)vsqrtq_f32((float32x4_t)x);
  else return (Vec<T>)vsqrtq_f64((float64x2_t)x);
#else
  for (int i = 0; i < kLanes<T>; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

/// a > b ? a : b in every lane: b where one is NaN
template <class T>
CONE_INLINE Vec<T> vmax(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
  else return (Vec<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
  else return (Vec<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm_max_ps((__m128)a, (__m128)b);
  else return (Vec<T>)_mm_max_pd((__m128d)a, (__m128d)b);
#else
  return a > b ? a : b;
#endif
}
/// a < b ? a : b in every lane
template <class T>
CONE_INLINE Vec<T> vmin(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_min_ps((__m512)a, (__m512)b);
  else return (Vec<T>)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_min_ps((__m256)a, (__m256)b);
  else return (Vec<T>)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm_min_ps((__m128)a, (__m128)b);
  else return (Vec<T>)_mm_min_pd((__m128d)a, (__m128d)b);
#else
  return a < b ? a : b;
#endif
}

/// 1/x for positive normal x, to the last bit or two; off the divider, which square roots need
template <class T>
CONE_INLINE Vec<T> vinverse(Vec<T> x) {
#if defined(__SSE2__)
  if constexpr (sizeof(T) == 4) {
#if defined(__AVX512F__)
    Vec<T> r = (Vec<T>)_mm512_rcp14_ps((__m512)x);
#elif defined(__AVX2__)
    Vec<T> r = (Vec<T>)_mm256_rcp_ps((__m256)x);
#else
    Vec<T> r = (Vec<T>)_mm_rcp_ps((__m128)x);
#endif
    return r * (T(2) - x * r);
  }
#endif
  return T(1) / x;
}
/// 1/sqrt(x) for positive normal x
template <class T>
CONE_INLINE Vec<T> vrsqrt_of_normal(Vec<T> x) {
#if defined(__SSE2__)
  if constexpr (sizeof(T) == 4) {
    // An estimate of 12 bits or more and one step of Newton's are faster than a root and a division.
#if defined(__AVX512F__)
    Vec<T> r = (Vec<T>)_mm512_rsqrt14_ps((__m512)x);
#elif defined(__AVX2__)
    Vec<T> r = (Vec<T>)_mm256_rsqrt_ps((__m256)x);
#else
    Vec<T> r = (Vec<T>)_mm_rsqrt_ps((__m128)x);
#endif
    return r + r * (T(0.5) - (x * T(0.5)) * r * r);
  }
#endif
  return T(1) / vsqrt<T>(x);
}
/// the same for x >= 0, and a finite number where x is 0 or denormal. (An addition is done beside products; a maximum would
/// wait for its turn among them.)
template <class T>
CONE_INLINE Vec<T> vrsqrt(Vec<T> x) {
  return vrsqrt_of_normal<T>(x + T(2.4e-38));
}
/// sqrt(x) - base from y = x - base^2, as y / (sqrt(x) + base): to the last bits of the difference. x and base are normal.
template <class T>
CONE_INLINE Vec<T> root_from(Vec<T> x, Vec<T> y, T base) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    // From estimates of 14 bits, and one step of Newton's for the difference d, of which d (d + 2 base) = y.
    const Vec<T> inverse = (Vec<T>)_mm512_rsqrt14_ps((__m512)x);
    const Vec<T> d = y * (Vec<T>)_mm512_rcp14_ps((__m512)(x * inverse + base));
    return d + (y - d * (d + T(2) * base)) * (inverse * T(0.5));
  }
#endif
  return y / (vsqrt<T>(x) + base);
}
/// whether any lane of a comparison is true
template <class T>
CONE_INLINE bool any(Int<T> m) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)m, (__m512i)m) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)m, (__m256i)m);
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)m) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes<T>; ++i) found |= m[i] != 0;
  return found;
#endif
}
template <class T>
CONE_INLINE bool all(Int<T> m) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_testc_si256((__m256i)m, _mm256_set1_epi32(-1));
#else
  return !any<T>(~m);
#endif
}

/// whether a < b in any lane
template <class T>
CONE_INLINE bool any_less(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ) != 0;
  else return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_LT_OQ) != 0;
#else
  return any<T>(a < b);
#endif
}

/// a where the comparison is true, b elsewhere
template <class T>
CONE_INLINE Vec<T> select(Int<T> m, Vec<T> a, Vec<T> b) {
  return m ? a : b;
}
/// a where the comparison is true, 0 elsewhere
template <class T>
CONE_INLINE Vec<T> keep_where(Int<T> m, Vec<T> a) {
  return (Vec<T>)((Int<T>)a & m);
}
template <class T>
CONE_INLINE Vec<T> vabs(Vec<T> x) {
  return (Vec<T>)((Int<T>)x & ~(Int<T>)splat<T>(T(-0.0)));
}

/// a positive number with the sign of every lane
template <class T>
CONE_INLINE Vec<T> with_sign(T size, Vec<T> x) {
  return (Vec<T>)(((Int<T>)x & (Int<T>)splat<T>(T(-0.0))) | (Int<T>)splat<T>(size));
}

/// All lanes put together by a function of two vectors, half of them at a time.
template <class T, class Join, int... kLane>
CONE_INLINE T joined(Vec<T> v, const Join& join, std::integer_sequence<int, kLane...>) {
  constexpr int n = kLanes<T>;
  if constexpr (n >= 16) v = join(v, __builtin_shufflevector(v, v, ((kLane + 8) % n)...));
  if constexpr (n >= 8) v = join(v, __builtin_shufflevector(v, v, ((kLane + 4) % n)...));
  if constexpr (n >= 4) v = join(v, __builtin_shufflevector(v, v, ((kLane + 2) % n)...));
  v = join(v, __builtin_shufflevector(v, v, ((kLane + 1) % n)...));
  return v[0];
}
template <class T>
CONE_INLINE T sum(Vec<T> v) {
  return joined<T>(v, [](Vec<T> a, Vec<T> b) CONE_BODY { return a + b; },
                   std::make_integer_sequence<int, kLanes<T>>());
}
template <class T>
CONE_INLINE T largest(Vec<T> v) {
  return joined<T>(v, [](Vec<T> a, Vec<T> b) CONE_BODY { return vmax<T>(a, b); },
                   std::make_integer_sequence<int, kLanes<T>>());
}

/// 0, 1, 2, ...
template <class T>
CONE_INLINE Int<T> lane_numbers() {
  Int<T> numbers = {};
  for (int i = 0; i < kLanes<T>; ++i) numbers[i] = i;
  return numbers;
}

// ---- rows of any length ----

/// How for_vectors reads and writes the vectors of a row that are whole, and its last one if that is not: as zeros beyond.
template <class T>
struct WholeVector {
  CONE_INLINE Vec<T> load(const T* p) const { return coneheads::load<T>(p); }
  CONE_INLINE void store(T* p, Vec<T> v) const { coneheads::store<T>(p, v); }
};
template <class T>
struct FirstLanes {
  int count;
  CONE_INLINE Vec<T> load(const T* p) const {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
    else return (Vec<T>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_maskload_ps(p, (__m256i)wanted());
    else return (Vec<T>)_mm256_maskload_pd(p, (__m256i)wanted());
#else
    Vec<T> v = {};
    for (int i = 0; i < count; ++i) v[i] = p[i];
    return v;
#endif
  }
  CONE_INLINE void store(T* p, Vec<T> v) const {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
    else _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), (__m512d)v);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(p, (__m256i)wanted(), (__m256)v);
    else _mm256_maskstore_pd(p, (__m256i)wanted(), (__m256d)v);
#else
    for (int i = 0; i < count; ++i) p[i] = v[i];
#endif
  }

 private:
  CONE_INLINE Int<T> wanted() const { return lane_numbers<T>() < (count - Int<T>{}); }
};
/// body(i, vector) for the places i of the vectors of a row of n numbers
template <class T, class Body>
CONE_INLINE void for_vectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) body(i, WholeVector<T>{});
  if (i < n) body(i, FirstLanes<T>{int(n - i)});
}

}  // namespace coneheads
