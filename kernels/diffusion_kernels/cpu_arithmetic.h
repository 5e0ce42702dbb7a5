// What the kernels for CPUs share: elements as float32, SiLU, and one copy of a function for each kind of CPU.
//
// Loops over channels are left to the compiler's vectorizer, so everything here is free of branches.
#pragma once

#include <cstdint>
#include <cstring>

// The copy that runs is chosen by the CPU when the library is loaded: AVX-512, AVX2 or neither. What such a function
// calls has to be inlined into it, or it is not compiled for that CPU. GCC knows the levels of x86-64 since version 12.
#ifdef FOR_EACH_CPU  // nothing: for the one CPU that the compiler is told
#elif __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#define INLINE inline __attribute__((always_inline))

namespace diffusion_kernels {

struct BFloat16 {
  uint16_t bits;
};

INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float load(const float &element) { return element; }
INLINE float load(const BFloat16 &element) { return from_bits(uint32_t(element.bits) << 16); }

INLINE void store(float &element, float value) { element = value; }

// Rounds to the nearest, halves to even; what is not a number stays so.
INLINE void store(BFloat16 &element, float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  element.bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

// y / (1 + exp(-y)). Where y is positive to 3 units in the last place of float32; where it is negative the relative error
// grows with it, to 40 units at most.
INLINE float silu(float y) {
  // exp(-y) is 2^t. Where t is bounded the result is y, or zero but for 2^-60 of y.
  float t = y * -1.4426950408889634f;
  t = t < -60.0f ? -60.0f : t;
  t = t > 60.0f ? 60.0f : t;
  // Adding 1.5 * 2^23 leaves no room for a fraction, and the integer in the lowest bits.
  const float shifted = t + 12582912.0f;
  const float fraction = t - (shifted - 12582912.0f);
  // 2^fraction for -0.5 to 0.5: the polynomial of degree 5 with the least relative error, 9e-8.
  float power = 1.32647273e-3f;
  power = power * fraction + 9.67151299e-3f;
  power = power * fraction + 5.55073358e-2f;
  power = power * fraction + 2.40222424e-1f;
  power = power * fraction + 6.93147004e-1f;
  power = power * fraction + 1.0f;
  power = from_bits(to_bits(power) + (to_bits(shifted) << 23));
  return y / (1.0f + power);
}

}  // namespace diffusion_kernels
