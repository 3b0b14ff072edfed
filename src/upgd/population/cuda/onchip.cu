// One learner per thread-block cluster: weights and state stay on chip for thousands of steps.
//
// The source is the concatenation of constants, machine.cuh, basics.cuh, judge.cuh, joins.cuh, tiles.cuh, network.cuh, rule.cuh,
// the rule and this file. The rule is by_hand.cuh, or the output of generated.py followed by generated.cuh. The
// constants are the plan of planner.py, written by source.py: CLUSTER, THREADS, the options of the rule, and for every layer l a
// struct Layer<l> with its Block<l, b>s. A step works as follows:
//
//   Layers alternate. An even layer is split by its OUTPUTS: every block of the cluster (a CTA) owns some units and all
//   their incoming weights. An odd layer is split by its INPUTS: its matrix is stored transposed ("turned"), one row for each
//   unit of the preceding layer that the CTA owns. The outputs of an even layer are then the inputs that its CTA needs for the
//   next layer, and the CTAs exchange sums only after odd layers in the forward pass and after even ones in the backward pass.
//   In both cases a CTA has "rows" (units it owns) of "lanes" (all units on the other side), and the gradient is
//   row vector × lane vector:        rows               lanes
//       even layer                   deltas it owns     all inputs h
//       odd layer, turned            inputs it owns     all deltas
//
//   A thread works on tiles of 2 rows × 4 lanes. Its lanes are fixed; its rows vary. Some tiles are kept in registers
//   ("held"), the rest in shared memory.
//
//   In hand-written rules, utilities decay lazily: u / scale is stored, with scale ← β·scale at every step, so that rows without
//   gradient are not written. The scale is reset to 1 at every 100th step, regardless of the blocks of steps.
//
// All sums have a fixed order, so results are bitwise reproducible and independent of the blocks of steps.

// ------------------------------------------------------------------------------------------------------- data and memory

