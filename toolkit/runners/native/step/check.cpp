// Bounds of everything that crosses the boundary, before anything is indexed by it.
#include <algorithm>
#include <set>
#include <string>

#include "step/adapters.h"
#include "step/plan.h"

namespace tk {
namespace {

constexpr int64_t MOST = int64_t(1) << 30;

[[noreturn]] void fail(const std::string& name, int64_t low, int64_t high, int64_t found, int64_t at = -1) {
    throw Error(name + ": expected values in [" + std::to_string(low) + ", " + std::to_string(high) + "), found " +
                std::to_string(found) + (at < 0 ? "" : " at entry " + std::to_string(at)));
}

template <class T>
void within(const char* name, const T* values, int64_t n, int64_t low, int64_t high) {
    if (n < 0 || n > MOST) fail(std::string("length of ") + name, 0, MOST, n);
    if (n > 0 && !values) throw Error(std::string(name) + ": missing");
    for (int64_t i = 0; i < n; i++)
        if (values[i] < low || values[i] >= high) fail(name, low, high, int64_t(values[i]), n > 1 ? i : -1);
}

void check_csr(const char* name, const int32_t* ptr, int64_t rows, int64_t size) {
    if (!ptr) throw Error(std::string(name) + ": missing");
    if (ptr[0] != 0 || ptr[rows] != size) throw Error(std::string(name) + ": does not span its ids");
    for (int64_t i = 0; i < rows; i++)
        if (ptr[i] > ptr[i + 1]) throw Error(std::string(name) + ": not ascending at row " + std::to_string(i));
}

void check_group(const Program& p, const StepArrays& in, int64_t g) {
    const Group& group = p.groups[g];
    const int64_t bs = p.block_size, width = in.table_width[g];
    if (!group.data) throw Error("the cache is not allocated");
    within("length of block_tables", &width, 1, 0, MOST);
    const int32_t* table = in.block_tables[g];
    if (group.state) {
        if (width < 2) throw Error("block_tables: expected the slots that states are read from and written to");
        std::set<int32_t> written;
        for (int64_t s = 0; s < in.seqs; s++) {
            const bool begun = in.seq_lens[s] > in.cu_seqlens[s + 1] - in.cu_seqlens[s];
            within("block_tables", table + s * width, 1, begun ? 0 : -1, group.blocks);
            within("block_tables", table + s * width + 1, 1, 0, group.blocks);
            if (!written.insert(table[s * width + 1]).second) throw Error("block_tables: two sequences write to one slot");
        }
        return;
    }
    within("slot_mapping", in.slot_mapping[g], in.tokens, 0, group.blocks * bs);
    for (int64_t s = 0; s < in.seqs; s++) {
        const int64_t length = in.seq_lens[s], fresh = in.cu_seqlens[s + 1] - in.cu_seqlens[s];
        if (length > width * bs)
            throw Error("block_tables: " + std::to_string(width) + " blocks hold no " + std::to_string(length) +
                        " tokens (sequence " + std::to_string(s) + ")");
        int64_t first = 0;
        if (group.window > 0 && length - fresh - group.window + 1 > 0) first = (length - fresh - group.window + 1) / bs;
        const int64_t last = (length + bs - 1) / bs;
        if (last > first) within("block_tables", table + s * width + first, last - first, 0, group.blocks);
        const int64_t head = std::min((group.sink_tokens + bs - 1) / bs, first);
        if (head > 0) within("block_tables", table + s * width, head, 0, group.blocks);
    }
}

// Tokens see up to themselves at least, and what runs together fits a chunk.
void check_reach(const Program& p, const StepArrays& in) {
    for (int64_t s = 0; s < in.seqs; s++) {
        const int64_t shift = in.seq_lens[s] - in.cu_seqlens[s + 1];
        int64_t run = 0, before = 0;
        for (int64_t t = in.cu_seqlens[s]; t < in.cu_seqlens[s + 1]; t++) {
            const int64_t least = std::max(before, t + 1 + shift);
            within("reach", in.reach + t, 1, least, in.seq_lens[s] + 1);
            before = in.reach[t];
            run = before > t + 1 + shift ? run + 1 : 0;
            if (run >= p.chunk) throw Error("reach: more than " + std::to_string(p.chunk) + " tokens see each other");
        }
    }
}

void check_views(const Program& p, const StepArrays& in) {
    if ((in.new_size || in.views_size) && !p.kept) throw Error("views: the model has no layers that look at pictures");
    within("views.new", in.new_pictures, 2 * in.new_size, 0, MOST);
    within("views.gone", in.gone, in.gone_size, 0, MOST);
    within("views.tokens", in.views, 2 * in.views_size, 0, in.tokens + 1);
    within("views.seen", in.seen, in.seen_size, 0, MOST);
    int64_t rows = 0, behind = 0;
    for (int64_t i = 0; i < in.new_size; i++) {
        within("views.new", in.new_pictures + 2 * i + 1, 1, 1, MOST);
        rows += in.new_pictures[2 * i + 1];
    }
    if (rows != in.rows_size) fail("views.rows", rows, rows + 1, in.rows_size);
    if (!in.views_size) return;
    check_csr("views.ptr", in.view_ptr, in.views_size, in.seen_size);
    for (int64_t i = 0; i < in.views_size; i++) {
        const int64_t from = in.views[2 * i], to = in.views[2 * i + 1];
        if (from < behind || from >= to) throw Error("views.tokens: not ascending at entry " + std::to_string(i));
        if (in.view_ptr[i] == in.view_ptr[i + 1]) throw Error("views.ptr: no picture at entry " + std::to_string(i));
        behind = to;
    }
}

void check_sampling(const Program& p, const StepArrays& in, const StepResults& out) {
    const int64_t n = in.rows;
    const void* needed[] = {in.temperature, in.top_k, in.top_p, in.min_p, in.repetition, in.presence,
                            in.frequency, in.seed, in.position, in.logprobs, out.tokens, out.logprob, out.bad};
    if (n > 0)
        for (const void* x : needed)
            if (!x) throw Error("sampling: an array is missing");
    within("sampling.history_ids", in.history_ids, in.history_size, 0, p.vocab);
    within("sampling.bias_ids", in.bias_ids, in.bias_size, 0, p.vocab);
    check_csr("sampling.history_ptr", in.history_ptr, n, in.history_size);
    check_csr("sampling.bias_ptr", in.bias_ptr, n, in.bias_size);
    if (in.history_size > 0 && !in.history_count) throw Error("sampling.history_count: missing");
    if (in.bias_size > 0 && !in.bias_values) throw Error("sampling.bias_values: missing");
    if (out.top_width > 0 && n > 0 && (!out.top_ids || !out.top_logprobs)) throw Error("top_ids: missing");
}

}  // namespace

void check_step(const Program& p, const StepArrays& in, const StepResults& out, int64_t previous) {
    if (in.groups != int64_t(p.groups.size()))
        throw Error("block_tables: expected " + std::to_string(p.groups.size()) + " groups, found " + std::to_string(in.groups));
    within("number of tokens", &in.tokens, 1, 0, MOST);
    within("number of sequences", &in.seqs, 1, 0, MOST);
    within("number of sampled rows", &in.rows, 1, 0, MOST);
    within("number of top log-probabilities", &out.top_width, 1, 0, p.vocab + 1);
    within("from_previous", in.from_previous, in.tokens, -1, previous);
    for (int64_t t = 0; t < in.tokens; t++)
        if (in.from_previous[t] < 0 && (in.token_ids[t] < 0 || in.token_ids[t] >= p.vocab))
            fail("token_ids", 0, p.vocab, in.token_ids[t], t);
    if (in.fills) {
        if (in.rows || in.logits_size || in.hidden_size || in.aux_size || in.target_size || in.routes_size || in.embeds_size != in.tokens)
            throw Error("fills: expected a row for each token, and nothing that is asked for");
        for (const Sublayer& s : p.sublayers)
            if (const Attention* a = std::get_if<Attention>(&s.mixer); a ? a->settles() || !a->k.present() : !std::holds_alternative<Mlp>(s.mixer))
                throw Error("fills: the model has layers of another kind than plain attention and MLPs");
    }
    if (in.axes != 1 && in.axes != 3) throw Error("positions: expected 1 or 3 of a token, found " + std::to_string(in.axes));
    within("positions", in.positions, in.axes * in.tokens, 0, MOST);
    within("cu_seqlens", in.cu_seqlens, in.seqs + 1, 0, in.tokens + 1);
    within("seq_lens", in.seq_lens, in.seqs, 1, MOST);
    within("rope_set", in.rope_set, in.seqs, 0, 2);
    if (in.adapter) within("adapter", in.adapter, in.seqs, -1, AdapterTable::SLOTS);
    if (in.rope_length) within("rope_length", in.rope_length, in.tokens, 0, MOST);
    if (in.cu_seqlens[0] != 0 || in.cu_seqlens[in.seqs] != in.tokens) throw Error("cu_seqlens: does not span the tokens");
    for (int64_t s = 0; s < in.seqs; s++) {
        const int64_t fresh = int64_t(in.cu_seqlens[s + 1]) - in.cu_seqlens[s];
        if (fresh < 1) throw Error("cu_seqlens: sequence " + std::to_string(s) + " has no tokens");
        if (fresh > in.seq_lens[s]) throw Error("seq_lens: sequence " + std::to_string(s) + " has fewer tokens in all than new ones");
    }
    if (in.reach) check_reach(p, in);
    if (p.positions) within("positions", in.positions, in.tokens, 0, p.positions.size / p.hidden - p.offset);
    if (in.types) within("types", in.types, in.tokens, 0, std::max<int64_t>(p.types.size / p.hidden, 1));
    for (int64_t g = 0; g < in.groups; g++) {
        check_group(p, in, g);
        within("copy_blocks", in.copies[g], in.copies_size[g] * 2, 0, p.groups[g].blocks);
    }
    within("sample_index", in.sample_index, in.rows, 0, in.tokens);
    within("logits_index", in.logits_index, in.logits_size, 0, in.tokens);
    within("hidden_index", in.hidden_index, in.hidden_size, 0, in.tokens);
    within("aux_index", in.aux_index, in.aux_size, 0, in.tokens);
    within("aux_layers", in.aux_sublayers, in.aux_sublayers_size, 0, int64_t(p.sublayers.size()) + 1);
    if (in.aux_sublayers_size > MOST_AUX) throw Error("aux_layers: expected at most " + std::to_string(MOST_AUX));
    within("target_index", in.target_index, in.target_size, 0, in.tokens);
    within("target_ids", in.target_ids, in.target_size, 0, p.vocab);
    within("routes_index", in.routes_index, in.routes_size, 0, in.tokens);
    within("embed_index", in.embed_index, in.embeds_size, 0, in.tokens);
    within("routed", in.routed, in.routed_size, 0, in.tokens);
    if (in.embeds_size > 0 && !in.embeds) throw Error("embeds: missing");
    if ((in.logits_size && !out.logits) || (in.hidden_size && !out.hidden) || (in.aux_size && in.aux_sublayers_size && !out.aux) || (in.target_size && !out.target_logprobs) ||
        (in.routes_size && p.mixtures && !out.routes))
        throw Error("outputs: an array is missing");
    check_views(p, in);
    check_sampling(p, in, out);
}

}  // namespace tk
