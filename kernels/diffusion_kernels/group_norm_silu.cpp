// GroupNorm followed by SiLU over channels_last images on a CPU, in two passes over memory.
//
// The computation of group_norm_silu.py: moments of each channel in chunks of rows (pixels), relative to the first row of
// the chunk; Chan's formula merges them into groups, in float64; a second pass normalizes. PyTorch takes three passes, and
// rounds between GroupNorm and SiLU. The bytes depend neither on the number of threads nor on the rest of the batch.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu_arithmetic.h"

namespace {

using namespace diffusion_kernels;

// Rows that are summed up before their deviations from their own mean are: the second time they are in the first cache.
constexpr int64_t BLOCK_ROWS = 16;
// Elements that a thread normalizes at a time.
constexpr int64_t TILE = 65536;

// What is kept of a chunk, in arrays of ``channels``: its first row, the mean less that row, M2 (the sum of squared
// deviations from the mean), and the sums of the block at hand. cpu.py makes room for it.
constexpr int64_t PARTIALS = 4;

template <typename T>
INLINE void chunk_moments(const T *x, float *partials, int64_t rows, int64_t channels) {
  float *pivot = partials, *mean = partials + channels;
  float *m2 = partials + 2 * channels, *sum = partials + 3 * channels;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    pivot[c] = load(x[c]);
    mean[c] = m2[c] = 0.0f;
  }
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
    const T *block = x + first * channels;
    const int64_t height = std::min(BLOCK_ROWS, rows - first);
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) sum[c] = 0.0f;
    for (int64_t r = 0; r < height; ++r)
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) sum[c] += load(block[r * channels + c]) - pivot[c];
    const float share = float(height) / float(first + height);
    const float weight = float(first) * share;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float block_mean = sum[c] / float(height);
      const float step = block_mean - mean[c];
      mean[c] += step * share;
      m2[c] += step * (step * weight);  // 0 in the first block, whatever the step
      sum[c] = block_mean;
    }
    for (int64_t r = 0; r < height; ++r)
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const float deviation = load(block[r * channels + c]) - pivot[c] - sum[c];
        m2[c] += deviation * deviation;
      }
  }
}

// Likewise of an image: the mean, the factor and the summand of y = (x - mean) * factor + summand.
constexpr int64_t COEFFICIENTS = 3;

template <typename T, bool SILU>
INLINE void normalize(const T *x, T *y, const float *coefficients, int64_t rows, int64_t channels) {
  const float *mean = coefficients, *factor = coefficients + channels;
  const float *summand = coefficients + 2 * channels;
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + r * channels;
    T *to = y + r * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float normalized = (load(from[c]) - mean[c]) * factor[c] + summand[c];
      store(to[c], SILU ? silu(normalized) : normalized);
    }
  }
}

FOR_EACH_CPU void chunk_moments_of(const float *x, float *partials, int64_t rows, int64_t channels) {
  chunk_moments(x, partials, rows, channels);
}

FOR_EACH_CPU void chunk_moments_of(const BFloat16 *x, float *partials, int64_t rows, int64_t channels) {
  chunk_moments(x, partials, rows, channels);
}

FOR_EACH_CPU void normalize_tile(const float *x, float *y, const float *coefficients, int64_t rows, int64_t channels,
                                 bool with_silu) {
  if (with_silu) normalize<float, true>(x, y, coefficients, rows, channels);
  else normalize<float, false>(x, y, coefficients, rows, channels);
}

FOR_EACH_CPU void normalize_tile(const BFloat16 *x, BFloat16 *y, const float *coefficients, int64_t rows,
                                 int64_t channels, bool with_silu) {
  if (with_silu) normalize<BFloat16, true>(x, y, coefficients, rows, channels);
  else normalize<BFloat16, false>(x, y, coefficients, rows, channels);
}

struct Shape {
  int64_t batch, rows, channels, groups, rows_per_chunk;

  int64_t width() const { return channels / groups; }
  int64_t chunks() const { return (rows + rows_per_chunk - 1) / rows_per_chunk; }
  int64_t chunk_rows(int64_t chunk) const { return std::min(rows_per_chunk, rows - chunk * rows_per_chunk); }
};

