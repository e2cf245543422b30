#include "step/plan.h"

#include <algorithm>

namespace tk {

Plan make_plan(const StepArrays& in) {
    Plan plan;
    std::vector<uint8_t> wanted(size_t(in.tokens), 0);  // 1 = hidden only, 2 = logits
    for (int64_t i = 0; i < in.hidden_size; i++) wanted[size_t(in.hidden_index[i])] |= 1;
    for (int64_t i = 0; i < in.rows; i++) wanted[size_t(in.sample_index[i])] |= 2;
    for (int64_t i = 0; i < in.logits_size; i++) wanted[size_t(in.logits_index[i])] |= 2;
    for (int64_t i = 0; i < in.target_size; i++) wanted[size_t(in.target_index[i])] |= 2;
    std::vector<int64_t> row(size_t(in.tokens), -1);
    for (int64_t t = 0; t < in.tokens; t++)
        if (wanted[size_t(t)] & 2) {
            row[size_t(t)] = int64_t(plan.rows.size());
            plan.rows.push_back(t);
        }
    plan.logit_rows = int64_t(plan.rows.size());
    for (int64_t t = 0; t < in.tokens; t++)
        if (wanted[size_t(t)] == 1) {
            row[size_t(t)] = int64_t(plan.rows.size());
            plan.rows.push_back(t);
        }
    for (int64_t i = 0; i < in.hidden_size; i++) plan.hidden_row.push_back(row[size_t(in.hidden_index[i])]);
    auto users = [&](const int32_t* index, int64_t n) {
        std::vector<std::pair<int64_t, int64_t>> u;
        for (int64_t i = 0; i < n; i++) u.emplace_back(row[size_t(index[i])], i);
        std::sort(u.begin(), u.end());
        return u;
    };
    plan.samples = users(in.sample_index, in.rows);
    plan.logits = users(in.logits_index, in.logits_size);
    plan.targets = users(in.target_index, in.target_size);
    return plan;
}

namespace {

// Parts of the chunk for threads that take rows through whole layers; none where there are too few rows for that.
void cut_parts(Cut& cut, const Program& p, int64_t threads) {
    if (p.ranks > 1 || cut.count < threads * PART / 2) return;
    for (const Sublayer& s : p.sublayers)
        if (!std::holds_alternative<Attention>(s.mixer) && !std::holds_alternative<Cross>(s.mixer) && !std::holds_alternative<Mlp>(s.mixer) &&
            !std::holds_alternative<PerLayer>(s.mixer))
            return;
    const int64_t n = ((cut.count + PART - 1) / PART + threads - 1) / threads * threads;
    for (int64_t i = 0; i < n; i++) cut.parts.push_back({{cut.count * i / n, cut.count * (i + 1) / n}, 0, 0, 0, 0});
}

// Positions that the tokens of a block see, in all.
int64_t cost(const StepArrays& in, const QueryBlock& b) {
    return (in.seq_lens[b.seq] - (in.cu_seqlens[b.seq + 1] - b.last)) * (b.last - b.first);
}

// Query blocks of flat tokens [first, last): whole rows of one sequence, about QUERY_ROWS query rows each.
void cut_blocks(Cut& cut, const StepArrays& in, int64_t first, int64_t last, int64_t tokens) {
    for (int64_t t = first; t < last;) {
        const int64_t s = cut.seq_of[size_t(t - cut.first)], end = std::min<int64_t>({in.cu_seqlens[s + 1], last, t + tokens});
        cut.blocks.push_back({s, t, end});
        t = end;
    }
}

// Which pictures the chunk's tokens look at.
void find_views(Cut& cut, const StepArrays& in) {
    cut.view_of.assign(size_t(cut.count), -1);
    for (int64_t v = 0; v < in.views_size; v++)
        for (int64_t t = std::max<int64_t>(in.views[2 * v], cut.first); t < std::min<int64_t>(in.views[2 * v + 1], cut.first + cut.count); t++)
            cut.view_of[size_t(t - cut.first)] = int32_t(v);
}

// Which of the chunk's tokens have linears of pictures.
void find_seen(Cut& cut, const StepArrays& in) {
    for (int64_t i = 0; i < in.routed_size; i++) {
        const int64_t t = in.routed[i] - cut.first;
        if (t < 0 || t >= cut.count) continue;
        cut.seen.resize(size_t(cut.count), 0);
        cut.seen[size_t(t)] = 1;
    }
}

// Blocks of flat tokens [first, last) that look at pictures, at most `tokens` of one view each.
void cut_looks(Cut& cut, int64_t first, int64_t last, int64_t tokens) {
    auto view = [&](int64_t t) { return cut.view_of[size_t(t - cut.first)]; };
    for (int64_t t = first, end; t < last; t = end) {
        end = t + 1;
        if (view(t) < 0) continue;
        while (end < last && end < t + tokens && view(end) == view(t)) end++;
        cut.looks.push_back({view(t), t, end});
    }
}

// How many tiles from the first on two sequences have in the same blocks of the cache, in every group of attention without a window.
int64_t tiles_shared(const StepArrays& in, const std::vector<int64_t>& groups, int64_t block_size, int64_t a, int64_t b, int64_t most) {
    int64_t tiles = most;
    for (int64_t g : groups) {
        const int32_t *x = in.block_tables[g] + a * in.table_width[g], *y = in.block_tables[g] + b * in.table_width[g];
        const int64_t n = (tiles * KV_TILE + block_size - 1) / block_size;
        const int64_t same = std::mismatch(x, x + n, y).first - x;
        if (same < n) tiles = same * block_size / KV_TILE;
    }
    return tiles;
}

// Blocks side by side that begin alike, as long as one more of them saves more reads than it costs. Nothing is shared where that would
// save less than an eighth of all reads: threads that take runs of sequences read them faster.
void cut_shared(Cut& cut, const Program& p, const StepArrays& in, int64_t tokens, int64_t threads) {
    std::vector<int64_t> groups;
    int64_t heads = 1;
    for (const Sublayer& s : p.sublayers) {
        const Attention* a = s.attends();
        if (!a || a->window) continue;
        heads = std::max(heads, a->kv_heads);
        if (std::find(groups.begin(), groups.end(), a->group) == groups.end()) groups.push_back(a->group);
    }
    const int64_t items = (2 * threads + heads - 1) / heads;  // so many at least, that no thread waits for another's
    tokens = std::min(tokens, (cut.count + items - 1) / items);
    if (in.reach || groups.empty() || tokens < 2) return;
    // tiles that all tokens of a block see whole
    auto whole = [&](const QueryBlock& b) { return (in.seq_lens[b.seq] - (in.cu_seqlens[b.seq + 1] - b.first)) / KV_TILE; };
    const std::vector<QueryBlock>& blocks = cut.blocks;
    const int64_t n = int64_t(blocks.size());
    int64_t all = 0, saved = 0;
    for (const QueryBlock& b : blocks) all += whole(b) + 1;
    for (int64_t i = 0, end; i < n; i = end) {
        SharedPrefix one{i, i + 1, 0};
        int64_t tiles = whole(blocks[size_t(i)]);
        for (end = i + 1; end < n && blocks[size_t(end)].last - blocks[size_t(i)].first <= tokens; end++) {
            const QueryBlock& b = blocks[size_t(end)];
            tiles = tiles_shared(in, groups, p.block_size, blocks[size_t(i)].seq, b.seq, std::min(tiles, whole(b)));
            if (tiles * (end - i) <= one.tiles * (one.last - one.first - 1)) break;
            one = {i, end + 1, tiles};
        }
        end = one.last;
        saved += one.tiles * (one.last - one.first - 1);
        cut.shared.push_back(one);
    }
    if (saved * 8 < all) return cut.shared.clear();
    cut.in_order = blocks;
    auto reads = [&](const SharedPrefix& s) {
        int64_t sum = s.tiles;
        for (int64_t i = s.first; i < s.last; i++) sum += whole(blocks[size_t(i)]) + 1 - s.tiles;
        return sum;
    };
    std::stable_sort(cut.shared.begin(), cut.shared.end(), [&](auto& a, auto& b) { return reads(a) > reads(b); });
}

// Runs of sequences with a token each, for threads to read their caches in one go: the longest left to the thread that has
// the least. None where there are too few, or one is too long.
void cut_runs(Cut& cut, const StepArrays& in, int64_t threads) {
    std::vector<QueryBlock>& blocks = cut.blocks;
    if (int64_t(blocks.size()) != cut.count || cut.count < 4 * threads) return;
    int64_t total = 0;
    for (const QueryBlock& b : blocks) {
        if (in.cu_seqlens[b.seq + 1] - in.cu_seqlens[b.seq] != 1) return;  // many heads a key: a prompt's blocks are as small
        total += cost(in, b);
    }
    if (cost(in, blocks[0]) * threads > total) return;
    std::vector<std::vector<QueryBlock>> runs(static_cast<size_t>(threads));
    std::vector<int64_t> sums(size_t(threads), 0);
    for (const QueryBlock& b : blocks) {
        const size_t i = size_t(std::min_element(sums.begin(), sums.end()) - sums.begin());
        runs[i].push_back(b);
        sums[i] += cost(in, b);
    }
    blocks.clear();
    cut.runs.push_back(0);
    for (const std::vector<QueryBlock>& run : runs) {
        blocks.insert(blocks.end(), run.begin(), run.end());
        cut.runs.push_back(int64_t(blocks.size()));
    }
}

}  // namespace

Shares tapered(int64_t n, int64_t threads, int64_t least) {
    Shares s;
    for (int64_t left = n; left > 0; left = n - s.at[s.parts]) {
        const int64_t room = CUTS - s.parts, size = std::max({least, left / (2 * threads), (left + room - 1) / room});
        s.at[s.parts + 1] = left < 2 * least ? n : s.at[s.parts] + size;
        s.parts++;
    }
    return s;
}

Cut cut_chunk(const Program& p, const StepArrays& in, int64_t first, int64_t count, int64_t threads) {
    Cut cut;
    cut.first = first;
    cut.count = count;
    int64_t per_kv = 1, looking = 1;
    for (const Sublayer& s : p.sublayers) {
        if (const Attention* a = s.attends()) per_kv = std::max(per_kv, a->per_kv);
        if (const Cross* c = std::get_if<Cross>(&s.mixer)) looking = std::max(looking, c->core.per_kv);
    }
    const int64_t tokens = std::max<int64_t>(1, QUERY_ROWS / per_kv), end = first + count;
    const int64_t look_tokens = std::max<int64_t>(1, QUERY_ROWS / looking);
    cut.seq_of.assign(size_t(count), 0);
    for (int64_t s = 0; s < in.seqs; s++) {
        const QueryBlock span{s, std::max<int64_t>(in.cu_seqlens[s], first), std::min<int64_t>(in.cu_seqlens[s + 1], end)};
        for (int64_t t = span.first; t < span.last; t++) cut.seq_of[size_t(t - first)] = s;
        if (span.first < span.last) cut.spans.push_back(span);
    }
    find_views(cut, in);
    find_seen(cut, in);
    cut_parts(cut, p, threads);
    if (cut.parts.empty()) {
        cut_looks(cut, first, end, look_tokens);
        cut_blocks(cut, in, first, end, tokens);
        if (count > SMALL) cut_shared(cut, p, in, tokens, threads);
        std::stable_sort(cut.blocks.begin(), cut.blocks.end(),
                         [&](const QueryBlock& a, const QueryBlock& b) { return cost(in, a) > cost(in, b); });
        cut_runs(cut, in, threads);
        int64_t total = 0;
        for (const QueryBlock& b : cut.blocks) total += cost(in, b);
        cut.heavy = cost(in, cut.blocks[0]) * threads > total;
        return cut;
    }
    for (RowPart& part : cut.parts) {
        part.first_block = int64_t(cut.blocks.size());
        cut_blocks(cut, in, first + part.rows.first, first + part.rows.last, tokens);
        part.last_block = int64_t(cut.blocks.size());
        part.first_look = int64_t(cut.looks.size());
        cut_looks(cut, first + part.rows.first, first + part.rows.last, look_tokens);
        part.last_look = int64_t(cut.looks.size());
    }
    auto total = [&](const RowPart& part) {
        int64_t sum = 0;
        for (int64_t i = part.first_block; i < part.last_block; i++) sum += cost(in, cut.blocks[size_t(i)]);
        return sum;
    };
    std::stable_sort(cut.parts.begin(), cut.parts.end(), [&](const RowPart& a, const RowPart& b) { return total(a) > total(b); });
    return cut;
}

int64_t chunk_end(const StepArrays& in, int64_t first) {
    const int64_t most = std::min(first + CHUNK, in.tokens);
    if (!in.reach || most == in.tokens) return most;
    // a token before the border that sees one behind it
    auto cuts = [&](int64_t end) {
        const int64_t seq = std::upper_bound(in.cu_seqlens, in.cu_seqlens + in.seqs + 1, int32_t(end - 1)) - in.cu_seqlens - 1;
        return in.reach[end - 1] > in.seq_lens[seq] - (in.cu_seqlens[seq + 1] - end);
    };
    int64_t end = most;
    while (end > first && cuts(end)) end--;
    if (end > first) return end;
    for (end = most; cuts(end);) end++;  // a text that is longer than a chunk, computed whole
    return end;
}

int64_t partial_floats(const Program& p, const StepArrays& in, const Cut& cut) {
    int64_t most = 0;
    if (cut.count > SMALL) return 0;
    for (const Sublayer& s : p.sublayers) {
        const Attention* a = s.attends();
        if (!a) continue;
        int64_t tiles = 0;
        for (int64_t t = 0; t < cut.count; t++) {
            const int64_t length = in.seq_lens[cut.seq_of[size_t(t)]];
            // of a window a tile at each end is seen in part; that of the sink tokens and that of a block's last token are more
            tiles += a->sink_tokens ? std::min(length, a->window + a->sink_tokens) / KV_TILE + 4 : length / KV_TILE + 1;
        }
        most = std::max(most, tiles * a->heads * (a->vpad + 2));
    }
    return most;
}

}  // namespace tk
