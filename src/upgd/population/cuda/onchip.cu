// One learner per thread-block cluster: weights and utilities stay on chip while the learner takes thousands of steps.
//
// The planner (planner.py) writes what is constant in front of this text: CLUSTER, THREADS, the choices of the rule, and for
// every layer l a struct Layer<l> with its Block<l, b>s. How a step goes:
//
//   Layers alternate. An even layer is split by its OUTPUTS: every block of the cluster (a CTA) owns some units and all
//   weights that enter them. An odd layer is split by its INPUTS: it stores its matrix turned, one row for each unit of
//   the layer before that the CTA owns. So what an even layer computes is what its CTA needs for the odd one behind it,
//   and the CTAs only exchange sums behind odd layers, on the way forward, and behind even ones, on the way back.
//   In both cases a CTA has "rows" (units it owns) of "lanes" (all units on the other side), and the gradient is
//   row vector × lane vector:        rows               lanes
//       even layer                   deltas it owns     all inputs h
//       odd layer, turned            inputs it owns     all deltas
//
//   A thread works on tiles of 2 rows × 4 lanes. Its lanes stay the same; the rows go round. Some tiles live in registers
//   ("held"), the rest in shared memory.
//
//   Utilities decay lazily: what is stored is u / scale, with scale ← β·scale at every step, so that rows without gradient
//   are not written. The scale returns to 1 at every 100th step, whatever the blocks of steps are.
//
// Sums have a fixed order everywhere, so reruns agree in every bit, and blocks of steps do not show.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ------------------------------------------------------------------------------------------------------------ arguments

struct Settings { float lr_c, keep, noise, beta, rest, p, q; int row; i64 seed; };  // noise: 2·ln 2·(lr·σ)²; rest: 1 − β
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
constexpr float TINY = 1.17549435e-38f;

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

// ----------------------------------------------------------------------------------------------- what a block of threads has

extern __shared__ __align__(16) float memory[];
INLINE u64* barrier(int i) { return (u64*)(memory + BARRIERS) + i; }
INLINE int first_of(int units, int grain, int rank) { return min(units, grain * (((units + grain - 1) / grain) * rank / CLUSTER)); }

// A tile, 2 rows × 4 lanes, in registers or in shared memory: the same words for both.
struct HeldTile {
  float (&w)[2][4]; float (&u)[2][4];
  INLINE void get_w(float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) v[r][k] = w[r][k]; }
  INLINE void get_u(float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) v[r][k] = u[r][k]; }
  INLINE void put_w(const float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) w[r][k] = v[r][k]; }
  INLINE void put_u(const float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) u[r][k] = v[r][k]; }
  INLINE void get_w_row(int r, float (&v)[4]) const { for (int k = 0; k < 4; ++k) v[k] = w[r][k]; }
  INLINE void put_u_row(int r, const float (&v)[4]) const { for (int k = 0; k < 4; ++k) u[r][k] = v[k]; }
};
template <class B> struct SharedTile {
  int offset;
  INLINE void get_w(float (&v)[2][4]) const { get4(memory + B::W + offset, v[0]); get4(memory + B::W + offset + B::CHUNKS * 4, v[1]); }
  INLINE void get_u(float (&v)[2][4]) const { get4(memory + B::U + offset, v[0]); get4(memory + B::U + offset + B::CHUNKS * 4, v[1]); }
  INLINE void put_w(const float (&v)[2][4]) const { put4(memory + B::W + offset, v[0]); put4(memory + B::W + offset + B::CHUNKS * 4, v[1]); }
  INLINE void put_u(const float (&v)[2][4]) const { put4(memory + B::U + offset, v[0]); put4(memory + B::U + offset + B::CHUNKS * 4, v[1]); }
  INLINE void get_w_row(int r, float (&v)[4]) const { get4(memory + B::W + offset + r * B::CHUNKS * 4, v); }
  INLINE void put_u_row(int r, const float (&v)[4]) const { put4(memory + B::U + offset + r * B::CHUNKS * 4, v); }
};

// Everything one thread knows.
struct Thread : Registers {
  int rank; u32 phases;
  float x[BLOCKS_0][4], x_next[BLOCKS_0][4];  // the first layer's inputs at this thread's lanes, now and at the next step

  template <int l> INLINE int rows() const { typedef Layer<l> L; return first_of(L::UNITS, L::GRAIN, rank + 1) - first_of(L::UNITS, L::GRAIN, rank); }
  template <int l> INLINE int first() const { typedef Layer<l> L; return first_of(L::UNITS, L::GRAIN, rank); }
  template <int l> INLINE int biases() const { typedef Layer<l> L; return L::BIAS < 0 ? 0 : first_of(L::OUTPUTS, L::BIAS_GRAIN, rank + 1) - first_bias<l>(); }
  template <int l> INLINE int first_bias() const { typedef Layer<l> L; return first_of(L::OUTPUTS, L::BIAS_GRAIN, rank); }

