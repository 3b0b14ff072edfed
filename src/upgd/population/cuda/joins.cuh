// Reductions of values over a warp, a tensor or a learner.

template <class Visit, int l = 0> INLINE void each_layer(Visit visit) {
  visit(Layer<l>());
  if constexpr (l + 1 < LAYERS) each_layer<Visit, l + 1>(visit);
}

// The operations: sum and maximum.
struct Sum { static constexpr bool ANY_ORDER = false; static constexpr float START = 0.f; INLINE static float of(float a, float b) { return a + b; } };
struct Largest { static constexpr bool ANY_ORDER = true; static constexpr float START = -3.402823466e38f; INLINE static float of(float a, float b) { return larger(a, b); } };
// The functions before and after the reduction.
template <class R> INLINE float measured(float value) { return R::OPERATION == NORM ? value * value : value; }
template <class R> INLINE float finished(float joined, float count) {
  if constexpr (R::OPERATION == NORM) return sqrtf(joined);
  else if constexpr (R::OPERATION == MEAN) return joined / count;
  else return joined;
}
template <class Join> INLINE float of_warp(float v) {
  if constexpr (Join::ANY_ORDER) return unordered(__reduce_max_sync(~0u, ordered(v)));
  for (int o = 16; o; o >>= 1) v = Join::of(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// From one value per warp and tensor to one per tensor, known to all CTAs: over the tensor, or over all tensors.
template <class R, class Thread> INLINE void join_tensors(Thread& me) {
  typedef typename R::Join Join;
  constexpr int TENSORS = 2 * LAYERS, WARPS = THREADS / 32;
  __syncthreads();
  for (int i = threadIdx.x; i < CLUSTER * TENSORS; i += THREADS) {
    const int tensor = i % TENSORS, to = i / TENSORS;
    float joined = Join::START;
    for (int warp = 0; warp < WARPS; ++warp) joined = Join::of(joined, memory[OF_WARPS + tensor * WARPS + warp]);
    send1(memory + R::BUFFER + me.rank * TENSORS + tensor, barrier(R::BARRIER), to, __float_as_int(joined));
  }
  me.receive(R::BARRIER, CLUSTER * TENSORS * 4);
  if (threadIdx.x < 32) {
    const int tensor = threadIdx.x;
    float joined = Join::START;
    if (tensor < TENSORS) for (int c = 0; c < CLUSTER; ++c) joined = Join::of(joined, memory[R::BUFFER + c * TENSORS + tensor]);
    if constexpr (R::OVER == LEARNER) {
      if (R::OPERATION == MAX && !finite(joined)) joined = 0.f;  // a tensor with an infinite or undefined maximum counts as zero
      joined = finished<R>(of_warp<Join>(joined), R::COUNT);
    } else each_layer([&](auto layer) {
      typedef decltype(layer) L;
      if (tensor % LAYERS == L::NUMBER) joined = finished<R>(joined, tensor < LAYERS && !R::OF_UNITS ? (float)L::INPUTS * L::OUTPUTS : (float)L::OUTPUTS);
    });
    if (tensor < TENSORS) memory[R::VALUES + tensor] = joined;
  }
  __syncthreads();
}
