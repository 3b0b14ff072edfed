// machine.cuh for a CPU: every CUDA thread is a fiber, and the clusters run one after the other. In which order the fibers of a
// cluster take turns is drawn, so that what a missing barrier lets happen does happen sooner or later. With RACES defined and
// -fsanitize=thread, whose calls are answered here, races are detected in any order; see emulated_races.h.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define INLINE inline
#define advance advance_on_chip  // the C library has another one
#define __global__
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int FLOATS = 58112;  // of a CTA's shared memory
#include "emulated_races.h"
#define UNWATCHED __attribute__((noinline, no_sanitize("thread")))  // its accesses are not reported
#define CALLER __builtin_return_address(0)

struct Meeting { int arrived[2] = {0, 0}; u64 round = 0; u32 values[2][32]; };
struct Cta {
  alignas(16) float floats[FLOATS];
  int arrived = 0, rank = 0; u64 round = 0;
  std::map<u64, Meeting> meetings;  // by warp and mask
  Gate gate, gates[32];             // of __syncthreads, and of mbarriers
  Watched watched;
};
struct Index { unsigned x; };
struct Fiber { ucontext_t context; Cta* cta; Index thread, block; bool done; std::unique_ptr<char[]> stack; Watcher watcher; u64 round = 0; };
struct Cluster { std::vector<std::unique_ptr<Cta>> ctas; int arrived = 0; u64 round = 0; Gate gate; };
static Fiber* current;
static Cluster* cluster_of_all;
static ucontext_t scheduler;
#define threadIdx (current->thread)
#define blockIdx (current->block)
#define memory (current->cta->floats)
inline void rest() { swapcontext(&current->context, &scheduler); }

inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> by); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float lg2(float x) { return log2f(x); }
inline float ex2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float root(float x) { return sqrtf(x); }
inline float sine(float x) { return sinf(x); }
inline float cosine(float x) { return cosf(x); }
inline float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline float smaller(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float chosen_near(float x, float bound, float a, float b) { return fabsf(x) < bound ? a : b; }
UNWATCHED inline int atomicMax(int* place, int value) {
  watch(current->cta->watched, current->watcher, (char*)place - (char*)memory, 4, ATOMIC, CALLER);
  const int old = *place; *place = max(old, value); return old;
}
inline void __threadfence() {}
inline void put_if(bool wanted, float* to, float v) { if (wanted) *to = v; }

inline void __syncthreads() {
  Cta& cta = *current->cta;
  const u64 round = cta.round;
  arrive(current->watcher, cta.gate);
  if (++cta.arrived == THREADS) { cta.arrived = 0; ++cta.round; open(cta.gate); }
  while (cta.round == round) rest();
  pass(current->watcher, cta.gate);
}
inline void cluster_arrive(bool relaxed = true) {
  Cluster& all = *cluster_of_all;
  current->round = all.round;
  arrive(current->watcher, all.gate, relaxed);
  if (++all.arrived == CLUSTER * THREADS) { all.arrived = 0; ++all.round; open(all.gate); }
}
inline void cluster_wait() { while (cluster_of_all->round == current->round) rest(); pass(current->watcher, cluster_of_all->gate); }
inline void cluster_sync() { cluster_arrive(false); cluster_wait(); }
inline const u32* meet(u32 mask, u32 value) {  // what the lanes of the mask have brought
  Meeting& here = current->cta->meetings[(u64)(threadIdx.x / 32) << 32 | mask];
  const u64 round = here.round, side = round & 1;
  here.values[side][threadIdx.x & 31] = value;
  if (++here.arrived[side] == __builtin_popcount(mask)) { here.arrived[side] = 0; ++here.round; }
  else while (here.round == round) rest();
  return here.values[side];
}
inline float __shfl_xor_sync(u32 mask, float v, int o) { return __uint_as_float(meet(mask, __float_as_uint(v))[(threadIdx.x & 31) ^ o]); }
inline int __reduce_max_sync(u32 mask, int v) { const u32* all = meet(mask, v); int top = (int)all[0]; for (int i = 1; i < 32; ++i) top = max(top, (int)all[i]); return top; }
inline int __reduce_min_sync(u32 mask, int v) { const u32* all = meet(mask, v); int low = (int)all[0]; for (int i = 1; i < 32; ++i) low = min(low, (int)all[i]); return low; }

// An mbarrier: bytes that are still to come, whether the one thread has said how many, and the phase.
struct Barrier { int32_t bytes : 30; u32 waits : 1, phase : 1; u32 unused; };
inline u64* barrier(int i) { return (u64*)(memory + BARRIERS) + i; }
template <class T> inline T* there(T* p, u32 rank) { return (T*)((char*)cluster_of_all->ctas[rank]->floats + ((char*)p - (char*)memory)); }
inline Gate& gate_of(u64* b, u32 rank) { return cluster_of_all->ctas[rank]->gates[b - barrier(0)]; }
UNWATCHED inline void settle(u64* b, u32 rank, int bytes, bool says) {
  Barrier& other = *(Barrier*)there(b, rank);
  other.bytes += bytes; if (says) other.waits = 0;
  arrive(current->watcher, gate_of(b, rank));
  if (!other.waits && other.bytes == 0) { other.phase ^= 1; other.waits = 1; open(gate_of(b, rank)); }
}
UNWATCHED inline void barrier_init(u64* b) { *(Barrier*)b = {0, 1, 0, 0}; }
inline void barriers_known() {}
inline void barrier_expect(u64* b, u32 bytes) { settle(b, current->cta->rank, bytes, true); }
UNWATCHED inline void barrier_wait(u64* b, u32 phase) { while (((Barrier*)b)->phase == phase) rest(); pass(current->watcher, gate_of(b, current->cta->rank)); }
UNWATCHED inline void send(void* to, u64* b, u32 rank, const void* v, int bytes) {
  const Gate* counts = CLUSTER > 1 ? &gate_of(b, rank) : nullptr;
  watch(cluster_of_all->ctas[rank]->watched, current->watcher, (char*)to - (char*)memory, bytes, WRITE, CALLER, counts);
  std::memcpy(there((char*)to, rank), v, bytes);
  if (CLUSTER > 1) settle(b, rank, -bytes, false);
}
inline void send4(float* to, u64* b, u32 rank, const float* v) { send(to, b, rank, v, 16); }
inline void send1(void* to, u64* b, u32 rank, int v) { send(to, b, rank, &v, 4); }
inline u32 cluster_rank() { return current->cta->rank; }
inline void wait_until(const int* place, int value) { if (*(volatile const int*)place != value) __builtin_trap(); }
inline void tell(int* place, int value) { *place = value; }

#ifdef RACES
UNWATCHED inline void seen(const void* at, int bytes, Kind kind, const void* code) {
  if (current && at >= memory && at < memory + FLOATS) watch(current->cta->watched, current->watcher, (char*)at - (char*)memory, bytes, kind, code);
}
extern "C" {
#define SEEN_BY_SANITIZER(BYTES) \
  UNWATCHED void __tsan_read##BYTES(void* at) { seen(at, BYTES, READ, CALLER); } \
  UNWATCHED void __tsan_write##BYTES(void* at) { seen(at, BYTES, WRITE, CALLER); } \
  UNWATCHED void __tsan_unaligned_read##BYTES(void* at) { seen(at, BYTES, READ, CALLER); } \
  UNWATCHED void __tsan_unaligned_write##BYTES(void* at) { seen(at, BYTES, WRITE, CALLER); }
SEEN_BY_SANITIZER(1) SEEN_BY_SANITIZER(2) SEEN_BY_SANITIZER(4) SEEN_BY_SANITIZER(8) SEEN_BY_SANITIZER(16)
UNWATCHED void __tsan_read_range(void* at, size_t bytes) { seen(at, bytes, READ, CALLER); }
UNWATCHED void __tsan_write_range(void* at, size_t bytes) { seen(at, bytes, WRITE, CALLER); }
UNWATCHED void __tsan_init() {}
UNWATCHED void __tsan_func_entry(void*) {}
UNWATCHED void __tsan_func_exit() {}
UNWATCHED void __tsan_vptr_read(void**) {}
UNWATCHED void __tsan_vptr_update(void**, void*) {}
UNWATCHED int races_found(Race* to, int room) {  // since the last call
  const int count = min<int>(room, races.size());
  std::copy_n(races.begin(), count, to);
  races.clear();
  return count;
}
}
#endif

struct Arguments;
static const Arguments* passed;
static void begin_fiber() { extern void call_advance(); call_advance(); current->done = true; rest(); }
extern "C" UNWATCHED void launch(const void* arguments, int clusters, u64 order) {
  passed = (const Arguments*)arguments;
  for (int number = 0; number < clusters; ++number) {
    Cluster all;
    std::vector<std::unique_ptr<Fiber>> fibers;
    cluster_of_all = &all;
    for (int rank = 0; rank < CLUSTER; ++rank) {
      all.ctas.emplace_back(new Cta);
      Cta* cta = all.ctas.back().get();
      cta->rank = rank;
      for (int i = 0; i < 32; ++i) counts_stores(cta->gates[i], 32 * rank + i);
      for (float& x : cta->floats) x = NAN;
      for (unsigned t = 0; t < THREADS; ++t) {
        const Index block = {(unsigned)(number * CLUSTER + rank)};
        fibers.emplace_back(new Fiber{{}, cta, {t}, block, false, std::unique_ptr<char[]>(new char[1 << 16]), rank * THREADS + t});
        Fiber& f = *fibers.back();
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get(); f.context.uc_stack.ss_size = 1 << 16; f.context.uc_link = nullptr;
        makecontext(&f.context, begin_fiber, 0);
      }
    }
    for (size_t running = fibers.size(); running;) {
      order = order * 6364136223846793005ull + 1442695040888963407ull;
      const size_t start = (order >> 33) % fibers.size(), back = order >> 63;
      for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& f = *fibers[back ? (start + fibers.size() - i) % fibers.size() : (start + i) % fibers.size()];
        if (f.done) continue;
        current = &f;
        swapcontext(&scheduler, &f.context);
        running -= f.done;
      }
    }
    current = nullptr;
  }
}