  INLINE void receive(int which, u32 bytes) {
    if constexpr (CLUSTER == 1) { __syncthreads(); return; }
    barrier_wait(barrier(which), phases >> which & 1);
    phases ^= 1u << which;
    if (threadIdx.x == 0) barrier_expect(barrier(which), bytes);
  }
};

// The thread's number in a block of lanes: small blocks begin at different warps, so that no warp gets them all.
template <class B> INLINE int worker() {
  const int t = (int)threadIdx.x - B::SHIFT;
  return B::SHIFT > 0 && t < 0 ? t + THREADS : t;
}
template <class B, class Visit> INLINE void each_tile(Thread& me, Visit visit) {
  const int chunk = worker<B>() % B::CHUNKS, group = worker<B>() / B::CHUNKS;
  const int pairs = (me.rows<B::LAYER>() + 1) / 2;
  if (group >= B::GROUPS) return;
  Held<B::LAYER, B::NUMBER>& held = me;
#pragma unroll
  for (int s = 0; s < B::HELD; ++s)
    if (group + s * B::GROUPS < pairs) visit(group + s * B::GROUPS, chunk, HeldTile{held.w[s], held.u[s]});
#pragma unroll 1
  for (int pair = group + B::HELD * B::GROUPS; pair < pairs; pair += B::GROUPS)
    visit(pair, chunk, SharedTile<B>{(pair - B::HELD * B::GROUPS) * 8 * B::CHUNKS + chunk * 4});
}

template <int l, class Visit> INLINE void each_block(Visit visit) {
  visit(Block<l, 0>());
  if constexpr (Layer<l>::BLOCKS == 2) visit(Block<l, 1>());
}
template <class Visit, int l = 0> INLINE void each_layer(Visit visit) {
  visit(Layer<l>());
  if constexpr (l + 1 < LAYERS) each_layer<Visit, l + 1>(visit);
}

// The vector along rows, and that along lanes at the thread's chunk; their product is the gradient.
template <int l> INLINE const float* row_vector() {
  if constexpr (Layer<l>::TURNED) return memory + Layer<l - 1>::H; else return memory + Layer<l>::D;
}
template <class B> INLINE void lane_vector(const Thread& me, int chunk, float (&v)[4]) {
  if constexpr (B::LAYER == 0) { for (int k = 0; k < 4; ++k) v[k] = me.x[B::NUMBER][k]; }
  else if constexpr (Layer<B::LAYER>::TURNED) get4(memory + Layer<B::LAYER>::D + B::FIRST + chunk * 4, v);
  else get4(memory + Layer<B::LAYER - 1>::H + B::FIRST + chunk * 4, v);
}

// ------------------------------------------------------------------------------- products: rows with lanes, lanes with rows

INLINE float dot4(const float (&w)[4], const float (&x)[4]) { return fmaf(w[3], x[3], fmaf(w[2], x[2], fmaf(w[1], x[1], __fmul_rn(w[0], x[0])))); }

// Two rows' sums over a team of threads; the parts of a row lie side by side.
template <class B> INLINE void put_parts(float a, float b, int pair, int chunk) {
  constexpr int TEAM = B::TEAM, PARTS = Layer<B::LAYER>::PARTS;
  float* part = memory + PART + 2 * pair * PARTS + B::FIRST_PART + chunk / TEAM;
  if constexpr (TEAM == 1) { part[0] = a; part[PARTS] = b; }
  else {
    const u32 mask = B::CHUNKS % 32 == 0 ? ~0u : ((1u << TEAM) - 1) << (threadIdx.x & 31 & ~(TEAM - 1));
    const bool upper = chunk & (TEAM / 2);
    float v = upper ? b : a;
    v += __shfl_xor_sync(mask, upper ? a : b, TEAM / 2);
#pragma unroll
    for (int o = TEAM / 4; o; o >>= 1) v += __shfl_xor_sync(mask, v, o);
    if ((chunk & (TEAM / 2 - 1)) == 0) part[upper ? PARTS : 0] = v;
  }
}
// done(row, j, sum) for every row, called by its eight threads j.
template <int l, class Done> INLINE void rows_done(const Thread& me, Done done) {
  constexpr int PARTS = Layer<l>::PARTS;
  const int rows = me.rows<l>(), j = threadIdx.x & 7;
#pragma unroll 1
  for (int base = 0; base < Layer<l>::ROWS; base += THREADS / 8) {
    const int row = base + threadIdx.x / 8;
    float sum = 0.f;
    if (row < rows)
#pragma unroll
      for (int q = 0; q < PARTS; q += 8) if (q + j < PARTS) sum += memory[PART + row * PARTS + q + j];
    sum += __shfl_xor_sync(~0u, sum, 1); sum += __shfl_xor_sync(~0u, sum, 2); sum += __shfl_xor_sync(~0u, sum, 4);
    if (row < rows) done(row, j, sum);
  }
}
template <int l> INLINE void dots(Thread& me) {
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    float v[4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
    each_tile<B>(me, [&](int pair, int chunk, auto tile) {
      float w[2][4]; tile.get_w(w);
      put_parts<B>(dot4(w[0], v), dot4(w[1], v), pair, chunk);
    });
  });
}
// Sums over the rows of all CTAs: value(w, u, row vector) → what to add. Ends with every CTA's sums in the buffer.
template <int l, class Value> INLINE void sums(Thread& me, int which, int buffer, bool with_bias, Value value) {
  typedef Layer<l> L;
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    const int chunk = worker<B>() % B::CHUNKS, group = worker<B>() / B::CHUNKS;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    each_tile<B>(me, [&](int pair, int, auto tile) { value(block, pair, tile, sum); });
    if (group < B::USED_GROUPS) put4(memory + PART + group * L::PADDED + B::FIRST + chunk * 4, sum);
  });
  __syncthreads();
  const int own = me.biases<l>(), from = me.first_bias<l>();