// The sources of the thread's inputs, and values being loaded.
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
// Online normalization (upgd.normalization): mean and variance of the inputs, which are in global memory, follow the sample,
// a = min(α, (t − 1)/t). One thread normalizes four inputs; the others that have these lanes wait for it.
struct Moments { float mean[BLOCKS_0][4], variance[BLOCKS_0][4]; };
template <class B> INLINE bool normalizes() { return worker<B>() / B::CHUNKS == 0; }
INLINE void ask(const Thread& me, Moments& moments) {  // start the loads
  each_block<0>([&](auto block) {
    typedef decltype(block) B;
    if (!normalizes<B>()) return;
    get4(me.far + MEANS + input_lane<B>(0), moments.mean[B::NUMBER]); get4(me.far + VARIANCES + input_lane<B>(0), moments.variance[B::NUMBER]);
  });
}
INLINE void normalize(const Thread& me, Moments& moments, float (&x)[BLOCKS_0][4], double rate, i64 step) {
  const double decay = fmin(rate, (double)(step - 1) / (double)step);
  const float a = (float)decay, rest = (float)(1. - decay);
  __syncthreads();  // the partial sums have been read; normalized inputs temporarily replace them
  each_block<0>([&](auto block) {
    typedef decltype(block) B;
    if (!normalizes<B>()) return;
    float (&mean)[4] = moments.mean[B::NUMBER], (&variance)[4] = moments.variance[B::NUMBER];
    for (int k = 0; k < 4; ++k) {
      const float now = x[B::NUMBER][k], moved = fmaf(a, mean[k], rest * now);
      variance[k] = fmaf(a, variance[k], rest * ((now - mean[k]) * (now - moved)));
      mean[k] = moved;
      x[B::NUMBER][k] = input_lane<B>(k) < Layer<0>::INPUTS ? fminf(fmaxf((now - moved) / sqrtf(variance[k] + 1e-4f), -5.f), 5.f) : 0.f;
    }
    put4(me.far + MEANS + input_lane<B>(0), mean); put4(me.far + VARIANCES + input_lane<B>(0), variance);
    put4(memory + PART + input_lane<B>(0), x[B::NUMBER]);
  });
  __syncthreads();
  each_block<0>([&](auto block) { get4(memory + PART + input_lane<decltype(block)>(0), x[decltype(block)::NUMBER]); });
  __syncthreads();
}
// Between global memory, in the order of the parameters, and the tiles. Entries that pad a tile are zero and never stored.
template <class B> INLINE i64 place(int first, int pair, int r, int lane) {
  typedef Layer<B::LAYER> L;
  return L::TURNED ? L::WEIGHT + (i64)lane * L::INPUTS + first + 2 * pair + r : L::WEIGHT + (i64)(first + 2 * pair + r) * L::INPUTS + lane;
}
template <bool LOAD> INLINE void move(Thread& me, const Arguments& args, int learner) {
  float* words = args.words + (i64)learner * WORDS * PARAMETERS;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    constexpr int l = L::NUMBER;
    const int first = me.first<l>(), rows = me.rows<l>();
    each_block<l>([&](auto block) {
      typedef decltype(block) B;
      each_tile<B>(me, [&](int pair, int chunk, auto tile) {
        const int lane = B::FIRST + chunk * 4;
        for (int n = 0; n < WORDS; ++n) {
          float* from = words + (i64)n * PARAMETERS;
          float v[2][4];
          if (!LOAD) tile.get(n, v);
          for (int r = 0; r < 2; ++r) {
            const bool row = 2 * pair + r < rows;
            if constexpr (L::VECTORS) {
              const i64 i = place<B>(first, pair, r, lane);
              if constexpr (LOAD) { for (int k = 0; k < 4; ++k) v[r][k] = 0.f; if (row) get4(from + i, v[r]); }
              else if (row) put4(from + i, v[r]);
            } else {
              for (int k = 0; k < 4; ++k) {
                const bool there = row && lane + k < L::LANES;
                const i64 i = place<B>(first, pair, r, lane + k);
                if constexpr (LOAD) v[r][k] = there ? from[i] : 0.f; else if (there) from[i] = v[r][k];
              }
            }
          }
          if (LOAD) tile.put(n, v);
        }
      });
    });
  });
  each_bias(me, [&](auto layer, float* own, int, int index) {
    for (int n = 0; n < WORDS; ++n) {
      float &here = own[n * decltype(layer)::BIASES], &there = words[(i64)n * PARAMETERS + index];
      if (LOAD) here = there; else there = here;
    }
  });
  if constexpr (NORMALIZE) {
    float* inputs = args.inputs + (i64)learner * 2 * Layer<0>::INPUTS;
    for (int i = threadIdx.x; i < Layer<0>::PADDED; i += THREADS) {
      const bool there = i < Layer<0>::INPUTS;
      if (LOAD) { me.far[MEANS + i] = there ? inputs[i] : 0.f; me.far[VARIANCES + i] = there ? inputs[Layer<0>::INPUTS + i] : 1.f; }
      else if (there && me.rank == 0) { inputs[i] = me.far[MEANS + i]; inputs[Layer<0>::INPUTS + i] = me.far[VARIANCES + i]; }
    }
  }
  if constexpr (FEATURES || RESETS) each_layer([&](auto layer) {
    typedef decltype(layer) L;
    if constexpr (L::NUMBER + 1 == LAYERS) return;
    constexpr bool ALL = L::TURNED || RESETS;  // every CTA knows all units
    const int own = ALL ? L::OUTPUTS : me.rows<L::NUMBER>(), first = ALL ? 0 : me.first<L::NUMBER>();
    for (int n = 0; n < UNIT_STATES; ++n)
      for (int i = threadIdx.x; i < own; i += THREADS) {
        float &here = memory[L::UNIT_STATE + n * L::UNITS_KEPT + i];
        float &there = args.units[((i64)learner * UNIT_STATES + n) * HIDDEN + L::FIRST_HIDDEN + first + i];
        if (LOAD) here = there; else if (!ALL || me.rank == 0) there = here;
      }
  });
}

// ------------------------------------------------------------------------------------------------- the steps of a learner

