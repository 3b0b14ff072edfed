// Generated rules (upgd.methods.tracing). The preceding source, written by generated.py, defines: Entry, an entry of a parameter;
// observe(entry, k), which may change s before the reductions; observed<n>(entry, k), the value that reduction n reduces;
// update<GATED, HAS_UNIT>(entry, k), which changes w and s, and the same in two parts, prepare and update, for entries that share
// values; and, for methods that use hidden units, the same for a Unit. k are the per-learner and per-step scalars.

// ------------------------------------------------------------------------------------------------------- entries of a tile

// Whether an entry of a tile belongs to the network, rather than to the padding.
template <class B> INLINE bool real(int rows, int pair, int r, int chunk, int k) {
  typedef Layer<B::LAYER> L;
  return (r == 0 || 2 * pair + 1 < rows) && (L::LANES % 4 == 0 || B::FIRST + chunk * 4 + k < L::LANES);
}
// The factors of gradients and curvatures: one number per row, four per thread.
template <class B> struct Lanes {
  float v[4], bend[4];
  INLINE Lanes(const Thread& me) {
    typedef Layer<B::LAYER> L;
    const int chunk = worker<B>() % B::CHUNKS;
    lane_vector<B>(me, chunk, v);
    if constexpr (CURVATURE) {
      if constexpr (L::TURNED) get4(memory + L::C + B::FIRST + chunk * 4, bend);
      else for (int k = 0; k < 4; ++k) bend[k] = v[k] * v[k];
    }
  }
};
template <int l> INLINE float row_bend(int row) {
  if constexpr (!CURVATURE) return 0.f;
  else if constexpr (Layer<l>::TURNED) { const float h = row_vector<l>()[row]; return h * h; }
  else return memory[Layer<l>::C + row];
}
template <class B> INLINE Entry entry_of(const float (&words)[WORDS][2][4], const Lanes<B>& lanes, float d, float bend, int r, int k) {
  Entry e;
  e.w = words[0][r][k]; e.g = d * lanes.v[k]; e.bound = Layer<B::LAYER>::BOUND;
  if constexpr (CURVATURE) e.curvature = bend * lanes.bend[k];
  for (int n = 1; n < WORDS; ++n) e.s[n - 1] = words[n][r][k];
  return e;
}
template <class L> INLINE Entry bias_entry(const float* words, int unit) {
  Entry e;
  e.w = words[0]; e.g = memory[L::D + unit]; e.bound = L::BOUND;
  if constexpr (CURVATURE) e.curvature = memory[L::C + unit];
  for (int n = 1; n < WORDS; ++n) e.s[n - 1] = words[n * L::BIASES];
  return e;
}

// -------------------------------------------------------------------------------------------------------------- reductions

template <int n> INLINE void reduce(Thread& me, const float* numbers) {
  typedef Reduction<n> R; typedef typename R::Join Join;
  constexpr int WARPS = THREADS / 32;
  const int warp = threadIdx.x / 32;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    typedef Reduced<l, n> Place;
    const int rows = me.rows<l>();
    float joined = Join::START;
    // A tile's values, and START where there is no entry.
    auto values = [&](auto block, int pair, int chunk, auto tile, const auto& lanes, float (&v)[2][4]) {
      typedef decltype(block) B;
      float words[WORDS][2][4];
      for (int i = 0; i < WORDS; ++i) tile.get(i, words[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float d = row_vector<l>()[2 * pair + r], bend = row_bend<l>(2 * pair + r);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Entry e = entry_of<B>(words, lanes, d, bend, r, k);
          if constexpr (n == 0) observe(e, numbers);
          for (int i = 1; i < WORDS; ++i) words[i][r][k] = e.s[i - 1];
          v[r][k] = measured<R>(observed<n>(e, numbers));
          if (!real<B>(rows, pair, r, chunk, k)) v[r][k] = Join::START;
        }
      }
      for (int i = 1; i < WORDS; ++i) if (n == 0 && OBSERVES(i - 1)) tile.put(i, words[i]);
    };
    if constexpr (L::GATED && R::OVER == UNIT && L::TURNED) {
      sums<l, Join>(me, Place::BARRIER, Place::BUFFER, false, [&](auto block, int pair, auto tile, float (&sum)[4]) {
        typedef decltype(block) B;
        const Lanes<B> lanes(me);
        float v[2][4]; values(block, pair, worker<B>() % B::CHUNKS, tile, lanes, v);
        for (int k = 0; k < 4; ++k) sum[k] = Join::of(Join::of(sum[k], v[0][k]), v[1][k]);
      });
      for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) memory[Place::VALUES + k] = finished<R>(received<l, Join>(Place::BUFFER, k), L::INPUTS);
      __syncthreads();
    } else if constexpr (L::GATED) {
      each_block<l>([&](auto block) {
        typedef decltype(block) B;
        const Lanes<B> lanes(me);
        each_tile<B>(me, [&](int pair, int chunk, auto tile) {
          float v[2][4]; values(block, pair, chunk, tile, lanes, v);
          float two[2];
          for (int r = 0; r < 2; ++r) two[r] = Join::of(Join::of(v[r][0], v[r][1]), Join::of(v[r][2], v[r][3]));
          if constexpr (R::OVER == UNIT) put_parts<B, Join>(two[0], two[1], pair, chunk); else joined = Join::of(joined, Join::of(two[0], two[1]));
        });
      });
      if constexpr (R::OVER == UNIT) {
        __syncthreads();
        rows_done<l, Join>(me, [&](int row, int j, float sum) { if (j == 0) memory[Place::VALUES + row] = finished<R>(sum, L::INPUTS); });
        __syncthreads();
      }
    }
    float of_biases = Join::START;
    if constexpr (L::GATED) each_bias_of<L>(me, [&](auto, float* words, int unit, int) {
      Entry e = bias_entry<L>(words, unit);
      if constexpr (n == 0) observe(e, numbers);
      for (int i = 1; i < WORDS; ++i) words[i * L::BIASES] = e.s[i - 1];
      of_biases = Join::of(of_biases, measured<R>(observed<n>(e, numbers)));
    });
    joined = of_warp<Join>(joined);
    of_biases = of_warp<Join>(of_biases);
    if (threadIdx.x % 32 == 0) { memory[OF_WARPS + l * WARPS + warp] = joined; memory[OF_WARPS + (LAYERS + l) * WARPS + warp] = of_biases; }
  });
  join_tensors<R>(me);
}
template <int n = 0> INLINE void reduce_all(Thread& me, const float* numbers) {
  if constexpr (n < REDUCTIONS) { reduce<n>(me, numbers); reduce_all<n + 1>(me, numbers); }
}

