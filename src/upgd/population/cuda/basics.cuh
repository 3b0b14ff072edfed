// What is passed, small functions, the learners' noise, and how the CTAs of a cluster talk to each other.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ------------------------------------------------------------------------------------------------------------ arguments

struct Settings { float lr_c, decay, noise, beta, rest, p, q; int row; i64 seed; };  // decay: lr·wd; noise: 2·ln 2·(lr·σ)²; rest: 1 − β
struct Segment { int learner, from, to, flags; };                                  // steps of the chunk; WAITS, TELLS
enum { WAITS = 1, TELLS = 2 };
struct Arguments {
  float* parameters; float* utilities; float* scales;                 // (learners, PARAMETERS) twice, (learners)
  const Settings* settings; const Segment* segments; const int* begins;  // segments begins[i] … begins[i + 1] − 1 are cluster i's
  int* told; int telling;                                            // told[learner] = telling: its first part is done
  const unsigned char* source; const i64* index; const i64* permutation; const i64* task; const float* pixel;  // pixel: 256 values
  const float* dense; const void* targets;
  double* loss; i64* correct; i64* diverged_at;
  i64 start; int length, tasks;
};

// -------------------------------------------------------------------------------------------------------- small functions

#define INLINE __device__ __forceinline__
INLINE float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float sine(float x) { float y; asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float cosine(float x) { float y; asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
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
INLINE Keys keys_of(i64 seed, i64 step) {  // Philox 4×32-10 of counter (0, step, purpose = 1), key seed
  u32 c0 = 0, c1 = (u32)step, c2 = (u32)(step >> 32), c3 = 1, a = (u32)seed, b = (u32)(seed >> 32);
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
  v = (r >> 1 ^ r >> 16) | 1u;  // (radius ≫ 1) | 1 where radius = r ⊕ r≫15
  angle = (s ^ (k.k2 + j * k.k3)) * 0x846CA68Bu; angle ^= angle >> 16;
}
INLINE float radius_of(u32 v, float noise) { return root(noise * fabsf(lg2((float)(int)v * 4.656612873077393e-10f))); }
INLINE float angle_of(u32 angle) {  // π·int32(angle)·2⁻³² by way of the mantissa of a number in [1, 2)
  return fmaf(__uint_as_float((angle >> 9) ^ 0x3FC00000u), 3.14159265f, -4.71238898f);
}
INLINE void add_pair(u32 j, const Keys& k, float noise, float sign, float& even, float& odd) {
  u32 v, angle; words(j, k, v, angle);
  const float r = sign * radius_of(v, noise), theta = angle_of(angle);
  even = fmaf(r, __uint_as_float(__float_as_uint(cosine(theta)) ^ (angle << 31)), even); odd = fmaf(r, sine(theta), odd);
}
INLINE void set_pair(u32 j, const Keys& k, float noise, float& even, float& odd) {
  u32 v, angle; words(j, k, v, angle);
  const float r = radius_of(v, noise), theta = angle_of(angle);
  even = r * __uint_as_float(__float_as_uint(cosine(theta)) ^ (angle << 31)); odd = r * sine(theta);
}
struct Noise { Keys now, before; float size, size_before; };  // sizes: Settings::noise; size_before = 0 at the first step
INLINE void pair_noise(u32 j, const Noise& z, float& even, float& odd) {
  set_pair(j, z.now, z.size, even, odd);
  if constexpr (NOISE == ANTICORRELATED) add_pair(j, z.before, z.size_before, -1.f, even, odd);
}
INLINE float single_noise(u32 i, const Noise& z) {
  if constexpr (NOISE == NONE) return 0.f;
  float even, odd; pair_noise(i >> 1, z, even, odd);
  return i & 1 ? odd : even;
}

// ------------------------------------------------------------------------------------------------ talking to the cluster

INLINE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE u32 at(u32 address, u32 rank) { u32 there; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank)); return there; }
INLINE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
INLINE void barrier_init(u64* b) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(b)) : "memory"); }
INLINE void barrier_expect(u64* b, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(b)), "r"(bytes) : "memory"); }
INLINE void barrier_wait(u64* b, u32 phase) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(shared(b)), "r"(phase) : "memory");
}
// Sending wakes the receiver's barrier. A cluster of one CTA writes to itself, and meets at a plain barrier (see receive).
INLINE void send4(float* to, u64* barrier, u32 rank, const float* v) {
  if constexpr (CLUSTER == 1) *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at(shared(to), rank)), "r"(__float_as_int(v[0])), "r"(__float_as_int(v[1])), "r"(__float_as_int(v[2])), "r"(__float_as_int(v[3])), "r"(at(shared(barrier), rank)) : "memory");
}
INLINE void send1(void* to, u64* barrier, u32 rank, int v) {
  if constexpr (CLUSTER == 1) *(int*)to = v;
  else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at(shared(to), rank)), "r"(v), "r"(at(shared(barrier), rank)) : "memory");
}

