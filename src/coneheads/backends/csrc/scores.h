// Scores: what a pair of points is worth, and the derivatives of that. The mathematics is in docs/math.md.
//
// A score is a struct with
//   kProduct                     whether it reads the product of two positions, or else their squared distance
//   Score(p)                     constants from its parameters, made once a head
//   aux(level)                   one more number a token, made of its level once
//   value(m, q, k)               the score, m being the measure of the pair
//   slopes(g, m, q, k, s, all)   g times the derivatives of the score for m and both levels; with `all` also for the
//                                parameters
// and, beside what OnePart says,
//   kParts > 1                   a long value in parts: part<0>(m, ...), then part<1> of what that gave, and so on. Each part
//                                is a pass over some vectors of keys: a processor overlaps more of them in short chains
//   kHasFar                      there is a cheaper form, value_far and slopes_far, where all_far(m, q) holds
// All is on vectors of pairs: q holds the level and aux of one query in all lanes, k those of several keys.
#pragma once

#include "elementary.h"

namespace coneheads {

inline constexpr int kMaxParameters = 2;

template <class T>
struct Token {
  Vec<T> level, aux;
};
/// what most scores are
struct OnePart {
  static constexpr bool kProduct = false, kHasFar = false;
  static constexpr int kParts = 1;
};
template <class T>
struct Slopes {
  Vec<T> measure, q_level, k_level, parameter[kMaxParameters];
};

template <class T>
inline constexpr T kDivisor = T(1e-30);  // divisors stay above it; it only ever meets a factor 0

/// 1/sqrt(x), and 0 at x = 0: the slope of a root is 0 there
template <class T>
CONE_INLINE Vec<T> inverse_root(Vec<T> x) {
  return keep_where<T>(x > T(0), vrsqrt<T>(x));
}

template <class T>
CONE_INLINE Vec<T> lca_level(Vec<T> a, Vec<T> b, Vec<T> distance) {
  return vmax<T>(vmax<T>(a, b), (a + b + distance) * T(0.5));
}
/// The derivatives of lca_level: for the distance, for the level of q, and for that of k 1 - q_share. If neither point
/// is an ancestor of the other, 1/2 each; otherwise the ancestor's level counts 1 and the rest 0.
template <class T>
CONE_INLINE void lca_slopes(Vec<T> q, Vec<T> k, Vec<T> distance, Vec<T>& distance_share, Vec<T>& q_share) {
  Vec<T> difference = q - k;
  Int<T> apart = distance >= vabs<T>(difference);
  distance_share = keep_where<T>(apart, splat<T>(T(0.5)));
  q_share = keep_where<T>(~apart, with_sign<T>(T(0.5), difference)) + T(0.5);
}

template <class T>
struct Dot : OnePart {
  static constexpr bool kProduct = true;
  T scale;
  explicit Dot(const T* p) : scale(p[0]) {}
  T aux(T) const { return 0; }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T>, Token<T>) const { return m * scale; }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T>, Token<T>, Slopes<T>& s, bool all) const {
    s.measure = g * scale;
    if (all) s.parameter[0] = g * m;
  }
};

template <class T>
struct Laplacian : OnePart {
  T gamma;
  explicit Laplacian(const T* p) : gamma(p[0]) {}
  T aux(T) const { return 0; }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T>, Token<T>) const { return vsqrt<T>(m) * -gamma; }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T>, Token<T>, Slopes<T>& s, bool all) const {
    s.measure = g * inverse_root<T>(m) * (gamma * T(-0.5));
    if (all) s.parameter[0] = -(g * vsqrt<T>(m));
  }
};

enum class Readout { height, height_sq, distance };

/// aux: half the squared height, y^2/2 = level (2h - level) / 2
template <class T, Readout kReadout>
struct Penumbral : OnePart {
  static constexpr bool kHasFar = true;
  static constexpr T kFloor = T(1.8048513878454153e-35);  // e^-80: `distance` reads lower squared heights as this
  T h, gamma, inverse_h_sq;
  explicit Penumbral(const T* p) : h(p[0]), gamma(p[1]), inverse_h_sq(T(1) / (h * h)) {}
  T aux(T level) const { return level * (2 * h - level) / 2; }

