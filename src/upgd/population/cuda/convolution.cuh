// Networks that start with convolutions: from a sample to the gradients.

// ----------------------------------------------------------------------------------------------- what a block of threads has

INLINE int first_of(int units, int rank) { return units * rank / CLUSTER; }

struct Thread {
  int rank; u32 phases;

  template <int l> INLINE int first() const { return first_of(Layer<l>::OUTPUTS, rank); }
  template <int l> INLINE int rows() const { return first_of(Layer<l>::OUTPUTS, rank + 1) - first_of(Layer<l>::OUTPUTS, rank); }
  INLINE void receive(int which, u32 bytes) {
    if constexpr (CLUSTER == 1) { __syncthreads(); return; }
    barrier_wait(barrier(which), phases >> which & 1);
    phases ^= 1u << which;
    if (threadIdx.x == 0) barrier_expect(barrier(which), bytes);
  }
};
template <int l> INLINE int owner(int unit) {
  int rank = 0;
#pragma unroll
  for (int c = 1; c < CLUSTER; ++c) rank += unit >= first_of(Layer<l>::OUTPUTS, c);
  return rank;
}
// Where position p of a unit is among the next layer's inputs, or the outputs.
template <int l> INLINE int place_of(int unit, int p) {
  typedef Layer<l> L;
  if constexpr (l + 1 == LAYERS) return OUTPUTS_AT + unit;
  else {
    typedef Layer<l + 1> Next;
    if constexpr (!Next::CONVOLUTION) return Next::IN + unit * L::WINDOWS + p;
    else return Next::IN + unit * Next::PLANE + (p / L::ACROSS + Next::PAD_Y) * Next::PITCH + p % L::ACROSS + Next::PAD_X;
  }
}
INLINE float dot4(const float (&w)[4], const float (&x)[4]) { return fmaf(w[3], x[3], fmaf(w[2], x[2], fmaf(w[1], x[1], __fmul_rn(w[0], x[0])))); }

// ---------------------------------------------------------------------------------------------------------------- forward

