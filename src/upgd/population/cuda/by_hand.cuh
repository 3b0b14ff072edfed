// Hand-written rules for the methods of the paper: plain descent, and descent gated by utility. They compute the rules of
// upgd.methods in a faster order: utilities decay lazily, and inactive units are not written.

INLINE void scale_utilities(Thread& me, float by) {
  each_layer([&](auto layer) {
    each_block<decltype(layer)::NUMBER>([&](auto block) {
      each_tile<decltype(block)>(me, [&](int, int, auto tile) {
        float u[2][4]; tile.get(1, u);
        for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) u[r][k] *= by;
        tile.put(1, u);
      });
    });
  });
  each_bias(me, [&](auto layer, float* words, int, int) { words[decltype(layer)::BIASES] *= by; });
}
// u ← u + factor·g·w, where factor = −(1 − β)/scale; in a tile whose lanes have the vector v.
template <class B, class Tile> INLINE void trace_tile(const Tile& tile, int pair, const float (&v)[4], float factor, float (&u)[2][4]) {
  float w[2][4] = {}, g[2];
  for (int r = 0; r < 2; ++r) g[r] = factor * row_vector<B::LAYER>()[2 * pair + r];
  tile.get(1, u);
  for (int r = 0; r < 2; ++r) if (g[r] != 0.f) tile.get_row(0, r, w[r]);  // an inactive unit is neither read nor written
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int k = 0; k < 4; ++k) u[r][k] = fmaf(g[r] * v[k], w[r][k], u[r][k]);
    if (g[r] != 0.f) tile.put_row(1, r, u[r]);
  }
}
// The same in all tiles of a layer, followed by look(block, pair, chunk, u) for each.
template <int l, class Look> INLINE void trace(Thread& me, float factor, Look look) {
  each_block<l>([&](auto block) {
    typedef decltype(block) B;
    float v[4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
    each_tile<B>(me, [&](int pair, int chunk, auto tile) {
      float u[2][4]; trace_tile<B>(tile, pair, v, factor, u);
      look(block, pair, chunk, u);
    });
  });
}
// Global scaling: the largest utility of the learner; a tensor with an infinite maximum is excluded.
INLINE float largest_utility(Thread& me, float factor) {
  int* maxima = (int*)(memory + MAXIMA);
  each_layer([&](auto layer) {
    constexpr int l = decltype(layer)::NUMBER;
    if constexpr (!Layer<l>::GATED) return;
    float largest = 0.f;  // η is at least the smallest normal float anyway
    trace<l>(me, factor, [&](auto, int, int, const float (&u)[2][4]) {
      for (int k = 0; k < 4; ++k) largest = fmaxf(largest, fmaxf(u[0][k], u[1][k]));
    });
    const int of_warp = __reduce_max_sync(~0u, ordered(largest));
    if ((threadIdx.x & 31) == 0) atomicMax(maxima + l, of_warp);
  });
  each_bias(me, [&](auto layer, float* words, int unit, int) {
    typedef decltype(layer) L;
    if constexpr (!L::GATED) return;
    float& u = words[L::BIASES];
    u = fmaf(factor * memory[L::D + unit], words[0], u);
    atomicMax(maxima + LAYERS + L::NUMBER, ordered(u));
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
// The norm is clamped at √tiny: squares of smaller utilities underflow, and no utility may exceed its scale.
INLINE float inverse_norm(float squares, float smallest) { return 1.44269504f / fmaxf(sqrtf(squares), smallest); }
// Values to exchange are computed first and arrive while the other layers are computed. The norms of biases are sent last, by
// CTAs that have read the norms of lanes: their receiver may reuse that buffer.
INLINE void local_norms(Thread& me, float factor, float smallest) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (L::GATED && L::TURNED) {
      send_sums<L::NUMBER>(me, L::NORM, L::NORM_BUFFER, false, [&](auto block, int pair, auto tile, float (&sum)[4]) {
        typedef decltype(block) B;
        float v[4], u[2][4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
        trace_tile<B>(tile, pair, v, factor, u);
        for (int k = 0; k < 4; ++k) sum[k] = fmaf(u[1][k], u[1][k], fmaf(u[0][k], u[0][k], sum[k]));
      });
      __syncthreads();
    }
  });
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (L::GATED && !L::TURNED) trace<L::NUMBER>(me, factor, [&](auto block, int pair, int chunk, const float (&u)[2][4]) {
      put_parts<decltype(block)>(dot4(u[0], u[0]), dot4(u[1], u[1]), pair, chunk);
    });
  });
  each_bias(me, [&](auto layer, float* words, int unit, int) {
    typedef decltype(layer) L;
    if constexpr (L::GATED) words[L::BIASES] = fmaf(factor * memory[L::D + unit], words[0], words[L::BIASES]);
  });
  __syncthreads();
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (L::GATED && !L::TURNED) {
      rows_done<L::NUMBER>(me, [&](int row, int j, float sum) { if (j == 0) memory[L::NORMS + row] = inverse_norm(sum, smallest); });
      for (int row = me.rows<L::NUMBER>() + threadIdx.x; row < L::ROWS; row += THREADS) memory[L::NORMS + row] = 0.f;  // it fills a tile
    }
    if constexpr (L::GATED && L::TURNED) {
      me.receive(L::NORM, CLUSTER * L::PADDED * 4);
      for (int k = THREADS - 1 - threadIdx.x; k < L::OUTPUTS; k += THREADS) memory[L::NORMS + k] = inverse_norm(received<L::NUMBER>(L::NORM_BUFFER, k), smallest);
    }
  });
  __syncthreads();
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if (threadIdx.x / 32 != L::NUMBER % (THREADS / 32)) return;
    float squares = 0.f;
    for (int i = threadIdx.x & 31; i < me.biases<L::NUMBER>(); i += 32) {
      const float u = memory[L::BIAS_WORDS + L::BIASES + i];
      squares = fmaf(u, u, squares);
    }
    squares = warp_sum(squares);
    for (int to = threadIdx.x & 31; to < CLUSTER; to += 32) send1(memory + SCALE_BUFFER + me.rank * LAYERS + L::NUMBER, barrier(SCALE), to, __float_as_int(squares));
  });
}
INLINE float bias_inverse_norm(int l, float smallest) {
  float squares = 0.f;
  for (int c = 0; c < CLUSTER; ++c) squares += memory[SCALE_BUFFER + c * LAYERS + l];
  return inverse_norm(squares, smallest);
}

