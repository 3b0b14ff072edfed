// GPU-specific parts: approximate functions, shared memory, warps, and communication among the CTAs of a cluster.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE __device__ __forceinline__

// ------------------------------------------------------------------------------------------------------------- functions

INLINE float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float sine(float x) { float y; asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float cosine(float x) { float y; asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// As in torch: NaN if an argument is NaN.
INLINE float larger(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
INLINE float smaller(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
// a if |x| < bound, otherwise b; without a branch, which would make the lanes of a warp diverge.
INLINE float chosen_near(float x, float bound, float a, float b) { float y; asm("{\n.reg .pred near;\nsetp.lt.f32 near, %1, %2;\nselp.f32 %0, %3, %4, near;\n}" : "=f"(y) : "f"(fabsf(x)), "f"(bound), "f"(a), "f"(b)); return y; }

// ---------------------------------------------------------------------------------------------------------- shared memory

extern __shared__ __align__(16) float memory[];
INLINE u64* barrier(int i) { return (u64*)(memory + BARRIERS) + i; }

INLINE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// if (wanted) *to = v; without a branch, across which instructions would not be interleaved.
INLINE void put_if(bool wanted, float* to, float v) { asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted st.shared.f32 [%0], %1;\n}" ::"r"(shared(to)), "f"(v), "r"((u32)wanted) : "memory"); }

// ------------------------------------------------------------------------------------------------ talking to the cluster

INLINE u32 at(u32 address, u32 rank) { u32 there; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank)); return there; }
INLINE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
// In two parts: others may overwrite what was read before, but need not see what was written. Without .relaxed, every warp would wait for
// a fence of all its memory accesses. It is not needed: a value that has been used has been read.
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
INLINE void barrier_init(u64* b) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(b)) : "memory"); }
INLINE void barriers_known() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void barrier_expect(u64* b, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(b)), "r"(bytes) : "memory"); }
INLINE void barrier_wait(u64* b, u32 phase) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(shared(b)), "r"(phase) : "memory");
}
// Sending signals the receiver's barrier. A cluster of one CTA writes to itself and uses a plain barrier (see receive).
INLINE void send4(float* to, u64* barrier, u32 rank, const float* v) {
  if constexpr (CLUSTER == 1) *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at(shared(to), rank)), "r"(__float_as_int(v[0])), "r"(__float_as_int(v[1])), "r"(__float_as_int(v[2])), "r"(__float_as_int(v[3])), "r"(at(shared(barrier), rank)) : "memory");
}
INLINE void send1(void* to, u64* barrier, u32 rank, int v) {
  if constexpr (CLUSTER == 1) *(int*)to = v;
  else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at(shared(to), rank)), "r"(v), "r"(at(shared(barrier), rank)) : "memory");
}

// ------------------------------------------------------------------------------------------------ talking to the clusters

INLINE void wait_until(const int* place, int value) {
  int told; do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(told) : "l"(place) : "memory"); while (told != value);
}
INLINE void tell(int* place, int value) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory"); }
