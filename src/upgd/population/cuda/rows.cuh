// Generated rules, as in generated.cuh, for layers whose rows (units) each belong to one CTA.

// ---------------------------------------------------------------------------------------------------------------- entries

// Where weight k of a row is: a convolution has room between the channels.
template <class L> INLINE int place_in(int row, int k) { return row * L::STEP + (L::TAP_STEP == L::TAPS ? k : k / L::TAPS * L::TAP_STEP + k % L::TAPS); }
// Entries of a weight that a thread processes together: four neighbours in a row, two that share a pair of normals, or one.
template <class L> struct Quad {
  static constexpr int N = 4;
  int row, column;
  const float (&x)[N];
  INLINE int row_of(int) const { return row; }
  INLINE bool real(int) const { return true; }
  INLINE int place() const { return L::WORDS_AT + row * L::STEP + column; }
  INLINE void get(int n, float (&v)[N]) const { get4(memory + place() + n * L::SIZE, v); }
  INLINE void put(int n, const float (&v)[N]) const { put4(memory + place() + n * L::SIZE, v); }
  INLINE void gradient(float (&g)[N], float (&bend)[N]) const {
    const float d = memory[L::D + row];
    for (int k = 0; k < N; ++k) { g[k] = d * x[k]; if constexpr (CURVATURE) bend[k] = memory[L::C + row] * (x[k] * x[k]); }
  }
  INLINE void noise(const Noise& z, int first, float (&n)[N]) const {
    const u32 i = L::WEIGHT + (first + row) * L::INPUTS + column;
    pair_noise(i >> 1, z, n[0], n[1]); pair_noise((i >> 1) + 1, z, n[2], n[3]);
  }
};
template <class L, int COUNT> struct Few {
  static constexpr int N = COUNT;
  int from, size;  // counted through the rows of the CTA
  INLINE bool real(int k) const { return u32(from + k) < u32(size); }
  INLINE int row_of(int k) const { return (real(k) ? from + k : 0) / L::INPUTS; }  // one of the CTA's, in any case
  INLINE int place(int k) const { return L::WORDS_AT + place_in<L>((from + k) / L::INPUTS, (from + k) % L::INPUTS); }
  INLINE void get(int n, float (&v)[N]) const { for (int k = 0; k < N; ++k) v[k] = real(k) ? memory[place(k) + n * L::SIZE] : 0.f; }
  INLINE void put(int n, const float (&v)[N]) const { for (int k = 0; k < N; ++k) if (real(k)) memory[place(k) + n * L::SIZE] = v[k]; }
  INLINE void gradient(float (&g)[N], float (&bend)[N]) const {
    for (int k = 0; k < N; ++k) {
      const int i = real(k) ? from + k : 0;
      if constexpr (L::CONVOLUTION) {
        g[k] = memory[L::WEIGHT_GRADIENT + i];
        if constexpr (CURVATURE) bend[k] = memory[L::WEIGHT_CURVATURE + i];
      } else {
        const float x = memory[L::IN + i % L::INPUTS];
        g[k] = memory[L::D + i / L::INPUTS] * x;
        if constexpr (CURVATURE) bend[k] = memory[L::C + i / L::INPUTS] * (x * x);
      }
    }
  }
  INLINE void noise(const Noise& z, int first, float (&n)[N]) const { pair_noise((L::WEIGHT + first * L::INPUTS + from) >> 1, z, n[0], n[1]); }
};
// visit(entries) for all of the CTA's weights in a layer. Layers start at different threads.
template <class L, class Visit> INLINE void each_weight(const Thread& me, Visit visit) {
  const int rows = me.rows<L::NUMBER>(), t = ((int)threadIdx.x + THREADS - L::FIRST_THREAD) % THREADS;
  if constexpr (L::QUADS) {  // a thread stays at its columns, as long as there are not too many
    constexpr int IN_ROW = L::INPUTS / 4, GROUPS = THREADS / IN_ROW > 0 ? THREADS / IN_ROW : 1;
    if (t / IN_ROW >= GROUPS) return;
    for (int k = t % IN_ROW * 4; k < L::INPUTS; k += THREADS * 4) {
      float x[4]; get4(memory + L::IN + k, x);
#pragma unroll 1
      for (int row = t / IN_ROW; row < rows; row += GROUPS) visit(Quad<L>{row, k, x});
    }
  } else {
    const int odd = (L::WEIGHT + me.first<L::NUMBER>() * L::INPUTS) & 1, size = rows * L::INPUTS;  // pairs have even indices
#pragma unroll 1
    for (int i = 2 * t - odd; i < size; i += 2 * THREADS) visit(Few<L, 2>{i, size});
  }
}
// value(entries) joined over each row by a warp; done(row, joined).
template <class L, class Join, class Value, class Done> INLINE void each_row(const Thread& me, Value value, Done done) {
  const int rows = me.rows<L::NUMBER>();
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32) {
    float joined = Join::START;
    if constexpr (L::QUADS) for (int k = 4 * (threadIdx.x & 31); k < L::INPUTS; k += 128) {
      float x[4]; get4(memory + L::IN + k, x);
      joined = Join::of(joined, value(Quad<L>{row, k, x}));
    }
    else for (int k = threadIdx.x & 31; k < L::INPUTS; k += 32) joined = Join::of(joined, value(Few<L, 1>{row * L::INPUTS + k, rows * L::INPUTS}));
    joined = of_warp<Join>(joined);
    if ((threadIdx.x & 31) == 0) done(row, joined);
  }
}
// visit(words, row) for every bias that the CTA owns. Word n is words[n · ROWS].
template <class L, class Visit> INLINE void each_bias(const Thread& me, Visit visit) {
  if constexpr (L::BIAS >= 0)
    for (int i = ((int)threadIdx.x + THREADS - L::BIAS_THREAD) % THREADS; i < me.rows<L::NUMBER>(); i += THREADS) visit(memory + L::BIAS_WORDS + i, i);
}
template <class L> INLINE Entry bias_entry(const float* words, int row) {
  Entry e;
  e.w = words[0]; e.g = memory[(L::CONVOLUTION ? L::BIAS_GRADIENT : L::D) + row]; e.bound = L::BOUND;
  if constexpr (CURVATURE) e.curvature = memory[(L::CONVOLUTION ? L::BIAS_CURVATURE : L::C) + row];
  for (int n = 1; n < WORDS; ++n) e.s[n - 1] = words[n * L::ROWS];
  return e;
}
template <class L, int N> INLINE Entry entry_of(const float (&words)[WORDS][N], const float (&g)[N], const float (&bend)[N], int k) {
  Entry e;
  e.w = words[0][k]; e.g = g[k]; e.bound = L::BOUND;
  if constexpr (CURVATURE) e.curvature = bend[k];
  for (int n = 1; n < WORDS; ++n) e.s[n - 1] = words[n][k];
  return e;
}
template <bool OBSERVED, int n = 1, class Entries, class Words> INLINE void put_changed(const Entries& entries, const Words& words) {
  if constexpr (n < WORDS) {
    if constexpr (OBSERVED ? OBSERVES(n - 1) : CHANGES(n - 1)) entries.put(n, words[n]);
    put_changed<OBSERVED, n + 1>(entries, words);
  }
}

