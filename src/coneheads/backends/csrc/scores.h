// Scores: what a pair of points is worth, and the derivatives of that. The mathematics is in docs/math.md.
//
// A score is a struct with
//   kProduct                     whether it reads the product of two positions, or else their squared distance
//   Score(p)                     constants from its parameters, made once a head
//   aux(level)                   one more number a token, made of its level once
//   value(m, q, k)               the score in base 2, log2(e) times what docs/math.md has, m being the measure of the pair
//   slopes(g, m, q, k, s, all)   g times the derivatives of the score: for both levels; for a product m, or those for a
//                                squared distance m times -2, which is what the products of backward take; with `all` also
//                                for the parameters
// and, beside what OnePart says,
//   kParts > 1                   a long value in parts: part<0>(m, ...), then part<1> of what that gave, and so on. Each part
//                                is a pass over some vectors of keys: a processor overlaps more of them in short chains
//   kHasFar                      there is a cheaper form, value_far and slopes_far, where all_far(m, q) holds
//   kRelative                    values leave out what all keys add to a query alike, `left_out`; value_from(m, n, base,
//                                q, k) also what lies in a distance `base` from the query, n being m - base^2
// All is on vectors of pairs: q holds the level and aux of one query in all lanes, k those of several keys.
#pragma once

#include "elementary.h"

