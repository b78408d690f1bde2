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
/// 1/sqrt(x), and a finite number where x is 0 or denormal
template <class T>
CONE_INLINE Vec<T> vrsqrt(Vec<T> x) {
#if defined(__SSE2__)
  if constexpr (sizeof(T) == 4) {
    // An estimate of 12 bits and one step of Newton's are faster than a root and a division.
    x = vmax<T>(x, splat<T>(T(1e-36)));
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
  return T(1) / vsqrt<T>(vmax<T>(x, splat<T>(T(1e-36))));
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

template <class T, int kCount>
CONE_INLINE T sum_of(const T* x) {
  if constexpr (kCount == 1) return x[0];
  else return sum_of<T, kCount / 2>(x) + sum_of<T, kCount / 2>(x + kCount / 2);
}
template <class T>
CONE_INLINE T sum(Vec<T> v) {
  T lanes[kLanes<T>];
  store<T>(lanes, v);
  return sum_of<T, kLanes<T>>(lanes);
}
template <class T>
CONE_INLINE T largest(Vec<T> v) {
  T best = v[0];
#pragma GCC unroll 16
  for (int i = 1; i < kLanes<T>; ++i) best = v[i] > best ? v[i] : best;
  return best;
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
#define CONE_BODY __attribute__((always_inline))  // of a lambda for it

// ---- exponentials, logarithms, angles ----
// Polynomials are minimax fits of our own, to an error far below one rounding of their type.

template <class T, int N>
CONE_INLINE Vec<T> horner(const T (&c)[N], Vec<T> x) {
  Vec<T> p = splat<T>(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) p = p * x + c[i];
  return p;
}

template <class T>
struct Constants;
template <>
struct Constants<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kExpLow = -87.33f;
  static constexpr float kTiny = 1.17549435e-38f;
  static constexpr float kExp[] = {0.4999999345f, 0.1666652063f, 0.04166838813f, 0.008368716918f, 0.001381459419f};
  static constexpr float kLog[] = {0.6666677894f, 0.3997598479f, 0.2992825616f};
  static constexpr float kAsin[] = {0.1666673129f, 0.07495660071f, 0.04546691888f, 0.02405037144f, 0.04256576135f};
};
template <>
struct Constants<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10, kExpLow = -708.39;
  static constexpr double kTiny = 2.2250738585072014e-308;
  static constexpr double kExp[] = {0.5000000000000000044,    0.1666666666666668341,    0.04166666666666609419,
                                    0.008333333333317038638,  0.001388888888911569314,  0.00019841269896373197,
                                    0.00002480158692647329688, 2.75572348722164662e-6,   2.755758200519743623e-7,
                                    2.511203338269439914e-8,  2.08265738523436774e-9};
  static constexpr double kLog[] = {0.6666666666666666334, 0.4000000000000484441, 0.2857142856934621066,
                                    0.2222222262771162746, 0.181817760262167174,  0.1538711258708434221,
                                    0.1324899221837777317, 0.1326591929160621192};
  static constexpr double kAsin[] = {0.1666666666666670121,  0.07499999999984424755,  0.04464285716374378422,
                                     0.03038194313835674505, 0.02237220513378145381,  0.01735175262522200481,
                                     0.01397952313756885694, 0.01140669831979968422,  0.01075076059621972084,
                                     0.003770024707547473218, 0.02165687782568710548, -0.0210600568358635439,
                                     0.03274148315219215233};
};

/// x = n ln 2 + r with |r| <= ln(2)/2: gives 2^n and exp(r) - 1
template <class T>
CONE_INLINE void exp_parts(Vec<T> x, Vec<T>& power, Vec<T>& rest) {
  using C = Constants<T>;
  Vec<T> shifted = x * T(1.4426950408889634074) + C::kRound;
  Vec<T> n = shifted - C::kRound;
  Vec<T> r = x - n * C::kLn2High;
  r = r - n * C::kLn2Low;
  power = (Vec<T>)(((Bits<T>)shifted << C::kMantissa) + (Bits<T>)splat<T>(T(1)));
  rest = (r * r) * horner<T>(C::kExp, r) + r;
}
/// exp(x) for x up to 88 (float) or 709 (double); 0 below the smallest normal number, -inf included
template <class T>
CONE_INLINE Vec<T> vexp(Vec<T> x) {
  Vec<T> power, rest;
  Int<T> normal = x >= Constants<T>::kExpLow;
  exp_parts<T>(x, power, rest);
  return keep_where<T>(normal, power * rest + power);
}
/// The same for the weights of softmax, cheaper: the relative error grows to two roundings where the result is below
/// e^-40 and adds nothing to a sum that holds a 1.
template <class T>
CONE_INLINE Vec<T> vexp_weight(Vec<T> x) {
  using C = Constants<T>;
  Int<T> normal = x >= C::kExpLow;
  Vec<T> shifted = x * T(1.4426950408889634074) + C::kRound;
  Vec<T> r = x - (shifted - C::kRound) * T(0.69314718055994530942);
  Vec<T> p = (horner<T>(C::kExp, r) * r + T(1)) * r + T(1);
  // n goes straight into the exponent.
  return keep_where<T>(normal, (Vec<T>)((Bits<T>)p + ((Bits<T>)shifted << C::kMantissa)));
}
/// exp(x) - 1 for 0 <= x <= 88 (float) or 709 (double), without cancellation
template <class T>
CONE_INLINE Vec<T> vexpm1(Vec<T> x) {
  Vec<T> power, rest;
  exp_parts<T>(x, power, rest);
  return power * rest + (power - T(1));
}
/// log(1 + x) for x >= 0, or log(x) of a normal positive number
template <class T, bool kPlusOne>
CONE_INLINE Vec<T> log_of(Vec<T> x) {
  using C = Constants<T>;
  Vec<T> w = kPlusOne ? x + T(1) : x;
  const Bits<T> bits = (Bits<T>)w;
  // w = m 2^n with m in [sqrt(1/2), sqrt(2)), and log(m) = 2 atanh(s), s = (m - 1) / (m + 1).
  const Bits<T> offset = (Bits<T>)splat<T>(T(1)) - (Bits<T>)splat<T>(T(0.70710678118654752));
  const Int<T> exponent = (Int<T>)(((bits + offset) >> C::kMantissa) - C::kBias);
  Vec<T> m = (Vec<T>)(bits - ((Bits<T>)exponent << C::kMantissa));
  Vec<T> n = __builtin_convertvector(exponent, Vec<T>), over = m - T(1);
  if constexpr (kPlusOne) over = select<T>(exponent == 0, x, over);  // x itself, before the 1 took its digits
  Vec<T> s = over * vinverse<T>(over + T(2));
  Vec<T> z = s * s;
  return (s * z * horner<T>(C::kLog, z) + n * C::kLn2Low) + (s + s) + n * C::kLn2High;
}
template <class T>
CONE_INLINE Vec<T> vlog(Vec<T> x) {
  return log_of<T, false>(x);
}
/// z with asinh(sqrt(x)) = log(1 + z) / 2 for x >= 0: 2x + 2 sqrt(x (x + 1)), in which nothing cancels
template <class T>
CONE_INLINE Vec<T> asinh_argument(Vec<T> x) {
  const Int<T> large = x > T(1e18);  // the square would overflow, and z = 4x to the last bit
  const Vec<T> small = x + vsqrt<T>(x * (x + T(1)));
  if (!any<T>(large)) return small + small;
  return select<T>(large, T(4) * vmin<T>(x, splat<T>(T(8e37))), small + small);
}
/// asinh(sqrt(x)) for x >= 0
template <class T>
CONE_INLINE Vec<T> vasinh_root(Vec<T> x) {
  return log_of<T, true>(asinh_argument<T>(x)) * T(0.5);
}
/// asin(x) for 0 <= x <= 1
template <class T>
CONE_INLINE Vec<T> vasin(Vec<T> x) {
  Int<T> steep = x > T(0.5);
  Vec<T> z = select<T>(steep, (T(1) - x) * T(0.5), x * x);
  Vec<T> root = select<T>(steep, vsqrt<T>(z), x);
  Vec<T> p = root * z * horner<T>(Constants<T>::kAsin, z) + root;
  return select<T>(steep, T(1.57079632679489661923) - (p + p), p);
}

}  // namespace coneheads
