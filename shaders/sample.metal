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

// An unsigned integer whose order is that of the floats.
inline uint ordered(float v) {
    const uint bits = as_type<uint>(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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

// sample_pick: one threadgroup applies top-k, top-p and min-p to the masses, draws, and ends the step.
//   grid: (1, 1, 1)
//   bytes: logits = 4
//   bytes: ring = 8
//   reads: step = 24
//   used: encode_tail
KERNEL(sample_pick, 8)(
    device const uint*         mass     [[buffer(0)]],  // [vocab]
    device const float*        adjusted [[buffer(1)]],  // [vocab]
    device const float*        logits   [[buffer(2)]],  // [sessions, GENERATIONS, vocab]
    device const float*        stats    [[buffer(3)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const uint*         indices  [[buffer(4)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    device const SampleParams* params   [[buffer(5)]],  // [sessions]
    device StepState*          step     [[buffer(6)]],  // [1]
    device uint*               tokens   [[buffer(7)]],  // [1]
    device uint*               ring     [[buffer(8)]],  // [TOKEN_RING, 2]
    constant sample_args&      args     [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH;
    SHARED atomic_uint bins[256];
    SHARED uint part[SIMDS * 2];
    SHARED uint sums[THREADS];
    inputs_ready();
    device const SampleParams* p = params + step->session;
    const uint vocab = args.vocab, top_k = p->top_k;
    const float top_p = p->top_p, min_p = p->min_p;
    sample_floor least;
    least.logit = 0;
    least.mass = 1;
    if (top_k > 0 && top_k < vocab)
        least.logit = select_value<THREADS, true>(mass, adjusted, vocab, least, top_k, bins, tid);
    const uint2 left = kept_mass<SIMDS>(mass, adjusted, vocab, least, part, tid, lane, simd);
    if (top_p < 1) {
        const uint goal = min(max(uint(top_p * float(left[0])), 1u), left[0]);
        least.mass = max(1u, select_value<THREADS, false>(mass, adjusted, vocab, least, goal, bins, tid));
    }
    least.mass = max(least.mass, min(uint(min_p * float(left[1])), left[1]));  // fp32 may round up
    const uint total = kept_mass<SIMDS>(mass, adjusted, vocab, least, part, tid, lane, simd)[0];
    // Each thread owns a run of ids; the first run whose running sum exceeds the draw holds the token.
    const uint run = (vocab + THREADS - 1) / THREADS, first = min(tid * run, vocab), last = min(first + run, vocab);
    uint sum = 0;
    for (uint i = first; i < last; i++) sum += kept_at(mass, adjusted, i, least);
    sums[tid] = sum;
    const logit_stats raw = join_stats(stats, indices, (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 1.0f, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        uint draw = mulhi(philox(p->seed_low, p->seed_high, step->position + step->rows), total), t = 0;
        while (t + 1 < THREADS && sums[t] <= draw) draw -= sums[t++];
        uint token = min(t * run, vocab - 1);
        for (uint i = token; i < vocab; i++) {
            const uint m = kept_at(mass, adjusted, i, least);
            token = i;
            if (m > draw) break;
            draw -= m;
        }
        const float logit = logits[state_next(step) * vocab + token];
        finish_step(step, tokens, ring, token, logit - raw.most - precise::log(raw.sum));
    }
    outputs_follow();
}