  /// pairs without a common ancestor: D > t_q + t_k, t = h - level
  CONE_INLINE Int<T> beyond(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> depths = T(2) * h - (q.level + k.level);
    return m > depths * depths;
  }
  /// for m > kDivisor
  CONE_INLINE Vec<T> height_sq_beyond(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> difference = q.aux - k.aux, inverse = vinverse<T>(m);
    return (m * T(0.25) + (q.aux + k.aux)) + difference * difference * inverse;
  }
  CONE_INLINE Vec<T> height_sq_below(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> level = vmin<T>(lca_level<T>(q.level, k.level, vsqrt<T>(m)), splat<T>(h));
    return level * (T(2) * h - level);
  }
  /// Whether no key has a common ancestor with the query, wherever its level: as it mostly is in many dimensions.
  CONE_INLINE bool all_far(Vec<T> m, Token<T> q) const {
    Vec<T> depth = T(2) * h - q.level;
    return all<T>(m > vmax<T>(depth * depth, splat<T>(kDivisor<T>)));
  }
  CONE_INLINE Vec<T> height_sq(Vec<T> m, Token<T> q, Token<T> k) const {
    return select<T>(beyond(m, q, k), height_sq_beyond(vmax<T>(m, splat<T>(kDivisor<T>)), q, k),
                     height_sq_below(m, q, k));
  }
  CONE_INLINE Vec<T> value_far(Vec<T> m, Token<T> q, Token<T> k) const { return read(height_sq_beyond(m, q, k)); }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T> q, Token<T> k) const { return read(height_sq(m, q, k)); }
  CONE_INLINE Vec<T> read(Vec<T> sq) const {
    if constexpr (kReadout == Readout::height_sq) return sq * -gamma;
    if constexpr (kReadout == Readout::height) return vsqrt<T>(sq) * -gamma;
    return vlog<T>(vmax<T>(sq, splat<T>(kFloor)) * inverse_h_sq) * (gamma * T(-0.5));
  }
  /// The squared height, and its slopes for m, both levels and h.
  struct SquareSlopes {
    Vec<T> sq, m, q, k, h;
  };
  CONE_INLINE SquareSlopes slopes_beyond(Vec<T> m, Token<T> q, Token<T> k, bool all) const {
    Vec<T> inverse = vinverse<T>(m);
    Vec<T> difference = q.aux - k.aux, ratio = (difference + difference) * inverse;
    Vec<T> q_weight = T(1) + ratio, k_weight = T(1) - ratio;
    return {(m * T(0.25) + (q.aux + k.aux)) + difference * difference * inverse, T(0.25) - ratio * ratio * T(0.25),
            q_weight * (h - q.level), k_weight * (h - k.level),
            all ? q_weight * q.level + k_weight * k.level : Vec<T>{}};
  }
  CONE_INLINE SquareSlopes slopes_below(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> d = vsqrt<T>(m), distance_share, q_share;
    Vec<T> level = vmin<T>(lca_level<T>(q.level, k.level, d), splat<T>(h));
    lca_slopes<T>(q.level, k.level, d, distance_share, q_share);
    Vec<T> slope = T(2) * (h - level), for_q = slope * q_share;
    return {level * (T(2) * h - level), slope * distance_share * inverse_root<T>(m) * T(0.5), for_q, slope - for_q,
            level + level};
  }
  CONE_INLINE void slopes_far(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    read_slopes<true>(g, slopes_beyond(m, q, k, all), s, all);
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Int<T> out = beyond(m, q, k);
    SquareSlopes of = slopes_below(m, q, k);
    if (any<T>(out)) {
      const SquareSlopes other = slopes_beyond(vmax<T>(m, splat<T>(kDivisor<T>)), q, k, all);
      of = {select<T>(out, other.sq, of.sq), select<T>(out, other.m, of.m), select<T>(out, other.q, of.q),
            select<T>(out, other.k, of.k), select<T>(out, other.h, of.h)};
    }
    read_slopes<false>(g, of, s, all);
  }
  template <bool kPositive>
  CONE_INLINE void read_slopes(Vec<T> g, const SquareSlopes& of, Slopes<T>& s, bool all) const {
    const Vec<T> sq = of.sq;
    Vec<T> g_sq;
    if constexpr (kReadout == Readout::height_sq) {
      g_sq = g * -gamma;
      if (all) s.parameter[1] = -(g * sq);
    } else if constexpr (kReadout == Readout::height) {
      g_sq = g * (kPositive ? vrsqrt<T>(sq) : inverse_root<T>(sq)) * (gamma * T(-0.5));
      if (all) s.parameter[1] = -(g * vsqrt<T>(sq));
    } else {
      Vec<T> floored = vmax<T>(sq, splat<T>(kFloor));
      g_sq = keep_where<T>(sq > kFloor, g / floored * (gamma * T(-0.5)));
      if (all) s.parameter[1] = g * vlog<T>(floored * inverse_h_sq) * T(-0.5);
    }
    s.measure = g_sq * of.m;
    s.q_level = g_sq * of.q;
    s.k_level = g_sq * of.k;
    if (!all) return;
    s.parameter[0] = g_sq * of.h;
    if constexpr (kReadout == Readout::distance) s.parameter[0] += g * (gamma / h);
  }
};