// Max pooling of a window's outputs, the first in case of ties; also stores the input position of its filter, y and x in one number.
template <int l> INLINE void choose(int row, int p, const float (&v)[Layer<l>::POOL_Y][Layer<l>::POOL_X]) {
  typedef Layer<l> L;
  const float bias = L::BIAS < 0 ? 0.f : memory[L::BIAS_WORDS + row];
  float largest = v[0][0] + bias; int y = 0, x = 0;
#pragma unroll
  for (int i = 0; i < L::POOL_Y; ++i)
#pragma unroll
    for (int j = 0; j < L::POOL_X; ++j) {
      const float a = v[i][j] + bias;
      if (a > largest || a != a) { largest = a; y = i; x = j; }
    }
  y = (p / L::ACROSS * L::POOL_SY + y) * L::STRIDE_Y; x = (p % L::ACROSS * L::POOL_SX + x) * L::STRIDE_X;
  const int at = L::SEEN + 2 * (row * L::WINDOWS + p);
  ((int*)memory)[at] = y << 16 | x;
  memory[at + 1] = active<L::ACTIVATION>(largest, L::SLOPE);
}
// Some neighbours in memory.
template <int COUNT> INLINE void take(const float* from, float* to) {
  if constexpr (COUNT == 4) get4(from, to);
  else if constexpr (COUNT == 2) { const float2 two = *(const float2*)from; to[0] = two.x; to[1] = two.y; }
  else *to = *from;
}
// A thread computes the outputs of TILE units in one window; if there are few of those, for some of the input channels.
template <int l> INLINE void convolve(Thread& me) {
  typedef Layer<l> L;
  constexpr int TILES = (L::ROWS + L::TILE - 1) / L::TILE, EACH = (L::CHANNELS + L::SPLIT - 1) / L::SPLIT;
  constexpr int PATCH_Y = (L::POOL_Y - 1) * L::STRIDE_Y + L::KERNEL_Y, PATCH_X = (L::POOL_X - 1) * L::STRIDE_X + L::KERNEL_X;
  const int rows = me.rows<l>(), first = me.first<l>();
#pragma unroll 1
  for (int i = threadIdx.x; i < L::SPLIT * TILES * L::WINDOWS; i += THREADS) {
    const int p = i % L::WINDOWS, tile = i / L::WINDOWS % TILES, split = i / (L::WINDOWS * TILES);
    const float* x = memory + L::IN + split * EACH * L::PLANE + p / L::ACROSS * (L::POOL_SY * L::STRIDE_Y * L::PITCH) + p % L::ACROSS * (L::POOL_SX * L::STRIDE_X);
    const float* w = memory + L::WORDS_AT + tile * L::TILE * L::STEP + split * EACH * L::TAP_STEP;
    float sum[L::TILE][L::POOL_Y][L::POOL_X];
#pragma unroll
    for (int r = 0; r < L::TILE; ++r) for (int a = 0; a < L::POOL_Y; ++a) for (int b = 0; b < L::POOL_X; ++b) sum[r][a][b] = 0.f;
    const int channels = min(EACH, L::CHANNELS - split * EACH);
#pragma unroll 1
    for (int c = 0; c < channels; ++c, x += L::PLANE, w += L::TAP_STEP) {
      float weight[L::TILE][L::TAP_STEP];
#pragma unroll
      for (int r = 0; r < L::TILE; ++r)
#pragma unroll
        for (int k = 0; k < L::TAP_STEP; k += L::AT_ONCE) take<L::AT_ONCE>(w + r * L::STEP + k, &weight[r][k]);
#pragma unroll
      for (int y = 0; y < PATCH_Y; ++y) {
        float v[PATCH_X];
#pragma unroll
        for (int k = 0; k < PATCH_X; k += L::PAIRED ? 2 : 1) take<L::PAIRED ? 2 : 1>(x + y * L::PITCH + k, &v[k]);
#pragma unroll
        for (int a = 0; a < L::POOL_Y; ++a) {
          const int ky = y - a * L::STRIDE_Y;
          if (ky < 0 || ky >= L::KERNEL_Y) continue;
#pragma unroll
          for (int r = 0; r < L::TILE; ++r)
#pragma unroll
            for (int kx = 0; kx < L::KERNEL_X; ++kx) {
#pragma unroll
              for (int b = 0; b < L::POOL_X; ++b) sum[r][a][b] = fmaf(weight[r][ky * L::KERNEL_X + kx], v[b * L::STRIDE_X + kx], sum[r][a][b]);
            }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < L::TILE; ++r) {
      const int row = tile * L::TILE + r;
      if constexpr (L::SPLIT == 1) { if (row < rows) choose<l>(row, p, sum[r]); }
      else
        for (int a = 0; a < L::POOL_Y; ++a)
          for (int b = 0; b < L::POOL_X; ++b)
            memory[PART + (((split * TILES + tile) * L::TILE + r) * L::POOL_Y * L::POOL_X + a * L::POOL_X + b) * L::WINDOWS + p] = sum[r][a][b];
    }
  }
  __syncthreads();
  if constexpr (L::SPLIT > 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * L::WINDOWS; i += THREADS) {
      const int row = i / L::WINDOWS, p = i % L::WINDOWS;
      float sum[L::POOL_Y][L::POOL_X];
#pragma unroll
      for (int a = 0; a < L::POOL_Y; ++a)
#pragma unroll
        for (int b = 0; b < L::POOL_X; ++b) {
          sum[a][b] = 0.f;
#pragma unroll
          for (int split = 0; split < L::SPLIT; ++split)
            sum[a][b] += memory[PART + ((split * TILES * L::TILE + row) * L::POOL_Y * L::POOL_X + a * L::POOL_X + b) * L::WINDOWS + p];
        }
      choose<l>(row, p, sum);
    }
    __syncthreads();
  }
  if constexpr (l == 0) cluster_wait();  // the others have read the data of the previous step
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * L::WINDOWS; i += THREADS) {
    const int to_place = place_of<l>(first + i / L::WINDOWS, i % L::WINDOWS), value = ((int*)memory)[L::SEEN + 2 * i + 1];
#pragma unroll
    for (int to = 0; to < CLUSTER; ++to) send1(memory + to_place, barrier(L::FORWARD), to, value);
  }
}
// A warp computes some rows at a time.
template <int l> INLINE void multiply(Thread& me) {
  typedef Layer<l> L;
  constexpr int WARPS = THREADS / 32, ALL = (L::ROWS + WARPS - 1) / WARPS, AT_ONCE = ALL < 4 ? ALL : 4;
  const int rows = me.rows<l>(), first = me.first<l>(), warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = warp; base < rows; base += WARPS * AT_ONCE) {
    float sum[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) sum[r] = 0.f;
#pragma unroll
    for (int q = 0; q < L::STEP; q += 128) {
      const int k = q + 4 * lane;
      if (k >= L::STEP) continue;
      float x[4]; get4(memory + L::IN + k, x);
#pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        float w[4]; get4(memory + L::WORDS_AT + min(base + r * WARPS, rows - 1) * L::STEP + k, w);
        sum[r] += dot4(w, x);
      }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      const int row = base + r * WARPS;
      float a = warp_sum(sum[r]);
      if (row < rows && L::BIAS >= 0) a += memory[L::BIAS_WORDS + row];
      if (row < rows && lane < CLUSTER) send1(memory + place_of<l>(first + row, 0), barrier(L::FORWARD), lane, __float_as_int(active<L::ACTIVATION>(a, L::SLOPE)));
    }
  }
}
template <int l> INLINE void forward(Thread& me) {
  typedef Layer<l> L;
  if constexpr (L::CONVOLUTION) convolve<l>(me); else multiply<l>(me);
  me.receive(L::FORWARD, L::OUTPUTS * L::WINDOWS * 4);
  if constexpr (l + 1 < LAYERS) forward<l + 1>(me);
}

