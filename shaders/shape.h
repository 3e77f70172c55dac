// shape.h -- the numbers and structs that the host and every shader share.
//
// Axis names used in shape comments: rows (tokens of this launch), hidden, heads, kv_heads, experts, used (experts per
// token), inner (expert width), vocab, pages, sessions. All arrays are row-major, the last axis fastest.
#pragma once

// The type of every input of a quantised product, and of dequantised tiles: half or bfloat.
using act_t = half;

// The model's identity: a checkpoint with other values is refused.
constant constexpr uint HEAD_DIM = 256;     // attention head
constant constexpr uint ROTARY_DIM = 64;    // leading dims of a head that rotate
constant constexpr uint DELTA_DIM = 128;    // key and value width of a delta head
constant constexpr uint CONV_WIDTH = 4;     // taps of the causal convolution
constant constexpr uint CONV_TAIL = CONV_WIDTH - 1;
constant constexpr uint QUANT_GROUP = 64;   // weights that share a scale and a bias

// Memory.
constant constexpr uint PAGE = 256;         // tokens of a KV page
constant constexpr uint GENERATIONS = 3;    // recurrent states a session keeps: two queued steps and the present one
constant constexpr uint TOKEN_RING = 64;    // finished tokens the host may fall behind

// Work split.
constant constexpr uint SIZE_UNIT = 64;     // every size of a matrix is a multiple
constant constexpr uint TILE_K = 64;        // depth of a matrix tile: one quantisation group
constant constexpr uint KV_BLOCK = 1024;    // tokens of one block of decode attention
constant constexpr uint ROUTE_BLOCK = 256;  // (row, expert) pairs that one routing threadgroup orders
constant constexpr uint VOCAB_BLOCK = 4096; // logits that one reduction threadgroup reads
constant constexpr uint CONV_ROWS = 16;     // tokens that one convolution threadgroup makes
constant constexpr uint COMBINE_COLUMNS = 256;  // columns that one combining threadgroup makes

// Limits of local arrays.
constant constexpr uint MAX_HIDDEN = 8192;
constant constexpr uint MAX_EXPERTS = 512;
constant constexpr uint MAX_USED = 32;      // experts of a token
constant constexpr uint MAX_GROUP = 8;      // query heads of a KV head
constant constexpr uint MAX_BIAS = 1024;    // logit_bias entries

// The experts' hidden activation is stored as act_t times 2^-6, so that it cannot overflow half; exact to undo.
constant constexpr uint SWIGLU_SHIFT = 64;

constant constexpr uint NO_TOKEN = 0xffffffff;

// A penalty count: whether the token is in the prompt, and how often in the output.
constant constexpr uint SEEN_IN_PROMPT = 0x8000;
constant constexpr uint COUNT_MASK = 0x7fff;

// What the launches of one step read to know where they are. The tail of a step moves it on: position += rows,
// generation + 1, rows = 1. Logits and penalty counts of the rows being computed belong to the next generation.
struct StepState {
    uint session;     // row of the page table, the state pools and the sampling parameters
    uint position;    // tokens of the session before this step's rows
    uint rows;        // tokens of this step
    uint generation;  // recurrent state that this step reads; it writes the next one
    uint last_token;  // token that the penalty counts do not hold yet, or NO_TOKEN
    uint ticket;      // tokens picked so far; its ring place is ticket % TOKEN_RING
};

struct SampleParams {
    float temperature;
    float top_p;
    float min_p;
    float presence;
    float frequency;
    float repetition;
    uint top_k;  // 0: all
    uint seed_low;
    uint seed_high;
    uint bias_count;
};