// ------------------------------------------------------------------------------------------------------------- reductions

template <int n> INLINE void reduce(Thread& me, const float* numbers) {
  typedef Reduction<n> R; typedef typename R::Join Join;
  constexpr int WARPS = THREADS / 32;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    float of_weights = Join::START, of_biases = Join::START;
    if constexpr (L::GATED) {
      auto value = [&](auto entries) {
        constexpr int N = decltype(entries)::N;
        float words[WORDS][N], g[N], bend[N], joined = Join::START;
        for (int i = 0; i < WORDS; ++i) entries.get(i, words[i]);
        if constexpr (n == 0) entries.gradient(g, bend);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          Entry e = entry_of<L, N>(words, g, bend, k);
          if constexpr (n == 0) observe(e, numbers);
          for (int i = 1; i < WORDS; ++i) words[i][k] = e.s[i - 1];
          const float seen = measured<R>(observed<n>(e, numbers));
          if (entries.real(k)) joined = Join::of(joined, seen);
        }
        if constexpr (n == 0) put_changed<true>(entries, words);
        return joined;
      };
      if constexpr (R::OVER == UNIT) each_row<L, Join>(me, value, [&](int row, float joined) { memory[Reduced<L::NUMBER, n>::VALUES + row] = finished<R>(joined, L::INPUTS); });
      else each_weight<L>(me, [&](auto entries) { of_weights = Join::of(of_weights, value(entries)); });
      each_bias<L>(me, [&](float* words, int row) {
        Entry e = bias_entry<L>(words, row);
        if constexpr (n == 0) observe(e, numbers);
        for (int i = 1; i < WORDS; ++i) words[i * L::ROWS] = e.s[i - 1];
        of_biases = Join::of(of_biases, measured<R>(observed<n>(e, numbers)));
      });
    }
    of_weights = of_warp<Join>(of_weights); of_biases = of_warp<Join>(of_biases);
    if (threadIdx.x % 32 == 0) {
      memory[OF_WARPS + L::NUMBER * WARPS + threadIdx.x / 32] = of_weights;
      memory[OF_WARPS + (LAYERS + L::NUMBER) * WARPS + threadIdx.x / 32] = of_biases;
    }
  });
  join_tensors<R>(me);
}
template <int n = 0> INLINE void reduce_all(Thread& me, const float* numbers) {
  if constexpr (n < REDUCTIONS) { reduce<n>(me, numbers); reduce_all<n + 1>(me, numbers); }
}
// Values shared by a layer, and by a row.
template <class L, int n = 0> INLINE void see_reduced(Entry& e) {
  if constexpr (n < REDUCTIONS && L::GATED) {
    if constexpr (Reduction<n>::OVER != UNIT) e.r[n] = memory[Reduction<n>::VALUES + L::NUMBER];
    see_reduced<L, n + 1>(e);
  }
}
template <class L, int n = 0> INLINE constexpr bool reduces_rows() {
  if constexpr (n < REDUCTIONS && L::GATED) return Reduction<n>::OVER == UNIT || reduces_rows<L, n + 1>(); else return false;
}
template <class L, int n = 0> INLINE void see_reduced_of_row(Entry& e, int row) {
  if constexpr (n < REDUCTIONS && L::GATED) {
    if constexpr (Reduction<n>::OVER == UNIT) e.r[n] = memory[Reduced<L::NUMBER, n>::VALUES + row];
    see_reduced_of_row<L, n + 1>(e, row);
  }
}
template <class L, int n = 0> INLINE void see_reduced_of_bias(Entry& e) {
  if constexpr (n < REDUCTIONS && L::GATED) { e.r[n] = memory[Reduction<n>::VALUES + LAYERS + L::NUMBER]; see_reduced_of_bias<L, n + 1>(e); }
}