// 1 − ū = 1 / (1 + e^(û/scale)) for four utilities with one reciprocal. û/scale ≤ 1, so the product stays small.
INLINE void four_gates(const float (&u)[4], const float (&by)[4], float (&open)[4]) {
  float a[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) a[k] = 1.f + ex2(u[k] * by[k]);
  const float left = a[0] * a[1], right = a[2] * a[3], all = reciprocal(left * right), l = all * right, r = all * left;
  open[0] = l * a[1]; open[1] = l * a[0]; open[2] = r * a[3]; open[3] = r * a[2];
}
struct Rule { float lr_c, decay, p, q; };
// The decay is part of the step: as a factor of w, 1 − lr·wd would round to 1 if lr·wd is small.
// BOTH: p = q = 1, the common case, has a shorter formula.
template <bool BOTH> INLINE float updated(float w, float d, float v, float noise, float open, const Rule& rule) {
  if constexpr (RULE == PLAIN) return w - fmaf(d, v, fmaf(rule.decay, w, noise));
  else if constexpr (BOTH) return w - fmaf(open, fmaf(d, v, noise), rule.decay * w);
  else return w - fmaf(fmaf(rule.p, open, 1.f - rule.p), d * v, fmaf(fmaf(rule.q, open, 1.f - rule.q), noise, rule.decay * w));
}
// The update of all parameters; products of the first layer with the next input are computed at the same time.
template <bool BOTH> INLINE void descend(Thread& me, const Rule& rule, const Noise& z, float by, float smallest) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    const int first = me.first<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      float v[4], lane_by[4]; lane_vector<B>(me, worker<B>() % B::CHUNKS, v);
      constexpr bool GATES = RULE == UTILITY && L::GATED;
      constexpr bool BY_ROW = NOISE == WHITE && !L::TURNED;  // normals of one row at a time take fewer registers
      if constexpr (GATES && SCALING == LOCAL && L::TURNED) get4(memory + L::NORMS + B::FIRST + worker<B>() % B::CHUNKS * 4, lane_by);
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        float w[2][4], u[2][4], n[2][4];
        tile.get(0, w);
        if constexpr (GATES) tile.get(1, u);
        if constexpr (!BY_ROW) tile_noise<B>(me, z, first, pair, chunk, n);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (BY_ROW) row_normals<B>(z.now, z.size, first, pair, chunk, r, n[r]);
          const float d = rule.lr_c * row_vector<l>()[2 * pair + r];
          float open[4], b[4];
          if constexpr (GATES) {
            for (int k = 0; k < 4; ++k) b[k] = SCALING == GLOBAL ? by : L::TURNED ? lane_by[k] : memory[L::NORMS + 2 * pair + r];
            four_gates(u[r], b, open);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) w[r][k] = updated<BOTH>(w[r][k], d, v[k], n[r][k], GATES ? open[k] : 1.f, rule);
        }
        tile.put(0, w);
        if constexpr (l == 0) put_parts<B>(dot4(w[0], me.x_next[B::NUMBER]), dot4(w[1], me.x_next[B::NUMBER]), pair, chunk);
      });
    });
  });
  if constexpr (RULE == UTILITY && SCALING == LOCAL) me.receive(SCALE, CLUSTER * LAYERS * 4);
  each_bias(me, [&](auto layer, float* words, int unit, int index) {
    typedef decltype(layer) L;
    float open = 1.f;
    if constexpr (RULE == UTILITY && L::GATED)
      open = 1.f / (1.f + ex2(words[L::BIASES] * (SCALING == LOCAL ? bias_inverse_norm(L::NUMBER, smallest) : by)));
    words[0] = updated<BOTH>(words[0], rule.lr_c, memory[L::D + unit], single_noise(index, z), open, rule);
  });
}