// Merges the chunks and channels of one group of one image into the coefficients of its channels.
void merge(const float *partials, float *coefficients, const float *weight, const float *bias, double eps,
           const Shape &shape, int64_t group) {
  const int64_t channels = shape.channels, begin = group * shape.width(), end = begin + shape.width();
  const auto channel_mean = [&](const float *chunk, int64_t c) { return double(chunk[c]) + double(chunk[channels + c]); };
  const double size = double(shape.rows) * double(shape.width());

  double total = 0.0;
  for (int64_t k = 0; k < shape.chunks(); ++k) {
    const float *chunk = partials + k * PARTIALS * channels;
    double sum = 0.0;
    for (int64_t c = begin; c < end; ++c) sum += channel_mean(chunk, c);
    total += sum * double(shape.chunk_rows(k));
  }
  const double mean = total / size;

  double m2 = 0.0;
  for (int64_t k = 0; k < shape.chunks(); ++k) {
    const float *chunk = partials + k * PARTIALS * channels;
    for (int64_t c = begin; c < end; ++c) {
      const double deviation = channel_mean(chunk, c) - mean;
      m2 += double(chunk[2 * channels + c]) + double(shape.chunk_rows(k)) * deviation * deviation;
    }
  }
  const double scale = 1.0 / std::sqrt(m2 / size + eps);

  // The mean as float32; what that leaves of it is in the summand, so that a mean far from zero costs no precision.
  const float rounded_mean = float(mean);
  for (int64_t c = begin; c < end; ++c) {
    const double factor = scale * double(weight[c]);
    coefficients[c] = rounded_mean;
    coefficients[channels + c] = float(factor);
    coefficients[2 * channels + c] = float(double(bias[c]) - (mean - double(rounded_mean)) * factor);
  }
}

template <typename T>
void group_norm_silu(const T *x, T *y, const float *weight, const float *bias, float *partials, float *coefficients,
                     const Shape &shape, double eps, bool with_silu, int threads) {
  const int64_t image = shape.rows * shape.channels, chunks = shape.chunks();
  const int64_t tile_rows = std::max<int64_t>(1, TILE / shape.channels);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for collapse(2)
    for (int64_t n = 0; n < shape.batch; ++n)
      for (int64_t k = 0; k < chunks; ++k)
        chunk_moments_of(x + n * image + k * shape.rows_per_chunk * shape.channels,
                         partials + (n * chunks + k) * PARTIALS * shape.channels, shape.chunk_rows(k), shape.channels);
#pragma omp for collapse(2)
    for (int64_t n = 0; n < shape.batch; ++n)
      for (int64_t group = 0; group < shape.groups; ++group)
        merge(partials + n * chunks * PARTIALS * shape.channels, coefficients + n * COEFFICIENTS * shape.channels,
              weight, bias, eps, shape, group);
#pragma omp for collapse(2)
    for (int64_t n = 0; n < shape.batch; ++n)
      for (int64_t row = 0; row < shape.rows; row += tile_rows) {
        const int64_t start = n * image + row * shape.channels;
        normalize_tile(x + start, y + start, coefficients + n * COEFFICIENTS * shape.channels,
                       std::min(tile_rows, shape.rows - row), shape.channels, with_silu);
      }
  }
}

}  // namespace

// ``x`` and ``y``: [batch, rows, channels], bfloat16 or float32. Room for the computation: ``partials``: [batch, chunks,
// PARTIALS, channels]; ``coefficients``: [batch, COEFFICIENTS, channels].
extern "C" void diffusion_group_norm_silu(const void *x, void *y, const float *weight, const float *bias, float *partials,
                                          float *coefficients, int64_t batch, int64_t rows, int64_t channels,
                                          int64_t groups, int64_t rows_per_chunk, double eps, int is_bfloat16,
                                          int with_silu, int threads) {
  const Shape shape{batch, rows, channels, groups, rows_per_chunk};
  if (is_bfloat16)
    group_norm_silu(static_cast<const BFloat16 *>(x), static_cast<BFloat16 *>(y), weight, bias, partials, coefficients,
                    shape, eps, with_silu, threads);
  else
    group_norm_silu(static_cast<const float *>(x), static_cast<float *>(y), weight, bias, partials, coefficients, shape,
                    eps, with_silu, threads);
}
