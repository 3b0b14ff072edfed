// From deltas to utilities, their scale, and new weights (upgd.rules).

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
// The smallest norm is the root of the smallest float: the squares of smaller utilities vanish, but none is above its scale.
INLINE float inverse_norm(float squares, float smallest) { return 1.44269504f / fmaxf(sqrtf(squares), smallest); }
INLINE void local_norms(Thread& me, float factor, float smallest) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    if constexpr (L::TURNED) {
      trace<l>(me, factor, [](auto, int, int, const float (&)[2][4]) {});
      sums<l>(me, L::NORM, L::NORM_BUFFER, false, [&](auto, int, auto tile, float (&sum)[4]) {
        float u[2][4]; tile.get_u(u);
        for (int k = 0; k < 4; ++k) sum[k] = fmaf(u[1][k], u[1][k], fmaf(u[0][k], u[0][k], sum[k]));
      });
      for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) memory[L::NORMS + k] = inverse_norm(received<l>(L::NORM_BUFFER, k), smallest);
    } else {
      trace<l>(me, factor, [&](auto block, int pair, int chunk, const float (&u)[2][4]) {
        put_parts<decltype(block)>(dot4(u[0], u[0]), dot4(u[1], u[1]), pair, chunk);
      });
      __syncthreads();
      rows_done<l>(me, [&](int row, int j, float sum) { if (j == 0) memory[L::NORMS + row] = inverse_norm(sum, smallest); });
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
// The decay is added to the rest of the step: as a factor of w, 1 − lr·wd would be rounded to 1 if lr·wd is small.
// BOTH: p = q = 1, the common case, has a shorter formula.
template <bool BOTH> INLINE float updated(float w, float d, float v, float noise, float open, const Rule& rule) {
  if constexpr (RULE == PLAIN) return w - fmaf(d, v, fmaf(rule.decay, w, noise));
  else if constexpr (BOTH) return w - fmaf(open, fmaf(d, v, noise), rule.decay * w);
  else return w - fmaf(fmaf(rule.p, open, 1.f - rule.p), d * v, fmaf(fmaf(rule.q, open, 1.f - rule.q), noise, rule.decay * w));
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
template <bool BOTH> INLINE void descend(Thread& me, const Rule& rule, const Noise& z, float by, float smallest) {
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
    const float b = SCALING == LOCAL && RULE == UTILITY ? bias_inverse_norm(l, smallest) : by;
    w = updated<BOTH>(w, rule.lr_c, delta, single_noise(index, z), RULE == UTILITY ? 1.f / (1.f + ex2(u * b)) : 0.f, rule);
  });
}