#pragma unroll 1
  for (int i = threadIdx.x; i < CLUSTER * (L::PADDED / 4); i += THREADS) {
    const int to = i / (L::PADDED / 4), lane = i % (L::PADDED / 4) * 4;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      if (lane >= B::FIRST && lane < B::FIRST + B::CHUNKS * 4)
#pragma unroll
        for (int g = 0; g < B::USED_GROUPS; ++g) { float v[4]; get4(memory + PART + g * L::PADDED + lane, v); for (int k = 0; k < 4; ++k) sum[k] += v[k]; }
    });
    if (with_bias)
      for (int k = 0; k < 4; ++k) if (u32(lane + k - from) < u32(own)) sum[k] += memory[L::BIAS_W + lane + k - from];
    send4(memory + buffer + me.rank * L::PADDED + lane, barrier(which), to, sum);
  }
  me.receive(which, CLUSTER * L::PADDED * 4);
}
template <int l> INLINE float received(int buffer, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < CLUSTER; ++c) sum += memory[buffer + c * Layer<l>::PADDED + lane];
  return sum;
}
template <int l> INLINE void weighted_sums(Thread& me, int which, int buffer, bool with_bias) {
  sums<l>(me, which, buffer, with_bias, [&](auto, int pair, auto tile, float (&sum)[4]) {
    const float a = row_vector<l>()[2 * pair], b = row_vector<l>()[2 * pair + 1];
    float w[2][4]; tile.get_w(w);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] = fmaf(w[1][k], b, fmaf(w[0][k], a, sum[k]));
  });
}

// -------------------------------------------------------------------------------------------- forward, judgement, backward

