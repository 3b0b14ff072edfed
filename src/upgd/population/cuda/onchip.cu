// One learner per thread-block cluster: weights and utilities stay on chip while the learner takes thousands of steps.
//
// The text is basics.cuh, tiles.cuh, network.cuh, rule.cuh and this file, one behind the other. The planner (planner.py)
// writes what is constant in front of it: CLUSTER, THREADS, the choices of the rule, and for
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
  const Rule rule = {own.lr_c, own.decay, own.p, own.q};
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

    float by = 0.f, smallest = 0.f;
    if constexpr (RULE == UTILITY) {
      if ((own_step - 1) % RENEWED_EVERY == 0 && scale != 1.f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      scale *= own.beta;
      if (scale < 1e-12f) { scale_utilities(me, scale); scale = 1.f; __syncthreads(); }
      const float factor = -own.rest / scale;
      if constexpr (SCALING == GLOBAL) by = 1.44269504f / fmaxf(largest_utility(me, factor), TINY);
      else { smallest = TINY_NORM / scale; local_norms(me, factor, smallest); __syncthreads(); }
    }
    const Noise z = {keys[0], keys[1], own.noise, own_step > 1 ? own.noise : 0.f};
    if (RULE == UTILITY && own.p == 1.f && own.q == 1.f) descend<true>(me, rule, z, by, smallest); else descend<false>(me, rule, z, by, smallest);
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