template <class T, Readout kReadout>
struct Umbral : OnePart {
  T gamma, inverse_sinh, inverse_tanh;
  explicit Umbral(const T* p)
      : gamma(p[1]), inverse_sinh(T(1) / std::sinh(p[0])), inverse_tanh(T(1) / std::tanh(p[0])) {}
  T aux(T) const { return 0; }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> level = lca_level<T>(q.level, k.level, vsqrt<T>(m));
    if constexpr (kReadout == Readout::height) return level * (-gamma * inverse_sinh);
    Vec<T> height = level * inverse_sinh;
    if constexpr (kReadout == Readout::height_sq) return height * height * -gamma;
    return vlog<T>(height) * -gamma;
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> d = vsqrt<T>(m), distance_share, q_share;
    Vec<T> height = lca_level<T>(q.level, k.level, d) * inverse_sinh;
    lca_slopes<T>(q.level, k.level, d, distance_share, q_share);
    Vec<T> g_height;
    if constexpr (kReadout == Readout::height) {
      g_height = g * -gamma;
      if (all) s.parameter[1] = -(g * height);
    } else if constexpr (kReadout == Readout::height_sq) {
      g_height = g * height * (T(-2) * gamma);
      if (all) s.parameter[1] = -(g * height * height);
    } else {
      g_height = g / height * -gamma;
      if (all) s.parameter[1] = -(g * vlog<T>(height));
    }
    Vec<T> g_level = g_height * inverse_sinh;
    s.measure = g_level * distance_share * inverse_root<T>(m) * T(0.5);
    s.q_level = g_level * q_share;
    s.k_level = g_level - s.q_level;
    if (all) s.parameter[0] = g_height * height * -inverse_tanh;
  }
};

/// both cones with their light at the origin: m is the squared chord of two unit vectors
template <class T>
struct FiniteCone : OnePart {
  T gamma;
  explicit FiniteCone(const T* p) : gamma(p[0]) {}
  T aux(T) const { return 0; }
  CONE_INLINE static Vec<T> angle(Vec<T> m) {
    return T(2) * vasin<T>(vmin<T>(vsqrt<T>(m) * T(0.5), splat<T>(T(1))));
  }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T> q, Token<T> k) const {
    return lca_level<T>(q.level, k.level, angle(m)) * -gamma;
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> a = angle(m), distance_share, q_share;
    lca_slopes<T>(q.level, k.level, a, distance_share, q_share);
    Vec<T> g_level = g * -gamma;
    Vec<T> rest = m * vmax<T>(T(4) - m, Vec<T>{});
    s.measure = g_level * distance_share * inverse_root<T>(rest);
    s.q_level = g_level * q_share;
    s.k_level = g_level - s.q_level;
    if (all) s.parameter[0] = -(g * lca_level<T>(q.level, k.level, a));
  }
};

/// of graph attention: LeakyReLU of the sum of both levels
template <class T>
struct Concatenation : OnePart {
  T negative_slope;
  explicit Concatenation(const T* p) : negative_slope(p[0]) {}
  T aux(T) const { return 0; }
  CONE_INLINE Vec<T> value(Vec<T>, Token<T> q, Token<T> k) const {
    Vec<T> x = q.level + k.level;
    return select<T>(x > T(0), x, x * negative_slope);
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T>, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> x = q.level + k.level;
    s.measure = Vec<T>{};
    s.q_level = s.k_level = select<T>(x > T(0), g, g * negative_slope);
    if (all) s.parameter[0] = keep_where<T>(x <= T(0), g * x);
  }
};