// ------------------------------------------------------------------------------------------------------------------ units

template <int n> INLINE void reduce_units(Thread& me) {
  typedef UnitReduction<n> R; typedef typename R::Join Join;
  constexpr int WARPS = THREADS / 32;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    float joined = Join::START;
    const int units = L::NUMBER + 1 < LAYERS ? me.rows<L::NUMBER>() : 0;
    for (int i = threadIdx.x; i < units; i += THREADS) joined = Join::of(joined, measured<R>(memory[L::UNIT_OBSERVED + n * L::ROWS + i]));
    joined = of_warp<Join>(joined);
    if (threadIdx.x % 32 == 0) { memory[OF_WARPS + L::NUMBER * WARPS + threadIdx.x / 32] = joined; memory[OF_WARPS + (LAYERS + L::NUMBER) * WARPS + threadIdx.x / 32] = Join::START; }
  });
  join_tensors<R>(me);
}
template <int n = 0> INLINE void reduce_all_units(Thread& me) {
  if constexpr (n < UNIT_REDUCTIONS) { reduce_units<n>(me); reduce_all_units<n + 1>(me); }
}
INLINE void look_at_units(Thread& me, const float* numbers) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    const int units = L::NUMBER + 1 < LAYERS ? me.rows<L::NUMBER>() : 0;
    for (int i = threadIdx.x; i < units; i += THREADS) {
      Unit u;
      u.gate_gradient = memory[L::GATE_GRADIENT + i];
      if constexpr (CURVATURE) u.gate_curvature = memory[L::GATE_CURVATURE + i];
      for (int n = 0; n < UNIT_STATES; ++n) u.s[n] = memory[L::UNIT_STATE + n * L::ROWS + i];
      observe_unit(u, numbers);
      for (int n = 0; n < UNIT_STATES; ++n) memory[L::UNIT_STATE + n * L::ROWS + i] = u.s[n];
      for (int n = 0; n < UNIT_REDUCTIONS; ++n) memory[L::UNIT_OBSERVED + n * L::ROWS + i] = u.o[n];
    }
  });
  __syncthreads();
  reduce_all_units(me);
}
template <class L, int n = 0> INLINE void see_unit(Entry& e, int row) {
  if constexpr (n < UNIT_REDUCTIONS) {
    e.unit_o[n] = memory[L::UNIT_OBSERVED + n * L::ROWS + row];
    e.unit_r[n] = memory[UnitReduction<n>::VALUES + L::NUMBER];
    see_unit<L, n + 1>(e, row);
  } else for (int m = 0; m < UNIT_STATES; ++m) e.unit_s[m] = memory[L::UNIT_STATE + m * L::ROWS + row];
}

