// A detector of races in shared memory, for emulated_machine.h. Every thread has a clock, and knows how far the clocks of the others had
// come when it last heard of them. Two accesses race if one of them writes and the thread of the later one has not heard of the earlier
// one. Threads hear of each other where the kernel synchronizes them, and nowhere else: in which order they happen to run is irrelevant.
#ifdef RACES
#include <dlfcn.h>

#include <set>

constexpr u32 CLOCKS = 2 * CLUSTER * THREADS;  // two for a thread: of its writes, which are even, and of its reads
typedef std::vector<u32> Times;                // then those of asynchronous stores: the phases of the mbarriers that count them
inline Times never() { return Times(CLOCKS + CLUSTER * 32); }
inline void learn(Times& own, const Times& other, bool of_reads_only = false) {
  for (u32 i = 0; i < own.size(); ++i) if (!of_reads_only || (i < CLOCKS && i % 2)) own[i] = max(own[i], other[i]);
}

struct Watcher {
  u32 number; Times known = never();
  Watcher(u32 thread) : number(2 * thread) { tick(); }
  void tick() { ++known[number]; ++known[number + 1]; }
};
// What synchronizes threads. Those that have arrived are heard of by those that pass after it has opened.
struct Gate { u32 stores = 0, phase = 1; Times arriving = never(), arrived = never(); };
inline void counts_stores(Gate& gate, u32 number) { gate.stores = CLOCKS + number; }
inline void arrive(Watcher& me, Gate& gate, bool of_reads_only = false) { learn(gate.arriving, me.known, of_reads_only); me.tick(); }
inline void open(Gate& gate) { gate.arrived = gate.arriving; if (gate.stores) gate.arrived[gate.stores] = gate.phase++; }
inline void pass(Watcher& me, const Gate& gate) { learn(me.known, gate.arrived); }

enum Kind { READ, WRITE, ATOMIC };
struct Access { u32 who = 0, when = 0; Kind kind = READ; const char* code = nullptr; };
struct Word { Access write; std::vector<Access> reads; };
struct Watched { std::vector<Word> words = std::vector<Word>(FLOATS); };
struct Race {
  u64 before, after; Kind kind_before, kind_after;
  bool operator<(const Race& other) const { return std::memcmp(this, &other, sizeof other) < 0; }
};
static std::set<Race> races;
inline bool excused(const Access& a, const Access& b) {
  if (a.kind == ATOMIC && b.kind == ATOMIC) return true;
  // Lanes of a warp may store the same value with one instruction.
  return a.kind == WRITE && b.kind == WRITE && a.code == b.code && b.who < CLOCKS && a.who / 64 == b.who / 64;
}
inline void watch(Word& word, const Times& known, const Access& now) {
  auto check = [&](const Access& before) {
    if (before.when <= known[before.who] || excused(before, now)) return;
    Dl_info library;
    dladdr(&races, &library);
    const char* start = (const char*)library.dli_fbase;
    races.insert({u64(before.code - start), u64(now.code - start), before.kind, now.kind});
  };
  check(word.write);
  if (now.kind == READ) {
    for (Access& before : word.reads) if (before.who == now.who) { before = now; return; }
    word.reads.push_back(now);
  } else {
    for (const Access& before : word.reads) check(before);
    word.reads.clear();
    word.write = now;
  }
}
// By a thread, or by an asynchronous store of it, which a gate counts.
inline void watch(Watched& memory_of, Watcher& me, i64 place, int bytes, Kind kind, const void* code, const Gate* gate = nullptr) {
  const u32 who = gate ? gate->stores : me.number + (kind == READ), when = gate ? gate->phase : me.known[who];
  for (i64 i = place / 4; i <= (place + bytes - 1) / 4; ++i) watch(memory_of.words[i], me.known, {who, when, kind, (const char*)code});
}
#else
struct Watcher { Watcher(u32) {} };
struct Gate {};
struct Watched {};
enum Kind { READ, WRITE, ATOMIC };
inline void counts_stores(Gate&, u32) {}
inline void arrive(Watcher&, Gate&, bool = false) {}
inline void open(Gate&) {}
inline void pass(Watcher&, const Gate&) {}
inline void watch(Watched&, Watcher&, i64, int, Kind, const void*, const Gate* = nullptr) {}
#endif
