// What all rules share: a way through the biases, and the noise of a tile.

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
