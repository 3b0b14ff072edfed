// From a sample to the deltas of all layers.

// -------------------------------------------------------------------------------------------- forward, judgement, backward

// From the partial sums of an even layer's rows to its outputs.
template <int l> INLINE void outputs_of_rows(Thread& me) {
  typedef Layer<l> L;
  rows_done<l>(me, [&](int row, int j, float sum) {
    const float a = L::BIAS < 0 ? sum : sum + memory[L::BIAS_WORDS + row];
    if constexpr (l + 1 < LAYERS) { if (j == 0) memory[L::H + row] = active<L::ACTIVATION>(a, L::SLOPE); }
    else for (int to = j; to < CLUSTER; to += 8) send1(memory + OUTPUTS_AT + me.first<l>() + row, barrier(GATHER), to, __float_as_int(a));
  });
  if constexpr (l + 1 == LAYERS) {
    // A CTA without outputs says that it has come so far: others may now overwrite what it has received before.
    if constexpr (L::OUTPUTS < CLUSTER)
      if (me.rows<l>() == 0 && threadIdx.x < CLUSTER) send1(memory + OUTPUTS_AT + L::OUTPUTS + me.rank - me.first<l>(), barrier(GATHER), threadIdx.x, 0);
    me.receive(GATHER, (L::OUTPUTS < CLUSTER ? CLUSTER : L::OUTPUTS) * 4);
  }
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
// Through an activation: from the gradient, and then the curvature, of a unit's output to those of its pre-activation.
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
// From layer l's deltas to those of the preceding layers. meanwhile() runs while the first sums are exchanged.
template <int l, class Meanwhile> INLINE void backward(Thread& me, Meanwhile meanwhile) {
  if constexpr (l == 0) meanwhile();
  else {
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
      weighted_sums<l>(me, L::BACKWARD, L::BACKWARD_BUFFER, false, meanwhile);
      for (int k = threadIdx.x; k < L::INPUTS; k += THREADS) put_delta<Before>(k, received<l>(L::BACKWARD_BUFFER, k));
      if constexpr (CURVATURE) {
        __syncthreads();
        weighted_sums<l, true>(me, L::BEND, L::BEND_BUFFER, false);
        for (int k = threadIdx.x; k < L::INPUTS; k += THREADS) put_curvature<Before>(k, received<l>(L::BEND_BUFFER, k));
      }
    }
    __syncthreads();
    if constexpr (L::TURNED) backward<l - 1>(me, meanwhile); else backward<l - 1>(me, Nothing());
  }
}
