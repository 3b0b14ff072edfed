// Arguments of the kernel, small functions, and the learners' noise.

// ------------------------------------------------------------------------------------------------------------ arguments

// decay: lr·wd; noise: 2·ln 2·(lr·σ)²; rest: 1 − β; rate: of the normalization.
struct Settings { float lr_c, decay, noise, beta, rest, p, q; int row; i64 seed; double rate; };
struct Segment { int learner, from, to, flags; };                                  // steps of the chunk; WAITS, TELLS
enum { WAITS = 1, TELLS = 2 };
struct Arguments {
  float* far;                                         // (CTAs, FAR_FLOATS): what has no room on chip
  float* words; float* scales; const float* scalars;  // (learners, WORDS, PARAMETERS), (learners), (learners, length, SCALARS)
  float* units; float* inputs;                        // (learners, UNIT_STATES, HIDDEN), (learners, 2, inputs): mean and variance
  const Settings* settings; const Segment* segments; const int* begins;  // segments begins[i] … begins[i + 1] − 1 are cluster i's
  int* told; int telling;                                            // told[learner] = telling: the first part of its steps is done
  const unsigned char* source; const i64* index; const i64* permutation; const i64* task; const float* pixel;  // pixel: 256 values
  const float* dense; const void* targets;
  double* loss; i64* correct; i64* diverged_at;
  i64 start; int length, tasks;
};

// -------------------------------------------------------------------------------------------------------- small functions

INLINE void get4(const float* p, float* v) { float4 a = *(const float4*)p; v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; }
INLINE void put4(float* p, const float* v) { *(float4*)p = make_float4(v[0], v[1], v[2], v[3]); }
// Integers in the order of the floats, for maxima; NaN is beyond infinity.
INLINE int ordered(float f) { int i = __float_as_int(f); return i ^ ((i >> 31) & 0x7fffffff); }
INLINE float unordered(int i) { return __int_as_float(i ^ ((i >> 31) & 0x7fffffff)); }
INLINE bool finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }
constexpr float TINY = 1.17549435e-38f, TINY_NORM = 1.08420217e-19f;

template <int ACTIVATION> INLINE float active(float a, float slope) {
  if constexpr (ACTIVATION == TANH) return tanhf(a);
  else if constexpr (ACTIVATION == IDENTITY) return a;
  else if constexpr (ACTIVATION == RELU) return fmaxf(a, 0.f);
  else return a > 0.f ? a : slope * a;
}
template <int ACTIVATION> INLINE float rise(float h, float slope) {  // the activation's derivative, from its value
  if constexpr (ACTIVATION == TANH) return fmaf(-h, h, 1.f);
  else if constexpr (ACTIVATION == IDENTITY) return 1.f;
  else if constexpr (ACTIVATION == RELU) return h > 0.f ? 1.f : 0.f;
  else return h > 0.f ? 1.f : slope;
}

// ---------------------------------------------------------------------------------------------------- noise (upgd.noise)

struct Keys { u32 k0, k1, k2, k3; };
enum { NOISE_OF_WEIGHTS = 1, FRESH_WEIGHTS = 5, DRAWS_OF_UNITS = 6 };  // upgd.noise.Purpose
INLINE Keys keys_of(i64 seed, i64 step, u32 purpose = NOISE_OF_WEIGHTS, u32 number = 0) {  // Philox 4×32-10 of counter (number, step, purpose), key seed
  u32 c0 = number, c1 = (u32)step, c2 = (u32)(step >> 32), c3 = purpose, a = (u32)seed, b = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u64 left = (u64)0xD2511F53u * c0, right = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(right >> 32) ^ c1 ^ a; c1 = (u32)right; c2 = (u32)(left >> 32) ^ c3 ^ b; c3 = (u32)left;
    a += 0x9E3779B9u; b += 0xBB67AE85u;
  }
  return {c0, c1 | 1u, c2, c3 | 1u};
}
INLINE void words(u32 j, const Keys& k, u32& v, u32& angle) {
  u32 x = k.k0 + j * k.k1; x = (x ^ x >> 16) * 0x21F0AAADu;
  u32 s = x ^ x >> 15, r = s * 0xD35A2D97u;
  v = (r ^ r >> 15) | 3u;  // twice (radius ≫ 1 | 1), and one more, which radius_of takes off
  angle = (s ^ (k.k2 + j * k.k3)) * 0x846CA68Bu; angle ^= angle >> 16 ^ 0x80000000u;  // plus half a turn, which angle_of takes off
}
INLINE float uniform(u32 j, const Keys& k) { u32 v, angle; words(j, k, v, angle); return (float)(int)(v >> 1) * 4.656612873077393e-10f; }
INLINE float radius_of(u32 v, float noise) { return root(noise * fabsf(lg2(fmaf((float)v, 2.3283064365386963e-10f, -2.3283064365386963e-10f)))); }
// π·int32(angle)·2⁻³² by way of the mantissa of a number in [1, 2); if the angle is odd, mirrored, which changes the sign of the
// cosine only.
INLINE float angle_of(u32 angle) { return fmaf(__uint_as_float(__funnelshift_r(angle, angle * 256 + 127, 9)), 3.14159265f, 1.57079633f); }
INLINE void set_pair(u32 j, const Keys& k, float noise, float& even, float& odd) {
  u32 v, angle; words(j, k, v, angle);
  const float r = radius_of(v, noise), theta = angle_of(angle);
  even = r * cosine(theta); odd = r * sine(theta);
}
INLINE float set_single(u32 i, const Keys& k, float noise) {
  float even, odd; set_pair(i >> 1, k, noise, even, odd);
  return i & 1 ? odd : even;
}
struct Noise { Keys now; float size, size_before; };  // sizes: Settings::noise; size_before = 0 at the first step
INLINE const Keys* keys_now() { return (const Keys*)(memory + KEYS); }  // and, if they are needed again, those of the step before
INLINE Noise noise_of(i64 step, float size) { return {keys_now()[0], size, step > 1 ? size : 0.f}; }
INLINE void pair_noise(u32 j, const Noise& z, float& even, float& odd) {
  set_pair(j, z.now, z.size, even, odd);
  if constexpr (NOISE == ANTICORRELATED) {
    float a, b; set_pair(j, keys_now()[1], z.size_before, a, b);
    even -= a; odd -= b;
  }
}
INLINE float single_noise(u32 i, const Noise& z) {
  if constexpr (NOISE == NONE) return 0.f;
  float even, odd; pair_noise(i >> 1, z, even, odd);
  return i & 1 ? odd : even;
}
