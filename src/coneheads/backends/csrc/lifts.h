// Lifts: from a feature row to a point, and the gradient of a point back to its row. See docs/math.md, section 1.
//
// In every lift a position is a multiple of the features, x = scale * f[:E-1], and scale and level of a token follow from
// its last feature and, for directions, from the norm of the others. So a lift is two numbers a token. A direction is
// divided by its norm, not multiplied by the inverse: +-1 in one dimension must be just that.
#pragma once

#include <algorithm>

#include "elementary.h"

namespace coneheads {

enum class Lift : int64_t {
  none = 0,  // x = f, all of it, no level
  given = 1,  // a point already: x = f[:-1], level = f[-1]
  xi = 2,  // heights below the light h
  psi_penumbral = 3,  // y = exp(f_d), levels of the penumbral cone with light h
  psi_umbral = 4,  // y = exp(f_d), level y sinh(r)
  psi_height = 5,  // y = exp(f_d), the height in the place of the level
  polar = 6,  // a direction, the radius in the place of the level
  finite_penumbral = 7,  // a direction, and the level outside of a ball of light
  finite_umbral = 8  // a direction, and the level of a ball under a point of light
};

inline constexpr double kPositionLimit = 1e15, kFeatureLimit = 1e30, kLogHeightLimit = 20, kRadiusLimit = 40;
inline constexpr double kDirectionFloor = 1e-12;

template <class T>
struct Lifter {
  Lift kind;
  T inner;  // h, R or r
  T height_scale;

  bool has_level() const { return kind != Lift::none; }
  /// positions are f / scale, not f * scale
  bool is_direction() const { return kind >= Lift::polar; }
  /// the coordinates of a position
  int64_t coordinates(int64_t features) const { return has_level() ? features - 1 : features; }
  /// features saturate here, before they are scaled
  T feature_limit() const {
    return T(kind == Lift::none || kind == Lift::given || is_direction() ? kPositionLimit : kFeatureLimit);
  }

  /// scale and level of n tokens (n a multiple of the lanes) from their last feature and the square norm of the others
  void lift(int64_t n, const T* last, const T* norm_sq, T* scale, T* level) const {
    const Vec<T> one = splat<T>(T(1));
    for (int64_t i = 0; i < n; i += kLanes<T>) {
      Vec<T> f = load<T>(last + i) * height_scale, s = one, l = {};
      switch (kind) {
        case Lift::none:
          break;
        case Lift::given:
          l = f;
          break;
        case Lift::xi: {
          // exp(-|f|) makes sigmoid(f) and sigmoid(-f) without cancellation: the level is y^2 / (h + sqrt(h^2 - y^2)).
          Vec<T> e = vexp<T>(-vmin<T>(vabs<T>(f), splat<T>(T(1e4)))), inverse = one / (e + T(1));
          Int<T> up = f >= T(0);
          Vec<T> y = select<T>(up, inverse, e * inverse), rest = select<T>(up, e * inverse, inverse);
          s = y * inner;
          l = y * y / (vsqrt<T>(rest * (y + T(1))) + T(1)) * inner;
          break;
        }
        case Lift::psi_penumbral:
        case Lift::psi_umbral:
        case Lift::psi_height: {
          const T limit = T(kLogHeightLimit);
          s = vexp<T>(vmin<T>(vmax<T>(f, splat<T>(-limit)), splat<T>(limit)));
          l = s;
          if (kind == Lift::psi_umbral) l = s * std::sinh(inner);
          if (kind == Lift::psi_penumbral) {
            Vec<T> y = vmin<T>(s, splat<T>(inner));
            l = y * y / (vsqrt<T>((inner - y) * (inner + y)) + inner);
          }
          break;
        }
        default: {
          Vec<T> norm = vsqrt<T>(load<T>(norm_sq + i));
          s = vmax<T>(norm, splat<T>(T(kDirectionFloor)));
          if (kind == Lift::polar) {
            l = vmin<T>(vabs<T>(f), splat<T>(T(kRadiusLimit)));
            s = select<T>(f < T(0), -s, s);
          } else {
            for (int j = 0; j < kLanes<T>; ++j) l[j] = T(finite_level(double(f[j])));
          }
        }
      }
      store<T>(scale + i, s);
      store<T>(level + i, l);
    }
  }

