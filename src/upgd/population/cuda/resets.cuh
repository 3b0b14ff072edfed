// Methods that reset hidden units, generated from their reset_units (upgd.methods.reset_tracing). The preceding source, written by
// generated.py, defines: Hidden, the values of a unit; leaving<n>(w, k), the term of sum n for an outgoing weight; to_join<n>(unit,
// k), the value that join n reduces over the units of a layer, and how_many<n>(unit, k), the number of smallest values; and
// renew(unit, k, chosen, moved), which changes s. k are the per-learner and per-step scalars.
//
// Every CTA stores all units of all hidden layers and computes the same values, so that all make the same decisions. The outputs of
// units and the sums over outgoing weights are exchanged while the first layer is updated. Few steps reset a unit; the others end
// with the decision.

template <class L> constexpr bool HAS_UNITS = L::NUMBER + 1 < LAYERS;

template <int n = 0, class L> INLINE void see_joined(L layer, Hidden& e, int i) {
  if constexpr (n < UNIT_JOINS) {
    typedef UnitJoin<n> J;
    e.joined[n] = J::OPERATION == SMALLEST ? memory[L::AMONG + J::SELECTION * L::UNITS_KEPT + i] : memory[JOINED + n * LAYERS + L::NUMBER];
    see_joined<n + 1>(layer, e, i);
  }
}
struct Draws { i64 seed, step; };
// visit(index, unit) for every unit of a layer; each by one thread, always the same.
template <class L, class Visit> INLINE void every_unit(const Draws& draws, Visit visit) {
  for (int i = threadIdx.x; i < L::OUTPUTS; i += THREADS) {
    Hidden e;
    e.activation = memory[(L::TURNED ? L::H : L::ALL_H) + i];
    if constexpr (DRAWS) e.draw = uniform(i, keys_of(draws.seed, draws.step, DRAWS_OF_UNITS, L::NUMBER));
    for (int n = 0; n < UNIT_STATES; ++n) e.s[n] = memory[L::UNIT_STATE + n * L::UNITS_KEPT + (OF_LAYER(n) ? 0 : i)];
    for (int n = 0; n < OUTGOING_SUMS; ++n) e.outgoing[n] = memory[L::OUTGOING + n * L::UNITS_KEPT + i];
    see_joined(L(), e, i);
    visit(i, e);
  }
}

// ------------------------------------------------------------------------------------------------ what the CTAs tell each other

template <int l, int n = 0> INLINE void send_outgoing(Thread& me, const float* numbers) {  // of the units of layer l
  if constexpr (n < OUTGOING_SUMS) {
    typedef Layer<l> L;
    const int rows = me.rows<l + 1>();
    auto values = [&](auto block, int pair, int chunk, auto tile, float (&v)[2][4]) {
      typedef decltype(block) B;
      tile.get(0, v);
      for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) v[r][k] = real<B>(rows, pair, r, chunk, k) ? leaving<n>(v[r][k], numbers) : 0.f;
    };
    if constexpr (Layer<l + 1>::TURNED) {  // a unit's weights are a row
      each_block<l + 1>([&](auto block) {
        typedef decltype(block) B;
        each_tile<B>(me, [&](int pair, int chunk, auto tile) {
          float v[2][4]; values(block, pair, chunk, tile, v);
          put_parts<B>((v[0][0] + v[0][1]) + (v[0][2] + v[0][3]), (v[1][0] + v[1][1]) + (v[1][2] + v[1][3]), pair, chunk);
        });
      });
      __syncthreads();
      rows_done<l + 1>(me, [&](int row, int j, float sum) {
        for (int to = j; to < CLUSTER; to += 8) send1(memory + L::OUTGOING + n * L::UNITS_KEPT + me.first<l>() + row, barrier(L::HEARD), to, __float_as_int(sum));
      });
    } else {
      send_sums<l + 1>(me, Outgoing<l + 1, n>::BARRIER, Outgoing<l + 1, n>::BUFFER, false, [&](auto block, int pair, auto tile, float (&sum)[4]) {
        float v[2][4]; values(block, pair, worker<decltype(block)>() % decltype(block)::CHUNKS, tile, v);
        for (int k = 0; k < 4; ++k) sum[k] += v[0][k] + v[1][k];
      });
    }
    __syncthreads();
    send_outgoing<l, n + 1>(me, numbers);
  }
}
INLINE void tell_of_units(Thread& me, const float* numbers) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (HAS_UNITS<L>) {
      if constexpr (!L::TURNED) {
        const int own = me.rows<L::NUMBER>(), first = me.first<L::NUMBER>();
        for (int i = threadIdx.x; i < CLUSTER * own; i += THREADS)
          send1(memory + L::ALL_H + first + i % own, barrier(L::HEARD), i / own, __float_as_int(memory[L::H + i % own]));
      }
      send_outgoing<L::NUMBER>(me, numbers);
    }
  });
}
template <int l, int n = 0> INLINE void hear_outgoing(Thread& me) {  // the sums of the units of a turned layer l
  if constexpr (n < OUTGOING_SUMS) {
    typedef Layer<l> L; typedef Outgoing<l + 1, n> From;
    me.receive(From::BARRIER, CLUSTER * Layer<l + 1>::PADDED * 4);
    for (int i = threadIdx.x; i < L::OUTPUTS; i += THREADS) memory[L::OUTGOING + n * L::UNITS_KEPT + i] = received<l + 1>(From::BUFFER, i);
    hear_outgoing<l, n + 1>(me);
  }
}
INLINE void hear_of_units(Thread& me) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (HAS_UNITS<L> && L::TURNED) hear_outgoing<L::NUMBER>(me);
    if constexpr (HAS_UNITS<L> && !L::TURNED) me.receive(L::HEARD, L::OUTPUTS * 4 * (1 + OUTGOING_SUMS));
  });
}

