// RMS norm over the channels followed by SiLU, on channels_last videos and images on a CPU, in one pass over memory.
//
// The computation of rms_norm_silu.py. A row (pixel) is read twice, the second time from the first cache.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu_arithmetic.h"

namespace {

using namespace diffusion_kernels;

// F.normalize's: no norm is taken for less.
constexpr float MIN_NORM = 1e-12f;
// Elements that a thread takes at a time.
constexpr int64_t TILE = 65536;

template <typename T, bool SILU>
INLINE void normalize(const T *x, T *y, const float *gamma, const float *bias, int64_t rows, int64_t channels) {
  const float root = std::sqrt(float(channels));
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + r * channels;
    T *to = y + r * channels;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < channels; ++c) squares += load(from[c]) * load(from[c]);
    const float norm = std::sqrt(squares);
    const float scale = root / (norm < MIN_NORM ? MIN_NORM : norm);  // not a number stays one
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float normalized = load(from[c]) * scale * gamma[c] + bias[c];
      store(to[c], SILU ? silu(normalized) : normalized);
    }
  }
}

FOR_EACH_CPU void normalize_tile(const float *x, float *y, const float *gamma, const float *bias, int64_t rows,
                                 int64_t channels, bool with_silu) {
  if (with_silu) normalize<float, true>(x, y, gamma, bias, rows, channels);
  else normalize<float, false>(x, y, gamma, bias, rows, channels);
}

FOR_EACH_CPU void normalize_tile(const BFloat16 *x, BFloat16 *y, const float *gamma, const float *bias, int64_t rows,
                                 int64_t channels, bool with_silu) {
  if (with_silu) normalize<BFloat16, true>(x, y, gamma, bias, rows, channels);
  else normalize<BFloat16, false>(x, y, gamma, bias, rows, channels);
}

template <typename T>
void rms_norm_silu(const T *x, T *y, const float *gamma, const float *bias, int64_t rows, int64_t channels,
                   bool with_silu, int threads) {
  const int64_t tile_rows = std::max<int64_t>(1, TILE / channels);
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row += tile_rows)
    normalize_tile(x + row * channels, y + row * channels, gamma, bias, std::min(tile_rows, rows - row), channels,
                   with_silu);
}

}  // namespace

// ``x`` and ``y``: [rows, channels], bfloat16 or float32.
extern "C" void diffusion_rms_norm_silu(const void *x, void *y, const float *gamma, const float *bias, int64_t rows,
                                        int64_t channels, int is_bfloat16, int with_silu, int threads) {
  if (is_bfloat16)
    rms_norm_silu(static_cast<const BFloat16 *>(x), static_cast<BFloat16 *>(y), gamma, bias, rows, channels, with_silu,
                  threads);
  else
    rms_norm_silu(static_cast<const float *>(x), static_cast<float *>(y), gamma, bias, rows, channels, with_silu,
                  threads);
}