  /// how the scale and the level of a token change with its last feature
  void slopes(double last, double& for_scale, double& for_level) const {
    const double h = inner, f = last * double(height_scale);
    for_scale = 0;
    for_level = 1;
    switch (kind) {
      case Lift::xi: {
        const double e = std::exp(-std::abs(f)), inverse = 1 / (1 + e);
        const double y = f >= 0 ? inverse : e * inverse, rest = f >= 0 ? e * inverse : inverse;
        for_scale = h * y * rest;
        for_level = h * y * y * std::sqrt(rest / (1 + y));
        break;
      }
      case Lift::psi_penumbral:
      case Lift::psi_umbral:
      case Lift::psi_height: {
        const double y = std::abs(f) <= kLogHeightLimit ? std::exp(f) : 0;
        for_scale = for_level = y;
        if (kind == Lift::psi_umbral) for_level = y * std::sinh(h);
        if (kind == Lift::psi_penumbral) {
          const T rounded = T(y), limit = inner;
          const double tau = std::sqrt(std::max(0.0, (h - double(rounded)) * (h + double(rounded))));
          for_level = rounded > limit ? 0 : tau > 0 ? y * y / tau : 2 * y * y / h;
        }
        break;
      }
      case Lift::polar:
        for_level = std::abs(f) > kRadiusLimit ? 0 : f < 0 ? -1 : 1;
        break;
      case Lift::finite_penumbral:
      case Lift::finite_umbral: {
        // d level / d rho = -sinh R / (sinh rho sqrt(sinh(rho - R) sinh(rho + R))), for the umbral level times cosh rho.
        const double excess = softplus(f), rho = h + excess;
        const double root = std::sqrt(std::sinh(excess)) * std::sqrt(std::sinh(rho + h));
        const double turn = kind == Lift::finite_umbral ? 1 / std::tanh(rho) : 1 / std::sinh(rho);
        const double sigmoid = f >= 0 ? 1 / (1 + std::exp(-f)) : std::exp(f) / (1 + std::exp(f));
        for_level = root > 0 ? -std::sinh(h) * turn / root * sigmoid : 0;
        break;
      }
      default:
        break;
    }
    for_scale *= height_scale;
    for_level *= height_scale;
  }

 private:
  static double softplus(double f) { return f > 40 ? f : std::log1p(std::exp(f)); }
  double finite_level(double f) const {
    const double r = inner, excess = softplus(f), rho = r + excess;
    const double root = std::sqrt(std::expm1(-2 * excess) * std::expm1(-2 * (rho + r)));
    if (kind == Lift::finite_penumbral) return -std::atan(root / ((1 + std::exp(-2 * rho)) * std::sinh(r)));
    return std::atan2(std::exp(-rho) * 2 * std::sinh(r), root);
  }
};

/// The gradient g of a point, in its place the gradient of the features f [n]. g = (position..., level), or position.
template <class T>
void lift_backward(const Lifter<T>& lifter, int64_t n, const T* f, T scale, T* g) {
  const int64_t d = lifter.coordinates(n);
  const T limit = lifter.feature_limit(), most = T(kPositionLimit);
  Vec<T> products = {};  // for a direction g x, otherwise g f, which make the gradient of the scale
  T along;
  if (lifter.is_direction()) {
    // What is along the direction does not change it: (g - x (g.x)) / norm, unless the norm is at its floor.
    for_vectors<T>(d, [&](int64_t i, auto vector) CONE_BODY {
      const Vec<T> x = vmin<T>(vmax<T>(vector.load(f + i), splat<T>(-limit)), splat<T>(limit)) / scale;
      products += vector.load(g + i) * x;
    });
    along = sum<T>(products);
    const T share = std::abs(scale) > T(kDirectionFloor) ? along : T(0);
    for_vectors<T>(d, [&](int64_t i, auto vector) CONE_BODY {
      const Vec<T> x = vector.load(f + i);
      vector.store(g + i, keep_where<T>(vabs<T>(x) <= limit, (vector.load(g + i) - share * (x / scale)) / scale));
    });
  } else {
    for_vectors<T>(d, [&](int64_t i, auto vector) CONE_BODY {
      const Vec<T> x = vector.load(f + i);
      const Int<T> free = (vabs<T>(x) <= limit) & (vabs<T>(x * scale) <= most);
      const Vec<T> kept = keep_where<T>(free, vector.load(g + i));
      products += kept * x;
      vector.store(g + i, kept * scale);
    });
    along = sum<T>(products);
  }
  if (!lifter.has_level()) return;
  double for_scale, for_level;
  lifter.slopes(double(f[d]), for_scale, for_level);
  g[d] = T(double(g[d]) * for_level + double(along) * for_scale);
}

}  // namespace coneheads