INLINE void learn(Thread& me, const Arguments& args, const Segment& segment) {
  const Settings own = args.settings[segment.learner];
  Method method(args, segment.learner);
  const int t = threadIdx.x;
  const bool keeps_books = t == 0 && me.rank == 0;
  double loss = 0.; i64 correct = 0, diverged_at = -1;
  if (keeps_books) { loss = args.loss[segment.learner]; correct = args.correct[segment.learner]; }
  move<true>(me, args, segment.learner);
  method.ask(segment.from);
  if constexpr (NOISE == ANTICORRELATED) {
    const i64 before = args.start + segment.from;  // its first step is before + 1
    remember_normals(me, keys_of(own.seed, before), before > 0 ? method.noise_size() : 0.f);
  }

  Keys* keys = (Keys*)(memory + KEYS);
  Input in;
  const i64* targets = (const i64*)args.targets + (i64)own.row * args.length;
  const i64* index = args.index + (i64)own.row * args.length;
  i64 image = INDEXED ? index[segment.from] : 0;
  if constexpr (INDEXED) take_order(args, own.row, (int)args.task[segment.from], in);
  ask(args, own.row, segment.from, image, in);
  answer(args, in, me.x);
  Moments moments;
  if constexpr (NORMALIZE) { __syncthreads(); ask(me, moments); normalize(me, moments, me.x, own.rate, args.start + segment.from + 1); }
  int target = LOSS == CROSS_ENTROPY ? (int)targets[segment.from] : 0, next_target = target, next_task = 0;
  auto look_ahead = [&](int step) {  // values needed to request the inputs of a step
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
    method.answer();
    if (step + 1 < segment.to) method.ask(step + 1);
    if constexpr (NOISE != NONE) if (t / 32 == THREADS / 32 - 1) {  // one warp computes the keys; the others read them later
      keys[0] = keys_of(own.seed, own_step);
      if constexpr (NOISE == ANTICORRELATED) keys[1] = keys_of(own.seed, own_step - 1);
    }
    outputs_of_rows<0>(me);
    __syncthreads();
    forward<1>(me);
    const Verdict verdict = judge(me, target);
    __syncthreads();
    backward<LAYERS - 1>(me, [&] {
      if constexpr (NORMALIZE) ask(me, moments);
      answer(args, in, me.x_next);
      if constexpr (NORMALIZE) if (step + 1 < segment.to && finite(verdict.loss)) normalize(me, moments, me.x_next, own.rate, own_step + 1);
    });
    loss += (double)verdict.loss; correct += verdict.correct;
    if (!finite(verdict.loss)) { diverged_at = args.start + step; break; }
    method.learn(me, own_step);
    for (int b = 0; b < BLOCKS_0; ++b) for (int k = 0; k < 4; ++k) me.x[b][k] = me.x_next[b][k];
    target = target_after;
    if constexpr (BARRIER_COUNT < 2) cluster_sync();  // otherwise, each exchange waits for the other
  }
  __syncthreads();
  move<false>(me, args, segment.learner);
  if (keeps_books) {
    args.loss[segment.learner] = loss; args.correct[segment.learner] = correct;
    if (diverged_at >= 0) args.diverged_at[segment.learner] = diverged_at;
    method.end();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) advance(const Arguments args) {
  Thread me;
  me.rank = cluster_rank(); me.phases = 0; me.far = args.far + (i64)blockIdx.x * FAR_FLOATS;
  const int cluster = blockIdx.x / CLUSTER, t = threadIdx.x;
  for (int i = t; i < VECTORS_END - VECTORS_AT; i += THREADS) memory[VECTORS_AT + i] = 0.f;
  __syncthreads();
  if (t == 0) {
    for (int i = 0; i < BARRIER_COUNT; ++i) barrier_init(barrier(i));
    barriers_known();
    const int expected[] = EXPECTED;
#pragma unroll
    for (int i = 0; i < BARRIER_COUNT; ++i) barrier_expect(barrier(i), expected[i]);
  }
  cluster_sync();
#pragma unroll 1
  for (int s = args.begins[cluster]; s < args.begins[cluster + 1]; ++s) {
    const Segment segment = args.segments[s];
    if (segment.flags & WAITS) {
      if (t == 0) wait_until(args.told + segment.learner, args.telling);
      __syncthreads();
    }
    if (((volatile i64*)args.diverged_at)[segment.learner] < 0) learn(me, args, segment);
    __threadfence();
    cluster_sync();  // the learner is stored, and no CTA still reads buffers that the next learner will write
    if (segment.flags & TELLS && t == 0 && me.rank == 0) tell(args.told + segment.learner, args.telling);
  }
}
