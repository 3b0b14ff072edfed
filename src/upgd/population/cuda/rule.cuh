// Shared parts of all rules: iteration over biases, and the noise of a tile.

// visit(layer, words, unit, index) for every bias that the CTA owns; each by one thread. Word n is words[n · BIASES], the unit's
// delta memory[D + unit].
template <class L, class Visit> INLINE void each_bias_of(Thread& me, Visit visit) {
  const int own = me.biases<L::NUMBER>(), from = me.first_bias<L::NUMBER>();
  for (int i = ((int)threadIdx.x + THREADS - L::BIAS_THREAD) % THREADS; i < own; i += THREADS)
    visit(L(), memory + L::BIAS_WORDS + i, L::TURNED ? from + i : i, L::BIAS + from + i);
}
template <class Visit> INLINE void each_bias(Thread& me, Visit visit) {
  each_layer([&](auto layer) { each_bias_of<decltype(layer)>(me, visit); });
}
// The normals of a step in a row of a tile, if they are neighbours there, that is, in an even layer.
template <class B> INLINE void row_normals(const Keys& keys, float size, int first, int pair, int chunk, int r, float (&n)[4]) {
  typedef Layer<B::LAYER> L;
  const u32 i = L::WEIGHT + (first + 2 * pair) * L::INPUTS + B::FIRST + chunk * 4;
  if constexpr (L::EVEN) for (int k = 0; k < 4; k += 2) set_pair((i >> 1) + (r * L::INPUTS + k) / 2, keys, size, n[k], n[k + 1]);
  else for (int k = 0; k < 4; ++k) n[k] = set_single(i + r * L::INPUTS + k, keys, size);
}
// The normals of a step in a tile.
template <class B> INLINE void tile_normals(const Keys& keys, float size, int first, int pair, int chunk, float (&n)[2][4]) {
  typedef Layer<B::LAYER> L;
  if constexpr (NOISE == NONE) { for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) n[r][k] = 0.f; }
  else if constexpr (L::TURNED) {
    const u32 i = L::WEIGHT + (B::FIRST + chunk * 4) * L::INPUTS + first + 2 * pair;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (L::EVEN) set_pair((i >> 1) + k * (L::INPUTS / 2), keys, size, n[0][k], n[1][k]);
      else for (int r = 0; r < 2; ++r) n[r][k] = set_single(i + k * L::INPUTS + r, keys, size);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_normals<B>(keys, size, first, pair, chunk, r, n[r]);
  }
}
// Where a tile's normals of the last step are, in global memory, if they are needed again.
template <class B> INLINE float* last_normals(const Thread& me, int pair, int r, int chunk) { return me.far + B::LAST + ((2 * pair + r) * B::CHUNKS + chunk) * 4; }
template <class B> INLINE void tile_noise(const Thread& me, const Noise& z, int first, int pair, int chunk, float (&n)[2][4]) {
  float last[2][4];
  if constexpr (NOISE == ANTICORRELATED) for (int r = 0; r < 2; ++r) get4(last_normals<B>(me, pair, r, chunk), last[r]);
  tile_normals<B>(z.now, z.size, first, pair, chunk, n);
  if constexpr (NOISE == ANTICORRELATED) for (int r = 0; r < 2; ++r) {
    put4(last_normals<B>(me, pair, r, chunk), n[r]);
    for (int k = 0; k < 4; ++k) n[r][k] -= last[r][k];
  }
}
// The initial data of tile_noise.
INLINE void remember_normals(Thread& me, const Keys& keys, float size) {
  each_layer([&](auto layer) {
    constexpr int l = decltype(layer)::NUMBER;
    const int first = me.first<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      each_tile<B>(me, [&](int pair, int chunk, auto) {
        float n[2][4]; tile_normals<B>(keys, size, first, pair, chunk, n);
        for (int r = 0; r < 2; ++r) put4(last_normals<B>(me, pair, r, chunk), n[r]);
      });
    });
  });
}