// ------------------------------------------------------------------------------------------------------------------ units

// Hidden units: in an even layer those of the CTA, in an odd layer all units, in every CTA.
template <class L, class Visit> INLINE void each_unit(const Thread& me, Visit visit) {
  const int count = L::TURNED ? L::OUTPUTS : me.rows<L::NUMBER>();
  for (int i = threadIdx.x; i < count; i += THREADS) {
    Unit u;
    u.gate_gradient = memory[L::GATE_GRADIENT + i];
    if constexpr (CURVATURE) u.gate_curvature = memory[L::GATE_CURVATURE + i];
    for (int n = 0; n < UNIT_STATES; ++n) u.s[n] = memory[L::UNIT_STATE + n * L::UNITS_KEPT + i];
    visit(i, u);
  }
}
template <int n> INLINE void reduce_units(Thread& me) {
  typedef UnitReduction<n> R; typedef typename R::Join Join;
  constexpr int WARPS = THREADS / 32;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    float joined = Join::START;
    if constexpr (L::NUMBER + 1 < LAYERS) {
      const int count = L::TURNED ? L::OUTPUTS : me.rows<L::NUMBER>();
      // Units that all CTAs have are counted in one of them.
      for (int i = threadIdx.x; i < count && (!L::TURNED || me.rank == 0); i += THREADS)
        joined = Join::of(joined, measured<R>(memory[L::UNIT_OBSERVED + n * L::UNITS_KEPT + i]));
    }
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
    if constexpr (L::NUMBER + 1 < LAYERS) each_unit<L>(me, [&](int i, Unit& u) {
      observe_unit(u, numbers);
      for (int n = 0; n < UNIT_STATES; ++n) memory[L::UNIT_STATE + n * L::UNITS_KEPT + i] = u.s[n];
      for (int n = 0; n < UNIT_REDUCTIONS; ++n) memory[L::UNIT_OBSERVED + n * L::UNITS_KEPT + i] = u.o[n];
    });
  });
  reduce_all_units(me);
}
// The values of the unit that an entry enters.
template <class L, int n = 0> INLINE void see_unit(Entry& e, int unit) {
  if constexpr (n < UNIT_REDUCTIONS) {
    e.unit_o[n] = memory[L::UNIT_OBSERVED + n * L::UNITS_KEPT + unit];
    e.unit_r[n] = memory[UnitReduction<n>::VALUES + L::NUMBER];
    see_unit<L, n + 1>(e, unit);
  }
  for (int m = 0; m < UNIT_STATES; ++m) e.unit_s[m] = memory[L::UNIT_STATE + m * L::UNITS_KEPT + unit];
}

// ------------------------------------------------------------------------------------------------------------- the update

