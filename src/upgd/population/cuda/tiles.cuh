// Tiles of weights in registers and shared memory, and their products with vectors.

// ----------------------------------------------------------------------------------------------- what a block of threads has

INLINE int first_of(int units, int grain, int rank) { return min(units, grain * (((units + grain - 1) / grain) * rank / CLUSTER)); }

// A tile, 2 rows × 4 lanes, in registers or in shared memory: of every word (the weight, then the rule's own numbers).
struct HeldTile {
  float (&held)[WORDS][2][4];
  INLINE void get(int n, float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) v[r][k] = held[n][r][k]; }
  INLINE void put(int n, const float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) held[n][r][k] = v[r][k]; }
  INLINE void get_row(int n, int r, float (&v)[4]) const { for (int k = 0; k < 4; ++k) v[k] = held[n][r][k]; }
  INLINE void put_row(int n, int r, const float (&v)[4]) const { for (int k = 0; k < 4; ++k) held[n][r][k] = v[k]; }
};
// In shared memory; or, if there is no room, "far": in the CTA's own part of global memory, which stays in the L2 cache.
template <class B> struct Tile {
  float* at;
  INLINE float* row(int n, int r) const { return at + (2 * n + r) * B::CHUNKS * 4; }
  INLINE void get(int n, float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) get4(row(n, r), v[r]); }
  INLINE void put(int n, const float (&v)[2][4]) const { for (int r = 0; r < 2; ++r) put4(row(n, r), v[r]); }
  INLINE void get_row(int n, int r, float (&v)[4]) const { get4(row(n, r), v); }
  INLINE void put_row(int n, int r, const float (&v)[4]) const { put4(row(n, r), v); }
};

// The state of one thread.
struct Thread : Registers {
  int rank; u32 phases; float* far;
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

// The thread's index in a block of lanes; small blocks start at different warps, to balance the load.
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
    if (group + s * B::GROUPS < pairs) visit(group + s * B::GROUPS, chunk, HeldTile{held.words[s]});
  constexpr int PAIR = 8 * WORDS * B::CHUNKS, NEAR = B::HELD * B::GROUPS + B::FAR;  // the first pair in shared memory
  int pair = group + B::HELD * B::GROUPS;
  if constexpr (B::FAR > 0)
#pragma unroll 1
    for (; pair < min(pairs, NEAR); pair += B::GROUPS) visit(pair, chunk, Tile<B>{me.far + B::FAR_AT + (pair - NEAR + B::FAR) * PAIR + chunk * 4});
  float* at = memory + B::SHARED + (pair - NEAR) * PAIR + chunk * 4;
#pragma unroll 1
  for (; pair < pairs; pair += B::GROUPS, at += B::GROUPS * PAIR) visit(pair, chunk, Tile<B>{at});
}