// From the parts of an even layer's rows to its outputs.
template <int l> INLINE void outputs_of_rows(Thread& me) {
  typedef Layer<l> L;
  rows_done<l>(me, [&](int row, int j, float sum) {
    const float a = L::BIAS < 0 ? sum : sum + memory[L::BIAS_W + row];
    if constexpr (l + 1 < LAYERS) { if (j == 0) memory[L::H + row] = active<L::ACTIVATION>(a, L::SLOPE); }
    else for (int to = j; to < CLUSTER; to += 8) send1(memory + OUTPUTS_AT + me.first<l>() + row, barrier(GATHER), to, __float_as_int(a));
  });
  if constexpr (l + 1 == LAYERS) me.receive(GATHER, L::OUTPUTS * 4);
}
template <int l> INLINE void forward(Thread& me) {  // from layer l to the last
  if constexpr (l < LAYERS) {
    typedef Layer<l> L;
    if constexpr (L::TURNED) {
      weighted_sums<l>(me, L::FORWARD, L::FORWARD_BUFFER, true);
      for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) {
        const float a = received<l>(L::FORWARD_BUFFER, k);
        if constexpr (l + 1 < LAYERS) memory[L::H + k] = active<L::ACTIVATION>(a, L::SLOPE); else memory[OUTPUTS_AT + k] = a;
      }
      __syncthreads();
    } else {
      dots<l>(me);
      __syncthreads();
      outputs_of_rows<l>(me);
      if constexpr (l + 1 < LAYERS) __syncthreads();
    }
    forward<l + 1>(me);
  }
}
struct Verdict { float loss; bool correct; };
INLINE float warp_sum(float v) { for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o); return v; }
// Every warp looks at all outputs, so that all threads know the loss; the first one writes down the deltas.
INLINE Verdict judge(Thread& me, int target) {
  typedef Layer<LAYERS - 1> L;
  constexpr int EACH = (L::OUTPUTS + 31) / 32;
  const int lane = threadIdx.x & 31;
  float v[EACH], delta[EACH];
  Verdict verdict;
#pragma unroll
  for (int i = 0; i < EACH; ++i) v[i] = lane + 32 * i < L::OUTPUTS ? memory[OUTPUTS_AT + lane + 32 * i] : -3.402823466e38f;
  if constexpr (LOSS == CROSS_ENTROPY) {
    float largest = v[0], total = 0.f; int place = 1 << 20;
#pragma unroll
    for (int i = 1; i < EACH; ++i) largest = fmaxf(largest, v[i]);
    largest = unordered(__reduce_max_sync(~0u, ordered(largest)));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int o = lane + 32 * i;
      delta[i] = o < L::OUTPUTS ? __expf(v[i] - largest) : 0.f; total += delta[i];
      if (o < L::OUTPUTS && v[i] == largest) place = min(place, o);
    }
    total = warp_sum(total);
    verdict.loss = (largest - memory[OUTPUTS_AT + target]) + logf(total);
    verdict.correct = __reduce_min_sync(~0u, place) == target;
    const float share = __fdividef(1.f, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) delta[i] = fmaf(delta[i], share, lane + 32 * i == target ? -1.f : 0.f);
  } else {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int o = lane + 32 * i;
      const float error = o < L::OUTPUTS ? v[i] - memory[TARGETS_AT + o] : 0.f;
      total = fmaf(error, error, total); delta[i] = error * (2.f / L::OUTPUTS);
    }
    verdict.loss = warp_sum(total) * (1.f / L::OUTPUTS); verdict.correct = false;
  }
  if (threadIdx.x < 32) {
    const int from = L::TURNED ? 0 : me.first<LAYERS - 1>(), count = L::TURNED ? L::OUTPUTS : me.rows<LAYERS - 1>();
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (u32(lane + 32 * i - from) < u32(count)) memory[L::D + lane + 32 * i - from] = delta[i];
  }
  return verdict;
}
template <int l> INLINE void backward(Thread& me) {  // from layer l's deltas to those of the layers before
  if constexpr (l > 0) {
    typedef Layer<l> L; typedef Layer<l - 1> Before;
    if constexpr (L::TURNED) {
      dots<l>(me);
      __syncthreads();
      rows_done<l>(me, [&](int row, int j, float sum) {
        if (j == 0) memory[Before::D + row] = sum * rise<Before::ACTIVATION>(memory[Before::H + row], Before::SLOPE);
      });
    } else {
      weighted_sums<l>(me, L::BACKWARD, L::BACKWARD_BUFFER, false);
      for (int k = threadIdx.x; k < L::INPUTS; k += THREADS)
        memory[Before::D + k] = received<l>(L::BACKWARD_BUFFER, k) * rise<Before::ACTIVATION>(memory[Before::H + k], Before::SLOPE);
    }
    __syncthreads();
    backward<l - 1>(me);
  }
}

// --------------------------------------------------------------------------------------------------------------- the rule