// A step of a learner's rule. Generated kernels have the same interface (generated.cuh).
struct Method {
  const Settings own; const Rule rule; float* const kept; float scale;

  INLINE Method(const Arguments& args, int learner)
      : own(args.settings[learner]), rule{own.lr_c, own.decay, own.p, own.q}, kept(args.scales + learner), scale(RULE == UTILITY ? *kept : 1.f) {}
  INLINE void ask(int) {}
  INLINE void answer() {
    if constexpr (RULE == UTILITY && SCALING == GLOBAL) if (threadIdx.x < 2 * LAYERS) ((int*)(memory + MAXIMA))[threadIdx.x] = 0;
  }
  INLINE void learn(Thread& me, i64 step) {
    float by = 0.f, smallest = 0.f;
    if constexpr (RULE == UTILITY) {
      if ((step - 1) % RENEWED_EVERY == 0 && scale != 1.f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      scale *= own.beta;
      if (scale < 1e-12f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      const float factor = -own.rest / scale;
      if constexpr (SCALING == GLOBAL) by = 1.44269504f / fmaxf(largest_utility(me, factor), TINY);
      else { smallest = TINY_NORM / scale; local_norms(me, factor, smallest); }
    }
    const Noise z = noise_of(step, noise_size());
    if (RULE == UTILITY && own.p == 1.f && own.q == 1.f) descend<true>(me, rule, z, by, smallest); else descend<false>(me, rule, z, by, smallest);
  }
  INLINE float noise_size() const { return own.noise; }
  INLINE void end() { if (RULE == UTILITY) *kept = scale; }  // by one thread of the cluster
};
