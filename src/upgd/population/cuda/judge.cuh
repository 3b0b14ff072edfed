// The loss, whether the prediction is correct, and the deltas of the last layer.

struct Verdict { float loss; bool correct; };
INLINE float warp_sum(float v) { for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o); return v; }
// Every warp reads all outputs, so that all threads know the loss; the first one writes the deltas.
template <class Thread> INLINE Verdict judge(Thread& me, int target) {
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
    const int from = L::TURNED ? 0 : me.template first<LAYERS - 1>(), count = L::TURNED ? L::OUTPUTS : me.template rows<LAYERS - 1>();
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (u32(lane + 32 * i - from) < u32(count)) {
      memory[L::D + lane + 32 * i - from] = delta[i];
      if constexpr (CURVATURE) memory[L::C + lane + 32 * i - from] = bend[i];
    }
  }
  return verdict;
}