// visit(w, u, delta, index, tensor) for every bias that the CTA owns; each by one thread.
template <class Visit> INLINE void each_bias(Thread& me, Visit visit) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    const int own = me.biases<L::NUMBER>(), from = me.first_bias<L::NUMBER>();
    for (int i = ((int)threadIdx.x + THREADS - L::BIAS_THREAD) % THREADS; i < own; i += THREADS)
      visit(memory[L::BIAS_W + i], memory[L::BIAS_U + i], memory[L::D + (L::TURNED ? from + i : i)], L::BIAS + from + i, L::NUMBER);
  });
}
INLINE void scale_utilities(Thread& me, float by) {
  each_layer([&](auto layer) {
    each_block<decltype(layer)::NUMBER>([&](auto block) {
      each_tile<decltype(block)>(me, [&](int, int, auto tile) {
        float u[2][4]; tile.get_u(u);
        for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) u[r][k] *= by;
        tile.put_u(u);
      });
    });
  });
  each_bias(me, [&](float&, float& u, float, int, int) { u *= by; });
}
// u ← u + factor·g·w, where factor = −(1 − β)/scale. Visits every tile after that with look(block, pair, u).
template <int l, class Look> INLINE void trace(Thread& me, float factor, Look look) {
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    float v[4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
    each_tile<B>(me, [&](int pair, int chunk, auto tile) {
      float u[2][4]; tile.get_u(u);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float g = factor * row_vector<l>()[2 * pair + r];
        if (g == 0.f) continue;  // a unit that is silent: nothing to read or write but the maximum
        float w[4]; tile.get_w_row(r, w);
#pragma unroll
        for (int k = 0; k < 4; ++k) u[r][k] = fmaf(g * v[k], w[k], u[r][k]);
        tile.put_u_row(r, u[r]);
      }
      look(block, pair, chunk, u);
    });
  });
}
// Global scaling: the largest utility of the learner; a tensor with an infinite one does not take part.
INLINE float largest_utility(Thread& me, float factor) {
  int* maxima = (int*)(memory + MAXIMA);
  each_layer([&](auto layer) {
    constexpr int l = decltype(layer)::NUMBER;
    float largest = 0.f;  // η is at least the smallest normal float anyway
    trace<l>(me, factor, [&](auto, int, int, const float (&u)[2][4]) {
      for (int k = 0; k < 4; ++k) largest = fmaxf(largest, fmaxf(u[0][k], u[1][k]));
    });
    const int of_warp = __reduce_max_sync(~0u, ordered(largest));
    if ((threadIdx.x & 31) == 0) atomicMax(maxima + l, of_warp);
  });
  each_bias(me, [&](float& w, float& u, float delta, int, int l) {
    u = fmaf(factor * delta, w, u);
    atomicMax(maxima + LAYERS + l, ordered(u));
  });
  __syncthreads();
  if (threadIdx.x < CLUSTER * 2 * LAYERS) {
    const int tensor = threadIdx.x % (2 * LAYERS), to = threadIdx.x / (2 * LAYERS);
    send1(memory + SCALE_BUFFER + me.rank * 2 * LAYERS + tensor, barrier(SCALE), to, maxima[tensor]);
  }
  me.receive(SCALE, CLUSTER * 2 * LAYERS * 4);
  int largest = 0;
  const int tensor = threadIdx.x & 31;
  if (tensor < 2 * LAYERS) {
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) largest = max(largest, ((int*)(memory + SCALE_BUFFER))[c * 2 * LAYERS + tensor]);
    if (!finite(unordered(largest))) largest = 0;
  }
  return unordered(__reduce_max_sync(~0u, largest));
}
// Local scaling: log₂e over the norm of a unit's incoming utilities, by row (even layers) or by lane (odd ones), and of biases.
INLINE float inverse_norm(float squares) { return 1.44269504f / fmaxf(sqrtf(squares), TINY); }
INLINE void local_norms(Thread& me, float factor) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    if constexpr (L::TURNED) {
      trace<l>(me, factor, [](auto, int, int, const float (&)[2][4]) {});
      sums<l>(me, L::NORM, L::NORM_BUFFER, false, [&](auto, int, auto tile, float (&sum)[4]) {
        float u[2][4]; tile.get_u(u);
        for (int k = 0; k < 4; ++k) sum[k] = fmaf(u[1][k], u[1][k], fmaf(u[0][k], u[0][k], sum[k]));
      });
      for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) memory[L::NORMS + k] = inverse_norm(received<l>(L::NORM_BUFFER, k));
    } else {
      trace<l>(me, factor, [&](auto block, int pair, int chunk, const float (&u)[2][4]) {
        put_parts<decltype(block)>(dot4(u[0], u[0]), dot4(u[1], u[1]), pair, chunk);
      });
      __syncthreads();
      rows_done<l>(me, [&](int row, int j, float sum) { if (j == 0) memory[L::NORMS + row] = inverse_norm(sum); });
    }
    __syncthreads();
  });
  each_bias(me, [&](float& w, float& u, float delta, int, int) { u = fmaf(factor * delta, w, u); });
  __syncthreads();
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if (threadIdx.x / 32 != L::NUMBER % (THREADS / 32)) return;
    float squares = 0.f;
    for (int i = threadIdx.x & 31; i < me.biases<L::NUMBER>(); i += 32) squares = fmaf(memory[L::BIAS_U + i], memory[L::BIAS_U + i], squares);
    squares = warp_sum(squares);
    for (int to = threadIdx.x & 31; to < CLUSTER; to += 32) send1(memory + SCALE_BUFFER + me.rank * LAYERS + L::NUMBER, barrier(SCALE), to, __float_as_int(squares));
  });
  me.receive(SCALE, CLUSTER * LAYERS * 4);
}
INLINE float bias_inverse_norm(int l) {
  float squares = 0.f;
  for (int c = 0; c < CLUSTER; ++c) squares += memory[SCALE_BUFFER + c * LAYERS + l];
  return inverse_norm(squares);
}