template <int l, class Visit> INLINE void each_block(Visit visit) {
  visit(Block<l, 0>());
  if constexpr (Layer<l>::BLOCKS == 2) visit(Block<l, 1>());
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

// Sums of two rows over a team of threads; the parts of a row are contiguous.
template <class B, class Join = Sum> INLINE void put_parts(float a, float b, int pair, int chunk) {
  constexpr int TEAM = B::TEAM, PARTS = Layer<B::LAYER>::PARTS;
  float* part = memory + Layer<B::LAYER>::PARTS_AT + 2 * pair * PARTS + B::FIRST_PART + chunk / TEAM;
  if constexpr (TEAM == 1) { part[0] = a; part[PARTS] = b; }
  else {
    const u32 mask = B::CHUNKS % 32 == 0 ? ~0u : ((1u << TEAM) - 1) << (threadIdx.x & 31 & ~(TEAM - 1));
    const bool upper = chunk & (TEAM / 2);
    float v = upper ? b : a;
    v = Join::of(v, __shfl_xor_sync(mask, upper ? a : b, TEAM / 2));
#pragma unroll
    for (int o = TEAM / 4; o; o >>= 1) v = Join::of(v, __shfl_xor_sync(mask, v, o));
    const bool writes = (chunk & (TEAM / 2 - 1)) == 0;
    if constexpr (NOISE == ANTICORRELATED) { if (writes) part[upper ? PARTS : 0] = v; }  // here, a branch is faster (measured)
    else put_if(writes, part + (upper ? PARTS : 0), v);
  }
}
// done(row, j, sum) for every row, called by its eight threads j. The first layer's rows begin at the first warp, those of other layers
// at the second.
template <int l, class Join = Sum, class Done> INLINE void rows_done(const Thread& me, Done done) {
  constexpr int PARTS = Layer<l>::PARTS;
  const int rows = me.rows<l>(), j = threadIdx.x & 7, t = l == 0 ? threadIdx.x : (threadIdx.x + THREADS - 32) % THREADS;
#pragma unroll 1
  for (int base = 0; base < Layer<l>::ROWS; base += THREADS / 8) {
    const int row = base + t / 8;
    if (base + t / 32 * 4 >= rows) break;  // the warp has no rows
    float sum = Join::START;
    if (row < rows)
#pragma unroll
      for (int q = 0; q < PARTS; q += 8) if (q + j < PARTS) sum = Join::of(sum, memory[Layer<l>::PARTS_AT + row * PARTS + q + j]);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum = Join::of(sum, __shfl_xor_sync(~0u, sum, o));
    if (row < rows) done(row, j, sum);
  }
}
// SQUARED: of squared weights, for curvatures.
template <int l, bool SQUARED = false> INLINE void dots(Thread& me) {
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    float v[4];
    if constexpr (SQUARED) get4(memory + Layer<l>::C + B::FIRST + worker<B>() % B::CHUNKS * 4, v);
    else lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
    each_tile<B>(me, [&](int pair, int chunk, auto tile) {
      float w[2][4]; tile.get(0, w);
      if constexpr (SQUARED) for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) w[r][k] *= w[r][k];
      put_parts<B>(dot4(w[0], v), dot4(w[1], v), pair, chunk);
    });
  });
}
// Sums over the rows of all CTAs: value(block, pair, tile, sum) adds a tile's part. They are sent to every CTA's buffer.
template <int l, class Join = Sum, class Value> INLINE void send_sums(Thread& me, int which, int buffer, bool with_bias, Value value) {
  typedef Layer<l> L;
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    const int chunk = worker<B>() % B::CHUNKS, group = worker<B>() / B::CHUNKS;
    float sum[4] = {Join::START, Join::START, Join::START, Join::START};
    each_tile<B>(me, [&](int pair, int, auto tile) { value(block, pair, tile, sum); });
    if (group < B::USED_GROUPS) put4(memory + PART + group * L::PADDED + B::FIRST + chunk * 4, sum);
  });
  __syncthreads();
  const int own = me.biases<l>(), from = me.first_bias<l>();
#pragma unroll 1
  for (int i = threadIdx.x; i < CLUSTER * (L::PADDED / 4); i += THREADS) {
    const int to = i / (L::PADDED / 4), lane = i % (L::PADDED / 4) * 4;
    float sum[4] = {Join::START, Join::START, Join::START, Join::START};
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      if (lane >= B::FIRST && lane < B::FIRST + B::CHUNKS * 4)
#pragma unroll
        for (int g = 0; g < B::USED_GROUPS; ++g) { float v[4]; get4(memory + PART + g * L::PADDED + lane, v); for (int k = 0; k < 4; ++k) sum[k] = Join::of(sum[k], v[k]); }
    });
    if (with_bias)
      for (int k = 0; k < 4; ++k) if (u32(lane + k - from) < u32(own)) sum[k] += memory[L::BIAS_WORDS + lane + k - from];
    send4(memory + buffer + me.rank * L::PADDED + lane, barrier(which), to, sum);
  }
}
struct Nothing { INLINE void operator()() const {} };
template <int l, class Join = Sum, class Value, class Meanwhile = Nothing>
INLINE void sums(Thread& me, int which, int buffer, bool with_bias, Value value, Meanwhile meanwhile = {}) {
  send_sums<l, Join>(me, which, buffer, with_bias, value);
  meanwhile();
  me.receive(which, CLUSTER * Layer<l>::PADDED * 4);
}
template <int l, class Join = Sum> INLINE float received(int buffer, int lane) {
  float sum = Join::START;
#pragma unroll
  for (int c = 0; c < CLUSTER; ++c) sum = Join::of(sum, memory[buffer + c * Layer<l>::PADDED + lane]);
  return sum;
}
template <int l, bool SQUARED = false, class Meanwhile = Nothing>
INLINE void weighted_sums(Thread& me, int which, int buffer, bool with_bias, Meanwhile meanwhile = {}) {
  const float* vector = SQUARED ? memory + Layer<l>::C : row_vector<l>();
  sums<l>(me, which, buffer, with_bias, [&](auto, int pair, auto tile, float (&sum)[4]) {
    const float a = vector[2 * pair], b = vector[2 * pair + 1];
    float w[2][4]; tile.get(0, w);
    if constexpr (SQUARED) for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) w[r][k] *= w[r][k];
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] = fmaf(w[1][k], b, fmaf(w[0][k], a, sum[k]));
  }, meanwhile);
}