// ---------------------------------------------------------------------------------------------------------------- the decision

// The order of a stable sort: NaN is the largest, and equal values keep their order.
INLINE bool comes_before(float a, int i, float b, int j) {
  const bool less = a < b || (b != b && a == a), same = a == b || (a != a && b != b);
  return less || (same && i < j);
}
template <int n = 0> INLINE void join_units(const Draws& draws, const float* numbers) {
  if constexpr (n < UNIT_JOINS) {
    typedef UnitJoin<n> J; typedef typename J::Join Join;
    constexpr int WARPS = THREADS / 32;
    each_layer([&](auto layer) {
      typedef decltype(layer) L;
      if constexpr (!HAS_UNITS<L>) return;
      else if constexpr (J::OPERATION == SMALLEST) every_unit<L>(draws, [&](int i, const Hidden& e) { memory[L::RANKED + i] = to_join<n>(e, numbers); });
      else {
        float joined = Join::START;
        every_unit<L>(draws, [&](int, const Hidden& e) { joined = Join::of(joined, to_join<n>(e, numbers)); });
        joined = of_warp<Join>(joined);
        if (threadIdx.x % 32 == 0) memory[OF_WARPS + L::NUMBER * WARPS + threadIdx.x / 32] = joined;
      }
    });
    __syncthreads();
    each_layer([&](auto layer) {
      typedef decltype(layer) L;
      if constexpr (!HAS_UNITS<L>) return;
      else if constexpr (J::OPERATION == SMALLEST) every_unit<L>(draws, [&](int i, const Hidden& e) {
        const float most = how_many<n>(e, numbers), own = memory[L::RANKED + i];
        bool among = most > 0.f;
        if (among) {  // the same for all units of the layer
          int rank = 0;
          for (int j = 0; j < L::OUTPUTS; ++j) rank += comes_before(memory[L::RANKED + j], j, own, i);
          among = (float)rank < most;
        }
        memory[L::AMONG + J::SELECTION * L::UNITS_KEPT + i] = among ? 1.f : 0.f;
      });
      else if (threadIdx.x == L::NUMBER) {
        float joined = Join::START;
        for (int warp = 0; warp < WARPS; ++warp) joined = Join::of(joined, memory[OF_WARPS + L::NUMBER * WARPS + warp]);
        memory[JOINED + n * LAYERS + L::NUMBER] = finished<J>(joined, L::OUTPUTS);
      }
    });
    __syncthreads();
    join_units<n + 1>(draws, numbers);
  }
}
INLINE bool decide(const Draws& draws, const float* numbers) {  // whether a unit of the learner is chosen
  join_units(draws, numbers);
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (HAS_UNITS<L>) every_unit<L>(draws, [&](int i, Hidden& e) {
      bool chosen = false; float moved = 0.f;
      renew(e, numbers, chosen, moved);
      for (int n = 0; n < UNIT_STATES; ++n) {
        if (!OF_LAYER(n)) memory[L::UNIT_STATE + n * L::UNITS_KEPT + i] = chosen ? 0.f : e.s[n];
        else if (i == 0) memory[OF_LAYERS + n * LAYERS + L::NUMBER] = e.s[n];  // other threads still read the old value
      }
      memory[L::CHOSEN + i] = chosen ? 1.f : 0.f; memory[L::MOVED + i] = moved;
      if (chosen || moved != 0.f) atomicMax((int*)memory + ANY_CHOSEN, 1);
    });
  });
  __syncthreads();
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (HAS_UNITS<L>) for (int n = 0; n < UNIT_STATES; ++n)
      if (OF_LAYER(n) && threadIdx.x == 0) memory[L::UNIT_STATE + n * L::UNITS_KEPT] = memory[OF_LAYERS + n * LAYERS + L::NUMBER];
  });
  return ((const int*)memory)[ANY_CHOSEN] != 0;
}