// 1 − ū = 1 / (1 + e^(û/scale)) for four utilities with one reciprocal. û/scale ≤ 1, so the product stays small.
INLINE void four_gates(const float (&u)[4], const float (&by)[4], float (&open)[4]) {
  float a[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) a[k] = 1.f + ex2(u[k] * by[k]);
  const float left = a[0] * a[1], right = a[2] * a[3], all = reciprocal(left * right), l = all * right, r = all * left;
  open[0] = l * a[1]; open[1] = l * a[0]; open[2] = r * a[3]; open[3] = r * a[2];
}
struct Rule { float lr_c, keep, p, q; };
// BOTH: p = q = 1, the common case, has a shorter formula.
template <bool BOTH> INLINE float updated(float w, float d, float v, float noise, float open, const Rule& rule) {
  if constexpr (RULE == PLAIN) return fmaf(w, rule.keep, -fmaf(d, v, noise));
  else if constexpr (BOTH) return fmaf(-open, fmaf(d, v, noise), w * rule.keep);
  else return fmaf(-fmaf(rule.p, open, 1.f - rule.p), d * v, fmaf(-fmaf(rule.q, open, 1.f - rule.q), noise, w * rule.keep));
}
template <class B> INLINE void tile_noise(const Thread& me, const Noise& z, int first, int pair, int chunk, float (&n)[2][4]) {
  typedef Layer<B::LAYER> L;
  if constexpr (NOISE == NONE) { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) n[r][k] = 0.f; }
  else if constexpr (L::TURNED) {
    const u32 i = L::WEIGHT + (B::FIRST + chunk * 4) * L::INPUTS + first + 2 * pair;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (L::EVEN) pair_noise((i >> 1) + k * (L::INPUTS / 2), z, n[0][k], n[1][k]);
      else for (int r = 0; r < 2; ++r) n[r][k] = single_noise(i + k * L::INPUTS + r, z);
    }
  } else {
    const u32 i = L::WEIGHT + (first + 2 * pair) * L::INPUTS + B::FIRST + chunk * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (L::EVEN) for (int k = 0; k < 4; k += 2) pair_noise((i >> 1) + (r * L::INPUTS + k) / 2, z, n[r][k], n[r][k + 1]);
      else for (int k = 0; k < 4; ++k) n[r][k] = single_noise(i + r * L::INPUTS + k, z);
    }
  }
}
// The update of all parameters; the first layer meets the next input on the way.
template <bool BOTH> INLINE void descend(Thread& me, const Rule& rule, const Noise& z, float by) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    const int first = me.first<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      float v[4], lane_by[4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
      if constexpr (RULE == UTILITY && SCALING == LOCAL && L::TURNED) get4(memory + L::NORMS + B::FIRST + worker<B>() % B::CHUNKS * 4, lane_by);
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        float w[2][4], u[2][4], n[2][4];
        tile.get_w(w);
        if constexpr (RULE == UTILITY) tile.get_u(u);
        tile_noise<B>(me, z, first, pair, chunk, n);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float d = rule.lr_c * row_vector<l>()[2 * pair + r];
          float open[4], b[4];
          if constexpr (RULE == UTILITY) {
            for (int k = 0; k < 4; ++k) b[k] = SCALING == GLOBAL ? by : L::TURNED ? lane_by[k] : memory[L::NORMS + 2 * pair + r];
            four_gates(u[r], b, open);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) w[r][k] = updated<BOTH>(w[r][k], d, v[k], n[r][k], RULE == UTILITY ? open[k] : 0.f, rule);
        }
        tile.put_w(w);
        if constexpr (l == 0) put_parts<B>(dot4(w[0], me.x_next[B::NUMBER]), dot4(w[1], me.x_next[B::NUMBER]), pair, chunk);
      });
    });
  });
  each_bias(me, [&](float& w, float& u, float delta, int index, int l) {
    const float b = SCALING == LOCAL && RULE == UTILITY ? bias_inverse_norm(l) : by;
    w = updated<BOTH>(w, rule.lr_c, delta, single_noise(index, z), RULE == UTILITY ? 1.f / (1.f + ex2(u * b)) : 0.f, rule);
  });
}

// ------------------------------------------------------------------------------------------------------- data and memory

