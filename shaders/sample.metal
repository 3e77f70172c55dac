// sample.metal -- sampling on the device, in this order: penalties, logit bias, temperature, top-k, top-p, min-p, draw.
//
//   seen = the token is in the prompt or the output, n = times it is in the output
//   l -> (l > 0 ? l / repetition : l * repetition) if seen;  l -= frequency * n + presence * (n > 0);  l += bias
//   p = softmax(l / temperature)
// The probabilities become integers, mass = floor(p * 2^31): sums are then exact and in any order the same. Kept are
// the tokens whose adjusted logit is at least the top_k-th one, and whose mass is at least the one at which the kept
// mass reaches top_p of what top-k left, and at least min_p times the largest. Equal ones stay or go together. The draw
// takes the first token, in order of ids, whose running sum of kept masses exceeds u * total, u from Philox 4x32-10
// with key `seed` and counter `position`. Reference: transformers generation/logits_process.py; Salmon et al., Parallel
// random numbers: as easy as 1, 2, 3 (2011).
#include "reduce.h"

struct sample_args {
    uint sessions;
    uint vocab;
};

constant constexpr float WHOLE_MASS = 2147483648.0f;  // 2^31, the mass of probability 1

// sample_adjust: one threadgroup applies the penalties to VOCAB_BLOCK logits and counts the last token. Without
// penalties the counts are left alone; the host writes them anew when a session begins to use them.
//   grid: ((vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 1, 1)
//   bytes: logits = vocab * 4
//   bytes: counts = vocab * 2
//   reads: counts = vocab * 2
//   used: encode_tail
KERNEL(sample_adjust, 8)(
    device const float*        logits   [[buffer(0)]],  // [sessions, GENERATIONS, vocab]
    device const SampleParams* params   [[buffer(1)]],  // [sessions]
    device const StepState*    step     [[buffer(2)]],  // [1]
    device ushort*             counts   [[buffer(3)]],  // [sessions, GENERATIONS, vocab]
    device float*              adjusted [[buffer(4)]],  // [vocab]
    constant sample_args&      args     [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    inputs_ready();
    device const SampleParams* p = params + step->session;
    device const float* from = logits + state_next(step) * args.vocab;
    device const ushort* now = counts + state_now(step) * args.vocab;
    device ushort* next = counts + state_next(step) * args.vocab;
    const float presence = p->presence, frequency = p->frequency, repetition = p->repetition;
    const bool penalised = presence != 0 || frequency != 0 || repetition != 1;
    const uint last = min(group.x * VOCAB_BLOCK + VOCAB_BLOCK, args.vocab);
    for (uint i = group.x * VOCAB_BLOCK + tid; i < last; i += THREADS) {
        float l = from[i];
        if (penalised) {
            ushort count = now[i];
            if (i == step->last_token && (count & COUNT_MASK) != COUNT_MASK) count = ushort(count + 1);
            next[i] = count;
            const uint n = count & COUNT_MASK;
            if (count != 0) l = l > 0 ? l / repetition : l * repetition;
            if (n != 0) l -= frequency * float(n) + presence;
        }
        adjusted[i] = l;
    }
    outputs_follow();
}

// sample_bias: adds the session's logit biases; ids are distinct.
//   grid: (1, 1, 1)
//   bytes: adjusted = 4 * MAX_BIAS
//   reads: adjusted = 4 * MAX_BIAS
//   used: encode_tail
KERNEL(sample_bias, 8)(
    device const uint*         ids      [[buffer(0)]],  // [sessions, MAX_BIAS]
    device const float*        values   [[buffer(1)]],  // [sessions, MAX_BIAS]
    device const SampleParams* params   [[buffer(2)]],  // [sessions]
    device const StepState*    step     [[buffer(3)]],  // [1]
    device float*              adjusted [[buffer(4)]],  // [vocab]
    constant sample_args&      args     [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    inputs_ready();
    const uint session = step->session, count = min(params[session].bias_count, MAX_BIAS);
    for (uint i = tid; i < count; i += THREADS) {
        const uint id = ids[session * MAX_BIAS + i];
        if (id < args.vocab) adjusted[id] += values[session * MAX_BIAS + i];
    }
    outputs_follow();
}

// The factor of the logits: 1 / temperature, or 1 where the choice is greedy. Bounded, so that its product with a
// difference of zero stays zero.
inline float sharpness(float temperature) { return temperature > 0 ? min(1.0f / temperature, 1e9f) : 1.0f; }

// sample_reduce: as head_reduce for the adjusted logits at the session's temperature.
//   grid: ((vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 1, 1)
//   used: encode_tail
KERNEL(sample_reduce, 8)(
    device const float*        adjusted [[buffer(0)]],  // [vocab]
    device const SampleParams* params   [[buffer(1)]],  // [sessions]
    device const StepState*    step     [[buffer(2)]],  // [1]
    device float*              stats    [[buffer(3)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device uint*               indices  [[buffer(4)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    constant sample_args&      args     [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    SHARED uint at[SIMDS];
    inputs_ready();
    const uint first = group.x * VOCAB_BLOCK;
    const float scale = sharpness(params[step->session].temperature);
    const logit_stats s = block_stats<SIMDS>(adjusted, first, min(first + VOCAB_BLOCK, args.vocab), scale, part, at,
                                             tid, lane, simd);
    if (tid == 0) {
        stats[group.x * 2] = s.most;
        stats[group.x * 2 + 1] = s.sum;
        indices[group.x] = s.index;
    }
    outputs_follow();
}

// sample_mass: one threadgroup turns VOCAB_BLOCK adjusted logits into integer masses.
//   grid: ((vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 1, 1)
//   used: encode_tail
KERNEL(sample_mass, 8)(
    device const float*        adjusted [[buffer(0)]],  // [vocab]
    device const float*        stats    [[buffer(1)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const uint*         indices  [[buffer(2)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    device const SampleParams* params   [[buffer(3)]],  // [sessions]
    device const StepState*    step     [[buffer(4)]],  // [1]
    device uint*               mass     [[buffer(5)]],  // [vocab]
    constant sample_args&      args     [[buffer(6)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    inputs_ready();
    const float scale = sharpness(params[step->session].temperature);
    const logit_stats s = join_stats(stats, indices, (args.vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, scale, lane);
    const float unit = WHOLE_MASS / s.sum;
    const uint last = min(group.x * VOCAB_BLOCK + VOCAB_BLOCK, args.vocab);
    for (uint i = group.x * VOCAB_BLOCK + tid; i < last; i += THREADS) {
        const float m = precise::exp(scale * (adjusted[i] - s.most)) * unit;
        mass[i] = m > 0 ? uint(min(m, WHOLE_MASS)) : 0;  // nothing for what is not a number
    }
    outputs_follow();
}

// Philox 4x32-10, first word.
inline uint philox(uint key0, uint key1, uint counter) {
    uint4 c = uint4(counter, 0, 0, 0);
    for (uint i = 0; i < 10; i++) {
        const uint high0 = mulhi(0xd2511f53u, c[0]), low0 = 0xd2511f53u * c[0];
        const uint high1 = mulhi(0xcd9e8d57u, c[2]), low1 = 0xcd9e8d57u * c[2];
        c = uint4(high1 ^ c[1] ^ key0, low1, high0 ^ c[3] ^ key1, low0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return c[0];
}

// What top-k, top-p and min-p leave: tokens whose logit and mass are at least these.
struct sample_floor {
    uint logit;  // as ordered() tells it
    uint mass;
};

// An unsigned integer whose order is that of the floats, zeros being equal; what is not a number is the least.
inline uint ordered(float v) {
    const uint bits = as_type<uint>(v + 0.0f);
    return v != v ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token's mass, or 0 if it is not left.
inline uint kept_at(device const uint* mass, device const float* adjusted, uint i, sample_floor least) {
    return mass[i] >= least.mass && ordered(adjusted[i]) >= least.logit ? mass[i] : 0;
}

// The largest v such that the tokens of value >= v weigh at least `goal`. With COUNT the value is the logit, as
// ordered() tells it, and every token weighs 1; else value and weight are the mass that is left. A radix search, eight
// bits at a time from the top; bins has 256 values. All tokens together must reach the goal.
template <uint THREADS, bool COUNT>
inline uint select_value(device const uint* mass, device const float* adjusted, uint vocab, sample_floor least,
                         uint goal, threadgroup atomic_uint* bins, uint tid) {
    uint prefix = 0, wanted = goal;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint b = tid; b < 256; b += THREADS) atomic_store_explicit(&bins[b], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < vocab; i += THREADS) {
            const uint v = COUNT ? ordered(adjusted[i]) : kept_at(mass, adjusted, i, least);
            if (shift == 24 || v >> (shift + 8) == prefix >> (shift + 8))
                atomic_fetch_add_explicit(&bins[(v >> shift) & 255], COUNT ? 1u : v, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint digit = 255, above = 0;
        for (;; digit--) {
            const uint here = atomic_load_explicit(&bins[digit], memory_order_relaxed);
            if (here >= wanted - above || digit == 0) break;
            above += here;
        }
        wanted -= above;
        prefix |= digit << shift;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return prefix;
}

// The mass that the kept tokens reach of `sum`, which is left; and the least mass beside a largest one. Products are
// fp32, which may round up.
inline uint top_p_goal(float top_p, uint sum) { return min(max(uint(top_p * float(sum)), 1u), sum); }
inline uint min_p_mass(float min_p, uint most) { return min(uint(min_p * float(most)), most); }

// Sum and largest of the masses that are left, over the threadgroup.
template <uint SIMDS>
inline uint2 kept_mass(device const uint* mass, device const float* adjusted, uint vocab, sample_floor least,
                       threadgroup uint* part, uint tid, uint lane, uint simd) {
    uint sum = 0, most = 0;
    for (uint i = tid; i < vocab; i += SIMDS * SIMD_WIDTH) {
        const uint m = kept_at(mass, adjusted, i, least);
        sum += m;
        most = max(most, m);
    }
    sum = simd_sum(sum);
    most = simd_max(most);
    if (lane == 0) {
        part[simd * 2] = sum;
        part[simd * 2 + 1] = most;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0;
    most = 0;
    for (uint j = 0; j < SIMDS; j++) {
        sum += part[j * 2];
        most = max(most, part[j * 2 + 1]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return uint2(sum, most);
}

constant constexpr uint MAX_CHOICES = 512;  // of a list in threadgroup memory

// Tokens to choose from, so few that each can be compared with each: in any order, ids and what they have.
struct choice_list {
    threadgroup uint* ids;
    threadgroup uint* logits;  // as ordered() tells them
    threadgroup uint* mass;    // 0 once a token is not left
    uint count;
};

// The top_k-th largest of the blocks' maxima, of which as many tokens are at least as large; top_k <= blocks. For a
// threadgroup; `found` has one value.
inline float block_floor(device const float* stats, uint blocks, uint top_k, threadgroup float* found, uint tid,
                         uint threads) {
    for (uint b = tid; b < blocks; b += threads) {
        uint larger = 0, equal = 0;
        for (uint j = 0; j < blocks; j++) {
            larger += stats[j * 2] > stats[b * 2] ? 1 : 0;
            equal += stats[j * 2] == stats[b * 2] ? 1 : 0;
        }
        if (larger < top_k && top_k <= larger + equal) found[0] = stats[b * 2];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return found[0];
}

// Lists the tokens whose logits are at least `floor`, as far as there is room; returns how many there are.
template <uint THREADS>
inline uint list_choices(device const uint* mass, device const float* adjusted, uint vocab, float floor,
                         choice_list list, threadgroup atomic_uint* counter, uint tid) {
    constexpr uint TURN = 8;  // on their way at once
    if (tid == 0) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = tid; first < vocab; first += TURN * THREADS) {
        float v[TURN];
        for (uint j = 0; j < TURN; j++) v[j] = first + j * THREADS < vocab ? adjusted[first + j * THREADS] : -INFINITY;
        for (uint j = 0; j < TURN; j++) {
            const uint id = first + j * THREADS;
            if (id >= vocab || !(v[j] >= floor)) continue;
            const uint place = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
            if (place >= MAX_CHOICES) continue;
            list.ids[place] = id;
            list.logits[place] = ordered(v[j]);
            list.mass[place] = mass[id];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint count = atomic_load_explicit(counter, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the counter may be used for something else
    return count;
}

// Sum and largest of the listed masses; every thread adds all of them.
inline uint2 listed_mass(choice_list list) {
    uint sum = 0, most = 0;
    for (uint j = 0; j < list.count; j++) {
        sum += list.mass[j];
        most = max(most, list.mass[j]);
    }
    return uint2(sum, most);
}

// Takes the masses of listed tokens below `least`. For a threadgroup.
inline void drop_below(choice_list list, uint least, uint tid, uint threads) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < list.count; i += threads)
        if (list.mass[i] < least) list.mass[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What sample_pick does, among listed tokens: among them are all that top-k leaves. The chosen one to `chosen`.
inline void pick_listed(choice_list list, uint top_k, float top_p, float min_p, uint random, threadgroup uint* chosen,
                        threadgroup atomic_uint* floor, uint tid, uint threads) {
    if (tid == 0) atomic_store_explicit(floor, 1u, memory_order_relaxed);
    for (uint i = tid; i < list.count; i += threads) {
        uint larger = 0;
        for (uint j = 0; j < list.count; j++) larger += list.logits[j] > list.logits[i] ? 1 : 0;
        if (larger >= top_k) list.mass[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint2 left = listed_mass(list);
    if (top_p < 1) {
        const uint goal = top_p_goal(top_p, left[0]);
        for (uint i = tid; i < list.count; i += threads) {
            uint weight = 0, larger = 0;
            for (uint j = 0; j < list.count; j++) {
                weight += list.mass[j] >= list.mass[i] ? list.mass[j] : 0;
                larger += list.mass[j] > list.mass[i] ? list.mass[j] : 0;
            }
            if (larger < goal && goal <= weight)
                atomic_store_explicit(floor, max(1u, list.mass[i]), memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const uint smallest = min_p_mass(min_p, left[1]);
    drop_below(list, max(atomic_load_explicit(floor, memory_order_relaxed), smallest), tid, threads);
    const uint draw = mulhi(random, listed_mass(list)[0]);
    for (uint i = tid; i < list.count; i += threads) {
        uint before = 0;
        for (uint j = 0; j < list.count; j++) before += list.ids[j] < list.ids[i] ? list.mass[j] : 0;
        if (before <= draw && draw - before < list.mass[i]) chosen[0] = list.ids[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What sample_pick does, among all tokens.
template <uint SIMDS>
inline void pick_any(device const uint* mass, device const float* adjusted, uint vocab, uint top_k, float top_p,
                     float min_p, uint random, threadgroup uint* chosen, threadgroup atomic_uint* bins,
                     threadgroup uint* part, threadgroup uint* sums, uint tid, uint lane, uint simd) {
    constexpr uint THREADS = SIMDS * SIMD_WIDTH;
    sample_floor least;
    least.logit = 0;
    least.mass = 1;
    if (top_k < vocab) least.logit = select_value<THREADS, true>(mass, adjusted, vocab, least, top_k, bins, tid);
    const uint2 left = kept_mass<SIMDS>(mass, adjusted, vocab, least, part, tid, lane, simd);
    if (top_p < 1) {
        const uint goal = top_p_goal(top_p, left[0]);
        least.mass = max(1u, select_value<THREADS, false>(mass, adjusted, vocab, least, goal, bins, tid));
    }
    least.mass = max(least.mass, min_p_mass(min_p, left[1]));
    const uint total = kept_mass<SIMDS>(mass, adjusted, vocab, least, part, tid, lane, simd)[0];
    // Each thread owns a run of ids; the first run whose running sum exceeds the draw holds the token.
    const uint run = (vocab + THREADS - 1) / THREADS, first = min(tid * run, vocab), last = min(first + run, vocab);
    uint sum = 0;
    for (uint i = first; i < last; i++) sum += kept_at(mass, adjusted, i, least);
    sums[tid] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        uint draw = mulhi(random, total), t = 0;
        while (t + 1 < THREADS && sums[t] <= draw) draw -= sums[t++];
        uint token = min(t * run, vocab - 1);
        for (uint i = token; i < vocab; i++) {
            const uint m = kept_at(mass, adjusted, i, least);
            token = i;
            if (m > draw) break;
            draw -= m;
        }
        chosen[0] = token;
    }
}

// sample_pick: one threadgroup applies top-k, top-p and min-p to the masses, draws, and ends the step. If top-k leaves
// few tokens, it looks at the others once.
//   grid: (1, 1, 1)
//   bytes: logits = 4
//   bytes: ring = 8
//   reads: step = 24
//   used: encode_tail
KERNEL(sample_pick, 32)(
    device const uint*         mass         [[buffer(0)]],   // [vocab]
    device const float*        adjusted     [[buffer(1)]],   // [vocab]
    device const float*        choice_stats [[buffer(2)]],   // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const float*        logits       [[buffer(3)]],   // [sessions, GENERATIONS, vocab]
    device const float*        stats        [[buffer(4)]],   // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const uint*         indices      [[buffer(5)]],   // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    device const SampleParams* params       [[buffer(6)]],   // [sessions]
    device StepState*          step         [[buffer(7)]],   // [1]
    device uint*               tokens       [[buffer(8)]],   // [1]
    device uint*               ring         [[buffer(9)]],   // [TOKEN_RING, 2]
    constant sample_args&      args         [[buffer(10)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(32), THREADS = SIMDS * SIMD_WIDTH;
    SHARED atomic_uint bins[256];
    SHARED uint part[SIMDS * 2];
    SHARED uint sums[THREADS];
    SHARED uint ids[MAX_CHOICES];
    SHARED uint choice_logits[MAX_CHOICES];
    SHARED uint choice_mass[MAX_CHOICES];
    SHARED float found[1];
    SHARED uint chosen[1];
    inputs_ready();
    device const SampleParams* p = params + step->session;
    const uint vocab = args.vocab, blocks = (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    const uint top_k = p->top_k > 0 ? p->top_k : vocab;
    const uint random = philox(p->seed_low, p->seed_high, step->position + step->rows);
    choice_list list = {ids, choice_logits, choice_mass, 0};
    if (top_k <= blocks) {
        const float floor = block_floor(choice_stats, blocks, top_k, found, tid, THREADS);
        list.count = list_choices<THREADS>(mass, adjusted, vocab, floor, list, bins, tid);
    }
    if (tid == 0) chosen[0] = vocab - 1;
    if (list.count > 0 && list.count <= MAX_CHOICES)
        pick_listed(list, top_k, p->top_p, p->min_p, random, chosen, bins + 1, tid, THREADS);
    else
        pick_any<SIMDS>(mass, adjusted, vocab, top_k, p->top_p, p->min_p, random, chosen, bins, part, sums, tid, lane,
                        simd);
    const logit_stats raw = join_stats(stats, indices, blocks, 1.0f, lane);
    if (tid == 0) {
        const float logit = logits[state_next(step) * vocab + chosen[0]];
        finish_step(step, tokens, ring, chosen[0], logit - raw.most - precise::log(raw.sum));
    }
    outputs_follow();
}