// ------------------------------------------------------------------------------------------------------------------ the reset

template <class L> INLINE bool is_chosen(int unit) { if constexpr (HAS_UNITS<L>) return memory[L::CHOSEN + unit] != 0.f; else return false; }

// Changes of the next layers' biases: sums over the preceding units, stored in place of the deltas, which are no longer needed.
INLINE void sums_for_biases(Thread& me) {
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    if constexpr (l > 0 && L::BIAS >= 0) {
      const float* moved = memory + Layer<l - 1>::MOVED;
      if constexpr (L::TURNED) {
        // All CTAs have read the sums of the forward pass before they sent their units, and synchronize before sending the next ones.
        const float* own = moved + me.first<l>();
        sums<l>(me, L::FORWARD, L::FORWARD_BUFFER, false, [&](auto, int pair, auto tile, float (&sum)[4]) {
          float w[2][4]; tile.get(0, w);
          for (int k = 0; k < 4; ++k) sum[k] = fmaf(w[1][k], own[2 * pair + 1], fmaf(w[0][k], own[2 * pair], sum[k]));
        });
        for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) memory[L::D + k] = received<l>(L::FORWARD_BUFFER, k);
      } else {
        each_block<l>([&](auto block) {
          typedef decltype(block) B;
          float v[4]; get4(moved + B::FIRST + worker<B>() % B::CHUNKS * 4, v);
          each_tile<B>(me, [&](int pair, int chunk, auto tile) {
            float w[2][4]; tile.get(0, w);
            put_parts<B>(dot4(w[0], v), dot4(w[1], v), pair, chunk);
          });
        });
        __syncthreads();
        rows_done<l>(me, [&](int row, int j, float sum) { if (j == 0) memory[L::D + row] = sum; });
      }
      __syncthreads();
    }
  });
}
INLINE void reset(Thread& me, const Draws& draws) {
  if constexpr (MOVES) sums_for_biases(me);
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    typedef Layer<l == 0 ? 0 : l - 1> Before;
    const int first = me.first<l>(), rows = me.rows<l>();
    const Keys keys = keys_of(draws.seed, draws.step, FRESH_WEIGHTS, l);
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        float w[2][4]; bool written[2][4], any = false;
        tile.get(0, w);
        for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) {
          written[r][k] = false;
          if (!real<B>(rows, pair, r, chunk, k)) continue;
          const int row = first + 2 * pair + r, lane = B::FIRST + chunk * 4 + k, out = L::TURNED ? lane : row, in = L::TURNED ? row : lane;
          if (is_chosen<L>(out)) { w[r][k] = (2.f * uniform(out * L::INPUTS + in, keys) - 1.f) * L::BOUND; written[r][k] = any = true; }
          else if (l > 0 && ZEROES && is_chosen<Before>(in)) { w[r][k] = 0.f; written[r][k] = any = true; }
        }
        if (!any) return;
        tile.put(0, w);
        for (int n = 1; n < WORDS; ++n) {
          float v[2][4]; tile.get(n, v);
          for (int r = 0; r < 2; ++r) for (int k = 0; k < 4; ++k) if (written[r][k]) v[r][k] = COPIES(n - 1) ? w[r][k] : 0.f;
          tile.put(n, v);
        }
      });
    });
  });
  each_bias(me, [&](auto layer, float* words, int unit, int index) {
    typedef decltype(layer) L;
    if (is_chosen<L>(index - L::BIAS)) for (int n = 0; n < WORDS; ++n) words[n * L::BIASES] = 0.f;
    else if (MOVES && L::NUMBER > 0) words[0] += memory[L::D + unit];
  });
  each_block<0>([&](auto block) {  // recompute the products of the first layer with the next input
    typedef decltype(block) B;
    each_tile<B>(me, [&](int pair, int chunk, auto tile) {
      float w[2][4]; tile.get(0, w);
      put_parts<B>(dot4(w[0], me.x_next[B::NUMBER]), dot4(w[1], me.x_next[B::NUMBER]), pair, chunk);
    });
  });
  cluster_sync();
}

INLINE void update_and_reset(Thread& me, const float* numbers, const Noise& z, i64 seed, i64 step) {
  const float* own = memory + NUMBERS + RESET_SCALARS;
  const Draws draws{seed, step};
  update_weights<1, LAYERS>(me, numbers, z);
  if (threadIdx.x == 0) ((int*)memory)[ANY_CHOSEN] = 0;
  tell_of_units(me, own);
  update_weights<0, 1>(me, numbers, z);
  update_biases(me, numbers, z);
  hear_of_units(me);
  __syncthreads();
  if (decide(draws, own)) reset(me, draws);
}
