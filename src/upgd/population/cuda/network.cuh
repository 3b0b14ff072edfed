// From a sample to the deltas of all layers.

// -------------------------------------------------------------------------------------------- forward, judgement, backward

// From the parts of an even layer's rows to its outputs.
template <int l> INLINE void outputs_of_rows(Thread& me) {
  typedef Layer<l> L;
  rows_done<l>(me, [&](int row, int j, float sum) {
    const float a = L::BIAS < 0 ? sum : sum + memory[L::BIAS_WORDS + row];
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
  float v[EACH], delta[EACH], bend[EACH];
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
    for (int i = 0; i < EACH; ++i) {
      const float q = delta[i] * share;
      delta[i] = fmaf(delta[i], share, lane + 32 * i == target ? -1.f : 0.f); bend[i] = q - q * q;
    }
  } else {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int o = lane + 32 * i;
      const float error = o < L::OUTPUTS ? v[i] - memory[TARGETS_AT + o] : 0.f;
      total = fmaf(error, error, total); delta[i] = error * (2.f / L::OUTPUTS); bend[i] = 2.f / L::OUTPUTS;
    }
    verdict.loss = warp_sum(total) * (1.f / L::OUTPUTS); verdict.correct = false;
  }
  if (threadIdx.x < 32) {
    const int from = L::TURNED ? 0 : me.first<LAYERS - 1>(), count = L::TURNED ? L::OUTPUTS : me.rows<LAYERS - 1>();
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (u32(lane + 32 * i - from) < u32(count)) {
      memory[L::D + lane + 32 * i - from] = delta[i];
      if constexpr (CURVATURE) memory[L::C + lane + 32 * i - from] = bend[i];
    }
  }
  return verdict;
}
// A unit behind an activation: from the gradient, and then the curvature, of its value to those of its input.
template <class L> INLINE void put_delta(int unit, float gradient) {
  const float h = memory[L::H + unit];
  memory[L::D + unit] = gradient * rise<L::ACTIVATION>(h, L::SLOPE);
  if constexpr (FEATURES) memory[L::GATE_GRADIENT + unit] = gradient * h;
}
template <class L> INLINE void put_curvature(int unit, float curvature) {
  const float h = memory[L::H + unit], slope = rise<L::ACTIVATION>(h, L::SLOPE);
  memory[L::C + unit] = slope * slope * curvature - (L::ACTIVATION == TANH ? 2.f * h * memory[L::D + unit] : 0.f);
  if constexpr (FEATURES) memory[L::GATE_CURVATURE + unit] = curvature * (h * h);
}
template <int l> INLINE void backward(Thread& me) {  // from layer l's deltas to those of the layers before
  if constexpr (l > 0) {
    typedef Layer<l> L; typedef Layer<l - 1> Before;
    if constexpr (L::TURNED) {
      dots<l>(me);
      __syncthreads();
      rows_done<l>(me, [&](int row, int j, float sum) { if (j == 0) put_delta<Before>(row, sum); });
      if constexpr (CURVATURE) {
        __syncthreads();
        dots<l, true>(me);
        __syncthreads();
        rows_done<l>(me, [&](int row, int j, float sum) { if (j == 0) put_curvature<Before>(row, sum); });
      }
    } else {
      weighted_sums<l>(me, L::BACKWARD, L::BACKWARD_BUFFER, false);
      for (int k = threadIdx.x; k < L::INPUTS; k += THREADS) put_delta<Before>(k, received<l>(L::BACKWARD_BUFFER, k));
      if constexpr (CURVATURE) {
        __syncthreads();
        weighted_sums<l, true>(me, L::BEND, L::BEND_BUFFER, false);
        for (int k = threadIdx.x; k < L::INPUTS; k += THREADS) put_curvature<Before>(k, received<l>(L::BEND_BUFFER, k));
      }
    }
    __syncthreads();
    backward<l - 1>(me);
  }
}