// Where the thread's inputs come from, and bytes on their way.
struct Input { u32 order[BLOCKS_0][2]; unsigned char byte[BLOCKS_0][4]; float value[BLOCKS_0][4]; int task; };
template <class B> INLINE int input_lane(int k) { return B::FIRST + worker<B>() % B::CHUNKS * 4 + k; }
INLINE void take_order(const Arguments& args, int row, int task, Input& in) {  // the permutation of a task, at the thread's lanes
  in.task = task;
  each_block<0>([&](auto block) {
    typedef decltype(block) B;
    u32 o[4];
    for (int k = 0; k < 4; ++k) {
      const int lane = min(input_lane<B>(k), Layer<0>::INPUTS - 1);
      o[k] = args.permutation ? (u32)args.permutation[((i64)row * args.tasks + task) * Layer<0>::INPUTS + lane] : lane;
    }
    in.order[B::NUMBER][0] = o[0] | o[1] << 16; in.order[B::NUMBER][1] = o[2] | o[3] << 16;
  });
}
INLINE void ask(const Arguments& args, int row, int step, i64 image, Input& in) {  // start the loads
  each_block<0>([&](auto block) {
    typedef decltype(block) B;
    for (int k = 0; k < 4; ++k) {
      if constexpr (INDEXED) in.byte[B::NUMBER][k] = args.source[image * Layer<0>::INPUTS + (in.order[B::NUMBER][k / 2] >> (16 * (k & 1)) & 0xffffu)];
      else in.value[B::NUMBER][k] = args.dense[((i64)row * args.length + step) * Layer<0>::INPUTS + min(input_lane<B>(k), Layer<0>::INPUTS - 1)];
    }
  });
}
INLINE void answer(const Arguments& args, const Input& in, float (&x)[BLOCKS_0][4]) {
  each_block<0>([&](auto block) {
    typedef decltype(block) B;
    for (int k = 0; k < 4; ++k) {
      const float value = INDEXED ? args.pixel[in.byte[B::NUMBER][k]] : in.value[B::NUMBER][k];
      x[B::NUMBER][k] = input_lane<B>(k) < Layer<0>::INPUTS ? value : 0.f;
    }
  });
}
// Between global memory, in the order of the parameters, and the tiles. Entries that pad a tile are zero and never stored.
template <class B> INLINE i64 place(int first, int pair, int r, int lane) {
  typedef Layer<B::LAYER> L;
  return L::TURNED ? L::WEIGHT + (i64)lane * L::INPUTS + first + 2 * pair + r : L::WEIGHT + (i64)(first + 2 * pair + r) * L::INPUTS + lane;
}
template <bool LOAD> INLINE void move(Thread& me, float* parameters, float* utilities) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    const int first = me.first<l>(), rows = me.rows<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        const int lane = B::FIRST + chunk * 4;
        float w[2][4], u[2][4];
        if (!LOAD) { tile.get_w(w); if (RULE == UTILITY) tile.get_u(u); }
        for (int r = 0; r < 2; ++r) {
          const bool row = 2 * pair + r < rows;
          const i64 i = place<B>(first, pair, r, lane);
          if constexpr (L::VECTORS) {
            if constexpr (LOAD) {
              for (int k = 0; k < 4; ++k) w[r][k] = u[r][k] = 0.f;
              if (row) { get4(parameters + i, w[r]); if (RULE == UTILITY) get4(utilities + i, u[r]); }
            } else {
              if (row) { put4(parameters + i, w[r]); if (RULE == UTILITY) put4(utilities + i, u[r]); }
            }
          } else {
            for (int k = 0; k < 4; ++k) {
              const bool real = row && lane + k < L::LANES;
              const i64 j = place<B>(first, pair, r, lane + k);
              if constexpr (LOAD) { w[r][k] = real ? parameters[j] : 0.f; u[r][k] = RULE == UTILITY && real ? utilities[j] : 0.f; }
              else { if (real) { parameters[j] = w[r][k]; if (RULE == UTILITY) utilities[j] = u[r][k]; } }
            }
          }
        }
        if (LOAD) { tile.put_w(w); if (RULE == UTILITY) tile.put_u(u); }
      });
    });
  });
  each_bias(me, [&](float& w, float& u, float, int index, int) {
    if (LOAD) { w = parameters[index]; u = RULE == UTILITY ? utilities[index] : 0.f; }
    else { parameters[index] = w; if (RULE == UTILITY) utilities[index] = u; }
  });
}

// ------------------------------------------------------------------------------------------------- the steps of a learner

