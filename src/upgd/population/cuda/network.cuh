// From a sample to the deltas of all layers.

// -------------------------------------------------------------------------------------------- forward, judgement, backward

// From the parts of an even layer's rows to its outputs.
template <int l> INLINE void outputs_of_rows(Thread& me) {
  typedef Layer<l> L;
  rows_done<l>(me, [&](int row, int j, float sum) {
    const float a = L::BIAS < 0 ? sum : sum + memory[L::BIAS_W + row];
    if constexpr (l + 1 < LAYERS) { if (j == 0) memory[L::H + row] = active<L::ACTIVATION>(a, L::SLOPE); }
    else for (int to = j; to < CLUSTER; to += 8) send1(memory + OUTPUTS_AT + me.first<l>() + row, barrier(GATHER), to, __float_as_int(a));
  });
  if constexpr (l + 1 == LAYERS) me.receive(GATHER, L::OUTPUTS * 4);
}
template <int l> INLINE void forward(Thread& me) {  // from layer l to the last
  if constexpr (l < LAYERS) {
    typedef Layer<l> L;
    if constexpr (L::TURNED) {
      weighted_sums<l>(me, L::FORWARD, L::FORWARD_BUFFER, true);
      for (int k = threadIdx.x; k < L::OUTPUTS; k += THREADS) {
        const float a = received<l>(L::FORWARD_BUFFER, k);
        if constexpr (l + 1 < LAYERS) memory[L::H + k] = active<L::ACTIVATION>(a, L::SLOPE); else memory[OUTPUTS_AT + k] = a;
      }
      __syncthreads();
    } else {
      dots<l>(me);
      __syncthreads();
      outputs_of_rows<l>(me);
      if constexpr (l + 1 < LAYERS) __syncthreads();
    }
    forward<l + 1>(me);
  }
}
struct Verdict { float loss; bool correct; };
INLINE float warp_sum(float v) { for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o); return v; }
// Every warp looks at all outputs, so that all threads know the loss; the first one writes down the deltas.
INLINE Verdict judge(Thread& me, int target) {
  typedef Layer<LAYERS - 1> L;
  constexpr int EACH = (L::OUTPUTS + 31) / 32;
  const int lane = threadIdx.x & 31;
  float v[EACH], delta[EACH];
  Verdict verdict;
#pragma unroll
  for (int i = 0; i < EACH; ++i) v[i] = lane + 32 * i < L::OUTPUTS ? memory[OUTPUTS_AT + lane + 32 * i] : -3.402823466e38f;
  if constexpr (LOSS == CROSS_ENTROPY) {
    float largest = v[0], total = 0.f; int place = 1 << 20;
#pragma unroll
    for (int i = 1; i < EACH; ++i) largest = fmaxf(largest, v[i]);
    largest = unordered(__reduce_max_sync(~0u, ordered(largest)));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int o = lane + 32 * i;
      delta[i] = o < L::OUTPUTS ? __expf(v[i] - largest) : 0.f; total += delta[i];
      if (o < L::OUTPUTS && v[i] == largest) place = min(place, o);
    }
    total = warp_sum(total);
    verdict.loss = (largest - memory[OUTPUTS_AT + target]) + logf(total);
    verdict.correct = __reduce_min_sync(~0u, place) == target;
    const float share = __fdividef(1.f, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) delta[i] = fmaf(delta[i], share, lane + 32 * i == target ? -1.f : 0.f);
  } else {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int o = lane + 32 * i;
      const float error = o < L::OUTPUTS ? v[i] - memory[TARGETS_AT + o] : 0.f;
      total = fmaf(error, error, total); delta[i] = error * (2.f / L::OUTPUTS);
    }
    verdict.loss = warp_sum(total) * (1.f / L::OUTPUTS); verdict.correct = false;
  }
  if (threadIdx.x < 32) {
    const int from = L::TURNED ? 0 : me.first<LAYERS - 1>(), count = L::TURNED ? L::OUTPUTS : me.rows<LAYERS - 1>();
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (u32(lane + 32 * i - from) < u32(count)) memory[L::D + lane + 32 * i - from] = delta[i];
  }
  return verdict;
}
template <int l> INLINE void backward(Thread& me) {  // from layer l's deltas to those of the layers before
  if constexpr (l > 0) {
    typedef Layer<l> L; typedef Layer<l - 1> Before;
    if constexpr (L::TURNED) {
      dots<l>(me);
      __syncthreads();
      rows_done<l>(me, [&](int row, int j, float sum) {
        if (j == 0) memory[Before::D + row] = sum * rise<Before::ACTIVATION>(memory[Before::H + row], Before::SLOPE);
      });
    } else {
      weighted_sums<l>(me, L::BACKWARD, L::BACKWARD_BUFFER, false);
      for (int k = threadIdx.x; k < L::INPUTS; k += THREADS)
        memory[Before::D + k] = received<l>(L::BACKWARD_BUFFER, k) * rise<Before::ACTIVATION>(memory[Before::H + k], Before::SLOPE);
    }
    __syncthreads();
    backward<l - 1>(me);
  }
}