template <class B, int n = 0> INLINE void see_reduced(Entry& e, int row, int lane) {
  typedef Layer<B::LAYER> L;
  if constexpr (n < REDUCTIONS && L::GATED) {
    if constexpr (Reduction<n>::OVER == UNIT) e.r[n] = memory[Reduced<B::LAYER, n>::VALUES + (L::TURNED ? lane : row)];
    else e.r[n] = memory[Reduction<n>::VALUES + B::LAYER];
    see_reduced<B, n + 1>(e, row, lane);
  }
}
template <class L, int n = 0> INLINE void see_reduced_of_bias(Entry& e) {
  if constexpr (n < REDUCTIONS && L::GATED) { e.r[n] = memory[Reduction<n>::VALUES + LAYERS + L::NUMBER]; see_reduced_of_bias<L, n + 1>(e); }
}
// The update of the weights of some layers; products of the first layer with the next input are computed at the same time.
template <int FROM, int TO> INLINE void update_weights(Thread& me, const float* numbers, const Noise& z) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    if constexpr (l < FROM || l >= TO) return;
    constexpr bool HAS_UNIT = FEATURES && l + 1 < LAYERS;
    const int first = me.first<l>(), rows = me.rows<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      const Lanes<B> lanes(me);
      const int lane = B::FIRST + worker<B>() % B::CHUNKS * 4;
      Entry of_lane[4];  // values shared by all rows
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (L::TURNED) see_reduced<B>(of_lane[k], 0, lane + k);
        if constexpr (L::TURNED && HAS_UNIT) see_unit<L>(of_lane[k], lane + k);
      }
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        float words[WORDS][2][4], n[2][4];
        for (int i = 0; i < WORDS; ++i) tile.get(i, words[i]);
        tile_noise<B>(me, z, first, pair, chunk, n);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float d = row_vector<l>()[2 * pair + r], bend = row_bend<l>(2 * pair + r);
          Entry of_row;
          if constexpr (!L::TURNED) see_reduced<B>(of_row, 2 * pair + r, 0);
          if constexpr (!L::TURNED && HAS_UNIT) see_unit<L>(of_row, 2 * pair + r);
          OfState of_state[4];  // computed once for the row if its entries have the same state
          if constexpr (ALIKE >= 0) {
            const float (&s)[4] = words[1 + ALIKE][r];
            prepare<L::GATED, HAS_UNIT>(entry_of<B>(words, lanes, d, bend, r, 0), numbers, of_state[0]);
            for (int k = 1; k < 4; ++k) of_state[k] = of_state[0];
            if (s[1] != s[0] || s[2] != s[0] || s[3] != s[0])
              for (int k = 1; k < 4; ++k) prepare<L::GATED, HAS_UNIT>(entry_of<B>(words, lanes, d, bend, r, k), numbers, of_state[k]);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            Entry e = entry_of<B>(words, lanes, d, bend, r, k);
            e.see(L::TURNED ? of_lane[k] : of_row);
            e.noise = n[r][k];
            if constexpr (ALIKE >= 0) update<L::GATED, HAS_UNIT>(e, numbers, of_state[k]); else update<L::GATED, HAS_UNIT>(e, numbers);
            words[0][r][k] = real<B>(rows, pair, r, chunk, k) ? e.w : 0.f;
            for (int i = 1; i < WORDS; ++i) words[i][r][k] = e.s[i - 1];
          }
        }
        tile.put(0, words[0]);
        for (int i = 1; i < WORDS; ++i) if (CHANGES(i - 1)) tile.put(i, words[i]);
        if constexpr (l == 0) put_parts<B>(dot4(words[0][0], me.x_next[B::NUMBER]), dot4(words[0][1], me.x_next[B::NUMBER]), pair, chunk);
      });
    });
  });
}
INLINE void update_biases(Thread& me, const float* numbers, const Noise& z) {
  each_bias(me, [&](auto layer, float* words, int unit, int index) {
    typedef decltype(layer) L;
    constexpr bool HAS_UNIT = FEATURES && L::NUMBER + 1 < LAYERS;
    Entry e = bias_entry<L>(words, unit);
    see_reduced_of_bias<L>(e);
    if constexpr (HAS_UNIT) see_unit<L>(e, unit);
    e.noise = single_noise(index, z);
    update<L::GATED, HAS_UNIT>(e, numbers);
    words[0] = e.w;
    for (int i = 1; i < WORDS; ++i) words[i * L::BIASES] = e.s[i - 1];
  });
}

// A step of a learner's rule; see by_hand.cuh.
struct Method {
  const float* table; float coming; const i64 seed;

  INLINE Method(const Arguments& args, int learner)
      : table(args.scalars + (i64)learner * args.length * SCALARS), coming(0.f), seed(args.settings[learner].seed) {}
  INLINE void ask(int step) { if (threadIdx.x < SCALARS) coming = table[(i64)step * SCALARS + threadIdx.x]; }
  INLINE void answer() { if (threadIdx.x < SCALARS) memory[NUMBERS + threadIdx.x] = coming; }
  template <class Own> INLINE void learn(Own& me, i64 step) {  // a template, so that resets.cuh may be missing
    float numbers[SCALARS];
    for (int i = 0; i < SCALARS; ++i) numbers[i] = memory[NUMBERS + i];
    if constexpr (FEATURES) look_at_units(me, numbers);
    reduce_all(me, numbers);
    const Noise z = noise_of(step, noise_size());
    if constexpr (RESETS) update_and_reset(me, numbers, z, seed, step);
    else { update_weights<0, LAYERS>(me, numbers, z); update_biases(me, numbers, z); }
  }
  INLINE static float noise_size() { return 1.38629436f; }  // 2·ln 2: standard normal
  INLINE void end() {}
};
