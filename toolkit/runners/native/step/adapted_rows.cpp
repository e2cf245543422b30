// Linears for rows that have adapters.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step/row_work.h"

namespace tk {

namespace {

constexpr int64_t WIDEST = 1024, FITS = 8 * WIDEST;  // columns, and numbers, of one half of a gated product that are made before the other's
constexpr int64_t FEW = 16;  // rows whose adapters' matrices stay in a core's caches until they are read

}  // namespace

bool RowWork::adapted(const Linear& l, int64_t first_row, int64_t rows) const {
    if (!adapters_ || l.site < 0) return false;
    for (int64_t t = first_row; t < first_row + rows; t++)
        if (change(l, t)) return true;
    return false;
}

bool RowWork::reads_floats(const Linear& l, int64_t first_row, int64_t rows) const {
    if (!adapters_ || l.site < 0) return false;
    for (int64_t t = first_row; t < first_row + rows; t++)
        if (const Change* c = change(l, t); c && !c->coded()) return true;
    return false;
}

// Runs [row, end) of rows that have the same change, at most RUN long and cut at the same places by all threads: body(row, end, change).
template <class Body>
void RowWork::each_change(const Linear& l, int64_t first_row, int64_t rows, Body&& body) const {
    constexpr int64_t RUN = 32;
    for (int64_t row = first_row, end, last = first_row + rows; row < last; row = end) {
        const Change* c = change(l, row);
        for (end = row + 1; end < last && end < row + RUN && change(l, end) == c;) end++;
        if (c) body(row, end, *c);
    }
}

void RowWork::expect(std::initializer_list<const Linear*> linears, int64_t rows, int64_t calls) const {
    if (!adapters_) return;
    own_->coming.clear();
    if (rows > FEW) return;
    const int64_t first = rows * thread_ / threads_, last = rows * (thread_ + 1) / threads_;
    for (const Linear* l : linears)
        if (l && l->site >= 0)
            each_change(*l, first, last - first, [&](int64_t, int64_t, const Change& c) {
                if (c.low()) own_->coming.add(c.a.w);
            });
    own_->coming.begin(calls);
}

// x a of rows [row, end) where nobody has made it yet.
void RowWork::lower(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t end) const {
    Lowered& low = table_->lowered;
    if (!low.claim(serial_, l.site, row + shift_)) return;
    const InputBuffer made = low.rows(l.site, row + shift_);
    float* out = made.x;
    const int64_t width = c.a.w.rows;
    if (c.coded()) {
        Store to;
        to.out = out;
        to.ld = made.ldx;
        ops.linear(c.a.w, rows_of(in, l, row), end - row, 0, c.a.w.tiles(), to, own_->linear.data());
        for (int64_t t = 0; t < end - row; t++) {
            ops.multiply(out + t * made.ldx, c.steps.data, c.steps.size, -1);
            ops.quantize(out + t * made.ldx, nullptr, c.b.w.group, 0, c.b.w.groups(), made.q[0] + t * made.ldq, made.scale[0] + t * made.lds,
                         made.sum[0] + t * made.lds);
        }
    } else if (width % LANES == 0) {
        ops.linear_back(c.a.w, rows_of(in, c.a, row), end - row, 0, c.a.w.tiles(), out, made.ldx);
    } else {  // what stands behind a row must not be read
        InputBuffer x;
        x.x = own_->padded.data();
        for (int64_t t = row; t < end; t++) {
            std::memcpy(x.x, in.x + t * in.ldx, size_t(width) * 4);
            std::fill(x.x + width, x.x + pad16(width), 0.0f);
            ops.linear_back(c.a.w, rows_of(x, c.a, 0), 1, 0, c.a.w.tiles(), out + (t - row) * made.ldx, made.ldx);
        }
    }
    low.made(serial_, l.site, row + shift_);
}

void RowWork::add_low(const Linear& l, const Change& c, int64_t row, int64_t end, Range tiles, Store to) const {
    Lowered& low = table_->lowered;
    low.wait(serial_, l.site, row + shift_);
    if (!to.add) to.alpha = 1.0f;
    to.add = 1;
    to.bias = nullptr;
    ops.linear(c.b.w, rows_of(low.rows(l.site, row + shift_), c.b, 0), end - row, tiles.first, tiles.last, to, own_->linear.data());
}

// As `linear`, for rows of which some have a change.
void RowWork::changed(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const {
    const int64_t last = first_row + rows;
    auto at = [&](int64_t row) {
        Store part = to;
        part.out += (row - first_row) * to.ld;
        return part;
    };
    // meanwhile comes what is added to them, which is read a few KB here and there: by itself it would take longer than its sums
    std::vector<std::pair<int64_t, int64_t>>& runs = own_->runs;
    runs.clear();
    own_->later.clear();
    each_change(l, first_row, rows, [&](int64_t row, int64_t end, const Change& c) {
        if (!c.low()) return;
        runs.emplace_back(row, end);
        const int64_t bytes = c.b.w.tile_bytes();
        own_->later.push_back({c.b.w.data + tiles.first * bytes, (tiles.last - tiles.first) * bytes});
    });
    to.later = own_->later.data();
    to.laters = int64_t(own_->later.size());
    // rows that the linear is computed for as it is, all together
    for (int64_t row = first_row, end; row < last; row = end) {
        auto plain = [&](int64_t t) { return !change(l, t) || change(l, t)->adds(); };
        end = row + 1;
        if (!plain(row)) continue;
        while (end < last && plain(end)) end++;
        one(l, in, row, end - row, tiles, at(row));
    }
    to.laters = 0;
    each_change(l, first_row, rows, [&](int64_t row, int64_t end, const Change& c) {
        if (!c.low()) one_whole(l, c, in, row, end - row, tiles, at(row));
    });
    // who comes with this thread begins elsewhere
    const size_t n = runs.size(), from = threads_ > 0 ? n * size_t(thread_) / size_t(threads_) : 0;
    for (size_t i = 0; i < n; i++) {
        const auto [row, end] = runs[(from + i) % n];
        lower(l, *change(l, row), in, row, end);
    }
    for (const auto& [row, end] : runs) {
        const Change& c = *change(l, row);
        if (c.adds()) add_low(l, c, row, end, tiles, at(row));
        else scaled(l, c, in, row, end, tiles, at(row));
    }
}

void RowWork::one_whole(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t rows, Range tiles, Store to) const {
    to.bias = l.bias.data;
    ops.linear(c.whole.w, rows_of(in, c.whole, row), rows, tiles.first, tiles.last, to, own_->linear.data());
}

// Rows whose linear is multiplied by factors of its outputs, before its bias.
void RowWork::scaled(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t end, Range tiles, Store to) const {
    constexpr int64_t STEP = STRIPE / LANES;
    float* y = own_->half.at<float>(0) + (own_->half.size() - 128) / 8;  // its second part
    Linear bare = l;
    bare.bias = {};
    for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += STEP) {
        const Range part{t0, std::min(t0 + STEP, tiles.last)};
        const int64_t at = t0 * LANES, width = std::min(l.w.rows, part.last * LANES) - at;
        Store made;
        made.out = y - at;
        made.ld = STRIPE;
        one(bare, in, row, end - row, part, made);
        add_low(l, c, row, end, part, made);
        for (int64_t i = 0; i < end - row; i++) {
            float *from = y + i * STRIPE, *out = to.out + i * to.ld + at;
            ops.multiply(from, c.magnitudes.data + at, width, -1);
            if (l.bias) ops.add_scaled(from, l.bias.data + at, 1.0f, width);
            if (to.add) ops.add_scaled(out, from, to.alpha, width);
            else std::memcpy(out, from, size_t(width) * 4);
        }
    }
}

void RowWork::embed_low(const Change& c, int64_t id, float scale, float* x) const {
    std::vector<float> row(size_t(pad16(c.b.w.cols)) + LANES);
    ops.matrix_row(c.a.w, id, 1.0f, row.data());
    InputBuffer low;
    low.x = row.data();
    low.ldx = int64_t(row.size());
    Store to;
    to.out = x;
    to.add = 1;
    to.alpha = scale;
    ops.linear(c.b.w, rows_of(low, c.b, 0), 1, 0, c.b.w.tiles(), to, own_->linear.data());
}

void RowWork::add_back(const Change& c, const Rows& x, int64_t count, Range tiles, float* out, int64_t width) const {
    const int64_t ld = pad16(c.b.w.cols) + LANES;
    std::vector<float> low(size_t(count * ld)), row(size_t(pad16(width)));
    ops.linear_back(c.b.w, x, count, tiles.first, tiles.last, low.data(), ld);
    Store to;
    to.out = row.data();
    for (int64_t i = 0; i < count; i++) {
        InputBuffer made;
        made.x = low.data() + i * ld;
        made.ldx = ld;
        ops.linear(c.a.w, rows_of(made, c.a, 0), 1, 0, c.a.w.tiles(), to, own_->linear.data());
        ops.add_scaled(out + i * width, row.data(), 1.0f, width);
    }
}

void RowWork::add_part(const Change& c, const float* y, int64_t width, Range tiles, float* out) const {
    std::vector<float> whole(size_t(pad16(width))), low(size_t(pad16(c.b.w.cols) + LANES));
    std::memcpy(whole.data(), y, size_t(width) * 4);  // what stands behind it must not be read
    InputBuffer from, made;
    from.x = whole.data();
    from.ldx = pad16(width);
    ops.linear_back(c.a.w, rows_of(from, c.a, 0), 1, 0, c.a.w.tiles(), low.data(), int64_t(low.size()));
    made.x = low.data();
    made.ldx = int64_t(low.size());
    Store to;
    to.out = out;
    to.add = 1;
    ops.linear(part_of(c.b.w, tiles), rows_of(made, c.b, 0), 1, 0, tiles.last - tiles.first, to, own_->linear.data());
}

// As `gated`, for rows of which some have a change of either half: of those each half is made by itself, some tiles at a time.
void RowWork::gated_changed(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const {
    const int64_t last = first_row + rows;
    auto apart = [&](int64_t t) { return change(m.up, t) || (m.gate.present() && change(m.gate, t)); };
    float* half = own_->half.at<float>(0);
    for (int64_t row = first_row, end; row < last; row = end) {
        const bool halves = apart(row);
        for (end = row + 1; end < last && bool(apart(end)) == halves;) end++;
        float* to = out + (row - first_row) * ld;
        if (!halves) {
            pair(m.gate, m.up, m, in, row, end - row, tiles, to, ld);
            continue;
        }
        const int64_t step = std::clamp(FITS / (end - row), STRIPE, WIDEST) / LANES, ld_half = step * LANES;
        for (int64_t t0 = tiles.first; t0 < tiles.last; t0 += step) {
            const Range part{t0, std::min(t0 + step, tiles.last)};
            const int64_t back = t0 * LANES, width = std::min(m.up.w.rows, part.last * LANES) - back;
            Store gate, up;
            gate.out = half - back;
            gate.ld = ld_half;
            up.out = to - tiles.first * LANES;
            up.ld = ld;
            if (m.gate.present()) linear(m.gate, in, row, end - row, part, gate);
            linear(m.up, in, row, end - row, part, up);
            for (int64_t i = 0; i < end - row; i++) join_halves(m, half + i * ld_half, up.out + i * ld + back, width);
        }
    }
}

// y = xielu(y)
void RowWork::bend(const Mlp& m, float* y, int64_t width) const {
    auto softplus = [](float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); };
    const float slope = *m.curve[2].data;
    ops.xielu(y, width, softplus(*m.curve[0].data), softplus(*m.curve[1].data) + slope, slope);
}

// y = activation(gate) * y, or without a gate activation(y).
void RowWork::join_halves(const Mlp& m, float* gate, float* y, int64_t width) const {
    if (m.curve[0]) return bend(m, y, width);
    if (!m.gate.present()) return ops.activate(y, width, m.activation);
    if (m.gate_scale != 1.0f) std::for_each(gate, gate + width, [&](float& x) { x *= m.gate_scale; });
    if (m.activation != SWIGLUOAI) return ops.multiply(y, gate, width, m.activation);
    for (int64_t i = 0; i < width; i++) {  // NaN stays NaN
        gate[i] = gate[i] > 7.0f ? 7.0f : gate[i];
        y[i] = (y[i] > 7.0f ? 7.0f : y[i] < -7.0f ? -7.0f : y[i]) + 1.0f;
    }
    ops.multiply(y, gate, width, QUICK_GELU);
}

}  // namespace tk
