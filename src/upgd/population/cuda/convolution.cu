// One learner per thread-block cluster, as in onchip.cu, for networks that begin with convolutions.
//
// The text is machine.cuh, basics.cuh, judge.cuh, joins.cuh, convolution.cuh, what generated.py makes of a method, rows.cuh and this
// file, one behind the other; convolutional.py writes what is constant in front. How a step goes:
//
//   Every layer is split by its OUTPUTS: a CTA owns some units, which are channels in a convolution, and all weights that enter
//   them. It sends the values of its units to all CTAs and, on the way back, its part of each gradient to the CTA that owns the
//   unit. A convolution, the pooling and the activation behind it are one layer: a window of the pooling gives one value, whose
//   gradient returns through the output that was chosen alone.
//
// Sums have a fixed order everywhere, so reruns agree in every bit, and blocks of steps do not show.

// ------------------------------------------------------------------------------------------------------- data and memory

constexpr int PIXELS_IN = Layer<0>::CHANNELS * Layer<0>::HEIGHT * Layer<0>::WIDTH, EACH_IN = (PIXELS_IN + THREADS - 1) / THREADS;
struct Input { unsigned char byte[EACH_IN]; float value[EACH_IN]; };  // on their way
INLINE void ask(const Arguments& args, int row, int step, i64 image, int task, Input& in) {  // start the loads
#pragma unroll
  for (int j = 0; j < EACH_IN; ++j) {
    const int i = min((int)threadIdx.x + j * THREADS, PIXELS_IN - 1);
    if constexpr (INDEXED) in.byte[j] = args.source[image * PIXELS_IN + (args.permutation ? args.permutation[((i64)row * args.tasks + task) * PIXELS_IN + i] : i)];
    else in.value[j] = args.dense[((i64)row * args.length + step) * PIXELS_IN + i];
  }
}
INLINE void look_up(const Arguments& args, Input& in) {
#pragma unroll
  for (int j = 0; j < EACH_IN; ++j) if constexpr (INDEXED) in.value[j] = args.pixel[in.byte[j]];
}
// With online normalization (upgd.normalization), mean and variance of the inputs follow the sample, a = min(α, (t − 1)/t).
INLINE void answer(const Input& in, double rate, i64 step) {
  typedef Layer<0> L;
  const double decay = fmin(rate, (double)(step - 1) / (double)step);
  const float a = (float)decay, rest = (float)(1. - decay);
#pragma unroll
  for (int j = 0; j < EACH_IN; ++j) {
    const int i = threadIdx.x + j * THREADS;
    if (i >= PIXELS_IN) break;
    float x = in.value[j];
    if constexpr (NORMALIZE) {
      float &mean = memory[MEANS + i], &variance = memory[VARIANCES + i];
      const float moved = fmaf(a, mean, rest * x);
      variance = fmaf(a, variance, rest * ((x - mean) * (x - moved)));
      mean = moved;
      x = fminf(fmaxf((x - moved) / sqrtf(variance + 1e-4f), -5.f), 5.f);
    }
    const int y = i / L::WIDTH % L::HEIGHT;
    memory[L::IN + i / (L::WIDTH * L::HEIGHT) * L::PLANE + (y + L::PAD_Y) * L::PITCH + i % L::WIDTH + L::PAD_X] = x;
  }
}
// Between global memory, in the order of the parameters, and shared memory.
template <bool LOAD> INLINE void exchange(float& here, float& there) { if (LOAD) here = there; else there = here; }
template <bool LOAD> INLINE void move(Thread& me, const Arguments& args, int learner) {
  float* words = args.words + (i64)learner * WORDS * PARAMETERS;
  each_layer([&](auto layer) {
    typedef decltype(layer) L;
    const int rows = me.rows<L::NUMBER>(), first = me.first<L::NUMBER>();
    for (int n = 0; n < WORDS; ++n) {
      float* from = words + (i64)n * PARAMETERS;
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * L::STEP; i += THREADS) {
        const int k = i % L::STEP;
        if (k < L::INPUTS) exchange<LOAD>(memory[L::WORDS_AT + n * L::SIZE + place_in<L>(i / L::STEP, k)], from[L::WEIGHT + (first + i / L::STEP) * L::INPUTS + k]);
        else if (!L::CONVOLUTION) memory[L::WORDS_AT + n * L::SIZE + i] = 0.f;
      }
      if constexpr (L::BIAS >= 0) for (int i = threadIdx.x; i < rows; i += THREADS) exchange<LOAD>(memory[L::BIAS_WORDS + n * L::ROWS + i], from[L::BIAS + first + i]);
    }
    if constexpr (FEATURES && L::NUMBER + 1 < LAYERS)
      for (int n = 0; n < UNIT_STATES; ++n)
        for (int i = threadIdx.x; i < rows; i += THREADS) exchange<LOAD>(memory[L::UNIT_STATE + n * L::ROWS + i], args.units[((i64)learner * UNIT_STATES + n) * HIDDEN + L::FIRST_HIDDEN + first + i]);
  });
  if constexpr (NORMALIZE) {
    float* inputs = args.inputs + (i64)learner * 2 * PIXELS_IN;
    for (int i = threadIdx.x; i < PIXELS_IN && (LOAD || me.rank == 0); i += THREADS) {
      exchange<LOAD>(memory[MEANS + i], inputs[i]); exchange<LOAD>(memory[VARIANCES + i], inputs[PIXELS_IN + i]);
    }
  }
}