// --------------------------------------------------------------------------------------------------------------- backward

// Write the contributions of a CTA's units to the gradients of the layer's inputs to PART; groups are N apart.
template <int l, bool SQUARED> INLINE void of_inputs(Thread& me) {
  typedef Layer<l> L;
  const int rows = me.rows<l>();
  if constexpr (L::CONVOLUTION) {
    constexpr int PIXELS = L::HEIGHT * L::WIDTH, TILES = (L::CHANNELS + L::BACK_TILE - 1) / L::BACK_TILE;
#pragma unroll 1
    for (int i = threadIdx.x; i < L::BACK_GROUPS * TILES * PIXELS; i += THREADS) {
      const int pixel = i % PIXELS, tile = i / PIXELS % TILES, group = i / (PIXELS * TILES);
      const int y = pixel / L::WIDTH + L::PAD_Y, x = pixel % L::WIDTH + L::PAD_X;
      // The windows that may have chosen an output that depends on the pixel, and their maximum number.
      constexpr int MOST_Y = ((L::KERNEL_Y - 1) / L::STRIDE_Y + L::POOL_Y - 1) / L::POOL_SY + 1, MOST_X = ((L::KERNEL_X - 1) / L::STRIDE_X + L::POOL_X - 1) / L::POOL_SX + 1;
      const int from_y = max(0, max(0, y - L::KERNEL_Y + L::STRIDE_Y) / L::STRIDE_Y - L::POOL_Y + L::POOL_SY) / L::POOL_SY;
      const int from_x = max(0, max(0, x - L::KERNEL_X + L::STRIDE_X) / L::STRIDE_X - L::POOL_X + L::POOL_SX) / L::POOL_SX;
      float sum[L::BACK_TILE];
#pragma unroll
      for (int c = 0; c < L::BACK_TILE; ++c) sum[c] = 0.f;
#pragma unroll 1
      for (int row = group; row < rows; row += L::BACK_GROUPS) {
        const float* w = memory + L::WORDS_AT + row * L::STEP + tile * L::BACK_TILE * L::TAP_STEP;
#pragma unroll
        for (int i = 0; i < MOST_Y; ++i)
#pragma unroll
          for (int j = 0; j < MOST_X; ++j) {
            const int window = row * L::WINDOWS + min(from_y + i, L::DOWN - 1) * L::ACROSS + min(from_x + j, L::ACROSS - 1);
            float seen[2]; take<2>(memory + L::SEEN + 2 * window, seen);
            const int at = __float_as_int(seen[0]), ky = y - (at >> 16), kx = x - (at & 0xffff);
            const bool sees = from_y + i < L::DOWN && from_x + j < L::ACROSS && u32(ky) < u32(L::KERNEL_Y) && u32(kx) < u32(L::KERNEL_X);
            const float d = sees ? SQUARED ? memory[L::C + window] : seen[1] : 0.f;
            const int tap = sees ? ky * L::KERNEL_X + kx : 0;
#pragma unroll
            for (int c = 0; c < L::BACK_TILE; ++c)
              if (TILES == 1 || tile * L::BACK_TILE + c < L::CHANNELS) { const float v = w[c * L::TAP_STEP + tap]; sum[c] = fmaf(d, SQUARED ? v * v : v, sum[c]); }
          }
      }
#pragma unroll
      for (int c = 0; c < L::BACK_TILE; ++c)
        if (TILES == 1 || tile * L::BACK_TILE + c < L::CHANNELS) memory[PART + (group * L::CHANNELS + tile * L::BACK_TILE + c) * PIXELS + pixel] = sum[c];
    }
  } else {
    constexpr int QUADS = L::STEP / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < L::BACK_GROUPS * QUADS; i += THREADS) {
      const int k = i % QUADS * 4, group = i / QUADS;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
      for (int row = group; row < rows; row += L::BACK_GROUPS) {
        float w[4]; get4(memory + L::WORDS_AT + row * L::STEP + k, w);
        const float d = memory[(SQUARED ? L::C : L::D) + row];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = fmaf(d, SQUARED ? w[j] * w[j] : w[j], sum[j]);
      }
      put4(memory + PART + group * L::STEP + k, sum);
    }
  }
}
// Send to the owners of the preceding layer.
template <int l, bool SQUARED> INLINE void send_back(Thread& me) {
  typedef Layer<l> L; typedef Layer<l - 1> Before;
  of_inputs<l, SQUARED>(me);
  __syncthreads();
  constexpr int N = Before::OUTPUTS * Before::WINDOWS, APART = L::CONVOLUTION ? N : L::STEP;
  constexpr int BUFFER = SQUARED ? Before::BEND_BUFFER : Before::BACKWARD_BUFFER, BARRIER = SQUARED ? Before::BEND : Before::BACKWARD;
#pragma unroll 1
  for (int k = threadIdx.x; k < N; k += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < L::BACK_GROUPS; ++g) sum += memory[PART + g * APART + k];
    const int to = owner<l - 1>(k / Before::WINDOWS), own = k - first_of(Before::OUTPUTS, to) * Before::WINDOWS;
    send1(memory + BUFFER + me.rank * Before::ROWS * Before::WINDOWS + own, barrier(BARRIER), to, __float_as_int(sum));
  }
}
template <class L> INLINE float received(int buffer, int i) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < CLUSTER; ++c) sum += memory[buffer + c * L::ROWS * L::WINDOWS + i];
  return sum;
}
// Through an activation: from the gradients, and curvatures, of a layer's outputs to those of its pre-activations.
template <int l> INLINE void take_back(Thread& me) {
  typedef Layer<l> L;
  const int count = me.rows<l>() * L::WINDOWS, first = me.first<l>();
  me.receive(L::BACKWARD, CLUSTER * count * 4);
  if constexpr (CURVATURE) me.receive(L::BEND, CLUSTER * count * 4);
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float gradient = received<L>(L::BACKWARD_BUFFER, i), h = memory[place_of<l>(first + i / L::WINDOWS, i % L::WINDOWS)];
    const float slope = rise<L::ACTIVATION>(h, L::SLOPE), d = gradient * slope;
    memory[L::CONVOLUTION ? L::SEEN + 2 * i + 1 : L::D + i] = d;
    if constexpr (FEATURES) memory[L::CONVOLUTION ? PART + i : L::GATE_GRADIENT + i] = gradient * h;
    if constexpr (CURVATURE) {
      const float curvature = received<L>(L::BEND_BUFFER, i);
      memory[L::C + i] = slope * slope * curvature - (L::ACTIVATION == TANH ? 2.f * h * d : 0.f);
      if constexpr (FEATURES) memory[L::CONVOLUTION ? PART + L::ROWS * L::WINDOWS + i : L::GATE_CURVATURE + i] = curvature * (h * h);
    }
  }
  __syncthreads();
  if constexpr (FEATURES && L::CONVOLUTION) {  // a channel has one gate
    for (int row = threadIdx.x / 32; row < me.rows<l>(); row += THREADS / 32) {
      float gradient = 0.f, curvature = 0.f;
      for (int p = threadIdx.x & 31; p < L::WINDOWS; p += 32) {
        gradient += memory[PART + row * L::WINDOWS + p];
        if constexpr (CURVATURE) curvature += memory[PART + (L::ROWS + row) * L::WINDOWS + p];
      }
      gradient = warp_sum(gradient); curvature = warp_sum(curvature);
      if ((threadIdx.x & 31) == 0) { memory[L::GATE_GRADIENT + row] = gradient; if constexpr (CURVATURE) memory[L::GATE_CURVATURE + row] = curvature; }
    }
    __syncthreads();
  }
}
// Gradients of filters: a thread sums over windows for one position of the filter and some input channels.
template <int l, bool SQUARED> INLINE void of_weights(Thread& me) {
  typedef Layer<l> L;
  constexpr int TILES = (L::CHANNELS + L::OWN_TILE - 1) / L::OWN_TILE, WARPS = THREADS / 32, APART = L::ROWS * L::INPUTS;
  const int rows = me.rows<l>();
#pragma unroll 1
  for (int i = threadIdx.x; i < L::OWN_GROUPS * L::ROWS * TILES * L::OWN_LANES; i += THREADS) {
    const int tap = i % L::OWN_LANES, tile = i / L::OWN_LANES % TILES, row = i / (L::OWN_LANES * TILES) % L::ROWS, group = i / (L::OWN_LANES * TILES * L::ROWS);
    if (row >= rows || tap >= L::TAPS) continue;
    const float* x = memory + L::IN + tile * L::OWN_TILE * L::PLANE + tap / L::KERNEL_X * L::PITCH + tap % L::KERNEL_X;
    float sum[L::OWN_TILE];
#pragma unroll
    for (int c = 0; c < L::OWN_TILE; ++c) sum[c] = 0.f;
#pragma unroll 4
    for (int p = group; p < L::WINDOWS; p += L::OWN_GROUPS) {
      float seen[2]; take<2>(memory + L::SEEN + 2 * (row * L::WINDOWS + p), seen);
      const int at = __float_as_int(seen[0]);
      const float d = SQUARED ? memory[L::C + row * L::WINDOWS + p] : seen[1];
      const float* v = x + (at >> 16) * L::PITCH + (at & 0xffff);
#pragma unroll
      for (int c = 0; c < L::OWN_TILE; ++c)
        if (TILES == 1 || tile * L::OWN_TILE + c < L::CHANNELS) sum[c] = fmaf(d, SQUARED ? v[c * L::PLANE] * v[c * L::PLANE] : v[c * L::PLANE], sum[c]);
    }
#pragma unroll
    for (int c = 0; c < L::OWN_TILE; ++c)
      if (TILES == 1 || tile * L::OWN_TILE + c < L::CHANNELS) memory[PART + group * APART + row * L::INPUTS + (tile * L::OWN_TILE + c) * L::TAPS + tap] = sum[c];
  }
  for (int row = WARPS - 1 - threadIdx.x / 32; row < rows && L::BIAS >= 0; row += WARPS) {
    float sum = 0.f;
    for (int p = threadIdx.x & 31; p < L::WINDOWS; p += 32) sum += memory[SQUARED ? L::C + row * L::WINDOWS + p : L::SEEN + 2 * (row * L::WINDOWS + p) + 1];
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) memory[(SQUARED ? L::BIAS_CURVATURE : L::BIAS_GRADIENT) + row] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * L::INPUTS; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < L::OWN_GROUPS; ++g) sum += memory[PART + g * APART + i];
    memory[(SQUARED ? L::WEIGHT_CURVATURE : L::WEIGHT_GRADIENT) + i] = sum;
  }
}
template <int l> INLINE void backward(Thread& me) {  // from layer l's deltas to all gradients
  typedef Layer<l> L;
  if constexpr (l > 0) {
    send_back<l, false>(me);
    if constexpr (CURVATURE) { __syncthreads(); send_back<l, true>(me); }
  }
  if constexpr (L::CONVOLUTION) {  // while the sums are being exchanged
    if constexpr (l > 0) __syncthreads();
    of_weights<l, false>(me);
    if constexpr (CURVATURE) { __syncthreads(); of_weights<l, true>(me); }
  }
  if constexpr (l > 0) {
    if constexpr (FEATURES) __syncthreads();  // PART is free
    take_back<l - 1>(me);
    backward<l - 1>(me);
  }
}