// ------------------------------------------------------------------------------------------------------------- the update

INLINE void update_all(Thread& me, const float* numbers, const Noise& z) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr bool HAS_UNIT = FEATURES && L::NUMBER + 1 < LAYERS;
    const int first = me.first<L::NUMBER>();
    constexpr bool BY_ROW = HAS_UNIT || reduces_rows<L>();
    Entry of_row;
    OfRow prepared;
    see_reduced<L>(of_row);
    if constexpr (!BY_ROW) prepare<L::GATED, HAS_UNIT>(of_row, numbers, prepared);
    each_weight<L>(me, [&](auto entries) {
      constexpr int N = decltype(entries)::N;
      float words[WORDS][N], g[N], bend[N], noise[N];
      for (int i = 0; i < WORDS; ++i) entries.get(i, words[i]);
      entries.gradient(g, bend);
      if constexpr (NOISE == NONE) for (int k = 0; k < N; ++k) noise[k] = 0.f; else entries.noise(z, first, noise);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if constexpr (BY_ROW) if (k == 0 || N == 2) {
          see_reduced_of_row<L>(of_row, entries.row_of(k));
          if constexpr (HAS_UNIT) see_unit<L>(of_row, entries.row_of(k));
          prepare<L::GATED, HAS_UNIT>(of_row, numbers, prepared);
        }
        Entry e = entry_of<L, N>(words, g, bend, k);
        e.see(of_row);
        e.noise = noise[k];
        update<L::GATED, HAS_UNIT>(e, numbers, prepared);
        words[0][k] = e.w;
        for (int i = 1; i < WORDS; ++i) words[i][k] = e.s[i - 1];
      }
      entries.put(0, words[0]);
      put_changed<false>(entries, words);
    });
    each_bias<L>(me, [&](float* words, int row) {
      Entry e = bias_entry<L>(words, row);
      see_reduced_of_bias<L>(e);
      if constexpr (HAS_UNIT) see_unit<L>(e, row);
      e.noise = single_noise(L::BIAS + first + row, z);
      update<L::GATED, HAS_UNIT>(e, numbers);
      words[0] = e.w;
      for (int i = 1; i < WORDS; ++i) words[i * L::ROWS] = e.s[i - 1];
    });
  });
}
