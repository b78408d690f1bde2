// Exponentials, logarithms and angles of vectors.
//
// Polynomials are minimax fits of our own, to an error far below one rounding of their type.
#pragma once

#include "simd.h"

namespace coneheads {

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
  static constexpr float kExp2[] = {1.0f,           0.693147214968f, 0.240226527829f,   0.0555031055121f,
                                    0.00961769297614f, 0.00134066438475f, 0.000155946770151f};
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
  static constexpr double kExp2[] = {1.0,
                                     0.69314718055994569675,
                                     0.24022650695910098006,
                                     0.055504108664790394528,
                                     0.0096181291076070026171,
                                     0.001333355815343996974,
                                     0.00015403530441571850099,
                                     0.00001525272738518977478,
                                     1.3215442675452855182e-6,
                                     1.0180647660573069343e-7,
                                     7.0725703945407994337e-9,
                                     4.0780717860928704165e-10};
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
/// 2^x for x <= 0; 0 below the smallest normal number, -inf included
template <class T>
CONE_INLINE Vec<T> vexp2(Vec<T> x) {
  using C = Constants<T>;
  Int<T> normal = x >= T(1 - C::kBias);
  Vec<T> shifted = x + C::kRound, p = horner<T>(C::kExp2, x - (shifted - C::kRound));
  // The integer part of x goes straight into the exponent.
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