// ------------------------------------------------------------------------------------------------- the steps of a learner

INLINE void learn(Thread& me, const Arguments& args, const Segment& segment) {
  constexpr int OUTPUTS = Layer<LAYERS - 1>::OUTPUTS;
  const Settings own = args.settings[segment.learner];
  const float* table = args.scalars + (i64)segment.learner * args.length * SCALARS;
  const int t = threadIdx.x;
  const bool keeps_books = t == 0 && me.rank == 0;
  double loss = 0.; i64 correct = 0, diverged_at = -1;
  if (keeps_books) { loss = args.loss[segment.learner]; correct = args.correct[segment.learner]; }
  move<true>(me, args, segment.learner);

  Keys* keys = (Keys*)(memory + KEYS);
  const i64* targets = (const i64*)args.targets + (i64)own.row * args.length;
  const i64* index = args.index + (i64)own.row * args.length;
  i64 image = 0; int target = 0, task = 0, next_target = 0; float coming = 0.f;
  auto look_ahead = [&](int step) {  // what must be known before the inputs of a step can be asked for
    if (step < segment.to) {
      if constexpr (INDEXED) { image = index[step]; task = (int)args.task[step]; }
      if constexpr (LOSS == CROSS_ENTROPY) next_target = (int)targets[step];
    }
  };
  Input in;
  look_ahead(segment.from);
  target = next_target;
  ask(args, own.row, segment.from, image, task, in);
  look_up(args, in);
  answer(in, own.rate, args.start + segment.from + 1);
  look_ahead(segment.from + 1);
  if (t < SCALARS) coming = table[(i64)segment.from * SCALARS + t];
  cluster_arrive();

#pragma unroll 1
  for (int step = segment.from; step < segment.to; ++step) {
    const i64 own_step = args.start + step + 1;
    const bool goes_on = step + 1 < segment.to;
    const int target_after = next_target;
    if (goes_on) ask(args, own.row, step + 1, image, task, in);
    look_ahead(step + 2);
    __syncthreads();
    if constexpr (LOSS == MSE) if (t < OUTPUTS) memory[TARGETS_AT + t] = ((const float*)args.targets)[((i64)own.row * args.length + step) * OUTPUTS + t];
    if (t < SCALARS) {
      memory[NUMBERS + t] = coming;
      if (goes_on) coming = table[(i64)(step + 1) * SCALARS + t];
    }
    if constexpr (NOISE != NONE) if (t / 32 == THREADS / 32 - 1) {  // one warp makes the keys; the other ones read them later
      keys[0] = keys_of(own.seed, own_step);
      if constexpr (NOISE == ANTICORRELATED) keys[1] = keys_of(own.seed, own_step - 1);
    }
    forward<0>(me);
    const Verdict verdict = judge(me, target);
    loss += (double)verdict.loss; correct += verdict.correct;
    if (!finite(verdict.loss)) { diverged_at = args.start + step; break; }
    look_up(args, in);
    __syncthreads();
    backward<LAYERS - 1>(me);
    __syncthreads();
    if (goes_on) answer(in, own.rate, own_step + 1);
    float numbers[SCALARS];
    for (int i = 0; i < SCALARS; ++i) numbers[i] = memory[NUMBERS + i];
    if constexpr (FEATURES) look_at_units(me, numbers);
    reduce_all(me, numbers);
    update_all(me, numbers, noise_of(own_step, 1.38629436f));  // 2·ln 2: standard normal
    target = target_after;
    cluster_arrive();
  }
  if (diverged_at < 0) cluster_wait();
  __syncthreads();
  move<false>(me, args, segment.learner);
  if (keeps_books) {
    args.loss[segment.learner] = loss; args.correct[segment.learner] = correct;
    if (diverged_at >= 0) args.diverged_at[segment.learner] = diverged_at;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) advance(const Arguments args) {
  Thread me;
  me.rank = cluster_rank(); me.phases = 0;
  const int cluster = blockIdx.x / CLUSTER, t = threadIdx.x;
  for (int i = t; i < VECTORS_END - VECTORS_AT; i += THREADS) memory[VECTORS_AT + i] = 0.f;
  __syncthreads();
  if (t == 0) {
    for (int i = 0; i < BARRIER_COUNT; ++i) barrier_init(barrier(i));
    barriers_known();
    each_layer([&](auto layer) {
      typedef decltype(layer) L;
      barrier_expect(barrier(L::FORWARD), L::OUTPUTS * L::WINDOWS * 4);
      if constexpr (L::NUMBER + 1 < LAYERS) barrier_expect(barrier(L::BACKWARD), CLUSTER * me.rows<L::NUMBER>() * L::WINDOWS * 4);
      if constexpr (L::NUMBER + 1 < LAYERS && CURVATURE) barrier_expect(barrier(L::BEND), CLUSTER * me.rows<L::NUMBER>() * L::WINDOWS * 4);
    });
    for (int i = BARRIER_COUNT - REDUCTIONS - UNIT_REDUCTIONS; i < BARRIER_COUNT; ++i) barrier_expect(barrier(i), CLUSTER * 2 * LAYERS * 4);
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
    cluster_sync();  // all of the learner is stored, and nobody reads what the next learner will send
    if (segment.flags & TELLS && t == 0 && me.rank == 0) tell(args.told + segment.learner, args.telling);
  }
}