INLINE void learn(Thread& me, const Arguments& args, const Segment& segment) {
  const Settings own = args.settings[segment.learner];
  const Rule rule = {own.lr_c, own.keep, own.p, own.q};
  const int t = threadIdx.x;
  const bool keeps_books = t == 0 && me.rank == 0;
  float* parameters = args.parameters + (i64)segment.learner * PARAMETERS;
  float* utilities = RULE == UTILITY ? args.utilities + (i64)segment.learner * PARAMETERS : nullptr;
  float scale = RULE == UTILITY ? args.scales[segment.learner] : 1.f;
  double loss = 0.; i64 correct = 0, diverged_at = -1;
  if (keeps_books) { loss = args.loss[segment.learner]; correct = args.correct[segment.learner]; }
  move<true>(me, parameters, utilities);

  Keys* keys = (Keys*)(memory + KEYS);
  Input in;
  const i64* targets = (const i64*)args.targets + (i64)own.row * args.length;
  const i64* index = args.index + (i64)own.row * args.length;
  i64 image = INDEXED ? index[segment.from] : 0;
  if constexpr (INDEXED) take_order(args, own.row, (int)args.task[segment.from], in);
  ask(args, own.row, segment.from, image, in);
  answer(args, in, me.x);
  int target = LOSS == CROSS_ENTROPY ? (int)targets[segment.from] : 0, next_target = target, next_task = 0;
  auto look_ahead = [&](int step) {  // what must be known before the inputs of a step can be asked for
    if (step < segment.to) {
      if constexpr (INDEXED) { image = index[step]; next_task = (int)args.task[step]; }
      if constexpr (LOSS == CROSS_ENTROPY) next_target = (int)targets[step];
    }
  };
  look_ahead(segment.from + 1);
  dots<0>(me);

#pragma unroll 1
  for (int step = segment.from; step < segment.to; ++step) {
    const i64 own_step = args.start + step + 1;
    const int target_after = next_target;
    if (step + 1 < segment.to) {
      if constexpr (INDEXED) if (next_task != in.task) take_order(args, own.row, next_task, in);
      ask(args, own.row, step + 1, image, in);
    }
    look_ahead(step + 2);
    float wanted = 0.f;
    if constexpr (LOSS == MSE) if (t < Layer<LAYERS - 1>::OUTPUTS) wanted = ((const float*)args.targets)[((i64)own.row * args.length + step) * Layer<LAYERS - 1>::OUTPUTS + t];
    __syncthreads();
    if constexpr (LOSS == MSE) if (t < Layer<LAYERS - 1>::OUTPUTS) memory[TARGETS_AT + t] = wanted;
    if constexpr (RULE == UTILITY && SCALING == GLOBAL) if (t < 2 * LAYERS) ((int*)(memory + MAXIMA))[t] = 0;
    if constexpr (NOISE != NONE) if (t / 32 == THREADS / 32 - 1) {  // one warp makes the keys; the other ones read them later
      keys[0] = keys_of(own.seed, own_step);
      if constexpr (NOISE == ANTICORRELATED) keys[1] = keys_of(own.seed, own_step - 1);
    }
    outputs_of_rows<0>(me);
    __syncthreads();
    forward<1>(me);
    const Verdict verdict = judge(me, target);
    __syncthreads();
    backward<LAYERS - 1>(me);
    loss += (double)verdict.loss; correct += verdict.correct;
    if (!finite(verdict.loss)) { diverged_at = args.start + step; break; }
    answer(args, in, me.x_next);

    float by = 0.f;
    if constexpr (RULE == UTILITY) {
      if ((own_step - 1) % RENEWED_EVERY == 0 && scale != 1.f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      scale *= own.beta;
      if (scale < 1e-12f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      const float factor = -own.rest / scale;
      if constexpr (SCALING == GLOBAL) by = 1.44269504f / fmaxf(largest_utility(me, factor), TINY);
      else { local_norms(me, factor); __syncthreads(); }
    }
    const Noise z = {keys[0], keys[1], own.noise, own_step > 1 ? own.noise : 0.f};
    if (RULE == UTILITY && own.p == 1.f && own.q == 1.f) descend<true>(me, rule, z, by); else descend<false>(me, rule, z, by);
    for (int b = 0; b < BLOCKS_0; ++b) for (int k = 0; k < 4; ++k) me.x[b][k] = me.x_next[b][k];
    target = target_after;
    if constexpr (EXCHANGES < 2) cluster_sync();  // else one exchange waits for what the other one read
  }
  __syncthreads();
  move<false>(me, parameters, utilities);
  if (keeps_books) {
    args.loss[segment.learner] = loss; args.correct[segment.learner] = correct;
    if (diverged_at >= 0) args.diverged_at[segment.learner] = diverged_at;
  }
  if (RULE == UTILITY && keeps_books) args.scales[segment.learner] = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) advance(const Arguments args) {
  Thread me;
  me.rank = cluster_rank(); me.phases = 0;
  const int cluster = blockIdx.x / CLUSTER, t = threadIdx.x;
  for (int i = t; i < VECTORS_END - VECTORS_AT; i += THREADS) memory[VECTORS_AT + i] = 0.f;
  __syncthreads();
  if (t == 0) {
    for (int i = 0; i < BARRIER_COUNT; ++i) barrier_init(barrier(i));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    each_layer([&](auto layer) {
      typedef decltype(layer) L;
      if constexpr (L::FORWARD >= 0) barrier_expect(barrier(L::FORWARD), CLUSTER * L::PADDED * 4);
      if constexpr (L::BACKWARD >= 0) barrier_expect(barrier(L::BACKWARD), CLUSTER * L::PADDED * 4);
      if constexpr (L::NORM >= 0) barrier_expect(barrier(L::NORM), CLUSTER * L::PADDED * 4);
    });
    if constexpr (GATHER >= 0) barrier_expect(barrier(GATHER), Layer<LAYERS - 1>::OUTPUTS * 4);
    if constexpr (SCALE >= 0) barrier_expect(barrier(SCALE), CLUSTER * (SCALING == GLOBAL ? 2 : 1) * LAYERS * 4);
  }
  cluster_sync();
#pragma unroll 1
  for (int s = args.begins[cluster]; s < args.begins[cluster + 1]; ++s) {
    const Segment segment = args.segments[s];
    if (segment.flags & WAITS) {
      if (t == 0) { int told; do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(told) : "l"(args.told + segment.learner) : "memory"); while (told != args.telling); }
      __syncthreads();
    }
    if (((volatile i64*)args.diverged_at)[segment.learner] < 0) learn(me, args, segment);
    __threadfence();
    cluster_sync();  // all of the learner is stored, and nobody reads what the next learner will send
    if (segment.flags & TELLS && t == 0 && me.rank == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(args.told + segment.learner), "r"(args.telling) : "memory");
  }
}