namespace coneheads {

inline constexpr int kMaxParameters = 2;
/// Scores are in base 2, since powers of 2 take fewer steps; their slopes are those of the scores themselves.
inline constexpr double kLog2E = 1.4426950408889634074;

template <class T>
struct Token {
  Vec<T> level, aux;
};
/// what most scores are
struct OnePart {
  static constexpr bool kProduct = false, kHasFar = false, kRelative = false;
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

/// max(a, b, (a + b + D) / 2), twice: max(a, b) = (a + b + |a - b|) / 2
template <class T>
CONE_INLINE Vec<T> twice_lca_level(Vec<T> a, Vec<T> b, Vec<T> distance) {
  return (a + b) + vmax<T>(vabs<T>(a - b), distance);
}
/// From the gradient g of that level: the gradient for the level of q, that for k's being the rest of g. If neither point
/// is an ancestor of the other, half of it; otherwise all goes to the ancestor's level. Whether half also goes to D.
template <class T>
CONE_INLINE Int<T> lca_slopes(Vec<T> g, Vec<T> q, Vec<T> k, Vec<T> distance, Vec<T>& for_q) {
  const Vec<T> difference = q - k;
  const Int<T> apart = distance >= vabs<T>(difference);
  for_q = select<T>(apart, g * T(0.5), keep_where<T>(difference > T(0), g));
  return apart;
}

template <class T>
struct Dot : OnePart {
  static constexpr bool kProduct = true;
  T scale;
  explicit Dot(const T* p) : scale(p[0]) {}
  T aux(T) const { return 0; }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T>, Token<T>) const { return m * (scale * T(kLog2E)); }
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
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T>, Token<T>) const { return vsqrt<T>(m) * (gamma * T(-kLog2E)); }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T>, Token<T>, Slopes<T>& s, bool all) const {
    s.measure = g * inverse_root<T>(m) * gamma;
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

  /// Whether no key has a common ancestor with the query, wherever its level: as it mostly is in many dimensions.
  CONE_INLINE bool all_far(Vec<T> m, Token<T> q) const {
    Vec<T> depth = T(2) * h - q.level;
    return !any_less<T>(m, vmax<T>(depth * depth, splat<T>(kDivisor<T>)));
  }
  CONE_INLINE Vec<T> value_far(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> difference = q.aux - k.aux;
    return read(height_sq_beyond(m, q, k, difference, difference * vinverse<T>(m)));
  }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T> q, Token<T> k) const {
    Vec<T> inverse = vrsqrt<T>(m), distance = m * inverse, turn = (q.aux - k.aux) * inverse;
    Vec<T> twice = twice_lca_level<T>(q.level, k.level, distance);
    return read(select<T>(beyond(distance, q, k), height_sq_beyond(m, q, k, turn, turn), height_sq_below(twice)));
  }
  /// Pairs without a common ancestor: D > t_q + t_k with t = h - level. Not a level above h: at the light, that is rounding.
  CONE_INLINE Int<T> beyond(Vec<T> distance, Token<T> q, Token<T> k) const {
    return distance > T(2) * h - (q.level + k.level);
  }
  /// Their squared height: m/4 + (y_q^2 + y_k^2)/2 + (y_q^2 - y_k^2)^2 / (4m), the last term from two factors.
  CONE_INLINE static Vec<T> height_sq_beyond(Vec<T> m, Token<T> q, Token<T> k, Vec<T> factor, Vec<T> other) {
    return (m * T(0.25) + (q.aux + k.aux)) + factor * other;
  }
  /// That of an ancestor at level L: L (2h - L).
  CONE_INLINE Vec<T> height_sq_below(Vec<T> twice) const { return twice * (h - twice * T(0.25)); }
  CONE_INLINE Vec<T> read(Vec<T> sq) const {
    if constexpr (kReadout == Readout::height_sq) return sq * (gamma * T(-kLog2E));
    if constexpr (kReadout == Readout::height) return vsqrt<T>(sq) * (gamma * T(-kLog2E));
    return vlog<T>(vmax<T>(sq, splat<T>(kFloor)) * inverse_h_sq) * (gamma * T(-0.5 * kLog2E));
  }
  /// The squared height and its slopes: for m, times -2; for both levels; for h.
  struct SquareSlopes {
    Vec<T> sq, m, q, k, h;
  };
  CONE_INLINE void slopes_far(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> difference = q.aux - k.aux, turn = difference * vinverse<T>(m), ratio = turn + turn;
    Vec<T> q_depth = h - q.level, k_depth = h - k.level;
    SquareSlopes of{height_sq_beyond(m, q, k, difference, turn), turn * ratio - T(0.5), ratio * q_depth + q_depth,
                    k_depth - ratio * k_depth, Vec<T>{}};
    if (all) of.h = (q.level + k.level) + ratio * (q.level - k.level);
    read_slopes<true>(g, of, s, all);
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    const Vec<T> inverse = vrsqrt<T>(m), distance = m * inverse, turn = (q.aux - k.aux) * inverse;
    const Vec<T> twice = twice_lca_level<T>(q.level, k.level, distance), rise = T(2) * h - twice;
    const Int<T> beyond = this->beyond(distance, q, k);
    Vec<T> for_q;
    const Int<T> apart = lca_slopes<T>(rise, q.level, k.level, distance, for_q);
    const Vec<T> for_m = keep_where<T>(apart & (m > T(0)), rise * inverse * T(-0.5));
    // Where there is an ancestor, the ratio may overflow: it is not used.
    const Vec<T> ratio = (turn + turn) * inverse, q_depth = h - q.level, k_depth = h - k.level;
    SquareSlopes of{select<T>(beyond, height_sq_beyond(m, q, k, turn, turn), height_sq_below(twice)),
                    select<T>(beyond, ratio * ratio * T(0.5) - T(0.5), for_m),
                    select<T>(beyond, ratio * q_depth + q_depth, for_q),
                    select<T>(beyond, k_depth - ratio * k_depth, rise - for_q), twice};
    if (all) of.h = select<T>(beyond, (q.level + k.level) + ratio * (q.level - k.level), twice);
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
      g_sq = g * (gamma * T(-0.5)) * (kPositive ? vrsqrt_of_normal<T>(sq) : inverse_root<T>(sq));
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

/// Features of some size make heights, and so scores, of thousands. What a query adds to all of them alike would take the
/// digits of what differs between its keys: of the height itself it is left out. (Not of its square or logarithm.)
template <class T, Readout kReadout>
struct Umbral : OnePart {
  static constexpr bool kRelative = kReadout == Readout::height;
  T gamma, inverse_sinh, inverse_tanh;
  explicit Umbral(const T* p)
      : gamma(p[1]), inverse_sinh(T(1) / std::sinh(p[0])), inverse_tanh(T(1) / std::tanh(p[0])) {}
  T aux(T) const { return 0; }
  /// of the height, for twice the level of the lca
  T factor() const { return gamma * inverse_sinh * T(-0.5 * kLog2E); }
  double left_out(T q_level, T base) const { return (double(q_level) + double(base)) * double(factor()); }
  /// Twice the level of the lca less that of q and `base`, with D less `base`: L_k + D, or of an ancestor and its descendant
  /// L_q, the same for all descendants of a query, or 2 L_k - L_q.
  CONE_INLINE static Vec<T> rest(Vec<T> distance, T base, Token<T> q, Token<T> k) {
    return vmax<T>(k.level + distance, vmax<T>(q.level - base, k.level * T(2) - (q.level + base)));
  }
  CONE_INLINE Vec<T> value_from(Vec<T> m, Vec<T> n, T base, Token<T> q, Token<T> k) const {
    return rest(root_from<T>(m, n, base), base, q, k) * factor();
  }
  CONE_INLINE Vec<T> value(Vec<T> m, Token<T> q, Token<T> k) const {
    if constexpr (kRelative) return rest(vsqrt<T>(m), T(0), q, k) * factor();
    Vec<T> height = twice_lca_level<T>(q.level, k.level, vsqrt<T>(m)) * (inverse_sinh * T(0.5));
    if constexpr (kReadout == Readout::height_sq) return height * height * (gamma * T(-kLog2E));
    return vlog<T>(height) * (gamma * T(-kLog2E));
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    const Vec<T> inverse = inverse_root<T>(m), d = m * inverse;
    const Vec<T> height = twice_lca_level<T>(q.level, k.level, d) * (inverse_sinh * T(0.5));
    Vec<T> g_level = g * (-gamma * inverse_sinh);
    if constexpr (kReadout == Readout::height) {
      if (all) s.parameter[1] = -(g * height);
    } else if constexpr (kReadout == Readout::height_sq) {
      g_level *= height + height;
      if (all) s.parameter[1] = -(g * height * height);
    } else {
      g_level /= height;
      if (all) s.parameter[1] = -(g * vlog<T>(height));
    }
    const Int<T> apart = lca_slopes<T>(g_level, q.level, k.level, d, s.q_level);
    s.k_level = g_level - s.q_level;
    s.measure = keep_where<T>(apart, g_level * inverse * T(-0.5));
    if (all) s.parameter[0] = g_level * height * (-inverse_tanh / inverse_sinh);
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
    return twice_lca_level<T>(q.level, k.level, angle(m)) * (gamma * T(-0.5 * kLog2E));
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    const Vec<T> a = angle(m), g_level = g * -gamma, rest = m * vmax<T>(T(4) - m, Vec<T>{});
    const Int<T> apart = lca_slopes<T>(g_level, q.level, k.level, a, s.q_level);
    s.k_level = g_level - s.q_level;
    s.measure = keep_where<T>(apart, -(g_level * inverse_root<T>(rest)));
    if (all) s.parameter[0] = g * twice_lca_level<T>(q.level, k.level, a) * T(-0.5);
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
    return x * select<T>(x > T(0), splat<T>(T(kLog2E)), splat<T>(negative_slope * T(kLog2E)));
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
    if constexpr (kPart == 2) return (log_of<T, true>(x) * -beta - offset) * T(kLog2E);
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> rise = q.level - k.level, chord_sq = rise * rise + m;
    Vec<T> inverse = inverse_root<T>(chord_sq), outer = vrsqrt<T>(chord_sq + q.level * k.level * T(4));
    const Vec<T> slope = g * outer * beta * inverse, stretch = slope * chord_sq, turn = rise * slope * T(-2);
    s.measure = slope + slope;
    s.q_level = turn + stretch * (q.aux * q.aux);
    s.k_level = stretch * (k.aux * k.aux) - turn;
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
    if constexpr (kPart == 3) return (log_of<T, true>(x) * -beta - offset) * T(kLog2E);
  }
  CONE_INLINE void slopes(Vec<T> g, Vec<T> m, Token<T> q, Token<T> k, Slopes<T>& s, bool all) const {
    Vec<T> u = growth(q, k), v = u * vinverse<T>(u + T(1)), turn = (u + v) * T(0.25);
    turn = select<T>(q.level < k.level, -turn, turn);
    Vec<T> sq = half_sinh_sq(u, v, m, q, k), chord_sq = m * T(0.25);
    Vec<T> g_sq = g * inverse_root<T>(sq) * vrsqrt<T>(sq + T(1)) * -beta;
    s.measure = g_sq * (q.aux * k.aux) * T(-0.5);
    s.q_level = g_sq * (turn + vsqrt<T>(q.aux * q.aux + T(1)) * k.aux * chord_sq);
    s.k_level = g_sq * (vsqrt<T>(k.aux * k.aux + T(1)) * q.aux * chord_sq - turn);
    if (!all) return;
    s.parameter[0] = g * vasinh_root<T>(sq) * T(-2);
    s.parameter[1] = -g;
  }
};

}  // namespace coneheads