/// the level is the height y; aux: 1/sqrt(y)
template <class T>
struct HalfSpaceDistance : OnePart {
  static constexpr int kParts = 3;
  T beta, offset;
  explicit HalfSpaceDistance(const T* p) : beta(p[0]), offset(p[1]) {}
  T aux(T level) const { return T(1) / std::sqrt(level); }
  /// sinh^2(d/2) = chord^2 / (4 y y')
  CONE_INLINE static Vec<T> argument(Vec<T> m, Token<T> q, Token<T> k) {
    Vec<T> rise = q.level - k.level, divisor = q.aux * k.aux * T(0.5);
    return (rise * rise + m) * divisor * divisor;
  }
  template <int kPart>
  CONE_INLINE Vec<T> part(Vec<T> x, Vec<T> m, Token<T> q, Token<T> k) const {
    if constexpr (kPart == 0) return argument(m, q, k);
    if constexpr (kPart == 1) return asinh_argument<T>(x);
    if constexpr (kPart == 2) return log_of<T, true>(x) * -beta - offset;
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> rise = q.level - k.level, chord_sq = rise * rise + m;
    Vec<T> inverse = inverse_root<T>(chord_sq), outer = vrsqrt<T>(chord_sq + q.level * k.level * T(4));
    s.measure = g * inverse * outer * -beta;
    Vec<T> stretch = g * (chord_sq * inverse) * outer * beta, slope = rise * s.measure * T(2);
    s.q_level = slope + stretch * (q.aux * q.aux);
    s.k_level = stretch * (k.aux * k.aux) - slope;
    if (!all) return;
    s.parameter[0] = g * vasinh_root<T>(argument(m, q, k)) * T(-2);
    s.parameter[1] = -g;
  }
};

/// the level is the radius a >= 0; aux: sinh(a)
template <class T>
struct HyperboloidDistance : OnePart {
  static constexpr int kParts = 4;
  T beta, offset;
  explicit HyperboloidDistance(const T* p) : beta(p[0]), offset(p[1]) {}
  T aux(T level) const { return std::sinh(level); }
  /// sinh^2(d/2) = sinh^2((a - b)/2) + sinh a sinh b chord^2/4; `turn`: sinh(a - b)/2, the slope of the first term.
  /// With u = e^|a-b| - 1 and v = 1 - e^-|a-b| = u / (1 + u), they are uv/4 and (u + v)/4.
  CONE_INLINE static Vec<T> growth(Token<T> q, Token<T> k) { return vexpm1<T>(vabs<T>(q.level - k.level)); }
  CONE_INLINE static Vec<T> half_sinh_sq(Vec<T> u, Vec<T> v, Vec<T> m, Token<T> q, Token<T> k) {
    return (u * v + q.aux * k.aux * m) * T(0.25);
  }
  template <int kPart>
  CONE_INLINE Vec<T> part(Vec<T> x, Vec<T> m, Token<T> q, Token<T> k) const {
    if constexpr (kPart == 0) return growth(q, k);
    if constexpr (kPart == 1) return half_sinh_sq(x, x * vinverse<T>(x + T(1)), m, q, k);
    if constexpr (kPart == 2) return asinh_argument<T>(x);
    if constexpr (kPart == 3) return log_of<T, true>(x) * -beta - offset;
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> u = growth(q, k), v = u * vinverse<T>(u + T(1)), turn = (u + v) * T(0.25);
    turn = select<T>(q.level < k.level, -turn, turn);
    Vec<T> sq = half_sinh_sq(u, v, m, q, k), chord_sq = m * T(0.25);
    Vec<T> g_sq = g * inverse_root<T>(sq) * vrsqrt<T>(sq + T(1)) * -beta;
    s.measure = g_sq * (q.aux * k.aux) * T(0.25);
    s.q_level = g_sq * (turn + vsqrt<T>(q.aux * q.aux + T(1)) * k.aux * chord_sq);
    s.k_level = g_sq * (vsqrt<T>(k.aux * k.aux + T(1)) * q.aux * chord_sq - turn);
    if (!all) return;
    s.parameter[0] = g * vasinh_root<T>(sq) * T(-2);
    s.parameter[1] = -g;
  }
};

}  // namespace coneheads
