// What is decided of a step before threads run it: which rows leave the layers, and how a chunk of tokens is cut for threads.
#pragma once

#include <utility>
#include <vector>

#include "step/program.h"
#include "step/step.h"

namespace tk {

constexpr int64_t CHUNK = 512;        // tokens that go through the layers together
constexpr int64_t PART = 128;         // tokens of a part, about, where threads take parts of a chunk through whole layers
constexpr int64_t SMALL = 4;          // up to so many tokens every thread prepares inputs for itself
constexpr int64_t QUERY_ROWS = 48;    // query rows of one attention item

// Which rows leave the layers and who asked for them: (row, index of the request), sorted.
struct Plan {
    std::vector<int64_t> rows;  // flat tokens; those with logits first
    int64_t logit_rows = 0;
    float* hidden = nullptr;  // [rows][hidden_ld], after the final norm
    std::vector<int64_t> hidden_row;
    std::vector<std::pair<int64_t, int64_t>> samples, logits, targets;
};

// The flat tokens whose logits or hidden states are needed, ascending, and where each request for one finds it.
Plan make_plan(const StepArrays& in);

constexpr int64_t CUTS = 256;            // parts of a phase's work, at most
constexpr int64_t PART_BYTES = 1 << 18;  // weights of a part, at least, where threads share them by their speed

// Units [0, n) of a phase, cut into parts that threads take one after the other: part i is [at[i], at[i + 1]).
struct Shares {
    int64_t parts = 0;
    int64_t at[CUTS + 1] = {};
};

// Parts that get smaller, down to `least` units: large ones first, so that few streams of weights begin anew, and small ones last, so
// that a thread whose core is slower, or shared with others, leaves more to the rest.
Shares tapered(int64_t n, int64_t threads, int64_t least);

// Tokens of the chunk that one thread takes through layers alone, and their query blocks.
struct RowPart {
    Range rows;
    int64_t first_block, last_block;
    int64_t first_look, last_look;
};

// Tokens [first, last) of sequence `seq`, consecutive, one attention item a kv head.
struct QueryBlock {
    int64_t seq, first, last;
};

// Query blocks [first, last) of Cut::in_order whose sequences begin with the same blocks of the cache: each of the first `tiles`
// tiles is read once for all of them. A block that shares nothing is one by itself.
struct SharedPrefix {
    int64_t first, last, tiles;
};

struct Adapter;

// How a chunk of tokens, flat ones from `first` on, is cut for the threads.
struct Cut {
    int64_t first = 0, count = 0;
    std::vector<int64_t> seq_of;      // of the chunk's tokens
    std::vector<QueryBlock> spans;    // of each sequence all tokens in the chunk
    std::vector<QueryBlock> blocks;
    std::vector<uint8_t> seen;        // of the chunk's tokens, whether they have linears of pictures; empty where none does
    std::vector<const Adapter*> adapters;  // of the chunk's tokens, or of the rows that leave the layers; empty where none has one
    std::vector<int32_t> view_of;     // of the chunk's tokens, -1: looks at no picture
    std::vector<QueryBlock> looks;    // as blocks, of tokens of one view: `seq` is its number
    std::vector<RowPart> parts;       // empty where every phase is shared out for itself
    std::vector<QueryBlock> in_order;  // blocks as their tokens lie, and …
    std::vector<SharedPrefix> shared;  // … which of them read a prefix together; empty where none do
    std::vector<int64_t> runs;        // of blocks, one a thread, equally long to read; empty where blocks are taken singly
    bool heavy = false;               // the first block costs more than a thread's share of all
};

// Sequences, parts, query blocks and runs of tokens [first, first + count). Long ones first: threads take them as they get
// free.
Cut cut_chunk(const Program& p, const StepArrays& in, int64_t first, int64_t count, int64_t threads);

// Where the chunk that begins with flat token `first` ends: tokens that see each other stay together.
int64_t chunk_end(const StepArrays& in, int64_t first);

// Numbers that the partial states of the widest layer take when the chunk has few tokens (attend_split); else 0.
int64_t partial_floats(const Program& p, const StepArrays& in, const Cut& cut);

}  // namespace tk
